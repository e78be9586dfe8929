"""What every test gets: the Triton interpreter where there is no GPU, and poisoned memory."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel's module is imported

import pytest
from hypothesis import settings

from tests.workers import poison_memory

poison_memory()
settings.register_profile("any machine", deadline=None)  # a loaded one is not a failure
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
