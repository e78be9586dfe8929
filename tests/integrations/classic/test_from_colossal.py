"""docs/from-colossal.md: every right-hand side is there, with the signature that users know."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import frozen

ROOT = Path(__file__).resolve().parents[3]
TABLE = frozen.colossal()
WRITTEN = re.findall(
    r"^\| `\w+ = .+` \| `(\w+ = .+)` \|$",
    (ROOT / "docs/from-colossal.md").read_text(),
    re.MULTILINE,
)


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


def test_signatures_are_those_that_users_know():
    assert frozen.signatures() == frozen.SIGNATURES.read_text().splitlines()


def test_the_engine_imports_no_door():
    """Read from the source, so that no import inside a function is missed."""
    packages = ("gemini", "optim", "io", "kernels_triton")
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    doors, above = ROOT / "gemini/integrations", ROOT / "gemini/train"  # a run, over Trainer's door
    checked = 0
    for path in paths:
        if {doors, above} & {*path.parents} or path == ROOT / "gemini/__main__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
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
        "peft": {"plugins/lora.py", "adapters.py"},
        "safetensors": {"adapters.py", "plugins/lora.py"},
        "accelerate": {"accelerate.py"},
        "transformers": {"transformers.py", "parallel/shared_sequence.py"},
        "torchao": {"plugins/float8.py"},
        "trl": set(),
    }
    doors = ROOT / "gemini/integrations"
    for path in doors.rglob("*.py"):
        name = str(path.relative_to(doors))
        tops = {module.partition(".")[0] for module in _imported(path)}
        for package, allowed in own.items():
            assert package not in tops or name in allowed, path
        assert "lightning" not in tops or name.startswith("lightning/"), path
        assert "pytorch_lightning" not in tops, path


def _imported(path):
    """Modules that a file imports, wherever in it; none that is relative."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def test_lora_without_peft_names_the_extra(monkeypatch):
    from gemini.integrations import Booster

    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install peft"):
        Booster().enable_lora(nn.Linear(2, 2), lora_config=object())
    assert 'lora = ["peft>=' in (ROOT / "pyproject.toml").read_text()
