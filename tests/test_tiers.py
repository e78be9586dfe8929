"""What runs when: tests near a change, the work of a tier, and what the ledger of searches says."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.deep import __main__ as deep
from tests.near import MOST_FILES, imported, module_of, nearest
from tests.support.work import BUDGET, TIERS, Budget

NEAR = {
    "tests/a.py": frozenset({"optim", "optim.state.space"}),
    "tests/b.py": frozenset({"optim.state.space", "torch", "pytest", "gemini.ddp"}),
    "tests/c.py": frozenset({"torch"}),
    "tests/d.py": frozenset({"nvme.files.calls"}),
}


def test_tests_that_import_what_was_changed_are_near_and_those_of_little_else_first():
    assert nearest({"optim/state/space.py"}, NEAR) == ["tests/a.py", "tests/b.py"]
    assert nearest({"io/nvme/files/calls.py", "tests/c.py"}, NEAR) == ["tests/c.py", "tests/d.py"]
    assert nearest({"README.md", "gemini/other.py"}, NEAR) == []
    many = {f"tests/{i}.py": frozenset({"gemini"}) for i in range(MOST_FILES + 5)}
    assert len(nearest({"gemini/__init__.py"}, many)) == MOST_FILES


def test_a_module_is_named_as_tests_import_it():
    assert module_of("io/nvme/__init__.py") == "nvme"
    text = "import a.b\nfrom c import d\nfrom . import e\n"
    assert set(imported(text)) == {"a.b", "c", "c.d"}


class Report:
    when = "teardown"

    def __init__(self, nodeid, tier, **counts):
        self.nodeid, self.user_properties = nodeid, [("work", (tier, counts))]


def test_work_is_added_up_by_tier_and_what_passes_its_budget_is_said():
    budget, limit = Budget(), tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    budget.pytest_runtest_logreport(Report("a", "test", process=2, step=3))
    budget.pytest_runtest_logreport(Report("b", "deep", process=10**6))
    assert budget.over() == []
    each = int(limit["ci"]["all"] / limit["weights"]["process"])
    for name in ("c", "d"):
        budget.pytest_runtest_logreport(Report(name, "ci", process=each))
    (said,) = budget.over()
    assert re.fullmatch(r"'ci' has \d+\.\d of work, \d+ are allowed", said)
    assert set(TIERS) < set(limit)


def test_every_folder_of_tests_is_in_one_shard_of_the_workflow():
    root = Path(__file__).resolve().parent.parent
    workflow = (root / ".github/workflows/test.yml").read_text(encoding="utf-8")
    shards = " ".join(re.findall(r"^          - (tests/.*)$", workflow, re.MULTILINE)).split()
    files = [name if name.endswith(".py") else f"{name}/**/test_*.py" for name in shards]
    run = [file for pattern in files for file in root.glob(pattern)]
    there = {file for file in root.glob("tests/**/test_*.py") if "deep" not in file.parts}
    assert sorted(run) == sorted(there)


def test_the_ledger_is_written_as_it_is_read(tmp_path):
    ledger = tmp_path / "ledger.toml"
    entries = {
        "crash: states": deep.Entry("abc", 12, 'said "this" and \\ that'),
        "fuzz: programs": deep.Entry("def", 3, "2000 ran", next_seed=4000),
    }
    assert deep.read(ledger) == {}
    deep.write(entries, ledger)
    assert deep.read(ledger)["fuzz: programs"] == entries["fuzz: programs"]
    assert deep.read(ledger)["crash: states"].said == "said 'this' and / that"


def test_the_ledger_has_jobs_that_there_are():
    titles = [job.title for job in deep.jobs()]
    assert len(set(titles)) == len(titles) and set(deep.read()) <= set(titles)


@pytest.mark.ci
def test_a_job_that_fails_prints_what_it_said_and_one_that_passes_is_an_entry(capsys):
    fails = deep.Job("area", "fails", ("-c", "print('seen'); exit(3)"))
    assert deep.run(fails, "abc", None) is None and "seen" in capsys.readouterr().out
    takes = deep.Job("area", "passes", ("-c", "import sys; print(sys.argv[1])"), num_seeds=5)
    entry = deep.run(takes, "abc", deep.Entry("old", 1, "", next_seed=10))
    assert (entry.said, entry.next_seed) == ("--seed=10", 15)
