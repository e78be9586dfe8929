"""Expert parallelism for models of transformers: each rank has some experts, tokens go to them.

P ranks · E experts · n tokens of this rank, each for k experts

A rank has E / P experts of each layer, stacked as they were: gate_up_proj [E, 2 * width, in] and
down_proj [E, out, width], split in their first dimension. Two all-to-alls send tokens to the ranks
of their experts and back; a third one before them exchanges the sizes. Router weights stay on the
rank that the token came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from gemini.comm.connect import announce
from gemini.parallel.styles import put_in_place

from .attention import exchanged
from .styles import of_parts, replace

STACKS = ("gate_up_proj", "down_proj")  # in the order in which ranks send them


def share_experts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    mesh: DeviceMesh,
    stages: Sequence[nn.Module] = (),
) -> None:
    """Split all stacked experts in place over a 1-D mesh; the optimizer gets the new parameters.

    stages: this rank's stages of a cut model; only their experts are split then.
    All ranks get the values of the mesh's first rank. Collective.
    Raises ValueError, before anything is changed, for a model without such experts, and for a
    number that the ranks do not divide.
    """
    found = {name: module for name, module in model.named_modules() if stacks_of(module)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no stacked experts; expected a model of transformers "
            "whose layers have gate_up_proj and down_proj of all experts, such as Mixtral, "
            "Qwen2-MoE or Qwen3-MoE, a MoeLayer of ours, or ep_size=1"
        )
    for name, experts in found.items():
        if experts.num_experts % mesh.size():
            raise ValueError(
                f"{name} has {experts.num_experts} experts, which ep_size={mesh.size()} does not "
                "divide; expected another ep_size"
            )
    here = {id(module) for stage in stages or [model] for module in stage.modules()}
    found = {name: experts for name, experts in found.items() if id(experts) in here}
    sent = [
        (f"{at}.{name}", getattr(experts, name))
        for at, experts in found.items() for name in stacks_of(experts)
    ]  # fmt: skip
    announce(mesh.get_group(), "share_experts()", sent)
    before = {id(param): (experts, name) for experts in found.values()
              for name, param in experts.named_parameters()}  # fmt: skip
    for experts in found.values():
        for name in stacks_of(experts):
            replace(experts, name, mesh, 0)
        experts.forward = partial(_over_ranks, experts, mesh, experts.forward)
    put_in_place(optimizer, {key: getattr(*place) for key, place in before.items()})


def stacks_of(module: Any) -> tuple[str, ...]:
    """Names of the stacked parameters [E, ...], in one order on all ranks: those of
    transformers, or `module.stacked`."""
    shapes = {name: param.dim() for name, param in module.named_parameters()}
    is_known = shapes == dict.fromkeys(STACKS, 3) and hasattr(module, "num_experts")
    found: tuple[str, ...] = STACKS if is_known else getattr(module, "stacked", ())
    return found


def _over_ranks(
    experts: Any, mesh: DeviceMesh, plain: Any, x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Forward of split experts: x [n, H], index and weights [n, k] -> [n, H]. Collective."""
    group, ranks = mesh.get_group(), mesh.size()
    own, flat = experts.num_experts // ranks, index.flatten()
    order = flat.argsort(stable=True)  # by expert, so by rank
    # an all-to-all needs the sizes of what it receives, and only the sender knows them
    counts = torch.bincount(flat, minlength=experts.num_experts).view(ranks, own)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()
    if torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()  # else ranks without tokens would send nothing back
    tokens = _Exchange.apply(x[order // index.shape[1]], group, sent, received)
    here = torch.arange(own, device=x.device).repeat(ranks)
    # without tokens the experts have nothing to compute; both exchanges are collective, and go on
    done = tokens
    if len(tokens):
        done = _own(experts, plain, own, tokens, here.repeat_interleave(theirs.flatten())[:, None])
    back = _Exchange.apply(done, group, received, sent)
    weighed = (back * weights.flatten()[order, None]).to(x.dtype)
    return torch.zeros_like(x).index_add(0, order // index.shape[1], weighed)


def _own(experts: Any, plain: Any, own: int, tokens: Tensor, index: Tensor) -> Tensor:
    """Outputs of this rank's experts, by the module's own forward with one expert a token."""
    # transformers' forwards size a one-hot mask by `num_experts`; here it is of this rank's alone
    everyone, experts.num_experts = experts.num_experts, own
    try:
        with of_parts(experts):
            found: Tensor = plain(tokens, index, tokens.new_ones(index.shape))
            return found
    finally:
        experts.num_experts = everyone


class _Exchange(Function):
    """All-to-all of rows with unequal sizes; backward sends gradients the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return exchanged(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return exchanged(grad, ctx.group, ctx.received, ctx.sent), None, None, None
