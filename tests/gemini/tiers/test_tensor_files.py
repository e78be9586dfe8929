"""TensorFiles by itself: flat tensors in blocks, versions, and few staging buffers."""

import errno
import signal
import threading
from queue import SimpleQueue

import pytest
import torch

from gemini.runtime.memory.backend import FileConfig
from gemini.runtime.memory.files import tensor_files
from gemini.runtime.memory.files.blocks import Flat
from gemini.runtime.memory.files.tensor_files import TensorFiles
from nvme import TransferError
from optim.step.tail import Gate
from tests.support.disks.faults import failing
from tests.support.until import until

BLOCK = 1024  # elements
SHAPES = {
    3: Flat(2 * BLOCK + 17, torch.float32),
    8: Flat(5, torch.bfloat16),
    9: Flat(BLOCK, torch.bfloat16),
}


@pytest.fixture(params=[True, False], ids=["versioned", "at once"])
def files(request, tmp_path):
    config = FileConfig(str(tmp_path), block_numel=BLOCK, depth=2)
    found = TensorFiles(SHAPES, config, versioned=request.param)
    found.versioned = request.param
    yield found
    found.close()
    assert list(tmp_path.iterdir()) == []


def values_of(chunk, seed=0):
    generator = torch.Generator().manual_seed(10 * chunk + seed)
    flat = SHAPES[chunk]
    return torch.randn(flat.numel, generator=generator).to(flat.dtype)


def read(files, chunk):
    flat = SHAPES[chunk]
    into = torch.full((flat.numel,), float("nan"), dtype=flat.dtype)
    files.read(chunk, into).wait()
    return into


def count(files, step):
    """What was written is what is read from now on."""
    if files.versioned:
        files.commit(step)
    else:
        files.flush()


def written(files, seed=0, step=1):
    for chunk in SHAPES:
        files.write(chunk, values_of(chunk, seed))
    count(files, step)


def test_tensors_come_back_whole_whatever_their_length(files):
    written(files)
    assert list(files) == list(SHAPES) and 3 in files and 4 not in files
    for chunk in reversed(SHAPES):
        assert torch.equal(read(files, chunk), values_of(chunk))


def test_many_reads_at_once_need_no_more_than_the_staging(files):
    """Twelve blocks are asked for, of four buffers, and tickets are waited for last to first."""
    written(files)
    staging = files.staging_bytes
    assert staging < 5 * (BLOCK * 4 + 4096)  # depth + 2 buffers of pages
    places = [(c, torch.zeros(SHAPES[c].numel, dtype=SHAPES[c].dtype)) for c in (3, 9, 8) * 2]
    tickets = [files.read(chunk, into) for chunk, into in places]
    for ticket in reversed(tickets):
        ticket.wait()
        assert ticket.ready()
    assert all(torch.equal(into, values_of(chunk)) for chunk, into in places)
    assert files.staging_bytes == staging


LONG = {1: Flat(40 * BLOCK + 3, torch.float32)}  # ten times the staging


@pytest.fixture
def long_file(tmp_path):
    found = TensorFiles(LONG, FileConfig(str(tmp_path), block_numel=BLOCK), versioned=True)
    found.write(1, torch.arange(LONG[1].numel, dtype=torch.float32))
    found.commit(1)
    yield found
    found.close()


def test_a_read_goes_on_while_nobody_asks_for_it(long_file):
    """As a prefetch does while a module computes."""
    into = torch.full((LONG[1].numel,), float("nan"))
    ticket = long_file.read(1, into)
    until(lambda: not into[-1].isnan())
    ticket.wait()
    assert torch.equal(into, torch.arange(LONG[1].numel, dtype=torch.float32))


class Told(Gate):
    """A gate that says which threads have come to it, and wait."""

    def __init__(self):
        super().__init__()
        self.came = SimpleQueue()
        self._lock = _ToldLock(self._lock, self.came)


class _ToldLock:
    def __init__(self, lock, came):
        self._lock, self._came = lock, came
        self.release = lock.release

    def __enter__(self):
        self._came.put(threading.get_ident())
        self._lock.acquire()

    def __exit__(self, *args):
        self._lock.release()


def test_a_read_is_of_what_was_written_before_its_gate_opened(long_file):
    gate = Told()
    long_file.reads_latest = True
    into = torch.zeros(LONG[1].numel)
    ticket = long_file.read(1, into, behind=gate)
    assert gate.came.get() != threading.get_ident()
    buffer, _ = long_file.acquire_buffers(2, to_thread=True)  # beside the buffers that the read has
    long_file.values(1, 0, buffer).fill_(7.0)
    written = long_file.begin_write(1, 0, buffer)
    assert not ticket.ready()
    came = []
    opens = threading.Thread(target=lambda: (came.append(gate.came.get()), gate.open()))
    opens.start()
    ticket.wait()
    assert (into[:BLOCK] == 7.0).all() and into[-1] == LONG[1].numel - 1
    assert came == [threading.get_ident()], "it was asked for before the gate was open"
    assert gate.waited_seconds > 0
    written.wait()
    long_file.release_buffers()
    opens.join()


