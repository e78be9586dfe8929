"""Which elements of weights an update has changed: one bit each, gathered where old and new meet.

Bit i of byte b is element 8 * b + i. Bits are only ever set here, so they say what has changed
since they were zero, over any number of updates, and something more where one was undone. Elements
are compared as the model sees them, by their bits. Bytes per element: 1/8 read and 1/8 written; old
and new values are in cache, or in registers, at that moment.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Bytes 0 and 1 of an int64, times this, have their lowest bits side by side in its highest byte,
# that of byte 0 lowest; no two products share a bit, so nothing is carried.
_SIDE_BY_SIDE = 0x0102040810204080


def packed(flags: Tensor) -> Tensor:
    """Bits uint8 [ceil(n / 8)] of flags bool [n]."""
    numel = flags.numel()
    if numel % 8:
        flags = torch.nn.functional.pad(flags, (0, -numel % 8))
    words = flags.view(torch.int64) * _SIDE_BY_SIDE
    return words.bitwise_right_shift_(56).to(torch.uint8)  # of -1 to 255, its lowest byte


def mark(bits: Tensor, before: Tensor, after: Tensor) -> None:
    """Set the bits [ceil(n / 8)] of elements that differ. before, after: [n] of one dtype."""
    kind = _INTEGERS[after.element_size()]
    bits.bitwise_or_(packed(before.view(kind) != after.view(kind)))


def positions(bits: Tensor) -> Tensor:
    """Positions int64 [k] of bits that are set, rising; where the bits are."""
    found = bits.nonzero().view(-1, 1)
    lanes = torch.arange(8, device=bits.device)
    is_set = (bits[found].to(torch.int64) >> lanes) & 1
    return (found * 8 + lanes)[is_set.bool()]


def marking_tile(tile: str) -> str:
    """C++ of a `tile` of `cpp_loops` with a column of bits, from one whose last column is flags.

    tile: one bool for each element goes to its last column, which is memory of the tile's own here.
    """
    body = tile.replace("static void tile(", "static inline void flagging_tile(")
    return f"""{body}
static void tile(const int64_t* columns, const float* scalars, int64_t first, int64_t n) {{
  uint8_t flags[TILE + 8];
  int64_t own[COLUMNS];
  std::copy(columns, columns + COLUMNS, own);
  own[COLUMNS - 1] = (int64_t)flags - first;
  flagging_tile(own, scalars, first, n);
  memset(flags + n, 0, 8);
  uint8_t* bits = (uint8_t*)columns[COLUMNS - 1] + first / 8;
  for (int64_t i = 0; i < n; i += 8) {{
    uint64_t word;
    memcpy(&word, flags + i, 8);
    bits[i / 8] |= (uint8_t)(word * {_SIDE_BY_SIDE:#x}ull >> 56);
  }}
}}
"""
