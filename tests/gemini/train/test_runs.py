"""A run of `python -m gemini train`, whole: planned, killed, gone on with, and written."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import nvme
from gemini.checkpoint import CheckpointError
from gemini.plan import models
from gemini.train import report, run, trainer
from gemini.train.config import parse
from gemini.train.data import Data
from tests.support.model_folder import flags, generated, losses, write_rows

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("cached_here")]  # trl takes seconds to import
ROOT = Path(__file__).resolve().parents[3]

# A rank that dies in its third step, after the checkpoint of the second
DIES = """
import os, signal, sys
from gemini.train import run, trainer

logged = trainer.TuningTrainer.log
def log(self, *args):
    if self.state.global_step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    logged(self, *args)
trainer.TuningTrainer.log = log
sys.exit(run.main(sys.argv[1:]))
"""


@pytest.mark.usefixtures("on_disk")
def test_a_run_that_was_killed_goes_on_at_another_world_size(folder, tmp_path, capsys):
    """And with less memory, so that its state is on NVMe."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run.main(flags(folder, whole, "--packing")) == 0
    said = capsys.readouterr().out
    assert "at the peak: device " in said and "bound by " in said
    (tmp_path / "job.py").write_text(DIES, encoding="utf-8")
    command = [
        sys.executable, "-m", "gemini", "run", "--nproc_per_node", "2", str(tmp_path / "job.py"),
        *flags(folder, killed, "--packing"),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")])}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode != 0 and str(signal.SIGKILL.value) in done.stderr, done.stderr
    assert (killed / run.REPORT).exists() and not (killed / "model.safetensors").exists()
    (killed / "checkpoints/checkpoint-3").mkdir()  # of a save that was cut short
    less = ["--packing", "--device-mem", "5000KiB", "--nvme", str(tmp_path)]
    with pytest.raises((nvme.WriteBudgetError, CheckpointError), match="nvme_write_budget is"):
        run.main(flags(folder, killed, *less, "--nvme-write-budget", "1MiB"))
    capsys.readouterr()
    assert run.main(flags(folder, killed, *less)) == 0
    said = capsys.readouterr().out
    assert re.search(r"at the peak: .*; disk [1-9]\S+ \wiB", said), said
    assert f"in {tmp_path}: a step writes " in said and "% of the 600 TB that" in said
    assert f"goes on from {killed}/checkpoints/checkpoint-2" in said
    gc.collect()  # a process would have ended
    assert list(tmp_path.glob("*.blocks")) == []
    # bf16 gradients that were added up in another order, twice
    assert losses(killed) == pytest.approx(losses(whole), rel=1e-3) and len(losses(whole)) == 4
    assert losses(whole)[-1] < losses(whole)[0]
    logged = [
        json.loads(line)
        for line in (killed / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [one["loss"] for one in logged if "loss" in one] == losses(killed)
    assert "gemini/device_measured_bytes" in logged[0]
    assert generated(killed).shape[1] > 3
    with pytest.raises(SystemExit):
        run.main(flags(folder, killed, "--packing", "--seed", "1"))
    assert "of another run: seed was 0" in capsys.readouterr().err


def test_new_weights_are_trained_on_a_stream_of_packed_text(folder, tmp_path):
    model = tmp_path / "model"  # without weights
    shutil.copytree(folder / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    made = [*flags(folder, tmp_path / "out", "--from-scratch", "--stream", "--packing"),
            "--model", str(model), "--lr", "3e-2"]  # fmt: skip
    assert run.main(made) == 0
    found = losses(tmp_path / "out")
    assert found[0] == pytest.approx(5.7, abs=0.2) and found[-1] < found[0]  # log of the tokens
    assert "trained from scratch on" in (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert generated(tmp_path / "out").shape[1] > 3


def test_a_name_of_plans_and_a_tokenizer_are_pretrained_without_a_network(
    folder, tmp_path, monkeypatch, capsys
):
    """As is an id on the hub, whose weights are not asked for."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked = []

    def download(model, *, revision, ignore_patterns):
        asked.append((model, "*.safetensors" in ignore_patterns))
        if model == "org/given":
            return str(folder / "model")
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "vocab_size": 300, "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    entry = ("LlamaConfig", "LlamaForCausalLM", sizes)
    monkeypatch.setitem(models.MODELS, "qwen2.5-7b", entry)
    given = flags(folder, tmp_path / "out", "--from-scratch", "--model", "Qwen/Qwen2.5-7B-Instruct")
    with pytest.raises(SystemExit):
        run.main(given)
    said = capsys.readouterr().err.splitlines()[-1]
    offered = re.search(r"or (--model qwen2.5-7b --tokenizer) FOLDER, which needs no netw", said)[1]
    assert asked == [("Qwen/Qwen2.5-7B-Instruct", True)]
    assert run.main([*given, *offered.split(), "org/given"]) == 0
    assert asked[1:] == [("org/given", True)]
    config = json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == 300 and config["eos_token_id"] == 1  # the tokenizer's
    assert generated(tmp_path / "out").shape[1] > 3
    for wrong, what in {
        ("--model", "qwen2.5-7b"): "as a name of plan's qwen2.5-7b has sizes, and no weights",
        ("--model", "bert-base", "--from-scratch", "--tokenizer", str(folder / "model")): (
            "bert-base is no causal language model"
        ),
    }.items():
        with pytest.raises(SystemExit):
            run.main([*flags(folder, tmp_path / "none"), *wrong])
        assert what in capsys.readouterr().err


def test_a_tokenizer_from_elsewhere_is_that_of_the_run(folder, tmp_path, capsys):
    model, words = tmp_path / "model", tmp_path / "words"
    names = ("tokenizer.json", "tokenizer_config.json")
    shutil.copytree(folder / "model", model, ignore=shutil.ignore_patterns(*names))
    words.mkdir()
    for name in names:
        shutil.copy(folder / "model" / name, words)
    made = flags(folder, tmp_path / "out", "--model", str(model))
    with pytest.raises(SystemExit):
        run.main(made)
    assert "expected one beside the weights, or --tokenizer FOLDER" in capsys.readouterr().err
    assert run.main([*made, "--tokenizer", str(words)]) == 0
    assert generated(tmp_path / "out").shape[1] > 3
    with pytest.raises(SystemExit):
        run.main([*made, "--tokenizer", str(words / names[0])])
    assert f"--tokenizer {words / names[0]} is a file; expected a folder" in capsys.readouterr().err


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("more", [(), ("--lora", "2")])
def test_both_orders_of_micro_batches_write_the_same_weights(folder, tmp_path, more):
    """With dropout, in less memory than the plain run, and as the trainer of trl has it."""
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    changed = json.dumps({**config, "attention_dropout": 0.3})
    (model / "config.json").write_text(changed, encoding="utf-8")
    given = ("--model", str(model), "--accumulate", "3", "--no-checkpointing", *more)
    tight = ("--device-mem", "6MiB", "--nvme", str(tmp_path))
    digests = []
    for order, memory in (("batches", ()), ("layers", ()), ("layers", tight)):
        out = tmp_path / f"{order}{len(memory)}"
        config, _ = parse([*flags(folder, out, *given), "--accumulate-order", order, *memory])
        job = run.prepare(config)
        job.run()
        wrapped = job.trainer.model_wrapped
        assert order == "batches" or wrapped.engine.cycle.accumulated.num_batches == 3
        digests.append((wrapped.digest(), losses(out)))
        del job, wrapped
        gc.collect()
    assert digests[0] == digests[1] == digests[2]


def test_nothing_behind_the_save_fails_a_run(folder, tmp_path, capsys, caplog, monkeypatch):
    """A table of 16 positions, an empty prompt; then samples and a report that fail."""
    import transformers

    model = tmp_path / "gpt2"
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=300, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(model)
    for file in (folder / "model").glob("token*"):
        shutil.copy(file, model)
    pairs = [{"prompt": "a" * (i % 3), "completion": "b"} for i in range(12)]
    write_rows(tmp_path / "prompt.jsonl", pairs)
    short = ("--seq", "16", "--held-out", "0.5", "--sample-tokens", "64", "--steps", "1")
    given = [*flags(tmp_path, tmp_path / "out", *short, data="prompt"), "--model", str(model)]
    assert run.main(given) == 0
    assert capsys.readouterr().out.count("-->") == 3 and "not affected" not in caplog.text

    def fails(*_, **__):
        raise OSError("no space\nleft")

    monkeypatch.setattr(report, "write_report", fails)
    monkeypatch.setattr(Data, "prompts", fails)
    assert run.main([*given, "--out", str(tmp_path / "another")]) == 0
    assert capsys.readouterr().out.endswith("another (from_pretrained reads it)\n")
    said = {record.getMessage() for record in caplog.records}
    assert {f"no {what}: OSError: no space left. The trained model is not affected"
            for what in ("samples", "report.html")} <= said  # fmt: skip
    assert generated(tmp_path / "another").shape[1] > 3


@pytest.mark.parametrize("saved", [None, 4])
def test_a_run_that_ctrl_c_stops_says_from_which_step_it_goes_on(
    tmp_path, monkeypatch, capsys, saved
):
    if saved:
        checkpoint = tmp_path / f"checkpoints/checkpoint-{saved}"
        (checkpoint / trainer.CHECKPOINT).mkdir(parents=True)
        (checkpoint / trainer.TRAINER_STATE_NAME).write_text("{}", encoding="utf-8")

    def interrupted():
        raise KeyboardInterrupt

    job = SimpleNamespace(run=interrupted, out=tmp_path)
    monkeypatch.setattr(run, "prepare", lambda _: job)
    given = ("model", "--data", "rows.jsonl", "--out", str(tmp_path))
    assert run.main(given) == 130
    said = f"stopped; the same command continues from step {saved or 0}\n"
    assert capsys.readouterr().err == said
