"""One rank of one row of `bench.train`, in a process of its own.

    python -m bench.rows.worker JOB.json
    python -m bench.rows.worker --prepare PEER     # import it, compile what it compiles

It answers with one line of JSON on stdout when it is ready, and to every line it reads: `step`
trains one step; `settle` waits until nothing of it is under way; `finish` says what was measured,
and ends it. So does the end of its input: whoever started it is gone. What the packages print goes
to stderr.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from bench.rows.job import Job, Trainer

PACKAGES = ("torch", "transformers", "deepspeed")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if sys.argv[1] == "--prepare":
        found = prepare(sys.argv[2])
        print(json.dumps(found), file=answers, flush=True)
    else:
        serve(Job.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")), answers)


def prepare(peer_name: str) -> dict[str, Any]:
    """Import the peer and let it compile. Raises what it raises."""
    peer = importlib.import_module(f"bench.peers.{peer_name}")
    peer.load()
    if hasattr(peer, "prepare"):
        peer.prepare()
    return {"versions": versions()}


def versions() -> dict[str, str]:
    """Of what is installed beside this interpreter."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def serve(job: Job, answers: TextIO) -> None:
    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    started = time.perf_counter()
    peer = importlib.import_module(f"bench.peers.{job.peer}")
    peer.load()
    import torch

    import_seconds = time.perf_counter() - started
    from bench.support import matmul
    from bench.support.machine import peak_rss_mib

    if job.device == "cpu":
        matmul.use_fp32()
    torch.set_num_threads(job.threads)
    model = make_model(job)
    batches = torch.load(job.batches)
    given = peer.settings(job)
    started = time.perf_counter()
    trainer = peer.wrap(model, job, given)
    wrap_seconds = time.perf_counter() - started
    del model

    say(import_seconds=import_seconds, wrap_seconds=wrap_seconds, peak_rss_mib=peak_rss_mib())
    step = 0
    for line in sys.stdin:
        if line.strip() == "finish":
            break
        if line.strip() == "settle":
            trainer.settle()
            say()
            continue
        say(**timed_step(trainer, batches[step, job.own_batch].to(job.device), job.device))
        step += 1
    say(
        peak_rss_mib=peak_rss_mib(),
        peak_device_mib=peak_device_mib(job.device),
        threads=torch.get_num_threads(),
    )


def make_model(job: Job) -> Any:
    """In training, with the seed's random weights, and without dropout: so losses compare."""
    import torch
    from torch import nn

    from gemini.plan.models import maker

    torch.manual_seed(job.seed)
    model = maker(job.model)()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def timed_step(trainer: Trainer, ids: Any, device: str) -> dict[str, float]:
    """One step; seconds of its three parts, and its loss."""
    times = [_now(device)]
    loss = trainer.forward(ids)
    times.append(_now(device))
    trainer.backward(loss)
    times.append(_now(device))
    trainer.step()
    times.append(_now(device))
    forward, backward, optimizer = (b - a for a, b in pairwise(times))
    return {
        "step_seconds": times[3] - times[0],
        "forward_seconds": forward,
        "backward_seconds": backward,
        "optimizer_seconds": optimizer,
        "loss": float(loss.detach()),
        **trainer.behind(),
    }


def _now(device: str) -> float:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def peak_device_mib(device: str) -> float:
    import torch

    return 0.0 if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20


if __name__ == "__main__":
    main()
