"""The scripts of examples/ as people run them."""

import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import demo
from tests.support.model_folder import make_folder, rows, write_rows

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.ci


TRAIN = str(ROOT / "examples/train_gpt.py")
TORCHRUN = [
    "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0",
    "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
]  # fmt: skip
# One after the other in one process: most of each is the import of torch.
IN_TURN = """
import json, runpy, sys
for arguments in json.loads(sys.argv[1]):
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
"""


def arguments(folder, out, *flags):
    return [
        TRAIN, "--model", "tiny", "--steps", "6", "--device", "cpu", "--nvme-dir", str(folder),
        "--json", str(out), *flags,
    ]  # fmt: skip


def started(*command):
    path = os.pathsep.join([str(ROOT), str(ROOT / "io")])
    subprocess.run([sys.executable, *command], check=True, env={**os.environ, "PYTHONPATH": path})


def test_two_ranks_have_the_losses_of_one_process_at_the_same_global_batch(tmp_path):
    outs = [tmp_path / "1.json", tmp_path / "2.json"]
    started(*arguments(tmp_path, outs[0]))
    started(*TORCHRUN, *arguments(tmp_path, outs[1]))
    one, two = (json.loads(out.read_text(encoding="utf-8")) for out in outs)
    assert one["train_loss"] == pytest.approx(two["train_loss"], rel=1e-3)
    assert one["val_loss"] == pytest.approx(two["val_loss"], rel=1e-3)
    assert one["val_loss"] < one["train_loss"][0] - 0.3


def test_every_way_of_running_it_ends_with_a_loss_and_leaves_nothing(tmp_path):
    data = tmp_path / "text.txt"
    data.write_text("the quick brown fox " * 2000, encoding="utf-8")
    ways = [
        ("--plot", str(tmp_path / "p.png")),
        ("--nvme-fraction", "1.0"),
        ("--device-budget", "60MiB"),
        *((flag,) for flag in ("--baseline", "--plain", "--floor")),
        ("--data", str(data), "--precision", "fp32"),
    ]
    outs = [tmp_path / f"{number}.json" for number in range(len(ways))]
    each = [arguments(tmp_path, out, *way) for way, out in zip(ways, outs, strict=True)]
    started("-c", IN_TURN, json.dumps(each))
    resident, on_disk, within, *others, of_text = (
        json.loads(out.read_text(encoding="utf-8")) for out in outs
    )
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert on_disk["train_loss"] == resident["train_loss"] and on_disk["nvme_bytes"] > 0
    assert within["train_loss"] == resident["train_loss"]
    assert all(other["val_loss"] > 0 for other in others)
    assert of_text["val_loss"] < 5.5
    assert [p for p in tmp_path.iterdir() if p.suffix == ".blocks"] == []


def test_scripts_over_trainers_of_others_save_and_go_on(tmp_path, monkeypatch):
    model, out = make_folder(tmp_path / "model"), tmp_path / "adapter"
    data = write_rows(tmp_path / "chat.jsonl", rows("chat"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    examples, folder = ROOT / "examples", tmp_path / "lightning"
    fit = [str(examples / "lightning_gpt.py"), "--layers", "2", "--seq", "32", "--out", str(folder)]
    sft = [
        str(examples / "sft_lora.py"), "--model", str(model), "--data", str(data), "--out",
        str(out), "--rank", "2", "--seq", "32", "--steps", "2", "--nvme-dir", str(tmp_path),
    ]  # fmt: skip
    on_disk = [*fit, "--steps", "10", "--nvme-fraction", "1.0"]
    started("-c", IN_TURN, json.dumps([sft, on_disk, [*fit, "--steps", "12", "--resume"]]))
    assert (out / "adapter_model.safetensors").exists() and not (out / "model.safetensors").exists()
    assert (folder / "last.ckpt").exists()
    assert not list(tmp_path.rglob("*.blocks"))


def test_the_demos_held_out_loss_falls_and_it_continues_where_ctrl_c_left_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(demo, "SAVE_EVERY", 20)
    arguments = ["--steps", "60", "--nvme-dir", str(tmp_path), "--out"]

    def draw(step, text):
        if step == 30 and draw.presses:
            draw.presses -= 1
            raise KeyboardInterrupt
        return batch_of(step, text)

    batch_of, draw.presses = demo.batch_of, 1
    monkeypatch.setattr(demo, "batch_of", draw)
    stopped = str(tmp_path / "stopped")
    with pytest.raises(SystemExit, match="continues from step 20 of 60"):
        demo.main([*arguments, stopped])
    demo.main([*arguments, stopped])
    said = capsys.readouterr().out
    assert "continues from step 20 of 60" in said
    before, after = map(float, re.search(r"loss (\S+) to (\S+) \(-", said).groups())
    demo.main([*arguments, str(tmp_path / "whole")])
    assert re.search(r"loss \S+ to (\S+) \(-", capsys.readouterr().out)[1] == f"{after:.3f}"
    assert after < 0.9 * before  # all of its steps are in tests/deep/clock/test_demo.py


DPO = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["prompt"]}
       for row in rows("prompt", 12)]  # fmt: skip
