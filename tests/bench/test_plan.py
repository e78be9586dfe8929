"""bench.plan: what it says is what planning with those numbers gives."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import plan
from bench.support import models
from bench.support.activations import activations_of, example_inputs
from gemini.chunk.sizing.model_specs import specs_of
from gemini.memtracer.collector import trace
from gemini.placement.timetable.updates import best_update

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "fits", "peaks", "bytes_moved_per_step", "step_seconds", "bound_by", "largest_batch",
    "suggestion",
}  # fmt: skip


FIELDS = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 7, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4000, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A LLaMA of 7 layers, 26 M parameters, 416 MB of model data."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(FIELDS))
    return path


@pytest.fixture(scope="module")
def question(config):
    return plan.ask(plan.parse(["--model", str(config), "--seq", "64"]))


def on(question, **changes):
    """The same model on another machine, sizes in MiB."""
    sizes = {
        k: v << 20 if k in ("device_mem", "host_mem", "nvme") else v for k, v in changes.items()
    }
    return replace(question, machine=replace(question.machine, **sizes))


@pytest.mark.ci
def test_command_writes_its_answer_and_exits_with_it(config, tmp_path, capsys):
    out, picture = tmp_path / "plan.json", tmp_path / "t.html"
    flags = ["--model", str(config), "--seq", "64", "--json", str(out)]
    assert plan.main([*flags, "--timeline", str(picture)]) == 0
    result = json.loads(out.read_text())
    assert result["fits"] and result["suggestion"] is None and result.keys() > KEYS
    assert "bound by" in capsys.readouterr().out
    assert picture.stat().st_size > 10_000
    assert plan.main([*flags, "--device-mem", "100MiB", "--host-mem", "10MiB", "--nvme", "0"]) == 1
    assert not json.loads(out.read_text())["fits"]


@pytest.mark.ci
def test_every_byte_of_model_data_has_a_home(question):
    numel = sum(spec.numel for spec in question.layout.params)
    for machine in ({}, {"device_mem": 200}, {"device_mem": 150, "host_mem": 80}):
        result, _ = plan.answer(on(question, **machine))
        for kind, nbytes in (("parameters", 2), ("gradients", 2), ("state", 12)):
            total = sum(result["homes"][kind].values())
            assert nbytes * numel <= total < 1.01 * nbytes * numel


@pytest.mark.parametrize(
    "short",
    [
        {"device_mem": 200, "host_mem": 100, "nvme": 10},
        {"device_mem": 200, "host_mem": 10, "nvme": 2000},
        {"device_mem": 20},
        {"device": "cpu", "device_mem": 200, "nvme": 100},
    ],
)
def test_change_that_is_suggested_makes_it_fit_and_less_does_not(question, short):
    asked = on(question, **short)
    result, _ = plan.answer(asked)
    assert not result["fits"] and result["largest_batch"] == 0
    flags = result["suggestion"].split()
    assert len(flags) == 2
    name = flags[0].removeprefix("--").replace("-", "_")
    mib = int(flags[1].removesuffix("MiB"))
    assert on(asked, **{name: mib}).fits()
    assert not on(asked, **{name: mib - 2}).fits()


def test_smaller_batch_is_the_cheapest_change(question):
    asked = replace(on(question, device_mem=200), batch=4096)
    result, _ = plan.answer(asked)
    batch = result["largest_batch"]
    assert 1 <= batch < 4096 and result["suggestion"] == f"--batch {batch}"
    assert replace(asked, batch=batch).fits() and not replace(asked, batch=batch + 1).fits()


def test_less_memory_moves_more_bytes_and_takes_longer(question):
    results = [
        plan.answer(on(replace(question), device="cpu", device_mem=size))[0]
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
    links = replace(plan.TYPICAL["cpu"], nvme_read=1e9, nvme_write=1e9)
    here = replace(on(question, device="cpu", device_mem=900, bandwidths=links), batch=16)
    result, planned = plan.answer(replace(here, nvme_frac=1.0))
    tail = result["tail"]
    assert result["homes"]["state"].keys() == {"nvme"} and planned.tail.serial_seconds > 0
    assert tail["serial_seconds"] == result["step_seconds"]
    assert 0 < tail["waited_seconds"] < tail["update_seconds"]
    disk = 2 * result["homes"]["state"]["nvme"] / 1e9
    forward = result["busy_seconds"]["compute"] / 3
    passing = tail["seconds"] - tail["waited_seconds"]
    # within a block of the bound, and within what the first chunk has to wait
    assert tail["seconds"] == pytest.approx(2 * forward + max(forward, disk), rel=0.1)
    assert passing == pytest.approx(3 * forward)
    seconds, ahead = result["seconds_by_update"], planned.speculation
    assert (seconds["serial"], seconds["tail"]) == (tail["serial_seconds"], tail["seconds"])
    assert seconds["both"] == ahead.tail.seconds and 0 < ahead.num_ahead < ahead.num_blocks
    assert result["best_update"] == best_update(seconds) == "both"
    said = plan.report(result, here)
    assert "hidden behind the next forward" in said and 'best is update="both"' in said
    assert f'with update="both", in backward: {ahead.num_ahead} of {ahead.num_blocks} ' in said
    result, _ = plan.answer(here)
    assert result["tail"] is None
    assert "update: serial, as all state is on the device" in plan.report(result, here)
    result, _ = plan.answer(replace(question, nvme_frac=1.0))
    assert result["tail"] is None and result["homes"]["state"].keys() == {"nvme"}
    said = "update: serial, as the device has memory of its own, and state is only on NVMe"
    assert said in plan.report(result, question)


def test_computing_is_priced_by_operations_at_every_batch(question):
    """And not by how long fake tensors took, which depends on the machine that asks."""
    for batch in (1, 2):
        assert all(m.seconds == 0 for m in question.activations.at(batch).moments)
    one, two = (plan.answer(replace(question, batch=b))[0]["busy_seconds"] for b in (1, 2))
    assert two["compute"] == pytest.approx(2 * one["compute"])


def test_measured_bandwidths_replace_the_typical_ones(tmp_path):
    links = tmp_path / "links.json"
    links.write_text('{"nvme_read": 1e6}')
    read = plan.read_bandwidths(links, "cpu")
    assert read == replace(plan.TYPICAL["cpu"], nvme_read=1e6)
    links.write_text('{"disk": 1}')
    with pytest.raises(ValueError, match=r"\['disk'\] are unknown"):
        plan.read_bandwidths(links, "cpu")


def test_ranks_share_a_nodes_memory(question):
    four = on(question, ranks_per_node=4, host_mem=100, nvme=1000).machine.budgets()
    assert (four.host, four.nvme) == (25 << 20, 250 << 20)
    assert four.device == question.machine.device_mem


@pytest.mark.parametrize(
    "flags",
    [
        ("--batch", "0"),
        ("--nvme-fraction", "2"),
        ("--device-mem", "much"),
        ("--world-size", "2", "--ranks-per-node", "3"),
    ],
)
def test_bad_arguments_are_refused(flags):
    with pytest.raises(SystemExit) as refused:
        plan.parse(flags)
    assert refused.value.code == 2


def test_model_without_a_config_needs_its_activations_said():
    with pytest.raises(SystemExit, match="--activation-bytes"):
        plan.main(["--model", "bench.shared.models:Tower"])
    assert plan.main(["--model", "bench.shared.models:Tower", "--activation-bytes", "1MiB"]) == 0


def test_trace_of_few_layers_grows_into_the_trace_of_all(config, question):
    model = models.build(str(config))
    whole = trace(model, example_inputs(model, 3, 64))
    grown = question.activations.at(3)
    assert whole.deviation_of(grown) is None
    assert [m.non_model_bytes for m in grown.moments] == [m.non_model_bytes for m in whole.moments]


def test_what_was_done_to_a_model_holds_in_the_trace_of_few_layers(config, question):
    """By a factory, say: checkpointing is no field of a configuration."""
    model = models.build(str(config))
    model.gradient_checkpointing_enable()
    specs = specs_of(model, "bfloat16")
    grown = activations_of(model, specs, 64).at(3)
    whole = trace(model, example_inputs(model, 3, 64))
    assert whole.deviation_of(grown) is None
    assert [m.non_model_bytes for m in grown.moments] == [m.non_model_bytes for m in whole.moments]
    assert grown.peak_non_model_bytes < question.activations.at(3).peak_non_model_bytes
    assert len(model.model.layers) == model.config.num_hidden_layers == 7


@pytest.mark.ci
def test_the_example_of_the_page_fits():
    page = (ROOT / "docs/memory.md").read_text()
    (command,) = re.findall(r"^    python -m bench\.plan (.+)$", page, re.MULTILINE)
    assert plan.ask(plan.parse(command.split())).fits()


def test_a_base_that_lies_there_in_bf16_has_no_originals(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**FIELDS, "torch_dtype": "bfloat16"}))
    flags = ["--lora", "4", "--activation-bytes", "10MiB"]
    asked = plan.ask(plan.parse(["--model", str(tmp_path / "config.json"), *flags]))
    assert "originals" not in plan.homes(asked.planned())


@pytest.mark.parametrize(
    "name",
    [pytest.param("gpt2", marks=pytest.mark.ci),
     *(pytest.param(name, marks=pytest.mark.deep) for name in ("bert-base", "vit-base"))],
)  # fmt: skip
def test_known_models_traces_grow_into_the_traces_of_all_layers(name):
    """Byte for byte, at a batch that was traced and at one that was not."""
    model = models.build(name)
    specs = specs_of(model, "bfloat16")
    activations = activations_of(model, specs, 128)
    for batch in (1, 4):
        grown, whole = activations.at(batch), trace(model, example_inputs(model, batch, 128))
        assert whole.deviation_of(grown) is None
        assert [m.non_model_bytes for m in grown.moments] == [
            m.non_model_bytes for m in whole.moments
        ]


@pytest.mark.parametrize(
    ("name", "world_size"),
    [pytest.param("llama-7b", 1, marks=pytest.mark.ci),
     pytest.param("llama-70b", 64, marks=pytest.mark.deep),
     pytest.param("mixtral-8x7b", 8, marks=pytest.mark.deep)],
)  # fmt: skip
def test_gathers_are_within_5_percent_of_the_lower_bound(name, world_size):
    for device_mem in ("40GiB", "80GiB"):
        args = plan.parse(
            ["--model", name, "--world-size", str(world_size), "--seq", "512", "--host-mem", "2TB",
             "--device-mem", device_mem]
        )  # fmt: skip
        result, _ = plan.answer(plan.ask(args))
        assert result["fits"] and result["gather_gap"] <= 0.05


def test_fp32_originals_of_a_frozen_base_are_planned_and_named(config):
    """26 M parameters, of which the adapter's alone are trained: 104 MB in RAM, or on disk."""
    flags = ["--model", str(config), "--lora", "4", "--activation-bytes", "10MiB"]
    asked = plan.ask(plan.parse(flags))
    frozen = sum(4 * c.shard_numel for c in asked.layout.chunks if not c.trainable)
    assert frozen > 4 * 25e6
    for machine, tier in (({}, "host"), ({"host_mem": 50}, "nvme"), ({"device": "cpu"}, "device")):
        planned = on(asked, **machine).planned()
        assert plan.homes(planned)["originals"] == {tier: frozen}
        assert planned.profile.peaks()[tier]["originals"] == pytest.approx(frozen, rel=1e-3)
    short = on(asked, host_mem=50, nvme=50)
    result, _ = plan.answer(short)
    assert not result["fits"] and "load frozen weights in the dtype" in result["missing"]
    assert f"originals: {plan.format_bytes(frozen)} on " in plan.report(result, short)
