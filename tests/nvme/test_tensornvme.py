"""tensornvme's engine: ends of writes as its ring has them, over a double and the package."""

import errno
import json
import os
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import nvme
from gemini.units import PAGE_BYTES
from nvme import BlockStore, BufferPool, StoreLayout, Transfer
from nvme.engines import tensornvme
from nvme.engines.tensornvme import TensorNvmeEngine
from nvme.files.file import OpenFile, create_files, remove_files
from nvme.layout import checksum_of
from tests.nvme.common import expected, fill, read, write
from tests.support.disks.async_writer import doubled
from tests.support.disks.faults import file_size_limit
from tests.support.until import until

NBYTES = 3 * PAGE_BYTES
UNCOLLECTED = tensornvme.uncollected_result  # that no double has replaced


@pytest.fixture
def disk():
    with doubled() as disk:
        yield disk


@pytest.fixture
def engine(disk):
    engine = TensorNvmeEngine(disk.writer)
    disk.at_once = False
    yield engine
    for writer in disk.under_way.values():
        writer.end(-errno.EIO)
    engine.close()
    assert disk.stuck == []


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "blocks"
    return OpenFile(path, os.open(path, os.O_RDWR | os.O_CREAT), direct=False)


def begun(engine, file, count):
    """Buffers and tickets of writes at 0, NBYTES, ..."""
    pool = BufferPool(count, NBYTES)
    views = [pool.take().view for _ in range(count)]
    for seed, view in enumerate(views):
        fill(view, seed)
    return views, [
        engine.write(Transfer(file, i * NBYTES, view, True)) for i, view in enumerate(views)
    ]


# -- a double -------------------------------------------------------------------------------------


def test_tickets_end_in_the_disks_order(engine, disk, file):
    views, tickets = begun(engine, file, 3)
    assert list(disk.under_way) == [0, NBYTES, 2 * NBYTES]
    for ended in (1, 2, 0):
        assert not tickets[ended].ready()
        disk.under_way[ended * NBYTES].end(NBYTES)
        until(tickets[ended].ready)  # its checksum is a thread's
        assert tickets[ended].wait() == checksum_of(views[ended])
    assert file.path.read_bytes() == b"".join(map(bytes, views))


def test_memory_is_whole_aligned_buffers_of_the_caller(engine, disk, file):
    """Nothing is copied, cut or padded on the way."""
    views, tickets = begun(engine, file, 2)
    for view, writer in zip(views, disk.under_way.values(), strict=True):
        assert writer.nbytes == view.nbytes and writer.address % PAGE_BYTES == 0
    view = views[0]
    view[:] = bytes(NBYTES)  # what the disk has not taken yet is still the caller's
    disk.under_way[0].end(NBYTES)
    tickets[0].wait()
    assert file.path.read_bytes() == bytes(NBYTES)


def test_a_ticket_is_not_ready_before_its_checksum(engine, disk, file, monkeypatch):
    may_go = threading.Event()
    real = tensornvme.piece_checksum
    monkeypatch.setattr(tensornvme, "piece_checksum", lambda *at: may_go.wait() and real(*at))
    (view,), (ticket,) = begun(engine, file, 1)
    disk.under_way[0].end(NBYTES)
    try:
        assert not ticket.ready()
    finally:
        may_go.set()
    until(ticket.ready)
    assert ticket.wait() == checksum_of(view)


def test_a_write_that_fails_says_so_at_its_ticket_alone(engine, disk, file):
    views, tickets = begun(engine, file, 3)
    disk.under_way[NBYTES].end(-errno.EIO)
    for offset in (0, 2 * NBYTES):
        disk.under_way[offset].end(NBYTES)
    for _ in range(2):  # a ticket answers the same every time
        with pytest.raises(nvme.TransferError, match="failed after 0: EIO") as raised:
            tickets[1].wait()
        assert (raised.value.offset, raised.value.nbytes) == (NBYTES, NBYTES)
        assert (raised.value.errno, raised.value.path) == (errno.EIO, str(file.path))
    assert [tickets[i].wait() for i in (0, 2)] == [checksum_of(views[i]) for i in (0, 2)]
    again = engine.write(Transfer(file, NBYTES, views[1], True))
    disk.under_way[NBYTES].end(NBYTES)
    assert again.wait() == checksum_of(views[1])
    assert file.path.read_bytes() == b"".join(map(bytes, views))


