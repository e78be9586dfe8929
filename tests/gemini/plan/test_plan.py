"""gemini plan: what it says is what planning with those numbers gives."""

import json
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from gemini.__main__ import main
from gemini.chunk.layout import specs_of
from gemini.memtracer.collector import trace
from gemini.placement.sizes import with_sums
from gemini.placement.timetable.clock import StepClock, Work
from gemini.placement.timetable.steps import MAX_UNDER_WAY
from gemini.placement.timetable.updates import SERIAL, best_update
from gemini.plan import models, table, words
from gemini.plan.activations import activations_of, example_inputs
from gemini.plan.ask import ask, plan_for
from gemini.plan.machine import CARDS, TYPICAL, machine_of
from gemini.plan.question import (
    homes,
)
from gemini.plan.training import Training
from gemini.plan.words import answer
from gemini.train import plan_command as command
from gemini.units import GIB, format_bytes, parse_bytes

ROOT = Path(__file__).resolve().parents[3]
DISK = {"nvme": 10**12}
KEYS = {
    "fits", "peaks", "bytes_moved_per_step", "step_seconds", "bound_by", "largest_batch",
    "suggestion",
}  # fmt: skip


def report(plan):
    return "\n".join([*words.five_lines("it", plan), *words.all_lines(plan)])


def on(question, **changes):
    """The same model on another machine, sizes in MiB."""
    sizes = {
        k: v << 20 if k in ("device_mem", "host_mem", "nvme") else v for k, v in changes.items()
    }
    return replace(question, machine=replace(question.machine, **sizes))


