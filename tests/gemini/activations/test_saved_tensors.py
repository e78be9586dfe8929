"""What leaves and comes back, in which order, and how many bytes: counted on a shelf in memory."""

import gc
import weakref

import pytest
import torch
from torch import nn

from gemini.activations.saved_tensors import SavedTensors

KIB = 1 << 10
ROW = 64 * KIB  # bytes of a tensor of one row


class Item:
    """Copy on the shelf, and its way back."""

    def __init__(self, storage):
        self.nbytes, self.values = storage.nbytes(), storage.clone()

    def wait(self):
        return self.values, 0


class Shelf:
    """A tier whose copies have ended at once. `log`: what it is asked, in order."""

    def __init__(self, room=None):
        self.log, self.items, self.room = [], [], room
        self.out = self.back = 0
        self.staging_bytes = self.in_flight_bytes = 0
        self.watch = lambda: None

    def moved(self):
        return 0, 0, self.out, self.back

    def save(self, storage):
        if self.room is not None and self.out + storage.nbytes() > self.room:
            return None
        item = Item(storage)
        self.items.append(item)
        self.out += item.nbytes
        self.log.append(("save", len(self.items) - 1))
        return item

    def is_saved(self, copy, *, wait=False):
        return True

    def load(self, copy):
        self.watch()
        self.back += copy.nbytes
        self.log.append(("load", self.items.index(copy)))
        return copy

    def drop(self, copy, arrival):
        self.log.append(("drop", self.items.index(copy)))

    def release_staging(self):
        pass

    def close(self):
        pass

    def of(self, kind):
        return [number for name, number in self.log if name == kind]


def saved_on(shelf, keep, ahead=0):
    made = SavedTensors(shelf, torch.device("cpu"), least_bytes=ROW, ahead_bytes=ahead)
    made.keep_at_most(keep)
    return made


