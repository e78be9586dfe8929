"""GeminiDDP and HybridAdam, with what README tells a user to write."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from bench.rows.job import LEARNING_RATE, WEIGHT_DECAY, Job, Trainer
from bench.rows.meshes import make_mesh, mesh_settings


def load() -> None:
    """Names, not only packages: `gemini` imports what is behind a name when it is asked for."""
    from gemini import AutoPlacement, GeminiDDP, StaticPlacement  # noqa: F401
    from gemini.optim import HybridAdam  # noqa: F401


def prepare() -> None:
    """Compile the CPU update, which is done once for a machine, if it can be."""
    from torch import nn

    from gemini import GeminiDDP
    from gemini.optim import HybridAdam
    from gemini.optim.update.kernel_cache import KernelBuildError

    with suppress(KernelBuildError):
        HybridAdam(GeminiDDP(nn.Linear(64, 64), "cpu").parameters(), cpu_path="compile").close()


def settings(job: Job) -> dict[str, Any]:
    """Options of the row: `nvme_fraction`, `update`, `device_budget`, `host` (the state in RAM),
    `stage`, `mesh`, `state` (in what it is kept), `micro_batches` (of a step, layer by layer)."""
    options, folder = job.options, str(job.state_folder)
    given: dict[str, Any] = {**mesh_settings(job), "GeminiDDP": {"max_norm": job.max_norm}}
    adam: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    if "device_budget" in options:
        given["AutoPlacement"] = {"device_budget": options["device_budget"], "nvme_dir": folder}
    if options.get("host"):
        given["StaticPlacement"] = {"offload_optim_frac": 1.0}
    if "stage" in options:
        given["GeminiDDP"]["placement_policy"] = f"zero{options['stage']}"
        if options["stage"] < 3:
            given["GeminiDDP"]["overlap_allgather"] = True
    if "update" in options:
        given["GeminiDDP"]["update"] = options["update"]
    if "state" in options:
        adam["state"] = options["state"]
    if "nvme_fraction" in options:
        adam["nvme_offload_fraction"] = options["nvme_fraction"]
        adam["nvme_offload_dir"] = folder
    return {**given, "HybridAdam": adam}


def wrap(model: Any, job: Job, given: dict[str, Any]) -> Trainer:
    import gemini
    from bench.rows.ranks import join_group
    from gemini.optim import HybridAdam

    if job.world_size > 1:
        join_group(job)
    placements = [
        getattr(gemini, kind)(**given[kind])
        for kind in ("AutoPlacement", "StaticPlacement")
        if kind in given
    ]
    mesh = make_mesh(model, job, given)
    wrapped = gemini.GeminiDDP(model, job.device, *placements, mesh=mesh, **given["GeminiDDP"])
    optimizer = HybridAdam(wrapped.parameters(), **given["HybridAdam"])

    before: list[Any] = []  # the report of the step before

    def step() -> None:
        before[:] = [optimizer.last_report]
        optimizer.step()
        optimizer.zero_grad()

    def behind() -> dict[str, float]:
        """Its tail has ended, as a backward came behind it."""
        if "AutoPlacement" in given:
            moves = wrapped.engine.planning.moves
            return {"home_moves": float(moves.num_down + moves.num_up)}
        if before[0] is None or "update" not in job.options:
            return {}
        tail = before[0].behind.wait()
        hidden = max(0.0, tail.seconds - tail.waited_seconds)
        assert before[0].grad_norm is not None
        return {"hidden_seconds": hidden, "waited_seconds": tail.waited_seconds,
                "clipped": float(before[0].grad_norm > job.max_norm),
                "committed": float(tail.committed)}  # fmt: skip

    def settle() -> None:
        if before[0] is not None:
            before[0].behind.wait()

    def forward(ids: Any) -> Any:
        return wrapped(input_ids=ids, labels=ids).loss

    if "micro_batches" in job.options:
        return Trainer(partial(_by_layers, wrapped, job), lambda loss: None, step, behind, settle)
    return Trainer(forward, lambda loss: loss.backward(), step, behind, settle)


def _by_layers(wrapped: Any, job: Job, ids: Any) -> Any:
    """Forward and backward of all micro-batches. Returns the mean loss."""
    import gemini

    count = job.options["micro_batches"]
    given = [{"input_ids": part, "labels": part} for part in ids.chunk(count)]
    return sum(gemini.accumulate(wrapped, given, lambda output, batch: output.loss / count))
