"""Plans of micro-batches layer by layer, beside one after the other and the other switches."""

from dataclasses import replace

import pytest

from gemini.placement.orders import LAYERS, NoLayersError
from gemini.plan import changes, words
from gemini.plan.ask import ask, plan_for
from gemini.plan.machine import machine_of
from gemini.plan.training import Training

MIB = 1 << 20


def in_little(question, device_mem=150):
    """8 micro-batches, where weights come from the host."""
    machine = replace(question.machine, device_mem=device_mem * MIB)
    return replace(question, machine=machine, accumulate=8)


def test_both_orders_are_priced_and_layer_by_layer_reads_less(question):
    asked = in_little(question)
    prices = asked.orders()
    assert 0 < prices.layers.read_bytes < prices.batches.read_bytes / 4
    assert replace(asked, accumulate=1).orders() is None
    layered = replace(asked, accumulate_order=LAYERS)
    assert prices.layers.seconds == layered.seconds(layered.planned())
    plan = words.answer(replace(asked, other=None))
    assert plan.orders == plan.asked.orders()  # with the update that runs
    assert str(plan.orders) in list(words.five_lines("it", plan))
    assert words.as_json(plan)["orders"]["layers"]["read_bytes"] == plan.orders.layers.read_bytes


def test_a_chunked_loss_and_the_order_are_in_one_plan(config):
    """Both flags, and each as a change of the other."""
    machine = machine_of({"nvme": 10**12})
    both = Training(seq=64, accumulate=8, chunked=True, accumulate_order=LAYERS)
    asked = ask(str(config), machine, both)
    assert (asked.chunked, asked.accumulate_order) == (True, LAYERS)
    assert asked.at(64).trace == asked.trace
    before = ask(str(config), machine, Training(seq=64, accumulate=8))
    layered = replace(before.other(False, 0, None, True), accumulate_order=LAYERS)
    assert changes.flags(before, layered) == "--chunk-loss --accumulate-order layers"
    assert layered.trace == asked.trace != replace(before, accumulate_order=LAYERS).trace


@pytest.mark.ci
def test_a_model_with_two_lists_of_layers_has_no_other_order():
    plan = plan_for("t5-small", machine_of({}, gpu="h100"), Training(seq=32, accumulate=2))
    assert "2 lists of layers (encoder.block, decoder.block)" in plan.orders.layers
    assert plan.orders.advised == "batches"
    with pytest.raises(NoLayersError, match="2 lists of layers"):
        ask("t5-small", machine_of({}), Training(seq=32, accumulate=2, accumulate_order=LAYERS))
