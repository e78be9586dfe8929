"""`python -m gemini plan --search`."""

import pytest

from gemini.train.plan_command import main

pytest.importorskip("transformers")


def said(capsys, *flags):
    assert main(["llama-150m", "--search", "--gpu", "h100", *flags]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_best_layout_is_told_with_why_others_lose_and_what_was_assumed(capsys):
    lines = said(capsys, "--gpus", "16", "--nodes", "2", "--global-batch", "64", "--seq", "256")
    assert lines[0] == "llama-150m on 16 ranks of 8 a node, 64 x 256 tokens a step:"
    assert "s a step" in lines[1] and "on the device" in lines[1]
    speed = float(lines[2].split()[0].replace(",", ""))
    assert speed == pytest.approx(64 * 256 / float(lines[1].split()[0]), rel=0.01)
    assert sum(line.startswith("+") for line in lines) == 5
    assert any(line == "computing: 396 TFLOP/s (0.4 of the data sheet of h100)" for line in lines)
    assert lines[-1].startswith("links: ")


def test_a_batch_of_each_rank_is_one_of_all(capsys):
    lines = said(capsys, "--gpus", "4", "--batch", "2", "--accumulate", "3", "--seq", "128")
    assert lines[0] == "llama-150m on 4 ranks of 4 a node, 24 x 128 tokens a step:"
    again = said(capsys, "--world-size", "4", "--global-batch", "24", "--seq", "128")
    assert again == lines


def test_layers_are_computed_again_if_that_is_asked(capsys):
    lines = said(capsys, "--gpus", "2", "--checkpointing", "--seq", "128")
    assert "recomputed" in lines[1]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--gpus", "6", "--nodes", "4"), "expected a divisor of --gpus"),
        (("--gpus", "2", "--machine", "here"), "expected a card or a report"),
        (("--gpus", "2", "--lora", "8"), "--lora beside --search"),
        (("--gpus", "2", "--optim", "sgd"), "--optim sgd beside --search"),
        (("--gpus", "2", "--device-mem", "100MiB", "--host-mem", "1MiB"), "fits in no layout"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(flags, error, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["llama-150m", "--search", "--gpu", "h100", "--seq", "128", *flags])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err.splitlines()[-1]


def test_flags_of_a_search_are_of_no_other_plan(capsys):
    with pytest.raises(SystemExit):
        main(["llama-150m", "--gpus", "4"])
    assert "--gpus without --search" in capsys.readouterr().err.splitlines()[-1]


def test_a_file_that_names_a_module_imports_none(tmp_path, capsys):
    """As without a search: whoever wrote the file runs no code here."""
    (tmp_path / "run.yaml").write_text("model: json:loads\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "run.yaml"), "--search", "--gpu", "h100"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert "json:loads" in said and "cannot be read" in said
