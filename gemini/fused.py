"""Norms and losses as Triton kernels in place of a model's own: `fuse(model)`, then wrap it.

Each has other bits than torch's operators, which round in between, so nothing here is on unless it
is asked for. Where its kernels do not run, a module runs its own operators: on a CPU, under
autocast, on DTensors, and for dtypes or widths that the kernels do not know.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gemini.arguments import by_name
from gemini.kernels_triton.launch import is_interpreted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SAME = 1e-4  # of a module's own result in fp32, where it is told which formula it has
log = logging.getLogger("gemini")


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """[..., n] over the root of its mean square, times `weight + offset` of [n].

    Differentiable in `x` and `weight`, both of one dtype. Raises ValueError for what the kernels do
    not know.
    """
    _check("rms_norm", x, weight)
    out: Tensor = _RowNorm.apply(x, weight, None, eps, offset, False)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """torch.nn.functional.layer_norm over the last dimension, [..., n] with [n].

    Differentiable in `x`, `weight` and `bias`, all of one dtype. Raises ValueError for what the
    kernels do not know.
    """
    _check("layer_norm", x, weight, bias)
    out: Tensor = _RowNorm.apply(x, weight, bias, eps, 0.0, True)
    return out


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """torch.nn.functional.cross_entropy of [n, classes] and int64 [n], as fp32.

    Memory beside the logits is their gradient, in their dtype. The device is not waited for: a
    target that is no class gives NaN. Raises ValueError for what the kernels do not know.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}; expected 'mean' or 'sum'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing}; expected 0 to 1")
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"logits {tuple(logits.shape)} with {targets.dtype} targets {tuple(targets.shape)}; "
            "expected [n, classes] with int64 [n]"
        )
    _check("cross_entropy", logits)
    losses = _RowLoss.apply(logits, targets, ignore_index, label_smoothing)
    total: Tensor = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


# -- modules --


@dataclass(frozen=True, slots=True)
class Fused:
    """Changes of `fuse`: modules whose kernels are fused, and those left as they are, by name."""

    norms: tuple[str, ...]
    has_loss: bool
    left: tuple[str, ...]


@by_name
def fuse(module: nn.Module, *, norms: bool = True, loss: bool = True) -> Fused:
    """Give a module's norms fused kernels, and a causal model of transformers a fused loss.

    norms: LayerNorm and RMSNorm of torch, and every module whose class ends with RMSNorm and that
    gives what its formula does with `weight`, or with `weight + 1`, which is tried. Names, state
    dicts and hooks stay. Call it before the module is wrapped.
    """
    done, left = [], []
    for name, child in module.named_modules() if norms else ():
        if not type(child).__name__.endswith(("RMSNorm", "LayerNorm")):
            continue
        forward = _forward_of(child)
        if forward is None:
            left.append(name)
            continue
        if not isinstance(child, _FusedModule):
            kind: Any = type(child)
            child.__class__ = _fused_class(kind, forward)
        done.append(name)
    has_loss = loss and _takes_loss(module)
    if has_loss:
        module.loss_function = causal_lm_loss  # type: ignore[assignment]
    if (done or has_loss) and not (torch.cuda.is_available() or is_interpreted()):
        log.warning("there is no GPU: fused norms and losses run their own operators")
    if left or (norms and not done):
        log.warning("norms that run their own operators: %s", ", ".join(left) or "there are none")
    return Fused(tuple(done), has_loss, tuple(left))


