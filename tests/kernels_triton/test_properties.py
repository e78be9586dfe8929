"""Kernels over random sizes, groups and dtypes; and their registration with torch."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kernels_triton import ops
from kernels_triton.control_fields import LOSS_SCALE, NUM_CONTROL
from kernels_triton.launch import is_interpreted
from kernels_triton.tiles import SegmentRow, segment_table, tile_table
from kernels_triton.update.frame import NUM_COEFFICIENTS, NUM_HYPER
from optim.adam import AdamRule
from optim.state.memory import memory_of
from optim.state.pieces import Piece
from optim.update.built_kernels import compiler
from optim.update.launch_tables import segments_of
from optim.update.triton_update import TritonUpdater, kernel_of

hypothesis = pytest.importorskip("hypothesis")  # a bare machine with a GPU may lack it
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULE = AdamRule()
ADAM = kernel_of(RULE)

pytestmark = [] if is_interpreted() else [pytest.mark.gpu, pytest.mark.values]


def hyper(lr, weight_decay, adamw_mode):
    return RULE.hyper(
        {
            "lr": lr, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": weight_decay,
            "adamw_mode": adamw_mode, "bias_correction": True, "amsgrad": False,
            "maximize": False,
        }
    )  # fmt: skip


pieces_of = st.lists(
    st.tuples(
        st.integers(1, 700),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),  # of the parameter
        st.sampled_from([torch.float32, torch.bfloat16]),  # of the gradient
        st.integers(0, 1),  # group
        st.booleans(),  # has a gradient
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.ci
@settings(max_examples=12, deadline=None)
@given(pieces_of, st.integers(0, 3), st.floats(0.0, 0.5), st.booleans())
def test_any_mix_of_sizes_dtypes_and_groups_is_updated_by_the_formula(
    wanted, unalignment, weight_decay, adamw_mode
):
    hypers = [hyper(1e-2, weight_decay, adamw_mode), hyper(1e-3, 0.0, True)]
    end = 0
    slabs = {"exp_avg": [], "exp_avg_sq": []}
    generator = torch.Generator().manual_seed(len(wanted))
    total = sum(-(-numel // 64) * 64 for numel, *_ in wanted)
    slabs = {
        "exp_avg": torch.randn(total, generator=generator).to(DEVICE) * 0.1,
        "exp_avg_sq": torch.rand(total, generator=generator).to(DEVICE),
    }
    pieces, starts = [], []
    for counter, (numel, dtype, grad_dtype, group, _) in enumerate(wanted):
        room = torch.randn(numel + unalignment, generator=generator).to(DEVICE)
        param = room.to(dtype)[unalignment:]
        grad = torch.randn(numel, generator=generator).to(DEVICE).to(grad_dtype)
        planes = tuple(slab[end : end + numel] for slab in slabs.values())
        end += -(-numel // 64) * 64
        starts.append((param.float().clone(), *(plane.clone() for plane in planes)))
        pieces.append(Piece(param, grad, None, planes, hypers[group], 0, counter))
    updater = TritonUpdater(RULE, [w[3] for w in wanted], DEVICE)
    updater.set_present([i for i, w in enumerate(wanted) if w[4]])
    updater.begin(hypers, with_norm=False)
    updater.update(pieces, slabs)
    for piece, (param, *planes), (_, dtype, _, group, present) in zip(
        pieces, starts, wanted, strict=True
    ):
        if not present:
            assert torch.equal(piece.param.float(), param)
            continue
        row = torch.tensor(RULE.values(hypers[group], 1), dtype=torch.float64).float()
        want = RULE.updated(param, piece.grad.float(), planes, row.to(DEVICE))
        # torch's square root on the CPU is not correctly rounded: an ulp of the update
        torch.testing.assert_close(
            piece.param.float(),
            want[0].to(dtype).float(),
            rtol=8e-3 if dtype != torch.float32 else 1e-6,
            atol=1e-7,
        )
        torch.testing.assert_close(piece.planes[0], want[1], rtol=0, atol=0)
        torch.testing.assert_close(piece.planes[1], want[2], rtol=0, atol=0)
    assert updater.steps.tolist() == [int(w[4]) for w in wanted]


@given(st.lists(st.integers(64, 640), min_size=1, max_size=8), st.integers(0, 255))
def test_neighbouring_pieces_become_one_segment(numels, owners):
    numels = [n // 64 * 64 for n in numels]
    slab = torch.zeros(sum(numels))
    param, grad = torch.zeros(sum(numels)), torch.zeros(sum(numels))
    pieces, at = [], 0
    for i, n in enumerate(numels):
        s = slice(at, at + n)
        pieces.append(
            Piece(param[s], grad[s], None, (slab[s],), None, 0, (owners >> i) & 1, first=at)
        )
        at += n
    found = [segment for _, segment in segments_of(pieces, slab, memory_of(DEVICE))]
    assert sum(segment.numel for segment in found) == sum(numels)
    changes = sum(a.counter != b.counter for a, b in pairwise(pieces))
    assert len(found) == changes + 1


def test_ops_declare_what_they_change():
    n, numel = 2, 100
    param, grad = torch.zeros(numel, device=DEVICE), torch.ones(numel, device=DEVICE)
    segments = segment_table([SegmentRow(param.data_ptr(), grad.data_ptr(), 0, numel, 0)], DEVICE)
    tiles = tile_table([numel], 128, DEVICE)
    control = torch.zeros(NUM_CONTROL, dtype=torch.float64, device=DEVICE)
    control[LOSS_SCALE] = 1.0
    coefficients = torch.zeros(n, NUM_COEFFICIENTS, device=DEVICE)
    integers = torch.zeros(n, dtype=torch.int64, device=DEVICE)
    present = torch.ones(n, dtype=torch.float64, device=DEVICE)
    table = torch.full((1, NUM_HYPER), 0.5, dtype=torch.float64, device=DEVICE)
    sums = torch.zeros(1, device=DEVICE)
    bad = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    planes = [torch.zeros(128, device=DEVICE), torch.zeros(128, device=DEVICE)]
    calls = [
        (ops.prologue, (ADAM, integers, table, integers.clone(), present, coefficients, control,
                        [], False)),
        (ops.update, (ADAM, tiles, segments, coefficients, control, planes, [param], [grad],
                      torch.float32, torch.float32, 128, 4)),
        (ops.grad_norm, (tiles, segments, sums, bad, control, [grad], torch.float32, 2.0)),
        (ops.finish_norm, (tiles, segments, sums, bad, control, 0, 1, 2.0)),
        (ops.tally, (torch.zeros(4, dtype=torch.float64, device=DEVICE), control, 2.0)),
    ]  # fmt: skip
    for op, args in calls:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.ci
def test_a_plain_module_can_be_updated_by_triton(monkeypatch, tmp_path):
    """The path of CUDA parameters, here on CPU tensors in the interpreter; state on disk too."""
    import optim.plain.target
    from optim import HybridAdam, NvmeConfig
    from optim.state.memory import memory_of
    from tests.support.plain_training import make_params, train, update_error

    shapes = [(1,), (3,), (17,), (1023,), (1025,), (37, 977), (7, 11, 13)]
    start, theirs = make_params(shapes=shapes), make_params(shapes=shapes)
    want = train(theirs, torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1), 5)
    if is_interpreted():
        monkeypatch.setattr(optim.plain.target, "kernels_of", memory_of)
    results = []
    for fraction in (0.0, 0.5, 1.0):
        ours = [torch.nn.Parameter(p.detach().to(DEVICE)) for p in make_params(shapes=shapes)]
        optimizer = HybridAdam(
            ours, lr=1e-2, weight_decay=0.1, nvme_offload_fraction=fraction,
            nvme_offload_dir=tmp_path, nvme=NvmeConfig(block_numel=1 << 13),
        )  # fmt: skip
        results.append([p.cpu() for p in train(ours, optimizer, 5)])
        assert optimizer.last_report.update_path == "triton"
        assert [int(s["step"]) for s in optimizer.state.values()] == [5] * 7
        optimizer.close()
    assert update_error(results[0], want, start) < 1e-6
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.ci
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.skipif(not is_interpreted(), reason="compares the interpreter")
def test_the_interpreter_gives_the_bits_of_the_compiled_path():
    """fp32 and the bf16 copy, on 300 003 elements: the same formulas without contraction."""
    script = Path(__file__).parent / "compiled_bits.py"
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "TRITON_INTERPRET": "1"}
    out = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    assert out.stdout == "compared\n"
