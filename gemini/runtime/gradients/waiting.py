"""Gradients of an engine between backward and step, which the loop may read and change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.chunk.parameter import clear_gradients
from gemini.chunk.storage import Chunk
from gemini.memtracer.module_calls import in_backward
from gemini.optim.rules.clipping import Clip
from gemini.runtime.meetings import Meetings
from gemini.runtime.passes import Passes, taking_turns
from gemini.runtime.sharding import Sharding
from gemini.runtime.weights import Weights
from gemini.tickets import Done, Ticket
from gemini.units import WORLD, ParamId

from .cycle import GradientCycle
from .values import GradientValues, norm_of

if TYPE_CHECKING:
    from .view import GradientView


@dataclass(frozen=True, slots=True)
class Edit:
    """Change of one parameter's gradient that is not carried out yet: factors, then limits."""

    factors: tuple[float | Tensor, ...] = ()
    low: float = -math.inf
    high: float = math.inf

    @property
    def factor(self) -> float:
        """Product of all factors. May wait for a device."""
        return math.prod(float(factor) for factor in self.factors)

    @property
    def limits(self) -> bool:
        return self.low > -math.inf or self.high < math.inf

    def is_like(self, other: Edit) -> bool:
        """Whether both are the same change, as far as the host knows without waiting."""
        if (self.low, self.high) != (other.low, other.high):
            return False
        return len(self.factors) == len(other.factors) and all(
            a is b or (isinstance(a, float) and isinstance(b, float) and a == b)
            for a, b in zip(self.factors, other.factors, strict=True)
        )

    def carried_out(self, values: Tensor, scale: float) -> Tensor:
        """Carry the edit out in place. values: fp32, multiplied by a loss scale of `scale`."""
        values.mul_(self.factor)
        return values.clamp_(self.low * scale, self.high * scale) if self.limits else values


