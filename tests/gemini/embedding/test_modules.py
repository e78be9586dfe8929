"""Cached embeddings beside torch's whole ones, bit for bit."""

import copy
import math
import threading

import pytest
import torch
from torch import nn

import gemini
from gemini.embedding import LazyAdam, RowAdagrad, RowSGD
from tests.support.whole_tables import RULES, pair, quicker, same_bits, saved_records

NUM, DIM = 60, 5


def drawn(count, size, seed=0, num=NUM):
    """Batches of ids with duplicates."""
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(0, num, size, generator=generator) for _ in range(count)]
    for batch in batches:
        batch[..., -2:] = batch[..., :2]
    return batches


@pytest.fixture(params=["host", "nvme"])
def home(request, tmp_path):
    folder = tmp_path / "rows" if request.param == "nvme" else None
    if folder:
        folder.mkdir()
    return {"home": request.param, "nvme_dir": folder}


def loss_of(out):
    return (out * torch.arange(1, out.numel() + 1).view(out.shape) / out.numel()).square().sum()


def compare(cached, whole, tmp_path):
    cached.save(tmp_path / "saved")
    records, step = saved_records(tmp_path / "saved")
    assert same_bits(records, whole.records) and step == whole.step_count


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_steps_clips_skips_accumulation_and_undo_have_the_bits_of_a_whole_table(
    rule, home, tmp_path
):
    cached, whole = pair(rule, NUM, DIM, nn.Embedding, 24, **home, padding_idx=3, lookahead=3)
    batches = drawn(12, (2, 6))
    for number, batch in enumerate(cached.prefetch(batches, ids=lambda batch: batch)):
        outs = []
        for emb in (cached, whole):
            outs.append(emb(batch))
            loss_of(outs[-1]).backward()
            if number % 4 == 3:  # an overflow: skipped
                (emb(batch).sum() * math.inf).backward()
        assert same_bits(outs[0], outs[1])
        if number % 4 == 1:  # accumulated: the next batch's gradients are added
            continue
        if number % 4 == 3:
            assert not math.isfinite(cached.grad_norm())
            cached.zero_grad()
            whole.zero_grad()
            continue
        norm = whole.module.weight.grad.double().norm()
        assert torch.allclose(cached.grad_norm(), norm, rtol=1e-12)
        scale = float(min(1, 0.5 / norm))
        cached.step(scale)
        whole.step(scale)
        if number == 8:
            cached.undo()
            whole.undo()
        if number == 4:
            cached.rule, whole.rule = quicker(rule), quicker(rule)
    report = cached.report()
    assert report.policy == "belady" and report.misses > 24 and report.rows_written > 0
    assert report.read_bytes == report.planned_read_bytes
    assert report.written_bytes == report.planned_written_bytes
    compare(cached, whole, tmp_path)


