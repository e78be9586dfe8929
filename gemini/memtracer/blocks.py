"""Meter of repeated blocks: what the call of each saves for backward, apart from what would be
there all the same if it were computed again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import UntypedStorage

from gemini.trees import tensors_in
from gemini.units import Bytes

from .monitor import SavedBytes
from .trace import LEAST_SAVED_BYTES, Layer


@dataclass(frozen=True, slots=True)
class BegunCall:
    """Call of a block that has begun. live: bytes that were saved before. given: storages that it
    was given, by address. held: addresses of those that were saved before."""

    live: int
    given: dict[int, UntypedStorage]
    held: frozenset[int]


class BlockMeter:
    """Meter of the calls of one iteration.

    A tensor that goes from block to block is there as the input of the next one, whichever of the
    two has saved it, and a mask that all are given is there once.
    """

    def __init__(self, saved: SavedBytes, least_bytes: int = LEAST_SAVED_BYTES) -> None:
        """least_bytes: of a storage that counts."""
        self._saved, self._least_bytes = saved, least_bytes
        # storages that earlier calls were given, or gave and saved; addresses are used again
        self._passed: dict[int, weakref.ref[UntypedStorage]] = {}

    def begin(self, given: Any) -> BegunCall:
        """Begin a call with these arguments."""
        storages = self._storages(given)
        held = frozenset(key for key, one in storages.items() if self._saved.holds(one))
        return BegunCall(self._saved.live_bytes, storages, held)

    def end(self, name: str, call: BegunCall, outputs: Any, seconds: float = 0.0) -> Layer:
        """End a call. Returns what it saves; see `Layer`."""
        given, gave = call.given, self._storages(outputs)
        kept = {
            key: one.nbytes()
            for key, one in {**gave, **given}.items()
            if key not in call.held and self._saved.holds(one)
        }
        alone = sum(
            one.nbytes()
            for key, one in given.items()
            if key not in kept and not self._is_passed(key, one)
        )
        for key, one in {**gave, **given}.items():
            if key in given or key in kept:
                self._passed[key] = weakref.ref(one)
        saved = max(0, self._saved.live_bytes - call.live - sum(kept.values()))
        return Layer(name, Bytes(saved), Bytes(alone), seconds)

    def _is_passed(self, key: int, storage: UntypedStorage) -> bool:
        return key in self._passed and self._passed[key]() is storage

    def _storages(self, values: Any) -> dict[int, UntypedStorage]:
        storages = (tensor.untyped_storage() for tensor in tensors_in(values))
        return {one._cdata: one for one in storages if one.nbytes() >= self._least_bytes}
