"""HybridLamb: its formula, and what fails; its homes and ranks are in `matrices`."""

import copy
import math
from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import nn

from bench.shared.models import seeded
from bench.shared.threads import run_threads
from gemini import GeminiDDP, StaticPlacement
from optim import HybridAdam, HybridLamb, NvmeConfig
from optim.elementwise import ElementwiseOptimizer
from optim.rules.measures import Measure
from optim.rules.rule import UpdateRule
from optim.rules.state_layout import Plane, StateLayout
from optim.step import measuring
from optim.step.direction_norms import DirectionNorms
from tests.support.device.placed import Forked, batch, device
from tests.support.plain_training import (
    ON_DISK,
    give_gradients,
    make_params,
    on_disk,
    train,
    update_error,
)


def _formula(steps, lr=1e-2, eps=1e-6, weight_decay=0.1, corrects=False):
    """In fp64: colossalai.nn.Lamb, after You et al. 2020."""
    weights = [p.detach().double() for p in make_params()]
    first, second = ([torch.zeros_like(p) for p in weights] for _ in range(2))
    for step in range(steps):
        given = make_params()
        give_gradients(given, step)
        for p, m, v, like in zip(weights, first, second, given, strict=True):
            grad = like.grad.double()
            m.mul_(0.9).add_(grad, alpha=0.1)
            v.mul_(0.999).addcmul_(grad, grad, value=0.001)
            count = step + 1 if corrects else math.inf
            moved = m / (1 - 0.9**count) / ((v / (1 - 0.999**count)).sqrt() + eps)
            moved += weight_decay * p
            p.sub_(lr * p.norm() / moved.norm() * moved)
    return weights


@ON_DISK
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("cpu_path", ["eager", "compile"])
def test_updates_are_the_formulas(fraction, corrects, cpu_path, tmp_path):
    params = make_params()
    optimizer = HybridLamb(
        params, lr=1e-2, weight_decay=0.1, bias_correction=corrects, cpu_path=cpu_path,
        **on_disk(tmp_path, fraction),
    )  # fmt: skip
    train(params, optimizer, 5)
    want = _formula(5, corrects=corrects)
    assert update_error(params, want, make_params()) < 3e-6


def test_zeros_and_adam_have_a_trust_of_one():
    """A weight of zeros could never move."""
    zeros, others = nn.Parameter(torch.zeros(130)), make_params()
    optimizer = HybridLamb([zeros], lr=1e-2)
    zeros.grad = torch.randn(130, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    grad = zeros.grad
    want = -1e-2 * (0.1 * grad) / ((0.001 * grad.square()).sqrt() + 1e-6)
    assert torch.allclose(zeros, want)
    options = {"lr": 1e-2, "eps": 1e-6}
    train(others, HybridLamb(others, adam=True, bias_correction=True, **options), 3)
    want = make_params()
    train(want, HybridAdam(want, **options), 3)
    assert update_error(others, want, make_params()) < 1e-6


def test_norms_do_not_depend_on_where_a_parameter_is_cut(monkeypatch):
    """Tiles are cut by position; what cuts do besides is below fp32."""
    (param,) = make_params(shapes=[(3000,)])
    param.grad = param.detach().sin()
    sums = []
    for block in (1024, 2048, 4096):
        monkeypatch.setattr(measuring, "TILE_NUMEL", 512)
        given = nn.Parameter(param.detach().clone())
        given.grad = param.grad.clone()
        optimizer = HybridLamb([given], nvme=NvmeConfig(block_numel=block))
        optimizer.step()
        sums.append(given.detach().clone())
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[1], sums[2])


# -- on a device ---------------------------------------------------------------------------------


PLACES = {
    "resident": (StaticPlacement(1.0, 0.0, 0.0), "bf16"),
    "state on the host": (StaticPlacement(1.0, 1.0, 0.0), "fp32"),
    "all on the host": (StaticPlacement(1.0, 1.0, 1.0), "bf16"),
    "half on NVMe": (StaticPlacement(1.0, 0.0, 0.0), "fp32"),
}
ULP = {"fp32": 1e-6, "bf16": 2.0**-7}


