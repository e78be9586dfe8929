"""The optimizer class behind HybridAdam and its like: a real `torch.optim.Optimizer`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nvme import check_folder

from .config import NvmeConfig, StateConfig
from .plain import PlainTarget
from .report import StepReport
from .rules import UpdateRule
from .target import Target, owner_of

Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


class TieredOptimizer(torch.optim.Optimizer):
    """Updates parameters by `rule` and keeps their state on the tier that was asked for.

    Parameters of a wrapped module are updated as shards by its engine, those of a plain module
    here; one optimizer has the one or the other. It may be built before or after wrapping.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        rule: UpdateRule,
        *,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: Folders = None,
        nvme: NvmeConfig | None = None,
        cpu_path: str = "eager",
    ) -> None:
        nvme = _with_folders(nvme or NvmeConfig(), nvme_offload_dir)
        self._config = StateConfig(float(nvme_offload_fraction), nvme, cpu_path)
        if self._config.nvme_fraction > 0:
            for folder in nvme.folders:
                check_folder(folder, allow_ram=nvme.allow_ram)
        self._rule = rule
        self._targets: list[Target] = []
        self._bound: set[int] = set()  # ids of parameters that a target has
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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update; returns the closure's loss. `last_report` says what it did."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._bind()
        reports = [target.step(self.param_groups) for target in self._targets]
        if reports:
            self.last_report = reports[-1]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for target in self._targets:
            target.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """torch's format; state on disk is read back for it, one block at a time."""
        live = self.state
        whole = defaultdict(dict, {param: dict(state) for param, state in live.items()})
        for target in self._targets:
            for param, planes in target.offloaded_state().items():
                whole[param].update(planes)
        self.state = whole
        try:
            return super().state_dict()
        finally:
            self.state = live

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """torch's format. Moments stay in fp32, also for 16-bit parameters."""
        shown = {param: dict(state) for param, state in self.state.items()}
        super().load_state_dict({**state_dict, "state": {}})  # checks and takes over the groups
        self.state.update(shown)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        by_id = dict(zip(saved, self._flat_params(), strict=True))
        state = {by_id[i]: values for i, values in state_dict["state"].items()}
        if state:
            self._bind()
            for target in self._targets:
                target.load_state(state)

    @property
    def nvme_bytes(self) -> int:
        """Bytes that this optimizer's state takes on disk, both versions of every block."""
        return sum(target.nvme_bytes for target in self._targets)

    def close(self) -> None:
        """Remove the files and threads. The optimizer cannot step any more."""
        for target in self._targets:
            target.close()
        self._targets.clear()

    def _flat_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _bind(self) -> None:
        """Give every parameter that has no target yet to one."""
        new = [
            (param, index)
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
            if id(param) not in self._bound
        ]
        if not new:
            return
        owners = {id(owner): owner for owner in (owner_of(param) for param, _ in new)}
        if len(owners) > 1 or (None not in owners.values() and self._targets):
            raise ValueError(
                "this optimizer got parameters of a wrapped module together with others; "
                "make one optimizer for each module, over all of its parameters"
            )
        (owner,) = owners.values()
        if owner is not None:
            self._targets.append(owner.attach(self.param_groups, self._rule, self._config))
        for device in dict.fromkeys(param.device for param, _ in new) if owner is None else ():
            there = [(param, index) for param, index in new if param.device == device]
            self._targets.append(
                PlainTarget(
                    [param for param, _ in there],
                    [index for _, index in there],
                    self._rule,
                    self._config,
                    self.state,
                )
            )
        self._bound.update(id(param) for param, _ in new)


def _with_folders(config: NvmeConfig, folders: Folders) -> NvmeConfig:
    if folders is None:
        return config
    if isinstance(folders, (str, os.PathLike)):
        folders = [folders]
    return replace(config, folders=tuple(os.fspath(folder) for folder in folders))
