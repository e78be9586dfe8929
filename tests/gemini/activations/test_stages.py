"""Stages of a pipeline whose activations leave: backwards do not come in the reverse order."""

import pytest
import torch

from bench.shared.workers import run_ranks
from gemini import AutoPlacement
from tests.support.pipelines import MICROBATCHES, batches, pipeline


def trained(rank, kind, policy):
    """Weights after some steps, norms, and bytes of the last call that went to files."""
    model = pipeline(kind, placement_policy=policy)
    saved = [part.engine.saved_tensors for part in model.parts]
    for one in saved:
        if one is not None:
            one.keep_at_most(0)
            one.keep_at_most = one.keep_what_fits = lambda *_: None
    norms = []
    for parts in batches(MICROBATCHES):
        model.run(parts)
        out = [0 if one is None else one.traffic.nvme_out for one in saved]
        norms.append(model.step())
    found = model.weights(), norms, out
    model.close()
    return found


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["1F1B", "ZBVZeroBubble"])
def test_stages_that_spill_have_the_bits_of_those_that_keep(kind, tmp_path):
    spill = AutoPlacement("8MiB", nvme_dir=str(tmp_path), activations="spill")
    keep = AutoPlacement("8MiB", nvme_dir=str(tmp_path))
    expected = run_ranks(trained, 2, kind, keep)
    found = run_ranks(trained, 2, kind, spill)
    assert all(sum(out) > 0 for *_, out in found) and not any(sum(out) for *_, out in expected)
    for (mine, norms, _), (theirs, others, _) in zip(found, expected, strict=True):
        assert norms == others and mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
