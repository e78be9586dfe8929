"""The optimizer step over an engine's shards.

    1. every gradient is reduced, and its squares are summed
    2. all ranks agree: norm, overflow, which parameters have a gradient (one all-reduce)
    3. state on disk is updated beside its last version
    4. all ranks agree that every disk did its part (only where state is on disk)
    5. the disk versions count; what is resident is updated

Up to 5 nothing that counts has changed, so an error leaves weights and state at the last step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.placement.policy import ModelData, state_fraction_on_nvme
from gemini.tickets import Done
from gemini.units import Bytes, align_up
from optim.config import StateConfig
from optim.cpu_path import Piece
from optim.report import Outcome, StepReport, Traffic
from optim.rules import UpdateRule
from optim.space import Block, Segment, StateSpace
from optim.state_layout import MASTER, StateLayout
from optim.step_thread import StepThread
from optim.target import Group
from optim.tiered_state import TieredState
from optim.updaters import Planes, Updater

from .agreement import Agreement, Ballot
from .paths import CpuStepPath, StepPath, TritonStepPath

if TYPE_CHECKING:
    from .engine import Engine


class ShardTarget:
    """State of this rank's shards of all trainable chunks, and their update."""

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[Group],
        rule: UpdateRule,
        config: StateConfig,
    ) -> None:
        self._engine = engine
        self._rule = rule
        self._chunks = [chunk for chunk in engine.chunks if chunk.spec.trainable]
        self._group_of = _group_of(engine, groups)
        segments, base = [], 0
        for chunk in self._chunks:
            for part in engine.layout.shard_parts(chunk.spec, engine.comm.rank):
                segments.append(
                    Segment(part.param, part.param_offset, part.numel, base + part.offset)
                )
            base += chunk.spec.shard_numel
        space = StateSpace.build(
            segments, [chunk.spec.shard_numel for chunk in self._chunks], config.nvme.block_numel
        )
        has_master = any(chunk.dtype != torch.float32 for chunk in self._chunks)
        layout = rule.layout.with_master() if has_master else rule.layout
        nvme_fraction = state_fraction_on_nvme(
            engine.placement,
            self._model_data(space, layout, config.nvme.depth),
            config.nvme_fraction,
        )
        self._uses_disk = nvme_fraction > 0  # on some rank: shards are equal, blocks may not be
        self._tiers = TieredState(
            space,
            layout,
            nvme_fraction=nvme_fraction,
            nvme=config.nvme,
            device=engine.backend.device,
            label=f"rank{engine.comm.rank}-",
        )
        self._unfilled = Counter(block.shard for block in space.blocks)
        try:
            self._tiers.initialise(self._fill_master)
        except BaseException:
            self._tiers.close()
            raise
        engine.originals.clear()
        self._path: StepPath = (
            TritonStepPath(
                rule, engine.layout, layout, self._group_of, engine.comm.rank, engine.backend.device
            )
            if engine.backend.updates_by_triton
            else CpuStepPath(rule, engine.layout, engine.comm.rank, config.cpu_path)
        )
        self._thread = StepThread()
        self._num_steps = 0
        self._skipped_steps = 0

    # -- the step --

    def step(self, groups: Sequence[Group]) -> StepReport:
        engine = self._engine
        hypers = [self._rule.hyper(group) for group in groups]
        engine.end_backward()
        chunks = [chunk for chunk in self._chunks if chunk.grad is not None]
        if isinstance(self._path, TritonStepPath) and self._all_here:
            return self._step_on_device(self._path, chunks, hypers)
        agreement = self._agree(chunks)
        self._check_any(agreement.present)
        norm = math.sqrt(agreement.sum_of_squares) if agreement.nonfinite is None else math.nan
        if agreement.nonfinite is not None:
            self._skipped_steps += 1
            param, rank = agreement.nonfinite
            name = engine.layout.params[param].name
            return StepReport(Done(Outcome(True, norm, f"{name} on rank {rank}")))

        updater = self._path.begin(
            hypers, agreement.present, agreement.sum_of_squares, engine.max_norm
        )
        views = _ShardViews(self, agreement.present, hypers)
        before, stalled = self._traffic(updater), self._tiers.stalled_seconds
        engine.manager.release_all()
        try:
            self._update(updater, views, agreement)
        finally:
            engine.after_step()
        return StepReport(
            Done(Outcome(grad_norm=norm)),
            traffic=self._traffic(updater) - before,
            stalled_seconds=self._tiers.stalled_seconds - stalled,
            update_path=updater.name,
        )

    @property
    def _all_here(self) -> bool:
        """No other rank and no disk has a say in a step: the device decides alone."""
        return self._engine.comm.world_size == 1 and self._tiers.nvme is None

    @torch.no_grad()
    def _step_on_device(
        self, path: TritonStepPath, chunks: Sequence[Chunk], hypers: Sequence[Any]
    ) -> StepReport:
        """Submit norm, clip, skip and update; the host waits for nothing."""
        engine = self._engine
        self._check_any(engine.present)
        engine.manager.release_all()
        updater = path.begin_unread(chunks, hypers, engine.present, engine.max_norm)
        self._tiers.commit(updater, _ShardViews(self, engine.present, hypers), self._num_steps + 1)
        self._num_steps += 1
        engine.after_step()
        return path.report()

    @staticmethod
    def _check_any(present: Sequence[bool]) -> None:
        if not any(present):
            raise RuntimeError("step() without a gradient; call loss.backward() first")

    def _traffic(self, updater: Updater) -> Traffic:
        return self._tiers.traffic() + updater.traffic()

    def _agree(self, chunks: Sequence[Chunk]) -> Agreement:
        agreement = self._vote(chunks)
        if agreement.deviated:  # a gradient came late on some rank: reduce once more, everywhere
            self._engine.reducer.reduce_leftovers()
            agreement = self._vote([chunk for chunk in self._chunks if chunk.grad is not None])
        return agreement

    def _vote(self, chunks: Sequence[Chunk]) -> Agreement:
        total, first_nonfinite = self._path.measure(chunks)
        ballot = Ballot(
            sum_of_squares=total,
            present=tuple(self._engine.present),
            first_nonfinite=first_nonfinite,
            deviated=self._engine.reducer.leftover,
        )
        return self._exchange(ballot)

    def _exchange(self, ballot: Ballot) -> Agreement:
        comm = self._engine.comm
        vector = torch.tensor(ballot.encode(comm.rank, comm.world_size), dtype=torch.float64)
        vector = vector.to(comm.device)
        comm.all_reduce(vector).wait()
        return Agreement.decode(vector.tolist(), comm.world_size)

    @torch.no_grad()
    def _update(self, updater: Updater, views: _ShardViews, agreement: Agreement) -> None:
        error: BaseException | None = None
        try:
            self._thread.run(lambda: self._prepare(updater, views))
        except BaseException as raised:
            error = raised
        failed = self._failed_ranks(error is not None)
        if failed:
            self._thread.run(lambda: self._tiers.rollback(views))
            if error is not None:
                raise error
            raise RuntimeError(
                f"the disks of ranks {list(failed)} failed; weights and state are those of the "
                "last step on every rank. Their own errors say what happened"
            )
        self._thread.run(lambda: self._commit(updater, views, agreement))

    def _prepare(self, updater: Updater, views: _ShardViews) -> None:
        with torch.no_grad():
            self._tiers.prepare(updater, views, lambda: self._thread.interrupted)

    def _commit(self, updater: Updater, views: _ShardViews, agreement: Agreement) -> None:
        with torch.no_grad():
            self._tiers.commit(updater, views, self._num_steps + 1)
        self._num_steps += 1  # here, so that an interrupt that came meanwhile finds it done
        self._path.count(agreement.present)

    def _failed_ranks(self, failed_here: bool) -> tuple[int, ...]:
        if self._engine.comm.world_size == 1:
            return (0,) if failed_here else ()
        if not self._uses_disk:
            return ()
        ballot = Ballot(sum_of_squares=0.0, present=(), io_failed=failed_here)
        return self._exchange(ballot).io_failed

    # -- the rest of a target --

    def zero_grad(self) -> None:
        self._engine.drop_gradients()

    def offloaded_state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        return {}

    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        raise NotImplementedError

    @property
    def nvme_bytes(self) -> int:
        return self._tiers.nvme_bytes

    def close(self) -> None:
        self._tiers.close()
        self._path.close()
        self._thread.close()
        self._engine.detach()

    def _model_data(self, space: StateSpace, layout: StateLayout, depth: int) -> ModelData:
        """This rank's bytes, for the placement to decide with."""
        params = sum(chunk.shard.nbytes for chunk in self._engine.chunks)
        grads = sum(chunk.shard.nbytes for chunk in self._chunks)
        largest = max(block.numel for block in space.blocks)
        return ModelData(
            param_bytes=Bytes(params),
            grad_bytes=Bytes(grads),
            state_bytes=Bytes(layout.block_nbytes(space.numel)),
            staging_bytes=Bytes((depth + 2) * layout.block_nbytes(largest)),
        )

    def _fill_master(self, block: Block, planes: Planes) -> None:
        """Masters start as the original fp32 weights, not as the rounded ones."""
        if MASTER not in planes:
            return
        chunk = self._chunks[block.shard]
        original = self._engine.originals.get(chunk.spec.id, chunk.shard)
        inside = slice(block.shard_offset, block.shard_offset + block.numel)
        planes[MASTER].copy_(original[inside])
        self._unfilled[block.shard] -= 1
        if self._unfilled[block.shard] == 0:
            self._engine.originals.pop(chunk.spec.id, None)  # one chunk's worth twice, at most


