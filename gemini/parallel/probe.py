"""Probe of a module before and after a user's plan splits it: one small forward each.

A module between split layers may count what was split: OPT reshapes by `self.num_heads`. Then
nothing fails, and the outputs are wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gemini.chunk.local import is_dtensor
from gemini.comm.connect import rank
from gemini.trees import tensors_in

from .cut import TransformerStage, input_name

ROWS = 2
log = logging.getLogger("gemini")
NOT_COMPARED = (
    "a %s is split by a plan of yours, and no input of it is known by which what it gives before "
    "and after could be compared: compare the first losses with those of one process"
)


class Probe:
    """Probe of one module: made before it is split, `check` follows. Collective over `mesh`.

    planned: names of split modules, whose outputs are parts.
    All parameters and buffers get the values of the mesh's first rank, as split ones do.
    """

    def __init__(self, module: nn.Module, planned: Sequence[str], mesh: DeviceMesh) -> None:
        self._module, self._planned, self._mesh = module, frozenset(planned), mesh
        # also what stays unsplit: with other values on each rank the two outputs would differ
        for tensor in (*module.parameters(), *module.buffers()):
            there = tensor.detach().to(mesh.device_type)
            dist.broadcast(there, group=mesh.get_group(), group_src=0)
            with torch.no_grad():
                tensor.copy_(there)
        self._inputs = inputs_of(module, mesh.size())
        self._before, failed = self._outputs()
        if failed is not None and rank() == 0:
            log.warning(NOT_COMPARED, type(module).__name__)

    def check(self) -> None:
        """Raise ValueError that names the first module with another output than before."""
        if "" not in self._before:
            return
        # split parameters are on the mesh's device, and a forward needs all on one
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            if not is_dtensor(tensor):
                tensor.data = tensor.data.to(self._mesh.device_type)
        after, failed = self._outputs()
        for name, want in self._before.items():
            found = after.get(name)
            if found is None or name in self._planned or (name and found.shape != want.shape):
                continue  # not reached, or a part of what it was
            if not _alike(found, want):
                self._refuse(name)
        if failed is not None:
            self._refuse(failed)

    def _refuse(self, name: str) -> None:
        module = self._module.get_submodule(name)
        ranks = self._mesh.size()
        counts = [
            attribute for attribute, value in vars(module).items()
            if "num" in attribute and type(value) is int and value > 1 and value % ranks == 0
        ]  # fmt: skip
        where = f"{name} ({type(module).__name__})" if name else type(module).__name__
        raise ValueError(
            f"{where} gives something else since its layers are split by the plan; expected one "
            "that divides what the module counts of them, such as "
            f"{{{name!r}: 'divide {' '.join(counts) or 'num_heads'}'}}, or that leaves its layers "
            "whole. The model has been split: make another one"
        )

    @torch.no_grad()
    def _outputs(self) -> tuple[dict[str, Tensor], str | None]:
        """First output tensor of each module by name, in the order in which forwards ended; and
        the module that failed, or None."""
        if self._inputs is None:
            return {}, ""
        found: dict[str, Tensor] = {}
        begun: list[str] = []
        args, kwargs = self._inputs
        device = next(self._module.parameters()).device
        training = {module: module.training for module in self._module.modules()}
        with ExitStack() as hooks:
            for name, module in self._module.named_modules():

                def begins(*_: Any, name: str = name) -> None:
                    begun.append(name)

                def ends(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                    begun.pop()
                    first = next(iter(tensors_in(output)), None)
                    if first is not None and not is_dtensor(first):
                        found.setdefault(name, first.detach().cpu().clone())

                hooks.enter_context(module.register_forward_pre_hook(begins))
                hooks.enter_context(module.register_forward_hook(ends))
            self._module.eval()
            try:
                self._module(
                    *(x.to(device) for x in args), **{n: x.to(device) for n, x in kwargs.items()}
                )
            except Exception:  # of shapes, or of what it is not called with
                return found, begun[-1] if begun else ""
            finally:
                for module, was in training.items():
                    module.training = was
        return found, None


def _alike(found: Tensor, want: Tensor) -> bool:
    """Whether two outputs are equal up to the rounding of sums in another order."""
    if found.shape != want.shape:
        return False
    if not (want.is_floating_point() and want.numel()):
        return torch.equal(found, want)
    bound = torch.finfo(want.dtype).eps ** 0.5 * float(want.abs().max())
    return torch.allclose(found.float(), want.float(), rtol=0.0, atol=bound, equal_nan=True)


def inputs_of(module: Any, ranks: int) -> tuple[tuple[Tensor, ...], Mapping[str, Tensor]] | None:
    """Small arguments (args, kwargs) for a module's forward; None if they cannot be guessed."""
    time = 4 * ranks  # what splits a sequence divides it
    config: Any = getattr(module, "config", None)
    ids = torch.arange(1, ROWS * time + 1).view(ROWS, -1)
    if isinstance(module, TransformerStage):
        if module.is_first:
            return (ids % config.vocab_size,), {}
        return (_drawn(ROWS, time, config.hidden_size),), {}
    name = input_name(module) if hasattr(module, "main_input_name") else ""
    if name == "input_ids":
        return (), {name: ids % config.vocab_size}
    if name == "pixel_values":
        return (), {name: _drawn(ROWS, config.num_channels, config.image_size, config.image_size)}
    leaves = (leaf for leaf in module.modules() if any(True for _ in leaf.parameters(False)))
    first = next(leaves, None)
    if isinstance(first, nn.Embedding):
        return (ids % first.num_embeddings,), {}
    if isinstance(first, nn.Linear):
        return (_drawn(ROWS, time, first.in_features),), {}
    return None


def _drawn(*shape: int) -> Tensor:
    """Random normal values, equal on all ranks, from a generator of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
