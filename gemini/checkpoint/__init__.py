"""Checkpoints: streamed, atomic, verified, for any world size; torch.distributed.checkpoint reads
them, too.

What is torch's or another program's is `gemini.checkpoint.foreign`'s, and is imported if it is met.
"""

from typing import TYPE_CHECKING, Any

from .export import export_safetensors, import_safetensors
from .format.manifest import CheckpointError, CorruptError, FormatError, MismatchError
from .load import load_checkpoint
from .save import save_checkpoint

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name in ("get_state_dict", "set_state_dict"):  # of torch.distributed.checkpoint's tensors
        from . import state_dict

        return getattr(state_dict, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
