"""GPT-2 with its optimizer state on NVMe, by us or by DeepSpeed ZeRO-3, in a process of its own.

    python -m bench.peers.gpt2_nvme                     # both in turn, and the ratios
    python -m bench.peers.gpt2_nvme --who deepspeed     # one of them, here

Same random weights, same batches of random tokens, bf16. `optimizer_seconds` is the time of
`step()`; `peak_rss_mib` is VmHWM. DeepSpeed has its pipelining knobs on, and sub-groups small
enough that there is something to pipeline (its defaults do neither).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.machine import MALLOC_ENVIRONMENT, write_result
from nvme import check_folder, default_folder

ROOT = Path(__file__).resolve().parent.parent.parent
BATCH, SEQ = 4, 128
WHO = ("ours", "deepspeed")
WARMUP_STEPS = 2
Backward = Callable[[Tensor], None]


def make_model(name: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape: dict[str, Any] = {} if name == "gpt2" else {"n_layer": 2, "n_embd": 128, "n_head": 4}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**shape))
    return model


def ours(model: nn.Module, folder: Path) -> tuple[nn.Module, Backward, Callable[[], None]]:
    """The wrapped model, its backward, and what the optimizer does after it."""
    from gemini import GeminiDDP
    from optim import HybridAdam

    wrapped = GeminiDDP(model, max_norm=1.0)
    optimizer = HybridAdam(
        wrapped.parameters(), lr=3e-4, nvme_offload_fraction=1.0, nvme_offload_dir=folder
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return wrapped, lambda loss: loss.backward(), step


def deepspeed_config(folder: Path) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 16_000_000,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(folder),
                "buffer_count": 5,
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
        "aio": {
            "block_size": 4 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 4,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def deepspeed(model: nn.Module, folder: Path) -> tuple[nn.Module, Backward, Callable[[], None]]:
    import deepspeed as package

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29655")
    torch.distributed.init_process_group("gloo")
    engine, *_ = package.initialize(
        model=model, model_parameters=model.parameters(), config=deepspeed_config(folder)
    )
    return engine, engine.backward, engine.step


def train(who: str, name: str, steps: int, folder: Path) -> dict[str, Any]:
    """Losses, seconds of every `step()`, and the peak of this process."""
    make = ours if who == "ours" else deepspeed
    model, backward, step = make(make_model(name), folder)
    generator = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(steps):
        ids = torch.randint(50257, (BATCH, SEQ), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss.detach()))
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.split("VmHWM:")[1].split()[0])
    return {
        "who": who,
        "losses": losses,
        "optimizer_seconds": seconds,
        "peak_rss_mib": peak_kib / 1024,
    }


def run(who: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`train` in a fresh process; where it cannot run, the reason."""
    out = folder / f"{who}.json"
    command = [
        sys.executable, "-m", "bench.peers.gpt2_nvme", "--who", who, "--json", str(out),
        "--steps", str(args.steps), "--dir", str(folder), "--model", args.model,
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "io"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, **MALLOC_ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        return {"who": who, "reason": (done.stderr.strip().splitlines() or ["?"])[-1]}
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both in turn, `--rounds` times; medians, and ratios paired by round."""
    rounds = [{who: run(who, args, folder) for who in WHO} for _ in range(args.rounds)]
    refused = {who: one[who]["reason"] for one in rounds for who in WHO if "reason" in one[who]}
    if refused:
        return {"refused": refused}

    def phase(result: dict[str, Any]) -> float:
        return float(statistics.median(result["optimizer_seconds"][WARMUP_STEPS:]))

    return {
        **{
            who: {
                "optimizer_seconds": statistics.median(phase(one[who]) for one in rounds),
                "peak_rss_mib": statistics.median(one[who]["peak_rss_mib"] for one in rounds),
                "losses": rounds[0][who]["losses"],
            }
            for who in WHO
        },
        "deepspeed / ours, optimizer phase": statistics.median(
            phase(one["deepspeed"]) / phase(one["ours"]) for one in rounds
        ),
        "ours / deepspeed, peak RSS": statistics.median(
            one["ours"]["peak_rss_mib"] / one["deepspeed"]["peak_rss_mib"] for one in rounds
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--who", choices=WHO, help="default: both in turn")
    parser.add_argument("--model", choices=["gpt2", "tiny"], default="gpt2")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="default: a temporary folder on a disk")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=check_folder(args.dir or default_folder())) as name:
        if args.who is not None:
            result = train(args.who, args.model, args.steps, Path(name))
        else:
            result = compare(args, Path(name))
    print(json.dumps(result, indent=1))
    if args.json is not None:
        write_result(args.json, result)


if __name__ == "__main__":
    main()
