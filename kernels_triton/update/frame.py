"""Frame of every optimizer kernel: one launch over a tile table, and its one-block prologue.

An optimizer is two small `@triton.jit` functions, of which `made.py` gets the source:

    coefficients(hyper, inside, t) -> 10 fp64 vectors, from hyperparameters and step counts
    formula(param, grad, s0, s1, s2, coefficients) -> param, s0, s1, s2, in fp32

Bytes per element: grad + 2 * (param or master) + 2 * 4 * planes, + 2 for a 16-bit copy; less with
quantised planes (`quantised.py`).
No hyperparameter is a kernel argument or a constexpr: a schedule neither recompiles nor waits.
"""

from __future__ import annotations

import numpy
import triton
import triton.language as tl

from gemini.kernels_triton.launch import check_interpreter, is_interpreted
from gemini.kernels_triton.norm import finish_tiles, tally_votes
from gemini.kernels_triton.quantised import NOISE_KEY, load_plane, store_plane, untied
from gemini.kernels_triton.rounding import (
    join_master,
    load,
    load_bits,
    mark,
    noise,
    pointer,
    round_stochastic,
    store,
    store_low,
    store_stochastic,
    stored_bits,
    with_tie,
)
from gemini.kernels_triton.tiles import (
    C_BACKOFF_FACTOR,
    C_BAD,
    C_BAD_RANK,
    C_FACTOR,
    C_GOOD_STEPS,
    C_GROWTH_FACTOR,
    C_GROWTH_INTERVAL,
    C_HYSTERESIS,
    C_HYSTERESIS_LEFT,
    C_LOSS_SCALE,
    C_MAX_NORM,
    C_MAX_SCALE,
    C_MAX_VALUE,
    C_MIN_SCALE,
    C_NORM,
    C_SEED,
    C_SKIP,
    C_SKIPPED_STEPS,
    C_SUM,
    C_USED_SCALE,
    T_COLUMNS,
    T_COUNTER,
    T_FIRST,
    T_GRAD,
    T_NUMEL,
    T_PARAM,
    T_STATE,
)

NUM_HYPER = 10  # fp64 columns of the hyperparameter table
# fp32 columns of the coefficient table: the rule's 10, then 1 where active, then the bits of the
# step count as int32
NUM_COEFFICIENTS = 12
COUNTERS_AT_ONCE = 128  # in the prologue

if is_interpreted():
    check_interpreter(triton.__version__, numpy.__version__)

_HYPER, _COEFFICIENTS = tl.constexpr(NUM_HYPER), tl.constexpr(NUM_COEFFICIENTS)
_ACTIVE, _STEP = tl.constexpr(NUM_COEFFICIENTS - 2), tl.constexpr(NUM_COEFFICIENTS - 1)


@triton.jit
def _next_scale(control, scale, overflow):
    """Move the loss scale on, in place, as `optim.rules.loss_scale.LossScale.after` does."""
    good = tl.load(control + C_GOOD_STEPS) + 1.0
    left = tl.load(control + C_HYSTERESIS_LEFT)
    left = tl.where(overflow & (left > 0.0), left - 1.0, left)
    lower = tl.maximum(scale * tl.load(control + C_BACKOFF_FACTOR), tl.load(control + C_MIN_SCALE))
    higher = tl.minimum(scale * tl.load(control + C_GROWTH_FACTOR), tl.load(control + C_MAX_SCALE))
    backs_off = overflow & (left <= 0.0)
    grows = (overflow == 0) & (good >= tl.load(control + C_GROWTH_INTERVAL))
    tl.store(control + C_LOSS_SCALE, tl.where(backs_off, lower, tl.where(grows, higher, scale)))
    tl.store(control + C_GOOD_STEPS, tl.where(overflow | grows, 0.0, good))
    tl.store(control + C_HYSTERESIS_LEFT, tl.where(grows, tl.load(control + C_HYSTERESIS), left))


