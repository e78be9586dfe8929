"""The longest sequence that fits, and a chunked loss where logits are what is left."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gemini import trace
from gemini.integrations import chunk_loss
from gemini.plan import words
from gemini.plan.activations import example_inputs
from gemini.plan.ask import ask
from gemini.plan.machine import machine_of
from gemini.plan.question import longest_seq
from gemini.plan.training import Training
from gemini.train import plan_command as command

MIB = 1 << 20
WORDY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 16000, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def wordy(tmp_path_factory):
    """A LLaMA whose logits are larger than all else that a forward needs."""
    path = tmp_path_factory.mktemp("wordy") / "config.json"
    path.write_text(json.dumps(WORDY), encoding="utf-8")
    return path


def asked(config, device_mem, **training):
    machine = machine_of({"device_mem": device_mem * MIB, "host_mem": 1024 * MIB}, gpu="rtx4090")
    return ask(str(config), machine, Training(**{"seq": 512, **training}))


@pytest.mark.ci
def test_the_longest_sequence_fits_and_one_part_in_64_more_does_not(wordy):
    """With whole logits, and with those of 1024 tokens at a time, which many more have room for."""
    question = asked(wordy, 200)
    found = longest_seq(question)
    assert question.at(found).fits() and not question.at(found + max(1, found // 64)).fits()
    assert asked(wordy, 200, seq=2 * found, chunked=True).fits()
    assert longest_seq(asked(wordy, 1)) == 0


def test_a_chunked_loss_is_the_cheapest_change_where_logits_are_what_is_left(wordy):
    question = asked(wordy, 200, seq=1536)
    assert not question.fits()
    plan = words.answer(question)
    assert plan.change == "--chunk-loss" and plan.asked.chunked and plan.asked.fits()
    assert plan.change_in_words == "the logits of a few tokens at a time (chunk_loss)"
    # adapters are around the model whose loss it is
    adapted = question.other(False, 4, None, True)
    assert adapted.chunked and adapted.lora == 4
    whole = question.other(False, 4, None, False)
    assert adapted.trace.peak_non_model_bytes < 0.8 * whole.trace.peak_non_model_bytes
    with pytest.raises(ValueError, match="a chunked loss beside that of trl"):
        asked(wordy, 200, by_trl=True, chunked=True)


def test_a_chunked_loss_is_traced_and_has_the_numbers_of_the_whole():
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**WORDY, use_cache=False))
    chunked = LlamaForCausalLM(LlamaConfig(**WORDY, use_cache=False))
    chunked.load_state_dict(plain.state_dict())
    chunk_loss(chunked, tokens=64)
    traces = [trace(one, example_inputs(one, 1, 512)) for one in (plain, chunked)]
    assert traces[1].peak_non_model_bytes < 0.3 * traces[0].peak_non_model_bytes
    ids = torch.randint(16000, (1, 512))
    whole, parts = (one(input_ids=ids, labels=ids).loss for one in (plain, chunked))
    whole.backward(), parts.backward()
    assert abs(whole.item() - parts.item()) <= 1e-6 * whole.item()
    for a, b in zip(plain.parameters(), chunked.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-6 * a.grad.norm()


def test_activations_have_the_bytes_of_the_precision(wordy):
    model = LlamaForCausalLM(LlamaConfig(**WORDY, use_cache=False))
    for precision in ("bf16", "fp32"):
        planned = asked(wordy, 200, precision=precision).trace
        traced = trace(model, example_inputs(model, 1, 512), precision=precision)
        sizes = [[(m.non_model_bytes, m.saved_bytes) for m in t.moments] for t in (planned, traced)]
        assert sizes[0] == sizes[1]


@pytest.mark.ci
def test_the_command_says_the_longest_sequence(wordy, capsys, tmp_path):
    out = tmp_path / "plan.json"
    flags = ["--model", str(wordy), "--gpu", "rtx4090", "--device-mem", "200MiB", "--host-mem"]
    flags += ["1GiB", "--seq", "512", "--batch", "1", "--chunk-loss", "--no-checkpointing"]
    assert command.main([*flags, "--longest", "--json", str(out)]) == 0
    longest = json.loads(out.read_text(encoding="utf-8"))["longest_seq"]
    said = capsys.readouterr().out
    assert f"the longest --seq that fits: {longest}\n" in said
    assert "with the loss of chunk_loss" in said and longest > 512
    assert command.main(flags) == 0 and "longest" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        command.main([*flags, "--print-args"])
    assert "expected no chunk_loss in the plan" in capsys.readouterr().err
