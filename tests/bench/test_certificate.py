"""What bench.certificate draws, and what is asked of it."""

import json
from dataclasses import asdict

import pytest

from bench import certificate
from bench.certificate import FAMILIES, LARGE, Draw, is_met, summary
from gemini.plan.machine import TYPICAL_PROCESS

NAMES = (
    "hidden", "layers", "batch", "seq", "lora", "checkpointing", "optimizer", "nvme_fraction",
    "used", "budget",
)  # fmt: skip

pytestmark = pytest.mark.ci  # imports transformers


def test_draws_are_the_same_for_the_same_numbers_and_have_all_kinds():
    draws = [Draw.of(0, number) for number in range(200)]
    assert draws == [Draw.of(0, number) for number in range(200)]
    assert {draw.family for draw in draws} == set(FAMILIES)
    for name in ("lora", "checkpointing", "nvme_fraction", "budget"):
        assert len({bool(getattr(draw, name)) for draw in draws}) == 2
    assert {len({*draw.lengths}) for draw in draws} == {1, 2, 3}
    assert all(max(draw.lengths) == draw.seq for draw in draws)
    assert {draw.lengths.index(draw.seq) for draw in draws} == {0, 1, 2}
    assert Draw.of(1, 0) != draws[0]


def test_half_of_the_draws_have_100_MiB_of_parameters_and_more():
    large = [draw for draw in (Draw.of(0, n) for n in range(40)) if draw.hidden in LARGE[0]]
    assert 10 < len(large) < 30
    sizes = [2 * sum(p.numel() for p in draw.model().parameters()) for draw in large[:8]]
    assert min(sizes) > 100 << 20


def row(took, *, refused=False, killed=False):
    return {"family": "Llama", "refused": refused, "killed": killed, "took": took, "needs": 100}


def of_all(rows):
    return {**summary(rows), "asked": len(rows), "failed": []}


def test_bars_are_of_killed_slack_and_refused():
    good = [row(95), row(99), row(80), *(row(0, refused=True, killed=True) for _ in range(9))]
    found = of_all(good)
    assert (found["killed"], found["refused_rightly"]) == (0, 1)
    assert found["median_slack"] == pytest.approx(0.05) and is_met(found)
    assert is_met(of_all([*good, row(0, refused=True)]))
    assert not is_met(of_all([*good, *(row(0, refused=True) for _ in range(2))]))
    assert not is_met(of_all([*good, row(101, killed=True)]))
    assert not is_met(of_all([row(90)]))
    assert not is_met({**found, "asked": 13}) and not is_met({**found, "failed": [12]})


def test_a_run_that_is_cut_off_leaves_the_figures_of_its_draws(monkeypatch, tmp_path):
    """The file is written after every draw, and says how many were asked."""

    def run(draw, costs):
        if len(rows.read_text(encoding="utf-8").splitlines()) == 3:
            raise KeyboardInterrupt
        return {**row(95), **dict.fromkeys(NAMES, 0), "allowed": 100}

    rows, result = tmp_path / "rows", tmp_path / "result.json"
    monkeypatch.setattr(certificate, "run", run)
    monkeypatch.setattr(certificate, "_apart", lambda work: asdict(TYPICAL_PROCESS))
    monkeypatch.setattr(
        "sys.argv", ["certificate", "--draws=9", f"--rows={rows}", f"--json={result}"]
    )
    with pytest.raises(KeyboardInterrupt):
        certificate.main()
    found = json.loads(result.read_text(encoding="utf-8"))
    assert (found["draws"], found["asked"], len(found["rows"])) == (3, 9, 3)
    assert not is_met(found)
