"""Errors of a pass, in words."""

from __future__ import annotations

from contextlib import suppress
from typing import NoReturn

from gemini.chunk.layout import ChunkLayout
from gemini.nvme import NvmeError
from gemini.runtime.parts import Parts
from gemini.units import ParamId


def refuse_double_backward() -> NoReturn:
    raise RuntimeError(
        "a backward with create_graph=True cannot go through a wrapped module: gradients "
        "are packed into chunks as they arrive, and have no graph"
    )


def refuse_unscaled(layout: ChunkLayout, param: ParamId) -> NoReturn:
    raise RuntimeError(
        f"a loss reaches {layout.params[param].name}, or a parameter beside it, without "
        "passing through the outputs of the GeminiDDP; in fp16 its gradient would carry no "
        "loss scale. Compute that part inside the module's forward (or under torch.no_grad)"
    )


def say_what_is_left(parts: Parts, error: NvmeError) -> None:
    """A parameter could not be read: nothing can compute, and memory holds only a part."""
    for chunk in parts.chunks:
        with suppress(NvmeError):  # what was begun ahead may be lost too; then it is not there
            chunk.wait_gathered()
    chunks = [chunk for chunk in parts.chunks if chunk.gathered or chunk.files is None]
    names = [parts.layout.params[slot.param].name for c in chunks for slot in c.spec.slots]
    error.add_note(
        f"{len(names)} of {len(parts.params)} parameters are in memory, with the 16 or 32 bits "
        f"in which they compute; model.salvage() has {', '.join(names) or 'none'}. The others, "
        "and fp32 masters on disk, are those of the last step if the disk comes back; "
        "else load a checkpoint"
    )
