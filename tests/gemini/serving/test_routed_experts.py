"""Stacked experts of a served model: rows that tokens are routed to are read, and no others.

E experts · row: one expert's [n, m] of a stack [E, n, m]
"""

import errno
import threading
from contextlib import contextmanager

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

import gemini
import nvme
from gemini.chunk.stack import RowCut, RowFill, row_cuts
from gemini.chunk.storage import Chunk
from gemini.decoding.decode import Serving
from gemini.decoding.experts import is_stack
from gemini.optim.state.memory import CpuMemory
from gemini.placement.policy import AutoPlacement
from gemini.placement.tiers import Tier
from gemini.runtime.memory.backend import FileConfig
from gemini.runtime.memory.files.blocks import Flat
from gemini.runtime.memory.files.frozen_files import FrozenFiles
from gemini.units import PAGE_BYTES, ChunkId
from tests.support.disks.faults import failing, flip

BOUNDS = {"max_tokens": 96, "max_sequences": 8}
ROWS = {"hidden_size": 64, "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
NEW, EXPERTS, LAYERS = 6, 8, 3
CONFIGS = {
    "mixtral": transformers.MixtralConfig(
        **ROWS, intermediate_size=64, num_hidden_layers=LAYERS, num_local_experts=EXPERTS,
        num_experts_per_tok=2,
    ),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **ROWS, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=LAYERS,
        shared_expert_intermediate_size=64, num_experts=EXPERTS, num_experts_per_tok=2,
        bos_token_id=0, eos_token_id=1,
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **ROWS, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=LAYERS,
        head_dim=16, num_experts=EXPERTS, num_experts_per_tok=2, bos_token_id=0, eos_token_id=1,
    ),
}  # fmt: skip


def saved(folder, kind):
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).to(torch.bfloat16)
    with torch.no_grad():  # else tokens of all prompts are routed alike
        for layer in module.model.layers:
            layer.mlp.gate.weight.normal_()
    module.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def prompts(count, length=4):
    torch.manual_seed(1)
    return torch.randint(2, 512, (count, length))


def answers(model, ids, **options):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=1,
        **{"do_sample": False, **options},
    )  # fmt: skip


def served(folder, tmp_path, share=0.4, **options):
    """A model of whose weights a share has room, and where that is below all stacks."""
    options = {**BOUNDS, **options}
    roomy = gemini.load_pretrained(folder, serve=True, **options)
    planned = roomy.engine.planning
    asked = planned.inputs.trace.peak_non_model_bytes
    nbytes = sum(chunk.payload_bytes for chunk in planned.plan.chunks)
    budget = asked + round(share * nbytes)
    return gemini.load_pretrained(
        folder, serve=True, device_budget=budget, nvme_dir=str(tmp_path), **options
    )


def stacks_in_files(model):
    """Chunks of stacks in files, by (number of the layer, bytes of a row)."""
    engine, found = model.engine, {}
    homes = {shard.chunk: shard.param_home for shard in engine.planning.plan.shards}
    for spec in engine.planning.inputs.layout.chunks:
        name = engine.planning.inputs.layout.params[spec.slots[0].param].name
        if ".experts." in name and homes[spec.id] is Tier.NVME:
            layer = int(name.split("layers.")[1].split(".")[0])
            found.setdefault(layer, {})[spec.id] = spec.payload_bytes // EXPERTS
    return found


@contextmanager
def routes(plain):
    """Experts of each pass so far, by layer: [{layer: set of experts}]."""
    passes = []

    def note(layer):
        def hook(module, args, kwargs):
            if not layer:
                passes.append({})
            passes[-1][layer] = set(args[1].unique().tolist())

        return hook

    handles = [
        layer.mlp.experts.register_forward_pre_hook(note(i), with_kwargs=True)
        for i, layer in enumerate(plain.model.layers)
    ]
    yield passes
    for handle in handles:
        handle.remove()


