"""A model becomes the stages of a pipeline that this rank has, and its optimizer theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gemini.ddp import GeminiDDP
from gemini.integrations.parallel.cut import stages_of
from gemini.integrations.parallel.pipelined import MicrobatchSchedule, Pipelined

from .engine_plugin import made_ours
from .plugin import params_of


def wrap_stages(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    schedule: MicrobatchSchedule,
    layers: Sequence[int] | None,
    options: dict[str, Any],
) -> Pipelined:
    """This rank's stages; the optimizer has their parameters alone.

    layers: of every stage; None is as even as it goes. options: of `GeminiDDP`, with `mesh=`.
    Raises ValueError, before anything is changed, for a model that cannot be cut, and for an
    optimizer that has nothing of some rank's stages.
    """
    mesh = options["mesh"]
    places = [schedule.stages(place, mesh["pp"].size()) for place in range(mesh["pp"].size())]
    stages = stages_of(model, sum(map(len, places)), layers)
    if optimizer is not None:
        for place, theirs in enumerate(places):
            _check_steps(optimizer, place, [stages[i] for i in theirs])
        made_ours(optimizer, model)
    mine = places[mesh.get_local_rank("pp")]
    parts = [GeminiDDP(stages[i], **options) for i in mine]
    if optimizer is not None:
        here = {id(param) for part in parts for param in part.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in here]
        optimizer.bind()  # type: ignore[attr-defined]
    return Pipelined(model, parts, mesh, schedule)


def _check_steps(optimizer: torch.optim.Optimizer, place: int, stages: Sequence[nn.Module]) -> None:
    ours = {id(param) for param in params_of(optimizer)}
    if not any(id(param) in ours for stage in stages for param in stage.parameters()):
        raise ValueError(
            f"the optimizer has no parameter of the stages of place {place} in the pipeline; "
            "expected one over model.parameters(), or over some of every place"
        )
