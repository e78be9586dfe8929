"""Power lost at any point of a store's life: the last commit is there, whole."""

import random

import pytest

import nvme
from nvme import BlockStore, BufferPool, StoreLayout
from tests.support.disks.crashes import check_recording, explore
from tests.support.disks.recording import Write, recorded

SIZES = [5000, 1, 4096, 9000, 700]
MANY = [3] * 130  # whose index has several sectors


def content(nbytes, block, step):
    return random.Random(f"{block} {step}").randbytes(nbytes)


def life(folder, layout, folders=(".",), steps=5, seed=0):
    """Record a store: filled, stepped, once rolled back. And its blocks after every step."""
    rng, sizes = random.Random(seed), layout.block_nbytes
    with recorded(folder) as log:
        nvme.files.calls.make_folders(folder / "b")
        store = BlockStore([folder / name for name in folders], layout)
        pool = BufferPool(len(sizes), max(sizes))
        now, expected, used = [None] * len(sizes), {}, []
        for step in range(steps):
            failed = step == 3
            written = [b for b in range(len(sizes)) if step < 2 or rng.random() < 0.7]
            for block in written:
                buffer = pool.take()
                data = content(sizes[block], block, -1 if failed else step)
                buffer.view[: len(data)] = data
                store.write(block, buffer.view)
                used.append(buffer)
            if failed:
                store.rollback()
            else:
                store.flush()
            while used:
                pool.give(used.pop())
            if failed:
                continue
            now = [step if b in written else now[b] for b in range(len(sizes))]
            expected[step] = [content(sizes[b], b, made) for b, made in enumerate(now)]
            log.note(("begins", step))
            store.commit(step)
            log.note(("ends", step))
        check_recording(log)
        names = [str(path.relative_to(folder)) for path in store.paths]
        ops = len(log.ops)
        store.close()
        del log.ops[ops:]
    return log, names, expected


def checker(names, expected):
    """Demands one whole step: the last that was committed, or one whose commit had begun."""

    def check(crash):
        begun = [step for kind, step in crash.notes if kind == "begins"]
        ended = [step for kind, step in crash.notes if kind == "ends"]
        paths = [crash.folder / name for name in names]
        try:
            with nvme.recover(paths) as found:
                step = found.index.step
                blocks = [found.block(i) for i in range(found.layout.num_blocks)]
        except nvme.FormatError:
            assert not ended, "a step that was committed is gone"
            return
        assert step in expected and step in (ended[-1:] or begun) + begun[-1:]
        assert blocks == expected[step]

    return check


LAYOUTS = {
    "one file": (StoreLayout.plan("d", SIZES), (".",)),
    "two folders": (StoreLayout.plan("d", SIZES, [1.0, 1.0]), (".", "b")),
    "a folder without blocks": (StoreLayout.plan("d", SIZES, [1.0, 1e-9]), (".", "b")),
    "many blocks": (StoreLayout.plan("d", MANY), (".",)),
}


def of_interest(layout):
    """After which calls to look: where there are many blocks, not after each of them."""
    blocks_begin = layout.extents()[0][0].offset
    many = layout.num_blocks > len(SIZES)
    return lambda op: not (many and isinstance(op, Write) and op.offset >= blocks_begin)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_power_loss_leaves_the_last_commit_whole(kind, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    log, names, expected = life(folder, *LAYOUTS[kind], steps=5)
    check = checker(names, expected)
    after = of_interest(LAYOUTS[kind][0])
    explored = explore(log, tmp_path / "after", check, samples=1, most=50, after=after)
    assert explored > (20 if kind == "many blocks" else 150)


@pytest.mark.ci
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_power_loss_leaves_the_last_commit_whole_in_any_of_thousands_of_states(kind, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    log, names, expected = life(folder, *LAYOUTS[kind], steps=12, seed=1)
    check = checker(names, expected)
    after = of_interest(LAYOUTS[kind][0])
    samples = 20 if kind == "many blocks" else 200
    explored = explore(log, tmp_path / "after", check, samples=samples, after=after)
    print(f"{explored} states of a store in {kind}")
    assert explored > (50 if kind == "many blocks" else 3400)
