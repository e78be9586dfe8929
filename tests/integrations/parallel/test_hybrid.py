"""Layers split inside of the stages of a pipeline, in all precisions; against one process.

And weights that two stages tie: one gradient, one norm, one tensor. In fp32 `test_pairs` has every
pair of ways to split.
"""

import pytest
import torch
from safetensors.torch import load_file

from bench.shared.reference import everything, same
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, load_checkpoint, save_checkpoint
from gemini.checkpoint.model.keys import Keys
from gemini.checkpoint.save import runs_of
from optim import HybridAdam
from tests.integrations.cases.hybrid_runs import (
    ADAM,
    BOTH,
    CUT,
    INTERLEAVED,
    ZBV,
    Run,
    batches,
    check_trained,
    copies_in,
    made,
    state_of,
)
from tests.support.said import said

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
TIED, EMBED, HEAD = "Llama tied, 4", "model.embed_tokens.weight", "lm_head.weight"
ZERO1, CHUNKED = {"zero_stage": 1}, {"tokens": 5}
FP16, BF16 = {"precision": "fp16"}, {"precision": "bf16"}
ZERO2 = {"tp_size": 2, "pp_size": 1, "zero_stage": 2}
REPLICAS = {"extra_dp_size": 2}
CASES = {
    2: [
        ("tied: GPT-2", "GPT-2 tied", CUT),
        ("tied: interleaved", TIED, CUT | INTERLEAVED),
        ("tied: zbv", TIED, CUT | ZBV),
        ("tied: zbv, chunked loss", TIED, CUT | ZBV | CHUNKED),
        ("tied: clipped by the optimizer", TIED, CUT | {"max_norm": 0.0}),
    ],
    4: [
        ("1f1b", "Llama", BOTH),
        ("tp, replicas", "Llama", ZERO2 | REPLICAS),
        ("fp16, the documents' line", "Llama", BOTH | FP16),
        ("fp16, zbv", "Llama", BOTH | ZBV | FP16),
        ("bf16, interleaved", "Llama", BOTH | INTERLEAVED | BF16 | {"microbatch_size": 2}),
        ("fp16, tp", "Llama", {"tp_size": 2, "pp_size": 1} | ZERO1 | FP16),
        ("tied: tp, chunked loss", TIED, BOTH | CHUNKED),
        ("tied: tp, zbv, fp16", TIED, BOTH | ZBV | FP16),
        ("tied: shards, interleaved", TIED, CUT | INTERLEAVED | ZERO1),
        ("tied: replicas, bf16", TIED, CUT | REPLICAS | BF16),
    ],
    8: [("fp16, shards", "Llama", BOTH | FP16 | ZERO1 | {"cpu_offload": True})],
}


def test_what_is_split_cut_and_copied_trains_as_one_process(found, ranks, case):
    copies = check_trained(found[ranks], case)
    assert len(copies) >= 2 or not case[0].startswith("tied")


def overflows(rank, folder):
    """From a scale that is too large nobody steps; two parts of a rank load one scale."""
    run = Run("Llama", **BOTH, **ZBV, precision="fp16", initial_scale=2.0**30, hysteresis=1)
    before = run.weights(folder, "before")
    run.train(steps=1)
    after = run.weights(folder, "after")
    state = run.optimizer.state_dict()
    run.optimizer.load_state_dict(state | {"counters": dict(state["counters"], scale=512.0)})
    scales = [part.engine.control_vector.read().scale for part in run.model]
    run.optimizer.close()
    return run.said[0][1], state["counters"]["scale"], same(before, after), scales


def test_a_scale_that_overflows_is_one_of_all_ranks(tmp_path):
    for skipped, scale, unchanged, scales in run_ranks(overflows, 4, str(tmp_path)):
        assert skipped and scale == 2.0**29
        assert unchanged and scales == [512.0, 512.0]


SIZES = {
    "Llama": [BOTH | ZERO1, ZERO2, CUT | REPLICAS | ZBV],
    TIED: [CUT | INTERLEAVED | ZERO1, BOTH | ZBV, ZERO2],
}


def saves(rank, kind, folder):
    run = Run(kind, **SIZES[kind][0])
    run.train()
    save_checkpoint(f"{folder}/saved", run.model, run.optimizer)
    weights = run.weights(folder, "trained")
    runs = runs_of(run.model, run.optimizer, 4, Keys(), once=True)
    shown = {key: sum(count for _, count in one.runs) for key, one in runs.tensors.items()}
    run.booster.save_model(run.model, f"{folder}/pretrained", shard=True, use_safetensors=True)
    run.optimizer.close()
    loaded, counts = [], set()
    for i, sizes in enumerate(SIZES[kind]):
        run = Run(kind, **sizes)
        load_checkpoint(f"{folder}/saved", run.model, run.optimizer)
        loaded.append(run.weights(folder, f"loaded{i}"))
        counts |= {float(state["step"]) for state in run.optimizer.state.values()}
        save_checkpoint(f"{folder}/again{i}", run.model, run.optimizer)
        run.optimizer.close()
    return weights, loaded, shown, counts


@pytest.mark.unlike
@pytest.mark.parametrize("kind", SIZES)
def test_a_checkpoint_loads_at_any_sizes_and_by_plain_transformers(kind, tmp_path):
    results = run_ranks(saves, 4, kind, str(tmp_path))
    weights, loaded, _, _ = results[0]
    left_out = {HEAD} if kind == TIED else set()
    for name, value in weights.items():  # of all ranks one shows an element
        found = sum(shown.get(f"model.{name}", 0) for *_, shown, _ in results)
        assert found == (0 if name in left_out else value.numel())
    assert all(same(one, weights) for one in loaded)
    assert set.union(*(counts for *_, counts in results)) == {3.0}  # of tied copies, too
    (file,) = (tmp_path / "pretrained").glob("*.safetensors")
    assert left_out.isdisjoint(load_file(file))
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "pretrained")
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == (kind == TIED)
    assert same(state_of(plain), weights)
    whole = []
    for name in ("saved", "again0", "again1", "again2"):
        model = GeminiDDP(made(kind), precision="fp32")
        optimizer = HybridAdam(model.parameters(), **ADAM)
        load_checkpoint(tmp_path / name, model, optimizer)
        whole.append(everything(model, optimizer))
        optimizer.close()
    assert all(same(one, whole[0]) for one in whole)  # moments too
    assert all(torch.equal(whole[0][name], value) for name, value in weights.items())


def looks(rank, steps_only):
    """Copies that begin otherwise; a gradient that is asked for, and one that is dropped."""
    run = Run(TIED, **CUT, change=lambda model: model.lm_head.weight.data.mul_(1 + rank))
    part = run.model[0]
    weight = dict(part.module.named_parameters())[HEAD if rank else EMBED]
    (before,), text, named = copies_in(part), "", []
    if not steps_only:
        run.call(batches(TIED, 1)[0][0][0])
        text = said(lambda: weight.grad)
        named = [name for name, _ in part.named_gradients()]
        run.optimizer.zero_grad()
    run.train(steps=1)
    (after,) = copies_in(part)
    run.optimizer.close()
    return before, after, text, named


def test_tied_copies_begin_alike_and_their_sum_is_seen_by_the_step_alone():
    (before, after, text, named), other = run_ranks(looks, 2, False)
    assert torch.equal(before, other[0]) and torch.equal(after, other[1])
    assert f"stages tie {EMBED}, whose gradients are added up in step()" in text
    assert text == other[2] and named and EMBED not in (*named, *other[3])
    assert torch.equal(after, run_ranks(looks, 2, True)[0][1])  # as if nothing had come before
