"""Rows of JSONL: every one is looked at, and what is wrong with one is said in one line."""

import gzip
import json
import os
from pathlib import Path

import pytest

from gemini.train.config import TrainConfig
from gemini.train.inputs import check_fit, check_inputs
from gemini.train.rows import RowForm, RowsWanted, converted, look_at, read
from gemini.train.sources import files_of
from gemini.train.tokens import Answers
from tests.support.model_folder import make_tokenizer
from tests.support.model_folder import tokenizer as tokenizer

GOOD = {"text": "a"}
USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
PAIR = {"prompt": "a", "completion": "b"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}


def written(tmp_path, given):
    if not isinstance(given, bytes):
        given = "".join(json.dumps(row) + "\n" for row in given).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(given)
    return [str(path)]


def look(files, tokenizer, **how):
    return look_at([(file, read(Path(file))) for file in files], "--data", tokenizer, **how)


LINE = b'{"text": "a"}\n'
TAKEN = {
    "text": ([GOOD, GOOD], RowForm("text", False)),
    "other keys beside": (
        [{**GOOD, "id": 1}, {**GOOD, "id": "b", "prompt": 3}],
        RowForm("text", False),
    ),
    "a prompt that is empty": ([{"prompt": "", "completion": "b"}], RowForm("prompt", False)),
    "chats": ([{"messages": [USER, ASSISTANT]}, {"messages": [USER]}], RowForm("chat", True)),
    "a call of a tool": ([{"messages": [USER, CALL]}], RowForm("chat", True)),
    "prompts of messages": (
        [{"prompt": [USER], "completion": [ASSISTANT]}],
        RowForm("prompt", True),
    ),
    "a byte-order mark": (b"\xef\xbb\xbf" + LINE, RowForm("text", False)),
    "lines of Windows": (LINE.replace(b"\n", b"\r\n") * 2, RowForm("text", False)),
    "blank lines": (b"\n \n" + LINE + b"\n" + LINE.strip(), RowForm("text", False)),
    "an array": (json.dumps([GOOD, GOOD]).encode(), RowForm("text", False)),
    "an array on lines": (json.dumps([GOOD, GOOD], indent=1).encode(), RowForm("text", False)),
    "alpaca": ([{"instruction": "a", "input": "", "output": "b"}], RowForm("chat", True)),
    "sharegpt": ([{"conversations": [{"from": "human", "value": "a"}]}], RowForm("chat", True)),
    "gzip": (gzip.compress(LINE), RowForm("text", False)),
    "a NUL": ([{"text": "a\0b"}], RowForm("text", False)),
}


@pytest.mark.parametrize("case", TAKEN)
def test_rows_that_can_be_trained_on_are_taken(tmp_path, tokenizer, case):
    given, form = TAKEN[case]
    assert look(written(tmp_path, given), tokenizer) == form


ALPACA = {"instruction": "a", "input": "b", "output": "c", "text": "abc"}
SAID = [("system", "s"), ("human", "a"), ("gpt", "b"), ("observation", "c")]


def messages(*said):
    return [{"role": role, "content": text} for role, text in said]


def test_rows_of_alpaca_and_sharegpt_become_chats_or_prompts(tokenizer):
    user, answer = ("user", "a\nb"), ("assistant", "c")
    assert converted(ALPACA, tokenizer) == {"messages": messages(user, answer)}
    longer = {**ALPACA, "system": "s", "history": [["x", "y"]]}
    before = [("system", "s"), ("user", "x"), ("assistant", "y")]
    assert converted(longer, tokenizer) == {"messages": messages(*before, user, answer)}
    plain = make_tokenizer(template=None)
    assert converted(ALPACA, plain) == {"prompt": "a\nb\n", "completion": "c"}
    said = {"conversations": [{"from": one, "value": text} for one, text in SAID], "tools": "[]"}
    roles = zip(("system", "user", "assistant", "tool"), "sabc", strict=True)
    assert converted(said, tokenizer) == {"messages": messages(*roles), "tools": "[]"}
    assert converted(PAIR, tokenizer) is PAIR


CHOSEN = {"chosen": [USER, ASSISTANT], "rejected": [USER, USER]}
OF_A_METHOD = [
    ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, RowForm("preference", False)),
    ("dpo", {"prompt": "a", **CHOSEN}, RowForm("pair", True)),
    ("dpo", {"prompt": "a", "chosen": "b"}, "has prompt, chosen, and no rejected; expected prom"),
    ("dpo", {"chosen": "a", "rejected": ""}, "rejected is empty; expected a text to train on"),
    ("dpo", PAIR, "has prompt, completion, and no chosen; expected prompt, chosen and"),
    ("grpo", {**PAIR, "answer": 3}, RowForm("question", False)),
    ("grpo", {"prompt": [USER]}, RowForm("question", True)),
    ("grpo", {"prompt": ""}, "prompt is empty; expected a text to train on"),
    ("grpo", GOOD, "has rows with text; expected a prompt"),
]


