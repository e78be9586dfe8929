"""Flags and YAML of `python -m gemini train` are one schema."""

import math
from dataclasses import fields

import pytest

from gemini.train import run
from gemini.train.config import (
    ELSEWHERE,
    OF_THE_MACHINE,
    TrainConfig,
    check,
    parse,
    read_config,
)
from gemini.train.plan_command import PlanConfig


def test_a_flag_wins_over_the_yaml_and_the_yaml_over_defaults(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: m\nlr: 1e-4\npacking: true\nlora: 3\ncheckpointing: false\n", encoding="utf-8"
    )
    config, shown = parse([str(file), "--lora", "5", "--device-mem", "22GiB"])
    assert config == TrainConfig(
        model="m", lr=1e-4, packing=True, lora=5, checkpointing=False, device_mem="22GiB"
    )
    assert not shown


def test_the_config_that_is_printed_is_the_run(tmp_path, capsys):
    flags = ["--model", "m", "--no-checkpointing", "--lr", "3e-06", "--nvme", "/fast disk"]
    assert run.main([*flags, "--print-config"]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    assert read_config(file) == parse(flags)[0]
    assert read_config(file).as_yaml() == text


WRONG = {
    "modell: m": "has the key 'modell', which is no flag; did you mean model",
    "learning_rate: 1": "no flag; learning_rate is lr here",
    "model_name_or_path: m": "no flag; model_name_or_path is model here",
    "zzz: 1": "no flag; expected one of model, data",
    "learning_rate: 1\nmodel: m\nlora_r: 8": (
        "keys 'learning_rate', 'lora_r', which are no flags; learning_rate is lr here; lora_r is "
        "lora here"
    ),
    "lora: 1.5": r"config.yaml: --lora 1.5; expected a whole number",
    "packing: 3": r"config.yaml: --packing 3; expected true or false",
    "optim: adamw8bit": "--optim adamw8bit; did you mean adamw_8bit[?] expected one of",
    "data: [a, b]": "has a list as data; expected one value",
    "- model": "is a list; expected flags as keys",
    "model: [": "cannot be read as YAML",
    "[" * 3000: "nested too deep",
    "5: 1": "has a int as a key",
    "when: 2026-13-45": "cannot be read as YAML",
    "trust_remote_code: true": "a file does not let code run; expected --trust-remote-code on",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:20])
def test_a_yaml_that_is_none_is_refused(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=WRONG[text]):
        parse([str(file)])
    with pytest.raises(ValueError, match="cannot be read as YAML"):
        parse([str(tmp_path / "none.yaml")])


def test_only_the_command_line_lets_code_run(tmp_path):
    """And a run's own config.yaml does not, so that it can be given to somebody."""
    config, _ = parse(["--model", "m", "--trust-remote-code"])
    assert config.trust_remote_code and "trust" not in config.as_yaml()
    (tmp_path / "config.yaml").write_text(config.as_yaml(), encoding="utf-8")
    again = read_config(tmp_path / "config.yaml")
    assert not again.trust_remote_code and again.changed_from(config, OF_THE_MACHINE) == []


def test_fields_are_given_by_name_as_their_order_is_that_of_the_help():
    assert all(field.kw_only for field in fields(PlanConfig))
    with pytest.raises(TypeError, match="'modell'; did you mean model"):
        TrainConfig(modell="m")


WRONG_FLAGS = {
    ("--modell", "m"): "unrecognized arguments: --modell; did you mean --model?",
    ("--learning_rate", "1"): "did you mean --lr?",
    ("--lora", "1.5"): "argument --lora: '1.5'; expected a whole number",
    ("--zzz",): "unrecognized arguments: --zzz",
}


@pytest.mark.parametrize("flags", WRONG_FLAGS)
def test_a_flag_that_is_none_ends_with_one_line(flags, capsys):
    with pytest.raises(SystemExit) as end:
        parse(flags)
    (said,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and WRONG_FLAGS[flags] in said and said.endswith("(see --help)")


def test_what_other_tools_name_otherwise_is_a_flag_here():
    assert set(ELSEWHERE.values()) <= {field.name for field in fields(TrainConfig)}
    assert not ELSEWHERE.keys() & {field.name for field in fields(TrainConfig)}


IMPOSSIBLE = {
    "batch": 0, "held_out": 1.0, "lr": 0.0, "lora": -1, "epochs": 0.0, "device_mem": "much",
    "quantize": "nf4",  # without adapters
    "method": "dpo", "loss": "prompts", "stream": True, "lora_dropout": 1.0, "completions": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_values_that_cannot_be_are_refused(name):
    with pytest.raises(ValueError, match="expected"):
        TrainConfig(**{name: IMPOSSIBLE[name]})


def test_numbers_are_finite_and_of_a_size_that_is_counted():
    """torch, numpy and the schedule would refuse them when a model is loaded."""
    for field in fields(TrainConfig):
        values = {float: [math.inf, math.nan], int: [2**70]}.get(type(field.default), [])
        for value in [*values, *([-1] if field.name == "seed" else [])]:
            with pytest.raises(ValueError, match=rf"--{field.name.replace('_', '-')} .*expected"):
                TrainConfig(**{field.name: value})


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="no --data; expected it as a flag"):
        check(TrainConfig(model="m"))
    whole = {"model": "m", "data": "d", "out": "o"}
    check(TrainConfig(**whole))
    with pytest.raises(ValueError, match=r"--method grpo; expected --reward FILE.py:FUNCTION"):
        check(TrainConfig(**whole, method="grpo"))  # which a config.yaml does not name


def test_a_run_goes_on_with_other_memory_and_with_no_other_rate(tmp_path):
    before = TrainConfig(model="m", out=str(tmp_path))
    (tmp_path / run.CONFIG).write_text(before.as_yaml(), encoding="utf-8")
    moved = TrainConfig(model="m", out=str(tmp_path), device_mem="8GiB", checkpointing=False)
    run.check_same_run(moved, tmp_path)
    changed = TrainConfig(model="m", out=str(tmp_path), lr=1e-3)
    with pytest.raises(ValueError, match="of another run: lr was 2e-05; expected the same, or"):
        run.check_same_run(changed, tmp_path)
    assert set(OF_THE_MACHINE) < {field.name for field in fields(TrainConfig)}


def test_a_refused_run_says_so_and_ends(capsys):
    with pytest.raises(SystemExit) as end:
        run.main(["--model", "m"])
    assert end.value.code == 2
    assert "python -m gemini train: error: no --data" in capsys.readouterr().err
