"""Receivers of weights that leave in buckets: TRL's generation through vLLM, and a wrapped module.

TRL 1.16 walks all parameters twice, to say names and shapes and to send, and gathers a whole model
of peft to merge it. Here the first walk reads a layout, and the second goes through buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gemini import GeminiDDP
from gemini.samplers.merged import named_weights, tensor_specs
from gemini.transfer.outgoing import WeightBucket

NEEDS = ("_iter_named_params", "_fix_param_name_to_vllm", "sync_weights")


def send_through(generation: Any, model: GeminiDDP, *, bytes: int | str = "256MiB") -> None:
    """Let the `sync_weights` of TRL's `VLLMGeneration` take weights of `model`, in both modes.

        trainer = GRPOTrainer(...)                      # with use_vllm=True
        send_through(trainer.vllm_generation, model)

    generation: TRL's object, whose own walk over parameters this replaces. Every rank calls
    `sync_weights`, as TRL does. Adapters are merged bucket by bucket.

    Raises ValueError for an object that is not TRL's, and as `tensor_specs`.
    """
    missing = [name for name in NEEDS if not callable(getattr(generation, name, None))]
    if missing:
        raise ValueError(
            f"a {type(generation).__name__} has no {missing[0]}; expected the VLLMGeneration of a "
            "trainer of trl 1.16"
        )
    fix = generation._fix_param_name_to_vllm
    specs = tensor_specs(model)

    def walk() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_weights(model, bytes=bytes):
            yield fix(name), tensor

    generation._iter_named_params = walk
    if getattr(generation, "mode", None) == "server":
        # what the server is told before, without a walk; a shape never changes
        generation._weight_metadata = [(fix(name), dtype, shape) for name, dtype, shape in specs]


def load_bucket(model: GeminiDDP, bucket: WeightBucket) -> None:
    """Load a bucket into a wrapped module, of any world size. All ranks of that module call.

    Rank 0's tensors count. Raises ValueError for a bucket with deltas, and for a name or a shape
    that the module does not have.
    """
    if bucket.deltas:
        raise ValueError(
            f"a bucket with a delta of {next(iter(bucket.deltas))} for a sharded module; expected "
            "whole parameters, by weights(deltas=False)"
        )
    layout = model.engine.layout
    known = {name for spec in layout.params for name in spec.names}
    unknown = [name for name in bucket.tensors if name not in known]
    if unknown:
        raise ValueError(f"{unknown[0]} is no parameter here; expected names of this module")
    model.load_state_dict(dict(bucket.tensors), strict=False)
