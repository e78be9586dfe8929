"""`python -m gemini train` with adapters, and the methods that train them beside their base."""

import json

import pytest
import torch
from safetensors.torch import load_file

from gemini.train import inputs, run
from tests.support.model_folder import flags, generated, make_folder, rows, write_rows

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("cached_here")]  # trl takes seconds to import


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [("prompt", (), ""), ("chat", ("--quantize", "nf4", "--seq", "64"), " on a base in nf4")],
)
def test_adapters_are_trained_and_come_back(
    folder, tmp_path, capsys, monkeypatch, data, more, said
):
    """Of a base on the hub, whose id is saved with them."""
    out = tmp_path / "out"
    monkeypatch.setattr(inputs, "downloaded", lambda _, weights: folder / "model")
    made = [*flags(folder, out, "--lora", "2", *more, data=data), "--model", "org/base"]
    assert run.main(made) == 0
    assert f"LoRA of rank 2{said} (as asked)" in capsys.readouterr().out
    adapters = load_file(out / "adapter_model.safetensors")
    assert all(value.any() for name, value in adapters.items() if "lora_B" in name)  # from zeros
    assert not (out / "model.safetensors").exists()
    settings = out / "adapter_config.json"
    assert json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"] == "org/base"
    settings.write_text(
        settings.read_text(encoding="utf-8").replace("org/base", str(folder / "model")),
        encoding="utf-8",
    )
    assert generated(out).shape[1] > 3
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "base_model: org/base\n" in card
    assert "LoRA adapters of rank 2 of `org/base`, fine-tuned on" in card
    assert "Information Needed" not in card and not list(out.glob("*.bin"))


@pytest.mark.parametrize("more", [(), ("--method", "reward"), ("--quantize", "nf4")])
def test_merged_adapters_are_whole_weights_as_peft_merges_them(folder, tmp_path, more):
    """Of linear layers and of a new head; in the dtype of the base, which is rounded to once."""
    import transformers

    kind = transformers.AutoModelForCausalLM
    given, options = rows("text"), {}
    if "reward" in more:
        from peft import AutoPeftModelForSequenceClassification as adapted

        kind, options = transformers.AutoModelForSequenceClassification, {"num_labels": 1}
        given = [{"chosen": row["text"][:20], "rejected": 20 * "x"} for row in given]
    else:
        from peft import AutoPeftModelForCausalLM as adapted
    write_rows(tmp_path / "text.jsonl", given)
    out = tmp_path / "out"
    made = [*flags(tmp_path, out, "--lora", "2", "--merge", *more),
            "--model", str(folder / "model"), "--lr", "1e-2"]  # fmt: skip
    assert run.main(made) == 0
    got = load_file(out / "model.safetensors")
    base = load_file(folder / "model/model.safetensors")
    want = adapted.from_pretrained(out / "adapter", dtype=torch.float32, **options)
    want = want.merge_and_unload().state_dict()
    assert got.keys() == want.keys() - ({"lm_head.weight"} - got.keys())
    for name, value in got.items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, want[name].bfloat16()), name
        if "proj" in name:
            assert not torch.equal(value, base[name]), name
    model = kind.from_pretrained(out, **options)
    assert model(input_ids=torch.tensor([[1, 2]])).logits.isfinite().all()
    assert {path.name for path in out.glob("adapter*")} == {"adapter"}
    assert f"from transformers import {kind.__name__}" in (out / "README.md").read_text(
        encoding="utf-8"
    )
    assert "merged into all weights" in (out / "README.md").read_text(encoding="utf-8")
    assert not list(out.rglob("*.bin")) and not list(out.glob("*/**/README.md"))


