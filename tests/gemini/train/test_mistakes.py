"""Typical mistakes at the command line: each ends with status 2 and one line with the remedy."""

import dataclasses
import importlib
import inspect
import pickle
import re
import signal

import pytest
import torch

import gemini
import gemini.integrations
import gemini.optim
from gemini.__main__ import main

TRAIN = {  # flags beside a good model, data and --out -> what is said
    "--lr 0": "--lr: 0.0; expected more than 0",
    "--lr fast": "--lr: 'fast'; expected a number",
    "--seq 0": "expected 1 or more",
    "--batch 2.5": "expected a whole number",
    "--held-out 1": "expected less than 1",
    "--epochs nan": "expected a finite number",
    "--learning_rate 1e-4": "did you mean --lr?",
    "--per_device_train_batch_size 4": "did you mean --batch?",
    "--gradient_accumulation_steps 4": "did you mean --accumulate?",
    "--max_seq_length 512": "did you mean --seq?",
    "--lora_rank 8": "did you mean --lora?",
    "--quantise nf4": "did you mean --quantize?",
    "--quantize nf4": "expected --lora with it, for adapters",
    "--merge": "expected --lora with it",
    "--lora 8 --quantize fp4": "did you mean nf4? expected one of nf4, int8",
    "--optim adamw8bit": "did you mean adamw_8bit?",
    "--optim galore_adamw": "expected one of adamw_torch,",
    "--schedule cosin": "did you mean cosine?",
    "--update tial": "did you mean tail?",
    "--activations spil": "did you mean spill?",
    "--device-mem 24": "did you mean '24GiB'?",
    "--host-mem lots": "expected bytes, '8GiB' or '1TB'",
    "--nvme-write-budget 1TB": "expected --nvme with it",
    "--nvme /no/folder": "create it or name another",
    "--model ./nomodel": "there is no folder ./nomodel; expected one, or an id on the hub",
    "--model {data}": "is a file; expected a folder that from_pretrained reads",
    "--out {data}": "is a file; expected a folder, or a new one",
    "--data none.jsonl": "none.jsonl",
    "--report-to wandbb": "expected none, or what is here",
    "--gpu h100": "unrecognized arguments: --gpu",
}
PLAN = {
    "plan llama-3.1-8": "did you mean llama-3.1-8b?",
    "plan gpt2 --gpu rtx4900": "did you mean rtx4090?",
    "plan gpt2 --world-size 3": "expected a multiple of them",
    "plan gpt2 --nvme 1TBB": "expected one, or its free bytes, such as 1TB",
    "plan gpt2 --device cpu --activations spill": "expected a folder on a disk",
    "plan": "expected one model: a name",
    "train": "no --model; expected it as a flag",
    "trian": "did you mean train?",
    "plan none.yaml": "none.yaml cannot be read as YAML",
    "plan {yaml}": "learning_rate is lr here",
    "train {yaml}": "learning_rate is lr here",
}


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-4\n", encoding="utf-8")
    return {"data": "good.jsonl", "yaml": "run.yaml"}


@pytest.mark.parametrize("typed", [*TRAIN, *PLAN])
def test_a_mistake_ends_with_one_line_that_names_the_remedy(typed, given, capsys):
    words = typed.format(**given).split()
    if typed in TRAIN:
        words = ["train", "model", "--data", given["data"], "--out", "out", *words]
        if "--model" in typed:
            words.remove("model")
    with pytest.raises(SystemExit) as end:
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and ": error: " in line and {**TRAIN, **PLAN}[typed] in line


INSIDE = {  # options of a value that is an argument -> how it is written
    "device_buget": r"placement_policy=AutoPlacement\(device_budget=...\)",
    "shard_param_frac": r"placement_policy=StaticPlacement\(shard_param_frac=...\)",
    "initial_scale": r"loss_scale=LossScale\(initial_scale=...\)",
    "placment_policy": "placement_policy",
}


