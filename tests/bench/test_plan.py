"""bench.plan: what it says is what planning with those numbers gives."""

import json
from dataclasses import replace

import pytest

from bench import plan
from bench.support import models
from bench.support.activations import activations_of, example_inputs
from gemini.chunk.sizing.model_specs import specs_of
from gemini.memtracer.collector import trace

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
    [("--batch", "0"), ("--device-mem", "much"), ("--world-size", "2", "--ranks-per-node", "3")],
)
def test_bad_arguments_are_refused(flags):
    with pytest.raises(SystemExit) as refused:
        plan.parse(flags)
    assert refused.value.code == 2


def test_model_without_a_config_needs_its_activations_said():
    with pytest.raises(SystemExit, match="--activation-bytes"):
        plan.main(["--model", "tests.support.models:Tower"])
    assert plan.main(["--model", "tests.support.models:Tower", "--activation-bytes", "1MiB"]) == 0


def test_trace_of_few_layers_grows_into_the_trace_of_all(config, question):
    model = models.build(str(config))
    whole = trace(model, example_inputs(model, 3, 64))
    grown = question.activations.at(3)
    assert whole.deviation_of(grown) is None
    assert [m.non_model_bytes for m in grown.moments] == [m.non_model_bytes for m in whole.moments]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert-base", "vit-base"])
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world_size"), [("llama-7b", 1), ("llama-70b", 64), ("mixtral-8x7b", 8)]
)
def test_gathers_are_within_5_percent_of_the_lower_bound(name, world_size):
    for device_mem in ("40GiB", "80GiB"):
        args = plan.parse(
            ["--model", name, "--world-size", str(world_size), "--seq", "512", "--host-mem", "2TB",
             "--device-mem", device_mem]
        )  # fmt: skip
        result, _ = plan.answer(plan.ask(args))
        assert result["fits"] and result["gather_gap"] <= 0.05
