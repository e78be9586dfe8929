"""Timers, printing, loaders and loggers of old scripts."""

import itertools
import logging

import torch
from torch.utils.data import TensorDataset

from gemini.integrations.classic import (
    MultiTimer,
    disable_existing_loggers,
    get_dataloader,
    print_rank_0,
    tools,
)
from gemini.integrations.launch import get_dist_logger


def test_a_timer_has_a_name_and_a_history(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(tools.time, "perf_counter", lambda: float(next(ticks)))
    timer = MultiTimer()
    for keeps in (True, True, False):
        timer.start("step")
        assert timer.stop("step", keep_in_history=keeps) == 1.0
    step = timer.get_timer("step")
    assert (step.get_elapsed_time(), step.get_history_sum(), step.get_history_mean()) == (1, 2, 1)
    assert [name for name, _ in timer] == ["step"]
    timer.reset()
    assert step.get_history_mean() == step.get_elapsed_time() == 0
    timer.set_status(False)
    timer.start("other")
    assert timer.stop("other") == 0 and not timer.is_on()


def test_the_first_rank_prints_and_loaders_have_their_part(capsys, monkeypatch):
    print_rank_0("said")
    print_rank_0("too", get_dist_logger())
    assert capsys.readouterr() == ("said\n", "[rank 0] too\n")
    monkeypatch.setattr(tools, "rank", lambda: 1)
    print_rank_0("not said")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("gemini.integrations.parts.world_size", lambda: 2)
    data = TensorDataset(torch.arange(8))
    seen = [
        [int(i) for (batch,) in get_dataloader(data, batch_size=2, add_sampler=adds) for i in batch]
        for adds in (True, False)
    ]
    assert seen == [[0, 2, 4, 6], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_loggers_of_others_say_warnings_alone():
    theirs, ours = (logging.getLogger(name) for name in ("stranger.x", "gemini.y"))
    disable_existing_loggers()
    assert theirs.level == logging.WARNING and ours.level == logging.NOTSET
    disable_existing_loggers(include=["gemini.y"])
    assert ours.level == logging.WARNING
    ours.setLevel(logging.NOTSET)
