"""Cost of an iteration: bytes over measured bandwidths, where links, cores and device overlap.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Seconds of an update's own memory traffic: state read and written, gradient read, parameter
    written."""
    memory = bandwidths.host_memory if path is UpdatePath.CPU else bandwidths.device_memory
    return (2 * state_bytes + 2 * param_bytes) / memory


def update_transfers(
    state_bytes: int,
    param_bytes: int,
    undo_bytes: int,
    *,
    param: Tier,
    grad: Tier,
    state: Tier,
    path: UpdatePath,
    has_master: bool,
) -> list[tuple[MoveKind, Tier, Tier, int]]:
    """Transfers of an update as (kind, from, to, bytes): first those to where it runs, then those
    back.

    undo_bytes: written to NVMe with the state where no whole master exists: the parameters of
    before the update, or of after it.
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
        moves.append((MoveKind.UNDO, site, state, undo_bytes))
    if param is not site:
        moves.append((MoveKind.PARAM, site, param, param_bytes))
    return moves


def gathered_bytes(chunk: ChunkBytes) -> float:
    """Bytes that each rank receives in a gather."""
    return chunk.payload_bytes * (chunk.num_shards - 1) / chunk.num_shards


def reduced_bytes(chunk: ChunkBytes) -> float:
    """Bytes that each rank receives in a reduction: within a replica, then of a shard across
    replicas."""
    across = chunk.shard_bytes * 2 * (chunk.num_replicas - 1) / chunk.num_replicas
    return gathered_bytes(chunk) + across


def estimate(
    homes: Homes, problem: PlacementProblem, num_uses: Sequence[int], compute_seconds: float
) -> tuple[float, float]:
    """Seconds of an iteration with these homes, and of all its transfers one after the other.

    No schedule is made: everything within forward and backward, and within the step, is taken to
    overlap. The second number decides between homes for which the first is equal.
    num_uses: gathers of every chunk in an iteration.
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
        path = UpdatePath.RESIDENT if home is Tier.DEVICE else problem.off_device
        block = chunk.blocks[0]
        undo_bytes = param_bytes * block.undo_bytes // block.param_bytes
        for _, src, dst, nbytes in update_transfers(
            state_bytes, param_bytes, undo_bytes,
            param=homes.param[i], grad=homes.grad[i], state=home, path=path,
            has_master=block.gives_parameters(home),
        ):  # fmt: skip
            _add(spent, link_seconds(src, dst, nbytes, problem.bandwidths, problem.has_host_tier))
        name = "host_memory" if path is UpdatePath.CPU else "device_memory"
        _add(spent, {name: update_seconds(state_bytes, param_bytes, path, problem.bandwidths)})
    return spent


def _add(total: Seconds, more: Seconds) -> None:
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + seconds


class PlannedLinks:
    """Links that carry what is sent in the order of issue. busy: seconds by resource."""

    def __init__(self, bandwidths: Bandwidths, has_host_tier: bool) -> None:
        self.busy: Seconds = dict.fromkeys((*LINKS, "compute", "update"), 0.0)
        self._free_at = dict.fromkeys(LINKS, 0.0)
        self._bandwidths, self._has_host_tier = bandwidths, has_host_tier

    @property
    def end(self) -> float:
        """Second at which the last transfer ends."""
        return max(self._free_at.values())

    def send(self, src: Tier, dst: Tier, nbytes: int, now: float) -> float:
        """Begin to move `nbytes` from one tier to another. Returns the second at which it ends."""
        spent = link_seconds(src, dst, nbytes, self._bandwidths, self._has_host_tier)
        # both links of a way from disk to device are taken at once: the slower one sets the pace
        start = max(now, *(self._free_at[link] for link in spent)) if spent else now
        for link, seconds in spent.items():
            self._occupy(link, start, seconds)
        return start + max(spent.values(), default=0.0)

    def exchange(self, nbytes: float, now: float) -> float:
        """Begin to exchange `nbytes` with other ranks. Returns the second at which it ends."""
        start, seconds = max(now, self._free_at["collective"]), nbytes / self._bandwidths.collective
        self._occupy("collective", start, seconds)
        return start + seconds

    def _occupy(self, link: str, start: float, seconds: float) -> None:
        self._free_at[link] = start + seconds
        self.busy[link] += seconds


class RecordedLinks(PlannedLinks):
    """Links that record when they are busy: `spans[link]` are (begin, end), in order."""

    def __init__(self, bandwidths: Bandwidths, has_host_tier: bool) -> None:
        super().__init__(bandwidths, has_host_tier)
        self.spans: dict[str, list[tuple[float, float]]] = {link: [] for link in LINKS}

    def _occupy(self, link: str, start: float, seconds: float) -> None:
        super()._occupy(link, start, seconds)
        spans = self.spans[link]
        if spans and start <= spans[-1][1]:
            start = spans.pop()[0]
        spans.append((start, self._free_at[link]))


