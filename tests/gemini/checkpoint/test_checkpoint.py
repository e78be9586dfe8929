"""Checkpoints in one process: resume, what fits what, digests."""

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import gemini
from bench.shared.models import Tower
from gemini.checkpoint import MismatchError
from gemini.ddp import GeminiDDP
from optim import HybridAdam, NvmeConfig
from tests.support.checkpoints import (
    ADAM,
    assert_same,
    batches,
    everything,
    load_with_dcp,
    make,
    torch_state,
    train,
    whole,
)

# -- resume -----------------------------------------------------------------------------------


def scheduled(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def go(model, optimizer, scheduler, steps):
    for step in steps:
        train(model, optimizer, [step])
        scheduler.step()


@pytest.mark.parametrize(
    ("precision", "async_save"), [("bf16", False), ("bf16", True), ("fp16", False), ("fp32", True)]
)
def test_training_goes_on_with_the_same_bits(precision, async_save, tmp_path):
    """At other placements and chunk sizes, with scheduler, scale, counters and random numbers."""
    model, optimizer = make("mixed", precision)
    scheduler = scheduled(optimizer)
    go(model, optimizer, scheduler, batches(0, 2))
    extra = {"position": 2, "names": ["a"], "ema": torch.ones(3, dtype=torch.bfloat16)}
    ticket = gemini.save_checkpoint(
        tmp_path / "k2", model, optimizer, scheduler, extra, async_save, async_ram_budget=50_000
    )
    go(model, optimizer, scheduler, batches(2, 5))
    ticket.wait()
    want = everything(model, optimizer)
    for placement, chunk_size_m in (("resident", 0.01), ("nvme", 0.004), ("host", 0.002)):
        other, its_optimizer = make(placement, precision, chunk_size_m, seed=7)
        its_scheduler = scheduled(its_optimizer)
        assert_same(gemini.load_checkpoint(tmp_path, other, its_optimizer, its_scheduler), extra)
        go(other, its_optimizer, its_scheduler, batches(2, 5))
        got = everything(other, its_optimizer)
        # chunks that differ cut runs differently: compare whole tensors
        assert_same(whole(other, its_optimizer), whole(model, optimizer))
        for name in ("steps", "counters", "groups", "random"):
            assert_same(got[name], want[name], name)
        assert its_scheduler.state_dict() == scheduler.state_dict()


def test_weights_alone_are_loaded_without_an_optimizer_on_either_side(tmp_path):
    model, optimizer = make()
    train(model, optimizer, batches(0, 2))
    gemini.save_checkpoint(tmp_path / "a", model)
    bare = GeminiDDP(Tower(4), precision="bf16", min_chunk_size_m=0.004)
    gemini.load_checkpoint(tmp_path, bare)
    assert_same(bare.state_dict(), model.state_dict())
    with pytest.raises(MismatchError, match=r"has no optimizer state$"):
        gemini.load_checkpoint(tmp_path, *make())
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(
        MismatchError, match=r"a torch file of weights, which model.load_state_dict"
    ):
        gemini.load_checkpoint(tmp_path / "weights.pt", *make())


@pytest.mark.parametrize("policy", ["static", "cpu"])
def test_what_was_written_to_a_module_without_an_optimizer_is_saved(policy, tmp_path):
    """Its fp32 originals wait for an optimizer, and are not what its weights are any more."""
    model = GeminiDDP(Tower(4), None, policy, precision="bf16", min_chunk_size_m=0.004)
    written = model.layers[0][1].weight
    with torch.no_grad():
        written.mul_(2.0)
    gemini.save_checkpoint(tmp_path / "a", model)  # first: state_dict() lets originals follow
    bare = GeminiDDP(Tower(5), precision="bf16", min_chunk_size_m=0.004)
    gemini.load_checkpoint(tmp_path, bare)
    assert_same(bare.state_dict(), model.state_dict())


# -- any optimizer, any module ----------------------------------------------------------------


def plain(steps, seed=0):
    module = Tower(seed)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAM)
    train(module, optimizer, steps)
    return module, optimizer


def plain_whole(module, optimizer):
    found = {f"model.{name}": value for name, value in module.state_dict().items()}
    names = [name for name, _ in module.named_parameters()]
    for i, planes in optimizer.state_dict()["state"].items():
        found |= {f"{names[i]}.{plane}": value for plane, value in planes.items()}
    return found


@pytest.mark.parametrize("how", ["dcp", "torch.save", "save_checkpoint"])
@pytest.mark.parametrize("placement", ["resident", "nvme"])
def test_a_plain_module_and_adamw_are_loaded(how, placement, tmp_path):
    module, optimizer = plain(batches(0, 2))
    if how == "dcp":
        dcp.save(torch_state(module, optimizer), checkpoint_id=tmp_path / "a")
    elif how == "torch.save":
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / "a")
    else:
        gemini.save_checkpoint(tmp_path / "a", module, optimizer, extra=[1])
    model, its_optimizer = make(placement, seed=2)
    train(model, its_optimizer, batches(5, 6))
    extra = gemini.load_checkpoint(tmp_path / "a", model, its_optimizer)
    assert extra == ([1] if how == "save_checkpoint" else None)
    assert_same(whole(model, its_optimizer), plain_whole(module, optimizer))


