"""torch's own configurations of its optimizers, run by ours beside torch's.

Source: `torch.testing._internal.common_optimizers` of the installed torch, which has the
configurations and the wrong arguments as data; and what test/test_optim.py of pytorch/pytorch asks
of every optimizer (its `TestOptimRenewed`). Written here from what these tests check.

What we do not take stands in REFUSED and TAKEN, and nowhere else: every other difference fails.
"""

import builtins
import copy
import io
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import optim
from bench.shared.reference import flat, relative_error
from optim import HybridAdam, HybridMuon, NvmeConfig

OTHERS = ("SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "Adafactor")
OURS = {"AdamW": HybridAdam, "Adam": HybridAdam}
OURS |= {name: getattr(optim, f"Hybrid{name}") for name in OTHERS}
THEIRS = {name: getattr(torch.optim, name) for name in OURS}
# what torch's constructors have by default and ours have otherwise
DEFAULTS = {"AdamW": {"weight_decay": 1e-2}, "Adam": {"adamw_mode": False}}

# options that ours refuse, each with its reason
REFUSED = {
    "foreach": "how torch walks over parameters; ours does it in one way",
    "fused": "as foreach",
    "differentiable": "a step that autograd goes through keeps every tensor that it makes",
    "capturable": "for CUDA graphs of torch's loops; our kernels keep step counts on the device",
}
# parameters that ours refuse, with what they say
REFUSED_PARAMETERS = {
    "complex": (lambda: torch.randn(3, 2, dtype=torch.complex64), "expected a floating one"),
    "shared": (lambda: torch.randn(3, 1).expand(3, 2), "elements share memory.*clone it before"),
}
# wrong arguments of torch's that ours take, each with its reason
TAKEN = {"does not support complex parameters": "refused by the first step, as in torch"}
STEPS = 6
# Of the relative error of updates. In fp32 they are 6e-3 of weights of about 1, whose rounding is
# 6e-8: 1e-5; 3e-6 was found.
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}

# In a process of its own: the import freezes torch's global flags and patches TorchScript.
EXTRACT = """
import pickle, sys, types, unittest
try:
    import expecttest
except ImportError:  # which torch's helpers import, and these tables do not use
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase
    sys.modules["expecttest"] = stub
import torch
from torch.testing._internal import common_optimizers

found = {}
for info in common_optimizers.optim_db:
    if info.name not in sys.argv[2:]:
        continue
    every = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs
    inputs = every("cpu", torch.float32, info)
    inputs += info.optim_inputs_func(device="cuda") + info.optim_inputs_func(device="mps")
    errors = [
        (error.optimizer_error_input.desc, error.optimizer_error_input.params,
         error.optimizer_error_input.kwargs, error.error_type)
        for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
    ]
    found[info.name] = {"inputs": [(one.desc, one.kwargs) for one in inputs], "errors": errors}
with open(sys.argv[1], "wb") as file:
    pickle.dump(found, file)
"""


TABLE = Path(__file__).with_name("torch_optimizers.json")


