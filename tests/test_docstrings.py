"""Every public name says what it is, and which errors it raises."""

import ast
import dataclasses
import inspect
import textwrap

import pytest

import gemini
import nvme
import optim

# Ours, raised by a function that makes it
MADE_BY = {"explained": "FolderError", "transfer_error": "TransferError", "missing": "BudgetError"}
OUR_BUGS = {"AssertionError", "AttributeError", "KeyError", "NotImplementedError"}


def public():
    """(qualified name, object) of what the packages list, constants and type aliases left out."""
    for package in (gemini, optim, nvme):
        for name in package.__all__:
            found = getattr(package, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield f"{package.__name__}.{name}", found


def methods(cls):
    """(name, function) of the public methods and properties of our own classes, inherited too."""
    seen = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] not in ("gemini", "optim", "nvme"):
            continue
        for name, member in vars(base).items():
            function = member.fget if isinstance(member, property) else member
            function = getattr(function, "__func__", function)
            if name.startswith("_") or not inspect.isfunction(function) or name in seen:
                continue
            seen.add(name)
            yield name, inspect.unwrap(function)


def own_docstring(found):
    doc = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
    generated = inspect.isclass(found) and dataclasses.is_dataclass(found)
    if generated and doc is not None and doc.startswith(found.__name__ + "("):
        return ""
    return doc or ""


def raised_by(function, depth=1):
    """Names of the errors that its body raises, and those of the private helpers it calls."""
    inner = inspect.unwrap(function)
    if inner.__code__.co_filename.startswith("<"):  # made by dataclass
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(inner)))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).split(".")[-1]
            found.add(MADE_BY.get(name, name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and depth:
            helper = function.__globals__.get(node.func.id)
            ours = getattr(helper, "__module__", "") == function.__module__
            if ours and inspect.isfunction(helper) and node.func.id.startswith("_"):
                found |= raised_by(helper, depth - 1)
    return {name for name in found if not name.startswith("_")} - OUR_BUGS


PUBLIC = dict(public())


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_and_its_methods_have_docstrings(name):
    found = PUBLIC[name]
    assert own_docstring(found), name
    if inspect.isclass(found):
        from_torch = {"forward", "zero_grad", "add_param_group", "wait", "ready"}
        bare = [m for m, f in methods(found) if not f.__doc__ and m not in from_torch]
        # what an interface documents, its implementations need not
        documented = {m for base in (nvme.Engine,) for m, f in methods(base) if f.__doc__}
        assert [m for m in bare if m not in documented] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_what_a_public_name_raises_is_named(name):
    found = PUBLIC[name]
    if not inspect.isclass(found):
        missing = [e for e in raised_by(found) if e not in own_docstring(found)]
        assert missing == [], name
        return
    if getattr(found, "_is_protocol", False):
        return
    says = own_docstring(found)
    for base in found.__mro__[1:]:
        if base.__module__.split(".")[0] in ("gemini", "optim", "nvme"):
            says += own_docstring(base)
    for method in ("__init__", "__post_init__"):
        if inspect.isfunction(vars(found).get(method)):
            missing = [e for e in raised_by(vars(found)[method]) if e not in says]
            assert missing == [], f"{name}.{method}"
    for method, function in methods(found):
        doc = (function.__doc__ or "") + says
        missing = [e for e in raised_by(function) if e not in doc]
        assert missing == [], f"{name}.{method}"


def test_an_error_that_is_not_named_is_found():
    def silent(x):
        """Says nothing."""
        if x:
            raise ValueError("x")

    assert raised_by(silent) == {"ValueError"}
