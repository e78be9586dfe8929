"""Features together: python -m bench.numerics [--json PATH]

Every pair of {clipping, accumulation, no_sync, placement, ZeRO stage, world size} in every
precision, 6 steps against one torch process that accumulates the same parts, on updates; and
digests of weights and state after 10 steps with clipping and accumulation on, one a placement. All
digests of a precision are equal: where state lives changes no bit. fp16 has its loss scale on.

Then digests of every tier, by each `update=`, when a run clips, accumulates, skips,
has no gradient of some parameters, or is resumed in its middle (`bench.support.digests`). Exit
status 1: digests differ that should not. It needs Triton's interpreter and a C++ compiler.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import flat, relative_error, train_reference
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from bench.support import digests as every_tier
from bench.support.machine import write_result
from gemini import GeminiDDP, StaticPlacement
from gemini.optim import HybridAdam, LossScale, NvmeConfig

ADAM: dict[str, Any] = {
    "lr": 1e-2,
    "eps": 1e-3,
    "weight_decay": 0.01,
}  # eps: an update that feels a factor
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = {"fp32": 1e-6, "bf16": 5e-3, "fp16": 1e-2}  # of the relative error of updates
MAX_NORM = 0.3  # gradients have norms of about 10
# share of the state on NVMe, and whether shards are in the host memory of a simulated device
PLACEMENTS = {
    "resident": (0.0, False),
    "host": (0.0, True),
    "nvme": (1.0, False),
    "mixed": (0.4, True),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One training run."""

    precision: str
    clip: bool = False
    parts: int = 1  # backwards before a step
    no_sync: bool = False
    placement: str = "resident"
    shard_param_frac: float = 1.0
    world_size: int = 1


FEATURES: dict[str, dict[str, Any]] = {
    "clip": {"clip": True},
    "K=2": {"parts": 2},
    "K=4": {"parts": 4},
    "K=3 no_sync": {"parts": 3, "no_sync": True},
    "host": {"placement": "host"},
    "nvme": {"placement": "nvme"},
    "mixed": {"placement": "mixed"},
    "zero-2": {"shard_param_frac": 0.0},
    "W=2": {"world_size": 2},
    "W=3": {"world_size": 3},
    "W=4": {"world_size": 4},
}


def pairs(precision: str) -> Iterator[tuple[str, Case]]:
    """Every two features that do not set the same option."""
    for (a, first), (b, second) in combinations(FEATURES.items(), 2):
        if not first.keys() & second.keys():
            yield f"{a} + {b}", replace(Case(precision), **first, **second)


def train(case: Case, steps: int, folder: str) -> tuple[Tensor, str]:
    """fp32 weights, flat, and the digest of weights and state, of rank 0."""
    fraction, on_host = PLACEMENTS[case.placement]
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = GeminiDDP(
        Tower(),
        device=SimBackend() if on_host else "cpu",
        placement_policy=StaticPlacement(case.shard_param_frac),
        precision=case.precision,
        loss_scale=LossScale(initial_scale=2.0**12) if case.precision == "fp16" else None,
        min_chunk_size_m=0.004,
    )
    optimizer = HybridAdam(
        model.parameters(),
        **ADAM,
        nvme_offload_fraction=fraction,
        nvme_offload_dir=folder,
        nvme=NvmeConfig(block_numel=2048),
    )
    for parts in token_batches(steps, case.parts * case.world_size):
        mine = parts[rank :: case.world_size]
        if case.no_sync:
            with model.no_sync():
                for part in mine[:-1]:
                    token_loss(model, part).backward()
            mine = mine[-1:]
        for part in mine:
            token_loss(model, part).backward()
        if case.clip:
            model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped_steps == 0
    weights, state = model.state_dict(), optimizer.state_dict()["state"]
    optimizer.close()
    if rank:
        return torch.zeros(0), ""
    digest = hashlib.sha256()
    for name, _ in Tower().named_parameters():
        for tensor in (weights[name], *(state[name][plane] for plane in sorted(state[name]))):
            digest.update(tensor.contiguous().numpy().tobytes())
    return flat([weights[name] for name, _ in Tower().named_parameters()]), digest.hexdigest()


