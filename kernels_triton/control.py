"""The control vector, fp64 [8]: what the kernels of one step tell each other, on the device."""

from __future__ import annotations

import triton.language as tl

SUM, BAD, NORM, FACTOR, SKIP, MAX_NORM, LOSS_SCALE = range(7)
NUM_CONTROL = 8

C_SUM, C_BAD, C_NORM, C_FACTOR = (tl.constexpr(c) for c in (SUM, BAD, NORM, FACTOR))
C_SKIP, C_MAX_NORM, C_LOSS_SCALE = (tl.constexpr(c) for c in (SKIP, MAX_NORM, LOSS_SCALE))