class _ShardViews:
    """One step's view of shards and gradients; see `optim.tiered_state.BlockViews`."""

    def __init__(self, target: ShardTarget, present: Sequence[bool], hypers: Sequence[Any]) -> None:
        self._chunks = target._chunks
        self._hyper = [
            hypers[group] if group is not None and present[param] else None
            for param, group in enumerate(target._group_of)
        ]
        merges = target._path.merges_parameters
        self._merges = merges
        self._step = [step + 1 for step in target._path.steps] if merges else [0] * len(present)

    def pieces(self, block: Block, planes: Planes) -> list[Piece]:
        chunk = self._chunks[block.shard]
        if chunk.grad is None:
            return []
        state = tuple(plane for name, plane in planes.items() if name != MASTER)
        whole = Piece(
            param=chunk.shard[block.shard_offset : block.shard_offset + block.numel],
            grad=chunk.grad[block.shard_offset : block.shard_offset + block.numel],
            master=planes.get(MASTER),
            planes=state,
            hyper=None,
            step=0,
            counter=0,
        )
        return [
            whole.cut(start, end).belonging_to(hyper, step, counter)
            for start, end, hyper, step, counter in self._runs(block)
        ]

    def _runs(self, block: Block) -> list[tuple[int, int, Any, int, int]]:
        """Neighbours of one group and one step count as one run, the gaps between them included.

        Gaps hold zeros and stay zero. Runs end at multiples of 64, so an element is never in a
        vector's tail, whatever the world size and the block.
        """
        runs: list[tuple[int, int, Any, int, int]] = []
        for part in block.parts:
            hyper, step = self._hyper[part.param], self._step[part.param]
            if hyper is None:
                continue
            start, end = part.offset, min(align_up(part.offset + part.numel, 64), block.numel)
            counter: int = part.param
            if self._merges and runs and runs[-1][1] == start and runs[-1][2:4] == (hyper, step):
                start, _, _, _, counter = runs.pop()
            runs.append((start, end, hyper, step, counter))
        return runs

    def save(self, block: Block, undo: Tensor) -> None:
        undo.copy_(self._param(block))

    def restore(self, block: Block, planes: Planes) -> None:
        self._param(block).copy_(planes["param_undo"] if MASTER not in planes else planes[MASTER])

    def _param(self, block: Block) -> Tensor:
        shard = self._chunks[block.shard].shard
        return shard[block.shard_offset : block.shard_offset + block.numel]


def _group_of(engine: Engine, groups: Sequence[Group]) -> list[int | None]:
    """The param group of every parameter of the engine; None for one that is not optimized."""
    found: list[int | None] = [None] * len(engine.params)
    index_of = {id(param): i for i, param in enumerate(engine.params)}
    for index, group in enumerate(groups):
        for param in group["params"]:
            if id(param) not in index_of:
                raise ValueError(
                    f"group {index} of the optimizer has a parameter of shape {tuple(param.shape)} "
                    "that is not a parameter of the wrapped module; make the optimizer from "
                    "model.parameters()"
                )
            found[index_of[id(param)]] = index
    return found