@pytest.mark.parametrize("place", PLACES)
def test_kernels_measure_norms_as_operators_do_wherever_state_is(place):
    """Up to an ulp: torch's square root in fp32 is not correctly rounded everywhere."""
    found = []
    policy, precision = PLACES[place]
    for by_kernels in (True, False):
        backend = device(by_triton=True)
        model = GeminiDDP(
            Forked(), backend, policy, precision=precision, min_chunk_size_m=0.004, max_norm=1.0
        )
        optimizer = HybridLamb(
            model.parameters(), lr=1e-2, weight_decay=0.1, nvme=NvmeConfig(block_numel=1024),
            nvme_offload_fraction=0.5 if place == "half on NVMe" else 0.0,
        )  # fmt: skip
        executor = model.engine.target.executor
        assert executor.norms_by_kernels is None  # but on a GPU
        rule, calls = optimizer.rule_for(optimizer.param_groups), []
        norms = DirectionNorms(rule, backend, lambda executor=executor: executor.staging)

        def measure(*asked, norms=norms, calls=calls):
            calls.append(len(asked[2]))
            norms.run(*asked)

        executor.norms_by_kernels = measure if by_kernels else None
        for number in range(3):
            model(batch(number), number != 1).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert calls == ([6, 4, 6] if by_kernels else [])
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        optimizer.close()
        backend.check()
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], rtol=ULP[precision], atol=1e-8)


def test_the_host_reads_the_counts_of_a_device_once_while_it_decides(on_triton, monkeypatch):
    """And again after they were loaded: no copy is older than what it stands for."""
    reads = []

    def read(found):
        reads.append(len(found))
        return measuring.to_host(found)

    monkeypatch.setattr("optim.step.triton_step.to_host", read)
    params, wanted = make_params(), make_params()
    optimizer, other = HybridLamb(params, lr=1e-2), HybridLamb(wanted, lr=1e-2)
    train(params, optimizer, 3)
    assert reads == [1]
    counts = optimizer.state_dict()["state"][0]["step"]
    assert int(counts) == 3
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    del reads[:]
    for step in range(2):
        give_gradients(wanted, step)
        other.step()
    assert reads == [1]
    assert [int(one["step"]) for one in other.state_dict()["state"].values()] == [5] * len(wanted)


# -- over shards ---------------------------------------------------------------------------------


class Rate(NamedTuple):
    lr: float


class MeanMagnitude(Measure):
    """Mean magnitude of a gradient over all ranks, by which a rate is divided."""

    def __init__(self, asked):
        super().__init__(asked)
        self.total = torch.zeros(1, dtype=torch.float64)

    def add(self, tile):
        self.total += tile.grad.double().abs().sum()

    def found(self):
        return self.total

    def told(self, found):
        asked = self.asked
        return Rate(asked.hyper.lr * math.prod(asked.shape) / float(found))


class LevelRule(UpdateRule):
    name = "level"
    layout = StateLayout((Plane("momentum_buffer", "float32"),))
    options: ClassVar = {"lr": 1e-3}
    measures = (MeanMagnitude,)
    coefficients = staticmethod(lambda h, t: {"lr": h.lr})

    @staticmethod
    def formula(param, grad, c, *, momentum_buffer):
        moved = momentum_buffer + grad
        return param - c.lr * moved, {"momentum_buffer": moved}


class HybridLevel(ElementwiseOptimizer):
    rule = LevelRule


def test_a_rule_of_a_user_measures_what_it_wants_wherever_its_parameters_are():
    """It is a file of its own: no target knows what is measured."""
    with seeded():
        start = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    inputs = torch.linspace(-1, 1, 128).view(4, 32)

    def trained(model, **places):
        optimizer = HybridLevel(model.parameters(), lr=1e-2, **places)
        for _ in range(2):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return {name: value.clone() for name, value in model.state_dict().items()}

    def work(rank):
        model = GeminiDDP(copy.deepcopy(start), "cpu", precision="fp32")
        return trained(model, nvme_offload_fraction=1.0)

    want = trained(copy.deepcopy(start))
    assert not torch.equal(want["0.weight"], start[0].weight)
    for ranks in (1, 2):
        got = run_threads(work, ranks, backend="gloo")[0]
        assert all(torch.equal(got[name], value) for name, value in want.items())


def test_a_rank_whose_disk_fails_before_the_update_is_told_to_all(monkeypatch):
    real = measuring.run

    def work(rank):
        with seeded():
            module = nn.Linear(64, 64)
        model = GeminiDDP(module)
        optimizer = HybridLamb(model.parameters(), nvme_offload_fraction=1.0)
        failing = []

        def run(*args):
            if rank == 1 and failing:
                raise OSError("on purpose")
            return real(*args)

        of_rank[rank] = run
        monkeypatch.setattr(measuring, "run", lambda *a: of_rank[_rank()](*a))
        model(torch.ones(2, 64)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = model.digest()
        failing.append(True)
        model(torch.ones(2, 64)).float().sum().backward()
        said = "on purpose" if rank == 1 else "the disk of another rank failed before the update"
        with pytest.raises((OSError, RuntimeError), match=said):
            optimizer.step()
        assert model.digest() == before
        failing.clear()
        optimizer.step()
        assert model.digest() != before
        optimizer.close()

    of_rank = {}
    run_threads(work, 2, backend="gloo")


def _rank():
    return torch.distributed.get_rank()