def moved(model, body):
    """Bytes that `body()` reads, without those of other chunks than stacks; and how often each
    stack was gathered."""
    engine = model.engine
    stacks = {chunk for chunks in stacks_in_files(model).values() for chunk in chunks}
    before, gathers = engine.storage.traffic().nvme_read, dict(engine.manager.gathers_of)
    body()
    made = {c: n - gathers.get(c, 0) for c, n in engine.manager.gathers_of.items()}
    specs = engine.planning.inputs.layout.chunks
    others = sum(specs[c].payload_bytes * n for c, n in made.items() if c not in stacks)
    read = engine.storage.traffic().nvme_read - before - others
    return read, {chunk: made.get(chunk, 0) for chunk in stacks}


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_token_reads_the_experts_it_is_routed_to_and_prompts_in_lockstep_their_union(
    kind, tmp_path
):
    plain = saved(tmp_path / "model", kind)
    model = served(tmp_path / "model", tmp_path)
    stacks = stacks_in_files(model)
    assert set(stacks) == set(range(LAYERS))
    for count in (1, 8):
        ids = prompts(count)
        with routes(plain) as passes:
            want = answers(plain, ids)
        found = []
        read, gathers = moved(model, lambda ids=ids, found=found: found.append(answers(model, ids)))
        assert torch.equal(found[0], want)
        assert len(passes) == NEW and set(gathers.values()) == {NEW}
        rows = [
            nbytes * len(one[layer])
            for one in passes for layer, chunks in stacks.items() for nbytes in chunks.values()
        ]  # fmt: skip
        assert read == sum(rows)
        whole = NEW * sum(EXPERTS * n for chunks in stacks.values() for n in chunks.values())
        assert 0 < read < whole


def test_a_long_prompt_reads_all_experts_once_and_decodes_plain_tokens(tmp_path):
    plain = saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    ids = prompts(1, 80)
    with routes(plain) as passes:
        want = answers(plain, ids)
    assert all(len(experts) == EXPERTS for experts in passes[0].values())
    assert torch.equal(answers(model, ids), want)


def test_experts_in_fp32_are_read_as_routed_too(tmp_path):
    plain = saved(tmp_path / "model", "mixtral").float()
    model = served(tmp_path / "model", tmp_path, precision="fp32")
    assert stacks_in_files(model)
    found = []
    read, gathers = moved(model, lambda: found.append(answers(model, prompts(1))))
    assert torch.equal(found[0], answers(plain, prompts(1)))
    stacks = model.engine.planning.inputs.layout.chunks
    assert 0 < read < sum(stacks[c].payload_bytes * count for c, count in gathers.items())


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_rows_that_were_not_read_are_never_used(implementation, tmp_path, monkeypatch):
    """Memory of a payload is NaN before it is read: tokens would be others."""
    plain = saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    for one in (plain, model.module):
        one.config._experts_implementation = implementation
    refill = CpuMemory.refill
    made = []

    def poisoned(self, tensor):
        refill(self, tensor)
        made.append(tensor)
        tensor.fill_(torch.nan)

    monkeypatch.setattr(CpuMemory, "refill", poisoned)
    left = []
    release = Chunk.release

    def noted(chunk):
        left.append(bool(chunk.payload.isnan().any()))
        release(chunk)

    monkeypatch.setattr(Chunk, "release", noted)
    for count, options in ((1, {}), (3, {}), (2, {"num_beams": 3})):
        want = answers(plain, prompts(count), **options)
        assert torch.equal(answers(model, prompts(count), **options), want)
    assert made and any(left)  # there were such rows


def test_another_implementation_reads_whole_stacks(tmp_path, monkeypatch):
    plain = saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "ours", batched_mm_experts_forward)
    for one in (plain, model.module):
        one.config._experts_implementation = "ours"
    stacks = [nbytes for chunks in stacks_in_files(model).values() for nbytes in chunks.values()]
    found = []
    read, gathers = moved(model, lambda: found.append(answers(model, prompts(1))))
    assert set(gathers.values()) == {NEW} and read == NEW * EXPERTS * sum(stacks)
    assert torch.equal(found[0], answers(plain, prompts(1)))


@pytest.mark.parametrize("of", ["before", "after"])
def test_a_hook_on_the_experts_sees_whole_stacks(of, tmp_path):
    plain = saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    want = [layer.mlp.experts.down_proj.float().sum() for layer in plain.model.layers]
    seen = []

    def look(module, *_):
        seen.append(module.down_proj.float().sum())

    for layer in model.module.model.layers:
        experts = layer.mlp.experts
        hook = {"before": experts.register_forward_pre_hook, "after": experts.register_forward_hook}
        hook[of](look)
    assert torch.equal(answers(model, prompts(1)), answers(plain, prompts(1)))
    assert seen == want * NEW


