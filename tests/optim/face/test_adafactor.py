"""HybridAdafactor: torch's numbers, in every home and at any number of ranks; its state and
doors."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import gemini
from bench.shared.models import seeded
from bench.shared.threads import run_threads
from gemini import GeminiDDP
from optim import HybridAdafactor, NvmeConfig
from optim.rules.lines import LineSums, boxes
from tests.golden import bits as program
from tests.support.loops.tails import on_host
from tests.support.plain_training import ON_DISK, on_disk, update_error

KINDS = ("bf16", "fp32", "rounded", "fp16")
HOMES = list(program.HOMES)
DEVICES = ("device", "device, host", "device, host, disk")
SHAPES = ((37, 19), (61,), (8, 129), (1,), (4, 3, 5, 3), (7, 1), (1, 9), (1024, 5), (6, 5, 3), ())
OPTIONS = (
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
    {"lr": 1.0, "eps": (1e-4, 0.5), "d": 2.0, "beta2_decay": -0.5},
)


def _params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    made.append(
        torch.randn(8, 6, 3, 3, generator=generator, dtype=torch.float64).to(
            memory_format=torch.channels_last
        )
    )
    return [nn.Parameter(values.mul(0.01).to(dtype)) for values in made]


def _give(params, step):
    """Gradients whose size is another in every step; the third parameter has none in one."""
    generator = torch.Generator().manual_seed(step)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.grad = None if i == 2 and step == 1 else grad.mul(10.0 ** (step - 2)).to(param.dtype)


def _train(params, optimizer, steps, first=0):
    for step in range(first, first + steps):
        _give(params, step)
        optimizer.step()
    return params


# -- beside torch's ------------------------------------------------------------------------------


@ON_DISK
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_and_state_are_torchs(fraction, options, dtype, tmp_path):
    """In fp64 to its bits, and in fp32 to the rounding of weights."""
    params, theirs = _params(dtype), _params(dtype)
    places = on_disk(tmp_path, fraction)
    optimizer = HybridAdafactor(params, **options, **places)
    torchs = torch.optim.Adafactor(theirs, **options)
    _train(params, optimizer, 5)
    _train(theirs, torchs, 5)
    assert update_error(params, theirs, _params(dtype)) < (1e-6 if dtype.itemsize == 4 else 1e-13)
    ours, want = optimizer.state_dict()["state"], torchs.state_dict()["state"]
    assert ours.keys() == want.keys()
    for i, state in want.items():
        assert ours[i].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(
                ours[i][name].double(), value.double(), rtol=2e-6, atol=1e-30
            )
    optimizer.close()


@pytest.mark.parametrize(
    ("scaled", "relative"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_updates_are_transformers(scaled, relative):
    """Whose relative rate has no `lr`, and whose decay is relative where the rate is."""
    from transformers.optimization import Adafactor

    params, theirs = _params(), _params()
    options = {
        "scale_parameter": scaled, "relative_step": relative,
        "weight_decay": 0.0 if scaled or relative else 0.1,
    }  # fmt: skip
    optimizer = HybridAdafactor(params, lr=1e-2, eps=(1e-30, 1e-3), **options)
    _train(params, optimizer, 5)
    _train(theirs, Adafactor(theirs, lr=None if relative else 1e-2, **options), 5)
    assert update_error(params, theirs, _params()) < 1e-6


def test_it_goes_on_from_torchs_state_and_torch_from_its():
    params, theirs = _params(), _params()
    torchs = torch.optim.Adafactor(theirs, lr=0.1)
    _train(theirs, torchs, 3)
    optimizer = HybridAdafactor([nn.Parameter(p.detach().clone()) for p in theirs], lr=0.1)
    optimizer.load_state_dict(torchs.state_dict())
    (group,) = optimizer.param_groups
    params = group["params"]
    start = [p.detach().clone() for p in params]
    _train(params, optimizer, 2, first=3)
    back = [nn.Parameter(p.detach().clone()) for p in params]
    again = torch.optim.Adafactor(back, lr=0.1)
    _train(theirs, torchs, 2, first=3)
    assert update_error(params, theirs, start) < 1e-6
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    start = [p.detach().clone() for p in params]
    _train(params, optimizer, 1, first=5)
    _train(back, again, 1, first=5)
    assert update_error(params, back, start) < 1e-6


def test_a_copy_goes_on_and_shares_nothing():
    params = _params()
    optimizer = HybridAdafactor(params, lr=0.1)
    _train(params, optimizer, 2)
    copied = copy.deepcopy(optimizer)
    others = copied.param_groups[0]["params"]
    _train(params, optimizer, 2, first=2)
    _train(others, copied, 2, first=2)
    assert all(map(torch.equal, params, others))


def test_a_matrix_keeps_no_plane():
    """A byte for 64 elements, as every block has a plane."""
    matrix = nn.Parameter(torch.randn(512, 512))
    optimizer = HybridAdafactor([matrix])
    matrix.grad = torch.randn(512, 512)
    optimizer.step()
    state = optimizer.state[matrix]
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "step": (), "row_var": (512, 1), "col_var": (1, 512),
    }  # fmt: skip
    (target,) = optimizer.targets
    assert sum(tensor.nbytes for tensor in target.tiered_state.movable()) == 512 * 512 // 64
    model = GeminiDDP(nn.Linear(512, 512, bias=False), precision="bf16")
    wrapped = HybridAdafactor(model.parameters(), nvme_offload_fraction=1.0)
    model(torch.ones(1, 512)).float().sum().backward()
    wrapped.step()
    masters = 4 * 512 * 512  # in two versions, and what a file has besides
    assert 2 * masters <= wrapped.nvme_bytes < 2.1 * masters
    wrapped.close()


def test_options_out_of_range_are_refused():
    params = [nn.Parameter(torch.zeros(2, 2))]
    for options, text in (
        ({"beta2_decay": 0.1}, "beta2_decay=0.1"),
        ({"d": 0.5}, "d=0.5"),
        ({"eps": (-1.0, 1e-3)}, r"eps\[0\]=-1.0"),
        ({"eps": (None, -1e-3)}, r"eps\[1\]=-0.001"),
        ({"eps": (1e-3,)}, "expected a number or None"),
    ):
        with pytest.raises(ValueError, match=text):
            HybridAdafactor(params, **options)
    with pytest.raises(TypeError, match="cpu_path"):
        HybridAdafactor(params, cpu_path="eager")


# -- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [(1, 5, 7), (4, 3, 3), (3, 1, 4), (2, 6, 1)])
def test_boxes_cover_a_run_once(stack):
    numel = math.prod(stack)
    whole = torch.arange(numel).view(stack)
    for first in range(numel):
        for count in range(1, numel - first + 1):
            found = list(boxes(stack, first, count))
            assert len(found) <= 5
            run = torch.cat([whole[box].flatten() for _, box in found])
            assert torch.equal(run, torch.arange(first, first + count))
            assert [here.start for here, _ in found] == [
                sum(h.stop - h.start for h, _ in found[:i]) for i in range(len(found))
            ]


@pytest.mark.parametrize("largest", [1.0, 1e-12, 1e12])
def test_sums_are_the_same_however_they_are_cut(largest):
    """Of values over 10 orders of magnitude; they are those of fp64, which are not."""
    stack = (2, 40, 50)
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-10, 0, 80).view(2, 40, 1) * largest
    values = (torch.rand(stack, generator=generator) * scales).flatten()
    whole = LineSums(stack, largest)
    whole.add(values, 0)
    for cuts in ((1,), (63, 64, 2001), tuple(range(7, 4000, 13))):
        parts = [LineSums(stack, largest) for _ in range(3)]
        edges = [0, *cuts, values.numel()]
        for i, (a, b) in enumerate(pairwise(edges)):
            parts[i % 3].add(values[a:b], a)
        total = parts[2].values + parts[0].values + parts[1].values
        assert torch.equal(total, whole.values)
    squares = values.double().square().view(stack)
    rows, columns = whole.means()
    torch.testing.assert_close(rows, squares.mean(2), rtol=1e-6, atol=0)
    torch.testing.assert_close(columns, squares.mean(1), rtol=1e-13, atol=0)


# -- over shards ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def of_the_program(monkeypatch):
    """The golden program (it clips, skips, accumulates, leaves out, resumes) with Adafactor."""

    def make(params, cpu_path="auto", **places):
        return HybridAdafactor(params, lr=1e-2, weight_decay=0.01, **places)

    monkeypatch.setitem(program.RULES, "adafactor", make)
    for kind in KINDS:
        monkeypatch.setitem(program.KINDS, f"adafactor, {kind}", ("adafactor", kind))
    monkeypatch.setitem(program.HOMES, "device", lambda: on_host("stream", state=0.0))
    monkeypatch.setitem(program.HOMES, "device, host", lambda: on_host("stream", state=0.6))
    far = lambda: on_host("stream", params=0.5, grads=True, state=0.8, disk=0.4)  # noqa: E731
    monkeypatch.setitem(program.HOMES, "device, host, disk", far)


def _bits(kind, home, folder, num_ranks=1):
    def work(rank):
        return program.bits(f"adafactor, {kind}", home, "tail", folder)

    if num_ranks == 1:
        return work(0)
    return run_threads(work, num_ranks, backend="gloo")[0]


def _cells(homes):
    """Of each home one kind while editing, two to land, and all."""
    marks = ([], [pytest.mark.ci], [pytest.mark.deep], [pytest.mark.deep])
    return [
        pytest.param(home, kind, marks=marks[(i + j) % len(KINDS)])
        for i, home in enumerate(homes)
        for j, kind in enumerate(KINDS)
    ]


@pytest.mark.parametrize(("home", "kind"), _cells(HOMES[1:]))
def test_bits_do_not_depend_on_where_state_lives(home, kind, tmp_path):
    want = _bits(kind, "resident", tmp_path / "resident")
    assert _bits(kind, home, tmp_path / "there") == want


@pytest.mark.parametrize(("home", "kind"), _cells(DEVICES))
def test_a_device_has_the_bits_of_the_host(home, kind, tmp_path, monkeypatch):
    """Without the step that clips: a norm of kernels is another's by its last bit."""
    clips, step = 2, program.STEPS[1]
    monkeypatch.setattr(
        program, "STEPS", (*program.STEPS[:clips], step, *program.STEPS[clips + 1 :])
    )
    want = _bits(kind, "resident", tmp_path / "resident")
    assert _bits(kind, home, tmp_path / "there") == want


