"""Lightning: `Trainer(strategy=GeminiStrategy(...))`, `Fabric(strategy=GeminiFabricStrategy(...))`.

Importing this registers the names "gemini", "gemini_nvme", "zero1" and "zero2" with both.

    from gemini.integrations.lightning import GeminiStrategy
    trainer = Trainer(devices=2, precision="bf16-mixed", strategy=GeminiStrategy("auto"))
"""

from __future__ import annotations

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry
except ImportError as error:
    raise ImportError(
        "gemini.integrations.lightning is for the package lightning (and not pytorch_lightning "
        "alone), which is not there: pip install lightning"
    ) from error

from .colossal import ColossalAIStrategy
from .fabric import GeminiFabricStrategy
from .shared import GeminiFabricPrecision, GeminiPrecision, register
from .trainer import GeminiMetrics, GeminiStrategy

__all__ = [
    "ColossalAIStrategy",
    "GeminiFabricPrecision",
    "GeminiFabricStrategy",
    "GeminiMetrics",
    "GeminiPrecision",
    "GeminiStrategy",
]

register(StrategyRegistry, GeminiStrategy)
register(STRATEGY_REGISTRY, GeminiFabricStrategy)
StrategyRegistry.register(
    "colossalai", ColossalAIStrategy, description="ColossalAIStrategy's own names", override=True
)
