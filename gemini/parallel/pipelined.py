"""Stages of this process, and one call of torch's schedule over all stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from gemini.checkpoint.model.state import parts_of
from gemini.checkpoint.ranks import Ranks
from gemini.ddp import GeminiDDP

from .cut import TransformerStage, input_name
from .shared_sequence import SharedSequence

if TYPE_CHECKING:
    from gemini.pipeline import GeminiStage  # torch's pipelines take long to import

STYLES = ("1f1b", "interleaved", "zbv")
Criterion = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class MicrobatchSchedule:
    """Schedule by which micro-batches pass the stages of a pipeline.

    style: one of `STYLES`. chunks: stages of a rank. microbatches: their number in a batch, or
    rows: the number of rows in each.
    """

    style: str
    chunks: int
    microbatches: int | None = None
    rows: int | None = None

    def stages(self, place: int, places: int) -> list[int]:
        """Stages of one place of the pipeline, in the order in which data passes."""
        if self.style == "zbv":
            return [place, 2 * places - 1 - place]
        return [place + i * places for i in range(self.chunks)]

    def count(self, batch: int) -> int:
        """Number of micro-batches in `batch` rows. Raises ValueError if they differ in size."""
        parts = self.microbatches or 0
        if self.rows is not None:
            parts = batch // self.rows if batch % self.rows == 0 else 0
        if not parts or batch % parts:
            asked = (
                f"num_microbatches={self.microbatches}" if self.rows is None
                else f"microbatch_size={self.rows}"
            )  # fmt: skip
            raise ValueError(
                f"a batch of {batch} rows with {asked}; expected micro-batches of one size: "
                "drop_last=True in prepare_dataloader, or another number"
            )
        return parts

    def of(self, stages: Sequence[GeminiStage], count: int, loss: Any) -> Any:
        """Schedule of torch for these stages and `count` micro-batches."""
        from torch.distributed.pipelining import (
            Schedule1F1B,
            ScheduleInterleaved1F1B,
            ScheduleZBVZeroBubble,
        )

        if self.style == "1f1b":
            return Schedule1F1B(stages[0], count, loss_fn=loss)
        kind = ScheduleZBVZeroBubble if self.style == "zbv" else ScheduleInterleaved1F1B
        return kind(list(stages), count, loss_fn=loss)


class Pipelined(nn.ModuleList):
    """Stages of a model in this process, each a `GeminiDDP`, for `booster.execute_pipeline`.

    A Booster and `gemini.save_checkpoint` save and load it as the whole model.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[GeminiDDP],
        mesh: DeviceMesh,
        schedule: MicrobatchSchedule,
        sequence: SharedSequence | None = None,
    ) -> None:
        """Make stages from `parts` of the cut `model`; `sequence`: ranks share its sequences."""
        from gemini.pipeline import GeminiStage

        super().__init__(parts)
        place, places = mesh.get_local_rank("pp"), mesh.get_group("pp").size()
        indices = schedule.stages(place, places)
        device, total = parts[0].engine.backend.device, places * len(indices)
        self.stages = [
            GeminiStage(part, index, total, device, group=mesh.get_group("pp"))
            for part, index in zip(parts, indices, strict=True)
        ]
        for name in ("config", "generation_config"):  # saved with the weights
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))
        self._is_sequence = isinstance(model, nn.Sequential)
        self._input_name = input_name(model)
        self._schedule, self._sequence = schedule, sequence
        self._made: tuple[Any, Any] | None = None  # what torch's schedule is for, and it
        self._call: _Call | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError: this process has only a part of the model."""
        raise RuntimeError(
            "a pipeline's stages are not called one by one; call booster.execute_pipeline("
            "data_iter, model, criterion, optimizer)"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError: this process has only a part of the model."""
        raise RuntimeError(
            "a pipeline's weights are on several ranks; call booster.save_model(model, ...), or "
            "gemini.save_checkpoint"
        )

    def execute(
        self,
        batch: Any,
        criterion: Criterion,
        *,
        backward: bool,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        """Run one batch; see `Booster.execute_pipeline`."""
        device = self.stages[0].device
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        batch = tree_map_only(Tensor, lambda x: x.to(device), batch)
        first, others = self._inputs(batch)
        count = self._schedule.count(len(first))
        _check_rows(batch, len(first))
        call = _Call(criterion, [_part(batch, i, count) for i in range(count)], return_outputs)
        if self._sequence is not None:
            others = self._sequence.part({self._input_name: first, **others})
            first = others.pop(self._input_name)
        # torch's schedule calls `_loss` with a number alone, and the batch is found by `_call`
        run, self._call = self._torch_schedule(count, first, others), call
        args = (first,) if any(stage.is_first for stage in self.stages) else ()
        given: dict[str, Any] = {"return_outputs": False}
        losses: list[Tensor] = []
        if any(stage.is_last for stage in self.stages):
            given |= {"target": torch.arange(count), "losses": losses}
        (run.step if backward else run.eval)(*args, **given, **others)
        self._call = None
        found: dict[str, Any] = {"loss": None, "outputs": None}
        if losses and return_loss:
            found["loss"] = torch.stack([loss.detach() for loss in losses]).mean()
        if losses and return_outputs:
            found["outputs"] = call.merged()
        return found

    def _torch_schedule(self, count: int, first: Tensor, others: Mapping[str, Any]) -> Any:
        """Schedule of torch, made anew when shapes change: stages keep buffers of the old ones."""
        shapes = [(name, tuple(t.shape)) for name, t in others.items() if isinstance(t, Tensor)]
        key = count, tuple(first.shape), shapes
        if self._made is None or self._made[0] != key:
            for stage in self.stages:
                stage.args_recv_info, stage.grad_recv_info = {}, {}
                stage.grad_send_info = None
            self._made = key, self._schedule.of(self.stages, count, self._loss)
        return self._made[1]

    def _inputs(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Input of the first stage, and the other arguments of all stages. Raises ValueError."""
        others: dict[str, Any] = {}
        if isinstance(batch, Mapping) and not self._is_sequence:
            others = {name: v for name, v in batch.items() if name != self._input_name}
            batch = batch.get(self._input_name)
        elif isinstance(batch, (tuple, list)) and self._is_sequence and batch:
            batch = batch[0]
        if not isinstance(batch, Tensor) or not batch.dim():
            wanted = "a tensor, or a tuple that begins with what the first layer takes"
            if not self._is_sequence:
                wanted = f"{self._input_name}, or a dict that has them"
            raise ValueError(f"the batch has a {type(batch).__name__}; expected {wanted}")
        return batch, others

    def _loss(self, outputs: Any, index: Tensor) -> Tensor:
        """Loss of one micro-batch, by its number."""
        assert self._call is not None
        last: Any = self.stages[-1].submod.module
        whole = last.rebuilt(outputs) if isinstance(last, TransformerStage) else outputs
        return self._call.loss(whole, int(index))


class _Call:
    """Call of the schedule with one batch: its micro-batches, criterion and outputs."""

    def __init__(self, criterion: Criterion, micro: Sequence[Any], keeps: bool) -> None:
        self._criterion, self._micro, self._keeps = criterion, micro, keeps
        self._outputs: dict[int, Any] = {}

    def loss(self, outputs: Any, index: int) -> Tensor:
        if self._keeps:
            self._outputs[index] = tree_map_only(Tensor, Tensor.detach, outputs)
        return self._criterion(outputs, self._micro[index])

    def merged(self) -> Any:
        """Outputs of all micro-batches: rows concatenated, 0-d tensors averaged."""
        flat = [tree_flatten(self._outputs[i]) for i in sorted(self._outputs)]
        leaves = [_joined(values) for values in zip(*(values for values, _ in flat), strict=True)]
        return tree_unflatten(leaves, flat[0][1])


def _check_rows(batch: Any, rows: int) -> None:
    for value in tree_flatten(batch)[0]:
        if isinstance(value, Tensor) and (not value.dim() or len(value) != rows):
            raise ValueError(
                f"the batch has {rows} rows, and a tensor of shape {tuple(value.shape)}; expected "
                "tensors of as many rows, which are cut into micro-batches"
            )


def gathered_weights(model: Pipelined, ranks: Ranks) -> dict[str, Tensor]:
    """Weights of all stages by name, on the CPU of rank 0; empty on other ranks. All ranks call.

    A weight that stages tie is one tensor under all its names.
    """
    own: dict[str, Tensor] = {}
    for part in parts_of(model):
        state = part.state_dict()
        for spec in part.engine.layout.params:
            there = [name for name in spec.names if name in state]
            state |= dict.fromkeys(spec.names, state[there[0]]) if there else {}
        own = {**state, **own}
    said = ranks.gather([(name, value.shape, value.dtype) for name, value in own.items()])
    found: dict[str, Tensor] = {}
    known: set[str] = set()
    group = ranks.group()
    # all ranks walk one list in one order: so each send meets its receive, one weight at a time
    for rank, tensors in enumerate(said):
        for name, shape, dtype in tensors:
            if name in known:
                continue  # of another rank with the same stage
            known.add(name)
            if rank == 0 and ranks.rank == 0:
                found[name] = own[name].cpu()
            elif ranks.rank == 0:
                found[name] = torch.empty(shape, dtype=dtype)
                dist.recv(found[name], group=group, group_src=rank)
            elif ranks.rank == rank:
                dist.send(own[name].cpu().contiguous(), group=group, group_dst=0)
    return found


def _part(batch: Any, index: int, count: int) -> Any:
    """Micro-batch `index`, as torch's schedules cut it."""
    return tree_map_only(Tensor, lambda x: x.tensor_split(count)[index], batch)


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    return torch.cat(list(values)) if first.dim() else torch.stack(list(values)).mean()
