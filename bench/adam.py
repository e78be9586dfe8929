"""`python -m bench.adam`: the optimizer step side by side, in one process, interleaved.

Rows of one numel: milliseconds (median), GB/s of the bytes that the row must move, and that as a
fraction of the copy bandwidth measured in the same run. Our rows say by which update path: on the
CPU the one that `cpu_path="auto"` chooses for a model of `--numel` parameters. `traffic/bf16-mixed`
is the loads and stores of ours/bf16-mixed without its formula. DeepSpeedCPUAdam is measured where
deepspeed is installed (`pip install deepspeed ninja`; it builds C++ at its first use).
`--device sim` has the GPU's rows on the CPU, in the interpreter (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.support.ceilings import memory_ceilings
from bench.support.machine import write_result
from bench.support.timing import interleaved, median_ratio
from gemini.dtypes import DTYPES
from gemini.optim.adam import AdamRule
from gemini.optim.adaptive import LionRule
from gemini.optim.rules.config import UpdateFacts
from gemini.optim.rules.formulas import Updated
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.state.pieces import Piece, Planes
from gemini.optim.update.built_kernels import compiler
from gemini.optim.update.compiled_update import Mix
from gemini.optim.update.cpu_update import CpuWorkers
from gemini.optim.update.updaters import cpu_updater

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
ADAM_OPTIONS = {"adamw_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False}
RULE = AdamRule()
BYTES_PER_ELEMENT = {
    "ours/fp32": 28,
    "ours/bf16-mixed": 28,
    "ours/bf16-mixed-eager": 28,
    "ours/fp16-mixed": 28,
    "ours/fp32-8bit": 16.25,
    "ours/bf16-mixed-8bit": 16.25,
    "ours/bf16-mixed-bf16": 20,
    "ours/bf16-split": 26,
    "ours/bf16-split-8bit": 14.25,
    "ours/bf16-stochastic": 22,
    "ours/bf16-mixed-lion": 20,
    "bitsandbytes/fp32-8bit": 16.06,
    "traffic/bf16-mixed": 28,
    "ours/norm-bf16": 2,
    "ours/norm-bf16-eager": 2,
    "torch/fused-fp32": 28,
    "torch/foreach-fp32": 28,
    "torch/single-fp32": 28,
    "torch/pipeline-bf16-mixed": 28,
    "torch/norm-bf16": 2,
    "deepspeed/cpu-adam-fp32": 28,
}
TICK = 5e-4  # seconds: how often a thread beside an update wants to run
Variants = dict[str, Callable[[], object]]


class TrafficRule(AdamRule):
    """Adam's planes, read and written, with an addition for a formula."""

    name = "traffic"

    @staticmethod
    def formula(param: Tensor, grad: Tensor, c: Any, **planes: Tensor | None) -> Updated:
        return param + grad, {name: old + grad for name, old in planes.items() if old is not None}


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A row of the kernels. master: `whole` in fp32, `split`: the half that bf16 lacks, or none."""

    dtype: torch.dtype
    master: str = ""
    rule: UpdateRule = RULE
    is_stochastic: bool = False


CUDA_ROWS = {
    "ours/fp32": DeviceRow(torch.float32),
    "ours/bf16-mixed": DeviceRow(torch.bfloat16, "whole"),
    "ours/fp16-mixed": DeviceRow(torch.float16, "whole"),
    "ours/bf16-split": DeviceRow(torch.bfloat16, "split"),
    "ours/bf16-stochastic": DeviceRow(torch.bfloat16, is_stochastic=True),
    "ours/bf16-mixed-8bit": DeviceRow(torch.bfloat16, "whole", AdamRule(state="8bit")),
    "ours/bf16-split-8bit": DeviceRow(torch.bfloat16, "split", AdamRule(state="8bit")),
    "ours/bf16-mixed-bf16": DeviceRow(torch.bfloat16, "whole", AdamRule(state="bf16")),
    "ours/bf16-mixed-lion": DeviceRow(torch.bfloat16, "whole", LionRule()),
}


class Tensors:
    """One set of fp32 state that all variants update, and gradients in three dtypes."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.param = torch.randn(numel, device=device)
        self.exp_avg = torch.zeros(numel, device=device)
        self.exp_avg_sq = torch.zeros(numel, device=device)
        self.grad = {torch.float32: torch.randn(numel, device=device) * 1e-3}
        self.copy: dict[torch.dtype, Tensor] = {}
        for dtype in (torch.bfloat16, torch.float16):
            self.grad[dtype] = self.grad[torch.float32].to(dtype)
            self.copy[dtype] = self.param.to(dtype)

    def piece(self, dtype: torch.dtype, rule: AdamRule = RULE) -> Piece:
        hyper = RULE.hyper(HYPER | ADAM_OPTIONS)
        planes: tuple[Tensor, ...] = (self.exp_avg, self.exp_avg_sq)
        if rule.layout.is_quantised:
            numel = self.param.numel()
            stored = rule.layout.stored().planes
            planes = tuple(torch.zeros(p.numel(numel), dtype=DTYPES[p.dtype]) for p in stored)
        if dtype == torch.float32:
            return Piece(self.param, self.grad[dtype], None, planes, hyper, 3, 0)
        return Piece(self.copy[dtype], self.grad[dtype], self.param, planes, hyper, 3, 0)

    def on_device(self, row: DeviceRow) -> tuple[Piece, Planes]:
        """What a kernel updates: fp32 planes are shared by all rows, quantised ones its own."""
        rule, numel, device = row.rule, self.param.numel(), self.param.device
        given = HYPER | rule.options if isinstance(rule, LionRule) else HYPER | ADAM_OPTIONS
        hyper = rule.hyper(given)
        shared = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        planes: dict[str, Tensor] = {
            plane.name: shared[plane.name]
            if plane.dtype == "float32" and not rule.layout.is_quantised
            else torch.zeros(plane.numel(numel), dtype=DTYPES[plane.dtype], device=device)
            for plane in rule.layout.stored().planes
        }
        master = {
            "": None,
            "whole": self.param,
            "split": torch.zeros(numel, dtype=torch.int16, device=device),
        }[row.master]
        param = self.copy.get(row.dtype, self.param)
        piece = Piece(param, self.grad[row.dtype], master, tuple(planes.values()), hyper, 3, 0)
        if master is not None:
            planes = {"master": master, **planes}
        return piece, planes


