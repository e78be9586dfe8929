"""`report.html`: pictures in it, and nothing that is fetched."""

import io
import re
import sys

from gemini.train.report import PICTURES, summary, write_report
from gemini.train.run import printable, visible

LOG = [
    {
        "step": step, "loss": 3.0 / step, "learning_rate": 0.1, "seconds": 2.0,
        "seconds_passes": 1.0, "seconds_update": 0.5, "seconds_between": 0.5,
        "gemini/device_predicted_bytes": 2**30, "gemini/device_measured_bytes": 2**29,
        "gemini/nvme_predicted_bytes": 0, "gemini/stalled_seconds": 0.1,
    }
    for step in (1, 2, 3)
]  # fmt: skip


def written(tmp_path, log):
    path = tmp_path / "report.html"
    write_report(
        path, log, title="m on <d>", plan="a plan", config="lr: 1", samples=[("a", "<b>")],
        planned_seconds=1.5,
    )  # fmt: skip
    return path.read_text(encoding="utf-8")


def test_a_report_has_every_picture_and_fetches_nothing(tmp_path):
    text = written(tmp_path, [*LOG, {"step": 3, "eval_loss": 1.5}])
    assert text.count("<svg") == len(PICTURES) == 5
    assert re.findall(r"(?:src|href)=\"?(?!#)[\w/:]", text) == []
    for part in ("m on &lt;d&gt;", "a plan", "lr: 1", "&lt;b&gt;"):
        assert part in text
    assert "<d>" not in text and "<b>" not in text
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    assert "svg { width: 100%;" in text and "min-width" not in text  # on a phone too


def test_a_continuation_of_blank_lines_is_seen():
    assert visible("a b\n\n\n") == "a b" and visible("\n\n") == r"'\n\n'" and visible("") == "''"


def test_a_report_begins_with_what_came_of_the_run():
    log = [*LOG, {"step": 3, "eval_loss": 1.5, "num_tokens": 1e4}, {"step": 3, "train_runtime": 9}]
    said = summary(log, 1.5)
    assert said["loss of training"] == "3 at step 1, 1 at step 3" and said["tokens"] == "10,000"
    assert said["a step"].endswith(", planned 1.5 s") and said["time"].startswith("9 s ")
    assert {"machine", "versions"} < said.keys() and summary([]) == {}


def test_the_memory_of_a_small_run_is_in_mib(tmp_path):
    assert "<!-- GiB of a rank at its peak -->" in written(tmp_path, LOG)
    small = [
        {**entry, "gemini/device_predicted_bytes": 2**25, "gemini/device_measured_bytes": 2**24}
        for entry in LOG
    ]
    assert "<!-- MiB of a rank at its peak -->" in written(tmp_path, small)


def test_a_run_that_logged_nothing_has_a_report(tmp_path):
    assert "<svg" not in written(tmp_path, [])


def test_half_of_a_character_does_not_fail_what_is_written(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_report(path, [], title="é\ud83d", plan="", config="", samples=[("\udc80", "→")])
    text = path.read_bytes().decode("utf-8")
    assert "é" in text and "→" in text and "\\ud83d" in text and "\\udc80" in text
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert printable("é\ud83d a\n") == "\\xe9\\ud83d a\n"