class Gradients:
    """`.grad` of the parameters of one engine; see `view`.

    One factor for all gradients becomes a factor of the coming step, as a clip does; any other edit
    is carried out on the shards, in fp32. All ranks must make the same edits: each rank's are
    recorded in the sequence that the next vote compares.
    """

    def __init__(
        self,
        sharding: Sharding,
        meetings: Meetings,
        cycle: GradientCycle,
        passes: Passes,
        weights: Weights,
        dropped: Callable[[], None],
    ) -> None:
        """dropped: called when all gradients are dropped."""
        self.sharding, self.meetings, self.cycle = sharding, meetings, cycle
        self._passes, self._weights = passes, weights
        self._values = GradientValues(sharding, meetings, cycle)
        self._dropped = dropped
        self._views: dict[ParamId, GradientView] = {}
        self._edits: dict[ParamId, Edit] = {}
        self._changes: set[str] = set()  # by this rank, since the last vote
        # int32 [P]: how many ranks had a gradient when they were reduced last
        self._somewhere: tuple[Ticket[None], Tensor] = (Done(None), torch.zeros(0))

    # -- which gradients exist --

    @taking_turns
    def of(self, param: ParamId) -> GradientView | None:
        """`.grad`: None where no rank has a gradient."""
        from .view import GradientView

        self.notice_broken_backward()
        spec = self.sharding.layout.params[param]
        if not self.exists(param):
            return None
        self._check_not_split(param)
        if param not in self._views:
            device = self.sharding.backend.device
            self._views[param] = GradientView(self, param, torch.Size(spec.shape), device)
        return self._views[param]

    def exists(self, param: ParamId) -> bool:
        """Whether there is a gradient: of this rank, or a reduced one of another."""
        if self.cycle.reducer.present[param] or param in self.cycle.broken:
            return True
        ticket, counts = self._somewhere
        ticket.wait()
        return bool(counts.numel() and counts[param] > 0)

    def end_backward(self) -> None:
        """End a backward that was reduced: begin to exchange which parameters have a gradient, and
        let the all-reduce hook have them."""
        if self.sharding.comm.world_size > 1:
            counts = self.sharding.comm.numbers(self.cycle.reducer.present, torch.int32)
            self._somewhere = (self.sharding.comm.all_reduce(counts), counts)
        if self.cycle.hook is not None:
            self.cycle.reduce_what_is_left()

    # -- all of them --

    def begin_backward(self) -> None:
        """Prepare for a backward that adds gradients: carry out the clip, unify loss scales."""
        self.carry_out_clip()
        factor = self.cycle.rescale()
        if factor is not None:
            for chunk in self.sharding.chunks:
                chunk.gradient.scale(factor)

    def after_step(self) -> None:
        """Keep gradients after a step until they are dropped, as torch does."""
        self._spell_out_clip()
        self.cycle.outlive_step()

    def notice_broken_backward(self) -> None:
        """Drop gradients of a backward that an error ended."""
        if self.cycle.reducer.active and not (in_backward() or self._passes.is_elsewhere()):
            self.drop_broken()

    def drop_broken(self) -> None:
        """Drop gradients that are incomplete, and mark all as broken until zero_grad."""
        self.drop()
        params = self.sharding.layout.params
        self.cycle.breaks(ParamId(i) for i, p in enumerate(params) if p.trainable)

    def check_complete(self) -> None:
        """Raise RuntimeError where an error has cut a backward short since zero_grad."""
        self.notice_broken_backward()
        if self.cycle.broken:
            raise RuntimeError(
                "a backward ended in an error, so the gradients since zero_grad are incomplete; "
                "call zero_grad() before you go on"
            )

    def check_backward(self) -> None:
        """Raise RuntimeError for a backward that could not add to the gradients that are there."""
        self.check_complete()
        hook = self.cycle.hook
        if hook is not None:
            hook.check_backward()

    @taking_turns
    def zero_all(self) -> None:
        """Set all gradients to zero; a step takes zeros as gradients."""
        self.notice_broken_backward()
        clear_gradients(self.sharding.params)
        self._forget()
        for chunk in self.sharding.chunks:
            chunk.gradient.zero()

    @taking_turns
    def drop(self) -> None:
        """Drop all gradients."""
        clear_gradients(self.sharding.params)
        self._forget()
        self.cycle.drop()
        self._dropped()

    def _forget(self) -> None:
        """Forget edits, views and cached values."""
        self._weights.refuse_parked()
        self.cycle.begin_anew()
        self._values.have_changed()
        for known in (self._edits, self._views, self._changes):
            known.clear()
        self._somewhere = (Done(None), torch.zeros(0))

    def tell_changes(self) -> None:
        """Record this rank's edits, which the coming vote compares over ranks."""
        if self._changes:
            self.sharding.comm.log.record("changes gradients:", "; ".join(sorted(self._changes)))
            self._changes.clear()

    # -- changes of one gradient --

    @taking_turns
    def clear_but(self, spared: Sequence[int], set_to_none: bool) -> None:
        """Drop gradients of all parameters but `spared`, or set them to zero."""
        self._weights.refuse_parked()
        self.notice_broken_backward()
        params = self.sharding.params
        clear_gradients(param for i, param in enumerate(params) if i not in spared)
        for param in map(ParamId, range(len(self.sharding.params))):
            if param not in spared and self.exists(param):
                self._drop(param) if set_to_none else self.zero(param)
        self.cycle.new_to_hook()

    @taking_turns
    def set(self, param: ParamId, value: Tensor | None) -> None:
        """`p.grad = value`."""
        self.notice_broken_backward()
        if value is None:
            self._drop(param)
        elif value is not self._views.get(param):
            self._check_not_split(param)
            self.assign(param, value)

    @taking_turns
    def scale(self, param: ParamId, factor: float | Tensor) -> None:
        self._check(param)
        self._spell_out_clip()
        edit = self._edits.get(param, Edit())
        if edit.limits:
            self._carry_out(param)
            edit = Edit()
        self._edits[param] = replace(edit, factors=(*edit.factors, factor))

    @taking_turns
    def clamp(self, param: ParamId, low: float, high: float) -> None:
        self._check(param)
        if self._values.are_local:
            raise RuntimeError(
                "gradients are not reduced inside no_sync(); clamp them behind the last backward"
            )
        self._spell_out_clip()
        edit = self._edits.get(param, Edit())
        self._edits[param] = replace(edit, low=max(edit.low, low), high=min(edit.high, high))

    @taking_turns
    def zero(self, param: ParamId) -> None:
        if param in self.cycle.broken:
            self.assign(param, torch.zeros(self.sharding.layout.params[param].shape))
            return
        self._check(param)
        self._spell_out_clip()
        self._edits.pop(param, None)
        self._note(param, "zeroes")
        self._change(param, Tensor.zero_, wide=False)  # a product would keep what is not finite

    @taking_turns
    @torch.no_grad()
    def assign(self, param: ParamId, values: Tensor) -> None:
        spec = self.sharding.layout.params[param]
        if tuple(values.shape) != tuple(spec.shape) or not values.is_floating_point():
            raise RuntimeError(
                f"the gradient of {spec.name} is floating and has shape {tuple(spec.shape)}; it "
                f"cannot be given {values.dtype} of shape {tuple(values.shape)}"
            )
        if not spec.trainable:
            raise RuntimeError(f"{spec.name} is frozen, and cannot be given a gradient")
        self.cycle.mends(param)
        self._check_time()
        flat = (
            values.detach().to_dense().to(self.sharding.backend.device, torch.float32).reshape(-1)
        )
        if self.cycle.control_vector.active:
            flat = flat * self.cycle.control_vector.scale.float()
        self._spell_out_clip()
        self._edits.pop(param, None)
        self._values.have_changed()
        chunk, slot = self.sharding.place_of(param)
        if chunk.gradient.exists:
            self._note(param, f"assigns values of sum {float(flat.double().sum())!r} to")
            chunk.gradient.forget(slot)
            chunk.gradient.change(lambda shard: self._put(shard, chunk, param, flat), wide=True)
        else:  # as what no_sync leaves: the step reduces it
            chunk.gradient.put_local(slot, flat)
        self.cycle.reducer.set_present(param)

    def _put(self, shard: Tensor, chunk: Chunk, param: ParamId, flat: Tensor) -> None:
        for at, first in self.sharding.own_parts(chunk, param):
            shard[at].copy_(flat[first : first + at.stop - at.start])

    def _drop(self, param: ParamId) -> None:
        """`p.grad = None`."""
        self.cycle.mends(param)
        if not self.exists(param):
            return
        self._spell_out_clip()
        self._note(param, "drops")
        self._edits.pop(param, None)
        self._views.pop(param, None)
        self._change(param, Tensor.zero_, wide=False)  # a product would keep what is not finite
        chunk, slot = self.sharding.place_of(param)
        chunk.gradient.forget(slot)
        self.cycle.reducer.set_present(param, there=False)
        ticket, counts = self._somewhere
        ticket.wait()
        if counts.numel():
            counts[param] = 0
        if not any(self.exists(other.param) for other in chunk.spec.slots):
            chunk.gradient.drop()
        if not any(self.exists(ParamId(other)) for other in range(len(self.sharding.params))):
            self.drop()

    # -- edits --

    def settle(self) -> None:
        """Carry out all edits: before gradients are added to, or read together.

        A limit applies to the mean over ranks, so gradients that were put off are reduced first.
        """
        if any(edit.limits for edit in self._edits.values()):
            self.cycle.reducer.reduce_put_off()
        self._values.have_changed()
        for param in list(self._edits):
            self._carry_out(param)

    def resolve(self) -> None:
        """Prepare edits for a step: one factor for all becomes the step's, others are applied."""
        if not self._edits:
            return
        params = [ParamId(p) for p in range(len(self.sharding.params)) if self.exists(ParamId(p))]
        first = self._edits.get(params[0], Edit()) if params else Edit()
        one_for_all = (
            self.cycle.pending_clip is None
            and self.sharding.precision_settings.max_norm == 0
            and first.low == -first.high
            and all(first.is_like(self._edits.get(param, Edit())) for param in params)
            and 0 < first.factor <= 1
        )
        if not one_for_all:
            self.settle()
            return
        self._edits.clear()
        self._changes.add(f"multiplies all by {first.factor!r}, to at most {first.high!r}")
        self.cycle.clip_with(Clip(fixed_factor=first.factor, max_value=first.high))

    def carry_out_clip(self) -> None:
        """Apply the pending clip: before another is measured, or gradients are added to."""
        self._spell_out_clip()
        self.settle()

    def _spell_out_clip(self) -> None:
        """Turn the pending clip into edits of all gradients, as torch's clip changes gradients.

        Called after the step that applied it, and before any other edit.
        """
        pending = self.cycle.take_clip()
        if pending is None:
            return
        self._values.have_changed()
        clip = pending.clip
        factor: float | Tensor = 1.0 if clip.fixed_factor is None else clip.fixed_factor
        if pending.norm is not None and clip.max_norm > 0:
            factor = clip.factor_of(pending.norm)
        edit = Edit((factor,), -clip.max_value, clip.max_value)
        for param in map(ParamId, range(len(self.sharding.params))):
            if self.exists(param):
                self._edits[param] = edit

    def _carry_out(self, param: ParamId) -> None:
        edit = self._edits.pop(param)
        asked = f"{edit.factor!r}, to [{edit.low!r}, {edit.high!r}],"
        self._note(param, f"multiplies by {asked}")
        scale = self.cycle.control_vector.read().scale if edit.limits else 1.0
        self._change(param, lambda values: edit.carried_out(values, scale), wide=True)

    @torch.no_grad()
    def _change(self, param: ParamId, do: Callable[[Tensor], Tensor], *, wide: bool) -> None:
        """Change this rank's part in place. wide: in fp32."""
        chunk, slot = self.sharding.place_of(param)

        def change(shard: Tensor) -> None:
            for at, _ in self.sharding.own_parts(chunk, param):
                do(shard[at])

        if chunk.gradient.exists and any(self.sharding.own_parts(chunk, param)):
            chunk.gradient.change(change, wide=wide)
        chunk.gradient.change_local(slot, do, wide=wide)
        self._values.have_changed()

    def _note(self, param: ParamId, does: str) -> None:
        if self.sharding.comm.world_size > 1:
            self._changes.add(f"{does} {self.sharding.layout.params[param].name}")

    # -- values --

    @taking_turns
    def values(self, param: ParamId) -> Tensor:
        """Copy in fp32, of the parameter's shape. Collective where gradients are reduced."""
        self._check(param)
        spec = self.sharding.layout.params[param]
        chunk, slot = self.sharding.place_of(param)
        local = chunk.gradient.local(slot)
        if self.sharding.comm.world_size == 1 or (
            self._values.are_local and not chunk.gradient.exists
        ):
            total = self._values.of_this_rank(param)
        else:
            total = self._values.read(param)
            local = local if self._values.are_local else None
        if local is not None:
            total = total.add_(local)
        factor, limit = self.cycle.clipped_by()
        self._edits.get(param, Edit()).carried_out(total, self.cycle.control_vector.read().scale)
        return total.mul_(factor).clamp_(-limit, limit).view(spec.shape)

    @taking_turns
    def norm(self, param: ParamId, order: float) -> Tensor:
        """Norm of a gradient, fp64 0-d. Collective; ranks may ask for different parameters."""
        self._check(param)
        if self._edits.get(param, Edit()).limits:
            if self.cycle.reducer.has_put_off:  # ranks ask for norms in orders of their own
                return norm_of(self.values(param), order)
            self.settle()
        if self._values.are_local and not self.cycle.reducer.synchronise:
            return norm_of(self.values(param), order)
        if order <= 0:  # no sum of powers over ranks
            return norm_of(self.values(param), order)
        norm = self._values.norm(param, order)
        factor, limit = self.cycle.clipped_by()
        if limit < math.inf:
            return norm_of(self.values(param), order)
        return norm * (abs(self._edits.get(param, Edit()).factor) * factor)

    def _check(self, param: ParamId) -> None:
        """Raise RuntimeError where the gradient was dropped, or is not reduced yet."""
        if not self.exists(param):
            raise RuntimeError(
                f"the gradient of {self.sharding.layout.params[param].name} was dropped; "
                "p.grad.clone() keeps its values"
            )
        self._check_time()

    def _check_not_split(self, param: ParamId) -> None:
        spec = self.sharding.layout.params[param]
        if self.sharding.chunks[self.sharding.chunk_of[param]].tie is not None:
            raise RuntimeError(
                f"stages tie {spec.name}, whose gradients are added up in step(), and no rank has "
                "their sum before. Expected a clip by the optimizer, or weights that are not tied"
            )
        if spec.group != WORLD:
            raise RuntimeError(
                f"the gradient of {spec.name} is split over {spec.group}, and p.grad would be a "
                "part of it; use model.named_gradients(), model.map_gradients() or "
                "optimizer.clip_grad_norm_()"
            )

    def _check_time(self) -> None:
        self._weights.refuse_parked()
        self.check_complete()
        if self._passes.has_pass_elsewhere():
            raise RuntimeError(
                "gradients are read or changed while another thread runs a forward or a backward; "
                "look at them there, or behind it"
            )
        if self.sharding.comm.world_size > 1 and self._passes.in_pass():
            raise RuntimeError(
                "gradients are not reduced before a backward has ended; look at them behind it"
            )
