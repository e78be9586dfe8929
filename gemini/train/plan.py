"""Questions of a run to `gemini.plan`: how it trains, and its machine, measured."""

from __future__ import annotations

from dataclasses import replace

import torch

from gemini import nvme
from gemini.comm.communicator import Communicator
from gemini.doctor.measure import flops_of
from gemini.memtracer.monitor import resident_bytes
from gemini.nvme.files.file import free_bytes
from gemini.placement.homes.budgets import USABLE
from gemini.placement.speeds import FOLDER, agreed
from gemini.plan.machine import TYPICAL_PROCESS, Hardware
from gemini.plan.training import Training
from gemini.plan.words import OPTIMIZERS
from gemini.runtime.memory.backend import make_backend
from gemini.runtime.memory.machine import look_at_machine, ranks_here
from gemini.units import parse_bytes

from .config import TrainConfig

_PROBE_SECONDS = 1.0


def training_of(config: TrainConfig, world_size: int) -> Training:
    """Training that a config describes. Raises ValueError if ranks do not divide the batch."""
    optimizer, state = OPTIMIZERS[config.optim]
    sequences = 2 if config.method in ("dpo", "reward") else 1  # of a pair
    return Training(
        batch=config.batch_of_rank(world_size) * sequences, seq=config.seq, lora=config.lora,
        lora_targets=config.targets, quantize=config.quantize,
        checkpointing=config.checkpointing, optimizer=optimizer, state=state,
        accumulate=config.accumulate, accumulate_order=config.accumulate_order,
        update=config.update, by_trl=True,
        trust_remote_code=config.trust_remote_code, scores=config.scores,
        lengths=len(config.padded_lengths), activations=config.activations,
        canonical=config.canonical,
    )  # fmt: skip


def hardware(config: TrainConfig, comm: Communicator, device: torch.device) -> Hardware:
    """Machine to plan for: memory as given, or most of the free bytes. All ranks call.

    Sizes and speeds are the smallest of all ranks: so all ranks make one plan.
    """
    backend = make_backend(device)
    disk = None if config.nvme is None else disk_of(config.nvme)
    folder = "." if disk is None else disk[1]
    machine = look_at_machine(backend, ranks_here(comm), None if folder == "." else folder)
    mine = {"device_mem": machine.device_bytes_left, "host_mem": machine.host_bytes_left}
    sizes = {name: int(USABLE * left) for name, left in mine.items()}
    given = {name: getattr(config, name) for name in sizes if getattr(config, name) is not None}
    sizes |= {name: parse_bytes(size) for name, size in given.items()}
    sources = {name: "given" if name in given else f"{USABLE:g} of what is left" for name in sizes}
    sizes["nvme"], sources["nvme"] = 0, "no --nvme"
    if disk is not None:
        sizes["nvme"] = disk[0]
        sources["nvme"] = "given" if folder == "." else f"free in {config.nvme}"
    gathered = comm.gather_objects((sizes, machine.speeds, flops_of(device)))
    all_sizes, all_speeds, all_flops = zip(*gathered, strict=True)
    least = {name: min(one[name] for one in all_sizes) for name in sizes}
    there = agreed(all_speeds)
    sources |= dict.fromkeys(sorted(there.measured), there.origin)
    priced = {"flops": min(all_flops)}
    if folder != "." and not there.measured >= set(FOLDER):
        # one rank: probes at the same time on one disk would measure each other
        found = nvme.probe(folder, seconds=_PROBE_SECONDS) if comm.rank == 0 else None
        best = comm.gather_objects(found)[0]
        shared = machine.ranks_per_node
        priced |= {"nvme_read": best.read / shared, "nvme_write": best.write / shared}
    sources |= dict.fromkeys(priced, "measured")
    return Hardware(
        comm.world_size, machine.ranks_per_node, **least,
        bandwidths=replace(there.links, **priced),
        device=device.type,
        sources=tuple(sources.items()), folder=folder, is_here=True,
        process=replace(TYPICAL_PROCESS, floor=resident_bytes(trimmed=False)),
        run_speeds=there.links,
    )  # fmt: skip


def disk_of(given: str) -> tuple[int, str]:
    """Bytes of `--nvme` and its folder: a folder that is here has what is free, elsewhere a size
    is given. Raises ValueError."""
    if "{" in given or nvme.local_folder(given).is_dir():
        return free_bytes(nvme.check_folder(given)), given
    try:
        return parse_bytes(given), "."
    except ValueError:
        raise ValueError(
            f"--nvme {given} is no folder here; expected one, or its free bytes, such as 1TB"
        ) from None
