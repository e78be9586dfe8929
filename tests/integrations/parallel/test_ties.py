"""Weights that two stages of a pipeline tie: one gradient, one norm, one tensor; against one
process."""

import pytest
import torch
from safetensors.torch import load_file

from bench.shared.reference import everything, same
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, load_checkpoint, save_checkpoint
from gemini.checkpoint.format.keys import Keys
from gemini.checkpoint.save import runs_of
from optim import HybridAdam
from tests.integrations.cases.hybrid_runs import (
    ADAM,
    MAX_NORM,
    Run,
    batches,
    made,
    one_process,
    reference,
    state_of,
    update_error,
)
from tests.support.said import said

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
# fp32: other orders of sums, of micro-batches and ranks, and of what is split
BOUND = 1.5e-6
LLAMA, EMBED, HEAD = "Llama tied, 4", "model.embed_tokens.weight", "lm_head.weight"
CUT, BOTH = {"tp_size": 1, "pp_size": 2}, {"tp_size": 2, "pp_size": 2}
INTERLEAVED = {"pp_style": "interleaved", "num_model_chunks": 2}
ZBV = {"pp_style": "zbv", "num_model_chunks": 2}  # one process has both copies
CASES = {
    2: {
        "GPT-2": ("GPT-2 tied", CUT),
        "interleaved": (LLAMA, CUT | INTERLEAVED),
        "zbv": (LLAMA, CUT | ZBV),
        "zbv, chunked loss": (LLAMA, CUT | ZBV | {"tokens": 5}),
        "clipped by the optimizer": (LLAMA, CUT | {"max_norm": 0.0}),
    },
    4: {
        "tp, chunked loss": (LLAMA, BOTH | {"tokens": 5}),
        "tp, zbv, fp16": (LLAMA, BOTH | ZBV | {"precision": "fp16"}),
        "shards, interleaved": (LLAMA, CUT | INTERLEAVED | {"zero_stage": 1}),
        "replicas, bf16": (LLAMA, CUT | {"extra_dp_size": 2, "precision": "bf16"}),
    },
}


def trained(rank, cases, folder):
    """Of each case weights, what every step said, and this rank's copies."""
    found = {}
    for name, (kind, options) in cases.items():
        run = Run(kind, **options)
        if options.get("max_norm") == 0.0:
            step = run.optimizer.step
            run.optimizer.step = lambda run=run, step=step: clipped(run, step)
        run.train()
        copies = [copy for part in run.model for copy in copies_in(part)]
        found[name] = run.weights(folder, name), run.said, copies
        run.optimizer.close()
    return found


def copies_in(part):
    """What a stage has of the tied weight, under the one name that it has there."""
    state = part.state_dict()
    names = [spec.names for spec in part.engine.layout.params if len(spec.names) > 1]
    return [state[name] for alike in names for name in alike if name in state]


def clipped(run, step):
    run.optimizer.clip_grad_by_norm(MAX_NORM)
    step()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ties"))
    return {ranks: run_ranks(trained, ranks, cases, folder) for ranks, cases in CASES.items()}


@pytest.mark.parametrize(("ranks", "name"), [(r, name) for r in CASES for name in CASES[r]])
def test_a_weight_that_stages_tie_trains_as_in_one_process(found, ranks, name):
    kind, options = CASES[ranks][name]
    places = ranks // options["tp_size"] // options["pp_size"]
    weights, said_first, _ = found[ranks][0][name]
    want, start = reference(kind, places), state_of(made(kind))
    bound, precision = BOUND, options.get("precision", "fp32")
    if precision != "fp32":
        bound = 1.1 * update_error(one_process(kind, precision, places), want, start)
        assert bound < 0.02
    assert update_error(weights, want, start) < bound
    assert all(of_rank[name][1] == said_first for of_rank in found[ranks])  # one norm, one scale
    copies = [copy for of_rank in found[ranks] for copy in of_rank[name][2]]
    assert len(copies) >= 2 and all(torch.equal(copies[0], copy) for copy in copies)


SIZES = [
    CUT | INTERLEAVED | {"zero_stage": 1}, BOTH | ZBV, {"tp_size": 2, "pp_size": 1, "zero_stage": 2}
]  # fmt: skip


def saves(rank, folder):
    run = Run(LLAMA, **SIZES[0])
    run.train()
    save_checkpoint(f"{folder}/saved", run.model, run.optimizer)
    runs = runs_of(run.model, run.optimizer, 4, Keys(), once=True)
    shown = {key: sum(count for _, count in one.runs) for key, one in runs.tensors.items()}
    run.booster.save_model(run.model, f"{folder}/pretrained", shard=True, use_safetensors=True)
    weights = run.weights(folder, "trained")
    run.optimizer.close()
    loaded, counts = [], []
    for i, sizes in enumerate(SIZES):
        run = Run(LLAMA, **sizes)
        load_checkpoint(f"{folder}/saved", run.model, run.optimizer)
        loaded.append(run.weights(folder, f"loaded{i}"))
        counts += [float(state["step"]) for state in run.optimizer.state.values()]
        save_checkpoint(f"{folder}/again{i}", run.model, run.optimizer)
        run.optimizer.close()
    return weights, loaded, shown, counts


def test_a_tied_weight_is_one_tensor_that_loads_at_any_sizes(tmp_path):
    results = run_ranks(saves, 4, str(tmp_path))
    weights, loaded, _, _ = results[0]
    for name in (EMBED, "model.norm.weight"):  # of all ranks one shows an element
        assert sum(shown.get(f"model.{name}", 0) for *_, shown, _ in results) == (
            weights[name].numel()
        )
    assert all(f"model.{HEAD}" not in shown for *_, shown, _ in results)
    assert all(same(one, weights) for one in loaded)
    assert {count for *_, counts in results for count in counts} == {3.0}  # copies in one rank, too
    (file,) = (tmp_path / "pretrained").glob("*.safetensors")
    assert HEAD not in load_file(file)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "pretrained")
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert same(state_of(plain), weights)
    whole = []
    for name in ("saved", "again0", "again1", "again2"):
        model = GeminiDDP(made(LLAMA), precision="fp32")
        optimizer = HybridAdam(model.parameters(), **ADAM)
        load_checkpoint(tmp_path / name, model, optimizer)
        whole.append(everything(model, optimizer))
        optimizer.close()
    assert all(same(one, whole[0]) for one in whole)  # moments too


def looks(rank, steps_only):
    """Copies that begin otherwise; a gradient that is asked for, and one that is dropped."""
    run = Run(LLAMA, **CUT, change=lambda model: model.lm_head.weight.data.mul_(1 + rank))
    part = run.model[0]
    weight = dict(part.module.named_parameters())[HEAD if rank else EMBED]
    (before,), text, named = copies_in(part), "", []
    if not steps_only:
        run.call(batches(LLAMA, 1)[0][0][0])
        text = said(lambda: weight.grad)
        named = [name for name, _ in part.named_gradients()]
        run.optimizer.zero_grad()
    run.train(steps=1)
    (after,) = copies_in(part)
    run.optimizer.close()
    return before, after, text, named


def test_copies_begin_alike_and_their_sum_is_seen_by_the_step_alone():
    (before, after, text, named), other = run_ranks(looks, 2, False)
    assert torch.equal(before, other[0]) and torch.equal(after, other[1])
    assert f"stages tie {EMBED}, whose gradients are added up in step()" in text
    assert text == other[2] and named and EMBED not in (*named, *other[3])
    assert torch.equal(after, run_ranks(looks, 2, True)[0][1])  # as if nothing had come before
