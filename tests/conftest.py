"""What every test gets: the Triton interpreter where there is no GPU, and poisoned memory."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel's module is imported

import pytest

from tests.workers import poison_memory

poison_memory()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
