"""Binding of an optimizer's parameters to targets, which hold their state."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from gemini.nvme import WriteMeter
from gemini.optim.rules.config import NvmeConfig, StateConfig
from gemini.optim.rules.report import StepReport
from gemini.optim.rules.rule import UpdateRule, scalar
from gemini.units import parse_bytes

from .target import OWNER_ATTRIBUTE, ParameterOwner, new_lock, owner_of

if TYPE_CHECKING:
    from .step.target import Target

log = logging.getLogger("gemini")
# A module that is wrapped after its optimizer was made finds it here.
_alive: weakref.WeakKeyDictionary[BoundOptimizer, None] = weakref.WeakKeyDictionary()

Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


class BoundOptimizer(torch.optim.Optimizer):
    """Optimizer, a real `torch.optim.Optimizer`, whose parameters belong to targets.

    Targets and their state are made by the first step or load for plain parameters, and at once for
    parameters of a wrapped module. Raises ValueError for options and parameters that it cannot
    take, TypeError for options of another type, and for a copy of one over a wrapped module.
    """

    in_place_of: ClassVar[str] = ""  # another's class: it goes on as this one

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
        if isinstance(params, nn.Module):
            raise TypeError(
                f"{self.own_name()} got a {type(params).__name__}; expected its parameters: "
                f"{self.own_name()}(model.parameters())"
            )
        fraction = scalar("nvme_offload_fraction", nvme_offload_fraction)
        nvme = _with_folders(nvme or NvmeConfig(), nvme_offload_dir)
        if nvme_write_budget is not None:
            nvme = replace(nvme, write_budget=parse_bytes(nvme_write_budget))
        nvme = replace(nvme, meter=WriteMeter(nvme.write_budget))
        kind = f"(state={rule.layout.kind!r})" if rule.layout.is_quantised else ""
        name = " in place of ".join(filter(None, (self.own_name() + kind, self.in_place_of)))
        self._config = StateConfig(fraction, nvme, cpu_path, name)
        if self._config.nvme_fraction > 0:
            from gemini.nvme import check_folder

            for folder in nvme.folders:
                check_folder(folder, allow_ram=nvme.allow_ram)
        self._begin(rule)
        super().__init__(params, defaults)
        if not any(param.requires_grad for param in self._flat_params()):
            log.warning(
                "%s: nothing is trained, as no parameter requires a gradient; a step needs one",
                self.own_name(),
            )
        if self._is_wrapped():
            self._bind()  # the engine can free fp32 originals now

    def _begin(self, rule: UpdateRule) -> None:
        self._rule = rule
        self._targets: list[Target] = []
        self._owner: ParameterOwner | None = None  # of the parameters of a wrapped module
        self._is_parked = False
        self._bound: dict[int, UpdateRule] = {}  # by id: parameters that a target has
        self._closed = False
        self._lock = new_lock()  # of plain parameters
        self.last_report: StepReport | None = None
        _alive[self] = None

    @classmethod
    def own_name(cls) -> str:
        """Name of the class that updates, also where it goes on for another optimizer."""
        return cls.__mro__[1 if cls.in_place_of else 0].__name__

    @property
    def _turns(self) -> AbstractContextManager[Any]:
        return self._lock if self._owner is None else self._owner.lock

    def _refuse_beside_pass(self, changes: str) -> None:
        if self._owner is not None:
            self._owner.refuse_beside_pass(changes)

    def waits_for(self, params: set[int]) -> bool:
        """Whether this optimizer has these parameters (ids), and no state of them is made yet."""
        return not (self._targets or self._closed) and any(
            id(param) in params for param in self._flat_params()
        )

    def rule_for(self, groups: Sequence[Mapping[str, Any]]) -> UpdateRule:
        """Rule whose state these groups need; fixed when the state is made."""
        return self._rule.for_groups(groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            params = self.param_groups[-1]["params"]
            if len({id(param) for param in params}) < len(params):
                raise ValueError("a parameter is in its group twice; expected each parameter once")
            self._check_options(self.param_groups[-1], ())
            for param in self.param_groups[-1]["params"]:
                self.check_param(param)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_options(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        """Raise ValueError for unknown options, and for options that do not fit `params`' state."""
        rules = [self._bound[id(param)] for param in params if id(param) in self._bound]
        if self._owner is not None:
            rules = [self._rule]
        for rule in dict.fromkeys(rules or [self.rule_for([group])]):
            rule.hyper(group)

    def check_param(self, param: Tensor) -> None:
        """Raise ValueError for a parameter that this optimizer cannot update."""
        if not param.is_floating_point():
            if param.requires_grad:
                raise _not_floating(param)
            return  # one that a wrapped module has as bytes, or ignores; else see `_check_made`
        if owner_of(param) is None and not param.is_meta:  # it may be made, and wrapped, by then
            from gemini.optim.plain.views import check_plain

            check_plain(param)

    def bind(self) -> None:
        """Make the state now, before the first step: values that are loaded need a place."""
        self._bind()

    @property
    def targets(self) -> Sequence[Target]:
        """Targets: the shards of a wrapped module, or plain parameters by device."""
        self._bind()
        return self._targets

    def bind_to(self, params: Iterable[Tensor]) -> None:
        """Take the parameters' state now. Raises ValueError if they are not those of one wrapped
        module with `params`, which may be all that it has."""
        if not self.is_over(params):
            raise ValueError(
                "this optimizer is not over the parameters of that module; make it from "
                "module.parameters()"
            )

    def is_over(self, params: Iterable[Tensor]) -> bool:
        """Whether its parameters, bound now, are those of the wrapped module that has some of
        `params`."""
        self._bind()
        return self._owner is not None and any(owner_of(one) is self._owner for one in params)

    def hand_over_to(self, other: torch.optim.Optimizer) -> None:
        """Turn `other`, over the same parameters in the same groups, into this optimizer.

        `other` keeps its group dictionaries, hooks and schedulers; this one is to be dropped.
        """
        followed = hasattr(other.step, "_wrapped_by_lr_sched")
        groups = other.param_groups
        for group, ours in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(ours)
        theirs = {name: value for name, value in vars(other).items() if name != "step"}
        own = {name: value for name, value in vars(self).items() if not name.endswith("_hooks")}
        other.__class__ = type(self)
        other.__dict__ = {**theirs, **own, "param_groups": groups}
        _alive[other] = None  # type: ignore[index]
        if followed:
            show_steps(other)

    def _flat_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _is_wrapped(self) -> bool:
        return any(owner_of(param) is not None for param in self._flat_params())

    def _names(self) -> Mapping[int, str] | None:
        """Names of a wrapped module's parameters, by id; None for a plain module's."""
        if not self._is_wrapped():
            return None
        self._bind()
        return {i: name for target in self._targets for i, name in target.names.items()}

    def _bind(self) -> None:
        """Give every parameter that has no target yet to one."""
        self._refuse_closed()
        new = [
            (param, index)
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
            if id(param) not in self._bound
        ]
        if not new:
            return
        owners = {id(owner): owner for owner in (owner_of(param) for param, _ in new)}
        if (len(owners) > 1 or self._owner is not None) and self._leave_out_frozen():
            self._bind()
            return
        if len(owners) > 1 or (self._targets and owners != {id(self._owner): self._owner}):
            ignored = _ignored_among(self._flat_params())
            if ignored:
                raise ValueError(
                    f"this optimizer got {ignored[0]}, which is in ignored_params and trained: the "
                    "wrapped module neither reduces nor updates it; expected another optimizer for "
                    "it, and this one over the parameters that the module has"
                )
            raise ValueError(
                "this optimizer got parameters of a wrapped module together with others; "
                "make one optimizer for each module, over all of its parameters"
            )
        (owner,) = owners.values()
        if owner is not None and self._targets:
            for target in self._targets:
                target.set_groups(self.param_groups)
        elif owner is not None:
            self._rule = self.rule_for(self.param_groups)
            self._targets += owner.attach(self.param_groups, self._rule, self._config)
            self._owner = owner
        rule = self._rule
        if owner is None:
            from gemini.optim.plain.target import PlainTarget, alike

            _check_made([param for param, _ in new])
            rule = self.rule_for([self.param_groups[index] for _, index in new])
            for params, group_of in alike(new):
                self._targets.append(
                    PlainTarget(params, group_of, rule, self._config, self.param_groups)
                )
        for target in self._targets:
            self.state.update(target.state_views())
        self._bound.update({id(param): rule for param, _ in new})

    def _leave_out_frozen(self) -> bool:
        """Drop frozen parameters that the wrapped module ignores from the groups; whether any."""
        before = len(self._flat_params())
        for group in self.param_groups:
            group["params"] = [
                param
                for param in group["params"]
                if param.requires_grad or owner_of(param) is not None
            ]
        return len(self._flat_params()) < before

    def _full_state(self, *, cut: bool = False) -> defaultdict[Tensor, Any]:
        """State shown in `self.state`, and copies of the rest; see `Target.offloaded_state`."""
        whole: defaultdict[Tensor, Any] = defaultdict(dict)
        if any(target.untouched for target in self._targets) and not cut:
            return whole
        whole.update({param: dict(state) for param, state in self.state.items()})
        for target in self._targets:
            for param, planes in target.offloaded_state(cut).items():
                whole[param].update(planes)
        return whole

    def _refuse_unusable(self) -> None:
        self._refuse_closed()
        if self._owner is None and self._targets and self._is_wrapped():
            raise RuntimeError(
                "parameters of this optimizer were wrapped after it had stepped, and its state is "
                "that of plain ones; make another over model.parameters() and load its state_dict()"
            )
        if self._is_parked:
            raise RuntimeError("parameters and state are parked; leave `optimizer.parked` first")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this optimizer was closed; its state is gone, so make another")

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, with the parameters, as in torch."""
        self._refuse_unusable()
        if self._is_wrapped():
            raise TypeError(
                "an optimizer over a wrapped module cannot be copied or pickled; save its "
                "state_dict(), or the module with it by gemini.save_checkpoint"
            )
        state = {
            param: {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in planes.items()
            }
            for param, planes in self._full_state().items()
        }
        return {
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "state": state,
            "rule": self._rule,
            "config": replace(self._config, nvme=replace(self._config.nvme, meter=None)),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose state goes where this one's is; torch calls it with groups, too."""
        if "config" not in state:
            super().__setstate__(state)
            return
        config: StateConfig = state["config"]
        meter = WriteMeter(config.nvme.write_budget)
        self._config = replace(config, nvme=replace(config.nvme, meter=meter))
        self._begin(state["rule"])
        groups, defaults = state["param_groups"], state["defaults"]
        super().__setstate__(
            {"defaults": defaults, "param_groups": groups, "state": defaultdict(dict)}
        )
        if state["state"]:
            self._bind()
        for target in self._targets:
            target.load_state(state["state"])


