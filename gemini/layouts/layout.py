"""Layouts: how a training is cut over ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .cluster import Cluster
from .shape import ModelShape

PLANNED = "planned"  # as 3, with homes by `AutoPlacement`: what has no room leaves the device
ZERO = ("1", "2", "3", PLANNED)
ULYSSES, RING = "all_to_all", "ring_attn"
ONE, INTERLEAVED, ZBV = "1f1b", "interleaved", "zbv"  # of `HybridParallelPlugin`
_CHUNKS = 2  # stages of a rank of the two others
MOST_TENSOR = 2  # nodes over which a layer is split


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """ParallelLayout of a training.

    tp: ranks that split layers; in_sequence: between these each has a part of the tokens.
    pp: places of a pipeline, of `chunks` stages each, in the order `style`.
    sp: ranks that share sequences, by `sp_mode`. ep: ranks over which experts are split.
    data: ranks with different data, of which `replicas` have the same shards.
    zero: of `ZERO`.
    batch: sequences of a micro-batch. micro_batches: of a step.
    recompute: layers are computed again in backward.
    """

    data: int = 1
    replicas: int = 1
    tp: int = 1
    in_sequence: bool = False
    pp: int = 1
    style: str = ONE
    chunks: int = 1
    sp: int = 1
    sp_mode: str = ULYSSES
    ep: int = 1
    zero: str = "1"
    batch: int = 1
    micro_batches: int = 1
    recompute: bool = False

    @property
    def ranks(self) -> int:
        return self.data * self.tp * self.pp * self.sp

    @property
    def shards(self) -> int:
        """Shards of what is not split: ranks that share sequences have some too."""
        return self.data * self.sp // self.replicas

    @property
    def expert_shards(self) -> int:
        """Shards of one rank's experts."""
        return self.shards // self.ep

    @property
    def stride(self) -> dict[str, int]:
        """Ranks between neighbours of each group, as a plugin's mesh with `dp_outside=False` has
        them. Shards of what is not split are over "ep", "sp" and "data" together."""
        inner = {"tp": self.tp, "ep": self.ep, "sp": self.sp}
        inner |= {"data": self.data // self.ep // self.replicas, "replicas": self.replicas}
        found, stride = {}, 1
        for name, size in (*inner.items(), ("pp", self.pp)):
            found[name] = stride
            stride *= size
        return found

    def layers_of_stages(self, layers: int) -> list[int]:
        """Layers of every stage of a pipeline: as even as can be, the rest in the last ones."""
        stages = self.pp * self.chunks
        return [(layers + i) // stages for i in range(stages)]

    def __str__(self) -> str:
        said = {
            "replicas": (self.replicas, ""), "data": (self.data, ""), "tp": (self.tp, ""),
            "pp": (self.pp, f" ({self.style})"), "sp": (self.sp, f" ({self.sp_mode})"),
            "ep": (self.ep, ""),
        }  # fmt: skip
        parts = [f"{name} {size}{more}" for name, (size, more) in said.items() if size > 1]
        parts += [f"zero {self.zero}"] * (self.shards > 1 or self.zero == PLANNED)
        parts += [f"{self.micro_batches} x {self.batch}"]
        parts += ["tokens split too"] * self.in_sequence + ["recomputed"] * self.recompute
        return ", ".join(parts)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """Batch of one step of all ranks: `sequences` of `seq` tokens each."""

    sequences: int
    seq: int


def _tensor_sizes(shape: ModelShape, cluster: Cluster) -> list[int]:
    if "tp" not in shape.can:
        return [1]
    most = min(cluster.ranks, MOST_TENSOR * cluster.per_node)
    return [n for n in _divisors(cluster.ranks)
            if n <= most and shape.heads % n == 0 and shape.kv_heads % n == 0]  # fmt: skip


def _sequence_sizes(shape: ModelShape, ranks: int, seq: int, tp: int) -> list[tuple[int, str]]:
    found = [(1, ULYSSES)]
    if "sp" not in shape.can:
        return found
    for n in _divisors(ranks)[1:]:
        keys = shape.kv_heads // tp
        if seq % n == 0 and shape.heads % (tp * n) == 0 and (keys % n == 0 or n % keys == 0):
            found.append((n, ULYSSES))
        if seq % (2 * n) == 0:
            found.append((n, RING))
    return found


def _pipelines(shape: ModelShape, ranks: int) -> list[tuple[int, str, int]]:
    found = [(1, ONE, 1)]
    if "pp" not in shape.can:
        return found
    for n in _divisors(ranks)[1:]:
        if n <= shape.layers:
            found.append((n, ONE, 1))
        if _CHUNKS * n <= shape.layers:
            found += [(n, INTERLEAVED, _CHUNKS), (n, ZBV, _CHUNKS)]
    return found


def meshes_of(shape: ModelShape, cluster: Cluster, step: GlobalBatch) -> Iterator[ParallelLayout]:
    """Yield every mesh that the plugins run, with one micro-batch of all that a rank has.

    Sizes are divisors of the ranks. Experts are split over ranks of whole layers alone. The heads
    that a rank has of a split layer are those that it exchanges for tokens.
    """
    ranks = cluster.ranks
    for tp in _tensor_sizes(shape, cluster):
        for pp, style, chunks in _pipelines(shape, ranks // tp):
            for sp, mode in _sequence_sizes(shape, ranks // tp // pp, step.seq, tp):
                data = ranks // (tp * pp * sp)
                if step.sequences % data:
                    continue
                for ep in _divisors(data) if "ep" in shape.can and tp == 1 else [1]:
                    if ep > 1 and shape.experts % ep:
                        continue
                    for replicas in _replicas(data // ep, cluster, tp * sp):
                        splits = tp > 1 and sp == 1 and step.seq % tp == 0
                        for in_sequence in (False, True)[: 1 + splits]:
                            yield ParallelLayout(
                                data, replicas, tp, in_sequence, pp, style, chunks, sp, mode, ep,
                                "1", step.sequences // data,
                            )  # fmt: skip


def _replicas(data: int, cluster: Cluster, stride: int) -> list[int]:
    """Numbers of replicas worth pricing: none, and one for each node."""
    here = max(1, cluster.per_node // stride)
    nodes = data // here
    return [1, nodes] if nodes > 1 and data % here == 0 and here > 1 else [1]


def runs_of(mesh: ParallelLayout, shape: ModelShape) -> Iterator[ParallelLayout]:
    """Yield what runs on a mesh: sizes of micro-batches, stages of ZeRO, and recomputation.

    A stage of a pipeline has its gradients whole until its last micro-batch, and its parameters
    too, unless its plan has no room.
    """
    kinds = ZERO if mesh.shards > 1 and mesh.pp == 1 else ("1", PLANNED)
    for batch in _divisors(mesh.batch):
        times = mesh.batch // batch
        if mesh.style == INTERLEAVED and times % mesh.pp:
            continue
        if mesh.pp > 1 and times < mesh.pp:
            continue
        for zero in kinds:
            for recompute in (False, True)[: 1 + ("recompute" in shape.can)]:
                yield replace(
                    mesh, batch=batch, micro_batches=times, zero=zero, recompute=recompute
                )  # fmt: skip
