"""Optimizer step over an engine's shards.

    1. every gradient is reduced, and its squares are summed
    2. all ranks agree: norm, overflow, which parameters have a gradient (one all-reduce)
    3. state on disk is updated next to its last version
    4. all ranks agree that every disk did its part (only where state is on disk)
    5. the disk versions count; what is resident is updated

Up to 5 nothing that counts has changed, so an error leaves weights and state at the last step.
3 to 5 are done when `step()` returns, or go on after it: `gemini.runtime.step.tail`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.comm.ballot import Agreement
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.report import Skips, StepReport, Traffic
from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.deferred_signals import TailSignals
from gemini.optim.state.pieces import Planes, Updater
from gemini.optim.state.space import Block
from gemini.optim.state.state_stream import BlockFiller, StateStream, inside
from gemini.optim.step.driver import Agree, Step, alone, take_step
from gemini.optim.step.executor import Executor
from gemini.optim.target import AmpInputs, Group
from gemini.optim.update.cpu_update import StepInputs
from gemini.placement.plan import Plan
from gemini.placement.timetable.updates import is_early
from gemini.runtime.gradients.cycle import GradientCycle
from gemini.runtime.sharding import Sharding
from gemini.units import ChunkId, ParamId

from .agreement import raise_first, raise_what_any_rank_raised
from .executors import reserve_staging
from .gradients import StepGradients, check_any
from .state.shard_blocks import Shards
from .state.shard_state import ShardState, param_groups_of
from .views import ShardViews

if TYPE_CHECKING:
    from gemini.optim.state.disk.state_version import StateVersion
    from gemini.optim.step.executor import AnyUpdater
    from gemini.optim.step.measuring import ParamAndGrad
    from gemini.optim.step.triton_step import TritonStep

    from .early import EarlySpans

log = logging.getLogger("gemini")


class ShardTarget(ShardState):
    """Target of one engine: state of this rank's shards of all trainable chunks, and its update."""

    _early: EarlySpans | None = None
    joint: Any = None  # what steps it with other modules; None: it steps alone

    def _begin(self) -> None:
        sharding, storage, plan = self._sharding, self._storage, self._planning.plan
        try:
            reserve_staging(self._executor, plan)
            kind: type[StepGradients] = StepGradients
            if sharding.is_canonical:
                from .canonical import CanonicalGradients as kind
            self.gradients = kind(sharding, self._cycle, self._calls, self._executor, self._chunks)
            storage.place_gradients(plan, sharding.chunks)
        except BaseException:
            self._close()
            raise
        self._ledger.count_state(self._tiered_state, self._staging_bytes)
        self._moved, self._closed = storage.traffic(), False
        # ranks skip together, and one of them tells
        most = sharding.precision_settings.most_skipped
        self._skips = Skips(*most, tells=sharding.comm.rank == 0)
        if is_early(self._overlap.asked) and self.by_kernels:
            from .early import EarlySpans

            executor = cast("TritonStep", self._executor)
            self._early = EarlySpans(
                self._cycle.reducer, storage, sharding.backend, self._events, self._overlap,
                self._tiered_state, self._chunks, executor, self.hypers, self._by_param,
            )  # fmt: skip
        self.device_may_decide = not sharding.is_canonical  # False: hosts agree in every step

    @property
    def sharding(self) -> Sharding:
        """Sharding of the module whose shards these are."""
        return self._sharding

    @property
    def cycle(self) -> GradientCycle:
        """Which gradients there are, and the clip of the coming step."""
        return self._cycle

    @property
    def stage(self) -> tuple[int, int] | None:
        """Stage of a pipeline that the module is, with their number; None: it is none."""
        return self._passes.stage

    @property
    def executor(self) -> Executor:
        """Executor that measures gradients and updates shards."""
        return self._executor

    def _staging_bytes(self) -> int:
        return 0 if self._executor.staging is None else self._executor.staging.nbytes

    # -- the step --

    def step(
        self, together: Sequence[ShardTarget], groups: Sequence[Group], amp: AmpInputs | None
    ) -> StepReport:
        if self.joint is not None:
            return cast("StepReport", self.joint.step(groups, amp))
        self.check_step(amp)
        hypers, chunks = self.hypers(groups), self.gradients.reduced()
        device, pending = self._deciding_device, self._cycle.pending_clip
        decided = pending is not None and pending.clip.fixed_factor is not None
        if device is not None and not decided:
            report = self._step_on_device(device, chunks, hypers)
        else:
            report = self._step_agreed(chunks, hypers)
        self.gradients.used()
        if self._early is not None:
            self._early.stepped(groups)
        return self.reported(report)

    def check_step(self, amp: AmpInputs | None) -> None:
        """Raise RuntimeError for a step that cannot be taken."""
        if amp is not None:
            raise RuntimeError(
                'torch.amp.GradScaler is for plain modules; GeminiDDP(precision="fp16") has a '
                "loss scale of its own, so call loss.backward() and optimizer.step()"
            )
        if self._closed:
            raise RuntimeError(
                "the module of this optimizer was unwrapped; wrap it again and make another"
            )
        torn = self._tiered_state.torn
        if torn is not None:
            raise RuntimeError(
                "a step ended in the middle of its update, so weights and state in memory are of "
                f"two steps; load a checkpoint. It ended with {type(torn).__name__}: {torn}"
            ) from torn

    def _step_agreed(self, chunks: Sequence[Chunk], hypers: Sequence[Any]) -> StepReport:
        """Take a step whose agreement the host reads before anything is changed."""
        pending = self.gradients.pending_clip
        agreement = pending.agreement or self.gradients.agree(chunks, pending.clip.norm_type)
        self.agree_on_trace()  # behind the vote: it ends where ranks ran other modules
        check_any(agreement.present)
        if agreement.nonfinite is not None:
            param, rank = agreement.nonfinite
            return self.skipped(f"{self._names[param]} on rank {rank}", self.scale)
        step = self.agreed_step(hypers, pending.clip, agreement)
        agree = partial(raise_what_any_rank_raised, self._sharding, uses_disk=self._uses_disk)
        return self._carry_out(step, agree)

    def _carry_out(self, step: Step, agree: Agree = alone) -> StepReport:
        is_tail = cast("ShardViews", step.views).goes_on  # asked once: see `_views`
        return self._begin_tail(step, agree) if is_tail else take_step([step], agree)

    def _begin_tail(self, step: Step, agree: Agree) -> StepReport:
        """Carry a step out after this call, which returns when no budget and no rank is against it.

        The host's counts are raised now, and taken back where the tail fails.
        """
        self.before_step()
        # Until the tail has ended a signal would leave the step half done, so it waits.
        signals = TailSignals()
        signals.hold()
        error: BaseException | None = None
        try:
            step.submit()
        except BaseException as raised:
            error = raised
        try:
            agree(error)
        except BaseException:
            step.undo()
            self.undo()
            signals.release()
            signals.put_back()
            raise
        outcome, forget = self.outcome(), self._counted()
        self.count(step)
        behind = self._tail.begin(step, self._tiered_state, self._chunks, signals, forget)
        self.after_step()
        return StepReport(
            outcome,
            self.gathered_since(),
            nvme_written_total=step.written_total,
            update_path=step.updater.name,
            behind=behind,
        )

    def _counted(self) -> Callable[[], None]:
        """Function that restores the counts of steps and the loss scale as they are now."""
        number = self._num_steps
        now = [*self._small_state, self._cycle.control_vector.tensor]
        before = [tensor.clone() for tensor in now]

        def put_back() -> None:
            self._num_steps = number
            for tensor, value in zip(now, before, strict=True):
                tensor.copy_(value)
            self.undo()  # what its prologue has counted

        return put_back

    def agree_on_trace(self) -> None:
        """Plan with what all ranks measured. Collective, after the vote."""
        self._calls.agree_on_trace()

    @property
    def scale(self) -> float:
        """Loss scale of the gradients. Waits for the device."""
        return self._cycle.control_vector.read().scale

    def agreed_step(self, hypers: Sequence[Any], clip: Clip, agreement: Agreement) -> Step:
        """Begin the step that all ranks agreed on; nothing that counts has changed."""
        if self.kept_steps is not None:
            self.kept_steps.begin_step(self._small_state)
        power_sum, taken = agreement.power_sum, self._taken(agreement.present)

        def show() -> tuple[ParamAndGrad, StepInputs]:
            from .state.shard_param_and_grad import ShardParamAndGrad

            param_and_grad = ShardParamAndGrad(self._sharding, self._chunks, clip.norm(power_sum))
            return param_and_grad, StepInputs.clipping(clip, power_sum, self.scale)

        by_param, hypers = self._told(hypers, taken, show)
        updater = self._executor.begin(hypers, taken, power_sum, clip)
        return self._new_step(updater, self._views(by_param), taken)

    def _taken(self, present: Sequence[bool]) -> list[ParamId]:
        """Parameters that this step updates: present and in a group."""
        return [
            ParamId(i)
            for i, (there, group) in enumerate(zip(present, self._group_of, strict=True))
            if there and group is not None
        ]

    @property
    def _deciding_device(self) -> TritonStep | None:
        """Executor of the device if it decides a step alone: no disk and no replica has a say."""
        has_files = self._storage.gradient_files is not None
        asks_host = self._uses_disk or has_files or self._sharding.scope.replicas
        decides = self.device_may_decide and not (asks_host or self.needs_wholes)
        on_device = decides and self._executor.staging is not None
        return cast("TritonStep", self._executor) if on_device else None

    @torch.no_grad()
    def _step_on_device(
        self, executor: TritonStep, chunks: Sequence[Chunk], hypers: Sequence[Any]
    ) -> StepReport:
        """Submit norm, clip, skip and update; the host waits for no device."""
        pending = self.gradients.pending_clip
        if pending.norm is None:
            present = self.gradients.submit_measure(executor, chunks, pending.clip)
        else:
            assert pending.present is not None
            present = pending.present
        self._calls.agree_on_trace()
        taken = self._taken(present)
        updater = executor.begin_unread(hypers, taken)
        views = self._views(self._by_param(hypers, taken))
        return self._carry_out(self._new_step(updater, views, taken))

    def _views(self, by_param: Sequence[Any]) -> ShardViews:
        """Views of a step. Whether it goes on behind `step()` is asked once, here, as the plan's
        choice may change during the step."""
        goes_on, staging, nvme = self._tail.applies, self._executor.staging, self._tiered_state.nvme
        if staging is not None:
            staging.begin(waits=goes_on)
        return ShardViews(
            self._chunks,
            by_param,
            self._executor.next_steps(),
            self._storage,
            self._sharding.backend,
            staging=staging,
            merges=self._executor.merges_parameters,
            goes_on=goes_on,
            num_waiting=0 if nvme is None else nvme.num_waiting,
        )

    def clip(self, together: Sequence[ShardTarget], clip: Clip) -> Tensor | None:
        """Clip the coming step's gradients; returns the norm before, fp64 0-d, if one is asked."""
        if self.joint is None:
            return self.gradients.clip(clip, self._deciding_device)
        return cast("Tensor | None", self.joint.clip(clip))

    def gathered_since(self) -> Traffic:
        """Bytes of parameters and gradients moved since the last step, also in its passes."""
        before, self._moved = self._moved, self._storage.traffic()
        return self._moved - before

    def _new_step(self, updater: AnyUpdater, views: ShardViews, taken: Sequence[ParamId]) -> Step:
        params = self._storage.params
        files = None if params is None else (params.store, params.written_bytes_per_step)
        if self._early is not None:
            updater = self._early.agreed(cast("Updater", updater), taken)
        # In order, the first blocks are read ahead; their gradients are the last to be final.
        return Step(
            self._tiered_state, updater, views, self._num_steps + 1, files,
            in_order=self._tail.applies, target=self, taken=taken,
        )  # fmt: skip

    def undo(self) -> None:
        super().undo()
        if self._early is not None:
            self._early.undone()

    def before_step(self) -> None:
        self._manager.release_for_step()
        self._ledger.note()

    def count(self, step: Step) -> None:
        super().count(step)
        if self.kept_steps is not None:
            self.kept_steps.end_step()
        self._weights.user_writes.stepped(step.taken, self._storage.changed)
        if self._executor.counts_on_host:  # else the prologue did
            self._cycle.control_vector.stepped(overflow=False)

    def after_step(self) -> None:
        self._weights.after_step()

    # -- run by run --

    def streams(self, names: Mapping[int, str]) -> Sequence[StateStream]:
        """Stream of this rank's state. What is filled is followed by weights. Not collective."""
        slots = (slot for chunk in self._chunks for slot in chunk.spec.slots)
        own = [names[id(param)] for param in self._sharding.params]
        params = [slot.param for slot in slots]
        return [StateStream(self.tiered_state, own, params, self._overwrite)]

    def pin_state(self, witness: Path) -> tuple[StateVersion, Callable[[], None]]:
        """Keep this rank's state on disk as it is now, while `witness` is there. Not collective.

        Returns its version, and what is to be called when the witness is there, or nobody will make
        it. Raises OSError where that cannot be said beside the store's files.
        """
        nvme = self.tiered_state.nvme
        assert nvme is not None
        pin = nvme.store.pin_last(witness)
        return nvme.version(pin.index), partial(nvme.store.versions.settle, pin)

    @contextmanager
    def _changing(self) -> Iterator[Shards]:
        """Context that changes masters, and shards with them: all of it or nothing."""
        self._manager.release_all()
        shards = Shards(self._chunks)
        try:
            with self.shards_with_masters():
                yield shards
            shards.end()
        finally:
            self._weights.after_step()

    def _overwrite(self, fill: BlockFiller, whole: bool) -> None:
        """Overwrite all blocks. Weights follow the masters."""
        self._loading()
        with self._changing() as shards:

            def fill_and_follow(block: Block, planes: Planes) -> None:
                fill(block, planes)
                shards.store_master(block, planes)

            self.tiered_state.overwrite(fill_and_follow, whole=whole)
        self._tiered_state.torn = None

    @torch.no_grad()
    def blend(self, plane: str, weights: Sequence[float]) -> None:
        """See `Target.blend`: masters where they are, and shards follow. Not collective."""
        self._weights.write_back_changes()
        shares = self._shares(weights)
        with self._changing() as shards:

            def move(block: Block, planes: Planes) -> None:
                exact = shards.exact(block, planes)
                for part in block.segments:
                    if shares[part.param]:
                        here = exact[inside(part)]
                        here.add_(planes[plane][inside(part)].sub(here).mul_(shares[part.param]))
                shards.store(block, exact)

            self.tiered_state.overwrite(move)

    @torch.no_grad()
    def rewind(self, steps: int) -> None:
        """See `GeminiDDP.rewind`. Collective."""
        steps_kept = self.kept_steps
        self._weights.write_back_changes()
        state, error = self.tiered_state, None
        try:
            if steps_kept is None:
                raise RuntimeError(
                    "rewind() of an optimizer that keeps no steps; make it with "
                    "nvme_offload_fraction=1.0 and nvme=NvmeConfig(keep_versions=...)"
                )
            commits, memory = steps_kept.check(steps)
        except Exception as raised:
            error = raised
        raise_first(
            self._sharding.comm.gather_objects(None if error is None else str(error)), error
        )
        assert steps_kept is not None
        self._manager.release_all()
        try:
            shards = Shards(self._chunks, self._sharding.backend)
            steps_kept.nvme.rewind(steps)
            state.visit(shards.store_master)
            steps_kept.nvme.load_weights(commits, shards.store)
            shards.end()
            steps_kept.put_back(memory, self._small_state)
            state.torn = None
        except BaseException as raised:
            state.torn = raised
            raise
        finally:
            self._weights.after_step()

    def _loading(self) -> None:
        self._was_loaded = True
        if self.kept_steps is not None:
            self.kept_steps.forget()

    # -- whole planes --

    def offloaded_state(self, cut: bool) -> Mapping[Tensor, dict[str, Tensor]]:
        """Whole planes of parameters in groups on rank 0, nothing elsewhere; or DTensors on every
        rank. Collective."""
        from .state.full_state import gather_state

        self._calls.meet("optimizer.state_dict()")
        whole = gather_state(self._sharding, self.tiered_state, self._chunks, cut=cut)
        return {
            param: whole[self._names[i]]
            for i, param in enumerate(self._sharding.params)
            if self._group_of[i] is not None and self._names[i] in whole
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Rank 0's whole planes and step counts; no weight changes. Collective."""
        comm = self._sharding.comm
        if self.untouched and not comm.gather_objects(bool(state))[0]:
            return
        self._loading()
        self._load_planes(state)
        self._tiered_state.torn = None
        names = ("step", *self._rule.carried)
        whole = {
            i: {name: value for name, value in state[param].items() if name in names}
            for i, param in enumerate(self._sharding.params)
            if param in state
        }
        self._load_small(comm.gather_objects(whole)[0])

    def _load_planes(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Rank 0's whole planes to all shards. Collective."""
        from .state.full_state import scatter_state

        self._calls.meet("optimizer.load_state_dict()")
        by_name = {
            name: state[param]
            for param, name in zip(self._sharding.params, self._names, strict=True)
            if param in state
        }
        shards, given = scatter_state(self._sharding, self.tiered_state, self._chunks, by_name)
        self._weights.write_back_changes()
        other = self._of_other_weights(shards, {n for n, keys in given.items() if MASTER in keys})

        def fill(block: Block, planes: Planes) -> None:
            chunk = self._chunks[block.shard].spec.id
            for part in block.segments:
                at = slice(block.shard_offset + part.offset, None)
                param = self._names[part.param]
                for name in given.get(param, ()):
                    if name in planes and not (name == MASTER and param in other):
                        planes[name][inside(part)] = shards[chunk, name][at][: part.numel]

        self.tiered_state.overwrite(fill)

    def _of_other_weights(
        self, planes: Mapping[tuple[ChunkId, str], Tensor], given: Set[str]
    ) -> Set[str]:
        """Names of `given` whose masters in `planes` do not round to the weights that are there, on
        any rank: they are left out, since state moves no weight. Collective; rank 0 says so."""
        found = set[str]()
        if not (given and self.has_master):
            return found
        for chunk in self._chunks:
            masters = planes.get((chunk.spec.id, MASTER))
            if masters is None:
                continue
            weights = chunk.load_shard()
            differs = masters.to(weights.device, weights.dtype) != weights
            for part in self._sharding.layout.shard_segments(chunk.spec, chunk.rank):
                if differs[part.offset : part.offset + part.numel].any():
                    found.add(self._names[part.param])
        found = set[str]().union(*self._sharding.comm.gather_objects(found)) & given
        if found and self._sharding.comm.rank == 0:
            log.warning(
                "optimizer.load_state_dict() left fp32 masters out that do not round to the "
                "weights that are there; load the weights that were saved with this state first "
                "(%d parameters, %s the first)",
                len(found),
                min(found),
            )
        return found

    # -- the rest of a target --

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, or set them to zero.

        Gradients of parameters in no group stay, as with torch's optimizers.
        """
        groups = zip(self._sharding.params, self._group_of, strict=True)
        left_alone = [i for i, (p, group) in enumerate(groups) if p.requires_grad and group is None]
        if left_alone:
            self._calls.gradients.clear_but(left_alone, set_to_none)
        elif set_to_none:
            self._calls.gradients.drop()
        else:
            self._calls.gradients.zero_all()

    def set_groups(self, groups: Sequence[Group]) -> None:
        """Take over groups after some were added: their parameters are updated from now on."""
        self._groups = range(len(groups))
        self._group_of = param_groups_of(self._sharding.params, groups)
        self._executor.set_groups(self._executor_groups)

    def homes_changed(self) -> None:
        """Reserve staging for the plan's new homes, measure what leaves the device, and count the
        traffic of files anew."""
        self.gradients.measure_leaving()
        reserve_staging(self._executor, self._planning.plan)
        self._moved = self._storage.traffic()

    def _end_early(self) -> None:
        """End early updates: their memory is about to move."""
        if self._early is not None:
            self._early.settle()

    def promote_state(self, plan: Plan) -> None:
        self._end_early()
        super().promote_state(plan)

    def demote_state(self, plan: Plan) -> None:
        self._end_early()
        super().demote_state(plan)

    def extend(self, chunks: Sequence[Chunk]) -> None:
        self._end_early()
        super().extend(chunks)

    def movable(self) -> Sequence[Tensor]:
        self._end_early()
        return super().movable()

    def close(self, keep_masters: bool = True) -> None:
        if self._closed:
            return
        if (away := self._weights.parked) is not None:  # other ranks may be gone, and are not asked
            away.bring_back()
            self._weights.is_back()
        self._closed = True
        try:
            self.settle()
            if keep_masters:
                self._weights.write_back_changes()
                self.give_masters_back()
        finally:
            self._close()

    def _close(self) -> None:
        self._tail.end()
        if self._early is not None:
            self._early.close()
        self._events.keeping.leave(self._refresh_from_payload)
        self._ledger.forget_state()
        if self.kept_steps is not None:
            self.kept_steps.close()
        self._tiered_state.close()
        self._executor.close()
        self._calls.detach()