def _check_made(params: Iterable[Tensor]) -> None:
    for param in params:
        if param.is_meta:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is on the meta device and has no "
                "values; materialise the module, or wrap it, before the optimizer's first use"
            )
        if not param.is_floating_point():
            raise _not_floating(param)


def _not_floating(param: Tensor) -> ValueError:
    return ValueError(
        f"a parameter of shape {tuple(param.shape)} has dtype {param.dtype}; "
        "expected a floating one"
    )


def _ignored_among(params: Iterable[Tensor]) -> list[str]:
    """Names of parameters that the wrapped modules of the other parameters ignore."""
    params = list(params)
    owners = [handle.owner for p in params if (handle := getattr(p, OWNER_ATTRIBUTE, None))]
    names = {i: name for owner in dict.fromkeys(owners) for i, name in owner.ignored.items()}
    return [names[id(param)] for param in params if id(param) in names]


def show_steps(optimizer: torch.optim.Optimizer) -> None:
    """Show an optimizer's steps to schedulers that were made before, as their own patch does."""
    step, held = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def shown(*args: Any, **kwargs: Any) -> Any:
        optimizer: Any = held()
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    shown._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = shown  # type: ignore[method-assign]


def waiting_for(params: Iterable[Tensor]) -> list[BoundOptimizer]:
    """Optimizers over any of these parameters whose state is not made yet."""
    wanted = {id(param) for param in params}
    return [optimizer for optimizer in _alive if optimizer.waits_for(wanted)]


def _with_folders(config: NvmeConfig, folders: Folders) -> NvmeConfig:
    if folders is None:
        return config
    if isinstance(folders, (str, os.PathLike)):
        folders = [folders]
    return replace(config, folders=tuple(os.fspath(folder) for folder in folders))
