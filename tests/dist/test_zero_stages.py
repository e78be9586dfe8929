"""ZeRO of stages 1 and 2: what they send and hold, as formulas, and the bits of a step.

E elements of all payloads, C chunks, W ranks, k backwards before a step; bf16 is 2 B an element.
"""

import tempfile
from collections import Counter
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import nn

import gemini
from bench.shared.models import Choosy, Tower, seeded, token_batches, token_loss
from bench.shared.reference import relative_error
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from gemini.placement.tiers import Tier
from optim import HybridAdam, HybridSGD

pytestmark = pytest.mark.ci

SMALL = {"min_chunk_size_m": 0.004}
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}
BF16, FP32 = 2, 4
K = 4
WORLDS = [2, 4]


class Wire:
    """Counts a model's collectives, and their bytes as payloads, by kind."""

    def __init__(self, model):
        self.count, self.nbytes = Counter(), Counter()
        comm = model.engine.comm
        for kind, of_payload in (("all_gather", 0), ("reduce_scatter", 1), ("all_reduce", 0)):
            setattr(comm, kind, self._counted(kind, getattr(comm, kind), of_payload))

    def _counted(self, kind, function, of_payload):
        def call(*args, **kwargs):
            self.count[kind] += 1
            self.nbytes[kind] += args[of_payload].nbytes
            return function(*args, **kwargs)

        return call

    def take(self):
        found = dict(self.count), dict(self.nbytes)
        self.count.clear()
        self.nbytes.clear()
        return found


class LateTicket:
    """A gather whose values come when it is waited for, and not before."""

    def __init__(self, ticket, copies):
        self.ticket, self.copies = ticket, copies

    def ready(self):
        return False

    def wait(self):
        self.ticket.wait()
        if self.copies is not None:
            payload, values = self.copies
            payload.copy_(values)
            self.copies = None


def delay_gathers(model):
    comm = model.engine.comm
    gather = comm.all_gather

    def late(payload, shard, label):
        values = torch.empty_like(payload)
        return LateTicket(gather(values, shard.clone(), label), (payload, values))

    comm.all_gather = late


def wrap(placement, **options):
    model = GeminiDDP(Tower(), placement_policy=placement, **SMALL, **options)
    return model, HybridAdam(model.parameters(), **ADAM)


def parts_of(rank, world_size, steps, k=K):
    return [parts[k * rank : k * (rank + 1)] for parts in token_batches(steps, k * world_size)]


def backwards(model, parts, no_sync):
    for i, part in enumerate(parts):
        hold = no_sync and i + 1 < len(parts)
        with model.no_sync() if hold else nullcontext():
            (token_loss(model, part) / len(parts)).backward()


def on_device(model, kind):
    return model.engine.manager.bytes_in_use().get((Tier.DEVICE, kind), 0)


def measured(rank, world_size, placement, no_sync):
    """Counts, bytes on the wire and in memory of three steps, and the digest behind them."""
    model, optimizer = wrap(placement)
    wire, found = Wire(model), []
    held = {"parameters": on_device(model, "parameters"), "state": on_device(model, "state")}
    for parts in parts_of(rank, world_size, 3):
        gradients = []
        for i, part in enumerate(parts):
            with model.no_sync() if no_sync and i < K - 1 else nullcontext():
                (token_loss(model, part) / K).backward()
            gradients.append(on_device(model, "gradients"))
        optimizer.step()
        gradients.append(on_device(model, "gradients"))
        optimizer.zero_grad()
        found.append((wire.take(), gradients))
    chunks = model.engine.chunks
    predicted = {row.kind: row for row in model.memory_report().rows if row.tier == "device"}
    plan = {kind: row.predicted_bytes for kind, row in predicted.items()}
    sizes = len(chunks), sum(chunk.payload.numel() for chunk in chunks)
    report = plan, model.explain("embed.weight")
    return sizes, held, found, report, model.digest()


def gradients_read(rank, world_size, placement):
    """Norms of one gradient: this rank's own under no_sync, the mean's behind a plain backward."""
    model, optimizer = wrap(placement, precision="fp32")
    weight = model.layers[1][1].weight
    first, second = parts_of(rank, world_size, 1, 2)[0]
    with model.no_sync():
        token_loss(model, first).backward()
    own = weight.grad.clone()
    token_loss(model, second).backward()
    whole = weight.grad.clone()
    token_loss(model, first).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    return own, whole, norm.double()