def test_who_reads_a_stack_within_a_pass_has_all_of_it(tmp_path):
    """A hook around the router and its experts; between the passes too."""
    plain = saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    seen = []

    def look(block, *_):
        seen.append((block.experts.gate_up_proj.clone(), block.experts.down_proj[3].clone()))

    for layer in model.module.model.layers:
        layer.mlp.register_forward_pre_hook(look)
        layer.mlp.register_forward_hook(look)
    assert torch.equal(answers(model, prompts(1)), answers(plain, prompts(1)))
    for i, (whole, row) in enumerate(seen):
        experts = plain.model.layers[i // 2 % LAYERS].mlp.experts
        assert torch.equal(whole, experts.gate_up_proj) and torch.equal(row, experts.down_proj[3])
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_another_thread_that_reads_a_stack_within_its_call_has_all_of_it(tmp_path):
    plain = saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    seen = []

    def look(*_):
        stack = model.module.model.layers[1].mlp.experts.gate_up_proj
        thread = threading.Thread(target=lambda: seen.append(stack.clone()))
        thread.start()
        thread.join()

    for layer in model.module.model.layers:
        layer.mlp.experts.act_fn.register_forward_hook(look)
    assert torch.equal(answers(model, prompts(1)), answers(plain, prompts(1)))
    want = plain.model.layers[1].mlp.experts.gate_up_proj
    assert len(seen) == NEW * LAYERS and all(torch.equal(one, want) for one in seen)


def leave_rows(model):
    """Gather stacks, as a plan may between two passes, and read some of their rows."""
    for chunks in stacks_in_files(model).values():
        for chunk in chunks:
            model.engine.chunks[chunk].gather()
            model.engine.chunks[chunk].pending.fill([0, 2])


def load(model):
    model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})


@torch.no_grad()
def write(model):
    experts = getattr(model, "module", model).model.layers[1].mlp.experts
    experts.down_proj[2].mul_(-3)
    experts.gate_up_proj.data.mul_(1.5)


def train(model):
    """A stack is unfrozen, which moves it to other files."""
    stack = getattr(model, "module", model).model.layers[1].mlp.experts.down_proj
    stack.requires_grad_(True)
    model(input_ids=prompts(2), use_cache=False).logits.float().sum().backward()
    return stack.grad


@pytest.mark.parametrize("change", [load, write, train])
def test_weights_that_change_between_passes_are_those_of_the_next(change, tmp_path):
    plain = saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    answers(model, prompts(1))
    leave_rows(model)
    found, want = change(model), change(plain)
    assert found is want is None or torch.equal(found, want)
    assert torch.equal(answers(model, prompts(3)), answers(plain, prompts(3)))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_backward_through_the_experts_has_whole_stacks(tmp_path):
    """Of a prompt's embeddings: the weights are frozen."""
    plain = saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    answers(model, prompts(1))
    grads = []
    for one in (plain, model):
        inputs = plain.model.embed_tokens(prompts(1)).detach().requires_grad_()
        one(inputs_embeds=inputs, use_cache=False).logits.sum().backward()
        grads.append(inputs.grad)
    assert torch.equal(*grads)


