"""Sharing of a causal language model's sequences: each rank computes with its own tokens.

B rows · T tokens of a sequence · P ranks · s = T / P

All ranks of a sequence get the whole batch. Labels are shifted before it is cut, because the next
token may be another rank's. The loss is the mean over all tokens, on every rank.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from gemini.mesh.head_loss import IGNORED, shifted

from .attention import positions, ring_attention, ulysses
from .cut import TransformerStage

MODES = ("all_to_all", "ring_attn")
_CAUSAL = ("ForCausalLMLoss", "loss_of_head")  # transformers', and `chunk_loss`'s
_NAME = "gemini_shared_sequence"
_OF_BLOOM = "BloomAttention"
_WANTED = (
    "expected a model whose layers all compute it by transformers' AttentionInterface, or BLOOM. "
    "Others see this rank's tokens alone: use enable_sequence_parallelism with 'split_gather'"
)
# transformers calls attention as one function for all models, which finds its model's object here
_shared: weakref.WeakKeyDictionary[nn.Module, SharedSequence] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """Options of attention over sequences that ranks share.

    mode: one of `MODES`. inner: ranks of an inner ring; None is all. whole: logits are gathered.
    """

    mode: str
    inner: int | None = None
    whole: bool = False


def share_sequence(
    model: Any, mesh: DeviceMesh, asked: SequenceParallel, stages: Sequence[Any] = ()
) -> SharedSequence:
    """Make a model of transformers compute with a part of every sequence; `mesh` is 1-D.

    stages: of a pipeline, hooked instead of the model; their inputs are parts already, see
    `SharedSequence.part`.
    Raises ValueError for another model, another loss than that of the next token, or attention to
    something else than all tokens before.
    """
    check_shareable(model)
    config: Any = model.config
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, flash_attention_mask)  # none: else masks are made whole
    config._attn_implementation = _NAME
    made = SharedSequence(model, mesh.get_group(), asked)
    for one in stages or (model,):
        made.hook(one)
    return made


def check_shareable(model: Any) -> None:
    """Raise ValueError for a model whose sequences cannot be shared; see `share_sequence`."""
    config: Any = getattr(model, "config", None)
    loss = getattr(getattr(model, "loss_function", None), "__name__", "none")
    if not hasattr(config, "_attn_implementation") or loss not in _CAUSAL:
        raise ValueError(
            f"{type(model).__name__} has its sequences split; expected a causal language model of "
            "transformers, whose attention and loss can be those of a part"
        )
    own = any(type(module).__name__ == _OF_BLOOM for module in model.modules())
    if not own and not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} computes its attention itself, and its sequences are split; "
            f"{_WANTED}"
        )
    if getattr(config, "attention_chunk_size", None):
        raise ValueError(
            f"{type(model).__name__} attends within chunks (attention_chunk_size), and its "
            "sequences are split; expected a model whose tokens see all before them"
        )


class SharedSequence:
    """Hooks of one model with shared sequences: inputs, outputs and attention."""

    def __init__(self, model: nn.Module, group: Any, asked: SequenceParallel) -> None:
        self._group, self._asked = group, asked
        self._rank, self._ranks = dist.get_rank(group), group.size()
        self._name = type(model).__name__
        self._takes = inspect.signature(type(model).forward)
        self._length = 0  # of whole sequences, in this forward
        self._calls = 0  # of attention, in this forward
        self._compared = False

    def hook(self, model: Any) -> None:
        """Hook a model, or a stage of it. These hooks run first, so that others see parts."""
        for module in model.modules():
            _shared[module] = self
            if type(module).__name__ == _OF_BLOOM:
                _attend_with_slopes(module, model.config.num_attention_heads)
        if isinstance(model, TransformerStage):
            take, gives = self._begin, vars(model).get("gives", lambda output: output)
            vars(model)["gives"] = lambda output: self.given(gives(output))
        else:
            take = self._take
            model.register_forward_hook(lambda model, args, output: self.given(output))
        model.register_forward_pre_hook(take, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._check_calls, prepend=True)

    def _places(self, device: torch.device, rank: int | None = None) -> Tensor:
        rank = self._rank if rank is None else rank
        return positions(
            self._asked.mode == "ring_attn", self._length, rank, self._ranks
        ).to(device)  # fmt: skip

    # -- what a model is called with --

    def _take(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Pre-hook of a whole model: cut its inputs into this rank's part."""
        own = self.part(self._named(model, args, kwargs))
        if "use_cache" in self._takes.parameters:
            own["use_cache"] = False
        return self._begin(model, (), own)

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Pre-hook of a model or stage that is called with a part.

        Divides the number of items by P: this rank's loss is P times its share of the mean,
        because gradients are averaged over ranks.
        """
        self._calls = 0
        items = kwargs.get("num_items_in_batch")
        if items is not None:
            kwargs = kwargs | {"num_items_in_batch": torch.as_tensor(items).sum() / self._ranks}
        return args, kwargs

    def part(self, given: dict[str, Any]) -> dict[str, Any]:
        """Part of a model's arguments that this rank computes with. Collective the first time.

        `num_items_in_batch`, if not given, is [B]: items of each row. Raises ValueError.
        """
        ids = given.get("input_ids")
        ids = given.get("inputs_embeds") if ids is None else ids
        if not isinstance(ids, Tensor) or given.get("past_key_values") is not None:
            raise ValueError(
                f"{self._name}, whose sequences are split, is called without input_ids and "
                "inputs_embeds, or with past_key_values; expected whole sequences: generate with "
                "a model that was not boosted so"
            )
        rows, self._length = ids.shape[:2]
        pieces = self._ranks * (2 if self._asked.mode == "ring_attn" else 1)
        if self._length % pieces:
            raise ValueError(
                f"a sequence of {self._length} is split into {pieces} pieces; expected a length "
                "that they divide: pad it on the right, with -100 in labels"
            )
        self._compare(ids)
        given["position_ids"] = self._counted(given.get("position_ids"), ids)
        self._drop_mask(given)
        self._set_labels(given)
        at = self._places(ids.device)
        for name, value in given.items():
            if isinstance(value, Tensor) and value.shape[:2] == (rows, self._length):
                given[name] = value.index_select(1, at.to(value.device))
        return given

    def _named(self, model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        """Arguments of a call, all by name."""
        bound = self._takes.bind(model, *args, **kwargs).arguments
        others = [
            one.name for one in self._takes.parameters.values() if one.kind == one.VAR_KEYWORD
        ]
        found = dict(list(bound.items())[1:])
        for name in others:
            found |= found.pop(name, {})
        return found

    def _compare(self, ids: Tensor) -> None:
        """Raise ValueError on all ranks if they have different tokens; in the first call only."""
        if self._compared:
            return
        most = ids.detach().clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        # a rank with the maximum sees no difference, and would wait alone for the others
        differs = (most != ids).any().to(torch.int32)
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=self._group)
        if differs:
            raise ValueError(
                f"{self._ranks} ranks share each sequence, and were given different ones; expected "
                "the same batch on all of them: plugin.prepare_dataloader gives it"
            )
        self._compared = True

    def _counted(self, given: Tensor | None, ids: Tensor) -> Tensor:
        """Position ids of the whole sequence, [B, T]. Raises ValueError for packed ones.

        A model that counts the tokens of a part itself would begin at 0.
        """
        if given is None:
            given = torch.arange(self._length, device=ids.device)[None]
        elif not bool((given.diff() == 1).all()):
            raise ValueError(
                "position_ids of a split sequence count from token to token; expected one document "
                "a row: packed ones would see each other"
            )
        return given.expand(len(ids), -1)

    def _drop_mask(self, given: dict[str, Any]) -> None:
        """Remove the attention mask. Raises ValueError unless all padding is on the right, without
        labels: causal attention then needs no mask."""
        mask = given.pop("attention_mask", None)
        if mask is None:
            return
        labels = given.get("labels")
        if labels is not None and given.get("shift_labels") is None:
            given["shift_labels"] = shifted(labels)
        targets = given.get("shift_labels")
        padded = mask == 0
        if (
            mask.dim() != 2
            or bool((padded[:, :-1] & ~padded[:, 1:]).any())
            or (targets is not None and bool((padded & (targets != IGNORED)).any()))
        ):
            raise ValueError(
                f"attention_mask {tuple(mask.shape)} of a split sequence; expected zeros on the "
                "right of each row alone, where labels are -100"
            )

    def _set_labels(self, given: dict[str, Any]) -> None:
        if given.get("labels") is None:
            return
        if given.get("shift_labels") is None:
            given["shift_labels"] = shifted(given["labels"])
        if given.get("num_items_in_batch") is None:
            given["num_items_in_batch"] = (given["shift_labels"] != IGNORED).sum(1)

    # -- what it gives --

    def _check_calls(self, model: Any, args: Any, output: Any) -> None:
        """Hook: raise ValueError if some layer did not call the shared attention."""
        layers = getattr(model.config, "num_hidden_layers", 1)
        layers = model.depth if isinstance(model, TransformerStage) else layers
        if self._calls < layers:
            raise ValueError(
                f"{self._name} called attention {self._calls} times in {layers} layers; {_WANTED}"
            )

    def given(self, output: Any) -> Any:
        """Output with the loss of all tokens, and their logits if `whole`. Collective.

        Raises ValueError for an output without names.
        """
        if not isinstance(output, Mapping):
            raise ValueError(
                f"{self._name} gives a {type(output).__name__}; expected what has names: leave "
                "return_dict=False away"
            )
        found = dict(output)
        if isinstance(found.get("loss"), Tensor):
            found["loss"] = _Mean.apply(found["loss"], self._group)
        if self._asked.whole and isinstance(found.get("logits"), Tensor):
            device = found["logits"].device
            order = torch.cat([self._places(device, rank) for rank in range(self._ranks)])
            found["logits"] = _Gathered.apply(found["logits"], order, self._group)
        return type(output)(**found)

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, kwargs: Any,
        slopes: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of this rank's tokens, [B, H, s, D]. Collective. slopes: [H] of ALiBi.

        Raises ValueError for attention to something else than all tokens before.
        """
        self._calls += 1
        window, causal = kwargs.get("sliding_window"), kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        dropout = kwargs.get("dropout", 0.0)
        ring = self._asked.mode == "ring_attn"
        others = [n for n in ("softcap", "s_aux", "position_bias") if kwargs.get(n) is not None]
        if not causal or others or (window is not None and window < self._length):
            what = others or ("sliding_window" if causal else "attention to later tokens")
            raise ValueError(
                f"{type(module).__name__} has {what}, and its sequence of {self._length} is split; "
                "expected attention to all tokens before, and no more"
            )
        if dropout and (ring or slopes is not None):
            where, other = "in a ring", ", or sequence_parallelism_mode='all_to_all'"
            where, other = (where, other) if slopes is None else ("and adds alibi", "")
            raise ValueError(
                f"{type(module).__name__} drops {dropout} of its attention, {where}; expected 0: "
                f"attention_dropout=0.0 in the config{other}"
            )
        if not ring:
            return ulysses(q, k, v, scale, dropout, self._group, slopes)
        inner = self._asked.inner or self._ranks
        return ring_attention(q, k, v, scale, self._group, inner, slopes)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention function with the signature of transformers' interface."""
    out = _shared[module].attend(module, query, key, value, scaling, kwargs)
    return out.transpose(1, 2).contiguous(), None


