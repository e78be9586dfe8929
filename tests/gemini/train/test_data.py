"""Rows from files, the hub, streams and mixtures; what is trained on, held out, and packed."""

from dataclasses import replace

import datasets
import pytest
import torch
import transformers
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from gemini.train.config import TrainConfig
from gemini.train.data import load
from gemini.train.inputs import check_packing
from gemini.train.plan import training_of
from gemini.train.sources import sources_of
from gemini.train.tokens import MASK, Answers
from gemini.train.trainer import PackedRows, PaddedRows
from tests.support.model_folder import TEMPLATE, make_tokenizer, rows, write_rows
from tests.support.model_folder import tokenizer as tokenizer


@pytest.fixture(autouse=True)
def cached_here(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


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
    with pytest.raises(ValueError, match=r"--data .*none.jsonl is no file; expected JSONL, CSV"):
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
    assert load(replace(whole, loss="all"), tokenizer).said == ()
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


# -- where rows come from --


def test_tables_have_the_rows_of_jsonl(tmp_path, tokenizer):
    given = [{"prompt": "NA" if i else "", "completion": f'a,"b"\n{i}'} for i in range(4)]
    table = datasets.Dataset.from_list(given)
    table.to_csv(tmp_path / "a.csv")
    table.to_parquet(tmp_path / "a.parquet")
    want = load(TrainConfig(data=str(write_rows(tmp_path / "a.jsonl", given))), tokenizer)
    for name in ("a.csv", "a.parquet"):
        got = load(TrainConfig(data=str(tmp_path / name)), tokenizer)
        assert got.form == want.form and list(got.train) == list(want.train)
        assert list(got.held_out) == list(want.held_out)
    (tmp_path / "b.csv").write_text("text\na\n5\n", encoding="utf-8")
    (tmp_path / "b.parquet").write_text("text", encoding="utf-8")
    assert len(load(TrainConfig(data=str(tmp_path / "b.csv")), tokenizer).train) == 1
    with pytest.raises(ValueError, match=r"b.parquet cannot be read as PARQUET"):
        load(TrainConfig(data=str(tmp_path / "b.parquet")), tokenizer)
    (tmp_path / "c.csv").write_text("text\n1\n2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"c.csv row 1: text is the number 1; expected a text"):
        load(TrainConfig(data=str(tmp_path / "c.csv")), tokenizer)
    with pytest.raises(ValueError, match="has files of csv and json; expected one kind"):
        load(TrainConfig(data=str(tmp_path / "a.[cj]s*")), tokenizer)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("org/name", ("org/name", None, "train")),
        ("org/name:test[:50%]", ("org/name", None, "test[:50%]")),
        ("org/name/main:validation", ("org/name", "main", "validation")),
    ],
)
def test_a_data_set_on_the_hub_is_asked_for_by_its_split(monkeypatch, tokenizer, given, asked):
    table, seen = datasets.Dataset.from_list(rows("chat", 4)), []

    def load_dataset(name, subset, split, **_):
        seen.append((name, subset, split))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load(TrainConfig(data=given, held_out=0.0), tokenizer).train) == 4
    assert seen == [asked]
    (there,) = sources_of(given, "--data")
    assert there.files == ()


def test_a_mixture_draws_by_weights_and_holds_out_rows_of_each(tmp_path, tokenizer):
    for name, count in (("a", 30), ("b", 6)):
        named = [{"text": f"{name}{i}"} for i in range(count)]
        write_rows(tmp_path / f"{name}.jsonl", named)
    both = f"{tmp_path}/a.jsonl, {tmp_path}/b.jsonl"
    whole = load(TrainConfig(data=both, held_out=0.2), tokenizer)
    assert (len(whole.train), len(whole.held_out)) == (24 + 5, 6 + 1)
    mixed = load(TrainConfig(data=both, held_out=0.2, weights="1,3"), tokenizer)
    drawn = [row["text"] for row in mixed.train]
    assert sum(text.startswith("b") for text in drawn) > 2 * sum(t.startswith("a") for t in drawn)
    assert {t for t in drawn if t.startswith("a")} <= {row["text"] for row in whole.train}
    assert not set(drawn) & {row["text"] for row in mixed.held_out}  # though some come again
    for wrong in ("1", "1,x", "1,0", "1,2,3"):
        with pytest.raises(ValueError, match=f"--weights {wrong} of 2 sources"):
            load(TrainConfig(data=both, weights=wrong), tokenizer)


