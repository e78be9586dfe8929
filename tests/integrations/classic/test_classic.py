"""The functional and older names train as GeminiDDP does, and refuse what they cannot do."""

import copy
import json
import logging

import pytest
import torch
from torch import nn

import gemini
from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import same
from gemini import GeminiDDP
from gemini.integrations.classic import (
    GRADIENT_HANDLER,
    BaseGradientHandler,
    ChunkManager,
    ColoInitContext,
    FusedSGD,
    GeminiManager,
    LazyInitContext,
    LowLevelZeroOptimizer,
    ShardedModelV2,
    ShardedOptimizerV2,
    TensorShardStrategy,
    ZeroDDP,
    ZeroInitContext,
    col_model_deepcopy,
    init_chunk_manager,
    zero_model_wrapper,
    zero_optim_wrapper,
)
from gemini.integrations.classic import wrappers as classic
from optim import HybridAdam, LossScale

ADAM = {"lr": 0.05, "eps": 0.1, "weight_decay": 0.0}
IDS = token_batches(1, 1)[0][0]


class Normed(nn.Module):
    """With a norm that stays in fp32, and so chunks of two dtypes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def trained(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.backward(token_loss(model, IDS))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def expected(precision="fp16", placement="cpu", **options):
    model = GeminiDDP(Tower(), placement_policy=placement, precision=precision, **options)
    return trained(model, HybridAdam(model.parameters(), **ADAM))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_wrappers_train_as_gemini_ddp_and_keep_the_optimizer(stage):
    module = Tower()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAM)
    config = {"placement_policy": "cpu"} if stage == 3 else None
    model = zero_model_wrapper(module, zero_stage=stage, gemini_config=config)
    wrapped = zero_optim_wrapper(model, optimizer, initial_scale=2**5)
    assert wrapped is optimizer
    assert model.engine.control_vector.read().scale == 2**5
    assert same(trained(model, wrapped), expected(loss_scale=LossScale(2.0**5)))


def test_the_wrapper_clips_in_every_step_by_the_norm_that_was_asked_for():
    norms = {}
    for norm_type in (1.0, 2.0):
        model = zero_model_wrapper(Tower(), zero_stage=2)
        optimizer = HybridAdam(model.parameters(), **ADAM)
        zero_optim_wrapper(model, optimizer, max_norm=0.5, norm_type=norm_type)
        optimizer.backward(token_loss(model, IDS))
        total = torch.stack([p.grad.abs().sum() for p in model.parameters()]).sum()
        optimizer.step()
        norms[norm_type] = optimizer.last_report.grad_norm
        if norm_type == 1.0:
            # fp16 gradients, added in another order
            assert norms[norm_type] == pytest.approx(float(total), rel=1e-5)
    assert norms[1.0] > norms[2.0]


def test_a_module_of_the_init_context_has_no_memory_until_it_is_wrapped():
    with ColoInitContext(device="cpu"):
        module = Normed()
    assert all(param.is_meta for param in module.parameters())
    optimizer = HybridAdam(module.parameters(), **ADAM)
    model = classic.GeminiDDP(
        module, placement_policy="cpu", pin_memory=True, search_range_mb=32, loss_scale=32.0
    )
    before = model.state_dict()["first.weight"].clone()
    optimizer.backward(model(torch.ones(4, 5) + torch.randn(4, 5)).square().mean())
    optimizer.step()
    assert not torch.equal(model.state_dict()["first.weight"], before)


def test_the_oldest_context_counts_elements_and_says_what_it_need_not_know(caplog, monkeypatch):
    from gemini.integrations import parts

    monkeypatch.setattr(parts, "said_already", set())
    counted = torch.ones(1, dtype=torch.long)
    given = {"seed": 3, "shard_param": True, "bf16": True, "default_dtype": torch.float}
    with (
        caplog.at_level(logging.WARNING),
        ZeroInitContext("cpu", TensorShardStrategy(), model_numel_tensor=counted, **given),
    ):
        module = Normed()
        module.again = module.first  # tied: counted once
    assert int(counted) == 1 + sum(param.numel() for param in module.parameters())
    assert all(param.is_meta for param in module.parameters())
    for name in ("target_device", "seed", "shard_param", "bf16"):
        assert f"{name} of ZeroInitContext (" in caplog.text
    with pytest.raises(ValueError, match="shard_strategy is a str; expected a TensorShardStrategy"):
        ZeroInitContext("cpu", "tensor").__enter__()
    with pytest.raises(ValueError, match=r"default_dtype=torch.float16; expected None or torch"):
        ZeroInitContext("cpu", default_dtype=torch.half).__enter__()
    assert not nn.Linear(2, 2).weight.is_meta
    wrapped = ShardedModelV2(module, TensorShardStrategy())
    assert int(counted) - 1 == sum(spec.numel for spec in wrapped.engine.layout.params)


def test_what_is_made_lazily_has_values_when_it_is_asked(capsys):
    with LazyInitContext(default_device="cpu"):
        module = Normed()
        module.again = module.first
    assert LazyInitContext.materialize(module, verbose=True) is module
    numel = sum(param.numel() for param in module.parameters())
    assert capsys.readouterr().out.startswith(f"{numel:,} elements of ")
    assert not any(param.is_meta for param in module.parameters())
    assert module.again.weight is module.first.weight
    assert float(module.first.weight.detach().std()) > 0
    module(torch.randn(4, 5)).square().mean().backward()

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with LazyInitContext():
        bare = Bare()
    with pytest.raises(ValueError, match=r"scale of the root module \(Bare\) is on the meta"):
        LazyInitContext.materialize(bare)


def test_fused_sgd_is_sgd():
    torch.manual_seed(0)
    modules = [Normed(), Normed()]
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    optimizers = [
        FusedSGD(modules[0].parameters(), **options),
        torch.optim.SGD(modules[1].parameters(), **options),
    ]
    x = torch.randn(4, 5)
    for module, optimizer in zip(modules, optimizers, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    for one, other in zip(*(m.parameters() for m in modules), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="wd_after_momentum=True; expected False"):
        FusedSGD(modules[0].parameters(), 0.1, wd_after_momentum=True)


def test_chunks_that_were_searched_before_are_those_of_the_module():
    module = Normed()
    manager = init_chunk_manager(module, "cpu", 5, search_range_mb=0, min_chunk_size_mb=40 / 2**20)
    model = ZeroDDP(module, GeminiManager("cpu", manager))
    assert model.chunk_configuration is manager.chunks
    searched = GeminiDDP(Normed(), placement_policy="cpu", precision="fp16")
    assert len(model.engine.chunks) > len(searched.engine.chunks)
    with pytest.raises(ValueError, match="searched for another model"):
        GeminiDDP(Tower(), chunks=manager.chunks)
    bf16 = gemini.search_chunk_configuration(Tower())
    with pytest.raises(ValueError, match="with the dtype in which the module computes"):
        GeminiDDP(Tower(), precision="fp32", chunks=bf16)
    size = ChunkManager.search_chunk_size(Tower(), 64 * 1024**2, 32)
    assert size >= max(param.numel() for param in Tower().parameters())


def test_the_default_device_of_a_policy():
    assert GeminiManager.get_default_device("cpu") == torch.device("cpu")


def test_low_level_zero_optimizer_is_over_a_wrapped_module():
    model = zero_model_wrapper(Tower(), zero_stage=2)
    optimizer = HybridAdam(model.parameters(), **ADAM)
    assert LowLevelZeroOptimizer(optimizer, initial_scale=2**5, module=model) is optimizer
    assert model.engine.control_vector.read().scale == 2**5
    with pytest.raises(ValueError, match="zero_stage=1"):
        LowLevelZeroOptimizer(optimizer)


def test_every_option_of_low_level_zero_means_something(caplog, capsys, monkeypatch):
    from gemini.integrations import parts

    monkeypatch.setattr(parts, "said_already", set())
    model = zero_model_wrapper(Tower(), zero_stage=2, verbose=True)
    assert "searching chunk configuration is completed" in capsys.readouterr().out
    optimizer = HybridAdam(model.parameters(), lr=0.1)
    LowLevelZeroOptimizer(
        optimizer, initial_scale=2**24, clip_grad_norm=0.5, verbose=True,
        overlap_communication=True, module=model,
    )  # fmt: skip
    said = "change nothing here: overlap_communication ("
    assert [r for r in caplog.records if said in r.message]
    assert model.engine.precision_settings.max_norm == 0.5
    optimizer.backward(token_loss(model, IDS))
    optimizer.step()
    assert "step skipped: the gradient of" in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_static_copy_is_plain_and_the_wrapper_trains_on(precision):
    module = Normed()
    calls = []
    module.first.register_forward_hook(lambda *_: calls.append(1))
    model = classic.GeminiDDP(module, precision=precision)
    optimizer = HybridAdam(model.parameters(), lr=0.05)

    def step():
        optimizer.backward(model(torch.ones(3, 5)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    want = dict(model.state_dict())
    for everywhere in (False, True):
        plain = classic.get_static_torch_model(model, only_rank_0=not everywhere)
        assert type(plain) is Normed and {type(p) for p in plain.parameters()} == {nn.Parameter}
        assert same(dict(plain.state_dict()), want)
        before = len(calls)
        plain(torch.ones(3, 5)).sum().backward()
        assert len(calls) == before + 1  # the user's own hook, and none of the engine's
    half = classic.get_static_torch_model(model, dtype=torch.bfloat16)
    assert half.first.weight.dtype == torch.bfloat16
    step()
    assert not same(dict(model.state_dict()), want)
    with pytest.raises(ValueError, match="expected a GeminiDDP"):
        classic.get_static_torch_model(plain)


def test_sharded_model_v2_trains_dumps_and_is_copied(tmp_path):
    model = ShardedModelV2(Tower(), None, offload_config={"device": "cpu"})
    assert isinstance(model, ShardedModelV2)
    optimizer = torch.optim.AdamW(model.module.parameters(), **ADAM)
    assert ShardedOptimizerV2(model, optimizer, initial_scale=2**16) is optimizer
    assert same(trained(model, optimizer), expected())
    model.dump_memory_stats(tmp_path / "stats.log")
    assert json.loads((tmp_path / "stats.log").read_text(encoding="utf-8"))["traces"]
    other = Tower(seed=1)
    col_model_deepcopy(model, other)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    with pytest.raises(ValueError, match="expected a module like the one"):
        col_model_deepcopy(model, nn.Linear(3, 3))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gradient_handler_changes_what_the_step_takes(precision):
    """Halved gradients, and with SGD's plain rule half the update."""
    from optim import HybridSGD

    @GRADIENT_HANDLER.register_module
    class Halves(BaseGradientHandler):
        def handle_gradient(self):
            self.map_gradients(lambda name, part: part * 0.5)

    assert GRADIENT_HANDLER.get_module("Halves") is Halves
    with pytest.raises(ValueError, match="register_module"):
        GRADIENT_HANDLER.get_module("Others")
    moved = []
    for handled in (False, True):
        model = classic.GeminiDDP(Tower(), placement_policy="cpu", precision=precision)
        optimizer = HybridSGD(model.parameters(), lr=0.5)
        before = copy.deepcopy(model.state_dict())
        if handled:
            handler = Halves(model, optimizer)
        after = trained(model, optimizer, steps=1)
        moved.append(torch.cat([(after[n] - before[n]).flatten() for n in before]))
    # halving is exact; weights are at most 4, where fp32 has steps of 4.8e-7
    assert torch.allclose(moved[1], moved[0] / 2, rtol=0, atol=5e-7) and moved[0].abs().max() > 1e-3
    handler.remove()
    with pytest.raises(RuntimeError, match="change them first, then clip"):
        token_loss(model, IDS).backward()
        optimizer.clip_grad_norm_(1.0)
        model.map_gradients(lambda name, part: None)
    with pytest.raises(ValueError, match="expected a GeminiDDP"):
        Halves(Tower(), optimizer)
