"""Train a GPT on real text with its optimizer state wherever it fits: the main job.

    python examples/train_gpt.py --model gpt2 --steps 20 --nvme-fraction 1.0
    torchrun --nproc_per_node 2 examples/train_gpt.py --model tiny --steps 20

What makes it Gemini are the three lines marked (*); the rest is a plain PyTorch loop. Nothing is
downloaded: the weights are random, the text is Python's own standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from gemini import AutoPlacement, GeminiDDP, init_empty, trace
from gemini.memtracer.monitor import process_peak_rss_bytes
from gemini.optim import HybridAdam, StepReport

# no dropout in the tiny one: then any number of ranks has the same losses
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 256, **NO_DROPOUT},
    "gpt2": {},
    "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
}
VALIDATION_BATCHES = 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--data", type=Path, help="file or folder; default: the standard library")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step, over all ranks")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--placement", default="auto")
    parser.add_argument("--device-budget", help="as in 8GiB; what does not fit goes to disk")
    parser.add_argument(
        "--lean",
        action="store_true",
        help="the model never exists as a whole: values are made chunk by chunk, and the first "
        "iteration is planned from a trace on fake tensors",
    )
    parser.add_argument("--nvme-fraction", type=float, default=0.0, help="of the optimizer state")
    parser.add_argument("--state", default="fp32", help="of moments: fp32, bf16 or 8bit")
    parser.add_argument(
        "--update", choices=["serial", "tail"], default="serial",
        help="tail: state on disk is updated behind the next forward",
    )  # fmt: skip
    parser.add_argument("--max-norm", type=float, default=1.0, help="gradients are clipped to it")
    parser.add_argument("--nvme-dir", help="default: a temporary folder on a disk")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--plot", type=Path, help="draw loss and memory")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--baseline", action="store_true", help="torch AdamW under bf16 autocast")
    kind.add_argument("--plain", action="store_true", help="HybridAdam instead of that AdamW")
    kind.add_argument("--floor", action="store_true", help="gradients are dropped: no optimizer")
    return parser.parse_args()


class Text:
    """Bytes of real text as token ids; the last twentieth is held out."""

    def __init__(self, path: Path | None, batch: int, seq: int) -> None:
        root = path or Path(sysconfig.get_paths()["stdlib"])
        files = [root] if root.is_file() else sorted(root.rglob("*.py" if path is None else "*"))
        files = [f for f in files if f.is_file() and "site-packages" not in f.parts]
        data = torch.frombuffer(
            bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8
        )
        cut = len(data) - len(data) // 20
        self.train, self.validation = data[:cut], data[cut:]
        self.batch, self.seq = batch, seq

    def batches(self, data: Tensor, seed: int) -> Iterator[Tensor]:
        """Random windows, int64 [batch, seq]; the same for the same seed on every rank."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(data) - self.seq, (self.batch,), generator=generator)
            yield torch.stack([data[s : s + self.seq] for s in starts.tolist()]).long()


def peak_rss_mib() -> float:
    """The largest resident memory of this process so far."""
    return process_peak_rss_bytes() / 2**20


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def mean_over_ranks(value: float) -> float:
    if not dist.is_initialized():
        return value
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total.to("cuda") if dist.get_backend() == "nccl" else total)
    return total.item() / dist.get_world_size()


