"""Memory that two owners share is refused by both names; memory side by side is not."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, spectral_norm, vector_to_parameters

from gemini import GeminiDDP
from gemini.runtime.wrap.shared_memory import check_memory


class Holder(nn.Module):
    """A module of what it is given."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def weight(values):
    return nn.Parameter(values)


def with_buffer():
    module = Holder(a=weight(torch.ones(4, 4)))
    module.register_buffer("mean", module.a.data[1])
    return module


def with_attribute(view):
    module = Holder(a=weight(torch.ones(4, 4)))
    module.kept = view(module.a)
    return module


def shared():
    """(names, module): the module's owners of these names share memory."""
    line, matrix = torch.ones(100), torch.ones(8, 8)
    tied = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    tied[1].weight.data = tied[0].weight.data
    yield ("parameter 0.weight", "parameter 1.weight"), tied
    for a, b in (
        (line, line),
        (line[:60], line[50:]),
        (line, line[50:]),
        (matrix, matrix.t()),
        (matrix[:, :5], matrix[:, 4:]),
        (matrix[::2], matrix[::4]),
        (line, line.view(torch.bfloat16)[1:5]),
    ):
        yield ("parameter a", "parameter b"), Holder(a=weight(a), b=weight(b))
    frozen = nn.Parameter(matrix[2:], requires_grad=False)
    yield ("parameter a", "parameter b"), Holder(a=weight(matrix), b=frozen)
    yield ("parameter a", "buffer mean"), with_buffer()
    for view in (torch.Tensor.t, torch.Tensor.detach, lambda w: {"rows": [w.data[2:]]}):
        yield ("parameter a", "attribute kept"), with_attribute(view)
    deep = nn.Sequential(nn.Linear(2, 2), with_attribute(torch.Tensor.detach))
    yield ("parameter 1.a", "attribute 1.kept"), deep


def apart():
    """(what it is, module): no two owners share a byte."""
    line, matrix = torch.ones(100), torch.ones(8, 8)
    yield "halves", Holder(a=weight(line[:50]), b=weight(line[50:]))
    yield "columns", Holder(a=weight(matrix[:, :4]), b=weight(matrix[:, 4:]))
    yield "rows by turns", Holder(a=weight(matrix[::2]), b=weight(matrix[1::2]))
    vector = parameters_to_vector(nn.Linear(3, 3).parameters()).detach().clone()
    vector_to_parameters(vector, (flat := nn.Linear(3, 3)).parameters())
    yield "one vector", flat
    yield "no elements", Holder(a=weight(torch.ones(0)), b=weight(torch.ones(0, 2)), c=weight(line))
    yield "the parameter itself", with_attribute(lambda w: [w])
    yield "a recurrent layer's list", nn.LSTM(3, 3, 2, bidirectional=True)
    yield "buffers alone", Holder(a=weight(line), b=nn.Buffer(matrix), c=matrix[1])
    yield "what a hook computes", spectral_norm(nn.Linear(3, 3))
    yield "what a hook masks", prune.identity(nn.Linear(3, 3), "weight")
    yield "on the meta device", nn.Linear(3, 3, device="meta")
    once = nn.Parameter(torch.ones(1).expand(8), requires_grad=False)
    yield "a frozen one of one element", Holder(a=once, b=weight(line))


def check(module, given=False):
    return check_memory(module, list(module.named_parameters()), given=given)


@pytest.mark.parametrize(("names", "module"), [*shared()])
def test_owners_that_share_a_byte_are_both_named(names, module):
    with pytest.raises(ValueError, match="share memory") as error:
        check(module)
    assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize("module", [pytest.param(m, id=what) for what, m in apart()])
def test_memory_side_by_side_is_no_sharing(module):
    check(module)


def test_elements_of_a_trained_parameter_that_share_memory_are_refused_unless_values_are_given():
    module = Holder(a=weight(torch.zeros(1).expand(8)))
    with pytest.raises(ValueError, match=r"parameter a is trained, and elements.* strides \(0,\)"):
        check(module)
    check(module, given=True)


def test_a_refused_module_is_as_it_was():
    _, module = next(shared())
    before = [(type(p), p.data_ptr(), p.detach().clone()) for p in module.parameters()]
    with pytest.raises(ValueError, match=r"parameter 0\.weight and parameter 1\.weight share"):
        GeminiDDP(module, precision="fp32")
    for (kind, address, values), param in zip(before, module.parameters(), strict=True):
        assert (type(param), param.data_ptr()) == (kind, address) and torch.equal(param, values)


def test_memory_of_a_module_that_is_wrapped_is_refused_until_it_is_unwrapped():
    values = torch.ones(3)
    first = GeminiDDP(Holder(a=weight(values)), precision="fp32")
    with pytest.raises(ValueError, match="parameter a of a module that is wrapped already"):
        check(Holder(b=weight(values[1:])))
    check(Holder(b=weight(torch.ones(3))))
    first.unwrap()
    check(Holder(b=weight(values)))