def test_what_is_saved_after_a_decode_has_whole_stacks(tmp_path):
    plain = saved(tmp_path / "model", "qwen3-moe")
    model = served(tmp_path / "model", tmp_path)
    roomy = gemini.load_pretrained(tmp_path / "model", serve=True, **BOUNDS)
    answers(model, prompts(1))
    want = plain.state_dict()
    for found in (model.state_dict(), model.salvage()):
        assert all(torch.equal(value, want[name]) for name, value in found.items())
    assert model.state_dict().keys() == want.keys()
    assert model.digest() == roomy.digest()
    gemini.export_safetensors(tmp_path / "out", model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(answers(again, prompts(2)), answers(model, prompts(2)))


def test_salvage_in_the_middle_of_a_pass_has_no_row_that_was_not_read(tmp_path):
    plain = saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    want, found = plain.state_dict(), []

    def look(*_):
        with failing("preadv", errno.EIO, "-base-"):
            found.append(model.salvage())

    model.module.model.layers[1].mlp.experts.act_fn.register_forward_hook(look)
    assert torch.equal(answers(model, prompts(1)), answers(plain, prompts(1)))
    assert found and all(
        torch.equal(value, want[name]) for one in found for name, value in one.items()
    )


def test_payloads_stay_within_their_plan_and_count_whole(tmp_path):
    saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    engine, seen = model.engine, []
    planned = {(row.tier, row.kind): row for row in model.memory_report().rows}
    key = ("device", "parameters")
    for layer in model.module.model.layers:
        layer.mlp.experts.act_fn.register_forward_hook(
            lambda *_: seen.append(engine.manager.bytes_in_use()[Tier.DEVICE, "parameters"])
        )
    answers(model, prompts(8))
    chunks = engine.planning.plan.chunks
    here = sum(
        chunks[shard.chunk].payload_bytes
        for shard in engine.planning.plan.shards if shard.param_home is Tier.DEVICE
    )  # fmt: skip
    pair = max(EXPERTS * sum(rows.values()) for rows in stacks_in_files(model).values())
    assert here + pair <= max(seen) <= planned[key].predicted_bytes


@pytest.mark.parametrize("routed", [True, False])
def test_a_changed_byte_of_an_expert_is_found_when_that_one_is_read(routed, tmp_path):
    plain = saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    with routes(plain) as passes:
        want = answers(plain, prompts(1))
    used = set.union(*(one[0] for one in passes))
    assert len(used) < EXPERTS
    expert = min(used) if routed else min(set(range(EXPERTS)) - used)
    layer = min(stacks_in_files(model))
    assert not layer
    content = memory_of(plain.model.layers[0].mlp.experts.gate_up_proj[expert])
    (path,) = (path for path in tmp_path.glob("*-base-*") if content in path.read_bytes())
    path.chmod(0o600)
    flip(path, path.read_bytes().index(content))
    if routed:
        with pytest.raises(nvme.ChecksumError, match=r"experts\.gate_up_proj") as raised:
            answers(model, prompts(1))
        assert "parameters are in memory" in raised.value.__notes__[0]
        assert "layers.0.mlp.experts.gate_up_proj" not in raised.value.__notes__[0]
    else:
        assert torch.equal(answers(model, prompts(1)), want)
        with pytest.raises(nvme.ChecksumError, match=r"experts\.gate_up_proj"):
            model.state_dict()


def memory_of(tensor):
    return bytes(tensor.detach().contiguous().view(torch.uint8).flatten().tolist())


def test_who_reads_a_stack_after_ctrl_c_in_its_call_has_all_of_it(tmp_path, monkeypatch):
    plain = saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    fill, calls = RowFill.fill, []

    def interrupted(self, rows):
        calls.append(rows)
        if len(calls) == 3:  # the first stack of the second layer
            raise KeyboardInterrupt
        fill(self, rows)

    monkeypatch.setattr(RowFill, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answers(model, prompts(1))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(answers(model, prompts(1)), answers(plain, prompts(1)))


@pytest.mark.parametrize("after", [0, 5, 13])
def test_a_disk_that_fails_for_a_while_raises_and_then_the_model_decodes_as_before(after, tmp_path):
    plain = saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    want = answers(plain, prompts(1))
    assert torch.equal(answers(model, prompts(1)), want)
    rests = model.engine.manager.bytes_in_use()
    with (
        failing("preadv", errno.EIO, "-base-", after=after) as failed,
        pytest.raises(nvme.TransferError) as raised,
    ):
        answers(model, prompts(1))
    assert failed and "parameters are in memory" in raised.value.__notes__[0]
    for count in (1, 3):
        assert torch.equal(answers(model, prompts(count)), answers(plain, prompts(count)))
    assert torch.equal(answers(model, prompts(1)), want)
    assert model.engine.manager.bytes_in_use() == rests  # the call that failed has ended, too


# -- values --


class Reads:
    """Reads of rows, of which some fail."""

    def __init__(self, fail=()):
        self.fail, self.rows = set(fail), []

    def __call__(self, rows):
        self.rows.append([*rows])
        return Read(self, [*rows])


class Read:
    def __init__(self, reads, rows):
        self.reads, self.rows = reads, rows

    def ready(self):
        return True

    def wait(self):
        if self.reads.fail & set(self.rows):
            raise nvme.TransferError("read", "there", 0, 1, errno.EIO)


@pytest.mark.parametrize("straight", [True, False])
def test_a_file_gives_the_blocks_of_a_row(straight, tmp_path):
    """straight: to where they belong; else through staging, as on a GPU."""
    chunk, cut, rows = ChunkId(0), RowCut(3 * 2048, 2048), 5
    numel = rows * cut.row_numel + 256
    values = torch.arange(numel, dtype=torch.float32).to(torch.bfloat16)
    files = FrozenFiles(
        {chunk: Flat(numel, torch.bfloat16)}, FileConfig(str(tmp_path)), {chunk: "a stack"},
        {chunk: cut}, straight=straight,
    )  # fmt: skip
    try:
        files.replace(chunk, values)
        into = torch.full((numel,), torch.nan, dtype=torch.bfloat16)
        fill = files.read(chunk, into)
        fill.fill([3, 1])
        assert files.traffic.nvme_read == 2 * cut.row_numel * 2
        there = torch.zeros(numel, dtype=torch.bool)
        for row in (1, 3):
            there[row * cut.row_numel : (row + 1) * cut.row_numel] = True
        assert torch.equal(into[there], values[there]) and into[~there].isnan().all()
        fill.wait()
        assert torch.equal(into, values) and files.traffic.nvme_read == values.nbytes
    finally:
        files.close()


@given(st.lists(st.lists(st.integers(0, 9), unique=True), max_size=6))
def test_each_row_is_read_once_and_a_wait_reads_the_rest(calls):
    reads = Reads()
    fill = RowFill(reads, 10)
    for rows in calls:
        fill.fill(rows)
        assert set(rows) <= {row for read in reads.rows for row in read}
    assert fill.ready() == (len({row for rows in calls for row in rows}) == 10)
    fill.wait()
    assert fill.ready()
    assert sorted(row for read in reads.rows for row in read) == [*range(10)]


def test_rows_whose_read_failed_are_missing_and_read_again():
    reads = Reads(fail=[3])
    fill = RowFill(reads, 4)
    fill.fill([0])
    with pytest.raises(nvme.TransferError):
        fill.fill([1, 3])
    assert not fill.ready()
    reads.fail = set()
    fill.wait()
    assert reads.rows == [[0], [1, 3], [1, 2, 3]] and fill.ready()


def test_rows_are_cut_where_they_are_whole_pages_of_one_stack(tmp_path):
    saved(tmp_path / "model", "mixtral")
    model = served(tmp_path / "model", tmp_path)
    layout = model.engine.planning.inputs.layout
    cuts = row_cuts(layout)
    names = {layout.params[layout.chunks[c].slots[0].param].name for c in cuts}
    assert names == {
        f"model.layers.{i}.mlp.experts.{name}"
        for i in range(LAYERS) for name in ("gate_up_proj", "down_proj")
    }  # fmt: skip
    for chunk, cut in cuts.items():
        numel = layout.chunks[chunk].shard_numel
        assert cut.num_rows(numel) == EXPERTS
        assert cut.block_numel * 2 % PAGE_BYTES == 0
        blocks = [cut.blocks_of([row], numel) for row in range(EXPERTS)]
        assert [b for row in blocks for b in row] == [*range(numel // cut.block_numel)]


def test_only_code_of_transformers_that_is_given_routes_is_a_stack():
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(CONFIGS["mixtral"])
    experts = module.model.layers[0].mlp.experts
    assert is_stack(experts) and not is_stack(module.model.layers[0].mlp)
    forward = experts.forward
    experts.forward = lambda *args: forward(*args)
    assert not is_stack(experts)
    del experts.forward

    class Experts(type(experts)):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states * self.down_proj.sum()

    experts.__class__ = Experts
    assert not is_stack(experts)
    with torch.device("meta"):
        assert not is_stack(torch.nn.Conv1d(4, 4, 3))


def test_a_stack_and_its_router_call_one_after_the_other_in_the_plan():
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(CONFIGS["mixtral"])
    planned = Serving(AutoPlacement(), **BOUNDS).begin(module, {})
    names = [one.module for one in planned.trace.moments if ".mlp" in one.module]
    assert names[:4] == [
        f"model.layers.0.mlp.{name}" for name in ("gate", "gate", "experts", "experts")
    ]
