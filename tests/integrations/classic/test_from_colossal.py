"""Names of Colossal-AI: those from here are there, with the signature that users know, and scripts
are rewritten with them."""

import ast
import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from gemini.__main__ import main
from gemini.integrations import classic
from gemini.integrations.classic import hooks
from gemini.integrations.colossalai import put_up
from gemini.migrate import colossal
from tests.integrations.cases import documents
from tests.support import frozen

ROOT = Path(__file__).resolve().parents[3]
TABLE = colossal.names().moved
WRITTEN = colossal.names().written.values()


def found_at(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", TABLE)
def test_every_right_hand_side_is_there(name):
    there = found_at(TABLE[name])
    assert there.__doc__, f"{TABLE[name]} does not say what it is"
    assert name.rpartition(".")[2] in (TABLE[name].rpartition(".")[2], "MemStats")


LINES = (
    "save_checkpoint('xxx.pt', epoch, model)",
    "assert load_checkpoint('xxx.pt', model) == epoch",
    "save_checkpoint('all.pt', epoch, model, optimizer, lr_scheduler)",
    "assert load_checkpoint('all.pt', model, optimizer, lr_scheduler) == epoch",
    "assert ChunkManager.search_chunk_size(model, 64 * 1024**2, 32)",
    *WRITTEN,
)


def test_lines_of_old_documents_run(tmp_path, monkeypatch):
    """And what the page says to write in place of those that do not."""
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {
        "model": model, "optimizer": optimizer, "epoch": 3, "device": torch.device("cpu"),
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }  # fmt: skip
    names |= {name.rpartition(".")[2]: found_at(place) for name, place in TABLE.items()}
    assert WRITTEN
    for line in LINES:
        exec(line, names)


ELSEWHERE = {
    "from colossalai.nn import HybridAdm": "did you mean colossalai.nn.optimizer.HybridAdam?",
    "import colossalai.nn.optimiser": "is no name of the documents",
    "import colossalai.inference": "a server for inference",
    "import colossalai.amp; colossalai.amp.convert_to_apex_amp()": "convert_to_amp with a mode",
    "from colossalai.builder import build_from_config; build_from_config({})": "the classes them",
    "from colossalai.engine.schedule import BaseSchedule\nclass A(BaseSchedule): pass": '"zbv"',
}


@pytest.mark.parametrize("code", ELSEWHERE)
def test_a_name_without_a_door_says_what_is_used_when_it_is_used(code):
    put_up()
    exec("from colossalai.builder import build_from_config", {})  # not by an import
    with pytest.raises((ImportError, NotImplementedError), match=re.escape(ELSEWHERE[code])):
        exec(code, {})


def test_their_modules_have_what_the_table_has_and_no_more(monkeypatch):
    put_up()
    import colossalai.trainer.hooks
    from colossalai.trainer.hooks import LossHook

    assert colossalai.trainer.hooks is hooks and hooks.__spec__.name == hooks.__name__
    assert LossHook is hooks.LossHook
    assert {"Linear", "Lamb", "lr_scheduler", "Linear3D"} < set(dir(colossalai.nn))
    assert not hasattr(colossalai.nn, "Anything")
    monkeypatch.setitem(sys.modules, "colossalai", ModuleType("colossalai"))
    with pytest.raises(ImportError, match="imported already"):
        put_up()


def test_what_is_spawned_meets_by_itself_under_torchrun_too(monkeypatch):
    """torchrun's own variables would have it wait for torchrun's ranks."""
    seen = {}
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(
        torch.multiprocessing, "spawn", lambda run, nprocs: seen.update(os.environ, ranks=nprocs)
    )
    classic.spawn(print, 2)
    assert seen["ranks"] == 2 and not {"TORCHELASTIC_USE_AGENT_STORE", "LOCAL_RANK"} & {*seen}
    assert os.environ["LOCAL_RANK"] == "1"


def pages_of_code():
    code = {}
    for block in documents.read()[0]:
        if "code" in block and "file" not in block:
            code[block["page"]] = code.get(block["page"], "") + block["code"]
    return code


@pytest.mark.parametrize("page", pages_of_code())
def test_a_script_of_the_documents_is_rewritten_with_names_that_are_there(page):
    text, left = colossal.rewritten(pages_of_code()[page])
    assert left == [] and "colossalai" not in re.sub("Colossal-AI", "", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("gemini."):
            for name in node.names:
                assert hasattr(importlib.import_module(node.module), name.name)


SCRIPT = """import os, colossalai
import colossalai.nn as col_nn
from colossalai import nn
from torch.nn import Linear

def launch():
    from colossalai.core import global_context as gpc; import colossalai.utils as u
    u.print_rank_0(f"ä{gpc.config}"); colossalai.launch(config={})
    return col_nn.Linear(3), nn.lr_scheduler.LinearWarmupLR
"""
REWRITTEN = """import os
from gemini.integrations.launch import launch as colossal_launch
from gemini.integrations.classic.layers import Linear as colossal_Linear
from gemini.integrations.schedules import LinearWarmupLR
from torch.nn import Linear

def launch():
    from gemini.integrations.config import global_context as gpc; \
from gemini.integrations.classic import print_rank_0
    print_rank_0(f"ä{gpc.config}"); colossal_launch(config={})
    return colossal_Linear(3), LinearWarmupLR
""".replace("\\\n", "")


def test_names_of_the_script_itself_are_not_hidden():
    assert colossal.rewritten(SCRIPT) == (REWRITTEN, [])
    assert colossal.rewritten(REWRITTEN) == (REWRITTEN, [])


def test_an_import_inside_of_a_function_stays_there():
    inside = "def {}():\n    import colossalai as c\n    c.launch()\n"
    ours = "    from gemini.integrations.launch import launch\n    launch()\n"
    text, left = colossal.rewritten(inside.format("f") + inside.format("g"))
    assert (text, left) == (f"def f():\n{ours}def g():\n{ours}", [])


def test_what_is_left_is_listed_with_its_line_and_stays(tmp_path, capsys):
    path = tmp_path / "train.py"
    lines = (
        "import colossalai", "from colossalai.engine import Engine, BaseGradientHandler",
        "from colossalai.gemini import ChunkManager", "c = ChunkManager(3, pg)",
        "colossalai.launch(); colossalai.amp.convert_to_apex_amp(4)",
    )  # fmt: skip
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert main(["from-colossal", str(path)]) == 1
    shown = capsys.readouterr()
    assert "+from gemini.integrations.classic import BaseGradientHandler\n" in shown.out
    assert "import colossalai\n" in path.read_text(encoding="utf-8")
    assert main(["from-colossal", str(path), "--write"]) == 1
    said = capsys.readouterr()
    assert said.err == shown.err and "5 lines changed" in said.out
    for text in (
        "train.py:2: colossalai.engine.Engine has no place", "train.py:5: colossalai.amp",
        "train.py:4: in place of ChunkManager(3, pg): chunk_manager = init_chunk",
    ):  # fmt: skip
        assert text in said.err
    assert path.read_text(encoding="utf-8").startswith(
        "import colossalai\nfrom gemini.integrations.launch import"
    )
    path.write_text("import (", encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["from-colossal", str(path)])
    assert "train.py" in capsys.readouterr().err


def test_the_page_shows_what_the_command_does():
    block = re.search(
        r"```diff\n(.*?)```",
        (ROOT / "docs/from-colossal.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    sides = ["".join(re.findall(rf"^[{s} ](.*\n)", block[1], re.MULTILINE)) for s in ("-", "+")]
    assert colossal.rewritten(sides[0]) == (sides[1], [])


def test_signatures_are_those_that_users_know():
    assert frozen.signatures() == frozen.SIGNATURES.read_text(encoding="utf-8").splitlines()


def test_the_engine_imports_no_door():
    """Read from the source, so that no import inside a function is missed."""
    packages = ("gemini", "optim", "io", "kernels_triton")
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    doors, above = ROOT / "gemini/integrations", ROOT / "gemini/train"  # a run, over Trainer's door
    checked = 0
    for path in paths:
        # a table of names, which are imported on first use: `test_pure` imports it without torch
        named = path == ROOT / "gemini/__init__.py"
        if {doors, above} & {*path.parents} or named or path == ROOT / "gemini/__main__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            own = [name for name in names if not name.startswith("transformers")]  # has its own
            assert not any("integrations" in name for name in own), path
            checked += bool(names)
    assert checked > 500


def test_optional_packages_are_imported_by_their_own_file_alone():
    """Only where they are used, so that no other door asks for them."""
    own = {
        "peft": {"integrations/plugins/lora.py", "checkpoint/adapters.py", "samplers/merged.py"},
        "safetensors": {"samplers/files.py"},
        "accelerate": {"integrations/accelerate.py"},
        "transformers": {"integrations/transformers.py", "parallel/shared_sequence.py"},
        "torchao": {"integrations/plugins/float8.py"},
        "trl": set(),
    }
    rooms = (ROOT / "gemini" / room for room in ("integrations", "parallel", "samplers"))
    files = [path for room in rooms for path in room.rglob("*.py")]
    files.append(ROOT / "gemini/checkpoint/adapters.py")
    paths = {str(path.relative_to(ROOT / "gemini")): path for path in files}
    assert {name for names in own.values() for name in names} <= paths.keys()
    for name, path in paths.items():
        tops = {module.partition(".")[0] for module in _imported(path)}
        for package, allowed in own.items():
            assert package not in tops or name in allowed, path
        assert "lightning" not in tops or name.startswith("integrations/lightning/"), path
        assert "pytorch_lightning" not in tops, path


def _imported(path):
    """Modules that a file imports, wherever in it; none that is relative."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def test_lora_without_peft_names_the_extra(monkeypatch):
    from gemini.integrations import Booster

    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install peft"):
        Booster().enable_lora(nn.Linear(2, 2), lora_config=object())
    assert 'lora = ["peft>=' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
