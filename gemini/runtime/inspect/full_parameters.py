"""Full parameters from shards, and shards from full parameters, one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from gemini.chunk.local import full_tensor_of, group_of
from gemini.chunk.opaque import OpaqueChunk
from gemini.chunk.storage import Chunk, params_in
from gemini.nvme import NvmeError
from gemini.runtime.schedule.tensor_mgr import StatefulTensorMgr
from gemini.runtime.sharding import Sharding
from gemini.runtime.step.state.dtensors import dtensors_in
from gemini.runtime.step.state.full_state import gathered, scatter
from gemini.runtime.weights import Weights
from gemini.units import WORLD, ParamId


def full_parameters(weights: Weights, *, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of every parameter on rank 0, nothing on the others; all ranks iterate.

    everywhere: on every rank.
    Values come from the fp32 masters, if there are any, in the dtype that the parameter had before
    wrapping, on the CPU. An opaque parameter has the form in which its library saves it. Tied
    parameters come under each of their names, as one tensor.
    """
    weights.write_back_changes()
    sharding = weights.sharding
    weights.warn_rounded_once()
    for chunk in sharding.chunks:
        for param, value in (
            _on_every_rank(weights, chunk)
            if everywhere
            else gathered(sharding, chunk, weights.master_of(chunk), cut=False)
        ):
            if param in sharding.opaque:
                yield from sharding.opaque[param].saved(value).items()
                continue
            value = value.to(sharding.original_dtypes[param], copy=True)
            for name in sharding.layout.params[param].names:
                yield name, value


def _on_every_rank(weights: Weights, chunk: Chunk) -> Iterator[tuple[ParamId, Tensor]]:
    """Parameters of a chunk, as `gathered`, on every rank. Collective."""
    sharding = weights.sharding
    for param, mine in params_in(sharding.layout, chunk.spec, weights.full_chunk(chunk)):
        if param not in sharding.opaque:
            mine = full_tensor_of(sharding.params[param], mine)
        yield param, mine.cpu()


def opaque_as_saved(weights: Weights) -> dict[ParamId, dict[str, Tensor]]:
    """Tensors of every opaque parameter in a state dict, on the meta device. All ranks call.

    Dtypes and shapes may depend on values: they are exact on the first rank of the first replica,
    and those of zeros on the others.
    """
    weights.write_back_changes()
    sharding = weights.sharding
    found = {}
    for chunk in sharding.chunks:
        if not isinstance(chunk, OpaqueChunk):
            continue
        payload = sharding.links[chunk.spec.group].gather(weights.master_of(chunk))
        if payload is None:
            payload = torch.zeros(chunk.spec.payload_numel, dtype=chunk.dtype)
        for param, mine in params_in(sharding.layout, chunk.spec, payload.cpu()):
            saved = sharding.opaque[param].saved(mine)
            found[param] = {name: value.to("meta") for name, value in saved.items()}
    return found


def cut_parameters(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """(name, DTensor) of every parameter on every rank, on the CPU; all ranks iterate.

    Values are fp32 if there are masters or originals, else in the compute dtype. Tied parameters
    come under each of their names, as one tensor.
    """
    weights.write_back_changes()
    sharding = weights.sharding
    weights.warn_rounded_once()
    for chunk in sharding.chunks:
        mine = weights.master_of(chunk).to(weights.exact_dtype(chunk))
        for param, value in gathered(sharding, chunk, mine, cut=True):
            if param in sharding.opaque:  # whole on every rank
                yield from sharding.opaque[param].saved(value).items()
                continue
            for name in sharding.layout.params[param].names:
                yield name, value


def salvageable(weights: Weights) -> dict[str, Tensor]:
    """Copies, in the compute dtype, of the full parameters that this rank has in memory.

    They are what remains if files are lost: 16-bit values, and not the fp32 masters. With several
    ranks only parameters of gathered chunks are full.
    """
    weights.settle()
    sharding = weights.sharding
    weights.regather.end()
    found = {}
    for chunk in sharding.chunks:
        values = chunk.payload
        with suppress(NvmeError):  # rows of a stack may be missing, and lost with the files
            chunk.wait_gathered()
        if not chunk.gathered or chunk.pending is not None:
            if chunk.files is not None or sharding.links[chunk.spec.group].world_size > 1:
                continue
            values = chunk.shard
        for param, value in params_in(sharding.layout, chunk.spec, values):
            spec = sharding.layout.params[param]
            if param in sharding.opaque:
                found.update(sharding.opaque[param].saved(value.cpu()))
                continue
            if group_of(sharding.params[param]) == WORLD:
                found.update(dict.fromkeys(spec.names, value.cpu().clone()))
    return found


@torch.no_grad()
def load_full_parameters(
    weights: Weights, manager: StatefulTensorMgr, values: Mapping[str, Tensor]
) -> None:
    """Load rank 0's `values` into the parameters that they name. All ranks call.

    Of a DTensor every rank gives its part; other values of other ranks are ignored. Shards and fp32
    masters take the values; moments, step counts and other parameters stay.
    Raises ValueError on every rank, before anything is changed, if a shape differs, or a value is a
    DTensor on some ranks only.
    """
    weights.write_back_changes()
    sharding = weights.sharding
    known = [
        (name, tuple(param.shape))
        for spec, param in zip(sharding.layout.params, sharding.params, strict=True)
        if spec.form is None
        for name in spec.names
    ]
    wrong = [
        f"{name}: {tuple(values[name].shape)} was given, {shape} is expected"
        for name, shape in known
        if name in values and tuple(values[name].shape) != shape
    ]
    for one in sharding.opaque.values() if sharding.comm.rank == 0 else ():
        try:
            known += [(name, ()) for name in one.saved_names if name in values]
            one.given(values)
        except ValueError as error:
            wrong.append(str(error))
    wrong, named = sharding.comm.gather_objects((wrong, [n for n, _ in known if n in values]))[0]
    if wrong:
        raise ValueError("the state dict does not fit: " + "; ".join(wrong))
    given = set(named)
    split = dtensors_in(sharding.comm, values) & given
    for chunk in sharding.chunks:
        name_of = {
            slot.param: name
            for slot in chunk.spec.slots
            for name in _loaded_names(sharding, slot.param)[::-1]  # the first that is given
            if name in given
        }
        if not name_of:
            continue
        mine = weights.master_of(chunk)
        payload = sharding.links[chunk.spec.group].gather(mine)
        own = name_of.keys() - sharding.opaque.keys()
        if payload is not None:
            for param, place in params_in(sharding.layout, chunk.spec, payload):
                if param in name_of and param in sharding.opaque:
                    sharding.opaque[param].load(place, values)
        parted = {param for param in own if name_of[param] in split}
        scatter(
            sharding, chunk, payload, mine,
            {p: values.get(name) for p, name in name_of.items() if p in own}, parted,
        )  # fmt: skip
        weights.set_master(chunk, mine)
    manager.release_all()
    weights.after_step(trained=False)
    params = range(len(sharding.params))
    weights.user_writes.stepped(
        [p for p in map(ParamId, params) if given & set(sharding.layout.params[p].names)]
    )


def _loaded_names(sharding: Sharding, param: ParamId) -> Sequence[str]:
    """Names of a parameter's values in a state dict."""
    one = sharding.opaque.get(param)
    return sharding.layout.params[param].names if one is None else one.saved_names