def refused(flags, capsys):
    """The one line that a refused command ends with."""
    with pytest.raises(SystemExit) as end:
        command.main(flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("python -m gemini plan: error: ")
    return line


@pytest.mark.ci
def test_command_writes_its_answer_and_exits_with_it(config, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(config.parent)  # a path of any length would wrap the picture's title
    out, picture = tmp_path / "plan.json", tmp_path / "t.svg"
    own = ["--no-by-trl", "--no-checkpointing", "--batch", "1", "--seq", "64"]
    flags = ["--model", config.name, *own, "--json", str(out)]
    assert command.main([*flags, "--timeline", str(picture)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["fits"] and result["suggestion"] is None and result.keys() > KEYS
    assert "bound by" in capsys.readouterr().out
    said = picture.read_text(encoding="utf-8")
    assert "batch 1 x 64 tokens of a rank" in said and ">it fits; " in said
    small = [*flags, "--device-mem", "100MiB", "--host-mem", "10MiB", "--nvme", "0"]
    assert command.main([*small, "--timeline", str(picture)]) == 1
    assert not json.loads(out.read_text(encoding="utf-8"))["fits"]
    said = picture.read_text(encoding="utf-8")
    assert ">it does not fit: " in said and "budget 100.00 MiB" in said


@pytest.mark.ci
def test_a_share_that_is_too_small_is_told_beside_what_was_given(question):
    machine = replace(question.machine, device="cpu", device_mem=20 << 20, ranks_per_node=2)
    why = answer(replace(question, machine=machine, other=None)).why
    assert "--device-mem of 20.00 MiB: a rank's share of 10.00 MiB is " in why
    assert "; raise --device-mem by as much for each of 2 ranks" in why
    alone = answer(replace(on(question, device_mem=20), other=None)).why
    assert "--device-mem of 20.00 MiB is " in alone and "by as much for each" not in alone


def test_every_byte_of_model_data_has_a_home(question):
    numel = sum(spec.numel for spec in question.layout.params)
    for machine in ({}, {"device_mem": 200}, {"device_mem": 150, "host_mem": 80}):
        homes = answer(on(question, **machine)).homes
        for kind, nbytes in (("parameters", 2), ("gradients", 2), ("state", 12)):
            total = sum(homes[kind].values())
            assert nbytes * numel <= total < 1.01 * nbytes * numel


@pytest.mark.parametrize(
    "short",
    [
        {"device_mem": 200, "host_mem": 100, "nvme": 10},
        {"device_mem": 200, "host_mem": 1, "nvme": 2000},
        {"device_mem": 20},
        {"device": "cpu", "device_mem": 200, "nvme": 100},
    ],
)
def test_change_that_is_suggested_makes_it_fit_and_less_does_not(question, short):
    asked = replace(on(question, **short), other=None)
    plan = answer(asked)
    assert not plan.fits and plan.largest_batch == 0
    flags = plan.change.split()
    assert len(flags) == 2
    name = flags[0].removeprefix("--").replace("-", "_")
    mib = int(flags[1].removesuffix("MiB"))
    assert on(asked, **{name: mib}).fits()
    assert not on(asked, **{name: mib - 2}).fits()


def test_the_same_step_in_more_forwards_is_the_cheapest_change(question):
    asked = replace(on(question, device_mem=200), batch=4096)
    plan = answer(asked)
    found = plan.asked
    assert (found.batch * found.accumulate, found.lora) == (4096, 0) and found.batch > 1
    assert plan.change == f"--batch {found.batch} --accumulate {found.accumulate}"
    before = f"{found.accumulate} forwards of {found.batch} rather than 1 of 4096"
    assert plan.change_in_words == before
    twice = replace(found, batch=2 * found.batch, accumulate=found.accumulate // 2)
    assert found.fits() and not twice.fits()
    largest = plan.largest_batch
    assert replace(asked, batch=largest).fits() and not replace(asked, batch=largest + 1).fits()


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


def test_what_is_faster_is_said_and_planned(config):
    """Activations that are kept, and RAM in place of a disk."""
    machine = machine_of({"device_mem": 200 << 20, "host_mem": 100 << 20, **DISK})
    asked = ask(str(config), machine, Training(seq=64, checkpointing=True, accumulate=2))
    plan = answer(asked)
    assert plan.fits and plan.homes["state"].get("nvme")
    found = dict(plan.faster)
    more = [flags for flags in found if flags.startswith("--host-mem")]
    assert len(more) == 1 and all(seconds < 0.93 * plan.seconds for seconds in found.values())
    size = int(more[0].split()[1].removesuffix("MiB"))
    again = answer(on(asked, host_mem=size))
    assert again.fits and again.seconds == pytest.approx(found[more[0]], rel=0.02)
    said = list(words.five_lines("it", plan))
    assert f"with {more[0]} a step takes about {found[more[0]]:.3g} s" in said


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


def test_measured_bandwidths_replace_the_typical_ones(tmp_path):
    links = tmp_path / "links.json"
    links.write_text('{"nvme_read": 1e6}', encoding="utf-8")
    machine = machine_of({}, device="cpu", speeds=links)
    assert machine.bandwidths == replace(TYPICAL["cpu"], nvme_read=1e6)
    said = list(machine.assumptions({"nvme_read": "reads", "nvme_write": "writes"}))
    assert said == [f"reads: 0.001 GB/s ({links})", "writes: 2 GB/s (assumed)"]
    links.write_text('{"disk": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"\['disk'\] are unknown"):
        machine_of({}, speeds=links)


@pytest.mark.parametrize(
    "flags",
    [
        ("--batch", "0"),
        ("--nvme-fraction", "2"),
        ("--device-mem", "much"),
        ("--world-size", "2", "--ranks-per-node", "3"),
        ("--batch", str(10**12)),
        ("--batch", str(10**5), "--seq", str(10**5)),
        ("--lora", str(10**30)),
        ("--activation-bytes", str(10**30)),
        ("--json", "none/a.json"),
        ("--timeline", "."),
        ("--fits", __file__),
    ],
)
def test_bad_arguments_are_refused(flags):
    with pytest.raises(SystemExit) as refused:
        command.main(["gpt2", *flags])
    assert refused.value.code == 2


@pytest.mark.parametrize("what", ["", ".:x", ":x", "torch.nn:Linear", "json:loads", "os.path:join"])
def test_a_name_that_makes_no_model_is_refused_in_one_line(what, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = refused([what], capsys)
    assert "expected" in said or "cannot be read" in said


def test_a_report_of_a_machine_that_is_too_deep_is_refused(tmp_path, capsys):
    (tmp_path / "a.json").write_text("[" * 100_000, encoding="utf-8")
    said = refused(["gpt2", "--machine", str(tmp_path / "a.json")], capsys)
    assert "cannot be read as JSON" in said


def test_model_without_a_config_needs_its_activations_said(capsys):
    tower = ["bench.shared.models:Tower", "--no-checkpointing"]
    assert "--activation-bytes" in refused(tower, capsys)
    assert command.main([*tower, "--activation-bytes", "1MiB"]) == 0


def check_grown(model, seq, *batches):
    """Byte for byte; returns the last one."""
    activations = activations_of(model, specs_of(model, "bfloat16"), seq)
    for batch in batches:
        grown, whole = activations.at(batch), trace(model, example_inputs(model, batch, seq))
        assert whole.deviation_of(grown) is None
        for kind in ("non_model_bytes", "saved_bytes"):
            both = [[getattr(m, kind) for m in t.moments] for t in (grown, whole)]
            assert both[0] == both[1]
    return grown


def test_trace_of_few_layers_grows_into_the_trace_of_all(config, question):
    """Also of what was done to a model, as checkpointing and adapters are no configuration's."""
    plain = check_grown(models.build(str(config)), 64, 3)
    assert plain.moments == question.traced.at(3).moments
    model = models.build(str(config))
    model.gradient_checkpointing_enable()
    assert check_grown(model, 64, 3).peak_non_model_bytes < plain.peak_non_model_bytes
    assert len(model.model.layers) == model.config.num_hidden_layers == 7
    check_grown(models.add_lora(models.checkpointed(models.build(str(config))), 4), 64, 3)


@pytest.mark.ci
def test_the_example_of_the_page_fits():
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"^    python -m gemini plan (.+)$", page, re.MULTILINE)
    assert main(["plan", *arguments.split()]) == 0


def test_a_base_that_lies_there_in_bf16_has_no_originals(config, tmp_path):
    fields = json.loads(config.read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(
        json.dumps({**fields, "torch_dtype": "bfloat16"}), encoding="utf-8"
    )
    plan = plan_for(str(tmp_path), machine_of(DISK), Training(lora=4, activation_bytes=10 << 20))
    assert plan.fits and "originals" not in plan.homes


@pytest.mark.ci
def test_a_named_base_is_one_of_16_bits():
    training = Training(lora=4, activation_bytes=10 << 20, keep_originals=True)
    assert not ask("llama-150m", machine_of(DISK), training).with_originals


@pytest.mark.parametrize(
    "name",
    [pytest.param("gpt2", marks=pytest.mark.ci),
     *(pytest.param(name, marks=pytest.mark.deep) for name in ("bert-base", "vit-base"))],
)  # fmt: skip
def test_known_models_traces_grow_into_the_traces_of_all_layers(name):
    """At a batch that was traced and at one that was not."""
    check_grown(models.build(name), 128, 1, 4)


def test_fp32_originals_of_a_frozen_base_are_planned_and_named(config):
    """26 M parameters, of which the adapter's alone are trained: 104 MB in RAM, or on disk."""
    training = Training(lora=4, activation_bytes=10 << 20)
    asked = ask(str(config), machine_of(DISK), replace(training, keep_originals=True))
    assert "originals" not in homes(ask(str(config), machine_of(DISK), training).planned())
    frozen = sum(4 * c.shard_numel for c in asked.layout.chunks if not c.trainable)
    assert frozen > 4 * 25e6
    for machine, tier in (({}, "host"), ({"host_mem": 50}, "nvme"), ({"device": "cpu"}, "device")):
        planned = on(asked, **machine).planned()
        assert homes(planned)["originals"] == {tier: frozen}
        assert planned.profile.peaks()[tier]["originals"] == pytest.approx(frozen, rel=1e-3)
    short = on(asked, host_mem=50, nvme=50)
    plan = answer(short)
    assert not plan.fits and "or leave keep_originals=True out" in plan.why
    assert f"originals: {format_bytes(frozen)} on " in report(plan)


def test_a_quantised_base_is_the_cheapest_change_where_a_disk_is_not_enough(config):
    machine = machine_of({"device_mem": 33 << 20, "nvme": 0}, device="cpu")
    training = Training(seq=64, lora=16, checkpointing=True)
    plan = plan_for(str(config), machine, training)
    flags = plan.change.split()
    assert not plan.fits and flags[:2] == ["--quantize", "nf4"] and flags[2] == "--nvme"
    assert "a base in nf4 rather than in 16 bits" in plan.change_in_words
    assert words.train_arguments(plan, "adamw_torch").find("--lora 16 --quantize nf4") > 0
    more = machine_of({"device_mem": 33 << 20, "nvme": parse_bytes(flags[3])}, device="cpu")
    asked = plan_for(str(config), more, replace(training, quantize="nf4"))
    assert asked.fits and asked.homes == plan.homes
    with pytest.raises(ValueError, match="quantize='nf4' with lora=0; expected one of"):
        replace(training, quantize="nf4", lora=0)


def test_checkpointing_is_the_cheapest_change_where_it_is_enough(config):
    asked = ask(str(config), machine_of({"device_mem": 100 << 20, **DISK}), Training(seq=512))
    plan = answer(asked)
    assert not plan.fits and plan.change == "--checkpointing"
    assert answer(asked.other(True, 0, None)).fits
    more = on(asked, device_mem=101)
    assert answer(more).asked.machine == more.machine
    said = list(words.five_lines("it", plan))
    assert said[1].startswith("cheapest change: activations that are computed again in backward")
    assert words.train_arguments(plan, "adamw_torch").endswith(" --checkpointing")


@pytest.mark.parametrize(
    ("options", "of_param", "of_state"),
    [({"precision": "fp32"}, 4, 8), ({"precision": "fp16", "optimizer": "lion"}, 2, 8),
     ({"optimizer": "sgd"}, 2, 8), ({"optimizer": "ademamix"}, 2, 16),
     ({"state": "8bit", "precision": "fp32"}, 4, 2.125),
     ({"state": "bf16", "precision": "fp16"}, 2, 8)],
)  # fmt: skip
def test_bytes_follow_precision_and_optimizer(config, question, options, of_param, of_state):
    numel = sum(spec.numel for spec in question.layout.params)
    plan = plan_for(str(config), machine_of(DISK), Training(activation_bytes=1 << 20, **options))
    for kind, nbytes in (("parameters", of_param), ("state", of_state)):
        assert nbytes * numel <= sum(plan.homes[kind].values()) < 1.01 * nbytes * numel


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--state", "bf16", "--print-args"), "--state bf16; expected an --optim with such a state"),
     (("--quantize", "nf4"), "--quantize nf4; expected --lora with it, for adapters"),
     (("--ema", "host", "--print-args"), "--print-args with --ema; expected none: train has no"),
     (("--fits", "x", "--gpu", "h100"), "--gpu beside --fits; expected none: it has machines"),
     (("--device-mem", "24"), "--device-mem: size 24 is 24 bytes; did you mean '24GiB'?"),
     (("--host-mem", "much"), "--host-mem: size 'much' is not understood"),
     (("--nvme", "/no/folder"), "--nvme /no/folder is no folder here; expected one, or its free"),
     (("--optimiser", "lion"), "--optimiser lion; did you mean --optim?"),
     (("--learning_rate", "1"), "--learning_rate 1; did you mean --lr?"),
     (("--model", "gpt2"), "expected one model")],
)  # fmt: skip
def test_what_is_not_there_yet_is_refused_by_name(flags, said, capsys):
    assert said in refused(["gpt2", *flags], capsys)


REPORT = {
    "ram_bytes": 70 << 30, "ram_left_bytes": 60 << 30, "bandwidths": {"nvme_read": 7e9},
    "devices": [{"free_bytes": 22 << 30}, {"free_bytes": 23 << 30}],
    "folders": [
        {"path": "/a", "error": None, "free_bytes": 1 << 40},
        {"path": "/b", "error": "in RAM", "free_bytes": 2 << 40},
    ],
}  # fmt: skip


def test_a_number_is_what_was_given_else_measured_else_of_the_card_else_assumed(tmp_path):
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps(REPORT), encoding="utf-8")
    machine = machine_of({"host_mem": 8 << 30}, gpu="h100", report=file)
    assert (machine.device_mem, machine.nvme, machine.folder) == (22 << 30, 1 << 40, "/a")
    names = ("host_mem", "device_mem", "nvme_read", "host_to_device", "nvme_write")
    assert [line.partition(": ")[2] for line in machine.assumptions(dict.fromkeys(names, "x"))] == [
        "8.00 GiB (given)", f"22.00 GiB (measured, {file})", f"7 GB/s (measured, {file})",
        "50 GB/s (data sheet of h100)", "3 GB/s (assumed)",
    ]  # fmt: skip
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="is no report; expected that of"):
        machine_of({}, report=file)
    with pytest.raises(ValueError, match="--gpu tpu with --device cuda; expected"):
        machine_of({}, gpu="tpu")
    assert machine_of({}, gpu="h100").device_mem == CARDS["h100"].usable_bytes == 79 * GIB


def test_a_name_that_nobody_knows_and_an_absent_package_are_said(monkeypatch):
    with pytest.raises(
        ValueError, match=r"no model 'gpt5'; did you mean gpt2\? expected a name that --help lists"
    ):
        models.build("gpt5")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        models.build("gpt2")


def test_a_folder_is_a_folder_whatever_its_name(tmp_path, monkeypatch):
    """`pay:run` beside a `pay.py`: a folder of a stranger imports nothing of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pay.py").write_text("raise SystemExit('ran')\n", encoding="utf-8")
    (tmp_path / "pay:run").mkdir()
    (tmp_path / "pay:file").touch()
    (tmp_path / "gpt2").mkdir()
    for what in ("pay:run", Path("pay:run"), Path("pay:file"), Path("pay:none"), "gpt2"):
        with pytest.raises(ValueError, match="cannot be read"):
            models.build(what)
    (tmp_path / "pay:run/config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 1}', encoding="utf-8"
    )
    assert type(models.build("pay:run")).__name__ == "GPT2LMHeadModel"
    with pytest.raises(ValueError, match=r"expected package\.module:factory"):
        models.build("no_such_module:run")
    with pytest.raises(SystemExit, match="ran"):
        models.build("pay:none")  # which who types a command may ask for


@pytest.mark.parametrize("config", [
    "5", "[]", "{", "[" * 100_000, "{}", '{"model_type": 5}', '{"model_type": "no_such"}',
    '{"model_type": "gpt2", "n_embd": "a"}',
    '{"model_type": "gpt2", "dtype": "load"}', '{"model_type": "gpt2", "n_layer": 1, "n_layer": 2}',
], ids=lambda text: text[:30])  # fmt: skip
def test_a_config_that_describes_no_model_is_refused_in_one_line(tmp_path, config):
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ValueError, match=r"cannot be read|describes no model|holds a") as found:
        models.build(str(tmp_path))
    assert len(str(found.value).splitlines()) == 1


def test_a_hub_id_of_known_sizes_needs_no_network(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    raised = OSError("404")

    def refuse(*_, **__):
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert models.build("Qwen/Qwen2.5-0.5B-Instruct").config.hidden_size == 896
    for what, known in (
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"), ("openai-community/gpt2", "gpt2"),
        ("mistralai/Mistral-7B-v0.1", None), ("somebody/gpt2", None),  # of other sizes, perhaps
    ):  # fmt: skip
        assert models.known_name(what) == known
    with pytest.raises(ValueError, match=r"its config\.json \(404\); expected a folder, its con"):
        models.build("somebody/gpt2")
    raised = huggingface_hub.errors.LocalEntryNotFoundError("retries")
    with pytest.raises(ValueError, match=r"and no network reaches the hub; expected a folder, its"):
        models.build("somebody/gpt2")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "numel", "used"),
    [("llama-3.2-1b", 1_235_814_400, 1), ("llama-3.1-8b", 8_030_261_248, 0.935),
     ("qwen2.5-0.5b", 494_032_768, 1), ("qwen2.5-7b", 7_615_616_512, 0.928),
     ("qwen3-8b", 8_190_735_360, 0.924), ("gemma-2-2b", 2_614_341_888, 1),
     ("mistral-7b", 7_248_023_552, 0.981), ("mixtral-8x7b", 46_702_792_704, 0.273),
     ("deepseek-v2-lite", 15_706_484_224, 0.156), ("qwen3-30b-a3b", 30_532_122_624, 0.0996)],
)  # fmt: skip
def test_named_models_have_as_many_parameters_as_published(name, numel, used):
    """used: share that a token is multiplied by; embeddings that are no head are not."""
    model = models.build(name)
    assert sum(param.numel() for param in model.parameters()) == numel
    assert models.used_numel(model) / numel == pytest.approx(used, rel=2e-3)


def test_a_page_of_what_fits_escapes_names_and_gives_its_rows_back():
    rows = [table.FitRow("</script><b>", "LoRA", "h100", 32, 0, 0.5, 1, 2048)]
    page = table.page(rows, "<i>")
    assert "</script><b>" not in page and "<i>" not in page and table.rows_of(page) == rows
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page


@pytest.mark.ci
def test_table_has_the_first_host_that_does_and_the_page_all(config, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "CARD_NAMES", ("rtx4080",))
    monkeypatch.setattr(table, "HOSTS", ((5, 0), (6, 0)))  # of which a host keeps 5
    monkeypatch.setitem(CARDS, "rtx4080", replace(CARDS["rtx4080"], gib=1))
    monkeypatch.setattr("gemini.plan.machine.CONTEXT_BYTES", 824 << 20)
    flags = ["--fits", str(tmp_path), "--seq", "64", "--batch", "1", "--activation-bytes", "1MiB"]
    logging.getLogger("torchao").setLevel(logging.NOTSET)
    assert command.main([str(config), *flags]) == 0
    assert logging.getLogger("torchao").level == logging.ERROR  # its lacks are not the command's
    page = (tmp_path / "what-fits.html").read_text(encoding="utf-8")
    said = json.loads(re.search(r"const rows = (\[.*?\]), cards", page)[1])
    whole = [row["seconds"] for row in said if row["training"] == "all parameters"]
    assert whole[0] is None and whole[1] > 0
    lora = [row["seconds"] for row in said if row["training"] == "LoRA adapters"]
    assert len(said) == 4 and lora[1] < whole[1]
    (row,) = re.findall(r"^\| /.*", (tmp_path / "what-fits.md").read_text(encoding="utf-8"), re.M)[
        :1
    ]
    assert row == f"| {config} | 6 GiB | {whole[1]:.2g} s |"
    assert "http" not in page


def test_adapters_are_on_no_experts_nor_on_those_that_all_tokens_go_to():
    """peft takes their names for those of the others, which then have other names in a forward."""
    config = transformers.DeepseekV2Config(
        hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, first_k_dense_replace=1, vocab_size=40, kv_lora_rank=8,
        q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.DeepseekV2ForCausalLM(config)
    adapted = models.add_lora(model, 2)
    of = {n.partition(".lora_A")[0].rpartition(".")[2]
          for n, _ in adapted.named_parameters() if "lora_A" in n}  # fmt: skip
    assert of == {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    check_grown(adapted, 8, 2)


def test_sums_of_a_canonical_run_are_no_room_of_its_plan(config):
    asked = ask(str(config), machine_of(DISK), Training(seq=64, canonical=True))
    inputs = asked.wrapped()[0]
    plain = replace(asked, canonical=False).wrapped()[0].budgets
    assert inputs.budgets == with_sums(plain, inputs.layout, MAX_UNDER_WAY) != plain