def chain(rows=(1,) * 8):
    """Products of tensors of so many rows, each of which saves one of them."""
    x = torch.randn(ROW // 4, requires_grad=True)
    total = 0
    for i, count in enumerate(rows):
        total = total + (x.expand(count, -1) + i).square().sum()
    return x, total


def test_the_oldest_leave_and_come_back_last():
    shelf = Shelf()
    saved = saved_on(shelf, 3 * ROW)
    with saved.saving():
        _, total = chain()
    assert shelf.log == [("save", i) for i in range(5)]
    assert (saved.live_bytes, saved.resident_bytes) == (8 * ROW, 3 * ROW)
    total.backward()
    assert shelf.of("load") == [4, 3, 2, 1, 0]
    assert saved.live_bytes == saved.resident_bytes == 0
    assert sorted(shelf.of("drop")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ahead", [0, ROW, 3 * ROW])
@pytest.mark.parametrize("keep", [0, 2, 5])
def test_backward_holds_what_may_stay_or_is_read_ahead_and_one_more(keep, ahead):
    shelf = Shelf()
    saved = saved_on(shelf, keep * ROW, ahead)
    most = []
    shelf.watch = lambda: most.append(saved.resident_bytes)
    with saved.saving():
        _, total = chain()
    assert saved.resident_bytes == keep * ROW
    total.backward()
    assert shelf.of("load") == list(reversed(range(8 - keep)))
    assert max(most) <= max(keep * ROW, ahead)


@pytest.mark.parametrize("keep", [None, 0, 1, 7, 12, 20, 21, 100])
def test_what_is_written_is_what_was_saved_less_what_stays_up_to_one_tensor(keep):
    rows = (1, 5, 2, 3, 1, 4, 5)
    shelf = Shelf()
    saved = saved_on(shelf, None if keep is None else keep * ROW)
    x, total = chain(rows)
    total.backward()
    expected = x.grad
    torch.manual_seed(0)
    with saved.saving():
        x, total = chain(rows)
    total.backward()
    over = 0 if keep is None else max(0, sum(rows) - keep)
    assert over <= shelf.out / ROW < over + max(rows) and shelf.back == shelf.out
    assert bool(shelf.out) is bool(over)
    assert x.grad.shape == expected.shape


def test_a_storage_is_one_record_however_often_it_is_saved():
    shelf = Shelf()
    saved = saved_on(shelf, 0)
    x = torch.randn(4, ROW // 4, requires_grad=True)
    with saved.saving():
        y = x + 1
        a, b = y[:2], y.t()
        total = (a * a).sum() + (b * b.flip(0)).sum() + y.exp().sum()
        assert saved.live_bytes == 4 * ROW * 3  # of y, its flip, and exp(y)
    kept = y.untyped_storage().nbytes()
    total.backward()
    assert shelf.out == 3 * kept and shelf.of("save") == [0, 1, 2]


def test_what_somebody_has_kept_is_not_read():
    shelf = Shelf()
    saved = saved_on(shelf, 0)
    with saved.saving():
        x = torch.randn(ROW // 4, requires_grad=True)
        kept = x + 1
        total = kept.square().sum()
    assert shelf.of("save") == [0] and saved.resident_bytes == 0
    total.backward()
    assert shelf.of("load") == [] and torch.equal(x.grad, 2 * kept)


def test_a_storage_that_its_owner_frees_for_a_while_is_not_read_then():
    """As another engine's parameters are: what was copied before counts, and nothing else moves."""
    shelf = Shelf()
    saved = saved_on(shelf, ROW)
    x = torch.randn(ROW // 4, requires_grad=True)
    owned = [torch.full((ROW // 4,), float(i)) for i in range(3)]
    expected = sum(owned)
    with saved.saving():
        total = sum((x * values).sum() for values in owned)  # the third one stays
        assert shelf.of("save") == [0, 1]
        for values in owned:
            values.untyped_storage().resize_(0)
        saved.keep_at_most(0)
    assert shelf.of("save") == [0, 1] and saved.resident_bytes == ROW
    owned[2].untyped_storage().resize_(ROW)
    owned[2].data.fill_(2)
    total.backward()
    assert shelf.of("load") == [1, 0] and torch.equal(x.grad, expected)


def test_where_hooks_are_forbidden_nothing_is_saved():
    shelf = Shelf()
    saved = saved_on(shelf, 0)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), saved.saving():
        _, total = chain()
    total.backward()
    assert not shelf.log


def test_memory_goes_with_what_leaves():
    shelf = Shelf()
    saved = saved_on(shelf, 0)
    with saved.saving():
        x = torch.randn(ROW // 4, requires_grad=True)
        y = x + 1
        gone = weakref.ref(y.untyped_storage())
        total = y.square().sum()
        del y
        assert gone() is None
    total.backward()


def test_where_a_tier_has_no_room_the_rest_stays():
    shelf = Shelf(room=2 * ROW)
    saved = saved_on(shelf, ROW)
    with saved.saving():
        x, total = chain()
    assert (shelf.of("save"), saved.resident_bytes) == ([0, 1], 6 * ROW)
    total.backward()
    assert x.grad is not None and saved.live_bytes == 0


def test_graphs_that_wait_together_are_read_in_any_order():
    """The first forward's backward comes first, and what it has must come through the bound."""
    shelf = Shelf()
    saved = saved_on(shelf, 2 * ROW)
    with saved.saving():
        x, first = chain()
        y, second = chain()
    first.backward()
    second.backward()
    found, x.grad, y.grad = (x.grad, y.grad), None, None
    for leaf, mine in zip((x, y), found, strict=True):
        sum(((leaf.expand(1, -1) + i).square().sum() for i in range(8)), start=0).backward()
        assert torch.equal(mine, leaf.grad)
    assert saved.live_bytes == 0


def test_others_own_what_they_have_anyway():
    """Parameters, buffers, what the caller says, and what is small."""
    shelf = Shelf()
    module = nn.BatchNorm1d(ROW)
    mine = torch.randn(2, ROW)
    saved = SavedTensors(
        shelf,
        torch.device("cpu"),
        least_bytes=ROW,
        leave_alone=lambda t: t.data_ptr() == mine.data_ptr(),
    )
    saved.keep_at_most(0)
    with saved.saving(module.buffers()):
        (module.running_var * module.weight).sum().backward()
        (mine * module.weight).sum().backward()
        (torch.randn(10, requires_grad=True) + 1).exp().sum().backward()
    assert saved.traffic.nvme_out == 0 and not shelf.log


def test_an_error_in_forward_leaves_nothing():
    shelf = Shelf()
    saved = saved_on(shelf, ROW)

    def forward():
        _, total = chain()
        raise ArithmeticError(str(total))

    with pytest.raises(ArithmeticError), saved.saving():
        forward()
    gc.collect()
    assert saved.live_bytes == saved.resident_bytes == 0
    assert shelf.of("drop") and sorted(shelf.of("drop")) == shelf.of("save")


def test_nothing_is_noted_for_ever():
    """Queues do not grow with iterations, whether anything leaves or not."""
    for keep in (None, ROW):
        saved = saved_on(Shelf(), keep)
        lengths = []
        for _ in range(6):
            with saved.saving():
                _, total = chain()
            total.backward()
            lengths.append(sum(len(x) for x in vars(saved).values() if hasattr(x, "__len__")))
        assert lengths[1:] == lengths[1:2] * 5


def test_a_bound_may_change_between_iterations():
    shelf = Shelf()
    saved = saved_on(shelf, None)
    outs = []
    for keep in (None, 2 * ROW, 6 * ROW, None):
        saved.keep_at_most(keep)
        with saved.saving():
            _, total = chain()
        outs.append(saved.traffic.nvme_out // ROW)
        total.backward()
        assert saved.traffic.nvme_in == saved.traffic.nvme_out
    assert outs == [0, 6, 2, 0]