def stock_optimizer(tensors: Tensors, **kind: Any) -> torch.optim.Optimizer:
    """torch.optim.AdamW over the shared state."""
    param = torch.nn.Parameter(tensors.param)
    param.grad = tensors.grad[torch.float32]
    optimizer = torch.optim.AdamW([param], **HYPER, **kind)
    optimizer.state[param] = {
        # the fused step reads the count where it runs
        "step": torch.tensor(2.0, device=param.device if kind.get("fused") else "cpu"),
        "exp_avg": tensors.exp_avg,
        "exp_avg_sq": tensors.exp_avg_sq,
    }
    return optimizer


def stock_pipeline(tensors: Tensors, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Mixed precision as people write it: upcast and unscale, clip, step, copy back."""
    param = optimizer.param_groups[0]["params"][0]
    grad, copy = tensors.grad[torch.bfloat16], tensors.copy[torch.bfloat16]

    def run() -> None:
        param.grad = grad.float()
        param.grad.mul_(1.0)
        torch.nn.utils.clip_grad_norm_([param], 1.0)
        optimizer.step()
        copy.copy_(param.detach())
        param.grad = tensors.grad[torch.float32]

    return run


def cpu_variants(
    tensors: Tensors, num_threads: int | None = None
) -> tuple[Variants, dict[str, str]]:
    """Ours, and the update path of each. `num_threads`: None is what a run takes."""
    variants: Variants = {}
    paths: dict[str, str] = {}

    def add(
        name: str,
        dtype: torch.dtype,
        cpu_path: str,
        *,
        norm: bool = False,
        rule: AdamRule = RULE,
    ) -> None:
        piece = tensors.piece(dtype, rule)
        facts = UpdateFacts(piece.param.numel(), has_master=piece.master is not None)
        mix = Mix(piece.param.dtype, dtype, facts.has_master)
        updater = replace(
            cpu_updater(rule, cpu_path, facts, lambda: [mix]), workers=CpuWorkers(num_threads)
        )
        paths[name] = updater.name
        if norm:
            variants[name] = lambda: updater.grad_sum([piece.grad])
        else:
            variants[name] = lambda: updater.update([piece])

    add("ours/fp32", torch.float32, "auto")
    add("ours/bf16-mixed", torch.bfloat16, "auto")
    add("ours/bf16-mixed-eager", torch.bfloat16, "eager")
    add("ours/fp16-mixed", torch.float16, "auto")
    if compiler() is not None:
        add("ours/fp32-8bit", torch.float32, "compile", rule=AdamRule(state="8bit"))
        add("ours/bf16-mixed-8bit", torch.bfloat16, "compile", rule=AdamRule(state="8bit"))
        add("ours/bf16-mixed-bf16", torch.bfloat16, "compile", rule=AdamRule(state="bf16"))
        add("traffic/bf16-mixed", torch.bfloat16, "compile", rule=TrafficRule())
    add("ours/norm-bf16", torch.bfloat16, "auto", norm=True)
    add("ours/norm-bf16-eager", torch.bfloat16, "eager", norm=True)
    return variants, paths


def cuda_variants(
    tensors: Tensors,
    device: torch.device,
    launch: tuple[int, int] | None = None,
    chosen: Sequence[str] | None = None,
) -> Variants:
    """`launch`: elements of a tile and warps; None is what `choose_launch` answers. `chosen`: names
    of rows; None is all."""
    from gemini.kernels_triton.launch import Launch
    from gemini.optim.update.triton_update import TritonUpdater

    variants: Variants = {}
    for name in CUDA_ROWS if chosen is None else chosen:
        row = CUDA_ROWS[name]
        piece, planes = tensors.on_device(row)
        updater = TritonUpdater(row.rule, [0], device, stochastic=row.is_stochastic)
        updater.launch = None if launch is None else Launch(*launch)
        updater.begin([piece.hyper], with_norm=False)
        variants[name] = lambda u=updater, p=piece, s=planes: u.update([p], s)  # type: ignore[misc]
        if name == "ours/bf16-mixed":
            variants["ours/norm-bf16"] = lambda u=updater, p=piece: u.measure([p])  # type: ignore[misc]
    return variants


def stock_variants(tensors: Tensors, device: torch.device) -> Variants:
    fused = stock_optimizer(tensors, fused=True)
    variants: Variants = {"torch/fused-fp32": fused.step}
    variants["torch/foreach-fp32"] = stock_optimizer(tensors, foreach=True).step
    variants["torch/single-fp32"] = stock_optimizer(tensors, foreach=False).step
    variants["torch/pipeline-bf16-mixed"] = stock_pipeline(tensors, fused)
    grad = tensors.grad[torch.bfloat16]
    variants["torch/norm-bf16"] = lambda: torch.linalg.vector_norm(grad, dtype=torch.float32)
    if device.type == "cpu":
        with suppress(ImportError):
            from bitsandbytes.optim.adamw import AdamW8bit

            own = torch.nn.Parameter(tensors.param)
            own.grad = tensors.grad[torch.float32]
            variants["bitsandbytes/fp32-8bit"] = AdamW8bit([own], **HYPER).step
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            param = torch.nn.Parameter(tensors.param)
            param.grad = tensors.grad[torch.float32]
            variants["deepspeed/cpu-adam-fp32"] = DeepSpeedCPUAdam([param], **HYPER).step
        except ImportError:
            print("deepspeed/cpu-adam-fp32: not installed")
        except Exception as error:
            print(f"deepspeed/cpu-adam-fp32: {type(error).__name__}: {error}")
    return variants


def _spin(stop: Any) -> None:
    while not stop.is_set():
        for _ in range(100_000):
            pass


def beside_a_busy_process(variants: Variants, rounds: int, device: torch.device) -> float:
    """ours/bf16-mixed over torch/fused-fp32 while another process keeps one core busy."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    busy = context.Process(target=_spin, args=(stop,), daemon=True)
    busy.start()
    try:
        pair = {name: variants[name] for name in ("torch/fused-fp32", "ours/bf16-mixed")}
        seconds = interleaved(pair, rounds, device)
    finally:
        stop.set()
        busy.join()
    return median_ratio(seconds, "ours/bf16-mixed", "torch/fused-fp32")


def _waited_for_a_core() -> float:
    """Seconds in which this thread could have run, and another had the core."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9


def lateness(update: Callable[[], object], rounds: int) -> float:
    """Milliseconds by which a Python thread beside an update is late: its latest tick, of the
    median round, without what it waited for a core."""
    latest = []
    for _ in range(rounds):
        stop = threading.Event()
        late: list[float] = []

        def tick(stop: threading.Event = stop, late: list[float] = late) -> None:
            while not stop.is_set():
                due, waited = time.perf_counter() + TICK, _waited_for_a_core()
                time.sleep(TICK)
                late.append(time.perf_counter() - due - (_waited_for_a_core() - waited))

        thread = threading.Thread(target=tick)
        thread.start()
        update()
        stop.set()
        thread.join()
        latest.append(max(late, default=0.0))
    return statistics.median(latest) * 1e3


def shape(text: str) -> tuple[int, int]:
    """`1024/4`: elements of a tile, and warps."""
    block, warps = text.split("/")
    return int(block), int(warps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cpu or sim"
    )
    parser.add_argument("--numel", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, help="of the CPU, for all rows; else all cores")
    parser.add_argument(
        "--launch", type=shape, metavar="BLOCK/WARPS", help="of our kernels: 1024/4, 2048/8"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    simulated = args.device == "sim"
    device = torch.device("cpu" if simulated else args.device)
    on_cpu = device.type == "cpu" and not simulated
    if args.threads is not None:
        torch.set_num_threads(args.threads)

    ceilings = memory_ceilings(device)
    tensors = Tensors(args.numel, device)
    if on_cpu:
        ours, paths = cpu_variants(tensors, args.threads)
    else:
        ours = cuda_variants(tensors, device, args.launch)
        paths = dict.fromkeys(ours, "triton")
    variants = {**stock_variants(tensors, device), **ours}

    def rows_of(seconds: Mapping[str, list[float]]) -> list[dict[str, Any]]:
        rows = []
        for name, times in seconds.items():
            median = statistics.median(times)
            speed = BYTES_PER_ELEMENT[name] * args.numel / median / 1e9
            rows.append(
                {
                    "name": name,
                    "numel": args.numel,
                    "ms": median * 1e3,
                    "gb_per_s": speed,
                    "fraction_of_ceiling": speed / ceilings["copy_gb_per_s"],
                    **({"path": paths[name]} if name in paths else {}),
                }
            )
        return rows

    def keep(seconds: Mapping[str, list[float]]) -> None:
        """A run that is stopped leaves the rounds that it had."""
        if args.json is not None:
            rounds = len(seconds[next(iter(seconds))])
            write_result(args.json, {"rows": rows_of(seconds), "rounds": rounds})

    seconds = interleaved(variants, args.rounds, device, keep)
    rows = rows_of(seconds)
    for row in rows:
        print(
            f"{row['name']:28s} {row['ms']:9.2f} ms {row['gb_per_s']:8.1f} GB/s "
            f"{row['fraction_of_ceiling']:6.2f} of copy  {row.get('path', '')}"
        )
    base = "torch/fused-fp32"
    ratios = {f"{n} / {base}": median_ratio(seconds, n, base) for n in ours if "norm" not in n}
    ratios["torch/norm-bf16 / ours/norm-bf16"] = median_ratio(
        seconds, "torch/norm-bf16", "ours/norm-bf16"
    )
    if "traffic/bf16-mixed" in seconds:
        pair = ("ours/bf16-mixed", "traffic/bf16-mixed")
        ratios[" / ".join(pair)] = median_ratio(seconds, *pair)
    if "ours/fp32-8bit" in seconds and "bitsandbytes/fp32-8bit" in seconds:
        pair = ("ours/fp32-8bit", "bitsandbytes/fp32-8bit")
        ratios[" / ".join(pair)] = median_ratio(seconds, *pair)
    if "deepspeed/cpu-adam-fp32" in seconds:
        pair = ("deepspeed/cpu-adam-fp32", "ours/bf16-mixed")
        ratios[" / ".join(pair)] = median_ratio(seconds, *pair)
    if on_cpu:
        ratios[f"ours/bf16-mixed / {base}, beside a busy process"] = beside_a_busy_process(
            variants, args.rounds, device
        )
        late = lateness(variants["ours/bf16-mixed"], args.rounds)
        ratios["ms late: a Python thread beside ours/bf16-mixed"] = late
    for name, value in ratios.items():
        print(f"{name:70s} {value:6.2f}")
    if args.json is not None:
        write_result(args.json, {"rows": rows, "ratios": ratios, "ceilings": ceilings})


if __name__ == "__main__":
    main()
