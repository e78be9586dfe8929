"""Break the code in one place after the other, and see that a test notices.

    python -m tests.mutate [--promises] [--area AREA ...] [--name TEXT] [--jobs 2]

Prints what survives. Fails where a mutation does not apply, its tests do not pass without it, or
fewer than 95 % of mutants die (with --promises: one lives).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tests.mutate import listed
from tests.mutate.listed import ROOT, Mutant
from tests.mutate.trees import Outcome, Tree, warm_up
from tests.support.disks import own_folder

LEAST_KILLED = 0.95  # of those that are no equivalents
LIMIT_SECONDS = 150.0  # of the tests of one mutant: they take a few
WHOLE_LIMIT_SECONDS = 1800.0  # of all of them, unchanged
T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    mutants = [
        mutant for area in asked.area or listed.areas() for mutant in listed.read(area)
        if asked.name in mutant.title and (mutant.promise or not asked.promises)
    ]  # fmt: skip
    wrong = listed.do_not_apply(mutants)
    if wrong:
        print("\n".join(wrong))
        return 1
    to_run = [mutant for mutant in mutants if not mutant.equivalent]
    own_folder.make()
    warm_up()
    folder = Path(tempfile.mkdtemp())
    trees = [Tree(ROOT, folder / str(i)) for i in range(asked.jobs)]
    try:
        if not asked.unchecked and not _pass_unchanged(to_run, trees):
            return 1
        survivors = _survivors(to_run, trees)
    finally:
        for tree in trees:
            tree.close()
    killed = len(to_run) - len(survivors)
    print(f"{killed} of {len(to_run)} killed, {len(mutants) - len(to_run)} equivalent")
    for mutant in survivors:
        print(f"survived: {mutant.title} ({mutant.file})")
    least = 1.0 if asked.promises else LEAST_KILLED
    return int(killed < least * len(to_run))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate")
    parser.add_argument("--promises", action="store_true", help="those that hold one of README.md")
    parser.add_argument("--area", nargs="*", choices=listed.areas())
    parser.add_argument("--name", default="", help="those whose title has this")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--unchecked", action="store_true", help="trust the tests to pass as it is")
    return parser


def _pass_unchanged(mutants: Sequence[Mutant], trees: Sequence[Tree]) -> bool:
    """Whether the tests that are named pass without a mutation, each module once."""
    by_module: dict[str, dict[str, None]] = {}
    for mutant in mutants:
        for test in mutant.killed_by:
            by_module.setdefault(test.partition("::")[0], {})[test] = None
    shares = [list(by_module.values())[i :: len(trees)] for i in range(len(trees))]
    runs = [[test for tests in share for test in tests] for share in shares if share]
    passed = True
    for tests, outcome in _run_all(trees, runs, lambda tree, tests: tests, WHOLE_LIMIT_SECONDS):
        print(f"{len(tests)} tests without mutations: {outcome.seconds:.0f} s", flush=True)
        if outcome.code != 0:
            print(outcome.output[-4000:])
            passed = False
    return passed


def _survivors(mutants: Sequence[Mutant], trees: Sequence[Tree]) -> list[Mutant]:
    survivors = []
    original = {mutant.file: (ROOT / mutant.file).read_text() for mutant in mutants}
    changed: dict[Tree, Mutant] = {}

    def mutate(tree: Tree, mutant: Mutant) -> Sequence[str]:
        if tree in changed:
            before = changed.pop(tree).file
            (tree.root / before).write_text(original[before])
        (tree.root / mutant.file).write_text(mutant.applied_to(original[mutant.file]))
        changed[tree] = mutant
        return mutant.killed_by

    for mutant, outcome in _run_all(trees, mutants, mutate, LIMIT_SECONDS):
        lives = outcome.code == 0
        said = "SURVIVED" if lives else outcome.failed or _unnamed(outcome)
        print(f"{outcome.seconds:5.1f} s  {mutant.title}: {said}", flush=True)
        if lives:
            survivors.append(mutant)
    return survivors


def _unnamed(outcome: Outcome) -> str:
    if outcome.code is None:
        return "did not end"
    return f"ended with {outcome.code}: {outcome.output[-300:]}"


def _run_all(
    trees: Sequence[Tree],
    items: Sequence[T],
    tests_of: Callable[[Tree, T], Sequence[str]],
    limit_seconds: float,
) -> Iterator[tuple[T, Outcome]]:
    """Every item in the next tree that is free."""
    waiting, running, free = list(items)[::-1], dict[Tree, T](), list(trees)
    while waiting or running:
        while waiting and free:
            tree, item = free.pop(), waiting.pop()
            tree.begin(tests_of(tree, item), limit_seconds)
            running[tree] = item
        time.sleep(0.02)
        for tree in list(running):
            outcome = tree.outcome()
            if outcome is not None:
                free.append(tree)
                yield running.pop(tree), outcome


if __name__ == "__main__":
    sys.exit(main())
