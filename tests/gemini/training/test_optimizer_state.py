"""optimizer.state and state dicts under GeminiDDP: keyed by name, whole, in fp32."""

import pytest
import torch

from bench.shared.models import Tower, token_batches
from optim.groups import merged_groups
from tests.support.checkpoints import train
from tests.support.towers import wrapped


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


def test_a_group_of_another_stage_of_unfreezing_names_what_differs_and_the_way():
    ours, names = [torch.zeros(1) for _ in range(5)], ["a", "b", "c", "d", "e"]
    named = {id(param): name for param, name in zip(ours, names, strict=True)}
    for saved, here, said in (
        (["a", "b"], ours, r"2 parameters .* has 5 \(c, d and 1 more only in this optimizer's\)"),
        (["a", "z"], ours[:1], r"2 parameters .* has 1 \(z only in the saved one\)"),
        ([0, 1], ours[:1], r"2 parameters and this optimizer's has 1; make it with the groups"),
    ):
        with pytest.raises(ValueError, match=said + ".*add_param_group"):
            merged_groups([{"params": here}], [{"params": saved}], named, lambda *_: None)