def test_rows_of_chats_may_come_from_three_forms(tmp_path, tokenizer):
    """And end as one column of messages."""
    alpaca = [{"instruction": f"a{i}", "output": "b"} for i in range(3)]
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    names = {"alpaca": alpaca, "chat": rows("chat", 3), "sharegpt": [{"conversations": said}] * 3}
    paths = [write_rows(tmp_path / f"{name}.jsonl", given) for name, given in names.items()]
    data = load(TrainConfig(data=",".join(map(str, paths)), held_out=0.0), tokenizer)
    assert len(data.train) == 9 and {"messages", MASK, "input_ids"} == set(data.train.column_names)
    text = write_rows(tmp_path / "text.jsonl", rows("text", 3))
    with pytest.raises(ValueError, match=r"has text as texts, and --data .* messages as lists"):
        load(TrainConfig(data=f"{paths[0]},{text}"), tokenizer)


def test_a_stream_has_the_rows_of_the_file_and_names_one_that_is_wrong(tmp_path, tokenizer):
    given = [{"instruction": f"a{i}", "output": f"b{i}", "id": i} for i in range(20)]
    path = write_rows(tmp_path / "a.jsonl", given)
    config = TrainConfig(data=str(path), stream=True, steps=2, batch=5, held_out=0.2)
    data, again = load(config, tokenizer), load(config, tokenizer)
    drawn = list(data.train)
    assert drawn == list(again.train) and len(drawn) == 18 and len(data.held_out) == 2
    kept = load(TrainConfig(data=str(path), held_out=0.0), tokenizer).train
    tokens = [row["input_ids"] for row in drawn]
    assert sorted([*tokens, *data.held_out["input_ids"]]) == sorted(kept["input_ids"])
    assert tokens != list(kept["input_ids"])[2:]  # shuffled
    assert len(data.prompts(tokenizer, 3)) == 2
    write_rows(path, [*given[:5], {"instruction": "a", "output": None}])
    with pytest.raises(
        ValueError, match=r"--data .*a.jsonl row 6: output is null; expected a text"
    ):
        list(load(config, tokenizer).train)


# -- what is trained on --

MARKED = TEMPLATE.replace(
    "{{ m.role }}: {{ m.content }}</s>",
    "{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}",
)
TURNS = [("system", "s"), ("user", "a chunk"), ("assistant", "one"), ("user", "b"),
         ("assistant", "two words")]  # fmt: skip


@pytest.mark.parametrize("template", [MARKED, TEMPLATE], ids=["marked", "by prefixes"])
def test_tokens_of_answers_alone_are_trained_on(tmp_path, template):
    tokenizer = make_tokenizer(template=template)
    row = {"messages": [{"role": role, "content": text} for role, text in TURNS]}
    config = TrainConfig(data=str(write_rows(tmp_path / "a.jsonl", [row] * 2)), held_out=0.0)
    marked = load(config, tokenizer).train[0]
    trained = [
        t for t, is_answer in zip(marked["input_ids"], marked[MASK], strict=True) if is_answer
    ]
    assert tokenizer.decode(trained) == " one</s> two words</s>"  # its space is a part
    assert load(replace(config, loss="all"), tokenizer).train.column_names == ["messages"]
    with pytest.raises(ValueError, match="all 2 rows are dropped by --seq 9: prompts fill it"):
        load(replace(config, seq=9), tokenizer)


