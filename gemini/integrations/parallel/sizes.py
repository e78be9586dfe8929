"""Sizes of a mesh: from a plugin's options to its dimensions, and to each rank's data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gemini.integrations import parts

_SAME_DATA = ("tp", "pp", "cp")  # dimensions whose ranks work on the same rows
Dims = tuple[tuple[str, int], ...]
# By group of all ranks: layers that are split as they are made are in the mesh of their plugin. By
# the group and not by its id, which the next group of a process may have.
_Meshes = WeakValueDictionary[tuple[str, Dims], DeviceMesh]
_MESHES: WeakKeyDictionary[dist.ProcessGroup, _Meshes] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Numbers of ranks in the dimensions of a mesh.

    tp: ranks that split layers, inside of a stage too. pp: places of a pipeline.
    replicas: copies of each shard. cp: ranks that share sequences; state is sharded over them too.
    ep: data-parallel ranks over which experts are split.
    shards: False makes every data-parallel rank a replica of the whole state.
    pp_inside: ranks of one pipeline are neighbours.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    cp: int = 1
    ep: int = 1
    shards: bool = True
    pp_inside: bool = True

    def dims(self, ranks: int) -> Dims:
        """Names and sizes of the mesh's dimensions; empty if one sharding group has all ranks.

        Raises ValueError for sizes that do not divide `ranks`.
        """
        alike = self.tp * self.pp * self.cp
        if ranks % (alike * self.replicas * self.ep):
            named = {
                "tp_size": self.tp, "pp_size": self.pp, "sp_size": self.cp,
                "extra_dp_size": self.replicas, "ep_size": self.ep,
            }  # fmt: skip
            asked = " and ".join(f"{name}={size}" for name, size in named.items() if size > 1)
            raise ValueError(
                f"{asked} for {ranks} ranks; expected sizes whose product is a divisor of their "
                "number"
            )
        data = ranks // alike
        replicas = self.replicas if self.shards else data
        dims = [("replicate", replicas), ("shard", data // replicas // self.ep)]
        dims += [("cp", self.cp), ("ep", self.ep), ("tp", self.tp)]
        dims.insert(2 if self.pp_inside else 0, ("pp", self.pp))
        # a mesh of replicas alone would be one of shards
        there = [(n, size) for n, size in dims if size > 1 or (n == "shard" and replicas > 1)]
        return () if [name for name, _ in there] == ["shard"] else tuple(there)

    def mesh(self, device: torch.device) -> DeviceMesh | None:
        """Mesh of all ranks, None if one group has them all. Collective.

        Callers share one mesh per device type and sizes, as long as any of them keeps it.
        """
        dims = self.dims(parts.world_size())
        if not dims:
            return None
        assert dist.group.WORLD is not None
        meshes = _MESHES.setdefault(dist.group.WORLD, WeakValueDictionary())
        mesh = meshes.get((device.type, dims))
        if mesh is None:
            names, sizes = zip(*dims, strict=True)
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
            meshes[device.type, dims] = mesh
        return mesh

    def data_place(self, rank: int, ranks: int) -> tuple[int, int]:
        """Part of the data that `rank` sees, and the number of parts."""
        names = [name for name, _ in self.dims(ranks) or [("shard", ranks)]]
        return self.place([name for name in names if name not in _SAME_DATA], rank, ranks)

    def place(self, names: Sequence[str], rank: int, ranks: int) -> tuple[int, int]:
        """Row-major place of a rank in dimensions `names`, and the number of places."""
        dims = self.dims(ranks) or (("shard", ranks),)
        at = list(product(*(range(size) for _, size in dims)))[rank]
        mine = [
            (place, size) for place, (name, size) in zip(at, dims, strict=True) if name in names
        ]  # fmt: skip
        return _row_major(mine), prod(size for _, size in mine)


def _row_major(places: Sequence[tuple[int, int]]) -> int:
    index = 0
    for place, size in places:
        index = index * size + place
    return index
