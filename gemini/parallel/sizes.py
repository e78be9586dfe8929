"""Sizes of a mesh: from a plugin's options to its dimensions, and to each rank's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt, prod
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gemini.comm.connect import world_size

Dims = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of tensor parallelism in blocks: what each dimension of its mesh cuts.

    rows, columns: dimensions that cut the rows of an activation, the outer one first, and its
    features. weight: of a weight [in, out], the dimension of it that is cut, by mesh dimension. In
    the order of the mesh, in which torch cuts.
    """

    rows: tuple[str, ...]
    columns: str
    weight: Mapping[str, int]


LAYOUTS = {
    "2d": Layout(("2d_col",), "2d_row", {"2d_col": 0, "2d_row": 1}),
    "2.5d": Layout(("2p5d_dep", "2p5d_col"), "2p5d_row", {"2p5d_col": 0, "2p5d_row": 1}),
    "3d": Layout(
        ("3d_weight", "3d_input"), "3d_output", {"3d_input": 1, "3d_weight": 1, "3d_output": 0}
    ),
}
BLOCKS = tuple(dict.fromkeys(n for one in LAYOUTS.values() for n in (*one.rows, *one.weight)))
_SAME_DATA = ("tp", "pp", "cp", *BLOCKS)  # dimensions whose ranks work on the same rows


def dims_of(mode: str, size: int, depth: int) -> Dims:
    """Dimensions of the mesh of `size` ranks that split layers in a mode of `LAYOUTS`.

    2d is q x q ranks, 2.5d `depth` of these, 3d q x q x q. Raises ValueError for another size.
    """
    side = round(size ** (1 / 3)) if mode == "3d" else isqrt(size // depth)
    ranks, shape = {
        "2d": (side**2, "q * q"), "2.5d": (side**2 * depth, "q * q * depth"),
        "3d": (side**3, "q * q * q"),
    }[mode]  # fmt: skip
    if ranks != size:
        given = f" and depth={depth}" if mode == "2.5d" else ""
        raise ValueError(f"mode={mode!r} for {size} ranks{given}; expected {shape} ranks")
    names = LAYOUTS[mode].weight
    deep = (("2p5d_dep", depth),) if mode == "2.5d" else ()
    return (*deep, *((name, side) for name in names))


# By group of all ranks: layers that are split as they are made are in the mesh of their plugin. By
# the group and not by its id, which the next group of a process may have.
_Meshes = WeakValueDictionary[tuple[str, Dims], DeviceMesh]
_MESHES: WeakKeyDictionary[dist.ProcessGroup, _Meshes] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Numbers of ranks in the dimensions of a mesh.

    tp: ranks that split layers, inside of a stage too. pp: places of a pipeline.
    replicas: copies of each shard. cp: ranks that share sequences; state is sharded over them too.
    blocks: dimensions of `dims_of` in place of the one of `tp`, whose product it is.
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
    blocks: Dims = ()

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
        dims += [("cp", self.cp), ("ep", self.ep), *(self.blocks or [("tp", self.tp)])]
        dims.insert(2 if self.pp_inside else 0, ("pp", self.pp))
        # a mesh of replicas alone would be one of shards
        there = [(n, size) for n, size in dims if size > 1 or (n == "shard" and replicas > 1)]
        return () if [name for name, _ in there] == ["shard"] else tuple(there)

    def mesh(self, device: torch.device) -> DeviceMesh | None:
        """Mesh of all ranks, None if one group has them all. Collective.

        Callers share one mesh per device type and sizes, as long as any of them keeps it.
        """
        dims = self.dims(world_size())
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
