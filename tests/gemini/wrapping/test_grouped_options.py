"""Arguments of GeminiDDP in groups: the same module as with each by itself."""

import dataclasses
import inspect

import pytest
import torch
from torch import nn

from bench.shared.models import Tower
from gemini import ChunkSearch, GeminiDDP, PrecisionPolicy
from optim import LossScale

POLICIES = [
    PrecisionPolicy("fp16", cast_buffers=True, loss_scale=LossScale(2.0**5), on_nonfinite="raise"),
    PrecisionPolicy("bf16", master_weights=False, rounding_seed=3, force_outputs_fp32=True),
    PrecisionPolicy(
        "bf16", keep_fp32=lambda name, module: name == "layers.1", cast_inputs=False,
        communication_dtype="fp16",
    ),
]  # fmt: skip
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
        outputs.dtype,
    )


@pytest.mark.parametrize("group", [*POLICIES, *SEARCHES])
def test_a_group_is_its_fields_one_by_one(group):
    name = "precision" if isinstance(group, PrecisionPolicy) else "chunks"
    fields = {f.name: getattr(group, f.name) for f in dataclasses.fields(group)}
    grouped, single = GeminiDDP(Tower(), **{name: group}), GeminiDDP(Tower(), **fields)
    assert what_it_is(grouped) == what_it_is(single)
    assert what_it_is(grouped) != what_it_is(GeminiDDP(Tower()))


def test_fields_have_the_defaults_of_the_arguments():
    arguments = inspect.signature(GeminiDDP).parameters
    for kind in (PrecisionPolicy, ChunkSearch):
        for field in dataclasses.fields(kind):
            assert field.default == arguments[field.name].default, field.name


def test_an_option_in_a_group_and_beside_it_is_refused():
    with pytest.raises(ValueError, match=r"cast_buffers=True beside a PrecisionPolicy.*one of the"):
        GeminiDDP(nn.Linear(3, 2), precision=PrecisionPolicy("fp32"), cast_buffers=True)
    with pytest.raises(ValueError, match="hidden_dim=3 beside a ChunkSearch"):
        GeminiDDP(nn.Linear(3, 2), chunks=ChunkSearch(), hidden_dim=3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"precision": "bf16", "loss_scale": 2.0}, "loss_scale is for"),
        ({"precision": "fp32", "master_weights": False}, "master_weights=False"),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused_where_it_is_made(options, said):
    with pytest.raises(ValueError, match=said):
        PrecisionPolicy(**options)
