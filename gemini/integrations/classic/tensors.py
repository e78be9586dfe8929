"""Names of `colossalai.tensor` for torch's meshes, placements and DTensors.

Parameters of a module made in `ColoInitContext` take a spec of how they are split. When the
`GeminiDDP` of this package wraps the module, the specs become a plan by which torch splits layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from gemini.api import fill_empty, rank, this_device, world_size
from gemini.parallel.plans import TensorParallel, split
from gemini.parallel.sizes import MeshSizes
from gemini.parallel.styles import output_dim


class ProcessGroup:
    """Group of all ranks: `tp_degree` neighbours have parts of tensors, others have replicas.

    mesh: torch's, with those of "tp" and "shard" that have several ranks; None if "tp" has one.
    """

    def __init__(self, *, tp_degree: int | None = None, dp_degree: int | None = None) -> None:
        """Make the mesh. A degree of None is what the other leaves; without both no tensor is
        split. Collective. Raises ValueError for degrees whose product is not the world size."""
        ranks = world_size()
        tp = tp_degree or max(1, ranks // (dp_degree or ranks))
        if ranks % tp or dp_degree not in (None, ranks // tp):
            raise ValueError(
                f"tp_degree={tp_degree} and dp_degree={dp_degree} for {ranks} ranks; expected two "
                "sizes whose product is their number"
            )
        self._sizes = MeshSizes(tp=tp)
        self.mesh: DeviceMesh | None = self._sizes.mesh(this_device())

    def tp_world_size(self) -> int:
        return self._sizes.tp

    def dp_world_size(self) -> int:
        return world_size() // self._sizes.tp

    def tp_local_rank(self) -> int:
        return self._sizes.place(["tp"], rank(), world_size())[0]

    def dp_local_rank(self) -> int:
        return self._sizes.data_place(rank(), world_size())[0]


@dataclass(frozen=True)
class ReplicaSpec:
    """Spec of a tensor that every rank has whole."""

    @property
    def placement(self) -> Placement:
        return Replicate()


@dataclass(frozen=True)
class ShardSpec:
    """Spec of a tensor that is cut in one dimension into `tp_world_size()` parts of its group.

    Raises ValueError for several dimensions.
    """

    dims: Sequence[int]
    num_partitions: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.dims) != 1 or len(self.num_partitions) != 1:
            raise ValueError(
                f"ShardSpec({list(self.dims)}, {list(self.num_partitions)}); expected one dimension"
            )

    @property
    def placement(self) -> Placement:
        return Shard(self.dims[0])

    def check(self, group: ProcessGroup) -> None:
        """Raise ValueError unless the parts are as many as the group's `tp_world_size()`."""
        if self.num_partitions[0] != group.tp_world_size():
            raise ValueError(
                f"ShardSpec has num_partitions={list(self.num_partitions)}; expected "
                f"[{group.tp_world_size()}], the tp_world_size() of its ProcessGroup"
            )


Spec = ReplicaSpec | ShardSpec


class ComputePattern(Enum):
    """Ways in which a layer computes with a split parameter; there is one."""

    TP1D = "1d"


@dataclass
class ComputeSpec:
    """Spec of a layer's computation. output_replicate: its output is whole on every rank."""

    compute_pattern: ComputePattern = ComputePattern.TP1D
    output_replicate: bool = True

    def set_output_replicate(self, flag: bool = True) -> None:
        self.output_replicate = flag


@dataclass
class ColoTensorSpec:
    """Spec of a tensor: its group, how it is cut, and how a layer computes with it."""

    pg: ProcessGroup
    dist_attr: Spec = ReplicaSpec()
    compute_attr: ComputeSpec | None = None


class ColoTensor:
    """Tensor of which ranks have parts. `dtensor` is torch's, for computing.

    shape, data: those of this rank's part.
    """

    def __init__(self, dtensor: Tensor, spec: ColoTensorSpec) -> None:
        self.dtensor, self._spec = dtensor, spec

    @staticmethod
    def from_torch_tensor(tensor: Tensor, spec: ColoTensorSpec) -> ColoTensor:
        """Make one from this rank's part. Raises ValueError unless each rank has one part."""
        if isinstance(spec.dist_attr, ShardSpec):
            spec.dist_attr.check(spec.pg)
        if spec.pg.mesh is not None:
            placed = [spec.dist_attr.placement]
            tensor = DTensor.from_local(tensor, spec.pg.mesh["tp"], placed, run_check=False)
        return ColoTensor(tensor, spec)

    @property
    def data(self) -> Tensor:
        found = self.dtensor.detach()
        return found.to_local() if isinstance(found, DTensor) else found

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def size_global(self) -> torch.Size:
        return self.dtensor.shape

    def to_replicate(self) -> ColoTensor:
        """Copy that is whole on every rank. Collective."""
        whole = ColoTensor(self.dtensor, self._spec)
        whole.set_dist_spec(ReplicaSpec())
        return whole

    def set_dist_spec(self, spec: Spec) -> None:
        """Cut the tensor anew; a backward does the reverse. Collective. Raises ValueError."""
        if isinstance(spec, ShardSpec):
            spec.check(self._spec.pg)
        if isinstance(self.dtensor, DTensor):
            self.dtensor = self.dtensor.redistribute(placements=[spec.placement])
        self._spec = ColoTensorSpec(self._spec.pg, spec, self._spec.compute_attr)


