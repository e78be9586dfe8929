"""The product of a matrix with its transpose, of which one triangle is computed."""

import pytest
import torch

from gemini.optim.rules.orthogonal import COEFFICIENTS, orthogonal
from kernels_triton import symmetric
from kernels_triton.launch import is_interpreted
from kernels_triton.symmetric import TILE, gram

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = [] if is_interpreted() else [pytest.mark.gpu, pytest.mark.values]

SHAPES = [(16, 16), (TILE, 64), (TILE + 16, 80), (2 * TILE + 32, 16), (32, 3 * TILE)]


def matrix(rows, columns, transposed, whole=False):
    """Values, or whole numbers whose sums are exact in fp32."""
    generator = torch.Generator().manual_seed(rows * columns)
    shape = (columns, rows) if transposed else (rows, columns)
    if whole:
        found = torch.randint(-30, 31, shape, generator=generator)
    else:
        found = torch.randn(shape, generator=generator)
    found = found.to(DEVICE, torch.bfloat16)
    return found.T if transposed else found


@pytest.fixture
def launched(monkeypatch):
    """Grids of launches."""
    found, kernel = [], symmetric.gram_kernel

    class Counted:
        def __getitem__(self, grid):
            found.append(grid)
            return kernel[grid]

    monkeypatch.setattr(symmetric, "gram_kernel", Counted())
    return found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_sums_are_exact_where_fp32_is(rows, columns, transposed, launched):
    x = matrix(rows, columns, transposed, whole=True)
    wide = x.double()
    assert torch.equal(gram(x).double(), wide @ wide.T)
    assert launched == [(-(-rows // TILE),) * 2]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_it_is_symmetric_to_the_bit_and_near_what_is_summed_in_fp64(rows, columns, transposed):
    x = matrix(rows, columns, transposed)
    found, wide = gram(x), x.double()
    assert torch.equal(found, found.T)
    # fp32 sums of c terms: at most c roundings of what all terms have together
    bound = columns * torch.finfo(torch.float32).eps * (wide.abs() @ wide.abs().T)
    assert bool(((found.double() - wide @ wide.T).abs() <= bound).all())


def test_rows_have_the_bits_that_they_have_alone():
    """Whatever else is multiplied: no sum knows how large the matrix is."""
    x = matrix(2 * TILE + 32, 80, False)
    assert torch.equal(gram(x)[:32, :32], gram(x[:32]))


def test_a_row_with_nan_has_it_in_its_row_and_column_alone():
    x = matrix(48, 32, False)
    x[7, 3] = torch.nan
    bad = gram(x).isnan()
    assert bad[7].all() and bad[:, 7].all() and bad.sum() == 2 * 48 - 1


@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (5, 16), (16, 5), (17, 33)])
def test_sizes_that_are_not_aligned_are_torchs(shape, launched):
    x = matrix(*shape, transposed=False)
    wide = x.float()
    assert torch.equal(gram(x), wide @ wide.T)
    assert launched == []


def test_memory_that_is_not_aligned_is_torchs(launched):
    x = matrix(16, 48, False, whole=True)
    assert torch.equal(gram(x[:, 3:35]), x[:, 3:35].float() @ x[:, 3:35].float().T)
    assert launched == []


@pytest.mark.parametrize("x", [torch.ones(16, 16), torch.ones(16, dtype=torch.bfloat16)])
def test_other_dtypes_and_what_is_no_matrix_are_refused(x):
    with pytest.raises(ValueError, match="expected a bfloat16 matrix"):
        gram(x)


def test_the_gram_form_of_newton_and_schulz_takes_it_and_the_standard_form_does_not(launched):
    x = matrix(32, 64, False).float()
    by_torch = orthogonal(x, COEFFICIENTS, 5, 1e-7, form="gram")
    by_kernel = orthogonal(x, COEFFICIENTS, 5, 1e-7, form="gram", gram=gram)
    assert len(launched) == 1
    # the same but for a last bit of bf16
    assert torch.allclose(by_torch, by_kernel, atol=2**-7, rtol=2**-7)
    orthogonal(x, COEFFICIENTS, 5, 1e-7, gram=gram)
    orthogonal(x, COEFFICIENTS, 5, 1e-7, form="gram", dtype=torch.float32, gram=gram)
    assert len(launched) == 1
