"""GeminiStage: a wrapped module as a stage of torch's pipelines.

torch's schedules call a stage to run the forwards and backwards of micro-batches, and then to
reduce. The stage tells the engine where each begins and ends. Hooks could not: in a zero-bubble
schedule a backward has two halves, and the second gives gradients without autograd's accumulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

from gemini.chunk.local import local_gradient
from gemini.ddp import GeminiDDP
from gemini.trees import map_tensors
from gemini.units import ParamId


class GeminiStage(PipelineStage):
    """A `torch.distributed.pipelining.PipelineStage` for all of torch's schedules.

    submodule: a `GeminiDDP(..., mesh=mesh)` whose mesh has "pp"; every stage has its own.
    group: of the stages; None is `mesh.get_group("pp")`.
    The other arguments are those of `PipelineStage`.

    Gradients of all micro-batches are added up in fp32 and reduced once; `no_sync` changes nothing.
    Weights of the stage stay gathered from its first micro-batch to its last if the budget has room
    for them.

    Raises ValueError for a module that is not wrapped on such a mesh, a module that is another
    stage already, another group, and a `dw_builder`.
    """

    submod: GeminiDDP

    def __init__(
        self,
        submodule: GeminiDDP,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Any = None,
        get_mesh: Any = None,
    ) -> None:
        together = submodule.engine.together if isinstance(submodule, GeminiDDP) else None
        if together is None:
            raise ValueError(
                f"submodule is a {type(submodule).__name__} outside a mesh; expected a "
                'GeminiDDP(layers, mesh=mesh) whose mesh has a dimension "pp"'
            )
        if dw_builder is not None:
            raise ValueError(
                "dw_builder gives gradients of weights past the stage, which packs them; leave it "
                "away: zero-bubble schedules find them by themselves"
            )
        group = group or together.pipeline
        if dist.get_process_group_ranks(group) != dist.get_process_group_ranks(together.pipeline):
            raise ValueError(
                f"group has the ranks {dist.get_process_group_ranks(group)}; expected those of "
                f'mesh.get_group("pp"), {dist.get_process_group_ranks(together.pipeline)}'
            )
        engine = submodule.engine
        engine.passes.check_stage(stage_index, num_stages)
        super().__init__(
            submodule, stage_index, num_stages, device, input_args, output_args, output_grads,
            input_grads, group, None, get_mesh,
        )  # fmt: skip
        engine.passes.become_stage(stage_index, num_stages)
        self._has_split = False  # a backward went in two halves
        self._window = engine.window

    # -- what a schedule calls --

    def clear_runtime_states(self) -> None:
        """Begin a call of the schedule."""
        super().clear_runtime_states()
        # A call that an error has cut short leaves its window open, with broken gradients.
        self._window.end()

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        self._window.open()
        self._window.sample((args, kwargs), len(self.args_recv_info))
        outputs = super().forward_maybe_with_nosync(*args, **kwargs)
        return outputs if self.is_last else map_tensors(outputs, _without_base)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward and fwd_chunk_id == len(self.args_recv_info) - 1:
            self._window.end()
        return outputs

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run the backward of one micro-batch, or one half: of its inputs, then of its weights.

        If the weights cannot stay gathered, the first half is the whole backward.
        """
        with self._window.backward():
            if backward_type == "weight":
                self._backward_of_weights(bwd_kwargs["param_groups"])
                return (), None
            outputs, grads = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
            inputs = bwd_kwargs["input_values"]
            if backward_type == "input" and self._window.splits_backward:
                return self._backward_of_inputs(outputs, grads, inputs)
            if grads is None and isinstance(outputs, tuple):  # the loss, as one output
                (outputs,) = outputs
            found = stage_backward(outputs, grads, inputs)
            return found, [] if backward_type == "input" else None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce, once, the sum of all micro-batches' gradients, divided by the factor."""
        if self.has_backward:
            self._window.reduce(grad_scale_factor)
        else:
            self._window.end()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Reduce gradients, in schedules without an action for that."""
        self.perform_reduce_grad(grad_scale_factor)

    # -- between two stages of one rank; a V schedule asks for gradients in an evaluation, too --

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    # -- a micro-batch before the first, by which torch finds shapes --

    def _compute_outputs(self, *args: Any, module: torch.nn.Module, **kwargs: Any) -> Any:
        self._window.open()
        return super()._compute_outputs(*args, module=module, **kwargs)

    def _compute_input_grads(self, *args: Any, **kwargs: Any) -> Any:
        with self._window.backward():
            return super()._compute_input_grads(*args, **kwargs)

    # -- the halves of a backward --

    def _weights(self) -> list[WeightLeaf]:
        return [WeightLeaf(param) for param in self.submod.engine.params]

    def _backward_of_inputs(
        self, outputs: list[Tensor], grads: Any, inputs: list[Any]
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
        weights, first = self._weights(), not self._has_split
        roots = [t.grad_fn for t in outputs if t.grad_fn is not None] if first else []
        found = stage_backward_input(outputs, grads, inputs, iter(weights))  # type: ignore[arg-type]
        self._has_split = True
        lost = lost_weights(roots, weights, found[1])
        if lost:
            names = [self.submod.engine.layout.params[i].name for i in lost]
            raise RuntimeError(
                f"stage {self.stage_index} has outputs that depend on {', '.join(names)} and on no "
                "input; torch's zero-bubble schedules leave such gradients out. Compute them "
                "from an input, or take a schedule with whole backwards (1F1B, Interleaved1F1B)"
            )
        return found

    def _backward_of_weights(self, param_groups: list[dict[str, Any]]) -> None:
        """Run the half for weights and pass their gradients on: no hook of a parameter fires."""
        weights, engine = self._weights(), self.submod.engine
        with engine.calls.taken_by_stage():
            stage_backward_weight(iter(weights), param_groups)  # type: ignore[arg-type]
        for i, weight in enumerate(weights):
            if weight.grad is not None:
                grad = local_gradient(engine.params[i], weight.grad)
                engine.calls.gradient_arrived(ParamId(i), grad)


class WeightLeaf:
    """Stand-in for a parameter: torch finds its place in the graph by it, and sets its `grad`.

    The parameter itself would not do: its `.grad` is not autograd's, and its views are watched.
    """

    grad_fn: Node | None = None  # it is a leaf

    def __init__(self, param: torch.nn.Parameter) -> None:
        self._param = param
        self.requires_grad = param.requires_grad
        self.grad: Tensor | None = None

    def view_as(self, other: object) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self._param.view_as(self._param)

    @property
    def node(self) -> Node | None:
        """Node of the parameter in the graph; None if it is frozen."""
        made = self.view_as(self).grad_fn
        return made.next_functions[0][0] if made is not None else None


def lost_weights(
    roots: Sequence[Node], weights: Sequence[WeightLeaf], groups: Sequence[dict[str, Any]]
) -> list[int]:
    """Positions of weights that `roots` depend on and whose gradients torch's second half omits."""
    seen: set[Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [below for below, _ in node.next_functions if below is not None]
    found = {node for group in groups for node in group["params"]}
    nodes = [weight.node for weight in weights]
    return [i for i, node in enumerate(nodes) if node in seen and node not in found]


def _without_base(tensor: Tensor) -> Tensor:
    """Copy of a tensor that is a view, else the tensor: torch detaches outputs in place."""
    return tensor.clone() if tensor._is_view() else tensor
