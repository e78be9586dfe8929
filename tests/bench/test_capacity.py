"""`bench.capacity`: which runs it makes, what it divides by what, and when it fails."""

import itertools
import json
import resource
from contextlib import contextmanager
from unittest import mock

import pytest

from bench import capacity
from gemini.units import GIB

RESULT = {
    "arguments": {"max_norm": "1.0", "state": "fp32"},
    "final_peak_rss_mib": 900.04,
    "train_loss": [10.0, 12.0, 9.0],
    "val_loss": 9.5,
    "bytes_read": [1, 6_000_000_000, 8_000_000_000, 7_000_000_000],
    "bytes_written": [1, 3_000_000_000, 3_000_000_000, 3_000_000_000],
    "step_seconds": [90.0, 9.0, 8.0, 7.0],
    "cpu_seconds": [99.0, 10.0, 12.0, 14.0],
    "nvme_bytes": 5,
}


def test_a_step_is_the_median_of_all_but_the_first_and_bounds_are_of_its_bytes():
    with mock.patch("os.sched_getaffinity", return_value={0, 1}):
        found = capacity.summary(RESULT, GIB, 2.0, 6.5)
    assert (found["bytes_read"], found["bytes_written"]) == (7_000_000_000, 3_000_000_000)
    assert (found["step_seconds"], found["disk_bound_seconds"]) == (8.0, 5.0)
    assert (found["compute_seconds"], found["core_bound_seconds"]) == (6.5, 6.0)
    assert (found["peak_rss_mib"], found["rss_limit_mib"]) == (900.0, 1024)


def made(tmp_path, monkeypatch, *options, **changes):
    """The exit status, the result, and the options and limits of the runs that were made."""
    runs, speeds = [], itertools.count(1.0, 2.0)

    def run(args, limit, *options):
        runs.append((limit, options))
        given = dict(zip(options[1::2], options[2::2], strict=False))
        arguments = {
            "max_norm": given.get("--max-norm", "1.0"),
            "state": given.get("--state", "fp32"),
        }
        return {**RESULT, **changes, "arguments": arguments}

    path = tmp_path / "result.json"
    argv = ["capacity", "--model", "gpt2", "--nvme-dir", str(tmp_path), "--json", str(path)]
    monkeypatch.setattr("sys.argv", [*argv, *options])
    with (
        mock.patch.object(capacity, "train", run),
        mock.patch.object(capacity, "mixed_gb_per_s", lambda folder: next(speeds)),
    ):
        status = capacity.main()
    return status, json.loads(path.read_text(encoding="utf-8")), runs


def test_every_limit_is_run_clipped_and_not_beside_the_disk_of_that_time(tmp_path, monkeypatch):
    status, result, runs = made(tmp_path, monkeypatch)
    assert status == 0
    floor, *rest = runs
    assert floor == (resource.RLIM_INFINITY, ("--floor",))
    assert [limit for limit, _ in rest] == [6 * GIB] * 4 + [4 * GIB] * 4
    assert all("--lean" in options for _, options in rest)
    rows = result["runs"]
    assert [row["max_norm"] for row in rows] == [1.0, 1.0, *[capacity.NEVER_CLIPS] * 2] * 2
    assert [row["state"] for row in rows] == ["fp32", "8bit"] * 4
    assert [row["mixed_disk_gb_per_s"] for row in rows] == [2.0 * i for i in range(1, 9)]
    assert result["update"] == "tail"


@pytest.mark.parametrize(
    "changes", [{"train_loss": [9.0, 8.0, 10.0]}, {"final_peak_rss_mib": 4096.1}]
)
def test_a_limit_that_does_not_hold_and_a_loss_that_rises_are_failures(
    changes, tmp_path, monkeypatch
):
    assert made(tmp_path, monkeypatch, **changes)[0] == 1


def test_what_is_asked_for_is_what_is_run(tmp_path, monkeypatch):
    options = ["--rss-limit", "2GiB", "--max-norm", "3", "--update", "tail", "--state", "bf16"]
    _, result, (_, (limit, given)) = made(tmp_path, monkeypatch, *options)
    assert limit == 2 * GIB and len(result["runs"]) == 1
    assert given[given.index("--update") + 1] == "tail"
    assert given[given.index("--state") + 1] == "bf16"
    assert given[given.index("--device-budget") + 1] == str(2 * GIB - capacity.SLACK_BYTES)


QLORA_RUN = {
    "losses": [8.0, 7.0, 6.0, 5.0],
    "step_seconds": [99.0, 99.0, 4.0, 6.0],
    "bytes_read": [9, 9, 8, 4_000_000_000],
    "planned_read_bytes": [0, 9, 8, 4_000_000_000],
    "peak_rss_bytes": 10 << 20,
    "parts": {"layers": 6 << 20, "libraries": 4 << 20},
    "read_gb_per_s": 2.0,
    "frozen_file_bytes": 7,
}


def made_of_a_base(tmp_path, monkeypatch, pss=(100, 400), **changes):
    """The exit status, the result, and what was run with which limit."""
    runs = []

    @contextmanager
    def started(script, limit, *options):
        runs.append((limit, options))
        yield mock.Mock(wait=lambda: 0)

    def result_of(script, limit, *options):
        runs.append((limit, options))
        pair = {"plain_step_seconds": 2.5, "overhead": 1.01}
        return pair if "--pair" in options else {**QLORA_RUN, **changes}

    found = {1: (pss[0], 10), capacity.SHARING: (pss[1], 10)}
    path = tmp_path / "result.json"
    argv = ["capacity", "--qlora", "--nvme-dir", str(tmp_path), "--json", str(path)]
    monkeypatch.setattr("sys.argv", argv)
    with (
        mock.patch.multiple(capacity, started=started, result_of=result_of),
        mock.patch.object(capacity, "pss_of", lambda count, *options: found[count]),
    ):
        status = capacity.main()
    return status, json.loads(path.read_text(encoding="utf-8")), runs


def test_a_base_is_made_run_under_the_limit_and_in_the_least_budget(tmp_path, monkeypatch):
    status, result, runs = made_of_a_base(tmp_path, monkeypatch)
    limit = 5 * GIB // 2
    assert status == 0
    assert [given for given, _ in runs] == [resource.RLIM_INFINITY] * 2 + [limit] * 3
    budgets = [row["device_budget"] for row in result["runs"]]
    assert budgets == [limit - capacity.QLORA_SLACK_BYTES] * 2 + [6 << 20]
    assert [row["cold"] for row in result["runs"]] == [False, True, False]
    row = result["runs"][0]
    assert (row["step_seconds"], row["read_bound_seconds"], row["of_bound"]) == (5.0, 2.0, 2.0)
    assert row["least_peak_mib"] == 10.5
    assert result["shared"]["share"] == 1.0
    assert not list(tmp_path.glob("tmp*"))  # nothing of the base stays


@pytest.mark.parametrize(
    "changes",
    [
        {"peak_rss_bytes": 11 << 20},  # more than the least budget, the process and 5 %
        {"losses": [5.0, 6.0]},
        {"planned_read_bytes": [1]},
        {"pss": (100, 402)},
    ],
)
def test_what_is_not_as_promised_of_a_base_is_a_failure(changes, tmp_path, monkeypatch):
    assert made_of_a_base(tmp_path, monkeypatch, **changes)[0] == 1
