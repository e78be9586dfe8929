"""optimizer.state and state dicts under GeminiDDP: keyed by name, whole, in fp32."""

import pytest
import torch

from bench.shared.models import Tower, token_batches
from bench.shared.reference import flat, relative_error
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP
from optim import HybridAdam
from tests.support.checkpoints import train
from tests.support.towers import ADAM, weights, wrapped

SMALL = {"min_chunk_size_m": 0.004}


def test_it_is_keyed_by_name_and_has_every_plane():
    model, optimizer = wrapped("bf16")
    assert all(optimizer.state[p]["step"] == 0 for p in model.parameters())
    train(model, optimizer, token_batches(2, 1))
    saved = optimizer.state_dict()
    names = [name for name, _ in Tower().named_parameters()]
    assert list(saved["state"]) == names
    assert saved["param_groups"][0]["params"] == names
    for name, param in Tower().named_parameters():
        planes = saved["state"][name]
        assert planes.keys() == {"step", "master", "exp_avg", "exp_avg_sq"}
        assert planes["step"] == 2 and planes["exp_avg"].shape == param.shape
        assert {planes[p].dtype for p in planes} == {torch.float32}
    assert all(optimizer.state[p]["step"] == 2 for p in model.parameters())


def test_it_interchanges_with_torch_both_ways():
    plain = Tower()
    torch_optimizer = torch.optim.AdamW(plain.parameters(), **ADAM, foreach=False)
    train(plain, torch_optimizer, token_batches(3, 1))
    model, optimizer = wrapped("fp32")
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(torch_optimizer.state_dict())
    start = weights(model)
    for some, its in ((plain, torch_optimizer), (model, optimizer)):
        train(some, its, token_batches(3, 1, seed=2))
    want = flat(list(plain.parameters()))
    assert relative_error(weights(model) - start, want - start) < 1e-6

    saved = optimizer.state_dict()
    order = {name: i for i, name in enumerate(saved["param_groups"][0]["params"])}
    by_position = {
        "state": {order[name]: planes for name, planes in saved["state"].items()},
        "param_groups": [
            {**group, "params": [order[name] for name in group["params"]]}
            for group in saved["param_groups"]
        ],
    }
    plain.load_state_dict(model.state_dict())
    again = torch.optim.AdamW(plain.parameters(), foreach=False)
    again.load_state_dict(by_position)
    start = weights(model)
    for some, its in ((plain, again), (model, optimizer)):
        train(some, its, token_batches(3, 1, seed=3))
    want = flat(list(plain.parameters()))
    assert relative_error(weights(model) - start, want - start) < 1e-6


def test_groups_go_by_name_and_others_are_refused():
    def two(params):
        params = list(params)
        return [{"params": params[::2], "lr": 0.1}, {"params": params[1::2]}]

    _, optimizer = wrapped(groups=two)
    saved = optimizer.state_dict()
    _, one = wrapped()
    with pytest.raises(ValueError, match="2 param groups and this optimizer has 1"):
        one.load_state_dict(saved)

    def other_two(params):
        params = list(params)
        return [{"params": params[1::2]}, {"params": params[::2][:-1]}]

    _, swapped = wrapped(groups=other_two)
    with pytest.raises(ValueError, match="param group 0 of the state dict has"):
        swapped.load_state_dict(saved)


def test_add_param_group_over_the_same_module():
    batches = token_batches(3, 1)
    results = []
    for late in (False, True):
        model = GeminiDDP(Tower(), precision="fp32", **SMALL)
        params = list(model.parameters())
        groups = [{"params": params[:5]}, {"params": params[5:], "lr": 0.1}]
        optimizer = HybridAdam(groups[:1] if late else groups, **ADAM)
        if late:
            optimizer.add_param_group(groups[1])
        train(model, optimizer, batches)
        results.append(weights(model))
    assert torch.equal(results[0], results[1])
    stranger = Tower()
    optimizer.add_param_group({"params": [stranger.embed.weight]})
    with pytest.raises(ValueError, match="together with others"):
        optimizer.step()


def test_it_streams_run_by_run(tmp_path):
    model, optimizer = wrapped("bf16", SimBackend(), tmp_path, 0.5)
    train(model, optimizer, token_batches(2, 1))
    saved = {}

    def keep(run):
        saved[run.name, run.plane, run.start] = run.values.clone()

    optimizer.visit_state(keep)
    whole = optimizer.state_dict()["state"]
    for (name, plane, start), values in saved.items():
        flat_plane = whole[name][plane].reshape(-1)
        assert torch.equal(flat_plane[start : start + values.numel()], values)
    assert sum(v.numel() for (_, plane, _), v in saved.items() if plane == "master") == sum(
        p.numel() for p in Tower().parameters()
    )
    other, other_optimizer = wrapped("bf16")

    def give(run):
        return whole[run.name][run.plane].reshape(-1)[run.elements]

    other_optimizer.fill_state(give)
    assert torch.equal(weights(other), weights(model))
