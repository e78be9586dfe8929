"""Optimizers whose state lives where it fits: on the device, in RAM or on NVMe.

Names are imported on first use, so that planners can use the pure files without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ == "optim":
    from gemini import names

    names.is_long(__name__)
if TYPE_CHECKING:
    from gemini.optim.adafactor import HybridAdafactor as HybridAdafactor
    from gemini.optim.adam import CPUAdam as CPUAdam
    from gemini.optim.adam import FusedAdam as FusedAdam
    from gemini.optim.adam import HybridAdam as HybridAdam
    from gemini.optim.adaptive import HybridAdadelta as HybridAdadelta
    from gemini.optim.adaptive import HybridAdagrad as HybridAdagrad
    from gemini.optim.adaptive import HybridAdamax as HybridAdamax
    from gemini.optim.adaptive import HybridLion as HybridLion
    from gemini.optim.adaptive import HybridNAdam as HybridNAdam
    from gemini.optim.adaptive import HybridRAdam as HybridRAdam
    from gemini.optim.adaptive import HybridRMSprop as HybridRMSprop
    from gemini.optim.lamb import HybridLamb as HybridLamb
    from gemini.optim.muon import HybridMuon as HybridMuon
    from gemini.optim.rules.config import NvmeConfig as NvmeConfig
    from gemini.optim.rules.loss_scale import LossScale as LossScale
    from gemini.optim.rules.report import NonFiniteGradientError as NonFiniteGradientError
    from gemini.optim.rules.report import StepReport as StepReport
    from gemini.optim.schedule_free import HybridScheduleFreeAdamW as HybridScheduleFreeAdamW
    from gemini.optim.sgd import HybridSGD as HybridSGD

_HOME = {
    "CPUAdam": "gemini.optim.adam",
    "FusedAdam": "gemini.optim.adam",
    "HybridAdafactor": "gemini.optim.adafactor",
    "HybridAdadelta": "gemini.optim.adaptive",
    "HybridAdagrad": "gemini.optim.adaptive",
    "HybridAdam": "gemini.optim.adam",
    "HybridAdamax": "gemini.optim.adaptive",
    "HybridLamb": "gemini.optim.lamb",
    "HybridLion": "gemini.optim.adaptive",
    "HybridMuon": "gemini.optim.muon",
    "HybridNAdam": "gemini.optim.adaptive",
    "HybridRAdam": "gemini.optim.adaptive",
    "HybridRMSprop": "gemini.optim.adaptive",
    "HybridSGD": "gemini.optim.sgd",
    "HybridScheduleFreeAdamW": "gemini.optim.schedule_free",
    "LossScale": "gemini.optim.rules.loss_scale",
    "NvmeConfig": "gemini.optim.rules.config",
    "NonFiniteGradientError": "gemini.optim.rules.report",
    "StepReport": "gemini.optim.rules.report",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