@pytest.mark.parametrize(
    ("num_ranks", "home"),
    [
        (2, "partly on disk"),
        pytest.param(2, "files", marks=pytest.mark.ci),
        pytest.param(4, "disk", marks=pytest.mark.ci),
        pytest.param(4, "resident", marks=pytest.mark.ci),
    ],
)
def test_bits_do_not_depend_on_the_number_of_ranks(num_ranks, home, tmp_path):
    kind = KINDS[(num_ranks + len(home)) % 2]
    assert _bits(kind, home, tmp_path / "many", num_ranks) == _bits(kind, home, tmp_path / "one")


def _made(fraction=0.0, precision="bf16", **places):
    with seeded():
        module = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 33))
    model = GeminiDDP(module, precision=precision)
    optimizer = HybridAdafactor(
        model.parameters(), lr=1e-2, weight_decay=0.1, nvme_offload_fraction=fraction, **places
    )
    return model, optimizer


def _steps(model, optimizer, count):
    for _ in range(count):
        model(torch.linspace(-1, 1, 128).view(2, 64)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_checkpoint_resumes_at_another_number_of_ranks(tmp_path):
    def first(rank):
        model, optimizer = _made(1.0)
        _steps(model, optimizer, 2)
        gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
        _steps(model, optimizer, 2)
        digest = model.digest()
        optimizer.close()
        return digest

    def second(rank):
        model, optimizer = _made()
        gemini.load_checkpoint(tmp_path / "saved", model, optimizer)
        _steps(model, optimizer, 2)
        return model.digest()

    want = run_threads(first, 2, backend="gloo")
    assert second(0) == want[0] == want[1]


def test_a_state_dict_is_torchs_whole_and_is_a_copy():
    model, optimizer = _made(precision="fp32")
    plain = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 33))
    plain.load_state_dict(model.state_dict())
    torchs = torch.optim.Adafactor(plain.parameters(), lr=1e-2, weight_decay=0.1)
    _steps(model, optimizer, 2)
    _steps(plain, torchs, 2)
    saved = optimizer.state_dict()
    names = [name for name, _ in plain.named_parameters()]
    for i, state in torchs.state_dict()["state"].items():
        assert saved["state"][names[i]].keys() == state.keys()
        for plane, value in state.items():
            torch.testing.assert_close(saved["state"][names[i]][plane], value, rtol=1e-4, atol=1e-9)
    weights, before = copy.deepcopy(model.state_dict()), copy.deepcopy(saved)
    _steps(model, optimizer, 1)
    want = model.digest()
    for name, state in before["state"].items():
        assert all(torch.equal(saved["state"][name][plane], v) for plane, v in state.items())
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    _steps(model, optimizer, 1)
    assert model.digest() == want


