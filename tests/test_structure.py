"""Imports run down: rooms import each other in one direction, types included."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import gemini
from bench.host import house
from tests.support.unordered import walks_of_sets

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "gemini": ROOT / "gemini",
    "gemini.optim": ROOT / "optim",
    "gemini.nvme": ROOT / "io/nvme",
    "gemini.kernels_triton": ROOT / "kernels_triton",
}
TOPS = {"gemini", "optim", "nvme", "kernels_triton"}  # with their short names
TAKE_NAMES = {"getattr", "setattr", "hasattr", "delattr", "patch", "object"}
MOST_PRIVATE_USES = 10  # of our packages, in tests and benches

MODULES = {
    ".".join((name, *path.relative_to(base).with_suffix("").parts)).removesuffix(".__init__"): path
    for name, base in PACKAGES.items()
    for path in base.rglob("*.py")
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
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
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
                if base == "gemini" and name.name in gemini.__all__:  # a table of names
                    inner = getattr(getattr(gemini, name.name), "__module__", inner)  # its home
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
    assert len(found) > 40 and "gemini.runtime.memory.files" in found["gemini.runtime.step.views"]
    assert cycle_in(found) is None


def test_nothing_below_the_engine_knows_it():
    engine = "gemini.runtime.engine"
    below = {module for module in MODULES if module.startswith("gemini.runtime.")} - {engine}
    assert len(below) > 40
    assert [module for module in sorted(below) if engine in imported(module)] == []


def test_a_class_has_its_name_alone():
    """A reader who looks for a class by its name finds one."""
    homes = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
    assert len(homes) > 400
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def imports_of(path):
    """Modules that a file imports, wherever the import stands, with the names that it takes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_no_bench_imports_tests():
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "bench").rglob("*.py"))
        for name in imports_of(path)
        if name.split(".")[0] == "tests"
    ]
    assert found == []


def test_what_benches_and_tests_share_knows_neither():
    shared = sorted((ROOT / "bench/shared").glob("*.py"))
    names = {name for path in shared for name in imports_of(path)}
    assert len(names) > 10
    others = [name for name in names if name.split(".")[0] in ("bench", "tests")]
    assert [name for name in others if not name.startswith("bench.shared.")] == []


def test_no_test_imports_another():
    statement = re.compile(r"^\s*(?:from|import)\s+tests\.[\w.]*\btest_\w+", re.MULTILINE)
    assert statement.search("    from tests.gemini.test_units import align_up\n")
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert [str(path) for path in files if statement.search(path.read_text(encoding="utf-8"))] == []


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(tree):
    """What a module names with one underscore: functions, classes, globals, attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found = node.id
        elif is_own(node) and isinstance(node.ctx, ast.Store):
            found = node.attr
        else:
            continue
        if is_private(found):
            yield found


def is_own(node):
    """Whether it is an attribute of self or cls."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return own and node.value.id in ("self", "cls")


def called(node):
    """The last name of what a call calls."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def private_uses(tree, names):
    """(line, name) of accesses to what others name with an underscore: `x._name`, imports from our
    packages, and strings for `getattr`, `setattr` and patches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_own(node):
            found = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in TOPS:
            found = [name.name for name in node.names]
        elif isinstance(node, ast.Call) and called(node) in TAKE_NAMES:
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            found = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
        else:
            continue
        yield from ((node.lineno, name) for name in found if is_private(name) and name in names)


def test_private_uses_are_found():
    names = set(
        private_names(ast.parse("_a = 1\nclass _B:\n  def _c(self):\n    self._d = e._f\n"))
    )
    assert names == {"_a", "_B", "_c", "_d"}
    used = "from optim.x import _a\nfrom torch import _B\ny._c\nself._d\npatch('y._d')\nz._f\n"
    found = [name for _, name in private_uses(ast.parse(used), names)]
    assert sorted(found) == ["_a", "_c", "_d"]


