"""Stored planes of a block, as memory and disk have them, and logical ones, as all but updates
see them.

Logical are whole masters and planes in what updates are computed in; stored is what
`StateLayout.stored` says: of split masters their remainders (`split_master.py`), of quantised
planes codes and what groups of them share (`StateLayout.codec`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.dtypes import DTYPES
from gemini.pages import tiles

from . import split_master
from .split_master import Planes, join, remainder_of, untied
from .state_layout import MASTER, REMAINDER, WEIGHT, StateLayout


def logical_planes(
    planes: Planes, layout: StateLayout, weight: Tensor | None, *, in_place: bool = False
) -> Planes:
    """Logical planes of a block: copies of the stored ones where the two differ.

    layout: of the logical planes, with whole masters. weight: bf16 [n], its parameters, where
    masters are split; else None. in_place: only planes that differ are copies, and `planes` are not
    valid until `store_planes`.
    """
    if not layout.is_quantised:
        if weight is None:
            return planes
        return split_master.join_masters(planes, weight, layout.with_remainder(), in_place=in_place)
    found: Planes = {}
    if weight is not None:
        low = planes[REMAINDER]
        found[MASTER] = torch.empty_like(low, dtype=torch.float32)
        for part, bits, master in tiles(weight.to(low.device), low, found[MASTER]):
            master.copy_(join(part, bits, None))
    elif layout.has_master:
        found[MASTER] = planes[MASTER]
    names = [name for name in layout.names if name != MASTER]
    columns = [plane for name, plane in planes.items() if name not in (MASTER, REMAINDER, WEIGHT)]
    return {**found, **dict(zip(names, layout.codec.decoded(columns, layout), strict=True))}


def unset(planes: Planes, layout: StateLayout, numel: int) -> Planes:
    """Logical planes of a block of `numel` elements, for values that come: views of the stored ones
    where the two are the same, else memory of their own. layout: as of `logical_planes`."""
    same = [MASTER] if layout.is_quantised else layout.names
    return {
        plane.name: planes[plane.name]
        if plane.name in planes and plane.name in same
        else torch.empty(numel, dtype=DTYPES[plane.dtype])
        for plane in layout.planes
    }


def store_planes(planes: Planes, values: Planes, layout: StateLayout, *, is_split: bool) -> None:
    """Write stored planes from `values`: what `logical_planes` gave and a caller has changed.

    Where there is a plane for the weight, it follows; elsewhere it is, or will be, the new master,
    rounded.
    """
    if not layout.is_quantised:
        if is_split:
            split_master.split_masters(planes, values, layout.with_remainder())
            return
        for name in layout.names:
            if planes[name].data_ptr() != values[name].data_ptr():
                planes[name].copy_(values[name])
        return
    if layout.has_master:
        _store_master(planes, values[MASTER], is_split=is_split)
    names = [name for name in layout.names if name != MASTER]
    columns = [plane for name, plane in planes.items() if name not in (MASTER, REMAINDER, WEIGHT)]
    layout.codec.encode([values[name] for name in names], columns, layout, None)


def _store_master(planes: Planes, master: Tensor, *, is_split: bool) -> None:
    kept = planes[REMAINDER if is_split else MASTER]
    for values, out, weight in tiles(master, kept, planes.get(WEIGHT, kept)):
        values.copy_(untied(values))
        if not is_split:
            out.copy_(values)
            continue
        out.copy_(remainder_of(values))
        if WEIGHT in planes:
            weight.copy_(values)
