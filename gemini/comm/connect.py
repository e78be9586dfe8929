"""Communicators of one engine, from a process group or a mesh.

In a mesh with a dimension "pp", an engine has one stage. At each place of "pp" the other dimensions
form a mesh of their own, with the roles that they have without stages, and ranks are numbered by
their places in it. In (shard=2, pp=2, tp=2), ranks 0, 1, 4 and 5 are the mesh (shard=2, tp=2) of
the first stage, and each of them has half of the shards of its part. All ranks of the whole mesh
vote (`gemini.runtime.pipeline.seats`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gemini.units import WORLD

from .ballot import Scope
from .communicator import Communicator
from .links import Links, Tie

if TYPE_CHECKING:
    from gemini.mesh.roles import MeshRoles


PIPELINE = "pp"


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def this_device(asked: torch.device | str | None = None) -> torch.device:
    """Device of this process: `asked`, or else its CUDA device, or else the CPU."""
    if asked is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(asked or "cpu")


def announce(
    group: dist.ProcessGroup | None, call: str, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Raise SequenceError on all ranks of a group unless each is about to send these tensors, in
    this order, in `call`: torch's own collectives of unequal sizes abort the process."""
    sent = [f"{name} {[*x.shape]} {x.dtype}" for name, x in tensors]
    Communicator(group).announce(call, sent)


@dataclass(frozen=True, slots=True)
class Connections:
    """Communicators of one engine.

    comm: all its ranks, for votes and set-up. links: of each sharding group, by its name.
    """

    comm: Communicator
    links: Mapping[str, Links]
    scope: Scope

    @property
    def num_shards(self) -> dict[str, int]:
        """S by sharding group: number of ranks among which its parameters are cut."""
        return {group: links.world_size for group, links in self.links.items()}

    @property
    def num_replicas(self) -> int:
        """R: replicas of a shard."""
        return self.links[WORLD].num_replicas


def connect(
    process_group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    split: Sequence[str] = (),
    groups: Collection[str] = (),
    ties: Mapping[str, Tie] | None = None,
) -> Connections:
    """Make the communicators of one engine. Collective.

    split: mesh dimensions over which torch has split or replicated a parameter.
    groups: names of the sharding groups of the engine's parameters.
    ties: of parameters that other stages have too, by their groups; None if the mesh is not the
        mesh of one stage of a pipeline.

    Raises ValueError for a mesh that cannot be carried out; see `roles_of`.
    """
    inside, ties, roles = ties is not None, ties or {}, None
    if mesh is not None:
        check_mesh(process_group, mesh)
        roles = _roles(mesh, split, inside=inside)
    if roles is None or mesh is None:
        comm = Communicator(_only_group(process_group, mesh))
        alike = {name: Links(comm, tie=ties.get(name)) for name in sorted({WORLD, *groups})}
        return Connections(comm, alike, Scope(comm.rank, comm.world_size))
    comm = Communicator(_group_over(mesh) if inside else None)

    @cache
    def over(dims: tuple[str, ...]) -> Communicator:
        return _over(mesh, roles, dims, comm)

    links = {}
    # Sorted: making a group is a collective, and all ranks must make them in one order.
    for name in sorted({WORLD, *groups}):
        group = roles.group(name)
        links[name] = Links(
            over(group.shard),
            over(roles.replicate),
            over(group.copies),
            over(group.split),
            roles.num_means,
            ties.get(name),
        )
    return Connections(comm, links, Scope(comm.rank, comm.world_size, roles.replicas()))


def check_canonical(made: Connections, *, is_stage: bool) -> None:
    """Raise ValueError for ranks at which gradients have no order that others have, too."""
    ranks = made.comm.world_size
    is_plain = all(
        links.world_size == links.num_means == ranks and links.tie is None
        for links in made.links.values()
    )
    if is_stage or not is_plain:
        raise ValueError(
            "canonical=True on a mesh that replicates or splits parameters, whose sums follow the "
            "mesh; expected ranks of one group, or canonical=False"
        )
    if ranks & (ranks - 1):
        raise ValueError(
            f"canonical=True on {ranks} ranks, over which a mean is no exact product; expected "
            "a power of two"
        )


