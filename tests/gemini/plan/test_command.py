"""python -m gemini plan: its answers and files, and what it refuses in one line."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gemini.__main__ import main
from gemini.plan import table
from gemini.plan.machine import CARDS
from gemini.train import plan_command as command

ROOT = Path(__file__).resolve().parents[3]

KEYS = {
    "fits", "peaks", "bytes_moved_per_step", "step_seconds", "bound_by", "largest_batch",
    "suggestion",
}  # fmt: skip


def refused(flags, capsys):
    """The one line that a refused command ends with."""
    with pytest.raises(SystemExit) as end:
        command.main(flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("python -m gemini plan: error: ")
    return line


@pytest.mark.ci
def test_command_writes_its_answer_and_exits_with_it(config, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(config.parent)  # a path of any length would wrap the picture's title
    out, picture = tmp_path / "plan.json", tmp_path / "t.svg"
    own = ["--no-by-trl", "--no-checkpointing", "--batch", "1", "--seq", "64"]
    flags = ["--model", config.name, *own, "--json", str(out)]
    assert command.main([*flags, "--timeline", str(picture)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["fits"] and result["suggestion"] is None and result.keys() > KEYS
    assert "bound by" in capsys.readouterr().out
    said = picture.read_text(encoding="utf-8")
    assert "batch 1 x 64 tokens of a rank" in said and ">it fits; " in said
    small = [*flags, "--device-mem", "100MiB", "--host-mem", "10MiB", "--nvme", "0"]
    assert command.main([*small, "--timeline", str(picture)]) == 1
    assert not json.loads(out.read_text(encoding="utf-8"))["fits"]
    said = picture.read_text(encoding="utf-8")
    assert ">it does not fit: " in said and "budget 100.00 MiB" in said


@pytest.mark.parametrize(
    "flags",
    [
        ("--batch", "0"),
        ("--nvme-fraction", "2"),
        ("--device-mem", "much"),
        ("--world-size", "2", "--ranks-per-node", "3"),
        ("--batch", str(10**12)),
        ("--batch", str(10**5), "--seq", str(10**5)),
        ("--lora", str(10**30)),
        ("--activation-bytes", str(10**30)),
        ("--json", "none/a.json"),
        ("--timeline", "."),
        ("--fits", __file__),
    ],
)
def test_bad_arguments_are_refused(flags):
    with pytest.raises(SystemExit) as refused:
        command.main(["gpt2", *flags])
    assert refused.value.code == 2


@pytest.mark.parametrize("what", ["", ".:x", ":x", "torch.nn:Linear", "json:loads", "os.path:join"])
def test_a_name_that_makes_no_model_is_refused_in_one_line(what, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = refused([what], capsys)
    assert "expected" in said or "cannot be read" in said


def test_a_report_of_a_machine_that_is_too_deep_is_refused(tmp_path, capsys):
    (tmp_path / "a.json").write_text("[" * 100_000, encoding="utf-8")
    said = refused(["gpt2", "--machine", str(tmp_path / "a.json")], capsys)
    assert "cannot be read as JSON" in said


def test_model_without_a_config_needs_its_activations_said(capsys):
    tower = ["bench.shared.models:Tower", "--no-checkpointing"]
    assert "--activation-bytes" in refused(tower, capsys)
    assert command.main([*tower, "--activation-bytes", "1MiB"]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--state", "bf16", "--print-args"), "--state bf16; expected an --optim with such a state"),
     (("--quantize", "nf4"), "--quantize nf4; expected --lora with it, for adapters"),
     (("--ema", "host", "--print-args"), "--print-args with --ema; expected none: train has no"),
     (("--fits", "x", "--gpu", "h100"), "--gpu beside --fits; expected none: it has machines"),
     (("--device-mem", "24"), "--device-mem: size 24 is 24 bytes; did you mean '24GiB'?"),
     (("--host-mem", "much"), "--host-mem: size 'much' is not understood"),
     (("--nvme", "/no/folder"), "--nvme /no/folder is no folder here; expected one, or its free"),
     (("--optimiser", "lion"), "--optimiser lion; did you mean --optim?"),
     (("--learning_rate", "1"), "--learning_rate 1; did you mean --lr?"),
     (("--model", "gpt2"), "expected one model")],
)  # fmt: skip
def test_what_is_not_there_yet_is_refused_by_name(flags, said, capsys):
    assert said in refused(["gpt2", *flags], capsys)


@pytest.mark.ci
def test_the_example_of_the_page_fits():
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"^    python -m gemini plan (.+)$", page, re.MULTILINE)
    assert main(["plan", *arguments.split()]) == 0


def test_a_page_of_what_fits_escapes_names_and_gives_its_rows_back():
    rows = [table.FitRow("</script><b>", "LoRA", "h100", 32, 0, 0.5, 1, 2048)]
    page = table.page(rows, "<i>")
    assert "</script><b>" not in page and "<i>" not in page and table.rows_of(page) == rows
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page


@pytest.mark.ci
def test_table_has_the_first_host_that_does_and_the_page_all(config, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "CARD_NAMES", ("rtx4080",))
    monkeypatch.setattr(table, "HOSTS", ((5, 0), (6, 0)))  # of which a host keeps 5
    monkeypatch.setitem(CARDS, "rtx4080", replace(CARDS["rtx4080"], gib=1))
    monkeypatch.setattr("gemini.plan.machine.CONTEXT_BYTES", 824 << 20)
    flags = ["--fits", str(tmp_path), "--seq", "64", "--batch", "1", "--activation-bytes", "1MiB"]
    logging.getLogger("torchao").setLevel(logging.NOTSET)
    assert command.main([str(config), *flags]) == 0
    assert logging.getLogger("torchao").level == logging.ERROR  # its lacks are not the command's
    page = (tmp_path / "what-fits.html").read_text(encoding="utf-8")
    said = json.loads(re.search(r"const rows = (\[.*?\]), cards", page)[1])
    whole = [row["seconds"] for row in said if row["training"] == "all parameters"]
    assert whole[0] is None and whole[1] > 0
    lora = [row["seconds"] for row in said if row["training"] == "LoRA adapters"]
    assert len(said) == 4 and lora[1] < whole[1]
    (row,) = re.findall(r"^\| /.*", (tmp_path / "what-fits.md").read_text(encoding="utf-8"), re.M)[
        :1
    ]
    assert row == f"| {config} | 6 GiB | {whole[1]:.2g} s |"
    assert "http" not in page
