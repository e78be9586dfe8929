"""Bars of the step and its rooms, as `python -m tests.support.spine` counts them: they only fall.

Each row has at most what it has today; who makes one smaller lowers it. Beside it stands what is
asked. A row that needs more for something that is worth it says so here.
"""

import ast
import inspect
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import gemini
from gemini import api, optim
from tests.support import spine

ROOT = Path(__file__).parents[1]

# Row: (at most, asked). What was asked was asked beside the figures of 26 November: 133 calls of a
# block (61, 31, 15, 27), 188 on a device in 31 files, 19 types, 128 classes (17), 8554 and 10 316
# lines of 112 and 126 files run, 206 loaded, 79 869 tokens in 12 454 lines. Since then signals wait
# during each block's update (11 calls a block), and a save has an end (1). On a device, 188 was a
# serial step: a tail, which was refused there, has gates and what they let go (17). The five lines
# run 1057 lines more: homes that follow measurements, shared memory, forecasts, hints about
# misspelt arguments, casts. Wrapping asks for the speeds that the doctor kept: 41
# lines. On a device a tail has a stream of its own, gathers have one, launch tables are kept, and
# norms of Lamb are kernels: 2900 tokens, two classes. Activations may leave the device: four lines
# ask whether they do, the ledger counts their staging, and the planner says how many stay (190
# lines that every wrapping runs). Spans that are updated in backward, with second versions in host
# memory: 3900 tokens, six classes, and a file of events that reducers know, too. Layers may be
# computed again in backward: traces note what each saves, forecasts and the planner's search know
# numbers of them (140 lines that every wrapping runs), and two files of 630 lines are four. One
# folder's name is that folder (one line), and work may come behind copies and what was launched. A
# folder's name may be another on every host (24 lines), which ranks do not compare (3 more).
# What is saved in files counts in the budget of writes, a failed rank tells the others, and a
# forward refuses a transform of torch.func around it (6 lines that every wrapping with files runs).
# Of what fits nowhere the planner knows the number of layers with which least lacks, and a disk's
# error in backward is told to all (4 lines). A forward that nobody announced may be a decode step,
# and a gradient's buffer begins where it arrives (46 lines).
# A hook of the user may have reduced gradients, model data may be parked until the loop resumes,
# and a frozen stack of experts has rows that are read alone (29 lines of the five, 300 tokens).
# Updates on every path can mark what they change, and gradients can have one order at any number of
# ranks (75 lines of the five that ask whether they do, 1400 tokens, two classes). Parts of shards
# are read from files (15 lines). Doors ask for this process's device, too, and a function that
# passes options on takes their groups (3 lines).
# Muon's blocks take turns in staging, and a site knows a product that is symmetric (34 tokens).
# On a device early updates and a tail go together, a host waits once for several spans that leave,
# and wrapping asks which half of an update no rule is against: 250 tokens in 46 lines, of which the
# five lines run 23. A price says what is early, and goes on (2 lines).
# Masters and parked data leave a device through pinned memory, which is on its NUMA node and, of
# gradients, there before a backward (1188 tokens, a class, 8 lines of the five).
# Copies come behind several others, so that what is brought to a block waits for what left its set
# and not for all that the device was given, and weights of before are saved in pinned memory, each
# on its own (31 tokens, 3 lines; 9 lines of the five).
# An engine is no record that its wings take: `Sharding`, `Passes`, `Weights`, `UpdateOverlap` and
# `GradientCycle` stand for it, three files more, and each wing names what it takes (209 lines of
# the five that are signatures and arguments, 37 tokens).
# Wrapping and gemini plan begin with the same functions, which every wrapping runs (17 lines).
# Copies to another dtype wake no team of threads either, and a load zeroes what it leaves unset
# (110 tokens in 7 lines, of which the five lines run 1).
# The plan in use, with what carries it out, is one word that wings take: 24 lines of the five less.
# Verbs of their owners change whether a graph is open, whether ranks meet first and whether a layer
# is visited (20 lines of the five, 86 tokens). Homes that cannot rise stay (5 lines).
BARS = {
    "block": (90, 75),
    "block, step": (34, 25),
    "block, store": (24, 20),
    "block, update": (15, 15),
    "block, engine": (17, 15),
    "block, pools": (25, 25),  # transfers and updates: the issue counts one thread
    "device": (160, 140),
    "device, pools": (4, 4),
    "device, files": (27, 15),
    "device, waits of step()": (0, 0),  # 3 a block
    "types": (18, 15),
    "classes": (101, 85),
    "protocols": (7, 8),
    "five lines, resident: lines": (10_060, 7600),
    "five lines, resident: files": (131, 80),
    "five lines, nvme: lines": (11_791, 8600),
    "five lines, nvme: files": (146, 85),
    "five lines: files loaded": (139, 120),
    "save: files beyond the step": (24, 30),  # 63 files and 2859 lines once
    "save: lines beyond the step": (2343, 1600),
    "load: files beyond the step": (26, 30),
    "load: lines beyond the step": (3017, 1600),
    "tokens": (80_626, 58_000),
    "lines": (12_360, 9000),
}


