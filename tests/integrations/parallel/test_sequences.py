"""Sequences that ranks share, and a loss whose logits never exist whole; against one process."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from bench.shared.workers import run_ranks
from gemini.integrations import chunk_loss
from gemini.mesh.head_loss import HeadLoss
from gemini.parallel import attention
from gemini.parallel.cut import stages_of
from gemini.parallel.shared_sequence import SequenceParallel, share_sequence
from tests.integrations.cases.hybrid_runs import ZBV, Run, check_trained, made
from tests.support.said import said

transformers = pytest.importorskip("transformers")
ULYSSES, RING = (
    {"pp_size": 1, "enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
    for mode in ("all_to_all", "ring_attn")
)
STAGES = {"tp_size": 1, "pp_size": 2, "sp_size": 2}
SHARED = {
    "Ulysses, dp": ("GPT-2", ULYSSES | {"tp_size": 1, "sp_size": 2, "zero_stage": 2}),
    "inner rings": ("GPT-2", RING | {"tp_size": 1, "sp_size": 4, "inner_ring_size": 2}),
    "chunked, tp, whole logits": (
        "Llama",
        ULYSSES | {"tp_size": 2, "sp_size": 2, "tokens": 5, "parallel_output": False},
    ),
    "fp16, more ranks than keys": (
        "Llama", ULYSSES | {"tp_size": 1, "sp_size": 4, "precision": "fp16", "zero_stage": 1}
    ),
    "bf16, replicas": (
        "Llama",
        RING | {"tp_size": 1, "sp_size": 2, "extra_dp_size": 2, "precision": "bf16", "tokens": 7},
    ),
    "alibi, tp": ("BLOOM", ULYSSES | {"tp_size": 2, "sp_size": 2}),
    "alibi, ring in stages": ("BLOOM", RING | STAGES),
    "ring in stages, zbv, chunked": ("Llama long", RING | STAGES | ZBV | {"tokens": 5}),
}  # fmt: skip
CASES = {4: [(name, f"{kind} shared", options) for name, (kind, options) in SHARED.items()]}


@pytest.mark.ci
def test_shared_sequences_train_as_one_process(found, ranks, case):
    check_trained(found[ranks], case)


def outputs(rank, folder):
    """Of one batch, by mode: loss, and logits as they are given."""
    run = Run("Llama shared", **RING, tp_size=1, sp_size=2, parallel_output=False, zero_stage=1)
    split = Run("Llama shared", tp_size=2, pp_size=1, zero_stage=1)
    ids = torch.arange(4, 68).view(4, 16)
    split.model(input_ids=ids)  # says nothing of how the loss is made
    first = split.model(input_ids=ids, labels=ids)  # gathers logits
    shared, parallel = (one.model(input_ids=ids, labels=ids) for one in (run, split))
    assert torch.allclose(first.logits.to_local(), parallel.logits.to_local(), atol=1e-5)
    assert torch.allclose(first.loss, parallel.loss)
    part = parallel.logits.to_local().shape[-1]
    found = [shared.loss, shared.logits, parallel.loss, parallel.logits.full_tensor(), part]
    for one in (run, split):
        one.optimizer.close()
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in found]


@pytest.mark.ci
def test_outputs_are_of_all_tokens_and_of_all_words(tmp_path):
    ids = torch.arange(4, 68).view(4, 16)
    with torch.no_grad():
        want = made("Llama shared")(input_ids=ids, labels=ids)
    for loss, logits, of_split, parallel, part in run_ranks(outputs, 2, str(tmp_path)):
        assert torch.allclose(loss, want.loss) and torch.allclose(of_split, want.loss)
        assert torch.allclose(logits, want.logits, atol=1e-5)
        assert torch.allclose(parallel, want.logits, atol=1e-5) and part == 48


def in_stages(rank):
    run = Run("GPT-2 shared", **(ULYSSES | STAGES), parallel_output=False)
    ids = torch.arange(4, 68).view(4, 16)
    text = said(run.call, {"input_ids": ids[:, 1:], "labels": ids[:, 1:]})
    with torch.no_grad():
        batch = iter([{"input_ids": ids, "labels": ids}])
        found = run.booster.execute_pipeline(
            batch, run.model, lambda outputs, _: outputs.loss, return_outputs=True
        )
    run.train(steps=1)
    run.optimizer.close()
    return text, run.said[0][1], found["loss"], (found["outputs"] or {}).get("logits")


@pytest.mark.ci
def test_stages_give_what_the_model_gives_and_refuse_at_all_places_what_they_cannot_split():
    ids = torch.arange(4, 68).view(4, 16)
    with torch.no_grad():
        want = made("GPT-2 shared")(input_ids=ids, labels=ids)
    last = []
    for text, skipped, loss, logits in run_ranks(in_stages, 4):
        assert "a sequence of 15 is split into 2 pieces" in text and not skipped
        last += [] if loss is None else [(loss, logits)]
    assert len(last) == 2
    for loss, logits in last:
        assert torch.allclose(loss, want.loss) and torch.allclose(logits, want.logits, atol=1e-5)


# -- attention alone --

BATCH, TIME, WIDTH = 2, 24, 5
# heads, of keys, inner, whether scores have slopes of ALiBi
HEADS = {
    "ring": (6, 3, 4, False),
    "inner": (6, 3, 2, False),
    "ulysses": (4, 2, 0, False),
    "ring, slopes": (6, 3, 2, True),
    "ulysses, slopes": (8, 4, 0, True),
}


def attended(rank, name):
    """(output, gradients of queries, keys and values) of this rank's tokens."""
    heads, few, inner, biased = HEADS[name]
    group = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)).get_group()
    own = attention.positions(bool(inner), TIME, rank, 4)
    q, k, v, grad = (x[:, :, own] for x in drawn(heads, few))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    slopes = slopes_of(heads) if biased else None
    if inner:
        out = attention.ring_attention(*leaves, 0.3, group, inner, slopes)
    else:
        out = attention.ulysses(*leaves, 0.3, 0.0, group, slopes)
    out.backward(grad)
    return [own, out.detach(), *(x.grad for x in leaves)]


