"""What updates in backward are predicted to save where parameters and gradients are in files."""

from dataclasses import replace

import pytest

from gemini.placement.plan import Move, MoveKind
from gemini.placement.planner import make_plan
from gemini.placement.tiers import Tier
from gemini.placement.timetable.speculation import price_speculation
from gemini.units import Bytes, ChunkId, Moment, ParamId
from tests.support.priced import BLOCK, DISK, TEN, WRITE, asked

PARAM_READ, PARAM_WRITE = 1 / 3, 1 / 2  # seconds of a block's parameters
IN_FILES = {"fixed_params": (Tier.NVME,) * 10}


def test_a_block_that_is_held_leaves_the_step_nothing():
    """10 s a module, of which a block takes 5.5. Two are read ahead of the step, written in it."""
    planned = make_plan(asked(TEN, 40.0, **IN_FILES))
    cost = planned.speculation
    assert (cost.num_blocks, cost.num_ahead) == (10, 8)
    step = 2 * (WRITE + PARAM_WRITE)
    assert cost.serial_seconds == pytest.approx(PARAM_READ + 400 + 100 + step)
    assert cost.tail.update_seconds == pytest.approx(step)
    assert cost.tail.seconds == pytest.approx(PARAM_READ + 400 + 100)
    assert planned.best_update == "tail"  # which hides as much, and is simpler
    assert make_plan(asked(TEN, 4.0, **IN_FILES)).best_update == "both"


def ahead(backward, *, grads, sent=False):
    """How many of ten blocks, whose parameters are in files; grads: these, too; sent: which takes
    the disk half a second each."""
    inputs = asked(TEN, 40.0, backward=backward, **IN_FILES)
    plan = make_plan(inputs).plan
    if grads:
        shards = tuple(replace(shard, grad_home=Tier.NVME) for shard in plan.shards)
        plan = replace(plan, shards=shards)
    if sent:
        moves = [
            Move(
                MoveKind.GRAD, r.chunk, None, Tier.DEVICE, Tier.NVME,
                r.last, Moment(plan.num_trace_moments), Bytes(2 * BLOCK),
            )
            for r in plan.forecast.reductions
        ]  # fmt: skip
        moves = sorted((*plan.forecast.moves, *moves), key=lambda move: move.begin)
        plan = replace(plan, forecast=replace(plan.forecast, moves=tuple(moves)))
    calls = inputs.trace.calls({ParamId(i): ChunkId(i) for i in range(10)})
    seconds = [moment.seconds for moment in inputs.trace.moments]
    return price_speculation(plan, DISK, seconds, calls, 20, has_tail=False).num_ahead


def test_a_gradient_in_a_file_is_read_before_its_block_is_updated():
    """The disk reads for the step until 4, and then a block is there at 6, 11.5, 13.5, 19 and, too
    late for 20, at 24.5 s; with gradients at 6.3, 12.2, 14.5 and, too late, at 20.3 s."""
    assert ahead(20.0, grads=False) == 4
    assert ahead(20.0, grads=True) == 3


def test_what_the_pass_sends_to_the_disk_takes_its_time():
    """Each block is there up to a second and a half later: the third at 16 s and not at 14.5."""
    assert ahead(15.0, grads=True) == 3
    assert ahead(15.0, grads=True, sent=True) == 2
