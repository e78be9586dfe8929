"""Where the source walks what has no order: sets, which each process hashes in its own way, and
folders, which each disk lists in its own.

Types are read from annotations and from what is assigned, names of attributes and functions are
looked up in all files: one that is a set in one class and something else in another is not judged
outside of its class. What takes a set as an argument is judged by what it does with it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

SETS = {"set", "frozenset", "AbstractSet", "MutableSet", "WeakSet", "Set"}
MAPPINGS = {"dict", "Mapping", "MutableMapping", "defaultdict"}
HOLDERS = {"list", "tuple", "Sequence", "Iterable", "Iterator", "Collection", "deque", "Generator"}
LISTINGS = {"iterdir", "glob", "rglob", "iglob", "listdir", "scandir"}
MAKES_SETS = {"union", "intersection", "difference", "symmetric_difference", "copy"}
KEYS = {"keys", "items"}
# The result is the same in any order
FREE = {
    "sorted", "len", "any", "all", "set", "frozenset", "bool", "isinstance", "union",
    "intersection", "difference", "issubset", "issuperset", "isdisjoint", "difference_update",
    "intersection_update", "symmetric_difference", "update", "min", "max",
}  # fmt: skip
# The result has the order of what is given
WALKS = {
    "list", "tuple", "iter", "enumerate", "map", "filter", "zip", "reversed", "fromkeys",
    "sum", "join", "extend", "chain", "from_iterable", "deque", "islice", "reduce",
    "accumulate", "starmap", "product", "Counter", "OrderedDict", "dict",
}  # fmt: skip
LAZY = {
    "map", "filter", "zip", "enumerate", "chain", "from_iterable", "iter", "starmap", "list",
    "tuple", "islice",
}  # fmt: skip
ANY_KIND = {"", "Any", "Collection", "Iterable"}  # of a parameter to which a set may be given
SET, HOLDS, MAPS, OTHER = "a set", "holds sets", "maps to sets", "something else"
_PASSED_OVER = (ast.Name, ast.Constant, ast.Attribute, ast.expr_context, ast.operator)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def named(node: ast.AST | None) -> str:
    """The last name of an expression."""
    if isinstance(node, ast.Subscript):
        return named(node.value)
    return getattr(node, "attr", getattr(node, "id", ""))


@dataclass
class _Known:
    """Kinds by name, of all files."""

    attributes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    own: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    returns: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    aliases: dict[str, str] = field(default_factory=dict)
    functions: dict[str, list[_Function]] = field(default_factory=lambda: defaultdict(list))
    given: set[tuple[str, str]] = field(default_factory=set)  # arguments that are sets

    def of(self, annotation: ast.expr | None) -> str:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return _first_of(self.of(annotation.left), self.of(annotation.right))
        name = named(annotation)
        if name in SETS:
            return SET
        if name in self.aliases:
            return self.aliases[name]
        if not isinstance(annotation, ast.Subscript):
            return OTHER
        inner = annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if name in ("Optional", "ClassVar"):
            return self.of(parts[0])
        has_sets = self.of(parts[-1]) == SET or SET in map(self.of, parts[: name in HOLDERS])
        return OTHER if not has_sets else MAPS if name in MAPPINGS else HOLDS


class _File:
    def __init__(self, path: str, tree: ast.Module, known: _Known) -> None:
        self.path, self.tree, self.known = path, tree, known
        nodes = list(ast.walk(tree))
        self.parent = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.nodes = [node for node in nodes if not isinstance(node, _PASSED_OVER)]
        self.scopes: dict[ast.AST, dict[str, str]] = defaultdict(dict)

    # -- what is known --

    def declare(self) -> None:
        known = self.known
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                known.functions[node.name].append(node)
                kind = known.of(node.returns)
                known.returns[node.name].add(kind)
                above = self.parent[node]
                if isinstance(above, ast.ClassDef):
                    known.own[above.name, node.name].add(kind)
                    if any("property" in named(d) for d in node.decorator_list):
                        known.attributes[node.name].add(kind)
            elif isinstance(node, ast.Assign) and self.parent[node] is self.tree:
                kind = known.of(node.value) if isinstance(node.value, ast.Subscript) else OTHER
                if kind != OTHER and isinstance(node.targets[0], ast.Name):
                    known.aliases[node.targets[0].id] = kind

    def assign(self, *, is_last: bool) -> None:
        """Note what names and attributes are; again, it knows more, and at last what is no set."""
        known = self.known
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for arg in _args(node):
                    kind = known.of(arg.annotation)
                    if (node.name, arg.arg) in known.given and named(arg.annotation) in ANY_KIND:
                        kind = SET
                    self.scopes[node][arg.arg] = kind
            elif isinstance(node, ast.AnnAssign):
                self._note(node.target, known.of(node.annotation))
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value)
                    if is_last:
                        self._note_others(target)
            elif isinstance(node, ast.AugAssign | ast.NamedExpr):
                self._bind(node.target, node.value)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._bind(node.optional_vars, node.context_expr)
            elif isinstance(node, ast.For | ast.comprehension):
                self._bind_each(node.target, node.iter)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._bind(one, other)
        elif isinstance(target, ast.Name | ast.Attribute):
            kind = self.kind(value)
            if kind != OTHER:
                self._note(target, kind)

    def _note_others(self, target: ast.expr) -> None:
        for node in ast.walk(target):
            key = self._class(node), getattr(node, "attr", "")
            if named(getattr(node, "value", None)) == "self" and key not in self.known.own:
                self.known.own[key].add(OTHER)
                self.known.attributes[key[1]].add(OTHER)

    def _bind_each(self, target: ast.expr, walked: ast.expr) -> None:
        if self.kind(walked) != HOLDS:
            return
        last = target.elts[-1] if isinstance(target, ast.Tuple) else target
        if isinstance(last, ast.Name):
            self._note(last, SET)

    def _note(self, target: ast.expr, kind: str) -> None:
        if isinstance(target, ast.Name):
            self._scope(target)[target.id] = kind
            above = self.parent[self.parent[target]] if target in self.parent else None
            if isinstance(above, ast.ClassDef):
                self.known.attributes[target.id].add(kind)
                self.known.own[above.name, target.id].add(kind)
        elif isinstance(target, ast.Attribute):
            self.known.attributes[target.attr].add(kind)
            if named(target.value) == "self":
                self.known.own[self._class(target), target.attr].add(kind)

    def _scope(self, node: ast.AST) -> dict[str, str]:
        while not isinstance(node, _Function | ast.Module):
            node = self.parent[node]
        return self.scopes[node]

    def _class(self, node: ast.AST) -> str:
        while not isinstance(node, ast.ClassDef | ast.Module):
            node = self.parent[node]
        return getattr(node, "name", "")

    def _class_of(self, node: ast.expr) -> str:
        """Name of the class of `self`, or of an annotated argument; "" of anything else."""
        if named(node) == "self":
            return self._class(node)
        at: ast.AST = node
        while isinstance(node, ast.Name) and not isinstance(at, ast.Module):
            at = self.parent[at]
            if isinstance(at, ast.FunctionDef):
                own = [named(arg.annotation) for arg in _args(at) if arg.arg == node.id]
                if own:
                    return own[0]
        return ""

    # -- kinds of expressions --

    def kind(self, node: ast.expr) -> str:
        if isinstance(node, ast.Set | ast.SetComp):
            return SET
        if isinstance(node, ast.Name):
            return self._kind_of_name(node)
        if isinstance(node, ast.Attribute):
            own = self.known.own.get((self._class_of(node.value), node.attr))
            return _one(own or self.known.attributes.get(node.attr))
        if isinstance(node, ast.BinOp):
            sides = node.left, node.right
            if isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
                return SET if any(self.kind(s) == SET or _is_keys(s) for s in sides) else OTHER
            return OTHER
        if isinstance(node, ast.IfExp):
            return self._any(node.body, node.orelse)
        if isinstance(node, ast.BoolOp):
            return self._any(*node.values)
        if isinstance(node, ast.NamedExpr):
            return self.kind(node.value)
        if isinstance(node, ast.Subscript):
            return SET if self.kind(node.value) in (HOLDS, MAPS) else OTHER
        if isinstance(node, ast.Dict | ast.DictComp):
            return MAPS if any(self.kind(v) == SET for v in _held(node)) else OTHER
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.List):
            return HOLDS if any(self.kind(v) == SET for v in _held(node)) else OTHER
        return self._kind_of_call(node) if isinstance(node, ast.Call) else OTHER

    def _kind_of_name(self, node: ast.Name) -> str:
        at: ast.AST = node
        while True:
            if node.id in self.scopes.get(at, {}):
                return self.scopes[at][node.id]
            if isinstance(at, ast.Module):
                return OTHER
            at = self.parent[at]

    def _kind_of_call(self, node: ast.Call) -> str:
        name = named(node.func)
        if name in SETS or name in LISTINGS:
            return SET
        if isinstance(node.func, ast.Attribute):
            of = self.kind(node.func.value)
            if of == SET and name in MAKES_SETS:
                return SET
            if of in (HOLDS, MAPS) and name in ("get", "pop", "setdefault"):
                return SET
            if of == MAPS and name in ("values", "items"):
                return HOLDS
        if name in ("list", "sorted", "tuple", "reversed", "iter", "dict"):
            return _first_of(*({HOLDS, MAPS} & {self.kind(arg) for arg in node.args}))
        if name == "defaultdict" and node.args and named(node.args[0]) in SETS:
            return MAPS
        own = None
        if isinstance(node.func, ast.Attribute):
            own = self.known.own.get((self._class_of(node.func.value), name))
        return _one(own or self.known.returns.get(name))

    def _any(self, *nodes: ast.expr) -> str:
        return _first_of(*map(self.kind, nodes))

    # -- walks --

    def give(self) -> None:
        """Note which arguments of our functions are sets."""
        for call in self.nodes:
            if not isinstance(call, ast.Call) or named(call.func) not in self.known.functions:
                continue
            by_place = [i for i, arg in enumerate(call.args) if self.kind(arg) == SET]
            by_name = [k.arg for k in call.keywords if self.kind(k.value) == SET]
            for function in self.known.functions[named(call.func)] if by_place or by_name else ():
                args = [arg.arg for arg in _args(function) if arg.arg not in ("self", "cls")]
                names = [*(args[i] for i in by_place if i < len(args)), *by_name]
                self.known.given.update((named(call.func), str(name)) for name in names)

    def walks(self) -> Iterator[tuple[int, str]]:
        for node in self.nodes:
            for walked in self._walked_by(node):
                if self.kind(walked) == SET:
                    yield walked.lineno, ast.unparse(walked)

    def _walked_by(self, node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.For | ast.AsyncFor):
            yield node.iter
        elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp):
            if not self._is_free(node):
                yield from (part.iter for part in node.generators)
        elif isinstance(node, ast.Call):
            name = named(node.func)
            if (name in WALKS and not self._is_free(node)) or _has_ties(node):
                yield from node.args
            elif name == "pop" and not node.args and isinstance(node.func, ast.Attribute):
                yield node.func.value
        elif isinstance(node, ast.Starred) and not isinstance(self.parent[node], ast.Set):
            if isinstance(node.ctx, ast.Load) and not self._is_free(node):
                yield node.value
        elif isinstance(node, ast.YieldFrom | ast.FormattedValue) or _unpacks(node):
            yield node.value

    def _is_free(self, node: ast.expr) -> bool:
        """Whether what an expression yields goes where order makes no difference."""
        above = self.parent[node]
        if isinstance(above, ast.Starred):
            return isinstance(self.parent[above], ast.Set) or self._is_free(above)
        if isinstance(above, ast.Compare) and isinstance(above.ops[0], ast.In | ast.NotIn):
            return node in above.comparators
        if not isinstance(above, ast.Call) or node is above.func:
            return isinstance(above, ast.comprehension) and isinstance(
                self.parent[above], ast.SetComp
            )
        name = named(above.func)
        return not _has_ties(above) and (name in FREE or (name in LAZY and self._is_free(above)))


def _one(kinds: set[str] | None) -> str:
    """The kind of a name that has one; of one that has several, nothing is said."""
    return min(kinds) if kinds is not None and len(kinds) == 1 else OTHER


def _unpacks(node: ast.AST) -> TypeGuard[ast.Assign]:
    """Whether it gives each of several elements a name."""
    return isinstance(node, ast.Assign) and len(getattr(node.targets[0], "elts", ())) > 1


def _has_ties(call: ast.Call) -> bool:
    """Whether equal keys leave to the order which element is found."""
    return named(call.func) in ("min", "max") and any(k.arg == "key" for k in call.keywords)


def _first_of(*kinds: str) -> str:
    return next((kind for kind in (SET, HOLDS, MAPS) if kind in kinds), OTHER)


def _is_keys(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and named(node.func) in KEYS and not node.args


def _held(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.Dict):
        return node.values
    if isinstance(node, ast.DictComp):
        return [node.value]
    return node.elts if isinstance(node, ast.List) else [node.elt]  # type: ignore[attr-defined]


def _args(function: _Function) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def walks_of_sets(trees: Mapping[str, ast.Module]) -> list[str]:
    """`path:line expression` of every walk, over files by path."""
    known = _Known()
    files = [_File(path, tree, known) for path, tree in trees.items()]
    for file in files:
        file.declare()
    for is_last in (False, False, True):  # what is assigned may be known from another file
        for file in files:
            file.assign(is_last=is_last)
        for file in files:
            file.give()
    return [f"{file.path}:{line} {text}" for file in files for line, text in file.walks()]
