"""bench.certificate kills a process at the peak of its resident memory."""

import pytest

from bench import certificate
from bench.certificate import Certificate, Draw
from gemini.memtracer.monitor import process_peak_rss_bytes, reset_peak_rss, resident_bytes
from gemini.plan.machine import TYPICAL_PROCESS

MIB = 1 << 20


@pytest.mark.parametrize("taken", [5, 60])
def test_a_process_above_its_answer_is_killed_and_another_is_not(monkeypatch, taken):
    """Of an answer of 30 MiB. Memory that is given back before it ends counts too."""

    def certify(draw, costs):
        floor = resident_bytes()
        return Certificate(floor + 30 * MIB, 0, floor, False, None, None, "serial", 0)

    def train(draw, plan):
        reset_peak_rss()
        bytearray(b"1") * (taken * MIB)
        return process_peak_rss_bytes()

    monkeypatch.setattr(certificate, "certify", certify)
    monkeypatch.setattr(certificate, "train", train)
    row = certificate.run(Draw.of(0, 0), TYPICAL_PROCESS)
    assert row["killed"] == (taken > 30) and row["took"] >= 0.9 * min(taken, 30) * MIB
