"""Kinds and units: ids of different types, and byte sizes as people write them.

Pure: no torch. `nvme` and `kernels_triton` may import this file and nothing else of ours.
"""

from __future__ import annotations

import re
from typing import NewType

ParamId = NewType("ParamId", int)  # index into ChunkLayout.params, registration order
ChunkId = NewType("ChunkId", int)  # index into ChunkLayout.chunks, layout order
BlockId = NewType("BlockId", int)  # index into a rank's list of blocks
Moment = NewType(
    "Moment", int
)  # module boundary or block of the step, numbered round the iteration
Numel = NewType("Numel", int)  # elements
Bytes = NewType("Bytes", int)
Segments = tuple[tuple[int, int], ...]  # of one dimension: (offset in the whole, size), in order

WORLD = "world"  # sharding group of parameters that no dimension of a mesh splits

KIB = 1 << 10
MIB = 1 << 20
MAX_TOKENS = 2048  # of all sequences that a model decodes at once, unless more is asked
MAX_SEQUENCES = 16  # the same of the sequences
GIB = 1 << 30

PARAM_ALIGN_NUMEL = 64  # every parameter starts at a multiple of this inside its chunk
SHARD_ALIGN_NUMEL = 256  # shard boundaries are multiples of this: vector tails never exist
BLOCK_NUMEL = 1 << 20  # unit of transfer, staging, update, checksum and version
STREAMED_BLOCK_NUMEL = 1 << 22  # the same, where a device streams: see `gemini.placement.fit`
BUFFERS_AHEAD = 2  # extra buffers of files, for updates behind a step
WINDOW = 8  # blocks of files that leave a device before a host waits for them, all at once
SERIAL_NUMEL = 1 << 15  # elements at most for which torch wakes no other threads of a CPU
MIN_BLOCK_NUMEL = 1024  # blocks are multiples of it
NUM_VERSIONS = 2  # of a block on disk: the one that counts, and the one that is written
PAGE_BYTES = 4096  # alignment of direct I/O
ORIGINAL_BLOCK_NUMEL = 1 << 16  # fewest elements of a block of fp32 originals or averages in files
FROZEN_BLOCK_BYTES = 4 << 20  # unit in which frozen shards are written and read, in every plan

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}ib": 1 << (10 * i) for i, p in enumerate("kmgt", start=1)},
    **{f"{p}{b}": 1000**i for i, p in enumerate("kmgt", start=1) for b in ("", "b")},
}
FEWEST_BYTES = 1024  # of a size without a unit: below it somebody means GiB
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def align_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def check_block_numel(block_numel: int) -> None:
    """Raise ValueError unless a block size is a positive multiple of `MIN_BLOCK_NUMEL`."""
    if block_numel < MIN_BLOCK_NUMEL or block_numel % MIN_BLOCK_NUMEL:
        raise ValueError(f"block_numel={block_numel}; expected a multiple of {MIN_BLOCK_NUMEL}")


def parse_bytes(size: int | str) -> Bytes:
    """Parse `8GiB` (unit 2**30), `1TB` or `1T` (unit 10**12), `4096` or 4096 into bytes.

    Raises ValueError for anything else, for a negative size, and for a number without a unit that
    is a few bytes.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"size {size!r} is a {type(size).__name__}; expected bytes or '8GiB'")
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"size {size} is negative; expected bytes or '8GiB'")
        return _without_unit(size)
    match = _SIZE.fullmatch(size)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"size {size!r} is not understood; expected bytes, '8GiB' or '1TB'")
    if not match[2]:
        return _without_unit(round(float(match[1])))
    return Bytes(round(float(match[1]) * _UNITS[match[2].lower()]))


def _without_unit(size: int) -> Bytes:
    if 0 < size < FEWEST_BYTES:
        raise ValueError(
            f"size {size} is {size} bytes; did you mean '{size}GiB'? Bytes are '{size}B'"
        )
    return Bytes(size)


def format_bytes(nbytes: int) -> str:
    """Format bytes for people: `1.50 GiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
