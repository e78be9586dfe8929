"""What a steady iteration asks of CUDA: python -m tests.cuda_stub tests.cuda_stub.steps [--check]

Writes `bench/results/cuda-stub.json`, or compares its numbers: by home of model data, the launches,
copies, events and waits of one forward, backward, step and zero_grad. Whoever asks whether a copy
has ended hears that it has; who waits without asking is counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.host import launches
from bench.support.gpu_sections import Stack
from bench.support.machine import write_result
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.placement.tiers import Tier
from gemini.runtime.comm.communicator import Communicator
from optim import HybridAdam, NvmeConfig
from tests.cuda_stub.counts import Row, asked, counted
from tests.support.alike import one_of_many

GOLDEN = Path("bench/results/cuda-stub.json")
WIDTH, DEPTH, WARM = 64, 8, 4
GPU = torch.device("cuda", 0)


@contextmanager
def over_nccl() -> Iterator[None]:
    """One rank of two, whose collectives take tensors of a GPU and do nothing."""
    with one_of_many(2), patch.object(Communicator, "device", GPU):
        yield


@dataclass(frozen=True)
class Case:
    """Where model data is, and among whom."""

    policy: StaticPlacement | AutoPlacement
    options: dict[str, Any] = field(default_factory=dict)  # of the optimizer
    group: Callable[[], AbstractContextManager[None]] = nullcontext
    disk: bool = False
    block_numel: int = 1024


RESIDENT, STATE, ALL = (StaticPlacement(1.0, s, p) for s, p in ((0, 0), (1, 0), (1, 1)))
PARAMS = StaticPlacement(1.0, 0.0, 1.0)
ON_NVME = {"nvme_offload_fraction": 1.0}
CASES = {
    "resident": Case(RESIDENT),
    "state on the host": Case(STATE),
    "parameters on the host": Case(PARAMS),
    "all on the host": Case(ALL),
    "resident, two ranks": Case(RESIDENT, group=over_nccl),
    "state on the host, two ranks": Case(STATE, group=over_nccl),
    "state on NVMe": Case(RESIDENT, ON_NVME, disk=True),
    "state on NVMe, split masters": Case(RESIDENT, ON_NVME, disk=True, block_numel=4096),
    "all on NVMe": Case(AutoPlacement("90KiB", "100KiB"), disk=True),
}


def _no_places(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, tensor.dim(), dtype=torch.int64, device=tensor.device)


def iteration_of(case: Case) -> Row:
    with case.group():
        module, trace = Stack(WIDTH, DEPTH), None
        if isinstance(case.policy, AutoPlacement):  # what is sampled here is not what a GPU has
            trace = sequential_trace(specs_of(module, "bfloat16"))
        model = GeminiDDP(
            module, GPU, case.policy, precision="bf16", max_norm=1.0, trace=trace,
            min_chunk_size_m=WIDTH * (WIDTH + 1) / 2**20,
        )  # fmt: skip
        # nothing is computed, so its result would be of any size
        with patch.object(torch.Tensor, "nonzero", _no_places):
            optimizer = HybridAdam(
                model.parameters(),
                lr=1e-3,
                nvme=NvmeConfig(block_numel=case.block_numel),
                **case.options,
            )
        homes = {shard.param_home for shard in model.engine.planning.plan.shards}
        assert (Tier.NVME in homes) == isinstance(case.policy, AutoPlacement)
        # hosts that agree divide by it, and no kernel wrote it
        model.engine.control_vector.scale.copy_(torch.tensor(1.0))
        x = torch.randn(4, WIDTH, device=GPU, dtype=torch.bfloat16)

        def iteration() -> None:
            model(x).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(WARM):
            iteration()
        launches.counted().clear()
        with asked() as found:
            iteration()
        triton = dict(sorted(launches.counted().items()))
        optimizer.close()
    return found.counts | {"launches": triton, "waits": dict(sorted(found.waits.items()))}


def refused_of(case: Case, row: Row) -> Row:
    """What no steady iteration may ask for, whatever was written down."""
    most = {"events made": 0, "copy D2H pageable": 0, "copy H2D pageable": 0}
    if case.group is nullcontext:
        most["copy D2D"] = DEPTH
    too_much = {what: row[what] for what in most if row.get(what, 0) > most[what]}
    return too_much if case.disk else too_much | row["waits"]


def in_a_process(name: str) -> Row:
    """Of its own: what kernels should have written are zeros, where memory is fresh."""
    command = [
        sys.executable,
        "-m",
        "tests.cuda_stub.over",
        "tests.cuda_stub.steps",
        "--case",
        name,
    ]
    out = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=True
    ).stdout
    found: Row = json.loads(out.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_stub tests.cuda_stub.steps")
    parser.add_argument("--case", choices=CASES, help="print this one, and no more")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where they differ")
    parser.add_argument("--json", type=Path, default=GOLDEN)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(iteration_of(CASES[args.case])))
        return 0
    found = {name: in_a_process(name) for name in CASES}
    refused = {name: said for name, row in found.items() if (said := refused_of(CASES[name], row))}
    if refused:
        print("a steady iteration asks for too much:", json.dumps(refused, indent=1))
        return 1
    if not args.check:
        write_result(args.json, {"iterations": found})
        return 0
    golden = json.loads(args.json.read_text(encoding="utf-8"))["iterations"]
    differ = False
    for name in sorted(found | golden):
        row, want = found.get(name, {}), golden.get(name, {})
        got, expected = counted(row), counted(want)
        for what in sorted(got | expected):
            if got.get(what) != expected.get(what):
                differ = True
                print(f"{name}: {what}: {got.get(what)}, and {expected.get(what)} in {args.json}")
        if got != expected:
            print(json.dumps({note: row.get(note) for note in ("launches", "waits")}, indent=1))
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
