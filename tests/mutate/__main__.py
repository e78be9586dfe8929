"""Break the code in one place after the other, and see that a test notices.

    python -m tests.mutate [--promises] [--changed BASE] [--area AREA ...] [--name TEXT]
                           [--ledger FILE] [--jobs 2]

Prints what survives. Fails where a mutation does not apply, its tests do not pass without it, or
fewer than 95 % of mutants die (with --promises or --changed: one lives).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tests.mutate import listed
from tests.mutate.history import Ledger, changed_since
from tests.mutate.listed import ROOT, Mutant
from tests.mutate.trees import Outcome, Tree, next_outcome, warm_up
from tests.support.disks import own_folder

LEAST_KILLED = 0.95  # of those that are no equivalents
LIMIT_SECONDS = 300  # of the tests of one mutant, where they hang: they take a few
NO_VERDICT = (4, 5)  # of pytest: a test that is not there, or is left out
T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    mutants = [
        mutant for area in asked.area or listed.areas() for mutant in listed.read(area)
        if asked.name in mutant.title
    ]  # fmt: skip
    wrong = listed.do_not_apply(mutants)
    if wrong:
        print("\n".join(wrong))
        return 1
    if asked.promises or asked.changed:
        changed = changed_since(asked.changed, mutants) if asked.changed else []
        mutants = [each for each in mutants if (asked.promises and each.promise) or each in changed]
    ledger = Ledger(asked.ledger, mutants)
    for mutant in mutants:
        if mutant.equivalent:
            ledger.add(mutant.title, "equivalent")
    to_run = [mutant for mutant in mutants if mutant.title not in ledger.known]
    if to_run and not _run(to_run, ledger, asked.jobs, unchecked=asked.unchecked):
        return 1
    verdicts = [ledger.known[mutant.title] for mutant in mutants if not mutant.equivalent]
    survivors = [each for each in mutants if ledger.known[each.title] == "survived"]
    killed = len(verdicts) - len(survivors)
    print(f"{killed} of {len(verdicts)} killed, {len(mutants) - len(verdicts)} equivalent")
    for mutant in survivors:
        print(f"survived: {mutant.title} ({mutant.file})")
    least = 1.0 if asked.promises or asked.changed else LEAST_KILLED
    return int(killed < least * len(verdicts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate")
    parser.add_argument("--promises", action="store_true", help="those of docs/guarantees.md")
    parser.add_argument("--changed", metavar="BASE", help="those that a commit does not have, or "
                        "whose function or tests are others there")  # fmt: skip
    parser.add_argument("--area", nargs="*", choices=listed.areas())
    parser.add_argument("--name", default="", help="those whose title has this")
    parser.add_argument("--ledger", type=Path, help="where verdicts are kept: one that is there "
                        "is asked again where its function or tests are others now")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--unchecked", action="store_true", help="trust the tests to pass as it is")
    return parser


def _run(mutants: Sequence[Mutant], ledger: Ledger, jobs: int, *, unchecked: bool) -> bool:
    """Whether their tests pass without a mutation."""
    own_folder.make()
    warm_up()
    folder = Path(tempfile.mkdtemp())
    trees = [Tree(ROOT, folder / str(i)) for i in range(min(jobs, len(mutants)))]
    try:
        if not unchecked and not _pass_unchanged(mutants, trees):
            return False
        _find_verdicts(mutants, trees, ledger)
    finally:
        for tree in trees:
            tree.close()
    return True


def _pass_unchanged(mutants: Sequence[Mutant], trees: Sequence[Tree]) -> bool:
    """Whether the tests that are named pass without a mutation, each module once."""
    by_module: dict[str, dict[str, None]] = {}
    for mutant in mutants:
        for test in mutant.killed_by:
            by_module.setdefault(test.partition("::")[0], {})[test] = None
    shares = [list(by_module.values())[i :: len(trees)] for i in range(len(trees))]
    runs = [[test for tests in share for test in tests] for share in shares if share]
    passed = True
    for tests, outcome in _run_all(trees, runs, lambda tree, tests: tests):
        print(f"{len(tests)} tests without mutations: {outcome.seconds:.0f} s", flush=True)
        if outcome.code != 0:
            print(outcome.output[-4000:])
            passed = False
    return passed


def _find_verdicts(mutants: Sequence[Mutant], trees: Sequence[Tree], ledger: Ledger) -> None:
    changed: dict[Tree, str] = {}

    def mutate(tree: Tree, mutant: Mutant) -> Sequence[str]:
        if tree in changed:
            before = changed.pop(tree)
            (tree.root / before).write_text(
                (ROOT / before).read_text(encoding="utf-8"), encoding="utf-8"
            )
        (tree.root / mutant.file).write_text(mutant.applied(), encoding="utf-8")
        changed[tree] = mutant.file
        return mutant.killed_by

    for mutant, outcome in _run_all(trees, mutants, mutate, LIMIT_SECONDS):
        lives = outcome.code in (0, *NO_VERDICT)
        verdict = "survived" if lives else outcome.failed or outcome.end
        ledger.add(mutant.title, verdict)
        print(f"{outcome.seconds:5.1f} s  {mutant.title}: {verdict}", flush=True)
        if outcome.code and not outcome.failed:
            print(outcome.output[-300:])


def _run_all(
    trees: Sequence[Tree],
    items: Sequence[T],
    tests_of: Callable[[Tree, T], Sequence[str]],
    limit_seconds: int | None = None,
) -> Iterator[tuple[T, Outcome]]:
    """Every item in the next tree that is free."""
    waiting, running, free = list(items)[::-1], dict[Tree, T](), list(trees)
    while waiting or running:
        while waiting and free:
            tree, item = free.pop(), waiting.pop()
            tree.begin(tests_of(tree, item), limit_seconds)
            running[tree] = item
        tree, outcome = next_outcome(list(running))
        free.append(tree)
        yield running.pop(tree), outcome


if __name__ == "__main__":
    sys.exit(main())
