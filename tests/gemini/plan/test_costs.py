"""What a planned step takes: operations, as torch counts them, moved bytes, and a tail."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from gemini.placement.timetable.clock import StepClock, Work
from gemini.placement.timetable.updates import SERIAL, best_update
from gemini.plan import models, words
from gemini.plan.ask import ask
from gemini.plan.machine import TYPICAL, machine_of
from gemini.plan.training import Training
from gemini.plan.words import answer
from tests.support.asked import DISK, on, report

TINY = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "vocab_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "fields", "frozen"),
    [("Llama", "CausalLM", {**TINY, "num_key_value_heads": 2}, None),
     ("Llama", "CausalLM", {**TINY, "num_key_value_heads": 2}, "down_proj"),
     ("GPT2", "LMHeadModel", {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64}, None),
     ("Bert", "MaskedLM", TINY, None)],
)  # fmt: skip
@pytest.mark.parametrize("checkpointing", [False, True])
def test_operations_are_those_that_torch_counts(name, kind, fields, frozen, checkpointing):
    """An embedding that is looked up has none, a frozen weight has no gradient; keys of the whole
    sequence count."""
    config = getattr(transformers, f"{name}Config")(**fields, attn_implementation="eager")
    cls = getattr(transformers, f"{name}{kind}" if name == "GPT2" else f"{name}For{kind}")
    model = cls(config)
    for path, param in model.named_parameters():
        param.requires_grad_(frozen is None or frozen not in path)
    if checkpointing:
        model = models.checkpointed(model)
    ids = torch.zeros(2, 48, dtype=torch.int64)
    more = {"use_cache": False} if hasattr(config, "use_cache") else {}
    with FlopCounterMode(display=False) as counted, set_checkpoint_early_stop(False):
        model(input_ids=ids, labels=ids, **more).loss.backward()
    said = 2 * 48 * models.flops_of(model, 48, checkpointing=checkpointing)
    # the head of Bert has a layer before its product, which is not computed again
    assert said == pytest.approx(counted.get_total_flops(), rel=0.011 if name == "Bert" else 1e-9)


def test_a_kernel_of_attention_computes_half_of_a_causal_mask_and_the_scores_again():
    with torch.device("meta"):
        kernel, eager = (
            transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**TINY, attn_implementation=kind)
            )
            for kind in ("sdpa", "eager")
        )
    seq, heads, width = 48, 4, 8
    shape = (1, heads, seq, width)
    forward = sdpa_flop_count(shape, shape, shape)
    backward = sdpa_backward_flop_count(shape, shape, shape, shape)
    counted = 2 * (forward + backward) / 2 / seq  # of two layers
    of_both = [models.flops_of(m, seq, checkpointing=False) for m in (kernel, eager)]
    assert of_both[0] - counted == of_both[1] - 2 * 3 * forward / seq
    kernel.config.sliding_window = seq - 1  # its mask is given to the kernel
    windowed = models.flops_of(kernel, seq, checkpointing=False)
    assert windowed - 2 * counted == of_both[0] - counted


def test_computing_is_priced_by_operations_at_every_batch(question):
    """And not by how long fake tensors took, which depends on the machine that asks."""
    for batch in (1, 2):
        assert all(m.seconds == 0 for m in question.traced.at(batch).moments)
    one, two = (answer(replace(question, batch=b)).result.cost.busy for b in (1, 2))
    assert two["compute"] == pytest.approx(2 * one["compute"])


def test_frozen_weights_have_no_gradient_to_compute(config):
    """In backward a base under adapters takes what it takes in forward, for gradients of inputs."""
    for lora, times in ((0, 2.0), (1, 1.0)):
        asked = ask(str(config), machine_of(DISK), Training(seq=64, lora=lora))
        inputs, _ = asked.priced()
        weights, seconds = inputs.compute_weights(), inputs.compute_seconds()
        first = inputs.backward
        used = sum(weights[:first]) - 4000 * 512 * bool(lora)  # a table that nobody trains
        # 2 % more: what the first layer multiplies, of which nobody asks for a gradient of inputs
        assert sum(weights[first:]) == pytest.approx(times * used, rel=0.03)
        assert sum(seconds[first:]) / sum(seconds) == pytest.approx(
            sum(weights[first:]) / sum(weights)
        )


def test_sums_of_gradients_are_planned_in_fp32(question):
    """4 bytes of every trained parameter, at every moment."""
    more = replace(question, accumulate=2)
    sums = sum(4 * c.shard_numel for c in question.layout.chunks)
    for one, two in zip(question.trace.moments, more.trace.moments, strict=True):
        assert two.non_model_bytes - one.non_model_bytes == sums
    seconds = [q.seconds(q.planned()) for q in (question, more)]
    assert seconds[1] > seconds[0]


def test_forwards_without_a_step_are_priced_as_an_iteration_is(config):
    """By the clock: reads wait for the disk, and ranks for what they gather and reduce."""
    given = {"device_mem": 210 << 20, "host_mem": 80 << 20, **DISK}
    machine = machine_of(given, world_size=2, ranks_per_node=2)
    slow = replace(machine, bandwidths=replace(machine.bandwidths, collective=1e9))
    few = replace(ask(str(config), machine, Training(seq=64)), accumulate=3)
    for asked in (few, replace(few, machine=slow)):
        inputs, result = asked.priced()
        clock = StepClock(Work(result.plan, inputs).without_updates(), SERIAL)
        clock.run()
        once = result.seconds_by_update[asked.runs(result)]
        assert asked.seconds(result) - once == pytest.approx(2 * clock.seconds, rel=1e-9)
        assert clock.seconds > clock.links.busy["nvme"] + clock.links.busy["collective"] > 0
    assert clock.links.busy["collective"] > 8 * clock.links.busy["nvme"] > 0


def test_less_memory_moves_more_bytes_and_takes_longer(question):
    results = [
        words.as_json(answer(on(question, device="cpu", device_mem=size)))
        for size in (600, 400, 200)
    ]
    moved = [r["bytes_moved_per_step"] for r in results]
    assert moved[0] == 0 < moved[1] < moved[2]
    seconds = [r["step_seconds"] for r in results]
    assert seconds[0] < seconds[1] < seconds[2]
    assert results[2]["bound_by"] == "nvme"
    assert all(
        r["peaks"]["device"] <= b << 20 for r, b in zip(results, (600, 400, 200), strict=True)
    )


@pytest.mark.ci
def test_what_a_tail_hides_is_said_or_what_is_against_one(question):
    """On a CPU whose disk and processor take about as long: all that the forward has time for."""
    links = replace(TYPICAL["cpu"], nvme_read=1e9, nvme_write=1e9)
    here = replace(on(question, device="cpu", device_mem=900, bandwidths=links), batch=16)
    plan = answer(replace(here, nvme_fraction=1.0))
    result = words.as_json(plan)
    tail = result["tail"]
    assert result["homes"]["state"].keys() == {"nvme"}
    assert 0 < tail["waited_seconds"] < tail["update_seconds"]
    disk = 2 * result["homes"]["state"]["nvme"] / 1e9
    forward = result["busy_seconds"]["compute"] / 3
    passing = tail["seconds"] - tail["waited_seconds"]
    # within a block of the bound, and within what the first chunk has to wait
    assert tail["seconds"] == pytest.approx(2 * forward + max(forward, disk), rel=0.1)
    assert passing == pytest.approx(3 * forward)
    seconds = result["seconds_by_update"]
    assert (seconds["serial"], seconds["tail"]) == (result["step_seconds"], tail["seconds"])
    assert result["best_update"] == best_update(seconds) == "tail"
    said = report(plan)
    assert "hidden during the next forward" in said and 'best is update="tail"' in said
    plan = answer(here)
    assert not plan.result.overlapped
    assert "update: serial, as all state is on the device" in report(plan)
    plan = answer(replace(question, nvme_fraction=1.0))
    assert plan.result.overlapped and plan.homes["state"].keys() == {"nvme"}
    assert "hidden during the next forward" in report(plan)
