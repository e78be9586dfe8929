"""Adam (L2), AdamW and AMSGrad: the update rules, and HybridAdam, CPUAdam and FusedAdam."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gemini.arguments import by_name
from gemini.optim.rules import formulas
from gemini.optim.rules.config import NvmeConfig
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.state_layout import KIND_OF, Plane, StateLayout, kind_of

from .base import Folders, TieredOptimizer


class AdamRule(UpdateRule):
    """Adam: m and v in fp32, and with `amsgrad` the largest v so far for groups that ask for it.

    Of a kind that is coarse, v is at least what makes no step longer than exact moments could; see
    `formulas.adam_8bit_coefficients`.
    """

    name = "adam"
    layout = StateLayout(
        (
            Plane("exp_avg", "float32", under_root=True),
            Plane("exp_avg_sq", "float32", keeps_ties=True),
        )
    )
    optional: ClassVar = {"amsgrad": Plane("max_exp_avg_sq", "float32")}
    options: ClassVar = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
        "adamw_mode": True, "bias_correction": True, "maximize": False, "amsgrad": False,
    }  # fmt: skip
    coefficients = staticmethod(formulas.adam_coefficients)
    formula = staticmethod(formulas.adam)

    def __init__(self, *wanted: str, state: str = "fp32") -> None:
        if kind_of(state).is_coarse:
            self.coefficients = formulas.adam_8bit_coefficients
            self.formula = formulas.adam_8bit
        super().__init__(*wanted, state=state)

    def update(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], hyper: Any, step: int
    ) -> None:
        """Call torch's own fused CPU step, which is vectorised and needs no compiler.

        Its result differs from `formulas.adam` by a few ulp (docs/numerics.md): it contracts
        multiply-adds, and its square root is not correctly rounded.
        """
        exp_avg, exp_avg_sq, *largest = planes
        if KIND_OF[self.layout.kind].is_coarse:
            inverse_bound = self.coefficients(hyper, step)["inverse_bound"]
            least = formulas.least_square(exp_avg, inverse_bound)
            torch.maximum(exp_avg_sq, least, out=exp_avg_sq)
        fused = torch._fused_adamw_ if hyper.adamw_mode else torch._fused_adam_
        # beta^inf = 0: the bias corrections become 1 exactly
        count = float(step) if hyper.bias_correction else float("inf")
        fused(
            [param], [grad], [exp_avg], [exp_avg_sq], largest if hyper.amsgrad else [],
            [_step_tensor(count)],
            lr=hyper.lr, beta1=hyper.beta1, beta2=hyper.beta2, eps=hyper.eps,
            weight_decay=hyper.weight_decay, amsgrad=hyper.amsgrad, maximize=hyper.maximize,
        )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _step_tensor(step: float) -> Tensor:
    """Step count as fp32 0-d, which the fused step reads and does not write."""
    return torch.tensor(step, dtype=torch.float32)


class HybridAdam(TieredOptimizer):
    """Adam (`adamw_mode=False`: L2) or AdamW with fp32 state on device, host or NVMe.

    On a `GeminiDDP` it updates fp32 master shards; on a plain module the parameters themselves,
    CPU parameters by the CPU path and CUDA parameters by Triton.

    nvme_offload_fraction: share of the state's bytes that goes to disk, met within one block
        (2**20 elements): exp_avg and exp_avg_sq, and under GeminiDDP the fp32 master too.
    nvme_offload_dir: an existing folder on a disk, or several to stripe over; None is a temporary
        folder. The files are removed when the optimizer is closed or collected, and at exit, but
        for those that a checkpoint is pinned to.
    nvme_write_budget: bytes, or `"1TiB"`, that may be written in all; the step that would pass it
        raises `nvme.WriteBudgetError` and changes nothing. ValueError where it is below one step.
    cpu_path: `"eager"`, torch's own vectorised operators; `"compile"`, the formula compiled by a
        C++ compiler, once for a machine (`optim/update/built_kernels.py`); or `"auto"`, which
        compiles for fp32 masters of a model of at least 2**26 parameters where that is possible,
        and says so.
        Either has its own bits (docs/numerics.md); `last_report.update_path` says which it is.
    amsgrad, maximize: as in torch.optim.Adam, per group. With amsgrad in any group the state has a
        third plane, max_exp_avg_sq; which planes there are is settled when the state is made.
    state: in what exp_avg and exp_avg_sq are kept, wherever they are: `"fp32"`; `"bf16"`, 4 bytes a
        parameter less; or `"8bit"`, with an exponent that 8 elements share, 5.9 bytes less. Updates
        are computed in fp32, and moments rounded at random (`optim/rules/quantised.py`). State
        dicts and checkpoints stay in fp32, and load into any. Not with amsgrad or float64
        parameters.

    Options behind `lr` go by name: torch and Colossal-AI have different ones third.

    Raises ValueError for a hyperparameter out of range and names it, TypeError for one of another
    type, for an unknown one and for one by position, `nvme.FolderError` for a folder that cannot be
    used, `nvme.DiskFullError` where the state does not fit, and `KernelBuildError` where
    `cpu_path="compile"` is not possible.
    Formulas: `optim.rules.formulas.adam` (Kingma & Ba 2015; Loshchilov & Hutter 2019; with
    amsgrad Reddi et al. 2018).
    """

    @by_name
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: Folders = None,
        nvme_write_budget: int | str | None = None,
        nvme: NvmeConfig | None = None,
        cpu_path: str = "auto",
        amsgrad: bool = False,
        maximize: bool = False,
        state: str = "fp32",
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw_mode": adamw_mode,
            "amsgrad": amsgrad,
            "maximize": maximize,
            **({} if state == "fp32" else {"state": state}),  # for who loads it
        }
        super().__init__(
            params,
            defaults,
            AdamRule(state=state),
            nvme_offload_fraction=nvme_offload_fraction,
            nvme_offload_dir=nvme_offload_dir,
            nvme_write_budget=nvme_write_budget,
            nvme=nvme,
            cpu_path=cpu_path,
        )


class CPUAdam(HybridAdam):
    """HybridAdam for parameters in host memory. Raises ValueError for any other."""

    def check_param(self, param: Tensor) -> None:
        """Raise ValueError for a parameter on another device."""
        super().check_param(param)
        if param.device.type != "cpu":
            raise ValueError(f"CPUAdam got a parameter on {param.device}; use HybridAdam")


class FusedAdam(HybridAdam):
    """HybridAdam for CUDA parameters, with state on the device. Raises ValueError for any other."""

    @by_name
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        amsgrad: bool = False,
        maximize: bool = False,
        state: str = "fp32",
    ) -> None:
        super().__init__(
            params, lr, bias_correction=bias_correction, betas=betas, eps=eps,
            weight_decay=weight_decay, adamw_mode=adamw_mode, amsgrad=amsgrad,
            maximize=maximize, state=state,
        )  # fmt: skip

    def check_param(self, param: Tensor) -> None:
        """Raise ValueError for a parameter on another device."""
        super().check_param(param)
        if param.device.type != "cuda":
            raise ValueError(f"FusedAdam got a parameter on {param.device}; use HybridAdam")
