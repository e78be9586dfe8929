"""Checkpoints on torch.distributed.checkpoint: streamed, atomic, verified, for any world size."""

from gemini.checkpoint.format.manifest import (
    CheckpointError,
    CorruptError,
    FormatError,
    MismatchError,
)

from .export import export_safetensors, import_safetensors
from .load import load_checkpoint
from .save import save_checkpoint
from .state_dict import get_state_dict, set_state_dict

__all__ = [
    "CheckpointError",
    "CorruptError",
    "FormatError",
    "MismatchError",
    "export_safetensors",
    "get_state_dict",
    "import_safetensors",
    "load_checkpoint",
    "save_checkpoint",
    "set_state_dict",
]
