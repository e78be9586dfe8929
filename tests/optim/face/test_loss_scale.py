"""The loss scale's schedule, on the host and in the prologue kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_triton import ops
from kernels_triton.control_fields import BAD, LOSS_SCALE
from kernels_triton.update.frame import NUM_COEFFICIENTS, NUM_HYPER
from optim import LossScale
from optim.rules.control_vector import ControlVector
from optim.rules.loss_scale import ScaleState
from optim.sgd import SGDRule
from optim.update.triton_update import kernel_of

OPTIONS = LossScale(
    initial_scale=64.0,
    min_scale=8.0,
    growth_factor=4.0,
    backoff_factor=0.5,
    growth_interval=3,
    hysteresis=2,
    max_scale=128.0,
)
G, B = False, True  # a good step, an overflow
# made by hand: what happens, and scale, good steps, overflows that go without a backoff
TABLE = [
    (G, 64, 1, 2),
    (B, 64, 0, 1),  # the first overflow is forgiven
    (G, 64, 1, 1),
    (B, 32, 0, 0),  # the second is not, though a good step lies between
    (B, 16, 0, 0),  # and none after it
    (G, 16, 1, 0),
    (G, 16, 2, 0),
    (G, 64, 0, 2),  # three good ones: grows, and forgives again
    (B, 64, 0, 1),
    (G, 64, 1, 1),
    (G, 64, 2, 1),
    (G, 128, 0, 2),  # not beyond max_scale
    (B, 128, 0, 1),
    (B, 64, 0, 0),
    (B, 32, 0, 0),
    (B, 16, 0, 0),
    (B, 8, 0, 0),
    (B, 8, 0, 0),  # not below min_scale
]


def test_the_schedule_is_the_one_made_by_hand():
    state = OPTIONS.start()
    for overflow, scale, good, left in TABLE:
        state = OPTIONS.after(state, overflow)
        assert state == ScaleState(scale, good, left)


def test_an_interval_of_zero_never_changes_the_scale():
    options = LossScale(initial_scale=8.0, growth_interval=0)
    assert options.after(options.start(), True) == options.after(options.start(), False)


def one_prologue(control_vector, overflow):
    """A step in which only the loss scale is looked at."""
    control_vector.tensor[BAD] = float(overflow)
    n = 1
    ops.prologue(
        kernel_of(SGDRule()),
        torch.zeros(n, dtype=torch.int64),
        torch.zeros(1, NUM_HYPER, dtype=torch.float64),
        torch.zeros(n, dtype=torch.int64),
        torch.ones(n, dtype=torch.float64),
        torch.zeros(n, NUM_COEFFICIENTS),
        control_vector.tensor,
        [],
        True,
    )


def test_the_kernel_follows_the_same_schedule_and_counts_skipped_steps():
    control_vector = ControlVector(OPTIONS, torch.device("cpu"))
    for overflow, scale, good, left in TABLE:
        before = float(control_vector.scale)
        one_prologue(control_vector, overflow)
        assert control_vector.read() == ScaleState(scale, good, left)
        assert float(control_vector.used) == before
    assert control_vector.skipped_steps == sum(overflow for overflow, *_ in TABLE)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from([1.0, 2.0, 3.0]),
    st.sampled_from([1.0, 0.5, 0.3]),
)
def test_host_and_kernel_agree_on_any_schedule(steps, interval, hysteresis, growth, backoff):
    options = LossScale(
        initial_scale=48.0,
        min_scale=7.0,
        max_scale=300.0,
        growth_interval=interval,
        hysteresis=hysteresis,
        growth_factor=growth,
        backoff_factor=backoff,
    )
    host, device = (
        ControlVector(options, torch.device("cpu")),
        ControlVector(options, torch.device("cpu")),
    )
    for overflow in steps:
        host.stepped(overflow)
        one_prologue(device, overflow)
        assert host.read() == device.read() and float(host.used) == float(device.used)
    assert host.state_dict() == device.state_dict()


@pytest.mark.parametrize(
    "change",
    [
        lambda vector: vector.scale.fill_(7.0),
        lambda vector: vector.load_state_dict({"scale": 7, "good_steps": 0, "hysteresis_left": 2}),
        lambda vector: vector.tensor.data[LOSS_SCALE].fill_(7.0) is vector.changed(),
    ],
    ids=["by torch", "by a checkpoint", "by a kernel"],
)
def test_what_was_read_for_the_norm_is_the_scale_until_that_changes(change, monkeypatch):
    """The host waits for a device once."""
    vector, read = ControlVector(OPTIONS, torch.device("cpu")), ControlVector.values
    reads = []
    monkeypatch.setattr(ControlVector, "values", lambda self: reads.append(0) or read(self))
    assert vector.values()[LOSS_SCALE] == vector.read().scale == vector.read().scale
    assert len(reads) == 1
    change(vector)
    assert vector.read().scale == float(vector.scale) != OPTIONS.initial_scale
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"initial_scale": 0.5}, "initial_scale=0.5"),
        ({"initial_scale": float("nan")}, "initial_scale=nan"),
        ({"min_scale": 0.0}, "min_scale=0.0"),
        ({"max_scale": 0.5}, "max_scale=0.5"),
        ({"growth_factor": 0.9}, "growth_factor=0.9"),
        ({"backoff_factor": 1.5}, "backoff_factor=1.5"),
        ({"growth_interval": -1}, "growth_interval=-1"),
        ({"hysteresis": 0}, "hysteresis=0"),
    ],
)
def test_an_option_out_of_range_is_named(options, said):
    with pytest.raises(ValueError, match=said):
        LossScale(**options)
