"""Cluster: ranks on nodes, what each computes with, and links of two classes. Pure.

k ranks of a group on one node · N nodes of it · n = k N ranks · b bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from gemini.placement.sizes import Bandwidths


@dataclass(frozen=True, slots=True)
class Link:
    """Link of one rank: seconds before the first byte, and bytes a second each way."""

    latency: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Cluster of ranks that are alike.

    ranks: in all. per_node: on one node, neighbours first.
    device_bytes, host_bytes: memory of one rank.
    speeds: of one rank, as plans have them: products, its memory, its link to RAM.
    attention: operations a second of attention, and exact_attention: of a ring's, whose products
        are in fp32 and in no fused kernel.
    weights: bytes of a product's weight a second, which each product takes beside its operations:
        to read it, and to pack it for a CPU.
    inside, across: links between ranks of one node, and of two.
    has_host_tier: else the device is RAM.
    burst: how much faster a rank computes while the others of its node wait: above 1 where they
        share cores.
    overlap: share of what could run beside products that does.
    scatter: bytes of a reduce-scatter by those of an all-gather: gloo's is an all-reduce.
    """

    ranks: int
    per_node: int
    device_bytes: int
    host_bytes: int
    speeds: Bandwidths
    attention: float
    exact_attention: float
    weights: float
    inside: Link
    across: Link
    has_host_tier: bool = True
    burst: float = 1.0
    overlap: float = 0.9
    scatter: float = 1.0

    def _places(self, size: int, stride: int) -> tuple[int, int]:
        """Ranks of a group on one node, and its nodes: `size` ranks, `stride` apart."""
        here = min(size, max(1, self.per_node // stride))
        return here, -(-size // here)

    def _latency(self, here: int, nodes: int) -> float:
        """Latency of a tree over both classes of links."""
        return self.inside.latency * log2(here) + self.across.latency * log2(nodes)

    def _rate(self, here: int, nodes: int) -> float:
        """Bytes a second of a ring over nodes: each rank of a node has a link of its own across."""
        if nodes == 1:
            return self.inside.bytes_per_s
        across = here * self.across.bytes_per_s
        return min(self.inside.bytes_per_s, across) if here > 1 else across

    def gather(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds of an all-gather or reduce-scatter of b bytes in all: (n - 1) / n b over the
        ring."""
        if size == 1 or not nbytes:
            return 0.0
        here, nodes = self._places(size, stride)
        return (size - 1) / size * nbytes / self._rate(here, nodes) + self._latency(here, nodes)

    def reduce(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds of an all-reduce of b bytes: a reduce-scatter and an all-gather."""
        return 2 * self.gather(nbytes, size, stride)

    def exchange(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds of an all-to-all in which a rank has b bytes: what leaves its node does so over
        its own link."""
        if size == 1 or not nbytes:
            return 0.0
        here, nodes = self._places(size, stride)
        inside = (here - 1) / size * nbytes / self.inside.bytes_per_s
        across = (size - here) / size * nbytes / self.across.bytes_per_s
        return max(inside, across) + self._latency(here, nodes)

    def send(self, nbytes: float, stride: int) -> float:
        """Seconds of a message to the rank that is `stride` away."""
        link = self.inside if stride < self.per_node else self.across
        return link.latency + nbytes / link.bytes_per_s
