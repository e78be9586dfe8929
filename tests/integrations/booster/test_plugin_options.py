"""Every option of a plugin maps, is said to do nothing, or is refused with the remedy."""

import dataclasses
import inspect
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import gemini
from bench.shared.models import Tower, token_batches, token_loss
from gemini import AutoPlacement, ConstPlacement, GeminiDDP, StaticPlacement
from gemini.integrations import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    parts,
)
from gemini.integrations.plugins import engine_plugin
from optim import HybridAdam, LossScale
from tests.support import frozen

IDS = token_batches(1, 1)[0][0]


def wrapped(plugin, module=None):
    model, *_ = Booster(plugin=plugin).boost(module or Tower())
    return model


def test_options_of_gemini_reach_the_engine():
    found = gemini.search_chunk_configuration(Tower(), 0, None, 3000 / 2**20, dtype="float32")
    model = wrapped(
        GeminiPlugin(
            chunk_config_dict=found, precision="fp32", max_prefetch=2, max_norm=0.5, norm_type=1.0,
            shard_param_frac=0.5, offload_optim_frac=0.25, offload_param_frac=0.0,
        )
    )  # fmt: skip
    assert model.chunk_configuration is found
    assert model.engine.precision_settings.clip.max_norm == 0.5
    assert model.engine.precision_settings.clip.norm_type == 1.0
    assert model.engine.planning.inputs.max_prefetch == 2
    chunked = wrapped(GeminiPlugin(min_chunk_size_m=3000 / 2**20, search_range_m=0, hidden_dim=33))
    assert max(chunked.chunk_configuration.capacities.values()) == 3000
    scaled = wrapped(GeminiPlugin(initial_scale=2**5, hysteresis=3))
    assert scaled.engine.control_vector.options == LossScale(2.0**5, hysteresis=3)
    outputs = wrapped(GeminiPlugin(precision="bf16", force_outputs_fp32=True))(IDS)
    assert outputs.dtype == torch.float32
    rounded = wrapped(GeminiPlugin(precision="bf16", master_weights=False))
    assert not rounded.engine.precision_settings.master_weights
    traced = gemini.trace(Tower(), (IDS,), precision="fp32")
    assert wrapped(GeminiPlugin(memstats=traced, placement_policy="auto")).engine.planning.has_trace


@pytest.mark.parametrize(
    ("options", "placement"),
    [
        ({}, StaticPlacement()),
        ({"shard_param_frac": 0.0, "offload_optim_frac": 1.0}, StaticPlacement(0.0, 1.0, 0.0)),
        ({"placement_policy": "cuda"}, StaticPlacement(1.0, 0.0, 0.0)),
        ({"placement_policy": "cpu"}, StaticPlacement(1.0, 1.0, 1.0)),
        (
            {"placement_policy": "auto", "warmup_non_model_data_ratio": 0.5,
             "steady_cuda_cap_ratio": 0.7, "gpu_margin_mem_ratio": 0.5},
            AutoPlacement(warmup_non_model_data_ratio=0.5, steady_cap_ratio=0.7),
        ),
        ({"placement_policy": ConstPlacement("1GiB")}, ConstPlacement("1GiB")),
    ],
)  # fmt: skip
def test_policies_are_those_of_the_engine(options, placement):
    assert GeminiPlugin(**options).placement() == placement


@pytest.mark.parametrize(("call", "said"), frozen.refusals(), ids=lambda text: text[:60])
def test_an_option_without_a_meaning_here_is_refused_by_name(call, said):
    assert frozen.said_of(call) == said


def test_an_option_that_changes_nothing_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(parts, "said_already", set())
    for _ in range(2):
        GeminiPlugin(pin_memory=True)
    said = [r for r in caplog.records if "change nothing here" in r.message]
    assert [r.levelno for r in said] == [logging.WARNING]


