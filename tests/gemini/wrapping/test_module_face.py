"""The wrapper as torch sees it: names, signature, state dicts, parents, and the way out."""

import copy
import inspect
import io
import pickle
import warnings
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from bench.shared.models import Tower
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP, StaticPlacement
from gemini.runtime.autograd.io_casts import lost_number
from optim import HybridAdam
from tests.support.loops.sides import (
    HOMES,
    PLACEMENTS,
    SMALL,
    Net,
    batch,
    full_step,
    loss_of,
    wrapped,
)

# -- names and signature ---------------------------------------------------------------------


def test_every_name_is_that_of_the_inner_module():
    module = Tower()
    want = {
        "parameters": [n for n, _ in module.named_parameters()],
        "state": list(module.state_dict()),
        "modules": [n for n, _ in module.named_modules()],
    }
    model = GeminiDDP(module)
    assert [n for n, _ in model.named_parameters()] == want["parameters"]
    assert list(model.state_dict()) == want["state"]
    assert [n for n, _ in model.named_modules()][1:] == want["modules"]  # the first is the wrapper
    assert model.get_parameter("layers.2.1.weight") is module.layers[2][1].weight
    parent = nn.ModuleDict({"backbone": model})
    assert [n for n, _ in parent.named_parameters()] == [
        f"backbone.{n}" for n in want["parameters"]
    ]


def test_forward_has_the_signature_and_the_docstring_of_the_inner_one():
    class Named(nn.Linear):
        def forward(self, input, scale: float = 2.0, *, labels=None):
            """What it does."""
            return super().forward(input) * scale

    model = GeminiDDP(Named(3, 3), precision="fp32")
    assert str(inspect.signature(model.forward)) == "(input, scale: float = 2.0, *, labels=None)"
    assert model.forward.__doc__ == "What it does."
    assert torch.equal(model(torch.ones(2, 3), 3.0), model.forward(torch.ones(2, 3), scale=3.0))


def test_the_signature_keeps_nothing_alive():
    model = GeminiDDP(Net(), precision="fp32")
    dead = weakref.ref(model), weakref.ref(model.module)
    del model
    assert [ref() for ref in dead] == [None, None]


# -- state dicts -----------------------------------------------------------------------------


