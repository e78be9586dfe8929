"""Models of transformers, and LoRA of PEFT, as they are: trained, generating, checkpointed.

Random weights and small sizes. On the simulated device chunks are small and what is released is
NaN, so a read of a released parameter shows in the loss.
"""

import copy

import peft
import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from bench.shared.reference import flat, relative_error, train_reference
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP
from optim import HybridAdam
from tests.support.one_thread import one_thread as one_thread

transformers.logging.set_verbosity_error()
STEPS = 3
CHUNKS = {"min_chunk_size_m": 0.002}  # 2097 elements: several chunks a model
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}
BOUNDS = {"fp32": 1e-6, "bf16": 5e-3}  # bf16: a master off by an ulp may round to another weight
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VOCABULARY = 67
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=24, n_embd=36, n_layer=3, n_head=3,
                   resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **ENDS)
    )  # fmt: skip


def llama():
    """Four queries a key: grouped-query attention."""
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=56,
                    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, **ENDS)
    )  # fmt: skip


def opt():
    return OPTForCausalLM(
        OPTConfig(vocab_size=VOCABULARY, hidden_size=36, ffn_dim=70, num_hidden_layers=3,
                  num_attention_heads=3, max_position_embeddings=24, word_embed_proj_dim=20,
                  dropout=0, **ENDS)
    )  # fmt: skip


def mixtral():
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48,
                      num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                      num_local_experts=4, num_experts_per_tok=2, **ENDS)
    )  # fmt: skip


def bert():
    return BertForPreTraining(
        BertConfig(vocab_size=VOCABULARY, hidden_size=36, num_hidden_layers=3,
                   num_attention_heads=3, intermediate_size=70, max_position_embeddings=24,
                   hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    )  # fmt: skip


def t5():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=36, d_kv=12, d_ff=70, num_layers=2, num_heads=3,
                 dropout_rate=0, decoder_start_token_id=0)
    )  # fmt: skip


def vit():
    return ViTForImageClassification(
        ViTConfig(hidden_size=36, num_hidden_layers=3, num_attention_heads=3, intermediate_size=70,
                  image_size=12, patch_size=4, num_labels=5, hidden_dropout_prob=0,
                  attention_probs_dropout_prob=0)
    )  # fmt: skip


def llama_lora():
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"],
                             task_type="CAUSAL_LM")  # fmt: skip
    model = peft.get_peft_model(llama(), config)
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zeros, which would hide a wrong lora_A in the first step
            torch.nn.init.normal_(param, std=0.1)
    return model


def tokens(seed, rows=3):
    return torch.randint(3, VOCABULARY, (rows, 11), generator=torch.Generator().manual_seed(seed))


def causal_batch(seed):
    return {"input_ids": tokens(seed), "labels": tokens(seed)}


def bert_batch(seed):
    return {**causal_batch(seed), "next_sentence_label": torch.tensor([0, 1, 1])}


def t5_batch(seed):
    return {"input_ids": tokens(seed), "labels": tokens(seed + 50)[:, :7].contiguous()}


def vit_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(3, 3, 12, 12, generator=generator)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 4, 2])}


MODELS = {
    gpt2: causal_batch,
    llama: causal_batch,
    opt: causal_batch,
    mixtral: causal_batch,
    bert: bert_batch,
    t5: t5_batch,
    vit: vit_batch,
    llama_lora: causal_batch,
}


def made(make):
    torch.manual_seed(0)
    return make()


def loss_of(model, batch):
    dtype = next(model.parameters()).dtype
    return model(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}).loss


def in_compute_dtype(module, dtype):
    for param in module.parameters():
        param.data = param.data.to(dtype)
    return module


def trained(module, device, precision, batches):
    """fp32 values of the trainable parameters, and the wrapped model."""
    names = [name for name, param in module.named_parameters() if param.requires_grad]
    model = GeminiDDP(module, device, precision=precision, **CHUNKS)
    optimizer = HybridAdam([p for p in model.parameters() if p.requires_grad], **ADAM)
    for batch in batches:
        loss = loss_of(model, batch)
        assert torch.isfinite(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    return flat([state[name] for name in names]), model


def compare(module, batches, precision, devices):
    start = flat([p for p in module.parameters() if p.requires_grad])
    want = train_reference(
        copy.deepcopy(module),
        lambda params: torch.optim.AdamW(params, **ADAM, fused=True),
        [[batch] for batch in batches],
        loss_of,
        DTYPES[precision],
    )
    for device in devices:
        got, model = trained(copy.deepcopy(module), device, precision, batches)
        assert relative_error(got - start, want - start) < BOUNDS[precision]
        assert len(model.engine.chunks) >= 4


def in_turn(makes, values, tested=()):
    """Every model with one of the values; those that are not `tested` as slower tests."""
    for number, make in enumerate(makes):
        marks = [] if make in tested else [pytest.mark.ci]
        value = values[number % len(values)]
        yield pytest.param(make, value, marks=marks, id=f"{make.__name__}-{value}")


@pytest.mark.parametrize(
    ("make", "precision"),
    [*in_turn(MODELS, ["fp32", "bf16"], MODELS), *in_turn(MODELS, ["bf16", "fp32"])],
)
def test_updates_are_those_of_torch(make, precision):
    batches = [MODELS[make](step) for step in range(STEPS)]
    compare(made(make), batches, precision, [SimBackend(1)])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_updates_on_one_memory_are_those_of_torch(precision):
    compare(made(gpt2), [causal_batch(step) for step in range(STEPS)], precision, ["cpu"])


@pytest.mark.parametrize(
    ("make", "reentrant"),
    [*in_turn([gpt2, llama, t5, llama_lora, mixtral], [False, True], [gpt2, llama_lora])],
)
def test_updates_with_gradient_checkpointing(make, reentrant):
    module = made(make)
    module.train()
    if make is llama_lora:
        module.enable_input_require_grads()  # reentrant regions need an input with a gradient
    module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert any(getattr(each, "gradient_checkpointing", False) for each in module.modules())
    batches = [MODELS[make](step) for step in range(STEPS)]
    compare(module, batches, "fp32", [SimBackend(2)])


@pytest.mark.parametrize(
    ("make", "precision"),
    [*in_turn([gpt2, llama, opt, mixtral, t5, llama_lora], ["fp32", "bf16"], [gpt2, mixtral, t5])],
)
def test_generates_what_the_plain_model_does(make, precision):
    module = made(make).eval()
    plain = in_compute_dtype(copy.deepcopy(module), DTYPES[precision])
    model = GeminiDDP(module, SimBackend(3), precision=precision, **CHUNKS)
    for options in ({"do_sample": False}, {"num_beams": 3}, {"do_sample": True, "top_k": 9}):
        outputs = []
        for each in (plain, model):
            torch.manual_seed(1)
            outputs.append(each.generate(input_ids=tokens(5, rows=2), max_new_tokens=8, **options))
        assert torch.equal(*outputs)
    assert model.engine.manager.gathers_of.total() > len(model.engine.chunks)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_evaluation_gives_the_bits_of_the_plain_model(make):
    module = made(make).eval()
    batch = MODELS[make](0)
    model = GeminiDDP(copy.deepcopy(module), SimBackend(4), precision="fp32", **CHUNKS)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():  # with gradients attention may take another kernel
            want = module(**batch)
            for _ in range(2):
                got = model(**batch)
                assert type(got) is type(want) and list(got) == list(want)
                assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