def test_tests_and_benches_ask_by_public_names():
    names = {
        name
        for path in MODULES.values()
        for name in private_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(names) > 500
    found = []
    for path in [*(ROOT / "bench").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        source = ast.parse(path.read_text(encoding="utf-8"))
        uses = private_uses(source, names - set(private_names(source)))  # its own are its own
        found += [f"{path.relative_to(ROOT)}:{line} {name}" for line, name in uses]
    assert len(found) < MOST_PRIVATE_USES, "\n".join(sorted(found))


# What the house is now, each at most; who makes one smaller lowers it. Asked are 0 protocols, 20
# reaches, no small file, functions of 80 lines and signatures of 14
LONE_PROTOCOLS, REACHES, SMALL_FILES = 6, 48, 23
LARGEST_FILE, LONGEST_FUNCTION, WIDEST_SIGNATURE = 600, 85, 23


def test_a_protocol_has_two_implementers():
    alone = {name: found for name, found in house.protocols().items() if len(found) < 2}
    assert len(house.protocols()) > 20 and len(alone) <= LONE_PROTOCOLS, alone


def test_reaches_are_found():
    tree = ast.parse("import m\na.b.c.d\nself.a.b.c\nself.a.b.c.d()\nm.a.b.c.d\n")
    assert [text for _, text in house.reaches(tree)] == ["a.b.c.d", "self.a.b.c.d"]


def test_nobody_reaches_two_deep():
    found = [
        (source.path, *reach) for source in house.sources() for reach in house.reaches(source.tree)
    ]
    assert len(found) <= REACHES, found


# What an engine's wings may take of it: five words each, but for as many functions as there are
# today (ADR 0013). What several wings share changes by its own verbs
WORDS = {
    *("Sharding", "Passes", "Weights", "UpdateOverlap", "GradientCycle", "EngineEvents"),
    *("PlanInUse", "Planning", "ShardStorage", "StatefulTensorMgr", "MemoryLedger", "Sampler"),
    *("Reducer", "Meetings", "Gradients", "MovingHomes", "Calls", "ControlVector", "Backend"),
}
MOST_WORDS, WIDE_TAKERS = 5, 1
SHARED = {
    *("sharding", "passes", "weights", "overlap", "cycle", "engine"),
    *("planning", "reducer", "save", "manager", "sampler", "ledger", "meetings", "calls"),
}


def words_of(fields):
    return [one.arg for one in fields if ast.unparse(one.annotation or one).strip('"') in WORDS]


def wide_takers(tree):
    """Functions, and classes with fields, that have more words of an engine than a wing may."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found = words_of([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
        elif isinstance(node, ast.ClassDef):
            fields = (one for one in node.body if isinstance(one, ast.AnnAssign))
            found = [one for one in fields if ast.unparse(one.annotation) in WORDS]
        else:
            continue
        if len(found) > MOST_WORDS:
            yield node.name


def assigned_from_outside(tree):
    """(line, text) of assignments into an attribute of what wings share, by any other object."""
    for node in ast.walk(tree):
        if isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            continue
        into = node.value if isinstance(node, ast.Subscript) else node
        if isinstance(into, ast.Attribute):
            owner = getattr(into.value, "attr", getattr(into.value, "id", ""))
            if owner.strip("_") in SHARED:
                yield node.lineno, ast.unparse(node)


def test_takers_and_assignments_are_found():
    args = "a: Sharding, b: Passes, c: Weights, *, d: Planning, e: Sampler"
    wide = f"def wing({args}, f: Reducer): ...\ndef narrow({args}, f: int): ...\n"
    record = "class Record:\n" + "".join(f"    {a}: {a}\n" for a in sorted(WORDS)[:6])
    assert [*wide_takers(ast.parse(wide + record))] == ["wing", "Record"]
    source = (
        "self._cycle.a = 1\nengine.b += 1\ndel model.engine.c\ncycle.arrived(d)\nself.d = e.f\n"
        "self._reducer.a[0] = 1\na, planning.b = c\nsave.state['a'].c(d)\nreducer[0] = save.a"
    )
    assert [line for line, _ in assigned_from_outside(ast.parse(source))] == [1, 2, 3, 6, 7]


def test_wings_take_what_they_use_and_nobody_assigns_into_what_they_share():
    wide = [f"{s.path}:{name}" for s in house.sources() for name in wide_takers(s.tree)]
    assert len(wide) <= WIDE_TAKERS, wide
    found = [(s.path, *one) for s in house.sources() for one in assigned_from_outside(s.tree)]
    assert found == []


def test_files_and_functions_have_a_size_that_is_read_at_once():
    lines = [source.lines for source in house.sources()]
    assert len(lines) > 200 and max(lines) <= LARGEST_FILE
    assert sum(count < house.SMALL for count in lines) <= SMALL_FILES
    assert max(count for _, count, _ in house.functions()) <= LONGEST_FUNCTION
    assert max(count for _, _, count in house.functions()) <= WIDEST_SIGNATURE


CLOCKS = re.compile(
    r"(?<!\")\b(perf_counter|monotonic|process_time|thread_time|cpu_seconds|time\.time|sleep|getrusage|"
    r"ru_maxrss|memory_info|VmHWM|VmRSS|RssAnon|extra_ram)(_ns)?\b|\btimeout=\d"
)
READ_CLOCKS = ("tests/deep/", "tests/test_structure.py")


def test_no_verdict_depends_on_how_busy_the_machine_is():
    """Tests count calls and bytes, and wait for events; searches and benches read clocks."""
    assert CLOCKS.search("began = time.perf_counter_ns()") and CLOCKS.search("wait(timeout=5)")
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not file.startswith(READ_CLOCKS):
            lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            found += [
                f"{file}:{number} {line.strip()}" for number, line in lines if CLOCKS.search(line)
            ]
    assert found == []


SETS = """
class A:
    names: frozenset[str]
    by_rank: dict[int, set[str]]
    def __init__(self, some: Iterable[int], param: Tensor):
        self.ids = {1}
        first = [x for x in self.names], list(self.ids | {2}), *self.names, ", ".join({"a"}), some
        for x in self.by_rank[0]: pass
        for own in self.by_rank.values(): tuple(own)
        max(self.ids, key=abs), self.ids.pop(), next(iter(self.names)), f"{self.ids}"
        {k: 0 for k in a.keys() & b.keys()}
        for path in folder.iterdir(): pass
def given(some: Collection[int], all: Sequence[int]):
    for x in some: pass
given({1}, [2])
"""
SORTED = """
class A:
    names: frozenset[str]
    def all(self):
        for x in sorted(self.names): pass
        {y for y in self.names}, {*self.names}, any(y for y in self.names)
        sorted(map(f, self.names))
        (one,) = self.names
        max(self.names), 1 in self.names, [k for k in a.keys()], len(list(self.names))
"""
# In these, what is summed are sizes of files: whole numbers
SUMS = {"gemini/checkpoint/format/manifest.py", "bench/capacity.py", "bench/train.py"}


def test_walks_of_sets_are_found():
    found = walks_of_sets({"a.py": ast.parse(SETS)})
    lines = Counter(int(text.split(":")[1].split()[0]) for text in found)
    assert lines == {7: 4, 8: 1, 9: 1, 10: 4, 11: 1, 12: 1, 14: 1}, found
    assert walks_of_sets({"a.py": ast.parse(SORTED)}) == []


def test_nothing_walks_a_set_where_order_can_matter():
    """Each rank hashes names in its own way: what a set puts in order differs among them, and with
    it collectives, files and plans. The same is true of folders, which disks list."""
    trees = {source.path: source.tree for source in house.sources()}
    for path in sorted((ROOT / "bench").rglob("*.py")):
        trees[str(path.relative_to(ROOT))] = ast.parse(path.read_text(encoding="utf-8"))
    found = walks_of_sets(trees)
    assert {text.split(":")[0] for text in found} == SUMS and len(found) == len(SUMS), found


TEXT_CALLS = {"read_text", "write_text"}
OPENS = {"open", "fdopen", "NamedTemporaryFile", "TemporaryFile"}


def texts_without_encoding(tree):
    """Lines of calls that read or write a text in the language of the machine."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(key.arg == "encoding" for key in node.keywords):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        modes += [key.value.value for key in node.keywords if key.arg == "mode"]
        is_text = any(re.fullmatch(r"[rwxa]\+?t?", str(mode)) for mode in modes)
        in_text = any(key.arg in ("text", "universal_newlines") for key in node.keywords)
        of_process = owner == "subprocess" and in_text and name in ("run", "Popen")
        of_path = name in TEXT_CALLS and owner != "strangers"
        if of_path or of_process or (name in OPENS and is_text):
            yield node.lineno


def test_every_text_file_is_utf_8():
    source = (
        "p.read_text()\np.open('r')\np.open('rb')\ng.open()\nopen(p, mode='a')\nos.fdopen(1, 'w')"
    )
    assert [*texts_without_encoding(ast.parse(source))] == [1, 2, 5, 6]
    assert [*texts_without_encoding(ast.parse("p.write_text(a, encoding='utf-8')"))] == []
    others = (
        path for name in ("bench", "examples", "tests") for path in (ROOT / name).rglob("*.py")
    )
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in (*MODULES.values(), *sorted(others))
        for line in texts_without_encoding(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def calls_of(tree, names):
    """Calls of functions of these names, whatever they are asked of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in names:
                yield node


# what opens a file by itself, where `gemini.strangers` is asked first or it is written
READERS = re.compile(r"gemini\.(checkpoint|plan|train)\b")
FILE_CALLS = {"open", "fdopen", "read_text", "read_bytes", "open_file", "memmap", "fromfile"}
OWN_FILES = {
    "gemini.checkpoint.export": {"open"},  # a file that is written
    "gemini.checkpoint.format.folder": {"open_file"},  # locks
    "gemini.checkpoint.save": {"open_file"},  # a file that is written
    "gemini.plan.machine": {"read_text"},  # a file that its user names
    "gemini.train.trainer": {"open"},  # a log that is written
    "gemini.train.rows": {"open"},  # rows of a file that its user names
}


def opens_by_itself(module, tree):
    """Names of calls in a module that open a file past `gemini.strangers`."""
    for node in calls_of(tree, FILE_CALLS):
        owner = getattr(getattr(node.func, "value", None), "id", "")
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if owner != "strangers" and name not in OWN_FILES.get(module, ()):
            yield node.lineno, name


def test_readers_of_files_of_others_open_them_in_one_place():
    source = "path.open('rb')\nos.open(path, 0)\nstrangers.read_text(path)\np.read_bytes()"
    found = [line for line, _ in opens_by_itself("gemini.train.x", ast.parse(source))]
    assert found == [1, 2, 4]
    readers = [module for module in MODULES if READERS.match(module)]
    assert len(readers) > 30
    found = [
        (module, *call)
        for module in readers
        for call in opens_by_itself(module, ast.parse(MODULES[module].read_text(encoding="utf-8")))
    ]
    assert found == []


TRANSFORMERS = re.compile(
    r"(^|\.)(Auto\w+\.(from_pretrained|from_config)|pipeline|load_dataset|SFTConfig)$"
)


def calls_that_may_run_code(tree):
    """Calls of transformers, datasets and trl, without `trust_remote_code`, that ask for it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and TRANSFORMERS.search(ast.unparse(node.func)):
            yield from [node.lineno][: "trust_remote_code" not in [k.arg for k in node.keywords]]


def test_no_call_leaves_to_transformers_whether_code_of_others_runs():
    source = (
        "AutoConfig.from_pretrained(p)\nt.AutoTokenizer.from_pretrained(p, trust_remote_code=x)"
    )
    assert [*calls_that_may_run_code(ast.parse(source))] == [1]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in [*MODULES.values(), *sorted((ROOT / "bench").rglob("*.py"))]
        for line in calls_that_may_run_code(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []
