"""Roles of the dimensions of a mesh, and the place of every rank in it. Pure.

S shards · R replicas · T places of parameters that are split already

Every parameter belongs to a sharding group, named by the dimensions that split it: `"world"` for a
parameter that none splits. Its chunks are cut into S shards, each with R replicas. Ranks at
different places of the split have different elements of a split parameter, and the same elements of
all other parameters.

Experts are split over a dimension whose ranks have different tokens. So all other parameters are
sharded over it too (S), and experts are sharded over the other dimensions of S. Gradients of both
are means over all R * S ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

REPLICATE = ("replicate", "dp_replicate")
DATA_PARALLEL = (*REPLICATE, "dp", "shard", "fsdp", "dp_shard", "cp")
SHARD = ("shard", "dp_shard", "fsdp", "efsdp", "dp", "cp")
TENSOR_PARALLEL = "tp"  # splits the layers of a stage, where a mesh has stages
EXPERTS = "ep"  # splits experts, and shards the rest


@dataclass(frozen=True, slots=True)
class Place:
    """Place of one rank in a mesh."""

    shard: int
    replica: int
    split: int  # row-major over the dimensions that split


@dataclass(frozen=True, slots=True)
class GroupRoles:
    """Mesh dimensions of one sharding group by role, each in the order of the mesh.

    shard: its parameters are sharded over these. split: these split them. copies: ranks at
    different places of these have the same elements and compute the same gradients.
    """

    shard: tuple[str, ...]
    split: tuple[str, ...]
    copies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeshRoles:
    """A mesh with the role of each of its dimensions.

    ranks: of the mesh, row-major. shard, split: `EXPERTS` is in `shard`, as it shards every
    parameter that it does not split.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    replicate: tuple[str, ...]
    shard: tuple[str, ...]
    split: tuple[str, ...]

    @property
    def num_shards(self) -> int:
        """S: shards of a chunk in the group `WORLD`."""
        return self._count(self.shard)

    @property
    def num_replicas(self) -> int:
        """R: replicas of a shard."""
        return self._count(self.replicate)

    @property
    def num_split(self) -> int:
        """T: places of parameters that are split, `EXPERTS` not counted."""
        return self._count(self.split)

    @property
    def num_means(self) -> int:
        """Ranks with different data, R * S: the gradient of any group is the mean over them."""
        return self.num_shards * self.num_replicas

    def group(self, name: str) -> GroupRoles:
        """Roles in the sharding group `name`: dimensions that split, joined by `+`, or `WORLD`."""
        split = tuple(dim for dim in self.names if dim in name.split("+"))
        return GroupRoles(
            tuple(dim for dim in self.shard if dim not in split),
            split,
            tuple(dim for dim in self.split if dim not in split),
        )

    def place(self, rank: int) -> Place:
        """Place of a rank, given by its number among all ranks."""
        at = dict(zip(self.names, self._coordinate(rank), strict=True))
        roles = (self.shard, self.replicate, self.split)
        return Place(*(self._index(names, at) for names in roles))

    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks with the same shard of the same parameters; empty if R is 1."""
        if self.num_replicas == 1:
            return ()
        alike: dict[tuple[int, int], list[int]] = {}
        for rank in sorted(self.ranks):
            place = self.place(rank)
            alike.setdefault((place.split, place.shard), []).append(rank)
        return tuple(map(tuple, alike.values()))

    def _count(self, names: Sequence[str]) -> int:
        return prod(self.sizes[self.names.index(name)] for name in names)

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        position = self.ranks.index(rank)
        return next(at for i, at in enumerate(product(*map(range, self.sizes))) if i == position)

    def _index(self, names: Sequence[str], at: dict[str, int]) -> int:
        index = 0
        for name in names:
            index = index * self.sizes[self.names.index(name)] + at[name]
        return index


def roles_of(
    names: Sequence[str] | None,
    sizes: Sequence[int],
    ranks: Sequence[int],
    split: Sequence[str],
    world_size: int,
) -> MeshRoles:
    """Roles of a mesh's dimensions, by their names.

    names: None for a mesh without names, which is (replicate, shard) as in `fully_shard`.
    sizes, ranks: of the mesh; ranks row-major.
    split: the dimensions over which torch has split or replicated a parameter.
    world_size: number of all ranks.
    Raises ValueError, with the names, for a mesh that cannot be carried out.
    """
    if names is None:
        if len(sizes) != 2:
            raise ValueError(
                f"mesh= has {len(sizes)} dimensions without names; expected mesh_dim_names, of "
                f"{', '.join((*REPLICATE, *SHARD))}, or two dimensions: (replicate, shard)"
            )
        names = ("replicate", "shard")
    for name in split:
        if name not in names:
            raise ValueError(
                f"a parameter is split over mesh dimension {name}, and "
                f"mesh={_shown(names, sizes)} has none of that name; expected the whole mesh, of "
                "which parallelize_module was given a part"
            )
    if prod(sizes) != world_size:
        raise ValueError(
            f"mesh={_shown(names, sizes)} has {prod(sizes)} of {world_size} ranks; expected the "
            "mesh of all of them, as init_device_mesh makes it"
        )
    if ranks[0] != 0:
        raise ValueError(
            f"mesh={_shown(names, sizes)} begins with rank {ranks[0]}; expected rank 0, whose "
            "parameters count, at its first place"
        )
    replicate = tuple(name for name in names if name in REPLICATE and name not in split)
    shard = tuple(name for name in names if name in SHARD and name not in split)
    _check_names(names, sizes, split, replicate, shard)
    return MeshRoles(
        tuple(names),
        tuple(sizes),
        tuple(ranks),
        replicate,
        tuple(name for name in names if name in (*shard, EXPERTS)),
        tuple(name for name in names if name in split and name != EXPERTS),
    )


def _check_names(
    names: Sequence[str],
    sizes: Sequence[int],
    split: Sequence[str],
    replicate: Sequence[str],
    shard: Sequence[str],
) -> None:
    shown = _shown(names, sizes)
    for name in split:
        if name in REPLICATE or name in SHARD:
            raise ValueError(
                f"a parameter is split over mesh dimension {name}, which is one of data parallel: "
                "that is FSDP2's work, and done here; expected parameters that are whole over "
                f"{name}"
            )
    for name in names:
        if name not in (*split, *replicate, *shard):
            raise ValueError(
                f"mesh={shown}: no parameter is split over dimension {name}, and it is none of "
                f"data parallel; expected {', '.join((*REPLICATE, *SHARD))}, or parallelize_module "
                f"over {name} before GeminiDDP"
            )
    if len(replicate) > 1 or len([name for name in shard if name != "cp"]) > 1:
        raise ValueError(
            f"mesh={shown} has several dimensions of one role; expected one to replicate "
            f"({' or '.join(REPLICATE)}), and one to shard beside cp and {EXPERTS}"
        )
    shards = (*shard, EXPERTS)
    roles = [0 if name in replicate else 1 if name in shards else 2 for name in names]
    if roles != sorted(roles):
        raise ValueError(
            f"mesh={shown} has its dimensions in an order that cannot be carried out; expected "
            "first what replicates, then what shards, then what splits parameters"
        )


def _shown(names: Sequence[str], sizes: Sequence[int]) -> str:
    return "(" + ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True)) + ")"
