"""What updates in backward are predicted to save where parameters and gradients are in files."""

from dataclasses import replace

import pytest

from gemini.placement.plan import Move, MoveKind
from gemini.placement.planner import make_plan
from gemini.placement.tiers import Tier
from gemini.placement.timetable.clock import Work, price
from gemini.units import BlockId, Bytes, ChunkId, Moment, ParamId
from tests.support.priced import BLOCK, DISK, READ, TEN, WRITE, asked

PARAM_READ, PARAM_WRITE = 1 / 3, 1 / 2  # seconds of a block's parameters
GRADIENT = Bytes(2 * BLOCK)
IN_FILES = {"fixed_params": (Tier.NVME,) * 10}


def test_a_block_that_is_held_leaves_the_step_nothing():
    """10 s a module, of which a block takes 5.5. Two are read ahead of the step, written in it."""
    planned = make_plan(asked(TEN, 40.0, **IN_FILES))
    serial, tail = planned.overlapped["speculate"], planned.overlapped["both"]
    assert serial.num_early == tail.num_early == 8
    step = 2 * (WRITE + PARAM_WRITE)
    # the first parameter is read after one block for the step; the other is still in memory
    assert serial.seconds == pytest.approx(READ + PARAM_READ + 400 + 100 + step)
    assert tail.update_seconds == pytest.approx(step + 2 * PARAM_READ)  # of the forward
    assert tail.seconds == pytest.approx(PARAM_READ + 400 + 100)
    assert planned.best_update == "tail"  # which hides as much, and is simpler
    assert make_plan(asked(TEN, 4.0, **IN_FILES)).best_update == "both"


def iteration(update, backward, *, sent=False, read=False):
    """Ten blocks, whose parameters are in files. Of gradients that are, too: sent to the disk, for
    half a second each, and read from it for a third."""
    inputs = asked(TEN, 40.0, backward=backward, **IN_FILES)
    plan = make_plan(inputs).plan
    end, moves = Moment(plan.num_trace_moments), list(plan.forecast.moves)
    for r in plan.forecast.reductions:
        there, here, kind = Tier.NVME, Tier.DEVICE, MoveKind.GRAD
        moves += [Move(kind, r.chunk, None, here, there, r.last, end, GRADIENT)] * sent
        moves += [Move(kind, r.chunk, BlockId(r.chunk), there, here, end, end, GRADIENT)] * read
    moves.sort(key=lambda move: move.begin)
    plan = replace(plan, forecast=replace(plan.forecast, moves=tuple(moves)))
    calls = inputs.trace.calls({ParamId(i): ChunkId(i) for i in range(10)})
    seconds = [moment.seconds for moment in inputs.trace.moments]
    work = Work(plan, DISK, seconds, calls, 20, depth=2, num_ahead=2)
    return price(work, [update])[update]


def test_a_gradient_in_a_file_is_read_before_its_block_is_updated():
    """2 s a module. Blocks are there at 4, 9.5, 11.5, 17 and, too late for 20, at 26 s; with
    gradients at 4.3, 6.7, 12.5 and, too late, at 21.8 s."""
    assert iteration("speculate", 20.0).num_early == 4
    assert iteration("speculate", 20.0, read=True).num_early == 3


def test_what_a_backward_sends_to_the_disk_is_waited_for():
    """Of a second, in which nothing else is under way: the first of ten gradients comes at 0.1."""
    late = iteration("serial", 1.0, sent=True).seconds - iteration("serial", 1.0).seconds
    assert late == pytest.approx(0.1 + 10 * PARAM_WRITE - 1.0)
