"""Tokens of a model that does not fit, beside accelerate's offload to a disk, on a CPU.

    python -m bench.serving --json PATH            a Llama of 334 M parameters, half of it has room
    python -m bench.serving --room 0.25 --rounds 5

Each figure is of a process of its own, and rounds are interleaved:

plain           transformers, with all weights in memory
gemini          `gemini.load_pretrained(folder, serve=True, device_budget=, nvme_dir=)`
gemini, 8       eight prompts in one pass a token
accelerate      `device_map="auto"` with `max_memory` of as many weights and `offload_folder`

read_mib: of files, a pass; accelerate maps its files, so that the page cache, which no budget
counts, gives them. of_least: read_mib over the weights that have no room. cpu_seconds, seconds: a
pass, median of the rounds. added_rss_mib: peak resident size over that before the model was loaded,
with pages of files that are mapped. tokens: digest, which is equal in all rows of one prompt.

Exit status 1 where tokens of a row differ from plain ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import gemini
from bench.support.machine import write_result
from gemini.memtracer.monitor import process_peak_rss_bytes, reset_peak_rss
from gemini.nvme import default_folder
from gemini.units import MIB

ROWS = {"plain": 1, "plain, 8": 8, "gemini": 1, "gemini, 8": 8, "accelerate": 1}  # prompts
SHAPES: dict[str, dict[str, Any]] = {
    "llama-334m": {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    },
}  # fmt: skip
MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Job:
    """What one process runs."""

    row: str
    folder: str  # with the model, and for files
    room_bytes: int  # for weights
    beside_bytes: int  # that `gemini` plans for the cache and the activations
    new_tokens: int


def save(folder: Path, shape: dict[str, Any]) -> None:
    """Save a Llama with random weights, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    module: Any = LlamaForCausalLM(LlamaConfig(**shape))
    module.to(torch.bfloat16).save_pretrained(folder)


def weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in sorted(folder.glob("*.safetensors")))


def loaded(job: Job) -> tuple[Any, Any]:
    """Model of a row, and what counts its reads."""
    from transformers import AutoModelForCausalLM

    folder = Path(job.folder, "model")
    if job.row.startswith("gemini"):
        model = gemini.load_pretrained(
            folder, serve=True, nvme_dir=job.folder, max_tokens=MAX_TOKENS, max_sequences=8,
            device_budget=job.room_bytes + job.beside_bytes,
        )  # fmt: skip
        return model, model.engine.storage
    options: dict[str, Any] = {}
    if job.row == "accelerate":
        options |= {
            "device_map": "auto", "offload_folder": str(Path(job.folder, "offloaded")),
            "max_memory": {"cpu": job.room_bytes},
        }  # fmt: skip
    found = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, trust_remote_code=False, **options
    )
    return found, None


def beside(job: Job) -> dict[str, int]:
    """Bytes that `gemini` plans for the cache and the activations."""
    model, _ = loaded(job)
    return {"beside": model.engine.planning.inputs.trace.peak_non_model_bytes}


def measured(job: Job) -> dict[str, Any]:
    """Answers of one row, in this process."""
    import accelerate  # noqa: F401  (before memory is looked at, as the next)
    from transformers import LlamaForCausalLM  # noqa: F401

    torch.set_num_threads(1)
    reset_peak_rss(forget=True)
    base = process_peak_rss_bytes()
    model, storage = loaded(job)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 900, (1, 16), generator=generator).expand(ROWS[job.row], -1)

    def answers() -> torch.Tensor:
        found: torch.Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=1,
            max_new_tokens=job.new_tokens, min_new_tokens=job.new_tokens,
        )  # fmt: skip
        return found

    answers()  # libraries are there
    before = 0 if storage is None else storage.traffic().nvme_read
    cpu, wall = time.process_time(), time.perf_counter()
    out = answers()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    read = 0 if storage is None else storage.traffic().nvme_read - before
    return {
        "read_mib": read / job.new_tokens / MIB,
        "cpu_seconds": cpu / job.new_tokens, "seconds": wall / job.new_tokens,
        "added_rss_mib": (process_peak_rss_bytes() - base) / MIB,
        "tokens": hashlib.sha256(out[0].numpy().tobytes()).hexdigest()[:16],
    }  # fmt: skip


def run(job: Job) -> dict[str, Any]:
    """A row in a process of its own. Raises CalledProcessError where it dies."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __spec__.name, "--job", json.dumps(asdict(job))]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summed(name: str, rounds: list[dict[str, Any]], least_mib: float) -> dict[str, Any]:
    """Row of the table: medians, and the range of the seconds. least_mib: weights without room."""
    seconds = [one["seconds"] for one in rounds]
    row = {
        key: statistics.median(one[key] for one in rounds) for key in rounds[0] if key != "tokens"
    }
    return {
        "row": name, **row, "of_least": row["read_mib"] / least_mib,
        "range": [min(seconds), max(seconds)],
        "tokens": sorted({one["tokens"] for one in rounds}),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| row | read a pass, MiB | of no room | CPU s a pass | s a pass | added peak, MiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        low, high = row["range"]
        read = f"{row['read_mib']:.1f} | {row['of_least']:.3f}" if row["read_mib"] else "0 | "
        lines.append(
            f"| {row['row']} | {read} | {row['cpu_seconds']:.3f} | {row['seconds']:.3f} "
            f"[{low:.3f}, {high:.3f}] | {row['added_rss_mib']:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", choices=list(SHAPES), default="llama-334m")
    parser.add_argument("--room", type=float, default=0.5, help="share of the weights")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nvme-dir", default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--job", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is not None:
        job = Job(**json.loads(args.job))
        print(json.dumps(measured(job) if job.new_tokens else beside(job)))
        return 0
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    with tempfile.TemporaryDirectory(dir=args.nvme_dir or default_folder()) as folder:
        save(Path(folder, "model"), SHAPES[args.model])
        weights = weights_bytes(Path(folder, "model"))
        more = run(Job("gemini", folder, 2 * weights, 0, 0))["beside"]
        for _ in range(args.rounds):
            for name, rounds in found.items():
                rounds.append(
                    run(Job(name, folder, round(args.room * weights), more, args.new_tokens))
                )
                print({"row": name, **rounds[-1]}, file=sys.stderr, flush=True)
    rows = [summed(name, rounds, (1 - args.room) * weights / MIB)
            for name, rounds in found.items()]  # fmt: skip
    print(table(rows))
    if args.json is not None:
        figures = {
            "model": args.model, "room": args.room, "new_tokens": args.new_tokens,
            "rounds": args.rounds, "weights_mib": weights / MIB, "beside_mib": more / MIB,
            "rows": rows,
        }  # fmt: skip
        write_result(args.json, figures)
    plain = rows[0]["tokens"]
    return 0 if all(row["tokens"] == plain for row in rows if ROWS[row["row"]] == 1) else 1


if __name__ == "__main__":
    sys.exit(main())
