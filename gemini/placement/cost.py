"""What an iteration costs: bytes over measured bandwidths, with what runs beside what. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from gemini.units import BlockId, ChunkId

from .plan import Move, MoveKind, Plan, UpdatePath
from .problem import Homes, PlacementProblem, state_parts
from .sizes import Bandwidths, ChunkBytes
from .tiers import Tier

Seconds = dict[str, float]  # by resource
LINKS = ("host_to_device", "device_to_host", "nvme", "collective")


@dataclass(frozen=True, slots=True)
class StepCost:
    """One iteration as predicted."""

    seconds: float
    stall_seconds: float  # computing waited for a link
    busy: dict[str, float]  # seconds of every resource: links, `compute`, `update`

    @property
    def bound_by(self) -> str:
        """The resource that is busy the longest: with everything overlapped it sets the time."""
        return max(self.busy, key=lambda name: self.busy[name])


def link_seconds(
    src: Tier, dst: Tier, nbytes: int, bandwidths: Bandwidths, has_host_tier: bool
) -> dict[str, float]:
    """Seconds that a transfer occupies every link on its way."""
    seconds = {}
    if src is Tier.NVME:
        seconds["nvme"] = nbytes / bandwidths.nvme_read
    elif dst is Tier.NVME:
        seconds["nvme"] = nbytes / bandwidths.nvme_write
    if has_host_tier and dst is Tier.DEVICE:
        seconds["host_to_device"] = nbytes / bandwidths.host_to_device
    elif has_host_tier and src is Tier.DEVICE:
        seconds["device_to_host"] = nbytes / bandwidths.device_to_host
    return seconds


def update_seconds(
    state_bytes: int, param_bytes: int, path: UpdatePath, bandwidths: Bandwidths
) -> float:
    """Of an update itself: state read and written, gradient read, parameter written."""
    memory = bandwidths.host_memory if path is UpdatePath.CPU else bandwidths.device_memory
    return (2 * state_bytes + 2 * param_bytes) / memory


def update_transfers(
    state_bytes: int,
    param_bytes: int,
    beside_bytes: int,
    *,
    param: Tier,
    grad: Tier,
    state: Tier,
    path: UpdatePath,
    has_master: bool,
) -> list[tuple[MoveKind, Tier, Tier, int]]:
    """What an update moves: (kind, from, to, bytes), first what must come, then what goes.

    `beside_bytes`: of what goes to NVMe beside the state where there is no whole master: parameters
    as they were, or as they are now.
    """
    site = Tier.HOST if path is UpdatePath.CPU else Tier.DEVICE
    moves = []
    if grad is not site:
        moves.append((MoveKind.GRAD, grad, site, param_bytes))
    if param is not site and not has_master:
        moves.append((MoveKind.PARAM, param, site, param_bytes))
    if state is not site and state_bytes:
        moves.append((MoveKind.STATE, state, site, state_bytes))
        moves.append((MoveKind.STATE, site, state, state_bytes))
    if state is Tier.NVME and not has_master:
        moves.append((MoveKind.BESIDE, site, state, beside_bytes))
    if param is not site:
        moves.append((MoveKind.PARAM, site, param, param_bytes))
    return moves


def gathered_bytes(chunk: ChunkBytes) -> float:
    """What each rank receives of a gather."""
    return chunk.payload_bytes * (chunk.num_shards - 1) / chunk.num_shards


def reduced_bytes(chunk: ChunkBytes) -> float:
    """What each rank receives of a reduction: inside a replica, then of a shard across them."""
    across = chunk.shard_bytes * 2 * (chunk.num_replicas - 1) / chunk.num_replicas
    return gathered_bytes(chunk) + across


def estimate(
    homes: Homes, problem: PlacementProblem, num_uses: Sequence[int], compute_seconds: float
) -> tuple[float, float]:
    """Seconds of an iteration with these homes, and of all transfers one after the other.

    Without a schedule, and as if everything within forward and backward, and within the step, ran
    beside everything else. The second is what decides between homes that the first finds equal.
    `num_uses`: how often an iteration gathers every chunk.
    """
    bandwidths = problem.bandwidths
    model: Seconds = {"compute": compute_seconds}
    step: Seconds = {}
    for chunk in problem.chunks:
        i = chunk.id
        uses = 0 if homes.never_released[i] else num_uses[i]
        if homes.param[i] is not Tier.DEVICE:
            nbytes = uses * chunk.shard_bytes
            _add(model, link_seconds(homes.param[i], Tier.DEVICE, nbytes, bandwidths,
                                     problem.has_host_tier))  # fmt: skip
        if chunk.trainable and homes.grad[i] is not Tier.DEVICE:
            _add(model, link_seconds(Tier.DEVICE, homes.grad[i], chunk.shard_bytes, bandwidths,
                                     problem.has_host_tier))  # fmt: skip
        wire = gathered_bytes(chunk) * max(uses, 1)
        if chunk.trainable:
            wire += reduced_bytes(chunk)
        _add(model, {"collective": wire / bandwidths.collective})
        _add(step, _update_busy(chunk, homes, problem))
    return (
        max(model.values()) + max(step.values(), default=0.0),
        sum(model.values()) + sum(step.values()),
    )


def _update_busy(chunk: ChunkBytes, homes: Homes, problem: PlacementProblem) -> Seconds:
    """Seconds of every resource for one chunk's update."""
    spent: Seconds = {}
    i = chunk.id
    for home, (state_bytes, param_bytes) in state_parts(chunk, homes.state[i]):
        taken = UpdatePath.RESIDENT if home is Tier.DEVICE else problem.off_device
        block = chunk.blocks[0]
        beside_bytes = param_bytes * block.beside_bytes // block.param_bytes
        for _, src, dst, nbytes in update_transfers(
            state_bytes, param_bytes, beside_bytes,
            param=homes.param[i], grad=homes.grad[i], state=home, path=taken,
            has_master=block.gives_parameters(home),
        ):  # fmt: skip
            _add(spent, link_seconds(src, dst, nbytes, problem.bandwidths, problem.has_host_tier))
        name = "host_memory" if taken is UpdatePath.CPU else "device_memory"
        _add(spent, {name: update_seconds(state_bytes, param_bytes, taken, problem.bandwidths)})
    return spent