@cache
def measured():
    return spine.in_own_process()


@pytest.mark.parametrize("row", BARS)
def test_a_row_has_at_most_its_bar(row):
    found = measured()
    assert found["rows"].keys() == BARS.keys()
    assert found["rows"][row] <= BARS[row][0], found["parts"].get(row)


def test_a_folder_that_nobody_knows_is_a_room_of_the_step():
    owners = {
        "optim/state/slabs.py": "step",
        "gemini/of_tomorrow/flow.py": "step",
        "optim/update/of_tomorrow.py": "update",
        "gemini/runtime/schedule/planning.py": "engine",
        "gemini/ddp.py": "engine",
    }
    assert {path: spine.owner_of(path) for path in owners} == owners
    assert sum(map(len, spine.rooms().values())) > 20


# What training needs. All else in `gemini/` hangs on it, and a new room does, too, unless it is
# named here.
SPINE = {
    *("__init__", "arguments", "callers", "chunk", "comm", "ddp", "digests", "dtypes"),
    *(
        "kept_speeds",
        "kernels_triton",
        "memtracer",
        "module_face",
        "numa",
        "nvme",
        "optim",
        "options",
    ),
    *("pages", "placement", "ranges", "runtime", "saved_names", "settings", "strangers"),
    *("tickets", "trees", "units"),
}
INSIDE = ("gemini.optim.matrices", "gemini.runtime.pipeline")  # rooms of rooms that it needs not


# What doors take from the spine beside public names. 20 were asked for: the last two say what is
# wrong with arguments, as the front door says it
API = {
    *("TieredOptimizer", "Scaling", "asked_norm", "show_steps"),
    *("fill_empty", "full_parameters", "map_tensors"),
    *("Placement", "parse_placement", "Trace", "ChunkConfiguration", "as_precision"),
    *("rank", "world_size", "this_device", "rest_at_exit", "Ticket"),
    *("by_name", "passes_on", "takes_fields"),
    *("check_passed_on", "nearest"),
}


