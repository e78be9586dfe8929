"""Update of whole matrices over blocks of their state: in, across, out.

    take in     elementwise: gradients go into the momentum; the result is a direction [n]
    exchange    of a bucket, when all its blocks here were taken in: runs go to the owners of their
                parameters in one all-to-all, are made orthogonal, and come back
    put out     elementwise: weights move along the directions, other rules update their parameters

A block that was taken in waits until the buckets of all its matrices are back. Blocks on disk wait
in their buffers: so a step reads and writes each of them once. Blocks in memory are updated when
the step counts. A bucket with blocks on some rank's disk is exchanged before that: its blocks in
memory are only read for the exchange, and taken in later.

[Note: all take part] Exchanges are collective, and come in the order of buckets on every rank. A
rank whose disk fails sends what it has until the last exchange is over, and says so in the vote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gemini.optim.rules.matrix_rule import (
    MOMENTUM,
    Intake,
    MatrixOptions,
    Outlet,
    directed,
)
from gemini.optim.rules.orthogonal import DTYPES
from gemini.optim.rules.report import Traffic
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.state.pieces import BlockViews, Planes
from gemini.optim.state.space import Block
from gemini.optim.update.cpu_update import StepInputs
from gemini.tickets import CopyTicket
from gemini.units import BlockId

from .plan import Bucket, WholeParam
from .sites import Site, update_apart

BlockInMemory = tuple[Block, Planes, bool]  # with its state, and whether that is in the host's
Returning = tuple[Block, CopyTicket | None]  # updated, and what brings it back; see `Updater`
Run = tuple[int, Tensor]  # first element of a parameter, and directions [n] from there


class Transport(Protocol):
    """Communication between the ranks that have runs of the same parameters."""

    rank: int
    world_size: int

    def all_to_all(
        self, there: Tensor, numels: Sequence[int], here: Tensor, sent: Sequence[int]
    ) -> None:
        """Exchange elements: `here` [sum of sent] goes out, `there` [sum of numels] is filled.

        sent, numels: elements to and from every rank, in their order. Collective.
        """
        ...


class LocalTransport:
    """Transport of a process that has all of every parameter."""

    rank = 0
    world_size = 1

    def all_to_all(
        self, there: Tensor, numels: Sequence[int], here: Tensor, sent: Sequence[int]
    ) -> None:
        raise AssertionError("there is nobody to send to")


@dataclass(slots=True)
class _Taken:
    """Block that was taken in.

    directions: [n], of its matrices. grads: [n] fp32 of other parameters, or None without any.
    waits_for: indices of buckets.
    """

    block: Block
    planes: Planes
    on_host: bool
    directions: Tensor
    grads: Tensor | None
    waits_for: set[int]


class MatrixUpdater:
    """Updater of the blocks of one step, with matrices updated whole.

    hyper: of every parameter; None for one that the step leaves alone.
    """

    keeps_blocks = True

    def __init__(
        self,
        site: Site,
        rule: UpdateRule,
        buckets: Sequence[Bucket],
        on_disk: Set[int],
        transports: Mapping[str, Transport],
        hyper: Sequence[Any],
    ) -> None:
        """on_disk: parameters of which a block is on some rank's disk."""
        self._site = site
        self._rule = rule
        self._transports = transports
        self._hyper = hyper
        self._in = replace(site.inputs, rounding_seed=None)  # of directions none is rounded so
        self._out = StepInputs(rounding_seed=site.inputs.rounding_seed)
        self._buckets = [bucket.only(self._is_matrix) for bucket in buckets]
        self._bucket_of = {w.param: i for i, b in enumerate(self._buckets) for w in b.whole_params}
        self._shape = {w.param: w.shape for bucket in self._buckets for w in bucket.whole_params}
        self._on_disk = [
            i
            for i, b in enumerate(buckets)
            if self._buckets[i].whole_params and any(w.param in on_disk for w in b.whole_params)
        ]
        self._to_come: dict[int, set[BlockId]] = {i: set() for i in self._on_disk}
        self._taken: dict[BlockId, _Taken] = {}
        self._runs: dict[int, list[Run]] = {}  # by parameter
        self._kept: dict[int, dict[int, Tensor]] = {}  # of blocks in memory, by first element
        self._leaving: list[CopyTicket] = []  # momenta on their way to host memory

    @property
    def name(self) -> str:
        return self._site.name

    def traffic(self) -> Traffic:
        return self._site.traffic()

    def _is_matrix(self, whole: WholeParam) -> bool:
        return isinstance(self._hyper[whole.param], MatrixOptions)

    # -- blocks on disk, before the step counts --

    def begin(
        self,
        on_disk: Sequence[Block],
        in_memory: Sequence[BlockInMemory],
        views: BlockViews,
    ) -> None:
        """Begin with this rank's blocks, on disk and in memory."""
        for block in on_disk:
            for i in sorted(self._waits_for(block, views)):
                self._to_come[i].add(block.id)
        for block, planes, on_host in in_memory:
            if self._waits_for(block, views) & self._to_come.keys():
                self._take_in(block, planes, views, on_host=on_host, looks_only=True)
        for param, runs in self._runs.items():
            if self._bucket_of[param] in self._to_come:
                self._kept[param] = dict(runs)

    def update_block(self, block: Block, planes: Planes, views: BlockViews) -> CopyTicket | None:
        """Take a block with a gradient in, or update it where none of its matrices has one."""
        waits_for = self._waits_for(block, views)
        if not waits_for:
            return update_apart(self._site, self._rule, block, planes, views, on_host=True)
        self._take_in(block, planes, views, on_host=True)
        for i in sorted(waits_for):
            self._to_come[i].discard(block.id)
        return None

    def is_waiting(self, block: Block) -> bool:
        """Whether a block was taken in, and is not put out."""
        return block.id in self._taken

    def ready(self, views: BlockViews) -> Iterator[Returning]:
        """Exchange complete buckets, in order; yields each block that is updated by that, before
        the next one. To be asked to the end."""
        # A complete bucket waits for those before it: ranks exchange all of them in one order.
        while self._on_disk and not self._to_come[self._on_disk[0]]:
            i = self._on_disk.pop(0)
            self._exchange(self._buckets[i])
            yield from self._put_out(i, views)

    def join(self) -> None:
        """Take part in the others' exchanges after a failure; see [Note: all take part]."""
        self._arrive()  # first: buffers of blocks that waited are given to others
        while self._on_disk:
            self._exchange(self._buckets[self._on_disk.pop(0)])

    # -- blocks in memory, when it counts --

    def update_in_memory(
        self, blocks: Sequence[BlockInMemory], views: BlockViews
    ) -> Iterator[Returning]:
        """Update the blocks in memory; yields each when it is done."""
        try:
            yield from self._update_in_memory(blocks, views)
        except BaseException:
            self._arrive()  # what a load writes over must not change behind it
            raise
        finally:
            self._leaving.clear()

    def _arrive(self) -> None:
        """Wait until all momenta are back in host memory."""
        while self._leaving:
            self._leaving.pop().settle()

    def _update_in_memory(
        self, blocks: Sequence[BlockInMemory], views: BlockViews
    ) -> Iterator[Returning]:
        self._taken.clear()
        self._runs.clear()
        come: dict[int, list[BlockInMemory]] = {}  # by their first bucket
        for block, planes, on_host in blocks:
            waits_for = self._waits_for(block, views)
            if waits_for:
                come.setdefault(min(waits_for), []).append((block, planes, on_host))
            elif views.touches(block):
                yield (
                    block,
                    update_apart(self._site, self._rule, block, planes, views, on_host=on_host),
                )
            else:
                yield block, None
        for i, bucket in enumerate(self._buckets):
            for block, planes, on_host in come.get(i, ()):
                self._take_in(block, planes, views, on_host=on_host)
            if i in self._to_come:
                self._bring_back(bucket)
            else:
                self._exchange(bucket)
            yield from self._put_out(i, views)

    # -- the three parts --

    def _waits_for(self, block: Block, views: BlockViews) -> set[int]:
        """Buckets of the block's matrices that have a gradient."""
        found = {self._bucket_of.get(part.param, -1) for part in block.segments} - {-1}
        return found if found and views.touches(block) else set()

    def _take_in(
        self,
        block: Block,
        planes: Planes,
        views: BlockViews,
        *,
        on_host: bool,
        looks_only: bool = False,
    ) -> None:
        site = self._site
        matrices = [part for part in block.segments if part.param in self._bucket_of]
        directions = site.zeros(block.numel, self._dtype_of([p.param for p in matrices]))
        momenta = {name: plane for name, plane in planes.items() if name == MOMENTUM.name}
        here = site.bring(block, momenta, on_host=on_host)
        pieces = views.pieces(block, here, param=directions)
        taken_in = []
        for piece in pieces:
            hyper = piece.hyper
            if isinstance(hyper, MatrixOptions):
                momentum = piece.planes[0].clone() if looks_only else piece.planes[0]
                intake = Intake(hyper.momentum, hyper.nesterov)
                taken_in.append(replace(piece, planes=(momentum,), hyper=intake))
        site.update(self._rule, taken_in, self._in)
        for part in matrices:
            run = directions[part.offset : part.offset + part.numel]
            self._runs.setdefault(part.param, []).append((part.param_offset, run))
        if looks_only:
            return
        grads = None
        if len(taken_in) < len(pieces):
            grads = site.zeros(block.numel, torch.float32)
            for piece in pieces:
                start = piece.param.storage_offset() - directions.storage_offset()
                grads[start : start + piece.grad.numel()].copy_(piece.grad)
        # Behind all that reads this set of staging: the next block there comes behind this copy, as
        # does this one when it is brought again, from where it goes now.
        copies = site.take_back(momenta, here, block, views)
        if copies is not None:
            self._leaving.append(copies)
        waits_for = self._waits_for(block, views)
        self._taken[block.id] = _Taken(block, planes, on_host, directions, grads, waits_for)

    def _dtype_of(self, params: Sequence[int]) -> torch.dtype:
        """dtype of directions: the widest, where some are iterated in fp32."""
        found = [DTYPES[self._hyper[param].dtype] for param in params]
        return max(found, key=lambda dtype: dtype.itemsize)

    def _exchange(self, bucket: Bucket) -> None:
        """Make the directions of a bucket orthogonal, in place. Collective."""
        if not bucket.whole_params:
            return
        transport = self._transports[bucket.group]
        if transport.world_size == 1:
            for whole in bucket.whole_params:
                self._direct(whole, self._here(whole, 0))
            return
        rank, ranks = transport.rank, range(transport.world_size)
        owned = [bucket.owned_by(owner) for owner in ranks]
        sent = [sum(whole.runs[rank][1] for whole in of_rank) for of_rank in owned]
        come = [sum(whole.runs[other][1] for whole in owned[rank]) for other in ranks]
        dtype = self._dtype_of([whole.param for whole in bucket.whole_params])
        out, found = self._site.zeros(sum(sent), dtype), self._site.zeros(sum(come), dtype)
        here = [run for of_rank in owned for whole in of_rank for run in self._here(whole, rank)]
        sizes = [run.numel() for run in here]
        for there, values in zip(out.split(sizes), here, strict=True):
            there.copy_(values)
        transport.all_to_all(found, come, out, sent)
        # The other ranks wait in the second exchange, so an error here must not skip it.
        try:
            self._orthogonalise(owned[rank], found, transport.world_size)
        finally:
            transport.all_to_all(out, sent, found, come)
        for there, values in zip(out.split(sizes), here, strict=True):
            values.copy_(there)

    def _here(self, whole: WholeParam, rank: int) -> list[Tensor]:
        """Directions of this rank's run of a parameter, block by block."""
        runs = [values for _, values in sorted(self._runs.get(whole.param, ()), key=_first)]
        numel = whole.runs[rank][1]
        if sum(run.numel() for run in runs) == numel:
            return runs
        return [self._site.zeros(numel, torch.bfloat16)]  # the step failed here, and others wait

    def _direct(self, whole: WholeParam, runs: Sequence[Tensor]) -> None:
        """Make the direction of a parameter orthogonal; `runs` are all of it, in order."""
        flat = runs[0] if len(runs) == 1 else torch.cat(tuple(runs))
        directed(
            self._hyper[whole.param],
            flat.as_strided(whole.shape, whole.stride, flat.storage_offset()),
            self._site.gram,
        )
        if len(runs) > 1:
            for run, values in zip(runs, flat.split([run.numel() for run in runs]), strict=True):
                run.copy_(values)

    def _orthogonalise(self, params: Sequence[WholeParam], found: Tensor, num_ranks: int) -> None:
        """Make directions orthogonal in place; `found` [n] has each rank's runs, rank by rank."""
        sizes = [whole.runs[rank][1] for rank in range(num_ranks) for whole in params]
        parts = found.split(sizes)
        for k, whole in enumerate(params):
            self._direct(whole, parts[k :: len(params)])

    def _bring_back(self, bucket: Bucket) -> None:
        """Copy directions that were exchanged before the step counted to blocks taken in now."""
        for whole in bucket.whole_params:
            for first, values in self._runs.get(whole.param, ()):
                values.copy_(self._kept[whole.param][first])

    def _put_out(self, i: int, views: BlockViews) -> Iterator[Returning]:
        """Put out the blocks that wait for no other bucket, and yield each."""
        for whole in self._buckets[i].whole_params:
            self._runs.pop(whole.param, None)
        for taken in list(self._taken.values()):
            taken.waits_for.discard(i)
            if not taken.waits_for:
                copies = self._put(taken, views)
                del self._taken[taken.block.id]
                yield taken.block, copies

    def _put(self, taken: _Taken, views: BlockViews) -> CopyTicket | None:
        block, moves = taken.block, taken.directions
        if taken.grads is not None:
            moves = taken.grads
            for part in block.segments:
                if part.param in self._bucket_of:
                    place = slice(part.offset, part.offset + part.numel)
                    moves[place].copy_(taken.directions[place])
        site, moved, others = self._site, [], []
        here = site.bring(block, taken.planes, on_host=taken.on_host)
        for piece in views.pieces(block, here, grad=moves):
            hyper = piece.hyper
            if isinstance(hyper, MatrixOptions):
                rate = hyper.rate_of(self._shape[piece.counter])
                outlet = Outlet(1 - hyper.lr * hyper.weight_decay, rate)
                moved.append(replace(piece, planes=(), hyper=outlet))
            else:
                others.append(piece)
        site.update(self._rule, moved, self._out)
        site.update(self._rule, others, site.inputs)
        return site.take_back(taken.planes, here, block, views)


def _first(run: Run) -> int:
    return run[0]
