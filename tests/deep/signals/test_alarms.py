"""Time-outs by SIGALRM at random, in whatever is called: later calls work, and no bit is lost."""

import itertools
import random
import signal
import time
from typing import Any

import pytest
import torch

import optim
from gemini import GeminiDDP, save_checkpoint
from gemini.checkpoint import CheckpointError
from optim import NvmeConfig
from tests.support.loops.sides import SMALL, Net, loss_of
from tests.support.loops.tails import differences, everything

pytestmark = pytest.mark.timeout(0)
SECONDS = 22  # of one life
CHECKED = 20  # calls between two looks at everything
ADAM: dict[str, Any] = {"lr": 0.1, "eps": 1.0}
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "adam": (optim.HybridAdam, ADAM, {}),
    "8-bit": (optim.HybridAdam, {**ADAM, "state": "8bit"}, {}),
    "kept versions": (optim.HybridAdam, ADAM, {"keep_versions": 3}),
    "lamb": (optim.HybridLamb, {"lr": 0.01}, {}),
    "adafactor": (optim.HybridAdafactor, {"lr": 0.01}, {}),
    "muon": (optim.HybridMuon, {"lr": 0.01}, {}),
}


class TimeIsUp(TimeoutError):
    """What the handler raises."""


def time_is_up(number: int, frame: Any) -> None:
    raise TimeIsUp


def again(call: Any) -> Any:
    """`call()`, as often as a tail that ends late, or a late alarm, interrupts it."""
    while True:
        try:
            return call()
        except TimeIsUp:
            continue


def made(kind: str, update: str) -> tuple[Any, Any]:
    make, options, disk = KINDS[kind]
    model = GeminiDDP(Net(), precision="bf16", update=update, **SMALL)
    params = model if make is optim.HybridMuon else model.parameters()
    nvme = NvmeConfig(block_numel=1024, **disk)
    optimizer = make(params, **options, nvme_offload_fraction=1.0, nvme=nvme)
    return model, optimizer


def count(optimizer: Any) -> int:
    return int(optimizer.targets[0].step_counts[0])


def step(model: Any, optimizer: Any) -> None:
    loss_of(model, count(optimizer) % 50).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "update"),
    [
        *itertools.product(KINDS, ["serial"]),
        *itertools.product(["adam", "8-bit", "kept versions"], ["tail"]),
    ],
)
def test_a_life_of_random_alarms_has_the_bits_of_no_alarm(kind, update, tmp_path):
    rng, before = random.Random(f"{kind} {update}"), signal.signal(signal.SIGALRM, time_is_up)
    (model, optimizer), alone = made(kind, update), made(kind, "serial")
    calls = [
        *[lambda: step(model, optimizer)] * 4,
        model.state_dict, optimizer.state_dict, model.digest,
        lambda: [float(p.detach().float().sum()) for p in model.parameters()],
        lambda: save_checkpoint(tmp_path / "saved", model, optimizer),
    ]  # fmt: skip
    num_calls, num_came, end = 0, 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        num_calls += 1
        try:
            signal.setitimer(signal.ITIMER_REAL, 10 ** rng.uniform(-5, -1.7))
            rng.choice(calls)()
        except (TimeIsUp, CheckpointError):
            num_came += 1
        again(lambda: signal.setitimer(signal.ITIMER_REAL, 0))
        # torch's own `no_grad`, where an exception came between it and its body
        again(lambda: torch.set_grad_enabled(True))
        again(optimizer.zero_grad)
        if num_calls % CHECKED == 0:
            got = again(lambda: everything(model, optimizer))
            while count(alone[1]) < count(optimizer):
                step(*alone)
            assert differences(got, everything(*alone)) == []
    signal.signal(signal.SIGALRM, before)
    assert num_came > num_calls / 10
    optimizer.close(), alone[1].close()
