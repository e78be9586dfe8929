"""Staging memory: private, given back when it is emptied, and a fork's child has none of it."""

import mmap
import os
from pathlib import Path

import pytest

from gemini.units import PAGE_BYTES
from nvme import BufferPool

NBYTES = 96 << 20


def proportional():
    """Bytes of this process's share of anonymous and of shared memory, as a cgroup counts them."""
    fields = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]:
        name, value, _ = line.split()
        fields[name.rstrip(":")] = int(value) << 10
    return fields["Pss_Anon"], fields["Pss_Shmem"]


def touched(pool):
    """All buffers, every page of them written."""
    buffers = [pool.take() for _ in range(pool.count)]
    for buffer in buffers:
        for page in range(0, buffer.view.nbytes, PAGE_BYTES):
            buffer.view[page] = 7
    return buffers


def test_emptied_buffers_are_memory_of_the_system_again():
    """Not only unmapped here: shared pages stay where they are until the last byte of the mapping
    is gone, and count against a cgroup."""
    before = proportional()
    pool = BufferPool(6, NBYTES // 6)
    buffers = touched(pool)
    full = proportional()
    assert 0.95 < (full[0] - before[0]) / NBYTES < 1.1
    assert full[1] - before[1] < NBYTES // 50, "shared memory"
    pool.empty()
    emptied = proportional()
    assert (emptied[0] - before[0]) / NBYTES < 0.05
    assert not any(buffers[0].view[:PAGE_BYTES]) and not any(buffers[-1].view[-PAGE_BYTES:])


def test_pinned_buffers_stay():
    pool = BufferPool(2, PAGE_BYTES, lambda address, nbytes: lambda: None)
    buffers = touched(pool)
    pool.empty()
    assert buffers[1].view[0] == 7


def huge_pages():
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(
            encoding="utf-8"
        )
    except OSError:
        return False


@pytest.mark.skipif(not huge_pages(), reason="the kernel has no huge pages")
def test_large_pools_are_huge_pages():
    pool = BufferPool(1, NBYTES)
    touched(pool)
    huge = [
        int(line.split()[1]) << 10
        for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
        if line.startswith("AnonHugePages:")
    ]
    assert huge[0] >= NBYTES // 2


def test_a_forked_child_finds_zeros_and_changes_nothing_of_its_parents():
    """So a fork leaves the parent's pages where the disk is sending to."""
    pool = BufferPool(2, PAGE_BYTES)
    buffers = touched(pool)
    pid = os.fork()
    if pid == 0:
        seen = bytes(buffers[0].view[:8])
        buffers[1].view[:] = b"\xff" * PAGE_BYTES
        os._exit(0 if seen == bytes(8) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert buffers[0].view[0] == buffers[1].view[0] == 7


def test_a_pool_of_one_page_is_a_page():
    pool = BufferPool(1, 1)
    assert pool.take().view.nbytes == mmap.PAGESIZE == pool.nbytes
