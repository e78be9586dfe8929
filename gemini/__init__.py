"""Memory manager for models whose model data does not fit the device.

Names are imported on first use, so that planners and `nvme` can use the pure files without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemini.chunk.sizing.search import search_chunk_configuration as search_chunk_configuration
    from gemini.optim import CPUAdam as CPUAdam
    from gemini.optim import FusedAdam as FusedAdam
    from gemini.optim import HybridAdam as HybridAdam
    from gemini.optim import HybridLion as HybridLion
    from gemini.optim import HybridSGD as HybridSGD
    from gemini.optim import LossScale as LossScale
    from gemini.optim import NvmeConfig as NvmeConfig
    from gemini.runtime.schedule.tensor_mgr import StatefulTensorMgr as StatefulTensorMgr
    from gemini.runtime.wrap.materialise import init_empty as init_empty

    from .accumulation.accumulate import accumulate as accumulate
    from .checkpoint.export import export_safetensors as export_safetensors
    from .checkpoint.load import load_checkpoint as load_checkpoint
    from .checkpoint.pretrained import load_pretrained as load_pretrained
    from .checkpoint.save import save_checkpoint as save_checkpoint
    from .ddp import GeminiDDP as GeminiDDP
    from .ema import EMA as EMA
    from .embedding.modules import CachedEmbedding as CachedEmbedding
    from .embedding.modules import CachedEmbeddingBag as CachedEmbeddingBag
    from .fused import fuse as fuse
    from .integrations.autoparallel import autoparallelize as autoparallelize
    from .memtracer.collector import MemStatsCollector as MemStatsCollector
    from .memtracer.collector import trace as trace
    from .metrics import Metrics as Metrics
    from .optimizer import GeminiAdamOptimizer as GeminiAdamOptimizer
    from .optimizer import GeminiOptimizer as GeminiOptimizer
    from .options import ChunkSearch as ChunkSearch
    from .options import PrecisionPolicy as PrecisionPolicy
    from .placement.overruns import BudgetWarning as BudgetWarning
    from .placement.policy import AutoPlacement as AutoPlacement
    from .placement.policy import ConstPlacement as ConstPlacement
    from .placement.policy import StaticPlacement as StaticPlacement

__version__ = "0.1.0"
_HOME = {
    "AutoPlacement": "gemini.placement.policy",
    "BudgetWarning": "gemini.placement.overruns",
    "CPUAdam": "gemini.optim",
    "CachedEmbedding": "gemini.embedding.modules",
    "CachedEmbeddingBag": "gemini.embedding.modules",
    "ChunkSearch": "gemini.options",
    "EMA": "gemini.ema",
    "ConstPlacement": "gemini.placement.policy",
    "FusedAdam": "gemini.optim",
    "GeminiAdamOptimizer": "gemini.optimizer",
    "GeminiDDP": "gemini.ddp",
    "GeminiOptimizer": "gemini.optimizer",
    "HybridAdam": "gemini.optim",
    "HybridLion": "gemini.optim",
    "HybridSGD": "gemini.optim",
    "LossScale": "gemini.optim",
    "MemStatsCollector": "gemini.memtracer.collector",
    "Metrics": "gemini.metrics",
    "NvmeConfig": "gemini.optim",
    "PrecisionPolicy": "gemini.options",
    "accumulate": "gemini.accumulation.accumulate",
    "autoparallelize": "gemini.integrations.autoparallel",
    "export_safetensors": "gemini.checkpoint.export",
    "fuse": "gemini.fused",
    "init_empty": "gemini.runtime.wrap.materialise",
    "load_checkpoint": "gemini.checkpoint.load",
    "load_pretrained": "gemini.checkpoint.pretrained",
    "save_checkpoint": "gemini.checkpoint.save",
    "StaticPlacement": "gemini.placement.policy",
    "StatefulTensorMgr": "gemini.runtime.schedule.tensor_mgr",
    "search_chunk_configuration": "gemini.chunk.sizing.search",
    "trace": "gemini.memtracer.collector",
}
_TORCHS = {
    "Adam": "HybridAdam(params, adamw_mode=False)",
    "AdamW": "HybridAdam(params, weight_decay=0.01), as torch decays",
    "SGD": "HybridSGD",
}
__all__ = [*_HOME, "__version__"]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gemini' has no attribute {name!r}{_where(name)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def _where(name: str) -> str:
    """End of a message about a name that is not here: where it is, or what was meant."""
    if name.startswith("_"):
        return ""
    # `from gemini import names` asks for a submodule as an attribute first
    for package in ("gemini.optim", "gemini.integrations") if name[0].isupper() else ():
        if name in importlib.import_module(package).__all__:
            return f"; it is {package}.{name}"
    if name in _TORCHS:
        return f"; it is gemini.{_TORCHS[name]}"
    optim = importlib.import_module("gemini.optim") if name.startswith("Hybrid") else None
    names = {**_HOME, **dict.fromkeys(getattr(optim, "__all__", ()), "gemini.optim")}
    near = importlib.import_module("gemini.arguments").nearest(name, names)
    if near is None:
        return ""
    return f"; did you mean {near if near in _HOME else f'gemini.optim.{near}'}?"
