"""State planes of one or two bytes an element, and the way between them and fp32.

    kind   a plane that may be negative            a plane that never is
    bf16   bf16, to nearest even                   bf16, up or down at random
    8bit   int8, companded (softsign)              uint8, of its square root, at random

Codes of 8 bits are of groups of 64 elements, each with one fp32 scale, its largest value. With
z = x / scale a signed code is the nearest of 127 * 2z / (1 + |z|) (FlashOptim), and a positive one
that of 255 * sqrt(x) / scale. A second moment moves by 0.1 % in a step, less than half a code: to
nearest it would stay what it was for ever. So it goes up or down at random, and its mean is the
value; the bits are those of `formulas.noise` for its parameter, element and step, so that they are
the same wherever it lives.

What was decoded is encoded to the same codes, to nearest. NaN in a group makes all of it NaN. All
operators are correctly rounded, and compiled loops and kernels have the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .formulas import noise
from .state_layout import GROUP_NUMEL, MASTER, Plane, StateLayout

NOISE_KEY = 1 << 32  # added to a parameter's: its weights may be rounded at random, too
# scales below these are 0: what is made of a code is no subnormal, and so comes back
LEAST_SIGNED, LEAST_ROOT = 2.0**-100, 2.0**-52
_TILE_NUMEL = 1 << 16  # what is coded at once stays in cache; whole groups


def state_noise(seed: int, counter: int, step: int, first: int, numel: int) -> Tensor:
    """int32 [numel] in [0, 2**16): noise with which planes that are never negative are rounded."""
    return noise(seed, counter + NOISE_KEY, step, first, numel)


def decoded(stored: Sequence[Tensor], layout: StateLayout) -> list[Tensor]:
    """fp32 [n] of all planes of a layout but masters. stored: the planes that are kept."""
    if layout.kind == "bf16":
        return [plane.float() for plane in stored]
    planes = _quantised(layout)
    found = []
    for plane, codes, scales in zip(
        planes, stored[: len(planes)], stored[len(planes) :], strict=True
    ):
        values = torch.empty_like(codes, dtype=torch.float32)
        decode = _root_squared if plane.keeps_ties else _expanded
        for start, groups in _tiles(codes.numel()):
            tile = slice(start, start + _TILE_NUMEL)
            values[tile] = decode(codes[tile], scales[groups])
        found.append(values)
    return found


def encode(
    values: Sequence[Tensor], stored: Sequence[Tensor], layout: StateLayout, random: Tensor | None
) -> None:
    """Write fp32 [n] into `stored`, as codes. random: of `state_noise`; None: all to nearest."""
    planes = _quantised(layout)
    count = len(planes)
    for i, plane in enumerate(planes):
        drawn = random if plane.keeps_ties else None
        if layout.kind == "bf16":
            _to_bf16(values[i], stored[i], drawn)
            continue
        for start, groups in _tiles(values[i].numel()):
            tile = slice(start, start + _TILE_NUMEL)
            into = values[i][tile], stored[i][tile], stored[count + i][groups]
            if plane.keeps_ties:
                _encode_root(*into, None if drawn is None else drawn[tile])
            else:
                _encode_companded(*into)


def _tiles(numel: int) -> Iterator[tuple[int, slice]]:
    """(begin, groups) of every tile."""
    step = _TILE_NUMEL // GROUP_NUMEL
    for i, start in enumerate(range(0, numel, _TILE_NUMEL)):
        yield start, slice(i * step, (i + 1) * step)


def _quantised(layout: StateLayout) -> list[Plane]:
    return [plane for plane in layout.planes if plane.name != MASTER]


def _to_bf16(values: Tensor, out: Tensor, random: Tensor | None) -> None:
    if random is None:
        out.copy_(values)
        return
    bits = (values.view(torch.int32) + random).bitwise_right_shift_(16).to(torch.int16)
    out.copy_(bits.view(torch.bfloat16)).masked_fill_(values.isnan(), torch.nan)


def _groups(values: Tensor) -> Tensor:
    """[groups, 64] of [n], with zeros after its end; a view where it has whole groups."""
    missing = -values.numel() % GROUP_NUMEL
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.view(-1, GROUP_NUMEL)


def _scales(values: Tensor, least: float, out: Tensor) -> Tensor:
    """The largest |value| of every group, 0 below `least`; [groups, 1]."""
    bits = values.view(torch.int32).bitwise_and(0x7FFFFFFF)  # NaN is the largest of all
    largest = bits.amax(dim=1).view(torch.float32)
    out.copy_(torch.where(largest < least, 0.0, largest))
    return out[:, None]


def _encode_companded(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    groups = _groups(values)
    scale = _scales(groups, LEAST_SIGNED, scales)
    z = torch.where(scale > 0, groups / scale, 0.0)
    code = (2.0 * z / (1.0 + z.abs())).mul_(127.0)
    codes.copy_(code.add_(0.5).floor_().nan_to_num_(0.0).view(-1)[: codes.numel()])


def _expanded(codes: Tensor, scales: Tensor) -> Tensor:
    y = _groups(codes).float().div_(127.0)
    return (y / (2.0 - y.abs())).mul_(scales[:, None]).view(-1)[: codes.numel()]


def _encode_root(values: Tensor, codes: Tensor, scales: Tensor, random: Tensor | None) -> None:
    roots = _groups(values.sqrt())
    scale = _scales(roots, LEAST_ROOT, scales)
    z = torch.where(scale > 0, roots / scale, 0.0).view(-1)[: codes.numel()]
    up = 0.5 if random is None else random.float() * 2.0**-16
    codes.copy_((255.0 * z + up).floor_().nan_to_num_(0.0))


def _root_squared(codes: Tensor, scales: Tensor) -> Tensor:
    root = _groups(codes).float().div_(255.0).mul_(scales[:, None])
    return (root * root).view(-1)[: codes.numel()]
