"""Control vector, fp64: numbers that the kernels of a step leave each other on the device. Pure.

The host reads and writes it by these indices, with or without Triton.
"""

from __future__ import annotations

# fields that a step measured and decided
SUM = 0  # of |g|^p over all gradients, or the largest |g| for p = inf; of the scaled gradients
BAD = 1  # 1 + the first parameter (a counter) that is not finite; 0 where all are
NORM = 2  # of the unscaled gradients, before clipping
FACTOR = 3  # what gradients are multiplied with: unscale and clip in one
SKIP = 4  # 1 where the step changes nothing
# fields that the host asks for
MAX_NORM = 5  # 0: no clipping
LOSS_SCALE = 6  # what gradients carry; the schedule below changes it
MAX_VALUE = 7  # largest |g| after FACTOR; 0: any
# fields of the loss scale's schedule: its state, then its options
GOOD_STEPS = 8  # since the scale last changed
HYSTERESIS_LEFT = 9  # overflows that still go without a backoff
SKIPPED_STEPS = 10
GROWTH_FACTOR = 11
BACKOFF_FACTOR = 12
GROWTH_INTERVAL = 13  # 0: the scale never changes
HYSTERESIS = 14
MIN_SCALE = 15
MAX_SCALE = 16
USED_SCALE = 17  # LOSS_SCALE as this step's gradients carried it
SEED = 18  # of stochastic rounding
BAD_RANK = 19  # that has it
NUM_CONTROL = 20
