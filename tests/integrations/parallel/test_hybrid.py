"""Layers split inside of the stages of a pipeline, in all precisions; against one process."""

import pytest
import torch

import gemini
from bench.shared.reference import everything, same
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, load_checkpoint, save_checkpoint
from gemini.checkpoint.format.keys import Keys
from gemini.checkpoint.save import runs_of
from gemini.integrations import HybridParallelPlugin
from optim import HybridAdam
from tests.integrations.cases.hybrid_runs import (
    ADAM,
    Run,
    made,
    one_process,
    reference,
    state_of,
    trained,
    update_error,
)

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
# fp32: other orders of sums, of micro-batches and ranks, and of what is split
BOUND = 1.5e-6
BOTH = {"tp_size": 2, "pp_size": 2}
INTERLEAVED = {"pp_style": "interleaved", "num_model_chunks": 2}
ZBV = {"pp_style": "zbv", "num_model_chunks": 2}
FOUR = {  # at 4 ranks
    "1f1b": BOTH,
    "tp, replicas": {"tp_size": 2, "pp_size": 1, "zero_stage": 2, "extra_dp_size": 2},
    "fp16, the documents' line": BOTH | {"precision": "fp16"},
    "fp16, zbv": BOTH | ZBV | {"precision": "fp16"},
    "bf16, interleaved": BOTH | INTERLEAVED | {"precision": "bf16", "microbatch_size": 2},
    "fp16, tp": {"tp_size": 2, "pp_size": 1, "zero_stage": 1, "precision": "fp16"},
}  # fmt: skip
EIGHT = {
    "fp16, shards": BOTH | {"precision": "fp16", "zero_stage": 1, "cpu_offload": True},
}
CASES = [*((4, name) for name in FOUR), *((8, name) for name in EIGHT)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("hybrid"))
    return {
        ranks: run_ranks(trained, ranks, [(n, "Llama", o) for n, o in cases.items()], folder)
        for ranks, cases in ((4, FOUR), (8, EIGHT))
    }


@pytest.fixture(scope="module")
def wanted():
    return {places: reference("Llama", places) for places in (1, 2)}


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_what_is_split_cut_and_copied_trains_as_one_process(found, wanted, ranks, name):
    options = (FOUR | EIGHT)[name]
    places = ranks // options["tp_size"] // options["pp_size"]
    start, (weights, again, _) = state_of(made("Llama")), found[ranks][0][name]
    bound, precision = BOUND, options.get("precision", "fp32")
    if precision != "fp32":
        alone = one_process("Llama", precision, places)
        bound = 1.1 * update_error(alone, wanted[places], start)
        assert bound < 0.02
    assert update_error(weights, wanted[places], start) < bound
    assert same(again, weights)  # loading what is there changes no bit
    said = {tuple(one[name][2]) for one in found[ranks]}
    assert len(said) == 1  # one norm, one scale, one skip, bit for bit
    assert {scale for _, _, scale in next(iter(said))} == {65536.0 if precision == "fp16" else 1.0}


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


SIZES = [BOTH | {"zero_stage": 1}, {"tp_size": 2, "pp_size": 1, "zero_stage": 2}, {
    "tp_size": 1, "pp_size": 2, "extra_dp_size": 2, **ZBV
}]  # fmt: skip


def saves(rank, folder):
    run = Run("Llama", **SIZES[0])
    run.train()
    save_checkpoint(f"{folder}/saved", run.model, run.optimizer)
    weights = run.weights(folder, "trained")
    runs = runs_of(run.model, run.optimizer, 4, Keys(), once=True)
    shown = {key: sum(count for _, count in one.runs) for key, one in runs.tensors.items()}
    run.booster.save_model(run.model, f"{folder}/pretrained", shard=True, use_safetensors=True)
    run.optimizer.close()
    found = []
    for i, sizes in enumerate(SIZES):
        run = Run("Llama", **sizes)
        load_checkpoint(f"{folder}/saved", run.model, run.optimizer)
        found.append(run.weights(folder, f"loaded{i}"))
        save_checkpoint(f"{folder}/again{i}", run.model, run.optimizer)
        run.optimizer.close()
    return weights, found, shown


def test_a_checkpoint_loads_at_any_sizes_and_by_plain_transformers(tmp_path):
    results = run_ranks(saves, 4, str(tmp_path))
    weights, loaded, _ = results[0]
    for name, value in weights.items():  # of all ranks one shows an element
        assert sum(shown.get(f"model.{name}", 0) for *_, shown in results) == value.numel()
    assert all(same(one, weights) for one in loaded)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "pretrained")
    assert same(state_of(plain), weights)
    whole = []
    for name in ("saved", "again0", "again1", "again2"):
        model = GeminiDDP(made("Llama"), precision="fp32")
        optimizer = HybridAdam(model.parameters(), **ADAM)
        gemini.load_checkpoint(tmp_path / name, model, optimizer)
        whole.append(everything(model, optimizer))
        optimizer.close()
    assert all(same(one, whole[0]) for one in whole)  # moments too
    assert all(torch.equal(whole[0][name], value) for name, value in weights.items())


def test_sizes_that_have_no_meaning_together_are_refused():
    with pytest.raises(ValueError, match="zero_stage=2 with pp_size=2; expected 0 or 1"):
        HybridParallelPlugin(**BOTH, zero_stage=2)
    with pytest.raises(ValueError, match="extra_dp_size=2; expected 1: it is for shards"):
        HybridParallelPlugin(tp_size=2, pp_size=1, extra_dp_size=2)