def build(args: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    torch.manual_seed(args.seed)
    with init_empty() if args.lean else nullcontext():
        model: nn.Module = GPT2LMHeadModel(GPT2Config(**MODELS[args.model]))
    nvme = {"nvme_offload_fraction": args.nvme_fraction, "nvme_offload_dir": args.nvme_dir}
    adam = {"lr": args.lr, "weight_decay": 0.01}
    if args.baseline:
        model.to(args.device)
        return model, torch.optim.AdamW(model.parameters(), fused=True, **adam)
    if args.plain:
        model.to(args.device)
        return model, HybridAdam(model.parameters(), state=args.state, **adam, **nvme)
    if args.floor:
        model.to(torch.bfloat16)  # no master weights to keep
    placement = args.placement
    if args.device_budget is not None:
        placement = AutoPlacement(args.device_budget, nvme_dir=args.nvme_dir)
    iteration = None
    if args.lean:
        ids = torch.zeros(args.batch // world_size(), args.seq, dtype=torch.long)
        iteration = trace(model, {"input_ids": ids, "labels": ids}, precision=args.precision)
    model = GeminiDDP(  # (*)
        model, args.device, placement, precision=args.precision, max_norm=args.max_norm,
        trace=iteration, update=args.update,
    )  # fmt: skip
    if args.floor:
        return model, None
    return model, HybridAdam(model.parameters(), state=args.state, **adam, **nvme)  # (*)


def evaluate(model: nn.Module, text: Text, mine: slice, context: Any) -> float:
    """Mean loss over the same held-out batches, whoever asks."""
    model.eval()
    batches = text.batches(text.validation, seed=1)
    with torch.no_grad(), context:
        losses = [
            model(input_ids=ids[mine], labels=ids[mine]).loss.item()
            for ids, _ in zip(batches, range(VALIDATION_BATCHES), strict=False)
        ]
    model.train()
    return mean_over_ranks(sum(losses) / len(losses))


def train(args: argparse.Namespace) -> dict[str, Any]:
    rank = int(os.environ.get("RANK", 0))
    mine = slice(rank * args.batch // world_size(), (rank + 1) * args.batch // world_size())
    text = Text(args.data, args.batch, args.seq)
    model, optimizer = build(args)
    clips_itself = isinstance(model, GeminiDDP)
    schedule = None
    if optimizer is not None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, args.lr, total_steps=args.steps, cycle_momentum=False
        )
    autocast = torch.autocast(torch.device(args.device).type, dtype=torch.bfloat16)
    context = autocast if args.baseline or args.plain else nullcontext()

    losses, seconds, cpu_seconds, peaks, reports = [], [], [], [], []
    batches = text.batches(text.train, args.seed)
    bar = tqdm(range(args.steps), disable=rank != 0)
    for _ in bar:
        started, used = time.perf_counter(), time.process_time()
        ids = next(batches)[mine].to(args.device)
        with context:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if not clips_itself:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        if optimizer is not None and schedule is not None:
            optimizer.step()  # (*) clips, skips on overflow, updates where the state is
            schedule.step()
        model.zero_grad()
        losses.append(mean_over_ranks(loss.item()))
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - used)
        peaks.append(peak_rss_mib())
        reports.append(getattr(optimizer, "last_report", None) or StepReport())
        speed = args.batch * args.seq / seconds[-1]
        bar.set_postfix_str(
            f"loss {losses[-1]:.3f}, {speed:.0f} tokens/s, peak {peaks[-1]:.0f} MiB"
        )
    moved = [report.traffic + report.behind.wait().traffic for report in reports]
    return {
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "train_loss": losses,
        "val_loss": evaluate(model, text, mine, context),
        "step_seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_rss_mib": peaks,
        "nvme_bytes": getattr(optimizer, "nvme_bytes", 0),
        "bytes_moved_per_step": moved[-1].total,
        "bytes_read": [traffic.nvme_read for traffic in moved],
        "bytes_written": [traffic.nvme_write for traffic in moved],
        "final_peak_rss_mib": peak_rss_mib(),
    }


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, sharex=True)
    top.plot(result["train_loss"])
    top.set_ylabel("loss")
    bottom.plot(result["peak_rss_mib"])
    bottom.set_ylabel("peak RSS, MiB")
    bottom.set_xlabel("step")
    figure.savefig(path)


def main() -> None:
    args = arguments()
    cuda = torch.cuda.is_available() if args.device is None else args.device.startswith("cuda")
    args.device = args.device or ("cuda" if cuda else "cpu")
    if "RANK" in os.environ:  # started by torchrun
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cuda else "gloo")
    result = train(args)
    if int(os.environ.get("RANK", 0)) == 0:
        if args.json is not None:
            args.json.write_text(json.dumps(result), encoding="utf-8")
        if args.plot is not None:
            plot(result, args.plot)
        print(f"validation loss {result['val_loss']:.4f}, peak {peak_rss_mib():.0f} MiB")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
