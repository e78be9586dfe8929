"""One chunk on one of two ranks: its gradients as they are packed and reduced, its payload."""

import signal
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from gemini.chunk.gradient import ChunkGradient
from gemini.chunk.layout import ChunkSpec, Slot
from gemini.chunk.storage import Chunk
from gemini.tickets import Done

NUMELS = (5, 100)  # at 0 and 64; the rest of 512 elements is a gap
S = 256


def spec_of(dtype, num_shards):
    slots = (Slot(0, 0, NUMELS[0]), Slot(1, 64, NUMELS[1]))
    return ChunkSpec(0, dtype, True, slots, S, num_shards)


class Memory:
    """Fresh memory is NaN; what is copied is there when its ticket is waited for."""

    def __init__(self):
        self.log = []

    def allocate(self, numel, dtype):
        return torch.full((numel,), torch.nan, dtype=dtype)

    allocate_host = allocate

    def free(self, tensor):
        self.log.append("free")

    def refill(self, tensor):
        self.log.append("refill")

    def copy(self, dst, src, behind=()):
        dst.copy_(src)
        return Logged(self.log)


class Logged:
    def __init__(self, log, error=None):
        self.log, self.error = log, error

    def ready(self):
        return True

    def wait(self):
        self.log.append("wait")
        if self.error is not None:
            raise self.error


class Links:
    """This is rank 0; the payload of rank 1 is `other`."""

    rank = 0
    shards = sums = property(lambda self: self)

    def __init__(self, world_size, other=0.0, num_means=None):
        self.world_size, self.num_means = world_size, num_means or world_size
        self.is_alone = world_size == 1
        self.tie = None
        self.other = other

    def reduce_scatter(self, shard, payload, label):
        shard.copy_(payload[:S] + self.other)
        return Done(None)


def gradient_of(dtype="float32", world_size=2, other=0.0):
    return ChunkGradient(spec_of(dtype, world_size), Memory(), Links(world_size, other))


def reduced(gradient):
    gradient.begin_reduce()
    gradient.end_reduce()
    return gradient.shard


def test_what_is_reduced_is_a_mean_and_zero_where_nothing_arrived():
    gradient = gradient_of(other=3.0)
    gradient.add(1, torch.full((100,), 2.0))
    want = torch.full((S,), 3.0)
    want[64:164] += 2.0 / 2
    assert torch.equal(reduced(gradient), want)


def test_a_gradient_that_arrives_again_is_added():
    gradient = gradient_of()
    gradient.add(0, torch.full((5,), 2.0))
    gradient.add(0, torch.full((5,), 6.0))
    assert reduced(gradient)[:5].tolist() == [4.0] * 5


def test_a_backward_of_a_gpu_packs_small_gradients_in_one_launch(monkeypatch):
    """Whoever looks at the buffer before finds them in their places."""
    launches = mock.Mock(side_effect=torch._foreach_copy_)
    monkeypatch.setattr("gemini.chunk.gradient.LAUNCHED", ("cpu",))
    monkeypatch.setattr(torch, "_foreach_copy_", launches)
    first, second = torch.full((5,), 2.0), torch.full((100,), 3.0)
    want = torch.zeros(S)
    want[:5], want[64:164] = first, second

    def packed(then=reduced):
        gradient = ChunkGradient(spec_of("float32", 1), Memory(), Links(1))
        gradient.add(0, first)
        gradient.add(1, second)
        launches.reset_mock()
        return gradient, then(gradient)

    assert torch.equal(packed()[1], want) and launches.call_count == 1
    again, _ = packed(lambda gradient: gradient.add(0, first))
    assert torch.equal(reduced(again)[:5], first * 2) and launches.call_count == 1
    assert torch.equal(packed(lambda gradient: gradient.local(1))[1], second)
    changed, _ = packed(lambda g: g.change_local(0, lambda grad: grad.neg_(), wide=False))
    assert torch.equal(reduced(changed)[:5], -first)
    left, _ = packed(lambda gradient: gradient.end_backward_unreduced())
    left.add(0, first)
    assert torch.equal(reduced(left)[:5], first * 2)
    dropped, _ = packed(lambda gradient: gradient.drop())
    dropped.add(1, second)
    assert not reduced(dropped)[:5].any() and launches.call_count == 1


