"""Copies of a GPU as streams and events see them, on stand-ins for both: no GPU is needed."""

import gc
import weakref
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch

from optim.state import memory as memories
from optim.state.memory import CudaMemory, DeviceMemory
from optim.update.staging import DeviceStaging

DEVICE = torch.device("cuda", 0)


class Stream:
    device = DEVICE

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} comes behind {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} comes behind {event.name}")

    def record_event(self, event):
        event.log, event.name = self.log, f"an event of {self.name}"


class Event:
    num_made = 0

    def __init__(self):
        Event.num_made += 1
        self.log, self.name = [], "nothing"

    def query(self):
        return False

    def synchronize(self):
        self.log.append(f"the host waits for {self.name}")


class Memory:
    """A tensor; it has no `record_stream`."""

    def __init__(self, log, streams, is_cuda):
        self.log, self.streams, self.is_cuda = log, streams, is_cuda

    def copy_(self, src, non_blocking):
        assert non_blocking
        self.log.append(f"{self.streams[-1].name} copies")


@pytest.fixture
def gpu(monkeypatch):
    """(log, current streams, memory): the last stream is the current one."""
    log, names = [], iter(["in", "out", "gathers", "beside"])
    streams = [Stream(log, "compute")]

    @contextmanager
    def current(stream):
        streams.append(stream)
        try:
            yield
        finally:
            streams.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log, next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(memories, "FREE_EVENTS", defaultdict(list))
    return log, streams, CudaMemory(DEVICE)


