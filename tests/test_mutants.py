"""The list of `make mutate`: every mutation still applies, and names tests that exist."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.mutate import history, listed, sites
from tests.mutate.listed import ROOT, Mutant

MUTANTS = listed.everything()


@pytest.mark.ci
def test_every_mutation_applies_to_its_function_once_and_leaves_it_python():
    assert listed.do_not_apply(MUTANTS) == []


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len([mutant for mutant in MUTANTS if not mutant.equivalent]) >= 600
    assert max(Counter(mutant.title for mutant in MUTANTS).values()) == 1
    assert len({mutant.file for mutant in MUTANTS}) >= 120


def test_tests_that_are_named_exist_and_one_is_in_ci():
    for mutant in MUTANTS:
        in_ci = [test for test in mutant.killed_by if not test.startswith("tests/deep/")]
        assert in_ci or mutant.equivalent, mutant.title
        for test in mutant.killed_by:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), mutant.title


def test_the_promises_are_those_of_the_guarantees():
    promises = " ".join((ROOT / "docs/guarantees.md").read_text(encoding="utf-8").split())
    held = [mutant for mutant in MUTANTS if mutant.promise]
    assert len(held) >= 40
    assert [m.title for m in held if m.promise not in promises or m.equivalent] == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("a + b", "a - b if c else d", "return ((a - b if c else d)) * c"),
        ("x = f('y')\nx += 1", "if a:\n    x = 2", "    if a:\n        x = 2\n    if a:\n"),
        ("if b:", "if True:", "elif True:\n        return 1"),
        ("def g(self, x=1):", "def g(self, x=2):", "def g(self, x=2):\n        return x"),
    ],
)  # fmt: skip
def test_a_site_is_found_by_what_it_means_in_its_own_function(old, new, expected):
    scopes = sites.scopes(ast.parse(TEXT), "C.g" if "def" in old else "h")
    assert expected in sites.replaced(TEXT, scopes, old, new)


TEXT = """
class C:
    def g(self, x = 1):  # one
        return x

def h(a, b, c, d):
    def g():
        return a + b
    x = f( "y" )  # a comment
    x += 1
    if a:
        return x
    elif b:
        return 1
    return (a
        + b) * c
"""


@pytest.mark.parametrize(("old", "nth", "times"), [("a - b", 0, 0), ("a", 0, 2), ("a", 3, 2)])
def test_a_site_that_is_not_there_once_is_said(old, nth, times):
    scopes = sites.scopes(ast.parse(TEXT), "h")
    with pytest.raises(ValueError, match=f"it occurs {times} times, expected {nth or 'once'}"):
        sites.replaced(TEXT, scopes, old, "d", nth)
    assert "((d)\n        + b) * c" in sites.replaced(TEXT, scopes, "a", "d", 2)


def test_what_has_moved_is_found_by_its_name_and_what_is_nowhere_is_said():
    assert listed.file_of("gemini.old:ShardTarget.step") == "gemini/runtime/step/target.py"
    mutant = Mutant("area", "a name", "gemini.ddp:no_such", "a", "b")
    assert listed.do_not_apply([mutant]) == [
        "area: a name: gemini.ddp:no_such: not in its module, and 0 others have its name"
    ]


RUN = """
import sys
from tests.mutate import __main__ as run, listed

tests = ("tests/optim/state/test_space.py::test_fraction_on_nvme_is_met_within_one_block",)
old, place = "assert 0 <= fraction <= 1", "optim.state.space:blocks_on_nvme"
listed.areas = lambda: ["area"]
listed.read = lambda area: [
    listed.Mutant(area, "seen", place, old, "return frozenset()", killed_by=tests),
    listed.Mutant(area, "unseen", place, old, "assert fraction <= 1", killed_by=tests),
]
sys.exit(run.main(["--jobs", "1"]))
"""


@pytest.mark.deep
def test_what_no_test_notices_survives_and_fails_the_run():
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'io'}"}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 1, done.stderr
    assert "area: seen: tests/optim/state/test_space.py" in done.stdout
    assert "1 of 2 killed" in done.stdout and "survived: area: unseen" in done.stdout


def test_a_ledger_knows_verdicts_until_a_function_or_its_test_changes(tmp_path, monkeypatch):
    first, second = (
        Mutant("a", name, f"m:{name}", "x", "y", killed_by=("t.py::t",)) for name in "fg"
    )
    now = {"m.py": "def f(): 1\ndef g(): 2\n", "t.py": "def t(): f()\n"}
    at = {"one": {**now, "tests/mutate/a.toml": "f and g"}}

    def git(verb, *arguments):
        if verb == "show":
            commit, _, file = arguments[0].partition(":")
            return at[commit][file]
        return "one" if verb == "rev-parse" else ""

    monkeypatch.setattr(history, "_git", git)
    monkeypatch.setattr(history, "_text_at", lambda base, file: git("show", f"{base}:{file}"))
    monkeypatch.setattr(history, "_tree_at", lambda base, file: ast.parse(at[base][file]))
    monkeypatch.setattr(history, "tree_of", lambda file: ast.parse(now[file]))
    monkeypatch.setattr(listed, "file_of", lambda where: "m.py")
    path = tmp_path / "ledger.toml"
    ledger = history.Ledger(path)
    ledger.add("a: g", "survived")
    ledger.add("a: f", "t.py::t")
    assert (
        path.read_text(encoding="utf-8")
        == '"a: f" = ["one", "t.py::t"]\n"a: g" = ["one", "survived"]\n'
    )
    assert history.Ledger(path, [first, second]).known == {"a: f": "t.py::t", "a: g": "survived"}
    now["m.py"] = "def f(): 1\ndef g(): 3\n"
    assert history.Ledger(path, [first, second]).known == {"a: f": "t.py::t"}
    now["t.py"] = "def t(): pass\n"
    assert history.Ledger(path, [first, second]).known == {}
