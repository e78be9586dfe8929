"""Clusters: of a card by its data sheet, of a machine that was asked about, and of this one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from math import log2
from typing import Any

import torch

from gemini.comm.communicator import Communicator
from gemini.comm.connect import everyone, this_device
from gemini.placement.homes.budgets import USABLE
from gemini.placement.sizes import Bandwidths, least_bandwidths
from gemini.plan.machine import Hardware, machine_of
from gemini.runtime.memory.backend import make_backend
from gemini.runtime.memory.machine import look_at_machine, ranks_here
from gemini.units import MIB

from .cluster import Cluster, Link

ATTENTION = 0.45  # of the rate of products: attention's, forward and backward
EXACT = 1 / 16  # of a card's rate of products: those in fp32, which no tensor core computes
PACKING = 4  # times that a CPU's product passes its weight, which it packs
# bytes a second each way of a card: to its neighbours, and across nodes
_LINKS = {
    "h100": (450e9, 50e9), "h200": (450e9, 50e9), "a100": (300e9, 25e9), "a100-40g": (300e9, 25e9),
}  # fmt: skip
_USUAL_LINKS = (24e9, 12.5e9)  # PCIe 4, and 100 Gb/s
_ACHIEVED = 0.85  # of a link
_INSIDE_LATENCY, _ACROSS_LATENCY, _CPU_LATENCY = 8e-6, 2e-5, 2e-4
# of products that are timed: few rows and many, and their width
_ROWS, _WIDTH = (128, 1024), {"cpu": 1024, "cuda": 8192}
_MESSAGE = 8 * MIB
# gloo reduces whole tensors and drops what is not a rank's; half of a collective's time is waiting
_CPU_COLLECTIVES = {"overlap": 0.5, "scatter": 2.0}
_COPIED = 128 * MIB  # more than caches have
_TIMES, _COLLECTIVES = 5, 16

Measured = tuple[Bandwidths, float, float]  # beside speeds of a product's weight, and latency


def cluster_of(machine: Hardware, gpu: str | None = None) -> Cluster:
    """Cluster of a machine that is asked about.

    gpu: name of the card, by which its links are known: `machine` has one speed of collectives.
    """
    links, budgets = machine.bandwidths, machine.budgets()
    on_cpu = machine.device == "cpu"
    if on_cpu:
        inside = across = Link(_CPU_LATENCY, links.collective)
    else:
        here, beyond = (_ACHIEVED * speed for speed in _LINKS.get(gpu or "", _USUAL_LINKS))
        inside, across = Link(_INSIDE_LATENCY, here), Link(_ACROSS_LATENCY, beyond)
    return Cluster(
        machine.world_size, machine.ranks_per_node, budgets.device, budgets.host, links,
        *_attention(links.flops, on_cpu), links.device_memory / (PACKING if on_cpu else 1),
        inside, across, **_of_device(on_cpu),
    )  # fmt: skip


def _attention(flops: float, on_cpu: bool) -> tuple[float, float]:
    """Operations a second of attention, and of a ring's, where products have `flops`."""
    return ATTENTION * flops, flops * (0.5 if on_cpu else EXACT)


def _of_device(on_cpu: bool) -> dict[str, Any]:
    return {"has_host_tier": not on_cpu, **(_CPU_COLLECTIVES if on_cpu else {})}


def cluster_named(gpu: str, devices: int, per_node: int = 8) -> Cluster:
    """Cluster of a card by its data sheet. Raises ValueError for a card that is not known."""
    return cluster_of(
        machine_of({}, world_size=devices, ranks_per_node=min(per_node, devices), gpu=gpu), gpu
    )


def measured(comm: Communicator, device: torch.device, dtype: torch.dtype) -> Measured:
    """Measure this rank while all ranks do, in about a second. Collective."""
    width = _WIDTH[device.type]
    weight = torch.ones(width, width, dtype=dtype, device=device, requires_grad=True)

    def of_rows(number: int) -> float:
        rows = torch.ones(number, width, dtype=dtype, device=device, requires_grad=True)
        return _seconds(lambda: torch.nn.functional.linear(rows, weight).sum().backward(), device)

    few, many = map(of_rows, _ROWS)
    each = max(1e-9, (many - few) / (_ROWS[1] - _ROWS[0]))  # of a row
    flops, fixed = 6.0 * width * width / each, few - _ROWS[0] * each
    weights = 3.0 * weight.nbytes / max(fixed, 1e-9)
    values = torch.zeros(_COPIED // 4, device=device)
    memory = 2.0 * values.nbytes / _seconds(lambda: values.add_(1.0), device)
    if comm.world_size == 1:
        speeds = Bandwidths(flops=flops, device_memory=memory, collective=memory)
        return speeds, weights, _CPU_LATENCY
    one, message = comm.numbers([0.0], torch.float32), torch.zeros(_MESSAGE // 4, device=device)
    rows = torch.ones(_ROWS[0], width, dtype=dtype, device=device)

    def worked(waits: bool) -> None:
        """Products, and a collective for which ranks that share cores must be let run."""
        for _ in range(_COLLECTIVES):
            torch.nn.functional.linear(rows, weight)
            if waits:
                comm.all_reduce(one).wait()

    spent = _seconds(lambda: worked(True), device) - _seconds(lambda: worked(False), device)
    steps = 2 * log2(comm.world_size)  # of a reduction: see `Cluster`
    latency = max(1e-6, spent / _COLLECTIVES / steps)
    passes = 2 * (comm.world_size - 1) / comm.world_size * _MESSAGE
    reduced = _seconds(lambda: comm.all_reduce(message).wait(), device)
    speeds = Bandwidths(flops=flops, device_memory=memory, collective=passes / reduced)
    return speeds, weights, latency


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a piece of work."""
    found = []
    for _ in range(_TIMES + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    return sorted(found[1:])[_TIMES // 2]


def cluster_here(precision: str = "bf16") -> Cluster:
    """Cluster of the ranks that there are, measured by all of them at once. Collective.

    One speed is measured for links of both classes, over all ranks.
    """
    device, comm = this_device(), everyone(None, None)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    here = ranks_here(comm)
    machine = look_at_machine(make_backend(device), here, None)
    of_ranks = comm.gather_objects(measured(comm, device, dtype))
    every, weights, latencies = zip(*of_ranks, strict=True)
    found = least_bandwidths(every)
    link, links = Link(max(latencies), found.collective), machine.speeds.links
    left = min(comm.gather_objects((machine.device_bytes_left, machine.host_bytes_left)))
    on_cpu = device.type == "cpu"
    own, node = (int(USABLE * nbytes) for nbytes in left)
    cores = len(os.sched_getaffinity(0))
    threads = min(torch.get_num_threads(), cores)
    return Cluster(
        comm.world_size, here, own // (here if on_cpu else 1), node // here,
        replace(found, host_to_device=links.host_to_device, device_to_host=links.device_to_host),
        *_attention(found.flops, on_cpu), min(weights), link, link,
        burst=max(1.0, threads / min(threads, cores / here)) if on_cpu else 1.0,
        **_of_device(on_cpu),
    )  # fmt: skip