class Extra(nn.Module):
    """A module with all that torch's state dicts know."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.told = 0
        self._register_load_state_dict_pre_hook(self._from_older)

    def get_extra_state(self):
        return {"told": self.told}

    def set_extra_state(self, state):
        self.told = state["told"]

    def _from_older(self, state_dict, prefix, *_):
        for name in ("weight", "bias"):
            if f"{prefix}old.{name}" in state_dict:
                state_dict[f"{prefix}body.{name}"] = state_dict.pop(f"{prefix}old.{name}")

    def forward(self, x):
        return self.norm(self.body(x))


def test_a_state_dict_is_as_torch_makes_it():
    module = Extra()
    want = module.state_dict()
    model = GeminiDDP(module)
    state = model.state_dict()
    assert isinstance(state, OrderedDict) and list(state) == list(want)
    assert state._metadata.keys() == want._metadata.keys()
    for name, value in want.items():
        same = torch.equal(state[name], value) if isinstance(value, torch.Tensor) else None
        assert same or state[name] == value, name


def test_extra_state_and_hooks_of_loading_are_honoured():
    model = GeminiDDP(Extra())
    state = model.state_dict()
    state["_extra_state"] = {"told": 7}
    for name in ("weight", "bias"):
        state[f"old.{name}"] = state.pop(f"body.{name}") + 1
    model.load_state_dict(state)
    assert model.module.told == 7
    assert torch.equal(model.state_dict()["body.weight"], Extra().body.weight + 1)
    with pytest.raises(RuntimeError, match=r"unexpected \['old\.weight'\]"):
        GeminiDDP(Net()).load_state_dict({**Net().state_dict(), "old.weight": torch.ones(1)})


@pytest.mark.parametrize("place", HOMES)
def test_a_wrapped_child_is_saved_and_loaded_by_its_parent(place):
    def parent(seed):
        model, optimizer = wrapped(place=place)
        for s in range(seed):
            full_step(model, optimizer, s)
        return nn.ModuleDict({"head": nn.Linear(3, 3), "backbone": model}), optimizer

    first, _ = parent(2)
    saved = first.state_dict()
    assert "backbone.layers.0.weight" in saved
    other, optimizer = parent(0)
    keys = other.load_state_dict(saved)
    assert keys.missing_keys == [] and keys.unexpected_keys == []
    for name, value in other.state_dict().items():
        assert torch.equal(value, saved[name]), name
    full_step(other["backbone"], optimizer)  # masters followed
    full_step(first["backbone"], _)
    saved = first.state_dict()
    moved = [name for name, v in other.state_dict().items() if not torch.equal(v, saved[name])]
    assert all("backbone" in name for name in moved)

    del saved["backbone.layers.1.bias"]
    saved["backbone.new"] = torch.ones(1)
    with pytest.raises(RuntimeError) as error:
        other.load_state_dict(saved)
    assert "backbone.layers.1.bias" in str(error.value) and "backbone.new" in str(error.value)
    assert "backbone.module" not in str(error.value)
    wrong = {**first.state_dict(), "backbone.layers.0.bias": torch.ones(2)}
    with pytest.raises(RuntimeError, match=r"layers\.0\.bias: \(2,\) was given"):
        other.load_state_dict(wrong)


def test_a_parent_moves_trains_and_drops_gradients_of_a_wrapped_child():
    model, _ = wrapped()
    parent = nn.Sequential(model)
    parent.to("cpu").eval()
    assert not model.module.layers[0].training
    loss_of(parent, 0).backward()
    parent.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    assert not any(chunk.gradient.exists for chunk in model.engine.chunks)


# -- writes ----------------------------------------------------------------------------------


class Tempered(Net):
    """A module whose attributes change what it computes."""

    temperature = 1.0

    def __init__(self, depth=3):
        super().__init__(depth)
        self.register_buffer("shift", torch.zeros(1))
        self._gain = 1.0

    @property
    def gain(self):
        return self._gain

    @gain.setter
    def gain(self, value):
        self._gain = value

    def forward(self, x):
        return super().forward(x) * self.temperature * self.gain + self.shift


def test_what_is_set_on_the_wrapper_is_the_inner_modules():
    model, plain = GeminiDDP(Tempered(), precision="fp32"), Tempered()
    for one in (model, plain):
        one.temperature, one.gain, one.shift, one._gain_of_old = 2.0, 3.0, torch.ones(1), None
        one.register_buffer("kept", torch.ones(2))
        one.act, one.known = nn.GELU(), one.layers
        one.added = 1
        del one.added
    inner = model.module
    assert (inner.temperature, inner._gain, inner.shift.item()) == (2.0, 3.0, 1.0)
    assert not hasattr(inner, "added") and inner.known is inner.layers
    assert torch.equal(model(torch.ones(1, 24)), plain(torch.ones(1, 24)))
    assert model.state_dict().keys() >= {"kept", "shift"}
    model.training = False  # an attribute of every module; torch sets it on the one alone
    assert not model.training and not inner.training and inner.layers.training
    with pytest.raises(AttributeError, match="no attribute 'added'"):
        del model.added


def test_parameters_that_were_not_wrapped_are_refused_where_they_are_set():
    model = GeminiDDP(Net(), precision="fp32")
    layer = model.layers[0]
    model.first = layer  # its parameters were wrapped
    for name, value, said in (
        ("layers", nn.ModuleList([nn.Linear(2, 2)]), "layers.0.weight is another"),
        ("head", nn.Linear(2, 2), "head.weight is new"),
        ("scale", nn.Parameter(torch.ones(1)), "scale is new"),
    ):
        for write in (setattr, lambda m, n, v: m.add_module(n, v)):
            if write is setattr or isinstance(value, nn.Module):
                with pytest.raises(RuntimeError, match=said):
                    write(model, name, value)
    root = GeminiDDP(nn.Linear(2, 2), precision="fp32")
    for value, said in ((None, "gone"), (torch.ones(2), "another"), (layer.bias, "another")):
        with pytest.raises(RuntimeError, match=f"parameter bias is {said}"):
            root.bias = value
    with pytest.raises(RuntimeError, match="parameter bias is gone"):
        del root.bias
    with pytest.raises(RuntimeError, match=r"module\.weight is new"):
        root.module = nn.Linear(2, 2)
    root(torch.ones(1, 2))  # nothing was changed


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_module_inside_is_converted_no_more_than_the_wrapper(precision):
    model = GeminiDDP(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), precision=precision)
    before = [(p.dtype, p.device) for p in (*model.parameters(), *model.buffers())]
    for change in ("half", "float", "double", "bfloat16"):
        kept = getattr(torch.empty(0), change)().dtype
        for one in (model, model.module, *model.module):
            own = {model.engine.dtype} if one is model else {p.dtype for p in one.parameters()}
            if own == {kept}:
                getattr(one, change)()
                continue
            with pytest.raises(ValueError, match="a wrapped module stays in"):
                getattr(one, change)()
    model.module[0].to("cpu")
    for one in (model, model.module, *model.module):
        with pytest.raises(ValueError, match=r"to_empty\(\) leaves a module without values"):
            one.to_empty(device="cpu")
    assert before == [(p.dtype, p.device) for p in (*model.parameters(), *model.buffers())]
    model(torch.ones(2, 3))


# -- copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", HOMES)
def test_parameters_are_pickled_and_copied_as_plain_tensors(place):
    model, _ = wrapped(place=place)
    want = {n: v.to(torch.float32) for n, v in Net(len(model.layers)).state_dict().items()}
    file = io.BytesIO()
    torch.save(model.module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    copied = copy.deepcopy(model.module.state_dict())
    for name, param in model.named_parameters():
        again = pickle.loads(pickle.dumps(param))
        assert type(again) is nn.Parameter and again.requires_grad
        detached = copy.deepcopy(param.detach())
        for found in (loaded[name], copied[name], again.detach(), detached):
            assert type(found) is torch.Tensor and torch.equal(found, want[name]), name


def test_a_wrapped_module_is_not_copied_pickled_or_shared():
    model, _ = wrapped()
    for module in (model, model.module, nn.Sequential(model)):
        for make in (copy.deepcopy, pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
            with pytest.raises(TypeError, match=r"load model.state_dict\(\) into a plain one"):
                make(module)
    for share in (model.share_memory, model.module.share_memory):
        with pytest.raises(RuntimeError, match="cannot be moved to shared memory"):
            share()


def test_the_address_of_a_released_parameter_is_not_given():
    model, _ = wrapped(place="host")
    weight = model.layers[0].weight
    for read in (weight.data_ptr, weight.untyped_storage, weight.detach().data_ptr):
        with pytest.raises(RuntimeError, match="released and gathered again"):
            read()
    with model.summon_full_params():
        assert weight.data_ptr() == weight.detach().data_ptr() != 0
    assert wrapped()[0].layers[0].weight.data_ptr() != 0


@pytest.mark.parametrize("place", HOMES)
def test_a_view_shows_the_leafs_own_node(place):
    """torch's pipelining, and hooks in the manner of DDP, look for it this way."""
    model, _ = wrapped(place=place)
    for param in model.parameters():
        nodes = {
            view.grad_fn.next_functions[0][0]
            for view in (param.view_as(param), param.expand_as(param), param.t(), param[:2])
        }
        assert len(nodes) == 1 and "AccumulateGrad" in str(nodes)


