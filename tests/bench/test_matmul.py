"""bf16 products in fp32: those of fp64, rounded, whatever the shapes, forward and backward."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ci  # processes that import torch
SCRIPT = """
import json, sys, threading
import torch
from torch.nn import functional
from bench.support import matmul

matmul.use_fp32(always=True)
matmul.MAX_NUMEL = 1 << 12
torch.manual_seed(0)


def worst(make, *shapes):
    "Of results and gradients, relative to those of fp64 on the same values."
    inputs = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, wanted = make(*inputs), make(*exact)
    assert out.dtype is torch.bfloat16
    grad = torch.randn(out.shape).bfloat16()
    pairs = [(out, wanted), *zip(torch.autograd.grad(out, inputs, grad),
                                 torch.autograd.grad(wanted, exact, grad.double()))]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def bmm(a, b):
    return a @ b


def attend(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


found = {
    "small": worst(functional.linear, (3, 5), (7, 5)),
    "bias": worst(functional.linear, (2, 33, 65), (77, 65), (77,)),
    "long": worst(functional.linear, (3, 5001), (7, 5001)),
    "wide": worst(functional.linear, (3, 5), (5001, 5)),
    "tall": worst(functional.linear, (5001, 5), (7, 5)),
    "addmm": worst(lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2), (9,), (8, 5), (5, 9)),
    "bmm": worst(bmm, (3, 7, 5), (3, 5, 9)),
    "baddbmm": worst(lambda c, a, b: torch.baddbmm(c, a, b, beta=2, alpha=0.5),
                     (3, 7, 9), (3, 7, 5), (3, 5, 9)),
    "attention": worst(attend, (2, 3, 17, 8), (2, 3, 17, 8), (2, 3, 17, 8)),
    "empty": float((torch.ones(0, 3).bfloat16() @ torch.ones(3, 2).bfloat16()).numel()),
}
x = torch.randn(9, 5)
found["fp32"] = float((x @ x.T - (x.double() @ x.double().T)).norm())
others = []  # from another thread, as autograd of a device has one
thread = threading.Thread(target=lambda: others.append(worst(functional.linear, (9, 99), (8, 99))))
thread.start()
thread.join()
found["thread"] = others[0]
print(json.dumps(found))
"""


def test_products_are_those_of_fp64_rounded_once() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, encoding="utf-8", check=True
    )
    found = json.loads(run.stdout)
    assert found.pop("empty") == 0
    assert found.pop("fp32") < 1e-5
    # a bf16 is off by 2**-9 of itself at most; attention rounds scores and weights in between
    assert found.pop("attention") < 2**-6
    assert all(error < 2**-8 for error in found.values()), found


def test_a_script_is_run_with_its_arguments(tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(__name__, *sys.argv[1:])\n", encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "bench.support.matmul", str(script), "--model", "tiny"],
        capture_output=True, text=True, encoding="utf-8", check=True,
    )  # fmt: skip
    assert run.stdout.split() == ["__main__", "--model", "tiny"]
