"""Prices of both orders of micro-batches: traces, bytes, and what a step then reads."""

import gc
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import gemini
from bench.accumulate import VOCAB, Decoder
from gemini import AutoPlacement, GeminiDDP
from gemini.memtracer.trace import Trace, TraceMoment
from gemini.placement.orders import (
    BATCHES,
    LAYERS,
    NoLayersError,
    OrderPrice,
    OrderPrices,
    layered,
)
from gemini.placement.tiers import Tier
from optim import HybridAdam


def trace_of(num_layers, *, hidden=10, own=7):
    """Trace of an embedding, layers of one module and a head, in which each keeps `hidden`."""
    names = ["embedding", *(f"h.{i}.linear" for i in range(num_layers)), "head"]
    moments = []
    for i, name in enumerate(names):
        kept = 100 + hidden * i
        for edge, extra in (("enter", own), ("leave", 0)):
            moments.append(TraceMoment("forward", edge, name, (i,), kept + extra))
    for i, name in reversed(list(enumerate(names))):
        kept = 100 + hidden * i
        for edge, extra in (("enter", own), ("leave", 0)):
            moments.append(TraceMoment("backward", edge, name, (i,), kept + extra))
    return Trace("train", "ids", "digest", tuple(moments))


def test_a_layer_comes_once_in_each_pass_and_the_ends_for_each_micro_batch():
    found = layered(trace_of(3), 2, {})
    begins = [(m.phase[0], m.module) for m in found.moments if m.edge == "enter"]
    layers = [f"h.{i}" for i in range(3)]
    ends = [("f", "embedding"), ("f", "head"), ("b", "head")]
    assert begins == [
        *[("f", "embedding")] * 2, *(("f", name) for name in layers), *ends * 2,
        *(("b", name) for name in reversed(layers)), *[("f", "embedding"), ("b", "embedding")] * 2,
    ]  # fmt: skip


def test_hidden_states_of_all_micro_batches_and_sums_of_gradients_stay():
    k, hidden, own = 3, 10, 7
    sums = {i: 1000 * 10**i for i in range(4)}
    found = layered(trace_of(2, hidden=hidden, own=own), k, sums).moments
    at = {(m.phase, m.edge, m.module): m.non_model_bytes for m in found}
    assert at["forward", "enter", "h.0"] == 100 + k * hidden + own
    assert at["forward", "leave", "h.1"] == 100 + 2 * k * hidden
    outer = sums[0] + sums[3]
    assert at["backward", "leave", "h.1"] == 100 + 2 * k * hidden + outer + sums[2]
    assert at["backward", "leave", "h.0"] == 100 + k * hidden + outer + sums[2] + sums[1]
    assert at["backward", "leave", "embedding"] == 100 + sum(sums.values())


def test_thousands_of_micro_batches_are_planned_as_a_few_and_take_their_time():
    """Prologues and epilogues of one place need the same weights."""
    trace = trace_of(3)
    timed = replace(trace, moments=tuple(replace(m, seconds=1.0) for m in trace.moments))
    few, many = layered(timed, 8, {}).moments, layered(timed, 4000, {}).moments
    assert [(m.module, m.params) for m in few] == [(m.module, m.params) for m in many]
    assert sum(m.seconds for m in many) == 500 * sum(m.seconds for m in few) > 0
    at_most = [max(m.non_model_bytes for m in found) for found in (few, many)]
    assert at_most == [100 + 3 * k * 10 + 7 for k in (8, 4000)]


@pytest.mark.parametrize("num_layers", [0, 1])
def test_a_trace_without_a_list_of_layers_has_no_other_order(num_layers):
    with pytest.raises(NoLayersError, match="no list of layers"):
        layered(trace_of(num_layers), 2, {})


def test_the_faster_order_is_advised_and_of_equal_ones_the_one_of_any_model():
    def price(order, seconds):
        return OrderPrice(order, 1 << 20, seconds)

    slow, fast = price(BATCHES, 2.0), price(LAYERS, 1.0)
    assert OrderPrices(slow, fast).advised == LAYERS
    assert OrderPrices(slow, price(LAYERS, 2.0)).advised == BATCHES
    assert OrderPrices("does not fit", fast).advised == LAYERS
    assert OrderPrices(slow, "has no price").advised == BATCHES
    assert str(OrderPrices(slow, fast)) == (
        "micro-batches one after the other: reads 1.00 MiB of parameters, 2 s; layer by layer: "
        "reads 1.00 MiB of parameters, 1 s; advised: --accumulate-order layers"
    )


@pytest.mark.ci  # files of its own for each block
@pytest.mark.parametrize("order", [LAYERS, BATCHES])
def test_a_step_reads_what_its_plan_predicts(order, tmp_path):
    """And a report has both. One after the other, payloads that a micro-batch has left are there as
    the next one begins, which the plan of one does not know: so up to k times what the device ever
    holds of payloads may not be read."""
    gc.collect()  # what other tests left is no activation of this one
    module, share, k = Decoder(128, 6), 1.5, 3
    if order == BATCHES:  # gradients that wait would leave later micro-batches less room
        module.requires_grad_(False)
        module.norm.requires_grad_(True)
        module.blocks[0].first.requires_grad_(True)
        share = 0.6
    params = sum(param.numel() * 4 for param in module.parameters())
    policy = AutoPlacement(int(share * params), nvme_dir=str(tmp_path), block_numel=1 << 14)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gemini.BudgetWarning)
        model = GeminiDDP(module, "cpu", policy, precision="fp32", min_chunk_size_m=0.02)
        optimizer = HybridAdam(model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(1)
        # The first step compares losses and is no sample, the second is measured, and the third
        # follows its plan.
        for _ in range(3):
            given = list(torch.randint(VOCAB, (k, 1, 16), generator=generator))
            gemini.accumulate(model, given, loss_of, order=order)
            optimizer.step()
            optimizer.zero_grad()
    assert not model.memory_stats.deviations
    found = model.engine.cycle.accumulated
    assert (found.order, found.num_batches) == (order, k)
    payloads = max(model.engine.planning.result.profile.rows[Tier.DEVICE, "parameters"])
    stayed = k * payloads if order == BATCHES else 0
    assert stayed < found.predicted_bytes / 2
    assert found.predicted_bytes - stayed <= found.counted_bytes <= found.predicted_bytes
    assert str(found) in model.explain("norm.weight")


def loss_of(logits, ids):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / 3