GRPO = [{"prompt": row["prompt"][:20], "answer": "e"} for row in rows("prompt", 12)]
TUNES = ("--dtype", "float32", "--rank", "2", "--steps", "3", "--batch", "2")
LOOPS = ("--fp32", "--steps", "4", "--batch", "2")
LIKE_THE_LIBRARY = {
    "sft_lora": (*TUNES, "--seq", "64"),
    "dpo_lora": (*TUNES, "--seq", "64"),
    "grpo_lora": (*TUNES, "--completions", "2", "--tokens", "6", "--beta", "0.1"),
    "protein": (*LOOPS, "--size", "toy", "--seq", "24"),
    "diffusion": (*LOOPS, "--channels", "8", "--size", "8"),
    "pretrain": (*LOOPS, "--layers", "1", "--width", "32", "--seq", "32"),
}


def flags_of(name, folder):
    """Flags of an example at toy size, with a model and data in `folder` if it needs them."""
    made = []
    if name.endswith("lora"):
        given = {"sft_lora": rows("chat", 12), "dpo_lora": DPO, "grpo_lora": GRPO}[name]
        data = write_rows(folder / f"{name}.jsonl", given)
        made = ["--model", str(make_folder(folder / "model")), "--data", str(data)]
    elif name == "pretrain":
        made = ["--text", str(ROOT / "docs/glossary.md")]
    return [*made, *LIKE_THE_LIBRARY[name]]


# Plain, then sharded, one after the other on the ranks of torchrun.
ON_RANKS = """
import json, runpy, sys
from pathlib import Path
losses = {}
for name, flags in json.loads(Path(sys.argv[1]).read_text()).items():
    main = runpy.run_path(f"examples/{name}.py")["main"]
    losses[name] = [main([*flags, "--out", f"{sys.argv[2]}/{name}-plain", "--plain"]),
                    main([*flags, "--out", f"{sys.argv[2]}/{name}"])]
import torch.distributed as dist
Path(f"{sys.argv[2]}/losses-{dist.get_rank()}").write_text(json.dumps(losses))
dist.destroy_process_group()
"""


@pytest.mark.deep
def test_on_two_ranks_the_examples_train_as_the_libraries_alone(tmp_path, monkeypatch):
    """Libraries average over ranks by DistributedDataParallel."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    names = [n for n in LIKE_THE_LIBRARY if n != "diffusion" or find_spec("diffusers")]
    flags = {name: flags_of(name, tmp_path) for name in names}
    (tmp_path / "flags.json").write_text(json.dumps(flags), encoding="utf-8")
    (tmp_path / "script.py").write_text(ON_RANKS, encoding="utf-8")
    started(*TORCHRUN, *(str(tmp_path / name) for name in ("script.py", "flags.json", "")))
    for rank in (0, 1):
        losses = json.loads((tmp_path / f"losses-{rank}").read_text(encoding="utf-8"))
        assert list(losses) == names
        for name, (want, got) in losses.items():
            assert (len(want) > 2 and len(set(want)) > 1) or rank, name
            assert got == pytest.approx(want, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("name", LIKE_THE_LIBRARY)
def test_an_example_trains_as_the_library_alone(tmp_path, monkeypatch, name):
    """To 1e-5, which is what rounding in another order leaves of fp32."""
    if name == "diffusion":
        pytest.importorskip("diffusers")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    flags = flags_of(name, tmp_path)
    main = runpy.run_path(str(ROOT / f"examples/{name}.py"))["main"]
    want = main([*flags, "--out", str(tmp_path / "plain"), "--plain"])
    got = main([*flags, "--out", str(tmp_path / "ours")])
    assert len(want) > 2 and len(set(want)) > 1 and got == pytest.approx(want, rel=1e-5, abs=1e-7)
    assert list((tmp_path / "ours").glob("*.safetensors"))