def test_adapters_of_a_weight_with_two_names_are_not_merged(folder, tmp_path, capsys):
    model = make_folder(tmp_path / "tied", tie_word_embeddings=True)
    made = flags(folder, tmp_path / "out", "--lora", "2", "--merge", "--lora-targets", "lm_head")
    with pytest.raises(SystemExit):
        run.main([*made, "--model", str(model)])
    assert "--merge with adapters of " in capsys.readouterr().err


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_a_method_trains_new_adapters_with_the_base_as_reference(folder, tmp_path, method):
    """Before the first step nothing is preferred, and the divergence is none."""
    if method == "dpo":
        given = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": r["prompt"]}
                 for r in rows("prompt", 20)]  # fmt: skip
        more = ["--beta", "0.5"]
    else:
        given = [{"prompt": r["prompt"][:9], "letter": "e"} for r in rows("prompt", 20)]
        reward = "def count(completions, letter, **_): return [len(set(c)) for c in completions]"
        (tmp_path / "reward.py").write_text(reward, encoding="utf-8")
        more = ["--reward", f"{tmp_path}/reward.py:count", "--completions", "2", "--beta", "0.1"]
    write_rows(tmp_path / f"{method}.jsonl", given)
    out = tmp_path / "out"
    made = [*flags(tmp_path, out, "--method", method, *more, data=method)]
    made += ["--model", str(folder / "model"), "--lora", "2", "--lora-targets", "q_proj,v_proj",
             "--lora-alpha", "8", "--lora-dropout", "0.1", "--seq", "48"]  # fmt: skip
    assert run.main(made) == 0
    assert f"trained by {method.upper()} on" in (out / "README.md").read_text(encoding="utf-8")
    (state,) = (out / "checkpoints/checkpoint-4").glob("trainer_state.json")
    first = next(
        e for e in json.loads(state.read_text(encoding="utf-8"))["log_history"] if "loss" in e
    )
    if method == "dpo":  # nothing is preferred yet: log 2
        assert first["loss"] == pytest.approx(0.693147, abs=1e-6)
    else:
        assert first["kl"] == 0.0
    settings = json.loads((out / "adapter_config.json").read_text(encoding="utf-8"))
    assert settings["base_model_name_or_path"] == str(folder / "model")
    assert (settings["lora_alpha"], settings["lora_dropout"]) == (8, 0.1)
    saved = load_file(out / "adapter_model.safetensors")
    assert all(("q_proj" in name) or ("v_proj" in name) for name in saved)
    assert not any(".ref." in name for name in saved)
    assert any(value.any() for name, value in saved.items() if "lora_B" in name)


@pytest.mark.parametrize("more", [(), ("--lora", "2"), ("--lora", "2", "--quantize", "nf4")])
def test_a_reward_model_is_trained_and_scores_as_it_did(folder, tmp_path, capsys, caplog, more):
    """By pairs, of which one is too long; the head is new, and comes back with the rest."""
    import transformers

    given = [{"prompt": r["prompt"][:9], "chosen": r["completion"][:20], "rejected": 20 * "x"}
             for r in rows("prompt", 20)]  # fmt: skip
    write_rows(tmp_path / "reward.jsonl", [*given, given[0] | {"chosen": 99 * "long"}])
    write_rows(tmp_path / "held.jsonl", given[:4])
    out = tmp_path / "out"
    made = flags(tmp_path, out, "--method", "reward", "--seq", "48", "--lr", "1e-2", *more)
    made += ["--model", str(folder / "model"), "--data", str(tmp_path / "reward.jsonl"),
             "--eval-data", str(tmp_path / "held.jsonl")]  # fmt: skip
    assert run.main(made) == 0
    said = capsys.readouterr().out
    assert "1 of 21 rows are dropped by --seq 48: a text of the pair is longer" in said
    assert "(traced, of a reward model)" in said and "-->" not in said
    assert "left its trace" not in caplog.text
    (state,) = (out / "checkpoints/checkpoint-4").glob("trainer_state.json")
    log = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    logged = [entry for entry in log if "eval_loss" in entry][-1]
    assert logged["eval_loss"] < 0.6  # log 2 before

    kind, options = transformers.AutoModelForSequenceClassification, {"num_labels": 1}
    if more:
        from peft import AutoPeftModelForSequenceClassification as kind
    model = kind.from_pretrained(out, **options)
    assert f"{kind.__name__}.from_pretrained(" in (out / "README.md").read_text(encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    scores = torch.tensor([
        [model(**tokenizer(row["prompt"] + row[key] + "</s>", return_tensors="pt")).logits.item()
         for key in ("chosen", "rejected")] for row in given[:4]
    ])  # fmt: skip
    loss = -torch.nn.functional.logsigmoid(scores[:, 0] - scores[:, 1]).mean().item()
    if "nf4" not in more:  # whose base comes back in 16 bits
        assert loss == pytest.approx(logged["eval_loss"], rel=0.03)  # bf16
