"""Ranks that would cross in torch's own collectives: an error of ours, before anything is sent."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.shared.models import seeded
from bench.shared.workers import run_ranks
from gemini.comm.collective_log import SequenceError
from gemini.comm.communicator import Communicator
from gemini.integrations.classic.moe import Experts
from gemini.integrations.plugins.fsdp import TorchFSDPPlugin
from gemini.parallel.experts import share_experts
from gemini.parallel.plans import TensorParallel, split, split_layer
from gemini.runtime.pipeline.ties import Ties


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)


class Wide(nn.Module):
    """Whose layers, and buffers, another rank registers in another order."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(*((4, 6) if name == "up" else (6, 4))))
        for name in names:
            self.register_buffer(f"{name}_mean", torch.zeros(4 if name == "up" else 6))


def names_of(rank):
    return ("up", "down") if rank == 0 else ("down", "up")


# Each makes a rank's model, and returns what is collective


def experts(rank):
    made = Experts(Expert, 2)
    if rank:
        made.stacked = made.stacked[::-1]
    return lambda: share_experts(nn.Sequential(made), None, of_two())


def layers(rank):
    plan = dict.fromkeys(names_of(rank), "colwise")
    model = Wide(names_of(0))
    return lambda: split(model, None, of_two(), TensorParallel(plan))


def probed(rank):
    model = Wide(names_of(rank))
    return lambda: split(model, None, of_two(), TensorParallel({"up": "colwise"}))


def dropout(rank):
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1 * rank))
    return lambda: split(model, None, of_two(), TensorParallel({"0": "colwise"}))


def one_layer(rank):
    layer = nn.Linear(4, 6, bias=rank == 0)
    return lambda: split_layer(layer, "colwise", of_two())


def fsdp(rank):
    model, plugin = Wide(names_of(rank)), TorchFSDPPlugin(sync_module_states=True)
    return lambda: plugin.wrap(model, None, None, torch.device("cpu"))


def ties(rank):
    weight = nn.Parameter(torch.zeros(4 + rank))
    return lambda: Ties(dist.group.WORLD, rank).add([weight], names_of(rank), [0, 1])


def other_things(rank):
    return (layers if rank else experts)(0)


def of_two():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def crossed(rank, work):
    with seeded():
        calls = work(rank)
    try:
        calls()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


SAID = {
    one_layer: ("sends bias [6]", "sends nothing more"),
    experts: (
        "sends 0.up__weight [2, 6, 4] torch.float32",
        "sends 0.down__bias [2, 4] torch.float32",
    ),
    layers: (
        "sends up.weight, ColwiseParallel, [6, 4]",
        "sends down.weight, ColwiseParallel, [4, 6]",
    ),
    probed: ("sends up_mean [4]", "sends down_mean [6]"),
    dropout: ("sends nothing more", "sends the state of a generator"),
    fsdp: ("sends up.weight", "sends down.weight"),
    ties: ("sends up", "sends down"),
    other_things: ("calls share_experts()", "calls split() of Wide"),
}


@pytest.mark.parametrize("work", SAID)
def test_ranks_that_would_cross_are_told_what_each_sends(work):
    for kind, text in run_ranks(crossed, 2, work):
        assert kind == "SequenceError" and all(words in text for words in SAID[work]), text


def announced(rank):
    comm = Communicator()
    comm.announce("f()", ["a", "b"])
    with pytest.raises(SequenceError) as raised:
        comm.announce("f()", ["a", "b"][: 2 - rank])
    return str(raised.value)


def test_one_that_would_send_less_is_told_so_too():
    for text in run_ranks(announced, 2):
        assert "rank 0 sends b, and rank 1 sends nothing more. All ranks must be given" in text
