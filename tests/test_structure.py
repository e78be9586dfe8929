"""Imports run down: rooms import each other in one direction, types included."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"gemini": ROOT, "optim": ROOT, "nvme": ROOT / "io", "kernels_triton": ROOT}
TREES = ("bench", "gemini", "optim", "io", "kernels_triton", "tests")
MOST_MODULES = 12  # of one folder, beside its __init__

MODULES = {
    ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
    for name, base in PACKAGES.items()
    for path in (base / name).rglob("*.py")
}


def folder_of(module):
    is_folder = MODULES[module].name == "__init__.py"
    return module if is_folder else module.rpartition(".")[0]


HAVE_FOLDERS = {folder_of(module).rpartition(".")[0] for module in MODULES}


def room_of(module):
    """Its folder; a file beside folders is a room of its own, what a folder shows too."""
    folder = folder_of(module)
    if folder not in HAVE_FOLDERS:
        return folder
    return f"{folder}.__init__" if folder == module else module


def imported(module):
    """Modules of ours that one imports, wherever the import stands."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = folder_of(module).split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for name in node.names:
                inner = f"{base}.{name.name}"
                if inner in MODULES or base in MODULES:
                    yield inner if inner in MODULES else base


def arrows():
    found = defaultdict(set)
    for module in MODULES:
        for other in imported(module):
            if room_of(other) != room_of(module):
                found[room_of(module)].add(room_of(other))
    return found


def cycle_in(arrows):
    """Rooms on one, the first again at its end; None where there is none."""
    done, way = set(), []

    def walk(room):
        if room in way:
            return [*way[way.index(room) :], room]
        if room in done:
            return None
        way.append(room)
        for other in sorted(arrows.get(room, ())):
            found = walk(other)
            if found:
                return found
        way.pop()
        done.add(room)
        return None

    return next((found for room in sorted(arrows) if (found := walk(room))), None)


def test_a_cycle_is_found():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "d": {"c"}}) is None
    assert cycle_in({"a": {"b"}, "b": {"c", "d"}, "d": {"b"}}) == ["b", "d", "b"]


def test_rooms_import_each_other_in_one_direction():
    found = arrows()
    assert len(found) > 40 and "gemini.runtime.memory" in found["gemini.runtime.step"]
    assert cycle_in(found) is None


def test_nothing_below_the_engine_knows_it():
    engine = "gemini.runtime.engine"
    below = {module for module in MODULES if module.startswith("gemini.runtime.")} - {engine}
    assert len(below) > 40
    assert [module for module in sorted(below) if engine in imported(module)] == []


@pytest.mark.parametrize("tree", TREES)
def test_a_folder_has_few_files(tree):
    folders = [ROOT / tree, *(path for path in (ROOT / tree).rglob("*") if path.is_dir())]
    sizes = {
        str(folder.relative_to(ROOT)): sum(f.name != "__init__.py" for f in folder.glob("*.py"))
        for folder in folders
    }
    assert {name: size for name, size in sizes.items() if size > MOST_MODULES} == {}
