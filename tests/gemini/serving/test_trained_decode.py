"""Models that train, and decode between two steps: tokens of plain ones, planned as cycles."""

import copy

import pytest
import torch
import transformers

from bench.shared.models import seeded
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP
from gemini.memtracer.decoding import decoding_of
from gemini.placement.tiers import Tier
from gemini.runtime.schedule.sampler import MAX_SIGNATURES
from optim import HybridAdam
from tests.support.checkpoints import everything

KIB = 1024
CONFIG = {
    "hidden_size": 64, "vocab_size": 128, "num_attention_heads": 4, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_key_value_heads": 2,
}  # fmt: skip
LONG, NEW = 12, 40


def llama():
    with seeded(0):
        return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**CONFIG))


class Trained:
    """A Llama on the simulated device, whose long batches leave weights little room."""

    def __init__(self, kib):
        self.sim = SimBackend(1)
        self.model = GeminiDDP(
            llama(), self.sim, AutoPlacement(f"{kib}KiB", "64MiB"), min_chunk_size_m=0.005,
            search_range_m=0.0, max_norm=1.0, precision="fp32",
        )  # fmt: skip
        self.optimizer = HybridAdam(self.model.parameters(), lr=1e-2)
        self.generator = torch.Generator().manual_seed(1)
        self.gathered = []  # bytes, of each token

    def train(self, steps):
        for _ in range(steps):
            ids = torch.randint(128, (2, LONG), generator=self.generator)
            with self.sim.running():
                self.model(input_ids=ids, labels=ids).loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def generate(self, ids, new=NEW):
        manager = self.model.engine.manager
        sizes = [chunk.spec.payload_bytes for chunk in self.model.engine.chunks]
        before = [0]

        def count(*_):
            total = sum(n * sizes[chunk] for chunk, n in manager.gathers_of.items())
            self.gathered.append(total - before[0])
            before[0] = total

        count()
        self.gathered.clear()
        handle = self.model.module.register_forward_hook(count)
        self.model.eval()
        self.sim.pages.peak_device_bytes = 0
        try:
            with self.sim.running():
                return answers(self.model, ids, new)
        finally:
            handle.remove()
            self.model.train()


def answers(model, ids, new=NEW):
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
        pad_token_id=1,
    )  # fmt: skip


def prompts(count=2):
    return torch.randint(2, 128, (count, 6), generator=torch.Generator().manual_seed(2))


def plain_of(model):
    module = llama().eval()
    module.load_state_dict(copy.deepcopy(model.state_dict()))
    return module


def planned_bytes(trained, signature):
    """What the plan of such an iteration gathers."""
    engine = trained.model.engine
    steps = engine.planning.steps_for("eval", signature).steps
    return sum(engine.chunks[chunk].spec.payload_bytes for step in steps for chunk in step.gather)


@pytest.mark.parametrize("kib", [700, 1 << 14])
def test_tokens_are_plain_ones_and_one_plan_serves_all_of_a_caches_size(kib):
    """What a token reads is what its plan gathers, however long its cache is; budgets hold."""
    trained = Trained(kib).train(2)
    want = answers(plain_of(trained.model), prompts())
    for _ in range(2):
        assert torch.equal(trained.generate(prompts()), want)
        assert trained.sim.peak_device_bytes <= kib * KIB
        per_token = trained.gathered
        # lengths of the cache: none in the first pass, then 6, 7 and so on
        sizes = {32: per_token[13:26], 64: per_token[29:]}
        for room, gathered in sizes.items():
            assert set(gathered) == {planned_bytes(trained, f"int64[2, 1],cache[{2 * room}, 1]")}
    engine = trained.model.engine
    elsewhere = sum(
        chunk.spec.payload_bytes
        for chunk, shard in zip(engine.chunks, engine.plan.shards, strict=True)
        if shard.param_home is not Tier.DEVICE
    )
    # all of it, before there was a plan
    assert 0 < per_token[-1] < elsewhere if kib == 700 else not any(per_token)


def test_training_around_has_the_bits_of_training_alone():
    one, other = Trained(700).train(1), Trained(700).train(1)
    for _ in range(2):
        one.generate(prompts())
        one.train(1)
        other.train(1)
    first, second = (everything(each.model, each.optimizer) for each in (one, other))
    assert first["runs"].keys() == second["runs"].keys()
    for name, values in first["runs"].items():
        assert torch.equal(values, second["runs"][name]), name


def test_a_cache_counts_as_it_will_be_and_the_report_tells_it():
    trained = Trained(1 << 14).train(1)
    trained.generate(prompts(), new=14)
    traces = {t.signature: t for t in trained.model.engine.sampler.traces("eval")}
    # keys and values of 3 layers, in fp32: 2 heads of 16
    token = 3 * 2 * 2 * 16 * 4
    for tokens in (2 * 16, 2 * 32):
        trace = traces[f"int64[2, 1],cache[{tokens}, 1]"]
        assert trace.peak_non_model_bytes >= tokens * token
    report = trained.model.memory_report()
    assert [row.kind for row in report.evaluations] == ["evaluation", "decode"]
    for row in report.evaluations:
        assert row.measured_bytes <= row.predicted_bytes