def test_a_step_goes_back(tmp_path):
    model, optimizer = _made(1.0, nvme=NvmeConfig(keep_versions=2))
    _steps(model, optimizer, 2)
    _steps(model, optimizer, 1)
    third = model.digest()
    model.rewind(1)
    _steps(model, optimizer, 1)
    assert model.digest() == third
    optimizer.close()


def test_a_step_that_fails_changes_no_line():
    model, optimizer = _made(1.0)
    _steps(model, optimizer, 1)
    (target,) = optimizer.targets
    before = copy.deepcopy({p: dict(s) for p, s in target.state_views().items()})
    real = target.tiered_state.nvme.store.write

    def fails(*args, **kwargs):
        raise OSError("on purpose")

    target.tiered_state.nvme.store.write = fails
    with pytest.raises(OSError, match="on purpose"):
        _steps(model, optimizer, 1)
    target.tiered_state.nvme.store.write = real
    for (_, now), (_, then) in zip(target.state_views().items(), before.items(), strict=True):
        assert all(torch.equal(now[name], value) for name, value in then.items())
    optimizer.close()


def test_a_checkpoint_without_lines_is_refused(tmp_path):
    from gemini.checkpoint import MismatchError
    from optim import HybridAdam

    model = GeminiDDP(nn.Linear(4, 4))
    optimizer = HybridAdam(model.parameters())
    model(torch.ones(1, 4)).float().sum().backward()
    optimizer.step()
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    optimizer.close()
    other = HybridAdafactor(model.parameters())
    with pytest.raises(MismatchError, match=r"missing optim\.state\.weight\.row_var"):
        gemini.load_checkpoint(tmp_path / "saved", model, other)