# -- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_batch_norms_run_in_every_precision_with_fp32_statistics(precision):
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, 3), nn.BatchNorm2d(2)
    )
    plain = copy.deepcopy(module)
    model = GeminiDDP(module, precision=precision)
    x = torch.randn(4, 3, 9, 9)
    for _ in range(2):
        y, want = model(x), plain(x)
    assert y.dtype == {"bf16": torch.bfloat16}.get(precision, torch.float32)
    bound = {"bf16": 0.1, "fp16": 0.01, "fp32": 1e-6}[precision]  # some roundings of values near 3
    assert torch.allclose(y.float(), want, atol=bound)
    y.float().pow(2).mean().backward()
    HybridAdam(model.parameters()).step()
    for name, buffer in model.named_buffers():
        assert buffer.dtype == dict(plain.named_buffers())[name].dtype
        assert torch.allclose(buffer.float(), dict(plain.named_buffers())[name].float(), rtol=0.05)


def test_targets_keep_their_bits_where_inputs_are_not_cast():
    class Inner(Net):
        def forward(self, x, target):
            self.seen = target.dtype, float(target[0, 0])
            y = super().forward(x.to(self.layers[0].weight.dtype))
            return (y.float() - target).pow(2).mean()

    x, y = batch(0)
    y[0, 0] = 1.001
    model = GeminiDDP(Inner(), cast_inputs=False)
    model(x, y).backward()
    assert model.module.seen == (torch.float32, float(y[0, 0]))
    model = GeminiDDP(Inner())
    model(x, y)
    assert model.module.seen[0] == torch.bfloat16