def test_all_options_that_change_nothing_are_in_one_line_of_rank_0(caplog, monkeypatch):
    given = {
        "pin_memory": True, "strict_ddp_mode": True, "enable_gradient_accumulation": True,
        "chunk_init_device": torch.device("cpu"), "enable_async_reduce": False,
        "gpu_margin_mem_ratio": 0.1, "placement_policy": "auto",
        "enable_flash_attention": True, "enable_jit_fused": True,
    }  # fmt: skip
    for rank, lines in ((1, 0), (0, 1)):
        caplog.clear()
        monkeypatch.setattr(parts, "said_already", set())
        monkeypatch.setattr(parts, "rank", lambda rank=rank: rank)
        GeminiPlugin(**given)
        said = [r.message for r in caplog.records if "change nothing here" in r.message]
        assert len(said) == lines
    assert all(name in said[0] for name in given if name != "placement_policy")


@pytest.mark.parametrize("name", ["enable_fused_normalization", "enable_all_optimization"])
@pytest.mark.parametrize(
    "make", [GeminiPlugin, lambda **given: HybridParallelPlugin(tp_size=1, pp_size=1, **given)]
)
def test_fused_norms_are_those_of_the_model_by_the_names_it_had(make, name):
    module = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8))
    model = wrapped(make(precision="fp32", **{name: True}), module)
    x = torch.linspace(-1, 1, 6).view(2, 3)
    with torch.no_grad():
        assert torch.allclose(model(x), nn.LayerNorm(8)(module[0](x)), atol=1e-5)
    assert isinstance(module[1], nn.LayerNorm) and type(module[1]) is not nn.LayerNorm
    assert "1.weight" in model.state_dict()
    other = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8))
    wrapped(make(precision="fp32"), other)
    assert type(other[1]) is nn.LayerNorm


@pytest.mark.parametrize("plugin", [GeminiPlugin, LowLevelZeroPlugin, HybridParallelPlugin])
def test_every_option_is_read_by_its_table_the_engine_or_the_plugin(plugin):
    """One that none of them reads would be swallowed."""
    source = inspect.getsource(inspect.getmodule(plugin)) + inspect.getsource(engine_plugin)
    taken = inspect.signature(GeminiDDP).parameters.keys()
    for field in dataclasses.fields(plugin):
        is_read = f"self.{field.name}" in source or f'"{field.name}"' in source
        assert field.metadata or field.name in taken or is_read, field.name


def test_the_docstring_of_a_plugin_says_what_its_table_refuses():
    text = HybridParallelPlugin.__doc__
    only = "sequence_parallelism_mode, enable_sequence_overlap: it is for enable_sequence_paral"
    assert f"    {only}lelism=True.\n" in text
    assert "    enable_sequence_overlap: changes nothing: a ring passes keys on while" in text
    assert "    fp8_communication: not there yet.\n" in TorchDDPPlugin.__doc__
    assert "max_scale: a loss scale is for precision='fp16', and not for others." in text
    assert "    overlap_p2p: changes nothing: torch's schedules wait for a message" in text


def test_low_level_zero_is_stages_with_whole_parameters():
    for stage in (1, 2):
        plugin = LowLevelZeroPlugin(stage=stage, cpu_offload=True, precision="bf16", max_norm=1.0)
        model = wrapped(plugin)
        assert (
            model.engine.sharding.all_gathered and model.engine.precision_settings.max_norm == 1.0
        )
        assert model.engine.planning.policy == StaticPlacement.zero(stage, cpu_offload=True)
    bucket = wrapped(LowLevelZeroPlugin(precision="bf16", reduce_bucket_size_in_m=3000 / 2**20))
    assert set(bucket.chunk_configuration.capacities.values()) == {3000}
    targets = []

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x, target):
            targets.append(target.dtype)
            return self.layer(x.to(self.layer.weight.dtype))

    for cast in (True, False):
        model = wrapped(LowLevelZeroPlugin(precision="bf16", cast_inputs=cast), Keeps())
        model(torch.ones(2, 3), torch.ones(2))
    assert targets == [torch.bfloat16, torch.float32]


def test_verbose_prints_the_search_and_what_is_skipped(capsys):
    model = Tower()
    optimizer = HybridAdam(model.parameters(), lr=0.1)
    plugin = GeminiPlugin(verbose=True, initial_scale=2**32)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.backward(token_loss(model, IDS), optimizer)
    optimizer.step()
    printed = capsys.readouterr().out
    assert "searching chunk configuration is completed" in printed
    assert "step skipped: the gradient of" in printed


