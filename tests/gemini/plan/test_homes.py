"""Where the bytes of model data live: by precision, optimizer, frozen bases and originals."""

import json
from dataclasses import replace

import pytest

from gemini.placement.sizes import with_sums
from gemini.placement.timetable.steps import MAX_UNDER_WAY
from gemini.plan.ask import ask, plan_for
from gemini.plan.machine import machine_of
from gemini.plan.question import homes
from gemini.plan.training import Training
from gemini.plan.words import answer
from gemini.units import format_bytes
from tests.support.asked import DISK, on, report


def test_every_byte_of_model_data_has_a_home(question):
    numel = sum(spec.numel for spec in question.layout.params)
    for machine in ({}, {"device_mem": 200}, {"device_mem": 150, "host_mem": 80}):
        homes = answer(on(question, **machine)).homes
        for kind, nbytes in (("parameters", 2), ("gradients", 2), ("state", 12)):
            total = sum(homes[kind].values())
            assert nbytes * numel <= total < 1.01 * nbytes * numel


@pytest.mark.parametrize(
    ("options", "of_param", "of_state"),
    [({"precision": "fp32"}, 4, 8), ({"precision": "fp16", "optimizer": "lion"}, 2, 8),
     ({"optimizer": "sgd"}, 2, 8), ({"state": "8bit", "precision": "fp32"}, 4, 2.125),
     ({"state": "bf16", "precision": "fp16"}, 2, 8)],
)  # fmt: skip
def test_bytes_follow_precision_and_optimizer(config, question, options, of_param, of_state):
    numel = sum(spec.numel for spec in question.layout.params)
    plan = plan_for(str(config), machine_of(DISK), Training(activation_bytes=1 << 20, **options))
    for kind, nbytes in (("parameters", of_param), ("state", of_state)):
        assert nbytes * numel <= sum(plan.homes[kind].values()) < 1.01 * nbytes * numel


@pytest.mark.parametrize("named", [{}, {"architectures": ["LlamaForCausalLM"]}])
def test_a_base_that_lies_there_in_bf16_has_no_originals(named, config, tmp_path):
    fields = json.loads(config.read_text(encoding="utf-8")) | named
    (tmp_path / "config.json").write_text(
        json.dumps({**fields, "torch_dtype": "bfloat16"}), encoding="utf-8"
    )
    training = Training(lora=4, activation_bytes=10 << 20, keep_originals=True)
    plan = plan_for(str(tmp_path), machine_of(DISK), training)
    assert plan.fits and "originals" not in plan.homes


@pytest.mark.ci
def test_a_named_base_is_one_of_16_bits():
    training = Training(lora=4, activation_bytes=10 << 20, keep_originals=True)
    assert not ask("llama-150m", machine_of(DISK), training).with_originals


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


def test_sums_of_a_canonical_run_are_no_room_of_its_plan(config):
    asked = ask(str(config), machine_of(DISK), Training(seq=64, canonical=True))
    inputs = asked.wrapped()[0]
    plain = replace(asked, canonical=False).wrapped()[0].budgets
    assert inputs.budgets == with_sums(plain, inputs.layout, MAX_UNDER_WAY) != plain
