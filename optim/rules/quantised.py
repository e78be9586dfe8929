"""State planes of one or two bytes an element, and the way between them and fp32.

    kind   a plane that never is negative       a plane that may be
    bf16   bf16, up or down at random           bf16, to nearest even
    8bit   uint8: the upper bits of fp32        int8: a part of the other plane's root, or signed
                                                upper bits where it has no such bound

8 bits. What never is negative keeps 3 bits of fp32's mantissa, and the byte counts from a power of
two that 8 elements share. 8 elements that span more than 28 octaves keep 2 bits, which reaches 61.
What is not 0 never becomes 0: below, it is the least code. So the bits of an element do not depend
on its neighbours, unless they are more than 2**28 times as large.

A first moment that is bounded by the root s of the second (`Plane.under_root`) is kept as m / s,
whatever its neighbours are, with 4 bits of the mantissa of |m| / s + 1/16, up to 15.4. A signed
plane without such a bound has 3 bits, and 14 octaves below the largest of 8 elements; 0 below.

Both go up or down at random, and their means are the values: a second moment moves by 0.1 % in a
step, and to nearest it would stay what it was for ever. The bits are those of `formulas.noise` for
its parameter, element and step, so that they are the same wherever it lives.

What was decoded is encoded to nearest to what it was. inf and NaN have codes and belong to one
element. All operators are exact or correctly rounded, and compiled loops and kernels have the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gemini.units import PARAM_ALIGN_NUMEL, SERIAL_NUMEL

from .formulas import noise
from .state_layout import GROUP_NUMEL, MASTER, Plane, StateLayout

NOISE_KEY = 1 << 32  # added to a parameter's: its weights may be rounded at random, too
NEAREST = 1 << 15  # in the place of noise
INF_BITS, NAN_BITS = 0x7F800000, 0x7FC00000
NAN_CODE, INF_CODE = 254, 255  # of a plane that never is negative
SIGNED_NAN = -128
FINE, COARSE = (3, 30), (2, 62)  # bits of the mantissa, and octaves from the first to the last
SIGNED = (3, 14)
OFFSET, RATIO_BITS = 2.0**-4, 4  # of a ratio to the root
RATIO_BASE = (127 - 4) << RATIO_BITS  # upper bits of OFFSET
LEAST_RATIO = (RATIO_BASE + 1) << (23 - RATIO_BITS)  # bits of OFFSET and the least ratio, 1/256


def state_noise(seed: int, counter: int, step: int, first: int, numel: int) -> Tensor:
    """int32 [numel] in [0, 2**16): noise with which planes are rounded."""
    return noise(seed, counter + NOISE_KEY, step, first, numel)


def decoded(stored: Sequence[Tensor], layout: StateLayout) -> list[Tensor]:
    """fp32 [n] of all planes of a layout but masters. stored: the planes that are kept."""
    if layout.kind == "bf16":
        floats = [torch.empty_like(plane, dtype=torch.float32) for plane in stored]
        for tile, _ in _tiles(stored[0].numel() if stored else 0, layout):
            for plane, values in zip(stored, floats, strict=True):
                values[tile] = plane[tile]
        return floats
    planes, is_linear = _quantised(layout), layout.kind == "8bit-linear"
    codes, shared = stored[: len(planes)], _shared(planes, stored, layout)
    found = [torch.empty_like(plane, dtype=torch.float32) for plane in codes]
    root = torch.empty(0)
    for tile, groups in _tiles(codes[0].numel() if codes else 0, layout):
        for i in layout.coding_order:
            one, of_group = codes[i][tile], shared[i]
            if of_group is None:
                values = _under_root(one, root)
            elif is_linear:
                values = (_root_squared if planes[i].keeps_ties else _expanded)(
                    one, of_group[groups]
                )
            elif planes[i].keeps_ties:
                values = _positive(one, of_group[groups])
                root = _root(values)
            else:
                values = _signed(one, of_group[groups])
            found[i][tile] = values
    return found


def encode(
    values: Sequence[Tensor], stored: Sequence[Tensor], layout: StateLayout, random: Tensor | None
) -> None:
    """Write fp32 [n] into `stored`, as codes. random: of `state_noise`; None: all to nearest."""
    planes = _quantised(layout)
    if layout.kind == "bf16":
        for tile, _ in _tiles(values[0].numel() if values else 0, layout):
            up = None if random is None else random[tile]
            for plane, one, out in zip(planes, values, stored, strict=True):
                _to_bf16(one[tile], out[tile], up if plane.keeps_ties else None)
        return
    assert layout.kind == "8bit", "8bit-linear is only read"
    codes, shared = stored[: len(planes)], _shared(planes, stored, layout)
    root = torch.empty(0)
    for tile, groups in _tiles(codes[0].numel() if codes else 0, layout):
        up = other = torch.tensor(NEAREST, dtype=torch.int32)
        if random is not None:
            up = random[tile]
            other = ((up & 0xFF) << 8) | (up >> 8)  # of first moments: no two go up together
        for i in layout.coding_order:
            one, out, of_group = values[i][tile], codes[i][tile], shared[i]
            if of_group is None:
                _encode_under_root(one, out, root, other)
            elif planes[i].keeps_ties:
                _encode_positive(one, out, of_group[groups], up)
                root = _root(_positive(out, of_group[groups]))
            else:
                _encode_signed(one, out, of_group[groups], other)


def _tiles(numel: int, layout: StateLayout) -> Iterator[tuple[slice, slice]]:
    """Elements, and their groups, of every tile; what is coded at once stays in cache, and is
    computed by one thread."""
    of_group = PARAM_ALIGN_NUMEL if layout.kind == "8bit-linear" else GROUP_NUMEL
    step = SERIAL_NUMEL // of_group
    for i, start in enumerate(range(0, numel, SERIAL_NUMEL)):
        yield slice(start, start + SERIAL_NUMEL), slice(i * step, (i + 1) * step)


def _quantised(layout: StateLayout) -> list[Plane]:
    return [plane for plane in layout.planes if plane.name != MASTER]


def _shared(
    planes: Sequence[Plane], stored: Sequence[Tensor], layout: StateLayout
) -> list[Tensor | None]:
    """What the groups of each plane share; None of one that is under another's root."""
    others = iter(stored[len(planes) :])
    return [None if layout.is_under_root(plane) else next(others) for plane in planes]


