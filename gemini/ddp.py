"""GeminiDDP, the front door."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini.chunk.layout import ChunkLayout
from gemini.chunk.search import search_chunk_configuration
from gemini.placement.policy import Placement, parse_placement
from gemini.runtime.backend import Backend, make_backend
from gemini.runtime.comm import Communicator
from gemini.runtime.engine import Engine
from gemini.runtime.hooks import ModuleHooks
from gemini.runtime.specs import collect_params
from gemini.runtime.trees import map_tensors

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class GeminiDDP(nn.Module):
    """Shards a module over ranks and places its model data, behind the module's own interface.

    The module is changed in place: its parameters keep their identity and become views of chunks
    in the compute dtype. Every rank starts with rank 0's values. Use plain `loss.backward()`.

    module: on the CPU or on `device`; wrapped once.
    device: where modules compute; None is the CUDA device of this process, else the CPU. A
        `gemini.runtime.backend.Backend` is taken as it is.
    placement_policy: `"auto"` (what fits `AutoPlacement.device_budget` on the device, optimizer
        state that does not on NVMe), `"static"` or `"cuda"` (everything on the device), or a
        placement dataclass. Parameters are sharded as in ZeRO-3 but for
        `StaticPlacement(shard_param_frac)`.
    precision: `"bf16"` or `"fp32"`: dtype of parameters, activations and gradients. Floating
        inputs are cast to it; buffers keep theirs.
    process_group: None is the default group, or no group where torch.distributed is not set up.
    search_range_m, hidden_dim, min_chunk_size_m: see `search_chunk_configuration`.
    max_prefetch: chunks gathered ahead of their use.
    force_outputs_fp32: floating outputs are cast to fp32.
    max_norm: gradients are clipped to this L2 norm over all parameters and ranks; 0 does not clip.

    Raises ValueError, before anything is changed, for a module that cannot be wrapped.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | Backend | None = None,
        placement_policy: str | Placement = "auto",
        *,
        precision: str = "bf16",
        process_group: dist.ProcessGroup | None = None,
        search_range_m: float | None = None,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        max_prefetch: int = 1,
        force_outputs_fp32: bool = False,
        max_norm: float = 0.0,
    ) -> None:
        super().__init__()
        if precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r}; expected one of {sorted(PRECISIONS)}")
        if max_norm < 0:
            raise ValueError(f"max_norm={max_norm} is negative; 0 does not clip")
        if max_prefetch < 0:
            raise ValueError(f"max_prefetch={max_prefetch} is negative; 0 does not prefetch")
        placement = parse_placement(placement_policy)
        self._dtype = PRECISIONS[precision]
        params, specs = collect_params(module, str(self._dtype).removeprefix("torch."))
        comm = Communicator(process_group)
        capacity = search_chunk_configuration(
            specs,
            search_range_m=search_range_m,
            hidden_dim=hidden_dim,
            min_chunk_size_m=min_chunk_size_m,
        )
        layout = ChunkLayout.build(specs, capacity, comm.world_size)
        _check_same_layout(comm, layout)
        backend = _backend(device)
        self.module = module
        self._force_outputs_fp32 = force_outputs_fp32
        self.engine = Engine(
            params, layout, backend, comm, placement, max_prefetch=max_prefetch, max_norm=max_norm
        )
        for buffer in module.buffers():
            buffer.data = buffer.data.to(backend.device)
        self._hooks = None if self.engine.all_gathered else ModuleHooks(self.engine, module)

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have is the inner module's: `config`, `generate`, ..."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.engine.begin_forward()
        try:
            args, kwargs = map_tensors((args, kwargs), self._to_compute)
            outputs = self.module(*args, **kwargs)
        finally:
            self.engine.end_forward()
        if self._force_outputs_fp32:
            outputs = map_tensors(outputs, lambda t: t.float() if t.is_floating_point() else t)
        return map_tensors(outputs, self._boundary) if torch.is_grad_enabled() else outputs

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, which are in chunks and not in `p.grad`."""
        super().zero_grad(set_to_none)
        self.engine.drop_gradients()

    def _to_compute(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self.engine.backend.device, dtype=dtype, non_blocking=True)

    def _boundary(self, output: Tensor) -> Tensor:
        """An output as a view whose gradient marks the start of backward."""
        if not output.requires_grad:
            return output
        view = output.view_as(output)
        view.register_hook(self._backward_begins)
        return view

    def _backward_begins(self, grad: Tensor) -> None:
        self.engine.begin_backward()


def _backend(device: torch.device | str | Backend | None) -> Backend:
    if not isinstance(device, str | torch.device | None):
        return device
    if device is None:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
    return make_backend(torch.device(device))


def _check_same_layout(comm: Communicator, layout: ChunkLayout) -> None:
    """All ranks must have the same model: else name the first difference, on every rank."""
    digests = comm.gather_objects(layout.digest())
    if len(set(digests)) == 1:
        return
    names = comm.gather_objects([(p.name, p.shape, p.trainable) for p in layout.params])
    for rank, other in enumerate(names):
        for mine, theirs in zip(names[0], other, strict=False):
            if mine != theirs:
                raise ValueError(
                    f"rank {rank} has parameter {theirs[0]} of shape {theirs[1]} "
                    f"(trainable: {theirs[2]}) where rank 0 has {mine[0]} of shape {mine[1]} "
                    f"(trainable: {mine[2]}); all ranks must wrap the same module"
                )
        if len(other) != len(names[0]):
            raise ValueError(
                f"rank {rank} has {len(other)} parameters and rank 0 has {len(names[0])}; "
                "all ranks must wrap the same module"
            )
    raise ValueError("ranks were given different chunk options; they must be the same everywhere")