def written(value, seen):
    """In JSON's types; parameters by their number, of `seen`, as their values are torch's draw."""
    if isinstance(value, nn.Parameter):
        return {"parameter": seen.setdefault(id(value), len(seen))}
    many = isinstance(value, torch.Tensor) and value.dim() > 1 and value.numel() > 1
    if many:  # with values of torch's draw
        return {"drawn": [list(value.shape), str(value.dtype).removeprefix("torch.")]}
    if isinstance(value, torch.Tensor):
        return {"tensor": value.tolist()}
    if isinstance(value, type):
        return {"type": value.__name__}
    if isinstance(value, dict):
        return {key: written(inner, seen) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        inner = [written(one, seen) for one in value]
        return {"tuple": inner} if isinstance(value, tuple) else inner
    return value


def read(value, params):
    if isinstance(value, list):
        return [read(inner, params) for inner in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("parameter", number)]:
            return params.setdefault(number, nn.Parameter(torch.ones(1, 1)))
        case [("drawn", [shape, dtype])]:
            return torch.ones(shape, dtype=getattr(torch, dtype))
        case [("tensor", values)]:
            return torch.tensor(values)
        case [("type", name)]:
            return getattr(builtins, name)
        case [("tuple", inner)]:
            return tuple(read(inner, params))
    return {key: read(inner, params) for key, inner in value.items()}


@pytest.fixture
def borrowed():
    """By optimizer: (description, arguments) of `inputs`, and `errors`."""
    return {
        name: {kind: [read(row, {}) for row in rows] for kind, rows in kinds.items()}
        for name, kinds in json.loads(TABLE.read_text(encoding="utf-8")).items()
    }


@pytest.mark.ci
def test_the_table_is_that_of_the_installed_torch(tmp_path):
    """Where it is not, `found` takes its place."""
    subprocess.run([sys.executable, "-c", EXTRACT, tmp_path / "found", *OURS, "Muon"], check=True)
    found = {
        name: {kind: [written(row, {}) for row in rows] for kind, rows in kinds.items()}
        for name, kinds in pickle.loads((tmp_path / "found").read_bytes()).items()
    }
    assert found == json.loads(TABLE.read_text(encoding="utf-8"))


def configurations(found, name):
    """What ours are to take, each once: torch's arguments without refused ones that are off."""
    seen = set()
    for desc, kwargs in found[name]["inputs"]:
        if not any(kwargs.get(option) for option in REFUSED):
            kept = {option: v for option, v in kwargs.items() if option not in REFUSED}
            if repr(kept) not in seen:
                seen.add(repr(kept))
                yield desc, copy.deepcopy(kept)


def make_ours(name, params, options, folder=None):
    if folder is not None:
        options = {**options, "nvme_offload_fraction": 1.0, "nvme_offload_dir": folder}
    config = NvmeConfig(block_numel=1024)
    return OURS[name](params, **{**DEFAULTS.get(name, {}), **options}, nvme=config)


def make_theirs(name, params, options):
    return THEIRS[name](params, foreach=False, **options)


def make_params(dtype=torch.float32, contiguous=True):
    """A matrix and a vector, as slices with gaps where not `contiguous`."""
    generator = torch.Generator().manual_seed(0)

    def param(*shape):
        values = torch.randn((*shape, 2), generator=generator, dtype=torch.float64).to(dtype)
        return nn.Parameter(values[..., 0].contiguous() if contiguous else values[..., 0])

    return [param(10, 5), param(10)]


def take_steps(params, optimizer, count=STEPS, schedules=()):
    """Weights after steps on a loss of their own; flat fp64."""
    matrix, vector = params
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs = torch.randn(5, generator=generator, dtype=torch.float64).to(matrix.dtype)

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = (matrix.mv(inputs) + vector).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        for schedule in schedules:
            plateau = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
            schedule.step(*([loss.detach()] if plateau else []))
    return flat(params)


def compare(got, want, start, dtype, said):
    error = relative_error(got - start, want - start)
    # the product of momentums is fp32 in torch, whatever the parameters are
    bound = 1e-7 if dtype == torch.float64 and said.startswith("NAdam") else BOUNDS[dtype]
    assert error < bound, f"{said}: off by {error:.1e}"


OFTEN = ("AdamW", "Adam", "SGD")  # others where a change is to land
NAMES = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.ci]) for name in OURS],
)
PLACES = pytest.mark.parametrize("on_disk", [False, True], ids=["resident", "nvme"])


@PLACES
@NAMES
def test_every_configuration_updates_as_torchs(borrowed, name, on_disk, tmp_path):
    """Of every dtype and memory order, with torch's bits where SGD is in memory."""
    ran = 0
    for desc, options in configurations(borrowed, name):
        for dtype in BOUNDS:
            for contiguous in (True, False):
                ours, theirs = (make_params(dtype, contiguous) for _ in range(2))
                start = flat(ours)
                optimizer = make_ours(name, ours, options, tmp_path if on_disk else None)
                got = take_steps(ours, optimizer)
                want = take_steps(theirs, make_theirs(name, theirs, copy.deepcopy(options)))
                if "lr" in options and isinstance(options["lr"], torch.Tensor):
                    dtype = torch.float32  # torch divides this number in its own dtype
                compare(got, want, start, dtype, f"{name} {desc} {dtype} {contiguous=}")
                if name == "SGD":
                    assert torch.equal(got, want), desc
                assert (optimizer.nvme_bytes > 0) == on_disk
                optimizer.close()
                ran += 1
    assert ran >= 4 * 5


