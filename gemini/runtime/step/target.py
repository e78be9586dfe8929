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
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.runtime.comm.ballot import Agreement, Ballot
from gemini.runtime.gradients.edits import PendingClip
from gemini.tickets import Done
from optim.rules.clipping import Clip
from optim.rules.config import StateConfig
from optim.rules.control_vector import Scaler
from optim.rules.report import NonFiniteGradientError, Outcome, SkipLog, StepReport, Traffic
from optim.rules.rule import UpdateRule
from optim.rules.state_layout import Plane
from optim.state.held_signals import HeldSignals
from optim.state.pieces import Updater
from optim.state.state_stream import Source
from optim.target import AmpInputs, Group

from .executors import CpuStepPath, StepPath, TritonStepPath
from .state import ShardState
from .views import ShardViews

if TYPE_CHECKING:
    from gemini.runtime.engine import Engine


class ShardTarget(ShardState):
    """State of this rank's shards of all trainable chunks, and their update."""

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[Group],
        rule: UpdateRule,
        config: StateConfig,
    ) -> None:
        self._group_of = _group_of(engine, groups)  # first: it refuses what is not ours
        super().__init__(engine, rule.layout, config)
        self._rule = rule
        seed = None if engine.numerics.master_weights else engine.numerics.rounding_seed
        self._path: StepPath = (
            TritonStepPath(
                rule,
                engine.layout,
                self._tiers.layout,
                self._group_of,
                engine.comm.rank,
                engine.scaler,
                engine.backend,
                stochastic=seed is not None,
            )
            if engine.backend.updates_by_triton
            else CpuStepPath(
                rule,
                engine.layout,
                engine.comm,
                config.cpu_path,
                engine.scaler,
                seed,
                has_master=self.has_master,
            )
        )
        self.measure_leaving()
        engine.storage.place_gradients(engine.planning.plan, engine.chunks)
        engine.manager.ledger.state = self._tiers
        engine.manager.payload_room_bytes = engine.planning.payload_room_bytes
        self._moved = engine.storage.traffic()
        self._num_steps = 0
        self._closed = False
        self._was_loaded = False
        self._log = SkipLog()

    def measure_leaving(self) -> None:
        """Gradients that leave the device are measured as they do."""
        if isinstance(self._path, CpuStepPath):
            for chunk in self._chunks:
                chunk.gradient.measure = partial(self._path.measure_leaving, chunk)

    # -- the step --

    def step(self, groups: Sequence[Group], amp: AmpInputs | None = None) -> StepReport:
        if amp is not None:
            raise RuntimeError(
                'torch.amp.GradScaler is for plain modules; GeminiDDP(precision="fp16") has a '
                "loss scale of its own, so call loss.backward() and optimizer.step()"
            )
        if self._closed:
            raise RuntimeError(
                "the module of this optimizer was unwrapped; wrap it again and make another"
            )
        engine = self._engine
        hypers = [self._rule.hyper(group) for group in groups]
        chunks = self._reduced_chunks()
        pending = engine.pending_clip
        decided = pending is not None and pending.clip.fixed_factor is not None
        if isinstance(self._path, TritonStepPath) and self._all_here(chunks) and not decided:
            report = self._step_on_device(self._path, chunks, hypers)
        else:
            report = self._step_agreed(chunks, hypers)
        engine.after_stepping()
        self._log.add(report)
        if engine.numerics.on_nonfinite == "raise" and report.skipped:
            raise NonFiniteGradientError(
                f"the gradient of {report.nonfinite} is not finite (loss scale "
                f"{report.loss_scale:g}); weights and state are those of the last step",
                report,
            )
        return report

    def _step_agreed(self, chunks: Sequence[Chunk], hypers: Sequence[Any]) -> StepReport:
        """The host knows what all ranks found before anything is changed."""
        engine, scale = self._engine, self._engine.scaler.read().scale
        pending = engine.pending_clip or PendingClip(engine.numerics.clip)
        agreement = pending.agreement or self._agree(chunks, pending.clip.norm_type)
        engine.agree_on_trace()  # behind the vote, which ends where ranks ran different modules
        self._check_any(agreement.present)
        if agreement.nonfinite is not None:
            engine.scaler.stepped(overflow=True)
            param, rank = agreement.nonfinite
            where = f"{self._names[param]} on rank {rank}"
            return StepReport(Done(Outcome(True, math.nan, where, scale)))

        taken = self._taken(agreement.present)
        updater = self._path.begin(hypers, taken, agreement.power_sum, pending.clip)
        views = self._views(hypers, taken)
        before, stalled = self._traffic(updater), self._tiers.stalled_seconds
        engine.manager.release_for_step()
        try:
            with HeldSignals() as held:
                engine.manager.ledger.note()
                self._update(updater, views, agreement, held)
        finally:
            engine.after_step()
        if isinstance(self._path, CpuStepPath):
            engine.scaler.stepped(overflow=False)  # as the prologue does on a device
        norm = pending.clip.norm(agreement.power_sum) / scale
        return StepReport(
            Done(Outcome(grad_norm=norm, loss_scale=scale)),
            traffic=self._traffic(updater) - before + self._gathered_since(),
            stalled_seconds=self._tiers.stalled_seconds - stalled,
            nvme_written_total=self._tiers.nvme_written_total,
            update_path=updater.name,
        )

    def _taken(self, present: Sequence[bool]) -> list[bool]:
        """By parameter: whether this step updates it. One in no group is left alone."""
        return [
            there and group is not None
            for there, group in zip(present, self._group_of, strict=True)
        ]

    def _all_here(self, chunks: Sequence[Chunk]) -> bool:
        """No other rank and no disk has a say in a step: the device decides alone."""
        return (
            self._engine.comm.world_size == 1
            and self._tiers.nvme is None
            and all(chunk.grad is not None for chunk in chunks)
        )

    @torch.no_grad()
    def _step_on_device(
        self, path: TritonStepPath, chunks: Sequence[Chunk], hypers: Sequence[Any]
    ) -> StepReport:
        """Submit norm, clip, skip and update; the host waits for nothing."""
        engine = self._engine
        self._check_any(engine.present)
        engine.manager.release_for_step()
        pending = engine.pending_clip or PendingClip(engine.numerics.clip)
        if pending.norm is None:
            path.submit_measure(chunks, pending.clip)
        taken = self._taken(engine.present)
        updater = path.begin_unread(hypers, taken)
        self._tiers.commit(updater, self._views(hypers, taken), self._num_steps + 1)
        self._num_steps += 1
        engine.weights_changed(taken)
        engine.after_step()
        return path.report()

    def _views(self, hypers: Sequence[Any], taken: Sequence[bool]) -> ShardViews:
        hyper = [
            hypers[group] if taken[param] and group is not None else None
            for param, group in enumerate(self._group_of)
        ]
        on_host = isinstance(self._path, CpuStepPath)
        steps = [step + 1 for step in self._path.steps] if on_host else [0] * len(hyper)
        return ShardViews(
            self._chunks,
            hyper,
            steps,
            self._engine.storage,
            self._engine.backend,
            on_device=not on_host,
            merges=self._path.merges_parameters,
        )

    def clip(self, clip: Clip) -> Tensor | None:
        """Remember what the coming step clips to; the norm before, fp64 0-d, where one is asked.

        Raises RuntimeError where gradients are clipped already, or there are none.
        """
        engine = self._engine
        chunks = self._reduced_chunks()
        if engine.pending_clip is not None:
            raise RuntimeError(
                "gradients were clipped already since the last step; a step clips once, "
                "by norm or by value"
            )
        if engine.numerics.max_norm > 0:
            raise RuntimeError(
                f"GeminiDDP(max_norm={engine.numerics.max_norm:g}) clips in every step; leave "
                "that away, or this call"
            )
        if clip.max_norm == 0:
            self._check_any(engine.present)
            engine.pending_clip = PendingClip(clip)
            return None
        if isinstance(self._path, TritonStepPath) and self._all_here(chunks):
            self._check_any(engine.present)
            self._path.submit_measure(chunks, clip)
            engine.pending_clip = PendingClip(clip, self._path.unread_norm(clip))
            return engine.pending_clip.norm
        agreement = self._agree(chunks, clip.norm_type)
        self._check_any(agreement.present)
        norm = clip.norm(agreement.power_sum) / engine.scaler.scale
        engine.pending_clip = PendingClip(clip, norm, agreement)
        return norm

    def _reduced_chunks(self) -> list[Chunk]:
        """Chunks that have a gradient, when all backwards have ended.

        Raises RuntimeError inside `no_sync` for gradients that no rank has reduced.
        """
        engine = self._engine
        engine.begin_step()
        if engine.reducer.leftover and not engine.reducer.synchronise:
            raise RuntimeError(
                "gradients are not reduced inside no_sync(); leave it before you step or clip"
            )
        engine.reducer.reduce_put_off()
        if engine.reducer.leftover and engine.comm.world_size == 1:
            engine.reducer.reduce_leftovers()  # several ranks agree on it first
        return [chunk for chunk in self._chunks if chunk.gradient.exists]

    @staticmethod
    def _check_any(present: Sequence[bool]) -> None:
        if not any(present):
            raise RuntimeError("step() without a gradient; call loss.backward() first")

    def _traffic(self, updater: Updater) -> Traffic:
        return self._tiers.traffic() + updater.traffic()

    def _gathered_since(self) -> Traffic:
        """Bytes of parameters and gradients since the last step: in forward and backward too."""
        before, self._moved = self._moved, self._engine.storage.traffic()
        return self._moved - before

    def _agree(self, chunks: Sequence[Chunk], norm_type: float) -> Agreement:
        agreement = self._vote(chunks, norm_type)
        if agreement.deviated:  # a gradient came late on some rank: reduce once more, everywhere
            self._engine.reducer.reduce_leftovers()
            chunks = [chunk for chunk in self._chunks if chunk.gradient.exists]
            agreement = self._vote(chunks, norm_type)
        return agreement

    def _vote(self, chunks: Sequence[Chunk], norm_type: float) -> Agreement:
        total, first_nonfinite = self._path.measure(chunks, norm_type)
        engine, log = self._engine, self._engine.comm.log
        engine.gradients.tell_changes()
        here = [chunk.spec.id for chunk in self._chunks if chunk.gradient.exists]
        log.record("votes", f"with gradients of chunks {here}")
        ballot = Ballot(
            power_sum=total,
            present=tuple(self._engine.present),
            first_nonfinite=first_nonfinite,
            deviated=self._engine.reducer.leftover,
            sequence=self._engine.comm.log.digest,
        )
        agreement = self._exchange(ballot, norm_type)
        if agreement.sequences_differ:
            self._engine.comm.compare_logs()
        self._engine.comm.log.clear()
        return agreement

    def _exchange(self, ballot: Ballot, norm_type: float = 2.0) -> Agreement:
        comm = self._engine.comm
        vector = torch.tensor(ballot.encode(comm.rank, comm.world_size), dtype=torch.float64)
        vector = vector.to(comm.device)
        comm.all_reduce(vector).wait()
        return Agreement.decode(vector.tolist(), comm.world_size, norm_type)

    @torch.no_grad()
    def _update(
        self, updater: Updater, views: ShardViews, agreement: Agreement, held: HeldSignals
    ) -> None:
        error: BaseException | None = None
        files = self._engine.storage.params
        try:
            if files is not None:
                also = self._tiers.nvme.written_bytes_per_step if self._tiers.nvme else 0
                files.store.check_step(files.written_bytes_per_step + also)
            self._tiers.prepare(updater, views, lambda: held.pending)
            if files is not None:
                files.flush()
        except BaseException as raised:
            error = raised
        try:
            self._raise_what_any_rank_raised(error)
        except BaseException:
            views.abandon()
            if files is not None:
                files.rollback()
            self._tiers.rollback(views)
            self._path.undo()
            raise
        if files is not None:  # before the state: `recover` finds the step before in either file
            files.commit(self._num_steps + 1)
        self._tiers.commit(updater, views, self._num_steps + 1)
        self._num_steps += 1
        taken = self._taken(agreement.present)
        self._path.count(taken)
        self._engine.weights_changed(taken)

    def _raise_what_any_rank_raised(self, error: BaseException | None) -> None:
        """This rank's own error, or one that says what the failing ranks' errors were."""
        comm = self._engine.comm
        if comm.world_size > 1 and self._uses_disk:
            ballot = Ballot(power_sum=0.0, present=(), io_failed=error is not None)
            failed = self._exchange(ballot).io_failed
            if failed:
                said = comm.gather_objects(str(error))
            if failed and error is None:
                raise RuntimeError(
                    f"the disks of ranks {list(failed)} failed; weights and state are those of "
                    "the last step on every rank. "
                    + "; ".join(f"rank {rank}: {said[rank]}" for rank in failed)
                )
        if error is not None:
            raise error

    # -- the rest of a target --

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Those of parameters in no group stay, as with torch's optimizers."""
        engine = self._engine
        groups = zip(engine.params, self._group_of, strict=True)
        left_alone = [i for i, (p, group) in enumerate(groups) if p.requires_grad and group is None]
        if left_alone:
            engine.gradients.clear_but(left_alone, set_to_none)
        elif set_to_none:
            engine.drop_gradients()
        else:
            engine.zero_gradients()

    def set_groups(self, groups: Sequence[Group]) -> None:
        """Groups were added: the parameters in them are updated from now on."""
        self._group_of = _group_of(self._engine, groups)
        self._path.set_groups(self._group_of)

    def homes_changed(self) -> None:
        """Files may be gone, and what was read from them with them."""
        self._moved = self._engine.storage.traffic()

    @property
    def names(self) -> dict[int, str]:
        """Name by id of the parameter."""
        params = self._engine.params
        return {id(param): name for param, name in zip(params, self._names, strict=True)}

    @property
    def counters(self) -> Scaler:
        return self._engine.scaler

    @property
    def pinned_seconds(self) -> float:
        """That steps waited for an asynchronous save to read what they overwrite."""
        return self._tiers.nvme.store.pinned_seconds if self._tiers.nvme is not None else 0.0

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Of the state of every parameter, its master first where there is one."""
        return self._tiers.layout.planes

    @property
    def has_master(self) -> bool:
        return self._tiers.layout.has_master

    def offloaded_state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """Whole planes of parameters in groups on rank 0, nothing elsewhere. Collective."""
        engine, found = self._engine, super().offloaded_state()
        in_groups = zip(engine.params, self._group_of, strict=True)
        return {p: found[p] for p, group in in_groups if group is not None and p in found}

    @property
    def untouched(self) -> bool:
        """No step was taken and nothing loaded: moments and counts are zero."""
        return self._num_steps == 0 and not self._was_loaded

    @torch.no_grad()
    def fill_state(self, source: Source) -> None:
        self._was_loaded = True
        super().fill_state(source)

    def shown_state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """Step counts, as views; the rest is in shards."""
        counts = self._path.counts
        return {
            param: {"step": counts[i]}
            for i, param in enumerate(self._engine.params)
            if self._group_of[i] is not None
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Rank 0's whole planes and step counts. Collective."""
        if self.untouched and not self._engine.comm.gather_objects(bool(state))[0]:
            return
        self._was_loaded = True
        super().load_state(state)
        params = self._engine.params
        steps = {
            i: float(state[param]["step"])
            for i, param in enumerate(params)
            if "step" in state.get(param, {})
        }
        for i, count in self._engine.comm.gather_objects(steps)[0].items():
            self._path.counts[i] = count

    def movable(self) -> Sequence[Tensor]:
        engine = self._engine
        engine.begin_step()
        engine.manager.release_all()
        found = list(self._tiers.movable())
        for chunk in engine.chunks:
            chunk.wait_gathered()
            chunk.gradient.end_reduce()
            held = (chunk.payload, chunk.gradient.buffer, chunk.gradient.shard)
            found += [tensor for tensor in held if tensor is not None]
            if chunk.files is None:
                found.append(chunk.shard)
        return found

    @property
    def nvme_bytes(self) -> int:
        return self._tiers.nvme_bytes + self._engine.storage.file_bytes

    @property
    def step_counts(self) -> Sequence[int]:
        """How often each parameter was updated."""
        return self._path.steps

    def close(self, keep_masters: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if keep_masters:
                self._engine.adopt_changes()
                self.give_masters_back()
        finally:
            self._close()

    def _close(self) -> None:
        self._engine.manager.ledger.state = None
        self._tiers.close()
        self._path.close()
        self._engine.detach()


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
