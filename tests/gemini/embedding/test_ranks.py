"""Rows that ranks share: the bits of one whole table, checkpoints of any world size."""

import json
import math
import os
import shutil

import pytest
import torch
from torch import nn

import gemini
from bench.shared.workers import run_ranks
from gemini.checkpoint import CheckpointError
from nvme import StoreFormatError
from tests.support.whole_tables import RULES, WholeTable, same_bits, saved_records

NUM, DIM, CACHE = 50, 5, 40
STEPS = 6


def weights():
    return torch.randn(NUM, DIM, generator=torch.Generator().manual_seed(0))


def batch_of(rank, step):
    """Ranks have unlike numbers of ids; one has none at times."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(0, NUM, ((3 + 2 * rank) * ((rank + step) % 4 > 0),), generator=generator)


def loss_of(out, rank):
    return (out * (rank + 1.5)).square().sum()


def has_backward(rank, step):
    return (rank, step) != (1, 2)  # a rank whose loss does not use the rows


def cached(rule, folder=None, cache_rows=CACHE, **options):
    home = {"home": "nvme", "nvme_dir": folder} if folder else {}
    return gemini.CachedEmbedding.from_pretrained(
        weights(), freeze=False, cache_rows=cache_rows, rule=rule, lookahead=2, **home, **options
    )


def run(emb, rank, first, last, scales=True):
    batches = [(step, batch_of(rank, step)) for step in range(first, last)]
    for step, ids in emb.prefetch(batches, ids=lambda batch: batch[1]):
        loss = loss_of(emb(ids), rank)
        if has_backward(rank, step):
            loss.backward()
        if step % 3 == 1:  # accumulated
            continue
        norm = emb.grad_norm()
        emb.step(float(min(1, 1 / norm)))
        if step == 3:
            emb.undo()


def expected(rule, world_size, last, first=0, whole=None):
    """The whole table, whose gradients are means over ranks, added in their order."""
    module = nn.Embedding(NUM, DIM, _weight=weights())
    whole = whole or WholeTable(module, rule)
    sums = [torch.zeros(NUM, DIM) for _ in range(world_size)]
    for step in range(first, last):
        for rank in range(world_size):
            loss = loss_of(whole(batch_of(rank, step)), rank)
            if has_backward(rank, step):
                loss.backward()
                sums[rank] += whole.module.weight.grad
                whole.module.zero_grad()
        if not all(has_backward(rank, step) for rank in range(world_size)):
            touched = [batch_of(r, s) for s in (step - 1, step) for r in range(world_size)
                       if has_backward(r, s) and (s == step or s % 3 == 1)]  # fmt: skip
            whole.touched.zero_()
            whole.touched[torch.cat(touched)] = True
        if step % 3 == 1:
            continue
        total = torch.zeros(NUM, DIM)
        for part in sums:
            total += part
            part.zero_()
        whole.module.weight.grad = total / world_size
        norm = whole.module.weight.grad.double().square().sum().sqrt()
        whole.step(float(min(1, 1 / norm)))
        if step == 3:
            whole.undo()
    return whole


def train_and_save(rank, rule, folder, home):
    emb = cached(rule, home and home / "rows")
    run(emb, rank, 0, STEPS)
    emb.save(folder / "saved")
    report = emb.report()
    emb.close()
    return report


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_ranks_have_the_bits_of_one_whole_table(rule, world_size, tmp_path):
    home = tmp_path if world_size == 2 else None
    (tmp_path / "rows").mkdir()
    reports = run_ranks(train_and_save, world_size, rule, tmp_path, home)
    whole = expected(rule, world_size, STEPS)
    records, step = saved_records(tmp_path / "saved")
    assert step == whole.step_count and same_bits(records, whole.records)
    for report in reports:
        assert report.policy == "belady" and report.step == step
        assert report.read_bytes == report.planned_read_bytes
        assert report.written_bytes == report.planned_written_bytes


def go_on(rank, rule, folder):
    emb = cached(rule)
    emb.load(folder / "saved")
    run(emb, rank, STEPS, STEPS + 4)
    emb.save(folder / "later")


@pytest.mark.parametrize("sizes", [(1, 3), (3, 2), (2, 1)])
def test_another_world_size_goes_on_with_a_checkpoint(sizes, tmp_path):
    rule = RULES[2]
    run_ranks(train_and_save, sizes[0], rule, tmp_path, None)
    run_ranks(go_on, sizes[1], rule, tmp_path)
    whole = expected(rule, sizes[0], STEPS)
    expected(rule, sizes[1], STEPS + 4, STEPS, whole)
    records, step = saved_records(tmp_path / "later")
    assert step == whole.step_count and same_bits(records, whole.records)


def go_on_in_files(rank, rule, folder):
    emb = cached(rule, folder / "rows", recover=True)
    emb.save(folder / "recovered")
    emb.close()


def one_step_less(folder):
    """File of rank 0 as it was before its last step, by a copy; that of rank 1 has it."""
    return folder / "rows" / "embedding-0-of-2.rows"


def train_and_copy(rank, rule, folder):
    emb = cached(rule, folder / "rows")
    run(emb, rank, 0, 1)
    emb.save(folder / "first")
    if rank == 0:
        shutil.copy(one_step_less(folder), folder / "copy")
    loss_of(emb(batch_of(rank, 1)), rank).backward()
    emb.step()
    emb.close()


def test_files_that_are_one_step_apart_are_opened_at_the_earlier_step(tmp_path):
    """As ranks are that were killed between two commits."""
    rule = RULES[2]
    (tmp_path / "rows").mkdir()
    run_ranks(train_and_copy, 2, rule, tmp_path)
    shutil.copy(tmp_path / "copy", one_step_less(tmp_path))
    run_ranks(go_on_in_files, 2, rule, tmp_path)
    first, recovered = (saved_records(tmp_path / name) for name in ("first", "recovered"))
    assert same_bits(first[0], recovered[0]) and first[1] == recovered[1] == 1


def refuse_together(rank):
    """What one rank cannot do, none does; and the next batch goes on."""
    emb, said = cached(RULES[0]), []

    def refused(work):
        try:
            work()
        except ValueError as error:
            said.append(str(error))

    small = cached(RULES[0], cache_rows=4)
    refused(lambda: small(torch.arange(0, 20, 2) if rank else torch.arange(2)))
    refused(lambda: emb(torch.tensor([NUM]) if rank else torch.tensor([0])))
    refused(lambda: list(emb.prefetch([torch.tensor([1])] * (2 + rank), ids=list)))
    refused(emb.state_dict)
    assert emb(torch.arange(3)).shape == (3, DIM)
    return said


def test_a_rank_that_fails_alone_is_told_to_all():
    one, other = run_ranks(refuse_together, 2)
    assert "cache_rows=4" in one[0] and "ranks [0] refused" in other[0]
    assert "ranks [1] refused" in one[1] and "ids from 50" in other[1]
    assert "the loaders of ranks [0] have ended" in one[2] and one[2] == other[2]
    assert "expected save(folder) on every rank" in one[3]


def overflow(rank):
    emb = cached(RULES[0])
    (emb(torch.arange(3)).sum() * (math.inf if rank else 1)).backward()
    norm = float(emb.grad_norm())
    emb.zero_grad()
    emb.step()
    return norm, emb.report().step


def test_an_overflow_of_one_rank_is_seen_by_all():
    for norm, step in run_ranks(overflow, 2):
        assert not math.isfinite(norm) and step == 0


# -- folders of strangers -------------------------------------------------------------------------


def changed(folder, **fields):
    path = folder / "rows.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**body, **fields}), encoding="utf-8")


def pipe(folder):
    (folder / "rows-00000.bin").unlink()
    os.mkfifo(folder / "rows-00000.bin")


def flip(folder):
    path = folder / "rows-00000.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "no manifest": (lambda folder: (folder / "rows.json").unlink(), "cannot be read"),
    "no json": (lambda folder: (folder / "rows.json").write_bytes(b"{"), "cannot be read"),
    "no dict": (
        lambda folder: (folder / "rows.json").write_bytes(b"[]"),
        "says what no checkpoint has",
    ),
    "other rows": (lambda folder: changed(folder, num_rows=51), "rows of another table: num_rows"),
    "other rule": (lambda folder: changed(folder, rule={"name": "X"}), "another table: rule 'X'"),
    "huge": (lambda folder: changed(folder, width=1 << 60), "says what no|another table"),
    "parts": (lambda folder: changed(folder, files=[[1, 2, 3]]), "says what no checkpoint has"),
    "negative": (lambda folder: changed(folder, step=-1), "says what no checkpoint has"),
    "flip": (flip, "part 0, is damaged"),
    "cut": (
        lambda folder: os.truncate(folder / "rows-00000.bin", 8),
        "has 8 bytes, expected 1200: it was cut or replaced",
    ),
    "pipe": (pipe, "cannot be read: it is no file"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_folders_of_strangers_change_nothing(kind, tmp_path):
    damage, said = DAMAGES[kind]
    emb = cached(RULES[1])
    run(emb, 0, 0, 2)
    emb.save(tmp_path / "saved")
    shutil.copytree(tmp_path / "saved", tmp_path / "other")
    damage(tmp_path / "other")
    with pytest.raises(CheckpointError, match=said):
        emb.load(tmp_path / "other")
    emb.save(tmp_path / "again")
    assert same_bits(*(saved_records(tmp_path / name)[0] for name in ("saved", "again")))
    with pytest.raises(CheckpointError, match="is there; expected a new folder"):
        emb.save(tmp_path / "saved")


def test_files_of_another_world_size_are_not_recovered(tmp_path):
    with pytest.raises(StoreFormatError, match="cannot be opened"):
        cached(RULES[1], tmp_path, recover=True)
