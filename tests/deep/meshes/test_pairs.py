"""The rows of tests/integrations/parallel/test_pairs.py at 8 ranks that `make ci` leaves out."""

import pytest

from tests.integrations.cases.hybrid_runs import check_trained
from tests.integrations.parallel import conftest, test_pairs

pytest.importorskip("transformers")
found, pytest_generate_tests = conftest.found, conftest.pytest_generate_tests
CASES = {8: [case for case in test_pairs.ALL[8] if case not in test_pairs.CASES[8]]}


def test_any_two_train_as_one_process(found, ranks, case):
    check_trained(found[ranks], case)
