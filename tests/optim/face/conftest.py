"""The path of CUDA parameters for those of the CPU, in Triton's interpreter."""

import pytest

from kernels_triton.launch import is_interpreted
from optim.state.memory import memory_of


@pytest.fixture
def on_triton(monkeypatch):
    if not is_interpreted():
        pytest.skip("needs Triton's interpreter")

    monkeypatch.setattr("optim.plain.target.kernels_of", memory_of)


@pytest.fixture(params=["cpu", "triton"])
def path(request):
    """Of updates."""
    if request.param == "triton":
        request.getfixturevalue("on_triton")
    return request.param
