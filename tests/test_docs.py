"""README.md and docs/: what they show runs, and what they name exists."""

import gc
import json
import os
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import nvme
from gemini import HybridAdam
from gemini.plan import table
from tests.support.model_folder import make_folder
from tests.support.one_thread import one_thread as one_thread

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"python -m ((?:bench|gemini)[\w.]*)([^\n`#]*)")


def python_blocks(page):
    """Blocks that are run in order; those with `file=` are files."""
    found = FENCE.findall((ROOT / page).read_text(encoding="utf-8"))
    assert found, f"{page} has no python block"
    return [code for info, code in found if "file=" not in info]


def files_of(page):
    """File name to text, of blocks that say `file=NAME`."""
    found = FENCE.findall((ROOT / page).read_text(encoding="utf-8"))
    return {info.split("file=")[1].strip(): code for info, code in found if "file=" in info}


def run_blocks(page, names, replaced=(), last=None):
    for number, code in enumerate(python_blocks(page)[:last]):
        for old, new in replaced:
            code = code.replace(old, new)
        exec(compile(code, f"{page}, block {number + 1}", "exec"), names)
    return names


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """The current folder is a temporary one; skips where that is in RAM."""
    try:
        nvme.check_folder(tmp_path)
    except nvme.FolderError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.ci
def test_the_tutorial_runs_from_top_to_bottom(on_disk, capsys):
    names = run_blocks("docs/tutorial.md", {"__name__": "tutorial"})
    assert names["on_disk"] == names["resident"] == names["under_budget"]
    assert "too small" in capsys.readouterr().out
    assert (on_disk / "timeline.json").stat().st_size > 1000
    names.clear()  # parameters that are in files go with their module
    gc.collect()
    assert list(on_disk.glob("*.blocks")) == []


@pytest.mark.parametrize("page", ["docs/reports.md", "docs/extending.md", "docs/from-colossal.md"])
def test_the_blocks_of_a_page_run(page, on_disk):
    names = run_blocks(page, {"__name__": "page"})
    names.clear()
    gc.collect()
    assert list(on_disk.glob("*.blocks")) == []


@pytest.mark.ci
def test_blocks_that_need_a_model_run_with_a_small_one(on_disk):
    """Of pages whose models are the hub's or a folder's; Lightning's has tests of its own."""
    for package in ("bitsandbytes", "peft", "transformers"):
        pytest.importorskip(package)
    folder = str(make_folder(on_disk / "folder", hidden_size=64))
    replaced = [("meta-llama/Llama-3.2-3B", folder), ("/fast/disk", str(on_disk))]
    for page, last in (("docs/frozen.md", None), ("docs/trainers.md", 3), ("docs/update.md", None),
                       ("docs/long-sequences.md", None)):  # fmt: skip
        names = run_blocks(page, {"__name__": "page"}, replaced, last)
        names.clear()
        gc.collect()
    assert list(on_disk.glob("*.blocks")) == []


def test_what_explain_prints_is_what_the_page_shows(on_disk):
    """Word for word, but for the sizes."""
    page = (ROOT / "docs/reports.md").read_text(encoding="utf-8")
    shown = re.search(r"^    7\.weight.*?\n\n", page, re.DOTALL | re.MULTILINE)[0]
    blocks = python_blocks("docs/reports.md")
    names = {}
    for code in blocks[:2]:
        exec(code, names)
    assert names["text"].split() == shown.split()
    names["optimizer"].close()


