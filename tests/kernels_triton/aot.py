"""Compiles every kernel ahead of time, without a GPU; prints what the assembly holds, as JSON.

Run by test_aot.py in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels_triton import float8, lines, rows, symmetric
from kernels_triton.launch import choose_launch
from kernels_triton.norm import (
    FINISH_AT_ONCE,
    NORM_BLOCK,
    NORM_ROUNDS,
    NORM_WARPS,
    finish_kernel,
    norm_kernel,
    tally_kernel,
)  # fmt: skip
from kernels_triton.update.directions import SUM_AT_ONCE, direction_kernel, segment_kernel
from kernels_triton.update.frame import COUNTERS_AT_ONCE, prologue_kernel, update_kernel
from kernels_triton.update.made import KERNELS
from optim.update.triton_update import kernel_of
from tests.support.rules import CASES

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
IN_FULL = (
    "adam",
    "adam-8bit",
    "adam-bf16",
    "adam-amsgrad",
    "sgd",
    "lion",
)  # in all mixes of dtypes; others in three
ACCESS = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?((?:ld|st)\.global\S*|buffer_(?:load|store)\S*|scratch_\S*|fma\.\S*)"
)


def sources():
    """(name, source, num_warps) of every kernel that is launched."""
    launch = choose_launch(28, interpreted=False, largest_numel=1 << 20)
    tables = {"tiles": "*i32", "segments": "*i64", "coefficients": "*fp32", "control": "*fp64"}
    rules = {rule.name: rule for rule in (case.rule() for case in CASES.values())}
    mixes = (
        (tl.bfloat16, tl.bfloat16, True, False, False),
        (tl.float32, tl.float32, False, False, False),
        (tl.bfloat16, tl.bfloat16, False, False, True),
        (tl.float16, tl.float16, True, False, False),
        (tl.bfloat16, tl.float32, True, False, False),
        (tl.bfloat16, tl.bfloat16, False, True, False),
    )
    for name, rule in rules.items():
        kernel, in_full = KERNELS[kernel_of(rule)], name in IN_FULL
        form, codec = kernel.form, kernel.form.codec
        for param, grad, master, stochastic, split in mixes[: None if in_full else 3]:
            if split and form.keeper < 0:
                continue
            codes = {"fp32": ["*fp32"] * 3, "bf16": ["*i16"] * 3, "8bit": ["*i8", "*u8", "*u8"]}
            pointers = {**tables, "master": "*i16" if split else "*fp32"}
            pointers |= {f"state{i}": kind for i, kind in enumerate(codes[form.kind])}
            pointers |= {f"shared{i}": "*u8" for i in range(3)}
            constants = {
                "marks": None, "FORMULA": kernel.formula, "NUM_PLANES": form.num_planes,
                "PARAM_DTYPE": param, "GRAD_DTYPE": grad, "HAS_MASTER": master, "SPLIT": split,
                "KEEPER": form.keeper, "UNDER_ROOT": form.under_root,
                "KIND": codec.code, "STOCHASTIC": stochastic, "BLOCK": launch.block,
            }  # fmt: skip
            name = (
                f"update-{rule.name}-{param}-{grad}{'-stochastic' * stochastic}{'-split' * split}"
            )
            yield name, source(update_kernel, pointers, constants), launch.num_warps
        pointers = {
            "groups": "*i64", "hyper": "*fp64", "steps": "*i64", "present": "*fp64",
            "num_counters": "i32", "coefficients": "*fp32", "control": "*fp64",
            "tiles": "*i32", "segments": "*i64", "sums": "*fp32", "bad": "*i32", "num_tiles": "i32",
            "votes": "*fp64", "num_ranks": "i32",
        }  # fmt: skip
        for votes in (False, True)[: 2 if in_full else 1]:
            constants = {
                "RULE_COEFFICIENTS": kernel.coefficients, "WITH_NORM": True,
                "FROM_TILES": not votes, "FROM_VOTES": votes, "NORM": 2,
                "AT_ONCE": COUNTERS_AT_ONCE, "TILES_AT_ONCE": FINISH_AT_ONCE,
            }  # fmt: skip
            name = f"prologue-{rule.name}{'-votes' if votes else ''}"
            yield name, source(prologue_kernel, pointers, constants), 4
    yield from directions(launch)
    for norm in (0, 1, 2, -1):
        for writes in (False, True) if norm == 2 else (False,):
            pointers = {
                "tiles": "*i32", "segments": "*i64", "sums": "*fp32", "bad": "*i32",
                "p": "*fp64", "destination_scale": "*fp64",
            }  # fmt: skip
            constants = {
                "GRAD_DTYPE": tl.bfloat16, "OUT_DTYPE": tl.bfloat16, "NORM": norm,
                "WRITES": writes, "SUMS": True, "BLOCK": NORM_BLOCK, "ROUNDS": NORM_ROUNDS,
            }  # fmt: skip
            name = f"{'pack' if writes else 'norm'}-{norm}"
            yield name, source(norm_kernel, pointers, constants), NORM_WARPS
        pointers = {
            "tiles": "*i32", "segments": "*i64", "sums": "*fp32", "bad": "*i32", "num_tiles": "i32",
            "out_sum": "*fp64", "out_bad": "*fp64",
        }  # fmt: skip
        constants = {"NORM": norm, "AT_ONCE": FINISH_AT_ONCE}
        yield f"finish-{norm}", source(finish_kernel, pointers, constants), 4
        pointers = {"votes": "*fp64", "num_ranks": "i32", "control": "*fp64"}
        yield f"tally-{norm}", source(tally_kernel, pointers, {"NORM": norm}), 4
    yield from sources_of_rows()
    yield from sources_of_float8()
    yield from sources_of_gram()
    yield from sources_of_lines()


def sources_of_lines():
    names = ("numel", "matrices", "rows", "columns")
    for values in ("bf16", "fp32"):
        arguments = {"values": f"*{values}", "sums": "*fp64", **dict.fromkeys(names, "i32")}
        arguments |= dict.fromkeys(("first", "top", "rest"), "i64")
        tile = {"ROWS": lines.ROWS, "COLUMNS": lines.COLUMNS}
        yield f"lines-{values}", source(lines.line_kernel, arguments, tile), lines.WARPS


def sources_of_gram():
    """A matrix of rows, and one of columns, as `orthogonal` turns tall ones."""
    tile = {"TILE": symmetric.TILE, "AT_ONCE": symmetric.AT_ONCE, "INTERPRETED": False}
    names = ("r", "c", "row_stride", "column_stride")
    for name, of_one in (("gram", "column_stride"), ("gram-of-tall", "row_stride")):
        arguments = {"x": "*i16", "out": "*fp32", **dict.fromkeys(names, "i32")}
        arguments[of_one] = "constexpr"
        multiples = [other for other in names if other != of_one]
        yield name, source(symmetric.gram_kernel, arguments, {of_one: 1, **tile}, multiples), 8


def sources_of_float8():
    """Magnitudes, pack and unpack of bf16 parameters."""
    constants = {"DTYPE": tl.bfloat16, "BLOCK": float8.FLOAT8_BLOCK}
    tables = {"tiles": "*i32", "runs": "*i64"}
    values, sent, most = {"values": "*i16"}, {"sent": "*u8"}, {"most": "*fp32"}
    for kernel, pointers in (
        (float8.largest_kernel, {**values, "most": "*i32", **tables}),
        (float8.pack_kernel, {**values, **most, **sent, **tables}),
        (float8.unpack_kernel, {**sent, **most, **values, **tables}),
    ):
        name = kernel.fn.__name__.removesuffix("_kernel")
        yield f"float8-{name}", source(kernel, pointers, constants), float8.WARPS


def sources_of_rows():
    """The same of `kernels_triton.rows`: a row of 4096, and losses."""
    scalars = {"numel": "i32", "eps": "fp32", "offset": "fp32"}
    vectors = {"x": "*i16", "weight": "*i16", "bias": "*i16"}
    constants = {"DTYPE": tl.bfloat16, "CENTRED": True, "HAS_BIAS": True, "BLOCK": 4096}
    pointers = {**vectors, "out": "*i16", "mean": "*fp32", "scale": "*fp32", **scalars}
    yield "rows-norm", source(rows.norm_rows_kernel, pointers, constants, ("numel",)), 4
    pointers = {
        "x": "*i16", "weight": "*i16", "grad": "*i16", "x_grad": "*i16", "weight_sums": "*fp32",
        "bias_sums": "*fp32", "mean": "*fp32", "scale": "*fp32", "rows": "i32", "numel": "i32",
        "offset": "fp32",
    }  # fmt: skip
    yield (
        "rows-backward",
        source(rows.norm_rows_backward_kernel, pointers, constants, ("numel",)),
        8,
    )
    constants = {"DTYPE": tl.bfloat16, "SMOOTHS": True, "BLOCK": rows.LOSS_BLOCK}
    pointers = {
        "logits": "*i16", "targets": "*i64", "losses": "*fp32", "sums": "*fp32", "numel": "i32",
        "ignored": "i64", "smoothing": "fp32",
    }  # fmt: skip
    yield "rows-loss", source(rows.loss_rows_kernel, pointers, constants, ("numel",)), 8
    del constants["SMOOTHS"]
    pointers = {
        "logits": "*i16", "targets": "*i64", "sums": "*fp32", "factors": "*fp32", "grad": "*i16",
        "numel": "i32", "ignored": "i64", "smoothing": "fp32",
    }  # fmt: skip
    yield (
        "rows-loss-backward",
        source(rows.loss_rows_backward_kernel, pointers, constants, ("numel",)),
        8,
    )


def directions(launch):
    """Kernels of a rule's norms; its directions are a kernel's formula."""
    rule = CASES["lamb"].rule()
    rule.name, rule.formula = f"{rule.name}-direction", rule.direction
    kernel = KERNELS[kernel_of(rule)]
    for param, grad, master, split in (
        (tl.bfloat16, tl.bfloat16, True, False),
        (tl.float32, tl.float32, False, False),
        (tl.bfloat16, tl.bfloat16, False, True),
    ):
        pointers = {
            "tiles": "*i32", "segments": "*i64", "coefficients": "*fp32", "squares": "*fp64",
            "master": "*i16" if split else "*fp32",
            **{f"state{i}": "*fp32" for i in range(3)}, "factor": "fp32", "limit": "fp32",
        }  # fmt: skip
        constants = {
            "DIRECTION": kernel.formula, "NUM_PLANES": 2, "PARAM_DTYPE": param, "GRAD_DTYPE": grad,
            "HAS_MASTER": master, "SPLIT": split, "KEEPER": kernel.form.keeper,
            "BLOCK": launch.block,
        }  # fmt: skip
        name = f"direction-lamb-{param}-{grad}{'-split' * split}"
        yield name, source(direction_kernel, pointers, constants), launch.num_warps
    pointers = {"squares": "*fp64", "ends": "*i64", "out": "*fp64"}
    yield "segment", source(segment_kernel, pointers, {"AT_ONCE": SUM_AT_ONCE}), 4


def source(kernel, arguments, constants, multiples=()):
    """multiples: whole numbers that are multiples of 16, as Triton finds out at a launch."""
    names = list({**arguments, **constants})
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    pointers = [i for i, name in enumerate(arguments) if arguments[name].startswith("*")]
    return ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i in (*pointers, *(names.index(name) for name in multiples))
        },
    )


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK and LOCAL of a cubin, from cuobjdump, which comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=True,
        ).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def main() -> None:
    report = {}
    for target_name in sys.argv[1:]:
        for name, src, num_warps in sources():
            compiled = triton.compile(
                src,
                target=TARGETS[target_name],
                options={"num_warps": num_warps, "enable_fp_fusion": False},
            )
            assembly = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
            found = Counter(m[1] for line in assembly.splitlines() if (m := ACCESS.match(line)))
            plain = [line for line in assembly.splitlines() if not line.lstrip().startswith("@")]
            entry = {
                "accesses": found,
                "unmasked": Counter(m[1] for line in plain if (m := ACCESS.match(line))),
            }
            if "cubin" in compiled.asm:
                entry["resources"] = resources(compiled.asm["cubin"])
            else:  # the assembler says it in the text
                said = re.findall(r"\.([sv]gpr_(?:spill_)?count):\s*(\d+)", assembly)
                entry["resources"] = {key: int(value) for key, value in said}
            report[f"{target_name}/{name}"] = entry
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
