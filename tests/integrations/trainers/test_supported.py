"""docs/trainers.md says what tests show."""

import ast
from pathlib import Path

from bench.docs.supported import SUPPORTED

TESTS = Path(__file__).resolve().parents[2]


def test_every_row_names_a_test_that_is_there():
    for row in (row for rows in SUPPORTED.values() for row in rows):
        file, name = row.test.split("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert name in names and name.startswith("test_"), row


def test_every_library_has_its_table_on_the_page():
    page = (TESTS.parent / "docs/trainers.md").read_text(encoding="utf-8")
    assert [name for name in SUPPORTED if f"<!-- table trainers-{name} -->" not in page] == []
