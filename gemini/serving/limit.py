"""The tokens that a plan has room for: more are refused before a forward begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Most tokens in the cache of keys and values, and most sequences of one pass."""

    max_tokens: int
    max_sequences: int

    def watch(self, module: nn.Module) -> None:
        """Check every forward of `module` from now on."""
        module.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        inputs = next((one for one in given if isinstance(one, Tensor)), None)
        if inputs is not None:
            self.check(inputs.shape[0], inputs.shape[1] + _length(kwargs.get("past_key_values")))

    def check(self, sequences: int, length: int) -> None:
        """Raise ValueError for more than was planned. length: tokens of each sequence."""
        if sequences > self.max_sequences:
            raise ValueError(
                f"a pass over {sequences} sequences, and the plan has room for "
                f"{self.max_sequences}; expected max_sequences={sequences} where it is loaded"
            )
        tokens = sequences * length
        if tokens > self.max_tokens:
            raise ValueError(
                f"{tokens} tokens in {sequences} sequences, and the plan has room for "
                f"{self.max_tokens}; expected max_tokens={tokens} where it is loaded"
            )


def _length(cache: Any) -> int:
    """Tokens of each sequence that a cache has, or has room for if it never grows."""
    if cache is None:
        return 0
    rooms = (getattr(layer, "max_cache_len", 0) for layer in getattr(cache, "layers", ()))
    return max(int(cache.get_seq_length()), *rooms)
