"""Gradients of an engine between backward and step, as its user may see and change them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.chunk.gradient_view import GradientView
from gemini.chunk.storage import Chunk
from gemini.tickets import Done, Ticket
from gemini.units import ParamId
from optim.clipping import Clip

from .agreement import Agreement

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True, slots=True)
class PendingClip:
    """What the coming step clips to, and what was measured for it already."""

    clip: Clip
    norm: Tensor | None = None  # fp64 0-d, unscaled, where a norm was asked for
    agreement: Agreement | None = None  # where the host knows it

    def decided(self) -> PendingClip:
        """The same factor, whatever becomes of the gradients it was measured on."""
        if self.norm is None:
            return PendingClip(self.clip)
        factor = self.clip.factor(float(self.norm))
        return PendingClip(Clip(fixed_factor=factor, max_value=self.clip.max_value))


@dataclass(frozen=True, slots=True)
class Edit:
    """What is asked of one parameter's gradient and not done yet: a product, then limits."""

    factors: tuple[float | Tensor, ...] = ()
    low: float = -math.inf
    high: float = math.inf

    @property
    def factor(self) -> float:
        """May wait for a device."""
        return math.prod(float(factor) for factor in self.factors)

    @property
    def limits(self) -> bool:
        return self.low > -math.inf or self.high < math.inf

    def is_like(self, other: Edit) -> bool:
        """Whether both ask for the same, as far as is known without a device."""
        if (self.low, self.high) != (other.low, other.high):
            return False
        return len(self.factors) == len(other.factors) and all(
            a is b or (isinstance(a, float) and isinstance(b, float) and a == b)
            for a, b in zip(self.factors, other.factors, strict=True)
        )

    def carried_out(self, values: Tensor, scale: float) -> Tensor:
        """In place on `values`, fp32, which carry a loss scale."""
        values.mul_(self.factor)
        return values.clamp_(self.low * scale, self.high * scale) if self.limits else values


