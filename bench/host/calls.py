"""What a step goes through on the host: python -m bench.host.calls [--json PATH]

Calls and files. A profile hook counts the calls of functions of ours, generators' resumptions and
comprehensions among them, and the files they are in. A layer, a linear one in a chunk of its own,
is what 8 of them cost beyond 4; a block of the step likewise. What the simulated device does inside
one of its calls is its own business.

    resident    nothing moves
    gathered    two ranks: every chunk is gathered before its use and released behind it
    offloaded   one rank: the same from the host, to which gradients go, on a simulated device
    nvme        the optimizer's state lives in a file

CPU time of one thread, of a chain of small linear layers: how wrapping and the first iteration grow
from 4000 parameters to 8000; the first iteration beside a steady one; forward and backward beside
plain torch's; 80 000 moments planned.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from bench.support.machine import write_result
from gemini import GeminiDDP, StaticPlacement
from gemini.chunk.layout import ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.optim import HybridAdam, NvmeConfig
from gemini.placement.timetable.gathers import gather_steps

_SOURCES = Path(__file__).resolve().parents[2]
# the simulated device among them: a call of it stands for one of a real device's backend
PARTS = ("gemini", "optim", "kernels_triton", "io/nvme", "bench/shared/simulated")
_OURS = tuple(f"{_SOURCES / part}/" for part in PARTS)
WIDTH, LAYERS = 64, (4, 8)
MODES = ("resident", "gathered", "offloaded", "nvme")
PHASES = ("forward", "backward", "step")


@dataclass
class Counter:
    """Calls of our functions while the hook is set."""

    calls: int = 0
    files: set[str] = field(default_factory=set)
    functions: dict[str, int] = field(default_factory=dict)

    def hook(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            if frame.f_code.co_qualname.startswith("Sim") and _is_simulated(frame.f_back):
                return
            self.calls += 1
            self.files.add(frame.f_code.co_filename)
            name = _name(frame.f_code)
            self.functions[name] = self.functions.get(name, 0) + 1


def _is_simulated(caller: FrameType | None) -> bool:
    return caller is not None and caller.f_code.co_qualname.startswith("Sim")


def _name(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(_SOURCES)}:{code.co_qualname}"


def counted(work: Callable[[], object]) -> Counter:
    """What `work` calls of ours, on this thread."""
    counter = Counter()
    sys.setprofile(counter.hook)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counter


class Chain:
    """A wrapped chain of linear layers with an optimizer, and one iteration in three phases."""

    def __init__(self, layers: int, mode: str) -> None:
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        policy = StaticPlacement(offload_param_frac=float(mode == "offloaded"))
        self.model = GeminiDDP(
            module,
            SimBackend() if mode == "offloaded" else "cpu",
            policy,
            min_chunk_size_m=WIDTH * WIDTH / 2**20,
        )
        self.optimizer = HybridAdam(
            self.model.parameters(),
            nvme=NvmeConfig(block_numel=WIDTH * WIDTH),
            nvme_offload_fraction=float(mode == "nvme"),
        )
        self._rows = torch.ones(2, WIDTH)
        self._loss: Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """Of the optimizer's state."""
        target = self.model.engine.target
        assert target is not None
        return len(target.tiered_state.space.blocks)

    def forward(self) -> None:
        self._loss = self.model(self._rows).float().sum()

    def backward(self) -> None:
        assert self._loss is not None
        self._loss.backward()
        self._loss = None

    def step(self) -> None:
        self.optimizer.step()

    def iterate(self) -> None:
        for phase in PHASES:
            getattr(self, phase)()
        self.optimizer.zero_grad()


def phases_of(layers: int, mode: str) -> tuple[dict[str, Counter], int]:
    """What every phase of a steady iteration calls, and the number of blocks."""
    chain = Chain(layers, mode)
    for _ in range(3):
        chain.iterate()
    found = {phase: counted(getattr(chain, phase)) for phase in PHASES}
    blocks = chain.num_blocks
    chain.optimizer.close()
    return found, blocks


def _on_a_rank(rank: int, mode: str) -> list[tuple[dict[str, Counter], int]]:
    return [phases_of(layers, mode) for layers in LAYERS]


def per_layer(mode: str) -> list[dict[str, Any]]:
    """A row for every phase: calls of one more layer (or block) and the files of all of it."""
    if mode == "gathered":
        found = run_ranks(_on_a_rank, 2, mode, processes=True)[0]
    else:
        found = [phases_of(layers, mode) for layers in LAYERS]
    (few, few_blocks), (many, many_blocks) = found
    rows = []
    for phase in PHASES:
        more = many_blocks - few_blocks if phase == "step" else LAYERS[1] - LAYERS[0]
        functions = {
            name: (count - few[phase].functions.get(name, 0)) / more
            for name, count in many[phase].functions.items()
        }
        shared = {name: count for name, count in functions.items() if count > 0}
        rows.append(
            {
                "mode": mode,
                "phase": phase,
                "calls": (many[phase].calls - few[phase].calls) / more,
                "files": len({name.partition(":")[0] for name in shared}),
                "files_ever": len(many[phase].files),
                "functions": dict(sorted(shared.items(), key=lambda item: -item[1])),
            }
        )
    return rows