@triton.jit
def prologue_kernel(
    groups,  # int64 [counters]: row of the hyperparameter table
    hyper,  # fp64 [rows, 10]
    steps,  # int64 [counters]
    present,  # fp64 [counters]: above 0 where some rank has a gradient
    num_counters,
    coefficients,  # fp32 [counters, 12]
    control,  # fp64: see `fields.py`
    tiles,  # int32 [t, 2], int64 [n, 6], fp32 [t], int32 [t]: of `norm_kernel`, where FROM_TILES
    segments,
    sums,
    bad,
    num_tiles,
    votes,  # fp64 [2 * ranks], where FROM_VOTES: see `tally_votes`
    num_ranks,
    RULE_COEFFICIENTS: tl.constexpr,
    WITH_NORM: tl.constexpr,
    FROM_TILES: tl.constexpr,  # finish the norm here: no rank has to be asked
    FROM_VOTES: tl.constexpr,  # or of all ranks
    NORM: tl.constexpr,  # 2, 1, or 0 for the maximum
    AT_ONCE: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
):
    """Make clip factor and skip flag from the norm, coefficients from counts and hyperparameters.

    One program. A skipped step leaves every count as it was, and so does a parameter that has no
    gradient. The loss scale moves on by its schedule.
    """
    scale = tl.load(control + C_LOSS_SCALE)
    tl.store(control + C_USED_SCALE, scale)
    factor = 1.0 / scale
    skip = 0.0
    if WITH_NORM:
        if FROM_TILES:
            total, first_bad = finish_tiles(
                tiles, segments, sums, bad, num_tiles, NORM, TILES_AT_ONCE
            )
            tl.store(control + C_SUM, total)
            tl.store(control + C_BAD, first_bad)
        elif FROM_VOTES:
            total, first_bad, rank = tally_votes(votes, num_ranks, NORM)
            tl.store(control + C_SUM, total)
            tl.store(control + C_BAD, first_bad)
            tl.store(control + C_BAD_RANK, rank)
        else:
            total = tl.load(control + C_SUM)
            first_bad = tl.load(control + C_BAD)
        if NORM == 2:
            total = tl.sqrt(total)
        norm = total / scale
        max_norm = tl.load(control + C_MAX_NORM)
        clip = tl.where(max_norm > 0, max_norm / (norm + 1e-6), 1.0)
        factor = tl.where(clip < 1.0, clip, 1.0) * factor
        skip = tl.where(first_bad > 0, 1.0, 0.0)
        tl.store(control + C_NORM, norm)
        overflow = first_bad > 0
        tl.store(control + C_SKIPPED_STEPS, tl.load(control + C_SKIPPED_STEPS) + skip)
        if tl.load(control + C_GROWTH_INTERVAL) > 0.0:
            _next_scale(control, scale, overflow)
    tl.store(control + C_FACTOR, factor)
    tl.store(control + C_SKIP, skip)
    if skip == 0.0:
        for first in range(0, num_counters, AT_ONCE):
            counter = first + tl.arange(0, AT_ONCE)
            inside = counter < num_counters
            group = tl.load(groups + counter, mask=inside, other=0)
            active = tl.load(present + counter, mask=inside, other=0.0) > 0
            t = tl.load(steps + counter, mask=inside, other=0) + 1
            tl.store(steps + counter, t, mask=inside & active)
            c0, c1, c2, c3, c4, c5, c6, c7, c8, c9 = RULE_COEFFICIENTS(
                hyper + group * _HYPER, inside, t
            )
            out = coefficients + counter * _COEFFICIENTS
            tl.store(out + 0, c0.to(tl.float32), mask=inside)
            tl.store(out + 1, c1.to(tl.float32), mask=inside)
            tl.store(out + 2, c2.to(tl.float32), mask=inside)
            tl.store(out + 3, c3.to(tl.float32), mask=inside)
            tl.store(out + 4, c4.to(tl.float32), mask=inside)
            tl.store(out + 5, c5.to(tl.float32), mask=inside)
            tl.store(out + 6, c6.to(tl.float32), mask=inside)
            tl.store(out + 7, c7.to(tl.float32), mask=inside)
            tl.store(out + 8, c8.to(tl.float32), mask=inside)
            tl.store(out + 9, c9.to(tl.float32), mask=inside)
            tl.store(out + _ACTIVE, active.to(tl.float32), mask=inside)
            tl.store(out + _STEP, t.to(tl.int32).to(tl.float32, bitcast=True), mask=inside)


@triton.jit
def _plane(s0, s1, s2, NUMBER: tl.constexpr):
    if NUMBER == 0:
        return s0
    if NUMBER == 1:
        return s1
    return s2


@triton.jit
def _with_plane(plane, s0, s1, s2, NUMBER: tl.constexpr):
    """Replace one of three planes."""
    if NUMBER == 0:
        return plane, s1, s2
    if NUMBER == 1:
        return s0, plane, s2
    return s0, s1, plane