class Gradients:
    """`.grad` of the parameters of one engine; see `gemini.chunk.gradient_view`.

    A factor that all gradients are multiplied with becomes one of the coming step, as a clip does;
    anything else is done to the shards, in fp32. Ranks must change the same: what each did goes
    into the sequence that the next vote compares.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._views: dict[ParamId, GradientView] = {}
        self._edits: dict[ParamId, Edit] = {}
        self._norms: dict[float, Tensor] = {}  # fp64 [P], before edits; by order
        self._changes: set[str] = set()  # by this rank, since the last vote
        # int32 [P]: how many ranks had a gradient when they were reduced last
        self._somewhere: tuple[Ticket[None], Tensor] = (Done(None), torch.zeros(0))
        self._read: dict[ParamId, Tensor] = {}  # what `read` has brought

    # -- what there is --

    def of(self, param: ParamId) -> GradientView | None:
        """`.grad`: None where no rank has a gradient."""
        engine, spec = self._engine, self._engine.layout.params[param]
        if not self.exists(param):
            return None
        if param not in self._views:
            device = engine.backend.device
            self._views[param] = GradientView(self, param, torch.Size(spec.shape), device)
        return self._views[param]

    def exists(self, param: ParamId) -> bool:
        """Whether there is a gradient: of this rank, or a reduced one of another."""
        if self._engine.present[param] or param in self._engine.broken:
            return True
        ticket, counts = self._somewhere
        ticket.wait()
        return bool(counts.numel() and counts[param] > 0)

    def exchange_presence(self) -> None:
        """A backward was reduced: begin to tell the others which parameters have a gradient."""
        engine = self._engine
        if engine.comm.world_size > 1:
            counts = torch.tensor(engine.present, dtype=torch.int32).to(engine.comm.device)
            self._somewhere = (engine.comm.all_reduce(counts), counts)

    def dropped(self) -> None:
        """All gradients were."""
        for known in (self._norms, self._edits, self._views, self._changes):
            known.clear()
        self._somewhere = (Done(None), torch.zeros(0))

    def tell_changes(self) -> None:
        """Before a vote: what this rank has changed, to be compared with the others."""
        if self._changes:
            self._engine.comm.log.record("changes gradients:", "; ".join(sorted(self._changes)))
            self._changes.clear()

    # -- what is done to one of them --

    def clear_but(self, kept: Sequence[int], set_to_none: bool) -> None:
        """Drop the others, or make them zeros."""
        for param in map(ParamId, range(len(self._engine.params))):
            if param not in kept and self.exists(param):
                self._drop(param) if set_to_none else self.zero(param)

    def set(self, param: ParamId, value: Tensor | None) -> None:
        """`p.grad = value`."""
        if value is None:
            self._drop(param)
        elif value is not self._views.get(param):
            self.assign(param, value)

    def scale(self, param: ParamId, factor: float | Tensor) -> None:
        self._check(param)
        edit = self._edits.get(param, Edit())
        if edit.limits:
            self._carry_out(param)
            edit = Edit()
        self._edits[param] = replace(edit, factors=(*edit.factors, factor))

    def clamp(self, param: ParamId, low: float, high: float) -> None:
        self._check(param)
        if self._is_local:
            raise RuntimeError(
                "gradients are not reduced inside no_sync(); clamp them behind the last backward"
            )
        edit = self._edits.get(param, Edit())
        self._edits[param] = replace(edit, low=max(edit.low, low), high=min(edit.high, high))

    def zero(self, param: ParamId) -> None:
        if param in self._engine.broken:
            self.assign(param, torch.zeros(self._engine.layout.params[param].shape))
            return
        self._check(param)
        self._edits.pop(param, None)
        self._note(param, "zeroes")
        self._change(param, Edit(factors=(0.0,)), wide=False)

    @torch.no_grad()
    def assign(self, param: ParamId, values: Tensor) -> None:
        engine, spec = self._engine, self._engine.layout.params[param]
        if tuple(values.shape) != tuple(spec.shape) or not values.is_floating_point():
            raise RuntimeError(
                f"the gradient of {spec.name} is floating and has shape {tuple(spec.shape)}; it "
                f"cannot be given {values.dtype} of shape {tuple(values.shape)}"
            )
        if not spec.trainable:
            raise RuntimeError(f"{spec.name} is frozen, and cannot be given a gradient")
        engine.broken.discard(param)
        self._check_time()
        flat = values.detach().to(engine.backend.device, torch.float32).reshape(-1)
        if engine.scaler.active:
            flat = flat * engine.scaler.scale.float()
        self._edits.pop(param, None)
        chunk, slot = engine.place_of(param)
        if chunk.gradient.exists:
            self._note(param, f"assigns values of sum {float(flat.double().sum())!r} to")
            chunk.gradient.forget(slot)
            chunk.gradient.change(lambda shard: self._put(shard, chunk, param, flat), wide=True)
        else:  # as what no_sync leaves: the step reduces it
            chunk.gradient.put_local(slot, flat)
        engine.present[param] = True

    def _put(self, shard: Tensor, chunk: Chunk, param: ParamId, flat: Tensor) -> None:
        for at, first in self._own_parts(chunk, param):
            shard[at].copy_(flat[first : first + at.stop - at.start])

    def _drop(self, param: ParamId) -> None:
        """`p.grad = None`."""
        engine = self._engine
        engine.broken.discard(param)
        if not self.exists(param):
            return
        if engine.pending_clip is not None:
            engine.pending_clip = engine.pending_clip.decided()
        self._note(param, "drops")
        self._edits.pop(param, None)
        self._views.pop(param, None)
        self._change(param, Edit(factors=(0.0,)), wide=False)
        chunk, slot = engine.place_of(param)
        chunk.gradient.forget(slot)
        engine.present[param] = False
        ticket, counts = self._somewhere
        ticket.wait()
        if counts.numel():
            counts[param] = 0
        if not any(self.exists(other.param) for other in chunk.spec.slots):
            chunk.gradient.drop()
        if not any(self.exists(ParamId(other)) for other in range(len(engine.params))):
            engine.drop_gradients()

    # -- edits --

    def settle(self) -> None:
        """Carry out what was asked: before gradients are added, or looked at all together.

        A limit is one of the mean over ranks: what was put off is reduced first.
        """
        if any(edit.limits for edit in self._edits.values()):
            self._engine.reducer.reduce_put_off()
        self._norms.clear()
        for param in list(self._edits):
            self._carry_out(param)

    def resolve(self) -> None:
        """Before a step: one factor for all becomes the step's, anything else is carried out."""
        engine = self._engine
        if not self._edits:
            return
        params = [ParamId(p) for p in range(len(engine.params)) if self.exists(ParamId(p))]
        first = self._edits.get(params[0], Edit()) if params else Edit()
        one_for_all = (
            engine.pending_clip is None
            and engine.numerics.max_norm == 0
            and first.low == -first.high
            and all(first.is_like(self._edits.get(param, Edit())) for param in params)
            and 0 < first.factor <= 1
        )
        if not one_for_all:
            self.settle()
            return
        self._edits.clear()
        self._changes.add(f"multiplies all by {first.factor!r}, to at most {first.high!r}")
        clip = Clip(fixed_factor=first.factor, max_value=first.high)
        engine.pending_clip = PendingClip(clip)

    def keep_clip(self, pending: PendingClip) -> None:
        """A step clipped them: as with torch's clipping, they are what it made of them."""
        self._norms.clear()
        clip = pending.clip
        factor: float | Tensor = 1.0 if clip.fixed_factor is None else clip.fixed_factor
        if pending.norm is not None and clip.max_norm > 0:
            factor = (clip.max_norm / (pending.norm + 1e-6)).clamp(max=1.0)
        edit = Edit((factor,), -clip.max_value, clip.max_value)
        for param in map(ParamId, range(len(self._engine.params))):
            if self.exists(param):
                self._edits[param] = edit

    def _carry_out(self, param: ParamId) -> None:
        edit = self._edits.pop(param)
        asked = f"{edit.factor!r}, to [{edit.low!r}, {edit.high!r}],"
        self._note(param, f"multiplies by {asked}")
        self._change(param, edit, wide=True)

    @torch.no_grad()
    def _change(self, param: ParamId, edit: Edit, *, wide: bool) -> None:
        """Carry an edit out on what this rank holds; `wide`: in fp32."""
        engine = self._engine
        chunk, slot = engine.place_of(param)
        scale = engine.scaler.read().scale if edit.limits else 1.0

        def change(shard: Tensor) -> None:
            for at, _ in self._own_parts(chunk, param):
                edit.carried_out(shard[at], scale)

        if chunk.gradient.exists and any(self._own_parts(chunk, param)):
            chunk.gradient.change(change, wide=wide)
        chunk.gradient.change_local(slot, lambda local: edit.carried_out(local, scale), wide=wide)
        self._norms.clear()

    def _note(self, param: ParamId, does: str) -> None:
        if self._engine.comm.world_size > 1:
            self._changes.add(f"{does} {self._engine.layout.params[param].name}")

    def _own_parts(self, chunk: Chunk, param: ParamId) -> Iterator[tuple[slice, int]]:
        """Where this rank's shard has a parameter, and with which of its elements it begins."""
        for part in self._engine.layout.shard_parts(chunk.spec, self._engine.comm.rank):
            if part.param == param:
                yield slice(part.offset, part.offset + part.numel), part.param_offset

    # -- values --

    def values(self, param: ParamId) -> Tensor:
        """A copy, fp32, in the parameter's shape. All ranks read it, but what is local."""
        self._check(param)
        engine, spec = self._engine, self._engine.layout.params[param]
        chunk, slot = engine.place_of(param)
        local = chunk.gradient.local(slot)
        if engine.comm.world_size == 1 or (self._is_local and not chunk.gradient.exists):
            total = self._assembled(param, lone=True)
        else:
            engine.read({f"gradient {param}": f"the gradient of {spec.name}"})
            total = self._read.pop(param)
            local = local if self._is_local else None
        if local is not None:
            total = total.add_(local)
        factor, limit = _clipped_by(engine)
        self._edits.get(param, Edit()).carried_out(total, engine.scaler.read().scale)
        return total.mul_(factor).clamp_(-limit, limit).view(spec.shape)

    def norm(self, param: ParamId, order: float) -> Tensor:
        """fp64 0-d. All ranks ask for one, of this parameter or of another."""
        self._check(param)
        engine = self._engine
        if self._edits.get(param, Edit()).limits:
            if engine.reducer.has_put_off:  # ranks ask for norms in orders of their own
                return _norm(self.values(param), order)
            self.settle()
        if self._is_local and not engine.reducer.synchronise:
            return _norm(self.values(param), order)
        if order not in self._norms:
            engine.read({f"norm {order}": f"a norm of order {order} of the gradients"})
        factor, limit = _clipped_by(engine)
        if limit < math.inf:
            return _norm(self.values(param), order)
        return self._norms[order][param] * (abs(self._edits.get(param, Edit()).factor) * factor)

    def bring(self, param: ParamId, *, wanted: bool) -> None:
        """All ranks: give one's gradient to those that read it; `wanted`: this is one of them."""
        total = self._assembled(param, lone=False)
        if wanted:
            self._read[param] = total

    @torch.no_grad()
    def measure(self, order: float) -> None:
        """All ranks: the norms of all gradients, in one all-reduce."""
        engine, comm = self._engine, self._engine.comm
        reduce_what_is_left(engine)
        sums = torch.zeros(len(engine.params), dtype=torch.float64, device=engine.backend.device)
        for chunk in engine.chunks:
            if not chunk.gradient.exists:
                continue
            shard = chunk.gradient.load()
            for part in engine.layout.shard_parts(chunk.spec, comm.rank):
                run = shard[part.offset : part.offset + part.numel]
                norm = _norm(run, order)
                if math.isinf(order):
                    sums[part.param] = torch.maximum(sums[part.param], norm)
                else:
                    sums[part.param] += norm**order
        sums = sums.to(comm.device)
        comm.all_reduce(sums, largest=math.isinf(order)).wait()
        sums = sums.to(engine.backend.device)
        self._norms[order] = sums if math.isinf(order) else sums ** (1 / order)

    @torch.no_grad()
    def _assembled(self, param: ParamId, *, lone: bool) -> Tensor:
        """What is reduced, fp32 and flat, with its loss scale; of this rank alone where `lone`."""
        engine = self._engine
        if not lone and not self._is_local:
            reduce_what_is_left(engine)
        chunk, _ = engine.place_of(param)
        numel = math.prod(engine.layout.params[param].shape)
        total = torch.zeros(numel, dtype=torch.float32, device=engine.backend.device)
        if chunk.gradient.exists:
            shard = chunk.gradient.load()
            for at, first in self._own_parts(chunk, param):
                total[first : first + at.stop - at.start] = shard[at]
        if not lone:
            there = total.to(engine.comm.device)
            engine.comm.all_reduce(there).wait()
            total = there.to(engine.backend.device)
        return total

    @property
    def _is_local(self) -> bool:
        """The last backward was not reduced: as in DDP, what is there is this rank's own."""
        reducer = self._engine.reducer
        return self._engine.comm.world_size > 1 and reducer.unsynchronised and reducer.leftover

    def _check(self, param: ParamId) -> None:
        """Raise RuntimeError where there is nothing to look at."""
        if not self.exists(param):
            raise RuntimeError(
                f"the gradient of {self._engine.layout.params[param].name} was dropped; "
                "p.grad.clone() keeps its values"
            )
        self._check_time()

    def _check_time(self) -> None:
        engine = self._engine
        engine.check_gradients_whole()
        if engine.comm.world_size > 1 and engine.in_pass():
            raise RuntimeError(
                "gradients are not reduced before a backward has ended; look at them behind it"
            )


