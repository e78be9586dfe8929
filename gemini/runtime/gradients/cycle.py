"""Cycle of gradients: which of them there are, from one `zero_grad` to the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.comm.ballot import Agreement
from gemini.comm.communicator import Communicator
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.control_vector import ControlVector
from gemini.runtime.schedule.reducer import Reducer
from gemini.units import ParamId

if TYPE_CHECKING:
    from gemini.placement.orders import Accumulated
    from gemini.runtime.schedule.all_reduce_hook import AllReduceHook


@dataclass(frozen=True, slots=True)
class PendingClip:
    """Clip of the coming step, and what was measured for it already."""

    clip: Clip
    norm: Tensor | None = None  # fp64 0-d, unscaled, where a norm was asked for
    agreement: Agreement | None = None  # where the host knows it
    present: tuple[bool, ...] | None = None  # where it does not: some rank has a gradient, by param


class GradientCycle:
    """Gradients of one engine between two `zero_grad`: which there are, and the coming step's clip.

    broken: parameters whose gradients were dropped after an error in a backward.
    pending_clip: asked for since the last backward; None: there is none.
    hook: all-reduce hook of the user; None: there is none.
    accumulated: by the last `gemini.accumulate`.
    """

    def __init__(self, comm: Communicator, reducer: Reducer, control_vector: ControlVector) -> None:
        self.broken: set[ParamId] = set()
        self.pending_clip: PendingClip | None = None
        self.hook: AllReduceHook | None = None
        self.accumulated: Accumulated | None = None
        self.reducer, self.control_vector = reducer, control_vector
        self._comm = comm
        self._carried_scale: Tensor | None = None  # of gradients that outlived their step

    # -- which there are --

    def breaks(self, params: Iterable[ParamId]) -> None:
        """Note that gradients of these parameters are incomplete."""
        self.broken.update(params)

    def mends(self, param: ParamId) -> None:
        """Note that the user replaced the gradient of a parameter, or dropped it."""
        self.broken.discard(param)

    def begin_anew(self) -> None:
        """The gradients that follow are new ones: nothing is broken, clipped or late."""
        self.broken.clear()
        self.reducer.begin_anew()
        self.new_to_hook()
        self.pending_clip = None

    def drop(self) -> None:
        """Drop all gradients."""
        self._carried_scale = None
        self.reducer.drop_gradients()

    def has_accumulated(self, found: Accumulated) -> None:
        """Note what `gemini.accumulate` read."""
        self.accumulated = found

    # -- the hook of the user --

    def hook_with(self, hook: AllReduceHook | None) -> None:
        """Let a hook have all reduced gradients from now on, or none."""
        self.hook = hook

    def new_to_hook(self) -> None:
        """The gradients that follow are others than those that the all-reduce hook has had."""
        if self.hook is not None:
            self.hook.forget()

    def reduce_what_is_left(self) -> Sequence[bool]:
        """Reduce gradients left by `no_sync` or late, and let the all-reduce hook have all that it
        has not had; returns which parameters have one. Collective."""
        said = self._comm.numbers([*self.reducer.present, self.reducer.leftover], torch.float64)
        self._comm.all_reduce(said).wait()
        *there, leftover = (count > 0 for count in said.tolist())
        if leftover:
            self.reducer.reduce_leftovers()
        if self.hook is not None:
            self.hook.run(there)
        return there

    # -- clip and loss scale --

    def clip_with(
        self,
        clip: Clip,
        norm: Tensor | None = None,
        agreement: Agreement | None = None,
        present: tuple[bool, ...] | None = None,
    ) -> None:
        """Set the clip of the coming step; see `PendingClip`."""
        self.pending_clip = PendingClip(clip, norm, agreement, present)

    def take_clip(self) -> PendingClip | None:
        """Remove the pending clip, and return it."""
        pending, self.pending_clip = self.pending_clip, None
        return pending

    def clipped_by(self) -> tuple[Tensor, float]:
        """Factor (fp64 0-d) that unscales and clips, and the limit of a value, in the next step."""
        pending = self.pending_clip
        clip = pending.clip if pending is not None else Clip()
        factor = 1.0 / self.control_vector.scale
        if clip.fixed_factor is not None:
            factor = factor * clip.fixed_factor
        elif pending is not None and pending.norm is not None and clip.max_norm > 0:
            factor = factor * clip.factor_of(pending.norm)
        return factor, clip.max_value

    def outlive_step(self) -> None:
        """Keep gradients after a step, with the loss scale that it used."""
        if self.control_vector.active:
            self._carried_scale = self.control_vector.used.clone()

    def rescale(self) -> Tensor | None:
        """Factor, once, from the scale of gradients that outlived their step to the one in use;
        None where they have it already."""
        before, self._carried_scale = self._carried_scale, None
        return None if before is None else self.control_vector.scale / before
