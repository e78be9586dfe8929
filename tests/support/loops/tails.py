"""Wrapped modules with state on disk, stepped serially or with a tail, and schedules for both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP, StaticPlacement
from gemini.tickets import Done
from optim import HybridAdam, LossScale, NvmeConfig
from optim.update.triton_update import TritonUpdater
from optim.update.updaters import CpuUpdater
from tests.support.disks.waiting import when_waited

SMALL = {"min_chunk_size_m": 0.004}  # 4194 elements: several chunks
PRECISIONS = {
    "bf16": {},
    "fp32": {"precision": "fp32"},  # no masters: what undoes a step goes to disk with it
    "rounded": {"master_weights": False},
    "fp16": {  # another scale behind every step
        "precision": "fp16",
        "loss_scale": LossScale(initial_scale=2.0**10, growth_interval=1),
    },
    "clipped": {"max_norm": 0.1},
}
BLOCK = 2048  # masters of such a block are split on disk; those of a chunk's last one may be whole


def wrapped(
    update: str,
    fraction: float = 1.0,
    module: Any = None,
    folder: Any = None,
    nvme: NvmeConfig | None = None,
    state: str = "fp32",
    **options: Any,
) -> tuple[Any, Any]:
    if not isinstance(module, nn.Module):  # what makes one
        module = (module or Tower)()
    model = GeminiDDP(module, update=update, **{**SMALL, **options})
    optimizer = HybridAdam(
        model.parameters(),
        lr=1e-2,
        eps=1e-3,
        weight_decay=0.01,
        nvme_offload_fraction=fraction,
        nvme_offload_dir=folder,
        nvme=nvme or NvmeConfig(block_numel=BLOCK),
        state=state,
    )
    return model, optimizer


def on_host(
    path: str, *, params: float = 0.0, grads: bool = False, state: float = 1.0, disk: float = 0.0
) -> dict[str, Any]:
    """Options of `wrapped`: state in host memory beside a simulated device, updated by that where
    it is to `"stream"`, or by the host's `"cpu"`. params: the share of these that is there, too;
    grads: whether those are. disk: of the share `state` that is not on the device, so much of all
    is on NVMe."""
    device = SimBackend(3, updates_by_triton=path == "stream")
    device.shards_start_on_host = False
    policy = StaticPlacement(1.0, state, params, offload_grads=grads)
    return {"device": device, "placement_policy": policy, "fraction": disk}


class HeldUpdates:
    """Updates of blocks in host memory, which do not begin before a test says so."""

    def __init__(self, fails_at: int | None) -> None:
        self._changed = threading.Condition()
        self._free: Callable[[int], bool] = lambda shard: fails_at is not None
        self._fails_at, self._count = fails_at, 0

    def go_on(self, but: int | None = None) -> None:
        """All, or all but those of one shard."""
        self._let(lambda shard: shard != but)

    def hold(self) -> None:
        """Those to come wait again."""
        self._let(lambda shard: False)

    def _let(self, free: Callable[[int], bool]) -> None:
        with self._changed:
            self._free = free
            self._changed.notify_all()

    def begin(self, block: Any) -> None:
        self._count += 1
        if self._fails_at is not None and self._count > self._fails_at:
            raise MemoryError("no room")
        with self._changed:
            self._changed.wait_for(lambda: self._free(block.shard))


@contextmanager
def held_updates(fails_at: int | None = None) -> Iterator[HeldUpdates]:
    """They wait for `go_on`. fails_at: none waits, and the one behind so many fails."""
    found = HeldUpdates(fails_at)

    def held(updates: Any) -> Any:
        def update_block(self: Any, block: Any, *args: Any) -> Any:
            found.begin(block)
            return updates(self, block, *args)

        return update_block

    with (
        mock.patch.object(CpuUpdater, "update_block", held(CpuUpdater.update_block)),
        mock.patch.object(TritonUpdater, "update_block", held(TritonUpdater.update_block)),
    ):
        try:
            yield found
        finally:
            found.go_on()


def late_updates(model: Any, optimizer: Any, count: int = 4) -> Iterator[None]:
    """Yields behind every step. Behind all but the first, updates begin when somebody waits for
    them: a forward that does not computes with weights of before."""
    with held_updates() as held:
        held.go_on()
        for step, batch in enumerate(batches(count)):
            with when_waited(held.go_on):
                loss = token_loss(model, batch)
            held.go_on()
            loss.backward()
            if step:
                held.hold()
            optimizer.step()
            optimizer.zero_grad()
            yield


def state_of(visit: Callable[[Callable[[Any], None]], object]) -> dict[str, Tensor]:
    """What is shown run by run, each plane of a parameter as one: runs are as homes have them."""
    runs: dict[str, dict[int, Tensor]] = {}  # by first element

    def keep(run: Any) -> None:
        runs.setdefault(f"{run.name}/{run.plane}", {})[run.start] = run.values.clone().flatten()

    visit(keep)
    return {
        f"{name}/{min(parts)}": torch.cat([parts[start] for start in sorted(parts)])
        for name, parts in runs.items()
    }


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """This rank's state, whole weights, and what is counted. Collective."""
    found: dict[str, Any] = state_of(optimizer.visit_state)
    with model.summon_full_params(writeback=False):
        found |= {name: p.detach().clone() for name, p in model.module.named_parameters()}
    counts = [float(count) for count in optimizer.targets[0].step_counts]
    return {**found, "steps": counts, "counters": optimizer.targets[0].counters.state_dict()}


