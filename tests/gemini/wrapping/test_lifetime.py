"""What is left when a wrapped module goes, and what grows while it trains: nothing."""

import gc
import hashlib
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_processes
from gemini import GeminiDDP
from gemini.runtime.memory.backend import CpuBackend
from optim import HybridAdam, NvmeConfig
from tests.support.checkpoints import train
from tests.support.counting import allocated
from tests.support.spilled import SMALL

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = NvmeConfig(block_numel=4096)
MIB = 2**20


def wrapped(backend="cpu", module=None, folder=None, **options):
    model = GeminiDDP(module or Tower(), backend, **{**SMALL, **options})
    optimizer = HybridAdam(
        model.parameters(),
        nvme_offload_fraction=0.5 if folder else 0.0,
        nvme_offload_dir=folder,
        nvme=BLOCKS,
    )
    return model, optimizer


@pytest.mark.parametrize(
    ("stage", "backend"),
    [("built", "cpu"), ("trained", "sim"), ("after a forward", "cpu"), ("after an error", "sim")],
)
def test_everything_dies_with_the_last_name(backend, stage, tmp_path):
    model, optimizer = wrapped(SimBackend() if backend == "sim" else backend, folder=tmp_path)
    (batch,) = token_batches(1, 1)
    output = None
    if stage == "trained":
        train(model, optimizer, [batch] * 3)
    if stage == "after a forward":
        output = model(batch[0])
    if stage == "after an error":
        model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            token_loss(model, batch[0])
    engine = model.engine
    watched = {
        "wrapper": weakref.ref(model),
        "module": weakref.ref(model.module),
        "engine": weakref.ref(engine),
        "manager": weakref.ref(engine.manager),
        "target": weakref.ref(engine.target),
        "optimizer": weakref.ref(optimizer),
        "parameter": weakref.ref(engine.params[3]),
        "payload": weakref.ref(engine.chunks[0].payload),
        "shard": weakref.ref(engine.chunks[-1].shard),
    }
    del model, optimizer, engine, output
    gc.collect()
    assert [name for name, reference in watched.items() if reference() is not None] == []
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_that_is_kept_keeps_its_values_alone():
    """What the user holds is a view of its chunk: that stays, and the module goes."""
    model, optimizer = wrapped(precision="fp32")
    kept, want = model.head.weight, model.head.weight.detach().clone()
    module = weakref.ref(model.module)
    del model, optimizer
    gc.collect()
    assert module() is None
    assert torch.equal(kept, want)


class Releasing(CpuBackend):
    """The CPU with shards in a pool of their own: payloads are really freed and filled again."""

    has_host_tier = True
    shards_start_on_host = True


def build_and_destroy(index, folder, cycles, closes):
    torch.set_num_threads(1)
    batches = token_batches(2, 1)

    def cycle():
        model, optimizer = wrapped(Releasing(), folder=folder)
        train(model, optimizer, batches)
        if closes:
            optimizer.close()
        del model, optimizer
        gc.collect()

    rows = []
    for _ in range(cycles):
        left = allocated(cycle).left
        for thread in set(threading.enumerate()) - {threading.current_thread()}:
            thread.join(60)  # those of what was dropped end by themselves
        threads, fds = threading.active_count(), psutil.Process().num_fds()
        rows.append((threads, fds, left, len(list(Path(folder).iterdir()))))
    return rows


@pytest.mark.ci
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
def test_engines_leave_no_thread_file_descriptor_or_memory(closes, tmp_path):
    (rows,) = run_processes(build_and_destroy, 1, str(tmp_path), 8, closes)
    threads, fds, left, files = zip(*rows, strict=True)
    assert set(files) == {0}
    assert set(threads) == {1} and fds[-1] == fds[5]
    assert set(left[2:]) == {0}


@pytest.mark.ci
def test_memory_is_flat_after_the_first_steps():
    module = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
    model, optimizer = wrapped(Releasing(), module, min_chunk_size_m=128 * 128 / MIB)
    chunks = model.engine.chunks
    assert len(chunks) == 6

    def steps(number):
        for step in range(number):
            model(torch.randn(4 + step % 2, 128)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            payloads = sum(chunk.payload.untyped_storage().nbytes() for chunk in chunks)
            # what is in use and one prefetched, and not all six
            assert payloads <= 3 * chunks[0].payload.nbytes

    steps(4)
    assert allocated(lambda: steps(6)).left == 0


def digest_of_a_run():
    """Of weights and state after some steps, of the layout and of what was gathered when."""
    torch.set_num_threads(1)
    seen = []
    model, optimizer = wrapped(SimBackend(), max_norm=0.3)
    chunks = {chunk.spec.id: chunk for chunk in model.engine.chunks}
    for chunk in chunks.values():
        chunk.gather = lambda chunk=chunk, gather=chunk.gather: (
            seen.append(chunk.spec.id),
            gather(),
        )
    train(model, optimizer, token_batches(5, 1))
    found = hashlib.sha256(repr((model.engine.layout, seen)).encode())
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    optimizer.targets[0].tiered_state.visit(
        lambda block, planes: [found.update(p.numpy().tobytes()) for p in planes.values()]
    )
    assert len(seen) > 5 * len(chunks)
    return found.hexdigest()


@pytest.mark.ci  # two processes that import torch
def test_bits_do_not_depend_on_the_hash_seed():
    code = (
        "from tests.gemini.wrapping.test_lifetime import digest_of_a_run; print(digest_of_a_run())"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "io")])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        for seed in ("1", "2")
    ]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert outputs[0] == outputs[1] and len(outputs[0].strip()) == 64
