"""Parameters that were frozen when their module was wrapped, and are trained from now on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gemini.units import ParamId

if TYPE_CHECKING:
    from .engine import Engine


@torch.no_grad()
def thaw(engine: Engine, params: list[ParamId]) -> None:
    """Give the chunks of these parameters gradients and state; fp32 masters from what they were.

    Between iterations, on all ranks in the same forward. What shares a chunk with them is trained
    too, as soon as it requires a gradient. Raises BudgetError where their state fits nowhere.
    """
    names = ", ".join(engine.layout.params[param].name for param in params)
    engine.call(f"forward with {names} trained")
    frozen = {engine.chunk_of[param] for param in params}
    frozen = {chunk for chunk in frozen if not engine.layout.chunks[chunk].trainable}
    if frozen:
        layout = engine.layout.with_trainable(frozen)
        before = engine.layout, engine.planning.inputs, engine.planning.planned
        engine.planning.grow(layout)
        chunks = [engine.chunks[chunk] for chunk in sorted(frozen)]
        engine.layout = layout
        for chunk in engine.chunks:
            chunk.spec = layout.chunks[chunk.spec.id]
        try:
            if engine.target is not None:
                engine.target.extend(chunks)
        except BaseException:
            engine.layout, engine.planning.inputs, engine.planning.planned = before
            for chunk in engine.chunks:
                chunk.spec = engine.layout.chunks[chunk.spec.id]
            raise
        engine.storage.layout_changed(layout)
        if engine.target is not None:
            engine.storage.place_gradients(engine.planning.plan, engine.chunks)
            engine.target.measure_leaving()
        engine.reducer.add(chunks)
        engine.manager.homes_changed(engine.planning.payload_room_bytes)
        engine.sampler.specs_changed(layout.params)
    for param in params:
        engine.listen(param)
