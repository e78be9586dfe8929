"""`ignored_params`: parameters of a wrapped module that stay the user's own, as in FSDP2."""

import pytest
import torch
from torch import nn

import gemini
from bench.shared.models import seeded
from bench.shared.workers import run_ranks
from gemini import GeminiDDP
from gemini.units import format_bytes
from optim import HybridAdam
from tests.support.quantised import KINDS, lora, plain_losses, same, wrapped_losses


class Tables(nn.Module):
    """A trained embedding that is the user's own, a counter that is a parameter, and a rest."""

    def __init__(self):
        super().__init__()
        with seeded():
            self.table = nn.Embedding(40_000, 8, sparse=True)
            self.ids = nn.Parameter(torch.arange(40_000).flip(0), requires_grad=False)
            self.norm = nn.BatchNorm1d(8)
            self.head = nn.Linear(8, 4)

    def forward(self, picked):
        return self.head(self.norm(self.table(self.ids[picked])))


def ignored(name, param):
    return name.startswith("table.") or not param.is_floating_point()


def picked(rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 40_000, (16,), generator=generator)


def wrapped(module, **options):
    return GeminiDDP(module, precision="fp32", ignored_params=ignored, **options)


def untouched(rank):
    module = Tables()
    with torch.no_grad():
        module.table.weight += rank  # each rank's own, and it stays so
    before = module.table.weight, module.table.weight.detach().clone(), module.ids
    model = wrapped(module)
    optimizer = HybridAdam(_of_the_module(model), lr=1e-2)
    own = torch.optim.SparseAdam([module.table.weight], lr=1e-2)
    model(picked(rank)).square().mean().backward()
    gradient = module.table.weight.grad.clone()
    alone = Tables()
    with torch.no_grad():
        alone.table.weight += rank
    alone(picked(rank)).square().mean().backward()
    assert module.table.weight is before[0] and module.ids is before[2]
    assert torch.equal(module.table.weight, before[1])
    assert torch.equal(gradient.to_dense(), alone.table.weight.grad.to_dense())
    optimizer.step()
    own.step()
    assert not torch.equal(module.table.weight, before[1])
    model.zero_grad()
    assert module.table.weight.grad is None
    state = model.state_dict()
    assert list(state) == (list(alone.state_dict()) if rank == 0 else [])
    if rank == 0:
        assert torch.equal(state["table.weight"], module.table.weight)
        assert torch.equal(state["ids"], module.ids)
    return module.head.weight.detach().sum().item(), module.table.weight.detach().sum().item()


def _of_the_module(model):
    """All of its parameters but those that the user trains."""
    return [param for name, param in model.named_parameters() if name != "table.weight"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_ignored_parameters_stay_each_ranks_own(world_size):
    results = run_ranks(untouched, world_size)
    assert len({head for head, _ in results}) == 1
    assert len({table for _, table in results}) == world_size


def test_an_optimizer_leaves_out_what_is_frozen_and_ignored():
    """Made before the module is wrapped, or after."""
    for before in (True, False):
        module = Tables()
        module.table.weight.requires_grad_(False)
        optimizer = HybridAdam(module.parameters()) if before else None
        model = wrapped(module)
        optimizer = optimizer or HybridAdam(model.parameters())
        model(picked(0)).sum().backward()
        optimizer.step()
        assert sorted(optimizer.state_dict()["param_groups"][0]["params"]) == [
            "head.bias", "head.weight", "norm.bias", "norm.weight",
        ]  # fmt: skip
        optimizer.close()


def test_checkpoints_exports_and_state_dicts_have_them(tmp_path):
    module = Tables()
    model = wrapped(module)
    optimizer = HybridAdam(_of_the_module(model))
    model(picked(0)).sum().backward()
    optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    gemini.export_safetensors(tmp_path / "export", model)

    def changed():
        with torch.no_grad():
            module.table.weight.zero_()
            module.ids.zero_()
            for param in module.head.parameters():
                param.zero_()

    for load in (
        lambda: gemini.load_checkpoint(tmp_path / "saved", model, optimizer),
        lambda: gemini.load_checkpoint(tmp_path / "export", model, strict=False),
        lambda: model.load_state_dict(expected),
    ):
        changed()
        load()
        found = model.state_dict()
        assert all(torch.equal(value, found[name]) for name, value in expected.items())
    optimizer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_on_quantised_weights_of_other_libraries(kind):
    """Losses of plain peft to the last bit; the state dict has the library's own names and bits."""
    plain, module = lora(kind), lora(kind)
    quantised = {p for p in module.parameters() if type(p) is not nn.Parameter}
    model = GeminiDDP(module, ignored_params=quantised)
    assert wrapped_losses(model) == plain_losses(plain)[0]
    frozen = {name: value for name, value in plain.state_dict().items() if "lora_" not in name}
    found = {name: value for name, value in model.state_dict().items() if name in frozen}
    assert same(found, frozen)


def test_a_value_that_no_tensor_holds_is_not_lost_in_silence():
    """Double quantisation has a number in a packed one."""
    module, other = lora("nf4-double"), lora("nf4-double", seed=1)
    quantised = {p for p in module.parameters() if type(p) is not nn.Parameter}
    model = GeminiDDP(module, ignored_params=quantised)
    model.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=r"quant_state.* is of an ignored parameter, whose module"):
        model.load_state_dict(other.state_dict())


