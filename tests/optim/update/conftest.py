"""Threads that update blocks on the host, shared by the tests of a file."""

import pytest

from optim.update.cpu_update import CpuWorkers


@pytest.fixture(scope="module")
def workers():
    workers = CpuWorkers(2)
    yield workers
    workers.close()
