"""Optimizers, plain and wrapped, walked on a device that is not the CPU and holds no data.

Every operator refuses tensors of two devices, so a table, a gradient or a scalar that was made on
the host and given to the device's shows without a GPU.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import gemini
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.placement.tiers import Tier
from kernels_triton import ops
from optim import HybridAdam, HybridLion, HybridSGD, NvmeConfig
from optim.plain.views import Order
from optim.update.launch_tables import LaunchTables
from tests.support.device.placed import HOMES, NAMES, Forked, place_gradients
from tests.support.walking import META, MetaBackend, Walk


def layers():
    return nn.Sequential(nn.Linear(33, 77), nn.Tanh(), nn.Linear(77, 33))


def walk(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.randn(5, 33, device=META)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", [HybridAdam, HybridLion, HybridSGD])
def test_a_plain_optimizer_stays_on_its_device(make, monkeypatch):
    monkeypatch.setattr(make, "check_param", lambda self, param: None)  # that it has no values
    monkeypatch.setattr("optim.binding._check_made", lambda params: None)
    module = layers().to(META)
    walk(module, make(module.parameters(), lr=1e-3))


def test_a_gradient_in_another_order_is_copied_on_its_own_device():
    """To the CPU, and its address given to a kernel, once."""
    param = torch.empty(8, 4, device=META)
    assert Order.of(param).flat(torch.empty(4, 8, device=META).t()).device == META


def test_strides_of_dimensions_of_one_element_are_no_other_order():
    """A 1x1 convolution in channels_last: nothing is copied."""
    param = torch.empty_strided((8, 4, 1, 1), (4, 1, 4, 4))
    grad = torch.randn(8, 4, 1, 1)
    assert grad.stride() != param.stride()
    assert Order.of(param).flat(grad).data_ptr() == grad.data_ptr()


# -- wrapped modules --


@pytest.fixture
def walking(monkeypatch):
    """Kernels look at the devices of what they are given, and do nothing."""
    walk = Walk()

    def stub(name):
        def launched(*args, **kwargs):
            walk.launched(name, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])

        return launched

    for name in ("prologue", "update", "update_now", "grad_norm", "finish_norm"):
        monkeypatch.setattr(ops, name, stub(name))

    def digest_kernel(words, first, salt):
        walk.launched("digest", [words])
        return torch.zeros((), dtype=torch.int64, device=words.device)

    monkeypatch.setattr("kernels_triton.digest.digest_on_device", digest_kernel)
    with walk:
        yield walk


def wrapped(placement, homes, make=HybridAdam, **options):
    with gemini.init_empty():
        module = Forked()
    model = GeminiDDP(module, MetaBackend(), placement, min_chunk_size_m=1500 / 2**20, **options)
    optimizer = make(model.parameters(), lr=1e-3, nvme=NvmeConfig(block_numel=1024))
    params, grads, state = homes
    place_gradients(model, Tier.HOST if grads else Tier.DEVICE)
    plan = model.engine.planning.plan
    found = {(s.param_home is Tier.HOST, set(s.state_homes) == {Tier.HOST})
             for s in plan.shards}  # fmt: skip
    assert found == {(params, state)}
    return model, optimizer


def train(model, optimizer, clip=lambda: None, steps=3):
    for step in range(steps):
        x = torch.empty(5, 33, device=META)
        model(x, step != 1).float().pow(2).mean().backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()


def look_at_everything(model, optimizer):
    model.digest()
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}
    optimizer.state_dict()
    model.load_state_dict(model.state_dict())
    with torch.no_grad(), model.summon_full_params():
        for param in model.module.parameters():
            param.fill_(0.5)


PRECISIONS = {
    "bf16": {"precision": "bf16"},
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "no-master": {"precision": "bf16", "master_weights": False},
}


def homes_in_turn():
    """Every one in one precision; in another as a slower test."""
    kinds = list(PRECISIONS)
    for number, homes in enumerate(HOMES):
        yield pytest.param(homes, kinds[number % len(kinds)])
        yield pytest.param(
            homes, kinds[(number + 1 + number // 4) % len(kinds)], marks=pytest.mark.ci
        )


@pytest.mark.parametrize(("homes", "precision"), list(homes_in_turn()))
def test_a_wrapped_module_stays_on_its_devices_wherever_model_data_lives(homes, precision, walking):
    """Absent gradients, a clip by norm, everything that is read between steps."""
    params, _, state = homes
    placement = StaticPlacement(1.0, float(state), float(params))
    model, optimizer = wrapped(placement, homes, max_norm=0.1, **PRECISIONS[precision])
    train(model, optimizer)
    assert walking.kernels["prologue"] == 3
    assert walking.kernels["update"] + walking.kernels["update_now"] >= 3
    look_at_everything(model, optimizer)
    assert bool(walking.kernels["digest"]) != params  # no kernel reads host memory
    train(model, optimizer)


@pytest.mark.parametrize("homes", [HOMES[0], HOMES[-1]], ids=[NAMES[0], NAMES[-1]])
@pytest.mark.parametrize("how", ["norm", "any norm", "largest", "value"])
def test_clipping_by_the_loop_stays_on_the_devices(how, homes, walking):
    params, _, state = homes
    model, optimizer = wrapped(StaticPlacement(1.0, float(state), float(params)), homes)
    if how == "value":
        train(model, optimizer, lambda: optimizer.clip_grad_by_value(0.1))
        return
    order = {"norm": 2.0, "any norm": 3.0, "largest": float("inf")}[how]
    train(model, optimizer, lambda: optimizer.clip_grad_norm_(0.1, order))


@pytest.mark.parametrize("make", [HybridAdam, HybridLion, HybridSGD])
def test_every_optimizer_stays_on_its_devices(make, walking):
    model, optimizer = wrapped(StaticPlacement(1.0, 1.0, 1.0), HOMES[-1], make)
    train(model, optimizer)


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Forked() for _ in range(6))

    def forward(self, x, uses_spare):
        for layer in self.layers:
            x = layer(x, uses_spare)
        return x


def test_parameters_gradients_and_state_in_files_stay_on_their_devices(walking):
    with gemini.init_empty():
        module = Several()
    model = GeminiDDP(
        module, MetaBackend(), AutoPlacement("90KiB", "100KiB"), max_norm=0.1,
        trace=sequential_trace(specs_of(module, "bfloat16")), min_chunk_size_m=0.004,
        gather_whole=lambda m: isinstance(m, Forked),
    )  # fmt: skip
    optimizer = HybridAdam(model.parameters(), lr=1e-3, nvme=NvmeConfig(block_numel=1024))
    shards = model.engine.planning.plan.shards
    assert Tier.NVME in {shard.param_home for shard in shards}
    assert Tier.NVME in {home for shard in shards for home in shard.state_homes}
    train(model, optimizer)
    look_at_everything(model, optimizer)
    walking.finds_bad = True
    train(model, optimizer, steps=1)
    assert optimizer.last_report.skipped


@pytest.mark.parametrize("homes", HOMES[1:4], ids=NAMES[1:4])
def test_a_table_on_the_host_is_found(homes, walking, monkeypatch):
    """That the walk can fail."""

    class OnHost(LaunchTables):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.segments = torch.zeros(self.segments.shape, dtype=torch.int64, device="cpu")

    monkeypatch.setattr("optim.update.launch_tables.LaunchTables", OnHost)
    params, _, state = homes
    model, optimizer = wrapped(StaticPlacement(1.0, float(state), float(params)), homes)
    with pytest.raises(AssertionError, match="is given memory of"):
        train(model, optimizer)