def drawn(heads, few, time=TIME):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, n, time, WIDTH, generator=draw) for n in (heads, few, few, heads)]


def slopes_of(heads):
    return torch.linspace(0.1, 0.9, heads)


def whole(heads, few, biased, time=TIME):
    """torch's attention: (output, gradients of queries, keys and values) of all tokens."""
    q, k, v, grad = drawn(heads, few, time)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bias = torch.full((time, time), -torch.inf).triu(1)
    if biased:
        bias = bias + slopes_of(heads)[:, None, None] * torch.arange(time)
    out = scaled_dot_product_attention(*leaves, attn_mask=bias, scale=0.3, enable_gqa=True)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.one_process("what is sent is counted in this process")
@pytest.mark.parametrize("name", HEADS)
def test_attention_of_parts_is_that_of_the_whole_and_sends_what_the_formula_says(name, monkeypatch):
    """Sums are fp32 in another order."""
    monkeypatch.setattr(attention, "QUERIES", 2)  # of the 3 in a piece
    sent, lock = [], threading.Lock()

    def counted(call, nbytes):
        def run(*args, **kwargs):
            with lock:
                sent.append(nbytes(*args))
            return call(*args, **kwargs)

        return run

    monkeypatch.setattr(
        dist, "all_to_all_single",
        counted(dist.all_to_all_single, lambda _, parts: parts.nbytes * 3 // 4),
    )  # fmt: skip
    monkeypatch.setattr(
        dist, "batch_isend_irecv",
        counted(
            dist.batch_isend_irecv,
            lambda ops: sum(one.tensor.nbytes for one in ops if one.op is dist.isend),
        ),
    )  # fmt: skip
    heads, few, inner, biased = HEADS[name]
    want = whole(heads, few, biased)
    for own, *parts in run_ranks(attended, 4, name):
        for part, x in zip(parts, want, strict=True):
            assert torch.allclose(part, x[:, :, own], rtol=1e-5, atol=2e-6)
    own = BATCH * TIME // 4 * WIDTH * 4  # bytes of one head
    of_rank = 2 * (2 * heads + 2 * 4) * own * 3 // 4  # two heads of keys are four for four ranks
    if inner:
        of_rank = few * own * (2 * 3 + 2 * 3 + 2 * 4)
    assert sum(sent) == 4 * of_rank


def of_three(rank):
    group = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",)).get_group()
    q, k, v, _ = (x[:, :, 3 * rank : 3 * rank + 3] for x in drawn(3, 3, 9))
    return attention.ulysses(q, k, v, 0.3, 0.0, group, slopes_of(3))


def test_slopes_need_no_even_length_where_heads_are_exchanged():
    want, *_ = whole(3, 3, True, 9)
    assert torch.allclose(torch.cat(run_ranks(of_three, 3), 2), want, rtol=1e-5, atol=2e-6)


def test_ranks_of_a_ring_have_as_much_to_do():
    places = [attention.positions(True, 16, rank, 4).tolist() for rank in range(4)]
    assert places == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert len({sum(one) for one in places}) == 1
    assert attention.positions(False, 8, 1, 4).tolist() == [2, 3]


# -- what is refused --


def refusals(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ids = torch.arange(4, 20).view(2, 8)

    def shared(kind, mode="ring_attn", dropout=0.0, **changes):
        model = made(kind)
        vars(model.config).update(changes)
        for module in model.modules():
            if dropout and hasattr(module, "attention_dropout"):
                own = isinstance(module.attention_dropout, torch.nn.Module)
                module.attention_dropout = torch.nn.Dropout(dropout) if own else dropout
        share_sequence(model, mesh, SequenceParallel(mode))
        return model

    def asked(how, kind="Llama shared", mode="ring_attn", changes=None, **given):
        model = shared(kind, mode, **(changes or {}))
        return said(lambda: model(**({"input_ids": ids} | how | given), labels=ids))

    left = torch.ones_like(ids)
    left[0, 0] = 0
    right = torch.ones_like(ids)
    right[0, -2:] = 0
    other = ids if rank else ids + 1
    return [
        said(shared, "BERT"),
        said(lambda: shared("Llama shared", attention_chunk_size=4)),
        asked({"input_ids": ids[:, :6]}),
        asked({"input_ids": other}),
        asked({"attention_mask": left}),
        asked({"attention_mask": right}),
        asked({"position_ids": torch.arange(8)[None] % 4}),
        asked({"return_dict": False}),
        said(shared, "Falcon"),
        asked({}, changes={"num_hidden_layers": 3}),
        asked({}, "Mistral", changes={"sliding_window": 4}),
        asked({}, changes={"dropout": 0.1}),
        asked({}, "BLOOM", "all_to_all", changes={"dropout": 0.1}),
        asked({"attention_mask": left}, "BLOOM"),
    ]


def test_what_would_be_wrong_is_refused():
    texts = [
        "BertForMaskedLM has its sequences split; expected a causal language model",
        "attends within chunks (attention_chunk_size)",
        "a sequence of 6 is split into 4 pieces; expected a length that they divide",
        "2 ranks share each sequence, and were given different ones",
        "expected zeros on the right of each row alone, where labels are -100",
        "expected zeros on the right of each row alone, where labels are -100",
        "position_ids of a split sequence count from token to token; expected one document",
        "LlamaForCausalLM gives a tuple; expected what has names",
        "FalconForCausalLM computes its attention itself, and its sequences are split; expected a",
        "LlamaForCausalLM called attention 2 times in 3 layers; expected a model whose layers all",
        "MistralAttention has sliding_window, and its sequence of 8 is split",
        "drops 0.1 of its attention, in a ring; expected 0",
        "BloomAttention drops 0.1 of its attention, and adds alibi; expected 0",
        "expected zeros on the right of each row alone, where labels are -100",
    ]
    for found in run_ranks(refusals, 2):
        for text, one in zip(texts, found, strict=True):
            assert text in one, (text, one)


# -- the loss where the head is --


@pytest.mark.parametrize("kind", ["GPT-2 tied", "BLOOM", "Gemma"])
def test_a_loss_in_chunks_is_that_of_all_logits(kind):
    """Logits of 7 tokens are one tensor; gradients are those of all, and scaled as the loss is."""
    plain, chunked = made(kind), made(kind)
    chunk_loss(chunked, tokens=7)
    ids = torch.arange(4, 52).view(4, 12)
    labels = ids.masked_fill(ids % 5 == 0, -100)
    want = plain(input_ids=ids, labels=labels, num_items_in_batch=17)
    given = chunked(input_ids=ids, labels=labels, num_items_in_batch=17)
    assert torch.allclose(given.loss, want.loss, rtol=1e-6) and "logits" not in given
    for loss in (want.loss, given.loss):
        (3 * loss).backward()
    for a, b in zip(plain.parameters(), chunked.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6 * float(a.grad.abs().max()))
    with torch.no_grad():
        assert torch.equal(chunked(input_ids=ids).logits, plain(input_ids=ids).logits)
        loss, *_ = chunked(input_ids=ids, labels=labels, return_dict=False)
    assert torch.allclose(loss * 37, plain(input_ids=ids, labels=labels).loss * 37, rtol=1e-6)


def test_the_last_stage_has_its_loss_in_chunks():
    plain, chunked = made("Llama shared"), made("Llama shared")
    chunk_loss(chunked, tokens=7)
    ids = torch.arange(4, 36).view(4, 8)
    want = plain(input_ids=ids, labels=ids)
    first, last = stages_of(chunked, 2)
    loss = last(first(ids, labels=ids), labels=ids)
    whole = last.rebuilt(loss)
    assert torch.allclose(loss, want.loss, rtol=1e-6) and whole.loss is loss
    assert "logits" not in whole
    with torch.no_grad():
        logits = last(first(ids))
    assert torch.allclose(logits, want.logits, atol=1e-6)


def test_a_model_that_does_more_to_its_logits_is_refused():
    model = made("Llama shared")
    assert "tokens=0; expected 1 or more" in said(chunk_loss, model, 0)
    assert "BertForMaskedLM has another loss" in said(chunk_loss, made("BERT"))
    chunk_loss(model)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * 0.5)
    ids = torch.arange(4, 20).view(2, 8)
    text = said(lambda: model(input_ids=ids, labels=ids))
    assert "LlamaForCausalLM does more to its logits than its head" in text
    plain = made("Llama shared")
    model = made("Llama shared")
    HeadLoss(model)  # as with parallel_output: nobody asked for it, and nothing is refused
    for one in (plain, model):
        one.lm_head.register_forward_hook(lambda module, args, logits: logits * 0.5)
    for _ in range(2):
        want, found = (one(input_ids=ids, labels=ids) for one in (plain, model))
        assert torch.equal(found.loss, want.loss) and torch.equal(found.logits, want.logits)