def _takes_loss(module: nn.Module) -> bool:
    """Whether a module asks transformers for the loss of causal models."""
    own = getattr(module, "loss_function", None)
    return getattr(own, "__name__", "") in ("ForCausalLMLoss", causal_lm_loss.__name__)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """Loss of transformers' causal models: [b, s, classes] and int64 [b, s], each position against
    the next one's label."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if _why_not(logits.view(-1, logits.shape[-1])) is not None:
        transformers_loss: Any = ForCausalLMLoss
        own: Tensor = transformers_loss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **more
        )
        return own
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    rows = logits.view(-1, vocab_size)
    if num_items_in_batch is None:
        return cross_entropy(rows, targets, ignore_index=ignore_index)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    return cross_entropy(rows, targets, ignore_index=ignore_index, reduction="sum") / (
        num_items_in_batch
    )


Forward = Callable[[Any, Tensor], Tensor]


def _rms(module: Any, x: Tensor, offset: float = 0.0) -> Tensor:
    return rms_norm(x, module.weight, _eps_of(module), offset)


def _layer(module: Any, x: Tensor) -> Tensor:
    return layer_norm(x, module.weight, module.bias, module.eps)


_one_more = functools.partial(_rms, offset=1.0)


def _eps_of(module: Any) -> float:
    found = next((n for n in ("variance_epsilon", "eps", "epsilon") if hasattr(module, n)), None)
    eps = None if found is None else getattr(module, found)
    return torch.finfo(torch.float32).eps if eps is None else float(eps)


def _forward_of(module: Any) -> Forward | None:
    """Fused forward of a norm; None: there is none."""
    if isinstance(module, _FusedModule):
        return module.fused
    weight = getattr(module, "weight", None)
    names = [name for name, _ in module.named_parameters()]
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    if type(module) is nn.LayerNorm:
        return _layer
    if names != ["weight"] or list(module.buffers()):
        return None
    if type(module) is nn.RMSNorm:
        return _rms
    for offset, forward in ((0.0, _rms), (1.0, _one_more)):
        with suppress(Exception):  # a module of somebody else's, with an input of our own
            if _gives(module, offset):
                return forward
    return None


@torch.no_grad()
def _gives(module: Any, offset: float) -> bool:
    """Whether a module in fp32 gives what the formula does, on a row that no symmetry hides."""
    own = module.__class__.__new__(module.__class__)
    own.__dict__ = dict(module.__dict__)
    n = module.weight.numel()
    weight = torch.linspace(0.5, 1.5, n)
    own._parameters = {"weight": nn.Parameter(weight)}
    x = torch.linspace(-2.0, 1.0, n).sin()[None]
    wanted = x * (x.square().mean() + _eps_of(module)).rsqrt() * (weight + offset)
    got = own(x)
    return bool(got.shape == x.shape and (got - wanted).abs().max() < _SAME)


class _FusedModule:
    """Mixin of norms whose forward is a kernel."""

    fused: Forward
    base: type[Any]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own: Any = self
        if args or kwargs or _why_not(x, own.weight, getattr(own, "bias", None)) is not None:
            found: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return found
        return type(self).fused(self, x)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made here and has no name that pickle could find.
        return _rebuilt, (self.base, type(self).fused), self.__dict__


@functools.cache
def _fused_class(base: type[Any], forward: Forward) -> type[Any]:
    names = {"fused": staticmethod(forward), "base": base}
    return type(base.__name__, (_FusedModule, base), names)


def _rebuilt(base: type[Any], forward: Forward) -> Any:
    kind: Any = base
    made: Any = _fused_class(kind, forward)
    return made.__new__(made)


# -- kernels --


def _why_not(x: Tensor, *others: Tensor | None) -> str | None:
    """Why kernels do not take tensors, in words; None: they do."""
    from torch.distributed.tensor import DTensor

    tensors = [x, *(one for one in others if one is not None)]
    if any(isinstance(one, DTensor) for one in tensors):
        return "DTensors have operators of torch's alone"
    if not x.is_cuda and not is_interpreted():
        return f"there are no kernels for {x.device}"
    if torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
        return "autocast and torch.compile have operators of torch's alone"
    if x.dtype not in DTYPES or any(one.dtype != x.dtype for one in tensors):
        return f"dtypes {', '.join(str(one.dtype) for one in tensors)}; expected one float type"
    if not x.numel():
        return "there are no elements"
    if others:
        from gemini.kernels_triton.rows import NORM_WIDTH

        if x.shape[-1] > NORM_WIDTH:
            return f"rows of {x.shape[-1]} elements; expected at most {NORM_WIDTH}"
        if any(one is not None and one.shape != x.shape[-1:] for one in others):
            return f"weights of another shape than [{x.shape[-1]}]"
    return None


def _check(name: str, x: Tensor, *others: Tensor | None) -> None:
    if (why := _why_not(x, *others)) is not None:
        raise ValueError(f"{name} has no kernel here: {why}; expected torch's function instead")


def _raw(*tensors: Tensor | None) -> Iterator[Tensor | None]:
    """Tensors as kernels take them: bf16 as its bits."""
    for one in tensors:
        bits = one is not None and one.dtype == torch.bfloat16
        yield one.view(torch.int16) if bits and one is not None else one


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        offset: float,
        centred: bool,
    ) -> Tensor:
        from gemini.kernels_triton import rows

        x = x.contiguous()
        n, out = x.shape[-1], torch.empty_like(x)
        count = x.numel() // n
        scale = torch.empty(count, dtype=torch.float32, device=x.device)
        mean = torch.empty_like(scale) if centred else None
        with _on(x):
            rows.norm_rows_kernel[(count,)](
                *_raw(x, weight, bias, out), mean, scale, n, eps, offset,
                DTYPE=_dtype(x), CENTRED=centred, HAS_BIAS=bias is not None, **_launch(n),
            )  # fmt: skip
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.offset, ctx.centred, ctx.has_bias = offset, centred, bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _check_once()
        from gemini.kernels_triton import rows

        x, weight, mean, scale = ctx.saved_tensors
        grad = grads[0].contiguous()
        n, count = x.shape[-1], scale.numel()
        programs = min(rows.SUMMERS, count)
        x_grad = torch.empty_like(x)
        sums = torch.empty(programs, n, dtype=torch.float32, device=x.device)
        bias_sums = torch.empty_like(sums) if ctx.has_bias else None
        with _on(x):
            rows.norm_rows_backward_kernel[(programs,)](
                *_raw(x, weight, grad, x_grad), sums, bias_sums, mean, scale, count, n, ctx.offset,
                DTYPE=_dtype(x), CENTRED=ctx.centred, HAS_BIAS=ctx.has_bias, **_launch(n),
            )  # fmt: skip
        bias_grad = None if bias_sums is None else bias_sums.sum(0).to(weight.dtype)
        return x_grad, sums.sum(0).to(weight.dtype), bias_grad, None, None, None


class _RowLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, targets: Tensor, ignored: int, smoothing: float
    ) -> Tensor:
        from gemini.kernels_triton import rows

        logits, targets = logits.contiguous(), targets.contiguous()
        count, n = logits.shape
        losses = torch.empty(count, dtype=torch.float32, device=logits.device)
        sums = torch.empty_like(losses)
        with _on(logits):
            rows.loss_rows_kernel[(count,)](
                *_raw(logits), targets, losses, sums, n, ignored, smoothing,
                DTYPE=_dtype(logits), SMOOTHS=smoothing > 0, BLOCK=rows.LOSS_BLOCK, num_warps=8,
            )  # fmt: skip
        ctx.save_for_backward(logits, targets, sums)
        ctx.ignored, ctx.smoothing = ignored, smoothing
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _check_once()
        from gemini.kernels_triton import rows

        logits, targets, sums = ctx.saved_tensors
        grad, (count, n) = torch.empty_like(logits), logits.shape
        factors = grads[0].contiguous()  # of every row, as fp32
        with _on(logits):
            rows.loss_rows_backward_kernel[(count, -(-n // rows.LOSS_BLOCK))](
                *_raw(logits), targets, sums, factors, *_raw(grad), n, ctx.ignored, ctx.smoothing,
                DTYPE=_dtype(logits), BLOCK=rows.LOSS_BLOCK, num_warps=8,
            )  # fmt: skip
        return grad, None, None, None


def _check_once() -> None:
    # A kernel's result has no graph, so a second derivative would leave it out without a word;
    # torch's `once_differentiable` looks at the gradients alone, and not at what was saved.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused norms and losses have no second derivative (create_graph=True); expected a "
            "module without gemini.fuse"
        )


def _on(x: Tensor) -> Any:
    from gemini.kernels_triton.launch import on

    return on(x.device)


def _dtype(x: Tensor) -> Any:
    from gemini.kernels_triton.tiles import TRITON_DTYPES

    return TRITON_DTYPES[x.dtype]


def _launch(n: int) -> dict[str, int]:
    block = 1 << (n - 1).bit_length()
    return {"BLOCK": block, "num_warps": min(16, max(4, block // 1024))}