class Walk:
    """Walk over the moments of a plan: begins the transfers of each, and knows when they end."""

    def __init__(self, plan: Plan, links: PlannedLinks, moves: Iterable[Move]) -> None:
        self._links = links
        self._due: dict[int, float] = {}  # by moment: second at which its last transfer ends
        self._moves_at: dict[int, list[Move]] = {}
        for move in moves:
            self._moves_at.setdefault(move.begin, []).append(move)
        # (chunk, moment at which it is due, bytes) by the moment of its begin
        self._wires_at: dict[int, list[tuple[ChunkId, int, float]]] = {}
        for gather in plan.gathers:
            if plan.chunks[gather.chunk].num_shards > 1:
                nbytes = gathered_bytes(plan.chunks[gather.chunk])
                self._wire(gather.begin, gather.chunk, gather.use, nbytes)
        for reduction in plan.forecast.reductions:
            if plan.chunks[reduction.chunk].reduces:
                nbytes = reduced_bytes(plan.chunks[reduction.chunk])
                self._wire(reduction.last, reduction.chunk, reduction.end, nbytes)

    def _wire(self, begin: int, chunk: ChunkId, end: int, nbytes: float) -> None:
        self._wires_at.setdefault(begin, []).append((chunk, end, nbytes))

    def begin(
        self, moment: int, now: float, is_late: Callable[[Move], bool] = lambda move: False
    ) -> None:
        """Begin the moves of a moment, and its gathers and reductions, each when its chunk has
        arrived.
        is_late: moves that the caller begins later, by `transfer`."""
        arrived: dict[ChunkId, float] = {}
        for move in self._moves_at.get(moment, ()):
            if not is_late(move):
                arrived[move.chunk] = self.transfer(move, now)
        for chunk, end, nbytes in self._wires_at.get(moment, ()):
            self._must_end(end, self._links.exchange(nbytes, arrived.get(chunk, now)))

    def transfer(self, move: Move, now: float) -> float:
        """Begin a move. Returns the second at which it ends."""
        end = self._links.send(move.src, move.dst, move.nbytes, now)
        self._must_end(move.end, end)
        return end

    def _must_end(self, moment: int, done: float) -> None:
        self._due[moment] = max(self._due.get(moment, done), done)

    def reach(self, moment: int, now: float) -> float:
        """Second at which a moment may go on that comes `now`: transfers that are due at it have
        ended."""
        return max(now, self._due.pop(moment, now))


def update_seconds_of(plan: Plan, bandwidths: Bandwidths) -> dict[BlockId, float]:
    """Seconds of every block's update; empty in evaluation."""
    return {
        block.id: update_seconds(
            block.state_on(home), block.param_bytes, plan.path_of(home), bandwidths
        )
        for shard in (plan.shards if plan.kind == "train" else ())
        for block, home in zip(plan.chunks[shard.chunk].blocks, shard.state_homes, strict=True)
    }


def through(
    plan: Plan, links: PlannedLinks, bandwidths: Bandwidths, compute_seconds: Sequence[float]
) -> Iterator[float]:
    """Walk through a plan, its step after its pass. Yields the second at which each moment begins,
    then the one at which all transfers have ended. See `predict_step`."""
    updates = update_seconds_of(plan, bandwidths)
    order = plan.forecast.step_order
    at = [updates.pop(block, 0.0) for block in order]
    at.append(sum(updates.values()))  # blocks on the device are one launch
    walk, now = Walk(plan, links, plan.forecast.moves), 0.0
    for moment in range(plan.num_moments + 1):
        yield now
        walk.begin(moment, now)
        now = walk.reach(moment, now)
        if moment < plan.num_trace_moments:
            resource, seconds = "compute", compute_seconds[moment]
        elif moment < plan.num_moments:
            resource, seconds = "update", at[moment - plan.num_trace_moments]
        else:
            break
        now += seconds
        links.busy[resource] += seconds
    yield max(now, links.end)


def predict_step(plan: Plan, bandwidths: Bandwidths, compute_seconds: Sequence[float]) -> StepCost:
    """Predict an iteration whose step does all updates. compute_seconds: by moment of the trace."""
    links = PlannedLinks(bandwidths, plan.has_host_tier)
    *_, end = through(plan, links, bandwidths, compute_seconds)
    stalled = end - links.busy["compute"] - links.busy["update"]
    return StepCost(end, stalled, links.busy)


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
