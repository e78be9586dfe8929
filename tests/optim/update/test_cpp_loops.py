"""Torch functions as C++ loops: the bits of torch, and what is refused."""

import threading

import pytest
import torch

from optim.update.built_kernels import Kernel, Rows, compile_library, compiler
from optim.update.cpp_loops import library, traced_tile
from tests.support.until import until

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OWN = torch.ones(1)
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


class Traced:
    """A function as a specification of a kernel."""

    name = "traced"

    def __init__(self, program, scalars, columns):
        self.source = library(
            traced_tile(program, scalars, columns),
            columns=len(columns), scalars=sum(scalars), tile_numel=1000,
        )  # fmt: skip


@pytest.fixture
def build(tmp_path):
    def build(program, scalars, columns):
        path = tmp_path / "traced.so"
        compile_library(Traced(program, scalars, columns), path, compiler())
        return Kernel(path)

    return build


def run(kernel, columns, scalars=(), num_threads=2):
    rows = Rows()
    rows.add(columns, columns[0].numel(), scalars)
    kernel(rows, num_threads)


def same_bits(a, b):
    """NaNs of any kind are alike."""
    integers = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    nan = (a != a) & (b != b)
    return bool(((a.view(integers) == b.view(integers)) | nan).all())


@needs_compiler
def test_conversions_round_as_torch_every_16_bit_value_and_every_tie(build):
    def convert(bf16, fp16, wide, from_bf16, from_fp16, to_bf16, to_fp16):
        from_bf16.copy_(bf16)
        from_fp16.copy_(fp16)
        to_bf16.copy_(wide)
        to_fp16.copy_(wide)

    kernel = build(convert, [], [BF16, FP16, FP32, FP32, FP32, BF16, FP16])
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numel = 6 << 16  # each 16-bit value as the upper half, with lower halves around a tie of bf16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    wide = (upper[:, None] | lower).flatten().to(torch.int32).view(FP32)
    halves = values.view(FP16).float()  # and of fp16: half way to the next one, and beside it
    ties = (halves + values.add(1).view(FP16).float()) / 2
    wide[: 3 << 16] = torch.cat([ties, ties.nextafter(halves), ties.nextafter(halves * 4)])
    bf16, fp16 = (values.view(dtype).repeat(6) for dtype in (BF16, FP16))
    found = [torch.empty(numel, dtype=dtype) for dtype in (FP32, FP32, BF16, FP16)]
    run(kernel, (bf16, fp16, wide, *found))
    for got, want in zip(
        found, (bf16.float(), fp16.float(), wide.to(BF16), wide.half()), strict=True
    ):
        assert same_bits(got, want)


def operators(scalars, a, b, halves, bits, out, integers, chosen):
    """Every kind of operator that a loop knows, but the square root, which torch's vectorised
    one does not round correctly (numpy's is what test_compiled_update compares with)."""
    first, second = scalars.unbind()
    wide = halves.float()
    joined = ((halves.view(torch.int16).to(torch.int32) << 16) + bits).view(FP32)
    x = 1.5 - torch.maximum(a * first, wide) / (b.abs() + 0.1)
    y = torch.where((a > b) & (b != second), x.clamp(-second, second), x.reciprocal())
    chosen.copy_(torch.minimum(y, a.sign() * b.square()).clamp(max=3.0).clamp(min=-2))
    split = joined.view(torch.int32) - (joined.to(BF16).view(torch.int16).to(torch.int32) << 16)
    integers.copy_(split.clamp(max=0x7FFF))
    odd = (a.view(torch.int32) & 1) == 1
    out.copy_(torch.where(odd | (a <= b), -y + a, (bits.to(torch.int32) >> 3).float()))