@pytest.mark.parametrize(("method", "row", "said"), OF_A_METHOD)
def test_rows_are_those_of_the_method(tmp_path, tokenizer, method, row, said):
    files = written(tmp_path, [row])
    if isinstance(said, RowForm):
        assert look(files, tokenizer, asked=RowsWanted(method)) == said
        return
    with pytest.raises(ValueError, match=f"row 1: {said}"):
        look(files, tokenizer, asked=RowsWanted(method))


def test_a_chat_without_an_answer_is_named_unless_all_of_it_is_trained_on(tmp_path, tokenizer):
    files = written(tmp_path, [{"messages": [USER, ASSISTANT]}, {"messages": [USER]}])
    look(files, tokenizer)
    with pytest.raises(
        ValueError, match=r"row 2: messages has no message of the assist.*--loss all"
    ):
        look(files, tokenizer, asked=RowsWanted(answers=Answers(tokenizer)))


def test_a_template_that_hides_where_answers_end_is_named(tmp_path):
    """As those do that drop the thoughts of earlier answers."""
    hiding = make_tokenizer(
        template="{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }};"
        "{% endif %}{% endfor %}"
    )
    short = [{"messages": [USER, ASSISTANT]}]
    look(written(tmp_path, short), hiding, asked=RowsWanted(answers=Answers(hiding)))
    files = written(tmp_path, [*short, {"messages": [USER, ASSISTANT, USER, ASSISTANT]}])
    with pytest.raises(ValueError, match=r"row 2: messages: the chat template .*--loss all"):
        look(files, hiding, asked=RowsWanted(answers=Answers(hiding)))


# (rows, the row that is named, what is said of it)
WRONG = {
    "null": ([GOOD, {"text": None}], 2, "text is null; expected a text"),
    "a number": ([GOOD, {"text": 5}], 2, "text is the number 5; expected a text"),
    "a truth": ([GOOD, {"text": True}], 2, "text is true; expected a text"),
    "a list": ([GOOD, {"text": ["a"]}], 2, "text is a list; expected a text"),
    "an empty text": ([GOOD, {"text": ""}], 2, "text is empty; expected a text to train on"),
    "an empty completion": ([{"prompt": "a", "completion": ""}], 1, "completion is empty"),
    "another key": ([GOOD, {"txt": "b"}], 2, "has no text, but txt; expected it, as in the rows"),
    "another kind": ([GOOD, PAIR], 2, "has no text, but prompt, completion; expected it"),
    "half of a kind": ([{"prompt": "a"}], 1, "has prompt, and no completion; expected text,"),
    "nothing": ([{}], 1, "has rows with nothing; expected text, prompt and completion"),
    "alpaca without an answer": ([{"instruction": "a", "output": None}], 1, "output is null; exp"),
    "half of alpaca": ([{"instruction": "a"}], 1, "has rows with instruction; expected text, pro"),
    "sharegpt of a text": ([{"conversations": "a"}], 1, "conversations is a text; expected a list"),
    "an unknown speaker": ([{"conversations": [{"from": "bot"}]}], 1, "role 'bot'"),
    "no object": ([GOOD, [1]], 2, "is a list; expected an object with text"),
    "no object at first": (b"5\n", 1, "is the number 5; expected an object"),
    "a list of no objects": ([[1], [2]], 1, "is a list; expected an object"),
    "no JSON": (LINE + b"{'text': 1}\n", 2, "is no JSON (Expecting property name"),
    "a line that was cut": (LINE + b'{"text": "a', 2, "is no JSON (Unterminated string"),
    "too deep": (b'{"text":' + b"[" * 99999 + b"]" * 99999 + b"}", 1, "is nested too deep"),
    "latin-1": (LINE + b'{"text": "\xe9"}', 2, "is no UTF-8 (byte 10: "),
    "half of a pair": ([GOOD, {"text": "\ud800"}], 2, "text has half of a surrogate pair"),
    "half of a pair in a key": ([{**GOOD, "\ud800": 1}], 1, "\\ud800 has half of a surrogate"),
    "messages of a text": ([{"messages": "a"}], 1, "messages is a text; expected a list of mess"),
    "no message": ([{"messages": []}], 1, "messages is an empty list; expected a list of mess"),
    "a text as message": ([{"messages": ["a"]}], 1, "messages, message 1 is a text; expected an"),
    "no role": ([{"messages": [{"content": "a"}]}], 1, "message 1 has no role, but content; exp"),
    "an unknown role": ([{"messages": [{**USER, "role": "usr"}]}], 1, "has the role 'usr'; expec"),
    "no content": ([{"messages": [USER, {"role": "assistant"}]}], 1, "message 2 has no content"),
    "content of parts": ([{"messages": [{**USER, "content": []}]}], 1, "has an empty list as con"),
    "a text beside messages": ([{"prompt": [USER], "completion": "b"}], 1, "completion is a text"),
    "messages after texts": ([PAIR, {"prompt": [USER], "completion": [ASSISTANT]}], 2, "prompt is"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_row_that_cannot_be_is_named_with_its_file_and_number(tmp_path, tokenizer, case):
    given, number, said = WRONG[case]
    files = written(tmp_path, given)
    with pytest.raises(ValueError) as refused:
        look(files, tokenizer)
    text = str(refused.value)
    assert text.startswith(f"--data {files[0]} row {number}: ") and said in text, text
    assert "\n" not in text
    text.encode()  # a terminal can show it


def test_a_chat_that_the_template_refuses_is_named(tmp_path):
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    files = written(tmp_path, [{"messages": [USER]}, {"messages": [ASSISTANT]}])
    with pytest.raises(ValueError, match=r"row 2: messages: .* refuses them .*user first"):
        look(files, make_tokenizer(template=template))


def test_paths_without_rows_are_refused(tmp_path, tokenizer):
    (tmp_path / "empty.jsonl").touch()
    os.mkfifo(tmp_path / "pipe")
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(LINE * 99)[:30])
    with pytest.raises(ValueError, match="has no rows; expected JSONL"):
        look([str(tmp_path / "empty.jsonl")], tokenizer)
    with pytest.raises(ValueError, match=r"cut.gz cannot be read: Compressed file ended"):
        look([str(cut)], tokenizer)
    wrong = {
        "none*": "is no file; expected JSONL",
        "": r"is a folder; expected files in it: '.*/\*.jsonl'",
        "pipe": "is no regular file",
    }  # fmt: skip
    for name, said in wrong.items():
        with pytest.raises(ValueError, match=said):
            files_of(str(tmp_path / name), "--data")


# -- what is given beside rows --


def folder(tmp_path, **settings):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **settings}), encoding="utf-8"
    )
    return tmp_path


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(tmp_path, tokenizer):
    config = TrainConfig(model="m", seq=8)
    tokens = len(tokenizer)
    for rows in (tokens, tokens + 64):
        assert check_fit(config, folder(tmp_path, vocab_size=rows), tokenizer) == (None, [])
    with pytest.raises(
        ValueError, match=f"has {tokens} tokens, and its embedding {tokens - 1} row"
    ):
        check_fit(config, folder(tmp_path, vocab_size=tokens - 1), tokenizer)
    more = make_tokenizer()
    more.add_special_tokens({"pad_token": "<pad>"})
    with pytest.raises(ValueError, match=rf"resize_token_embeddings\({tokens + 1}\)"):
        check_fit(config, folder(tmp_path, vocab_size=tokens), more)


