"""Price of a layout: seconds of a step and bytes of the rank that has most, each by what it is for.
Pure.

n tokens of a micro-batch on a rank · m micro-batches · p places of a pipeline · v stages of a place
F forward, B backward of a place for one micro-batch

Of weights that are frozen there are no gradients to compute, to reduce or to keep, and no state.

Pipelines take those schedules of torch that the plugins run. With equal places 1F1B takes
(m + p - 1)(F + B), the interleaved one (m + (p - 1) / v)(F + B): Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters", arXiv 2104.04473, section 2.2. In torch's
zero-bubble V, where half of B are gradients of weights, (p - 1) B / 4 are left of the bubble from
m = 2 p on, and twice that below. A test runs torch's own orders of actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from gemini.placement.cost import link_seconds, update_seconds, update_transfers
from gemini.placement.plan import UpdatePath
from gemini.placement.sizes import FP32_BYTES, BlockBytes
from gemini.placement.tiers import Tier
from gemini.units import BlockId, Bytes, ChunkId

from .cluster import Cluster
from .layout import INTERLEAVED, ONE, PLANNED, RING, ZBV, GlobalBatch, ParallelLayout
from .shape import ModelShape

FORWARD_PASSES, BACKWARD_PASSES = 2.0, 4.0  # times that saved bytes pass memory beside products
FLASH_BACKWARD = 2.5  # of attention's forward, whose scores are computed again
STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.125}  # of Adam's moments, an element


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a layout.

    seconds, nbytes: by name. left: bytes of model data that leave the device.
    """

    seconds: Mapping[str, float]
    nbytes: Mapping[str, float]
    left: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def peak(self) -> float:
        """Bytes on the device at the peak."""
        return sum(self.nbytes.values()) - self.left


