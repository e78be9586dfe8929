"""Names that are saved have nothing of torch's wrappers, by every door and back."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gemini import EMA, GeminiDDP
from gemini.checkpoint import load_checkpoint, save_checkpoint
from gemini.saved_names import SavedNames, renamed, without_wrappers
from optim import HybridAdam
from tests.support.loops.doors import DOORS, WRAPPERS, bare, through
from tests.support.loops.sides import Net, full_step, wrapped

CI = pytest.mark.ci  # the compiler takes a second to import
KINDS = [pytest.param(k, marks=CI if "compiled" in k else ()) for k in WRAPPERS]


class Boxed(nn.Module):
    """A module of a user, with a child of a wrapper's name: what earlier releases have saved."""

    def __init__(self, inner, name):
        super().__init__()
        self.add_module(name, inner)
        self.name = name

    def forward(self, x):
        return getattr(self, self.name)(x)


def boxed(name="_checkpoint_wrapped_module"):
    module = Net()
    module.layers[1] = Boxed(module.layers[1], name)
    return module


def checkpointed(*_):
    return WRAPPERS["checkpointed"](Net())


def trained(build, steps=2):
    model, optimizer = wrapped(lambda depth: build())
    for seed in range(steps):
        full_step(model, optimizer, seed)
    return model, optimizer


def flat(model):
    return torch.cat([value.flatten() for value in model.state_dict().values()])


@pytest.mark.parametrize("kind", KINDS)
def test_saved_names_are_those_of_the_module_without_wrappers(kind):
    module = WRAPPERS[kind](Net())
    names = [name for name, _ in module.named_parameters()]
    saved = SavedNames(module)
    assert [*map(saved.saved, names)] == [name for name, _ in Net().named_parameters()]
    assert [*map(saved.saved, module.state_dict())] == [*Net().state_dict()]  # by torch's hooks
    assert [*map(saved.found(names), map(saved.saved, names))] == names
    assert [*map(without_wrappers([*Net().state_dict()]), names)] == [*map(bare, names)]


def test_a_users_own_child_of_a_wrappers_name_keeps_it():
    names = [name for name, _ in boxed().named_parameters()]
    assert [*map(SavedNames(boxed()).saved, names)] == names
    assert [*map(without_wrappers(names), names)] == names
    there = {"a._orig_mod.b": 1, "a.b": 2, "c._orig_mod": 3}
    assert renamed(there, without_wrappers(["a.b"])) == {"a._orig_mod.b": 1, "a.b": 2, "c": 3}


@pytest.mark.parametrize("door", DOORS)
def test_state_of_a_module_under_wrappers_loads_without_them_and_back(door):
    model, optimizer = trained(checkpointed)
    before = flat(model)
    through(model, optimizer, door, Net(), pending=False)
    assert torch.equal(before, flat(model))


@pytest.mark.parametrize("name", ["_checkpoint_wrapped_module", "_orig_mod"])
def test_a_checkpoint_with_names_of_wrappers_loads_under_any_and_without(name, tmp_path):
    model, optimizer = trained(lambda: boxed(name))
    save_checkpoint(tmp_path / "a", model, optimizer)
    state = optimizer.state_dict()
    full_step(model, optimizer, 5)
    for build in (Net, checkpointed):
        other, its = trained(build, 0)
        load_checkpoint(tmp_path / "a", other, its)
        full_step(other, its, 5)
        assert torch.equal(flat(model), flat(other))
        its.load_state_dict(state)
    plain = Net()
    load_checkpoint(tmp_path / "a", plain, HybridAdam(plain.parameters()))


def test_reports_and_gradients_know_the_names_of_the_module_and_the_saved_ones():
    model, _ = wrapped(checkpointed)
    model(torch.ones(1, 24)).sum().backward()
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in model.named_gradients()] == names
    seen = []
    model.map_gradients(lambda name, part: seen.append(name))
    assert seen == names and any(name != bare(name) for name in names)
    for name in names:
        assert model.explain(name) == model.explain(bare(name))


def test_an_average_is_saved_under_wrappers_and_loaded_without(tmp_path):
    (model, optimizer), (other, _) = trained(checkpointed), trained(Net, 0)
    first, second = EMA(model), EMA(other)
    first.update()
    full_step(model, optimizer, 7)
    first.update()
    first.save(tmp_path / "average")
    second.load(tmp_path / "average")
    with first.swapped(), second.swapped():
        assert torch.equal(flat(model), flat(other))


def test_training_on_an_average_is_said_where_its_checkpoint_is_loaded(tmp_path, caplog):
    model, optimizer = trained(Net)
    average = EMA(model)
    full_step(model, optimizer, 7)
    average.update()
    with average.swapped():
        save_checkpoint(tmp_path / "inside", model, optimizer)
    save_checkpoint(tmp_path / "outside", model, optimizer)
    for name, said in (("outside", 0), ("inside", 1)):
        load_checkpoint(tmp_path / name, model, optimizer)
        assert sum("was saved inside ema.swapped()" in r.message for r in caplog.records) == said
    load_checkpoint(tmp_path / "inside", model)
    assert sum("was saved inside ema.swapped()" in r.message for r in caplog.records) == 1


@pytest.mark.ci
def test_a_compiled_wrapper_is_saved_and_loaded_as_the_wrapper_itself(tmp_path):
    model, optimizer = trained(Net)
    save_checkpoint(tmp_path / "a", torch.compile(model, backend="eager"), optimizer)
    other, its = trained(Net, 0)
    load_checkpoint(tmp_path / "a", torch.compile(other, backend="eager"), its)
    assert torch.equal(flat(model), flat(other))


def test_a_wrapped_module_under_a_wrapper_at_its_root_keeps_the_names_of_torch():
    model = GeminiDDP(checkpoint_wrapper(Net()), precision="fp32")
    assert [*model.state_dict()] == [*Net().state_dict()]  # torch's hook has renamed them
    model.load_state_dict({f"_orig_mod.{name}": v + 1 for name, v in Net().state_dict().items()})
    assert torch.equal(flat(model), flat(Net()) + 1)
