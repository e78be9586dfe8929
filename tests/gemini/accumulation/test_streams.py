"""How far generators have moved, and states that follow from it."""

import pytest
import torch

from gemini.accumulation.chain import NoChainError
from gemini.accumulation.streams import NONE, Draws, Streams, generators, same

FORWARDS = {
    "nothing": lambda: None,
    "one number": lambda: torch.rand(()),
    "numbers of 64 bits": lambda: torch.rand(7, dtype=torch.float64),
    "a normal of many": lambda: torch.randn(100),
    "up to the end of a block": lambda: torch.rand(624),
    "several blocks": lambda: torch.rand(5000),
    "a dropout": lambda: torch.nn.functional.dropout(torch.ones(2000), 0.3),
    "a permutation": lambda: torch.randperm(77),
}


@pytest.fixture(autouse=True)
def restored():
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


@pytest.mark.parametrize("before", [0, 1, 623, 624, 1000])
@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_the_state_behind_a_forward_follows_from_another_one_of_its_kind(forward, before):
    torch.manual_seed(1)
    start = generators(None)
    forward()
    drawn = Draws.between(start, generators(None))
    torch.manual_seed(2)
    torch.rand(before)
    start = generators(None)
    forward()
    expected = generators(None)
    assert same(drawn.behind(start), expected)
    assert (drawn == NONE) == same(start, expected)


def state_of_a_gpu(seed, offset):
    return torch.tensor([seed, offset]).view(torch.uint8)


def test_of_a_gpu_an_offset_moves():
    host = torch.get_rng_state()
    drawn = Draws.between((host, state_of_a_gpu(3, 8)), (host, state_of_a_gpu(3, 20)))
    assert drawn == Draws(0, 12)
    start = host, state_of_a_gpu(5, 100)
    assert same(drawn.behind(start), (host, state_of_a_gpu(5, 112)))
    assert same(start, (host, state_of_a_gpu(5, 100)))
    for after in ((4, 20), (3, 4)):  # another seed; and back
        with pytest.raises(NoChainError, match="seeds torch's generator"):
            Draws.between((host, state_of_a_gpu(3, 8)), (host, state_of_a_gpu(*after)))


def test_a_generator_that_was_seeded_is_not_ahead(monkeypatch):
    monkeypatch.setattr("gemini.accumulation.streams.MOST_NUMBERS", 1 << 14)
    torch.manual_seed(1)
    first = generators(None)
    torch.rand(3)
    second = generators(None)
    torch.manual_seed(2)
    for before, after in ((second, first), (first, generators(None))):
        with pytest.raises(NoChainError, match="seeds torch's generator"):
            Draws.between(before, after)


def test_generators_are_as_before_if_an_error_ends_the_step_and_behind_it_otherwise():
    streams = Streams(torch.device("cpu"))
    streams.expect_draws([Draws(3), Draws(5)])
    with pytest.raises(ZeroDivisionError), streams.moved():
        torch.rand(1)
        raise ZeroDivisionError
    assert same(streams.now(), streams.starts[0])
    with streams.moved():
        pass
    assert same(streams.now(), Draws(8).behind(streams.starts[0]))