def train_all(rank: int, cases: Sequence[Case], steps: int, folder: str) -> list[Tensor]:
    """Of one rank of a group that all cases share."""
    return [train(case, steps, folder)[0] for case in cases]


def update_errors(cases: Sequence[Case], steps: int = 6) -> list[float]:
    """Relative errors of the updates of all cases, which have one world size."""
    world_size = cases[0].world_size
    assert all(case.world_size == world_size for case in cases)
    with tempfile.TemporaryDirectory() as folder:
        if world_size == 1:
            got = train_all(0, cases, steps, folder)
        else:
            got = run_ranks(train_all, world_size, cases, steps, folder)[0]
    start = flat(list(Tower().parameters()))
    return [
        relative_error(weights - start, reference(*_reference_of(case), steps) - start)
        for case, weights in zip(cases, got, strict=True)
    ]


def _reference_of(case: Case) -> tuple[str, bool, int, int]:
    return case.precision, case.clip, case.parts * case.world_size, case.world_size


@functools.cache
def reference(precision: str, clip: bool, parts: int, divisor: int, steps: int) -> Tensor:
    """fp32 weights of one torch process that sees all `parts` of a step."""
    return train_reference(
        Tower(),
        lambda params: torch.optim.AdamW(params, **ADAM),
        token_batches(steps, parts),
        token_loss,
        DTYPES[precision],
        MAX_NORM if clip else 0.0,
        divisor=divisor,
    )


def digests(precision: str, steps: int = 10) -> dict[str, str]:
    """By placement, with clipping and accumulation on."""
    case = Case(precision, clip=True, parts=3)
    found = {}
    for placement in PLACEMENTS:
        with tempfile.TemporaryDirectory() as folder:
            found[placement] = train(replace(case, placement=placement), steps, folder)[1]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel's module is imported
    found: list[dict[str, Any]] = []
    for precision in DTYPES:
        named = list(pairs(precision))
        errors: dict[str, float] = {}
        for world_size in sorted({case.world_size for _, case in named}):
            group = [(name, case) for name, case in named if case.world_size == world_size]
            said = update_errors([case for _, case in group])
            errors |= {name: error for (name, _), error in zip(group, said, strict=True)}
        for name, case in named:
            entry = {"case": name, "update_error": errors[name], **asdict(case)}
            found.append(entry)
        print(f"\nrelative error of updates, {precision} (bound {BOUNDS[precision]:g})")
        _print_matrix(errors)
    print("\ndigests after 10 steps with clipping and accumulation")
    rows = [
        {"precision": precision, "placement": placement, "sha256": sha256}
        for precision in DTYPES
        for placement, sha256 in digests(precision).items()
    ]
    for precision in DTYPES:
        mine = {row["placement"]: row["sha256"] for row in rows if row["precision"] == precision}
        same = "all equal" if len(set(mine.values())) == 1 else "DIFFERENT"
        short = "  ".join(f"{placement} {sha256[:12]}" for placement, sha256 in mine.items())
        print(f"{precision:5} {short}  {same}")
    cells = [cell for precision in DTYPES for cell in every_tier.cells(precision)]
    for precision in DTYPES:
        print("\n" + every_tier.table([cell for cell in cells if cell.precision == precision]))
    if args.json:
        tiers = [asdict(cell) for cell in cells]
        write_result(args.json, {"pairs": found, "digests": rows, "tiers": tiers})
    found_of = sorted({(row["precision"], row["sha256"]) for row in rows})
    wrong = [name for name, count in Counter(p for p, _ in found_of).items() if count > 1]
    wrong += every_tier.different(cells)
    print(f"\nDIFFERENT: {', '.join(wrong)}" if wrong else "\none digest a precision and schedule")
    return int(bool(wrong))


def _print_matrix(errors: dict[str, float]) -> None:
    names = list(FEATURES)
    print(" " * 12 + "".join(f"{name:>12}" for name in names[1:]))
    for i, row in enumerate(names[:-1]):
        cells = [errors.get(f"{row} + {column}") for column in names[1:]]
        shown = ["" if cell is None else f"{cell:.1e}" for cell in cells]
        shown[:i] = [""] * i
        print(f"{row:12}" + "".join(f"{cell:>12}" for cell in shown))


if __name__ == "__main__":
    sys.exit(main())