def test_loaders_give_ranks_their_part_and_workers_their_seed():
    data = TensorDataset(torch.arange(11))
    loader = GeminiPlugin().prepare_dataloader(data, batch_size=3, shuffle=True, drop_last=True)
    batches = [batch for (batch,) in loader]
    assert [len(batch) for batch in batches] == [3, 3, 3]
    seen = [sorted(torch.cat([b for (b,) in plugin_loader(data, seed)])) for seed in (1, 2)]
    assert seen[0] == seen[1] == list(range(11))
    assert isinstance(TorchFSDPPlugin().prepare_train_dataloader(data), DataLoader)

    class Endless(IterableDataset):
        def __iter__(self):
            yield torch.ones(1)

    with pytest.raises(ValueError, match="Split it by rank yourself"):
        GeminiPlugin().prepare_dataloader(Endless())
    with pytest.raises(ValueError, match="distributed_sampler_cls="):
        GeminiPlugin().prepare_dataloader(data, sampler=range(3))
    drawn = torch.rand(1)
    begun = []
    plugin_loader(data, 5, worker_init_fn=begun.append).worker_init_fn(0)
    first = torch.rand(1)
    plugin_loader(data, 5).worker_init_fn(1)
    assert not torch.equal(torch.rand(1), first) and drawn.numel() == 1 and begun == [0]
    plugin_loader(data, 4).worker_init_fn(1)
    assert torch.equal(torch.rand(1), first)


def plugin_loader(data, seed, **options):
    return GeminiPlugin().prepare_dataloader(data, batch_size=4, shuffle=True, seed=seed, **options)


def test_boost_says_what_is_wrong_with_its_arguments():
    module, booster = Tower(), Booster(plugin=GeminiPlugin())
    optimizer = HybridAdam(module.parameters())
    loader, criterion = DataLoader(TensorDataset(IDS)), nn.CrossEntropyLoss()
    with pytest.raises(TypeError, match="criterion is a DataLoader; write dataloader="):
        booster.boost(module, optimizer, loader, criterion)
    with pytest.raises(TypeError, match="write criterion= or lr_scheduler="):
        booster.boost(module, optimizer, None, criterion)
    with pytest.raises(TypeError, match="expected a function"):
        booster.boost(module, optimizer, 3)
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer"):
        booster.boost(module, criterion)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module"):
        booster.boost(optimizer, module)
    schedule = torch.optim.lr_scheduler.StepLR(HybridAdam(Tower().parameters()), 1)
    with pytest.raises(ValueError, match="drives another optimizer"):
        booster.boost(module, optimizer, lr_scheduler=schedule)
    with pytest.raises(ValueError, match="not the module's"):
        booster.boost(module, HybridAdam(Tower().parameters()))
    with pytest.raises(ValueError, match="Adagrad has state of the plain module"):
        booster.boost(module, torch.optim.Adagrad(module.parameters()))
    assert not isinstance(module, GeminiDDP) and type(next(module.parameters())) is nn.Parameter
    stepped = HybridAdam(module.parameters())
    token_loss(module, IDS).backward()
    stepped.step()
    with pytest.raises(ValueError, match="boost first, then load its state"):
        booster.boost(module, stepped)
    with pytest.raises(ValueError, match=r"execute_pipeline\(\) of a Tower; expected a model that"):
        booster.execute_pipeline(iter([]), module, criterion)
    with pytest.raises(ValueError, match="expected the boosted model"):
        booster.no_sync()
    with pytest.raises(ValueError, match="was not boosted by this Booster"):
        booster.save_optimizer(optimizer, "nowhere")


def test_a_module_is_boosted_once():
    for plugin in (GeminiPlugin(precision="fp32"), TorchDDPPlugin()):
        booster = Booster(plugin=plugin)
        model, *_ = booster.boost(Tower())
        if plugin == TorchDDPPlugin():
            model = nn.DataParallel(model)
        with pytest.raises(ValueError, match="already"):
            booster.boost(model)


def test_fsdp_asks_for_a_group_and_an_optimizer_of_torchs():
    module, booster = Tower(), Booster(plugin=TorchFSDPPlugin())
    with pytest.raises(ValueError, match="or GeminiPlugin, which shards for this one"):
        booster.boost(module, HybridAdam(module.parameters()))
    with pytest.raises(ValueError, match="launch_from_torch"):
        booster.boost(module, torch.optim.AdamW(module.parameters()))