def clipped_by_value(rank, world_size, placement):
    """A limit between backwards is one of the mean over ranks."""
    model, optimizer = wrap(placement, precision="fp32")
    first, second = parts_of(rank, world_size, 1, 2)[0]
    token_loss(model, first).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    seen = model.layers[1][1].weight.grad.norm()
    token_loss(model, second).backward()
    found = dict(model.named_gradients())
    optimizer.step()
    return seen, torch.cat([grad.double().flatten() for grad in found.values()])


def travelling(rank, world_size, dtype, precision):
    model, optimizer = wrap("zero1", precision=precision, communication_dtype=dtype)
    wire, found = Wire(model), []
    for parts in parts_of(rank, world_size, 3, 2):
        backwards(model, parts, no_sync=False)
        found.append({chunk.gradient.buffer.dtype for chunk in model.engine.chunks})
        optimizer.step()
        found.append({chunk.gradient.shard.dtype for chunk in model.engine.chunks})
        optimizer.zero_grad()
    numel = sum(chunk.payload.numel() for chunk in model.engine.chunks)
    state = model.state_dict()
    weights = torch.cat([v.double().flatten() for v in state.values()]) if state else None
    return wire.take()[1]["reduce_scatter"] / numel, found, weights


class Unwatched(nn.Sequential):
    """Its operators do not ask its parameters, as those of compiled code."""

    def forward(self, x):
        with torch._C.DisableTorchFunctionSubclass():
            return super().forward(x)