def _add(total: Seconds, more: Seconds) -> None:
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + seconds


class Walk:
    """Seconds through a plan, from `now` on: links work in the order of issue, and whoever computes
    waits for what it needs."""

    def __init__(
        self,
        plan: Plan,
        bandwidths: Bandwidths,
        now: float = 0.0,
        done: Collection[BlockId] = frozenset(),
    ) -> None:
        """done: blocks that the step does not update."""
        self.now = now
        self.busy: Seconds = dict.fromkeys((*LINKS, "compute", "update"), 0.0)
        self._plan, self._bandwidths = plan, bandwidths
        self._free_at = dict.fromkeys(LINKS, now)
        self._due: dict[int, float] = {}  # when what must have ended at a moment has
        self._moves_at: dict[int, list[Move]] = {}
        for move in plan.forecast.moves:
            self._moves_at.setdefault(move.begin, []).append(move)
        # chunk, when it must be there, bytes
        self._wires_at: dict[int, list[tuple[ChunkId, int, float]]] = {}
        for gather in plan.gathers:
            if plan.chunks[gather.chunk].num_shards > 1:
                nbytes = gathered_bytes(plan.chunks[gather.chunk])
                self._wire(gather.begin, gather.chunk, gather.use, nbytes)
        for reduction in plan.forecast.reductions:
            if plan.chunks[reduction.chunk].reduces:
                nbytes = reduced_bytes(plan.chunks[reduction.chunk])
                self._wire(reduction.last, reduction.chunk, reduction.end, nbytes)
        self._moment_of = {
            block: plan.num_trace_moments + i for i, block in enumerate(plan.forecast.step_order)
        }
        self._update_at = _updates(plan, bandwidths, self._moment_of, done)

    def _wire(self, begin: int, chunk: ChunkId, end: int, nbytes: float) -> None:
        self._wires_at.setdefault(begin, []).append((chunk, end, nbytes))

    @property
    def end(self) -> float:
        """When all that was begun has ended."""
        return max(self.now, *self._free_at.values())

    def move(
        self, moment: int, ready: Mapping[ChunkId, float] | None = None
    ) -> dict[ChunkId, float]:
        """Begin the transfers of a moment; by chunk, when the last of them ends. ready: when there
        is something to move, where that is later."""
        arrived: dict[ChunkId, float] = {}
        for move in self._moves_at.get(moment, ()):
            start = max(self.now, (ready or {}).get(move.chunk, self.now))
            spent = link_seconds(
                move.src, move.dst, move.nbytes, self._bandwidths, self._plan.has_host_tier
            )
            for link in spent:
                start = max(start, self._free_at[link])
            arrived[move.chunk] = start + max(spent.values(), default=0.0)
            for link, seconds in spent.items():
                self._occupy(link, start, seconds)
            self._must_end(move.end, arrived[move.chunk])
        return arrived

    def exchange(self, moment: int, arrived: Mapping[ChunkId, float]) -> None:
        """Begin the gathers and reductions of a moment, each when its chunk has arrived."""
        for chunk, end, nbytes in self._wires_at.get(moment, ()):
            start = max(self.now, self._free_at["collective"], arrived.get(chunk, self.now))
            seconds = nbytes / self._bandwidths.collective
            self._occupy("collective", start, seconds)
            self._must_end(end, start + seconds)

    def hold_disk(self, seconds: float) -> None:
        """It is busy with something else, so long from now on."""
        self._free_at["nvme"] = max(self._free_at["nvme"], self.now + seconds)

    def _occupy(self, link: str, start: float, seconds: float) -> None:
        self._free_at[link] = start + seconds
        self.busy[link] += seconds

    def _must_end(self, moment: int, done: float) -> None:
        self._due[moment] = max(self._due.get(moment, done), done)

    def reach(self, moment: int) -> None:
        """Wait for what must have ended when a moment comes."""
        self.wait(self._due.pop(moment, self.now))

    def through(self, compute_seconds: Sequence[float], disk_busy: float = 0.0) -> Iterator[float]:
        """A pass and its step, moment after moment: when each begins. See `predict_step`."""
        trace = self._plan.num_trace_moments
        for moment in range(self._plan.num_moments + 1):
            yield self.now
            if moment == trace:
                self.hold_disk(disk_busy)
            self.exchange(moment, self.move(moment))
            self.reach(moment)
            if moment < trace:
                self.compute(compute_seconds[moment])
            else:
                self.update(moment)

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def compute(self, seconds: float) -> None:
        """Of forward or backward."""
        self.now += seconds
        self.busy["compute"] += seconds

    def update(self, moment: int) -> None:
        """What the step updates at a moment."""
        seconds = self._update_at.get(moment, 0.0)
        self.now += seconds
        self.busy["update"] += seconds

    def update_of(self, block: BlockId) -> float:
        """Seconds of the update of a block that is not on the device."""
        return self._update_at.get(self._moment_of[block], 0.0)


