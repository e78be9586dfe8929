"""What a Booster saves and loads: weights, optimizer state, schedules, whatever the plugin."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemini.checkpoint.dcp.ranks import Ranks
from gemini.checkpoint.export import (
    SAFETENSORS,
    TORCH,
    Format,
    WeightsWriter,
    export_weights,
    save_config,
    spec_of,
)
from gemini.checkpoint.format.manifest import CheckpointError, FormatError, on_disk
from gemini.checkpoint.load import load_checkpoint
from gemini.checkpoint.model.state import parts_of
from gemini.checkpoint.save import in_background, save_checkpoint, settle
from gemini.checkpoint.untrusted.lazy_tensors import TensorSpec
from gemini.integrations.parallel.pipelined import Pipelined, gathered_weights
from gemini.integrations.parts import accept, inner_of
from gemini.integrations.plugins import fsdp
from gemini.nvme.files import calls
from gemini.tickets import Done, Ticket

from .optimizer_state import full_state, load_full_state, scale_of, set_scale

_NO_LIMIT = 1 << 62  # bytes of a file


def save_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    shard: bool,
    prefix: str | None,
    size_per_shard: int,
    use_safetensors: bool,
    use_async: bool,
) -> Ticket[None]:
    """See `Booster.save_model`."""
    model, path = inner_of(model), Path(checkpoint).expanduser().absolute()
    if not size_per_shard > 0:
        raise ValueError(f"size_per_shard={size_per_shard} MiB must be positive")
    if prefix and not shard:
        raise ValueError(
            f"prefix={prefix!r} without shard=True; expected none: a file has the name it is given"
        )
    ranks = begin(model, "save_model()")
    limit = size_per_shard << 20 if shard else _NO_LIMIT
    as_safetensors = use_safetensors or (path.suffix == ".safetensors" and not shard)
    kind = SAFETENSORS if as_safetensors else TORCH
    if use_async or isinstance(model, Pipelined):
        state = full_weights(model, ranks)
        if not isinstance(model, Pipelined):  # whose weights are copies, tied ones one tensor
            state = {name: _copied(value) for name, value in state.items()}

        def write() -> None:
            if shard or as_safetensors:
                _write_folder(model, state, path, limit, prefix, kind, one=not shard)
            else:
                write_file(path, _saving(state))

        if not use_async:
            ranks.together(lambda: None if ranks.rank else write())
            return Done(None)
        return Done(None) if ranks.rank else in_background(str(path), write)
    if not (shard or as_safetensors):
        state = dict(full_weights(model, ranks))
        ranks.together(lambda: None if ranks.rank else write_file(path, _saving(state)))
        return Done(None)
    folder = path if shard else _beside(path)
    export_weights(folder, model, kind, max_shard_size=limit, prefix=prefix or "")
    if not shard:
        ranks.together(lambda: None if ranks.rank else _take_out(folder, path))
    return Done(None)


def load_model(model: nn.Module, checkpoint: str | os.PathLike[str], *, strict: bool) -> None:
    """See `Booster.load_model`."""
    load_checkpoint(checkpoint, inner_of(model), strict=strict)


def save_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: str | os.PathLike[str],
    *,
    shard: bool,
    use_async: bool,
) -> Ticket[None]:
    """See `Booster.save_optimizer`."""
    model, path = inner_of(model), Path(checkpoint).expanduser().absolute()
    if shard:
        return save_checkpoint(
            path, model, optimizer, extra=scale_of(optimizer), async_save=use_async, weights=False
        )
    if isinstance(model, Pipelined):
        raise ValueError(
            "save_optimizer() of a pipeline in one file; expected shard=True: each rank writes "
            "what it has, and it loads at any pp_size"
        )
    ranks = begin(model, "save_optimizer()")
    state = full_state(model, optimizer)
    if not use_async:
        ranks.together(lambda: None if ranks.rank else write_file(path, _saving(state)))
        return Done(None)
    state = _deep_copied(state)
    if ranks.rank:
        return Done(None)
    return in_background(str(path), lambda: write_file(path, _saving(state)))


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: str | os.PathLike[str]
) -> None:
    """See `Booster.load_optimizer`."""
    model, path = inner_of(model), Path(checkpoint).expanduser().absolute()
    if path.is_file() and not isinstance(model, Pipelined):
        ranks = begin(model, "load_optimizer()")
        load_full_state(path, model, optimizer, ranks)
    else:
        set_scale(optimizer, load_checkpoint(path, model, optimizer, weights=False))


def save_lr_scheduler(lr_scheduler: Any, checkpoint: str | os.PathLike[str]) -> None:
    """See `Booster.save_lr_scheduler`."""
    path = Path(checkpoint).expanduser().absolute()
    ranks = Ranks(nn.Module(), "save_lr_scheduler()")
    state = lr_scheduler.state_dict()
    ranks.together(lambda: None if ranks.rank else write_file(path, _saving(state)))


def load_lr_scheduler(lr_scheduler: Any, checkpoint: str | os.PathLike[str]) -> None:
    """See `Booster.load_lr_scheduler`. Raises FormatError."""
    path = Path(checkpoint).expanduser().absolute()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FormatError(f"{path} holds no schedule: {error}") from error
    lr_scheduler.load_state_dict(state)


def begin(model: nn.Module, call: str) -> Ranks:
    """Before a save or a load: what is under way ends, and what failed is said on every rank."""
    ranks = Ranks(model, call, parts_of(model))
    settle(ranks)
    return ranks


def full_weights(model: nn.Module, ranks: Ranks) -> Mapping[str, Any]:
    """The state dict, whole on rank 0. Collective."""
    if isinstance(model, Pipelined):
        return gathered_weights(model, ranks)
    if hasattr(model, "set_requires_gradient_sync"):
        return fsdp.full_state(model)
    state: Mapping[str, Any] = model.state_dict()
    return state


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Complete when it appears. Raises CheckpointError."""
    if path.is_dir():
        raise CheckpointError(f"cannot save to {path}: it is a folder; give a file, or shard=True")
    unfinished = _beside(path)
    with on_disk("save to", path):
        calls.make_folders(path.parent)
        write(unfinished)
        calls.sync_file(unfinished)
        calls.rename(unfinished, path)
        calls.sync_folder(path.parent)


