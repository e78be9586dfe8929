"""Linear layers that multiply in float8, by torchao: `use_fp8`, and `mixed_precision="fp8"`."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from gemini.integrations.options import Case

log = logging.getLogger("gemini")

MULTIPLE = 16  # of both sizes of a layer, which the multiplication wants
FLOAT8 = Case(
    lambda own: getattr(own, "tp_size", 1) == 1, "float8 is for layers that are whole: tp_size=1"
)
_FROM = (8, 9)  # compute capability that multiplies in float8


def in_float8(model: nn.Module, device: torch.device) -> None:
    """Make the linear layers of a model multiply in float8, in place, before it is wrapped.

    Inputs, weights and gradients are rounded with one scale a tensor each time; parameters stay the
    same objects, in their own dtype. A language model's head stays as it is, and so do layers whose
    sizes are no multiples of 16. On a device without float8 results are emulated.
    Raises ValueError for a model without such a layer.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()

    def is_taken(layer: nn.Module, name: str) -> bool:
        sizes = (getattr(layer, "in_features", 1), getattr(layer, "out_features", 1))
        return (
            type(layer) is nn.Linear
            and layer is not head
            and not any(size % MULTIPLE for size in sizes)
        )

    done = any(type(layer).__name__ == "Float8Linear" for layer in model.modules())
    there = any(is_taken(layer, name) for name, layer in model.named_modules())
    if not (done or there):
        raise ValueError(
            f"{type(model).__name__} has no torch.nn.Linear to multiply in float8; expected some "
            f"beside the head, of sizes that are multiples of {MULTIPLE}, or a plugin without "
            "use_fp8"
        )
    if not there:
        return
    float8 = _torchao()
    emulated = not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FROM)
    if emulated:
        log.warning(
            "%s has no float8: results are those of float8, emulated, and nothing is faster", device
        )
    config = float8.Float8LinearConfig(emulate=emulated)
    float8.convert_to_float8_training(model, module_filter_fn=is_taken, config=config)


def _torchao() -> Any:
    try:
        import torchao.float8 as float8
    except ImportError as error:
        raise ImportError(
            "use_fp8 and mixed_precision='fp8' need torchao: pip install torchao"
        ) from error
    return float8
