"""docs/ as a site: it builds without a warning, loads nothing from elsewhere, has every name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemini
import optim

ROOT = Path(__file__).resolve().parent.parent
LOADED = re.compile(
    r'(?:<script[^>]*src|<link[^>]*rel="(?:stylesheet|preload)"[^>]*href|<img[^>]*src)="?(\S+?)[">]'
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(what mkdocs said, the site)"""
    pytest.importorskip("mkdocstrings")
    site = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site], cwd=ROOT,
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return site


def public_names():
    yield from (f"gemini.{name}" for name in gemini.__all__ if name != "__version__")
    yield from (f"gemini.optim.{name}" for name in optim.__all__ if name not in gemini.__all__)


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8").splitlines()
    assert [name for name in public_names() if f"::: {name}" not in page] == []


@pytest.mark.ci
def test_the_site_builds_without_a_warning_and_shows_docstrings(built):
    page = (built / "api/index.html").read_text(encoding="utf-8")
    assert [name for name in public_names() if f'id="{name}"' not in page] == []
    assert "<li><strong>device</strong>: where modules compute;" in page
    front = (built / "index.html").read_text(encoding="utf-8")
    assert 'href="train/"' in front and (built / "LICENSE").is_file()


@pytest.mark.ci
def test_the_site_loads_nothing_from_elsewhere(built):
    assert LOADED.search('<script src="https://x.org/a.js">')[1] == "https://x.org/a.js"
    found = {
        target
        for page in built.rglob("*.html")
        for target in LOADED.findall(page.read_text(encoding="utf-8"))
        if "//" in target
    }
    assert found == set()
