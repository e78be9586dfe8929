"""Optimizers whose state lives where it fits: on the device, in RAM or on NVMe."""

from .adam import CPUAdam, FusedAdam, HybridAdam
from .config import NvmeConfig
from .lion import HybridLion
from .report import StepReport
from .sgd import HybridSGD

__all__ = [
    "CPUAdam",
    "FusedAdam",
    "HybridAdam",
    "HybridLion",
    "HybridSGD",
    "NvmeConfig",
    "StepReport",
]
