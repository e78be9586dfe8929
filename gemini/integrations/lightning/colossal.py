"""ColossalAIStrategy: Lightning 1's strategy by its parameters and methods, on GeminiStrategy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision

from gemini import LossScale, StaticPlacement
from gemini.api import Placement, takes_fields
from gemini.integrations.options import SCALE

from .trainer import GeminiStrategy

log = logging.getLogger("gemini")

_M = 2**20
_POLICIES = ("auto", "cuda", "cpu")


class ColossalAIStrategy(GeminiStrategy):
    """Strategy of Lightning 1 by its names: fp16, and one checkpoint file.

    use_chunk: True; one parameter a chunk is `GeminiStrategy(min_chunk_size_m=0)`.
    chunk_size: elements of a chunk; None searches one.
    enable_distributed_storage: False keeps parameters whole on every device, under any policy.
    placement_policy: `"auto"`, `"cuda"`, `"cpu"`.
    force_outputs_fp32: what modules return to a step is cast to fp32, as it is in fp16 anyway.
    gpu_margin_mem_ratio: share, 0 to 1, of what is left on the device for the optimizer's state,
        with `"auto"`: here always what the first iteration leaves, so any is accepted there.
    chunk_search_range, min_chunk_size: elements.
    chunk_search_n_grids: 1 or more, without effect: candidates are lengths that fit exactly.
    initial_scale ... max_scale: the loss scale of fp16; in another precision only the defaults.
    checkpoint_io: for the one file that it saves.

    It computes in fp16 unless the Trainer says bf16; fp32 is `precision_plugin=GeminiPrecision()`.

    Raises ValueError for a value that would do nothing.
    """

    strategy_name = "colossalai"

    @takes_fields(loss_scale=SCALE)
    def __init__(
        self,
        use_chunk: bool = True,
        chunk_size: int | None = None,
        enable_distributed_storage: bool = True,
        placement_policy: str = "auto",
        force_outputs_fp32: bool = False,
        gpu_margin_mem_ratio: float = 0.0,
        chunk_search_range: int = 64 * _M,
        chunk_search_n_grids: int = 4096,
        min_chunk_size: int = 32 * _M,
        loss_scale: LossScale = SCALE,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if not use_chunk:
            raise ValueError(
                "use_chunk=False: expected True; a chunk for each parameter is "
                "GeminiStrategy(min_chunk_size_m=0, search_range_m=0)"
            )
        if chunk_search_n_grids <= 0:
            raise ValueError(f"chunk_search_n_grids={chunk_search_n_grids}; expected 1 or more")
        self._is_precision_given = precision_plugin is not None
        searched = (chunk_search_range, min_chunk_size)
        search_range, least = searched if chunk_size is None else (0, chunk_size)
        super().__init__(
            _placement(placement_policy, enable_distributed_storage, gpu_margin_mem_ratio),
            checkpoint="full", accelerator=accelerator, parallel_devices=parallel_devices,
            cluster_environment=cluster_environment, checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin, force_outputs_fp32=force_outputs_fp32,
            search_range_m=search_range / _M, min_chunk_size_m=least / _M, loss_scale=loss_scale,
        )  # fmt: skip

    def setup(self, trainer: Any) -> None:
        if not self._is_precision_given and self.precision_plugin.precision == "32-true":
            self._asked = replace(self._asked, precision="fp16")
            log.info("ColossalAIStrategy computes in fp16, as no other precision was given")
        super().setup(trainer)

    def lightning_module_state_dict(self, rank_zero_only: bool = False) -> dict[str, Any]:
        """Whole state of the module on the CPU: on every rank, or on rank 0. All ranks call."""
        return super().lightning_module_state_dict(rank_zero_only)

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Any,
        opt_idx: int | Callable[[], Any],
        closure: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Take a step: with Lightning 1's `opt_idx`, or without it, as Lightning 2 calls.

        Raises ValueError for another `opt_idx` than 0, and without a closure.
        """
        if callable(opt_idx):
            return super().optimizer_step(optimizer, opt_idx, closure or model, **kwargs)
        if opt_idx != 0 or closure is None:
            raise ValueError(
                f"optimizer_step(opt_idx={opt_idx}); expected 0, the one optimizer, and a closure"
            )
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "sum") -> Any:
        """Reduce a tensor over ranks; another value is returned as it is."""
        return super().reduce(tensor, group, reduce_op)


def _placement(policy: str, sharded: bool, margin: float) -> str | Placement:
    if policy not in _POLICIES:
        raise ValueError(f"placement_policy={policy!r}; expected one of {', '.join(_POLICIES)}")
    if not 0 <= margin <= 1 or (margin and policy != "auto"):
        raise ValueError(
            f"gpu_margin_mem_ratio={margin} with placement_policy={policy!r}; expected 0, or up to "
            '1 with "auto"'
        )
    if sharded:
        return policy
    return StaticPlacement.zero(2, cpu_offload=policy == "cpu")