def test_gradients_that_wait_for_others_are_few_and_small(monkeypatch):
    monkeypatch.setattr("gemini.chunk.gradient.LAUNCHED", ("cpu",))
    monkeypatch.setattr("gemini.chunk.gradient.PACKED_BYTES", 40)
    monkeypatch.setattr("gemini.chunk.gradient.PACKED_TOGETHER", 1)
    launches = mock.Mock()
    monkeypatch.setattr(torch, "_foreach_copy_", launches)
    gradient = ChunkGradient(spec_of("float32", 1), Memory(), Links(1))
    for slot, numel in enumerate(NUMELS):
        gradient.add(slot, torch.ones(numel))
        assert launches.call_count == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_reduced_later_is_added_in_fp32(world_size):
    gradient = gradient_of("bfloat16", world_size)
    for value in (1.0, 2.0**-10):
        gradient.add(0, torch.full((5,), value, dtype=torch.bfloat16))
        found = reduced(gradient)
    assert found.dtype == torch.float32
    assert found[:5].tolist() == [(1 + 2.0**-10) / world_size] * 5


def test_a_backward_that_was_not_reduced_is_added_to():
    gradient = gradient_of("bfloat16")
    gradient.add(0, torch.ones(5, dtype=torch.bfloat16))
    gradient.end_backward_unreduced()
    gradient.add(0, torch.full((5,), 2.0**-10, dtype=torch.bfloat16))
    assert reduced(gradient)[:5].tolist() == [(1 + 2.0**-10) / 2] * 5


def test_a_gradient_with_memory_of_its_own_is_the_buffer_and_a_view_of_more_is_not():
    spec = ChunkSpec(0, "float32", True, (Slot(0, 0, S),), S, 1)
    for grad, is_taken in ((torch.ones(S), True), (torch.ones(2, S)[0], False)):
        gradient = ChunkGradient(spec, Memory(), Links(1))
        gradient.add(0, grad)
        assert (gradient.buffer.data_ptr() == grad.data_ptr()) is is_taken
        assert torch.equal(reduced(gradient), torch.ones(S))


@pytest.mark.parametrize("fills", [True, False])
def test_experts_on_one_rank_alone_have_a_mean_over_the_ranks_that_sent_tokens(fills):
    """Nothing is added to what arrives, and nothing of it is forgotten: three backwards."""
    numel = S if fills else S - 3
    spec = ChunkSpec(0, "float32", True, (Slot(0, 0, numel),), S, 1)
    gradient = ChunkGradient(spec, Memory(), Links(1, num_means=4))
    for value in (4.0, 8.0):
        gradient.add(0, torch.full((numel,), value))
        gradient.add(0, torch.full((numel,), value))
        found = reduced(gradient)
    assert found[:numel].tolist() == [6.0] * numel
    gradient.add(0, torch.full((numel,), 4.0))
    gradient.end_backward_unreduced()
    gradient.add(0, torch.full((numel,), 8.0))
    assert reduced(gradient)[:numel].tolist() == [9.0] * numel


def test_experts_that_no_token_came_to_have_zeros_because_others_may_have_had_some():
    gradient = ChunkGradient(spec_of("float32", 1), Memory(), Links(1, num_means=4))
    assert not reduced(gradient).any()
    gradient.add(0, torch.full((5,), 4.0))
    assert reduced(gradient)[:5].tolist() == [1.0] * 5
    alone = ChunkGradient(spec_of("float32", 1), Memory(), Links(1))
    assert reduced(alone) is None


class Files:
    def __init__(self, error=None):
        self.error = error

    def read(self, chunk, into, behind=None):
        if behind is not None:
            behind.wait()
        into.fill_(7)
        return Logged([], self.error)