@pytest.mark.ci
def test_the_tutorials_script_runs_under_torchrun(on_disk):
    losses = {}
    (on_disk / "train.py").write_text(files_of("docs/tutorial.md")["train.py"], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")])}
    for ranks in (1, 2):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "train.py",
        ]  # fmt: skip
        done = subprocess.run(
            command, env=environment, cwd=on_disk, capture_output=True, text=True, encoding="utf-8"
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("gemini optimizer") == 1  # on rank 0
        losses[ranks] = re.search(rf"{ranks} ranks: (\S+) to (\S+)", done.stdout).groups()
    assert float(losses[2][1]) < float(losses[2][0])
    assert list(on_disk.glob("*.blocks")) == []


def sides(page):
    """The code before and after, of the page's first block of `diff`."""
    block = re.search(
        r"^```diff\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    lines = block[1].splitlines()
    return ["\n".join(line[1:] for line in lines if line[:1] in (sign, " ")) for sign in "-+"]


def test_both_sides_of_the_readmes_diff_train_to_the_same_loss(on_disk):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ids = torch.arange(16).reshape(2, 8)
    losses = []
    for code in sides("README.md"):
        torch.manual_seed(0)
        names = {
            "torch": torch,
            "model": transformers.GPT2LMHeadModel(config),
            "loader": [{"input_ids": ids, "labels": ids}] * 5,
        }
        exec(compile(code.replace("/fast/disk", str(on_disk)), "README.md", "exec"), names)
        losses.append(names["loss"].item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)  # bf16
    names["optimizer"].close()


def test_the_readme_is_short_and_names_the_two_commands_of_a_contributor():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    commands = text.partition("## Contribute")[2]
    assert re.findall(r"^    (make \w+)", commands, re.MULTILINE) == ["make demo", "make test"]


def test_the_two_commands_of_a_contributor_do_what_the_readme_says():
    """Each sets up first; the demo trains on a CPU, and the tests are pytest beside lint."""
    made = {}
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")  # of the make that runs this test
    env = {name: value for name, value in os.environ.items() if name not in outer}
    for name, line in re.findall(
        r"`?make (\w+) +# (.*)", (ROOT / "README.md").read_text(encoding="utf-8")
    ):
        done = subprocess.run(
            ["make", "--dry-run", "--always-make", name, "TORCH=torch"],
            cwd=ROOT, text=True, encoding="utf-8", capture_output=True, env=env,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made[name] = line, done.stdout
    said, commands = made["demo"]
    assert "sets up .venv, then trains" in said
    assert commands.index("venv .venv") < commands.index("-e .[example]")
    assert commands.rstrip().endswith(".venv/bin/python -m bench.demo")
    said, commands = made["test"]
    assert "sets up what is missing, and runs the tests" in said
    assert commands.index("-e .[example,test,docs]") < commands.index("-m pytest -q")
    assert "ruff check ." in commands


REPLACES = (
    "README.md",
    "docs/tutorial.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("from-*.md")),
)


@pytest.mark.parametrize("page", REPLACES)
def test_a_line_in_place_of_torchs_adamw_states_its_decay(page):
    """HybridAdam's is 0.0, as Colossal-AI's, and torch's 0.01."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"^```(?:python|diff).*?^```$", text, re.DOTALL | re.MULTILINE))
    made = re.findall(r"HybridAdam\(.*?\)$", blocks, re.DOTALL | re.MULTILINE)
    assert made or page in ("docs/from-accelerate.md", "docs/from-colossal.md")
    assert [line for line in made if "weight_decay=" not in line] == []
    if page.startswith("docs/from-"):
        for subject in ("dtype|bf16", "decay", "keys"):
            assert re.search(subject, text), subject


def test_the_optimizer_that_fsdps_page_writes_updates_as_the_one_it_replaces():
    weights = []
    for code in sides("docs/from-fsdp2.md"):
        (line,) = re.findall(r"^optimizer = .*$", code, re.MULTILINE)
        model = torch.nn.Linear(8, 8)
        torch.nn.init.ones_(model.weight)
        names = {"torch": torch, "model": model, "HybridAdam": HybridAdam}
        exec(line, names)
        for _ in range(3):
            (model.weight * torch.arange(8.0)).sum().backward()
            names["optimizer"].step()
        weights.append(model.weight.detach() - 1)
    assert torch.allclose(*weights, rtol=1e-4, atol=0.0)  # without decay 1 % off


def test_what_the_readme_says_of_its_table_holds():
    rows = {
        r["name"]: r
        for r in json.loads((ROOT / "bench/results/ways.json").read_text(encoding="utf-8"))["rows"]
    }
    assert rows["nvme"]["train_loss_last"] == rows["resident"]["train_loss_last"]
    assert rows["nvme"]["val_loss"] == rows["resident"]["val_loss"]


def test_no_measured_figure_stands_outside_the_readmes_tables():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!-- table .*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```|`[^`\n]*`|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    unit = r"\d\s?(?:ms|s|seconds?|minutes?|[KMGT]i?B|GB/s|%|times)\b"
    assert re.findall(unit, text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_every_named_file_is_there(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    for target in re.findall(r"`((?:bench|docs|tests|gemini|optim|io|examples)/[\w/.-]+)`", text):
        if page.parent.name != "adr" and page.stem != "peers":  # of what is not, and of others
            assert (ROOT / target).exists(), target


def test_the_page_of_what_fits_has_the_rows_of_the_table():
    """And its script asks for what is on the page."""
    text = (ROOT / "docs/what-fits.html").read_text(encoding="utf-8")
    title = re.search(r"</h1>\s*<p>(.*?)</p>", text)[1]
    shown = table.rows_of(text)
    assert table.markdown(shown, title) == (ROOT / "docs/what-fits.md").read_text(encoding="utf-8")
    assert table.page(shown, title) == text
    rows = [line for line in table.markdown(shown, title).splitlines() if " GiB" in line]
    for line in rows:
        seconds = [float(cell[:-2]) for cell in line.strip(" |").split(" | ")[2:]]
        for i, j in pairwise(range(len(seconds))):
            smaller, larger = table.CARD_NAMES[i], table.CARD_NAMES[j]
            has_slower_link = table.CARDS[larger].pcie < table.CARDS[smaller].pcie
            assert seconds[j] <= seconds[i] or has_slower_link, line
    assert len(rows) == 2 * len(table.MODELS)
    asked = re.findall(r"getElementById\(\"(\w+)\"\)", text)
    assert asked and all(f'id="{name}"' in text for name in asked)
    assert "://" not in text


def test_the_sites_contents_list_every_document():
    listed = set(
        re.findall(
            r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert there <= listed


def test_pages_for_users_are_at_most_18_thousand_words():
    """Without failures.md, which is searched, and what is generated."""
    contents = (
        (ROOT / "mkdocs.yml")
        .read_text(encoding="utf-8")
        .partition("\nnav:")[2]
        .partition("Developers")[0]
    )
    pages = [ROOT / "docs" / name for name in re.findall(r"([\w/-]+\.md)$", contents, re.MULTILINE)]
    pages = [page for page in pages if page.stem not in ("index", "failures", "what-fits")]
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *pages))
    text = re.sub(r"<!-- table .*?<!-- end -->", "", text, flags=re.DOTALL)
    assert len(pages) > 15 and len(text.split()) <= 18_000, len(text.split())


def test_commands_of_the_readme_are_installed():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^    pip install \"?\.", text, re.MULTILINE)
    text = re.sub(r"<!-- table .*?<!-- end -->", "", text, flags=re.DOTALL)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = set(project["tool"]["setuptools"]["packages"])
    assert {module.partition(".")[0] for module, _ in COMMAND.findall(text)} <= packages


def test_every_make_target_that_is_named_exists():
    targets = re.findall(
        r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for page in PAGES:
        for name in re.findall(
            r"(?:`|^    )make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert name in targets, f"{page.name}: make {name}"


# Every command in one process: most of each is the import of torch.
HELPS = """
import contextlib, io, json, runpy, sys
helps = []
for module, *rest in json.loads(sys.argv[1]):
    sys.argv = [module, *rest, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise SystemExit(f"{module} {rest}: {end.code}")
    helps.append(said.getvalue())
print(json.dumps(helps))
"""


@pytest.mark.ci
def test_every_command_that_is_shown_knows_its_flags():
    shown = {}
    for page in PAGES:
        for module, rest in COMMAND.findall(page.read_text(encoding="utf-8")):
            command = (module, *rest.split()[:1]) if module == "gemini" else (module,)
            shown.setdefault(command, set()).update(re.findall(r"--[\w-]+", rest))
    assert {("gemini", "doctor"), ("gemini", "run"), ("gemini", "plan")} <= shown.keys()
    done = subprocess.run(
        [sys.executable, "-c", HELPS, json.dumps(list(shown))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")])},
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for (command, flags), said in zip(shown.items(), json.loads(done.stdout), strict=True):
        for flag in flags:
            assert re.search(rf"{flag}\b", said), f"python -m {command} has no {flag}"


def test_every_test_that_security_names_is_there():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8")))
    there = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    assert len(named) > 15
    assert [name for name in sorted(named) if f"def {name}(" not in there] == []
