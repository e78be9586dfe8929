"""Cost of an iteration whose updates overlap a pass: a step's flow on a clock. Pure.

    trainer   forward and backward, and what they move; waits for weights that come late
    worker    the flow of a step (`optim.state.flow`): reads, updates and writes

Each is a generator of what it waits for: a time, or a condition. Links work in the order of issue.
Where one processor trains and updates, an update takes its seconds from the pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gemini.optim.state.flow import Flow, Span, num_buffers
from gemini.placement.cost import PlannedLinks, Walk, update_seconds_of
from gemini.placement.plan import Move, MoveKind, Plan, UpdatePath
from gemini.placement.sizes import Bandwidths, BlockBytes
from gemini.placement.tiers import Tier
from gemini.units import BlockId, ChunkId

from .updates import TAIL, OverlapCost

Calls = Sequence[Sequence[ChunkId] | None]  # by moment the chunks of the call that begins
Wait = float | Callable[[], bool]  # until then; until it is true
Thread = Generator[Wait, None, None]
TRAINER = 0  # of the two threads; 1: the worker
ITERATIONS = 3  # the first step finds its reads done, and the first pass no tail


class Work:
    """Work of a plan's iteration: its pass, and the transfers of every block's update."""

    def __init__(
        self,
        plan: Plan,
        bandwidths: Bandwidths,
        compute_seconds: Sequence[float],
        calls: Calls,
        backward: int,
        *,
        depth: int,
        num_ahead: int,
    ) -> None:
        """compute_seconds, calls: by moment of the trace. backward: its first moment. depth: blocks
        read ahead of their update. num_ahead: more buffers."""
        self.plan, self.bandwidths = plan, bandwidths
        self.compute_seconds, self.calls, self.backward = compute_seconds, calls, backward
        self.depth, self.num_ahead = depth, num_ahead
        self.updates = update_seconds_of(plan, bandwidths)
        self.blocks = {block.id: block for chunk in plan.chunks for block in chunk.blocks}
        homes = {tier: plan.blocks_on(tier) for tier in Tier}
        order = [self.blocks[i] for i in plan.forecast.step_order]
        self.on_disk = [block for block in order if block.id in homes[Tier.NVME]]
        self.on_host = [block for block in order if block.id in homes[Tier.HOST]]
        self.on_device = [self.blocks[i] for i in sorted(homes[Tier.DEVICE])]
        self.num_blocks = {chunk.id: len(chunk.blocks) for chunk in plan.chunks if chunk.blocks}
        self.gradients = {  # bytes of the device
            shard.chunk: plan.chunks[shard.chunk].shard_bytes
            for shard in plan.shards
            if shard.grad_home is Tier.DEVICE
        }
        # parameters of these are read from a file by who uses them, when their update is done
        self.alone = {
            shard.chunk
            for shard in plan.shards
            if shard.param_home is Tier.NVME and plan.chunks[shard.chunk].num_shards == 1
        }
        self.moves = [move for move in plan.forecast.moves if self._is_of_pass(move)]
        # of blocks: state that comes, what else an update needs, and what goes
        self.state: dict[BlockId, list[Move]] = defaultdict(list)
        self.inputs: dict[BlockId, list[Move]] = defaultdict(list)
        self.results: dict[BlockId, list[Move]] = defaultdict(list)
        site = Tier.HOST if plan.off_device is UpdatePath.CPU else Tier.DEVICE
        for move in plan.forecast.moves:
            if move.block is not None:
                comes = self.state if move.kind is MoveKind.STATE else self.inputs
                (comes if move.dst is site else self.results)[move.block].append(move)
        self.gathers: dict[int, list[ChunkId]] = defaultdict(list)
        for gather in plan.gathers:
            if gather.chunk not in self.alone:
                self.gathers[gather.begin].append(gather.chunk)
        self.pass_seconds = self._seconds_of_pass()

    def _is_of_pass(self, move: Move) -> bool:
        """Whether forward or backward moves it, and no update."""
        return move.block is None and move.begin < self.plan.num_trace_moments

    def shares(self, moment: int) -> Iterator[tuple[ChunkId | None, float]]:
        """Seconds of a call by chunk. A call of many chunks, as of a whole module, uses one after
        the other, and its backward the last one first."""
        seconds, used = self.compute_seconds[moment], self.calls[moment] or ()
        nbytes = sum(self.plan.chunks[chunk].payload_bytes for chunk in used)
        for chunk in used if moment < self.backward else sorted(used, reverse=True):
            yield chunk, seconds * self.plan.chunks[chunk].payload_bytes / nbytes
        if not used:
            yield None, seconds

    def _seconds_of_pass(self) -> float:
        """Seconds of a pass without any update."""
        links, now = PlannedLinks(self.bandwidths, self.plan.has_host_tier), 0.0
        walk = Walk(self.plan, links, self.moves)
        for moment, seconds in enumerate(self.compute_seconds):
            walk.begin(moment, now)
            now = walk.reach(moment, now) + seconds
        return max(walk.reach(self.plan.num_trace_moments, now), links.end)


@dataclass(frozen=True, slots=True)
class _Timed:
    """Record of a block on a clock, and the ticket of its last transfer."""

    block: BlockBytes
    clock: StepClock

    @property
    def id(self) -> BlockId:
        return self.block.id

    def begin(self, buffer: int) -> _Timed:
        self.clock.reads(self.block)
        return self

    def put(self, buffer: int) -> _Timed:
        self.clock.writes(self.block)
        return self

    def ready(self) -> bool:
        return self.clock.has_ended(self.block)

    def wait(self) -> None:
        assert self.ready()


class StepClock:
    """Clock of iterations with one `update`, of which the last one is measured."""

    def __init__(self, work: Work, update: str) -> None:
        self._work, self._plan = work, work.plan
        self._has_tail = update == TAIL
        by_host = work.plan.has_host_tier and work.plan.off_device is UpdatePath.CPU
        self._shares = not by_host  # one processor trains and updates
        self._links = PlannedLinks(work.bandwidths, work.plan.has_host_tier)
        self._walk = Walk(work.plan, self._links, work.moves)
        count = num_buffers(work.depth, len(work.on_disk)) + work.num_ahead
        spans = [Span(_Timed(block, self)) for block in work.on_disk]
        self._flow = Flow(spans, work.depth, list(range(count)))
        self._now = 0.0
        self._waits: list[Wait] = [0.0, 0.0]
        self._is_asked = False  # the worker has a step to take
        self._is_computing = False
        self._update_ends = 0.0  # of the one under way
        self._ends: dict[BlockId, float] = {}  # of the last transfer
        self._left = Counter[ChunkId]()  # blocks whose weights are not those of the last step
        self._held = 0  # bytes of gradients on the device that updates still need
        self._late: list[Move] = []  # of parameters in files, which wait for their update
        # of the last iteration
        self._began: list[float] = []
        self._asked = self._update_seconds = 0.0
        self._kept_bytes: list[int] = []

    def run(self) -> OverlapCost:
        threads = self._train(), self._update_all()
        while True:
            for i, wait in enumerate(self._waits):
                if callable(wait) and wait():
                    self._waits[i] = self._now
            times = [(wait, -i) for i, wait in enumerate(self._waits) if not callable(wait)]
            # at the same second the worker (-1) comes first: the trainer sees what ended by then
            self._now, i = min(times)
            try:
                self._waits[-i] = next(threads[-i])
            except StopIteration:
                break
        seconds = self._began[-1] - self._began[-2]
        waited = max(0.0, seconds - self._work.pass_seconds)
        return OverlapCost(seconds, self._update_seconds, waited, tuple(self._kept_bytes))

    # -- who trains --

    def _train(self) -> Thread:
        for _ in range(ITERATIONS):
            self._began.append(self._now)
            self._kept_bytes.clear()
            yield from self._pass()
            yield from self._step()
        self._began.append(self._now)

    def _pass(self) -> Thread:
        work = self._work
        for moment in range(self._plan.num_trace_moments):
            if moment == work.backward:
                yield self._has_settled
                self._begin_backward()
            for gathered in work.gathers.get(moment, ()):
                yield from self._gate(gathered)
            self._walk.begin(moment, self._now, self._is_late)
            yield from self._reach(moment)
            if moment < work.backward:
                self._kept_bytes.append(self._held)
            for chunk, seconds in work.shares(moment):
                if chunk is not None:
                    yield from self._gate(chunk)
                yield from self._compute(seconds)
        yield from self._reach(self._plan.num_trace_moments)

    def _begin_backward(self) -> None:
        for block in self._work.on_host[: max(0, self._work.depth - len(self._work.on_disk))]:
            self._send(block, self._work.state)

    def _gate(self, chunk: ChunkId) -> Thread:
        """Wait until the chunk's weights are those of the last step."""
        if self._left[chunk]:
            yield lambda: not self._left[chunk]

    def _is_late(self, move: Move) -> bool:
        """Whether the move brings a parameter that is read from its file after its update."""
        if (
            move.kind is MoveKind.PARAM
            and move.chunk in self._work.alone
            and self._left[move.chunk]
        ):
            self._late.append(move)
            return True
        return False

    def _reach(self, moment: int) -> Thread:
        if any(move.end <= moment for move in self._late):
            yield lambda: not any(move.end <= moment for move in self._late)
        yield self._walk.reach(moment, self._now)

    def _compute(self, seconds: float) -> Thread:
        self._is_computing = True
        yield max(self._now, self._update_ends) + seconds
        self._is_computing = False

    def _step(self) -> Thread:
        flow = self._flow
        self._asked = self._now
        self._left.update(self._work.num_blocks)
        self._held = sum(self._work.gradients.values())
        for span in flow.reads:
            self._send(span.record.block, self._work.inputs)
        flow.begin()
        self._is_asked = True
        if not self._has_tail:
            yield self._has_settled

    def _has_settled(self) -> bool:
        return not self._is_asked

    # -- who updates --

    def _update_all(self) -> Thread:
        flow = self._flow
        flow.read_ahead()
        while True:
            yield lambda: self._is_asked
            while True:
                while (busy := flow.waits_for()) is not None:
                    yield from self._end(busy)
                span = flow.take()
                if span is None:
                    break
                block = span.record.block
                yield max(self._now, self._ends[block.id])  # of its inputs that are no state
                yield from self._update(self._work.updates[block.id])
                self._is_updated(block)
                flow.put(span)
            while flow.writes:
                yield from self._end(flow.writes[0])
            flow.committed(in_order=True)
            flow.read_ahead()
            yield from self._update_in_memory()
            self._update_seconds = self._now - self._asked
            self._is_asked = False

    def _end(self, span: Span[_Timed]) -> Thread:
        yield max(self._now, self._ends[span.id])
        self._flow.end(span)

    def reads(self, block: BlockBytes) -> None:
        """Begin to read a block's state, and in a step what else its update needs."""
        self._send(block, self._work.state)
        if self._flow.in_step:
            self._send(block, self._work.inputs)

    def writes(self, block: BlockBytes) -> None:
        """Begin to write a block's state."""
        self._send(block, self._work.results)

    def has_ended(self, block: BlockBytes) -> bool:
        """Whether the last transfer of a block has ended by now."""
        return self._ends[block.id] <= self._now

    def _update_in_memory(self) -> Thread:
        """Update blocks on the device, as one launch, then blocks in host memory one by one."""
        work = self._work
        yield from self._update(sum(work.updates[block.id] for block in work.on_device))
        for block in work.on_device:
            self._is_updated(block)
        num_begun, end = 0, self._now
        for i, block in enumerate(work.on_host):
            for other in work.on_host[num_begun : i + work.depth + 1]:
                if other.id not in self._ends:
                    self._send(other, work.state)
                self._send(other, work.inputs)
                num_begun += 1
            yield max(self._now, self._ends.pop(block.id))
            yield from self._update(work.updates[block.id])
            self._is_updated(block)
            self._send(block, work.results)
            end = max(end, self._ends.pop(block.id))
        yield end

    def _update(self, seconds: float) -> Thread:
        if not seconds:
            return
        # One processor: the update's seconds are added to the computation that it interrupts, or
        # the next computation waits for its end.
        if self._shares:
            if self._is_computing:
                self._waits[TRAINER] += seconds  # type: ignore[operator]
            self._update_ends = self._now + seconds
        yield self._now + seconds

    def _is_updated(self, block: BlockBytes) -> None:
        """Note that the block's weights are those of the step."""
        self._left[block.chunk] -= 1
        if not self._left[block.chunk]:
            self._held -= self._work.gradients.get(block.chunk, 0)
            for move in [move for move in self._late if move.chunk == block.chunk]:
                self._late.remove(move)
                self._walk.transfer(move, self._now)

    def _send(self, block: BlockBytes, moves: dict[BlockId, list[Move]]) -> None:
        ends = (self._links.send(m.src, m.dst, m.nbytes, self._now) for m in moves[block.id])
        self._ends[block.id] = max(ends, default=self._ends.get(block.id, self._now))


def price(work: Work, updates: Iterable[str]) -> dict[str, OverlapCost]:
    """Cost of an iteration with each of these `update`s."""
    return {update: StepClock(work, update).run() for update in updates}