def test_a_payload_is_not_freed_under_its_copy():
    memory = Memory()
    chunk = Chunk(spec_of("float32", 1), memory, Links(1), shard_on_host=True)
    chunk.release()
    memory.log.clear()
    chunk.gather()
    chunk.release()
    assert memory.log == ["refill", "wait", "free"] and not chunk.gathered


def test_a_payload_that_could_not_be_read_is_not_there():
    memory = Memory()
    chunk = Chunk(spec_of("float32", 1), memory, Links(1), files=Files(OSError("bad")))
    chunk.release()
    chunk.gather()
    with pytest.raises(OSError, match="bad"):
        chunk.wait_gathered()
    assert not chunk.gathered and memory.log[-1] == "free"


def test_a_payload_that_could_not_begin_to_be_read_is_not_there():
    memory, files = Memory(), Files()
    chunk = Chunk(spec_of("float32", 1), memory, Links(1), files=files)
    chunk.release()
    with mock.patch.object(files, "read", side_effect=OSError), pytest.raises(OSError):
        chunk.gather()
    assert not chunk.gathered and memory.log[-1] == "free"
    chunk.gather()
    chunk.wait_gathered()
    assert chunk.payload.tolist() == [7.0] * S


class Reading(Files):
    """Ctrl-C comes while a read is begun, or before it is waited for."""

    def __init__(self, before_wait):
        super().__init__()
        self.before_wait, self.is_over = before_wait, False

    def read(self, chunk, into, behind=None):
        into.fill_(7)
        self.signals = [signal.SIGINT]
        if not self.before_wait:
            self.come()
        return self

    def come(self):
        while self.signals:
            signal.raise_signal(self.signals.pop())

    def wait(self):
        self.come()
        self.is_over = True


@pytest.mark.parametrize("before_wait", [False, True])
def test_a_payload_is_not_freed_under_a_read_that_ctrl_c_came_into(before_wait):
    memory, files = Memory(), Reading(before_wait)
    chunk = Chunk(spec_of("float32", 1), memory, Links(1), files=files)
    chunk.release()
    free, over = memory.free, []
    memory.free = lambda tensor: (over.append(files.is_over), free(tensor))
    with pytest.raises(KeyboardInterrupt):
        chunk.gather()
        chunk.wait_gathered()
    if chunk.gathered:
        chunk.release()
    assert over == [True] and not chunk.gathered


def test_a_shard_of_the_host_is_sent_behind_its_copy_and_both_are_waited_for_later():
    log = []

    class Beside(Memory):
        def copy(self, dst, src, behind=()):
            log.append(("copies", dst.data_ptr()))
            dst.copy_(src)
            return Told("copy")

        @contextmanager
        def after_copies(self, and_work=False):
            log.append("behind copies")
            yield
            log.append("no more")

    class Told(Logged):
        def __init__(self, name):
            super().__init__(log)
            self.name = name

        def order(self):
            log.append(f"orders the {self.name}")

        def wait(self):
            log.append(f"waits for the {self.name}")

    class Gathering(Links):
        def all_gather(self, payload, shard, label):
            log.append(("gathers", shard.data_ptr()))
            return Told("gather")

    chunk = Chunk(spec_of("float32", 2), Beside(), Gathering(2), shard_on_host=True)
    chunk.shard_memory.fill_(3.0)
    chunk.release()
    chunk.gather()
    place = chunk.payload.data_ptr()  # of rank 0: nothing else is made to be sent
    assert log == [("copies", place), "behind copies", ("gathers", place), "no more"]
    log.clear()
    chunk.wait_gathered()
    assert log == ["orders the copy", "waits for the gather"]
    assert chunk.payload[:S].tolist() == [3.0] * S


@pytest.mark.parametrize("on_host", [True, False])
def test_a_shard_that_comes_from_a_file_has_its_values(on_host):
    chunk = Chunk(spec_of("float32", 2), Memory(), Links(2), files=Files())
    chunk.bring_home(on_host)
    assert chunk.shard.tolist() == [7.0] * S and chunk.files is None