def test_answers_are_those_of_trl_where_it_knows_the_template():
    from trl import chat_template_utils as trl

    tokenizer = make_tokenizer(template=trl.qwen3_chat_template)
    row = {"messages": [{"role": role, "content": text} for role, text in TURNS]}
    want = tokenizer.apply_chat_template(
        row["messages"], return_dict=True, return_assistant_tokens_mask=True,
        chat_template=trl.qwen3_training_chat_template,
    )  # fmt: skip
    assert Answers(tokenizer).mark(row) == {name: want[name] for name in ("input_ids", MASK)}


# -- packing --

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
         "pad_token_id": 0}  # fmt: skip
APART = {
    "Llama": {}, "Mistral": {"sliding_window": 4}, "Gemma2": {"sliding_window": 4}, "Phi": {},
    "GPTNeoX": {}, "Mixtral": {"num_local_experts": 2},
}  # fmt: skip
TOGETHER = {
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "Bloom": {}, "Mamba": {},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip


def model_of(name, more):
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def documents(*lengths):
    made = torch.Generator().manual_seed(0)
    return [torch.randint(1, 64, (length,), generator=made).tolist() for length in lengths]


@torch.no_grad()
def losses_of(model, ids, labels, **more):
    logits = model(input_ids=ids, use_cache=False, **more).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.transpose(1, 2).float(), labels[:, 1:], reduction="none"
    )


@pytest.mark.parametrize("name", APART)
def test_a_packed_document_has_the_loss_that_it_has_alone(name):
    model = model_of(name, APART[name])
    check_packing(model_of(name, APART[name]).to("meta"))
    docs = documents(5, 9, 2, 12, 7, 30)
    labels = [[-100, *doc[1:]] if i % 2 else doc for i, doc in enumerate(docs)]
    rows_ = datasets.Dataset.from_dict({"input_ids": docs, "labels": labels})
    packed = pack_dataset(rows_, 24, "bfd")
    assert len(packed) == 3
    batch = PackedRows(0, return_position_ids=True, pad_to_multiple_of=24)(list(packed))
    assert batch["input_ids"].shape == (3, 24) and "attention_mask" not in batch
    positions = batch["position_ids"]
    got = losses_of(model, batch["input_ids"], batch["labels"], position_ids=positions)
    found = {}
    for row, lengths in enumerate(packed["seq_lengths"]):
        begins = [sum(lengths[:i]) for i in range(len(lengths))]
        for begin, length in zip(begins, lengths, strict=True):
            tokens = tuple(batch["input_ids"][row, begin : begin + length].tolist())
            found[tokens] = got[row, begin : begin + length - 1]
    assert got.count_nonzero() == sum(map(torch.count_nonzero, found.values()))
    for doc, label in zip(docs, labels, strict=True):
        alone = losses_of(model, torch.tensor([doc[:24]]), torch.tensor([label[:24]]))[0]
        torch.testing.assert_close(found[tuple(doc[:24])], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TOGETHER)
def test_packing_is_refused_where_documents_would_see_each_other(name):
    with pytest.raises(ValueError, match=f"--packing with {name}ForCausalLM: .*expected no --pack"):
        check_packing(model_of(name, TOGETHER[name]).to("meta"))


@pytest.mark.parametrize("seq", [3, 8, 23, 100])
def test_batches_are_padded_to_a_few_lengths_and_never_beyond_the_longest_that_is_planned(seq):
    config = TrainConfig(seq=seq)
    lengths = config.padded_lengths
    assert len(lengths) == len({*lengths}) == min(8, seq) and lengths[-1] == seq
    assert training_of(config, 1).lengths == len(lengths)
    assert replace(config, packing=True).padded_lengths == (seq,)
    collator = PaddedRows(DataCollatorForLanguageModeling(0), lengths)
    found = set()
    for longest in range(1, seq + 1):
        batch = collator([{"input_ids": [5] * longest}, {"input_ids": [7]}])
        padded = batch["input_ids"].shape[1]
        found.add(padded)
        assert padded == min(n for n in lengths if n >= longest)
        assert all(batch[name].shape == (2, padded) for name in ("labels", "attention_mask"))
        assert batch["attention_mask"].sum() == longest + 1 and batch["labels"][0, 0] == 5
        assert (batch["labels"][0, longest:] == -100).all()
    assert found == {*lengths}
