"""A rank or a host is lost, and the run goes on from its last checkpoint by itself."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.loops import restarted
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
LOOP = Path(restarted.__file__)
STARTERS = {
    "gemini run": ["gemini", "run"],
    "torchrun": ["torch.distributed.run", "--standalone"],
}
STEPS = 6
REFUSED = """
from gemini.arguments import refuse
with open("attempts", "a", encoding="utf-8") as attempts:
    attempts.write("one\\n")
refuse("wrong flag")
"""


def started(out, starter, *flags, steps=STEPS, dies=(), pause=0.0):
    """A process of its own session that runs the loop on ranks."""
    out.mkdir(exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")]), "STEP_SECONDS": str(pause),
        # so long others may still join before those that are left go on; torch's own is 30 s
        "PET_RDZV_CONF": "last_call_timeout=2",
    }  # fmt: skip
    if starter == "torchrun":
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    arguments = [str(LOOP), str(out), str(steps), *map(str, dies)]
    return subprocess.Popen(
        [sys.executable, "-m", *STARTERS[starter], *flags, *arguments],
        env=environment, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        encoding="utf-8", start_new_session=True,
    )  # fmt: skip


def ended(process):
    printed, _ = process.communicate()
    assert process.returncode == 0, printed


def read(out, name):
    return (out / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    ended(started(out, "gemini run", "--nproc_per_node=2"))
    return read(out, "digest")


def of_files(out):
    """Files of state by rank."""
    return sorted(path.parent.name[-2:] for path in out.glob("*-?/gemini-*") if path.is_file())


@pytest.mark.ci
def test_a_killed_rank_is_replaced_and_the_run_has_the_bits_of_an_undisturbed_one(
    tmp_path, undisturbed
):
    run = started(tmp_path, "gemini run", "--nproc_per_node=2", "--max-restarts=1", dies=(1, 3))
    ended(run)
    assert read(tmp_path, "said") == "from 0 with 2\nfrom 3 with 2\n"
    assert read(tmp_path, "digest") == undisturbed
    assert of_files(tmp_path) == []


@pytest.mark.ci
def test_what_was_refused_does_not_begin_again(tmp_path):
    (tmp_path / "script.py").write_text(REFUSED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "gemini", "run", "--max-restarts=2", "script.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")])},
        cwd=tmp_path, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "wrong flag\n")
    assert read(tmp_path, "attempts") == "one\n"


@pytest.mark.ci
def test_a_host_is_lost_and_the_other_goes_on_alone(tmp_path):
    flags = ["--nnodes=1:2", "--master_addr=localhost", f"--master_port={free_port()}",
             "--max-restarts=2"]  # fmt: skip
    hosts = []
    for _ in range(2):
        hosts.append(started(tmp_path, "gemini run", *flags, steps=8, pause=0.5))
        time.sleep(1)  # the first has the store
    while not (tmp_path / "checkpoint").exists():
        assert hosts[0].poll() is None
        time.sleep(0.1)
    killed = hosts[1]
    ranks = {int(read(tmp_path, f"pid-{rank}")) for rank in (0, 1)}
    of_host = tree(killed.pid)
    assert len(of_host & ranks) == 1
    for pid in of_host:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed.communicate()
    ended(hosts[0])
    first, second = read(tmp_path, "said").splitlines()
    assert first == "from 0 with 2" and second.endswith("with 1") and second > "from 0"
    assert read(tmp_path, "digest")


def tree(pid):
    """A process and all below it."""
    found = {pid}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            text = path.read_text(encoding="utf-8")
            if int(text.rpartition(")")[2].split()[1]) == pid:
                found |= tree(int(path.parent.name))
    return found


@pytest.mark.deep
@pytest.mark.parametrize("starter", STARTERS)
def test_twenty_kills_at_random_moments(tmp_path, starter, undisturbed):
    drawn = random.Random(0)
    for number in range(20):
        out = tmp_path / str(number)
        run = started(out, starter, "--nproc-per-node=2", "--max-restarts=3", pause=0.2)
        while not (out / "pid-1").exists():
            time.sleep(0.05)
        time.sleep(drawn.uniform(0, 4))
        with suppress(ProcessLookupError):
            os.kill(int(read(out, f"pid-{drawn.randrange(2)}")), signal.SIGKILL)
        ended(run)
        assert read(out, "digest") == undisturbed, number