def _updates(
    plan: Plan, bandwidths: Bandwidths, at: Mapping[BlockId, int], done: Collection[BlockId]
) -> dict[int, float]:
    """Seconds of the updates at every moment of the step."""
    found: dict[int, float] = {}
    updated = plan.shards if plan.kind == "train" else ()
    for shard in updated:
        for block, home in zip(plan.chunks[shard.chunk].blocks, shard.state_homes, strict=True):
            if block.id in done:
                continue
            moment = at.get(block.id, plan.resident_moment)
            spent = update_seconds(
                block.state_on(home), block.param_bytes, plan.path_of(home), bandwidths
            )
            found[moment] = found.get(moment, 0.0) + spent
    return found


def predict_step(
    plan: Plan,
    bandwidths: Bandwidths,
    compute_seconds: Sequence[float],
    *,
    done: Collection[BlockId] = frozenset(),
    disk_busy: float = 0.0,
) -> StepCost:
    """Walk through the plan, its step behind its pass.

    compute_seconds: of every moment of the trace. done: blocks that were updated in the pass, for
    which the disk is busy for so long behind it.
    """
    walk = Walk(plan, bandwidths, done=done)
    for _ in walk.through(compute_seconds, disk_busy):
        pass
    stalled = walk.end - walk.busy["compute"] - walk.busy["update"]
    return StepCost(walk.end, stalled, dict(walk.busy))


class RecordedWalk(Walk):
    """A walk that keeps when every link is busy: `spans[link]` are (begin, end), in order."""

    def __init__(self, plan: Plan, bandwidths: Bandwidths) -> None:
        super().__init__(plan, bandwidths)
        self.spans: dict[str, list[tuple[float, float]]] = {link: [] for link in LINKS}

    def _occupy(self, link: str, start: float, seconds: float) -> None:
        super()._occupy(link, start, seconds)
        spans = self.spans[link]
        if spans and start <= spans[-1][1]:
            start = spans.pop()[0]
        spans.append((start, self._free_at[link]))


def compute_seconds_of(
    seconds: Sequence[float], weights: Sequence[int], total_flops: float, flops: float
) -> list[float]:
    """Seconds of every moment: as timed, else `total_flops` spread in proportion to `weights`."""
    if any(seconds):
        return list(seconds)
    all_weights = sum(weights)
    if not all_weights or flops == inf:
        return [0.0] * len(weights)
    return [total_flops / flops * weight / all_weights for weight in weights]
