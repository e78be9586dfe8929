"""Doors of samplers: a wrapped module's weights for TRL, verl, vLLM, files and other modules."""

from __future__ import annotations

from .files import WeightFiles, read_weights
from .streams import load_bucket, merged_weights, named_weights, tensor_specs
from .trl import send_through

__all__ = [
    "WeightFiles",
    "load_bucket",
    "merged_weights",
    "named_weights",
    "read_weights",
    "send_through",
    "tensor_specs",
]
