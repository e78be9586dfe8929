"""What a disk can do bounds what we do with it, or it was measured wrong."""

import sys
import types

import pytest

from bench import checkpoint, nvme
from bench.peers import deepspeed_zero
from bench.support import fio
from bench.support.fio import FioRun, check_ceilings


def test_what_is_beyond_a_ceiling_fails():
    check_ceilings({"read / fio's best": 1.05, "write / fio's best": 0.3})
    with pytest.raises(SystemExit, match=r"no ceiling: write / fio's best is 1\.06; nothing was"):
        check_ceilings({"read / fio's best": 1.05, "write / fio's best": 1.06})


def test_ratios_to_peers_are_no_ceilings_and_a_step_below_its_bound_is_beyond_one():
    ratios = {"read / fio's best": 0.9, "write / tensornvme": 4.0}
    assert nvme.ceilings(ratios, None) == {"read / fio's best": 0.9}
    found = nvme.ceilings(ratios, {"ratio": 0.5})
    assert found == {"read / fio's best": 0.9, "a step over its bound": 2.0}


@pytest.mark.parametrize(
    ("mixed", "wanted"),
    [((0.5, 0.5), 10 / 4 + 12 / 2), ((2.0, 2.0), 22 / 4)],
)
def test_a_step_is_bound_by_the_best_that_the_disk_did(mixed, wanted):
    """Mixed, or first read and then written."""
    runs = [FioRun(4.0, 0, 0), FioRun(0, 2.0, 0), FioRun(*mixed, 0), FioRun(3.0, 0, 0),
            FioRun(0, 1.0, 0), FioRun(0.1, 0.1, 0)]  # fmt: skip
    assert nvme.least_seconds(10 * 10**9, 12 * 10**9, runs) == pytest.approx(wanted)


def test_the_ceiling_is_measured_right_before_and_behind(monkeypatch, tmp_path):
    """In every round the best of those runs counts."""
    events = []
    speeds = iter(range(1, 100))

    def run(engine, kind, path, nbytes):
        events.append(f"fio {kind}")
        speed = float(next(speeds))
        return FioRun(speed * (kind == "read"), speed * (kind == "write"), 0.0)

    def row(name):
        timed = {
            kind: nvme.Timed(lambda kind=kind: events.append(f"{name} {kind}"), 1)
            for kind in ("write", "read")
        }
        return types.SimpleNamespace(**timed)

    monkeypatch.setattr(fio, "run", run)
    made = {name: row(name) for name in ("ours/threads", "other")}
    monkeypatch.setattr(nvme, "make_rows", lambda *_: (made, {}))
    ceilings = []
    monkeypatch.setattr(nvme, "_paired", lambda ours, theirs: ceilings.append(theirs) or 1.0)
    nvme.measure_rows(tmp_path, types.SimpleNamespace(path=tmp_path / "x"), 1, rounds=1)
    a_round = [
        event for kind in ("write", "read")
        for event in (*[f"fio {kind}"] * 2, f"ours/threads {kind}", *[f"fio {kind}"] * 2,
                      f"other {kind}")
    ]  # fmt: skip
    assert events == a_round * 2
    assert ceilings == [[16.0], [12.0]]  # the first round does not count


def test_without_fio_its_package_is_named(monkeypatch):
    monkeypatch.setattr(fio.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["bench.checkpoint"])
    with pytest.raises(SystemExit, match="apt install fio"):
        checkpoint.main()


def test_without_libaio_its_package_is_named(monkeypatch):
    def load(verbose):
        raise RuntimeError("Unable to JIT load the async_io op\ndue to hardware/software issue.")

    builder = types.SimpleNamespace(load=load)
    accelerator = types.ModuleType("deepspeed.accelerator")
    accelerator.get_accelerator = lambda: types.SimpleNamespace(
        create_op_builder=lambda name: builder
    )
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", accelerator)
    monkeypatch.setattr(deepspeed_zero, "OPERATORS", ("AsyncIOBuilder",))
    with pytest.raises(SystemExit, match=r"apt install libaio-dev\)\? due to hardware"):
        deepspeed_zero.prepare()
