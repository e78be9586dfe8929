"""What the tests of the store share."""

from __future__ import annotations

import random
import subprocess
from contextlib import contextmanager

import pytest

import nvme

ENGINES = ["threads", "tensornvme"]


def engine_or_skip(name):
    try:
        return nvme.make_engine(name)
    except nvme.NvmeError as error:
        pytest.skip(f"engine {name}: {error}")


@contextmanager
def mounted(folder, *arguments):
    """`mount *arguments folder` for as long as this lasts, or a skip that says why not."""
    done = subprocess.run(
        ["mount", *arguments, str(folder)], capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(view, seed):
    """Random bytes, the same for a seed and a length."""
    view[:] = random.Random(seed).randbytes(view.nbytes)


def write(store, pool, block, seed):
    buffer = pool.take()
    fill(buffer.view[: store.buffer_nbytes(block)], seed)
    store.write(block, buffer.view).wait()
    pool.give(buffer)


def read(store, pool, block):
    """The payload of a block."""
    buffer = pool.take()
    buffer.view[:] = b"\xee" * buffer.view.nbytes
    store.read(block, buffer.view).wait()
    data = bytes(buffer.view[: store.layout.block_nbytes[block]])
    pool.give(buffer)
    return data


def expected(store, block, seed):
    return random.Random(seed).randbytes(store.buffer_nbytes(block))[
        : store.layout.block_nbytes[block]
    ]