@dataclass(frozen=True)
class Pricing:
    """One layout with all that its price is computed from. state: of `HybridAdam`."""

    shape: ModelShape
    cluster: Cluster
    step: GlobalBatch
    layout: ParallelLayout
    state: str = "fp32"

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank."""
        return self.layout.batch * self.step.seq // self.layout.sp

    @cached_property
    def layers(self) -> int:
        """Layers of the place that has most: the last stages have what is left over."""
        layout, places = self.layout, range(self.layout.pp)
        counts = layout.layers_of_stages(self.shape.layers)
        if layout.style == ZBV:
            return max(counts[i] + counts[-1 - i] for i in places)
        return max(sum(counts[i :: layout.pp]) for i in places)

    @cached_property
    def saved(self) -> float:
        """Bytes of a token that a layer's backward needs, on a rank."""
        layout, scores = self.layout, self.shape.scores * self.step.seq
        return self.shape.saved.of_rank(layout.tp, in_sequence=layout.in_sequence) + (
            scores / layout.tp
        )

    # ---- one layer and one micro-batch

    def _layer(self) -> tuple[float, float]:
        """Seconds of a layer's forward and backward, without what ranks exchange."""
        layout, cluster = self.layout, self.cluster
        products, attention = self.shape.layer_flops(self.step.seq)
        mine = self.tokens / layout.tp
        weights = self._numels[2] * self.shape.itemsize / cluster.weights
        dot = products * mine / cluster.speeds.flops + weights
        is_ring = layout.sp > 1 and layout.sp_mode == RING
        attend = attention * mine / (cluster.exact_attention if is_ring else cluster.attention)
        passes = self.shape.passes * self.saved * self.tokens / cluster.speeds.device_memory
        forward = dot + attend + FORWARD_PASSES * passes
        dots = (1 + self.shape.trained) * dot  # gradients of inputs, and of weights
        backward = dots + FLASH_BACKWARD * attend + BACKWARD_PASSES * passes
        return forward, backward + (forward if layout.recompute else 0.0)

    def _tensor(self) -> tuple[float, float]:
        """Seconds of reductions between ranks that split a layer, in forward and backward.

        Where tokens are split too, each is an all-gather and a reduce-scatter: as many bytes.
        """
        layout = self.layout
        if layout.tp == 1:
            return 0.0, 0.0
        nbytes = self.tokens * self.shape.hidden * self.shape.itemsize
        one = self.cluster.reduce(nbytes, layout.tp, layout.stride["tp"])
        forward, backward = self.shape.reduces
        return forward * one, (backward + (forward if layout.recompute else 0)) * one

    def _sequence(self) -> tuple[float, float]:
        """Seconds of exchanges between ranks that share sequences, in forward and backward."""
        layout, shape = self.layout, self.shape
        if layout.sp == 1:
            return 0.0, 0.0
        width = shape.itemsize * shape.head_dim * self.tokens / layout.tp
        stride = layout.stride["sp"]
        if layout.sp_mode == RING:  # keys and values go round, and in backward their gradients
            pairs = 2 * shape.kv_heads * width
            forward = (layout.sp - 1) * self.cluster.send(pairs, stride)
            gradients = pairs * FP32_BYTES / shape.itemsize
            backward = forward + layout.sp * self.cluster.send(gradients, stride)
        else:
            keys = max(shape.kv_heads, layout.sp * layout.tp)  # repeated if there are fewer
            one, few = (self.cluster.exchange(heads * width, layout.sp, stride)
                        for heads in (shape.heads, keys))  # fmt: skip
            forward = backward = 2 * one + 2 * few
        return forward, backward + (forward if layout.recompute else 0.0)

    def _experts(self) -> tuple[float, float]:
        """Seconds of tokens on their way to experts and back, in forward and backward."""
        layout, shape = self.layout, self.shape
        nbytes = self.tokens * shape.experts_used * shape.hidden * shape.itemsize
        one = self.cluster.exchange(nbytes, layout.ep, layout.stride["ep"])
        return 2 * one, 2 * one * (2 if layout.recompute else 1)

    def _head(self) -> float:
        """Seconds of the head, forward and backward."""
        shape, cluster = self.shape, self.cluster
        mine = self.tokens / self.layout.tp
        passes = (FORWARD_PASSES + BACKWARD_PASSES) / 3 * shape.ends / cluster.speeds.device_memory
        weights = shape.hidden * shape.vocab / self.layout.tp * shape.itemsize / cluster.weights
        times = 2 + shape.trained  # forward, and gradients of inputs and of weights
        return mine * (times * shape.head_flops / cluster.speeds.flops + passes) + times * weights

    # ---- a step

    def _runs(self) -> dict[str, float]:
        """Seconds of all micro-batches of the slowest place, and what a pipeline adds."""
        layout, m = self.layout, self.layout.micro_batches
        parts = {
            "compute": sum(self._layer()), "tensor": sum(self._tensor()),
            "sequence": sum(self._sequence()), "experts": sum(self._experts()),
        }  # fmt: skip
        place = {name: self.layers * seconds for name, seconds in parts.items()}
        head = self._head()
        if layout.pp == 1:
            place["compute"] += head
            return {name: m * seconds for name, seconds in place.items()}
        each = sum(place.values())
        slowest = each + head  # the last place
        pairs = (self._layer(), self._tensor(), self._sequence(), self._experts())
        fill = self._bubble(*(self.layers * sum(one[way] for one in pairs) for way in (0, 1)))
        work = m * (each + head / layout.pp)  # of a place, on average
        path = m * slowest + fill
        # a rank that waits leaves the cores that it shares to the others
        wait = max(0.0, path / self.cluster.burst - work)
        nbytes = self.tokens * self.shape.hidden * self.shape.itemsize
        message = self.cluster.send(nbytes, layout.stride["pp"])
        # in the steady state a place sends while it computes; while it fills nothing else runs
        sends = 2 * (layout.pp - 1) * message
        beside = 2 * m * layout.chunks * message
        sends += (1 - self.cluster.overlap) * beside
        return {name: m * seconds for name, seconds in place.items()} | {
            "compute": m * (place["compute"] + head / layout.pp), "bubble": wait, "messages": sends,
        }  # fmt: skip

    def _bubble(self, forward: float, backward: float) -> float:
        """Seconds in which a place waits: forward and backward are its own, of a micro-batch."""
        layout = self.layout
        if layout.style == ZBV:  # gradients of weights fill what they can: all, with more to do
            share = 4 if layout.micro_batches >= 2 * layout.pp else 2
            return (layout.pp - 1) * backward / share
        return (layout.pp - 1) * (forward + backward) / layout.chunks

    @property
    def _state_bytes(self) -> float:
        """Bytes of the state of an element, with its master."""
        return STATE_BYTES[self.state] + FP32_BYTES

    @cached_property
    def _trained(self) -> float:
        """Elements of which a rank has the state."""
        dense, experts, _ = self._numels
        return self.shape.trained * (
            dense / self.layout.shards + experts / self.layout.expert_shards
        )

    @cached_property
    def _largest(self) -> float:
        """Elements of what is gathered or reduced at once at the most: a layer, or an end."""
        shape = self.shape
        ends = max(shape.first_numel, shape.last_numel) / self.layout.tp
        return max(self._numels[2], ends)

    @cached_property
    def _numels(self) -> tuple[float, float, float]:
        """Elements of a place: dense ones, experts, and of one layer."""
        shape, layout = self.shape, self.layout
        dense = shape.layer_numel - shape.split_numel + shape.split_numel / layout.tp
        experts = shape.expert_numel / layout.ep
        ends = [shape.first_numel / layout.tp, shape.last_numel / layout.tp]
        if layout.pp > 1 and shape.tied:
            ends[1] += ends[0]
        beside = sum(ends) if layout.pp == 1 or layout.style == ZBV else max(ends)
        return self.layers * dense + beside, self.layers * experts, dense + experts

    def _shared(self, seconds: dict[str, float]) -> dict[str, float]:
        """Seconds in which gradients are reduced and parameters gathered, beyond those that run
        beside products."""
        layout, cluster, size = self.layout, self.cluster, self.shape.itemsize
        dense, experts, layer = self._numels
        ranks, strides = layout.shards, layout.stride

        def once(whole: float, routed: float) -> float:
            of_experts = cluster.gather(routed * size, layout.expert_shards, strides["sp"])
            return cluster.gather(whole * size, ranks, strides["ep"]) + of_experts

        one = once(dense, experts)
        reduced = cluster.scatter * one
        of_replicas = cluster.reduce(
            (dense / ranks + experts / layout.expert_shards) * size,
            layout.replicas, strides["replicas"],
        )  # fmt: skip
        sharded = layout.zero in ("3", PLANNED) and ranks > 1
        times = float(layout.micro_batches)
        trained = self.shape.trained
        forward = one * (times if sharded else trained)  # ZeRO-1 and 2 gather behind the step
        often = 1 if layout.zero == "1" or layout.pp > 1 else times
        backward = trained * (reduced * often + of_replicas)
        if sharded:
            backward += one * times
        busy, beside = seconds["compute"], (0.0, 0.0)  # ZeRO-1 reduces and gathers in the step
        if sharded:
            beside = (busy / 3, busy * 2 / 3)
        elif layout.zero == "2":
            beside = (0.0, busy * 2 / 3)
        hidden = cluster.overlap * (min(forward, beside[0]) + min(backward, beside[1]))
        first = once(layer, 0.0) if sharded else 0.0
        return {"shards": forward + backward - hidden + first}

    def _updated(self, left: float) -> dict[str, float]:
        """Seconds of the update, and of state that is not on the device."""
        layout, speeds = self.layout, self.cluster.speeds
        dense, experts, _ = self._numels
        state, weights = (
            self._trained * nbytes for nbytes in (self._state_bytes, self.shape.itemsize)
        )
        seconds = {"update": update_seconds(state, weights, UpdatePath.RESIDENT, speeds)}
        if layout.micro_batches > 1:  # gradients add up in fp32
            whole = self.shape.trained * (dense + experts)
            whole = self._trained if layout.zero in ("2", "3", PLANNED) else whole
            added = whole * (2 * FP32_BYTES + self.shape.itemsize)
            seconds["update"] += layout.micro_batches * added / speeds.device_memory
        if left:
            seconds["homes"] = self.away(left)
        return seconds

    def away(self, left: float) -> float:
        """Seconds of the link to RAM, where `left` bytes of model data live: state, which passes it
        both ways at once in a step, then parameters, which forward and backward read."""
        has_host_tier, speeds = self.cluster.has_host_tier, self.cluster.speeds
        state = min(left, self._trained * self._state_bytes)
        block = BlockBytes(
            BlockId(0), ChunkId(0), int(self._trained), Bytes(0), Bytes(int(state)), Bytes(0),
            Bytes(0), has_master=True,
        )  # fmt: skip
        here, busy = Tier.DEVICE, Counter[str]()
        for _, src, dst, nbytes in update_transfers(
            block, Tier.HOST, param=here, grad=here, path=UpdatePath.STREAM
        ):
            busy.update(link_seconds(src, dst, nbytes, speeds, has_host_tier))
        read = link_seconds(Tier.HOST, here, int(left - state), speeds, has_host_tier)
        times = 2 * self.layout.micro_batches
        return max(busy.values(), default=0.0) + times * sum(read.values())

    def _bytes(self) -> dict[str, float]:
        """Bytes of the rank that has most."""
        layout, shape = self.layout, self.shape
        dense, experts, layer = self._numels
        shards, of_experts = layout.shards, layout.expert_shards
        own = dense / shards + experts / of_experts
        whole = dense + experts
        found: dict[str, float] = {"state": shape.trained * own * self._state_bytes}
        if layout.zero in ("3", PLANNED) and shards > 1:
            found["parameters"] = (own + layer + self._largest) * shape.itemsize
            found["gradients"] = shape.trained * own * shape.itemsize
        elif layout.zero == "2" and shards > 1:
            found["parameters"] = whole * shape.itemsize
            found["gradients"] = shape.trained * (own + self._largest) * shape.itemsize
        else:
            found["parameters"] = whole * shape.itemsize
            found["gradients"] = shape.trained * whole * shape.itemsize
        if layout.micro_batches > 1:
            found["sums"] = shape.trained * own * FP32_BYTES
        found["activations"] = self.tokens * (
            self._kept() + max(shape.ends / layout.tp, shape.working / layout.tp)
        )
        return found

    def _kept(self) -> float:
        """Bytes that a place keeps for backward, for each token of a micro-batch."""
        layout = self.layout
        rounds = {
            ONE: float(layout.pp),
            INTERLEAVED: layout.pp + (layout.pp - 1) / layout.chunks,
            ZBV: float(layout.pp),
        }[layout.style]
        rounds = min(rounds, layout.micro_batches)
        if not layout.recompute:
            return rounds * self.layers * self.saved
        width = self.shape.hidden * self.shape.itemsize / (layout.tp if layout.in_sequence else 1)
        return rounds * self.layers * width + self.saved

    @cached_property
    def needed(self) -> float:
        """Bytes on the device, if nothing leaves it."""
        return sum(self._bytes().values())

    def price(self, *, fits: bool = True) -> Price | None:
        """Price of the layout; None if it does not fit. fits: False prices it all the same."""
        found, limit = self._bytes(), self.cluster.device_bytes
        if not fits:
            seconds = self._runs()
            return Price(seconds | self._shared(seconds) | self._updated(0.0), found)
        over = sum(found.values()) - limit
        left = 0.0
        if over > 0:
            movable = found["state"] + found["parameters"] + found["gradients"]
            if self.layout.zero != PLANNED or over > min(movable, self.cluster.host_bytes):
                return None
            if not self.cluster.has_host_tier:
                return None
            left = over
        if self.layout.zero == PLANNED:
            simpler = replace(self.layout, zero="3" if self.layout.pp == 1 else "1")
            if replace(self, layout=simpler).needed <= limit:
                return None  # nothing is to be planned: a stage stays gathered, say
        seconds = self._runs()
        seconds |= self._shared(seconds) | self._updated(left)
        return Price(seconds, found, left)
