"""Whole parameters: looked at, changed in place, saved, loaded, and made from nothing."""

import copy

import pytest
import torch
from torch import nn

import gemini
from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import flat
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP
from gemini.dtypes import DTYPES
from gemini.runtime.wrap.module_check import ModuleChanged
from gemini.runtime.wrap.precision import DTYPE_OF
from optim import HybridAdam, NvmeConfig
from tests.support.checkpoints import masters_of, train, weights
from tests.support.pairs import pairs
from tests.support.spilled import SMALL

DEVICES = ["cpu", "sim"]


def wrapped(device, precision="bf16", fraction=0.0, folder=None, seed=0):
    backend = SimBackend() if device == "sim" else device
    model = GeminiDDP(Tower(seed), backend, precision=precision, **SMALL)
    optimizer = HybridAdam(
        model.parameters(),
        lr=1e-2,
        nvme_offload_fraction=fraction,
        nvme_offload_dir=folder,
        nvme=NvmeConfig(block_numel=1024),
    )
    return model, optimizer


def whole(model):
    with model.summon_full_params(writeback=False):
        return weights(model)


def ema(model):
    for p in model.parameters():
        p.mul_(0.5)


def through_data(model):
    for p in model.parameters():
        p.data.mul_(0.5)


def given_data(model):
    for p in model.parameters():
        p.data = p.data * 0.5


def foreach(model):
    torch._foreach_mul_(list(model.parameters()), 0.5)


def one_by_one_in_a_view(model):
    for p in model.parameters():
        p.view(-1)[: p.numel()].mul_(0.5)


WRITES = [ema, through_data, given_data, foreach, one_by_one_in_a_view]


@pytest.mark.parametrize(
    ("write", "device", "fraction", "summon"),
    pairs(WRITES, DEVICES, [0.0, 1.0], [True, False]),
)
def test_what_is_written_to_parameters_reaches_shards_and_masters(
    write, device, fraction, summon, tmp_path
):
    """The next step starts from the written values, exactly."""
    model, optimizer = wrapped(device, fraction=fraction, folder=tmp_path)
    train(model, optimizer, token_batches(2, 1))
    want = 0.5 * whole(model)
    with torch.no_grad():
        if summon:
            with model.summon_full_params():
                write(model)
        else:
            write(model)
    assert torch.equal(whole(model), want)
    model.engine.write_back_changes()
    assert torch.equal(masters_of(model, optimizer), want)
    before = optimizer.targets[0].step_counts[0]
    train(model, optimizer, token_batches(1, 1))
    assert optimizer.targets[0].step_counts[0] == before + 1
    assert 0 < (masters_of(model, optimizer) - want).abs().max() < 0.05


@pytest.mark.parametrize("device", DEVICES)
def test_masters_keep_their_bits_where_nothing_was_written(device):
    """An element whose weight was not changed keeps the part that bf16 cannot hold."""
    model, optimizer = wrapped(device)
    train(model, optimizer, token_batches(2, 1))
    before = masters_of(model, optimizer)
    with torch.no_grad():
        model.layers[0][1].weight[0, 0] = 2.0
    model.engine.write_back_changes()
    after = masters_of(model, optimizer)
    assert int((before != after).sum()) == 1 and (after == 2.0).sum() == 1


@pytest.mark.parametrize("device", DEVICES)
def test_without_writeback_changes_are_undone(device):
    model, optimizer = wrapped(device)
    want, masters = whole(model), masters_of(model, optimizer)
    with torch.no_grad(), model.summon_full_params(writeback=False):
        ema(model)
        assert not torch.equal(weights(model), want)
    assert torch.equal(whole(model), want)
    assert torch.equal(masters_of(model, optimizer), masters)


def test_a_forward_may_run_while_parameters_are_summoned():
    model, optimizer = wrapped("sim")
    (batch,) = token_batches(1, 1)
    loss = token_loss(model, batch[0])
    with model.summon_full_params():
        assert torch.equal(token_loss(model, batch[0]), loss)
        with pytest.raises(RuntimeError, match="summoned already"), model.summon_full_params():
            pass
        with pytest.raises(RuntimeError, match="while parameters are summoned"):
            optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("fraction", [0.0, 0.4])
