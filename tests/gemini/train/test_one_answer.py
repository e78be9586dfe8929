"""`plan` and `train` ask one question, and a run follows its answer."""

import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nvme
from gemini.placement.orders import ORDERS
from gemini.placement.timetable.updates import UPDATES
from gemini.plan import words
from gemini.plan.ask import plan_for
from gemini.plan.machine import machine_of
from gemini.runtime.memory.backend import make_backend
from gemini.train import data, run
from gemini.train import plan as train_plan
from gemini.train import plan_command as command
from gemini.train.config import TrainConfig, parse
from gemini.train.data import Data
from tests.support.model_folder import flags

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("cached_here")]  # trl takes seconds to import


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
