"""HybridAdam, CPUAdam and FusedAdam: Adam whose state lives where it fits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .adam import AdamRule
from .base import Folders, TieredOptimizer
from .nvme_state import NvmeConfig


class HybridAdam(TieredOptimizer):
    """Adam (`adamw_mode=False`: L2) or AdamW with fp32 state on device, host or NVMe.

    On a `GeminiDDP` it updates fp32 master shards; on a plain module the parameters themselves,
    CPU parameters by the CPU path and CUDA parameters by Triton.

    nvme_offload_fraction: share of the state's bytes that goes to disk, met within one block
        (2**20 elements): exp_avg and exp_avg_sq, and under GeminiDDP the fp32 master too.
    nvme_offload_dir: an existing folder on a disk, or several to stripe over; None is a temporary
        folder. The files are removed when the optimizer is closed or collected, and at exit.

    Raises ValueError for a hyperparameter out of range and names it, `nvme.FolderError` for a
    folder that cannot be used, and `nvme.DiskFullError` where the state does not fit.
    Formula: `optim.formulas.adam` (Kingma & Ba 2015; Loshchilov & Hutter 2019).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: Folders = None,
        *,
        nvme: NvmeConfig | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw_mode": adamw_mode,
        }
        super().__init__(
            params,
            defaults,
            AdamRule(),
            nvme_offload_fraction=nvme_offload_fraction,
            nvme_offload_dir=nvme_offload_dir,
            nvme=nvme,
        )
