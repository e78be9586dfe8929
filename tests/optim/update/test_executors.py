"""The pair of executors: what they measure of gradients, here or elsewhere, runs or parameters."""

import math

import pytest
import torch

from kernels_triton.launch import is_interpreted
from optim import HybridAdam
from optim.rules.clipping import Clip
from optim.rules.config import UpdateFacts
from optim.rules.control_vector import ControlVector
from optim.state.memory import memory_of
from optim.state.pieces import GradSegment
from optim.step.cpu_step import CpuStep
from optim.step.gradients import GradientRun
from optim.step.triton_step import TritonStep
from optim.update.updaters import cpu_updater

CPU = torch.device("cpu")
NUMELS = (3001, 64, 1999)  # of runs; each of two parameters but the one of 64


class Held:
    """A gradient that is here, or waits elsewhere."""

    def __init__(self, values, here=True):
        self.values, self.found, self.loads = values, None, 0
        self.shard = values if here else None

    def load(self):
        self.loads += self.shard is None
        return self.values


def runs_of(grads, here=True, **options):
    runs = []
    for i, grad in enumerate(grads):
        cut = min(1000, grad.numel())
        parts = [GradSegment(0, cut, 2 * i), GradSegment(cut, grad.numel() - cut, 2 * i + 1)]
        parts = tuple(part for part in parts if part.numel)
        runs.append(GradientRun(i, "bfloat16", parts, Held(grad, here), **options))
    return runs


def gradients(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator).to(dtype) for numel in NUMELS]


def made(kind, runs=()):
    rule = HybridAdam([torch.nn.Parameter(torch.zeros(1))]).rule_for([])
    scaler = ControlVector(None, CPU)
    if kind == "cpu":
        updater = cpu_updater(rule, "eager", UpdateFacts(1, has_master=False), [])
        return CpuStep(updater, 6, scaler)
    if not is_interpreted():
        pytest.skip("needs Triton's interpreter")
    return TritonStep(rule, [0] * 6, scaler, memory_of(CPU), runs=runs)


BOTH = pytest.mark.parametrize("kind", ["cpu", "triton"])


@BOTH
@pytest.mark.parametrize("here", [True, False])
def test_the_norm_is_that_of_all_runs_wherever_they_are(kind, here):
    grads = gradients()
    runs = runs_of(grads, here)
    found = made(kind, runs).measure(runs, 2.0)
    want = sum(float(grad.double().square().sum()) for grad in grads)
    assert found.first_nonfinite is None and found.checksum == 0
    # rows of 1024 squares are summed in fp32
    assert found.power_sum == pytest.approx(want, rel=1e-6)


@BOTH
def test_what_was_measured_as_it_left_has_the_same_bits_and_is_not_brought_back(kind):
    grads = gradients()
    here, gone = runs_of(grads), runs_of(grads, here=False)
    want = made(kind, here).measure(here, 2.0)
    executor = made(kind, gone)
    for run, grad in reversed(list(zip(gone, grads, strict=True))):
        run.gradient.found = executor.measure_leaving(run, grad)
    assert executor.measure(gone, 2.0) == want
    assert [run.gradient.loads for run in gone] == [0, 0, 0]


def test_gradients_of_a_plain_module_have_the_sum_of_runs():
    runs = runs_of(gradients())
    executor = made("cpu")
    alone = executor.power_sum([run.gradient.load() for run in runs], 2.0)
    assert float(alone) == executor.measure(runs, 2.0).power_sum


@BOTH
@pytest.mark.parametrize("run, element, counter", [(0, 999, 0), (0, 1000, 1), (2, 1998, 5)])
def test_the_first_parameter_that_is_not_finite_is_named(kind, run, element, counter):
    grads = gradients()
    grads[run][element] = math.inf
    runs = runs_of(grads)
    found = made(kind, runs).measure(runs, 2.0)
    assert found.first_nonfinite == counter and math.isnan(found.power_sum)


@BOTH
def test_what_another_rank_speaks_for_is_no_part_of_the_sum_but_of_the_checksum(kind):
    wide = [torch.cat([grad, grad.new_zeros(-grad.numel() % 64)]) for grad in gradients()]

    def measured(grads, counts):
        runs = runs_of(grads, counts=counts, has_replicas=True)
        return made(kind, runs).measure(runs, 2.0)

    mine, other = measured(wide, counts=True), measured(wide, counts=False)
    assert mine.power_sum > 0 == other.power_sum
    assert mine.checksum == other.checksum != 0
    wide[1].view(torch.int16)[7] ^= 1
    assert measured(wide, counts=False).checksum != other.checksum


@BOTH
def test_counts_are_those_of_before_where_a_step_is_undone(kind):
    executor = made(kind)
    adam = HybridAdam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    hypers = [executor_hyper(adam)]
    for step in range(2):
        executor.begin(hypers, [0, 3], 4.0, Clip())
        executor.count([0, 3])
        assert executor.counts.tolist() == [step + 1, 0, 0, step + 1, 0, 0]
    executor.begin(hypers, [0, 1], 4.0, Clip())
    executor.undo()
    executor.begin_amp(hypers, [5], None, may_fail=True)
    executor.undo()
    assert executor.counts.tolist() == [2, 0, 0, 2, 0, 0]
    assert list(executor.next_steps())[:2] == ([3, 1] if kind == "cpu" else [0, 0])


def executor_hyper(optimizer):
    return optimizer.rule_for(optimizer.param_groups).hyper(optimizer.param_groups[0])