@NAMES
def test_no_configuration_is_left_out_but_for_the_reasons_above(borrowed, name):
    refused = 0
    for _, kwargs in borrowed[name]["inputs"]:
        asked = {option: v for option, v in kwargs.items() if v or option not in REFUSED}
        if asked.keys() & REFUSED.keys():
            refused += 1
            with pytest.raises(TypeError, match="|".join(asked.keys() & REFUSED.keys())):
                OURS[name](make_params(), **copy.deepcopy(asked))
    # of Adafactor torch's table asks for none of these
    assert (name != "Adafactor") == (refused > 0) and refused < len(borrowed[name]["inputs"])
    for option in REFUSED:
        with pytest.raises(TypeError, match=option):
            OURS[name](make_params(), **{option: True})


@NAMES
def test_what_torch_refuses_is_refused(borrowed, name):
    """With an error of the kind of torch's, or a TypeError for an option that is not there."""
    assert len(borrowed[name]["errors"]) > 6
    for desc, params, kwargs, kind in borrowed[name]["errors"]:
        params = [nn.Parameter(torch.ones(3))] if params is None else params
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                OURS[name](params, **kwargs)
        except Exception as error:
            refused_option = isinstance(error, TypeError) and any(o in str(error) for o in REFUSED)
            assert isinstance(error, kind) or refused_option, (desc, error)
            names_it = any(word in str(error) for word in (*kwargs, "param"))
            assert names_it, f"{desc}: {error} does not name what is wrong"
            assert desc not in TAKEN
        else:
            assert desc in TAKEN, f"{desc}: taken without a word"


@NAMES
@pytest.mark.parametrize("kind", REFUSED_PARAMETERS)
def test_parameters_that_are_refused_are_refused_with_words(name, kind):
    make, said = REFUSED_PARAMETERS[kind]
    with pytest.raises(ValueError, match=said):
        OURS[name]([nn.Parameter(make())])


# -- what torch's tests ask of every optimizer ---------------------------------------------------


@PLACES
@NAMES
def test_groups_have_their_own_options(borrowed, name, on_disk, tmp_path):
    for desc, options in configurations(borrowed, name):
        results = []
        for make in (make_ours, make_theirs):
            params = make_params()
            groups = [{"params": params[:1], "weight_decay": 0.5}, {"params": params[1:],
                                                                    "lr": 1e-3}]  # fmt: skip
            place = [tmp_path] if make is make_ours and on_disk else []
            results.append(take_steps(params, make(name, groups, options, *place)))
        compare(*results, flat(make_params()), torch.float32, desc)


@NAMES
def test_schedules_of_a_number_and_of_a_tensor(borrowed, name):
    lr_scheduler = torch.optim.lr_scheduler
    schedules = [
        lambda o: [lr_scheduler.StepLR(o, gamma=0.9, step_size=2)],
        lambda o: [
            lr_scheduler.ExponentialLR(o, 0.9),
            lr_scheduler.ReduceLROnPlateau(o, patience=0),
        ],
    ]
    for make_schedules in schedules:
        for lr in (0.01, torch.tensor(0.01)):
            results = []
            for make in (make_ours, make_theirs):
                params = make_params()
                optimizer = make(name, params, {"lr": copy.deepcopy(lr)})
                results.append(take_steps(params, optimizer, schedules=make_schedules(optimizer)))
                assert type(optimizer.param_groups[0]["lr"]) is type(lr)
            compare(*results, flat(make_params()), torch.float32, str(lr))


@PLACES
@NAMES
def test_a_state_dict_goes_on_where_it_was(borrowed, name, on_disk, tmp_path):
    """Through torch.save with weights only; into a fresh optimizer; and into torch's."""
    place = [tmp_path] if on_disk else []
    for desc, options in configurations(borrowed, name):
        params = make_params()
        optimizer = make_ours(name, params, options, *place)
        take_steps(params, optimizer, 3)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        start, others, theirs = (
            flat(params),
            *([nn.Parameter(p.detach().clone()) for p in params] for _ in range(2)),
        )
        want = take_steps(params, optimizer)
        file.seek(0)
        other = make_ours(name, others, {"lr": 0.5}, *place)
        saved = torch.load(file, weights_only=True)
        other.load_state_dict(saved)
        assert torch.equal(take_steps(others, other), want), desc
        torchs = make_theirs(name, theirs, {"lr": 0.5})
        torchs.load_state_dict(saved)
        compare(take_steps(theirs, torchs), want, start, torch.float32, desc)


