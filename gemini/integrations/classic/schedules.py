"""Schedules of pipelines by their old names, for `initialize(schedule=)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gemini.integrations.parts import accept


class PipelineSchedule:
    """One forward, one backward: `pp_style="1f1b"` with so many micro-batches.

    options: of `HybridParallelPlugin`. tensor_shape, scatter_gather_tensors: without effect.

    Raises ValueError for a `data_process_func`: the model's forward takes the batch.
    """

    def __init__(
        self,
        num_microbatches: int,
        data_process_func: Callable[..., Any] | None = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
    ) -> None:
        if data_process_func is not None:
            raise ValueError(
                "data_process_func is a function; expected None: a loader or the model's forward "
                "makes of a batch what layers take"
            )
        ignored = (
            ("tensor_shape", tensor_shape is not None, "stages tell each other shapes"),
            ("scatter_gather_tensors", scatter_gather_tensors, "activations travel whole"),
        )
        accept({f"{name} of a schedule": why for name, given, why in ignored if given})
        self.options: dict[str, Any] = {
            "pp_style": "1f1b", "num_microbatches": num_microbatches
        }  # fmt: skip


class InterleavedPipelineSchedule(PipelineSchedule):
    """Several stages in each rank: `pp_style="interleaved"`; see `PipelineSchedule`."""

    def __init__(
        self,
        num_microbatches: int,
        num_model_chunks: int,
        data_process_func: Callable[..., Any] | None = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
    ) -> None:
        """num_model_chunks: stages of a rank."""
        super().__init__(
            num_microbatches, data_process_func, tensor_shape, scatter_gather_tensors
        )  # fmt: skip
        self.options |= {"pp_style": "interleaved", "num_model_chunks": num_model_chunks}
