"""Fixtures for loops that make a process group of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from bench.shared.workers import preload

# seconds for every rank, else
preload("lightning.pytorch", "peft", "torch.distributed.pipelining", "transformers.trainer", "trl")
preload("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama")


@pytest.fixture
def alone() -> Iterator[None]:
    """A launched loop makes a process group of one, and leaves it and its environment."""
    before = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def elsewhere(alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And its current folder is a temporary one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def a_script_of_its_own(monkeypatch):
    """What one test configures is no configuration of the next."""
    from gemini.integrations.config import global_context

    monkeypatch.setattr(global_context, "config", global_context.config)