def test_the_state_dict_is_that_of_the_module_in_fp32(device, precision, fraction, tmp_path):
    module = Tower()
    want = {name: value.clone() for name, value in module.state_dict().items()}
    model, optimizer = wrapped(device, precision, fraction, tmp_path)
    got = model.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    train(model, optimizer, token_batches(3, 1))
    plain = Tower(seed=5)
    plain.load_state_dict(model.state_dict())
    if precision == "bf16":
        assert torch.equal(flat(list(plain.parameters())), masters_of(model, optimizer))
    assert torch.equal(flat(list(plain.to(DTYPES[DTYPE_OF[precision]]).parameters())), whole(model))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("when", ["before the optimizer", "after it", "after a step"])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_loaded_weights_are_masters_whenever_they_are_loaded(device, when, fraction, tmp_path):
    other = Tower(seed=7)
    backend = SimBackend() if device == "sim" else device
    model = GeminiDDP(Tower(), backend, **SMALL)
    options = {"nvme_offload_fraction": fraction, "nvme_offload_dir": tmp_path}
    if when == "before the optimizer":
        model.load_state_dict(other.state_dict())
    optimizer = HybridAdam(model.parameters(), **options, nvme=NvmeConfig(block_numel=1024))
    if when == "after a step":
        train(model, optimizer, token_batches(1, 1))
    if when != "before the optimizer":
        model.load_state_dict(other.state_dict())
    want = flat(list(other.parameters()))
    assert torch.equal(masters_of(model, optimizer), want)
    assert torch.equal(whole(model), flat(list(copy.deepcopy(other).bfloat16().parameters())))
    got = model.state_dict()
    assert all(torch.equal(got[name], value) for name, value in other.state_dict().items())


def test_buffers_travel_in_the_state_dict_and_hidden_ones_do_not():
    class WithBuffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(5)
            self.register_buffer("hidden", torch.ones(2), persistent=False)

        def forward(self, x):
            return self.norm(x)

    plain, model = WithBuffers(), GeminiDDP(WithBuffers(), precision="fp32")
    model(torch.randn(8, 5))
    got = model.state_dict()
    assert got.keys() == plain.state_dict().keys()
    plain.load_state_dict(got)
    assert torch.equal(plain.norm.running_mean, model.norm.running_mean)
    fresh = GeminiDDP(WithBuffers())
    fresh.load_state_dict(got)
    assert torch.equal(plain.norm.running_var, fresh.norm.running_var)


def test_a_state_dict_that_does_not_fit_changes_nothing():
    model, _ = wrapped("cpu")
    before = whole(model)
    state = Tower(3).state_dict()
    missing = {k: v for k, v in state.items() if "layers.1" not in k} | {"stranger": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"missing .*layers\.1\.0\.bias.* unexpected .*stranger"):
        model.load_state_dict(missing)
    wrong = state | {"layers.0.1.bias": torch.ones(3)}
    with pytest.raises(ValueError, match=r"layers\.0\.1\.bias: \(3,\) was given, \(77,\)"):
        model.load_state_dict(wrong)
    assert torch.equal(whole(model), before)
    keys = model.load_state_dict(missing, strict=False)
    assert keys.unexpected_keys == ["stranger"] and len(keys.missing_keys) == 6
    assert not torch.equal(whole(model), before)


# -- modules that have no memory yet ---------------------------------------------------------


def test_an_empty_module_is_made_as_if_it_had_been_full():
    """One seed, one value: torch's own initialisation, module by module."""

    def values(empty, seed):
        torch.manual_seed(seed)
        if empty:
            with gemini.init_empty():
                module = nn.Sequential(nn.Embedding(33, 16), nn.Linear(16, 40), nn.LayerNorm(40))
            assert all(p.is_meta for p in module.parameters())
        else:
            module = nn.Sequential(nn.Embedding(33, 16), nn.Linear(16, 40), nn.LayerNorm(40))
        params = list(module.parameters())
        model = GeminiDDP(module, precision="fp32", min_chunk_size_m=0.0005)
        assert all(a is b for a, b in zip(params, module.parameters(), strict=True))
        optimizer = HybridAdam(model.parameters())
        model(torch.arange(33)).pow(2).mean().backward()
        optimizer.step()
        return weights(model)

    want = values(False, 3)
    assert torch.equal(values(True, 3), want)
    assert not torch.equal(values(True, 4), want)


