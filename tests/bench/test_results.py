"""Every result in bench/results/ can be traced to the command, commit and machine that made it."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from bench.docs import remake
from bench.docs.remake import EVERYTHING, RESULTS, ROOT
from bench.support.machine import write_result


def missing_from(result, command):
    """What a result does not say of how it was made."""
    missing = [name for name in ("command", "commit", "machine", "versions") if name not in result]
    if not re.fullmatch("[0-9a-f]{7,40}", str(result.get("commit"))):
        missing.append("a clean commit")
    if result.get("command") != command:
        missing.append("the command that makes it")
    missing += [key for key in ("cpu", "cores", "memory_gib") if key not in result["machine"]]
    return missing


def read(name):
    return json.loads((ROOT / RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def test_every_result_has_one_command_and_every_command_its_result():
    names = [result.name for result in EVERYTHING]
    assert sorted(names) == sorted(path.stem for path in (ROOT / RESULTS).glob("*.json"))
    assert len(set(names)) == len(names)


def test_every_result_names_its_command_a_clean_commit_and_its_machine():
    assert {r.name for r in EVERYTHING if missing_from(read(r.name), r.command)} == set()


def test_commits_of_results_are_of_this_repository():
    def git(*arguments):
        return subprocess.run(
            ["git", "-C", ROOT, *arguments], capture_output=True, text=True, encoding="utf-8"
        )

    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "false":
        now_in = remake.squashed()
        commits = {now_in.get(c, c) for c in (read(r.name)["commit"] for r in EVERYTHING)}
        assert commits and [c for c in commits if git("cat-file", "-e", c).returncode] == []


def test_only_commits_that_results_name_are_said_to_be_in_another():
    assert remake.squashed().keys() <= {read(r.name)["commit"] for r in EVERYTHING}


@pytest.mark.ci
def test_what_is_written_names_how_it_was_made(tmp_path):
    path = tmp_path / "r.json"
    code = (
        "import sys, pathlib; from bench.support.machine import write_result; "
        "write_result(pathlib.Path(sys.argv[1]), {})"
    )
    subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, check=True)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["command"] == shlex.join(["python", "-c", code, str(path)])
    assert {"commit", "machine", "versions"} <= written.keys()
    write_result(path, {"rows": 1, "command": "another"})
    assert json.loads(path.read_text(encoding="utf-8"))["command"].startswith("python ")


def test_results_are_not_made_from_a_tree_that_was_changed(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(remake, "run", lambda *arguments: ran.append(arguments))
    for found in ("abc1234+", "unknown"):
        monkeypatch.setattr(remake, "commit", lambda found=found: found)
        with pytest.raises(SystemExit):
            remake.main([])
        assert "commit what was changed first" in capsys.readouterr().err and not ran


def test_the_list_says_how_long_everything_takes(capsys):
    assert remake.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("min  ")[1] for line in lines[:-1]] == [r.command for r in EVERYTHING]
    assert lines[-1].split()[0] == str(sum(r.minutes for r in EVERYTHING))


@pytest.mark.deep
def test_small_versions_run(tmp_path, capfd):
    small = ["gathers", "adam-cpu"]  # of those that need no fio
    assert remake.main(["--smoke", str(tmp_path), "--only", *small]) == 0, capfd.readouterr().out
    for name in small:
        result = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        assert missing_from(result, None) in (
            ["the command that makes it"], ["a clean commit", "the command that makes it"]
        )  # fmt: skip
