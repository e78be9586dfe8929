"""Text, prompts with completions and chats as JSONL; what is held out, and prompts of it."""

from dataclasses import replace

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
    assert data.form.kind == kind and (len(data.train), len(data.held_out)) == (18, 2)
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
    good = write_rows(tmp_path / "b.jsonl", rows("text", 5))
    other = write_rows(tmp_path / "c.jsonl", rows("prompt", 5))
    with pytest.raises(ValueError, match="expected the same keys"):
        load(TrainConfig(data=str(good), eval_data=str(other)), tokenizer)


@pytest.mark.parametrize("ending", ["gz", "xz", "zip"])
def test_a_plain_file_with_the_name_of_a_compressed_one_is_refused(tmp_path, tokenizer, ending):
    path = write_rows(tmp_path / f"a.{ending}", rows("text", 2))
    with pytest.raises(ValueError, match=rf"--data .*a\.{ending} cannot be read as JSONL"):
        load(TrainConfig(data=str(path)), tokenizer)


def test_chats_need_a_template(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", rows("chat", 5))
    with pytest.raises(ValueError, match="the tokenizer of --model has no chat template"):
        load(TrainConfig(data=str(path)), make_tokenizer(template=None))


def test_a_path_that_exists_is_no_glob(tmp_path, tokenizer):
    path = write_rows(tmp_path / "data[1].jsonl", rows("text", 5))
    write_rows(tmp_path / "data1.jsonl", rows("prompt", 5))
    assert load(TrainConfig(data=str(path), held_out=0.0), tokenizer).form.kind == "text"


def test_columns_that_trl_takes_for_its_own_are_left_out(tmp_path, tokenizer):
    given = [
        {**row, "input_ids": [1], "prompt": "", "id": i} for i, row in enumerate(rows("text", 5))
    ]
    path = write_rows(tmp_path / "a.jsonl", given)
    data = load(TrainConfig(data=str(path), held_out=0.0), tokenizer)
    assert data.train.column_names == ["text"]


def long_and_short(chat):
    """40 rows, of which every other one has a prompt beyond 32 tokens."""
    for i in range(40):
        prompt, completion = "word " * (40 if i % 2 else 1), "done"
        if chat:
            prompt = [{"role": "user", "content": prompt}]
            completion = [{"role": "assistant", "content": completion}]
        yield {"prompt": prompt, "completion": completion}


@pytest.mark.parametrize("chat", [False, True])
def test_what_seq_drops_is_what_trl_drops_and_is_said(tmp_path, tokenizer, chat):
    path = write_rows(tmp_path / "a.jsonl", list(long_and_short(chat)))
    whole = TrainConfig(data=str(path), held_out=0.0, seq=32)
    data = load(whole, tokenizer)
    assert data.said == ("20 of 40 rows are dropped by --seq 32: prompts fill it",)
    assert len(data.train) == 20
    parts = load(replace(whole, held_out=0.5), tokenizer)
    assert len(parts.train) + len(parts.held_out) == 20
    assert "of 20 held-out rows are dropped by --seq 32" in parts.said[1]
    assert load(replace(whole, packing=True), tokenizer).said == ()
    with pytest.raises(ValueError, match=r"all 40 rows are dropped by --seq 4: .* larger --seq"):
        load(replace(whole, seq=4), tokenizer)
    short = write_rows(tmp_path / "b.jsonl", list(long_and_short(chat))[::2])
    long = write_rows(tmp_path / "c.jsonl", list(long_and_short(chat))[1::2])
    with pytest.raises(ValueError, match="all 20 held-out rows are dropped by --seq 32"):
        load(replace(whole, data=str(short), eval_data=str(long)), tokenizer)


def test_an_empty_prompt_begins_with_the_token_that_begins_a_text(tmp_path, tokenizer):
    given = [{"prompt": "", "completion": "b"}] * 3
    path = write_rows(tmp_path / "a.jsonl", given)
    data = load(TrainConfig(data=str(path), held_out=0.0), tokenizer)
    assert data.prompts(tokenizer, 2) == [[tokenizer.bos_token_id]] * 2
