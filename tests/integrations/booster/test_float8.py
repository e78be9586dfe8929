"""Linear layers in float8, of plugins and of `mixed_precision="fp8"`; emulated, and torchao's."""

import copy
import logging

import pytest
import torch
from torch import nn

from bench.shared.models import seeded
from bench.shared.workers import run_ranks
from gemini.integrations import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
)

float8 = pytest.importorskip("torchao.float8")
STEPS, LR = 4, 1e-2
PLUGINS = {
    "Gemini": lambda: GeminiPlugin(precision="bf16", use_fp8=True),
    "ZeRO-1": lambda: LowLevelZeroPlugin(stage=1, precision="bf16", use_fp8=True),
    "replicas": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, precision="bf16", use_fp8=True),
    "stages": lambda: HybridParallelPlugin(tp_size=1, pp_size=2, precision="bf16", use_fp8=True),
}
SENT = {"precision": "bf16", "fp8_communication": True}
SENDING = {
    "Gemini": lambda: GeminiPlugin(**SENT),
    "ZeRO-1": lambda: LowLevelZeroPlugin(stage=1, **SENT),
    "ZeRO-2": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=2, **SENT),
}


def made():
    with seeded():
        return nn.Sequential(
            nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 6)
        )


def data():
    draw = torch.Generator().manual_seed(2)
    return torch.randn(16, 32, generator=draw), torch.randn(16, 6, generator=draw)


def loss_of(outputs, batch):
    return (outputs.float() - batch[1]).square().mean()


def by_torchao(in_float8, dtype=torch.bfloat16):
    """Losses of fp32 masters whose copies compute in bf16, by torchao's own layers."""
    model = made()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LR), []
    for _ in range(STEPS):
        narrow = copy.deepcopy(model).to(dtype)
        if in_float8:
            config = float8.Float8LinearConfig(emulate=True)
            narrow = float8.convert_to_float8_training(
                narrow, config=config, module_filter_fn=lambda layer, _: layer.out_features != 6
            )
        x, y = data()
        loss = loss_of(narrow(x.to(dtype)), (x, y))
        loss.backward()
        for param, of_copy in zip(model.parameters(), narrow.parameters(), strict=True):
            param.grad = of_copy.grad.float()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(rank, name, sends=False):
    """Losses of a plugin, whose ranks see the same rows."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    params = list(model.parameters())
    booster = Booster(plugin=(SENDING if sends else PLUGINS)[name]())
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    kinds = [type(layer).__name__ for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert kinds == (["Linear"] * 3 if sends else [*["Float8Linear"] * 2, "Linear"])
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    losses = []
    for _ in range(STEPS):
        if name == "stages":
            found = booster.execute_pipeline(iter([data()]), boosted, loss_of, optimizer)["loss"]
            losses.append(None if found is None else float(found))
        else:
            loss = loss_of(boosted(data()[0]), data())
            booster.backward(loss, optimizer)
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name", PLUGINS)
def test_layers_in_float8_train_as_torchaos_do(name):
    found = [losses for losses in run_ranks(trained, 2, name) if losses[0] is not None]
    want, in_bf16 = by_torchao(True), by_torchao(False)
    assert found[0][0] == pytest.approx(want[0], rel=2e-3)  # outputs are bf16
    distance = max(abs(a - b) for a, b in zip(want, in_bf16, strict=True))
    assert distance > 0
    for losses in found:
        assert losses == pytest.approx(want, abs=distance)  # torchao's own from bf16
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", SENDING)
def test_what_is_gathered_in_float8_trains_as_near_to_bf16_as_layers_in_float8_do(name):
    want, in_bf16 = by_torchao(True), by_torchao(False)
    distance = max(abs(a - b) for a, b in zip(want, in_bf16, strict=True))
    first, second = run_ranks(trained, 2, name, True)
    assert first == second == pytest.approx(in_bf16, abs=distance)
    assert first[1:] != pytest.approx(in_bf16[1:], abs=1e-6) and first[-1] < first[0]


def test_mixed_precision_fp8_is_autocast_with_layers_in_float8(caplog):
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    booster = Booster(plugin=TorchDDPPlugin(), mixed_precision="fp8")
    with caplog.at_level(logging.WARNING, "gemini"):
        model, optimizer, *_ = booster.boost(model, optimizer)
    assert "cpu has no float8: results are those of float8, emulated" in caplog.text
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model(data()[0]), data())
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(by_torchao(True), rel=0.02)
    assert "Float8Linear" in {type(layer).__name__ for layer in model.modules()}


def test_what_has_no_layer_for_float8_is_refused():
    booster = Booster(plugin=GeminiPlugin(precision="bf16", use_fp8=True))
    with pytest.raises(ValueError, match=r"Sequential has no torch\.nn\.Linear to multiply in"):
        booster.boost(nn.Sequential(nn.Linear(5, 3)))
    with pytest.raises(ValueError, match="use_fp8=True; expected False: float8 is for layers"):
        HybridParallelPlugin(tp_size=2, pp_size=1, precision="bf16", use_fp8=True)
