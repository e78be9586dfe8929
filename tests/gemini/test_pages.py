"""Zeros that are not written are zeros."""

from pathlib import Path

import pytest
import torch

from gemini.pages import zeros

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 4, 100, 2 * MIB, 5 * MIB + 12, 64 * MIB])
def test_zeros_are_zeros_where_memory_was_used_before(nbytes):
    for _ in range(3):
        used = [torch.ones(max(nbytes // 4, 1)) for _ in range(3)]
        del used  # the allocator may hand the same pages out again
        fresh = zeros(nbytes // 4, torch.float32)
        assert fresh.shape == (nbytes // 4,) and not fresh.any()
        fresh.fill_(1.0)
        assert bool((fresh == 1).all())


def test_zeros_take_no_memory_before_they_are_touched():
    def resident():
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096

    before = resident()
    fresh = zeros(64 * MIB, torch.float32)
    assert resident() - before < 8 * MIB
    fresh[::1024].fill_(1.0)
    assert resident() - before > 200 * MIB
