"""Loss of a causal language model inside its head: logits of all tokens never exist.

N tokens · V words, of which a rank has a part if layers are split · H width

Cross-entropy of a few tokens at a time, with its gradients at once: logits are [tokens, V] instead
of [N, V], and none are computed twice. With a head split by words, ranks exchange three numbers a
token (maximum, sum, the target's logit), and no logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from gemini.arguments import by_name
from gemini.chunk.local import is_dtensor, local_of

TOKENS = 1024
IGNORED = -100  # a label that does not count


@by_name
def chunk_loss(model: Any, tokens: int = TOKENS) -> None:
    """Make a causal language model of transformers compute its loss `tokens` tokens at a time.

    Changes the model in place, before it is wrapped or boosted. With `labels=` its output has the
    loss and no logits; without, it has the logits as before. Raises ValueError for another model,
    and in a forward for a model that changes its logits after its head.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens}; expected 1 or more, whose logits exist at a time")
    HeadLoss(model, tokens)


def has_causal_loss(model: Any) -> bool:
    """Whether a model's loss is that of the next token, from logits of one linear layer."""
    name = getattr(getattr(model, "loss_function", None), "__name__", "none")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return name == "ForCausalLMLoss" and isinstance(head, nn.Linear)


class HeadLoss:
    """Hooks of a language model that compute its loss in its head.

    tokens: None takes all at once, with a head that ranks split: the output then has logits too, a
    DTensor [B, T, V] of which each rank has its words. The first forward gathers the logits and
    sees whether the model changes them after its head; such a model keeps its own loss.
    """

    def __init__(self, model: Any, tokens: int | None = None, multiple: int = 1) -> None:
        if not has_causal_loss(model):
            raise ValueError(
                f"{type(model).__name__} has another loss, or no linear head; expected a causal "
                "language model of transformers, whose loss is computed where its head is"
            )
        self._tokens, self._multiple = tokens, multiple
        self._fits = None if tokens is None else True  # None: not seen yet
        self._model, self._plain = type(model).__name__, model.loss_function
        self._asked: tuple[Tensor, Tensor] | None = None  # targets [B, T], and what divides
        self._logits: Tensor | None = None
        self._mesh: DeviceMesh | None = None  # that splits the head
        self._given: Tensor | None = None  # what the head gave in their place
        head = model.get_output_embeddings()
        head.forward = partial(self._head, head, head.forward)
        model.loss_function = self.loss_of_head
        model.gives = self.given  # where a stage asks for it
        head.register_forward_hook(self._keep)
        model.register_forward_pre_hook(self._take, with_kwargs=True)
        model.register_forward_hook(self._give)

    def _take(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Pre-hook: note targets. Labels given by position leave the model's own loss in place."""
        self._asked = self._given = self._logits = None
        if not self._fits:
            return
        labels, targets = kwargs.get("labels"), kwargs.get("shift_labels")
        if labels is None:
            return
        targets = shifted(labels) if targets is None else targets
        items = kwargs.get("num_items_in_batch")
        items = (targets != IGNORED).sum() if items is None else torch.as_tensor(items)
        self._asked = targets, items.to(targets.device, torch.float32)

    def _head(self, head: Any, plain: Any, x: Tensor) -> Tensor:
        """Forward of the head: the loss in place of logits, when targets were given."""
        self._mesh = mesh = x.device_mesh if isinstance(x, DTensor) else None
        if self._asked is None:
            out: Tensor = plain(x)
            return out
        targets, items = self._asked
        weight, bias = head.weight, head.bias
        split, words = None, 0
        if isinstance(
            x, DTensor
        ):  # torch split the head: gradients of its input are parts of a sum
            x = x.to_local(grad_placements=[Partial()])
        if is_dtensor(weight) and mesh is not None:
            rows = -(-weight.shape[0] // mesh.size())  # as torch cuts them: the last has fewer
            split, words = _Split(mesh, mesh.get_local_rank() * rows), weight.shape[0]
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()
        loss, logits = _ChunkedLoss.apply(
            x.flatten(0, -2), weight, bias, targets.to(x.device).flatten(), items, self._tokens,
            split, self._multiple,
        )  # fmt: skip
        if self._tokens is None and split is not None:
            self._logits = split.whole(logits.view(*x.shape[:-1], -1), words)
        if mesh is not None:
            loss = DTensor.from_local(loss, mesh, [Replicate()], run_check=False)
        whole: Tensor = loss
        return whole

    def _keep(self, head: nn.Module, args: Any, output: Tensor) -> None:
        self._given = None if self._asked is None and self._fits is not None else output.detach()

    def loss_of_head(self, logits: Tensor, labels: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Loss function of the model: returns the head's loss. Raises ValueError."""
        given, is_same = self._given, False
        # the same memory: the model has handed the head's output on unchanged
        if given is not None:
            is_same = _place_of(local_of(logits)) == _place_of(local_of(given))
            self._fits = is_same if self._fits is None else self._fits
        if self._asked is None:
            return self._plain(logits, labels, *args, **kwargs)
        if not is_same:
            raise ValueError(
                f"{self._model} does more to its logits than its head; expected a model whose loss "
                "is of what its head gives: leave chunk_loss away"
            )
        return logits

    def _give(self, model: nn.Module, args: Any, output: Any) -> Any:
        return output if getattr(model, "gives_itself", False) else self.given(output)

    def given(self, output: Any) -> Any:
        """Output of the model, with logits as this object's options say."""
        if self._asked is None:
            seen, self._given = self._given is not None and self._fits, None
            if not seen or self._mesh is None or not isinstance(output, Mapping):
                return output
            whole = DTensor.from_local(
                output["logits"].detach(), self._mesh, [Replicate()], run_check=False
            )
            return type(output)(**{**output, "logits": whole.redistribute(placements=[Shard(2)])})
        logits, self._asked, self._given, self._logits = self._logits, None, None, None
        if not isinstance(output, Mapping):
            return (output[0], *(() if logits is None else (logits,)), *output[2:])
        found = {**output, "logits": logits}
        return type(output)(**{name: value for name, value in found.items() if value is not None})


def _place_of(tensor: Tensor) -> tuple[int, int | torch.SymInt]:
    """Memory of a tensor, which may be a fake one."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


class _Split:
    """Split of words over ranks: this rank's first word, and sums and maxima over ranks."""

    def __init__(self, mesh: DeviceMesh, first: int) -> None:
        self._mesh, self.first = mesh, first

    def over_ranks(self, x: Tensor, most: bool = False) -> Tensor:
        how = dist.ReduceOp.MAX if most else dist.ReduceOp.SUM
        dist.all_reduce(x, how, group=self._mesh.get_group())
        return x

    def whole(self, logits: Tensor, words: int) -> DTensor:
        """DTensor [B, T, words] of the logits [B, T, V] that each rank computed."""
        batch, time, _ = logits.shape
        return DTensor.from_local(
            logits, self._mesh, [Shard(2)], run_check=False,
            shape=torch.Size((batch, time, words)), stride=(time * words, words, 1),
        )  # fmt: skip


class _ChunkedLoss(Function):
    """Loss of x [N, H], weight [V, H], targets [N] -> (sum of losses / items, logits or none).

    Logits are [N, V]. Forward keeps gradients of the sum, the weight's and the bias's in fp32;
    backward divides them by items.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, items: Tensor,
        tokens: int | None, split: _Split | None, multiple: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        total = torch.zeros((), device=x.device)
        dx = torch.empty_like(x) if of_x else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        db = torch.zeros_like(bias, dtype=torch.float32) if of_bias and bias is not None else None
        logits, words = x.new_empty(0), len(weight)
        wide = in_multiples(weight, multiple)
        wide_bias = None if bias is None else in_multiples(bias, multiple)
        # gradients are made here and not in backward, as these logits exist only now
        for begin in range(0, len(x), tokens or max(1, len(x))):
            rows = slice(begin, begin + (tokens or len(x)))
            logits = nn.functional.linear(x[rows], wide, wide_bias)[:, :words]
            loss, dlogits = _of_rows(logits, targets[rows], split)
            total += loss
            dlogits = in_multiples(dlogits.to(x.dtype), multiple, dim=1)
            if dx is not None:
                torch.mm(dlogits, wide, out=dx[rows])
            if dw is not None:
                dw += (dlogits.T @ x[rows])[:words]
            if db is not None:
                db += dlogits.sum(0)[:words]
        ctx.save_for_backward(dx, dw, db, items)
        ctx.dtypes = x.dtype, weight.dtype
        if tokens is not None:
            logits = x.new_empty(0)
        ctx.mark_non_differentiable(logits)
        return total / items, logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        dx, dw, db, items = ctx.saved_tensors
        factor = grad / items
        to_x, to_weight = ctx.dtypes
        return (
            None if dx is None else (dx * factor).to(to_x),
            None if dw is None else (dw * factor).to(to_weight),
            None if db is None else (db * factor).to(to_weight),
            None, None, None, None, None,
        )  # fmt: skip


def _of_rows(logits: Tensor, targets: Tensor, split: _Split | None) -> tuple[Tensor, Tensor]:
    """Sum of the losses of logits [n, V], and its gradient [n, V] in fp32."""
    wide = logits.float()
    # one maximum for all ranks: their sums add up only if all exponents are shifted alike
    most = wide.amax(-1)
    if split is not None:
        most = split.over_ranks(most, most=True)
    weights = (wide - most[:, None]).exp_()
    sums = weights.sum(-1)
    counts = targets != IGNORED
    local = targets - (0 if split is None else split.first)
    here = counts & (local >= 0) & (local < wide.shape[-1])
    at = local.where(here, 0)[:, None]
    picked = wide.gather(-1, at)[:, 0].where(here, 0.0)
    if split is not None:
        sums, picked = split.over_ranks(sums), split.over_ranks(picked)
    losses = (most + sums.log() - picked).where(counts, 0.0)
    weights.div_(sums[:, None])
    weights.scatter_add_(-1, at, -here.to(weights.dtype)[:, None])
    return losses.sum(), weights.mul_(counts[:, None])


def shifted(labels: Tensor) -> Tensor:
    """Labels shifted to the token before each, [B, T]; `IGNORED` at the end."""
    return nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def in_multiples(x: Tensor, multiple: int, dim: int = 0) -> Tensor:
    """Pad `dim` of `x` with zeros at its end, up to the next multiple."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    return nn.functional.pad(x, (*(0,) * (2 * (x.dim() - 1 - dim)), 0, missing))
