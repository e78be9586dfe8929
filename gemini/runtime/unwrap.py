"""Unwrapping: a wrapped module's parameters become plain ones with their fp32 values."""

from __future__ import annotations

import torch

from gemini.chunk.local import is_dtensor, rebind
from gemini.chunk.parameter import unwrap_in_place
from gemini.chunk.storage import params_in
from gemini.runtime.gradients.waiting import Gradients
from gemini.runtime.memory.machine import look_at_machine
from gemini.runtime.schedule.tensor_mgr import StatefulTensorMgr
from gemini.units import format_bytes

from .sharding import Sharding
from .weights import Weights


def check_room(sharding: Sharding, ranks_per_node: int, device: torch.device) -> None:
    """Raise MemoryError, on every rank, where one has no room for all parameters. Collective.

    Each parameter takes the bytes of its original dtype, and two fp32 copies of one chunk are made
    on the way. Chunks in that memory are freed as they are copied.
    """
    params = sharding.layout.params
    whole = sum(
        params[i].numel * dtype.itemsize for i, dtype in enumerate(sharding.original_dtypes)
    )
    passing = (
        2 * torch.float32.itemsize * max(chunk.spec.payload_numel for chunk in sharding.chunks)
    )
    freed = sum(
        chunk.payload.untyped_storage().nbytes()
        for chunk in sharding.chunks
        if chunk.payload.device.type == device.type
    )
    machine = look_at_machine(sharding.backend, ranks_per_node)
    left = machine.host_bytes_left // machine.ranks_per_node
    if device.type != "cpu":
        left = machine.device_bytes_left // machine.ranks_per_device
    short = max(sharding.comm.gather_objects(whole + passing - freed - left))
    if short > 0:
        raise MemoryError(
            f"unwrapped, all parameters are {format_bytes(whole)} on every rank, and one has "
            f"{format_bytes(short)} too little on {device}; expected room for them: keep the "
            "module wrapped, and write weights with gemini.export_safetensors, which takes a chunk"
        )


@torch.no_grad()
def unwrap(
    weights: Weights, gradients: Gradients, manager: StatefulTensorMgr, device: torch.device
) -> None:
    """Give every rank all parameters on `device`, in the dtypes they had; the engine ends then.

    Chunk by chunk: a rank has the finished parameters and two copies of one chunk at a time.
    Gradients, the optimizer's state and all files are gone afterwards. Collective.
    """
    sharding = weights.sharding
    weights.write_back_changes()
    weights.warn_rounded_once()
    gradients.drop()
    manager.release_all()
    for chunk in sharding.chunks:
        values = weights.full_chunk(chunk)
        for index, value in params_in(sharding.layout, chunk.spec, values):
            param = sharding.params[index]
            if index in sharding.opaque:
                sharding.opaque[index].unwrap(value.to(device))
                continue
            value = value.to(device, sharding.original_dtypes[index], copy=True)
            unwrap_in_place(param)
            if is_dtensor(param):
                rebind(param, value)
            else:
                param.data = value
        chunk.payload.untyped_storage().resize_(0)
