"""Models that only decode: tokens of plain transformers, and reads of what has no room."""

import json

import pytest
import torch
import transformers
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

import gemini
from bench.shared.workers import run_ranks
from gemini.__main__ import main
from gemini.decoding.decode import TokenLimit
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from tests.support.model_folder import make_folder

PROMPT, NEW = 6, 5
BOUNDS = {"max_tokens": 96, "max_sequences": 8}
ROWS = {"hidden_size": 64, "vocab_size": 512, "num_attention_heads": 4}
CONFIGS = {
    "llama": transformers.LlamaConfig(
        **ROWS, intermediate_size=176, num_hidden_layers=6, num_key_value_heads=2
    ),
    "tied": transformers.LlamaConfig(
        **ROWS, intermediate_size=176, num_hidden_layers=6, num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "opt": transformers.OPTConfig(
        **ROWS, ffn_dim=256, num_hidden_layers=6, word_embed_proj_dim=64, dropout=0.1,
        max_position_embeddings=128,
    ),
    "gpt2": transformers.GPT2Config(
        n_embd=64, n_layer=6, n_head=4, vocab_size=512, n_positions=128
    ),
    "mixtral": transformers.MixtralConfig(
        **ROWS, intermediate_size=64, num_hidden_layers=3, num_key_value_heads=2,
        num_local_experts=4,
    ),
}  # fmt: skip


def saved(folder, kind, dtype=torch.bfloat16):
    """Save a model; returns a plain one of it, and the bytes of its weights."""
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype).eval()
    module.save_pretrained(folder)
    nbytes = sum(param.nbytes for param in module.parameters())
    # loaded: `to` has cast buffers too
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), nbytes


def prompts(count):
    torch.manual_seed(1)
    return torch.randint(2, 512, (count, PROMPT))


def answers(model, ids, **options):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=1,
        **{"do_sample": False, **options},
    )  # fmt: skip


def loaded(folder, nbytes, tmp_path, share=0.5, **options):
    """Half of the weights have room, beside the activations and the cache."""
    bounds = {**BOUNDS, **options}
    roomy = gemini.load_pretrained(folder, serve=True, **bounds)
    asked = roomy.engine.planning.inputs.trace.peak_non_model_bytes
    budget = asked + round(share * nbytes)
    model = gemini.load_pretrained(
        folder, serve=True, device_budget=budget, nvme_dir=str(tmp_path), **bounds
    )
    return model, budget - asked


def read_bytes(model):
    return model.engine.storage.traffic().nvme_read


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_are_plain_ones_and_each_reads_what_has_no_room(kind, tmp_path):
    plain, nbytes = saved(tmp_path / "model", kind)
    model, room = loaded(tmp_path / "model", nbytes, tmp_path)
    homes = {shard.param_home for shard in model.engine.planning.plan.shards}
    assert homes == {Tier.DEVICE, Tier.NVME}
    for count in (1, 8):
        ids = prompts(count)
        want = answers(plain, ids)
        before = read_bytes(model)
        assert torch.equal(answers(model, ids), want)
        # buffers of the largest part that is read, and of the one behind it
        chunks = model.engine.planning.plan.chunks
        shards = model.engine.planning.plan.shards
        buffers = 2 * max(
            chunks[shard.chunk].payload_bytes for shard in shards if shard.param_home is Tier.NVME
        )
        assert (read_bytes(model) - before) / NEW <= 1.02 * (nbytes - room) + buffers
        assert read_bytes(model) > before


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_quantised_weights_are_read_and_give_the_tokens_of_resident_ones(quantize, tmp_path):
    saved(tmp_path / "model", "llama")
    roomy = gemini.load_pretrained(tmp_path / "model", serve=True, quantize=quantize, **BOUNDS)
    planned = roomy.engine.planning
    nbytes = sum(chunk.payload_bytes for chunk in planned.plan.chunks)
    asked = planned.inputs.trace.peak_non_model_bytes
    model = gemini.load_pretrained(
        tmp_path / "model", serve=True, quantize=quantize, device_budget=asked + nbytes // 2,
        nvme_dir=str(tmp_path), **BOUNDS,
    )  # fmt: skip
    ids = prompts(8)
    assert torch.equal(answers(model, ids), answers(roomy, ids))
    assert 0 < read_bytes(model) / NEW < 0.75 * nbytes


