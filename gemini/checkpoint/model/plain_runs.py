"""A plain module and an optimizer of ours as runs, so that state on disk is streamed here too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gemini.checkpoint.dcp.reader import RunFiller
from gemini.checkpoint.dcp.sharded import can_be_raw
from gemini.checkpoint.format.errors import CheckpointError
from gemini.checkpoint.format.keys import Keys
from gemini.module_face import saved_buffers
from gemini.optim.base import TieredOptimizer
from gemini.optim.plain.target import PlainTarget
from gemini.units import BLOCK_NUMEL

from .state import RunState, RunVisitor, StatePart, WeightRun, names_of


def can_be_runs(module: nn.Module) -> bool:
    """Whether its state dict is parameters and buffers that lie in memory as they are saved."""
    params = dict(module.named_parameters(remove_duplicate=False))
    known = params.keys() | dict(saved_buffers(module)).keys()
    return known == module.state_dict().keys() and all(
        param.is_contiguous() and can_be_raw(param.dtype) and not isinstance(param, DTensor)
        for param in params.values()
    )


class PlainRuns(RunState):
    """The parameters of a module that `can_be_runs`, and the state of its optimizer."""

    def __init__(
        self, module: nn.Module, optimizer: TieredOptimizer, keys: Keys, *, weights: bool = True
    ) -> None:
        """Raises CheckpointError for an optimizer over other parameters."""
        self.names = names_of(module)
        params = {names[0]: module.get_parameter(names[0]).detach() for names in self.names}
        self.shapes = {name: param.size() for name, param in params.items()}
        self._params = params if weights else {}
        self.buffers = dict(saved_buffers(module)) if weights else {}
        by_id = {id(module.get_parameter(names[0])): names[0] for names in self.names}
        targets = [target for target in optimizer.targets if isinstance(target, PlainTarget)]
        self._steps: dict[str, Tensor] = {}
        parts = []
        for target in targets:
            strangers = [param for param in target.params if id(param) not in by_id]
            if strangers or len(targets) < len(optimizer.targets):
                raise CheckpointError(
                    "the optimizer updates parameters that the module does not have; save a "
                    "module that holds all of them"
                )
            trained = [by_id[id(param)] for param in target.params]
            parts.append(StatePart(target, trained, _by_position(trained)))
            shown = target.shown_state()
            self._steps |= {by_id[id(param)]: state["step"] for param, state in shown.items()}
        super().__init__(
            keys,
            parts,
            [run for name, param in self._params.items() for run in _cut(name, param.numel())],
            {name: param.dtype for name, param in self._params.items()},
            with_optimizer=True,
            with_weights=weights,
        )

    def step_counts(self) -> Mapping[str, Tensor]:
        return self._steps

    def visit_weights(self, look: RunVisitor) -> None:
        for name, param in self._params.items():
            flat = param.view(-1)
            for _, start, numel in _cut(name, param.numel()):
                values = flat[start : start + numel]
                look(self._keys.weight(name), self.region(name), start, values)

    def _fill_weights(self, put: RunFiller) -> None:
        for name, param in self._params.items():
            flat = param.view(-1)
            for _, start, numel in _cut(name, param.numel()):
                values = torch.empty(numel, dtype=param.dtype)
                if put(self._keys.weight(name), start, values):
                    flat[start : start + numel].copy_(values)


def _by_position(names: Sequence[str]) -> Callable[[str], str]:
    return lambda position: names[int(position)]


def _cut(name: str, numel: int) -> list[WeightRun]:
    """A parameter in runs of at most a block."""
    return [
        (name, first, min(BLOCK_NUMEL, numel - first)) for first in range(0, numel, BLOCK_NUMEL)
    ]
