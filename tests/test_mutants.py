"""The list of `make mutate`: every mutation still applies, and names tests that exist."""

import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.mutate import listed
from tests.mutate.listed import ROOT, Mutant

MUTANTS = listed.everything()


def test_every_mutation_applies_to_its_file_once_and_leaves_it_python():
    assert listed.do_not_apply(MUTANTS) == []
    for mutant in MUTANTS:
        text = mutant.applied_to((ROOT / mutant.file).read_text())
        compile(text, mutant.file, "exec")


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len([mutant for mutant in MUTANTS if not mutant.equivalent]) >= 150
    assert max(Counter(mutant.title for mutant in MUTANTS).values()) == 1
    assert len({mutant.file for mutant in MUTANTS}) >= 50


def test_tests_that_are_named_exist():
    for mutant in MUTANTS:
        for test in mutant.killed_by:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text()
            assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), mutant.title


def test_the_promises_are_those_of_the_readme():
    promises = " ".join((ROOT / "README.md").read_text().split())
    held = [mutant for mutant in MUTANTS if mutant.promise]
    assert len(held) >= 40
    assert [m.title for m in held if m.promise not in promises or m.equivalent] == []


def test_a_text_that_is_not_there_once_is_said():
    mutant = Mutant("area", "a name", "README.md", "no such text", "")
    assert listed.do_not_apply([mutant]) == [
        "area: a name: README.md has its text 0 times, expected once"
    ]


RUN = """
import sys
from tests.mutate import __main__ as run, listed

tests = ("tests/optim/state/test_space.py::test_fraction_on_nvme_is_met_within_one_block",)
old = "    assert 0 <= fraction <= 1"
listed.areas = lambda: ["area"]
listed.read = lambda area: [
    listed.Mutant(area, "seen", "optim/state/space.py", old, "    return frozenset()", tests),
    listed.Mutant(area, "unseen", "optim/state/space.py", old, "    assert fraction <= 1", tests),
]
sys.exit(run.main(["--jobs", "1"]))
"""


@pytest.mark.ci
def test_what_no_test_notices_survives_and_fails_the_run():
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'io'}"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "area: seen: tests/optim/state/test_space.py" in done.stdout
    assert "1 of 2 killed" in done.stdout and "survived: area: unseen" in done.stdout
