"""Weights in Hugging Face's layout: gathered, written and read a tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gemini.checkpoint.dcp.ranks import Ranks
from gemini.checkpoint.format.errors import CheckpointError
from gemini.checkpoint.untrusted.lazy_tensors import LazyTensors, TensorSpec
from gemini.chunk.local import region_of
from gemini.ddp import GeminiDDP
from gemini.runtime.engine import GeminiEngine
from gemini.runtime.inspect.full_parameters import full_parameters, opaque_as_saved
from gemini.units import ParamId, parse_bytes

from .weight_files import SAFETENSORS, Format, WeightsWriter, spec_of


def export_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    prefix: str = "",
) -> None:
    """Write weights (fp32 masters, rounded once) where `from_pretrained` finds them. Collective.

    path: a new or empty folder, which is complete when it appears. Whole parameters are gathered a
        chunk at a time and written by rank 0. A `config` that can be saved is saved beside them.
    dtype: of floating tensors; None is what each had before it was wrapped.
    prefix: before the names of files, and a dot.

    Raises CheckpointError on every rank.
    """
    export_weights(
        path, model, SAFETENSORS, max_shard_size=max_shard_size, dtype=dtype, prefix=prefix
    )


def export_weights(
    path: str | os.PathLike[str],
    model: nn.Module,
    kind: Format,
    *,
    max_shard_size: int | str,
    dtype: torch.dtype | None = None,
    prefix: str = "",
) -> None:
    """As `export_safetensors`, in files of `kind`. Collective."""
    ranks = Ranks(model, "export_safetensors()" if kind is SAFETENSORS else "save_model()")
    target = Path(path).expanduser().absolute()
    limit = parse_bytes(max_shard_size)
    ranks.same("the path", str(target))
    specs, values = _content(model, dtype)
    writer = ranks.together(
        lambda: WeightsWriter(target, specs, limit, prefix, kind) if ranks.rank == 0 else None
    )
    failure: BaseException | None = None
    for name, value in values:  # collective: every rank goes through all of it
        if writer is not None and failure is None:
            try:
                writer.add(name, value)
            except Exception as error:
                failure = error

    def finish() -> None:
        if writer is None:
            return
        try:
            if failure is not None:
                raise failure
            save_config(model, writer.folder)
            writer.commit()
        except BaseException:
            writer.abandon()
            raise

    ranks.together(finish)


def import_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True
) -> None:
    """Load what `export_safetensors` or `save_pretrained` wrote, a tensor at a time. Collective.

    Rank 0's files count: safetensors, or else `pytorch_model*.bin`. Masters and shards take the
    values; moments stay.
    Raises FormatError for a folder without weights, and as `load_state_dict` does.
    """
    ranks = Ranks(model, "import_safetensors()")
    folder = Path(path).expanduser().absolute()
    with ExitStack() as stack:
        lazy = ranks.together(lambda: LazyTensors(folder, stack))
        if isinstance(model, GeminiDDP):
            lazy.tie([spec.names for spec in model.engine.layout.params])
        else:
            tied: dict[int, list[str]] = {}
            for name, param in model.named_parameters(remove_duplicate=False):
                tied.setdefault(id(param), []).append(name)
            lazy.tie(list(tied.values()))
        model.load_state_dict(lazy, strict=strict)


def _content(
    model: nn.Module, dtype: torch.dtype | None
) -> tuple[list[TensorSpec], Iterator[tuple[str, Tensor]]]:
    """Specs of all tensors, and the tensors in that order (on rank 0)."""
    if not isinstance(model, GeminiDDP):
        first: dict[int, tuple[str, Tensor]] = {}  # a tied tensor under its first name
        for name, value in model.state_dict(keep_vars=True).items():
            first.setdefault(id(value), (name, value))
        plain = first.values()
        specs = [spec_of(name, value.dtype, value.shape, dtype) for name, value in plain]
        return specs, ((name, _whole(value)) for name, value in plain)
    engine = model.engine
    buffers, opaque = list(model.saved_tensors()), opaque_as_saved(engine)
    specs = [
        spec
        for chunk in engine.chunks
        for slot in chunk.spec.slots
        for spec in _specs_of(engine, slot.param, opaque, dtype)
    ]
    first_names = {spec.name for spec in specs}
    specs += [spec_of(name, buffer.dtype, buffer.shape, dtype) for name, buffer in buffers]

    def values() -> Iterator[tuple[str, Tensor]]:
        yield from ((n, value) for n, value in full_parameters(engine) if n in first_names)
        yield from buffers

    return specs, values()


def _specs_of(
    engine: GeminiEngine,
    param: ParamId,
    opaque: Mapping[ParamId, Mapping[str, Tensor]],
    dtype: torch.dtype | None,
) -> Iterator[TensorSpec]:
    """Of what is written for one parameter; what its library saves keeps its dtypes."""
    if param not in opaque:
        shape = torch.Size(region_of(engine.params[param])[0])
        name = engine.layout.params[param].name
        yield spec_of(name, engine.original_dtypes[param], shape, dtype)
        return
    for name, value in opaque[param].items():
        if hasattr(value, "__tensor_flatten__"):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, which a file of weights does not hold; write "
                "model.state_dict() with torch.save on rank 0, or the adapters alone"
            )
        yield spec_of(name, value.dtype, value.shape, None)


def _whole(value: Tensor) -> Tensor:
    """Of what FSDP2 has sharded, all of it. Collective then."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def save_config(model: nn.Module, folder: Path) -> None:
    """What Hugging Face's models save beside their weights."""
    for attribute in ("config", "generation_config"):
        config: Any = getattr(model, attribute, None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)
