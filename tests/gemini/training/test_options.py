"""torch's options of Adam and SGD through a wrapped module, wherever its state is."""

import pytest
import torch
import torch.distributed as dist

import gemini
from bench.shared.models import Choosy, Tower, token_batches, token_loss
from bench.shared.reference import flat, relative_error, train_reference
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP, StaticPlacement
from gemini.checkpoint import MismatchError
from optim import HybridAdam, HybridSGD, NvmeConfig
from tests.support.checkpoints import PLACEMENTS, batches, train

ADAM = {"lr": 1e-2, "eps": 1e-3, "betas": (0.9, 0.9)}
SGD = {"lr": 0.1, "momentum": 0.9}
CASES = {
    "amsgrad": (HybridAdam, torch.optim.AdamW, {**ADAM, "amsgrad": True, "weight_decay": 0.01}),
    "maximize": (HybridAdam, torch.optim.AdamW, {**ADAM, "maximize": True, "weight_decay": 0.0}),
    "dampening": (HybridSGD, torch.optim.SGD, {**SGD, "dampening": 0.5, "maximize": True}),
    "nesterov": (HybridSGD, torch.optim.SGD, {**SGD, "nesterov": True, "weight_decay": 0.1}),
}
STEPS = 6


def wrapped(case, placement="resident", folder=None, groups=list, precision="fp32"):
    fraction, on_host = PLACEMENTS[placement]
    model = GeminiDDP(
        Tower(),
        SimBackend() if on_host else "cpu",
        StaticPlacement(offload_param_frac=float(on_host)),
        precision=precision,
        min_chunk_size_m=0.004,
    )
    cls, _, options = CASES[case]
    nvme = {"nvme_offload_fraction": fraction, "nvme_offload_dir": folder}
    params = groups(model.parameters())
    return model, cls(params, **options, **nvme, nvme=NvmeConfig(block_numel=1024))


def trained(rank, case, placement, folder):
    """fp32 weights, flat."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model, optimizer = wrapped(case, placement, folder)
    for step, parts in enumerate(token_batches(STEPS, world_size)):
        (token_loss(model, parts[rank]) * 0.3**step).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = model.state_dict()
    optimizer.close()
    return flat([weights[name] for name, _ in Tower().named_parameters()]) if rank == 0 else None


def reference(case, world_size):
    _, cls, options = CASES[case]
    shrinking = [
        [(part, 0.3**step) for part in parts]
        for step, parts in enumerate(token_batches(STEPS, world_size))
    ]
    return train_reference(
        Tower(),
        lambda params: cls(params, **options),
        shrinking,
        lambda module, part: token_loss(module, part[0]) * part[1],
        divisor=world_size,
    )


START = flat(list(Tower().parameters()))


@pytest.mark.parametrize("case", CASES)
def test_a_wrapped_module_is_updated_as_by_torch(case, tmp_path):
    found = [trained(0, case, placement, tmp_path) for placement in PLACEMENTS]
    want = reference(case, 1)
    assert relative_error(found[0] - START, want - START) < 1e-6
    for other in found[1:]:
        assert torch.equal(other, found[0])


def choosy(make_optimizer, model):
    """The second head gets its first gradient in the third step, the third one in the fourth."""
    optimizer = make_optimizer(model.parameters())
    torch.manual_seed(1)
    for head in (0, 0, 1, 2, 1, 2):
        model(torch.randn(4, 5), head).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = model.state_dict()
    return flat([weights[name] for name, _ in Choosy().named_parameters()])


@pytest.mark.parametrize("case", ["amsgrad", "dampening"])
def test_a_parameter_whose_first_gradient_comes_late_begins_as_in_torch(case):
    ours, theirs, options = CASES[case]
    options = {**options, "lr": 1e-2, "maximize": False}
    model = GeminiDDP(Choosy(), "cpu", precision="fp32")
    got = choosy(lambda params: ours(params, **options), model)
    want = choosy(lambda params: theirs(params, **options), Choosy())
    start = flat(list(Choosy().parameters()))
    assert relative_error(got - start, want - start) < 1e-6


def two_groups(amsgrad):
    def groups(params):
        params = list(params)
        return [{"params": params[:5]}, {"params": params[5:], "amsgrad": amsgrad}]

    return groups


def test_groups_that_differ_in_amsgrad_share_one_plane():
    model, optimizer = wrapped("maximize", groups=two_groups(True))
    for (batch,) in token_batches(3, 1):
        token_loss(model, batch).backward()
        optimizer.step()
    largest = [planes["max_exp_avg_sq"] for planes in optimizer.state_dict()["state"].values()]
    assert not any(plane.any() for plane in largest[:5])
    assert all(plane.any() for plane in largest[5:])


def test_a_group_with_amsgrad_is_refused_where_shards_have_no_plane_for_it():
    model, optimizer = wrapped("maximize", groups=lambda params: list(params)[:5])
    rest = list(model.parameters())[5:]
    with pytest.raises(ValueError, match="make the optimizer with amsgrad=True"):
        optimizer.add_param_group({"params": rest, "amsgrad": True})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": rest})


def test_a_checkpoint_with_amsgrad_goes_on_with_the_same_bits_and_fits_no_other(tmp_path):
    model, optimizer = wrapped("amsgrad")
    train(model, optimizer, batches(0, 2))
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    train(model, optimizer, batches(2, 4))
    want = model.state_dict()
    folder = tmp_path / "state"
    folder.mkdir()
    other = wrapped("amsgrad", "mixed", folder)
    gemini.load_checkpoint(tmp_path / "a", *other)
    train(*other, batches(2, 4))
    got = other[0].state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)
    with pytest.raises(MismatchError, match="make the optimizer with amsgrad=True"):
        gemini.load_checkpoint(tmp_path / "a", *wrapped("maximize"))
    gemini.save_checkpoint(tmp_path / "b", *wrapped("maximize"))
    with pytest.raises(MismatchError, match=r"missing .*max_exp_avg_sq"):
        gemini.load_checkpoint(tmp_path / "b", *wrapped("amsgrad"))


def test_a_checkpoint_of_torchs_sgd_goes_on_with_its_dampening(tmp_path):
    """It has buffers and no step counts: the next step is not the first."""
    _, cls, options = CASES["dampening"]

    module = Tower()
    optimizer = cls(module.parameters(), **options)
    train(module, optimizer, batches(0, 2))
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a")
    model, its_optimizer = wrapped("dampening")
    gemini.load_checkpoint(tmp_path / "a", model, its_optimizer)
    start = flat(list(module.parameters()))
    for pair in ((module, optimizer), (model, its_optimizer)):
        train(*pair, batches(2, 4))
    weights = model.state_dict()
    got = flat([weights[name] for name, _ in Tower().named_parameters()])
    assert relative_error(got - start, flat(list(module.parameters())) - start) < 1e-6
