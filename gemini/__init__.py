"""The memory manager: train models whose model data does not fit the device.

Names are imported on first use, so that planners and `nvme` can use the pure files without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ddp import GeminiDDP as GeminiDDP
    from .placement.policy import AutoPlacement as AutoPlacement
    from .placement.policy import StaticPlacement as StaticPlacement

_HOME = {
    "AutoPlacement": "gemini.placement.policy",
    "GeminiDDP": "gemini.ddp",
    "StaticPlacement": "gemini.placement.policy",
}
__all__ = ["AutoPlacement", "GeminiDDP", "StaticPlacement"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gemini' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
