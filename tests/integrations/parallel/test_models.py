"""Models of transformers whose plan and whose cut are in our tables; against one process."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.shared.workers import run_ranks
from gemini.integrations import GeminiPlugin
from gemini.parallel.models import is_ours
from gemini.parallel.plans import TensorParallel, split
from tests.integrations.cases.hybrid_runs import (
    BOTH,
    BOUND,
    CUT,
    KINDS,
    Run,
    batches,
    check_trained,
    made,
    reference,
    state_of,
    update_error,
)
from tests.support.said import said

pytest.importorskip("transformers")
pytestmark = pytest.mark.ci
# all but the last are split elsewhere
DROPPED = ("Llama", "Llama tied, 4", "BLOOM post", "GPT-2 dropped")
SPLIT = {"tp_size": 2, "pp_size": 1, "zero_stage": 1}
SEQUENCE = {"plugin": GeminiPlugin, "tp_size": 2, "enable_sequence_parallelism": True}
GATHERED = SPLIT | {
    "enable_sequence_parallelism": True,
    "sequence_parallelism_mode": "split_gather",
}
ALL = {
    2: [
        *((f"{kind} split", kind, SPLIT) for kind in KINDS if kind not in DROPPED),
        *(
            (f"{kind} cut", kind, CUT)
            for kind in ("Mistral", "GPT-J", "OPT", "ViT", "Falcon alibi", "Mixtral")
        ),
        ("ZeRO-3, chunked loss", "Llama", {"plugin": GeminiPlugin, "tp_size": 2, "tokens": 5}),
        *((f"{kind} sequence", kind, SEQUENCE) for kind in ("Llama tied", "Qwen3", "BERT", "OPT")),
        *((f"{kind} sequence", kind, SEQUENCE) for kind in ("GPT-2 tied", "Falcon", "BLOOM post")),
        ("Mixtral shared out", "Mixtral", {"tp_size": 1, "pp_size": 1, "ep_size": 2}),
    ],
    4: [
        *(
            (f"{kind} both", kind, BOTH)
            for kind in ("GPT-2", "BERT", "BLOOM", "Qwen3-MoE", "Falcon")
        ),
        (
            "Mixtral shared out, replicas",
            "Mixtral",
            {"tp_size": 1, "pp_size": 1, "ep_size": 2, "extra_dp_size": 2, "zero_stage": 2},
        ),
        ("Qwen3-MoE shared out", "Qwen3-MoE", {"plugin": GeminiPlugin, "ep_size": 2}),
        ("Mixtral shared out in stages", "Mixtral", CUT | {"ep_size": 2}),
        ("GPT-2 sequence, data", "GPT-2", GATHERED),
        ("BLOOM sequence in stages", "BLOOM", GATHERED | BOTH),
        ("BERT sequence, data", "BERT", GATHERED),
    ],
}
CASES = {ranks: cases[::2] for ranks, cases in ALL.items()}  # the others: tests/deep/meshes/


def test_a_model_of_the_table_trains_as_one_process(found, ranks, case):
    check_trained(found[ranks], case)


WITHOUT = {
    "OPT": ("model.decoder.layers.*", ("q_proj", "k_proj", "v_proj"), "self_attn.out_proj"),
    "BLOOM": ("transformer.h.*", ("query_key_value",), "self_attention.dense"),
}


def wrong_plans(rank, folder):
    """Plans that name layers alone, and the same with what counts heads."""
    texts, weights = {}, {}
    for kind, (layer, columns, rows) in WITHOUT.items():
        attention = f"{layer}.{rows.partition('.')[0]}"
        plan = dict.fromkeys((f"{attention}.{name}" for name in columns), "colwise")
        plan[f"{layer}.{rows}"] = "rowwise"
        texts[kind] = said(lambda kind=kind, plan=plan: Run(kind, **SPLIT, custom_policy=plan))
    run = Run("OPT", **SPLIT, custom_policy=plan_of_opt())
    run.train()
    weights = run.weights(folder, "OPT")
    run.optimizer.close()
    return texts, weights


def plan_of_opt():
    attention = "model.decoder.layers.*.self_attn"
    return {
        attention: "divide num_heads",
        **dict.fromkeys((f"{attention}.{name}_proj" for name in "qkv"), "colwise"),
        f"{attention}.out_proj": "rowwise",
    }


def test_a_plan_that_changes_what_a_module_computes_is_refused(tmp_path):
    for texts, _ in (results := run_ranks(wrong_plans, 2, str(tmp_path))):
        assert "model.decoder.layers.0.self_attn (OPTAttention) gives something" in texts["OPT"]
        assert "'divide num_heads'" in texts["OPT"]
        assert "transformer.h.0.self_attention" in texts["BLOOM"]
    error = update_error(results[0][1], reference("OPT"), state_of(made("OPT")))
    assert error < BOUND and torch.is_grad_enabled()


def test_heads_that_share_their_keys_are_not_split():
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 96}
    model = FalconForCausalLM(FalconConfig(**sizes, bos_token_id=1, eos_token_id=2))
    mesh = SimpleNamespace(size=lambda: 2)  # all that is asked before a module is changed
    with pytest.raises(
        ValueError, match=r"self_attention\.num_kv_heads is 1; expected a whole num"
    ):
        split(model, None, mesh, TensorParallel())


def test_a_plan_that_a_user_gave_is_told_from_that_of_the_model():
    for kind in KINDS:
        model = made(kind)
        assert is_ours(model, None) and not is_ours(model, {"x": "colwise"}), kind
        model.tp_plan = {"model.decoder.layers.*.self_attn.q_proj": "colwise_rep"}
        assert not is_ours(model, None), kind
    assert not is_ours(torch.nn.Linear(2, 2), None)


class Multiplied(TorchDispatchMode):
    """Sizes of all matrices that are multiplied."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.sizes |= {size for x in args for size in x.shape}
        return func(*args, **(kwargs or {}))


