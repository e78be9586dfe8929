"""From a process group or a mesh to the communicators of one engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gemini.mesh.roles import WORLD, MeshRoles, roles_of

from .ballot import Scope
from .communicator import Communicator
from .links import Links


@dataclass(frozen=True, slots=True)
class Connections:
    """comm: all ranks, for what they agree on. links: of each sharding group, by its name."""

    comm: Communicator
    links: Mapping[str, Links]
    scope: Scope

    @property
    def num_shards(self) -> dict[str, int]:
        """S of each sharding group: ranks among which its parameters are cut."""
        return {group: links.world_size for group, links in self.links.items()}

    @property
    def num_replicas(self) -> int:
        """R."""
        return self.links[WORLD].num_replicas


def connect(
    process_group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    split: Sequence[str] = (),
    groups: Collection[str] = (),
) -> Connections:
    """split: mesh dimensions over which torch has split or replicated a parameter. groups: the
    sharding groups that there are.

    Collective. Raises ValueError for a mesh that cannot be carried out; see `roles_of`.
    """
    check_mesh(process_group, mesh)
    roles = _roles(mesh, split)
    if roles is None or mesh is None:
        comm = Communicator(_only_group(process_group, mesh))
        return Connections(comm, {WORLD: Links(comm)}, Scope(comm.rank, comm.world_size))
    comm = Communicator()

    @cache
    def over(dims: tuple[str, ...]) -> Communicator:
        return _over(mesh, roles, dims, comm)

    links = {}
    for name in sorted({WORLD, *groups}):
        group = roles.group(name)
        links[name] = Links(
            over(group.shard),
            over(roles.replicate),
            over(group.copies),
            over(group.split),
            roles.num_means,
        )
    return Connections(comm, links, Scope(comm.rank, comm.world_size, roles.replicas()))


def check_mesh(process_group: dist.ProcessGroup | None, mesh: object) -> None:
    """Raise ValueError for what is no mesh, and for one beside a group."""
    if mesh is None:
        return
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
    """All ranks that `connect` would connect."""
    return Communicator(_only_group(process_group, mesh))


def _only_group(
    process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    """The one group that shares everything; None is the default one."""
    return mesh.get_group() if mesh is not None and mesh.ndim == 1 else process_group


def _roles(mesh: DeviceMesh | None, split: Sequence[str]) -> MeshRoles | None:
    if mesh is None:
        return None
    if mesh.ndim == 1 and not split:
        return None
    return roles_of(
        mesh.mesh_dim_names,
        tuple(mesh.mesh.shape),
        mesh.mesh.flatten().tolist(),
        split,
        dist.get_world_size(),
    )


def _over(
    mesh: DeviceMesh, roles: MeshRoles, names: Sequence[str], comm: Communicator
) -> Communicator:
    """This rank's group over some dimensions, of which none is this rank alone."""
    if not names:
        return Communicator.alone(comm)
    if mesh.mesh_dim_names is None:  # dimensions by number
        return Communicator(mesh.get_group(roles.names.index(names[0])), comm)
    part = mesh[tuple(names)]
    return Communicator((part if len(names) == 1 else part._flatten()).get_group(), comm)