def test_part_of_a_write_goes_on_where_it_stopped(engine, disk, file):
    (view,), (ticket,) = begun(engine, file, 1)
    address = disk.under_way[0].address
    disk.under_way[0].end(PAGE_BYTES)
    assert not ticket.ready()  # the look has begun the rest
    rest = disk.under_way[PAGE_BYTES]
    assert (rest.address, rest.nbytes) == (address + PAGE_BYTES, NBYTES - PAGE_BYTES)
    rest.end(-errno.ECANCELED)  # of a thread that ended: not the disk's word
    assert not ticket.ready()
    disk.under_way[PAGE_BYTES].end(rest.nbytes)
    assert ticket.wait() == checksum_of(view)
    assert file.path.read_bytes() == view


@pytest.mark.parametrize("result, kind, cause", [
    (-errno.ENOSPC, nvme.DiskFullError, "ENOSPC"),
    (-errno.EIO, nvme.TransferError, "EIO"),
    (0, nvme.TransferError, "it came up short"),
])  # fmt: skip
def test_part_of_a_write_that_stops_says_after_how_much(result, kind, cause, engine, disk, file):
    _, (ticket,) = begun(engine, file, 1)
    disk.under_way[0].end(PAGE_BYTES)
    assert not ticket.ready()
    disk.under_way[PAGE_BYTES].end(result)
    with pytest.raises(kind, match=f"{NBYTES} bytes at offset 0 .* after {PAGE_BYTES}: {cause}"):
        ticket.wait()


def test_a_write_beyond_a_submission_is_several(engine, disk, file, monkeypatch):
    monkeypatch.setattr(tensornvme, "MOST_BYTES", 2 * PAGE_BYTES)
    (view,), (ticket,) = begun(engine, file, 1)
    assert disk.under_way[0].nbytes == 2 * PAGE_BYTES
    disk.at_once = True
    disk.under_way[0].end(2 * PAGE_BYTES)
    assert ticket.wait() == checksum_of(view)
    assert file.path.read_bytes() == view


def test_a_close_waits_for_writes_under_way(disk, file):
    engine = TensorNvmeEngine(disk.writer)
    disk.at_once = False
    views, tickets = begun(engine, file, 2)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(engine.close)
        disk.under_way[0].end(-errno.EIO)  # its owner is told, and the close goes on
        disk.under_way[NBYTES].end(NBYTES)
        closing.result()
    assert disk.stuck == [] and not disk.by_ring
    with pytest.raises(nvme.TransferError, match="EIO"):
        tickets[0].wait()
    assert tickets[1].wait() == checksum_of(views[1])


def test_more_writes_than_lanes_wait_for_the_oldest(engine, disk, file, monkeypatch):
    monkeypatch.setattr(tensornvme, "MOST_LANES", 2)
    with ThreadPoolExecutor(1) as pool:
        writes = pool.submit(begun, engine, file, 3)
        until(lambda: len(disk.under_way) == 2)
        disk.under_way[0].end(-errno.EIO)
        until(lambda: list(disk.under_way) == [NBYTES, 2 * NBYTES])
        _, tickets = writes.result()
    with pytest.raises(nvme.TransferError, match="EIO"):
        tickets[0].wait()
    for writer in disk.under_way.values():
        writer.end(NBYTES)
    assert len({ticket.wait() for ticket in tickets[1:]}) == 2


def test_memory_that_is_not_the_callers_to_write_takes_no_lane(engine, disk, file):
    with pytest.raises(TypeError, match="not writable"):
        engine.write(Transfer(file, 0, memoryview(bytes(NBYTES)), False))
    engine.close()  # waits for nothing


