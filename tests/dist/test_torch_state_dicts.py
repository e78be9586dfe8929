"""torch.distributed.checkpoint.state_dict over a wrapped module, as over one of FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from bench.shared.models import Tower, seeded, token_loss
from bench.shared.workers import run_ranks
from gemini import GeminiDDP
from optim import HybridAdam
from tests.support.checkpoints import ADAM, assert_same, batches, make, train, whole
from tests.support.said import said

pytestmark = pytest.mark.ci

FULL = StateDictOptions(full_state_dict=True)
RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
LAYOUTS = ({"placement": "resident"}, {"placement": "nvme"}, {"placement": "mixed"},
         {"precision": "fp32"})  # fmt: skip


def trained(form, steps=(0, 2), **options):
    model, optimizer = make(**form, **options)
    train(model, optimizer, batches(*steps, dist.get_world_size()))
    return model, optimizer


def by_name(weights, state):
    """As `whole` has them."""
    found = {f"model.{name}": value for name, value in weights.items()}
    for name, planes in state["state"].items():
        found |= {f"{name}.{plane}": value for plane, value in planes.items()}
    return found


def shown(rank, form):
    """What torch's functions say, and what is there."""
    model, optimizer = trained(form)
    sharded = by_name(*get_state_dict(model, optimizer))
    cut = {name: value for name, value in sharded.items() if isinstance(value, DTensor)}
    others = sharded.keys() - cut.keys()
    found = {
        "dims": {(*value.placements, value.dtype) for value in cut.values()},
        "locals": {name: value.to_local().shape[0] for name, value in cut.items()},
        "others": {name.rpartition(".")[2] for name in others},
        "sharded": {n: v.full_tensor() if n in cut else v for n, v in sharded.items()},
        "all": by_name(
            get_model_state_dict(model, options=FULL),
            get_optimizer_state_dict(model, optimizer, options=FULL),
        ),
    }
    only = get_state_dict(model, optimizer, options=RANK_0)
    found["rank 0"] = by_name(*only) if rank == 0 else only
    return found, whole(model, optimizer), {n: p.shape[0] for n, p in model.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_has_its_part_or_all_or_rank_0_has(world_size):
    """Bit for bit the masters and moments; cut over dimension 0 as FSDP2 does."""
    results = run_ranks(shown, world_size, LAYOUTS[world_size - 1])
    want, sizes = results[0][1], results[0][2]
    assert len(want) > 50
    for rank, (found, *_) in enumerate(results):
        assert found["dims"] == {(Shard(0), torch.float32)} and found["others"] == {"step"}
        for name, size in sizes.items():
            own = len(range(size)[rank * -(-size // world_size) :][: -(-size // world_size)])
            assert found["locals"][f"model.{name}"] == found["locals"][f"{name}.exp_avg"] == own
        assert_same(dict(sorted(found["sharded"].items())), dict(sorted(want.items())))
        assert_same(dict(sorted(found["all"].items())), dict(sorted(want.items())))
        only = found["rank 0"]
        if rank:
            assert only == ({}, {})
        else:
            assert_same(dict(sorted(only.items())), dict(sorted(want.items())))


# -- and back ------------------------------------------------------------------------------------


def state_of(model, optimizer):
    """All that a load sets. Collective."""
    found = whole(model, optimizer)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for group in groups:
        group["betas"] = tuple(group["betas"])  # lists, where torch has taken them apart
    return found, groups, optimizer.targets[0].step_counts


def through_dcp(rank, path, form, saves, options):
    """Save, or load into another model; what is there then, and after a step."""
    model, optimizer = trained(form) if saves else make(**form, seed=4)
    optimizer.param_groups[0]["lr"] = 3e-3 if saves else 1.0
    weights, state = get_state_dict(model, optimizer, options=options)
    content = {"model": weights, "optim": state}
    if saves:
        dcp.save(content, checkpoint_id=path)
    else:
        dcp.load(content, checkpoint_id=path)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options
        )
    return state_of(model, optimizer)


@pytest.mark.parametrize(
    ("saves", "loads", "flat"), [(1, 3, False), (3, 2, False), (2, 4, True), (4, 1, True)]
)
def test_what_dcp_saved_of_them_it_loads_at_any_other_world_size(saves, loads, flat, tmp_path):
    """Bit for bit, also at another placement; flat as torchtitan has them."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    layouts = LAYOUTS[saves - 1], LAYOUTS[loads - 1]
    want = run_ranks(through_dcp, saves, tmp_path, layouts[0], True, options)[0]
    got = run_ranks(through_dcp, loads, tmp_path, layouts[1], False, options)[0]
    assert want[2] == [2] * len(want[2]) and want[1][0]["lr"] == 3e-3
    assert_same(got, want)


class Own(nn.Module):
    """Tied, frozen and half-precision parameters, one of its own, a scalar, and a buffer."""

    def __init__(self, seed=0):
        super().__init__()
        with seeded(seed):
            self.embed = nn.Embedding(7, 6)
            self.body = nn.Linear(6, 6).to(torch.bfloat16)
            self.fixed = nn.Linear(6, 6).requires_grad_(False)
            self.head = nn.Linear(6, 7, bias=False)
            self.own = nn.Parameter(torch.randn(6))
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.full((3,), float(seed)))

    def forward(self, tokens):
        hidden = self.embed(tokens) * self.scale + self.own
        return self.head(self.fixed(self.body(hidden.to(self.body.weight.dtype)).to(hidden.dtype)))


def own_model(seed):
    model = GeminiDDP(Own(seed), min_chunk_size_m=1e-4)
    return model, HybridAdam(model.parameters(), **ADAM)


def own_step(model, optimizer, seed):
    tokens = torch.arange(5 * dist.get_rank() + seed, 5 * dist.get_rank() + seed + 5) % 7
    model(tokens).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def set_again(rank, how):
    """A model and optimizer; others that were given their state dicts; after two more steps."""
    model, optimizer = own_model(0)
    for seed in range(2):
        own_step(model, optimizer, seed)
    got = {"sharded": None, "all": FULL, "rank 0": RANK_0}[how]
    weights, state = get_state_dict(model, optimizer, options=got)
    found = [state_of(model, optimizer), model.digest(), model.seen.clone()]
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    other, its = own_model(5)
    set_optimizer_state_dict(other, its, state, options=sent if how == "rank 0" else got)
    set_model_state_dict(other, weights, options=sent if how == "rank 0" else got)
    found += [state_of(other, its), other.digest(), other.seen.clone()]
    for pair in ((model, optimizer), (other, its)):
        for seed in range(2, 4):
            own_step(*pair, seed)
        found += state_of(*pair)
    return found


@pytest.mark.parametrize("how", ["sharded", "all", "rank 0"])
def test_what_was_given_is_set_bit_for_bit_and_trained_on(how):
    """Masters of a parameter that came in bf16, too."""
    for rank, found in enumerate(run_ranks(set_again, 2, how)):
        once, again = found[:3], found[3:6]
        assert_same(once, again)
        assert_same(found[6:9], found[9:])
        if rank == 0:
            assert {"model.head.weight", "model.scale", "model.seen", "model.fixed.weight",
                    "own.exp_avg", "scale.exp_avg"} <= once[0][0].keys()  # fmt: skip


def given_back(rank):
    """What there is before and after a model is given what it gave."""
    model, optimizer = own_model(0)
    own_step(model, optimizer, 0)
    masters = lambda: get_model_state_dict(model)["body.weight"].full_tensor()  # noqa: E731
    before = masters(), state_of(model, optimizer)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    set_model_state_dict(model, get_model_state_dict(model))
    every = get_model_state_dict(model, options=FULL)
    del every["own"]  # which torch fills up with the parameter
    set_model_state_dict(model, every, options=FULL)
    return before, (masters(), state_of(model, optimizer)), every["body.weight"].dtype


def test_what_a_model_gave_changes_no_bit_of_it():
    for before, after, dtype in run_ranks(given_back, 2):
        assert_same(after, before)
        assert dtype == torch.float32 and not torch.equal(before[0], before[0].bfloat16().float())


# -- others --------------------------------------------------------------------------------------


def before_a_step(rank):
    """The template of what took no step, of an optimizer that was made before the wrapping."""
    module = Tower(0)
    optimizer = HybridAdam(module.parameters(), **ADAM)
    model = GeminiDDP(module, min_chunk_size_m=0.004)
    want = get_model_state_dict(model, options=FULL)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    same = [torch.equal(v, want[n]) for n, v in get_model_state_dict(model, options=FULL).items()]
    return {frozenset(planes) for planes in state.values()}, same


def test_there_is_state_to_load_into_before_the_first_step():
    for planes, same in run_ranks(before_a_step, 2):
        assert planes == {frozenset({"step", "exp_avg", "exp_avg_sq"})} and all(same)


def in_a_parent(rank):
    def parent(seed):
        inner, _ = make("resident", "fp32", seed=seed)
        with seeded(seed):
            return nn.ModuleDict({"tower": inner, "other": nn.Linear(2, 2)})

    one, other = parent(0), parent(1)
    weights = get_model_state_dict(one)
    set_model_state_dict(other, weights)
    again = get_model_state_dict(other, options=FULL)
    return [
        torch.equal(again[name], value.full_tensor() if isinstance(value, DTensor) else value)
        for name, value in weights.items()
    ], [name for name in weights if not name.startswith(("tower.", "other."))]


def test_a_part_of_a_plain_module_is_one_of_its_state_dict():
    for same, strange in run_ranks(in_a_parent, 2):
        assert len(same) > 10 and all(same) and strange == []


def other_calls(rank):
    """What users call by themselves is what it was; a DTensor on one rank only is refused."""
    model, optimizer = trained({})
    weights = get_model_state_dict(model)
    full = {name: value.full_tensor() for name, value in weights.items()}
    mixed = full if rank else weights
    return (
        len(model.state_dict()),
        {frozenset(planes) for planes in optimizer.state_dict()["state"].values()},
        said(lambda: model.load_state_dict(mixed)),
    )


def test_other_callers_get_all_on_rank_0():
    (first, planes, refused), (second, steps, other) = run_ranks(other_calls, 2)
    assert first > 10 and second == 0 and steps == {frozenset({"step"})}
    assert planes == {frozenset({"step", "master", "exp_avg", "exp_avg_sq"})}
    assert "was given as a DTensor on one of ranks 0 and 1; expected" in refused == other


# -- FSDP2 ---------------------------------------------------------------------------------------


def into_fsdp2(rank, path):
    """What DCP saved of ours, into FSDP2's, and one step of each; what FSDP2 gives, into ours."""
    from torch.distributed.fsdp import fully_shard

    model, optimizer = trained({"precision": "fp32"})
    dcp.save(dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)),
             checkpoint_id=path)  # fmt: skip
    module = Tower(5)
    fully_shard(module)
    its = torch.optim.AdamW(module.parameters(), **ADAM)
    weights, state = get_state_dict(module, its)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=path)
    set_state_dict(module, its, model_state_dict=weights, optim_state_dict=state)
    loaded = by_name(*get_state_dict(module, its, options=FULL))
    token_loss(module, batches(2, 3, 2)[0][rank]).backward()
    its.step()
    theirs = get_state_dict(module, its)
    set_state_dict(
        model, optimizer, model_state_dict=theirs[0], optim_state_dict=theirs[1]
    )  # moments that FSDP2 has trained
    ours = by_name(*get_state_dict(model, optimizer, options=FULL))
    return loaded, ours, by_name(*get_state_dict(module, its, options=FULL))


@pytest.mark.unlike
def test_fsdp2_and_this_give_each_other_what_they_have(tmp_path):
    for loaded, ours, theirs in run_ranks(into_fsdp2, 2, tmp_path):
        assert_same(dict(sorted(ours.items())), dict(sorted(theirs.items())))
        assert loaded.keys() == theirs.keys()