@pytest.mark.parametrize(
    ("values", "dtype", "lost"),
    [
        (torch.tensor([500.0, 997.0]), torch.bfloat16, (997.0, 996.0)),
        (torch.tensor([[4.0, 257.0]] * 2), torch.bfloat16, (257.0, 256.0)),
        (torch.tensor(0.3), torch.bfloat16, (0.3, 0.30078125)),
        (torch.full((2, 2), 70000.5), torch.float16, (70000.5, float("inf"))),
        (torch.tensor([1.7e9 + 1], dtype=torch.float64), torch.float32, (1.7e9 + 1, 1.7e9)),
        (torch.tensor([500.0, float("inf"), float("nan")]), torch.bfloat16, None),
        (torch.full((2, 3), 0.3), torch.bfloat16, None),  # features lose bits
        (torch.tensor([997.0]), torch.float32, None),
        (torch.tensor([997]), torch.bfloat16, None),
        (torch.empty(2, 0), torch.bfloat16, None),
        (torch.empty(3, device="meta"), torch.bfloat16, None),
    ],
)
def test_a_number_that_a_cast_changes_is_found(values, dtype, lost):
    found = lost_number(values, dtype)
    changed, *numbers = [0.0] if found is None else found.tolist()
    assert bool(changed) == (lost is not None)
    assert lost is None or tuple(numbers) == pytest.approx(lost, rel=1e-7)


def test_numbers_that_the_cast_of_arguments_changes_are_told_once():
    class Timed(Net):
        def forward(self, x, t):
            return super().forward(x)

    x, exact, lost = batch(0)[0], torch.tensor([4.0, 500.0]), torch.tensor([997.0, 4.0])
    model = GeminiDDP(Timed())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GeminiDDP(Timed(), cast_inputs=False)(x.bfloat16(), lost)
        model(x, exact)
    with pytest.warns(UserWarning, match=r"997.0.* becomes 996.0.* cast_inputs=False") as told:
        model(x, t={"inside": (lost,)})
        model(x, lost)
    assert len(told) == 1 and told[0].filename == __file__


def test_a_loss_scale_may_be_a_number_that_stays():
    model = GeminiDDP(Net(), precision="fp16", loss_scale=512.0)
    optimizer = HybridAdam(model.parameters())
    for seed in range(3):
        full_step(model, optimizer, seed)
        assert optimizer.last_report.loss_scale == 512.0
    with pytest.raises(ValueError, match="loss_scale='512'"):
        GeminiDDP(Net(), precision="fp16", loss_scale="512")
    with pytest.raises(ValueError, match="loss_scale is for precision"):
        GeminiDDP(Net(), loss_scale=512.0)


@pytest.mark.parametrize("place", list(PLACEMENTS))
def test_a_module_with_nothing_to_train_is_evaluated(place):
    def build(depth=3):
        return Net(depth).requires_grad_(False)

    module = build()
    options = {"precision": "fp32", **SMALL, **PLACEMENTS[place](module)}
    if place == "files":
        options["placement_policy"] = StaticPlacement(offload_param_frac=1.0)
        options["device"] = SimBackend()
        del options["trace"]
    model = GeminiDDP(module, **options)
    x, _ = batch(0)
    for _ in range(3):
        assert torch.equal(model(x), Net()(x))
    assert model.explain("layers.0.weight")
    assert list(model.named_gradients()) == []


def test_a_graph_from_before_a_step_is_refused_as_torch_does():
    for place in HOMES:
        model, optimizer = wrapped(place=place)
        old = loss_of(model, 0)
        full_step(model, optimizer, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        model.zero_grad()
        full_step(model, optimizer, 2)


@pytest.mark.parametrize("place", HOMES)
@pytest.mark.parametrize("of", ["parameters", "inputs"])
def test_autograd_grad_gives_what_torch_gives(place, of):
    found = []
    model, optimizer = wrapped(place=place)
    for module in (Net(len(model.layers)), model):
        x = batch(0)[0].requires_grad_()
        wanted = [x] if of == "inputs" else list(module.parameters())
        loss = module(x).pow(2).mean()
        found.append(torch.autograd.grad(loss, wanted))
        assert all(p.grad is None for p in module.parameters())
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-8)
    full_step(model, optimizer)


@pytest.mark.parametrize("place", HOMES)
def test_autograd_grad_in_fp16_carries_no_loss_scale(place):
    """fp16 rounds gradients of about 0.01 to 2^-11 of themselves, some ten times on their way."""
    found = []
    model, optimizer = wrapped(place=place, precision="fp16", loss_scale=256.0)
    for module in (Net(len(model.layers)), model):
        x = batch(0)[0].requires_grad_()
        loss = module(x).pow(2).mean()
        found.append(torch.autograd.grad(loss, [x, *module.parameters()]))
    for ours, theirs in zip(*found, strict=True):
        assert float((theirs - ours.float()).norm() / ours.norm()) < 0.01
    full_step(model, optimizer)
    assert not optimizer.last_report.skipped