def test_no_file_stays_open_and_no_lane_is_made_twice(engine, disk, file):
    """A lane has a descriptor of its own: a file that is closed with a write under way is closed
    when that ends, and a descriptor of the same number gets none of it."""
    (view,), (ticket,) = begun(engine, file, 1)
    number, path = file.fd, file.path
    file.close()
    new = os.open(path.parent / "other", os.O_RDWR | os.O_CREAT)
    if new != number:  # a lower one was free: tests before this one had closed it
        os.dup2(new, number, inheritable=False)
        os.close(new)
    other = OpenFile(path.parent / "other", number, False)
    disk.under_way[0].end(NBYTES)
    assert ticket.wait() == checksum_of(view) and path.read_bytes() == view
    assert other.path.read_bytes() == b""
    assert str(other.path) in open_files() and str(path) not in open_files()
    with pytest.raises(nvme.TransferError, match="EBADF"):
        engine.write(Transfer(file, 0, view, True)).wait()
    assert len(disk.by_ring) == 1


def open_files():
    """Paths of this process's descriptors."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def in_a_child(engine, ticket, transfer):
    """What a forked child is told, as JSON through a pipe."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for use in (lambda: engine.write(transfer), ticket.wait, ticket.ready):
            try:
                use()
            except nvme.NvmeError as error:
                said.append(str(error))
        engine.close()
        os.write(sender, json.dumps(said).encode())
        os._exit(0)
    os.close(sender)
    os.waitpid(pid, 0)
    return json.loads(os.read(receiver, 1 << 16))


def test_a_forked_child_takes_no_result_of_its_parent(disk, file):
    """Also where another thread of the parent, which the child does not have, is making a lane."""
    said = []

    def forking(*arguments):
        if not disk.at_once:
            said.append(in_a_child(engine, tickets[0], Transfer(file, 0, views[0], True)))
            disk.at_once = True
        return disk.writer(*arguments)

    engine = TensorNvmeEngine(forking)
    disk.at_once = False
    views, tickets = begun(engine, file, 1)
    disk.under_way[0].end(NBYTES)  # the child finds it in the memory that both have
    other = engine.write(Transfer(file, NBYTES, views[0], True))
    assert len(said[0]) == 3 and all("forked process" in line for line in said[0])
    assert [tickets[0].wait(), other.wait()] == [checksum_of(views[0])] * 2
    engine.close()
    assert disk.stuck == []


def test_a_store_of_the_double_has_the_bytes_of_threads(disk, tmp_path):
    sizes = [5000, 3 << 20, (4 << 20) + 4097]
    store = BlockStore(
        [tmp_path], StoreLayout.plan("d", sizes), engine=TensorNvmeEngine(disk.writer)
    )
    pool = BufferPool(1, max(sizes))
    for seed in (10, 20, 30):
        for block in range(3):
            write(store, pool, block, seed + block)
        store.commit(seed)
        assert [read(store, pool, b) for b in range(3)] == [
            expected(store, b, seed + b) for b in range(3)
        ]
    store.close()


# -- refusals -------------------------------------------------------------------------------------

FDINFO = """pos:\t0
flags:\t02000002
CqHead:\t{head}
CqTail:\t4
SQEs:\t0
CQEs:\t{count}
{listed}SqThread:\t-1
PollList:
CqOverflowList:
  user_data=1, res=7, flags=0
"""


@pytest.mark.parametrize("result", [12 << 20, 0, -errno.ENOSPC, None])
def test_the_result_is_read_from_a_rings_fdinfo(result):
    listed = "" if result is None else f"    1: user_data:94731299893376, res:{result}, flag:0\n"
    said = FDINFO.format(head=3, count=int(result is not None), listed=listed)
    assert tensornvme.result_in(said) == result


def test_a_kernel_that_lists_no_result_is_refused(disk, tmp_path, monkeypatch):
    listing = tmp_path / "fdinfo"
    listing.write_text(FDINFO.format(head=4, count=0, listed=""), encoding="ascii")
    monkeypatch.setattr(tensornvme, "Path", lambda path: listing)
    monkeypatch.setattr(tensornvme, "uncollected_result", UNCOLLECTED)
    monkeypatch.setattr(tensornvme.time, "sleep", lambda seconds: None)
    with pytest.raises(nvme.NvmeError, match="does not list an io_uring's results"):
        TensorNvmeEngine(disk.writer)