def small_layers(num_params: int) -> nn.Sequential:
    """Layers of 16 x 16 with a bias: two parameters each."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_params // 2)))


class Loop:
    """Iterations of such a chain, wrapped or plain; CPU seconds of what is timed."""

    def __init__(self, num_params: int, *, wrapped: bool, chunk_m: float = 32) -> None:
        module = small_layers(num_params)
        self._rows = torch.ones(2, 16)
        self.model: nn.Module = module.to(torch.bfloat16)
        self.optimizer: Any = None
        if wrapped:
            self.model = GeminiDDP(module, "cpu", min_chunk_size_m=chunk_m)
            self.optimizer = HybridAdam(self.model.parameters())
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
            self._rows = self._rows.bfloat16()

    def iterate(self) -> dict[str, float]:
        """CPU seconds of forward, backward and the whole."""
        begun = time.process_time()
        loss = self.model(self._rows).float().sum()
        forward = time.process_time()
        loss.backward()
        backward = time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.process_time()
        return {"forward": forward - begun, "backward": backward - forward, "all": end - begun}


@contextmanager
def undisturbed() -> Iterator[None]:
    """One thread, and no pass of the collector."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def cpu_seconds(work: Callable[[], object]) -> float:
    with undisturbed():
        started = time.process_time()
        work()
        return time.process_time() - started


def host_costs(num_params: int, chunk_m: float) -> dict[str, float]:
    """Seconds to wrap and of the first iteration, and microseconds a parameter of a steady one."""
    loops: list[Loop] = []
    made = lambda: loops.append(Loop(num_params, wrapped=True, chunk_m=chunk_m))  # noqa: E731
    found = {"wrap": cpu_seconds(made)}
    loop, plain = loops[0], Loop(num_params, wrapped=False)
    with undisturbed():
        found["first"] = loop.iterate()["all"]
        plain.iterate()
        rounds = [(loop.iterate(), plain.iterate()) for _ in range(7)]
    for name in ("forward", "backward", "all"):
        ours, theirs = (min(one[side][name] for one in rounds) for side in (0, 1))
        found[f"{name}_us"], found[f"plain_{name}_us"] = (
            1e6 * seconds / num_params for seconds in (ours, theirs)
        )
    found["steady"] = min(one[0]["all"] for one in rounds)
    return found


def planning_seconds(num_moments: int) -> float:
    """To make the steps of so many moments, a module each two of them."""
    specs = [ParamSpec(f"m{i}.weight", (16,), "bfloat16") for i in range(num_moments // 4)]
    calls = sequential_trace(specs).calls({p: p for p in range(len(specs))})  # type: ignore[misc]
    assert len(calls) == num_moments
    return cpu_seconds(lambda: gather_steps(calls, ()))


def costs() -> list[dict[str, Any]]:
    """Of one chunk for all, and of a chunk for every layer."""
    host_costs(200, 32)  # what is imported and compiled once
    rows = []
    for name, chunk_m in (("one chunk", 32.0), ("a chunk a layer", 0.001)):
        half, whole = host_costs(4000, chunk_m), host_costs(8000, chunk_m)
        rows.append(
            {
                "chunks": name,
                "wrap_growth": whole["wrap"] / half["wrap"],
                "first_growth": whole["first"] / half["first"],
                "first_over_steady": half["first"] / half["steady"],
                "backward_over_plain_us": half["backward_us"] - half["plain_backward_us"],
                "at_4000": half,
                "at_8000": whole,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--functions", action="store_true", help="of every phase, with calls")
    parser.add_argument("--no-times", action="store_true", help="count calls only")
    options = parser.parse_args()
    layers = [row for mode in MODES for row in per_layer(mode)]
    print("calls of ours for one more layer (step: block), files they are in, files ever touched")
    for row in layers:
        print(
            f"{row['mode']:9} {row['phase']:9} {row['calls']:6.1f} calls"
            f" {row['files']:3} files, {row['files_ever']} ever"
        )
        for name, count in row["functions"].items() if options.functions else ():
            print(f"    {count:5.1f}  {name}")
    for row in layers:
        del row["functions"]
    figures: dict[str, Any] = {"layers": layers}
    if not options.no_times:
        figures["planning_80000_seconds"] = planning_seconds(80_000)
        print(f"80 000 moments planned in {figures['planning_80000_seconds']:.2f} s")
        figures["costs"] = costs()
        for row in figures["costs"]:
            print(
                f"{row['chunks']:15} wrap of 8000 x {row['wrap_growth']:.2f} of 4000, first"
                f" iteration x {row['first_growth']:.2f}; first x {row['first_over_steady']:.1f}"
                f" of a steady one; backward {row['backward_over_plain_us']:.1f} us a parameter"
                " over plain torch"
            )
    if options.json:
        write_result(options.json, figures)


if __name__ == "__main__":
    main()
