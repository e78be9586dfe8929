"""A run of `python -m gemini train`, whole: planned, killed, gone on with, written; and refused."""

import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import nvme
from gemini.checkpoint import CheckpointError
from gemini.launcher import run as launcher
from gemini.placement.orders import ORDERS
from gemini.placement.timetable.updates import UPDATES
from gemini.plan import models, words
from gemini.plan.ask import plan_for
from gemini.plan.machine import machine_of
from gemini.runtime.memory.backend import make_backend
from gemini.train import data, inputs, report, run, trainer
from gemini.train import plan as train_plan
from gemini.train import plan_command as command
from gemini.train.config import TrainConfig, parse
from gemini.train.data import Data
from tests.support.model_folder import make_folder, rows, write_rows

pytestmark = pytest.mark.ci  # trl alone takes seconds to import
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and rows of every kind."""
    made = tmp_path_factory.mktemp("given")
    for kind in ("text", "prompt", "chat"):
        write_rows(made / f"{kind}.jsonl", rows(kind))
    make_folder(made / "model")
    return made


@pytest.fixture(autouse=True)
def cached_here(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def on_disk(tmp_path):
    """Skips where the temporary folder is in RAM."""
    try:
        nvme.check_folder(tmp_path)
    except nvme.FolderError as error:
        pytest.skip(str(error))


def flags(folder, out, *more, data="text"):
    return [
        "--model", str(folder / "model"), "--data", str(folder / f"{data}.jsonl"),
        "--out", str(out), "--seq", "32", "--batch", "2", "--accumulate", "2", "--steps", "4",
        "--save-every", "2", "--log-every", "1", "--lr", "1e-3", "--held-out", "0.1",
        "--sample-tokens", "4", *more,
    ]  # fmt: skip


def losses(out):
    (state,) = (out / "checkpoints/checkpoint-4").glob("trainer_state.json")
    log = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def generated(out):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    return model.generate(**tokenizer("A chunk", return_tensors="pt"), max_new_tokens=3)


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


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [("prompt", (), ""), ("chat", ("--quantize", "nf4", "--seq", "64"), " on a base in nf4")],
)
def test_adapters_are_trained_and_come_back(
    folder, tmp_path, capsys, monkeypatch, data, more, said
):
    """Of a base on the hub, whose id is saved with them."""
    out = tmp_path / "out"
    monkeypatch.setattr(inputs, "downloaded", lambda _, weights: folder / "model")
    made = [*flags(folder, out, "--lora", "2", *more, data=data), "--model", "org/base"]
    assert run.main(made) == 0
    assert f"LoRA of rank 2{said} (as asked)" in capsys.readouterr().out
    adapters = load_file(out / "adapter_model.safetensors")
    assert all(value.any() for name, value in adapters.items() if "lora_B" in name)  # from zeros
    assert not (out / "model.safetensors").exists()
    settings = out / "adapter_config.json"
    assert json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"] == "org/base"
    settings.write_text(
        settings.read_text(encoding="utf-8").replace("org/base", str(folder / "model")),
        encoding="utf-8",
    )
    assert generated(out).shape[1] > 3
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "base_model: org/base\n" in card
    assert "LoRA adapters of rank 2 of `org/base`, fine-tuned on" in card
    assert "Information Needed" not in card and not list(out.glob("*.bin"))


@pytest.mark.parametrize("more", [(), ("--method", "reward"), ("--quantize", "nf4")])
def test_merged_adapters_are_whole_weights_as_peft_merges_them(folder, tmp_path, more):
    """Of linear layers and of a new head; in the dtype of the base, which is rounded to once."""
    import transformers

    kind = transformers.AutoModelForCausalLM
    given, options = rows("text"), {}
    if "reward" in more:
        from peft import AutoPeftModelForSequenceClassification as adapted

        kind, options = transformers.AutoModelForSequenceClassification, {"num_labels": 1}
        given = [{"chosen": row["text"][:20], "rejected": 20 * "x"} for row in given]
    else:
        from peft import AutoPeftModelForCausalLM as adapted
    write_rows(tmp_path / "text.jsonl", given)
    out = tmp_path / "out"
    made = [*flags(tmp_path, out, "--lora", "2", "--merge", *more),
            "--model", str(folder / "model"), "--lr", "1e-2"]  # fmt: skip
    assert run.main(made) == 0
    got = load_file(out / "model.safetensors")
    base = load_file(folder / "model/model.safetensors")
    want = adapted.from_pretrained(out / "adapter", dtype=torch.float32, **options)
    want = want.merge_and_unload().state_dict()
    assert got.keys() == want.keys() - ({"lm_head.weight"} - got.keys())
    for name, value in got.items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, want[name].bfloat16()), name
        if "proj" in name:
            assert not torch.equal(value, base[name]), name
    model = kind.from_pretrained(out, **options)
    assert model(input_ids=torch.tensor([[1, 2]])).logits.isfinite().all()
    assert {path.name for path in out.glob("adapter*")} == {"adapter"}
    assert f"from transformers import {kind.__name__}" in (out / "README.md").read_text(
        encoding="utf-8"
    )
    assert "merged into all weights" in (out / "README.md").read_text(encoding="utf-8")
    assert not list(out.rglob("*.bin")) and not list(out.glob("*/**/README.md"))


def test_adapters_of_a_weight_with_two_names_are_not_merged(folder, tmp_path, capsys):
    model = make_folder(tmp_path / "tied", tie_word_embeddings=True)
    made = flags(folder, tmp_path / "out", "--lora", "2", "--merge", "--lora-targets", "lm_head")
    with pytest.raises(SystemExit):
        run.main([*made, "--model", str(model)])
    assert "--merge with adapters of " in capsys.readouterr().err


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


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_a_method_trains_new_adapters_with_the_base_as_reference(folder, tmp_path, method):
    """Before the first step nothing is preferred, and the divergence is none."""
    if method == "dpo":
        given = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": r["prompt"]}
                 for r in rows("prompt", 20)]  # fmt: skip
        more = ["--beta", "0.5"]
    else:
        given = [{"prompt": r["prompt"][:9], "letter": "e"} for r in rows("prompt", 20)]
        reward = "def count(completions, letter, **_): return [len(set(c)) for c in completions]"
        (tmp_path / "reward.py").write_text(reward, encoding="utf-8")
        more = ["--reward", f"{tmp_path}/reward.py:count", "--completions", "2", "--beta", "0.1"]
    write_rows(tmp_path / f"{method}.jsonl", given)
    out = tmp_path / "out"
    made = [*flags(tmp_path, out, "--method", method, *more, data=method)]
    made += ["--model", str(folder / "model"), "--lora", "2", "--lora-targets", "q_proj,v_proj",
             "--lora-alpha", "8", "--lora-dropout", "0.1", "--seq", "48"]  # fmt: skip
    assert run.main(made) == 0
    assert f"trained by {method.upper()} on" in (out / "README.md").read_text(encoding="utf-8")
    (state,) = (out / "checkpoints/checkpoint-4").glob("trainer_state.json")
    first = next(
        e for e in json.loads(state.read_text(encoding="utf-8"))["log_history"] if "loss" in e
    )
    if method == "dpo":  # nothing is preferred yet: log 2
        assert first["loss"] == pytest.approx(0.693147, abs=1e-6)
    else:
        assert first["kl"] == 0.0
    settings = json.loads((out / "adapter_config.json").read_text(encoding="utf-8"))
    assert settings["base_model_name_or_path"] == str(folder / "model")
    assert (settings["lora_alpha"], settings["lora_dropout"]) == (8, 0.1)
    saved = load_file(out / "adapter_model.safetensors")
    assert all(("q_proj" in name) or ("v_proj" in name) for name in saved)
    assert not any(".ref." in name for name in saved)
    assert any(value.any() for name, value in saved.items() if "lora_B" in name)


@pytest.mark.parametrize("more", [(), ("--lora", "2"), ("--lora", "2", "--quantize", "nf4")])
def test_a_reward_model_is_trained_and_scores_as_it_did(folder, tmp_path, capsys, caplog, more):
    """By pairs, of which one is too long; the head is new, and comes back with the rest."""
    import transformers

    given = [{"prompt": r["prompt"][:9], "chosen": r["completion"][:20], "rejected": 20 * "x"}
             for r in rows("prompt", 20)]  # fmt: skip
    write_rows(tmp_path / "reward.jsonl", [*given, given[0] | {"chosen": 99 * "long"}])
    write_rows(tmp_path / "held.jsonl", given[:4])
    out = tmp_path / "out"
    made = flags(tmp_path, out, "--method", "reward", "--seq", "48", "--lr", "1e-2", *more)
    made += ["--model", str(folder / "model"), "--data", str(tmp_path / "reward.jsonl"),
             "--eval-data", str(tmp_path / "held.jsonl")]  # fmt: skip
    assert run.main(made) == 0
    said = capsys.readouterr().out
    assert "1 of 21 rows are dropped by --seq 48: a text of the pair is longer" in said
    assert "(traced, of a reward model)" in said and "-->" not in said
    assert "left its trace" not in caplog.text
    (state,) = (out / "checkpoints/checkpoint-4").glob("trainer_state.json")
    log = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    logged = [entry for entry in log if "eval_loss" in entry][-1]
    assert logged["eval_loss"] < 0.6  # log 2 before

    kind, options = transformers.AutoModelForSequenceClassification, {"num_labels": 1}
    if more:
        from peft import AutoPeftModelForSequenceClassification as kind
    model = kind.from_pretrained(out, **options)
    assert f"{kind.__name__}.from_pretrained(" in (out / "README.md").read_text(encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    scores = torch.tensor([
        [model(**tokenizer(row["prompt"] + row[key] + "</s>", return_tensors="pt")).logits.item()
         for key in ("chosen", "rejected")] for row in given[:4]
    ])  # fmt: skip
    loss = -torch.nn.functional.logsigmoid(scores[:, 0] - scores[:, 1]).mean().item()
    if "nf4" not in more:  # whose base comes back in 16 bits
        assert loss == pytest.approx(logged["eval_loss"], rel=0.03)  # bf16


@pytest.mark.usefixtures("on_disk")
def test_what_does_not_fit_is_refused_with_a_change_that_does(folder, tmp_path, capsys):
    given = flags(folder, tmp_path / "out", "--no-checkpointing", "--device-mem", "3MiB")
    with pytest.raises(SystemExit) as end:
        run.main(given)
    said = capsys.readouterr().err
    assert end.value.code == 2 and "it does not fit: --device-mem of 3.00 MiB is" in said
    change = (
        re.search(r"cheapest change: (.*) \(see --help\)", said)[1]
        .replace("FOLDER", str(tmp_path))
        .split()
    )
    assert not (tmp_path / "out").exists()
    assert run.main([*given, *change, "--steps", "1"]) == 0


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize(
    "short",
    [
        (),
        ("--lora", "2"),
        ("--lora", "2", "--quantize", "int8"),
        ("--accumulate", "4", "--no-checkpointing"),
        ("--accumulate", "4", "--accumulate-order", "layers"),
        ("--activations", "spill", "--no-checkpointing", "--optim", "sgd"),
    ],
)
def test_plan_and_train_give_one_answer_and_the_run_follows_it(
    folder, tmp_path, capsys, monkeypatch, short
):
    """Of the same machine. What `plan --print-args` prints is what `train` is given."""
    machine = replace(
        machine_of({"device_mem": 9 << 20, "host_mem": 1 << 30, "nvme": 1 << 30}, device="cpu"),
        folder=str(tmp_path), is_here=True,
    )  # fmt: skip
    monkeypatch.setattr(command, "machine_from", lambda *_: machine)
    monkeypatch.setattr(train_plan, "hardware", lambda *_: machine)
    model = str(folder / "model")
    asked = [model, "--seq", "32", "--batch", "2", "--packing", *short]
    assert command.main(asked) == 0
    answer = capsys.readouterr().out
    assert command.main([*asked, "--print-args"]) == 0
    given = capsys.readouterr().out.split()
    config, _ = parse(
        ["--model", model, "--data", str(folder / "text.jsonl"), "--out", str(tmp_path / "out"),
         "--steps", "1", "--packing", "--held-out", "0", *given]
    )  # fmt: skip
    job = run.prepare(config)
    assert capsys.readouterr().out == answer
    planned = plan_for(model, machine, train_plan.training_of(config, 1)).result.plan
    job.run()
    wrapped = job.trainer.model_wrapped
    found = wrapped.engine.planning.plan
    if config.quantize:  # a plan knows how many bytes there are, and not what they consist of
        found = replace(found, layout_digest=planned.layout_digest)
    assert found == planned
    assert wrapped.engine.overlap.asked == config.update


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


def drawn(draw, folder, out):
    """Settings that a plan depends on, and some that it does not."""
    lora = draw.choice([0, 2, 8])
    method = draw.choice(["sft", "sft", "reward", *(["dpo"] if lora else [])])
    return TrainConfig(
        method=method,
        model=str(folder / "model"), data=str(folder / "text.jsonl"), out=str(out), lora=lora,
        quantize=draw.choice([None, "nf4", "int8"]) if lora else None,
        optim=draw.choice([*words.OPTIMIZERS]), update=draw.choice(UPDATES),
        seq=draw.choice([16, 32]), batch=draw.choice([1, 2, 8]), accumulate=draw.choice([1, 3]),
        accumulate_order="batches" if method == "dpo" else draw.choice(ORDERS),
        packing=method == "sft" and draw.random() < 0.5, checkpointing=draw.random() < 0.5,
        lr=draw.random() + 0.1,
        device_mem=draw.choice([None, "9MiB", "1GiB"]), host_mem=draw.choice([None, "1GiB"]),
        nvme=draw.choice([None, str(out.parent)]), activations=draw.choice(["keep", "spill"]),
    )  # fmt: skip


@pytest.mark.usefixtures("on_disk")
def test_plan_and_train_ask_one_question_of_any_config(folder, tmp_path, monkeypatch):
    asked = []

    def ask(*question, longest=False):
        assert not longest
        asked.append(question)
        raise ValueError("it was asked")

    here = train_plan.look_at_machine(make_backend(torch.device("cpu")), 1)
    monkeypatch.setattr(train_plan, "look_at_machine", lambda *_: here)  # nothing else runs
    monkeypatch.setattr(train_plan, "free_bytes", lambda _: 1 << 30)
    monkeypatch.setattr(train_plan, "flops_of", lambda _: 1e12)
    monkeypatch.setattr(train_plan, "resident_bytes", lambda **_: 1 << 28)  # of its own libraries
    monkeypatch.setattr(nvme, "probe", lambda *_, **__: SimpleNamespace(read=1e9, write=1e9))
    monkeypatch.setattr(data, "load", lambda *_: Data(SimpleNamespace(kind="text"), None, None))
    monkeypatch.setattr(run, "plan_for", ask)
    monkeypatch.setattr(command, "plan_for", ask)
    draw = random.Random(56)
    for number in range(40):
        file = tmp_path / f"{number}.yaml"
        file.write_text(drawn(draw, folder, tmp_path / "out").as_yaml(), encoding="utf-8")
        for main in (run.main, command.main):
            with pytest.raises(SystemExit):
                main([str(file)])
        trained, planned = asked[-2:]
        assert len(asked) == 2 * number + 2 and trained[1:] == planned[1:]
        assert trained[0] == Path(planned[0])
    assert len({str(question) for question in asked}) > 30


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


def test_a_module_is_run_on_all_ranks(tmp_path):
    (tmp_path / "job.py").write_text(
        "import os, sys; print(os.environ['RANK'], sys.argv[1:])", encoding="utf-8"
    )
    command = [sys.executable, "-m", "gemini", "run", "--nproc_per_node", "2", "-m", "job", "--x"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "io")])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 ['--x']" in done.stdout and "1 ['--x']" in done.stdout


def test_ctrl_c_reaches_what_run_started_and_the_last_words_come_last(tmp_path, monkeypatch, capfd):
    """A terminal sends it to `run` alone: what it starts has a session of its own."""
    code = (
        "import os, pathlib, signal\n"
        "said = pathlib.Path(os.environ['GEMINI_LAST_WORDS'])\n"
        "signal.signal(signal.SIGINT, lambda *_: (said.write_text('step 7\\n'), os._exit(130)))\n"
        "pathlib.Path(f'{said}.ready').touch()\n"
        "signal.pause()\n"
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def until_ready(seconds):
        if list(tmp_path.glob("*/*.ready")):
            raise KeyboardInterrupt

    polls = {"sleep": until_ready}
    monkeypatch.setattr(launcher, "time", SimpleNamespace(**polls))
    assert launcher._run([[sys.executable, "-c", code]]) == 130
    assert capfd.readouterr().err == "step 7\n"


def test_of_several_ranks_one_says_why_they_are_refused():
    """In one line, to which torchrun adds no summary."""
    command = [sys.executable, "-m", "gemini", "run", "--nproc_per_node", "2"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "io")])
    done = subprocess.run(
        [*command, "-m", "gemini", "train", "--lr", "0"], cwd=ROOT, capture_output=True, text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    said = "python -m gemini train: error: argument --lr: 0.0; expected more than 0"
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(said), done.stderr
    assert done.stderr.count(said) == 1 and "torch/distributed/elastic" not in done.stderr


def test_the_doctor_imports_no_trainer():
    code = (
        "import sys, gemini.__main__, gemini.doctor.measure, gemini.launcher.run\n"
        "sys.exit('transformers' in sys.modules or 'trl' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
