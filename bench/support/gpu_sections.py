"""Sections of `bench.gpu` that train: each writes what it found to NAME.json in a folder.

`--device sim` is the simulated device, with sizes for its interpreter.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from gemini.optim import HybridAdam, NvmeConfig
from gemini.placement.sizes import UNLIMITED
from gemini.placement.tiers import Tier
from gemini.runtime.memory.backend import Backend, make_backend
from gemini.units import BLOCK_NUMEL

Rows = Iterator[tuple[str, Any]]  # names and what was found, as it is found
# of two ranks: the dimensions of their mesh, and of its name
MESHES: dict[str, tuple[tuple[int, int], tuple[str, str]]] = {
    "replicas": ((2, 1), ("replicate", "shard")),
    "shards": ((1, 2), ("replicate", "shard")),
    "split": ((1, 2), ("dp", "tp")),
}


class Stack(nn.Module):
    """Residual square layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Layer(nn.Module):
    """Causal attention and a wide layer over x [batch, time, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        wide = nn.functional.gelu(self.up(self.norms[1](x)))
        out: Tensor = x + self.down(wide)
        return out


class Decoder(nn.Module):
    """A decoder that computes each layer again in backward. ids [batch, time] to [.., words]."""

    def __init__(self, width: int, depth: int, heads: int, words: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


class Runs:
    """Training runs on one device, small where that is simulated."""

    def __init__(self, device: str, out: Path) -> None:
        self.is_real = device == "cuda"
        self.out = out

    def backend(self) -> Backend:
        if self.is_real:
            return make_backend(torch.device("cuda"))
        backend = SimBackend(updates_by_triton=True)
        backend.shards_start_on_host = False
        return backend

    def wrapped(
        self,
        width: int,
        depth: int,
        params: float = 0.0,
        state: float = 0.0,
        *,
        grads: float = 0.0,
        block_numel: int | None = None,
        module: nn.Module | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> tuple[GeminiDDP, HybridAdam]:
        """A stack in chunks of a layer, and its optimizer. `params`, `grads`, `state`: on the host.

        `block_numel`: None is the engine's choice.
        """
        model = GeminiDDP(
            module or Stack(width, depth), self.backend(), StaticPlacement(1.0, state, params),
            min_chunk_size_m=width * (width + 1) / 2**20, **options,
        )  # fmt: skip
        numel = block_numel if self.is_real else 1024
        optimizer = HybridAdam(
            model.parameters(), lr=1e-3, nvme=NvmeConfig(block_numel=numel),
            **optimizer_options or {},
        )  # fmt: skip
        plan = model.engine.planning.plan
        home = Tier.HOST if grads else Tier.DEVICE
        shards = tuple(replace(s, grad_home=home, leaving_bytes=UNLIMITED) for s in plan.shards)
        model.engine.storage.place_gradients(replace(plan, shards=shards), model.engine.chunks)
        return model, optimizer

    def step(self, model: GeminiDDP, optimizer: HybridAdam, width: int, seed: int = 0) -> None:
        x = torch.randn(8, width, generator=torch.Generator().manual_seed(seed))
        x = x.to(model.engine.backend.device)
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def synchronise(self) -> None:
        if self.is_real:
            torch.cuda.synchronize()


KEPT: tuple[tuple[str, float, float, dict[str, Any], dict[str, Any]], ...] = (
    # name, parameters and state on the host, options of the engine, of the optimizer
    ("resident", 0, 0, {}, {}),
    ("state on the host", 0, 1, {}, {}),
    ("state on the host, tail", 0, 1, {"update": "tail"}, {}),
    ("state on the host, in backward", 0, 1, {"update": "speculate"}, {}),
    ("state on the host, in backward, tail", 0, 1, {"update": "both"}, {}),
    ("state on the host, tail, 8 bits", 0, 1, {"update": "tail"}, {"state": "8bit"}),
    ("all on the host", 1, 1, {}, {}),
    ("all on the host, tail", 1, 1, {"update": "tail"}, {}),
    ("all on the host, in backward, tail", 1, 1, {"update": "both"}, {}),
    ("state on NVMe", 0, 0, {}, {"nvme_offload_fraction": 1.0}),
    ("state on NVMe, tail", 0, 0, {"update": "tail"}, {"nvme_offload_fraction": 1.0}),
)


def kept(runs: Runs) -> Rows:
    """Seconds of an iteration with a clip, at some numbers of tokens; and the share of the speed of
    the resident one that each keeps."""
    width, depth, heads, words, time = (
        (2048, 12, 16, 32000, 2048) if runs.is_real else (32, 2, 2, 64, 8)
    )
    rows = (1, 4) if runs.is_real else (1,)
    resident: dict[int, float] = {}
    for name, params, state, engine, given in KEPT:
        model, optimizer = runs.wrapped(
            width, depth, params, state, grads=params, precision="bf16", max_norm=1.0,
            module=Decoder(width, depth, heads, words), optimizer_options=given, **engine,
        )  # fmt: skip
        found = {}
        for batch in rows:
            seconds = min(_iterations(runs, model, optimizer, (batch, time), words))
            first = resident.setdefault(batch, seconds)
            found[f"{batch * time} tokens"] = {"seconds": seconds, "kept": first / seconds}
        yield name, found
        optimizer.close()
        del model, optimizer
        gc.collect()


def _iterations(
    runs: Runs, model: GeminiDDP, optimizer: HybridAdam, shape: tuple[int, int], words: int
) -> Iterator[float]:
    """Seconds of three, behind two that nobody looks at; a tail is of the iteration behind it."""
    for turn in range(5 if runs.is_real else 2):
        ids = torch.randint(words, shape, generator=torch.Generator().manual_seed(turn))
        ids = ids.to(model.engine.backend.device)
        if turn < 2:
            runs.synchronise()
        started = time.perf_counter()
        logits = model(ids)
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        # all but what a tail still does, which the next forward waits for
        logits.flatten()[0].item()
        if turn > 1 or not runs.is_real:
            yield time.perf_counter() - started


def places(runs: Runs) -> Rows:
    """Whether bits of weights and state are those of the resident run, wherever they live."""
    width = 515 if runs.is_real else 35
    want: dict[str, Tensor] = {}
    others = []
    for params, grads, state in itertools.product((0.0, 1.0), repeat=3):
        for precision, master, update in (
            ("bf16", True, "serial"), ("fp32", True, "serial"), ("bf16", False, "serial"),
            *((("bf16", True, "tail"),) if state else ()),
        ):  # fmt: skip
            model, optimizer = runs.wrapped(
                width, 3, params, state, grads=grads, precision=precision, master_weights=master,
                max_norm=0.1, update=update,
            )  # fmt: skip
            for step in range(3):
                runs.step(model, optimizer, width, step)
            got = torch.cat([v.float().flatten().cpu() for v in model.state_dict().values()])
            name = f"{precision}{'' if master else ' without master'}"
            first = want.setdefault(name, got)
            homes = f"parameters {params:g}, gradients {grads:g}, state {state:g} on the host"
            is_same = torch.equal(got, first)
            yield f"{name}, {homes}, {update}", is_same
            if not is_same:
                others.append(f"{name}, {homes}, {update}")
    assert not others, others


def ahead(runs: Runs) -> Rows:
    """Memory that the allocator takes while the host runs ahead of the device."""
    width, depth = (4096, 48) if runs.is_real else (35, 4)
    model, optimizer = runs.wrapped(width, depth, params=1.0)
    runs.step(model, optimizer, width)
    if not runs.is_real:
        backend = model.engine.backend
        assert isinstance(backend, SimBackend)
        yield "peak_device_bytes", backend.peak_device_bytes
        return
    torch.cuda.reset_peak_memory_stats()
    runs.step(model, optimizer, width)
    runs.synchronise()
    yield "allocated", torch.cuda.max_memory_allocated()
    yield "reserved", torch.cuda.max_memory_reserved()
    yield "payload", model.engine.chunks[0].payload.nbytes
    yield "payloads", len(model.engine.chunks)


def stream(runs: Runs) -> Rows:
    """Seconds of a step per 1e9 parameters, by what the host has and by block, with traces."""
    width, depth = (8192, 14) if runs.is_real else (35, 3)
    for name, params, grads, state, block_numel in (
        ("resident", 0, 0, 0, None),
        ("state", 0, 0, 1, None),
        ("state in small blocks", 0, 0, 1, BLOCK_NUMEL),
        ("state and params", 1, 0, 1, None),
        ("all", 1, 1, 1, None),
    ):
        model, optimizer = runs.wrapped(
            width, depth, params, state, grads=grads, block_numel=block_numel
        )
        numel = sum(chunk.spec.shard_numel for chunk in model.engine.chunks)
        runs.step(model, optimizer, width)
        seconds = []
        for turn in range(3):
            x = torch.randn(8, width, device=model.engine.backend.device)
            model(x).float().pow(2).mean().backward()
            runs.synchronise()
            started = time.perf_counter()
            if turn == 2 and runs.is_real:
                with torch.profiler.profile() as profile:
                    optimizer.step()
                    runs.synchronise()
                profile.export_chrome_trace(str(runs.out / f"stream-{name}.trace.json.gz"))
            else:
                optimizer.step()
                runs.synchronise()
                seconds.append(time.perf_counter() - started)
            optimizer.zero_grad()
        yield name, {"seconds_per_1e9": min(seconds) * 1e9 / numel, "numel": numel}
        optimizer.close()
        del model, optimizer


def window(runs: Runs) -> Rows:
    """Seconds that the host is in `step()`, and in all of an iteration, by number of blocks. A tail
    that has a window returns as early with many blocks as with few."""
    width, depths = (2048, (8, 32, 128)) if runs.is_real else (35, (3, 6))
    for update, depth in itertools.product(("serial", "tail", "both"), depths):
        model, optimizer = runs.wrapped(
            width, depth, state=1, grads=1, block_numel=BLOCK_NUMEL, update=update, max_norm=1.0
        )
        blocks = sum(len(sizes.blocks) for sizes in model.engine.planning.plan.chunks)
        found: list[tuple[float, float]] = []
        for turn in range(5 if runs.is_real else 2):
            x = torch.randn(8, width, device=model.engine.backend.device)
            runs.synchronise()
            started = time.perf_counter()
            model(x).float().pow(2).mean().backward()
            begun = time.perf_counter()
            optimizer.step()
            returned = time.perf_counter()
            optimizer.zero_grad()
            runs.synchronise()
            if turn > 1 or not runs.is_real:
                found.append((returned - begun, time.perf_counter() - started))
        host, whole = map(min, zip(*found, strict=True))
        yield f"{update}, {blocks} blocks", {"step() of the host": host, "iteration": whole}
        optimizer.close()
        del model, optimizer


def races(runs: Runs) -> Rows:
    """What the user writes is kept, while the device is behind; a NaN shows."""
    width = 2051 if runs.is_real else 35
    model, optimizer = runs.wrapped(width, 3, params=1.0, state=1.0)
    runs.step(model, optimizer, width)
    with torch.no_grad(), model.summon_full_params():
        for param in model.module.parameters():
            param.fill_(0.5)
    values = model.state_dict().values()
    found = {"written": all(bool((value == 0.5).all()) for value in values)}
    digest = model.digest()
    runs.step(model, optimizer, width)
    found["digest changes"] = model.digest() != digest
    first = next(model.module.parameters())
    hook = first.register_hook(lambda grad: grad * float("nan"))
    runs.step(model, optimizer, width)
    hook.remove()
    report = optimizer.last_report
    found["skipped"] = report is not None and report.skipped
    yield from found.items()
    assert all(found.values()), found


def ranks(runs: Runs) -> Rows:
    """Two ranks over gloo, on one GPU where there is one: as far from one rank as rounding goes.

    Without a mesh, parameters on either side; with meshes of replicas, of shards, and of torch's
    tensor parallelism.
    """
    alone = _of_rank(runs, 0.0, None)
    together = run_ranks(_of_all, 2, runs, processes=True)[0]
    found = {name: float((moved - alone).norm() / alone.norm()) for name, moved in together.items()}
    yield "relative difference", found
    assert max(found.values()) < 1e-4, found


def _of_all(rank: int, runs: Runs) -> dict[str, Tensor]:
    found = {f"parameters {params:g} on the host": _of_rank(runs, params, None)
             for params in (0.0, 1.0)}  # fmt: skip
    return found | {f"mesh of {name}": _of_rank(runs, 0.0, name) for name in MESHES}


def _of_rank(runs: Runs, params: float, mesh_name: str | None) -> Tensor:
    """How far training moved the weights, on rank 0; every rank has the same batch."""
    width = 515 if runs.is_real else 35
    options: dict[str, Any] = {}
    if mesh_name is not None:
        shape, names = MESHES[mesh_name]
        mesh = init_device_mesh("cuda" if runs.is_real else "cpu", shape, mesh_dim_names=names)
        module: nn.Module = Stack(width, 3)
        if mesh_name == "split":
            whole = ColwiseParallel(output_layouts=Replicate())
            plan: dict[str, ParallelStyle] = {f"layers.{i}": whole for i in range(3)}
            module = parallelize_module(module, mesh["tp"], plan)
        options = {"mesh": mesh, "module": module}
    model, optimizer = runs.wrapped(width, 3, params, precision="fp32", **options)
    start = model.state_dict()
    for step in range(2):
        runs.step(model, optimizer, width, step)
    moved = model.state_dict()
    return torch.cat([(moved[n] - start[n]).double().flatten().cpu() for n in start] or
                     [torch.zeros(0)])  # fmt: skip


SECTIONS: dict[str, Callable[[Runs], Rows]] = {
    section.__name__: section for section in (kept, places, ahead, stream, window, races, ranks)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=list(SECTIONS))
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = {}
    for name, value in SECTIONS[args.name](Runs(args.device, args.out)):
        found[name] = value
        print(f"{name}: {value}", flush=True)
        (args.out / f"{args.name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
