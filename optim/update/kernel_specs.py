"""What the compiled CPU path is made of, as values; and their compilation, in a process of its own.

`python -m optim.update.kernel_specs JOBS` writes one shared library for each job; JOBS has their
JSON (`as_job`). It imports torch's compiler (200 MiB), so nobody calls it in the process that
trains; `optim.update.built_kernels` starts it.
"""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optim.rules.rule import UpdateRule

_EXAMPLE = 1 << 16  # elements of what is traced; the length is left open
_OPTIONS = {
    "aot_inductor.package": True,
    "cpp.enable_floating_point_contract_flag": "off",  # the bits of the formula
    "cpp.dynamic_threads": True,  # as many as the process that runs it has
}


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """One rule's update of [n] elements in place.

    Called with scale [2], coefficients, grad, visible, master where there is one, and the planes.
    """

    rule: str  # "module:class"
    visible: str  # dtypes by torch's names
    grad: str
    has_master: bool

    @classmethod
    def of(
        cls, rule: UpdateRule, visible: torch.dtype, grad: torch.dtype, has_master: bool
    ) -> UpdateSpec:
        """Of a rule as it is, found again by its class."""
        kind = type(rule)
        return cls(
            f"{kind.__module__}:{kind.__qualname__}", dtype_name(visible), dtype_name(grad),
            has_master,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """For people: part of a file's name."""
        kind = self.rule.rpartition(":")[2].lower()
        return f"{kind}-{self.visible}-{self.grad}" + "-master" * self.has_master

    def load_rule(self) -> UpdateRule:
        """The rule, made anew: rules have no state."""
        module, _, name = self.rule.partition(":")
        rule: UpdateRule = getattr(importlib.import_module(module), name)()
        return rule

    def program(self) -> tuple[nn.Module, tuple[Tensor, ...], tuple[Any, ...]]:
        """What is compiled, example inputs, and which of their lengths are open."""
        rule = self.load_rule()
        layout = rule.layout.with_master() if self.has_master else rule.layout
        dtypes = [self.grad, self.visible, *(plane.dtype for plane in layout.planes)]
        grad, visible, *rest = [torch.zeros(_EXAMPLE, dtype=getattr(torch, d)) for d in dtypes]
        inputs = (
            torch.zeros(2),
            torch.zeros(rule.num_coefficients),
            grad,
            visible,
            *rest,
        )
        n = {0: torch.export.Dim("n", min=2)}
        return _Update(rule, self.has_master), inputs, (None, None, n, n, (n,) * len(rest))


@dataclass(frozen=True, slots=True)
class SquaresSpec:
    """Sums of squares of rows of gradients: [rows * row_numel] to fp32 [rows]."""

    grad: str  # dtype by torch's name
    row_numel: int  # elements whose squares are summed in fp32

    @property
    def name(self) -> str:
        """For people: part of a file's name."""
        return f"squares-{self.grad}"

    def program(self) -> tuple[nn.Module, tuple[Tensor, ...], tuple[Any, ...]]:
        """What is compiled, example inputs, and which of their lengths are open."""
        inputs = (torch.zeros(_EXAMPLE, dtype=getattr(torch, self.grad)),)
        rows = torch.export.Dim("rows", min=2)
        return _Squares(self.row_numel), inputs, ({0: self.row_numel * rows},)


KernelSpec = UpdateSpec | SquaresSpec


def dtype_name(dtype: torch.dtype) -> str:
    """`"bfloat16"` and its like."""
    return str(dtype).removeprefix("torch.")


class _Update(nn.Module):
    def __init__(self, rule: UpdateRule, has_master: bool) -> None:
        super().__init__()
        self._rule = rule
        self._has_master = has_master

    def forward(
        self, scale: Tensor, coefficients: Tensor, grad: Tensor, visible: Tensor, *rest: Tensor
    ) -> None:
        """grad in fp32, times scale[0], within +-scale[1]; then the rule's formula."""
        param, planes = (rest[0], rest[1:]) if self._has_master else (visible.float(), rest)
        grad = (grad.float() * scale[0]).clamp(-scale[1], scale[1])
        new, *state = self._rule.formula(param, grad, *planes, coefficients)
        if self._has_master:
            rest[0].copy_(new)
        visible.copy_(new)
        for plane, values in zip(planes, state, strict=True):
            plane.copy_(values)


class _Squares(nn.Module):
    def __init__(self, row_numel: int) -> None:
        super().__init__()
        self._row_numel = row_numel

    def forward(self, grad: Tensor) -> Tensor:
        rows = grad.view(-1, self._row_numel).float()
        return (rows * rows).sum(1)


def as_job(path: Path, spec: KernelSpec) -> list[Any]:
    """One entry of JOBS."""
    return [str(path), type(spec).__name__, asdict(spec)]


def compile_jobs(jobs: Sequence[Sequence[Any]]) -> None:
    """Write the shared library of every job to its path."""
    kinds: dict[str, Any] = {"UpdateSpec": UpdateSpec, "SquaresSpec": SquaresSpec}
    for path, kind, fields in jobs:
        _compile(kinds[kind](**fields), Path(path))


def _compile(spec: KernelSpec, path: Path) -> None:
    module, inputs, lengths = spec.program()
    exported = torch.export.export(module, inputs, dynamic_shapes=lengths)
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=f"{path}.pt2", inductor_configs=_OPTIONS
    )
    with zipfile.ZipFile(package) as archive:
        (library,) = [name for name in archive.namelist() if name.endswith(".so")]
        path.write_bytes(archive.read(library))


if __name__ == "__main__":
    compile_jobs(json.loads(sys.argv[1]))
