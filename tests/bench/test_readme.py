from pathlib import Path

from bench.readme import render

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_tables_in_the_readme_are_those_of_the_results():
    text = (ROOT / "README.md").read_text()
    assert "<!-- table demo -->" in text
    assert render(text) == text
