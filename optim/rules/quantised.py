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

from collections.abc import Sequence

import torch
from torch import Tensor

from .formulas import noise
from .state_layout import GROUP_NUMEL, MASTER, Plane, StateLayout

NOISE_KEY = 1 << 32  # added to a parameter's: its weights may be rounded at random, too
# scales below these are 0: what is made of a code is no subnormal, and so comes back
LEAST_SIGNED, LEAST_ROOT = 2.0**-100, 2.0**-52


def state_noise(seed: int, counter: int, step: int, first: int, numel: int) -> Tensor:
    """int32 [numel] in [0, 2**16): by what positive planes are rounded."""
    return noise(seed, counter + NOISE_KEY, step, first, numel)


def decoded(stored: Sequence[Tensor], layout: StateLayout) -> list[Tensor]:
    """fp32 [n] of all planes of a layout but masters; `stored`: what there is of them."""
    if layout.kind == "bf16":
        return [plane.float() for plane in stored]
    planes = _quantised(layout)
    columns = zip(planes, stored[: len(planes)], stored[len(planes) :], strict=True)
    return [
        (_root_squared if plane.keeps_ties else _expanded)(codes, scales)
        for plane, codes, scales in columns
    ]


def encode(
    values: Sequence[Tensor], stored: Sequence[Tensor], layout: StateLayout, random: Tensor | None
) -> None:
    """The way back: fp32 [n] into `stored`. random: of `state_noise`; None: all to nearest."""
    planes = _quantised(layout)
    count = len(planes)
    for i, plane in enumerate(planes):
        if layout.kind == "bf16":
            _to_bf16(values[i], stored[i], random if plane.keeps_ties else None)
        elif plane.keeps_ties:
            _encode_root(values[i], stored[i], stored[count + i], random)
        else:
            _encode_companded(values[i], stored[i], stored[count + i])


def _quantised(layout: StateLayout) -> list[Plane]:
    return [plane for plane in layout.planes if plane.name != MASTER]


def _to_bf16(values: Tensor, out: Tensor, random: Tensor | None) -> None:
    if random is None:
        out.copy_(values)
        return
    bits = (values.view(torch.int32) + random).bitwise_right_shift_(16).to(torch.int16)
    out.copy_(bits.view(torch.bfloat16)).masked_fill_(values.isnan(), torch.nan)


def _scales(values: Tensor, least: float, out: Tensor) -> Tensor:
    """The largest |value| of every group, 0 below `least`; also by element [n]."""
    numel = values.numel()
    # NaN is the largest of all as bits
    bits = values.view(torch.int32).bitwise_and(0x7FFFFFFF)
    padded = torch.nn.functional.pad(bits, (0, -numel % GROUP_NUMEL)).view(-1, GROUP_NUMEL)
    largest = padded.amax(dim=1).view(torch.float32)
    out.copy_(torch.where(largest < least, 0.0, largest))
    return out.repeat_interleave(GROUP_NUMEL)[:numel]


def _encode_companded(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    scale = _scales(values, LEAST_SIGNED, scales)
    z = torch.where(scale > 0, values / scale, 0.0)
    code = (127.0 * (2.0 * z / (1.0 + z.abs())) + 0.5).floor_()
    codes.copy_(code.nan_to_num_(0.0))


def _expanded(codes: Tensor, scales: Tensor) -> Tensor:
    y = codes.float() / 127.0
    return y / (2.0 - y.abs()) * scales.repeat_interleave(GROUP_NUMEL)[: codes.numel()]


def _encode_root(values: Tensor, codes: Tensor, scales: Tensor, random: Tensor | None) -> None:
    roots = values.sqrt()
    scale = _scales(roots, LEAST_ROOT, scales)
    z = torch.where(scale > 0, roots / scale, 0.0)
    up = 0.5 if random is None else random.float() * 2.0**-16
    codes.copy_((255.0 * z + up).floor_().nan_to_num_(0.0))


def _root_squared(codes: Tensor, scales: Tensor) -> Tensor:
    root = codes.float() / 255.0 * scales.repeat_interleave(GROUP_NUMEL)[: codes.numel()]
    return root * root
