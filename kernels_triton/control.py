"""The indices of the control vector (`fields.py`) as the kernels read them."""

from __future__ import annotations

import triton.language as tl

from . import control_fields as fields

C_SUM, C_BAD, C_NORM = (tl.constexpr(c) for c in (fields.SUM, fields.BAD, fields.NORM))
C_FACTOR, C_SKIP = tl.constexpr(fields.FACTOR), tl.constexpr(fields.SKIP)
C_MAX_NORM, C_MAX_VALUE = tl.constexpr(fields.MAX_NORM), tl.constexpr(fields.MAX_VALUE)
C_LOSS_SCALE, C_USED_SCALE = tl.constexpr(fields.LOSS_SCALE), tl.constexpr(fields.USED_SCALE)
C_GOOD_STEPS = tl.constexpr(fields.GOOD_STEPS)
C_HYSTERESIS_LEFT = tl.constexpr(fields.HYSTERESIS_LEFT)
C_SKIPPED_STEPS = tl.constexpr(fields.SKIPPED_STEPS)
C_GROWTH_FACTOR = tl.constexpr(fields.GROWTH_FACTOR)
C_BACKOFF_FACTOR = tl.constexpr(fields.BACKOFF_FACTOR)
C_GROWTH_INTERVAL = tl.constexpr(fields.GROWTH_INTERVAL)
C_HYSTERESIS = tl.constexpr(fields.HYSTERESIS)
C_MIN_SCALE, C_MAX_SCALE = tl.constexpr(fields.MIN_SCALE), tl.constexpr(fields.MAX_SCALE)
C_BAD_RANK = tl.constexpr(fields.BAD_RANK)
C_SEED = tl.constexpr(fields.SEED)