def _to_bf16(values: Tensor, out: Tensor, random: Tensor | None) -> None:
    if random is None:
        out.copy_(values)
        return
    bits = (values.view(torch.int32) + random).bitwise_right_shift_(16).to(torch.int16)
    out.copy_(bits.view(torch.bfloat16)).masked_fill_(values.isnan(), torch.nan)


def _groups(values: Tensor, numel: int = GROUP_NUMEL) -> Tensor:
    """[groups, numel] of [n], with zeros after its end; a view where it has whole groups."""
    missing = -values.numel() % numel
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.view(-1, numel)


def _wide(of_groups: Tensor, numel: int) -> Tensor:
    """[numel] of [groups]."""
    return of_groups.repeat_interleave(GROUP_NUMEL)[:numel]


def _upper(bits: Tensor, up: Tensor, mantissa_bits: int) -> Tensor:
    """Upper bits of fp32 with so many bits of the mantissa, rounded up by 16 bits of noise."""
    return (bits + (up << (7 - mantissa_bits))) >> (23 - mantissa_bits)


def _are_plain(bits: Tensor) -> bool:
    """Whether none is 0, inf or NaN, so that nothing has to be put aside."""
    low, high = torch.aminmax(bits)
    return bool(low > 0) and bool(high < INF_BITS)


def _window(upper: Tensor, live: Tensor | None, form: tuple[int, int], least: int) -> list[Tensor]:
    """[groups] int32: exponent from which codes count, a multiple of `least`, and the least
    exponent of what is `live` (None: all), 255 where nothing is."""
    mantissa_bits, octaves = form
    high = low = upper >> mantissa_bits
    if live is None and upper.numel() % GROUP_NUMEL:
        live = torch.ones_like(upper, dtype=torch.bool)
    if live is not None:  # zeros after the end are not live, and 255 - 0 is what they count as
        high, low = torch.where(live, high, 0), torch.where(live, 255 - low, 0)
        below = 255 - _groups(low).amax(1)
    else:
        below = _groups(low).amin(1)
    base = (_groups(high).amax(1) - octaves).clamp_(min=least)
    return [(base + (least - 1)).bitwise_and_(-least), below]


def _encode_positive(values: Tensor, codes: Tensor, shared: Tensor, up: Tensor) -> None:
    bits, numel = values.view(torch.int32) & 0x7FFFFFFF, values.numel()
    live = None if _are_plain(bits) else (bits > 0) & (bits < INF_BITS)
    found = _upper(bits, up, FINE[0])
    base, below = _window(found, live, FINE, 2)
    is_fine, header = below > base, 128 + (base >> 1)
    found -= _wide(base << FINE[0], numel)
    if not bool(is_fine.all()):
        coarse = _upper(bits, up, COARSE[0])
        base, _ = _window(coarse, live, COARSE, 2)
        header = torch.where(is_fine, header, base >> 1).masked_fill_(below == 255, 0)
        coarse -= _wide(base << COARSE[0], numel)
        found = torch.where(_wide(is_fine, numel), found, coarse)
    found.clamp_(1, NAN_CODE - 1)
    if live is not None:
        found.masked_fill_(bits == 0, 0).masked_fill_(bits == INF_BITS, INF_CODE)
        found.masked_fill_(bits > INF_BITS, NAN_CODE)
    shared.copy_(header.masked_fill_(below == 255, 0))
    codes.copy_(found)


