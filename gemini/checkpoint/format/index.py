"""Index of a checkpoint: which part of which tensor lies in which bytes of which file. Pure.

It comes from our manifest, as JSON, or from DCP's `.metadata` (`untrusted/metadata.py`). Both may
be a stranger's: `check` compares an index with the files before memory is taken for a tensor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from .errors import CorruptError

_MOST = 1 << 62  # bytes or elements
_DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype)
}


class SavedPart(NamedTuple):
    """One item of a file: a box of a tensor, or all of a value."""

    file: str
    at: int  # first byte
    nbytes: int  # with what stands before the elements
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SavedValue(NamedTuple):
    """A tensor, or a value that torch.save wrote."""

    dtype: torch.dtype | None  # None: a value, which is one part
    size: torch.Size
    parts: tuple[SavedPart, ...]


class Overlap(NamedTuple):
    """Elements that a box has in common with a part: the same ones, counted in each."""

    part: SavedPart
    in_part: tuple[int, ...]
    in_box: tuple[int, ...]
    sizes: tuple[int, ...]


Index = Mapping[str, SavedValue]


def encode_index(index: Index, files: Sequence[str]) -> dict[str, Any]:
    """key -> [dtype, size, parts]; a part is its file's number, its first byte, its bytes, offsets
    and sizes, and all parts are one list."""
    numbers = {name: number for number, name in enumerate(files)}
    return {
        key: [
            None if entry.dtype is None else str(entry.dtype).removeprefix("torch."),
            list(entry.size),
            [
                number
                for part in entry.parts
                for number in (
                    numbers[part.file], part.at, part.nbytes, *part.offsets, *part.sizes
                )
            ],
        ]
        for key, entry in index.items()
    }  # fmt: skip


def decode_index(body: Any, files: Mapping[str, int]) -> dict[str, SavedValue]:
    """The way back. `files`: bytes by name, in order. Raises CorruptError."""
    names, index = list(files), {}
    try:
        for key, (kind, size, numbers) in body.items():
            dtype, every = None if kind is None else _DTYPES[kind], [0, *size, *numbers]
            if set(map(type, every)) != {int} or min(every) < 0 or max(every) >= _MOST:
                raise ValueError(f"{key:.80} has a place that is none")
            n, parts = len(size), []
            for i in range(0, len(numbers), 3 + 2 * n):
                file, at, nbytes, *box = numbers[i : i + 3 + 2 * n]
                if len(box) != 2 * n:
                    raise ValueError(f"{key:.80} has half a place")
                parts.append(SavedPart(names[file], at, nbytes, tuple(box[:n]), tuple(box[n:])))
            index[key] = SavedValue(dtype, torch.Size(size), tuple(parts))
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        raise CorruptError(f"its index says what no checkpoint has: {error!r:.200}") from error
    check(index, files)
    return index


def check(index: Index, files: Mapping[str, int]) -> None:
    """Raise CorruptError for an item outside of its file, or a tensor larger than its items.

    files: bytes by name.
    """
    for key, entry in index.items():
        whole, held = prod(entry.size), 0
        if entry.dtype is None and len(entry.parts) != 1:
            raise CorruptError(f"{key} has no place in any file")
        for part in entry.parts:
            end = part.at + part.nbytes
            if end > files[part.file]:
                raise CorruptError(
                    f"{key} lies at bytes {part.at} to {end} of {part.file}, which has "
                    f"{files[part.file]}"
                )
            if entry.dtype is None:
                continue
            if not len(part.offsets) == len(part.sizes) == len(entry.size):
                raise CorruptError(f"a part of {key} lies outside of it")
            for offset, count, size in zip(part.offsets, part.sizes, entry.size, strict=True):
                if offset < 0 or count < 0 or offset + count > size:
                    raise CorruptError(f"a part of {key} lies outside of it")
            numel = prod(part.sizes)
            held += numel
            if part.nbytes < numel * entry.dtype.itemsize:
                raise CorruptError(
                    f"{key} has {part.nbytes} bytes in {part.file}, fewer than its {numel} elements"
                    f" of {entry.dtype} take"
                )
        if entry.dtype is not None and held != whole:
            raise CorruptError(f"{key} has {whole} elements, of which {held} were saved")


class PartsOf:
    """Parts of one tensor, to be found by a box that is wanted."""

    def __init__(self, parts: Sequence[SavedPart]) -> None:
        self._alike = {(part.offsets, part.sizes): part for part in parts}
        self._parts: list[SavedPart] = []
        self._all = parts

    def overlaps(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Overlap]:
        """What the parts have of a box, in the order of their places in it."""
        same = self._alike.get((offsets, sizes))
        if same is not None:  # saved as it is asked for: the usual case
            zeros = (0,) * len(sizes)
            return [Overlap(same, zeros, zeros, sizes)]
        if not sizes:
            return []
        if not self._parts:
            self._parts = sorted(self._all, key=lambda part: part.offsets)
            self._starts = [part.offsets[0] for part in self._parts]
            # of all parts up to each, the last row: grows, so that it can be searched
            self._ends = list(accumulate((p.offsets[0] + p.sizes[0] for p in self._parts), max))
        first = bisect_right(self._ends, offsets[0])
        last = bisect_left(self._starts, offsets[0] + sizes[0])
        found = []
        for part in self._parts[first:last]:
            low = tuple(map(max, part.offsets, offsets))
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(part.offsets, part.sizes, offsets, sizes, strict=True)
            ]
            counts = tuple(end - start for start, end in zip(low, ends, strict=True))
            if min(counts) > 0:
                found.append(
                    Overlap(
                        part,
                        tuple(a - b for a, b in zip(low, part.offsets, strict=True)),
                        tuple(a - b for a, b in zip(low, offsets, strict=True)),
                        counts,
                    )
                )
        return found
