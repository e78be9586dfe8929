"""The path of CUDA parameters for those of the CPU, in Triton's interpreter."""

import pytest

from kernels_triton.launch import is_interpreted
from optim.plain.target import on_device


@pytest.fixture
def on_triton(monkeypatch):
    if not is_interpreted():
        pytest.skip("needs Triton's interpreter")

    def triton_executor(rule, config, group_of, params):
        return on_device(rule, group_of, params[0].device)

    monkeypatch.setattr("optim.plain.target.make_executor", triton_executor)


@pytest.fixture(params=["cpu", "triton"])
def path(request):
    """Of updates."""
    if request.param == "triton":
        request.getfixturevalue("on_triton")
    return request.param
