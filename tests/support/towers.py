"""The Tower wrapped in several chunks, with an optimizer whose state may be on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.shared.models import Tower
from bench.shared.reference import flat
from gemini import GeminiDDP
from optim import HybridAdam, NvmeConfig
from tests.support.spilled import SMALL

ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}


def wrapped(
    precision: str = "fp32",
    device: Any = "cpu",
    folder: Any = None,
    fraction: float = 0.0,
    kind: Any = HybridAdam,
    groups: Callable[[Any], Any] = list,
    rule: dict[str, Any] = ADAM,
    **options: Any,
) -> tuple[GeminiDDP, Any]:
    """`rule`: of the optimizer; `options`: of GeminiDDP."""
    model = GeminiDDP(Tower(), device, precision=precision, **SMALL, **options)
    optimizer = kind(
        groups(model.parameters()),
        **rule,
        nvme_offload_fraction=fraction,
        nvme_offload_dir=folder,
        nvme=NvmeConfig(block_numel=4096),
    )
    return model, optimizer


def weights(model: GeminiDDP) -> Tensor:
    """fp32, of everything."""
    state = model.state_dict()
    return flat([state[name] for name, _ in model.module.named_parameters()])


def weights_of(model: GeminiDDP) -> dict[str, Tensor]:
    """Copies of all weights, as modules see them. Collective."""
    with model.summon_full_params(writeback=False):
        return {name: param.detach().clone() for name, param in model.module.named_parameters()}