def taken_from_the_spine(path):
    """(module, name) of every import in a door's file, wherever it stands, from a room of the spine
    by another name than the public ones; the name is None where a module is imported."""
    folder = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [(alias.name, None) for alias in node.names if alias.name != "gemini"]
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            found = [(module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in found:
            top, _, inside = module.partition(".")
            room = inside.partition(".")[0] or (name if module == "gemini" else "")
            public = {"gemini": gemini.__all__, "gemini.optim": optim.__all__}.get(module, ())
            if top in ("gemini", "optim", "nvme", "kernels_triton") and name not in public:
                yield from [(module, name)][: top != "gemini" or room in {*SPINE, "api"}]


DOORS = sorted((ROOT / "gemini/integrations").rglob("*.py"))


def test_doors_take_from_the_spine_what_the_api_has(tmp_path):
    taken = {path: set(taken_from_the_spine(path)) for path in DOORS}
    assert len(taken) > 40
    others = {
        str(path.relative_to(ROOT)): sorted(map(str, names))
        for path, found in taken.items()
        if (names := {one for one in found if one[0] != "gemini.api"})
    }
    assert others == {}
    used = {name for found in taken.values() for _, name in found}
    assert used == {*api.__all__} == API


def test_an_import_from_inside_of_the_spine_is_found(tmp_path):
    door = ROOT / "gemini/integrations/classic/of_tomorrow.py"
    source = (
        "import gemini, gemini.chunk.layout\nfrom optim.base import TieredOptimizer\n"
        "from gemini import GeminiDDP, ddp\nfrom ...optim import LossScale, binding\n"
        "def late():\n    from gemini.api import rank\n    from gemini.checkpoint import save\n"
        "    from ..parts import accept\n    from gemini.ddp import GeminiDDP\n"
    )
    path = tmp_path / door.relative_to(ROOT)
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "ROOT", tmp_path)
        assert set(taken_from_the_spine(path)) == {
            ("gemini.chunk.layout", None), ("optim.base", "TieredOptimizer"), ("gemini", "ddp"),
            ("gemini.optim", "binding"), ("gemini.api", "rank"), ("gemini.ddp", "GeminiDDP"),
        }  # fmt: skip


def test_the_api_is_imports_and_a_line_for_each_name():
    tree = ast.parse(inspect.getsource(api))
    doc, *statements, names = tree.body
    assert all(isinstance(one, ast.ImportFrom) for one in statements)
    assert isinstance(names, ast.Assign) and ast.literal_eval(names.value) == sorted(API)
    lines = [line.split(maxsplit=1) for line in ast.get_docstring(tree).splitlines()]
    told = {line[0] for line in lines if len(line) == 2}
    assert isinstance(doc, ast.Expr) and told >= API


def digests_without(folder, *modules):
    program = ROOT / "tests/support/loops/without.py"
    done = subprocess.run(
        [sys.executable, program, folder, *modules],
        check=True, capture_output=True, encoding="utf-8",
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'io'}"},
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.ci
def test_training_runs_without_any_room_that_is_not_the_spines(tmp_path):
    inside = (ROOT / "gemini").iterdir()
    rooms = {path.stem for path in inside if path.suffix in ("", ".py")} - {"__pycache__"}
    assert rooms >= SPINE and len(rooms - SPINE) > 15
    others = [f"gemini.{room}" for room in sorted(rooms - SPINE)]
    found = digests_without(tmp_path, *others, *INSIDE)
    assert len(found) == 7 and found == digests_without(tmp_path)


SOURCE = '''
def rule(a):  # of one line
    """A docstring is a token."""
    return f"{a} of {a + 1}"
'''


def test_tokens_are_those_of_code_in_texts_too():
    assert spine.tokens(SOURCE) == 9
    assert spine.tokens("x = '''\nwords of two lines\n'''\n") == 3
    assert spine.tokens("x = 'y = 1'\n") == 3
    assert spine.tokens("x = '''\ny = 1\n'''\n") == 6


def test_a_call_of_generated_code_is_its_modules():
    def path_of(source, name):
        names = {"__name__": spine.__name__}
        exec(source, names)
        return spine.path_of(names[name].__code__, names)

    own = {**vars(spine)}
    with_methods = spine.Calls.__init__.__code__
    assert with_methods.co_filename == "<string>" and spine.path_of(with_methods, own) is None
    assert path_of("def update(): pass", "update") is None  # tests are no source
    from gemini import tickets

    made = compile("def update(): pass", "<made>", "exec").co_consts[0]
    assert spine.path_of(made, vars(tickets)) == "gemini/tickets.py"