def test_a_gpu_without_an_index_is_the_current_one(monkeypatch):
    """As tensors say it, which are compared with it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert DeviceMemory(torch.device("cuda")).device == torch.device("cuda", 3)
    assert DeviceMemory(torch.device("cuda", 1)).device == torch.device("cuda", 1)


def ends(gpu, *, to_host):
    log, streams, _ = gpu
    return Memory(log, streams, not to_host), Memory(log, streams, to_host)


@pytest.mark.parametrize(("to_host", "side"), [(True, "out"), (False, "gathers")])
def test_a_copy_runs_beside_computing_on_a_stream_for_each_direction(to_host, side, gpu):
    log, _, memory = gpu
    ticket = memory.copy(*ends(gpu, to_host=to_host))
    assert log == [f"{side} comes behind an event of compute", f"{side} copies"]
    log.clear()
    ticket.wait()
    if to_host:
        assert log == [f"the host waits for an event of {side}"]
    else:
        assert log == [f"compute comes behind an event of {side}"]
    log.clear()
    ticket.settle()
    assert log == [f"the host waits for an event of {side}"]


def test_what_is_copied_lives_until_the_device_comes_behind_the_copy_and_no_longer(gpu):
    """Nothing is recorded on the side stream: an allocator would keep the memory until that stream
    has passed, behind copies that were begun later."""
    _, _, memory = gpu
    dst, src = ends(gpu, to_host=True)
    alive = weakref.ref(src)
    ticket = memory.copy(dst, src)
    del src
    gc.collect()
    assert alive() is not None
    ticket.order()
    gc.collect()
    assert alive() is None


def test_an_event_is_recorded_again_when_nobody_can_ask_for_what_it_marked(gpu):
    """Not when its ticket was ordered: `settle` may yet follow."""
    log, _, memory = gpu
    before = Event.num_made
    tickets = [memory.copy(*ends(gpu, to_host=True)) for _ in range(2)]
    for ticket in tickets:
        ticket.order()
    tickets.append(memory.copy(*ends(gpu, to_host=False)))
    assert Event.num_made - before == 3
    tickets.clear()
    del ticket
    for _ in range(5):
        memory.copy(*ends(gpu, to_host=False)).order()
    tickets = [memory.copy(*ends(gpu, to_host=to_host)) for to_host in (True, False)]
    tickets[0].settle()
    assert log[-1] == "the host waits for an event of out"
    assert Event.num_made - before == 3


def test_a_gather_comes_behind_the_copies_of_its_shard_and_what_computes_does_not(gpu):
    """Nor does a gather come behind the state of other layers, which is on another stream."""
    log, _, memory = gpu
    leaves = memory.copy(*ends(gpu, to_host=True))
    memory.copy_all([ends(gpu, to_host=False)])
    log.clear()
    memory.copy(*ends(gpu, to_host=False), behind=[leaves])
    assert log == [
        "gathers comes behind an event of out", "gathers comes behind an event of compute",
        "gathers copies",
    ]  # fmt: skip


def test_staging_comes_behind_the_last_use_of_its_own_set_and_not_behind_what_the_device_was_given(
    gpu,
):
    log, _, memory = gpu
    staging = DeviceStaging(memory, 2)
    staging.planes = lambda like: {name: ends(gpu, to_host=False)[0] for name in like}
    state = {"master": ends(gpu, to_host=False)[1]}
    behind = []
    for number in (0, 1, 2, 2):
        log.clear()
        staged = staging.bring_state(number, state)
        behind.append(log[0])
        staging.bring([ends(gpu, to_host=False)])  # its gradient
        assert log[1:3] == ["in copies", "compute comes behind an event of in"]
        assert log[3:5] == ["in comes behind an event of in", "in copies"]
        leaving = staging.take_back([(state["master"], staged["master"])])
    assert behind[:2] == ["in comes behind an event of compute"] * 2  # nothing has left these sets
    assert behind[2:] == ["in comes behind an event of out"] * 2
    log.clear()
    staging.bring([ends(gpu, to_host=False)], leaving)  # what that copy has brought to the host
    assert log[0] == "in comes behind an event of out"


def test_what_is_brought_to_a_block_on_the_device_waits_for_no_kernel_of_the_block_before(gpu):
    """But for what left its own set; and for all the device was given, if nothing has left it."""
    log, _, memory = gpu
    staging = DeviceStaging(memory, 2)
    behind = []
    for number in (0, 1, 2, 3, 4):
        staging.use(number)
        log.clear()
        staging.bring([ends(gpu, to_host=False)])  # parameters
        behind.append(log[0])
        log.clear()
        staging.bring([ends(gpu, to_host=False)])  # a gradient
        assert log[:2] == ["in comes behind an event of in", "in copies"]
        if number != 2:
            leaving = staging.take_back([ends(gpu, to_host=True)])
    compute, out = (f"in comes behind an event of {stream}" for stream in ("compute", "out"))
    assert behind == [compute, compute, out, out, compute]
    staging.use(5)
    log.clear()
    staging.bring([ends(gpu, to_host=False)], leaving)  # which another copy brought to the host
    assert log[:3] == [out, out, "in copies"]
    staging.take_back([ends(gpu, to_host=True)])
    staging.use(7)
    log.clear()
    staging.pass_by([ends(gpu, to_host=False)])  # to what the device may use
    assert log[0] == compute


@pytest.mark.parametrize(("to_host", "side"), [(True, "out"), (False, "gathers")])
def test_blocks_of_files_move_beside_computing_behind_what_it_was_given_when_they_were_asked_for(
    to_host, side, gpu
):
    log, streams, memory = gpu
    move = memory.mover()
    streams[0].name = "compute, later"
    for _ in range(2):
        move(*ends(gpu, to_host=to_host))
    each = [
        f"{side} comes behind an event of compute", f"{side} copies",
        f"the host waits for an event of {side}",
    ]  # fmt: skip
    assert log == each * 2


def test_a_block_of_a_file_for_the_host_is_copied_by_the_thread_that_asks(gpu):
    log, _, memory = gpu
    there, block = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    memory.mover()(there, block)
    assert torch.equal(there, block) and log == []


def test_a_collective_comes_behind_the_copies_that_were_begun_and_computing_does_not(gpu):
    log, streams, memory = gpu
    memory.copy(*ends(gpu, to_host=False))
    log.clear()
    with memory.after_copies():
        assert streams[-1].name == "gathers"
    assert streams[-1].name == "compute" and log == []


def test_host_memory_is_registered_in_its_own_size_and_not_by_torchs_allocator(gpu, monkeypatch):
    registered = []

    class Runtime:
        def cudaHostRegister(self, address, nbytes, flags):
            registered.append(nbytes)
            return 0

        def cudaHostUnregister(self, address):
            registered.pop()

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    *_, memory = gpu
    slab = memory.zeros(1001, torch.float32, on_host=True)
    shard = memory.allocate_host(77, torch.bfloat16)
    assert registered == [4004, 154] and bool((slab == 0).all())
    del shard, slab
    gc.collect()
    assert registered == []


def test_another_thread_launches_beside_the_one_that_asked_which_comes_behind_it_by_a_join(gpu):
    """Whatever stream that computes on, and whichever the thread is in when it joins."""
    log, streams, memory = gpu
    streams[0].name = "the user's"
    where = memory.beside()
    assert log == ["beside comes behind an event of the user's"]
    asked, streams[:] = streams[-1], [Stream(log, "of the thread")]
    with where:
        assert streams[-1].name == "beside"
        memory.copy_all([ends(gpu, to_host=False)]).order()
    log.clear()
    memory.join()
    assert log == [f"{asked.name} comes behind an event of beside"]


def test_a_thread_gives_streams_no_more_blocks_than_there_are_sets(gpu):
    log, _, memory = gpu
    staging = DeviceStaging(memory, 2)
    staging.planes = lambda like: {name: ends(gpu, to_host=False)[0] for name in like}
    state = {"master": ends(gpu, to_host=False)[1]}
    for waits in (True, False):
        staging.begin(waits=waits)
        for number in range(6):
            log.clear()
            staged = staging.bring_state(number, state)
            must = waits and number >= 2
            assert ("the host waits for an event of out" in log) == must
            assert not must or log.index("the host waits for an event of out") == 0
            staging.take_back([(state["master"], staged["master"])])
