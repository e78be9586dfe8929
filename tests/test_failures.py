"""docs/failures.md has every error class and every message that needs a remedy."""

import re
from pathlib import Path

from tests.support.messages import error_classes, messages

ROOT = Path(__file__).resolve().parent.parent
# ValueErrors by which our own parts check each other
INTERNAL = (
    "kernels_triton/", "optim/state/space.py", "optim/rules/state_layout.py",
    "optim/state/disk/state_version.py",
    "gemini/placement/timetable/belady.py", "gemini/placement/timeline.py",
    "io/nvme/layout.py", "io/nvme/store.py",
    "gemini/checkpoint/format/manifest.py",
    "gemini/checkpoint/foreign/metadata.py",
    "gemini/checkpoint/untrusted/torch_files.py",
)  # fmt: skip


def page():
    return re.sub(r"\s+", " ", (ROOT / "docs/failures.md").read_text(encoding="utf-8"))


def listed():
    for message in messages():
        if not message.text:  # made by a helper: its class is on the page
            continue
        if message.kind == "ValueError" and (
            message.says_what_was_expected or message.where.startswith(INTERNAL)
        ):
            continue
        if message.kind != "transfer_error":  # `TransferError`, which is on the page
            yield message


def is_on_page(message, text):
    """Its longest fixed part, up to the first example of its own."""
    sentence = re.split(r"\. (?=[A-Z])", message.key)
    return any(part.strip(" .(") in text for part in sentence)


def test_every_error_class_has_a_remedy():
    text = page()
    found = error_classes()
    assert {"BudgetError", "ChecksumError", "SequenceError"} <= set(found)
    assert [name for name in found if f"`{name}`" not in text] == []


def test_every_message_has_a_remedy():
    text, found = page(), list(listed())
    assert len(found) > 80
    assert [(m.where, m.key) for m in found if not is_on_page(m, text)] == []


def test_every_message_on_the_page_is_one_of_ours():
    """A message that was changed leaves no stale remedy behind."""
    keys = [message.key for message in messages() if message.key]
    texts = [message.text for message in messages()]
    for row in (ROOT / "docs/failures.md").read_text(encoding="utf-8").splitlines():
        if not row.startswith("| ") or row.startswith(("| message", "| class")):
            continue
        for shown in re.findall(r"``? ?(.+?) ?``?(?!`)", row.split(" | ")[0]):
            if " " in shown and "optimizer.parked" not in shown:
                whole = any(shown in text for text in texts)
                assert whole or any(shown in key or key in shown for key in keys), shown


def test_a_message_without_a_remedy_is_found():
    text = page().replace("staging buffers are in use", "")
    assert next(m.where for m in listed() if not is_on_page(m, text)).startswith("io/nvme/pool.py")


def test_every_row_has_a_remedy_of_its_own():
    rows = [
        row
        for row in (ROOT / "docs/failures.md").read_text(encoding="utf-8").splitlines()
        if row[:2] == "| "
    ]
    assert len(rows) > 150
    assert [row for row in rows if re.search(r"\| (as it says.*)?\s*\|$", row)] == []
