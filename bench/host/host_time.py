"""`python -m bench.host.host_time`: what a step asks of the host, on a device that does nothing.

Launches, waits for the device, calls of ours and CPU seconds of the thread, of a step whose state
is resident, of one whose state streams from host memory, of two ranks that do either, and of one
that hosts agree on. Copies take no time here: CUDA's own calls to begin them come on top.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import launches

# isort: split
import torch
from torch import Tensor, nn

from bench.host.calls import counted
from bench.shared.models import seeded
from bench.shared.simulated import SimBackend
from bench.shared.threads import run_threads
from gemini import GeminiDDP, StaticPlacement
from gemini.optim import HybridAdam, NvmeConfig
from gemini.optim.update.triton_update import DeviceOutcome
from gemini.tickets import Copied, CopyTicket

BLOCK_NUMEL = 1024
WIDTH = 64
BLOCKS_PER_LAYER = 4 * WIDTH * WIDTH // BLOCK_NUMEL
CASES = ("resident", "stream", "ranks", "ranks-stream", "agreed")


class Instant(SimBackend):
    """A device whose copies take no time."""

    def __init__(self, *, shards_on_host: bool = False) -> None:
        super().__init__(updates_by_triton=True)
        self.shards_start_on_host = shards_on_host

    def copy(self, dst: Tensor, src: Tensor, behind: Sequence[CopyTicket] = ()) -> CopyTicket:
        return Waited(self)

    def copy_all(
        self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[CopyTicket] = ()
    ) -> CopyTicket:
        return Waited(self)

    def address(self, tensor: Tensor) -> int:
        return tensor.data_ptr()


class Waited(Copied):
    """A copy that takes no time, and whose waits are counted."""

    def __init__(self, backend: SimBackend) -> None:
        self._backend = backend

    def settle(self) -> None:
        self._backend.host_waits += 1

    def wait(self) -> None:
        self.settle()


def step_of(case: str, num_layers: int, steps: int, rank: int = 0) -> dict[str, Any]:
    """Of the last steps: median and least seconds, launches, and waits of the host; and the calls
    of ours of one step more, which is not timed."""
    with seeded():
        layers = [nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(num_layers)]
    module = nn.ModuleList(layers)
    backend = Instant()
    placement = StaticPlacement(1.0, float(case.endswith("stream")), 0.0)
    model = GeminiDDP(
        module, backend, placement, precision="bf16", min_chunk_size_m=1.0, max_norm=1.0
    )
    optimizer = HybridAdam(model.parameters(), lr=1e-3, nvme=NvmeConfig(block_numel=BLOCK_NUMEL))
    target = model.engine.target
    assert target is not None
    target.device_may_decide = case != "agreed"
    seconds: list[float] = []
    launched, read, waits = {}, {}, 0

    def give_gradients() -> None:
        for param in model.module.parameters():
            param.grad = torch.ones_like(param) if param.grad is None else param.grad.fill_(1)

    for _ in range(steps):
        give_gradients()
        before = backend.host_waits
        launches.counted().clear()
        with ExitStack() as stack:
            found = stack.enter_context(launches.reads()) if rank == 0 else Counter[str]()
            started = time.thread_time()
            optimizer.step()
            seconds.append(time.thread_time() - started)
        launched, waits = dict(launches.counted()), backend.host_waits - before
        read = {name: count for name, count in found.items() if count}
        # gradients stay where they are, as tables are kept for addresses; ranks reduce new ones
        optimizer.zero_grad(set_to_none=case.startswith("ranks"))
    calls = 0
    if not case.startswith("ranks"):  # one that waits for another calls as often as it looks
        give_gradients()
        calls = counted(optimizer.step).calls
    blocks = sum(len(shard.state_homes) for shard in model.engine.planning.plan.shards)
    return {
        "blocks": blocks,
        "seconds": statistics.median(seconds[1:]),
        "least_seconds": min(seconds[1:]),
        "calls": calls,
        "launches": launched,
        "reads": read,
        "host_waits": waits,
    }


def step_of_ranks(case: str, num_layers: int, steps: int, ranks: int) -> dict[str, Any]:
    """The same of rank 0; ranks are threads of this process."""
    if ranks == 1:
        return step_of(case, num_layers, steps)
    found: dict[str, Any] = run_threads(lambda rank: step_of(case, num_layers, steps, rank), ranks)[
        0
    ]
    return found


def found_in(cases: Sequence[str], num_layers: int, steps: int) -> dict[str, dict[str, Any]]:
    """By case, on a device that is always behind."""
    launches.install()
    DeviceOutcome.ready = lambda self: False  # type: ignore[method-assign]
    return {
        case: step_of_ranks(case, num_layers, steps, 1 + case.startswith("ranks"))
        for case in sorted(cases, key=CASES.index)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=1000 // BLOCKS_PER_LAYER)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = found_in(args.cases, args.layers, args.steps)
    for case, row in found.items():
        per_block = row["seconds"] / row["blocks"]
        print(
            f"{case:12s} {row['blocks']:5d} blocks {row['seconds'] * 1e3:8.2f} ms a step "
            f"{per_block * 1e6:7.1f} us a block  {row['calls']:6d} calls  "
            f"launches {sum(row['launches'].values()):5d}  "
            f"reads {sum(row['reads'].values()):3d}  host waits {row['host_waits']}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
