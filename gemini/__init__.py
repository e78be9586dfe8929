"""The memory manager: train models whose model data does not fit the device.

Names are imported on first use, so that planners and `nvme` can use the pure files without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemini.chunk.sizing.search import search_chunk_configuration as search_chunk_configuration
    from gemini.runtime.schedule.tensor_mgr import StatefulTensorMgr as StatefulTensorMgr
    from gemini.runtime.wrap.materialise import init_empty as init_empty

    from .checkpoint.export import export_safetensors as export_safetensors
    from .checkpoint.load import load_checkpoint as load_checkpoint
    from .checkpoint.pretrained import load_pretrained as load_pretrained
    from .checkpoint.save import save_checkpoint as save_checkpoint
    from .ddp import GeminiDDP as GeminiDDP
    from .memtracer.collector import MemStatsCollector as MemStatsCollector
    from .memtracer.collector import trace as trace
    from .optimizer import GeminiAdamOptimizer as GeminiAdamOptimizer
    from .optimizer import GeminiOptimizer as GeminiOptimizer
    from .options import ChunkSearch as ChunkSearch
    from .options import PrecisionPolicy as PrecisionPolicy
    from .placement.overruns import BudgetWarning as BudgetWarning
    from .placement.policy import AutoPlacement as AutoPlacement
    from .placement.policy import ConstPlacement as ConstPlacement
    from .placement.policy import StaticPlacement as StaticPlacement

_HOME = {
    "AutoPlacement": "gemini.placement.policy",
    "BudgetWarning": "gemini.placement.overruns",
    "ChunkSearch": "gemini.options",
    "ConstPlacement": "gemini.placement.policy",
    "GeminiAdamOptimizer": "gemini.optimizer",
    "GeminiDDP": "gemini.ddp",
    "GeminiOptimizer": "gemini.optimizer",
    "MemStatsCollector": "gemini.memtracer.collector",
    "PrecisionPolicy": "gemini.options",
    "export_safetensors": "gemini.checkpoint.export",
    "init_empty": "gemini.runtime.wrap.materialise",
    "load_checkpoint": "gemini.checkpoint.load",
    "load_pretrained": "gemini.checkpoint.pretrained",
    "save_checkpoint": "gemini.checkpoint.save",
    "StaticPlacement": "gemini.placement.policy",
    "StatefulTensorMgr": "gemini.runtime.schedule.tensor_mgr",
    "search_chunk_configuration": "gemini.chunk.sizing.search",
    "trace": "gemini.memtracer.collector",
}
__all__ = [
    "AutoPlacement",
    "BudgetWarning",
    "ChunkSearch",
    "ConstPlacement",
    "GeminiAdamOptimizer",
    "GeminiDDP",
    "GeminiOptimizer",
    "MemStatsCollector",
    "PrecisionPolicy",
    "StatefulTensorMgr",
    "StaticPlacement",
    "export_safetensors",
    "init_empty",
    "load_checkpoint",
    "load_pretrained",
    "save_checkpoint",
    "search_chunk_configuration",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gemini' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
