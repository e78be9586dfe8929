"""Colossal-AI's auto-parallel by its name and arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from gemini.integrations.booster.booster import Booster
from gemini.integrations.parts import accept
from gemini.layouts.search import search

from .autoparallel import AutoParallelPlugin, batch_of, options_of
from .machines import cluster_here
from .shapes import shape_of


def autoparallelize(
    model: nn.Module,
    meta_args: Any = None,
    *args: Any,
    memory_budget: float = -1.0,
    **others: Any,
) -> nn.Module:
    """The model in its fastest layout on this machine, ready for a loop. Collective.

    There the layout is of operators; here it is of what the plugins run, as
    `gemini.autoparallelize` finds it, which returns the plugin.

        samples = {"input_ids": ids}  # rows of all ranks
        model = autoparallelize(model, samples)
        optimizer = HybridAdam(model.parameters())
        for batch in loader:  # of this rank
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    meta_args: inputs of one step of all ranks, rows first.
    memory_budget: bytes of a device; -1: what it has left.
    args, others: of the solver there. They change nothing, and are said.

    No layout has a pipeline, as a loop calls the model.

    Raises ValueError without inputs, and if nothing fits.
    """
    if meta_args is None:
        raise ValueError("autoparallelize() without inputs; expected meta_args, those of one step")
    solver = [f"argument {i + 3}" for i in range(len(args))] + sorted(others)
    accept(dict.fromkeys(solver, "every layout that the plugins run is priced"))
    cluster = cluster_here()
    if memory_budget > 0:
        cluster = replace(cluster, device_bytes=int(memory_budget))
    step = batch_of(meta_args)
    shape = shape_of(model, meta_args, seq=step.seq)
    found = search(replace(shape, can=shape.can - {"pp"}), cluster, step)
    plugin = AutoParallelPlugin(
        precision="bf16", found=found, **options_of(found.best.layout, shape.layers, cluster)
    )
    return Booster(plugin=plugin).boost(model)[0]
