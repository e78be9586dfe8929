"""Receipts: what was tampered with is found, by step and by name; `python -m gemini audit`."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import gemini
from bench.shared.models import seeded
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from gemini.receipts import chain, taking
from gemini.receipts.taking import Receipts
from optim import HybridAdam, NvmeConfig

STEPS, SAVED = 4, 2  # steps of a run, and the one whose checkpoint is there
FACTS = {"--lr": "0.01", "--seed": "0"}


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 33, generator=generator) for _ in range(STEPS)]


def module():
    with seeded():
        return nn.Sequential(nn.Linear(33, 77), nn.GELU(), nn.Linear(77, 5))


def made(*, lr=0.01, folder=None, disk=0.0, update="serial", **options):
    model = GeminiDDP(
        module(), placement_policy=StaticPlacement(), precision="bf16", min_chunk_size_m=0.001,
        update=update, **options,
    )  # fmt: skip
    optimizer = HybridAdam(
        model.parameters(), lr=lr, nvme_offload_fraction=disk,
        nvme_offload_dir=None if folder is None else str(folder), nvme=NvmeConfig(block_numel=1024),
    )  # fmt: skip
    return model, optimizer


def steps_of(model, optimizer, receipts, given, first=0):
    for step, batch in enumerate(given[first:], first + 1):
        receipts.saw({"x": batch})
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        receipts.stepped(state=step % SAVED == 0)
        if step == SAVED:
            yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folder of a run: receipts, and a checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    model, optimizer = made()
    for _ in steps_of(model, optimizer, Receipts(folder, model, optimizer, FACTS), batches()):
        gemini.save_checkpoint(folder / "saved", model, optimizer)
    optimizer.close()
    return folder


def again(folder, *, facts=FACTS, given=None, lr=0.01, change=None):
    """What a second run, from the checkpoint, finds otherwise than the receipts."""
    said = chain.read(folder / chain.FILE)
    model, optimizer = made(lr=lr)
    gemini.load_checkpoint(folder / "saved", model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if change is not None:
        change(model, optimizer)
    receipts = Receipts(None, model, optimizer, facts, step=SAVED)
    receipts.take(state=True, alone=True)
    list(steps_of(model, optimizer, receipts, batches() if given is None else given, SAVED))
    optimizer.close()
    return chain.first_difference(said, receipts.made)


def test_a_run_that_is_as_it_was_is_equal(run):
    assert again(run) is None


def changed_state(draw):
    """One element of one plane of one parameter, or of a weight, by its last bit."""
    name = draw.choice(["0.weight", "0.bias", "2.weight", "2.bias"])
    plane = draw.choice(["master", "exp_avg", "exp_avg_sq"])

    def change(model, optimizer):
        hit = []

        def fill(found):
            if (found.name, found.plane) != (name, plane):
                return None
            values = found.values.clone()
            at = draw.randrange(values.numel())
            values.view(torch.int32)[at] ^= 1 << draw.randrange(4)
            hit.append(at)
            return values

        optimizer.fill_state(fill)
        assert hit

    return {"change": change}, f"step {SAVED}: ", name


def changed_batch(draw):
    given, step = batches(), draw.randrange(SAVED, STEPS)
    flat = given[step].view(-1).view(torch.int32)
    flat[draw.randrange(flat.numel())] ^= 1 << draw.randrange(23)
    return {"given": given}, f"step {step + 1}: ", "batch"


def changed_order(draw):
    given = batches()
    given[SAVED], given[SAVED + 1] = given[SAVED + 1], given[SAVED]
    return {"given": given}, f"step {SAVED + 1}: ", "batch"


def changed_flag(draw):
    name = draw.choice(list(FACTS))
    return {"facts": {**FACTS, name: str(draw.random())}}, "step 0: facts", name


def changed_rate(draw):
    """A flag whose fact was forged with it: weights say so."""
    return {"lr": 0.01 * (1.5 + draw.random())}, f"step {SAVED + 1}: weights", "weight"


KINDS = [changed_state, changed_batch, changed_order, changed_flag, changed_rate]


def test_of_100_that_were_tampered_with_all_are_found_by_step_and_name(run):
    found = 0
    for seed in range(100):
        draw = random.Random(seed)
        given, where, what = KINDS[seed % len(KINDS)](draw)
        said = again(run, **given)
        assert said is not None and said.startswith(where) and what in said, (seed, said)
        found += 1
    assert found == 100


def edits(lines, draw):
    """A line of a step with another digest, gone, twice, or moved; a chain of another run."""
    at = draw.randrange(1, len(lines))
    kind = draw.randrange(5)
    one = json.loads(lines[at])
    if kind == 0:
        name = draw.choice(sorted(one["weights"]))
        one["weights"][name] = f"{draw.getrandbits(64):016x}"
        lines[at] = json.dumps(one, sort_keys=True)
        # the last line has nobody behind it: only a second run shows it
        return at < len(lines) - 1
    if kind == 1:
        del lines[at]
        return at < len(lines)
    if kind == 2:
        lines.insert(at, lines[at])
    elif kind == 3:
        lines[at] = lines[at][: draw.randrange(len(lines[at]))]
    else:
        one["before"] = "0" * 64
        lines[at] = json.dumps(one, sort_keys=True)
    return True


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_that_was_edited_is_refused_with_its_place(run, tmp_path, seed):
    lines = (run / chain.FILE).read_text(encoding="utf-8").splitlines()
    there = tmp_path / chain.FILE
    shows = edits(lines, random.Random(seed))
    there.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if shows:
        with pytest.raises(ValueError, match=r"receipts.jsonl: (line \d|the line of|step \d)"):
            chain.read(there)
    else:
        chain.read(there)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 0}', "[" * 100_000, "1\n2"])
def test_a_strangers_receipts_are_read_as_text(tmp_path, text):
    (tmp_path / chain.FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="expected"):
        chain.read(tmp_path / chain.FILE)


def test_code_of_every_room_is_a_fact():
    """Some rooms are links in a clone."""
    found = set(taking.code_files())
    assert {"ddp.py", "optim/adam.py", "nvme/store.py", "kernels_triton/ops.py"} <= found


def test_a_run_that_goes_on_drops_what_came_behind_its_checkpoint(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    whole = chain.read(run / chain.FILE)
    model, optimizer = made()
    gemini.load_checkpoint(tmp_path / "run/saved", model, optimizer)
    receipts = Receipts(tmp_path / "run", model, optimizer, FACTS, step=SAVED)
    assert len(chain.read(tmp_path / "run" / chain.FILE)) == SAVED + 1
    list(steps_of(model, optimizer, receipts, batches(), SAVED))
    optimizer.close()
    assert chain.first_difference(whole, chain.read(tmp_path / "run" / chain.FILE)) is None


def _at(rank, folder, update, disk):
    model, optimizer = made(
        folder=folder / "files", disk=disk, update=update, canonical=True
    )  # fmt: skip
    receipts = Receipts(None, model, optimizer, FACTS)
    for _ in range(2):
        for number, batch in enumerate(batches()):
            if number % model.engine.comm.world_size == rank:
                receipts.saw(batch)
                loss = model(batch).float().square().mean() / 4
                (loss * model.engine.comm.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        receipts.stepped(state=True)
    optimizer.close()
    return [replace(one, random="", before="") for one in receipts.made]


def test_ranks_tiers_and_modes_leave_the_same_receipts(tmp_path):
    (tmp_path / "files").mkdir()
    one = _at(0, tmp_path, "serial", 0.0)
    assert _at(0, tmp_path, "tail", 1.0) == one
    assert run_ranks(_at, 2, tmp_path, "tail", 1.0)[1] == one


# -- the command --


def test_what_a_strangers_config_says_of_a_machine_is_not_taken(tmp_path):
    from gemini.train.audit_command import _elsewhere
    from gemini.train.config import TrainConfig

    given = TrainConfig(
        model="m", data="d", out="/theirs", nvme="/theirs", report_to="wandb", device_mem="1GiB",
        save_every=3, lr=1.0, checkpointing=False, samples=9,
    )  # fmt: skip
    mine = _elsewhere(given, tmp_path)
    asked = (mine.out, mine.nvme, mine.report_to, mine.device_mem, mine.samples)
    assert asked == (str(tmp_path), None, "none", None, 0)
    assert (mine.model, mine.lr, mine.save_every, mine.checkpointing) == ("m", 1.0, 3, False)
    with pytest.raises(ValueError, match="runs code that no folder has"):
        _elsewhere(replace(given, method="grpo"), tmp_path)


def test_ranks_need_one_folder_to_work_in(tmp_path, monkeypatch, capsys):
    from gemini.train.audit_command import main

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--steps", "1-2"])
    assert "expected --work, a folder that all of them have" in capsys.readouterr().err


@pytest.mark.ci  # trl
def test_a_run_of_train_is_audited_from_its_checkpoint(tmp_path, monkeypatch, capsys):
    from gemini.__main__ import main
    from tests.support.model_folder import make_folder, rows, write_rows

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_rows(tmp_path / "text.jsonl", rows("text"))
    make_folder(tmp_path / "model")
    out = tmp_path / "out"
    flags = [
        str(tmp_path / "model"), "--data", str(tmp_path / "text.jsonl"), "--out", str(out),
        "--steps", "5", "--save-every", "2", "--batch", "2", "--seq", "16", "--samples", "0",
        "--held-out", "0.1", "--keep", "5", "--receipts",
    ]  # fmt: skip
    assert main(["train", *flags]) == 0
    assert [one.step for one in chain.read(out / chain.FILE)] == list(range(6))
    before = sorted(str(path) for path in out.rglob("*"))
    capsys.readouterr()
    assert main(["audit", str(out), "--steps", "3-5"]) == 0
    assert capsys.readouterr().out.endswith(f"{out}: steps 3-5 are equal; computed from step 2\n")
    assert sorted(str(path) for path in out.rglob("*")) == before  # nothing is written there
    config = out / "config.yaml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("lr: 2.0e-05", "lr: 3.0e-05"), encoding="utf-8")
    assert config.read_text(encoding="utf-8") != text
    assert main(["audit", str(out), "--steps", "3-5"]) == 1
    assert "step 0: facts of --lr" in capsys.readouterr().out
    config.write_text(text, encoding="utf-8")
    turned = [{"text": row["text"][::-1]} for row in rows("text")]
    write_rows(tmp_path / "text.jsonl", turned)
    assert main(["audit", str(out), "--steps", "3-5"]) == 1
    assert "step 3: batch" in capsys.readouterr().out


@pytest.mark.ci  # trl, and two ranks of it
def test_a_canonical_run_of_two_ranks_is_audited_on_one(tmp_path, monkeypatch, capsys):
    from gemini.__main__ import main
    from tests.support.model_folder import make_folder, rows, write_rows

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_rows(tmp_path / "text.jsonl", rows("text"))
    make_folder(tmp_path / "model")
    out = tmp_path / "out"
    flags = [
        str(tmp_path / "model"), "--data", str(tmp_path / "text.jsonl"), "--out", str(out),
        "--steps", "5", "--save-every", "2", "--batch", "4", "--accumulate", "2", "--seq", "16",
        "--samples", "0", "--held-out", "0.1", "--keep", "5", "--receipts", "--canonical",
    ]  # fmt: skip
    command = [sys.executable, "-m", "gemini", "run", "--nproc_per_node", "2", "-m", "gemini"]
    done = subprocess.run([*command, "train", *flags], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert main(["audit", str(out), "--steps", "3-5"]) == 0
    assert capsys.readouterr().out.endswith(f"{out}: steps 3-5 are equal; computed from step 2\n")
    config = out / "config.yaml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("batch: 4", "batch: 8"), encoding="utf-8")
    assert main(["audit", str(out), "--steps", "3-5"]) == 1
    assert "step 0: facts of sequences of a micro-batch" in capsys.readouterr().out
    config.write_text(text, encoding="utf-8")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        main(["audit", str(out), "--steps", "3-5", "--work", str(tmp_path / "work")])
    assert "4 micro-batches of a step, on 3 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["5", "0-2", "4-3", "a-b"])
def test_a_range_that_is_none_is_refused(steps, tmp_path, capsys):
    from gemini.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(["audit", str(tmp_path), "--steps", steps])
    assert ended.value.code == 2 and "expected the first and the last" in capsys.readouterr().err
