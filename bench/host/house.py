"""What the house is: python -m bench.host.house

Lines and files of the source by room, protocols with fewer than two implementers, reaches two deep,
the longest function and the widest signature. `tests/test_structure.py` holds what these may be.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("gemini", "optim", "kernels_triton", "io/nvme")
SMALL = 60  # lines, below which a file is to be a public door


@dataclass(frozen=True, slots=True)
class Source:
    path: str  # from the root
    lines: int
    tree: ast.Module


@cache
def sources() -> tuple[Source, ...]:
    """Every file of the source, once: folders that `gemini` shows under its own name are links."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder).parents
            if not any((ROOT / folder / part).is_symlink() for part in inside):
                text = path.read_text(encoding="utf-8")
                name = str(path.relative_to(ROOT))
                found.append(Source(name, text.count("\n"), ast.parse(text)))
    return tuple(found)


def _named(node: ast.expr) -> str:
    """The last name of a base class."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _members(node: ast.ClassDef) -> set[str]:
    """Methods, fields and attributes that it gives itself."""
    found = set()
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(inner.name)
            found |= {
                n.attr
                for n in ast.walk(inner)
                if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                and isinstance(n.value, ast.Name) and n.value.id == "self"
            }  # fmt: skip
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            found.add(inner.target.id)
        elif isinstance(inner, ast.Assign):
            found |= {n.id for n in inner.targets if isinstance(n, ast.Name)}
    return found


def protocols() -> Mapping[str, list[str]]:
    """By `path:name` of every Protocol, the classes of the source that have all its members."""
    classes = [
        (source.path, node)
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    ]
    by_name: dict[str, list[ast.ClassDef]] = {}
    for _, node in classes:
        by_name.setdefault(node.name, []).append(node)

    def is_protocol(node: ast.ClassDef) -> bool:
        return any(_named(base) == "Protocol" for base in node.bases)

    def members(node: ast.ClassDef) -> set[str]:
        found = _members(node)
        for base in node.bases:
            for other in by_name.get(_named(base), ()):
                if other.name != node.name:
                    found |= members(other)
        return found

    has = {id(node): members(node) for _, node in classes}
    return {
        f"{path}:{node.name}": sorted(
            other.name
            for _, other in classes
            if not is_protocol(other) and has[id(node)] <= has[id(other)]
        )
        for path, node in classes
        if is_protocol(node)
    }


def _chain(node: ast.expr) -> tuple[str, list[str]] | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, names[::-1]) if isinstance(node, ast.Name) else None


def reaches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of `other.its.own.part`: three names on an object that is a variable or an
    attribute of self; those of imported modules do not count."""
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {(a.asname or a.name).split(".")[0] for node in imports for a in node.names}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        chain = _chain(node)
        if chain is None or chain[0] in modules:
            continue
        base, names = chain
        if len(names[1:] if base in ("self", "cls") else names) >= 3:
            yield node.lineno, ".".join((base, *names))


def functions() -> Iterator[tuple[str, int, int]]:
    """(path:name, lines, arguments) of every function."""
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                args = node.args
                count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
                count -= any(a.arg in ("self", "cls") for a in args.args[:1])
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield f"{source.path}:{node.name}", lines, count


def main() -> int:
    rooms: dict[str, list[int]] = {}
    for source in sources():
        rooms.setdefault(str(Path(source.path).parent), []).append(source.lines)
    for room, lines in sorted(rooms.items()):
        print(f"{len(lines):4d} files {sum(lines):6d} lines  {room}")
    every = [source.lines for source in sources()]
    print(f"{len(every):4d} files {sum(every):6d} lines  in all")
    small = sum(lines < SMALL for lines in every)
    print(f"{small} files below {SMALL} lines, longest {max(every)}")
    alone = {name: found for name, found in protocols().items() if len(found) < 2}
    print(f"{len(protocols())} protocols, {len(alone)} with fewer than two implementers:")
    for name, found in alone.items():
        print(f"    {name}: {', '.join(found) or 'none'}")
    deep = [(s.path, *where) for s in sources() for where in reaches(s.tree)]
    print(f"{len(deep)} reaches two deep")
    by_lines = sorted(functions(), key=lambda f: -f[1])[:3]
    by_arguments = sorted(functions(), key=lambda f: -f[2])[:3]
    print("longest functions:", ", ".join(f"{name} {lines}" for name, lines, _ in by_lines))
    print("widest signatures:", ", ".join(f"{name} {count}" for name, _, count in by_arguments))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
