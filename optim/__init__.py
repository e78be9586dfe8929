"""Optimizers whose state lives where it fits: on the device, in RAM or on NVMe.

Names are imported on first use, so that planners can use the pure files without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optim.rules.config import NvmeConfig as NvmeConfig
    from optim.rules.loss_scale import LossScale as LossScale
    from optim.rules.report import NonFiniteGradientError as NonFiniteGradientError
    from optim.rules.report import StepReport as StepReport

    from .adam import CPUAdam as CPUAdam
    from .adam import FusedAdam as FusedAdam
    from .adam import HybridAdam as HybridAdam
    from .lion import HybridLion as HybridLion
    from .sgd import HybridSGD as HybridSGD

_HOME = {
    "CPUAdam": "optim.adam",
    "FusedAdam": "optim.adam",
    "HybridAdam": "optim.adam",
    "HybridLion": "optim.lion",
    "HybridSGD": "optim.sgd",
    "LossScale": "optim.rules.loss_scale",
    "NvmeConfig": "optim.rules.config",
    "NonFiniteGradientError": "optim.rules.report",
    "StepReport": "optim.rules.report",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'optim' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
