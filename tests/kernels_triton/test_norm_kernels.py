"""Norm, overflow and pack kernels against fp64."""

import math

import pytest
import torch

from kernels_triton import ops
from kernels_triton.control_fields import BAD, NUM_CONTROL, SUM
from kernels_triton.launch import is_interpreted
from kernels_triton.tiles import SegmentRow, segment_table, tile_table

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUMELS = [1, 3, 0, 1023, 32768, 65537, 64]

pytestmark = [] if is_interpreted() else [pytest.mark.gpu, pytest.mark.values]


def tables(sources, destinations=None):
    segments = [
        SegmentRow(d.data_ptr(), s.data_ptr(), 0, s.numel(), i)
        for i, (s, d) in enumerate(zip(sources, destinations or sources, strict=True))
    ]
    tiles = tile_table([s.numel() for s in sources], ops.NORM_TILE, DEVICE)
    sums = torch.full((len(tiles),), math.nan, device=DEVICE)
    bad = torch.full((len(tiles),), 7, dtype=torch.int32, device=DEVICE)
    return tiles, segment_table(segments, DEVICE), sums, bad


def measure(grads, norm_type=2.0, **at_once):
    tiles, segments, sums, bad = tables(grads)
    control = torch.zeros(NUM_CONTROL, dtype=torch.float64, device=DEVICE)
    ops.grad_norm(tiles, segments, sums, bad, control, grads, grads[0].dtype, norm_type)
    ops.finish_norm(tiles, segments, sums, bad, control, SUM, BAD, norm_type, **at_once)
    return float(control[SUM]), int(control[BAD])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_norm_is_that_of_fp64(dtype, norm_type):
    grads = [torch.randn(n, device=DEVICE).to(dtype) for n in NUMELS]
    total, bad = measure(grads, norm_type)
    flat = torch.cat([g.double() for g in grads])
    want = float(torch.linalg.vector_norm(flat, norm_type))
    got = total if norm_type == math.inf else total ** (1 / norm_type)
    assert got == pytest.approx(want, rel=1e-6) and bad == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_first_segment_that_is_not_finite_is_found(value, norm_type):
    grads = [torch.randn(n, device=DEVICE).bfloat16() for n in NUMELS]
    grads[5][65536] = value
    grads[6][0] = value
    assert measure(grads, norm_type)[1] == 1 + 5


def test_the_first_of_bad_segments_is_found_among_more_than_are_looked_at_at_once():
    grads = list(torch.randn(8 + 7, 64, device=DEVICE).unbind())
    grads[3][0] = grads[3 + 8][0] = math.nan
    assert measure(grads, at_once=8)[1] == 1 + 3


def test_norm_gives_the_same_bits_again():
    grads = [torch.randn(n, device=DEVICE) for n in NUMELS]
    assert len({measure(grads) for _ in range(3)}) == 1


@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pack_copies_scales_casts_and_sums(source_dtype, dtype):
    sources = [torch.randn(n, device=DEVICE).to(source_dtype) for n in NUMELS]
    buffer = torch.full((sum(NUMELS) + 64 * len(NUMELS),), math.nan, device=DEVICE).to(dtype)
    destinations, at = [], 0
    for n in NUMELS:
        destinations.append(buffer[at : at + n])
        at += -(-n // 64) * 64
    tiles, segments, sums, bad = tables(sources, destinations)
    scale = torch.full((1,), 1 / 3, dtype=torch.float64, device=DEVICE)
    ops.pack(tiles, segments, sums, bad, scale, [buffer], sources, source_dtype, dtype, True)
    third = torch.tensor(1 / 3, device=DEVICE)
    for source, got in zip(sources, destinations, strict=True):
        assert torch.equal(got, (source.float() * third).to(dtype))
    want = sum(float((s.float() * third).double().pow(2).sum()) for s in sources)
    assert float(sums.double().sum()) == pytest.approx(want, rel=1e-6)
    assert int(bad.sum()) == 0


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="norm_type=-1"):
        measure([torch.ones(3, device=DEVICE)], -1.0)


def test_a_sum_that_overflows_is_bad_although_its_terms_are_not():
    grads = [torch.ones(64, device=DEVICE), torch.full((4096,), 1e18, device=DEVICE)]
    assert measure(grads)[1] == 1 + 1
