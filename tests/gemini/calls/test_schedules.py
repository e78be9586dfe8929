"""Random schedules of what happens to chunks, on a device whose copies are late and reordered.

The real chunks, gradients, user writes and StatefulTensorMgr are driven; what they must hold is
kept beside them as plain tensors. All values are small integers, so every sum is exact.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from bench.shared.simulated import SimBackend
from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.chunk.storage import Chunk
from gemini.comm.communicator import Communicator
from gemini.comm.links import Links
from gemini.placement.plan import Gather
from gemini.placement.sizes import UNLIMITED
from gemini.placement.timetable.gathers import gather_steps
from gemini.runtime.memory.user_writes import UserWrites
from gemini.runtime.schedule.tensor_mgr import StatefulTensorMgr, TensorState

SIZES = (1, 63, 64, 200, 257, 300)  # elements of a parameter
NUM_CHUNKS = 5
LAYOUT = ChunkLayout.build(
    [ParamSpec(f"p{i}", (SIZES[i % len(SIZES)],), "float32") for i in range(2 * NUM_CHUNKS)], 330
)
ACTIONS = ("use", "use", "end", "fetch", "borrow", "write", "gradient", "unpin", "release all",
           "update")  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """A step that is repeated, once with an action that the others do not have."""

    step: tuple[tuple[str, int], ...]
    repeats: int
    odd_one: tuple[int, int, tuple[str, int]]  # repeat, position, action
    max_prefetch: int
    never_released: frozenset[int]  # chunks that are never released
    seed: int

    def actions(self):
        for repeat in range(self.repeats):
            yield "cycle", repeat
            step = list(self.step)
            if self.odd_one[0] == repeat:
                step.insert(self.odd_one[1] % (len(step) + 1), self.odd_one[2])
            yield from step


actions = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 24))
schedules = st.builds(
    Schedule,
    st.lists(actions, min_size=3, max_size=14).map(tuple),
    st.integers(2, 4),
    st.tuples(st.integers(0, 4), st.integers(0, 14), actions),
    st.integers(0, 3),
    st.sampled_from([frozenset(), frozenset({1}), frozenset({0, 3})]),
    st.integers(0, 1000),
)


class Driver:
    """Chunks of `LAYOUT` and what each of them must hold."""

    def __init__(self, schedule):
        self.backend = SimBackend(schedule.seed)
        comm = Links(Communicator())
        self.chunks = [
            Chunk(spec, self.backend, comm, shard_on_host=True) for spec in LAYOUT.chunks
        ]
        self.params = [nn.Parameter(torch.empty(0)) for _ in LAYOUT.params]
        self.want = []  # [S] of every chunk
        self.gradients = [None] * len(self.chunks)  # their sum since the last update
        for chunk in self.chunks:
            chunk.payload.zero_()
            for slot, place in enumerate(chunk.spec.slots):
                chunk.view(chunk.payload, slot).fill_(place.param + 1)
                self.params[place.param].data = chunk.view(chunk.payload, slot)
            self.want.append(chunk.payload.clone())
            chunk.keep_shard()
        self.user_writes = UserWrites(self.params)
        self.manager = StatefulTensorMgr(
            LAYOUT, self.chunks, schedule.never_released, schedule.max_prefetch
        )
        self.manager.ask_before_release(self.user_writes.write_back)
        self.manager.release_all()
        self.never_released = schedule.never_released
        self.max_prefetch = schedule.max_prefetch
        self.open = []  # chunks of calls that have not ended
        self.borrowed = set()
        self.largest_need = 0

    # -- actions; `n` chooses among what there is --

    def cycle(self, n):
        self.manager.begin_cycle("train" if n % 3 else "eval")

    def use(self, n):
        needs = tuple(dict.fromkeys((n % len(self.chunks), n // 5 % len(self.chunks))))
        self._moment(needs)
        self.manager.begin_use(needs, self._params(needs))
        self.open.append(needs)

    def end(self, n):
        if self.open:
            needs = self.open.pop(n % len(self.open))
            self.manager.end_use(needs, self._params(needs), TensorState.HOLD_AFTER_FORWARD)
            self.manager.call_ended()

    def fetch(self, n):
        self._moment((n % len(self.chunks),))

    def borrow(self, n):
        needs = (n % len(self.chunks),)
        self._moment(needs)
        self.manager.pin(needs)
        self.borrowed.update(needs)

    def unpin(self, n):
        self.manager.unpin_all()
        self.borrowed.clear()

    def write(self, n):
        """The user changes a parameter while a module uses it."""
        if self.open:
            needs = self.open[n % len(self.open)]
            chunk = self.chunks[needs[n % len(needs)]]
            slot = n % len(chunk.spec.slots)
            with torch.no_grad():
                self.params[chunk.spec.slots[slot].param].add_(n)
            chunk.view(self.want[chunk.spec.id], slot).add_(n)

    def gradient(self, n):
        chunk = self.chunks[n % len(self.chunks)]
        slot = n % len(chunk.spec.slots)
        grad = torch.full((chunk.spec.slots[slot].numel,), float(n))
        chunk.gradient.add(slot, grad)
        if self.gradients[chunk.spec.id] is None:
            self.gradients[chunk.spec.id] = torch.zeros(chunk.spec.payload_numel)
        chunk.view(self.gradients[chunk.spec.id], slot).add_(grad)
        if n % 4 == 0:  # a backward ends here
            chunk.gradient.begin_reduce()
            chunk.gradient.end_reduce()

    def release_all(self, n):
        self.manager.release_all()
        for param in range(len(LAYOUT.params)):
            if self.manager.state_of(param) is not TensorState.HOLD:
                self.manager.set_state((param,), TensorState.HOLD)
        self.open.clear()
        self.borrowed.clear()

    def update(self, n):
        for chunk in self.chunks:
            if chunk.gathered:
                self.user_writes.write_back(chunk)
        self.release_all(n)
        for chunk, total in zip(self.chunks, self.gradients, strict=True):
            if total is None:
                continue
            if chunk.gradient.num_arrived:
                chunk.gradient.begin_reduce()
                chunk.gradient.end_reduce()
            assert torch.equal(chunk.grad, total)
            chunk.shard.sub_(chunk.grad)
            self.want[chunk.spec.id].sub_(total)
            chunk.gradient.drop()
        self.gradients = [None] * len(self.chunks)
        for chunk in self.chunks:
            if chunk.spec.id in self.never_released:
                chunk.release()
                chunk.gather()
                chunk.wait_gathered()

    # -- inside --

    def _moment(self, needs):
        before = self._gathered_bytes()
        self.manager.advance_to(needs)
        self.manager.prepare(needs)
        for chunk in needs:
            assert torch.equal(self.chunks[chunk].payload, self.want[chunk])
        sizes = {
            c.spec.id: c.payload.nbytes for c in self.chunks if c.spec.id not in self.never_released
        }
        need = sum(sizes.get(chunk, 0) for chunk in needs)
        self.largest_need = max(self.largest_need, need)
        largest = max(sizes.values())
        limit = max(self.largest_need, largest) + self.max_prefetch * largest
        held = {*needs, *self.borrowed, *(chunk for call in self.open for chunk in call)}
        forced = sum(sizes.get(chunk, 0) for chunk in held)
        assert self._gathered_bytes() <= max(limit, forced, before)

    def _gathered_bytes(self):
        return sum(
            c.payload.nbytes
            for c in self.chunks
            if c.gathered and c.spec.id not in self.never_released
        )

    def _params(self, needs):
        return [slot.param for chunk in needs for slot in self.chunks[chunk].spec.slots]

    def check(self):
        """What is in use or borrowed is there and right; what is released is poisoned."""
        for chunk in {
            *self.borrowed,
            *(chunk for call in self.open for chunk in call),
            *self.never_released,
        }:
            assert torch.equal(self.chunks[chunk].payload, self.want[chunk])
        for chunk in self.chunks:
            assert chunk.gathered or bool(chunk.payload.isnan().all())


def run(schedule):
    driver = Driver(schedule)
    for kind, n in schedule.actions():
        getattr(driver, kind.replace(" ", "_"))(n)
        driver.check()
    driver.update(0)
    for chunk in range(len(driver.chunks)):
        driver.fetch(chunk)  # compares the values


def test_the_layout_has_chunks_of_one_and_of_several_parameters():
    assert len(LAYOUT.chunks) == NUM_CHUNKS
    assert {len(chunk.slots) for chunk in LAYOUT.chunks} >= {1, 2}


@pytest.mark.ci
@settings(max_examples=300, deadline=None)
@given(schedules)
def test_values_are_the_last_updates_and_bytes_stay_in_the_limit(schedule):
    run(schedule)


@pytest.mark.deep
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules)
def test_ten_thousand_schedules(schedule):
    run(schedule)


# -- calls that are repeated -------------------------------------------------------------------


def in_steps(gathers, calls, **options):
    """A manager at the begin of a cycle with these steps."""
    chunks = Driver(Schedule((), 1, (0, 0, ("cycle", 0)), 0, frozenset(), 0)).chunks
    steps = gather_steps(calls, gathers)
    manager = StatefulTensorMgr(
        LAYOUT, chunks, (), 1, steps_for=lambda kind, signature: steps, **options
    )
    manager.begin_cycle("train")
    return manager, chunks


def call(manager, needs):
    manager.advance_to(needs)
    manager.prepare(needs)
    manager.begin_use(needs, ())
    manager.end_use(needs, (), TensorState.HOLD)
    manager.call_ended()


def test_who_repeats_a_call_less_often_gathers_what_was_ahead_of_it_first():
    """So what is reduced at the next call has one place among gathers."""
    gathers = [Gather(0, 0, 0, 4), Gather(1, 2, 4, 6)]
    manager, chunks = in_steps(gathers, [(0,), None, (0,), None, (1,), None])
    call(manager, (0,))
    assert not chunks[1].gathered
    assert manager.advance_to((1,)) and chunks[1].gathered
    manager.prepare((1,))
    assert manager.follow_to_end() and manager.gathers_of.total() == 2


@pytest.mark.parametrize("room", [UNLIMITED, 0])
def test_who_repeats_a_call_more_often_finds_its_chunk_where_there_is_room(room):
    gathers = [Gather(0, 0, 0, 1), Gather(1, 2, 2, 3)]
    calls = [(0,), None, (1,), None]
    manager, chunks = in_steps(gathers, calls, payload_room_bytes=lambda: room, agree=print)
    call(manager, (0,))
    assert chunks[0].gathered == bool(room)
    call(manager, (0,))
    assert manager.deviated == (not room)
    if room:
        call(manager, (1,))
        assert not chunks[0].gathered and not manager.deviated