def named_gradients(engine: Engine, *, full: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, gradient) of every parameter that has one on some rank; see `GeminiDDP`."""
    engine.call("named_gradients()")
    engine.check_gradients_whole()
    if not engine.reducer.synchronise:
        raise RuntimeError("named_gradients() inside no_sync: gradients are not reduced yet")
    there = reduce_what_is_left(engine)
    engine.gradients.resolve()
    factor, limit = _clipped_by(engine)
    for chunk in engine.chunks:
        if not chunk.gradient.exists or not any(there[slot.param] for slot in chunk.spec.slots):
            continue
        shard = (
            chunk.gradient.load().to(torch.float32, copy=True).mul_(factor).clamp_(-limit, limit)
        )
        if not full:
            for part in engine.layout.shard_parts(chunk.spec, engine.comm.rank):
                if there[part.param]:
                    name = engine.layout.params[part.param].name
                    yield name, shard[part.offset : part.offset + part.numel]
            continue
        whole = shard
        if engine.comm.world_size > 1:
            whole = torch.empty(chunk.spec.payload_numel, dtype=torch.float32, device=shard.device)
            engine.comm.all_gather(whole, shard, chunk.spec.id).wait()
        for slot in chunk.spec.slots:
            if there[slot.param]:
                spec = engine.layout.params[slot.param]
                yield spec.name, whole[slot.offset : slot.offset + slot.numel].view(spec.shape)


def reduce_what_is_left(engine: Engine) -> Sequence[bool]:
    """Reduce what `no_sync` or a late gradient has left; which parameters have one. Collective."""
    said = torch.tensor([*engine.present, engine.reducer.leftover], dtype=torch.float64)
    said = said.to(engine.comm.device)
    engine.comm.all_reduce(said).wait()
    *there, leftover = (count > 0 for count in said.tolist())
    if leftover:
        engine.reducer.reduce_leftovers()
    return there


def _norm(values: Tensor, order: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, order, dtype=torch.float64)
    return norm


def _clipped_by(engine: Engine) -> tuple[Tensor, float]:
    """What unscales, and clips where a clip was asked for: a factor, fp64 0-d, and a limit."""
    pending = engine.pending_clip
    clip = pending.clip if pending is not None else Clip()
    factor = 1.0 / engine.scaler.scale
    if clip.fixed_factor is not None:
        factor = factor * clip.fixed_factor
    elif pending is not None and pending.norm is not None and clip.max_norm > 0:
        factor = factor * (clip.max_norm / (pending.norm + 1e-6)).clamp(max=1.0)
    return factor, clip.max_value
