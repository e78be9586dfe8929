"""The disk's bandwidth with reads and writes mixed half and half, through our own I/O engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemini.nvme import BlockStore, BufferPool, StoreLayout
from gemini.units import BlockId

BLOCK_BYTES = 12 << 20


def mixed_gb_per_s(folder: Path, total_bytes: int = 2 << 30, repeats: int = 3) -> float:
    """GB (10**9) a second, read and written together; the median of `repeats`."""
    num_blocks = total_bytes // BLOCK_BYTES // 2
    layout = StoreLayout.plan("probe", [BLOCK_BYTES] * num_blocks)
    store = BlockStore([folder], layout, checksums=False)
    pool = BufferPool(4, BLOCK_BYTES)
    buffers = [pool.take() for _ in range(pool.count)]
    try:
        for _ in range(2):  # both versions are written once: what is measured is rewriting
            for block in range(num_blocks):
                store.write(BlockId(block), buffers[0].view).wait()
            store.commit(0)
        speeds = []
        for _ in range(repeats):
            under_way: deque[Any] = deque()
            started = time.perf_counter()
            for block in range(num_blocks):
                moves: tuple[Callable[..., Any], ...] = (store.read, store.write)
                for side, transfer in enumerate(moves):
                    if len(under_way) == pool.count:
                        under_way.popleft().wait()
                    view = buffers[2 * (block % 2) + side].view
                    under_way.append(transfer(BlockId(block), view))
            while under_way:
                under_way.popleft().wait()
            seconds = time.perf_counter() - started
            store.rollback()
            speeds.append(2 * num_blocks * BLOCK_BYTES / seconds / 1e9)
        return sorted(speeds)[len(speeds) // 2]
    finally:
        store.close()
