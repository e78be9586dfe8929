"""A JSON file of DeepSpeed's becomes two calls that run, or keys of `train`'s file."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from torch import nn

from gemini.__main__ import main
from gemini.migrate.deepspeed import TABLE, Converted
from gemini.train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
OWN = {
    "fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 50, "hysteresis": 1},
    "optimizer": {"type": "Lion", "params": {"lr": 3e-5, "betas": [0.8, 0.9]}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "communication_data_type": "bfp16",
}


def run(config):
    """What its Python makes, without an optimizer's files."""
    text = Converted(config).as_python()
    names = {"model": nn.Linear(4, 4)}
    exec(text.replace("GeminiDDP(model, ", "GeminiDDP(model, device='cpu', "), names)
    return names["optimizer"], text


def test_auto_is_what_trainer_takes_and_says_so():
    optimizer, text = run(AUTO)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (5e-5, (0.9, 0.999), 0.0)
    assert "placement_policy='zero2', precision='fp32', max_norm=1.0" in text
    for key, said in (
        ("optimizer.params.lr", "TrainingArguments.learning_rate"),
        ("gradient_clipping", "TrainingArguments.max_grad_norm, 1.0 unless given"),
        ("bf16.enabled", "TrainingArguments.bf16 or fp16, False unless given"),
        ("gradient_accumulation_steps", "no_sync"),
        ("zero_optimization.reduce_bucket_size", "nothing: the plan"),
    ):
        assert re.search(rf"^# {re.escape(key)}: .*{re.escape(said)}", text, re.MULTILINE), key


def test_what_a_file_says_is_an_argument():
    optimizer, text = run(OWN)
    assert type(optimizer).__name__ == "HybridLion"
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert "LossScale(initial_scale=2.0**10, growth_interval=50, hysteresis=1)" in text
    assert "shard_grads=True, offload_grads=True, offload_optim_frac=0.5" in text
    assert "communication_dtype='bf16'" in text
    on_disk = {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}, "stage": 1}
    text = Converted({"zero_optimization": on_disk}).as_python()
    assert "nvme_offload_fraction=1.0, nvme_offload_dir='/x'" in text and "zero1" in text


@pytest.mark.parametrize("config", [AUTO, OWN], ids=["auto", "own"])
def test_the_yaml_has_keys_of_train_and_numbers(config, tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert main(["from-deepspeed", str(path), "--yaml"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found.keys() <= {field.name for field in fields(TrainConfig)}
    TrainConfig(**found)
    assert isinstance(found["lr"], float)
    if config is OWN:
        assert (found["batch"], found["accumulate"], found["warmup"]) == (8, 4, 7)


def test_keys_of_the_page_are_known_and_others_are_named():
    page = (
        (ROOT / "docs/from-deepspeed.md").read_text(encoding="utf-8").partition("| key | here |")[2]
    )
    keys = re.findall(r"`([\w.]+)`", page.partition("| call | here |")[0])
    said = {**TABLE["said"], **TABLE["said_of_zero"], **dict.fromkeys(TABLE["plan"], "")}
    named = {k for k in keys if k in said}
    assert {"overlap_comm", "sub_group_size", "aio", "autotuning", "scheduler"} <= named
    odd = {"zero_optimisation": {}, "zero_optimization": {"stage": 1, "overlap_com": 1}}
    text = Converted(odd).as_python()
    assert "zero_optimization.overlap_com: no key" in text and "did you mean overlap_comm?" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected an object"), ("{", "ds.json"),
        ('{"optimizer": {"type": "AdamWW"}}', "did you mean adamw?"),
        ('{"zero_optimization": {"stage": 4}}', "expected 0, 1, 2 or 3"),
        ('{"zero_optimization": {"offload_param": {"device": "gpu"}}}', "expected cpu, nvme"),
        ('{"communication_data_type": "int8"}', "communication_data_type is 'int8'"),
        ('{"fp16": true}', "fp16 is True"),
    ],
)  # fmt: skip
def test_what_is_no_such_file_is_refused_in_one_line(text, said, tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main(["from-deepspeed", str(path)])
    err = capsys.readouterr().err
    assert end.value.code == 2 and said in err and err.count("\n") == 1
