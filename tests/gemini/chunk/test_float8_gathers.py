"""Parameters that are gathered as float8: their values, their bytes, and what keeps its bits."""

import pytest
import torch

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import ConstPlacement, GeminiDDP, StaticPlacement
from optim import HybridAdam, HybridSGD

PLACEMENTS = {
    "ZeRO-3": StaticPlacement(),
    "on the host": StaticPlacement(offload_param_frac=1.0),
    "ZeRO-2": StaticPlacement.zero(2),
}


def rounded(weight):
    """What a gather makes of a whole parameter, of any dtype."""
    wide = weight.bfloat16().float()
    scale = wide.abs().max() / 448
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16()


def made(name, **options):
    options = {"fp8_communication": True, "min_chunk_size_m": 0.004} | options
    model = GeminiDDP(Tower(), placement_policy=PLACEMENTS[name], **options)
    return model, HybridSGD(model.parameters(), lr=0.5)


def seen(model, ids):
    """Parameters as layers compute with them, and bytes of all gathers, in one forward."""
    found = {}

    def keep(layer, *_):
        for name, param in layer.named_parameters(recurse=False):
            found[f"{names[layer]}.{name}"] = param.detach().clone()

    names = {layer: name for name, layer in model.module.named_modules()}
    hooks = [layer.register_forward_hook(keep) for layer in names]
    before = model.engine.comm.chunk_bytes
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found, model.engine.comm.chunk_bytes - before


def trained(rank, name):
    """After a step (what was computed with, what the shards say), and bytes of a forward."""
    (ids,) = token_batches(1, 1)[0]
    model, optimizer = made(name)
    token_loss(model, ids).backward()
    optimizer.step()
    found, nbytes = seen(model, ids)
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    model, optimizer = made(name, fp8_communication=False)
    _, plain = seen(model, ids)
    optimizer.close()
    return found, exact, nbytes, plain


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_parameter_is_rounded_with_one_scale_at_any_world_size(name):
    for ranks in (2, 3):
        results = run_ranks(trained, ranks, name)
        exact = results[0][1]
        for found, _, nbytes, plain in results:
            assert len(found) == len(exact)
            for key, value in found.items():
                assert torch.equal(value, rounded(exact[key])), key
            assert nbytes * 2 == plain and (plain > 0) == (name != "ZeRO-2")


def written(rank, name):
    """Masters before and after one parameter was written to, and what it is."""
    (ids,) = token_batches(1, 1)[0]
    model, optimizer = made(name)
    token_loss(model, ids).backward()
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad(), model.summon_full_params():
        model.module.layers[1][1].bias[3:].fill_(0.3)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    return before, after


@pytest.mark.parametrize("name", PLACEMENTS)
def test_what_was_not_written_to_keeps_the_bits_that_no_gather_has(name):
    before, after = run_ranks(written, 2, name)[0]
    bias, changed = (one.pop("layers.1.1.bias") for one in (before, after))
    assert torch.equal(changed[3:], torch.full((74,), 0.3).bfloat16().float())
    assert torch.equal(bias[:3], changed[:3])
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert not any(torch.equal(value, rounded(value).float()) for value in before.values())


def alone(rank, other):
    model, optimizer = made("ZeRO-3", **other)
    kinds = {type(chunk).__name__ for chunk in model.engine.chunks}
    optimizer.close()
    return kinds


def test_what_is_not_gathered_or_has_another_precision_is_as_it_was():
    assert run_ranks(alone, 1, {}) == [{"Chunk"}]
    norms = {"keep_fp32": lambda name, _: name.endswith(".0")}
    assert run_ranks(alone, 2, norms) == [{"Chunk", "Float8Chunk"}] * 2


def test_a_budget_is_refused_that_would_not_count_what_travels():
    with pytest.raises(ValueError, match="fp8_communication=True gathers float8 beside"):
        GeminiDDP(Tower(), placement_policy=ConstPlacement("1GiB"), fp8_communication=True)


def weights_of(rank, name, by_kernels):
    """After a step on the simulated device, and what a parameter's write leaves."""
    backend = SimBackend(rank, updates_by_triton=by_kernels)
    backend.shards_start_on_host = False
    model = GeminiDDP(
        Tower(), backend, placement_policy=PLACEMENTS[name], precision="bf16",
        fp8_communication=True, min_chunk_size_m=0.004,
    )  # fmt: skip
    optimizer = HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.0)
    (ids,) = token_batches(1, 1)[0]
    token_loss(model, ids).backward()
    optimizer.step()
    with torch.no_grad(), model.summon_full_params():
        model.module.layers[1][1].bias[3:].fill_(0.3)
    kinds = {type(chunk._own).__name__ for chunk in model.engine.chunks}
    found = {key: value.clone() for key, value in model.state_dict().items()}
    seen_now, _ = seen(model, ids)
    optimizer.close()
    return kinds, found, seen_now


@pytest.mark.ci
@pytest.mark.parametrize(("name", "ranks"), [("ZeRO-3", 3), ("on the host", 2), ("ZeRO-2", 3)])
def test_kernels_and_operators_gather_what_is_rounded_once(name, ranks):
    for by_kernels, way in ((False, "OperatorRuns"), (True, "Float8Runs")):
        results = run_ranks(weights_of, ranks, name, by_kernels)
        exact = results[0][1]
        assert exact["layers.1.1.bias"][3:].eq(torch.tensor(0.3).bfloat16()).all()
        for kinds, _, computed in results:
            assert kinds == {way}
            assert len(computed) == len(exact)
            for key, value in computed.items():
                assert torch.equal(value, rounded(exact[key])), key
