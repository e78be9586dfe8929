"""Decode steps: iterations in which every sequence gets one token, beside a cache that grows.

Each token has another mask and another cache, and would be an iteration of its own. One trace is
for all whose cache has at most the next power of two of tokens: it asks for a cache of that size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gemini.trees import tensors_in

_CACHE_OBJECTS = 3  # levels of objects between a cache and its tensors
_FEWEST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decode step: one of all that have the same trace.

    signature: of all with as many sequences and as large a cache at most. Tokens of all sequences
        stand where a forecast expects a batch: bytes of a cache grow with them, not their square.
    length: tokens of each sequence in the cache, as the step begins. room: the most of all these.
    """

    signature: str
    length: int
    room: int

    def cache_bytes(self, inputs: Any) -> tuple[int, int]:
        """Bytes of the cache as the step begins with `inputs`, and what steps of its signature ask
        for: a cache with all their tokens, and its largest layer again, which is there twice as it
        grows."""
        layers = layer_bytes(inputs[1]["past_key_values"])
        now = sum(layers)
        return now, (now + max(layers, default=0)) * self.room // self.length


def decoding_of(inputs: Any) -> Decoding | None:
    """Decode step with these inputs of a call, (positional, keyword); None: it is none that we
    know, or they are inputs of something else, such as a stage of a pipeline.

    A step of a decoder of transformers has token numbers [sequences, 1] and `past_key_values`; of
    one behind an encoder they are `decoder_input_ids`.
    """
    match inputs:
        case (tuple(args), dict(kwargs)):
            pass
        case _:
            return None
    tokens = args[0] if args else kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
    if not isinstance(tokens, Tensor) or tokens.shape[1:] != (1,):
        return None
    length = tokens_in(kwargs.get("past_key_values"))
    if not length:
        return None
    room, sequences = max(_FEWEST_TOKENS, 1 << length.bit_length()), tokens.shape[0]
    kind = str(tokens.dtype).removeprefix("torch.")
    return Decoding(f"{kind}[{sequences}, 1],cache[{sequences * room}, 1]", length, room)


def tokens_in(cache: Any) -> int:
    """Tokens of each sequence that a cache has, or has room for if it never grows."""
    if not hasattr(cache, "get_seq_length"):
        return 0
    rooms = (getattr(layer, "max_cache_len", 0) for layer in getattr(cache, "layers", ()))
    return max(int(cache.get_seq_length()), *rooms, 0)


def layer_bytes(cache: Any) -> list[int]:
    """Bytes of every layer of a cache; of all in one where it has no layers."""
    layers = getattr(cache, "layers", None)
    parts = [cache] if layers is None else layers
    return [sum(t.nbytes for t in tensors_in(part, objects=_CACHE_OBJECTS)) for part in parts]