@pytest.mark.parametrize("inside", [False, True])
def test_the_models_own_initialisation_counts(inside):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=64, n_layer=3, n_head=2, vocab_size=300, n_positions=40)
    with gemini.init_empty():
        module = GPT2LMHeadModel(config)
    outer = nn.Sequential(module) if inside else module
    model = GeminiDDP(outer, precision="fp32", min_chunk_size_m=0.02)
    assert module.lm_head.weight is module.transformer.wte.weight
    assert 0.018 < module.transformer.wte.weight.std() < 0.022
    scaled = 0.02 / (2 * config.n_layer) ** 0.5
    assert 0.9 * scaled < module.transformer.h[1].mlp.c_proj.weight.std() < 1.1 * scaled
    assert torch.isfinite(model(torch.arange(20)[None]).logits).all()


def test_what_cannot_initialise_itself_needs_a_function_or_values():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    with gemini.init_empty():
        module = Odd()
    with pytest.raises(ValueError, match=r"scale of the root module .* no reset_parameters"):
        GeminiDDP(module)
    with pytest.raises(ValueError, match="state dict has no values for scale"):
        GeminiDDP(module, init_state_dict={"linear.weight": 0, "linear.bias": 0})
    GeminiDDP(module, precision="fp32", init_fn=lambda m: nn.init.constant_(m.scale, 3.0))
    assert torch.equal(module.scale, torch.full((4,), 3.0)) and module.linear.weight.std() > 0
    with gemini.init_empty():
        module = Odd()
    state = {k: torch.randn(*v.shape) for k, v in Odd().state_dict().items()}
    GeminiDDP(module, precision="fp32", init_state_dict=state)
    assert all(torch.equal(module.get_parameter(k), v) for k, v in state.items())


def test_buffers_on_the_meta_device_are_made_too():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = GeminiDDP(module, precision="fp32")
    assert torch.equal(module[1].running_var, torch.ones(4))
    assert torch.isfinite(model(torch.randn(8, 4))).all()


# -- what may not change ---------------------------------------------------------------------


def test_a_module_that_changed_after_wrapping_is_refused_by_name():
    def fresh():
        return GeminiDDP(Tower(), **SMALL)

    ids = torch.zeros(1, 3, dtype=torch.int64)
    model = fresh()
    model.layers[1][1].weight = nn.Parameter(torch.zeros(77, 33))
    with pytest.raises(ModuleChanged, match=r"layers\.1\.1\.weight is another"):
        model(ids)
    model = fresh()
    model.module.extra = nn.Linear(3, 3)
    with pytest.raises(ModuleChanged, match=r"extra\.weight is new"):
        model(ids)
    model = fresh()
    model.layers[2][1].register_parameter("gain", nn.Parameter(torch.ones(1)))
    with pytest.raises(ModuleChanged, match=r"layers\.2\.1\.gain is new"):
        model(ids)
    model = fresh()
    weights = {name: value.clone() for name, value in Tower().named_parameters()}
    with pytest.raises(ModuleChanged, match="functional_call takes a plain module"):
        torch.func.functional_call(model, weights, (ids,))
    model = fresh()
    with pytest.raises(ValueError, match=r"layers\.0\.1\.bias of shape \(77,\) cannot be given"):
        model.layers[0][1].bias.data = torch.zeros(5)
    model = fresh()
    model.module.activation = nn.GELU()  # nothing to train: allowed
    model(ids)


def test_conversions_that_change_something_are_refused():
    model = GeminiDDP(Tower(), **SMALL)
    assert model.to("cpu") is model and model.bfloat16() is model
    for convert in (model.half, model.double, lambda: model.to("meta")):
        with pytest.raises(ValueError, match=r"stays in torch\.bfloat16 on cpu"):
            convert()