def test_beams_and_samples_are_plain_ones(tmp_path):
    plain, nbytes = saved(tmp_path / "model", "llama", torch.float32)
    model, _ = loaded(tmp_path / "model", nbytes, tmp_path)
    assert {chunk.dtype for chunk in model.engine.planning.inputs.layout.chunks} == {"float32"}
    for options in ({"num_beams": 3}, {"do_sample": True, "top_k": 20}):
        torch.manual_seed(3)
        want = answers(plain, prompts(2), **options)
        torch.manual_seed(3)
        assert torch.equal(answers(model, prompts(2), **options), want)


def on_a_rank(rank, folder, budget):
    model = gemini.load_pretrained(
        folder, serve=True, device_budget=budget, nvme_dir=str(folder), **BOUNDS
    )
    homes = {shard.param_home for shard in model.engine.planning.plan.shards}
    return answers(model, prompts(3)), homes


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_two_ranks_decode_the_same_tokens(kind, tmp_path):
    plain, nbytes = saved(tmp_path / "model", kind)
    want = answers(plain, prompts(3))
    roomy = gemini.load_pretrained(tmp_path / "model", serve=True, **BOUNDS)
    asked = roomy.engine.planning.inputs.trace.peak_non_model_bytes
    budget = 2 * asked + 3 * nbytes // 4  # of a node, whose ranks have a half each
    for found, homes in run_ranks(on_a_rank, 2, tmp_path / "model", budget, processes=True):
        assert torch.equal(found, want) and Tier.NVME in homes


