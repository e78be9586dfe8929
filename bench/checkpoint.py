"""Saving and loading: python -m bench.checkpoint [--json PATH] [--folder DIR]

GB (10**9) a second of one rank's weights and state: fp32 master, exp_avg, exp_avg_sq, 12 bytes a
parameter. In turn, round after round, on one file system:

ours                 save_checkpoint and load_checkpoint, state in host memory
ours/nvme            the same with all state on NVMe, on the same disk
torch/save-gather    whole state dicts, torch.save, fsync; torch.load and load_state_dict
fsdp2/dcp            fully_shard and torch.distributed.checkpoint's own writer and reader
fio/write            direct writes, and reads, of 4 MiB pieces: what the disk can do

async_stall_fraction: seconds for which an asynchronous save held training up (the call, and steps
that waited for a block to be saved), state on NVMe, over the seconds of a synchronous save.
pinned_stall_seconds: of a save that pins state on NVMe (ADR 0016); pinned_stall_of_step: over a
step of that model, whose passes take nothing.
nvme_over_mixed: a save and a load of state on NVMe read and write every byte: their speed over half
of what the disk moves when reads and writes are mixed.
extra_ram_blocks: peak resident memory of a synchronous save above that before it, in blocks of
2**20 elements of 12 bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gemini
from bench.support import fio
from bench.support.disk import mixed_gb_per_s
from bench.support.machine import MALLOC_ENVIRONMENT, write_result
from gemini import GeminiDDP
from gemini.nvme import PIECE_BYTES, default_folder
from gemini.optim import HybridAdam, NvmeConfig
from gemini.units import BLOCK_NUMEL

STATE_ITEMSIZE = 12
WIDTH = 2048
ROUNDS = 3


def network(layers: int) -> nn.Module:
    """4 Mi parameters a layer, and odd biases."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, WIDTH)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def wrapped(
    layers: int, fraction: float, folder: Path, keep_versions: int = 0
) -> tuple[GeminiDDP, HybridAdam]:
    model = GeminiDDP(network(layers), placement_policy="static")
    optimizer = HybridAdam(
        model.parameters(), nvme_offload_fraction=fraction, nvme_offload_dir=folder,
        nvme=NvmeConfig(keep_versions=keep_versions),
    )  # fmt: skip
    step(model, optimizer)
    return model, optimizer


class Ours:
    """save_checkpoint of a wrapped module."""

    def __init__(self, layers: int, fraction: float, folder: Path, keep_versions: int = 0) -> None:
        self.folder = folder / f"ours-{fraction}-{keep_versions}"
        self.model, self.optimizer = wrapped(layers, fraction, folder, keep_versions)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def save(self) -> None:
        gemini.save_checkpoint(self.folder / "c", self.model, self.optimizer)

    def load(self) -> None:
        gemini.load_checkpoint(self.folder / "c", self.model, self.optimizer)