@pytest.mark.parametrize("how", ["dcp", "load_checkpoint"])
def test_a_plain_module_and_adamw_load_what_was_saved_wrapped(how, tmp_path):
    model, optimizer = make("mixed")
    train(model, optimizer, batches(0, 2))
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    module, its_optimizer = plain([], seed=5)
    if how == "dcp":
        load_with_dcp(tmp_path / "a", module, its_optimizer)
    else:
        gemini.load_checkpoint(tmp_path, module, its_optimizer)
    assert_same(plain_whole(module, its_optimizer), whole(model, optimizer))
    assert its_optimizer.param_groups[0]["lr"] == ADAM["lr"]


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_hybrid_adam_on_a_plain_module_goes_on_with_the_same_bits(fraction, tmp_path):
    def pair(seed, fraction):
        module = Tower(seed)
        config = NvmeConfig(block_numel=1024)
        options = {"nvme_offload_fraction": fraction, "nvme": config}
        return module, HybridAdam(module.parameters(), **options, **ADAM)

    module, optimizer = pair(0, fraction)
    train(module, optimizer, batches(0, 2))
    gemini.save_checkpoint(tmp_path / "a", module, optimizer)
    train(module, optimizer, batches(2, 4))
    other, its_optimizer = pair(1, 1 - fraction)
    gemini.load_checkpoint(tmp_path, other, its_optimizer)
    train(other, its_optimizer, batches(2, 4))
    assert_same(plain_whole(other, its_optimizer), plain_whole(module, optimizer))


class Odd(nn.Module):
    """Shapes that cut badly, a scalar, an empty one, a frozen one, a buffer."""

    def __init__(self, seed=0, extra=0):
        super().__init__()
        torch.manual_seed(seed)
        self.deep = nn.Parameter(torch.randn(3, 5, 7, 31))
        self.scalar = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(301, 3 + extra), requires_grad=False)
        self.vector = nn.Parameter(torch.randn(1023))
        self.register_buffer("seen", torch.tensor([seed, 5]))

    def forward(self):
        return (self.deep.sum() * self.scalar + self.vector.square().sum()) * self.frozen.mean()


def odd(seed=0, extra=0, **options):
    return make(module=Odd(seed, extra), chunk_size_m=0.001, **options)


def step_odd(model, optimizer):
    model().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_plan_is_that_of_the_saved_run_from_the_first_iteration_on(tmp_path):
    budget = gemini.ConstPlacement("140KiB")  # no home rises in it, so one trace is measured
    model, optimizer = make(policy=budget)
    train(model, optimizer, batches(0, 2))
    sampled = model.engine.planning.inputs.trace
    assert sampled.signature != "assumed"
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    train(model, optimizer, batches(2, 4))
    again, its_optimizer = make(policy=budget)
    assert again.engine.planning.inputs.trace.signature == "assumed"
    gemini.load_checkpoint(tmp_path, again, its_optimizer)
    assert again.engine.planning.inputs.trace.moments == sampled.moments
    train(again, its_optimizer, batches(2, 4))
    assert_same(whole(again, its_optimizer), whole(model, optimizer))
    other, _ = make(module=Odd())
    sampler = model.engine.sampler.state_dict()
    other.engine.sampler.load_state_dict(sampler, told_apart=True)  # of another model: left
    assert other.engine.planning.inputs.trace.signature == "assumed"


def test_scalars_frozen_ones_buffers_and_unused_state_come_back(tmp_path):
    model, optimizer = odd(placement="nvme")
    step_odd(model, optimizer)
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    other, its_optimizer = odd(seed=1, placement="resident", precision="fp32")
    gemini.load_checkpoint(tmp_path, other, its_optimizer)
    got, want = whole(other, its_optimizer), whole(model, optimizer)
    assert_same(got, want)
    assert other.module.seen.tolist() == [0, 5]


def test_all_differences_are_listed_at_once_and_strict_can_be_given_up(tmp_path):
    model, optimizer = odd()
    step_odd(model, optimizer)
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    module = Odd(1, extra=2)
    module.renamed = module.vector
    del module.vector
    module.forward = lambda: module.deep.sum()
    other, its_optimizer = make(module=module, chunk_size_m=0.001)
    before = whole(other, its_optimizer)
    with pytest.raises(MismatchError) as raised:
        gemini.load_checkpoint(tmp_path, other, its_optimizer)
    text = str(raised.value)
    assert "missing model.renamed" in text and "unexpected model.vector" in text
    assert "model.frozen is of shape (301, 3), expected (301, 5)" in text
    assert "unexpected optim.state.vector.exp_avg" in text
    assert_same(whole(other, its_optimizer), before)
    with pytest.raises(MismatchError, match="parameter vector, which is not in"):
        gemini.load_checkpoint(tmp_path, other, its_optimizer, strict=False)
    gemini.load_checkpoint(tmp_path, other, strict=False)
    got, want = other.state_dict(), model.state_dict()
    assert torch.equal(got["deep"], want["deep"])
    assert torch.equal(got["renamed"], before["model.renamed"])


# -- digest -----------------------------------------------------------------------------------


def test_the_digest_follows_weights_and_not_where_they_are():
    layouts = [("resident", 0.002), ("nvme", 0.01), ("host", 0.004)]
    found = {make(placement, chunk_size_m=size)[0].digest() for placement, size in layouts}
    assert len(found) == 1
    model, optimizer = make()
    before = model.digest()
    assert before in found
    with torch.no_grad():
        model.layers[1][1].weight.view(-1)[-1] += 0.01
    changed = model.digest()
    train(model, optimizer, batches(0, 1))
    assert len({before, changed, model.digest()}) == 3


def test_the_digest_kernel_gives_the_bits_of_its_reference():
    from kernels_triton.digest import digest_on_device, digest_reference

    for numel in (0, 1, 1023, 4096, 70_001):
        words = torch.randint(-(2**62), 2**62, (numel,))
        want = digest_reference(words, 17, 3)
        assert torch.equal(digest_on_device(words, 17, 3), want)
        if numel > 1:
            parts = digest_reference(words[:500], 17, 3) + digest_reference(words[500:], 517, 3)
            assert torch.equal(parts, want)
