"""Text, prompts with completions and chats as JSONL; what is held out, and prompts of it."""

import pytest

from gemini.train.config import TrainConfig
from gemini.train.data import load
from tests.support.model_folder import make_tokenizer, rows, write_rows


@pytest.fixture(autouse=True)
def cached_here(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.mark.parametrize("kind", ["text", "prompt", "chat"])
def test_rows_of_every_kind_are_split_and_give_prompts(tmp_path, tokenizer, kind):
    path = write_rows(tmp_path / "a.jsonl", rows(kind, 20))
    config = TrainConfig(data=str(path), held_out=0.1)
    data, again = load(config, tokenizer), load(config, tokenizer)
    assert data.kind == kind and (len(data.train), len(data.held_out)) == (18, 2)
    assert list(data.held_out) == list(again.held_out)
    held_out = data.held_out[0]
    prompt = tokenizer.decode(data.prompts(tokenizer, 3)[0])
    assert len(data.prompts(tokenizer, 3)) == 2
    if kind == "text":
        assert held_out["text"].startswith(prompt) and len(prompt) < len(held_out["text"])
    elif kind == "prompt":
        assert prompt == held_out["prompt"]
    else:
        assert prompt == f"user: {held_out['messages'][0]['content']}</s>assistant: "


def test_several_files_and_held_out_data_of_its_own(tmp_path, tokenizer):
    for name in ("a", "b"):
        write_rows(tmp_path / f"{name}.jsonl", rows("text", 5))
    held_out = write_rows(tmp_path / "held.json", rows("text", 3))
    config = TrainConfig(data=str(tmp_path / "*.jsonl"), eval_data=str(held_out))
    data = load(config, tokenizer)
    assert (len(data.train), len(data.held_out)) == (10, 3)
    assert load(TrainConfig(data=str(held_out), held_out=0.0), tokenizer).held_out is None


WRONG = {
    "other keys": ([{"question": "a"}], "has rows with question; expected text, prompt and"),
    "one row": ([{"text": "a"}], "leaves none to train on; expected --held-out 0, or more rows"),
    "no rows": ([], "has no rows; expected JSONL"),
}


@pytest.mark.parametrize("case", WRONG)
def test_data_that_is_none_is_refused(tmp_path, tokenizer, case):
    given, message = WRONG[case]
    path = write_rows(tmp_path / "a.jsonl", given)
    with pytest.raises(ValueError, match=message):
        load(TrainConfig(data=str(path)), tokenizer)


def test_files_that_are_no_jsonl_are_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"--data .*none.jsonl is no file; expected JSONL"):
        load(TrainConfig(data=str(tmp_path / "none.jsonl")), tokenizer)
    (tmp_path / "a.jsonl").write_text("no json\n")
    with pytest.raises(ValueError, match="cannot be read as JSONL"):
        load(TrainConfig(data=str(tmp_path / "a.jsonl")), tokenizer)
    good = write_rows(tmp_path / "b.jsonl", rows("text", 5))
    other = write_rows(tmp_path / "c.jsonl", rows("prompt", 5))
    with pytest.raises(ValueError, match="expected the same keys"):
        load(TrainConfig(data=str(good), eval_data=str(other)), tokenizer)


def test_chats_need_a_template(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", rows("chat", 5))
    with pytest.raises(ValueError, match="the tokenizer of --model has no chat template"):
        load(TrainConfig(data=str(path)), make_tokenizer(template=None))