def check_mesh(process_group: dist.ProcessGroup | None, mesh: object) -> None:
    """Raise ValueError if `mesh` is no DeviceMesh, or was given together with a group."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}; expected a torch DeviceMesh, of init_device_mesh"
        )
    if process_group is not None:
        raise ValueError(
            "mesh= and process_group= exclude each other; a 1-D mesh is "
            "process_group=mesh.get_group()"
        )


def everyone(process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> Communicator:
    """Communicator of all ranks that `connect` would connect."""
    return Communicator(_only_group(process_group, mesh))


def is_pipeline(process_group: dist.ProcessGroup | None, mesh: object) -> bool:
    """Whether a mesh has a dimension "pp". Raises ValueError as `check_mesh`."""
    if mesh is None:
        return False
    check_mesh(process_group, mesh)
    return PIPELINE in (getattr(mesh, "mesh_dim_names", None) or ())


def check_stages(mesh: Any, split: Sequence[str]) -> None:
    """Raise ValueError for a dimension that cannot be combined with "pp", for parameters that are
    split over others than "tp" and "ep", and for a mesh that misses ranks."""
    from gemini.mesh.roles import DATA_PARALLEL, EXPERTS, TENSOR_PARALLEL

    names = tuple(mesh.mesh_dim_names or ())
    if not {*names, *split} <= {PIPELINE, TENSOR_PARALLEL, EXPERTS, *DATA_PARALLEL}:
        raise ValueError(
            f"mesh has the dimensions {names}, and parameters are split over {tuple(split)}; "
            f"expected 'pp', and beside it '{TENSOR_PARALLEL}' or '{EXPERTS}', which alone split "
            f"parameters, and {', '.join(DATA_PARALLEL)}"
        )
    missing = sorted(set(range(dist.get_world_size())) - set(mesh.mesh.flatten().tolist()))
    if missing:
        raise ValueError(
            f"mesh misses the ranks {missing}; expected all of the {dist.get_world_size()}, "
            "which vote on every step"
        )


def stage_of(mesh: Any) -> tuple[dist.ProcessGroup | None, Any]:
    """(None, mesh) of the ranks that have the same part as this one, or (group, None) if this rank
    alone has it. Collective among them."""
    others = tuple(name for name in mesh.mesh_dim_names if name != PIPELINE)
    if others:
        return None, mesh[others]
    return dist.new_group([dist.get_rank()], use_local_synchronization=True), None


def _only_group(
    process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    """Group of all ranks: the 1-D mesh's, or the one that was given; None is the default group."""
    return mesh.get_group() if mesh is not None and mesh.ndim == 1 else process_group


def _roles(mesh: DeviceMesh, split: Sequence[str], *, inside: bool) -> MeshRoles | None:
    from gemini.mesh.roles import TENSOR_PARALLEL, roles_of

    ranks, count = mesh.mesh.flatten().tolist(), dist.get_world_size()
    if inside:  # ranks by their place in the stage, which may have nothing that is split
        ranks, count = list(range(mesh.size())), mesh.size()
        split = sorted({*split, *({TENSOR_PARALLEL} & {*(mesh.mesh_dim_names or ())})})
    if mesh.ndim == 1 and not split:
        return None
    return roles_of(mesh.mesh_dim_names, tuple(mesh.mesh.shape), ranks, split, count)


def _over(
    mesh: DeviceMesh, roles: MeshRoles, names: Sequence[str], comm: Communicator
) -> Communicator:
    """This rank's group over some dimensions; over none it is this rank alone."""
    if not names:
        return Communicator.alone(comm)
    if mesh.mesh_dim_names is None:  # dimensions by number
        return Communicator(mesh.get_group(roles.names.index(names[0])), comm)
    return Communicator(_group_over(mesh[tuple(names)]), comm)


def _group_over(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Group of all ranks of a mesh, in its order. Collective the first time."""
    return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
