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
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.runtime.comm.ballot import Agreement, Ballot
from gemini.runtime.edits import PendingClip
from gemini.runtime.parts import Parts
from gemini.tickets import Done
from gemini.units import ParamId
from optim.rules.clipping import Clip
from optim.rules.config import StateConfig
from optim.rules.control_vector import Scaler
from optim.rules.report import NonFiniteGradientError, Outcome, SkipLog, StepReport, Traffic
from optim.rules.rule import UpdateRule
from optim.rules.state_layout import Plane
from optim.state.held_signals import HeldSignals
from optim.state.pieces import Updater
from optim.state.state_stream import Source
from optim.step.driver import TargetStep, take
from optim.target import AmpInputs, Group

from .executors import CpuStepPath, StepPath, TritonStepPath, updated_by_kernels
from .state import ShardState, StepCalls
from .views import ShardViews
from .weights import adopt_changes, after_step


class ShardTarget(ShardState):
    """State of this rank's shards of all trainable chunks, and their update."""

    def __init__(
        self,
        parts: Parts,
        calls: StepCalls,
        groups: Sequence[Group],
        rule: UpdateRule,
        config: StateConfig,
    ) -> None:
        self._group_of = _group_of(parts, groups)  # first: it refuses what is not ours
        super().__init__(parts, calls, rule.layout, config)
        self._rule = rule
        seed = None if parts.numerics.master_weights else parts.numerics.rounding_seed
        self._path: StepPath = (
            TritonStepPath(
                rule,
                parts.layout,
                self._tiers.layout,
                self._group_of,
                parts.comm.rank,
                parts.scaler,
                parts.backend,
                stochastic=seed is not None,
            )
            if updated_by_kernels(parts.planning.plan, parts.backend)
            else CpuStepPath(
                rule,
                parts.layout,
                parts.comm,
                config.cpu_path,
                parts.scaler,
                seed,
                has_master=self.has_master,
            )
        )
        self._path.reserve(parts.planning.plan.device_staging)
        self.measure_leaving()
        parts.storage.place_gradients(parts.planning.plan, parts.chunks)
        parts.manager.ledger.state = self._tiers
        parts.manager.ledger.staging_bytes = self._staging_bytes
        parts.manager.payload_room_bytes = parts.planning.payload_room_bytes
        self._moved = parts.storage.traffic()
        self._num_steps = 0
        self._closed = False
        self._was_loaded = False
        self._log = SkipLog()

    @property
    def executor(self) -> StepPath:
        """What measures and updates."""
        return self._path

    def _staging_bytes(self) -> int:
        """Of the device."""
        return 0 if self._path.staging is None else self._path.staging.nbytes

    def measure_leaving(self) -> None:
        """Gradients that leave the device are measured as they do."""
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
        parts = self._parts
        hypers = [self._rule.hyper(group) for group in groups]
        chunks = self._reduced_chunks()
        pending = parts.pending_clip
        decided = pending is not None and pending.clip.fixed_factor is not None
        if isinstance(self._path, TritonStepPath) and self._device_decides and not decided:
            report = self._step_on_device(self._path, chunks, hypers)
        else:
            report = self._step_agreed(chunks, hypers)
        self._calls.gradients.after_step()
        self._log.add(report)
        if parts.numerics.on_nonfinite == "raise" and report.skipped:
            raise NonFiniteGradientError(
                f"the gradient of {report.nonfinite} is not finite (loss scale "
                f"{report.loss_scale:g}); weights and state are those of the last step",
                report,
            )
        return report

    def _step_agreed(self, chunks: Sequence[Chunk], hypers: Sequence[Any]) -> StepReport:
        """The host knows what all ranks found before anything is changed."""
        parts, scale = self._parts, self._parts.scaler.read().scale
        pending = parts.pending_clip or PendingClip(parts.numerics.clip)
        agreement = pending.agreement or self._agree(chunks, pending.clip.norm_type)
        self._calls.agree_on_trace()  # behind the vote: it ends where ranks ran other modules
        self._check_any(agreement.present)
        if agreement.nonfinite is not None:
            parts.scaler.stepped(overflow=True)
            param, rank = agreement.nonfinite
            where = f"{self._names[param]} on rank {rank}"
            return StepReport(Done(Outcome(True, math.nan, where, scale)))

        taken = self._taken(agreement.present)
        updater = self._path.begin(hypers, taken, agreement.power_sum, pending.clip)
        step = self._new_step(updater, hypers, taken)
        parts.manager.release_for_step()
        try:
            with HeldSignals() as held:
                parts.manager.ledger.note()
                try:
                    report = take([step], held, self._raise_what_any_rank_raised)
                except BaseException:
                    self._path.undo()
                    raise
                self._count(taken)
        finally:
            after_step(parts)
        if isinstance(self._path, CpuStepPath):
            parts.scaler.stepped(overflow=False)  # as the prologue does on a device
        norm = pending.clip.norm(agreement.power_sum) / scale
        return replace(
            report,
            outcome=Done(Outcome(grad_norm=norm, loss_scale=scale)),
            traffic=report.traffic + self._gathered_since(),
        )

    def _taken(self, present: Sequence[bool]) -> list[bool]:
        """By parameter: whether this step updates it. One in no group is left alone."""
        return [
            there and group is not None
            for there, group in zip(present, self._group_of, strict=True)
        ]

    @property
    def _device_decides(self) -> bool:
        """No disk has a say in a step, so the host need not know what it decides."""
        return not self._uses_disk and self._parts.storage.gradient_files is None

    @torch.no_grad()
    def _step_on_device(
        self, path: TritonStepPath, chunks: Sequence[Chunk], hypers: Sequence[Any]
    ) -> StepReport:
        """Submit norm, clip, skip and update; the host waits for no device."""
        parts = self._parts
        pending = parts.pending_clip or PendingClip(parts.numerics.clip)
        if pending.norm is None:
            present = self._submit_measure(path, chunks, pending.clip)
        else:
            assert pending.present is not None
            present = pending.present
        self._calls.agree_on_trace()
        parts.manager.release_for_step()
        taken = self._taken(present)
        updater = path.begin_unread(hypers, taken)
        step = self._new_step(updater, hypers, taken)
        before, _ = step.moved()
        step.confirm()
        self._count(taken)
        after_step(parts)
        traffic = step.moved()[0] - before + self._gathered_since()
        return replace(path.report(), traffic=traffic)

    def _submit_measure(
        self, path: TritonStepPath, chunks: Sequence[Chunk], clip: Clip
    ) -> tuple[bool, ...]:
        """What all ranks found is on the device; which parameters any rank has a gradient for."""
        parts, present = self._parts, tuple(self._parts.present)
        if parts.comm.world_size > 1:
            present = self._agree(chunks, None).present
            chunks = [chunk for chunk in self._chunks if chunk.gradient.exists]
        self._check_any(present)
        path.submit_measure(chunks, clip)
        path.submit_vote(parts.comm)
        return present

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
            self._parts.storage,
            self._parts.backend,
            staging=self._path.staging,
            merges=self._path.merges_parameters,
        )

    def clip(self, clip: Clip) -> Tensor | None:
        """Remember what the coming step clips to; the norm before, fp64 0-d, where one is asked.

        Of what gradients are clipped to already. Raises RuntimeError where there are none.
        """
        parts = self._parts
        chunks = self._reduced_chunks()
        if parts.numerics.max_norm > 0:
            raise RuntimeError(
                f"GeminiDDP(max_norm={parts.numerics.max_norm:g}) clips in every step; leave "
                "that away, or this call"
            )
        if parts.pending_clip is not None:
            self._calls.gradients.carry_out_clip()
        if clip.max_norm == 0 and parts.comm.world_size == 1:
            self._check_any(parts.present)
            parts.pending_clip = PendingClip(clip)
            return None
        if isinstance(self._path, TritonStepPath) and self._device_decides:
            present = self._submit_measure(self._path, chunks, clip)
            found = self._path.unread_norm(clip)
            parts.pending_clip = PendingClip(clip, found, present=present)
            return found if clip.max_norm > 0 else None
        agreement = self._agree(chunks, clip.norm_type)
        self._check_any(agreement.present)
        if clip.max_norm == 0:
            parts.pending_clip = PendingClip(clip, agreement=agreement)
            return None
        norm = clip.norm(agreement.power_sum) / parts.scaler.scale
        parts.pending_clip = PendingClip(clip, norm, agreement)
        return norm

    def _reduced_chunks(self) -> list[Chunk]:
        """Chunks that have a gradient, when all backwards have ended.

        Raises RuntimeError inside `no_sync` for gradients that no rank has reduced.
        """
        parts = self._parts
        self._calls.begin()
        if not parts.reducer.synchronise and parts.reducer.leftover:
            raise RuntimeError(
                "gradients are not reduced inside no_sync(); leave it before you step or clip"
            )
        parts.reducer.reduce_put_off()
        if parts.comm.world_size == 1 and parts.reducer.leftover:
            parts.reducer.reduce_leftovers()  # several ranks agree on it first
        return [chunk for chunk in self._chunks if chunk.gradient.exists]

    @staticmethod
    def _check_any(present: Sequence[bool]) -> None:
        if not any(present):
            raise RuntimeError("step() without a gradient; call loss.backward() first")

    def _gathered_since(self) -> Traffic:
        """Bytes of parameters and gradients since the last step: in forward and backward too."""
        before, self._moved = self._moved, self._parts.storage.traffic()
        return self._moved - before

    def _agree(self, chunks: Sequence[Chunk], norm_type: float | None) -> Agreement:
        """norm_type: None where what was measured goes from device to device."""
        agreement = self._vote(chunks, norm_type)
        if agreement.deviated:  # a gradient came late on some rank: reduce once more, everywhere
            self._parts.reducer.reduce_leftovers()
            chunks = [chunk for chunk in self._chunks if chunk.gradient.exists]
            agreement = self._vote(chunks, norm_type)
        return agreement

    def _vote(self, chunks: Sequence[Chunk], norm_type: float | None) -> Agreement:
        total, first_nonfinite = 0.0, None
        if norm_type is not None:
            total, first_nonfinite = self._path.measure(chunks, norm_type)
        log = self._parts.comm.log
        self._calls.gradients.tell_changes()
        here = [chunk.spec.id for chunk in chunks]
        log.record("votes", f"with gradients of chunks {here}")
        ballot = Ballot(
            power_sum=total,
            present=tuple(self._parts.present),
            first_nonfinite=first_nonfinite,
            deviated=self._parts.comm.world_size > 1 and self._parts.reducer.leftover,
            sequence=self._parts.comm.log.digest,
        )
        agreement = self._exchange(ballot, norm_type or 2.0)
        if agreement.sequences_differ:
            self._parts.comm.compare_logs()
        self._parts.comm.log.clear()
        return agreement

    def _exchange(self, ballot: Ballot, norm_type: float = 2.0) -> Agreement:
        """Through the host where the group reaches it, else through its store: no device waits."""
        comm = self._parts.comm
        if comm.reaches_host:
            vector = torch.tensor(ballot.encode(comm.rank, comm.world_size), dtype=torch.float64)
            comm.all_reduce(vector).wait()
            return Agreement.decode(vector.tolist(), comm.world_size, norm_type)
        said = comm.tell("votes", ballot.to_text())
        return Agreement.of(list(map(Ballot.from_text, said)), norm_type)

    def _new_step(
        self, updater: Updater, hypers: Sequence[Any], taken: Sequence[bool]
    ) -> TargetStep:
        views, files = self._views(hypers, taken), self._parts.storage.params
        return TargetStep(self._tiers, updater, views, self._num_steps + 1, files)

    def _count(self, taken: Sequence[bool]) -> None:
        """The step was taken, and has updated these parameters."""
        self._num_steps += 1
        self._path.count(taken)
        self._parts.adoption.stepped([ParamId(i) for i, there in enumerate(taken) if there])

    def _raise_what_any_rank_raised(self, error: BaseException | None) -> None:
        """This rank's own error, or one that says what the failing ranks' errors were."""
        comm = self._parts.comm
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
        parts = self._parts
        groups = zip(parts.params, self._group_of, strict=True)
        left_alone = [i for i, (p, group) in enumerate(groups) if p.requires_grad and group is None]
        if left_alone:
            self._calls.gradients.clear_but(left_alone, set_to_none)
        elif set_to_none:
            self._calls.gradients.drop()
        else:
            self._calls.gradients.zero_all()

    def set_groups(self, groups: Sequence[Group]) -> None:
        """Groups were added: the parameters in them are updated from now on."""
        self._group_of = _group_of(self._parts, groups)
        self._path.set_groups(self._group_of)

    def homes_changed(self) -> None:
        """Files may be gone, and what was read from them with them; other blocks are staged."""
        self._path.reserve(self._parts.planning.plan.device_staging)
        self._moved = self._parts.storage.traffic()

    @property
    def names(self) -> dict[int, str]:
        """Name by id of the parameter."""
        params = self._parts.params
        return {id(param): name for param, name in zip(params, self._names, strict=True)}

    @property
    def counters(self) -> Scaler:
        return self._parts.scaler

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
        parts, found = self._parts, super().offloaded_state()
        in_groups = zip(parts.params, self._group_of, strict=True)
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
            for i, param in enumerate(self._parts.params)
            if self._group_of[i] is not None
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Rank 0's whole planes and step counts. Collective."""
        if self.untouched and not self._parts.comm.gather_objects(bool(state))[0]:
            return
        self._was_loaded = True
        super().load_state(state)
        params = self._parts.params
        steps = {
            i: float(state[param]["step"])
            for i, param in enumerate(params)
            if "step" in state.get(param, {})
        }
        for i, count in self._parts.comm.gather_objects(steps)[0].items():
            self._path.counts[i] = count

    def movable(self) -> Sequence[Tensor]:
        parts = self._parts
        self._calls.begin()
        parts.manager.release_all()
        found = list(self._tiers.movable())
        for chunk in parts.chunks:
            chunk.wait_gathered()
            chunk.gradient.end_reduce()
            held = (chunk.payload, chunk.gradient.buffer, chunk.gradient.shard)
            found += [tensor for tensor in held if tensor is not None]
            if chunk.files is None:
                found.append(chunk.shard)
        return found

    @property
    def nvme_bytes(self) -> int:
        return self._tiers.nvme_bytes + self._parts.storage.file_bytes

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
                adopt_changes(self._parts)
                self.give_masters_back()
        finally:
            self._close()

    def _close(self) -> None:
        self._parts.manager.ledger.state = None
        self._parts.manager.ledger.staging_bytes = int
        self._tiers.close()
        self._path.close()
        self._calls.detach()


def _group_of(parts: Parts, groups: Sequence[Group]) -> list[int | None]:
    """The param group of every parameter of the engine; None for one that is not optimized."""
    found: list[int | None] = [None] * len(parts.params)
    index_of = {id(param): i for i, param in enumerate(parts.params)}
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