def words(rank):
    """97 words, of which ranks have 49 and 48: in multiples of 20, and as they are."""
    found, losses = [], []
    for multiple, whole in ((20, False), (20, True), (1, False)):
        run = Run(
            "Llama tied", **SPLIT, make_vocab_size_divisible_by=multiple, parallel_output=not whole
        )
        batch = batches("Llama tied", 1)[0][0][0]
        run.call(batch)  # whether its loss may be computed in the head is seen
        with Multiplied() as multiplied:
            run.call(batch)
        losses.append(float(run.model(**batch).loss.detach()))
        shown = {name: tuple(value.shape) for name, value in run.model.state_dict().items()}
        found.append((multiplied.sizes & {49, 60}, shown.get("lm_head.weight")))
        run.optimizer.close()
    return found, losses


def test_a_head_computes_a_multiple_of_words_and_has_those_that_there_are():
    (first, losses), (other, _) = run_ranks(words, 2)
    assert first == [({60}, (97, 32)), ({60}, (97, 32)), ({49}, (97, 32))]
    assert [sizes for sizes, _ in other] == [{60}, {60}, set()]
    want = made("Llama tied")(**batches("Llama tied", 1)[0][0][0]).loss.detach()
    assert losses == pytest.approx([float(want)] * 3, rel=1e-6)


def dropped(rank, folder):
    """Ranks that were seeded otherwise, and a model that drops activations."""
    torch.manual_seed(rank)
    found = []
    for options in (SPLIT, GATHERED):
        run = Run("GPT-2 dropped", **options)
        run.train(steps=2)
        found.append((run.model.module.transformer.ln_f.weight.clone(), run.model.digest()))
        run.optimizer.close()
    ids = torch.arange(4, 15)[None]  # whose length two ranks do not divide
    return found, said(lambda: run.model(input_ids=ids))


def test_what_is_not_split_is_dropped_alike(tmp_path):
    results = run_ranks(dropped, 2, str(tmp_path), processes=True)
    (first, text), (other, _) = results
    for (weight, digest), (of_other, other_digest) in zip(first, other, strict=True):
        assert torch.equal(weight, of_other) and digest == other_digest
    assert "a sequence of 11 is split over 2 ranks; expected a length that they divide" in text