@triton.jit
def _load_planes(
    codes, shared, i, mask,
    NUM_PLANES: tl.constexpr, KEEPER: tl.constexpr, UNDER_ROOT: tl.constexpr, KIND: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load three planes in fp32; the first stands in for a plane that the rule does not have."""
    root = i
    if UNDER_ROOT != 0:
        keeper = load_plane(codes[KEEPER], shared[KEEPER], i, mask, i, KIND, True, False, MASKED)
        root = tl.sqrt_rn(keeper)
    s0 = load_plane(
        codes[0], shared[0], i, mask, root, KIND, KEEPER == 0, UNDER_ROOT & 1 != 0, MASKED
    )
    s1, s2 = s0, s0
    if NUM_PLANES >= 2:
        s1 = load_plane(
            codes[1], shared[1], i, mask, root, KIND, KEEPER == 1, UNDER_ROOT & 2 != 0, MASKED
        )
    if NUM_PLANES == 3:
        s2 = load_plane(
            codes[2], shared[2], i, mask, root, KIND, KEEPER == 2, UNDER_ROOT & 4 != 0, MASKED
        )
    return s0, s1, s2


@triton.jit
def _store_planes(
    codes, shared, new, i, random, mask, left,
    NUM_PLANES: tl.constexpr, KEEPER: tl.constexpr, UNDER_ROOT: tl.constexpr, KIND: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store three planes, rounded by `random` where they are quantised; what others are coded by
    the root of is stored first."""
    root = i
    if UNDER_ROOT != 0:
        root = store_plane(
            codes[KEEPER], shared[KEEPER], i, new[KEEPER], random, mask, left, i,
            KIND, True, False, MASKED, BLOCK,
        )  # fmt: skip
    if UNDER_ROOT == 0 or KEEPER != 0:
        store_plane(
            codes[0], shared[0], i, new[0], random, mask, left, root,
            KIND, KEEPER == 0, UNDER_ROOT & 1 != 0, MASKED, BLOCK,
        )  # fmt: skip
    if NUM_PLANES >= 2 and (UNDER_ROOT == 0 or KEEPER != 1):
        store_plane(
            codes[1], shared[1], i, new[1], random, mask, left, root,
            KIND, KEEPER == 1, UNDER_ROOT & 2 != 0, MASKED, BLOCK,
        )  # fmt: skip
    if NUM_PLANES == 3 and (UNDER_ROOT == 0 or KEEPER != 2):
        store_plane(
            codes[2], shared[2], i, new[2], random, mask, left, root,
            KIND, KEEPER == 2, UNDER_ROOT & 4 != 0, MASKED, BLOCK,
        )  # fmt: skip


@triton.jit
def _update_tile(
    param_address,
    grad_address,
    start,
    remaining,
    master,
    codes,  # of three planes, and what their groups share
    shared,
    row,
    scale,  # factor and limit of gradients
    drawn,  # by which noise is: seed, parameter, and its first element
    FORMULA: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    SPLIT: tl.constexpr,
    KEEPER: tl.constexpr,
    UNDER_ROOT: tl.constexpr,
    KIND: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    marks,  # address of the bits of the segment's elements, or None
    MASKED: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    mask = i < remaining
    # 16-bit elements are read 4 a thread, as the fp32 planes are: with 8, the registers of all
    # planes double, and half as many warps fit.
    param_alignment: tl.constexpr = 0 if MASKED else (16 if PARAM_DTYPE == tl.float32 else 8)
    grad_alignment: tl.constexpr = 0 if MASKED else (16 if GRAD_DTYPE == tl.float32 else 8)
    param = pointer(param_address, start, PARAM_DTYPE, param_alignment)
    grad = pointer(grad_address, start, GRAD_DTYPE, grad_alignment)
    g = load(grad, i, mask, GRAD_DTYPE, MASKED) * scale[0]
    g = tl.maximum(g, -scale[1], propagate_nan=tl.PropagateNan.ALL)
    g = tl.minimum(g, scale[1], propagate_nan=tl.PropagateNan.ALL)
    if SPLIT:
        low = load_bits(master, i, mask, MASKED)
        high = load_bits(param, i, mask, MASKED)
        p = ((high << 16) + low).to(tl.float32, bitcast=True)
    elif HAS_MASTER:
        p = load(master, i, mask, tl.float32, MASKED)
    else:
        p = load(param, i, mask, PARAM_DTYPE, MASKED)
    s0, s1, s2 = _load_planes(codes, shared, i, mask, NUM_PLANES, KEEPER, UNDER_ROOT, KIND, MASKED)
    if SPLIT and KIND == 0:
        keeper = _plane(s0, s1, s2, KEEPER)
        p = join_master(high, low, keeper)
        s0, s1, s2 = _with_plane(tl.abs(keeper), s0, s1, s2, KEEPER)
    before = p  # rounds to the weight that the model sees, of which nothing is read for this
    p, s0, s1, s2 = FORMULA(p, g, s0, s1, s2, row)
    if SPLIT and KIND == 0:
        keeper = with_tie(_plane(s0, s1, s2, KEEPER), p)
        s0, s1, s2 = _with_plane(keeper, s0, s1, s2, KEEPER)
    if KIND > 0 and (SPLIT or HAS_MASTER):
        p = untied(p)
    random = i
    if KIND == 2 or (KIND == 1 and KEEPER >= 0):
        count = tl.load(row + _STEP).to(tl.int32, bitcast=True).to(tl.int64)
        random = noise(drawn[0], drawn[1] + NOISE_KEY, count, drawn[2] + start, BLOCK)
    _store_planes(
        codes, shared, (s0, s1, s2), i, random, mask, remaining,
        NUM_PLANES, KEEPER, UNDER_ROOT, KIND, MASKED, BLOCK,
    )  # fmt: skip
    if SPLIT:
        store_low(master, i, p, mask, MASKED)
    elif HAS_MASTER:
        store(master, i, p, mask, tl.float32, MASKED)
    if STOCHASTIC:
        step = tl.load(row + _STEP).to(tl.int32, bitcast=True).to(tl.int64)
        random = noise(drawn[0], drawn[1], step, drawn[2] + start, BLOCK)
        store_stochastic(param, i, p, random, mask, MASKED)
    else:
        store(param, i, p, mask, PARAM_DTYPE, MASKED)
    if marks is not None:
        if STOCHASTIC:
            after = round_stochastic(p, random).to(tl.int32)
        else:
            after = stored_bits(p, PARAM_DTYPE)
        changed = (stored_bits(before, PARAM_DTYPE) != after) & mask
        mark(marks, start, changed, remaining, BLOCK)


@triton.jit
def update_kernel(
    tiles,  # int32 [t, 2]
    segments,  # int64 [n, 6]
    coefficients,  # fp32 [counters, 12]
    control,  # fp64: see `fields.py`
    master,  # fp32 slab, or anything where HAS_MASTER is false
    state0,  # slab of the KIND
    state1,  # slab, or anything where NUM_PLANES is 1
    state2,  # slab, or anything where NUM_PLANES is less than 3
    shared0,  # uint8, one for 8 elements of state0, or anything where they share nothing
    shared1,
    shared2,
    marks,  # int64 [n]: addresses of bits of elements, set where stored values change; or None
    FORMULA: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    SPLIT: tl.constexpr,  # `master` is int16: what bf16 parameters lack of theirs
    KEEPER: tl.constexpr,  # the plane that is never negative and so may keep ties; or -1
    UNDER_ROOT: tl.constexpr,  # bit i: plane i is coded by the root of KEEPER
    KIND: tl.constexpr,  # in what planes are kept: see `quantised.py`
    STOCHASTIC: tl.constexpr,  # bf16 without a master: round at random, see `rounding.noise`
    BLOCK: tl.constexpr,
):
    """Update one tile in one program. Full, aligned tiles take the unmasked branch (128-bit)."""
    program = tl.program_id(0).to(tl.int64)
    segment = tl.load(tiles + 2 * program).to(tl.int64)
    row = segments + segment * T_COLUMNS
    counter = tl.load(row + T_COUNTER)
    coefficient_row = coefficients + counter * _COEFFICIENTS
    active = tl.load(coefficient_row + _ACTIVE) != 0.0
    if (tl.load(control + C_SKIP) == 0.0) & active:
        start = tl.load(tiles + 2 * program + 1).to(tl.int64) * BLOCK
        param_address = tl.load(row + T_PARAM)
        grad_address = tl.load(row + T_GRAD)
        offset = tl.multiple_of(tl.load(row + T_STATE), 64) + start
        remaining = tl.load(row + T_NUMEL) - start
        factor = tl.load(control + C_FACTOR).to(tl.float32)
        limit = tl.load(control + C_MAX_VALUE).to(tl.float32)
        limit = tl.where(limit > 0, limit, float("inf"))
        seed = tl.load(control + C_SEED).to(tl.int64)
        first = tl.load(row + T_FIRST)
        codes = (state0 + offset, state1 + offset, state2 + offset)
        shared = (shared0 + offset // 8, shared1 + offset // 8, shared2 + offset // 8)
        drawn = (seed, counter, first)
        if marks is None:
            of_marks = None
        else:
            of_marks = tl.load(marks + segment)
        of_master = master + offset
        if SPLIT:  # told 8 of its 16 bytes of alignment, the compiler reads 4 elements a thread
            of_master = tl.multiple_of(of_master, 8)
        if (remaining >= BLOCK) & (((param_address | grad_address) & 15) == 0):
            _update_tile(
                param_address, grad_address, start, remaining,
                of_master, codes, shared, coefficient_row, (factor, limit), drawn,
                FORMULA, NUM_PLANES, PARAM_DTYPE, GRAD_DTYPE, HAS_MASTER, SPLIT, KEEPER,
                UNDER_ROOT, KIND, STOCHASTIC, BLOCK, of_marks, False,
            )  # fmt: skip
        else:
            _update_tile(
                param_address, grad_address, start, remaining,
                of_master, codes, shared, coefficient_row, (factor, limit), drawn,
                FORMULA, NUM_PLANES, PARAM_DTYPE, GRAD_DTYPE, HAS_MASTER, SPLIT, KEEPER,
                UNDER_ROOT, KIND, STOCHASTIC, BLOCK, of_marks, True,
            )  # fmt: skip