@pytest.mark.parametrize("freq", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_torchs_in_every_mode(mode, freq, tmp_path):
    if mode == "max" and freq:
        pytest.skip("torch has no gradients for it")
    options = {"mode": mode, "scale_grad_by_freq": freq, "padding_idx": 1}
    cached, whole = pair(
        RowAdagrad(), NUM, DIM, nn.EmbeddingBag, 40, **options, include_last_offset=True
    )
    offsets = torch.tensor([0, 4, 4, 11, 20])  # one bag is empty
    for batch in drawn(4, (20,)):
        outs = [emb(batch, offsets) for emb in (cached, whole)]
        assert same_bits(*outs)
        for out in outs:
            loss_of(out).backward()
        cached.step()
        whole.step()
    compare(cached, whole, tmp_path)
    assert cached.report().policy == "lru"


def test_weights_of_samples_have_their_gradients(tmp_path):
    cached, whole = pair(RowSGD(), NUM, DIM, nn.EmbeddingBag, 40, mode="sum")
    grads = []
    for emb in (cached, whole):
        weights = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss_of(emb(drawn(1, (3, 4))[0], None, weights)).backward()
        emb.step()
        grads.append(weights.grad)
    # torch takes a dot product of each row, whose order of sums depends on where the row lies: five
    # products, so at most four roundings apart
    assert torch.allclose(*grads, rtol=4 * torch.finfo(torch.float32).eps, atol=1e-6)
    compare(cached, whole, tmp_path)


def test_two_calls_of_one_backward_add_up_before_backwards_do(tmp_path):
    cached, whole = pair(LazyAdam(), NUM, DIM, nn.Embedding, 40)
    for emb in (cached, whole):
        for first, second in zip(*[iter(drawn(6, (9,)))] * 2, strict=True):
            (loss_of(emb(first)) + loss_of(emb(second) * 3)).backward()
        emb.step()
    compare(cached, whole, tmp_path)


def test_an_evaluation_between_batches_changes_no_bit_and_holds_no_rows(tmp_path):
    cached, whole = pair(RowAdagrad(), NUM, DIM, nn.Embedding, 40, lookahead=2)
    for batch in cached.prefetch(drawn(6, (12,)), ids=lambda batch: [batch]):
        with torch.no_grad():
            for other in drawn(4, (12,), seed=9):
                assert same_bits(cached(other), whole.module(other))
        for emb in (cached, whole):
            loss_of(emb(batch)).backward()
            emb.step()
    assert cached.report().policy == "belady, lru"
    compare(cached, whole, tmp_path)


def test_another_thread_evaluates_meanwhile(tmp_path):
    cached, whole = pair(RowAdagrad(), NUM, DIM, nn.Embedding, 50)
    frozen = torch.tensor([[58, 59]])  # no batch has them
    expected, found, ends = whole.module(frozen).detach(), [], threading.Event()

    def evaluate():
        with torch.no_grad():
            while not ends.is_set():
                found.append(same_bits(cached(frozen), expected))

    thread = threading.Thread(target=evaluate)
    thread.start()
    for batch in drawn(30, (12,), num=58):
        for emb in (cached, whole):
            loss_of(emb(batch)).backward()
            emb.step()
    ends.set()
    thread.join()
    assert found and all(found)
    compare(cached, whole, tmp_path)


def test_state_dicts_are_torchs(tmp_path):
    cached, _ = pair(RowAdagrad(), NUM, DIM, nn.Embedding, 20)
    loss_of(cached(drawn(1, (12,))[0])).backward()
    cached.step()
    holder = nn.ModuleDict({"emb": cached})
    plain = nn.ModuleDict({"emb": nn.Embedding(NUM, DIM)})
    plain.load_state_dict(holder.state_dict())
    holder.load_state_dict({"emb.weight": plain["emb"].weight.detach() * 2})
    assert same_bits(cached(torch.arange(20)), (plain["emb"].weight * 2)[:20])
    cached.zero_grad()
    with pytest.raises(RuntimeError, match=r"emb.weight has shape"):
        holder.load_state_dict({"emb.weight": torch.zeros(3, 5)})
    with pytest.raises(RuntimeError, match=r"Missing key.*emb.weight"):
        holder.load_state_dict({})
    frozen = gemini.CachedEmbedding.from_pretrained(plain["emb"].weight, cache_rows=9)
    assert same_bits(frozen(torch.arange(9)), plain["emb"].weight[:9])
    assert not frozen(torch.arange(9)).requires_grad


def embedding(**options):
    return gemini.CachedEmbedding(NUM, DIM, **{"cache_rows": 8, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_norm": 1.0}, "expected None, and a norm of the output"),
        ({"sparse": True}, "expected False"),
        ({"dtype": torch.bfloat16}, "expected torch.float32"),
        ({"cache_rows": 0}, "expected at least 1"),
        ({"lookahead": -1}, "expected a number of batches"),
        ({"padding_idx": 60}, "expected one of 60 rows"),
        ({"home": "nvme"}, "or 'nvme' with a folder"),
        ({"home": "disk"}, "expected 'host' without"),
        ({"recover": True}, "expected home='nvme'"),
    ],
)
def test_what_is_not_built_is_refused_by_name(options, said):
    with pytest.raises(ValueError, match=said):
        embedding(**options)


def test_batches_that_do_not_fit_are_refused_and_the_next_goes_on():
    emb = embedding()
    with pytest.raises(ValueError, match=r"a batch has 9 rows.*expected cache_rows of at least 9"):
        emb(torch.arange(9))
    emb(torch.arange(5))
    with pytest.raises(ValueError, match=r"5 wait for step"):
        emb(torch.arange(5, 9))
    emb.zero_grad()
    assert emb(torch.arange(5, 9)).shape == (4, DIM)
    with pytest.raises(ValueError, match=r"ids from -1 to 60; expected 0 to 59"):
        emb(torch.tensor([-1, 60]))


def test_misuses_are_refused_by_name(tmp_path):
    emb = embedding()
    with pytest.raises(ValueError, match=r"no step to undo"):
        emb.undo()
    with pytest.raises(ValueError, match=r"expected a RowAdagrad"):
        emb.rule = RowSGD()
    with pytest.raises(ValueError, match=r"expected save\(\) and load\(\)"):
        copy.deepcopy(emb)
    with pytest.raises(ValueError, match=r"expected a change of device"):
        emb.half()
    with pytest.raises(AttributeError, match=r"has no weight"):
        emb.weight  # noqa: B018
    with pytest.raises(TypeError, match=r"cache_row"):
        gemini.CachedEmbedding(NUM, DIM, cache_row=8)
    loop = emb.prefetch(drawn(3, (4,)), ids=lambda batch: batch)
    next(loop)
    with pytest.raises(ValueError, match=r"expected one loop at a time"):
        emb.prefetch([], ids=lambda batch: batch)
    with pytest.raises(ValueError, match=r"load within a loop"):
        emb.load(tmp_path)
    loop.close()
    assert emb.report().hits == 0 and len(list(emb.prefetch(drawn(2, (4,)), ids=list))) == 2


def test_a_step_without_gradients_changes_nothing():
    emb = embedding()
    emb.step()
    assert emb.report().step == 0 and emb.grad_norm() == 0
