"""TieredOptimizer, base of HybridAdam and all others: a real `torch.optim.Optimizer`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gemini.callers import flat_optimizer_state, wants_dtensors
from gemini.optim.rules.clipping import Clip, asked_norm
from gemini.optim.rules.report import NonFiniteGradientError
from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.saved_names import renamed, without_wrappers

from .binding import BoundOptimizer
from .binding import Folders as Folders
from .target import AmpInputs, changes, owner_of, reads

if TYPE_CHECKING:
    from gemini.nvme import BlockStore
    from gemini.optim.rules.control_vector import ControlVector
    from gemini.optim.state.parking import Where
    from gemini.optim.state.state_stream import StateSource, StateStream, StateVisitor


log = logging.getLogger("gemini")


class TieredOptimizer(BoundOptimizer):
    """Optimizer that updates parameters by `rule` and keeps their state on the tier asked for.

    Parameters of a wrapped module are updated as shards by its engine, and parameters of a plain
    module here; one optimizer has the one or the other. It may be built before or after wrapping.
    """

    _step_supports_amp_scaling = True  # what torch.amp.GradScaler looks for
    # Stores count from 0 in each process, and a run goes on over several: the run's steps when
    # stores of this process began to count, and by name when stores left by earlier ones did.
    _steps_before = 0
    _left_stores: Mapping[str, int] = MappingProxyType({})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update once; returns the closure's loss. `last_report` says what it did.

        Raises NonFiniteGradientError for one skipped step too many (`on_nonfinite`).
        """
        self._refuse_unusable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._turns:
            self._refuse_beside_pass("optimizer.step()")
            self._step()
        return loss

    def _step(self) -> None:
        self._bind()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        amp = AmpInputs(scale, found_inf) if found_inf is not None else None
        try:
            if self._targets:
                first = self._targets[0]
                self.last_report = first.step(self._targets, self.param_groups, amp)
        except NonFiniteGradientError as error:
            self.last_report = error.report
            raise

    @changes
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zeros, which a step takes as gradients."""
        if self._owner is None:
            super().zero_grad(set_to_none)
        else:
            self._bind()  # a group that was added since has gradients, too
        for target in self._targets:
            target.zero_grad(set_to_none)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Call `loss.backward(**options)`: a wrapped module applies its loss scale by itself."""
        loss.backward(**options)

    @changes
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of the coming step; returns their norm before, fp64 0-d.

        Over all parameters, ranks and tiers. norm_type: above 0, or inf. Under GeminiDDP gradients
        are changed as they enter the update.

        Raises ValueError for a limit that is none, and RuntimeError with `error_if_nonfinite` for
        a norm that is not finite, which then waits for it.
        """
        clip = asked_norm(max_norm, norm_type)
        self._bind()
        norm = self._targets[0].clip(self._targets, clip)
        assert norm is not None
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is not finite")
        return norm

    clip_grad_by_norm = clip_grad_norm_

    @changes
    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip every element of the coming step's gradients to [-clip_value, clip_value]."""
        clip = Clip(max_value=float(clip_value))
        self._bind()
        self._targets[0].clip(self._targets, clip)

    @property
    @reads
    def skipped_steps(self) -> int:
        """Number of steps skipped for a gradient that was not finite. Waits for the device."""
        # a step skips on all
        return max((target.counters.skipped_steps for target in self._targets), default=0)

    @property
    def counters(self) -> list[list[ControlVector]]:
        """Loss scales and skipped steps of all targets; those of one vote, which are equal, are
        together."""
        found = [target.counters for target in self._targets]
        return [[one] for one in found] if self._owner is None else [found]

    @reads
    def visit_state(self, look: StateVisitor) -> None:
        """Show this process's state, run by run, never all at once; see `optim.state.state_stream`.

        Under GeminiDDP every rank sees its own shards; no rank waits for another.
        """
        for stream in self._streams():
            stream.visit(look)

    @changes
    def fill_state(self, source: StateSource) -> None:
        """Replace state run by run: `source` gives new values for a run, or None to keep it."""
        for stream in self._streams():
            stream.fill(source)

    def _streams(self) -> Iterator[StateStream]:
        """Streams that name parameters as a state dict does: by position, or as the module."""
        self._bind()
        names = self._names() or {id(param): str(i) for i, param in enumerate(self._flat_params())}
        for target in self._targets:
            yield from target.streams(names)

    @reads
    def state_dict(self) -> dict[str, Any]:
        """State dict in torch's format; state on disk is read back for it, one block at a time.

        Before the first step there is no state in it, and none is made or moved for it. Under
        GeminiDDP it is keyed by parameter name, whole on rank 0 (elsewhere only step counts), and
        has the `counters` of the loss scale. Every rank must call it.
        `get_optimizer_state_dict` of torch.distributed.checkpoint is given DTensors on every rank,
        without fp32 masters, which are the weights of its `get_model_state_dict`.
        """
        from .groups import as_torchs

        self._refuse_unusable()
        names = self._names()
        cut = names is not None and wants_dtensors()
        live = self.state
        self.state = self._full_state(cut=cut)
        try:
            found = super().state_dict()
        finally:
            self.state = live
        if names is not None:
            params = self._flat_params()
            keys = list(range(len(params))) if cut else [names[id(param)] for param in params]
            found["state"] = {
                keys[i]: planes | {name: planes[name].cpu().clone() for name in live[params[i]]}
                for i, planes in found["state"].items()
            }
            for group in found["param_groups"]:
                group["params"] = [keys[i] for i in group["params"]]
                group.update(as_torchs(group) if cut else {})
        for target in self._targets:
            found["counters"] = target.counters.state_dict()
        return found

    @changes
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict in torch's format, also as torch.optim's own optimizers make it.

        State that it lacks begins anew, as in torch. Moments stay in fp32, also for 16-bit
        parameters. No weight changes: an fp32 master that does not round to the present weight is
        left out, which a warning says. Under GeminiDDP rank 0's values count, and every rank must
        call it. Raises ValueError, before anything is changed, for groups that differ from this
        optimizer's, for options that it does not have, and for step counts that are none.
        """
        from gemini.optim.rules.saved import check_counters, check_steps
        from gemini.optim.state.saved_state import filled_up, unflattened, with_steps

        self._refuse_unusable()
        names = self._names()
        if names is not None:
            state_dict = _without_wrappers(state_dict, names.values())
        self.check_param_groups(state_dict["param_groups"])
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        by_id = dict(zip(saved, self._flat_params(), strict=True))
        if names is not None:
            by_id |= {names[id(param)]: param for param in self._flat_params()}
        flat, found = flat_optimizer_state(), state_dict["state"]
        if flat is not None:
            every = {plane.name for target in self._targets for plane in target.planes}
            found = unflattened(flat, found, sorted(every | {*self._rule.carried}))
        check_steps(found.values())
        check_counters(state_dict.get("counters", {}))
        self.load_param_groups(state_dict["param_groups"])
        state = {by_id[i]: values for i, values in found.items()}
        if state:
            self._bind()
        for target in self._targets:
            planes = [plane.name for plane in target.planes if plane.name != MASTER]
            given = with_steps(state, planes)
            params = () if target.untouched else self._flat_params()
            target.load_state(filled_up(given, params, planes))
            if not wants_dtensors():
                target.counters.load_state_dict(state_dict.get("counters", {}))

    def check_param_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Merge saved groups into copies of this optimizer's. Raises ValueError as
        `load_state_dict`."""
        from .groups import merged_groups

        return merged_groups(self.param_groups, groups, self._names(), self._check_options)

    def load_param_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over the options of saved groups and leave state alone. Raises ValueError first."""
        merged = self.check_param_groups(groups)
        own = self._rule.layout.kind
        if groups and (theirs := groups[0].get("state", "fp32")) != own:
            log.warning(
                "moments that were kept as %s are loaded into state=%r: %s", theirs, own,
                "what they lack of fp32 stays lost" if own == "fp32" else "they are rounded to it",
            )  # fmt: skip
        shown = {param: dict(state) for param, state in self.state.items()}
        super().load_state_dict({"state": {}, "param_groups": merged})
        self.state.update(shown)

    @contextmanager
    def parked(self, where: Where) -> Iterator[None]:
        """Free the memory of parameters, gradients and state while the body runs.

        where: `"nvme"`, to the folders of `nvme_offload_dir`; `"host"`, from other devices to RAM.
        They come back bit for bit, also when the body raises. Until then they must not be read: the
        module cannot run and the optimizer cannot step. An error on the way out, such as
        `nvme.DiskFullError` or `nvme.WriteBudgetError`, leaves everything in place.
        Raises ValueError for another `where`, RuntimeError where it is parked already.
        """
        from gemini.optim.state.parking import park

        if where not in ("nvme", "host"):
            raise ValueError(f"parked({where!r}); expected 'nvme' or 'host'")
        self._refuse_unusable()
        self._bind()
        # A signal while tensors move would leave some of them without memory.
        with self._turns, DeferredSignals():
            self._refuse_beside_pass("optimizer.parked()")
            tensors = [tensor for target in self._targets for tensor in target.movable()]
            away = park(tensors, where, self._config.nvme)
        self._is_parked = True
        try:
            yield
        finally:
            with self._turns, DeferredSignals():
                away.bring_back()
                away.close()
                self._is_parked = False

    @property
    @reads
    def nvme_bytes(self) -> int:
        """Bytes that this optimizer's state takes on disk, all versions of every block."""
        return sum(store.file_bytes for store in self.stores)

    @property
    def stores(self) -> list[BlockStore]:
        """Stores on disk, of this optimizer and of the module that it updates."""
        return [store for target in self._targets for store in target.stores]

    @reads
    def stores_of_run(self) -> tuple[dict[str, int], int | None]:
        """Steps of stores, for a checkpoint: (begins, common).

        begins: by name the step of the run at which a store began to count, stores left by killed
        processes included. common: the step that all stores of this process have, or None.
        """
        own = [store for store in self.stores if store.layout.num_versions > 1]
        began = {**self._left_stores, **{store.name: self._steps_before for store in own}}
        held = min((store.committed_step for store in own), default=None)
        return began, None if held is None else self._steps_before + held

    @changes
    def go_on_from(self, step: int, began: Mapping[str, int]) -> None:
        """Go on from a step of a run that has left stores, and remove those with no later step.

        began: by name the step of the run at which a store began to count.
        """
        self._left_stores = dict(began)
        self.remove_left_stores(step)
        self._steps_before = step - max((s.committed_step for s in self.stores), default=0)

    def remove_left_stores(self, step: int) -> None:
        """Remove stores of killed processes with no step after this one of a complete checkpoint,
        where this process has its own."""
        if began := self._left_stores:
            from gemini.nvme import remove_superseded

            folders = dict.fromkeys(path.parent for store in self.stores for path in store.paths)
            left = remove_superseded(folders, {name: step - at for name, at in began.items()})
            self._left_stores = {name: began[name] for name in sorted(left)}

    @reads
    def close(self, *, keep_masters: bool = True) -> None:
        """Remove the files and threads. The optimizer cannot step any more.

        keep_masters: under GeminiDDP fp32 weights go back to the module, for `state_dict()`,
            exports and the next optimizer; without, it is left with 16 bits of each, sooner.
        """
        for target in self._targets:
            target.close(keep_masters)
        self._targets.clear()
        self._closed = True


def _without_wrappers(state_dict: Mapping[str, Any], known: Iterable[str]) -> Mapping[str, Any]:
    """State dict by names whose names have no wrapper of torch. known: names of this optimizer."""
    plain = without_wrappers(known)
    groups = [
        {**group, "params": [*map(plain, group["params"])]} for group in state_dict["param_groups"]
    ]
    found = {**state_dict, "param_groups": groups}
    if "state" in state_dict:
        found["state"] = renamed(state_dict["state"], plain)
    return found


@cache
def refuse_other_optimizers() -> None:
    """Refuse optimizers that cannot update shards, at their first step over a wrapped parameter, in
    this process from now on."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if isinstance(optimizer, TieredOptimizer):
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    if any(owner_of(param) is not None for param in params):
        raise RuntimeError(
            f"{type(optimizer).__name__} would keep its state whole on every rank and update "
            "16-bit weights without fp32 masters; make an optimizer of this project over "
            "model.parameters(): HybridAdam, HybridSGD or another of gemini.optim, with the same "
            "options"
        )
