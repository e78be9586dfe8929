"""Doors through which other libraries' loops reach the memory manager. The engine imports none.

Each door is a file or a folder. It imports its own optional package, and names the extra that
installs it. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemini.integrations.booster import Booster as Booster
    from gemini.integrations.plugins.fsdp import TorchFSDPPlugin as TorchFSDPPlugin
    from gemini.integrations.plugins.gemini_plugins import GeminiPlugin as GeminiPlugin
    from gemini.integrations.plugins.gemini_plugins import LowLevelZeroPlugin as LowLevelZeroPlugin
    from gemini.integrations.plugins.hybrid import HybridParallelPlugin as HybridParallelPlugin
    from gemini.integrations.plugins.torch_plugins import TorchDDPPlugin as TorchDDPPlugin
    from gemini.mesh.head_loss import chunk_loss as chunk_loss

_HOME = {
    "Booster": "gemini.integrations.booster",
    "GeminiPlugin": "gemini.integrations.plugins.gemini_plugins",
    "HybridParallelPlugin": "gemini.integrations.plugins.hybrid",
    "LowLevelZeroPlugin": "gemini.integrations.plugins.gemini_plugins",
    "TorchDDPPlugin": "gemini.integrations.plugins.torch_plugins",
    "TorchFSDPPlugin": "gemini.integrations.plugins.fsdp",
    "chunk_loss": "gemini.mesh.head_loss",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gemini.integrations' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
