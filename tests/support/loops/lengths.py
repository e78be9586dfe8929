"""Loops whose batches have many lengths, on the simulated device, and a search among them.

    python -m tests.support.loops.lengths [--count 100] [--seed 0] [--ranks 2]

A drawn program has a distribution of lengths, budgets, an update mode, backwards that add up,
evaluations, and an average of weights or none. It must have the bits of the same program without
budgets, and pass no budget: but in its first iteration, and where a warning said before the forward
that no homes hold it. Ranks draw lengths of their own, and must have one plan.
"""

from __future__ import annotations

import argparse
import logging
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared.models import Tower, token_loss
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import EMA, AutoPlacement, BudgetWarning, GeminiDDP
from gemini.optim.rules import quantised
from gemini.placement.tiers import Tier
from optim import HybridAdam, NvmeConfig
from tests.support.checkpoints import bits
from tests.support.spilled import BLOCKS, SMALL

KIB = 1024
TABLES = quantised  # made at its import: in a loop they would count as memory of the device
Step = int | tuple[int, ...]  # a length, or several that add up; a negative one is evaluated


class Loop:
    """A training loop on the simulated device, which knows the most that each iteration held."""

    def __init__(
        self,
        kib: int,
        *others: str | None,
        sim: SimBackend | None = None,
        module: nn.Module | None = None,
        released: bool = False,
        nvme: NvmeConfig = BLOCKS,
        on_nvme: float = 0.0,
        **options: Any,
    ) -> None:
        """released: parameters begin off the device, so they may leave it later. on_nvme: share of
        the state that is on disk, wherever there is room."""
        self.sim = sim or SimBackend(1)
        policy = AutoPlacement(f"{kib}KiB", *others)
        if released:
            policy = replace(policy, warmup_non_model_data_ratio=0.99)
        self.model = GeminiDDP(
            module or Tower(), self.sim, policy, max_norm=0.5, **SMALL, **options
        )
        self.optimizer = HybridAdam(
            self.model.parameters(), lr=1e-2, nvme=nvme, nvme_offload_fraction=on_nvme
        )
        self.generator = torch.Generator().manual_seed(1)
        self.peaks: list[int] = []

    def ids(self, length: int) -> Tensor:
        return torch.randint(97, (length, 9), generator=self.generator)

    def forward(self, length: int) -> Tensor:
        with self.sim.running():
            return token_loss(self.model, self.ids(length))

    def train(self, *steps: Step) -> Loop:
        for step in steps:
            for length in (step,) if isinstance(step, int) else step:
                ids = self.ids(abs(length))  # there before the forward, so no part of what it asks
                self.sim.pages.peak_device_bytes = 0
                with self.sim.running(), torch.set_grad_enabled(length > 0):
                    if length > 0:
                        token_loss(self.model, ids).backward()
                    else:
                        self.model(ids)
                self.peaks.append(self.sim.peak_device_bytes)
            with self.sim.running():
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.peaks[-1] = max(self.peaks[-1], self.sim.peak_device_bytes)
        self.sim.check()
        return self

    @property
    def moves(self) -> tuple[int, int]:
        moves = self.model.engine.planning.moves
        return moves.num_down, moves.num_up

    def on_device(self) -> int:
        return len(self.model.engine.planning.plan.blocks_on(Tier.DEVICE))


def assert_same(first: Loop, second: Loop) -> None:
    one, two = (bits(loop.model, loop.optimizer) for loop in (first, second))
    assert one["runs"].keys() == two["runs"].keys()
    for name, values in one["runs"].items():
        assert torch.equal(values, two["runs"][name]), name


