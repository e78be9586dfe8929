"""Programs of steps that overlap a pass, drawn at random, on the simulated device: every `update=`,
in every home, with disks that fail.

    python -m tests.support.loops.overlaps --count 1000 [--seed 0] [--ranks 2]

A program says where model data is, how a step clips, and what comes between backwards and steps. It
ends with the bits of a serial step whose state is on the device, and whose disk does not fail: a
step that is undone is taken again. What differs is kept in tests/corpus/overlaps, for tests to run.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from gemini.placement.tiers import Tier
from gemini.placement.timetable.updates import ASKED, SERIAL
from nvme import NvmeError
from optim import HybridAdam, NvmeConfig
from tests.support import corpus
from tests.support.device.placed import batch, device, place_gradients
from tests.support.disks.faults import failing
from tests.support.loops.tails import differences, everything, rank

AREA = "overlaps"
TOGETHER = 5  # programs of one set of ranks
TRIES = 3  # of a step: one transfer fails, and one that was begun behind it may have failed too
AFTER = ("", "", "", "gradient", "weight", "saved", "evaluated", "rate")

Program = dict[str, Any]  # of JSON's types


class Stopped(RuntimeError):
    """What a program raises in a backward."""


class Layer(nn.Module):
    """A matrix of an odd size, of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(33, 33)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(x))


def draw(rng: random.Random) -> Program:
    """A program of some steps."""
    on_disk = rng.choice([0.0, 0.5, 0.5, 1.0])
    steps = []
    for _ in range(rng.randint(2, 4)):
        fault = None
        if on_disk and rng.random() < 0.35:
            fault = [rng.choice(["pwritev", "pwritev", "preadv"]), rng.randrange(12)]
        steps.append({
            "backwards": rng.choice([1, 1, 1, 2]), "no_sync": rng.random() < 0.2,
            "stops": rng.random() < 0.1, "overflows": rng.random() < 0.1,
            "after": rng.choice(AFTER), "fault": fault, "fails_on": rng.randrange(2),
        })  # fmt: skip
    return {
        "update": rng.choice(ASKED), "params": rng.random() < 0.5, "grads": rng.random() < 0.3,
        "on_disk": on_disk, "precision": rng.choice(["bf16", "bf16", "fp32", "fp16"]),
        "max_norm": rng.choice([0.0, 0.0, 1e-3, 1e6]), "steps": steps,
    }  # fmt: skip


@contextmanager
def training(program: Program, *, as_serial: bool) -> Iterator[tuple[Any, Any]]:
    """A wrapped module and its optimizer, where a program has them, or as it is compared with."""
    backend = device(by_triton=True)
    torch.manual_seed(0)
    params, grads, disk = program["params"], program["grads"], program["on_disk"]
    if as_serial:
        params = grads = disk = 0
    model = GeminiDDP(
        nn.Sequential(Layer(), Layer(), Layer()), backend,
        StaticPlacement(1.0, float(not as_serial), float(params)),
        update=SERIAL if as_serial else program["update"], precision=program["precision"],
        max_norm=program["max_norm"], min_chunk_size_m=1100 / 2**20,
    )  # fmt: skip
    optimizer = HybridAdam(
        model.parameters(), lr=1e-2, eps=1e-3, nvme_offload_fraction=disk,
        nvme=NvmeConfig(block_numel=1024),
    )  # fmt: skip
    if grads:
        place_gradients(model, Tier.HOST)
    try:
        yield model, optimizer
        backend.check()
    finally:
        optimizer.close(keep_masters=False)


def backward(model: Any, number: int, scale: float = 1.0) -> None:
    (model(batch(number)).float().pow(2).mean() * scale).backward()


def _stop(grad: Tensor) -> None:
    raise Stopped


