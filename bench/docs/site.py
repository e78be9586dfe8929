"""`make docs`: what mkdocs needs to know of this repository; mkdocs.yml names it twice.

As a hook it adds pages that live outside of docs/: the front page is README.md. As an extension
of griffe, which reads docstrings, it makes a list of the lines `name: what it is`, and finds
folders that need no `__init__.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}  # fmt: skip
COPIED = ("LICENSE", "CITATION.cff")
FIRST_ADR = "adr/0001-io-is-a-source-root.md"
ARGUMENT = re.compile(r"(?m)^((?:[a-z]\w*)(?:, [a-z]\w*)*): ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        text = as_page((ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    for name in COPIED:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def as_page(text: str) -> str:
    """A file of the root, with its links as docs/ has them."""
    for source, page in PAGES.items():
        text = text.replace(f"]({source})", f"]({page})")
    return text.replace("](docs/adr)", f"]({FIRST_ADR})").replace("](docs/", "](")


def with_lists(docstring: str) -> str:
    """Paragraphs of `name: what it is` as lists: Markdown would run their lines together."""
    parts = []
    for part in docstring.split("\n\n"):
        if ARGUMENT.match(part):
            lines = re.sub(r"\n +", " ", part).splitlines()
            part = "\n".join(ARGUMENT.sub(r"- **\1**: ", line) for line in lines)
        parts.append(part)
    return "\n\n".join(parts)


class Arguments(griffe.Extension):
    """Docstrings as Markdown shows them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Folders without an `__init__.py` are packages too, which griffe passes over."""
        if mod.is_init_module and isinstance(mod.filepath, Path):
            _add_folders(mod, mod.filepath.parent)


def _add_folders(package: griffe.Module, folder: Path) -> None:
    for inside in sorted(folder.iterdir()):
        init = inside / "__init__.py"
        if any(inside.glob("*.py")) and not init.exists():
            room = griffe.Module(inside.name, filepath=init, parent=package)
            package.set_member(inside.name, room)
            _add_folders(room, inside)
