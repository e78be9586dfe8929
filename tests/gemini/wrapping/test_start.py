"""Three lines when an optimizer is made: what they say, who says them, and how often."""

import logging

import pytest
import torch

from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP
from gemini.integrations.torch_optimizers import convert
from gemini.nvme import default_folder
from gemini.placement.predict import KINDS
from gemini.placement.sizes import Budgets
from gemini.placement.start import Start
from tests.support.loops.sides import SMALL, Net
from tests.support.spilled import LEAST, wrapped


def peak(**kinds):
    return {**dict.fromkeys(KINDS, 0), **kinds, "total": sum(kinds.values())}


START = Start(
    device="cuda:0",
    peaks={
        "device": peak(parameters=1 << 20, state=1 << 19),
        "host": peak(),
        "nvme": peak(state=3 << 20),
    },
    budgets=Budgets.parse("2MiB"),
    folders="/fast",
    written_bytes=3 << 30,
    may_promote=True,
    update_path="triton",
    paths={"device": "resident", "nvme": "stream"},
    when="behind the next forward",
    asked="tail",
    optimizer="HybridAdam in place of torch.optim.AdamW",
    numel=262144,
    decays=(0.01, 0.0),
    precision="bf16 with fp32 masters",
    num_ranks=2,
)


def test_the_lines_are_memory_update_and_optimizer():
    assert START.lines() == (
        "gemini memory of a rank on cuda:0, planned peak: device 1.50 MiB of 2.00 MiB (parameters "
        "1.00 MiB, state 512.00 KiB); nvme 3.00 MiB in /fast (state 3.00 MiB). What is not on the "
        "device may rise, once measured. By rank, a step writes 3.00 GiB to disk, 1000 steps 3.22 "
        "TB: 0.54 % of the 600 TB that a 1 TB consumer SSD is rated for",
        "gemini update by triton: state on device resident, on nvme stream; behind the next "
        'forward (update="tail")',
        "gemini optimizer HybridAdam in place of torch.optim.AdamW: 262,144 parameters in 2 "
        "groups, weight decay 0.01 and 0, bf16 with fp32 masters, 2 ranks",
    )


@pytest.fixture
def bare(monkeypatch):
    """A program without handlers of its own; pytest has one for every logger."""
    monkeypatch.setattr(logging.getLogger("gemini"), "hasHandlers", lambda: False)


def started(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("gemini ")]


def test_a_program_without_handlers_shows_them_once_for_each_engine(bare, capsys):
    model, optimizer = wrapped(LEAST)
    memory, update, made = started(capsys)
    assert "of 130.00 KiB" in memory and "a step writes " in memory
    assert f" in {default_folder()}, where " in memory and " are free" in memory
    assert "stream" in update and "optimizer HybridAdam: " in made and "weight decay 0," in made
    optimizer.close()
    type(optimizer)(model.parameters()).close()
    assert started(capsys) == []
    wrapped()
    assert len(started(capsys)) == 3


def test_what_was_converted_is_named_also_where_it_was_before_the_module_was_wrapped(bare, capsys):
    module = Net()
    optimizer = convert(torch.optim.SGD(module.parameters(), lr=0.1))
    model = GeminiDDP(module, precision="fp32", **SMALL)
    assert started(capsys) == []
    optimizer.bind()
    assert "optimizer HybridSGD in place of torch.optim.SGD: " in started(capsys)[2]
    assert model.engine.target is not None


def test_a_level_above_info_turns_them_off(bare, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("gemini"), "level", logging.WARNING)
    wrapped()
    assert started(capsys) == []


def test_a_program_with_handlers_gets_records_at_info(caplog, capsys):
    wrapped()
    found = [record for record in caplog.records if record.getMessage().startswith("gemini ")]
    assert [record.levelname for record in found] == ["INFO"] * 3 and started(capsys) == []


def test_the_path_of_a_device_is_that_of_its_steps(caplog):
    _ = wrapped(AutoPlacement("90KiB", "250KiB"), device=SimBackend(0, True))
    said = "gemini update by triton: state on nvme stream, on host stream; in step()"
    assert said in caplog.text, caplog.text


@pytest.mark.ci
def test_one_rank_speaks(caplog):
    run_ranks(lambda rank: wrapped()[1].close(), 2)
    assert caplog.text.count("gemini optimizer") == 1 and ", 2 ranks" in caplog.text
