"""bench.certificate kills a process at the peak of its resident memory."""

import pytest

from bench import certificate
from bench.certificate import Certificate, Draw

MIB = 1 << 20


@pytest.mark.parametrize("taken", [5, 60])
def test_a_process_above_its_answer_is_killed_and_another_is_not(monkeypatch, taken):
    """Of an answer of 30 MiB. Memory that is given back before it ends counts too."""
    answer = Certificate(30 * MIB, 0, False, None, None, "serial", 0)

    def train(draw, plan, told):
        told.send((0, certificate._resident()))
        told.recv()
        bytes(taken * MIB)
        bytearray(b"1") * (taken * MIB)
        told.send(certificate.peak_rss_bytes())

    monkeypatch.setattr(certificate, "certify", lambda _: answer)
    monkeypatch.setattr(certificate, "train", train)
    row = certificate.run(Draw.of(0, 0))
    assert row["killed"] == (taken > 30) and row["took"] >= 0.9 * min(taken, 30) * MIB
