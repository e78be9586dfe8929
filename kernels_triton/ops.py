"""Kernels as the rest of the project calls them: checked, and registered with torch.

Each op takes few tensors: tables, slabs, control. Parameters and gradients of a plain module are
reached through the addresses in the segment table only, since a list of 500 tensors costs 1.3 ms a
call; those of an engine are passed as well, a few tensors, so that their mutation is declared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemini.kernels_triton.update.directions import (
    SUM_AT_ONCE,
    direction_kernel,
    segment_kernel,
)
from gemini.kernels_triton.update.frame import (
    COUNTERS_AT_ONCE,
    NUM_COEFFICIENTS,
    NUM_HYPER,
    prologue_kernel,
    update_kernel,
)
from gemini.kernels_triton.update.made import KERNELS

from .control_fields import NUM_CONTROL
from .launch import on
from .norm import (
    FINISH_AT_ONCE,
    NORM_BLOCK,
    NORM_ROUNDS,
    NORM_WARPS,
    finish_kernel,
    norm_kernel,
    tally_kernel,
)
from .tiles import NUM_COLUMNS, TRITON_DTYPES

NORM_TILE = NORM_BLOCK * NORM_ROUNDS
# Contraction of multiply-adds would make results depend on the compiler.
_EXACT = {"enable_fp_fusion": False}


def _check(name: str, tensor: Tensor, dtype: torch.dtype, columns: int | None) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}; expected {dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
    if columns is not None and (tensor.dim() != 2 or tensor.shape[1] != columns):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected [n, {columns}]")


def _check_device(**tensors: Tensor) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items()}
    first = next(iter(devices.values()))
    for name, device in devices.items():
        if device != first:
            raise ValueError(f"{name} is on {device}; expected {first}, as the other tables")


@torch.library.custom_op("gemini::prologue", mutates_args=("steps", "coefficients", "control"))
def prologue(
    rule: str,
    groups: Tensor,
    hyper: Tensor,
    steps: Tensor,
    present: Tensor,
    coefficients: Tensor,
    control: Tensor,
    norm_tiles: list[Tensor],
    with_norm: bool,
    norm_type: float = 2.0,
    votes: Tensor | None = None,
) -> None:
    """Make clip factor, skip flag and coefficients of a step, and count it; see `prologue_kernel`.

    groups, steps int64 [n] · present fp64 [n] · hyper fp64 [rows, 10] · coefficients fp32 [n, 12] ·
    control fp64 (`fields.py`), for n counters. `norm_tiles` is [tiles, segments, sums, bad]
    of a `grad_norm` of `norm_type` that is to be finished here, or empty; `votes` fp64 [2 * ranks]
    are what all ranks found, in its place (`tally`). Raises ValueError for anything else.
    """
    _check("groups", groups, torch.int64, None)
    _check("hyper", hyper, torch.float64, NUM_HYPER)
    _check("steps", steps, torch.int64, None)
    _check("present", present, torch.float64, None)
    _check("coefficients", coefficients, torch.float32, NUM_COEFFICIENTS)
    _check("control", control, torch.float64, None)
    _check_device(
        groups=groups, hyper=hyper, steps=steps, present=present,
        coefficients=coefficients, control=control,
    )  # fmt: skip
    for name, tensor in (("groups", groups), ("present", present)):
        if tensor.numel() != steps.numel():
            raise ValueError(f"{name} has {tensor.numel()} elements; expected {steps.numel()}")
    if coefficients.shape[0] != steps.numel():
        raise ValueError(f"coefficients has {coefficients.shape[0]} rows for {steps.numel()} steps")
    if control.numel() != NUM_CONTROL:
        raise ValueError(f"control has {control.numel()} elements; expected {NUM_CONTROL}")
    with on(control.device):
        prologue_kernel[(1,)](
            groups, hyper, steps, present, steps.numel(), coefficients, control,
            *(norm_tiles or [groups, groups, control, groups]),
            norm_tiles[0].shape[0] if norm_tiles else 0,
            control if votes is None else votes, 0 if votes is None else votes.numel() // 2,
            KERNELS[rule].coefficients, with_norm, bool(norm_tiles), votes is not None,
            _norm_code(norm_type),
            COUNTERS_AT_ONCE, FINISH_AT_ONCE,
            **_EXACT,
        )  # fmt: skip


def update_now(
    rule: str,
    tiles: Tensor,
    segments: Tensor,
    coefficients: Tensor,
    control: Tensor,
    planes: list[Tensor],
    params: list[Tensor],
    grads: list[Tensor],
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    block: int,
    num_warps: int,
    stochastic: bool = False,
    marks: Tensor | None = None,
) -> None:
    """Update every tile in one launch; see `update_kernel`.

    rule: a key of `KERNELS`.
    planes: the slabs [N], the master first where there is one more than the rule's own; an int16
        master is the remainder that bf16 parameters lack, and fp32 parameters have none. What
        groups of elements share comes last; see `PlaneForm`.
    stochastic: bf16 parameters without a master are rounded at random, by control[SEED].
    marks: int64 [n], where bits of each segment's changed elements are set; None: nowhere.
    params, grads: tensors that addresses in `segments` point into; may be empty for a plain module.
    Raises ValueError, before anything is written, for what the kernel cannot take.
    """
    kernel = KERNELS[rule]
    form, codec = kernel.form, kernel.form.codec
    _check("tiles", tiles, torch.int32, 2)
    _check("segments", segments, torch.int64, NUM_COLUMNS)
    _check_device(tiles=tiles, segments=segments, coefficients=coefficients, control=control)
    has_master = len(planes) == len(form.stored) + 1
    if not has_master and len(planes) != len(form.stored):
        raise ValueError(
            f"planes has {len(planes)} slabs; {kernel.name} has {len(form.stored)}, and one "
            "more with a master"
        )
    is_split = has_master and planes[0].dtype == torch.int16
    if is_split and form.keeper < 0 and codec.code == 0:
        raise ValueError(
            f"planes[0] is int16; {kernel.name} has no plane that keeps ties, so give fp32"
        )
    if is_split and param_dtype is not torch.bfloat16:
        raise ValueError(f"planes[0] is int16, which bf16 parameters lack; {param_dtype} was given")
    dtypes, num_shared = form.stored, len(form.stored) - form.num_planes
    groups = [codec.of_code] * form.num_planes + [codec.of_shared] * num_shared
    if has_master:
        dtypes = (torch.int16 if is_split else torch.float32, *dtypes)
        groups.insert(0, 1)
    numel = planes[0].numel() * groups[0]
    for i, (plane, dtype) in enumerate(zip(planes, dtypes, strict=True)):
        _check(f"planes[{i}]", plane, dtype, None)
        if plane.numel() != -(-numel // groups[i]):
            raise ValueError(f"planes[{i}] has {plane.numel()} elements, others differ")
        for j in range(i):
            if plane.numel() and plane.data_ptr() == planes[j].data_ptr():
                raise ValueError(f"planes[{i}] and planes[{j}] are the same memory")
    for name, dtype in (("param_dtype", param_dtype), ("grad_dtype", grad_dtype)):
        if dtype not in TRITON_DTYPES:
            raise ValueError(f"{name}={dtype} is not one of {list(TRITON_DTYPES)}")
    if stochastic and has_master:
        raise ValueError("stochastic rounding is for parameters without a master")
    if marks is not None:
        _check("marks", marks, torch.int64, None)
        _check_device(tiles=tiles, marks=marks)
    if tiles.shape[0] == 0:
        return
    state = planes[1:] if has_master else planes
    state = [p.view(torch.int16) if p.dtype is torch.bfloat16 else p for p in state]
    codes, shared = state[: form.num_planes], [state[i] for i in form.shared]
    with on(tiles.device):
        update_kernel[(tiles.shape[0],)](
            tiles, segments, coefficients, control, planes[0],
            codes[0], codes[min(1, len(codes) - 1)], codes[-1],
            shared[0], shared[min(1, len(shared) - 1)], shared[-1], marks,
            kernel.formula, form.num_planes, TRITON_DTYPES[param_dtype],
            TRITON_DTYPES[grad_dtype], has_master and not is_split, is_split,
            form.keeper, form.under_root, codec.code,
            stochastic and param_dtype is torch.bfloat16, block,
            num_warps=num_warps, **_EXACT,
        )  # fmt: skip


# A registered operator costs 0.1 ms a call, so streamed blocks call `update_now` itself.
update = torch.library.custom_op("gemini::update", update_now, mutates_args=("planes", "params"))


def direction_squares(
    rule: str,
    tiles: Tensor,
    segments: Tensor,
    ends: Tensor,
    ranges: Sequence[tuple[tuple[torch.dtype, torch.dtype], int, int]],
    coefficients: Tensor,
    planes: list[Tensor],
    factor: float,
    limit: float,
    block: int,
    num_warps: int,
) -> Tensor:
    """Squares fp64 [n, 2] of weights and directions of every segment; see `direction_kernel`.

    rule: a key of `KERNELS`, whose formula gives the direction in place of the parameter.
    ends: int64 [n], 1 + the last tile of each segment. ranges: of tiles, by the dtypes of parameter
    and gradient. planes: as of `update_now`, of fp32.
    """
    form = KERNELS[rule].form
    has_master = len(planes) == len(form.stored) + 1
    is_split = has_master and planes[0].dtype == torch.int16
    state = planes[1:] if has_master else planes
    _check("tiles", tiles, torch.int32, 2)
    _check("segments", segments, torch.int64, NUM_COLUMNS)
    _check("ends", ends, torch.int64, None)
    _check("coefficients", coefficients, torch.float32, NUM_COEFFICIENTS)
    for i, plane in enumerate(state):
        _check(f"planes[{i}]", plane, torch.float32, None)
    _check_device(tiles=tiles, segments=segments, ends=ends, coefficients=coefficients)
    squares = torch.empty(tiles.shape[0], 2, dtype=torch.float64, device=tiles.device)
    out = torch.empty(len(ends), 2, dtype=torch.float64, device=tiles.device)
    if not len(ends):
        return out
    with on(tiles.device):
        for (param_dtype, grad_dtype), lo, hi in ranges:
            direction_kernel[(hi - lo,)](
                tiles[lo:hi], segments, coefficients, squares[lo:hi], planes[0],
                state[0], state[min(1, len(state) - 1)], state[-1], factor, limit,
                KERNELS[rule].formula, form.num_planes, TRITON_DTYPES[param_dtype],
                TRITON_DTYPES[grad_dtype], has_master and not is_split, is_split, form.keeper,
                block, num_warps=num_warps, **_EXACT,
            )  # fmt: skip
        if len(ends) == tiles.shape[0]:  # every segment is a tile
            return squares
        segment_kernel[(len(ends),)](squares, ends, out, SUM_AT_ONCE, **_EXACT)
    return out


@torch.library.custom_op("gemini::grad_norm", mutates_args=("sums", "bad", "control"))
def grad_norm(
    tiles: Tensor,
    segments: Tensor,
    sums: Tensor,
    bad: Tensor,
    control: Tensor,
    grads: list[Tensor],
    grad_dtype: torch.dtype,
    norm_type: float,
) -> None:
    """Sum tiles into `sums` fp32 [t] and `bad` int32 [t]; no total yet (`finish_norm`)."""
    _check("tiles", tiles, torch.int32, 2)
    _check("segments", segments, torch.int64, NUM_COLUMNS)
    _check("sums", sums, torch.float32, None)
    _check("bad", bad, torch.int32, None)
    _check_device(tiles=tiles, segments=segments, sums=sums, bad=bad, control=control)
    if grad_dtype not in TRITON_DTYPES:
        raise ValueError(f"grad_dtype={grad_dtype} is not one of {list(TRITON_DTYPES)}")
    if sums.numel() < tiles.shape[0] or bad.numel() < tiles.shape[0]:
        raise ValueError(f"sums and bad have fewer elements than the {tiles.shape[0]} tiles")
    if tiles.shape[0] == 0:
        return
    exponent = torch.full((1,), norm_type, dtype=torch.float64, device=control.device)
    with on(tiles.device):
        norm_kernel[(tiles.shape[0],)](
            tiles, segments, sums, bad, exponent, exponent,
            TRITON_DTYPES[grad_dtype], TRITON_DTYPES[grad_dtype], _norm_code(norm_type),
            False, True, NORM_BLOCK, NORM_ROUNDS, num_warps=NORM_WARPS, **_EXACT,
        )  # fmt: skip


@torch.library.custom_op("gemini::finish_norm", mutates_args=("out",))
def finish_norm(
    tiles: Tensor,
    segments: Tensor,
    sums: Tensor,
    bad: Tensor,
    out: Tensor,
    at_sum: int,
    at_bad: int,
    norm_type: float,
    at_once: int = FINISH_AT_ONCE,
) -> None:
    """Sum tiles to fp64 `out[at_sum]`, `at_once` of them at a time in a fixed order, and put 1 +
    the first counter that is not finite to `out[at_bad]`."""
    _check("segments", segments, torch.int64, NUM_COLUMNS)
    _check("out", out, torch.float64, None)
    _check_device(tiles=tiles, segments=segments, sums=sums, bad=bad, out=out)
    with on(out.device):
        finish_kernel[(1,)](
            tiles, segments, sums, bad, tiles.shape[0], out[at_sum:], out[at_bad:],
            _norm_code(norm_type), at_once, **_EXACT,
        )  # fmt: skip


@torch.library.custom_op("gemini::tally", mutates_args=("control",))
def tally(votes: Tensor, control: Tensor, norm_type: float) -> None:
    """Tally the votes of all ranks to SUM, BAD and BAD_RANK of `control`.

    votes fp64 [2 * ranks]: results of `finish_norm` on every rank, sums first.
    """
    _check("votes", votes, torch.float64, None)
    _check_device(votes=votes, control=control)
    with on(control.device):
        tally_kernel[(1,)](votes, votes.numel() // 2, control, _norm_code(norm_type), **_EXACT)


@torch.library.custom_op("gemini::pack", mutates_args=("sums", "bad", "destinations"))
def pack(
    tiles: Tensor,
    segments: Tensor,
    sums: Tensor,
    bad: Tensor,
    scale: Tensor,
    destinations: list[Tensor],
    sources: list[Tensor],
    source_dtype: torch.dtype,
    destination_dtype: torch.dtype,
    with_sums: bool,
) -> None:
    """Copy every segment from its `grad` to its `param` address, times `scale` fp64 [1], cast.

    With sums, also the results of `grad_norm`, of the scaled values before they are rounded.
    """
    _check("tiles", tiles, torch.int32, 2)
    _check("segments", segments, torch.int64, NUM_COLUMNS)
    _check("scale", scale, torch.float64, None)
    _check_device(tiles=tiles, segments=segments, sums=sums, bad=bad, scale=scale)
    for name, dtype in (
        ("source_dtype", source_dtype), ("destination_dtype", destination_dtype)
    ):  # fmt: skip
        if dtype not in TRITON_DTYPES:
            raise ValueError(f"{name}={dtype} is not one of {list(TRITON_DTYPES)}")
    if tiles.shape[0] == 0:
        return
    with on(tiles.device):
        norm_kernel[(tiles.shape[0],)](
            tiles, segments, sums, bad, scale, scale,
            TRITON_DTYPES[source_dtype], TRITON_DTYPES[destination_dtype], 2,
            True, with_sums, NORM_BLOCK, NORM_ROUNDS, num_warps=NORM_WARPS, **_EXACT,
        )  # fmt: skip


def _norm_code(norm_type: float) -> int:
    """Code of a norm in the kernel: 2, 1, 0 for the maximum, -1 for any other."""
    if norm_type == float("inf"):
        return 0
    if norm_type in (1.0, 2.0):
        return int(norm_type)
    if norm_type > 0:
        return -1
    raise ValueError(f"norm_type={norm_type}; expected a positive number or inf")


for _op in (prologue, update, grad_norm, finish_norm, tally, pack):
    _op.register_fake(lambda *args, **kwargs: None)