class Products(TorchDispatchMode):
    """Shapes of what batched products multiply with."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bmm.default:
            self.shapes.append(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


def test_the_head_is_not_copied_for_each_sequence(tmp_path):
    saved(tmp_path / "model", "llama")
    model = gemini.load_pretrained(tmp_path / "model", serve=True, **BOUNDS)
    for count in (1, 8):
        hidden = torch.randn(count, PROMPT, 64, dtype=torch.bfloat16)[:, -1:]
        with Products() as products, torch.no_grad():
            torch.nn.functional.linear(hidden, model.module.lm_head.weight)
        assert (count, 64, 512) in products.shapes  # as torch would
        with Products() as products:
            answers(model, prompts(count))
        assert not any(512 in shape for shape in products.shapes)


def test_all_stays_where_there_is_room_and_nothing_is_read(tmp_path):
    plain, _ = saved(tmp_path / "model", "llama")
    model = gemini.load_pretrained(tmp_path / "model", serve=True)
    assert torch.equal(answers(model, prompts(2)), answers(plain, prompts(2)))
    assert read_bytes(model) == 0
    assert not any(param.requires_grad for param in model.parameters())
    assert not model.training


@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_more_tokens_are_planned_than_one_sequence_may_have(kind, tmp_path):
    """These have 128 positions."""
    plain, _ = saved(tmp_path / "model", kind)
    model = gemini.load_pretrained(tmp_path / "model", serve=True, max_tokens=8 * 100)
    ids = prompts(8).repeat(1, 15)
    assert torch.equal(answers(model, ids), answers(plain, ids))


def test_what_the_plan_has_no_room_for_is_refused_before_anything_runs(tmp_path):
    plain, nbytes = saved(tmp_path / "model", "llama")
    model, _ = loaded(tmp_path / "model", nbytes, tmp_path, max_tokens=33, max_sequences=3)
    before = read_bytes(model)
    with pytest.raises(ValueError, match="expected max_sequences=4 where it is loaded"):
        answers(model, prompts(4))
    assert read_bytes(model) == before
    with pytest.raises(ValueError, match=r"34 tokens in 1 sequences.*max_tokens=34 "):
        answers(model, prompts(1).repeat(1, 6)[:, :34])
    # two sequences of 17 tokens: the last one is not decoded any more
    with pytest.raises(ValueError, match="34 tokens in 2 sequences"):
        answers(model, prompts(2).repeat(1, 3)[:, :14])
    assert torch.equal(answers(model, prompts(3)), answers(plain, prompts(3)))


def test_a_cache_that_never_grows_counts_whole(tmp_path):
    _, nbytes = saved(tmp_path / "model", "llama")
    model, _ = loaded(tmp_path / "model", nbytes, tmp_path, max_tokens=20)
    with pytest.raises(ValueError, match="and the plan has room for 20"):
        answers(model, prompts(2), cache_implementation="static")
    with pytest.raises(ValueError, match="and the plan has room for 3"):
        TokenLimit(8, 3).check(4, 1)


def test_the_cache_and_the_activations_of_all_tokens_are_planned(tmp_path):
    _, _ = saved(tmp_path / "model", "llama")

    def asked(**bounds):
        model = gemini.load_pretrained(tmp_path / "model", serve=True, **bounds)
        return model.engine.planning.inputs.trace.peak_non_model_bytes

    per_token = 2 * 2 * 16 * 2 * 6  # K and V, 2 heads of 16 in bf16, 6 layers
    few, many = (asked(max_tokens=n, max_sequences=1) for n in (1000, 2000))
    assert many - few >= 1000 * per_token
    logits = asked(max_tokens=8, max_sequences=64) - asked(max_tokens=8, max_sequences=32)
    assert logits == 32 * 512 * 12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_budget": "1MiB"}, "device_budget= without serve=True"),
        ({"max_sequences": 3}, "max_tokens= or max_sequences= without serve=True"),
        ({"serve": True, "trace": None}, "trace= with serve=True"),
        ({"serve": True, "placement_policy": "auto"}, "placement_policy= with serve=True"),
        ({"serve": True, "lora": LoraConfig(target_modules=["q_proj"])}, "serve=True with lora="),
        ({"serve": True, "max_tokens": 0}, "max_tokens=0 is below 1"),
        (
            {"serve": True, "model_class": transformers.LlamaForSequenceClassification,
             "init_missing": True},
            "no decoder that generates",
        ),
    ],
)  # fmt: skip
def test_arguments_that_exclude_each_other_are_refused(options, words, tmp_path):
    saved(tmp_path / "model", "llama")
    with pytest.raises(ValueError, match=words):
        gemini.load_pretrained(tmp_path / "model", **options)


def test_a_budget_without_room_for_the_largest_part_is_refused(tmp_path):
    saved(tmp_path / "model", "llama")
    with pytest.raises(BudgetError, match="raise device_budget"):
        gemini.load_pretrained(
            tmp_path / "model", serve=True, device_budget="64KiB", nvme_dir=str(tmp_path)
        )


# -- the command --


def test_the_command_continues_prompts_as_plain_transformers_does(tmp_path, capsys):
    folder = make_folder(tmp_path / "model", hidden_size=64, num_hidden_layers=4)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["A chunk", "ranks"]
    want = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        out = answers(plain, ids)[0, ids.shape[1] :]
        want.append(tokenizer.decode(out, skip_special_tokens=True))
    (tmp_path / "prompts.txt").write_text("\n".join(texts) + "\n\n", encoding="utf-8")
    said = [
        str(folder), "--device-mem", "400KiB", "--nvme", str(tmp_path), "--max-tokens", "60",
        "--max-new-tokens", str(NEW), "--max-sequences", "1", "--json",
    ]  # fmt: skip
    assert main(["generate", *said, "--prompts", str(tmp_path / "prompts.txt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert [one["prompt"] for one in found] == texts
    assert [one["answer"] for one in found] == want


def test_a_folder_with_a_link_out_of_it_is_refused_before_its_tokenizer_is_read(
    tmp_path, capsys, monkeypatch
):
    folder, read = make_folder(tmp_path / "model"), []
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *given, **_: read.append(given)
    )
    (tmp_path / "theirs").write_text("{}", encoding="utf-8")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").symlink_to(tmp_path / "theirs")
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(folder), "--prompt", "a"])
    assert ended.value.code == 2
    assert "cannot be read" in capsys.readouterr().err and read == []


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ([], 2, "no prompt; expected --prompt TEXT"),
        (["--prompt", "a", "--max-new-tokens", "0"], 2, "expected a whole number from 1 on"),
        (["--prompt", "a", "--max-new-tokens", "99", "--max-tokens", "40"], 2, "--max-tokens 40"),
        (["--prompt", "a", "--device-mem", "1KiB"], 1, "raise device_budget"),
        (["--prompt", "a", "--device-mem", "many"], 2, "many"),
    ],
)
def test_the_command_says_in_one_line_why_it_refuses(flags, status, words, tmp_path, capsys):
    folder = make_folder(tmp_path / "model")
    try:
        found = main(["generate", str(folder), "--nvme", str(tmp_path), *flags])
    except SystemExit as ended:
        found = ended.code
    assert found == status
    assert words in capsys.readouterr().err
