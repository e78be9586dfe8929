"""Activations of one long sequence, on a CPU: what they take where they spill, beside others.

    python -m bench.activations --json PATH               GPT-2 small at 1 x 2048, with dropout
    python -m bench.activations --seq 4096 --no-dropout
    python -m bench.activations --rows "spill;recompute" --seq 512

Each row is a process of its own, with the disk as the only tier below memory:

plain               torch alone
checkpointing       transformers' own, without reentrance
save_on_cpu         torch.autograd.graph.save_on_cpu: on a CPU it copies, and frees nothing
keep                GeminiDDP without a budget
spill               AutoPlacement(device_budget=, nvme_dir=, activations="spill")
spill, chunked      with the loss 512 tokens at a time (`gemini.integrations.chunk_loss`)
spill, checkpointing
recompute           activations="auto" without a disk: what does not fit is computed again
auto                with it: what takes less time
auto, chunked

plain comes first, and before a row the one whose gradients it should have. What recomputes is
measured in the third iteration: the first is traced, and the second proves layers.

added_peak_mib: VmHWM of forward and backward over the resident size before them, with all
gradients. whole_peak_mib: over that before the model is built. of_plain: added_peak_mib over
plain's. digest: of all gradients; equal where nothing else than the place of activations differs.
cpu_seconds: of the process, in forward and backward. Dropout draws the same numbers in all rows.
saved_mib, may_stay_mib: saved for backward, and how much of it the budget has room for; what is
written is the difference, to the largest tensor (largest_mib).

The budget of all rows that have one is model data and `--room` MiB.

Exit status 1 where gradients of a row differ from those that it should equal, or where it wrote
another number of bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.predict import EXACT_MALLOC
from bench.support.machine import MALLOC_ENVIRONMENT, write_result
from gemini import AutoPlacement, GeminiDDP
from gemini.activations.saved_tensors import SavedTensors
from gemini.integrations import chunk_loss
from gemini.memtracer.monitor import peak_rss_bytes, process_peak_rss_bytes, reset_peak_rss
from gemini.nvme import default_folder
from gemini.optim import HybridAdam
from gemini.units import MIB

ROWS = {  # and the row whose gradients each has
    "plain": "plain",
    "checkpointing": "plain",
    "save_on_cpu": "plain",
    "keep": "plain",
    "spill": "plain",
    "spill, checkpointing": "plain",
    "recompute": "plain",
    "auto": "plain",
    "keep, chunked": "keep, chunked",
    "spill, chunked": "keep, chunked",
    "auto, chunked": "keep, chunked",
}
BUDGETED = {"spill": "spill", "recompute": "auto", "auto": "auto"}  # by the first word of a row
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 997},
}
CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Job:
    """What one process runs.

    room_mib: of the budget, beside parameters and gradients; below 0 these have no room either.
    trains: whether it has an optimizer, with which homes follow what iterations ask for.
    """

    row: str
    model: str
    seq: int
    dropout: bool
    room_mib: int
    folder: str
    trains: bool = False

    @property
    def kind(self) -> str:
        """Row without what is changed in the model: `"spill"` of `"spill, chunked"`."""
        return self.row.partition(",")[0]


def built(job: Job) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"n_positions": max(1024, job.seq), "use_cache": False}
    if not job.dropout:
        shape |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPES[job.model], **shape))
    model.train()
    if "checkpointing" in job.row:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "chunked" in job.row:
        chunk_loss(model, CHUNK_TOKENS)
    return model


def wrapped(job: Job, model: nn.Module) -> GeminiDDP:
    policy: Any = "auto"
    if job.kind in BUDGETED:
        params = sum(param.numel() * param.element_size() for param in model.parameters())
        policy = AutoPlacement(
            device_budget=2 * params + job.room_mib * MIB,
            nvme_dir=None if job.kind == "recompute" else job.folder,
            activations=BUDGETED[job.kind],
        )
    return GeminiDDP(model, "cpu", policy, precision="fp32")


def measured(job: Job) -> dict[str, Any]:
    """One forward and backward of a row, in this process."""
    torch.set_num_threads(1)
    tiny, few = built(replace(job, model="tiny")), torch.zeros(1, 8, dtype=torch.int64)
    tiny(input_ids=few, labels=few).loss.backward()  # libraries are there
    del tiny
    empty = peak_rss_bytes()
    model = built(job)
    ids = torch.randint(900, (1, job.seq), generator=torch.Generator().manual_seed(1))
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if job.kind == "keep" or job.kind in BUDGETED:
        model = wrapped(job, model)
    if job.row == "save_on_cpu":
        around = torch.autograd.graph.save_on_cpu
    optimizer = HybridAdam(model.parameters(), lr=0.0) if job.trains else None
    before = [ids[:, :8]]  # what a wrapped model has from its first call on
    if job.trains or BUDGETED.get(job.kind) == "auto":
        before += [ids, ids]
    for given in before:
        model(input_ids=given, labels=given).loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    torch.manual_seed(3)
    reset_peak_rss(forget=True)
    base, cpu, wall = peak_rss_bytes(), time.process_time(), time.perf_counter()
    with around():
        loss = model(input_ids=ids, labels=ids).loss
    engine = model.engine if isinstance(model, GeminiDDP) else None
    saved = None if engine is None else engine.saved_tensors
    sizes = {} if saved is None else sizes_of(saved)
    loss.backward()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    found = {
        "added_peak_mib": (process_peak_rss_bytes() - base) / MIB,
        "whole_peak_mib": (process_peak_rss_bytes() - empty) / MIB,
        "cpu_seconds": cpu, "wall_seconds": wall, "loss": float(loss.detach()),
        "digest": digest(gradients_of(model)), **sizes,
    }  # fmt: skip
    if engine is not None and saved is not None:
        found |= {f"{name}_mib": n / MIB for name, n in asdict(saved.traffic).items()}
        layers = engine.sampler.layers
        found["layers_recomputed"] = 0 if layers is None else len(layers.names)
    return found


def sizes_of(saved: SavedTensors) -> dict[str, float]:
    """Sizes between forward and backward, in MiB."""
    live = saved.live_bytes
    return {
        "saved_mib": live / MIB, "may_stay_mib": min(live, saved.may_stay_bytes) / MIB,
        "largest_mib": saved.largest_bytes / MIB,
    }  # fmt: skip


def writes_as_told(row: dict[str, Any]) -> bool:
    """Whether a row wrote what its budget had no room for, to the largest tensor."""
    if "saved_mib" not in row or row["row"] == "recompute":  # it has no disk
        return True
    told = row["saved_mib"] - row["may_stay_mib"]
    return bool(abs(row["nvme_out_mib"] - told) <= row["largest_mib"])


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, GeminiDDP):
        return dict(model.named_gradients())
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def digest(gradients: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(gradients):
        found.update(gradients[name].detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def run(job: Job) -> dict[str, Any]:
    """A row in a process of its own. Raises CalledProcessError where it dies."""
    environment = {**os.environ, **MALLOC_ENVIRONMENT, **EXACT_MALLOC, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __spec__.name, "--job", json.dumps(asdict(job))]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| activations | added peak, MiB | of plain | CPU seconds | written, MiB | gradients |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        same = "equal" if row["equal"] else "**differ**"
        lines.append(
            f"| {row['row']} | {row['added_peak_mib']:.0f} | {row['of_plain']:.2f} | "
            f"{row['cpu_seconds']:.1f} | {row.get('nvme_out_mib', 0):.0f} | {same} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", choices=list(SHAPES), default="gpt2")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--rows", default=";".join(ROWS), help="of them, by semicolons")
    parser.add_argument("--room", type=int, default=1500, help="MiB beside model data")
    parser.add_argument("--nvme-dir", default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--job", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is not None:
        print(json.dumps(measured(Job(**json.loads(args.job)))))
        return 0
    asked = [name.strip() for name in args.rows.split(";")]
    unknown = sorted(set(asked) - set(ROWS))
    if unknown:
        parser.error(f"--rows has {unknown}; expected of {list(ROWS)}")
    with tempfile.TemporaryDirectory(dir=args.nvme_dir or default_folder()) as folder:
        rows = []
        for name in dict.fromkeys(("plain", *(ROWS[name] for name in asked), *asked)):
            job = Job(name, args.model, args.seq, not args.no_dropout, args.room, folder)
            rows.append({"row": name, **run(job)})
            print(rows[-1], file=sys.stderr, flush=True)
    found = {row["row"]: row for row in rows}
    for row in rows:
        row["of_plain"] = row["added_peak_mib"] / found["plain"]["added_peak_mib"]
        row["equal"] = found[ROWS[row["row"]]]["digest"] == row["digest"]
    print(table(rows))
    if args.json is not None:
        figures = {
            "model": args.model, "seq": args.seq, "dropout": not args.no_dropout,
            "room_mib": args.room, "rows": rows,
        }  # fmt: skip
        write_result(args.json, figures)
    return 0 if all(row["equal"] and writes_as_told(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