def drawn(generator: random.Random) -> tuple[list[Step], int, str | None, str]:
    """Steps, budgets of device (KiB) and host, and update mode."""
    count = generator.randint(6, 14)
    kind = generator.choice(("lognormal", "buckets", "bursts", "outlier"))
    if kind == "lognormal":
        lengths = [min(48, max(2, int(generator.lognormvariate(2, 0.9)))) for _ in range(count)]
    elif kind == "buckets":
        lengths = [generator.choice((4, 8, 16, 40)) for _ in range(count)]
    elif kind == "bursts":
        lengths = [40 if i // 3 % 2 else 4 for i in range(count)]
    else:
        lengths = [4] * count
        lengths[generator.randrange(1, count)] = 44
    steps: list[Step] = []
    for length in lengths:
        extra = generator.random()
        if extra < 0.15:
            steps.append((length, generator.choice(lengths)))
        elif extra < 0.25:
            steps.append((-generator.choice(lengths), length))
        else:
            steps.append(length)
    host = generator.choice((None, None, "300KiB", "220KiB", "120KiB", "100KiB"))
    mode = generator.choice(("serial", "tail"))
    fits = 180 + 25.5 * max(lengths)  # the longest fits alone, beside gradients that wait
    return steps, round(fits * generator.choice((1.0, 1.05, 1.1, 1.2))), host, mode


def of_rank(steps: Sequence[Step], rank: int, seed: int) -> list[Step]:
    """The same steps; ranks but the first have lengths of their own, none longer."""
    if not rank:
        return list(steps)
    generator = random.Random(f"{seed} {rank}")
    longest = max(abs(n) for step in steps for n in ((step,) if isinstance(step, int) else step))

    def other(length: int) -> int:
        return min(longest, generator.choice((4, 9, 17, longest))) * (1 if length > 0 else -1)

    return [other(step) if isinstance(step, int) else tuple(map(other, step)) for step in steps]


def fails(seed: int, ranks: int = 1) -> str | None:
    """What is wrong with one drawn program; None: nothing."""
    try:
        if ranks == 1:
            return _fails(0, seed, ranks)
        said = run_ranks(_fails, ranks, seed, ranks)
    except Exception as error:  # of the engine, which is what is looked for
        return f"seed {seed}: {type(error).__name__} {error} in {drawn(random.Random(seed))}"
    return next(filter(None, said), None)


def _fails(rank: int, seed: int, ranks: int) -> str | None:
    generator = random.Random(seed)
    steps, kib, host, mode = drawn(generator)
    with_average = generator.random() < 0.25
    # then parameters begin off the device and may leave it, to files where the host is full
    released = host is not None and generator.random() < 0.5
    steps = of_rank(steps, rank, seed)
    program = f"seed {seed}: {steps} in {kib} KiB, host {host}, {mode}, average {with_average}"
    program += ", released" * released
    free = Loop(1 << 20).train(*steps)
    said_of = set()
    # ranks of a machine share what is given
    host_budget = host and f"{ranks * int(host[:-3])}KiB"
    loop = Loop(ranks * kib, host_budget, update=mode, released=released)
    average = EMA(loop.model) if with_average and host is None else None
    for i, step in enumerate(steps):
        before = len(loop.peaks)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loop.train(step)
            if average is not None:
                with loop.sim.running():
                    average.update()
        lengths = (step,) if isinstance(step, int) else step
        if any(issubclass(warning.category, BudgetWarning) for warning in said):
            said_of.update(abs(length) for length in lengths)
        if len(set(loop.model.engine.comm.gather_objects(loop.model.engine.plan.digest()))) > 1:
            return f"{program}: ranks have different plans after step {i}"
        for length, peak in zip(lengths, loop.peaks[before:], strict=True):
            if peak > kib * KIB and i and abs(length) not in said_of:
                return f"{program}: {peak - kib * KIB} bytes above in step {i}, of {length}"
    try:
        assert_same(loop, free)
    except AssertionError as error:
        return f"{program}: {error} differs"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.loops.lengths")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    asked = parser.parse_args(arguments)
    logging.getLogger("gemini").setLevel(logging.ERROR)
    found = 0
    for seed in range(asked.seed, asked.seed + asked.count):
        said = fails(seed, asked.ranks)
        if said is not None:
            found += 1
            print(said, flush=True)
    print(f"{asked.count} programs of many lengths, {found} failed")
    return int(found > 0)


if __name__ == "__main__":
    raise SystemExit(main())
