"""`python -m gemini train` beside the same script on trl and `GeminiTrainerMixin`.

    python -m bench.tune --rounds 5 --steps 40 --json PATH

A folder of `examples/small_model.py` is trained, in turn, by both, each time in a process of its
own.
`train` plans, logs memory and where seconds go, and draws a report with each checkpoint; the script
is a trainer with the same arguments, data and homes, and does none of that. train_seconds: of
`trainer.train()`; whole_seconds: of the process, with imports, planning and loading.
Bar: the median of the rounds' ratios of train_seconds is at most 1.02. Exit status 1: it is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.support.machine import write_result

ROOT = Path(__file__).resolve().parent.parent
BAR = 1.02
SIDES = ("train", "script")


def flags(folder: Path, out: Path, steps: int) -> list[str]:
    """Of `python -m gemini train`; half of the steps behind a checkpoint."""
    given = {
        "--model": folder, "--data": folder / "text.jsonl", "--out": out, "--seq": 128,
        "--batch": 4, "--steps": steps, "--save-every": max(1, steps // 2), "--samples": 0,
        "--held-out": 0, "--device-mem": "4GiB", "--update": "serial", "--max-norm": 1.0,
    }  # fmt: skip
    return [str(word) for pair in given.items() for word in pair]


def by_train(arguments: list[str]) -> float:
    """Seconds of the trainer of `python -m gemini train`."""
    from gemini.train.config import parse
    from gemini.train.run import prepare

    return _seconds(prepare(parse(arguments)[0]).trainer)


def by_script(arguments: list[str]) -> float:
    """What a user of trl writes."""
    from transformers import AutoTokenizer
    from trl.trainer.sft_trainer import SFTTrainer

    from gemini import AutoPlacement, load_pretrained
    from gemini.integrations.transformers import GeminiTrainerMixin
    from gemini.train.config import parse
    from gemini.train.data import load
    from gemini.train.trainer import arguments as as_trls

    class Tuned(GeminiTrainerMixin, SFTTrainer):  # type: ignore[misc]
        pass

    config = parse(arguments)[0]
    args = as_trls(config, 1, on_cpu=True)
    tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=False)
    rows = load(config, tokenizer)
    model = load_pretrained(
        config.model, precision="bf16", force_outputs_fp32=True, update=config.update,
        placement_policy=AutoPlacement(config.device_mem),
    )  # fmt: skip
    return _seconds(Tuned(model, args, train_dataset=rows.train, processing_class=tokenizer))


def _seconds(trainer: Any) -> float:
    started = time.perf_counter()
    trainer.train()
    return time.perf_counter() - started


def run(side: str, folder: Path, steps: int) -> dict[str, float]:
    """In a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "bench.tune", "--side", side, *flags(folder, Path(out), steps)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=True,
        )  # fmt: skip
        whole = time.perf_counter() - started
    return {"train_seconds": float(done.stdout.splitlines()[-1]), "whole_seconds": whole}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.side is not None:  # whose flags are the rest, and --steps
        arguments = [*rest, "--steps", str(args.steps)]
        print(f"\n{(by_train if args.side == 'train' else by_script)(arguments)}")
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        small = [str(ROOT / "examples/small_model.py"), made, "--layers", "6", "--width", "256"]
        subprocess.run([sys.executable, *small], check=True, stdout=subprocess.DEVNULL)
        rounds: list[dict[str, Any]] = []
        for number in range(args.rounds):
            order = SIDES if number % 2 else SIDES[::-1]
            rounds.append({side: run(side, folder, args.steps) for side in order})
            print(json.dumps(rounds[-1]), flush=True)
    found = {
        name: statistics.median(one["train"][name] / one["script"][name] for one in rounds)
        for name in ("train_seconds", "whole_seconds")
    }
    print(json.dumps({"ratios": found, "bar": BAR}))
    if args.json is not None:
        write_result(args.json, {"rounds": rounds, "ratios": found, "bar": BAR})
    return int(found["train_seconds"] > BAR)


if __name__ == "__main__":
    sys.exit(main())