class TorchSave:
    """Whole state dicts through torch.save."""

    def __init__(self, layers: int, folder: Path) -> None:
        self.path = folder / "whole.pt"
        self.model, self.optimizer = wrapped(layers, 0.0, folder)

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def save(self) -> None:
        optimizer = self.optimizer.state_dict()
        with self.path.open("wb") as file:
            for state in optimizer["state"].values():
                state.pop("master", None)  # the model's state dict has it
            torch.save({"model": self.model.state_dict(), "optimizer": optimizer}, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> None:
        drop_cache(self.path)
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Fsdp:
    """FSDP2 and DCP's own files."""

    def __init__(self, layers: int, folder: Path) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.folder = folder / "fsdp"
        self.module = network(layers)
        fully_shard(self.module, mesh=init_device_mesh("cpu", (1,)))
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        step(self.module, self.optimizer)

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optim": optimizer}

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def save(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(), checkpoint_id=self.folder)

    def load(self) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        for path in sorted(self.folder.iterdir()):
            drop_cache(path)
        state = self._state()
        load(state, checkpoint_id=self.folder)
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


class Fio:
    """The disk."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        self.nbytes, self.path = nbytes, folder / "fio"

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def save(self) -> float:
        return self._run("write", "--end_fsync=1")

    def load(self) -> float:
        return self._run("read")

    def _run(self, kind: str, *options: str) -> float:
        """Seconds."""
        done = subprocess.run(
            [
                "fio", "--name=x", f"--filename={self.path}", f"--rw={kind}", "--direct=1",
                f"--bs={PIECE_BYTES}", f"--size={self.nbytes}", "--ioengine=libaio",
                "--iodepth=4", "--output-format=json", *options,
            ],
            check=True, capture_output=True, text=True,
            encoding="utf-8", env={**os.environ, **fio.HUGE_PAGES},
        )  # fmt: skip
        return float(json.loads(done.stdout)["jobs"][0][kind]["runtime"]) / 1e3


FIO = "fio/write"
Saver = Ours | TorchSave | Fsdp | Fio


def drop_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def seconds_of(work: Callable[[], float | None]) -> float:
    started = time.perf_counter()
    said = work()
    return time.perf_counter() - started if said is None else said


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    found = re.search(
        rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8")
    )
    assert found is not None
    return int(found[1]) << 10


def extra_ram(work: Callable[[], None]) -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def async_stall(nvme: Ours) -> tuple[float, float]:
    """(seconds that training was held up, seconds until the checkpoint was complete)."""
    target = nvme.model.engine.target
    assert target is not None
    shutil.rmtree(nvme.folder, ignore_errors=True)
    held = target.pinned_seconds
    started = time.perf_counter()
    ticket = gemini.save_checkpoint(nvme.folder / "a", nvme.model, nvme.optimizer, async_save=True)
    call = time.perf_counter() - started
    for _ in range(3):
        step(nvme.model, nvme.optimizer)
    ticket.wait()
    done = time.perf_counter() - started
    return call + target.pinned_seconds - held, done


def pinned_stall(kept: Ours) -> tuple[float, float]:
    """(seconds of a pinned save, those over a step's)."""
    kept.clear()
    call = seconds_of(
        lambda: gemini.save_checkpoint(
            kept.folder / "p", kept.model, kept.optimizer, pinned=True
        ).wait()
    )
    return call, call / seconds_of(lambda: step(kept.model, kept.optimizer))


def measure(layers: int, folder: Path) -> dict[str, Any]:
    resident, nvme = Ours(layers, 0.0, folder), Ours(layers, 1.0, folder)
    kept = Ours(layers, 1.0, folder, keep_versions=1)
    numel = sum(p.numel() for p in resident.model.parameters())
    nbytes = numel * STATE_ITEMSIZE
    savers: dict[str, Saver] = {
        "ours": resident,
        "ours/nvme": nvme,
        "torch/save-gather": TorchSave(layers, folder),
        "fsdp2/dcp": Fsdp(layers, folder),
        FIO: Fio(-(-nbytes // PIECE_BYTES) * PIECE_BYTES, folder),
    }
    save: dict[str, list[float]] = {name: [] for name in savers}
    load: dict[str, list[float]] = {name: [] for name in savers}
    stalls: list[float] = []
    pins: list[tuple[float, float]] = []
    mixed: list[float] = []
    ram: list[float] = []
    for turn in range(ROUNDS + 1):
        for name, saver in savers.items():
            saver.clear()
            if name == "ours":
                ram.append(extra_ram(lambda: save["ours"].append(seconds_of(resident.save))))
            else:
                save[name].append(seconds_of(saver.save))
            load[name].append(seconds_of(saver.load))
        stalls.append(async_stall(nvme)[0])
        pins.append(pinned_stall(kept))
        mixed.append(mixed_gb_per_s(folder))
        if not turn:  # does not count
            every: list[list[Any]] = [*save.values(), *load.values(), stalls, pins, mixed, ram]
            for measured in every:
                measured.clear()
    rows = [
        {
            "name": name,
            "save_gb_s": nbytes / statistics.median(save[name]) / 1e9,
            "load_gb_s": nbytes / statistics.median(load[name]) / 1e9,
        }
        for name in savers
    ]
    stall = statistics.median(stalls)
    sync = statistics.median(save["ours/nvme"])
    return {
        "rows": rows,
        "async_stall_fraction": stall / sync,
        "async_stall_seconds": stall,
        "pinned_stall_seconds": statistics.median(call for call, _ in pins),
        "pinned_stall_of_step": statistics.median(share for _, share in pins),
        "mixed_disk_gb_per_s": statistics.median(mixed),
        "nvme_over_mixed": {
            kind: statistics.median(
                nbytes / took / (speed * 1e9 / 2)
                for took, speed in zip(seconds["ours/nvme"], mixed, strict=True)
            )
            for kind, seconds in (("save", save), ("load", load))
        },
        "over_fio": {  # speeds, round by round
            f"{name} {kind} over fio's": statistics.median(
                theirs / ours for ours, theirs in zip(seconds[name], seconds[FIO], strict=True)
            )
            for kind, seconds in (("save", save), ("load", load))
            for name in ("ours", "ours/nvme")
        },
        "extra_ram_blocks": statistics.median(ram) / (BLOCK_NUMEL * STATE_ITEMSIZE),
        "gigabytes": nbytes / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--layers", type=int, default=24, help="of 4 Mi parameters, 50 MB each")
    args = parser.parse_args()
    why_not = fio.available()
    if why_not is not None:
        raise SystemExit(why_not)
    if any(name not in os.environ for name in MALLOC_ENVIRONMENT):
        os.environ.update(MALLOC_ENVIRONMENT)
        os.execv(sys.executable, [sys.executable, "-m", "bench.checkpoint", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(dir=args.folder or default_folder()) as name:
        folder = Path(name)
        result = measure_in_group(args.layers, folder)
    for row in result["rows"]:
        print(f"{row['name']:18} save {row['save_gb_s']:5.2f}  load {row['load_gb_s']:5.2f} GB/s")
    print(
        f"stall of an asynchronous save: {result['async_stall_fraction']:.1%} of a synchronous one"
    )
    print(
        f"stall of a pinned save: {result['pinned_stall_seconds'] * 1e3:.0f} ms, "
        f"{result['pinned_stall_of_step']:.1%} of a step"
    )
    print(f"extra RAM of a synchronous save: {result['extra_ram_blocks']:.2f} blocks")
    fio.check_ceilings(result["over_fio"])
    if args.json is not None:
        write_result(args.json, result)


def measure_in_group(layers: int, folder: Path) -> dict[str, Any]:
    """FSDP2 wants a process group; of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        return measure(layers, folder)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
