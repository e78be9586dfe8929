"""`gemini.accumulate`: forward and backward of several micro-batches, layer by layer.

k micro-batches · n layers · h[i][j] hidden states of micro-batch j before layer i

One micro-batch after the other brings every layer's weights 2k times a step. Here they come twice:
layer i runs forward with all micro-batches without a graph, of which the boundaries h[i][j] stay;
in backward it runs forward again with one micro-batch after the other, each followed by its
backward. Gradients of a parameter are added up in the order of micro-batches, and each micro-batch
draws the random numbers of the other order (`streams`), so that bits are those of the other order.

A weight that prologue and epilogue share (a tied embedding) has, of one micro-batch, one gradient:
the sum of both. So epilogues run twice: once for h[n][j], and at the end once more, beside the
prologue, for that weight.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gemini.arguments import by_name
from gemini.ddp import GeminiDDP
from gemini.memtracer.module_calls import in_backward
from gemini.placement.orders import (
    BATCHES,
    LAYERS,
    ORDERS,
    Accumulated,
    bytes_read,
    counted_bytes,
)
from gemini.placement.plan import Plan
from gemini.placement.tiers import Tier
from gemini.runtime.engine import GeminiEngine
from gemini.trees import tensors_in
from gemini.units import ChunkId, ParamId

from .chain import (
    REMEDY,
    Chain,
    NoChainError,
    Recorded,
    Surveyed,
    goes_around,
    leaves_of,
    refuse,
    without_cache,
)
from .iteration import Iteration, params_among
from .streams import NONE, Draws, Streams

T = TypeVar("T")
FINE = "a loss"
CHAIN = "a chain"  # what a rank says that refuses nothing: a meeting has no empty words

_Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Known:
    """What whole forwards have shown of one kind of micro-batches: of the last one, and what one
    of each shape draws."""

    surveyed: Surveyed
    draws: dict[_Shapes, Draws]

    @property
    def is_random(self) -> bool:
        return any(drawn != NONE for drawn in self.draws.values())

    def unmeasured(self, shapes: Sequence[_Shapes]) -> list[int]:
        """The first micro-batch of each shape whose draws nobody knows; none if nothing is
        random."""
        if not self.is_random:
            return []
        first = {shape: j for j, shape in reversed(list(enumerate(shapes)))}
        return [j for shape, j in first.items() if shape not in self.draws]

    def drawn(self, shape: _Shapes) -> Draws:
        return self.draws.get(shape, NONE)


# By module, list of layers, mode and parts of a micro-batch
_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Known]] = weakref.WeakKeyDictionary()


@by_name
def accumulate(
    model: GeminiDDP,
    micro_batches: Sequence[Any],
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    order: str | None = None,
    layers: str | None = None,
) -> list[Tensor]:
    """Run forward and backward of all micro-batches; `optimizer.step()` follows.

    micro_batches: each a mapping of keyword arguments, a tuple or list of positional ones, or one
        tensor. All ranks give the same number.
    loss: (output, micro-batch) -> scalar; None is `output.loss`. Gradients are those of the sum of
        losses: a mean over micro-batches or tokens is divided here.
    order: `"layers"`: all micro-batches run through a layer before the next one, so weights come
        twice a step, layers run their forward twice, and boundaries between layers, [k] hidden
        states each, stay until backward. `"batches"`, and for one micro-batch either: one after the
        other, with the same bits. None: layers if weights come from another tier or other ranks,
        else batches, which then compute less, and which alone go with `canonical=True`.
    layers: name of the `ModuleList` or `Sequential` of layers that follow each other; None is the
        model's only `ModuleList`, as decoders of Hugging Face have it.

    Returns the losses, detached. Random numbers are those of a loop of forwards and backwards, in
    either order: layer by layer a whole forward without a graph measures, once for each new shape
    of a micro-batch, what a model with dropout draws.

    Raises ValueError for a model that is no chain of layers, before any gradient is changed; for a
    micro-batch that draws other random numbers than one of its shapes did before, which may have
    dropped all gradients, and then says that `zero_grad` must follow; and
    RuntimeError without gradients, inside a backward, in a pipeline, for another number of
    micro-batches than another rank's, on all ranks, or if another rank fails in its loss.
    """
    batches = list(micro_batches)
    _check(model, batches, order)
    engine = model.engine
    if order is None:
        by_layers = not engine.is_canonical and _weights_come(engine.plan)
        order = LAYERS if by_layers else BATCHES
    if engine.comm.world_size > 1:
        engine.call(f"gemini.accumulate() of {len(batches)} micro-batches, {order=}")
    work = _Work(model, batches, loss)
    one_by_one = order == BATCHES or len(batches) == 1
    manager = engine.manager
    before = manager.gathers_of.copy()
    losses = work.by_batches() if one_by_one else work.by_layers(layers)
    gathers = manager.gathers_of - before
    done = _accumulated(engine, BATCHES if one_by_one else order, losses, gathers)
    engine.cycle.has_accumulated(done)
    return losses


def _accumulated(
    engine: GeminiEngine, order: str, losses: Sequence[Tensor], gathers: Mapping[ChunkId, int]
) -> Accumulated:
    """What a step read, beside what the plan of its last iteration says of all of them."""
    count = len(losses)
    planned = engine.planning.plan_of_forward(engine.sampler.signature)
    times = count if order == BATCHES else 1
    predicted = None if planned is None else bytes_read(planned) * times
    return Accumulated(order, count, predicted, counted_bytes(engine.plan, gathers))


def _weights_come(plan: Plan) -> bool:
    """Whether forwards bring weights from another tier or from other ranks."""
    return any(
        not shard.never_released and (shard.param_home is not Tier.DEVICE or chunk.num_shards > 1)
        for shard, chunk in zip(plan.shards, plan.chunks, strict=True)
    )


def _check(model: GeminiDDP, batches: Sequence[Any], order: str | None) -> None:
    if not isinstance(model, GeminiDDP):
        raise ValueError(f"model is a {type(model).__name__}; expected a GeminiDDP")
    if not batches:
        raise ValueError("micro_batches is empty; expected at least one")
    if order not in (None, *ORDERS):
        raise ValueError(f"order={order!r}; expected one of {', '.join(ORDERS)}, or None")
    if order == LAYERS and model.engine.is_canonical:
        raise ValueError(
            'order="layers" sums micro-batches of one rank before those of others, and the module '
            'was wrapped with canonical=True; expected order="batches", or None'
        )
    if model.engine.is_unwrapped:
        raise RuntimeError("this module was unwrapped; use model.module, or wrap it again")
    if in_backward() or not torch.is_grad_enabled():
        raise RuntimeError("gemini.accumulate() inside a backward or no_grad() forms no gradients")
    if model.engine.together is not None:
        raise RuntimeError(
            "gemini.accumulate() of a stage of a pipeline; the schedule runs its micro-batches"
        )


@dataclass(slots=True)
class _Batch:
    """One micro-batch on its way through the layers.

    boundaries: h[0..n] as `Iteration.keep` has them. states: of generators before layer i, and
    before the epilogue. grad: of the hidden states that backward has come to.
    """

    recorded: Recorded
    boundaries: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    grad: Tensor | None = None


class _Work:
    """One call of `accumulate`."""

    def __init__(
        self,
        model: GeminiDDP,
        batches: Sequence[Any],
        loss: Callable[[Any, Any], Tensor] | None,
    ) -> None:
        self._model, self._batches, self._loss = model, batches, loss
        engine = model.engine
        self.streams = Streams(engine.backend.device)

    def _loss_of(self, output: Any, batch: Any) -> Tensor:
        found: Any
        if self._loss is not None:
            found = self._loss(output, batch)
        elif isinstance(output, Mapping):
            found = output.get("loss")
        else:
            found = getattr(output, "loss", None)
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise ValueError(
                f"no loss: {type(found).__name__} of a {type(output).__name__}; expected "
                "loss=lambda output, batch: ..., a scalar, or an output with a loss"
            )
        return found

    # -- one micro-batch after the other --

    def by_batches(self) -> list[Tensor]:
        losses = []
        last = len(self._batches) - 1
        engine = self._model.engine
        several = engine.comm.world_size > 1
        for j, batch in enumerate(self._batches):
            with self._model.no_sync() if several and j < last else nullcontext():
                found = self.together(partial(self._whole, batch))
                found.backward()
            losses.append(found.detach())
        return losses

    def _whole(self, batch: Any) -> Tensor:
        args, kwargs = self._given(batch)
        return self._loss_of(self._model(*args, **kwargs), batch)

    def together(self, compute: Callable[[], T]) -> T:
        """Result of what every rank computes, and that ends with the loss. Collective.

        Raises what this rank raised, or RuntimeError if another rank alone did: its collectives up
        to here are those of all, and those that follow would wait for it.
        """
        comm = self._model.engine.comm
        failure: Exception | None = None
        try:
            found = compute()
        except Exception as error:
            failure = error
        texts: list[str] = []
        if comm.world_size > 1:
            own = FINE if failure is None else f"{type(failure).__name__}: {failure}"
            texts = comm.tell("tells of its loss in gemini.accumulate()", own)
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text != FINE:
                raise RuntimeError(
                    f"rank {rank} failed in gemini.accumulate(), which ended on all: {text}"
                )
        return found

    def _given(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a forward."""
        if isinstance(batch, Mapping):
            return (), without_cache(self._model.module, batch)
        args = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        return args, without_cache(self._model.module, {})

    # -- one layer after the other --

    def by_layers(self, layers: str | None) -> list[Tensor]:
        chain = Chain(self._model.module, layers)
        with self.streams.moved():
            return self._by_layers(chain)

    def _by_layers(self, chain: Chain) -> list[Tensor]:
        surveyed, is_new = self._survey(chain)
        with Iteration(self._model, chain.layers, chain.name, self._batches) as iteration:
            walk = _Walk(self, chain, surveyed, iteration)
            walk.prologues()
            walk.forwards()
            if is_new:
                walk.compare(surveyed.loss)
            losses = walk.epilogues()
            walk.backwards()
            walk.ends()
        return losses

    def _survey(self, chain: Chain) -> tuple[Surveyed, bool]:
        """What whole forwards have shown: once for a kind of micro-batches the last one's, and if
        anything is random, one of each new shape. Whether the kind is new, too."""
        batch, last = self._batches[-1], len(self._batches) - 1
        parts = tuple(sorted(batch)) if isinstance(batch, Mapping) else len(self._given(batch)[0])
        kinds = _KNOWN.setdefault(self._model, {})
        key = (chain.name, tuple(map(id, chain.layers)), chain.root.training, parts)
        is_new = key not in kinds
        if is_new:
            surveyed, drawn = self._whole_survey(chain, last)
            kinds[key] = _Known(surveyed, {self._shapes[last]: drawn})
        known = kinds[key]
        wanted = set(known.unmeasured(self._shapes))
        if is_new and known.is_random:  # its loss is to be that of its own random numbers
            wanted.add(last)
        wanted = self._of_all_ranks(wanted)
        for j, shape in enumerate(self._shapes):
            if j in wanted:
                self.streams.begin(j)
                known.surveyed, known.draws[shape] = self._whole_survey(chain, j)
            self.streams.expect_draws([known.drawn(one) for one in self._shapes[: j + 1]])
        return known.surveyed, is_new

    @property
    def _shapes(self) -> list[_Shapes]:
        return [
            tuple(tuple(t.shape) for t in tensors_in(batch, objects=1)) for batch in self._batches
        ]

    def _of_all_ranks(self, wanted: Collection[int]) -> set[int]:
        """Micro-batches of which any rank wants a whole forward. Collective, as a forward is."""
        comm = self._model.engine.comm
        if comm.world_size == 1:
            return set(wanted)
        told = comm.tell("tells which forwards of gemini.accumulate() are new",
                         f"new: {sorted(wanted)}")  # fmt: skip
        return {int(j) for text in told for j in re.findall(r"\d+", text)}

    def _whole_survey(self, chain: Chain, j: int) -> tuple[Surveyed, Draws]:
        """What a whole forward of one micro-batch shows, from the generators' present state."""
        before = self.streams.now()
        found = self.together(partial(self._surveyed, chain, self._batches[j]))
        drawn = None
        try:
            drawn = Draws.between(before, self.streams.now())
        except NoChainError as error:
            found = error
        self.agree(found if isinstance(found, NoChainError) else None)
        assert isinstance(found, Surveyed) and drawn is not None
        return found, drawn

    @torch.no_grad()
    def _surveyed(self, chain: Chain, batch: Any) -> Surveyed | NoChainError:
        try:
            return chain.survey(lambda: self._whole(batch).float())
        except NoChainError as error:
            return error

    def agree(self, refusal: NoChainError | None) -> None:
        """Raise what any rank refuses, on all: what a survey finds may depend on data. Collective,
        once for a kind of micro-batches."""
        comm = self._model.engine.comm
        if comm.world_size > 1:
            own = str(refusal or CHAIN)
            for rank, text in enumerate(comm.tell("tells what gemini.accumulate() found", own)):
                if refusal is None and text != CHAIN:
                    refusal = NoChainError(f"on rank {rank}: {text}")
        if refusal is not None:
            self.forget_survey()
            raise refusal

    def forget_survey(self) -> None:
        _KNOWN.pop(self._model, None)