def test_a_backend_without_a_ring_is_refused(disk, monkeypatch):
    monkeypatch.setattr(tensornvme, "rings", set)
    with pytest.raises(nvme.NvmeError, match="unset TENSORNVME_BACKEND"):
        TensorNvmeEngine(disk.writer)


def test_a_system_without_io_uring_is_refused_before_the_package_ends_the_process(monkeypatch):
    monkeypatch.setattr(tensornvme, "set_up_ring", lambda: -errno.EPERM)
    with pytest.raises(nvme.NvmeError, match=r"this system refuses \(EPERM, "):
        TensorNvmeEngine(lambda *_: pytest.fail("a writer was made"))


def test_the_package_without_a_writer_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensornvme", None)
    monkeypatch.setitem(sys.modules, "tensornvme._C", None)
    with pytest.raises(nvme.NvmeError, match="with an AsyncFileWriter is not installed"):
        nvme.make_engine("tensornvme")


# -- the package itself ---------------------------------------------------------------------------


@pytest.fixture
def package():
    pytest.importorskip("tensornvme._C")
    engine = nvme.make_engine("tensornvme")
    yield engine
    engine.close()


@pytest.fixture
def blocks(tmp_path):
    """A file with direct I/O, where its file system has that."""
    (file,) = create_files([tmp_path], [24 << 20])
    yield file
    remove_files([file])


def test_the_package_says_where_a_limit_stopped_it(package, blocks):
    """The kernel writes up to the limit first, then refuses."""
    view = BufferPool(1, 12 << 20).take().view
    with file_size_limit(8 << 20):
        ticket = package.write(Transfer(blocks, 0, view, True))
        with pytest.raises(nvme.DiskFullError, match=rf"failed after {8 << 20}: EFBIG"):
            ticket.wait()
    assert package.write(Transfer(blocks, 0, view, True)).wait() == checksum_of(view)


def test_the_package_says_that_there_is_no_space(package):
    file = OpenFile(Path("/dev/full"), os.open("/dev/full", os.O_RDWR), direct=False)
    view = BufferPool(1, PAGE_BYTES).take().view
    with pytest.raises(nvme.DiskFullError, match="of /dev/full failed after 0: ENOSPC"):
        package.write(Transfer(file, 8192, view, True)).wait()


def test_the_package_writes_many_buffers_at_a_time(package, blocks):
    nbytes, count = PAGE_BYTES * 3, 2 * tensornvme.MOST_LANES
    pool = BufferPool(count, nbytes)
    views = [pool.take().view for _ in range(count)]
    for seed, view in enumerate(views):
        fill(view, seed)
    begin = [Transfer(blocks, i * nbytes, view, True) for i, view in enumerate(views)]
    tickets = [package.write(transfer) for transfer in random.Random(1).sample(begin, count)]
    assert {ticket.wait() for ticket in tickets} == {checksum_of(view) for view in views}
    written = [bytes(view) for view in views]
    for view in views:
        view[:] = bytes(nbytes)
    for ticket in [package.read(transfer) for transfer in begin]:
        ticket.wait()
    assert [bytes(view) for view in views] == written


def test_the_package_ends_what_an_ended_thread_began(package, blocks):
    view = BufferPool(1, 12 << 20).take().view
    fill(view, 5)
    tickets = []
    thread = threading.Thread(
        target=lambda: tickets.append(package.write(Transfer(blocks, 0, view, True)))
    )
    thread.start()
    thread.join()
    assert tickets[0].wait() == checksum_of(view)


def test_the_package_is_closed_and_forked_with_a_write_under_way(blocks):
    pytest.importorskip("tensornvme._C")
    engine = nvme.make_engine("tensornvme")
    view = BufferPool(1, 12 << 20).take().view
    fill(view, 7)
    transfer = Transfer(blocks, 0, view, True)
    ticket = engine.write(transfer)
    said = in_a_child(engine, ticket, transfer)
    assert len(said) == 3 and all("forked process" in line for line in said)
    engine.close()
    assert ticket.ready() and ticket.wait() == checksum_of(view)
    assert blocks.path.read_bytes()[: 12 << 20] == view
