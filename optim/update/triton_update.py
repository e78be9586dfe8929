"""Update on the compute device: three launches, and the host waits for none.

    measure    norm and overflow of all gradients, tile by tile
    vote       [several ranks: their totals into one vector, and one all-reduce of it]
    begin      the tiles, or the votes, to clip factor and skip flag; step counts, coefficients
               (the prologue)
    update     every segment of every shard

Step counts and the skip flag live on the device: the host neither reads nor needs them. State in
host memory is streamed: it travels to the device, is updated by the same kernel and travels back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gemini.dtypes import DTYPES
from gemini.kernels_triton import ops
from gemini.kernels_triton.control_fields import (
    BAD,
    BAD_RANK,
    MAX_NORM,
    MAX_VALUE,
    NORM,
    SUM,
    USED_SCALE,
)
from gemini.kernels_triton.launch import Launch, choose_launch, is_interpreted
from gemini.kernels_triton.norm import NORM_WARPS
from gemini.kernels_triton.quantised import CODECS
from gemini.kernels_triton.update.frame import NUM_COEFFICIENTS, NUM_HYPER
from gemini.kernels_triton.update.made import KERNELS, PlaneForm, add_kernel
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.report import Outcome, Traffic
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.state_layout import WEIGHT
from gemini.optim.state.memory import Memory, StreamMark, memory_of
from gemini.optim.state.pieces import BlockViews, Piece, Planes, Resident
from gemini.optim.state.space import Block
from gemini.ranges import named
from gemini.tickets import CopyTicket
from gemini.units import ParamId

from .launch_tables import VARIANTS, LaunchTables, TableVariants, segments_of
from .staging import DeviceStaging
from .triton_source import kernel_source

RING = 4  # hyperparameter uploads that may be in flight
UPDATE_BYTES = 28  # an element, of Adam with a master: what launches are shaped for


def kernel_of(rule: UpdateRule) -> str:
    """Key of the kernel that is made of a rule; rules that compute the same share one.

    Raises ValueError for a rule that no kernel can be made of.
    """
    try:
        source = kernel_source(rule)
    except NotImplementedError as error:
        raise ValueError(f"no kernel can be made of the rule {rule.name}: {error}") from error
    layout = rule.layout
    form = PlaneForm(
        layout.kind,
        len(layout.planes),
        next((i for i, plane in enumerate(layout.planes) if plane.keeps_ties), -1),
        sum(layout.is_under_root(plane) << i for i, plane in enumerate(layout.planes)),
        CODECS[layout.kind],
        tuple(DTYPES[plane.dtype] for plane in layout.stored().planes),
        tuple(i if shared is None else shared for i, shared in enumerate(layout.shares)),
    )
    return add_kernel(rule.name, source, form)


class TritonUpdater:
    """Updater of one rule on one device. `group_of[i]` is the param group of counter i.

    memory: allocates staging and copies state; the device's own where None.
    scaler: the control vector that kernels use; one without a loss scale where None.
    stochastic: bf16 parameters without a master are rounded at random.
    """

    name = "triton"
    keeps_blocks = False

    def __init__(
        self,
        rule: UpdateRule,
        group_of: Sequence[int],
        device: torch.device,
        control_vector: ControlVector | None = None,
        *,
        memory: Memory | None = None,
        stochastic: bool = False,
    ) -> None:
        n = len(group_of)
        self._memory = memory or memory_of(device)
        self._rule = rule
        self._kernel = kernel_of(rule)
        self._of_code = KERNELS[self._kernel].form.codec.of_code
        self._device = device
        self._stochastic = stochastic
        self.set_groups(group_of)
        self.launch: Launch | None = None  # of the update; None: chosen by what is updated
        self._hyper = torch.zeros(1, NUM_HYPER, dtype=torch.float64, device=device)
        self._hyper_rows: list[tuple[float, ...]] = []
        self._uploads: list[Tensor] = []
        self._coefficients = torch.zeros(n, NUM_COEFFICIENTS, device=device)
        self._tables: dict[object, TableVariants] = {}
        self._sums = torch.empty(0, dtype=torch.float32, device=device)
        self._bad = torch.empty(0, dtype=torch.int32, device=device)
        self._norm_tiles: list[Tensor] = []  # [tiles, segments, sums, bad], for `begin` to finish
        self._votes: Tensor | None = None  # of all ranks, for `begin` to tally
        self._signature: object | None = None  # of the views of the last step
        self._signatures: list[object] = []  # of the last steps, no two equal; the last one first
        self.staging = DeviceStaging(self._memory)
        self._moved = Traffic()
        self.outcomes: list[tuple[Tensor, StreamMark | None]] = []  # memory of those that are gone
        self.steps = torch.zeros(n, dtype=torch.int64, device=device)
        self.present = torch.ones(n, dtype=torch.float64, device=device)
        self._active = list(range(n))
        self.control_vector = control_vector or ControlVector(None, device)
        self.control = self.control_vector.tensor
        self.set_limits(Clip())

    def set_groups(self, group_of: Sequence[int]) -> None:
        """Set the param group of every counter."""
        self._groups = torch.tensor(group_of, dtype=torch.int64).to(self._device)

    def set_limits(self, clip: Clip) -> None:
        """Set the clip of the next steps."""
        self.norm_type = clip.norm_type
        self.control[MAX_NORM].fill_(clip.max_norm)
        self.control[MAX_VALUE].fill_(0.0 if math.isinf(clip.max_value) else clip.max_value)

    def set_present(self, counters: Sequence[int]) -> None:
        """Set which parameters have a gradient; the others keep their state and their count."""
        if list(counters) != self._active:
            self._active = list(counters)
            present = torch.zeros(self.present.numel(), dtype=torch.float64)
            present[self._active] = 1
            self.present.copy_(present, non_blocking=True)

    def measure(
        self, pieces: Callable[[], Sequence[Piece]] | Sequence[Piece], key: object | None = None
    ) -> None:
        """Measure norm and overflow of the pieces' gradients, tile by tile; `begin` finishes it.

        key: identity of the pieces; if it is the last measure's, so are they.
        """
        launch = Launch(ops.NORM_TILE, NORM_WARPS)
        tables = self._table("norm", pieces, None, lambda _: launch, key)
        num_tiles = tables.tiles.shape[0]
        if self._sums.numel() < num_tiles:
            self._sums = torch.empty(num_tiles, dtype=torch.float32, device=self._device)
            self._bad = torch.empty(num_tiles, dtype=torch.int32, device=self._device)
        for (_, grad_dtype), lo, hi in tables.ranges:
            ops.grad_norm(
                tables.tiles[lo:hi], tables.segments, self._sums[lo:hi], self._bad[lo:hi],
                self.control, [], grad_dtype, self.norm_type,
            )  # fmt: skip
        self.measured(
            [tables.tiles, tables.segments, self._sums[:num_tiles], self._bad[:num_tiles]]
        )

    def measured(self, norm_tiles: Sequence[Tensor]) -> None:
        """Take over tables of `ops.grad_norm`, [tiles, segments, sums, bad], for a `measure`."""
        self._norm_tiles, self._votes = list(norm_tiles), None

    def vote(self, rank: int, num_ranks: int, all_reduce: Callable[[Tensor], object]) -> None:
        """Add up the measures of all ranks, on the device; `begin` finishes it."""
        votes = torch.zeros(2 * num_ranks, dtype=torch.float64, device=self._device)
        ops.finish_norm(*self._norm_tiles, votes, rank, num_ranks + rank, self.norm_type)
        all_reduce(votes)
        self._norm_tiles, self._votes = [], votes

    def finish_measure(self) -> None:
        """Put the measure, of this rank or of all, to SUM and BAD, where `begin` finds it."""
        if self._votes is not None:
            ops.tally(self._votes, self.control, self.norm_type)
        else:
            ops.finish_norm(*self._norm_tiles, self.control, SUM, BAD, self.norm_type)
        self._norm_tiles, self._votes = [], None

    def read_measure(self) -> tuple[float, ParamId | None]:
        """Measure as the host reads it: sum of |g|^p, first bad counter. Waits for the device."""
        self.finish_measure()
        control = self.control_vector.values()
        bad = int(control[BAD])
        return control[SUM], ParamId(bad - 1) if bad else None

    def set_measure(self, power_sum: float) -> None:
        """Set the sum that all ranks agreed on, in place of this rank's measure."""
        self._norm_tiles, self._votes = [], None
        self.control[SUM].fill_(power_sum)
        self.control[BAD].zero_()

    def set_amp(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Set GradScaler's scale and overflow in place of a measure; the host waits for nothing."""
        self.set_measure(0.0)
        if grad_scale is None:
            self.control_vector.scale.fill_(1.0)
        else:
            self.control_vector.scale.copy_(grad_scale)
        if found_inf is not None:
            self.control[BAD] = found_inf.to(self.control) > 0

    def copy_from(self, other: TritonUpdater) -> None:
        """Take over what a step begins with from another updater, and its staging."""
        self._groups, self.staging = other._groups, other.staging
        self._coefficients.copy_(other._coefficients)
        self.steps.copy_(other.steps)
        self.control.copy_(other.control)

    def inputs(self) -> list[Tensor]:
        """What kernels are given of the step that was begun, but for its pieces."""
        return [self._coefficients, self.control]

    def begin(self, hypers: Sequence[object], *, with_norm: bool) -> None:
        """Make this step's coefficients. with_norm: clip and skip by the last measure."""
        self._upload([self._rule.hyper_row(hyper) for hyper in hypers])
        norm_type = self.norm_type
        if with_norm and norm_type not in (1.0, 2.0, math.inf):
            # a power of fp64 is contracted inside kernels, so torch takes the root of other orders
            if self._norm_tiles or self._votes is not None:
                self.finish_measure()
            self.control[SUM].pow_(1 / norm_type)
            norm_type = 1.0
        ops.prologue(
            self._kernel, self._groups, self._hyper, self.steps, self.present,
            self._coefficients, self.control, self._norm_tiles, with_norm, norm_type, self._votes,
        )  # fmt: skip
        self.control_vector.changed()

    def update_block(
        self, block: Block, planes: Planes, views: BlockViews, into: Planes | None = None
    ) -> CopyTicket:
        """See `Updater`. into: planes that take the new state; None: its own."""
        state = {name: plane for name, plane in planes.items() if name != WEIGHT}
        staging = self.staging
        with named("update", "block", block.id):
            staged = staging.bring_state(block.id, state)
            # Only after the planes have come: views may read the master.
            key = None if views.borrowed([block]) else self._key(views)
            tables = self._table(
                ("staged", block.id, staging.turn), lambda: views.pieces(block, staged),
                next(iter(staged.values())), self._launch_for, key,
            )  # fmt: skip
            self._run(ops.update_now, tables, staged)
            leaving = views.leaving(block, planes.get(WEIGHT))
            home = into or state
            copies = staging.take_back([*[(home[name], staged[name]) for name in state], *leaving])
        views.left(block, copies)
        nbytes = sum([plane.nbytes for plane in state.values()])
        self._moved += Traffic(host_to_device=nbytes, device_to_host=nbytes)
        return copies

    def reserve(self, count: int, *nbytes: int) -> None:
        """Reserve staging of these sizes from now on; between steps."""
        self.staging.end()
        self.staging = DeviceStaging(self._memory, count, *nbytes)
        self._tables.clear()  # with addresses of what was there

    def update_resident(self, slab: Resident, views: BlockViews) -> None:
        """Update resident blocks in one launch; blocks with borrowed memory come one by one."""
        borrowed = views.borrowed(slab.blocks)
        apart = {block.id for block in borrowed}

        def pieces() -> list[Piece]:
            own = (block for block in slab.blocks if block.id not in apart)
            return [piece for block in own for piece in views.pieces(block, slab.planes(block))]

        if len(borrowed) < len(slab.blocks):
            self._launch(("resident", slab.blocks[0].id), pieces, slab.tensors, self._key(views))
        for block in borrowed:
            if views.touches(block):
                self.staging.use(block.id)
                own = views.pieces(block, slab.planes(block))
                self._launch(("borrowed", block.id), own, slab.tensors)
                self._take_back(block, views)

    def _take_back(self, block: Block, views: BlockViews) -> None:
        """Begin to take borrowed parameters back."""
        leaving = views.leaving(block, None)
        if leaving:
            views.left(block, self.staging.take_back(leaving))

    def update(self, pieces: Sequence[Piece], slabs: Planes) -> None:
        """Update pieces on the device, whose state planes are views into `slabs`, by one step."""
        self._launch(("pieces", id(slabs)), pieces, slabs)

    def traffic(self) -> Traffic:
        return self._moved

    def _launch(
        self,
        name: object,
        pieces: Callable[[], Sequence[Piece]] | Sequence[Piece],
        slabs: Planes,
        key: object | None = None,
    ) -> None:
        first = next(iter(slabs.values()))
        self._run(ops.update, self._table(name, pieces, first, self._launch_for, key), slabs)

    def _run(self, update: Callable[..., None], tables: LaunchTables, slabs: Planes) -> None:
        planes = list(slabs.values())
        for (param_dtype, grad_dtype), lo, hi in tables.ranges:
            update(
                self._kernel, tables.tiles[lo:hi], tables.segments, self._coefficients,
                self.control, planes, [], [], param_dtype, grad_dtype, tables.launch.block,
                tables.launch.num_warps, self._stochastic, tables.marks,
            )  # fmt: skip

    def _key(self, views: BlockViews) -> object | None:
        """Signature of the views' memory: the object of an earlier step, if it is equal."""
        found = views.signature()
        if found is None:
            return None
        if found is not self._signature:
            known = next((other for other in self._signatures if other == found), found)
            others = [other for other in self._signatures if other is not known]
            self._signatures = [known, *others[: VARIANTS - 1]]
            self._signature = found
        return self._signatures[0]

    def _launch_for(self, pieces: Sequence[Piece]) -> Launch:
        if self.launch is not None:
            return self.launch
        largest = max([piece.param.numel() for piece in pieces], default=0)
        return choose_launch(UPDATE_BYTES, is_interpreted(), largest)

    def _upload(self, rows: list[tuple[float, ...]]) -> None:
        """Upload hyperparameters, from a ring so that none in flight is overwritten."""
        if rows == self._hyper_rows:
            return
        host = torch.zeros(len(rows), NUM_HYPER, dtype=torch.float64)
        for i, row in enumerate(rows):
            host[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
        if self._device.type == "cuda":
            host = host.pin_memory()
        self._uploads = [*self._uploads[-(RING - 1) :], host]
        self._hyper = host.to(self._device, non_blocking=True)
        self._hyper_rows = rows

    def _table(
        self,
        name: object,
        pieces: Callable[[], Sequence[Piece]] | Sequence[Piece],
        slab: Tensor | None,
        launch_for: Callable[[Sequence[Piece]], Launch],
        key: object | None = None,
    ) -> LaunchTables:
        """Device tables of a launch; made again only where addresses or lengths changed."""
        variants = self._tables.get(name)
        if variants is None:
            variants = self._tables[name] = TableVariants()
        tables = variants.known(key)
        if tables is None:
            found = pieces() if callable(pieces) else pieces
            keyed = segments_of(found, slab, self._memory, self._of_code)
            tables = variants.of(keyed, launch_for(found), self._device, key)
        return tables


class DeviceOutcome:
    """Outcome of a step, still on the device; reading it waits for the device once.

    Its memory goes back to the updater when it is dropped: a copy to it comes behind the last.
    """

    def __init__(self, updater: TritonUpdater, names: Sequence[str] | None) -> None:
        control, self._free = updater.control, updater.outcomes
        self._mark: StreamMark | None = None
        try:
            self._control, last = self._free.pop()
        except IndexError:
            pin = control.is_cuda
            self._control, last = torch.empty_like(control, device="cpu", pin_memory=pin), None
        if last is not None:
            last.order(torch.cuda.current_stream(control.device))
        self._control.copy_(control, non_blocking=True)
        if control.is_cuda:
            self._mark = StreamMark(torch.cuda.current_stream(control.device))
        self._names = names  # of the counters; None where nothing was measured here

    def __del__(self) -> None:
        self._free.append((self._control, self._mark))

    def ready(self) -> bool:
        return self._mark is None or self._mark.ready()

    def wait(self) -> Outcome:
        if self._mark is not None:
            self._mark.settle()
        bad = int(self._control[BAD])
        where = None
        if bad and self._names is not None:
            where = f"{self._names[bad - 1]} on rank {int(self._control[BAD_RANK])}"
        scale = float(self._control[USED_SCALE])
        return Outcome(bad > 0, float(self._control[NORM]), where, scale)
