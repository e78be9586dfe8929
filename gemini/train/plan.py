"""Questions of a run to `gemini.plan`: how it trains, and its machine, measured."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from gemini import nvme
from gemini.memtracer.monitor import resident_bytes
from gemini.nvme.files.file import free_bytes
from gemini.placement.fit import usual_speeds
from gemini.placement.homes.budgets import USABLE
from gemini.plan.ask import Training
from gemini.plan.machine import TYPICAL_PROCESS, Hardware
from gemini.plan.words import OPTIMIZERS
from gemini.runtime.comm.communicator import Communicator
from gemini.runtime.memory.backend import make_backend
from gemini.runtime.memory.machine import look_at_machine, ranks_here
from gemini.units import parse_bytes

from .config import TrainConfig

_PROBE_SECONDS = 1.0
_WIDTH = {"cpu": 256, "cuda": 8192}  # of a layer that is timed, and rows that it is given


def training_of(config: TrainConfig, world_size: int) -> Training:
    """Training that a config describes. Raises ValueError if ranks do not divide the batch."""
    optimizer, state = OPTIMIZERS[config.optim]
    sequences = 2 if config.method in ("dpo", "reward") else 1  # of a pair
    return Training(
        batch=config.batch_of_rank(world_size) * sequences, seq=config.seq, lora=config.lora,
        lora_targets=config.targets, quantize=config.quantize,
        checkpointing=config.checkpointing, optimizer=optimizer, state=state,
        accumulate=config.accumulate, update=config.update, by_trl=True,
        trust_remote_code=config.trust_remote_code, scores=config.scores,
        lengths=len(config.padded_lengths),
    )  # fmt: skip


def hardware(config: TrainConfig, comm: Communicator, device: torch.device) -> Hardware:
    """Machine to plan for: memory as given, or most of the free bytes. All ranks call.

    Sizes are the smallest of all ranks, and speeds are rank 0's: so all ranks make one plan.
    """
    backend = make_backend(device)
    machine = look_at_machine(backend, ranks_here(comm))
    mine = {"device_mem": machine.device_bytes_left, "host_mem": machine.host_bytes_left}
    sizes = {name: int(USABLE * left) for name, left in mine.items()}
    given = {name: getattr(config, name) for name in sizes if getattr(config, name) is not None}
    sizes |= {name: parse_bytes(size) for name, size in given.items()}
    sources = {name: "given" if name in given else f"{USABLE:g} of what is left" for name in sizes}
    speeds = replace(usual_speeds(backend.has_host_tier), flops=flops_of(device))
    sources["flops"] = "measured"
    sizes["nvme"], sources["nvme"], folder = 0, "no --nvme", "."
    if config.nvme is not None:
        sizes["nvme"], folder = disk_of(config.nvme)
        sources["nvme"] = "given" if folder == "." else f"free in {config.nvme}"
    if folder != ".":
        # one rank: probes at the same time on one disk would measure each other
        if comm.rank == 0:
            best = nvme.probe(folder, seconds=_PROBE_SECONDS)
            speeds = replace(speeds, nvme_read=best.read, nvme_write=best.write)
        sources |= dict.fromkeys(("nvme_read", "nvme_write"), "measured")
    all_sizes, all_speeds = zip(*comm.gather_objects((sizes, speeds)), strict=True)
    least = {name: min(one[name] for one in all_sizes) for name in sizes}
    return Hardware(
        comm.world_size, machine.ranks_per_node, **least, bandwidths=all_speeds[0],
        device=device.type,
        sources=tuple(sources.items()), folder=folder, is_here=True,
        process=replace(TYPICAL_PROCESS, floor=resident_bytes(trimmed=False)),
    )  # fmt: skip


def disk_of(given: str) -> tuple[int, str]:
    """Bytes of `--nvme` and its folder: a folder that is here has what is free, elsewhere a size
    is given. Raises ValueError."""
    if Path(given).is_dir():
        return free_bytes(nvme.check_folder(given)), given
    try:
        return parse_bytes(given), "."
    except ValueError:
        raise ValueError(
            f"--nvme {given} is no folder here; expected one, or its free bytes, such as 1TB"
        ) from None


def flops_of(device: torch.device) -> float:
    """FLOP a second of a layer's forward and backward in bf16; the best of three."""
    size = _WIDTH[device.type]
    layer = torch.nn.Linear(size, size, bias=False, dtype=torch.bfloat16, device=device)
    rows = torch.ones(size, size, dtype=torch.bfloat16, device=device, requires_grad=True)
    return 6 * size**3 / min(_pass_seconds(layer, rows) for _ in range(3))


def _pass_seconds(layer: torch.nn.Module, rows: torch.Tensor) -> float:
    started = time.perf_counter()
    layer(rows).sum().backward()
    assert rows.grad is not None
    rows.grad[0, 0].item()  # a device has ended with it
    return time.perf_counter() - started