class ColoParameter:
    """Methods that a parameter of a module in `ColoInitContext` gets.

    process_group, dist_spec, compute_spec: the values that were set last.
    """

    process_group: ProcessGroup | None
    dist_spec: Spec
    compute_spec: ComputeSpec

    def set_process_group(self, group: ProcessGroup) -> None:
        self.process_group = group

    def set_dist_spec(self, spec: Spec) -> None:
        self.dist_spec = spec

    def set_tensor_spec(self, dist_spec: Spec, compute_spec: ComputeSpec) -> None:
        self.dist_spec, self.compute_spec = dist_spec, compute_spec


_TOLD = ("set_process_group", "set_dist_spec", "set_tensor_spec")


def let_be_told(param: Any, group: ProcessGroup, spec: Spec) -> None:
    """Give a parameter of torch the methods of a `ColoParameter`; it stays the same object."""
    for name in _TOLD:
        setattr(param, name, MethodType(getattr(ColoParameter, name), param))
    param.process_group, param.dist_spec, param.compute_spec = group, spec, ComputeSpec()


# words of a plan for a weight that is cut in its output dimension, by whether the output is whole
_COLUMNS = {False: "colwise", True: "colwise_gather_output"}


def split_as_told(module: nn.Module) -> DeviceMesh | None:
    """Split layers in place by the specs of their weights. Collective.

    Makes the values of parameters on the meta device first. Returns the mesh of split parameters,
    None if there are none.
    Raises ValueError, before anything is changed, for a spec that no layer can compute with.
    """
    plan, group = _plan(module)
    if group is None or group.mesh is None or not plan:
        return None
    fill_empty(module)
    split(module, None, group.mesh["tp"], TensorParallel(plan))
    return group.mesh


def _plan(module: nn.Module) -> tuple[Mapping[str, str], ProcessGroup | None]:
    """Plan by the specs of weights, in words by names of layers, and the group of cut weights.

    Raises ValueError.
    """
    plan: dict[str, str] = {}
    rows: list[str] = []
    group: ProcessGroup | None = None
    for name, layer in module.named_modules():
        params: dict[str, Any] = dict(layer.named_parameters(recurse=False))
        cut = {n: p for n, p in params.items() if isinstance(_spec_of(p), ShardSpec)}
        if not cut:
            continue
        is_known = isinstance(layer, nn.Linear | nn.Embedding) or type(layer).__name__ == "Conv1D"
        if "weight" not in cut or not is_known:
            raise ValueError(
                f"{name}.{next(iter(cut))} has a ShardSpec; expected it of the weight of a Linear, "
                "an Embedding or a Conv1D, and of its bias beside it"
            )
        weight = cut["weight"]
        weight.dist_spec.check(weight.process_group)
        if group is not None and group is not weight.process_group:
            raise ValueError(f"{name}.weight has another ProcessGroup; expected one for all")
        group = weight.process_group
        dim = weight.dist_spec.dims[0] % weight.dim()
        if isinstance(layer, nn.Embedding):
            plan[name] = ("embedding_rowwise", "embedding_colwise")[dim]
        elif dim == output_dim(layer):
            plan[name] = _COLUMNS[weight.compute_spec.output_replicate]
        else:
            rows.append(name)
    # a layer split by rows gets its input in parts if a layer of the same parent returns parts
    parts = {name.rpartition(".")[0] for name, how in plan.items() if how == _COLUMNS[False]}
    for name in rows:
        is_part = name.rpartition(".")[0] in parts
        plan[name] = "rowwise" if is_part else "rowwise_split_input"
    return plan, group


def _spec_of(param: nn.Parameter) -> Spec | None:
    return getattr(param, "dist_spec", None)
