"""What a step asks of a device, through Triton's launch path and a driver that launches nothing.

Three launches and no wait where the device decides alone. Several ranks make one more, for what
each found, and wait for no device. Where hosts agree, as disks make them, each reads four times:
the loss scale (twice), what it measured, and what all found.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.support.timing import within


def counted(folder, *flags):
    path = folder / "found.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = subprocess.run(
        [sys.executable, "-m", "bench.host.host_time", "--json", str(path), *flags],
        capture_output=True, text=True, env={**environment, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return counted(tmp_path_factory.mktemp("host-time"), "--layers", "3", "--steps", "3")


def test_a_resident_step_is_three_launches_and_the_host_waits_for_nothing(found):
    case = found["resident"]
    assert case["launches"] == {"norm_kernel": 1, "prologue_kernel": 1, "update_kernel": 1}
    assert case["reads"] == {} and case["host_waits"] == 0


def test_a_streamed_step_is_one_launch_for_each_block_and_the_host_waits_for_nothing(found):
    case = found["stream"]
    assert case["blocks"] == 48
    assert case["launches"] == {"norm_kernel": 1, "prologue_kernel": 1, "update_kernel": 48}
    assert case["reads"] == {} and case["host_waits"] == 0


@pytest.mark.parametrize(("name", "updates"), [("ranks", 1), ("ranks-stream", 24)])
def test_several_ranks_wait_for_no_device(name, updates, found):
    case = found[name]
    assert case["launches"] == {
        "norm_kernel": 1, "finish_kernel": 1, "prologue_kernel": 1, "update_kernel": updates,
    }  # fmt: skip
    # of what hosts told each other: twice, since gradients set by hand are reduced behind a vote
    assert case["reads"] == {"tolist": 2} and case["host_waits"] == 0


def test_a_step_that_ranks_agree_on_waits_for_what_they_read_and_no_more(found):
    case = found["agreed"]
    assert sum(case["launches"].values()) == 4  # the norm is finished before it is read
    assert case["reads"] == {"tolist": 4} and case["host_waits"] == 0


@pytest.mark.parametrize(("case", "seconds"), [("resident", 5e-3), ("stream", 0.2e-3 * 1008)])
def test_what_a_step_of_a_thousand_blocks_takes_of_the_host(case, seconds, tmp_path):
    """CPU seconds of the thread, of the quickest of some steps: what others do counts little."""

    def step():
        found = counted(tmp_path, "--layers", "63", "--steps", "8", "--cases", case)[case]
        assert found["blocks"] == 1008
        return found["least_seconds"]

    assert within(seconds, step)
