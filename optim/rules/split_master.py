"""Split masters: fp32 masters of bf16 weights, without the bits that the two share.

A weight is its master, rounded to nearest even. So of a master only the low 16 bits are kept, in
the plane `remainder`. They say which way the weight was rounded, but for a tie:

    low half   below 0x8000   above 0x8000   0x8000, upper half odd   0x8000, upper half even
    rounded        down            up                  up                      down

The last case, one of 131072 masters, is told from the one before it by one more bit: the sign of a
plane that is never negative (`Plane.keeps_ties`), Adam's `exp_avg_sq`. So every master comes back
with all its bits, and NaN as some NaN. Where planes are quantised no sign is free: there an update
moves such a master by its last bit (`untied`), whether it is split or whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.pages import tiles

from .state_layout import MASTER, REMAINDER, WEIGHT, StateLayout

TIE_MASK, TIE = 0x1FFFF, 0x8000  # of a master's bits: an even upper half, and half a step
SIGN = -(1 << 31)  # of fp32, as int32

Planes = dict[str, Tensor]


def tie_sign(master: Tensor) -> Tensor:
    """int32 [n] of fp32 [n]: SIGN where the weight was rounded down half-way, else 0."""
    return ((master.view(torch.int32) & TIE_MASK ^ TIE) - 1) & SIGN


def remainder_of(master: Tensor) -> Tensor:
    """int16 [n]: the low halves of fp32 [n]."""
    return master.view(torch.int32).to(torch.int16)


def untied(master: Tensor) -> Tensor:
    """fp32 [n]: a value that is half-way and would be rounded down loses its last bit."""
    return (master.view(torch.int32) + (tie_sign(master) >> 31)).view(torch.float32)


def join(weight: Tensor, remainder: Tensor, keeper: Tensor | None) -> Tensor:
    """Whole masters, fp32 [n], of bf16 [n], int16 [n] and fp32 [n]. keeper: None where none
    ties."""
    upper = weight.view(torch.int16).to(torch.int32)
    if keeper is not None:
        upper = upper - (keeper.view(torch.int32) >> 31)
    return ((upper << 16) + remainder).view(torch.float32)


def join_masters(
    planes: Planes, weight: Tensor, layout: StateLayout, *, in_place: bool = False
) -> Planes:
    """Planes of a block with whole masters, as copies where they differ.

    weight: bf16 [n], its parameters. layout: of `planes`, without a weight. in_place: only the
    masters are a copy, and `planes` are not valid until `split_masters`.
    """
    keeper = planes[layout.tie_keeper]
    master, plain = torch.empty_like(keeper), keeper if in_place else torch.empty_like(keeper)
    weight = weight.to(keeper.device)
    for part, low, kept, whole, bare in tiles(weight, planes[REMAINDER], keeper, master, plain):
        whole.copy_(join(part, low, kept))
        torch.abs(kept, out=bare)
    others = {name: planes[name] for name in layout.names if name != REMAINDER}
    return {MASTER: master, **others, layout.tie_keeper: plain}


def split_masters(planes: Planes, values: Planes, layout: StateLayout) -> None:
    """Write planes back from `values`, which `join_masters` made of them and a caller has changed.

    A plane for the weight follows; where there is none, the weight is the new master, rounded.
    """
    for name in layout.names:
        if name not in (REMAINDER, layout.tie_keeper) and planes[name] is not values[name]:
            planes[name].copy_(values[name])
    keeper, remainder = planes[layout.tie_keeper], planes[REMAINDER]
    new_weight = planes.get(WEIGHT, remainder)  # where there is none, nobody writes to it
    columns = (values[MASTER], values[layout.tie_keeper], remainder, keeper, new_weight)
    for master, bare, low, kept, weight in tiles(*columns):
        low.copy_(remainder_of(master))
        torch.abs(bare, out=kept).view(torch.int32).bitwise_or_(tie_sign(master))
        if WEIGHT in planes:
            weight.copy_(master)
