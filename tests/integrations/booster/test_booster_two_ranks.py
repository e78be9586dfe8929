"""What a Booster does between ranks, beside training: data, copies, and errors on all."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bench.shared.models import Tower, seeded
from bench.shared.workers import run_ranks
from gemini.checkpoint import CheckpointError
from gemini.integrations import Booster, GeminiPlugin, LowLevelZeroPlugin, TorchFSDPPlugin
from gemini.integrations.classic import ShardedModelV2, col_model_deepcopy
from optim import HybridAdam
from tests.support.said import said


def work(rank, folder):
    """Each check's result, by name; on every rank the same checks in the same order."""
    return {check.__name__: check(rank, Path(folder)) for check in CHECKS}


def data(rank, folder):
    dataset = TensorDataset(torch.arange(20))
    loader = GeminiPlugin().prepare_dataloader(dataset, batch_size=5, shuffle=True, seed=3)
    return [int(i) for (batch,) in loader for i in batch]


def worker_seeds(rank, folder):
    """What the two workers of each rank draw first; a rank of these tests may have no children."""
    dataset = TensorDataset(torch.arange(4))
    loader = GeminiPlugin().prepare_dataloader(dataset, num_workers=2, seed=7)
    drawn = []
    for worker in range(2):
        loader.worker_init_fn(worker)
        drawn.append(float(torch.rand(())))
    return drawn


def copies(rank, folder):
    """Every rank has the whole weights, equal to rank 0's state dict."""
    model, other = ShardedModelV2(Tower(), None), Tower(seed=1)
    col_model_deepcopy(model, other)
    return {name: value.clone() for name, value in other.state_dict().items()}


def fsdp_options(rank, folder):
    """Meta parameters that `param_init_fn` makes, and rank 0's values where that is asked for."""
    with seeded(rank):
        module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    booster = Booster(plugin=TorchFSDPPlugin(sync_module_states=True))
    model, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
    synchronised = float(model(torch.ones(1, 6)).sum())
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))

    def ones(inner):
        for param in inner.parameters(recurse=False):
            nn.init.ones_(param)

    made, *_ = Booster(plugin=TorchFSDPPlugin(param_init_fn=ones)).boost(empty)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    refused = said(Booster(plugin=TorchFSDPPlugin()).boost, empty, error=ValueError)
    return synchronised, float(made(torch.ones(1, 6)).sum()), refused


def lora(rank, folder):
    """A save of adapters whose folder is a file fails on every rank, and the next one is whole."""
    import peft

    plugin = LowLevelZeroPlugin(precision="fp32")
    booster = Booster(plugin=plugin)
    config = peft.LoraConfig(target_modules=r".*layers\.\d\.1", r=2)
    module = booster.enable_lora(Tower(), lora_config=config)
    model, *_ = booster.boost(module, HybridAdam(module.parameters()))
    if rank == 0:
        (folder / "a-file").write_bytes(b"")
    refused = said(booster.save_lora_as_pretrained, model, folder / "a-file", error=CheckpointError)
    booster.save_lora_as_pretrained(model, folder / "lora", use_safetensors=True)
    return refused, (folder / "lora/adapter_model.safetensors").exists()


def alone(rank, folder):
    """Rank 0 saves alone: an error on every rank that names the call. Last: the ranks part."""
    module = Tower()
    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32"))
    model, optimizer, *_ = booster.boost(module, HybridAdam(module.parameters()))
    try:
        if rank == 0:
            booster.save_model(model, folder / "alone")
        else:
            booster.save_optimizer(optimizer, folder / "other", shard=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


CHECKS = (data, worker_seeds, copies, fsdp_options, lora, alone)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_ranks(work, 2, str(tmp_path_factory.mktemp("ranks")), processes=True)


pytestmark = pytest.mark.ci


def test_ranks_see_different_data_and_all_of_it(results):
    one, two = (found["data"] for found in results)
    assert sorted(one + two) == list(range(20)) and len(one) == len(two) == 10
    drawn = [value for found in results for value in found["worker_seeds"]]
    assert len(set(drawn)) == len(drawn) == 4


@pytest.mark.unlike
def test_a_copy_is_whole_on_every_rank(results):
    one, two = (found["copies"] for found in results)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) and torch.equal(one[n], v) for n, v in expected())


def test_adapters_that_rank_0_cannot_write_are_an_error_on_every_rank(results):
    pytest.importorskip("peft")
    (one, is_there), (two, is_there_too) = (found["lora"] for found in results)
    assert one == two and "FileExistsError" in one and "a-file" in one
    assert is_there and is_there_too


def expected():
    return Tower().state_dict().items()


def test_fsdp_takes_rank_0s_values_and_makes_those_of_meta_parameters(results):
    (one, made, refused), (two, made_too, _) = (found["fsdp_options"] for found in results)
    assert one == two
    assert made == made_too == 2 * (8 * 7 + 1)
    assert "param_init_fn=" in refused


def test_a_call_of_one_rank_alone_is_an_error_on_all(results):
    for found in results:
        assert "save_model" in found["alone"] and "save_checkpoint" in found["alone"]