class _Walk:
    """Passes of all micro-batches over a chain, in one iteration of the engine."""

    def __init__(self, work: _Work, chain: Chain, surveyed: Surveyed, iteration: Iteration) -> None:
        self._work, self._chain, self._surveyed = work, chain, surveyed
        self._iteration = iteration
        self._streams = work.streams
        self._batches: list[_Batch] = []
        # leaves of the prologue, and those of them that epilogues use, too
        self._of_prologue: dict[int, Tensor] = {}
        self._is_tied = False
        # whether h[i] needs a gradient; and for h[0]
        self._needs: list[bool] = []

    def _root(self, j: int) -> Any:
        args, kwargs = self._work._given(self._work._batches[j])
        return self._iteration.root(args, kwargs)

    # -- forward --

    def prologues(self) -> None:
        """Find h[0][j] and the arguments of all layers."""
        for j in range(len(self._work._batches)):
            self._streams.begin(j)
            with torch.set_grad_enabled(j == 0):  # which shows what has a gradient there
                recorded = self._chain.prologue(self._surveyed, partial(self._root, j))
            if j == 0:
                self._of_prologue = leaves_of([recorded.hidden])
            hidden = recorded.hidden.detach()
            batch = _Batch(Recorded(hidden, recorded.calls), states=[self._streams.now()])
            batch.boundaries.append(self._iteration.keep(hidden))
            batch.recorded = Recorded(hidden.new_empty(0), recorded.calls)
            self._batches.append(batch)
        trained = bool(self._of_prologue)
        for layer in self._chain.layers:
            self._needs.append(trained)
            trained = trained or any(param.requires_grad for param in layer.parameters())
        self._needs.append(trained)

    @torch.no_grad()
    def forwards(self) -> None:
        """Run every layer with all micro-batches, without graphs.

        The last first: what is kept last is read first, and backwards begin with micro-batch 0.
        """
        for i, layer in enumerate(self._chain.layers):
            with self._iteration.visit(i, backward=False):
                for batch in reversed(self._batches):
                    hidden = self._iteration.brought(batch.boundaries[i])
                    self._streams.go_on(batch.states[i])
                    with self._iteration.saving(layer):
                        output = batch.recorded.calls[i](layer, hidden)
                    batch.states.append(self._streams.now())
                    hidden = self._chain.hidden_of(i, output)
                    batch.boundaries.append(self._iteration.keep(hidden))

    # -- backward --

    @torch.no_grad()
    def compare(self, whole: Tensor) -> None:
        """Refuse if the last micro-batch's loss is not its loss in a whole forward.

        Layers ran it first of all, so what a layer left behind for the epilogue is another's.
        """
        self._iteration.is_no_sample()
        j = len(self._batches) - 1
        hidden = self._iteration.brought(self._batches[j].boundaries[-1])
        loss, _ = self._work.together(partial(self._epilogue, j, hidden))
        self._work.agree(_compared(loss, whole))

    def epilogues(self) -> list[Tensor]:
        """Run norm, head and loss of every micro-batch, back to h[n][j]. Returns losses."""
        losses = []
        for j, batch in enumerate(self._batches):
            leaf = self._leaf(batch, len(self._chain.layers))
            found, hidden = self._work.together(partial(self._epilogue, j, leaf))
            losses.append(found.detach())
            if goes_around(found, hidden):
                self._work.forget_survey()
                refuse(f"what is computed before {self._chain.name}.0 is used behind the last "
                       "layer, too, and its gradient is a sum with that of the layers")  # fmt: skip
            del hidden
            leaves = leaves_of([found])
            tied = self._of_prologue.keys() & leaves.keys()
            self._is_tied |= bool(tied)
            own = [leaf for key, leaf in leaves.items() if key not in tied]
            if own:
                self._iteration.backward([found], [None], own if tied else None)
            batch.grad = leaf.grad
        self._iteration.reduce(len(self._chain.layers), self._params_of_prologue())
        return losses

    def _params_of_prologue(self) -> tuple[ParamId, ...]:
        return params_among(list(self._of_prologue.values()))

    def _epilogue(self, j: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of a micro-batch from h[n][j], and h[0][j] with its graph."""
        batch = self._batches[j]
        self._streams.begin(j)
        output, first = self._chain.around(
            self._surveyed,
            hidden.view_as(hidden),  # a leaf has no place in the graph for hooks to watch
            lambda: self._root(j),
            lambda: self._streams.go_on(batch.states[-1]),
        )
        loss = self._work._loss_of(output, self._work._batches[j])
        try:
            self._streams.check_end(j)
        except NoChainError:
            self._work.forget_survey()
            raise
        return loss, first

    def _leaf(self, batch: _Batch, i: int) -> Tensor:
        """h[i][j], as a leaf that gets its gradient if anything before it is trained."""
        hidden = self._iteration.brought(batch.boundaries[i]).detach()
        return hidden.requires_grad_(self._needs[i])

    def backwards(self) -> None:
        """Run every layer again, from the last to the lowest that is trained, and its backward."""
        params = self._params_of_prologue()
        for i in reversed(range(len(self._chain.layers))):
            if not self._needs[i + 1]:
                break
            with self._iteration.visit(i, backward=True):
                for batch in self._batches:
                    if batch.grad is not None:
                        batch.grad = self._backward(batch, i)
            self._iteration.reduce(i, params)

    def _backward(self, batch: _Batch, i: int) -> Tensor | None:
        layer, leaf = self._chain.layers[i], self._leaf(batch, i)
        self._streams.go_on(batch.states[i])
        with self._iteration.saving(layer):
            output = batch.recorded.calls[i](layer, leaf.view_as(leaf) if self._needs[i] else leaf)
        grad, hidden = batch.grad, self._chain.hidden_of(i, output)
        batch.grad = None
        if not (self._is_tied and i == len(self._chain.layers) - 1):  # `ends` reads it
            batch.boundaries[i + 1] = None
        del output
        self._iteration.backward([hidden], [grad])
        return leaf.grad

    def ends(self) -> None:
        """Form the gradients of prologues, each with the one of its epilogue if they share it."""
        if not self._of_prologue:
            return
        for j, batch in enumerate(self._batches):
            outputs: list[Tensor] = []
            grads: list[Tensor | None] = []
            if self._is_tied:
                last = self._iteration.brought(batch.boundaries[-1]).detach()
                found, hidden = self._epilogue(j, last)
                outputs, grads = [found], [None]
            else:
                self._streams.begin(j)
                recorded = self._chain.prologue(self._surveyed, partial(self._root, j))
                hidden = recorded.hidden
            if batch.grad is not None:
                outputs, grads = [*outputs, hidden], [*grads, batch.grad]
            batch.boundaries.clear()
            if outputs:
                self._iteration.backward(outputs, grads, list(self._of_prologue.values()))
            batch.grad = None


def _compared(loss: Tensor, whole: Tensor) -> NoChainError | None:
    """Refusal, if the loss of a micro-batch is not the one of a whole forward."""
    if _same_bits(loss.float(), whole):
        return None
    return NoChainError(
        f"the loss layer by layer is {float(loss)!r}, and {float(whole)!r} in one forward: what "
        f"this model computes is more than its chain; {REMEDY}"
    )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    both_nan = bool(one.isnan().all()) and bool(other.isnan().all())
    return both_nan or bool((one == other).all())