# -- BLOOM, whose attention is no function of transformers' interface --


def _attend_with_slopes(module: Any, heads: int) -> None:
    """Make an attention of BLOOM's compute with a part of the sequence. heads: of all ranks of tp.

    The model's `alibi` counts the keys of this rank from 0, so the module gets slopes in its place,
    [B * H, 1, 1] in fp32, of which a split module takes those of its own heads.
    """
    made = vars(sys.modules[type(module).__module__])["build_alibi_tensor"]
    slopes = made(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)[:, :, 1:]

    def given(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden = args[0]
        return args, kwargs | {"alibi": slopes.to(hidden.device).repeat(len(hidden), 1, 1)}

    # before the hook of a split module, which cuts alibi
    module.register_forward_pre_hook(given, with_kwargs=True, prepend=True)
    module.forward = partial(_of_bloom, module)


def _of_bloom(
    module: Any, hidden: Tensor, residual: Tensor, alibi: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Forward of BLOOM's attention; alibi: slopes [B * H, 1, 1]."""
    q, k, v = module._reshape(module.query_key_value(hidden))
    dropout = module.attention_dropout.p if module.training else 0.0
    out = _shared[module].attend(
        module, q, k, v, module.inv_norm_factor, {"dropout": dropout},
        alibi[: module.num_heads, 0, 0],
    )  # fmt: skip
    out = module.dense(out.transpose(1, 2).flatten(2))
    return residual + nn.functional.dropout(out, module.hidden_dropout, module.training), None


class _Mean(Function):
    """Mean over ranks. Backward leaves each rank its own gradient: they are averaged later."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: Any) -> Tensor:
        mean: Tensor = loss.detach() / group.size()
        dist.all_reduce(mean, group=group)
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gathered(Function):
    """Gathered [B, T, ...] in the order of tokens.

    All ranks compute the same loss from it, and their gradients are averaged: so backward
    multiplies this rank's part by P.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, group: Any) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        ctx.own, ctx.ranks = order.view(len(parts), -1)[dist.get_rank(group)], len(parts)
        return torch.cat(parts, 1).index_select(1, order.argsort())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.index_select(1, ctx.own) * ctx.ranks, None, None