def test_an_ignored_parameter_may_be_replaced_and_a_wrapped_one_not():
    module = Tables()
    model = wrapped(module)
    module.table.weight = nn.Parameter(torch.zeros(40_000, 8))
    assert model(picked(0)).shape == (16, 4)
    model.unwrap()
    assert type(module.head.weight) is nn.Parameter
    model = wrapped(module)
    module.head.weight = nn.Parameter(torch.zeros(4, 8))
    with pytest.raises(RuntimeError, match=r"parameter head\.weight is another"):
        model(picked(0))


def test_a_set_of_parameters_is_taken_and_tied_names_go_together():
    module = Tables()
    module.other = nn.Embedding(40_000, 8)
    module.other.weight = module.table.weight
    model = GeminiDDP(module, precision="fp32", ignored_params={module.table.weight, module.ids})
    assert [name for name, _ in model.ignored_parameters()] == ["ids", "table.weight"]
    assert {spec.name.partition(".")[0] for spec in model.engine.layout.params} == {"norm", "head"}


REFUSED = {
    "is no parameter of this module": {"ignored_params": {nn.Parameter(torch.zeros(2))}},
    "has no parameter but what ignored_params has": {"ignored_params": lambda name, param: True},
    "table.weight is in ignored_params and trained": {
        "ignored_params": ignored,
        "precision": "fp16",
    },
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_ignored_is_refused(said):
    with pytest.raises(ValueError, match=said):
        GeminiDDP(Tables(), **REFUSED[said])


def test_an_ignored_parameter_on_the_meta_device_is_refused():
    with gemini.init_empty():
        module = Tables()
    with pytest.raises(ValueError, match=r"ids is in ignored_params and on the meta device"):
        wrapped(module)


def test_a_trace_and_ignored_parameters_are_refused_together():
    traced = gemini.trace(Tables().head, (torch.zeros(2, 8),), precision="fp32")
    with pytest.raises(ValueError, match=r"ids is in ignored_params; expected one of"):
        wrapped(Tables(), trace=traced)


def test_an_optimizer_over_trained_ignored_parameters_is_refused_by_name():
    model = wrapped(Tables())
    with pytest.raises(ValueError, match=r"got table\.weight, which is in ignored_params"):
        HybridAdam(model.parameters())


def test_bytes_of_ignored_parameters_are_told_as_in_no_budget():
    model = wrapped(Tables())
    nbytes = sum(param.nbytes for _, param in model.ignored_parameters())
    report = model.memory_report()
    assert report.as_dict()["ignored_bytes"] == nbytes
    assert f"ignored, in no budget: {format_bytes(nbytes)} on cpu" in str(report)
    assert "in no chunk, plan or budget" in model.explain("table.weight")
