"""Arguments of GeminiDDP in groups: the same module as with each by itself."""

import dataclasses
import inspect
import re
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

import gemini
from bench.shared.models import Tower
from gemini import ChunkSearch, GeminiDDP, PrecisionPolicy
from gemini.integrations import classic
from gemini.options import GROUPS, Communication, Options, Wrapping
from optim import LossScale

POLICIES = [
    PrecisionPolicy("fp16", cast_buffers=True, loss_scale=LossScale(2.0**5), on_nonfinite="raise"),
    PrecisionPolicy("bf16", master_weights=False, rounding_seed=3, force_outputs_fp32=True),
    PrecisionPolicy(
        "bf16", keep_fp32=lambda name, module: name == "layers.1", cast_inputs=False,
        communication_dtype="fp16",
    ),
]  # fmt: skip
OTHERS = [
    Communication(max_prefetch=3, broadcast_buffers=True),
    Wrapping(init_state_dict={n: p + 1 for n, p in Tower().named_parameters()}),
]
SEARCHES = [
    ChunkSearch(search_range_m=0, min_chunk_size_m=3000 / 2**20),
    ChunkSearch(hidden_dim=33, min_chunk_size_m=0.01, search_range_m=0.02),
]


def what_it_is(model):
    outputs = model(torch.arange(6).reshape(2, 3))
    return (
        model.engine.precision_settings,
        model.engine.layout.digest(),
        model.chunk_configuration,
        [param.dtype for param in model.parameters()],
        model.broadcast_buffers,
        model.engine.planning.inputs.max_prefetch,
        model.digest(),
        outputs.dtype,
    )


@pytest.mark.parametrize("group", [*POLICIES, *SEARCHES, *OTHERS])
def test_a_group_is_its_fields_one_by_one(group):
    name = next(name for name, usual in GROUPS.items() if type(usual) is type(group))
    fields = {f.name: getattr(group, f.name) for f in dataclasses.fields(group)}
    grouped, single = GeminiDDP(Tower(), **{name: group}), GeminiDDP(Tower(), **fields)
    assert what_it_is(grouped) == what_it_is(single)
    assert what_it_is(grouped) != what_it_is(GeminiDDP(Tower()))


def test_the_constructor_takes_few_values_and_shows_their_fields():
    shown = inspect.signature(GeminiDDP).parameters
    own = inspect.signature(inspect.unwrap(GeminiDDP.__init__)).parameters
    assert len(own) <= 14
    for group in GROUPS.values():
        for field in dataclasses.fields(group):
            assert shown[field.name].default == getattr(group, field.name)
            assert re.search(rf"\b{field.name}\b", GeminiDDP.__doc__)


def test_an_option_in_a_group_and_beside_it_is_refused():
    with pytest.raises(ValueError, match=r"cast_buffers=True beside a PrecisionPolicy.*one of the"):
        GeminiDDP(nn.Linear(3, 2), precision=PrecisionPolicy("fp32"), cast_buffers=True)
    with pytest.raises(ValueError, match="hidden_dim=3 beside a ChunkSearch"):
        GeminiDDP(nn.Linear(3, 2), chunks=ChunkSearch(), hidden_dim=3)


def test_a_function_that_passes_options_on_takes_groups_too():
    made = classic.GeminiDDP(Tower(), "cpu", precision="fp32", communication=Communication())
    assert isinstance(made, GeminiDDP)
    with pytest.raises(TypeError, match="did you mean max_norm"):
        classic.GeminiDDP(Tower(), communication=Communication(), max_nrom=1.0)


def test_a_type_checker_is_told_every_option_with_its_type():
    told = get_type_hints(Options)
    for name, group in GROUPS.items():
        assert type(group) in (told.pop(name), *get_args(get_type_hints(Options)[name]))
        for field, kind in get_type_hints(type(group)).items():
            assert field in GROUPS or told.pop(field) == kind, field
    assert told == {}


def test_the_package_lists_its_names():
    assert {"GeminiDDP", "HybridAdam", "init_empty"} <= set(dir(gemini)) == set(gemini.__all__)
    assert [name for name in dir(gemini) if not hasattr(gemini, name)] == []