@needs_compiler
def test_a_function_of_every_operator_has_the_bits_of_torch_whatever_the_threads(build):
    numel = 100_003
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(numel, generator=generator) for _ in range(2))
    halves = torch.randn(numel, generator=generator).to(BF16)
    bits = torch.randint(-0x8000, 0x8000, (numel,), generator=generator).to(torch.int16)
    for special, value in ((a, torch.nan), (b, torch.nan), (a, torch.inf), (b, 0.0), (a, -0.0)):
        special[torch.randperm(numel, generator=generator)[:500]] = value
    inputs = (a, b, halves, bits)
    dtypes = [tensor.dtype for tensor in inputs]
    kernel = build(operators, [2], [*dtypes, FP32, torch.int16, FP16])
    scalars = torch.tensor([0.7, 1.25])
    want = [torch.zeros(numel, dtype=dtype) for dtype in (FP32, torch.int16, FP16)]
    operators(scalars, *inputs, *want)
    for threads in (1, 3):
        found = [torch.zeros_like(tensor) for tensor in want]
        run(kernel, (*inputs, *found), scalars.tolist(), threads)
        assert all(same_bits(x, y) for x, y in zip(found, want, strict=True))


def value_of_a_tensor(x):
    x.copy_(x * 2 if bool(x.sum() > 0) else x)


def another_tensor(x):
    x.copy_(x * OWN)


def stale_view(x):
    view = x.view(torch.int32)
    x.copy_(x + 1)
    x.copy_(view.float())


@pytest.mark.parametrize(
    ("program", "dtype", "said"),
    [
        (lambda x: x.copy_(x.exp()), FP32, "calls torch's exp of torch.float32"),
        (lambda x: x.copy_(x.lerp(x, 0.5)), FP32, "calls torch's lerp"),
        (lambda x: x.copy_(torch.add(x, x, alpha=2)), FP32, "calls torch's add"),
        (lambda x: x.mul_(2), FP32, "calls torch's mul_"),
        (lambda x: x.copy_(x * 2), BF16, "computes in torch.bfloat16; expected fp32"),
        (lambda x: x.copy_(x.double() * 2), FP32, "computes in torch.float64; expected fp32"),
        (lambda x: x.copy_(x.cumsum(0)), FP32, "calls torch's cumsum"),
        (value_of_a_tensor, FP32, "calls torch's sum"),
        (lambda x: x.copy_(x[:1] + x), FP32, "a tensor of shape|calls torch's slice"),
        (another_tensor, FP32, "a tensor of its own"),
        (stale_view, FP32, "after it was made"),
    ],
)
def test_what_a_loop_cannot_do_is_refused_by_name(program, dtype, said):
    with pytest.raises(NotImplementedError, match=said):
        traced_tile(program, [], [dtype])


@needs_compiler
def test_rows_of_another_kernel_are_an_error(build):
    kernel = build(lambda scalars, x: x.copy_(x * scalars[1]), [2], [FP32])
    with pytest.raises(AssertionError, match="rows of another kernel"):
        run(kernel, (torch.ones(5),), (1.0,))
    x = torch.arange(5.0)
    run(kernel, (x,), (1.0, 3.0))
    assert x.tolist() == [0, 3, 6, 9, 12]


class Waits:
    """An update that ends once somebody sets the second word of its column, and says in the third
    whether that was so; it waits for a minute, which a thread without the lock would for ever."""

    name = "waits"
    source = """
#include <cstdint>
#include <unistd.h>
extern "C" int run(const int64_t* words, int64_t, const float*, int64_t, int64_t) {
    volatile int64_t* said = reinterpret_cast<volatile int64_t*>(words[1]);
    said[0] = 1;
    for (int i = 0; i < 60000 && !said[1]; i++) usleep(1000);
    said[2] = said[1];
    return 0;
}
"""


@needs_compiler
def test_a_thread_beside_an_update_runs_on_time(tmp_path):
    """A kernel holds no lock of Python's through its call."""
    compile_library(Waits(), tmp_path / "waits.so", compiler())
    kernel, said = Kernel(tmp_path / "waits.so"), torch.zeros(3, dtype=torch.int64)
    thread = threading.Thread(target=lambda: (until(lambda: said[0]), said[1:2].fill_(1)))
    thread.start()
    run(kernel, [said])
    thread.join()
    assert said.tolist() == [1, 1, 1]
