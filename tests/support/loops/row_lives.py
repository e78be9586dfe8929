"""Lives of a file of rows: steps, an undo, evictions and epochs; killed, recorded, recovered."""

from pathlib import Path

import torch

import gemini
from gemini.embedding import LazyAdam
from tests.support.disks.killing import counted
from tests.support.loops.kills import ended, num_ended
from tests.support.whole_tables import same_bits, saved_records

NUM, DIM, CACHE = 40, 90, 12  # three rows in a cell
STEPS = 9
UNDONE = 6  # the step with this number is undone, and made again with other ids


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, NUM, (6,), generator=generator) for _ in range(STEPS + 1)]


def made(folder=None, **options):
    torch.manual_seed(0)
    home = {} if folder is None else {"home": "nvme", "nvme_dir": folder}
    return gemini.CachedEmbedding(NUM, DIM, cache_rows=CACHE, rule=LazyAdam(), **home, **options)


def live(emb, note=lambda what: None, begin=0):
    """Steps from `begin`; notes `("begins", k)` and `("ends", k)` of the k-th commit."""
    for k, ids in enumerate(batches()):
        if k < begin:
            continue
        note(("begins", k + 1))
        if k == UNDONE:
            emb.undo()
        else:
            (emb(ids) * 1.5).square().sum().backward()
            emb.step()
        note(("ends", k + 1))


def states(scratch: Path):
    """Records after everything that commits, by its number: 0 is before the first."""
    emb, found = made(), []

    def look(what):
        if what[0] == "ends" or not found:
            emb.save(scratch / str(len(found)))
            found.append(saved_records(scratch / str(len(found))))

    live(emb, look)
    return found


def killed(last, folder):
    """A run that is killed at the change number `last`; how many changes there are."""
    with counted(last, ".rows") as changes:
        emb = made(folder)
        ended(folder, 1)
        live(emb, lambda what: ended(folder, what[1] + 1) if what[0] == "ends" else None)
        return changes.count


def recovered(folder: Path, scratch: Path):
    """(records, step) of a file that was left, and the module that goes on with it."""
    emb = made(folder, recover=True)
    emb.save(scratch)
    return saved_records(scratch), emb


def number_of(found, expected, least, most):
    """Which of the expected states a recovered one is: the last that had ended, or the next."""
    fitting = [
        k for k in range(least, most + 1)
        if same_bits(found[0], expected[k][0]) and found[1] == expected[k][1]
    ]  # fmt: skip
    assert fitting, f"step {found[1]} is none of {least} to {most}"
    return fitting[-1]


__all__ = ["killed", "live", "made", "num_ended", "number_of", "recovered", "states"]
