"""Cases that both halves of `make test-cuda` run: where model data is, what updates it, how a loop
goes. `CANNOT` says what is left out, and why."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import gemini
from bench.support.gpu_sections import Stack
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.optim import (
    HybridAdam,
    HybridLion,
    HybridMuon,
    HybridSGD,
    NvmeConfig,
)
from gemini.optim.rules.rule import UpdateRule
from gemini.placement.tiers import Tier
from gemini.runtime.schedule.planning import Planning
from tests.cuda_stub.group import over_nccl

WIDTH, DEPTH, ROWS = 64, 8, 4
GPU = torch.device("cuda", 0)
Policy = StaticPlacement | AutoPlacement | str
Then = Callable[[GeminiDDP], Callable[[Any], None]]  # of an input, after its step


def nothing(_: object) -> Callable[[Any], None]:
    return lambda _: None


def evaluates(model: GeminiDDP) -> Callable[[Any], None]:
    def then(x: Tensor) -> None:
        with torch.no_grad():
            model(x)

    return then


def averages(home: str) -> Then:
    def start(model: GeminiDDP) -> Callable[[Any], None]:
        average = gemini.EMA(model, home=home)
        return lambda _: average.update()

    return start


def rewinds(model: GeminiDDP) -> Callable[[Any], None]:
    return lambda _: model.rewind(1)


def parks(where: str) -> Then:
    def start(model: GeminiDDP) -> Callable[[Any], None]:
        def then(_: object) -> None:
            model.park(where)
            model.resume()

        return then

    return start


def half_frozen(width: int, depth: int) -> nn.Module:
    module = Stack(width, depth)
    for layer in itertools.islice(module.layers, depth // 2):
        layer.requires_grad_(False)
    return module


class Coded(nn.Module):
    """Linear map whose weight is codes of 8 bits, which no step changes, beside a trained part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        codes = torch.randint(256, (width, width), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.trained = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(x) + x @ (self.codes.to(x.dtype) - 128).div(128)


def on_quantised_base(width: int, depth: int) -> nn.Module:
    module = Stack(width, depth)
    module.layers = nn.ModuleList(Coded(width) for _ in range(depth))
    return module


@dataclass(frozen=True)
class Case:
    """Where model data is, among whom, and what a loop does."""

    policy: Policy
    options: dict[str, Any] = field(default_factory=dict)  # of the optimizer
    group: Callable[[], AbstractContextManager[None]] = nullcontext
    disk: bool = False
    block_numel: int = 1024
    engine: dict[str, Any] = field(default_factory=dict)  # options of GeminiDDP
    optimizer: Callable[..., Any] = HybridAdam
    module: Callable[[int, int], nn.Module] = Stack
    depth: int = DEPTH
    rows: tuple[int, ...] = (ROWS,)  # of inputs, one iteration after the other
    passes: int = 1  # forward and backward of a step
    then: Then = nothing
    own_stream: bool = False  # the loop runs on a stream of its user's
    waits: str = ""  # why a steady iteration waits, or makes events

    @property
    def has_tail(self) -> bool:
        """Whether a thread goes on with a step while the next forward runs."""
        return self.engine.get("update") in ("tail", "both")

    @property
    def several(self) -> bool:
        """Whether this rank is one of several."""
        return self.group is not nullcontext


RESIDENT, STATE, ALL = (StaticPlacement(1.0, s, p) for s, p in ((0, 0), (1, 0), (1, 1)))
PARAMS = StaticPlacement(1.0, 0.0, 1.0)
FILES = AutoPlacement("90KiB", "100KiB")  # parameters too
ON_NVME = {"nvme_offload_fraction": 1.0}
BITS = {"state": "8bit"}
TAIL = {"update": "tail"}
EARLY = {"update": "speculate"}
BOTH = {"update": "both"}
AGREED = "a step compares what it agreed on with what was expected"
MATRICES = "matrices are made orthogonal by torch's operators, one after the other"
MASTERS = "an average is of masters, which come to the host, block by block"
PARKS = "model data leaves and comes back, and memory that its copies were in is unpinned"
REWINDS = "a rewind brings back what files keep, block by block"
CASES = {
    "resident": Case(RESIDENT),
    # until `quantised.decoded` has its table of roots where the state is: now its close() raises
    "resident, 8 bits": Case(RESIDENT, BITS),
    "resident, bf16 state": Case(RESIDENT, {"state": "bf16"}),
    "resident, no masters": Case(RESIDENT, engine={"master_weights": False}),
    "resident, fp16": Case(RESIDENT, engine={"precision": "fp16"}),
    "resident, 3 layers": Case(RESIDENT, depth=3),
    "resident, changing shapes": Case(RESIDENT, rows=(4, 6, 5, 7)),
    "resident, two passes a step": Case(RESIDENT, passes=2),
    "resident, a user's stream": Case(RESIDENT, own_stream=True),
    "resident, half frozen": Case(RESIDENT, module=half_frozen),
    "resident, Lion": Case(RESIDENT, optimizer=HybridLion),
    "resident, SGD": Case(RESIDENT, {"momentum": 0.9}, optimizer=HybridSGD),
    "resident, Muon": Case(RESIDENT, optimizer=HybridMuon, waits=MATRICES),
    "resident, quantised base": Case(RESIDENT, module=on_quantised_base),
    "parameters on the host, quantised base": Case(PARAMS, module=on_quantised_base),
    "resident, EMA on the host": Case(RESIDENT, then=averages("host"), waits=MASTERS),
    "resident, parked on the host": Case(RESIDENT, then=parks("host"), waits=PARKS),
    "resident, parked on NVMe": Case(RESIDENT, then=parks("nvme"), waits=PARKS),
    "state on the host": Case(STATE),
    "state on the host, 6 layers": Case(STATE, depth=6),
    "state on the host, changing shapes": Case(STATE, rows=(4, 6, 5, 7)),
    "state on the host, 8 bits": Case(STATE, BITS),
    "state on the host, two passes a step": Case(STATE, passes=2),
    "state on the host, Muon": Case(STATE, optimizer=HybridMuon, waits=MATRICES),
    "state on the host, EMA on the host": Case(STATE, then=averages("host"), waits=MASTERS),
    "state on the host, tail": Case(STATE, engine=TAIL),
    "state on the host, tail, 8 bits": Case(STATE, BITS, engine=TAIL),
    "state on the host, tail, evaluation": Case(STATE, engine=TAIL, then=evaluates),
    "state on the host, tail, a user's stream": Case(STATE, engine=TAIL, own_stream=True),
    "state on the host, in backward": Case(STATE, engine=EARLY, waits=AGREED),
    "state on the host, in backward, two passes a step": Case(
        STATE, engine=EARLY, passes=2, waits=AGREED
    ),
    "state on the host, in backward, a user's stream": Case(
        STATE, engine=EARLY, own_stream=True, waits=AGREED
    ),
    "state on the host, in backward, tail": Case(STATE, engine=BOTH, waits=AGREED),
    "parameters on the host": Case(PARAMS),
    "parameters on the host, half frozen": Case(PARAMS, module=half_frozen),
    "parameters on the host, evaluation": Case(PARAMS, then=evaluates),
    "parameters on the host, a user's stream": Case(PARAMS, own_stream=True),
    "parameters on the host, tail": Case(PARAMS, engine=TAIL),
    "all on the host": Case(ALL),
    "all on the host, 6 layers": Case(ALL, depth=6),
    "all on the host, tail": Case(ALL, engine=TAIL),
    "all on the host, in backward": Case(ALL, engine=EARLY, waits=AGREED),
    "all on the host, half on NVMe, tail": Case(
        ALL, {"nvme_offload_fraction": 0.5}, disk=True, engine=TAIL
    ),
    "all on the host, half on NVMe, in backward, tail": Case(
        ALL, {"nvme_offload_fraction": 0.5}, disk=True, engine=BOTH, waits=AGREED
    ),
    "resident, two ranks": Case(RESIDENT, group=over_nccl),
    "resident, two ranks, fp8": Case(RESIDENT, group=over_nccl, engine={"fp8_communication": True}),
    "zero2, two ranks": Case("zero2", group=over_nccl),
    "state on the host, two ranks": Case(STATE, group=over_nccl),
    "state on the host, two ranks, in backward": Case(
        STATE, group=over_nccl, engine=EARLY, waits=AGREED
    ),
    "state on the host, two ranks, tail": Case(STATE, group=over_nccl, engine=TAIL),
    "parameters on the host, two ranks": Case(PARAMS, group=over_nccl),
    "parameters on the host, two ranks, fp8": Case(
        PARAMS, group=over_nccl, engine={"fp8_communication": True}
    ),
    "all on the host, two ranks, tail": Case(ALL, group=over_nccl, engine=TAIL),
    "state on NVMe": Case(RESIDENT, ON_NVME, disk=True),
    "state on NVMe, 8 bits": Case(RESIDENT, ON_NVME | BITS, disk=True),
    "state on NVMe, split masters": Case(RESIDENT, ON_NVME, disk=True, block_numel=4096),
    "state on NVMe, no masters": Case(
        RESIDENT, ON_NVME, disk=True, engine={"master_weights": False}
    ),
    "state on NVMe, Muon": Case(RESIDENT, ON_NVME, disk=True, optimizer=HybridMuon, waits=MATRICES),
    "state on NVMe, tail": Case(RESIDENT, ON_NVME, disk=True, engine=TAIL),
    "state on NVMe, two ranks": Case(RESIDENT, ON_NVME, group=over_nccl, disk=True),
    "state on NVMe, tail, a user's stream": Case(
        RESIDENT, ON_NVME, disk=True, engine=TAIL, own_stream=True
    ),
    "state on NVMe, EMA on NVMe": Case(
        RESIDENT, ON_NVME, disk=True, then=averages("nvme"), waits=MASTERS
    ),
    "state on NVMe, rewind": Case(RESIDENT, ON_NVME, disk=True, then=rewinds, waits=REWINDS),
    "all on NVMe, half frozen": Case(
        AutoPlacement("100KiB", "200KiB"), disk=True, depth=16, module=half_frozen
    ),
    "all on NVMe": Case(FILES, disk=True),
    "all on NVMe, tail": Case(FILES, disk=True, engine=TAIL),
}
CANNOT = {
    "Lamb": "its host takes roots of sums of squares, which no kernel has written",
    "Adafactor": "its host divides by sums of lines and by a norm, which no kernel has written",
    "a save, a load": "they read weights on the host, and no kernel has written any",
    "more than one rank that differs": "the other rank says what this one says",
    "CUDA graphs": "the stub captures nothing",
}


def _no_places(tensor: Tensor) -> Tensor:
    return torch.empty(0, tensor.dim(), dtype=torch.int64, device=tensor.device)


@dataclass(frozen=True)
class Loop:
    """A loop of training of a model. `settle` waits for what goes on behind its last step."""

    iteration: Callable[[], None]
    settle: Callable[[], object]
    planning: Planning


def _of_second_step(rule: UpdateRule, hyper: Any, step: int) -> tuple[float, ...]:
    """Rules that a host has a part in read counts of steps, which nobody counted on a device."""
    return tuple(map(float, rule.coefficients(hyper, 2).values()))


@contextmanager
def training(case: Case) -> Iterator[Loop]:
    own = torch.cuda.stream(torch.cuda.Stream() if case.own_stream else None)
    counted = patch.object(UpdateRule, "values", _of_second_step)
    with case.group(), own, counted:
        module, trace = case.module(WIDTH, case.depth), None
        if isinstance(case.policy, AutoPlacement):  # what is sampled here is not what a GPU has
            trace = sequential_trace(specs_of(module, "bfloat16"))
        model = GeminiDDP(
            module, GPU, case.policy, trace=trace,
            **{"precision": "bf16", "max_norm": 1.0} | case.engine,
            min_chunk_size_m=WIDTH * (WIDTH + 1) / 2**20,
        )  # fmt: skip
        # nothing is computed, so its result would be of any size
        with patch.object(torch.Tensor, "nonzero", _no_places):
            optimizer = case.optimizer(
                model if case.optimizer is HybridMuon else model.parameters(),
                lr=1e-3,
                nvme=NvmeConfig(
                    block_numel=case.block_numel, keep_versions=2 if case.then is rewinds else 0
                ),
                **case.options,
            )
        homes = {shard.param_home for shard in model.engine.planning.plan.shards}
        assert (Tier.NVME in homes) == isinstance(case.policy, AutoPlacement)
        # hosts that agree divide by it, and no kernel wrote it
        model.engine.control_vector.scale.copy_(torch.tensor(1.0))
        inputs = [torch.randn(n, WIDTH, device=GPU, dtype=torch.bfloat16) for n in case.rows]
        turn, then = itertools.cycle(inputs), case.then(model)

        def iteration() -> None:
            for _ in range(case.passes):
                x = next(turn)
                model(x).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            then(x)

        settle = lambda: optimizer.last_report.behind.wait()  # noqa: E731
        yield Loop(iteration, settle, model.engine.planning)
        optimizer.close()