def test_a_thread_that_reads_ahead_is_not_counted_as_waiting(long_file):
    gate = Told()
    ticket = long_file.read(1, torch.zeros(LONG[1].numel), behind=gate)
    gate.came.get()
    gate.open()
    until(ticket.ready)
    ticket.wait()
    assert gate.waited_seconds == 0


class _Interrupted:
    """A ticket that is interrupted in the thread which waits for a read, and opens later."""

    def __init__(self):
        self.opens = threading.Event()

    def ready(self):
        return False

    def wait(self):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        self.opens.wait()


def test_ctrl_c_in_a_write_loses_no_staging_buffer(files, monkeypatch):
    view = files.values

    def filled(chunk, index, buffer):
        signal.raise_signal(signal.SIGINT)
        return view(chunk, index, buffer)

    for step in range(2 * files.staging_bytes // (4 * BLOCK)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(files, "values", filled)
            files.write(3, values_of(3))
        count(files, step + 1)
    assert torch.equal(read(files, 3), values_of(3))


def test_who_is_interrupted_has_the_memory_to_himself_again(long_file, monkeypatch):
    """A payload whose gather has failed is freed."""
    behind = _Interrupted()
    ended = tensor_files.wait

    def wait(futures):
        behind.opens.set()
        ended(futures)

    monkeypatch.setattr(tensor_files, "wait", wait)
    ticket = long_file.read(1, torch.zeros(LONG[1].numel), behind=behind)
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    try:
        assert ticket.ready()
    finally:
        behind.opens.set()


def test_a_read_that_fails_is_told_and_the_next_one_has_all_buffers(long_file):
    with failing("preadv", errno.EIO, after=6, times=1):
        ticket = long_file.read(1, torch.zeros(LONG[1].numel))
        for _ in range(2):
            with pytest.raises(TransferError):
                ticket.wait()
    assert torch.equal(read_long(long_file), torch.arange(LONG[1].numel, dtype=torch.float32))


def read_long(files):
    into = torch.zeros(LONG[1].numel)
    files.read(1, into).wait()
    return into


@pytest.mark.parametrize("inference", [True, False])
def test_a_tensor_is_filled_in_the_mode_of_who_asks(files, inference):
    written(files)
    with torch.inference_mode(inference):
        assert torch.equal(read(files, 3), values_of(3))


def test_a_step_of_this_thread_has_the_buffers_when_tensors_have_been_read(long_file):
    """They share the buffers."""
    into = torch.zeros(LONG[1].numel)
    ticket = long_file.read(1, into)
    buffers = long_file.acquire_buffers(0, to_thread=False)
    assert ticket.ready() and len(buffers) == 4
    reads = [long_file.begin_read(1, index, buffer) for index, buffer in enumerate(buffers)]
    for index, (read, buffer) in enumerate(zip(reads, buffers, strict=True)):
        read.wait()
        assert long_file.values(1, index, buffer)[0] == index * BLOCK
    long_file.release_buffers()
    assert torch.equal(read_long(long_file), torch.arange(LONG[1].numel, dtype=torch.float32))


def test_a_step_has_buffers_of_its_own_as_long_as_it_asks_for_as_many(long_file):
    alone = long_file.staging_bytes
    first = long_file.acquire_buffers(3, to_thread=True)
    assert len(first) == 3 and long_file.staging_bytes == alone + 3 * len(first[0].view)
    long_file.release_staging()  # leaves alone what is acquired
    long_file.release_buffers()
    assert sorted(map(id, long_file.acquire_buffers(3, to_thread=True))) == sorted(map(id, first))
    long_file.release_buffers()
    assert len(long_file.acquire_buffers(1, to_thread=False)) == 1 + 4
    long_file.release_buffers()
    assert long_file.staging_bytes == alone + len(first[0].view)


def test_bytes_are_those_of_padded_blocks_and_go_when_a_tensor_is_forgotten(files):
    needed = sum(flat.numel * flat.dtype.itemsize for flat in SHAPES.values())
    blocks = 3 + 1 + 1
    assert needed <= files.written_bytes_per_step < needed + blocks * 4096
    before = files.written_bytes_per_step
    written(files)
    files.forget([3])
    assert 3 not in files and files.written_bytes_per_step < before - SHAPES[3].numel * 4 + 1
    assert torch.equal(read(files, 9), values_of(9))
