"""The models of tests/integrations/parallel/test_models.py that `make ci` leaves out."""

import pytest

from tests.integrations.cases.hybrid_runs import check_trained
from tests.integrations.parallel import conftest, test_models

pytest.importorskip("transformers")
found, pytest_generate_tests = conftest.found, conftest.pytest_generate_tests
CASES = {ranks: cases[1::2] for ranks, cases in test_models.ALL.items()}


def test_a_model_of_the_table_trains_as_one_process(found, ranks, case):
    check_trained(found[ranks], case)
