"""Price of an iteration: a step's flow on a clock, beside the pass of its plan. Pure.

One simulator for every `update`. What it notes of a serial step is what a timeline draws.

    trainer   forward and backward, and what they move; waits for weights that come late
    worker    the flow of a step (`optim.state.flow`): reads, updates and writes; before that, if
              updates are early, blocks whose gradients are final (`gemini.runtime.step.early`)

Each is a generator of what it waits for: a time, or a condition. Links work in the order of issue.
Where one processor trains and updates, an update takes its seconds from the pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from math import inf

from gemini.optim.state.flow import Flow, Span, num_buffers
from gemini.placement.cost import (
    LINKS,
    Seconds,
    gathered_bytes,
    link_seconds,
    reduced_bytes,
    update_seconds,
)
from gemini.placement.plan import Move, MoveKind, Plan, UpdatePath
from gemini.placement.problem import PlanInputs
from gemini.placement.sizes import Bandwidths, BlockBytes
from gemini.placement.tiers import Tier
from gemini.units import BlockId, Bytes, ChunkId, Moment

from .updates import BOTH, EARLY_WINDOW, SERIAL, SPECULATE, TAIL, StepCost, goes_on, is_early

Wait = float | Callable[[], bool]  # until then; until it is true
Thread = Generator[Wait, None, None]
TRAINER = 0  # of the two threads; 1: the worker
# A serial step ends before the next pass, and leaves its buffers as it found them. Of a tail the
# first step finds its reads done, and the first pass no tail.
ITERATIONS = {SERIAL: 1, SPECULATE: 1, TAIL: 3, BOTH: 3}


class TimedLinks:
    """Links that carry what is sent in the order of issue. busy: seconds by resource.

    notes: also when a link is busy (`spans`, in order), and of every move when it begins and ends
    (`sent`).
    """

    def __init__(self, bandwidths: Bandwidths, has_host_tier: bool, *, notes: bool) -> None:
        self.busy: Seconds = dict.fromkeys((*LINKS, "compute", "update"), 0.0)
        self.spans: dict[str, list[tuple[float, float]]] = {link: [] for link in LINKS}
        self.sent: list[tuple[Move, float, float]] = []
        self._free_at = dict.fromkeys(LINKS, 0.0)
        self._bandwidths, self._has_host_tier, self._notes = bandwidths, has_host_tier, notes

    def send(self, move: Move, now: float) -> float:
        """Begin a move. Returns the second at which it ends."""
        spent = link_seconds(move.src, move.dst, move.nbytes, self._bandwidths, self._has_host_tier)
        # both links of a way from disk to device are taken at once: the slower one sets the pace
        start = max(now, *(self._free_at[link] for link in spent)) if spent else now
        for link, seconds in spent.items():
            self._occupy(link, start, seconds)
        end = start + max(spent.values(), default=0.0)
        if self._notes:
            self.sent.append((move, start, end))
        return end

    def exchange(self, nbytes: float, now: float) -> float:
        """Begin to exchange `nbytes` with other ranks. Returns the second at which it ends."""
        start, seconds = max(now, self._free_at["collective"]), nbytes / self._bandwidths.collective
        self._occupy("collective", start, seconds)
        return start + seconds

    def _occupy(self, link: str, start: float, seconds: float) -> None:
        end = self._free_at[link] = start + seconds
        self.busy[link] += seconds
        if self._notes:
            spans = self.spans[link]
            if spans and start <= spans[-1][1]:
                start = spans.pop()[0]
            spans.append((start, end))


class Work:
    """Work of a plan's iteration: its pass, and the transfers of every block's update."""

    def __init__(
        self, plan: Plan, inputs: PlanInputs, compute_seconds: Sequence[float] | None = None
    ) -> None:
        """compute_seconds: by moment of the trace, by default those of `inputs`."""
        self.plan, self.bandwidths = plan, inputs.bandwidths
        self.compute_seconds = compute_seconds or inputs.compute_seconds()
        # by moment the chunks of the call that begins
        self.calls, self.backward = inputs.trace.calls(inputs.layout.chunk_of()), inputs.backward
        self.depth, self.num_ahead = inputs.depth, inputs.num_ahead
        self.on: dict[Tier, list[BlockBytes]] = {tier: [] for tier in Tier}  # by home of the state
        self.num_blocks: dict[ChunkId, int] = {}
        self.gradients: dict[ChunkId, int] = {}  # bytes of the device
        self.seconds: dict[BlockId, float] = {}  # of updates
        self.gathered_again = 0.0  # bytes of payloads that are never released, behind a step
        self.measured_bytes = 0  # of gradients, by a device that measures their norm
        for shard in plan.shards if plan.kind == "train" else ():
            sizes = plan.chunks[shard.chunk]
            self.num_blocks[sizes.id] = len(sizes.blocks)
            if plan.off_device is UpdatePath.STREAM and plan.has_host_tier and sizes.trainable:
                self.measured_bytes += sizes.shard_bytes
            if shard.grad_home is Tier.DEVICE:
                self.gradients[sizes.id] = sizes.shard_bytes
            if shard.never_released and sizes.trainable:
                self.gathered_again += gathered_bytes(sizes)
            for block, home in zip(sizes.blocks, shard.state_homes, strict=True):
                self.on[home].append(block)
                self.seconds[block.id] = update_seconds(
                    block.state_on(home), block.param_bytes, plan.path_of(home), self.bandwidths
                )
        # of blocks: state that comes, what else an update needs, and what goes
        self.state: dict[BlockId, list[Move]] = defaultdict(list)
        self.inputs: dict[BlockId, list[Move]] = defaultdict(list)
        self.results: dict[BlockId, list[Move]] = defaultdict(list)
        self.moves_at: dict[int, list[Move]] = defaultdict(list)  # of the pass, by its moments
        site = Tier.HOST if plan.off_device is UpdatePath.CPU else Tier.DEVICE
        for move in plan.forecast.moves:
            if move.block is None:
                self.moves_at[move.begin].append(move)
            else:
                comes = self.state if move.kind is MoveKind.STATE else self.inputs
                (comes if move.dst is site else self.results)[move.block].append(move)
        self.final: dict[int, list[ChunkId]] = defaultdict(list)  # chunks, by moment
        for reduction in plan.forecast.reductions:
            self.final[reduction.last].append(reduction.chunk)
        # parameters of these are read from a file by who uses them, when their update is done
        self.alone = {
            shard.chunk
            for shard in plan.shards
            if shard.param_home is Tier.NVME and plan.chunks[shard.chunk].num_shards == 1
        }
        self.gathers: dict[int, list[ChunkId]] = defaultdict(list)
        # (chunk, moment at which it is due, bytes) by the moment of its begin
        self.wires_at: dict[int, list[tuple[ChunkId, int, float]]] = defaultdict(list)
        for gather in plan.gathers:
            sizes = plan.chunks[gather.chunk]
            if gather.chunk not in self.alone:
                self.gathers[gather.begin].append(gather.chunk)
            if sizes.num_shards > 1:
                wire = gather.chunk, gather.use, gathered_bytes(sizes)
                self.wires_at[gather.begin].append(wire)
        for reduction in plan.forecast.reductions:
            sizes = plan.chunks[reduction.chunk]
            if sizes.reduces:
                wire = reduction.chunk, reduction.end, reduced_bytes(sizes)
                self.wires_at[reduction.last].append(wire)

    def without_updates(self) -> Work:
        """The pass alone."""
        bare = copy(self)
        bare.on, bare.num_blocks, bare.gradients = {tier: [] for tier in Tier}, {}, {}
        bare.gathered_again, bare.measured_bytes = 0.0, 0
        return bare

    def early_results(self, block: BlockBytes) -> list[Move]:
        """What goes from an early update: state, and weights to host memory of their own."""
        state = [move for move in self.results[block.id] if move.kind is not MoveKind.PARAM]
        return [*state, self._weights(block, Tier.DEVICE, Tier.HOST)]

    def committed(self, block: BlockBytes) -> list[Move]:
        """What brings the weights of an early update from there to where they live."""
        to_host = [move for move in self.results[block.id] if move.kind is MoveKind.PARAM]
        return [self._weights(block, Tier.HOST, Tier.DEVICE), *to_host]

    def _weights(self, block: BlockBytes, src: Tier, dst: Tier) -> Move:
        step, nbytes = Moment(self.plan.num_trace_moments), Bytes(block.param_bytes)
        return Move(MoveKind.PARAM, block.chunk, block.id, src, dst, step, step, nbytes)

    def shares(self, moment: int) -> Iterator[tuple[ChunkId | None, float]]:
        """Seconds of a call by chunk. A call of many chunks, as of a whole module, uses one after
        the other, and its backward the last one first."""
        seconds, used = self.compute_seconds[moment], self.calls[moment] or ()
        nbytes = sum(self.plan.chunks[chunk].payload_bytes for chunk in used)
        for chunk in used if moment < self.backward else sorted(used, reverse=True):
            yield chunk, seconds * self.plan.chunks[chunk].payload_bytes / nbytes
        if not used:
            yield None, seconds


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
    """Clock of iterations with one `update`, of which the last one is measured.

    seconds: of the iteration. update_seconds: from the call of `step()` until all is updated.
    kept_bytes: of gradients that blocks still need, at every moment of forward. moments, updates:
    seconds at which the moments of the trace begin, and at which updates are waited for, each with
    its block; None: those on the device, which are one launch. updated: when the last one ended.
    """

    def __init__(self, work: Work, update: str, *, notes: bool = False) -> None:
        """notes: links note what they carry, and when."""
        self._work, self._plan, self._update_kind = work, work.plan, update
        self._has_tail, self._is_early = goes_on(update), is_early(update)
        by_host = work.plan.has_host_tier and work.plan.off_device is UpdatePath.CPU
        self._num_sets = work.depth + 1  # of buffers on the device
        self._shares = not by_host  # one processor trains and updates
        self.links = TimedLinks(work.bandwidths, work.plan.has_host_tier, notes=notes)
        self._due: dict[int, float] = {}  # by moment: second at which its last transfer ends
        self._flow = self._new_flow()
        self._now = 0.0
        self._waits: list[Wait] = [0.0, 0.0]
        self._is_asked = False  # the worker has a step to take
        self._is_computing = False
        self._update_ends = 0.0  # of the one under way
        self._ends: dict[BlockId, float] = {}  # of the last transfer
        self._left = Counter[ChunkId]()  # blocks whose weights are not those of the last step
        self._held = 0  # bytes of gradients on the device that updates still need
        self._late: list[Move] = []  # of parameters in files, which wait for their update
        # blocks in host memory, the next to be updated first, in backward those that are final; and
        # of those that were updated there the second at which their copies end
        self._next: deque[BlockBytes] = deque()
        self._early: dict[BlockId, float] = {}
        # by set of buffers on the device, the second at which its block has left it; inf: it is in
        self._leaves: dict[int, float] = {}
        # of the last iteration
        self._began = self._asked = self.seconds = self.update_seconds = self.updated = 0.0
        self.kept_bytes: list[int] = []
        self.moments: list[float] = []
        self.updates: list[tuple[float, BlockId | None]] = []

    def _new_flow(self) -> Flow[_Timed]:
        """Flow as a step before leaves it: a serial one begins with the blocks that it had last."""
        work, spans = self._work, [Span(_Timed(block, self)) for block in self._work.on[Tier.NVME]]
        count = num_buffers(work.depth, len(spans), work.num_ahead)
        flow = Flow(spans, work.depth, list(range(count)))
        for span in () if self._has_tail else spans[: work.depth]:
            span.buffer = flow.free.pop()
            flow.reads.append(span)
        return flow

    def run(self) -> None:
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
                return

    # -- who trains --

    def _train(self) -> Thread:
        for _ in range(ITERATIONS[self._update_kind]):
            self._began = self._now
            self.kept_bytes.clear()
            self.moments.clear()
            self.links.busy = dict.fromkeys(self.links.busy, 0.0)
            yield from self._pass()
            yield from self._step()
            self.seconds = self._now - self._began

    def _pass(self) -> Thread:
        work = self._work
        for moment in range(self._plan.num_trace_moments):
            self.moments.append(self._now)
            if moment == work.backward:
                yield self._has_settled
                self._begin_backward()
            for gathered in work.gathers.get(moment, ()):
                yield from self._gate(gathered)
            yield from self._move(moment)
            if self._is_early:
                self._is_final(work.final.get(moment, ()))
            if moment < work.backward:
                self.kept_bytes.append(self._held)
            for chunk, seconds in work.shares(moment):
                if chunk is not None:
                    yield from self._gate(chunk)
                yield from self._compute(seconds)
        yield from self._move(self._plan.num_trace_moments)

    def _begin_backward(self) -> None:
        if self._is_early or self._has_tail:
            return
        # No state of the host comes yet. But as much of what the last blocks take back goes beside
        # the next forward, which this clock has not, so a serial step takes as long.
        on_disk, on_host = self._work.on[Tier.NVME], self._work.on[Tier.HOST]
        for block in on_host[: max(0, self._work.depth - len(on_disk))]:
            self._send(block, self._work.state)

    def _gate(self, chunk: ChunkId) -> Thread:
        """Wait until the chunk's weights are those of the last step."""
        if self._left[chunk]:
            yield lambda: not self._left[chunk]

    def _move(self, moment: int) -> Thread:
        """Begin the moves of a moment, its gathers and its reductions, each when its chunk has
        arrived. Wait for what is due."""
        arrived: dict[ChunkId | None, float] = {}
        for move in self._work.moves_at.get(moment, ()):
            if self._is_late(move):
                self._late.append(move)
            else:
                arrived[move.chunk] = self._transfer(move)
        for chunk, due, nbytes in self._work.wires_at.get(moment, ()):
            self._must_end(due, self.links.exchange(nbytes, arrived.get(chunk, self._now)))
        if any(move.end <= moment for move in self._late):
            yield lambda: not any(move.end <= moment for move in self._late)
        yield max(self._now, self._due.pop(moment, self._now))

    def _is_late(self, move: Move) -> bool:
        """Whether the move brings a parameter that is read from its file after its update."""
        if move.kind is not MoveKind.PARAM or move.chunk not in self._work.alone:
            return False
        return self._left[move.chunk] > 0

    def _transfer(self, move: Move) -> float:
        end = self.links.send(move, self._now)
        self._must_end(move.end, end)
        return end

    def _must_end(self, moment: int, end: float) -> None:
        self._due[moment] = max(self._due.get(moment, end), end)

    def _compute(self, seconds: float) -> Thread:
        self._is_computing = True
        self.links.busy["compute"] += seconds
        yield max(self._now, self._update_ends) + seconds
        self._is_computing = False

    def _step(self) -> Thread:
        flow = self._flow
        self._asked = self._now
        yield self._now + self._work.measured_bytes / self._work.bandwidths.device_memory
        # what streams were not given by now the step updates
        under_way = sum(end > self._now for end in self._early.values())
        while len(self._next) > max(0, EARLY_WINDOW - under_way):
            self._next.pop()
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
            yield lambda: self._is_asked or bool(self._next)
            yield from self._update_early()
            if not self._is_asked:
                continue
            yield max([self._now, *self._early.values()])  # what they brought is asked for
            self.updates.clear()
            yield from self._update_on_disk()
            flow.committed(in_order=self._has_tail)
            flow.read_ahead()
            yield from self._update_in_memory()
            self.update_seconds = self._now - self._asked
            self._is_asked = False

    def _is_final(self, chunks: Sequence[ChunkId]) -> None:
        """Note that gradients are reduced."""
        blocks = [block for block in self._work.on[Tier.HOST] if block.chunk in chunks]
        self._next.extend(blocks)
        self._bring_ahead()

    def _bring_ahead(self) -> None:
        """Begin to bring the blocks that come next, each to its set of buffers when that is free:
        a block has the same one in every step."""
        for block in islice(self._next, self._num_sets):
            if block is not self._next[0] and not self._work.results.get(block.id):
                return  # what nothing leaves is free when the block before is updated
            if block.id not in self._ends:
                free_at = self._leaves.get(block.id % self._num_sets, 0.0)
                if free_at == inf and self._shares:
                    return
                free_at = free_at if self._shares else 0.0
                self._send(block, self._work.state, free_at)
                self._send(block, self._work.inputs, free_at)
                self._leaves[block.id % self._num_sets] = inf

    def _update_next(
        self, results: Callable[[BlockBytes], Sequence[Move]]
    ) -> Generator[Wait, None, float]:
        """Update the next block in host memory. Returns the second at which its copies end."""
        self._bring_ahead()
        block = self._next[0]
        yield max(self._now, self._ends.pop(block.id))
        self._next.popleft()
        yield from self._update(self._work.seconds[block.id])
        end = self._leaves[block.id % self._num_sets] = self._send_moves(results(block))
        self._bring_ahead()
        return end

    def _update_early(self) -> Thread:
        """Update blocks whose gradients are final, to second versions."""
        while self._next:
            block = self._next[0]
            self._early[block.id] = yield from self._update_next(self._work.early_results)

    def _update_on_disk(self) -> Thread:
        flow = self._flow
        while True:
            waited = self._now
            while (busy := flow.waits_for()) is not None:
                yield from self._end(busy)
            span = flow.take()
            if span is None:
                break
            block = span.record.block
            self.updates.append((waited, block.id))
            yield max(self._now, self._ends[block.id])  # of its inputs that are no state
            yield from self._update(self._work.seconds[block.id])
            self._is_updated(block)
            flow.put(span)
        while flow.writes:
            yield from self._end(flow.writes[0])

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
        """Update blocks on the device, as one launch, but one by one what is brought to it; then
        blocks in host memory one by one."""
        work, on_device = self._work, self._work.on[Tier.DEVICE]
        self.updates.append((self._now, None))
        travels = {b.id for b in on_device if work.inputs.get(b.id) or work.results.get(b.id)}
        own = [block for block in on_device if block.id not in travels]
        yield from self._update(sum(work.seconds[block.id] for block in own))
        for block in own:
            self._is_updated(block)
        end = self._now
        brought = [block for block in on_device if block.id in travels]
        self._next.extend(brought)
        for block in brought:
            end = max(end, (yield from self._update_next(lambda b: work.results[b.id])))
            self._is_updated(block)
        end = max(end, (yield from self._update_on_host()))
        self.updated = self._now
        if work.gathered_again:
            end = max(end, self.links.exchange(work.gathered_again, self._now))
        yield max(end, self._now)

    def _update_on_host(self) -> Generator[Wait, None, float]:
        """Update blocks in host memory, or let those count that were updated early. Returns the
        second at which the last copy ends."""
        work, end = self._work, self._now
        self._next.extend(b for b in work.on[Tier.HOST] if b.id not in self._early)
        for block in work.on[Tier.HOST]:
            self.updates.append((self._now, block.id))
            self._bring_ahead()
            if block.id in self._early:
                here, *back = work.committed(block)
                yield self._send_moves([here])
                end = max(end, self._send_moves(back))
            else:
                end = max(end, (yield from self._update_next(lambda b: work.results[b.id])))
            self._is_updated(block)
        self._early.clear()
        return end

    def _update(self, seconds: float) -> Thread:
        if not seconds:
            return
        self.links.busy["update"] += seconds
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
                self._transfer(move)

    def _send(
        self, block: BlockBytes, moves: dict[BlockId, list[Move]], earliest: float = 0.0
    ) -> float:
        """Begin transfers of a block, at `earliest`. Returns the second at which the last of them
        ends."""
        own = moves.get(block.id, ())
        end = self._send_moves(own, earliest) if own else self._ends.get(block.id, self._now)
        self._ends[block.id] = end
        return end

    def _send_moves(self, moves: Sequence[Move], earliest: float = 0.0) -> float:
        now = max(self._now, earliest)
        return max([now, *(self.links.send(move, now) for move in moves)])


def price(work: Work, update: str) -> StepCost:
    """Price of an iteration with this `update`."""
    clock, bare = StepClock(work, update), StepClock(work.without_updates(), SERIAL)
    clock.run()
    bare.run()
    return StepCost(
        clock.seconds, clock.links.busy, clock.update_seconds,
        max(0.0, clock.seconds - bare.seconds), tuple(clock.kept_bytes),
    )  # fmt: skip