def overlapped(rank, world_size, overlaps):
    """Nothing is read before its gather has ended: by a module, or by an operator."""
    module = Tower()
    module.layers[3].__class__ = Unwatched
    model = GeminiDDP(module, placement_policy="zero2", overlap_allgather=overlaps, **SMALL)
    optimizer = HybridAdam(model.parameters(), **ADAM)
    delay_gathers(model)
    chunks = len(model.engine.chunks)
    read, waiting = [], []
    for parts in parts_of(rank, world_size, 3, 1):
        token_loss(model, parts[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        waiting.append(len(model.engine.weights.regather.arriving) / chunks)
        read.append(model.layers[2][1].weight.double().sum())
        read.append(model.head.weight.data.double().sum())
        with torch.no_grad():
            read.append(token_loss(model, parts[0]))
    token_loss(model, parts[0]).backward()
    optimizer.step()
    with torch.no_grad():  # written to while gathers are under way
        model.layers[0][1].bias.add_(1.0)
    with model.summon_full_params(writeback=False):
        whole = torch.cat([p.detach().double().flatten() for p in model.parameters()])
        model.embed.weight.data.zero_()
    return read, waiting, whole, model.digest()


def lora(rank, world_size, placement):
    """peft's adapters beside frozen weights; then all are trained."""
    import peft

    adapters = peft.LoraConfig(r=3, target_modules=r"layers\.\d\.[13]", bias="none")
    with seeded():
        module = peft.get_peft_model(Tower(), adapters)
    model = GeminiDDP(module, placement_policy=placement, **SMALL)
    wire = Wire(model)
    optimizer = HybridAdam(model.parameters(), **ADAM)
    steps = parts_of(rank, world_size, 4, 2)
    backwards(model, steps[0], no_sync=False)
    optimizer.step()
    optimizer.zero_grad()
    counts = wire.take()[0]
    trained = sum(chunk.spec.trainable for chunk in model.engine.chunks)
    model.requires_grad_(True)
    for parts in steps[1:]:
        backwards(model, parts, no_sync=False)
        optimizer.step()
        optimizer.zero_grad()
    kept = all(shard.never_released for shard in model.engine.planning.plan.shards)
    extra = sum(chunk.memory_nbytes for chunk in model.engine.chunks)
    return counts, trained, len(model.engine.chunks), kept, extra, model.digest()


def unused_on_some(rank, world_size, placement):
    model = GeminiDDP(Choosy(), placement_policy=placement, precision="fp32",
                      min_chunk_size_m=1e-5)  # fmt: skip
    optimizer = HybridSGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(rank))
    for head in (rank % 2, 1):
        model(x, head).pow(2).sum().backward()
    there = [model.heads[head].weight.grad is not None for head in range(3)]
    model.heads[0].weight.grad = None
    optimizer.step()
    return there, model.digest()


def goes_wrong(rank, world_size):
    """A NaN on one rank, a backward that breaks, a step inside no_sync; then a good step."""
    model, optimizer = wrap("zero1", precision="fp16", max_norm=0.3)
    before, said = model.digest(), []
    first, second = parts_of(rank, world_size, 1, 2)[0]
    if rank == world_size - 1:
        bad = model.layers[1][3].weight.register_hook(lambda grad: grad * float("nan"))
    token_loss(model, first).backward()
    token_loss(model, second).backward()
    if rank == world_size - 1:
        bad.remove()
    optimizer.step()
    said.append(optimizer.last_report.skipped)
    optimizer.zero_grad()
    token_loss(model, first).backward()
    broken = model.layers[1][1].weight.register_hook(lambda grad: 1 / 0)
    for call in (lambda: token_loss(model, second).backward(), optimizer.step):
        try:
            call()
        except (ZeroDivisionError, RuntimeError) as error:
            said.append(type(error).__name__)
    broken.remove()
    optimizer.zero_grad()
    token_loss(model, first).backward()
    with model.no_sync():
        try:
            optimizer.step()
        except RuntimeError as error:
            said.append(str(error))
    token_loss(model, second).backward()
    optimizer.step()
    optimizer.zero_grad()
    return said, before != model.digest(), model.digest()


def offloaded(rank, world_size, stage):
    """State, masters and reduced gradients in a host memory that is not the device's."""
    sim = SimBackend(rank)
    placement = StaticPlacement.zero(stage, cpu_offload=True)
    model = GeminiDDP(Tower(), sim, placement, **SMALL)
    optimizer = HybridAdam(model.parameters(), **ADAM)
    for parts in parts_of(rank, world_size, 3):
        backwards(model, parts, no_sync=False)
        optimizer.step()
        in_use = model.engine.manager.bytes_in_use()
        optimizer.zero_grad()
    kinds = {(tier.value, kind): nbytes for (tier, kind), nbytes in in_use.items()}
    return kinds, model.digest()


def saved_and_parked(rank, world_size, folder):
    """While gathers are under way; then another placement goes on from the file."""
    model = GeminiDDP(Tower(), placement_policy="zero1", overlap_allgather=True, **SMALL)
    optimizer = HybridAdam(model.parameters(), **ADAM, nvme_offload_dir=folder)
    delay_gathers(model)
    first, second = parts_of(rank, world_size, 2, 2)
    backwards(model, first, no_sync=False)
    optimizer.step()
    optimizer.zero_grad()
    gemini.save_checkpoint(f"{folder}/saved", model, optimizer)
    token_loss(model, second[0]).backward()
    with optimizer.parked("nvme"):
        parked = all(c.payload.untyped_storage().nbytes() == 0 for c in model.engine.chunks)
    token_loss(model, second[1]).backward()
    optimizer.step()
    other, other_optimizer = wrap("zero3")
    gemini.load_checkpoint(f"{folder}/saved", other, other_optimizer)
    with other.no_sync():
        token_loss(other, second[0]).backward()
    token_loss(other, second[1]).backward()
    other_optimizer.step()
    return parked, model.digest(), other.digest()


def group_of_cases(rank, world_size, group, folder):
    both = ("zero1", "zero2")
    found = {}
    if group == "measured":
        for name in both if world_size == 1 else (*both, "zero3"):
            for no_sync in (False,) if world_size == 1 else (False, True):
                found[name, no_sync] = measured(rank, world_size, name, no_sync)
    elif group == "gradients":
        for name in both:
            found["read", name] = gradients_read(rank, world_size, name)
            found["by value", name] = clipped_by_value(rank, world_size, name)
            found["unused", name] = unused_on_some(rank, world_size, name)
    elif group == "lora":
        found = {name: lora(rank, world_size, name) for name in both}
    elif group == "travels":
        for dtype in (None, "bf16", "fp16", "fp32"):
            found[dtype] = travelling(rank, world_size, dtype, "bf16")
    elif group == "offloaded":
        found = {stage: offloaded(rank, world_size, stage) for stage in (1, 2)}
    else:
        found = {overlaps: overlapped(rank, world_size, overlaps) for overlaps in (False, True)}
        found["saved"] = saved_and_parked(rank, world_size, folder)
        found["wrong"] = goes_wrong(rank, world_size)
    return found


@cache
def cases(group, world_size=2):
    """What every rank found, by case; the cases of a group share their processes."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(group_of_cases, world_size, world_size, group, folder)


# -- counts and bytes ------------------------------------------------------------------------


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_stage_1_sends_what_one_all_reduce_does_however_many_backwards(world_size, no_sync):
    """C reductions and C gathers. Sums of k backwards are fp32, so 4 + 2 B an element.

    Beside them, small: who has a gradient, behind a backward that is not under no_sync; one vote.
    """
    (chunks, numel), _, steps, *_ = cases("measured", world_size)[0]["zero1", no_sync]
    assert chunks > 4
    for (count, nbytes), _ in steps:
        small = (1 if no_sync else K) + 1
        assert count == {"reduce_scatter": chunks, "all_gather": chunks, "all_reduce": small}
        assert nbytes["reduce_scatter"] == FP32 * numel and nbytes["all_gather"] == BF16 * numel


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_stage_2_reduces_in_every_backward_that_is_not_under_no_sync(world_size, no_sync):
    (chunks, numel), _, steps, *_ = cases("measured", world_size)[0]["zero2", no_sync]
    reductions, width = (1, FP32) if no_sync else (K, BF16)
    for (count, nbytes), _ in steps:
        assert count["reduce_scatter"] == reductions * chunks and count["all_gather"] == chunks
        assert nbytes["reduce_scatter"] == reductions * width * numel
        assert nbytes["all_gather"] == BF16 * numel


def test_one_rank_sends_nothing_and_holds_what_a_plain_model_does():
    for name in ("zero1", "zero2"):
        (_, numel), held, steps, (plan, _), _ = cases("measured", 1)[0][name, False]
        assert held == {"parameters": BF16 * numel, "state": 12 * numel}
        assert {kind: plan[kind] for kind in held} == held
        for (count, _), gradients in steps:
            assert set(count) <= {"all_reduce"}  # which is nothing there
            assert gradients == [BF16 * numel, *[FP32 * numel] * K]


@pytest.mark.parametrize("world_size", WORLDS)
def test_parameters_are_held_once_and_state_is_shared(world_size):
    """2 B an element for the payload, and nothing for the shard; 12 / W of master and moments."""
    for name in ("zero1", "zero2"):
        (_, numel), held, _, (plan, _), _ = cases("measured", world_size)[0][name, False]
        assert held["parameters"] == plan["parameters"] == BF16 * numel
        assert held["state"] == plan["state"] == 12 * numel // world_size


@pytest.mark.parametrize("world_size", WORLDS)
def test_gradients_are_whole_at_stage_1_and_shards_at_stage_2(world_size):
    """Behind every backward, and behind the step; fp32 from the second backward on."""
    for no_sync in (False, True):
        (_, numel), _, steps, (plan, said), _ = cases("measured", world_size)[0]["zero1", no_sync]
        held = [BF16 * numel, *[FP32 * numel] * (K - 1)]
        if no_sync:  # the last backward is known to be it
            held[-1] = FP32 * numel // world_size
        for _, gradients in steps:
            assert gradients == [*held, FP32 * numel // world_size]
        assert plan["gradients"] == BF16 * numel
        assert "on every rank until the step reduces it" in said
    (_, numel), _, steps, (plan, said), _ = cases("measured", world_size)[0]["zero2", False]
    for _, gradients in steps:
        assert [n * world_size for n in gradients] == [BF16 * numel, *[FP32 * numel] * K]
    assert "on every rank" not in said and "gathered once, behind the step" in said


# -- bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLDS)
def test_steps_have_the_same_bits_at_every_stage(world_size):
    """Stage 1 adds up before it reduces, as all of them do under no_sync."""
    results = cases("measured", world_size)
    for rank in results:
        digest = {key: found[-1] for key, found in rank.items()}
        summed = {digest[name, True] for name in ("zero1", "zero2", "zero3")}
        assert summed == {digest["zero1", False]}
        assert digest["zero2", False] == digest["zero3", False]
    assert len({rank["zero1", False][-1] for rank in results}) == 1


@pytest.mark.parametrize("world_size", WORLDS)
def test_gradients_read_between_backwards_are_those_of_ddp(world_size):
    """fp32 sums in another order: 1e-6."""
    results = cases("gradients", world_size)
    for name in ("zero1", "zero2"):
        own, whole, norm = zip(*[rank["read", name] for rank in results], strict=True)
        assert not torch.equal(own[0], own[1])
        assert all(torch.equal(grad, whole[0]) for grad in whole)
        assert all(torch.equal(n, norm[0]) for n in norm)
    for rank in results:
        for one, two in zip(rank["read", "zero1"], rank["read", "zero2"], strict=True):
            assert relative_error(one, two) < 1e-6


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_limit_between_backwards_is_one_of_the_mean(world_size):
    for rank in cases("gradients", world_size):
        for one, two in zip(rank["by value", "zero1"], rank["by value", "zero2"], strict=True):
            assert relative_error(one, two) < 1e-6  # fp32 sums in another order


def test_what_is_frozen_is_neither_reduced_nor_gathered_until_it_is_trained():
    for name in ("zero1", "zero2"):
        results = [rank[name] for rank in cases("lora")]
        counts, trained, chunks, kept, extra, _ = results[0]
        assert 0 < trained < chunks and kept and extra == 0
        reductions = trained * (1 if name == "zero1" else 2)
        assert counts["reduce_scatter"] == reductions and counts["all_gather"] == trained
        assert len({digest for *_, digest in results}) == 1


@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_may_use_other_parameters_and_drop_a_gradient(world_size):
    results = cases("gradients", world_size)
    for name in ("zero1", "zero2"):
        assert all(rank["unused", name][0] == [True, True, False] for rank in results)
        assert len({rank["unused", name][1] for rank in results}) == 1


# -- options ---------------------------------------------------------------------------------


def test_gradients_travel_in_the_dtype_that_was_asked_for():
    """And are fp32 before and after, as sums of two backwards. Three steps."""
    (rank, _), width = cases("travels"), {None: 4, "bf16": 2, "fp16": 2, "fp32": 4}
    exact = rank[None][2]
    start = torch.cat([v.double().flatten() for v in Tower().state_dict().values()])
    for dtype, nbytes in width.items():
        travelled, dtypes, weights = rank[dtype]
        assert travelled == 3 * nbytes
        assert dtypes == [{torch.float32}] * 6
        same = dtype in (None, "fp32")
        assert torch.equal(weights, exact) == same
        # bf16 has 8 bits: 4e-3 of a gradient, and less of an update that Adam normalises
        assert relative_error(weights - start, exact - start) < 1e-2


def test_gathers_behind_a_step_are_waited_for_by_what_reads_first():
    for rank in cases("steps"):
        read, waiting, whole, digest = rank[False]
        read_late, waiting_late, whole_late, digest_late = rank[True]
        assert waiting == [0] * 3 and waiting_late == [1] * 3
        assert all(torch.equal(a, b) for a, b in zip(read, read_late, strict=True))
        assert torch.equal(whole, whole_late) and digest == digest_late


def test_stage_1_after_a_nan_a_broken_backward_and_a_refused_step():
    results = [rank["wrong"] for rank in cases("steps")]
    for said, changed, digest in results:
        assert said[:3] == [True, "ZeroDivisionError", "RuntimeError"]
        assert len(said) == 4 and "inside no_sync" in said[3]
        assert changed and digest == results[0][2]


def test_what_is_offloaded_is_in_host_memory_and_has_the_same_bits():
    for rank, resident in zip(cases("offloaded"), cases("measured", 2), strict=True):
        (_, numel), *_ = resident["zero1", False]
        for stage in (1, 2):
            in_use, digest = rank[stage]
            assert in_use["host", "state"] == 10 * numel // 2
            assert in_use["host", "gradients"] == FP32 * numel // 2
            assert ("device", "state") not in in_use and ("device", "gradients") not in in_use
            assert digest == resident[f"zero{stage}", False][-1]


@pytest.mark.unlike
def test_a_checkpoint_and_parking_wait_for_the_gathers():
    for rank in cases("steps"):
        parked, went_on, loaded = rank["saved"]
        assert parked and went_on == loaded