def test_measured_peaks_of_training_are_not_those_of_a_decode_that_fills_its_room():
    trained = Trained(700).train(2)
    before = str(trained.model.memory_report()).split("evaluation")[0]
    trained.generate(prompts())
    after = str(trained.model.memory_report()).split("evaluation")[0]
    assert before.splitlines()[:6] == after.splitlines()[:6]


def test_other_ways_to_the_module_still_train_and_raise():
    """A forward that raises inside `generate`, and one with gradients, which is no decode."""
    trained = Trained(700).train(1)
    model = trained.model
    handle = model.module.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trained.generate(prompts(), new=2)
    handle.remove()
    want = answers(plain_of(model), prompts(), 20)
    assert torch.equal(trained.generate(prompts(), new=20), want)
    trained.train(1)
    assert trained.model.engine.passes.depth == 0


class Layer:
    def __init__(self, tokens, room=0):
        self.keys = self.values = torch.zeros(2, 1, tokens, 4)
        if room:
            self.max_cache_len = room


class Cache:
    def __init__(self, tokens, room=0):
        self.tokens, self.layers = tokens, [Layer(room or tokens, room) for _ in range(3)]

    def get_seq_length(self):
        return self.tokens


def asked(length, room=0):
    """Inputs of a decode step of two sequences."""
    cache, ids = Cache(length, room), torch.zeros(2, 1, dtype=torch.long)
    return (), {"input_ids": ids, "past_key_values": cache, "mask": torch.ones(2, length + 1)}


def test_decode_steps_are_told_by_the_size_that_their_cache_may_have():
    lengths, rooms = (3, 16, 31, 32, 63), (16, 32, 32, 64, 64)
    nbytes = 2 * 2 * 4 * 4  # of a token in a layer
    for length, room in zip(lengths, rooms, strict=True):
        found = decoding_of(asked(length))
        assert found.signature == f"int64[2, 1],cache[{2 * room}, 1]"
        now, most = found.cache_bytes(asked(length))
        assert now == 3 * nbytes * length and most == 4 * nbytes * room
        behind = {"decoder_input_ids": torch.zeros(2, 1, dtype=torch.long)}
        behind |= {"past_key_values": Cache(length), "input_ids": None}
        assert decoding_of(((), behind)).signature == found.signature
    # one that never grows has one signature, whatever is in it
    assert len({decoding_of(asked(length, room=40)).signature for length in (1, 39)}) == 1


def test_prompts_of_many_lengths_forget_nothing_of_training():
    trained = Trained(1 << 14).train(1)
    sampler = trained.model.engine.sampler
    for length in range(2, 2 + MAX_SIGNATURES + 2):
        with torch.no_grad(), trained.sim.running():
            trained.model.module(input_ids=torch.ones(1, length, dtype=torch.long))
    assert len(sampler.traces("train")) == 1
    assert len(sampler.traces()) <= MAX_SIGNATURES


@pytest.mark.parametrize(
    "inputs",
    [
        ((torch.zeros(2, 1, dtype=torch.long),), {}),
        ((), {"input_ids": torch.zeros(2, 5, dtype=torch.long), "past_key_values": Cache(3)}),
        ((), {"input_ids": torch.zeros(2, 1, dtype=torch.long), "past_key_values": Cache(0)}),
        ((), {"input_ids": torch.zeros(2, 1, dtype=torch.long), "past_key_values": object()}),
        ((), {"inputs_embeds": torch.zeros(2, 1, 8), "past_key_values": Cache(3)}),
        (({"x": 1},), {}),
        ((), {}),
        ((torch.zeros(2, 1),), {}, 1),
        ([{"input_ids": torch.zeros(2, 1)}], torch.zeros(1, 0)),
        None,
    ],
    ids=[
        "none",
        "prompt",
        "empty",
        "other",
        "embedded",
        "mapping",
        "nothing",
        "stage",
        "batches",
        "not told apart",
    ],
)
def test_what_is_no_decode_step_is_an_evaluation_like_others(inputs):
    assert decoding_of(inputs) is None


def on_a_rank(rank, folder):
    model = GeminiDDP(
        llama(), "cpu", AutoPlacement("700KiB", nvme_dir=folder), min_chunk_size_m=0.005,
        search_range_m=0.0, precision="fp32",
    )  # fmt: skip
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    tokens = []
    for _ in range(2):
        ids = torch.randint(128, (2, LONG), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens.append(answers(model.eval(), prompts(), 20))
        model.train()
    return tokens[-1], model.state_dict()


@pytest.mark.ci
def test_two_ranks_decode_between_steps(tmp_path):
    (first, weights), (second, _) = run_ranks(on_a_rank, 2, str(tmp_path))
    plain = llama().eval()
    plain.load_state_dict(weights)
    want = answers(plain, prompts(), 20)
    assert torch.equal(first, want) and torch.equal(second, want)