def _saving(state: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(state, path)


def _beside(path: Path) -> Path:
    return path.parent / f".{path.name}.saving"


def _write_folder(
    model: nn.Module,
    state: Mapping[str, Tensor],
    path: Path,
    limit: int,
    prefix: str | None,
    kind: Format,
    *,
    one: bool,
) -> None:
    """A state dict as a folder of weights; `one`: as one file of this name."""
    folder = _beside(path) if one else path
    first: dict[int, tuple[str, Tensor]] = {}  # a tied tensor under its first name
    for name, value in state.items():
        first.setdefault(value.data_ptr() or id(value), (name, value))
    specs: list[TensorSpec] = [
        spec_of(name, value.dtype, value.shape, None) for name, value in first.values()
    ]
    writer = WeightsWriter(folder, specs, limit, prefix or "", kind)
    writer.write(first.values(), partial(save_config, model))
    if one:
        _take_out(folder, path)


def _take_out(folder: Path, path: Path) -> None:
    """The one file of weights of `folder` becomes `path`."""
    with on_disk("save to", path):
        (file,) = folder.glob("*.safetensors")
        calls.rename(file, path)
        for rest in list(folder.iterdir()):
            calls.unlink(rest)
        folder.rmdir()
        calls.sync_folder(path.parent)


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _deep_copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _deep_copied(inner) for key, inner in value.items()}
    return [_deep_copied(inner) for inner in value] if isinstance(value, list) else _copied(value)


def check_gathers(gather_dtensor: bool) -> None:
    if not gather_dtensor:
        accept({"gather_dtensor=False": "nothing is gathered that need not be"})


def check_reading(low_cpu_mem_mode: bool, num_threads: int) -> None:
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}; expected 1 or more")
    if not low_cpu_mem_mode:
        accept({"low_cpu_mem_mode=False": "values are read one by one, from mapped files"})
    if num_threads > 1:
        accept({"num_threads": "ranks read what they keep, from mapped files"})


def check_optimizer_files(prefix: str | None, size_per_shard: int) -> None:
    if prefix:
        raise ValueError(f"prefix={prefix!r} of an optimizer's files; expected none")
    if size_per_shard != 1024:
        raise ValueError(
            f"size_per_shard={size_per_shard} of an optimizer's files; expected 1024, which does "
            "nothing: each rank writes one file with what it has"
        )
