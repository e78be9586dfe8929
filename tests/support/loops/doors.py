"""What drawn programs do to a module before it is wrapped, and how its state leaves and comes back.

Names and values that come out of a file must fit a module without wrappers of torch; memory that
parameters share must give torch's updates, or a refusal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gemini.checkpoint import (
    export_safetensors,
    import_safetensors,
    load_checkpoint,
    save_checkpoint,
)
from gemini.trees import tensors_in

PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.")
DOORS = ("export", "checkpoint", "file", "back")
Build = Callable[..., Any]


def bare(name: str) -> str:
    """Name without what torch's wrappers add to it."""
    for part in PARTS:
        name = name.replace(part, "")
    return name


def without_wrappers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {bare(name): value for name, value in state.items()}


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def _layers(change: Callable[[nn.Module], Any]) -> Callable[[Any], Any]:
    def changed(module: Any) -> Any:
        for i in range(0, len(module.layers), 2):
            module.layers[i] = change(module.layers[i])
        return module

    return changed


def _share(module: Any, value: Tensor) -> Any:
    module.layers[1].weight.data = value
    return module


def _attribute(module: Any) -> Any:
    module.kept = [module.layers[0].weight.detach()[1:]]
    return module


def _buffer(module: Any) -> Any:
    module.register_buffer("kept", module.layers[0].bias.data)
    return module


def _flat(module: Any) -> Any:
    """All parameters side by side in one vector, which is no sharing."""
    vector = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, module.parameters())
    return module


def _columns(module: Any) -> Any:
    """Two weights that are columns of one matrix, so that their ranges overlap and they do not."""
    pair = torch.cat([layer.weight.data for layer in module.layers[:2]], dim=1)
    for layer, part in zip(module.layers, pair.chunk(2, dim=1), strict=False):
        layer.weight.data = part
    return module


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "": lambda module: module,
    "checkpointed": _layers(checkpoint_wrapper),
    "compiled": _layers(_compiled),
    "compiled around checkpointed": _layers(lambda layer: _compiled(checkpoint_wrapper(layer))),
    "checkpointed around compiled": _layers(lambda layer: checkpoint_wrapper(_compiled(layer))),
    "compiled whole": _compiled,
    "flat": _flat,
    "columns": _columns,
}
ALIASES: dict[str, Callable[[Any], Any]] = {
    "one memory": lambda module: _share(module, module.layers[0].weight.data),
    "transposed": lambda module: _share(module, module.layers[0].weight.data.t()),
    "attribute": _attribute,
    "buffer": _buffer,
}


def kept_of(module: Any) -> list[float]:
    """Norms of what a module of `ALIASES` keeps beside its parameters."""
    return [float(value.double().norm()) for value in tensors_in(getattr(module, "kept", ()))]


def built(build: Build, kind: str) -> Build:
    """Builder of the same module under a wrapper, or with memory that is shared."""
    change = (WRAPPERS | ALIASES)[kind]
    return lambda *args: change(build(*args))


@contextmanager
def _one_folder(ranks: Any) -> Iterator[Path]:
    """Folder of all ranks, until all of them leave it."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(ranks.gather_objects(own)[0])
        ranks.gather_objects(None)


def through(model: Any, optimizer: Any, door: str, fresh: Any, *, pending: bool) -> None:
    """Let state leave a wrapped module by a door, into a module without wrappers and back.

    pending: there are gradients or losses, so that nothing is loaded.
    Raises AssertionError where `fresh` has other names or values then.
    """
    ranks = model.engine.comm
    (want, *_) = ranks.gather_objects(without_wrappers(model.state_dict()))  # rank 0 has it
    with _one_folder(ranks) as folder:
        path = folder / "saved"
        if door == "export":
            export_safetensors(path, model)
            import_safetensors(path, fresh)
        elif door == "checkpoint":
            save_checkpoint(path, model, optimizer)
            load_checkpoint(path, fresh)
        else:
            state = model.state_dict()
            if door == "back":  # as a run without wrappers saves it
                state = without_wrappers(state)
            if ranks.rank == 0:
                torch.save({"model": state}, path)
            ranks.gather_objects(None)  # the file is there
            load_checkpoint(path, fresh)
        if not pending and door == "checkpoint":
            load_checkpoint(path, model, optimizer)
        elif not pending:
            load_checkpoint(path, model)
            optimizer.load_state_dict(optimizer.state_dict())
    got = fresh.state_dict()
    assert got.keys() == want.keys(), f"{door}: other names, {sorted(got.keys() ^ want.keys())[:2]}"
    for name, value in want.items():
        assert torch.equal(value, got[name]), f"{door}: other values of {name}"
