"""Optimizers whose state lives where it fits: on the device, in RAM or on NVMe."""

from .hybrid_adam import HybridAdam
from .nvme_state import NvmeConfig
from .report import StepReport

__all__ = ["HybridAdam", "NvmeConfig", "StepReport"]
