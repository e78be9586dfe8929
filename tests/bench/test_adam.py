"""What bench.adam gives to torch's fused step, and where ranks of a row of bench.train run."""

import os

import pytest
import torch

from bench import adam
from bench.rows import ranks
from bench.rows.job import Job

META = torch.device("meta")


@pytest.mark.parametrize(("kind", "where"), [({"fused": True}, "meta"), ({"foreach": True}, "cpu")])
def test_the_fused_step_finds_its_count_where_it_runs(kind, where, monkeypatch):
    """It reads the count on the device: a CPU tensor's address is an illegal access there."""
    made = {}

    class Stock:
        def __init__(self, params, **options):
            self.state = made

    monkeypatch.setattr(torch.optim, "AdamW", Stock)
    adam.stock_optimizer(adam.Tensors(8, META), **kind)
    (state,) = made.values()
    assert state["step"].device.type == where


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_of_a_row_takes_a_device_of_its_own(rank, monkeypatch, tmp_path):
    """Before its group is made; else all of them take the first. The group is told which."""
    did = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: did.append(("device", device)))
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, device_id, **_: did.append((backend, device_id)),
    )
    monkeypatch.setattr(os, "environ", {})
    ranks.join_group(Job("ours", "gpt2", "", str(tmp_path), device="cuda", rank=rank, world_size=3))
    own = torch.device("cuda", rank % 2)
    assert did == [("device", own), ("nccl", own)]