@NAMES
def test_state_dicts_of_torch_and_older_ones_load(borrowed, name):
    """Older ones have fewer options in their groups, and step counts that are numbers."""
    for desc, options in configurations(borrowed, name):
        for older in (False, True):
            theirs = make_params()
            torchs = make_theirs(name, theirs, options)
            take_steps(theirs, torchs, 3)
            saved = copy.deepcopy(torchs.state_dict())
            if older:
                for group in saved["param_groups"]:
                    for option in ("maximize", "foreach", "fused", "differentiable", "capturable"):
                        if not group.get(option):
                            group.pop(option, None)
                for planes in saved["state"].values():
                    if "step" in planes:
                        planes["step"] = int(planes["step"])
            ours = [nn.Parameter(p.detach().clone()) for p in theirs]
            optimizer = make_ours(name, ours, {"lr": 0.5})
            optimizer.load_state_dict(saved)
            start = flat(ours)
            got, want = take_steps(ours, optimizer), take_steps(theirs, torchs)
            compare(got, want, start, torch.float32, desc)


@NAMES
def test_named_parameters_and_state_dicts_with_and_without_names(name):
    results = []
    for make in (make_ours, make_theirs):
        named, plain = make_params(), make_params()
        first = make(name, list(zip(("matrix", "vector"), named, strict=True)), {"lr": 0.01})
        second = make(name, plain, {"lr": 0.5})
        take_steps(named, first, 3)
        saved = first.state_dict()
        assert saved["param_groups"][0]["param_names"] == ["matrix", "vector"]
        second.load_state_dict(copy.deepcopy(saved))
        assert second.param_groups[0]["param_names"] == ["matrix", "vector"]
        results.append(take_steps(plain, second, 3))
    compare(*results, flat(make_params()), torch.float32, name)


@NAMES
def test_a_step_without_gradients_changes_nothing(borrowed, name):
    for desc, options in configurations(borrowed, name):
        params = make_params()
        optimizer = make_ours(name, params, options)
        before = flat(params)
        optimizer.step()
        assert torch.equal(flat(params), before), desc
        assert all(int(state.get("step", 0)) == 0 for state in optimizer.state.values())


@NAMES
def test_zero_gradients_change_what_they_change_in_torch(borrowed, name):
    for desc, options in configurations(borrowed, name):
        results = []
        for make in (make_ours, make_theirs):
            params = make_params()
            optimizer = make(name, params, options)
            for param in params:
                param.grad = torch.zeros_like(param)
            optimizer.step()
            results.append(flat(params))
        torch.testing.assert_close(*results, rtol=1e-7, atol=1e-7, msg=desc)


@NAMES
def test_hooks_of_steps_and_of_state_dicts_run(name):
    params = make_params()
    optimizer = make_ours(name, params, {})
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before the step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after the step"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after loading"))
    take_steps(params, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    order = ["the step", "saving", "loading"]
    assert calls == [f"{when} {what}" for what in order for when in ("before", "after")]


# -- Muon, which takes matrices alone ------------------------------------------------------------

# what its own takes besides, with the reason
TAKEN_BY_MUON = {**TAKEN, "only support 2D parameters": "others are stacks of matrices"}


def matrices(contiguous):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, 2, generator=generator) for shape in ((10, 5), (5, 10), (7, 7))]
    return [nn.Parameter(m[..., 0].contiguous() if contiguous else m[..., 0]) for m in made]


@PLACES
@pytest.mark.parametrize("contiguous", [True, False])
def test_every_configuration_of_muon_has_torchs_bits(borrowed, on_disk, contiguous, tmp_path):
    every = list(configurations(borrowed, "Muon"))
    assert len(every) > 6
    for desc, options in every:
        ours, theirs = matrices(contiguous), matrices(contiguous)
        place = {"nvme_offload_fraction": 1.0, "nvme_offload_dir": tmp_path} if on_disk else {}
        optimizer = HybridMuon(ours, **options, **place)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            for a, b in zip(ours, theirs, strict=True):
                a.grad = torch.randn(a.shape, generator=generator)
                b.grad = a.grad.clone()
            optimizer.step()
            if not step:
                torchs = torch.optim.Muon(theirs, **copy.deepcopy(options))
            torchs.step()
        assert torch.equal(flat(ours), flat(theirs)), desc
        optimizer.close()


def test_what_torchs_muon_refuses_is_refused(borrowed):
    for desc, params, kwargs, kind in borrowed["Muon"]["errors"]:
        params = [nn.Parameter(torch.ones(3, 3))] if params is None else params
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if desc in TAKEN_BY_MUON:
                HybridMuon(params, **kwargs)
                continue
            with pytest.raises((kind, TypeError)):
                HybridMuon(params, **kwargs)
