"""The optimizer class behind HybridAdam and its like: a real `torch.optim.Optimizer`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gemini.units import parse_bytes
from nvme import WriteMeter, check_folder

from .clipping import Clip, asked_norm
from .config import NvmeConfig, StateConfig
from .groups import merged_groups
from .interrupts import HeldSignals
from .parking import Where, park
from .plain import PlainTarget, clip_together
from .report import NonFiniteGradientError, StepReport
from .rules import UpdateRule
from .state_stream import Look, Source
from .target import AmpInputs, ParameterOwner, Target, owner_of

Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


class TieredOptimizer(torch.optim.Optimizer):
    """Updates parameters by `rule` and keeps their state on the tier that was asked for.

    Parameters of a wrapped module are updated as shards by its engine, those of a plain module
    here; one optimizer has the one or the other. It may be built before or after wrapping.
    """

    _step_supports_amp_scaling = True  # what torch.amp.GradScaler looks for

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        rule: UpdateRule,
        *,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: Folders = None,
        nvme_write_budget: int | str | None = None,
        nvme: NvmeConfig | None = None,
        cpu_path: str = "auto",
    ) -> None:
        nvme = _with_folders(nvme or NvmeConfig(), nvme_offload_dir)
        if nvme_write_budget is not None:
            nvme = replace(nvme, write_budget=parse_bytes(nvme_write_budget))
        nvme = replace(nvme, meter=WriteMeter(nvme.write_budget))
        self._config = StateConfig(float(nvme_offload_fraction), nvme, cpu_path)
        if self._config.nvme_fraction > 0:
            for folder in nvme.folders:
                check_folder(folder, allow_ram=nvme.allow_ram)
        self._rule = rule
        self._targets: list[Target] = []
        self._owner: ParameterOwner | None = None  # of the parameters of a wrapped module
        self._is_parked = False
        self._bound: set[int] = set()  # ids of parameters that a target has
        self._closed = False
        self.last_report: StepReport | None = None
        super().__init__(params, defaults)
        if any(owner_of(p) is not None for p in self._flat_params()):
            self._bind()  # the engine can free fp32 originals now

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._rule.hyper(self.param_groups[-1])
            for param in self.param_groups[-1]["params"]:
                self.check_param(param)
        except ValueError:
            self.param_groups.pop()
            raise
        for param in self.param_groups[-1]["params"]:
            # never empty: torch.distributed.checkpoint takes that for "make a step to fill it"
            self.state[param] = {"step": torch.zeros(())}

    def check_param(self, param: Tensor) -> None:
        """Raise ValueError for a parameter that this optimizer cannot update."""
        if not param.is_floating_point():
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} has dtype {param.dtype}; "
                "expected a floating one"
            )
        if param.is_meta:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is on the meta device and has no "
                "values; materialise the module before you make the optimizer"
            )

    def bind(self) -> None:
        """Make the state now, and not with the first step: what is loaded needs its place."""
        self._bind()

    @property
    def targets(self) -> Sequence[Target]:
        """What it updates: the shards of a wrapped module, or plain parameters by device."""
        self._bind()
        return self._targets

    def bind_to(self, owner: ParameterOwner) -> None:
        """Take the parameters' state now. Raises ValueError where they are not `owner`'s."""
        self._bind()
        if self._owner is not owner:
            raise ValueError(
                "this optimizer is not over the parameters of that module; make it from "
                "module.parameters()"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update; returns the closure's loss. `last_report` says what it did."""
        self._refuse_while_parked()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._bind()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        amp = AmpInputs(scale, found_inf) if found_inf is not None else None
        try:
            for target in self._targets:
                self.last_report = target.step(self.param_groups, amp)
        except NonFiniteGradientError as error:
            self.last_report = error.report
            raise
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zeros, which a step takes as gradients."""
        if self._owner is None:
            super().zero_grad(set_to_none)
        else:
            self._bind()  # a group that was added since has gradients, too
        for target in self._targets:
            target.zero_grad(set_to_none)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """`loss.backward(**options)`: a wrapped module applies its loss scale by itself."""
        loss.backward(**options)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of the coming step; returns their norm before, fp64 0-d.

        Over all parameters, ranks and tiers. norm_type: above 0, or inf. Under GeminiDDP gradients
        are changed as they enter the update, and a step clips once.

        Raises ValueError for a limit that is none, RuntimeError for a second call before a step,
        and with `error_if_nonfinite` for a norm that is not finite, which then waits for it.
        """
        clip = asked_norm(max_norm, norm_type)
        self._bind()
        norm = clip_together(self._targets, clip)
        assert norm is not None
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is not finite")
        return norm

    clip_grad_by_norm = clip_grad_norm_

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip every element of the coming step's gradients to [-clip_value, clip_value]."""
        clip = Clip(max_value=float(clip_value))
        self._bind()
        clip_together(self._targets, clip)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped for a gradient that was not finite. Waits for the device."""
        counters = [target.counters for target in self._targets]
        return sum(c.skipped_steps for c in counters if c is not None)

    def visit_state(self, look: Look) -> None:
        """Show this process's state, run by run and never all at once; see `optim.state_stream`.

        Under GeminiDDP every rank sees its own shards; no rank waits for another.
        """
        self._bind()
        for target in self._targets:
            target.visit_state(look)

    def fill_state(self, source: Source) -> None:
        """The way back: `source` gives new values for a run, or None to leave it as it is."""
        self._bind()
        for target in self._targets:
            target.fill_state(source)

    def state_dict(self) -> dict[str, Any]:
        """torch's format; state on disk is read back for it, one block at a time.

        Under GeminiDDP it is keyed by parameter name, whole on rank 0 (elsewhere only step
        counts), and has the `counters` of the loss scale. Every rank must call it.
        """
        self._refuse_while_parked()
        live = self.state
        whole = defaultdict(dict, {param: dict(state) for param, state in live.items()})
        for target in self._targets:
            for param, planes in target.offloaded_state().items():
                whole[param].update(planes)
        self.state = whole
        try:
            found = super().state_dict()
        finally:
            self.state = live
        names = self._names()
        if names is not None:
            keys = [names[id(param)] for param in self._flat_params()]
            found["state"] = {
                keys[i]: {**planes, "step": planes["step"].cpu().clone()}
                for i, planes in found["state"].items()
            }
            for group in found["param_groups"]:
                group["params"] = [keys[i] for i in group["params"]]
        for target in self._targets:
            if target.counters is not None:
                found["counters"] = target.counters.state_dict()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """torch's format, also as torch.optim's own optimizers make it.

        Moments stay in fp32, also for 16-bit parameters. Under GeminiDDP rank 0's values count,
        and every rank must call it. Raises ValueError, before anything is changed, for groups
        that differ from this optimizer's, and for options that it does not have.
        """
        self._refuse_while_parked()
        names = self._names()
        self.load_param_groups(state_dict["param_groups"])
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        by_id = dict(zip(saved, self._flat_params(), strict=True))
        if names is not None:
            by_id |= {names[id(param)]: param for param in self._flat_params()}
        state = {by_id[i]: values for i, values in state_dict["state"].items()}
        if state or names is not None:
            self._bind()
            for target in self._targets:
                target.load_state(state)
        for target in self._targets:
            if target.counters is not None:
                target.counters.load_state_dict(state_dict.get("counters", {}))

    def check_param_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Saved groups as they would become this optimizer's. Raises ValueError, see above."""
        return merged_groups(self.param_groups, groups, self._names(), self._rule)

    def load_param_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over the options of saved groups and leave state alone. Raises ValueError first."""
        merged = self.check_param_groups(groups)
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
        if where not in ("nvme", "host"):
            raise ValueError(f"parked({where!r}); expected 'nvme' or 'host'")
        self._refuse_while_parked()
        self._bind()
        with HeldSignals():
            tensors = [tensor for target in self._targets for tensor in target.movable()]
            away = park(tensors, where, self._config.nvme)
        self._is_parked = True
        try:
            yield
        finally:
            with HeldSignals():
                away.bring_back()
                away.close()
                self._is_parked = False

    def _refuse_while_parked(self) -> None:
        if self._is_parked:
            raise RuntimeError("parameters and state are parked; leave `optimizer.parked` first")

    @property
    def nvme_bytes(self) -> int:
        """Bytes that this optimizer's state takes on disk, both versions of every block."""
        return sum(target.nvme_bytes for target in self._targets)

    def close(self, *, keep_masters: bool = True) -> None:
        """Remove the files and threads. The optimizer cannot step any more.

        keep_masters: under GeminiDDP fp32 weights go back to the module, for `state_dict()`,
            exports and the next optimizer; without, it is left with 16 bits of each, sooner.
        """
        for target in self._targets:
            target.close(keep_masters)
        self._targets.clear()
        self._closed = True

    def _flat_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _names(self) -> Mapping[int, str] | None:
        """Of the parameters of a wrapped module, by id."""
        self._bind()
        return self._targets[0].names if self._targets else None

    def _bind(self) -> None:
        """Give every parameter that has no target yet to one."""
        if self._closed:
            raise RuntimeError("this optimizer was closed; its state is gone, so make another")
        new = [
            (param, index)
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
            if id(param) not in self._bound
        ]
        if not new:
            return
        owners = {id(owner): owner for owner in (owner_of(param) for param, _ in new)}
        if len(owners) > 1 or (self._targets and owners != {id(self._owner): self._owner}):
            raise ValueError(
                "this optimizer got parameters of a wrapped module together with others; "
                "make one optimizer for each module, over all of its parameters"
            )
        (owner,) = owners.values()
        if owner is not None and self._targets:
            self._targets[0].set_groups(self.param_groups)
        elif owner is not None:
            self._targets.append(owner.attach(self.param_groups, self._rule, self._config))
            self._owner = owner
        for device in dict.fromkeys(param.device for param, _ in new) if owner is None else ():
            there = [(param, index) for param, index in new if param.device == device]
            self._targets.append(
                PlainTarget(
                    [param for param, _ in there],
                    [index for _, index in there],
                    self._rule,
                    self._config,
                )
            )
        for target in self._targets:
            self.state.update(target.shown_state())
        self._bound.update(id(param) for param, _ in new)


def _with_folders(config: NvmeConfig, folders: Folders) -> NvmeConfig:
    if folders is None:
        return config
    if isinstance(folders, (str, os.PathLike)):
        folders = [folders]
    return replace(config, folders=tuple(os.fspath(folder) for folder in folders))
