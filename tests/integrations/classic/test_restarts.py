"""A rank or a host is lost, and the run goes on from its last checkpoint by itself."""

import os
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from tests.support import nodes
from tests.support.loops import restarted
from tests.support.loops.restarted import ROOT, ended_well, read, started
from tests.support.ports import free_port
from tests.support.until import until

pytestmark = pytest.mark.ci

REFUSED = """
from gemini.arguments import refuse
with open("attempts", "a", encoding="utf-8") as attempts:
    attempts.write("one\\n")
refuse("wrong flag")
"""


def test_a_killed_rank_is_replaced_and_the_run_has_the_bits_of_an_undisturbed_one(tmp_path):
    undisturbed = tmp_path / "undisturbed"
    ended_well(started(undisturbed, "gemini run", "--nproc_per_node=2"))
    out = tmp_path / "out"
    flags = ["--nproc_per_node=2", "--max-restarts=1"]
    ended_well(started(out, "gemini run", *flags, dies="rank 1 3", every=2))
    assert read(out, "said") == "from 0 with 2\nfrom 2 with 2\n"
    assert read(out, "digest") == read(undisturbed, "digest")
    # what the killed ranks left is of step 3: it goes once a later checkpoint is complete
    folders = [path for path in out.iterdir() if path.name.endswith(("-0", "-1")) and path.is_dir()]
    assert len(folders) == 2 and not any(path for one in folders for path in one.iterdir())


def test_what_was_refused_does_not_begin_again(tmp_path):
    (tmp_path / "script.py").write_text(REFUSED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "gemini", "run", "--max-restarts=2", "script.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")])},
        cwd=tmp_path, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "wrong flag\n")
    assert read(tmp_path, "attempts") == "one\n"


def hosts_at(port, out, **options):
    """The first of one or two hosts, once it has the store; the flags of both."""
    flags = ["--nnodes=1:2", "--master_addr=localhost", f"--master_port={port}", "--max-restarts=2"]
    first = started(out, "gemini run", *flags, **options)

    def has_the_store():
        assert first.poll() is None
        with closing(socket.socket()) as asked:
            return asked.connect_ex(("localhost", port)) == 0

    until(has_the_store)
    return first, flags


def losses_of(out):
    """Loss by step, of the last attempt that has come to it, and the ranks that had it."""
    lines = [line.split() for line in read(out, "losses").splitlines()]
    return {int(step): (float(loss), int(ranks)) for step, ranks, loss in lines}


def test_a_host_is_lost_and_another_comes_and_losses_are_those_of_two_that_stayed(tmp_path):
    out, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    first, flags = hosts_at(free_port(), out, needs=2, precision="fp32")
    second = started(out, "gemini run", *flags, dies="host 3", precision="fp32")
    second.communicate()
    assert second.returncode != 0

    def goes_on_alone():
        assert first.poll() is None
        return read(out, "said").count("\n") > 1

    until(goes_on_alone)
    third = started(out, "gemini run", *flags, needs=2, precision="fp32")
    ended_well(third)
    ended_well(first)
    said = read(out, "said").splitlines()
    assert said[:2] == ["from 0 with 2", "from 3 with 1"]
    assert said[2].endswith("with 2") and len(said) == 3
    found = losses_of(out)
    flags = ["--nproc_per_node=2"]
    ended_well(started(undisturbed, "gemini run", *flags, steps=len(found), precision="fp32"))
    expected = losses_of(undisturbed)
    assert [found[step] for step in (1, 2, 3)] == [expected[step] for step in (1, 2, 3)]
    assert {ranks for _, ranks in found.values()} == {1, 2} and len(found) > 6
    # one rank adds the twelve products of a batch in another order than two ranks do: each step
    # differs in the last bits of fp32, which Adam carries on
    worst = max(abs(found[step][0] / loss - 1) for step, (loss, _) in expected.items())
    assert found.keys() == expected.keys() and worst < 1e-5


@pytest.mark.skipif(not nodes.can_be_had(), reason="users have no namespaces on this machine")
def test_two_nodes_with_disks_of_their_own_have_the_bits_of_one(tmp_path):
    """Each node runs the same command, and the second node's rank is killed once."""
    undisturbed = tmp_path / "undisturbed"
    ended_well(started(undisturbed, "gemini run", "--nproc_per_node=2"))
    out = tmp_path / "out"
    out.mkdir()
    command = [
        sys.executable, "-m", "gemini", "run", "--nnodes=2", "--master_addr=node-1",
        "--max-restarts=1", restarted.__file__, str(out), "6",
    ]  # fmt: skip
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")]), "DIES": "rank 1 3",
        "NEEDS": "2", "DISK": f"{out}/disk",
    }  # fmt: skip
    run = nodes.started(out, command, environment)
    disks = [out / "disks" / name for name in nodes.NAMES]

    def each_has_its_files():
        assert run.poll() is None
        return all(list(disk.glob("gemini-*.blocks")) for disk in disks)

    until(each_has_its_files)
    ended_well(run)
    assert read(out, "said") == "from 0 with 2\nfrom 3 with 2\n"
    assert read(out, "digest") == read(undisturbed, "digest")
    assert not any(path for disk in disks for path in disk.iterdir())
    assert not any((out / "disk").iterdir())
