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

pytestmark = pytest.mark.ci  # a process that compiles kernels
FOUND = """
import json
from bench.host.host_time import CASES, found_in
some = ("resident", "stream")
print(json.dumps([found_in(CASES, 3, 3), found_in(some, 6, 2), found_in(some, 12, 2)]))
"""


@pytest.fixture(scope="module")
def by_layers():
    """Of 3 layers every case; of 6 and of 12 the calls of two."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = subprocess.run(
        [sys.executable, "-c", FOUND],
        capture_output=True, text=True,
        encoding="utf-8", env={**environment, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@pytest.fixture(scope="module")
def found(by_layers):
    return by_layers[0]


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
    assert case["reads"] == {"tolist": 2} and case["host_waits"] == 0


@pytest.mark.parametrize(("case", "most"), [("resident", 3), ("stream", 50)])
def test_a_block_more_costs_a_step_few_calls_of_ours(case, most, by_layers):
    """Seconds are the bench's."""
    small, few, many = (found[case] for found in by_layers)
    assert many["blocks"] - few["blocks"] == 2 * (few["blocks"] - small["blocks"]) == 96
    calls = many["calls"] - few["calls"]
    assert calls <= most * 96
    assert calls == 2 * (few["calls"] - small["calls"])  # and no more of them where there are more