def _take(optimizer: Any, fault: Any, fails_on: int, *, may_fail: bool) -> int:
    """Take a step, again where a disk has undone it. Returns how often it was undone.

    may_fail: a transfer fails here, or one that a step before has read ahead did.
    """
    for tries in range(TRIES):
        fails = nullcontext()
        is_first = fault is not None and tries == 0
        if is_first and rank() == fails_on % (
            dist.get_world_size() if dist.is_initialized() else 1
        ):
            call, after = fault
            store = optimizer.targets[0].tiered_state.nvme.store
            # and no page of the index: a step whose index is not written counts, and no later one
            fails = failing(
                call, errno.EIO, store.paths[0].name, after=after, times=1,
                behind=store.layout.blocks_offset(0),
            )  # fmt: skip
        try:
            with fails:
                optimizer.step()
                if may_fail:
                    optimizer.targets[0].settle()
            return tries
        except (NvmeError, RuntimeError):
            if not may_fail:
                raise
    raise AssertionError(f"a step failed {TRIES} times, and one transfer was made to fail")


def _between(model: Any, optimizer: Any, after: str, number: int) -> None:
    """What comes between the last backward of a step and the step."""
    if after == "gradient":
        grad = model.module[1].a.weight.grad
        if grad is not None:
            grad.mul_(0.5)
    elif after == "weight":
        with torch.no_grad():
            model.module[0].a.bias.add_(0.25)
    elif after == "saved":
        optimizer.state_dict()
    elif after == "rate":
        optimizer.param_groups[0]["lr"] = 1e-2 / (number + 2)


def carried_out(program: Program, *, as_serial: bool = False) -> tuple[dict[str, Any], int]:
    """All that a program ends with on this rank, and how many of its steps were undone."""
    undone, has_failed = 0, False
    with training(program, as_serial=as_serial) as (model, optimizer):
        for number, step in enumerate(program["steps"]):
            if step["stops"]:
                hook = model.module[0].a.weight.register_hook(_stop)
                with contextlib.suppress(Stopped):
                    backward(model, 10 * number + 7)
                hook.remove()
                optimizer.zero_grad()
            for i in range(step["backwards"]):
                is_last = i + 1 == step["backwards"]
                apart = model.no_sync() if step["no_sync"] and not is_last else nullcontext()
                overflows = step["overflows"] and is_last and program["precision"] == "fp16"
                with apart:
                    backward(model, 10 * number + i, float("inf") if overflows else 1.0)
            _between(model, optimizer, step["after"], number)
            fault = None if as_serial else step["fault"]
            has_failed |= fault is not None
            undone += _take(optimizer, fault, step["fails_on"], may_fail=has_failed)
            optimizer.zero_grad()
            if step["after"] == "evaluated":
                with torch.no_grad():
                    model(batch(number))
        return everything(model, optimizer), undone


def is_wrong(program: Program) -> str | None:
    """What is not as it is in serial steps, or None. Collective."""
    try:
        found, _ = carried_out(program)
        names = differences(found, carried_out(program, as_serial=True)[0])
    except AssertionError as error:
        return f"AssertionError: {error}"
    return f"differs in {names}" if names else None


def run_many(rank: int, seed: int, count: int) -> list[tuple[int, str]]:
    """Programs `seed` to `seed + count`: the numbers of those that are wrong, and why."""
    torch.set_num_threads(1)
    said = [(number, is_wrong(draw(random.Random(number)))) for number in range(seed, seed + count)]
    return [(number, wrong) for number, wrong in said if wrong]


def run_found(rank: int, programs: Sequence[Program]) -> list[str | None]:
    """What is wrong with each of these, on a rank."""
    torch.set_num_threads(1)
    return [is_wrong(program) for program in programs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    wrong: dict[int, str] = {}
    for seed in range(args.seed, args.seed + args.count, TOGETHER):
        count = min(TOGETHER, args.seed + args.count - seed)
        if args.ranks == 1:
            found = dict(run_many(0, seed, count))
        else:
            on_ranks = run_ranks(run_many, args.ranks, seed, count, processes=True)
            found = {number: why for said in on_ranks for number, why in said}
        for number, why in found.items():
            kept = corpus.keep(AREA, {"ranks": args.ranks, "program": draw(random.Random(number))})
            print(f"program {number}: {why}; kept in {kept}")
        wrong |= found
        print(f"{seed + count}: {len(wrong)} wrong", flush=True)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
