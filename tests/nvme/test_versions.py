"""Versions that stay: whatever is committed, pinned and gone back to, each has its bytes."""

import random
import shutil

import pytest

import nvme
from gemini.checkpoint.format.boxes import Region, boxes_of_region, is_contiguous
from nvme import BlockStore, BufferPool, StoreLayout

SIZES = [4096, 9000, 1, 5000]


class Model:
    """What a store with kept versions must say: contents by version, and nothing else."""

    def __init__(self, folder, most, rng):
        self.folder, self.most, self.rng = folder, most, rng
        layout = StoreLayout.plan("d", SIZES, num_versions=most + 2)
        self.store = BlockStore([folder], layout)
        self.pool = BufferPool(len(SIZES), max(SIZES))
        self.step = self.made = self.named = 0
        self.history, self.pins = [], {}  # contents; by witness
        self.now = self.write(range(len(SIZES)), [None] * len(SIZES))
        self.store.commit(0)

    def write(self, blocks, before):
        after = list(before)
        for block in blocks:
            self.made += 1
            after[block] = random.Random(self.made).randbytes(SIZES[block])
            buffer = self.pool.take()
            buffer.view[: SIZES[block]] = after[block]
            self.store.write(block, buffer.view).wait()
            self.pool.give(buffer)
        return after

    def some(self):
        return [block for block in range(len(SIZES)) if self.rng.random() < 0.7]

    def commit(self):
        after = self.write(self.some(), self.now)
        self.step += 1
        self.store.commit(self.step)
        self.history.append(self.now)
        self.now = after
        self.trim()

    def rewrite(self):
        self.now = self.write(self.some(), self.now)
        self.store.commit(self.step)
        self.trim()

    def fail(self):
        self.write(self.some(), self.now)
        self.store.rollback()

    def rewind(self):
        steps = self.rng.randint(1, self.most + 1)
        if steps > len(self.history):
            with pytest.raises(ValueError, match="are kept"):
                self.store.rewind(steps)
            return
        self.now = self.history[-steps]
        del self.history[-steps:]
        self.store.rewind(steps)

    def pin(self):
        if len(self.pins) == self.most:
            return
        self.named += 1
        witness = self.folder / f"witness{self.named}"
        pin = self.store.pin_last(witness)
        if self.rng.random() < 0.8:
            witness.write_text("", encoding="utf-8")
            self.pins[witness] = (pin.index, self.now)
        self.store.versions.settle(pin)
        self.trim()

    def unpin(self):
        if self.pins:
            witness = self.rng.choice(sorted(self.pins))
            witness.unlink()
            del self.pins[witness]

    def trim(self):
        """The oldest steps go where pins take their places."""
        pinned = [id(content) for _, content in self.pins.values()]
        while len({*pinned, *map(id, self.history)}) > self.most:
            del self.history[0]

    def check(self):
        store, layout = self.store, self.store.layout
        history = store.versions.history
        assert len(history) == len(self.history)
        commits = [*zip(history, self.history, strict=True), (store.last, self.now)]
        for index, content in (*commits, *self.pins.values()):
            with nvme.recover(store.paths, pinned=index) as found:
                assert [found.block(i) for i in range(layout.num_blocks)] == content
        with nvme.recover(store.paths) as found:  # what a kill would leave
            assert [found.block(i) for i in range(layout.num_blocks)] == self.now
            assert found.index.step == self.step
        for block in range(len(SIZES)):
            taken = {i.entries[block].version for i in (store.last, *history)}
            taken |= {pin.index.entries[block].version for pin in store.versions.pinned}
            assert len(taken) <= self.most + 1
        witnesses, is_closed = nvme.files.orphan_files.pins_of(store.paths[0])
        assert not is_closed and set(self.pins) <= set(witnesses)


MOVES = ["commit"] * 5 + ["rewrite", "fail", "rewind", "rewind", "pin", "pin", "unpin"]


@pytest.mark.parametrize("seed", range(20))
def test_every_version_that_stays_has_its_bytes(seed, tmp_path):
    rng = random.Random(seed)
    model = Model(tmp_path, rng.choice([1, 2, 3, 8]), rng)
    for _ in range(60):
        getattr(model, rng.choice(MOVES))()
        model.check()
    alive = bool(model.pins)
    model.store.close()
    assert bool(list(tmp_path.glob("*.blocks"))) is alive
    for witness in model.pins:
        witness.unlink()
    BlockStore([tmp_path], StoreLayout.plan("d", SIZES)).close()
    assert not list(tmp_path.iterdir())


def test_boxes_of_rows_that_torch_has_split_are_not_in_one_piece():
    whole = Region.whole((4, 6))
    rows = Region((8, 6), (((2, 4),), ((0, 6),)))
    apart = Region((4, 12), (((0, 4),), ((0, 3), (6, 3))))
    for region, expected in ((whole, {True}), (rows, {True}), (apart, {True, False})):
        boxes = [box for start in range(20) for box in boxes_of_region(region, start, start + 4)]
        boxes += boxes_of_region(region, 0, 24)
        assert {is_contiguous(box, region) for box in boxes} == expected


def test_a_folder_that_is_gone_with_its_files_is_no_error_at_the_end(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    store = BlockStore([folder], StoreLayout.plan("d", [1], num_versions=3))
    buffer = BufferPool(1, 1).take()
    store.write(0, buffer.view)
    store.commit(1)
    (tmp_path / "witness").write_text("", encoding="utf-8")
    store.versions.settle(store.pin_last(tmp_path / "witness"))
    shutil.rmtree(folder)
    store.close()
    assert list(tmp_path.iterdir()) == [tmp_path / "witness"]