@pytest.mark.parametrize("given", INSIDE)
def test_an_option_that_another_value_has_is_told_where_it_belongs(given):
    with pytest.raises(TypeError, match=f"'{given}'; did you mean {INSIDE[given]}[?]"):
        gemini.GeminiDDP(torch.nn.Linear(2, 2), **{given: 1})


@pytest.mark.parametrize("package", [gemini, gemini.integrations, gemini.optim])
def test_a_misspelt_argument_of_what_a_package_lists_is_told_its_name(package):
    checked = 0
    for name in package.__all__:
        what = getattr(package, name)
        is_error = inspect.isclass(what) and issubclass(what, Exception)
        if not callable(what) or is_error or name == "StepReport":  # which nobody makes
            continue
        parameters = inspect.signature(what).parameters.values()
        kinds = {one.kind for one in parameters}
        if not parameters or inspect.Parameter.VAR_KEYWORD in kinds:
            continue
        *_, last = parameters
        needed = [None for one in parameters if one.default is one.empty and one is not last]
        with pytest.raises(TypeError, match=f"{name}.*'{last.name}x'; did you mean {last.name}[?]"):
            what(*needed, **{f"{last.name}x": 1})
        checked += 1
    assert checked > 4


PASSED_ON = {  # what passes options on -> an option, misspelt
    "load_pretrained('m', max_nrom=1)": "load_pretrained.*did you mean max_norm",
    "load_pretrained('m', quantise=1)": "did you mean quantize",
    "load_pretrained('m', device_buget=1)": "did you mean placement_policy=AutoPlacement",
    "GeminiOptimizer(None, None, initial_scal=1)": "did you mean initial_scale",
    "GeminiAdamOptimizer(None, max_nrom=1)": "did you mean max_norm",
    "GeminiAdamOptimizer(None, wieght_decay=1)": "did you mean weight_decay",
    "integrations.classic.GeminiDDP(None, strict_ddp_mod=1)": "did you mean strict_ddp_mode",
    "integrations.classic.get_dataloader([], shufle=1)": "did you mean shuffle",
    "integrations.classic.get_dataloader([], batch_siz=1)": "did you mean batch_size",
    "integrations.accelerate.GeminiAccelerator(mixed_precison=1)": "did you mean mixed_precision",
    "integrations.transformers.GeminiTrainer(None, geminy={})": "did you mean gemini",
    "integrations.lightning.GeminiStrategy(max_nrom=1)": "did you mean max_norm",
}


@pytest.mark.parametrize("typed", PASSED_ON)
def test_a_misspelt_option_that_is_passed_on_is_told_its_name(typed):
    for door in re.findall(r"integrations\.(\w+)", typed):
        importlib.import_module(f"gemini.integrations.{door}")
    with pytest.raises(TypeError, match=PASSED_ON[typed]):
        eval(f"gemini.{typed}")


def test_options_are_still_values_that_are_pickled_and_replaced():
    policy = gemini.AutoPlacement(device_budget="1GiB")
    assert pickle.loads(pickle.dumps(policy)) == dataclasses.replace(policy) == policy
    with pytest.raises(TypeError, match="did you mean nvme_dir"):
        dataclasses.replace(policy, nvmedir="x")


def test_the_command_alone_prints_the_list_and_its_version(capsys):
    assert main([]) == main(["--help"]) == main(["--version"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^  plan +does a model fit", said, re.M) and gemini.__version__ in said


@pytest.mark.parametrize(("rank", "said"), [(None, "stopped\n"), ("0", "stopped\n"), ("1", "")])
def test_a_command_that_ctrl_c_stops_says_so_once(rank, said, monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gemini.__main__, "clean", interrupted)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    before = signal.getsignal(signal.SIGINT)
    assert main(["clean"]) == 130
    assert signal.signal(signal.SIGINT, before) == (before if rank is None else signal.SIG_IGN)
    assert capsys.readouterr().err == said
