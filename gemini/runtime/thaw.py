"""Thaw of parameters that were frozen at wrapping, and are trained from now on."""

from __future__ import annotations

import torch

from gemini.runtime.inspect.weights import tell_rounded
from gemini.units import ParamId

from .meetings import Meetings
from .parts import Parts


@torch.no_grad()
def thaw(parts: Parts, meetings: Meetings, params: list[ParamId]) -> None:
    """Give the chunks of these parameters gradients and state; originals become fp32 masters, or
    the rounded weights do, which a warning says.

    Between iterations, on all ranks in the same forward. Another parameter of such a chunk is
    trained, too, as soon as it requires a gradient. Raises BudgetError where their state fits
    nowhere.
    """
    for param in params:
        if param in parts.opaque:
            name, kind = parts.layout.params[param].name, parts.opaque[param].form.kind
            raise ValueError(
                f"parameter {name} is a {kind}, whose bytes no step updates, and requires a "
                "gradient now; expected requires_grad_(False), with adapters that are trained"
            )
    names = ", ".join(parts.layout.params[param].name for param in params)
    meetings.call(f"forward with {names} trained")
    frozen = {parts.chunk_of[param] for param in params}
    frozen = {chunk for chunk in frozen if not parts.layout.chunks[chunk].trainable}
    if frozen:
        if parts.precision_settings.master_weights:
            tell_rounded(parts, frozen, "fp32 masters begin with")
        layout = parts.layout.with_trainable(frozen)
        planning = parts.planning
        before = parts.layout, planning.inputs, planning.result
        grown = planning.inputs.layout.with_trainable(frozen)
        planning.grow(grown)
        chunks = [parts.chunks[chunk] for chunk in sorted(frozen)]
        parts.layout = layout
        for chunk in parts.chunks:
            chunk.spec = layout.chunks[chunk.spec.id]
        try:
            for chunk in chunks:
                chunk.wait_gathered()  # its rows are in files that go
            if parts.target is not None:
                parts.target.settle()
            parts.storage.thaw(frozen)
            if parts.target is not None:
                parts.target.extend(chunks)
        except BaseException:
            parts.layout, planning.inputs, planning.result = before
            for chunk in parts.chunks:
                chunk.spec = parts.layout.chunks[chunk.spec.id]
            raise
        parts.originals.lost -= frozen
        parts.storage.layout_changed(layout)
        if parts.target is not None:
            parts.storage.place_gradients(parts.plan, parts.chunks)
            parts.target.homes_changed()
        parts.reducer.add(chunks)
        parts.manager.homes_changed()
        parts.sampler.specs_changed(grown.params)