def _positive(codes: Tensor, shared: Tensor) -> Tensor:
    of_groups, numel = shared.int(), codes.numel()
    mantissa_bits = COARSE[0] + (of_groups >> 7)
    base = ((of_groups & 127) * 2) << mantissa_bits
    values = (codes.int() + _wide(base, numel)) << _wide(23 - mantissa_bits, numel)
    low, high = torch.aminmax(codes)
    if int(low) == 0:
        values.masked_fill_(codes == 0, 0)
    if int(high) >= NAN_CODE:
        values.masked_fill_(codes == INF_CODE, INF_BITS).masked_fill_(codes == NAN_CODE, NAN_BITS)
    return values.view(torch.float32)


def _encode_signed(values: Tensor, codes: Tensor, shared: Tensor, up: Tensor) -> None:
    every, numel = values.view(torch.int32), values.numel()
    bits, mantissa_bits = every & 0x7FFFFFFF, SIGNED[0]
    live = (bits > 0) & (bits < INF_BITS)
    upper = _upper(bits, up, mantissa_bits)
    base, below = _window(upper, live, SIGNED, 1)
    shared.copy_(base.masked_fill(below == 255, 0))
    found = (upper - _wide(base << mantissa_bits, numel)).clamp_(0, 127).masked_fill_(bits == 0, 0)
    codes.copy_(_with_sign(found, every).masked_fill_(bits >= INF_BITS, SIGNED_NAN))


def _signed(codes: Tensor, shared: Tensor) -> Tensor:
    signed, mantissa_bits = codes.int(), SIGNED[0]
    base = _wide(shared.int() << mantissa_bits, codes.numel())
    values = ((signed.abs() + base) << (23 - mantissa_bits)).masked_fill_(signed == 0, 0)
    values = values.view(torch.float32).masked_fill_(signed == SIGNED_NAN, torch.nan)
    return torch.where(signed < 0, -values, values)


def _with_sign(found: Tensor, every: Tensor) -> Tensor:
    """`found`, negative where the bits of fp32 are those of a negative number."""
    sign = every >> 31
    return (found ^ sign) - sign


_ROOTS = (
    (torch.arange(1 << 11, dtype=torch.int32) << 20).view(torch.float32).double().sqrt().float()
)


def _root(values: Tensor) -> Tensor:
    """Square root of what is decoded, correctly rounded, as torch's of fp32 is not everywhere."""
    return _ROOTS.to(values.device).index_select(0, values.view(torch.int32) >> (23 - FINE[0]))


def _encode_under_root(values: Tensor, codes: Tensor, root: Tensor, up: Tensor) -> None:
    size = values.abs()
    ratio = size / root
    if not bool(root.min() > 0):
        ratio = torch.where(root > 0, ratio, size * 0.0)
    bits = ratio.add_(OFFSET).view(torch.int32)
    found = (_upper(bits, up, RATIO_BITS) - RATIO_BASE).clamp_(0, 127)
    found.masked_fill_(bits < LEAST_RATIO, 0)  # or it would come to more than twice what it is
    found = _with_sign(found, values.view(torch.int32))
    if not bool(ratio.max() < torch.inf):
        found.masked_fill_((bits & 0x7FFFFFFF) >= INF_BITS, SIGNED_NAN)
    codes.copy_(found)


def _under_root(codes: Tensor, root: Tensor) -> Tensor:
    signed = codes.int()
    ratio = ((signed.abs() + RATIO_BASE) << (23 - RATIO_BITS)).view(torch.float32).sub_(OFFSET)
    sign = (signed & -0x80000000).bitwise_or_(ratio.view(torch.int32))
    values = sign.view(torch.float32).mul_(root)
    if not bool(root.max() < torch.inf):
        values.masked_fill_(signed == 0, 0.0)
    if int(codes.min()) == SIGNED_NAN:
        values.masked_fill_(signed == SIGNED_NAN, torch.nan)
    return values


# -- codes of earlier versions, of 64 elements with one fp32 scale: linear in the root, and softsign


def _expanded(codes: Tensor, scales: Tensor) -> Tensor:
    y = _groups(codes, PARAM_ALIGN_NUMEL).float().div_(127.0)
    return (y / (2.0 - y.abs())).mul_(scales[:, None]).view(-1)[: codes.numel()]


def _root_squared(codes: Tensor, scales: Tensor) -> Tensor:
    root = _groups(codes, PARAM_ALIGN_NUMEL).float().div_(255.0).mul_(scales[:, None])
    return (root * root).view(-1)[: codes.numel()]