def test_seq_beyond_a_table_of_positions_is_refused_and_beyond_a_rotary_one_told(
    tmp_path, tokenizer
):
    config = TrainConfig(model="m", seq=65)
    table = folder(tmp_path, model_type="gpt2", n_positions=64, vocab_size=512)
    with pytest.raises(ValueError, match=r"--seq 65 is more than the 64 positions .* --seq 64 or"):
        check_fit(config, table, tokenizer)
    assert check_fit(TrainConfig(model="m", seq=64), table, tokenizer) == (64, [])
    rotary = folder(tmp_path, max_position_embeddings=64, vocab_size=512)
    most, said = check_fit(config, rotary, tokenizer)
    assert most is None and "more than the 64 positions of the model: its rotary" in said[0]


def test_what_is_no_input_is_refused_before_any_work(tmp_path):
    pytest.importorskip("transformers")
    rows = tmp_path / "a.jsonl"
    rows.write_bytes(LINE)
    model = tmp_path / "m"
    model.mkdir()
    folder(model)
    good = {"model": str(model), "data": str(rows), "out": str(tmp_path / "out")}
    check_inputs(TrainConfig(**good))
    (tmp_path / "bare").mkdir()
    wrong = [
        ({"model": str(rows)}, r"--model .*a.jsonl is a file; expected a folder"),
        ({"model": str(tmp_path / "bare")}, "has no config.json"),
        ({"model": str(tmp_path / "none")}, "there is no folder"),
        ({"model": "./none"}, "there is no folder ./none"),
        ({"data": "none.jsonl"}, "--data none.jsonl is no file"),
        ({"eval_data": "none.jsonl"}, "--eval-data none.jsonl is no file"),
        ({"out": str(rows)}, r"--out .*a.jsonl is a file; expected a folder"),
        ({"out": str(rows / "x")}, r"--out .*a.jsonl is a file; expected a folder"),
        ({"nvme": str(tmp_path / "none")}, "nvme folder .* does not exist"),
        ({"optim": "adamw8bit"}, "--optim adamw8bit; did you mean adamw_8bit\\? expected"),
        ({"report_to": "nope"}, "--report-to nope: nope is not supported"),
    ]
    for changed, said in wrong:
        with pytest.raises(ValueError, match=said):
            check_inputs(TrainConfig(**{**good, **changed}))
    assert not Path(good["out"]).exists()