def differences(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Names of what is not the same, bit for bit."""
    assert got.keys() == want.keys()
    return [
        name
        for name, value in want.items()
        if not (torch.equal(got[name], value) if isinstance(value, Tensor) else got[name] == value)
    ]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def batches(count: int, parts: int = 2) -> list[Tensor]:
    """Of this rank, one for each step."""
    return [batch[rank()] for batch in token_batches(count, parts)]


def has_tail(optimizer: Any) -> bool:
    """Whether the last step had one."""
    return not isinstance(optimizer.last_report.behind, Done)


def one_step(model: Any, optimizer: Any, batch: Tensor) -> None:
    token_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def stepped(update: str, steps: int, **options: Any) -> tuple[Any, Any]:
    """A pair behind so many steps, which count."""
    model, optimizer = wrapped(update, **options)
    for batch in batches(steps):
        one_step(model, optimizer, batch)
    everything(model, optimizer)
    return model, optimizer


# -- schedules: each yields behind every step --


def plain(model: Any, optimizer: Any) -> Iterator[None]:
    for batch in batches(4):
        one_step(model, optimizer, batch)
        yield


def clips(model: Any, optimizer: Any) -> Iterator[None]:
    """In every step, to less than its norm."""
    for batch in batches(4):
        token_loss(model, batch).backward()
        assert float(optimizer.clip_grad_norm_(0.1)) > 0.1
        optimizer.step()
        optimizer.zero_grad()
        yield


def skips(model: Any, optimizer: Any) -> Iterator[None]:
    """One of three steps."""
    for step, batch in enumerate(batches(6)):
        handle = None
        if step % 3 == 1:
            weight = model.module.get_parameter("layers.1.1.weight")
            handle = weight.register_hook(lambda grad: grad * float("nan"))
        token_loss(model, batch).backward()
        if handle is not None:
            handle.remove()
        optimizer.step()
        assert optimizer.last_report.skipped == (step % 3 == 1)
        optimizer.zero_grad()
        yield


def accumulates(model: Any, optimizer: Any) -> Iterator[None]:
    """Three backwards a step, of which two reduce nothing."""
    for step, batch in enumerate(batches(9)):
        if step % 3 < 2:
            with model.no_sync():
                token_loss(model, batch).backward()
            continue
        token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def keeps_gradients(model: Any, optimizer: Any) -> Iterator[None]:
    """They are made zeros, or stay and are added to, while a step still reads them."""
    for step, batch in enumerate(batches(6)):
        token_loss(model, batch).backward()
        optimizer.step()
        if step % 3 == 0:
            optimizer.zero_grad(set_to_none=False)
        elif step % 3 == 1:
            for param in model.parameters():
                param.grad.mul_(0.5)
        yield


def absent(model: Any, optimizer: Any, first: int = 0) -> Iterator[None]:
    """Another head in every step, of `Choosy`; from step `first` on."""
    generator = torch.Generator().manual_seed(rank())
    for step, x in enumerate([torch.randn(4, 5, generator=generator) for _ in range(6)]):
        if step < first:
            continue
        model(x, step % 3).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def evaluates(model: Any, optimizer: Any) -> Iterator[None]:
    """Between steps; and two forwards before one backward."""
    for batch in batches(4):
        with torch.no_grad():
            before = token_loss(model, batch)
        loss = token_loss(model, batch) + token_loss(model, batch)
        assert torch.equal(before + before, loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def schedules_rates(model: Any, optimizer: Any) -> Iterator[None]:
    """Hyperparameters change as soon as a step has returned."""
    for step, batch in enumerate(batches(4)):
        token_loss(model, batch).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 2)
        optimizer.param_groups[0]["weight_decay"] = 0.02 * step
        optimizer.zero_grad()
        yield


def writes(model: Any, optimizer: Any) -> Iterator[None]:
    """The user changes weights behind a step, in place and by `.data`."""
    for step, batch in enumerate(batches(4)):
        one_step(model, optimizer, batch)
        weight = model.module.get_parameter("layers.2.1.weight")
        with torch.no_grad():
            weight.mul_(1 + step / 8) if step % 2 else weight.data.mul_(0.75)
        yield


Schedule = Callable[[Any, Any], Iterator[None]]
SCHEDULES: dict[str, Schedule] = {
    f.__name__: f
    for f in (
        plain, clips, skips, accumulates, keeps_gradients, evaluates, schedules_rates, writes
    )
}  # fmt: skip


@contextmanager
def run(schedule: Schedule, update: str, **options: Any) -> Iterator[tuple[Any, Any, list[bool]]]:
    """Carry a schedule out; the pair, and which of its steps had a tail."""
    model, optimizer = wrapped(update, **options)
    tails = [has_tail(optimizer) for _ in schedule(model, optimizer)]
    try:
        yield model, optimizer, tails
    finally:
        optimizer.close()
