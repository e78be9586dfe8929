"""Runs of all cases of a module, which its tests look at one by one."""

import pytest

from bench.shared.workers import run_ranks
from tests.integrations.cases.hybrid_runs import trained


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """By number of ranks, of every rank: what the module's `CASES` came to."""
    folder = str(tmp_path_factory.mktemp("trained"))
    cases = request.module.CASES
    return {ranks: run_ranks(trained, ranks, rows, folder) for ranks, rows in cases.items()}


def pytest_generate_tests(metafunc):
    """A test that asks for `ranks` and `case` is of each case of its module."""
    if {"ranks", "case"} <= set(metafunc.fixturenames):
        rows = [(ranks, case) for ranks, cases in metafunc.module.CASES.items() for case in cases]
        metafunc.parametrize(("ranks", "case"), rows, ids=[case[0] for _, case in rows])
