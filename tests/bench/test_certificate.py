"""What bench.certificate draws, and what is asked of it."""

import pytest

from bench.certificate import FAMILIES, LARGE, Draw, is_met, summary

pytestmark = pytest.mark.ci  # imports transformers


def test_draws_are_the_same_for_the_same_numbers_and_have_all_kinds():
    draws = [Draw.of(0, number) for number in range(200)]
    assert draws == [Draw.of(0, number) for number in range(200)]
    assert {draw.family for draw in draws} == set(FAMILIES)
    for name in ("lora", "checkpointing", "nvme_fraction", "budget"):
        assert len({bool(getattr(draw, name)) for draw in draws}) == 2
    assert {len({*draw.lengths}) for draw in draws} == {1, 2, 3}
    assert all(max(draw.lengths) == draw.seq for draw in draws)
    assert {draw.lengths.index(draw.seq) for draw in draws} == {0, 1, 2}
    assert Draw.of(1, 0) != draws[0]


def test_half_of_the_draws_have_100_MiB_of_parameters_and_more():
    large = [draw for draw in (Draw.of(0, n) for n in range(40)) if draw.hidden in LARGE[0]]
    assert 10 < len(large) < 30
    sizes = [2 * sum(p.numel() for p in draw.model().parameters()) for draw in large[:8]]
    assert min(sizes) > 100 << 20


def row(took, *, refused=False, killed=False):
    return {"family": "Llama", "refused": refused, "killed": killed, "took": took, "needs": 100}


def test_bars_are_of_killed_slack_and_refused():
    good = [row(95), row(99), row(80), *(row(0, refused=True, killed=True) for _ in range(9))]
    found = summary(good)
    assert (found["killed"], found["refused_rightly"]) == (0, 1)
    assert found["median_slack"] == pytest.approx(0.05) and is_met(found)
    assert is_met(summary([*good, row(0, refused=True)]))
    assert not is_met(summary([*good, *(row(0, refused=True) for _ in range(2))]))
    assert not is_met(summary([*good, row(101, killed=True)]))
    assert not is_met(summary([row(90)]))
