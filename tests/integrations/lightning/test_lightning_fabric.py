"""GeminiFabricStrategy beside Lightning's own DDP, at 1, 2 and 4 ranks in the same processes.

In fp32 they differ by the order of sums in reductions and norms: 1e-5, relative.
"""

import functools
import os
import tempfile

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")

from lightning.fabric import Fabric

from bench.shared.workers import run_ranks
from gemini.integrations.lightning import GeminiFabricStrategy
from gemini.integrations.lightning.shared import REGISTERED
from tests.integrations.cases.lightning_runs import ADAM, SMALL, as_torchrun, close, loader
from tests.support.said import said

pytestmark = pytest.mark.ci

FOUR = ("value", "zero2", "zero1, gathered late")
STEPS, SAVED_AT, ACCUMULATE = 4, 2, 2


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 37), nn.Tanh(), nn.Linear(37, 31), nn.Tanh(), nn.Linear(31, 5)
    )


def ours(name=None, **options):
    return GeminiFabricStrategy(**{**SMALL, **REGISTERED[name or "gemini"], **options})


def begun(strategy, **options):
    devices = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, **options)
    fabric.launch()
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAM)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    wrapped, optimizer = fabric.setup(module, optimizer)
    data = fabric.setup_dataloaders(loader())
    state = {"model": wrapped, "optimizer": optimizer, "schedule": schedule, "step": 0}
    return fabric, state, data


def trained(strategy, clip, path=None, resume=None, **options):
    """Losses, norms and rates of a loop that accumulates."""
    fabric, state, data = begun(strategy, **options)
    if resume is not None:
        assert fabric.load(resume, state) == {}
    batches, found = iter(data), []
    for _ in range(2 * state["step"]):
        next(batches)
    while state["step"] < STEPS:
        for i in range(ACCUMULATE):
            x, y, _ = next(batches)
            with fabric.no_backward_sync(state["model"], enabled=i + 1 < ACCUMULATE):
                loss = nn.functional.mse_loss(state["model"](x), y) / ACCUMULATE
                fabric.backward(loss)
            found.append(loss.item())
        norm = fabric.clip_gradients(state["model"], state["optimizer"], **clip)
        found += [] if norm is None else [float(norm)]
        found.append(state["optimizer"].param_groups[0]["lr"])
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["schedule"].step()
        state["step"] += 1
        if path is not None and state["step"] == SAVED_AT:
            fabric.save(path, state)
    return found


LATE = {"overlap_allgather": True, "communication_dtype": "fp32"}
NORM, VALUE = {"max_norm": 0.3}, {"clip_val": 0.02}
CASES = {
    "norm": (lambda: ours(), NORM),
    "value": (lambda: ours(), VALUE),
    "state on disk": (lambda: ours("gemini_nvme"), NORM),
    "zero1": (lambda: ours("zero1"), NORM),
    "zero2": (lambda: ours("zero2"), NORM),
    "zero1, gathered late": (lambda: ours("zero1", **LATE), NORM),
    "zero2, gathered late": (lambda: ours("zero2", **LATE), VALUE),
}


def work(rank, folder):
    as_torchrun(rank)
    found = {}
    two = torch.distributed.get_world_size() == 2
    for case, (make, clip) in CASES.items():
        if two or case in FOUR:
            found[case] = trained("ddp", clip), trained(make(), clip)
    if not two:
        return found
    for name, option in (("bf16-mixed", None), (None, "fp16")):
        chosen = ours(**({"precision": option} if option else {}))
        found[name or option] = found["norm"][0], trained(chosen, NORM, precision=name)
    savers = {"ddp": lambda: "ddp", "full": lambda: ours(checkpoint="full"), "sharded": ours}
    for saver, make in savers.items():
        path = f"{folder}/{torch.distributed.get_world_size()}.{saver}"
        found[f"{saver} saves"] = trained(make(), NORM, path=path)
        takers = ("full",) if saver == "sharded" else ("ddp", "sharded")
        for taker in takers:
            found[taker, saver] = trained(savers[taker](), NORM, resume=path)
    return found


@functools.cache
def results(world_size):
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(work, world_size, folder, processes=True)


@pytest.mark.parametrize(
    ("world_size", "case"), [*((2, case) for case in CASES), *((4, case) for case in FOUR)]
)
def test_losses_norms_and_rates_are_those_of_ddp(world_size, case):
    for want, got in (rank[case] for rank in results(world_size)):
        close(got, want)


@pytest.mark.parametrize("case", ["bf16-mixed", "fp16"])
def test_16_bits_train_as_fp32_does_to_their_precision(case):
    """2**-8 of a weight in bf16, through three layers."""
    for want, got in (rank[case] for rank in results(2)):
        close(got, want, rtol=0.02)
        assert got != want


def test_a_loop_goes_on_from_what_any_of_them_saved():
    for found in results(2):
        whole = found["ddp saves"]
        later = whole[len(whole) * SAVED_AT // STEPS :]
        pairs = [key for key in found if isinstance(key, tuple)]
        assert len(pairs) == 5
        for pair in pairs:
            close(found[pair], later)


def refused(rank, folder):
    """What is said to calls that cannot be done."""
    as_torchrun(rank)
    fabric, state, _ = begun(ours())
    _, other, _ = begun(ours())
    calls = [
        lambda: fabric.save(f"{folder}/a", {"a": state["model"], "b": other["model"]}),
        lambda: fabric.save(f"{folder}/b", state, filter={"model": lambda *_: True}),
        lambda: fabric.save(f"{folder}/c", state),
        lambda: fabric.load(f"{folder}/c"),
        lambda: fabric.load(f"{folder}/c", {**state, "more": 1}),
        lambda: ours(module=1),
    ]
    return [said(call) for call in calls]


def test_what_a_folder_cannot_hold_is_refused(tmp_path):
    for two, filtered, saved, nothing, more, option in run_ranks(
        refused, 2, str(tmp_path), processes=True
    ):
        assert "a, b: a sharded checkpoint holds one model" in two
        assert 'strategy with checkpoint="full"' in filtered
        assert saved == "" and "expected the model that takes it" in nothing
        assert "contains a key 'more'" in more
        assert "module= is the strategy's own" in option
