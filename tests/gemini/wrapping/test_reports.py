"""What a module says about its memory: explain, the report, the timeline, the collector's dump."""

import json
import math

import pytest

import gemini
from bench.shared.models import token_batches
from bench.shared.simulated import SimBackend
from gemini import AutoPlacement, Metrics
from gemini.placement.tiers import Tier
from gemini.tickets import Done
from optim.rules.report import Outcome, StepReport, TailResult, Traffic
from tests.support.checkpoints import train
from tests.support.spilled import LEAST, wrapped

BATCHES = token_batches(2, 1)


def test_explain_says_where_a_parameter_lives_why_and_what_it_costs():
    model, _ = wrapped(LEAST)
    text = model.explain("layers.3.3.weight")
    assert text.startswith("layers.3.3.weight (33, 77)")
    assert "budget" in text and "on nvme" in text
    assert "moved a step" in text and "update stream" in text
    resident, _ = wrapped()
    assert "on device" in resident.explain("head.weight")  # a tied name
    assert "nvme" not in resident.explain("head.weight")


def test_explain_of_an_unknown_name_offers_near_ones():
    model, _ = wrapped()
    with pytest.raises(ValueError, match=r"layers\.3\.3\.weigth.*layers\.3\.3\.weight"):
        model.explain("layers.3.3.weigth")


def test_the_report_has_predicted_beside_measured_bytes():
    model, optimizer = wrapped(AutoPlacement("150KiB"))
    assert all(row.measured_bytes is None for row in model.memory_report().rows)
    train(model, optimizer, BATCHES)
    rows = {(row.tier, row.kind): row for row in model.memory_report().rows}
    assert {tier for tier, _ in rows} == {"device", "nvme"}
    for tier in ("device", "nvme"):
        kinds = [row for (t, kind), row in rows.items() if t == tier and kind != "total"]
        assert sum(row.measured_bytes for row in kinds) == rows[tier, "total"].measured_bytes
        assert sum(row.predicted_bytes for row in kinds) == rows[tier, "total"].predicted_bytes
    state = rows["nvme", "state"]
    assert abs(state.measured_bytes - state.predicted_bytes) < 70_000  # header and index
    staging = rows["device", "staging"]
    assert staging.measured_bytes <= staging.predicted_bytes
    assert rows["device", "parameters"].measured_bytes > 0
    assert "predicted" in str(model.memory_report())


def test_metrics_are_flat_numbers_of_the_step_before_the_last_one():
    model, optimizer = wrapped(LEAST)
    metrics = Metrics(model, optimizer)
    assert "gemini/nvme_read_bytes" not in metrics.as_dict()
    train(model, optimizer, BATCHES)
    first = optimizer.last_report
    train(model, optimizer, BATCHES[:1])
    found = metrics.as_dict("")
    json.dumps(found)
    assert {type(value) for value in found.values()} <= {int, float}
    assert found.items() >= first.as_dict().items()
    assert found["nvme_read_bytes"] == first.traffic.nvme_read > 0
    (total,) = [r for r in model.memory_report().rows if (r.tier, r.kind) == ("nvme", "total")]
    assert found["nvme_predicted_bytes"] == total.predicted_bytes
    assert found["nvme_measured_bytes"] == total.measured_bytes
    assert found["overruns"] == len(model.memory_report().overruns)
    assert found["share_of_bound"] == found["bound_seconds"] / found["iteration_seconds"] > 0
    metrics.close()
    train(model, optimizer, BATCHES[:1])
    assert metrics.as_dict("").items() >= first.as_dict().items()


def test_a_step_says_what_its_tail_did_too():
    report = StepReport(
        Done(Outcome(skipped=True, grad_norm=math.inf, loss_scale=8.0)),
        Traffic(nvme_read=1, host_to_device=2),
        stalled_seconds=0.25,
        behind=Done(TailResult(True, Traffic(nvme_read=10, nvme_write=5), 0.5, 3.0, 1.0)),
    )
    assert report.as_dict() == {
        "nvme_read_bytes": 11,
        "nvme_write_bytes": 5,
        "host_to_device_bytes": 2,
        "device_to_host_bytes": 0,
        "stalled_seconds": 0.75,
        "tail_seconds": 3.0,
        "hidden_seconds": 2.0,
        "skipped": 1,
        "loss_scale": 8.0,
    }


def test_what_is_in_use_is_counted_exactly():
    """At rest there are shards, state and staging buffers; nothing is gathered."""
    sim = SimBackend(0)
    model, optimizer = wrapped(AutoPlacement("90KiB", "250KiB"), device=sim)
    train(model, optimizer, BATCHES)
    engine = model.engine
    plan = engine.planning.plan
    engine.manager.release_all()
    in_use = engine.manager.bytes_in_use()
    for tier in (Tier.DEVICE, Tier.HOST):
        shards = sum(
            sizes.shard_bytes
            for sizes, shard in zip(plan.chunks, plan.shards, strict=True)
            if shard.param_home is tier
        )
        state = sum(
            block.state_bytes
            for sizes, shard in zip(plan.chunks, plan.shards, strict=True)
            for block, home in zip(sizes.blocks, shard.state_homes, strict=True)
            if home is tier
        )
        assert in_use.get((tier, "parameters"), 0) == shards
        assert in_use.get((tier, "state"), 0) == state
    assert (Tier.DEVICE, "gradients") not in in_use


@pytest.mark.parametrize("suffix", ["json", "svg"])
def test_a_timeline_is_drawn(suffix, tmp_path):
    if suffix == "svg":
        pytest.importorskip("matplotlib")
    model, optimizer = wrapped(LEAST)
    train(model, optimizer, BATCHES)
    path = tmp_path / f"timeline.{suffix}"
    model.memory_timeline(path)
    assert path.stat().st_size > 1000
    assert suffix == "json" or ">seconds<" in path.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="expected one of"):
        model.memory_timeline(tmp_path / "timeline.txt")


def test_what_was_sampled_can_be_dumped_and_used_again(tmp_path):
    model, optimizer = wrapped(LEAST)
    train(model, optimizer, BATCHES)
    model.memory_stats.dump_memory_stats(tmp_path / "stats.json")
    (data,) = json.loads((tmp_path / "stats.json").read_text(encoding="utf-8"))["traces"]
    trace = gemini.memtracer.trace.Trace.from_json(data)
    assert trace == next(iter(model.memory_stats.traces.values()))
    again = wrapped(LEAST)
    train(*again, BATCHES)
    (found,) = again[0].memory_stats.traces.values()
    assert found.digest() == trace.digest()
