"""What a process takes beyond a plan's peak: products, wrapping, objects of blocks."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gemini import GeminiDDP
from gemini.optim import HybridAdam
from gemini.optim.update.cpu_update import CpuWorkers
from gemini.placement.tiers import Tier
from gemini.plan import models
from gemini.plan.ask import ask
from gemini.plan.machine import ProcessCosts, machine_of
from gemini.plan.question import (
    BLOCK_OBJECTS,
    BLOCKS_OF_ORIGINALS,
    EXPERT_PRODUCTS,
    KEPT_PRODUCTS,
    SLACK_BYTES,
    SLACK_SHARE,
    SPREAD,
    STATE_FILE_OBJECTS,
    TAIL_OBJECTS,
    homes,
)
from gemini.plan.training import Training
from gemini.plan.words import process_in_words
from gemini.units import BLOCK_NUMEL


def experts_model(**more):
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=40, **more,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


class Products(TorchDispatchMode):
    """Shapes and layouts of the products that are computed, by their number of rows."""

    def __init__(self):
        super().__init__()
        self.found = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            (left, right), sizes = args, {16, 24, 48}
            for rows in {*left.shape, *right.shape} - sizes:
                layout = [(tuple(m.shape), m.stride(0) < m.stride(1)) for m in (left, right)]
                self.found[rows].add(tuple(layout))
        return func(*args, **(kwargs or {}))


@pytest.mark.ci
@pytest.mark.parametrize("lora", [0, 2])
def test_each_number_of_rows_of_an_expert_is_as_many_products_as_a_plan_counts(lora):
    """Which a processor compiles, each of them. Expert by expert, where products are seen."""
    model = experts_model(experts_implementation="eager")
    asked = ask(experts_model().to("meta"), machine_of({}, device="cpu"),
                Training(2, 15, lora))  # fmt: skip
    assert (asked.experts, asked.experts_share) == (2 * 4, 0.5)
    if lora:
        model = models.adapted(model, lora)
    ids = torch.randint(40, (2, 15))
    with Products() as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    of_experts = [rows for rows in counted.found if rows not in (1, lora, 4, 30, 40)]
    assert len(of_experts) > 3
    per_number = EXPERT_PRODUCTS * (2 if lora else 3)
    assert {len(counted.found[rows]) for rows in of_experts} == {per_number}
    numbers = SPREAD * (0.5 * 30) ** 0.5
    product = asked.machine.process.product
    assert asked.expert_bytes() == int(product * per_number * numbers)
    few = asked.expert_bytes(1)
    assert 0 < few < product * per_number * 8 and few < asked.expert_bytes(2)
    assert asked.expert_bytes(1000) == asked.expert_bytes()
    planned = asked.planned()
    without = replace(asked, experts=0).process(planned)
    assert asked.process(planned, 1).total == without.total + few
    assert "experts have no bound" in process_in_words(asked.process(planned))
    assert "experts" not in process_in_words(without)
    assert replace(asked, machine=machine_of({})).expert_bytes() == 0


@pytest.mark.parametrize(("lora", "tied"), [(0, False), (2, False), (0, True)])
def test_each_length_of_inputs_is_as_many_products_as_a_plan_counts(lora, tied):
    """But for attention, whose products are no operators."""
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=40, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if lora:
        model = models.adapted(model, lora)
    found = set()
    with Products() as counted:
        for rows in (15, 21):
            ids = torch.randint(40, (1, rows))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            found.add(len(counted.found[rows]))
    assert found == {models.products_of(model) - models.ATTENTION_PRODUCTS}


def test_a_process_takes_its_floor_and_what_is_compiled_for_each_length(config):
    costs = ProcessCosts(floor=400 << 20, product=1 << 20, parameter=10 << 10, thread=6 << 20)
    machine = replace(machine_of({}, device="cpu"), process=costs)
    asked = ask(str(config), machine, Training(seq=64, update="serial"))
    result = asked.planned()
    own = asked.process(result)
    peak = result.profile.peak(Tier.DEVICE)
    assert own.products == asked.products << 20 and own.objects == len(asked.layout.params) * 10240
    assert own.slack == SLACK_BYTES + int(SLACK_SHARE * peak)
    assert own.held == own.set_up == 0
    numel = sum(block.numel for sizes in result.plan.chunks for block in sizes.blocks)
    assert own.scratch == min(4 * numel, 6 << 20)
    blocks = sum(len(sizes.blocks) for sizes in result.plan.chunks)
    assert own.blocks == BLOCK_OBJECTS * blocks > 0
    known = own.products + own.objects + own.blocks + own.scratch
    assert own.total == (400 << 20) + known + own.slack
    assert "a floor of 400.00 MiB" in process_in_words(own)
    some = replace(asked, lengths=3).process(result)
    assert some.products == 3 * own.products
    many = replace(asked, lengths=10_000).process(result)
    assert many.products == KEPT_PRODUCTS << 20  # what the library keeps
    unknown = replace(asked, machine=machine_of({}, device="cpu")).process(result)
    assert unknown.total == unknown.above_floor and "doctor" in process_in_words(unknown)
    on_gpu = replace(asked, machine=replace(machine_of({}), process=costs))
    assert on_gpu.process(on_gpu.planned()).products == 0
    in_fp32 = ask(str(config), machine, Training(seq=64, precision="fp32"))
    assert in_fp32.products == 0


def test_a_tail_holds_what_no_call_has_asked_for_yet(config):
    """Of the process's own bytes: by how much that passes the peak of the plan."""
    machine = machine_of({"device_mem": 1 << 50, "host_mem": 1 << 50, "nvme": 1 << 50},
                         device="cpu")  # fmt: skip
    asked = ask(str(config), machine, Training(seq=256, nvme_fraction=1.0, update="tail"))
    result = asked.planned()
    held = asked.process(result).held
    totals, moments = result.profile.total(Tier.DEVICE), asked.trace.moments
    chunk_of, late, most = asked.layout.chunk_of(), {}, 0
    late = {c.id: c.payload_bytes for c in asked.layout.chunks}
    for total, moment in zip(totals, moments, strict=False):
        if moment.phase == "backward":
            break
        most = max(most, total + sum(late.values()))
        if moment.edge == "enter":
            for param in moment.params:
                late.pop(chunk_of[param], None)
    assert held == max(0, most - max(totals))
    serial = replace(asked, update="serial").process(result)
    assert serial.held == 0


@pytest.mark.parametrize("fraction", [0.0, 1.0], ids=["whole", "split"])
def test_threads_that_update_keep_as_many_tiles_as_a_plan_counts(config, fraction, monkeypatch):
    """Masters on disk are split, and joined in two of them."""
    kept, scratch = set(), CpuWorkers.scratch

    def counted(workers, name, *args):
        kept.add(name)
        return scratch(workers, name, *args)

    monkeypatch.setattr(CpuWorkers, "scratch", counted)
    model = GeminiDDP(nn.Linear(64, 64), device="cpu", max_norm=1e-3)
    optimizer = HybridAdam(model.parameters(), lr=1e-3, nvme_offload_fraction=fraction)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.last_report.behind.wait()
    machine = machine_of({"device_mem": 1 << 50, "host_mem": 1 << 50, "nvme": 1 << 50},
                         device="cpu")  # fmt: skip
    machine = replace(machine, process=ProcessCosts(floor=0, product=0, parameter=0, thread=1000))
    asked = ask(str(config), machine, Training(seq=64, nvme_fraction=fraction))
    assert asked.process(asked.planned()).scratch == 1000 * len(kept)
    on_gpu = replace(asked, machine=replace(machine, device="cuda"))
    assert on_gpu.process(on_gpu.planned()).scratch == 0


def test_an_average_of_weights_is_in_its_homes_budget(config):
    machine = machine_of({"nvme": 1 << 40})
    without = ask(str(config), machine, Training(seq=64))
    numel = sum(chunk.shard_numel for chunk in without.layout.chunks)
    for home, tier in (("host", Tier.HOST), ("nvme", Tier.NVME)):
        asked = ask(str(config), machine, Training(seq=64, ema=home))
        before, after = without.planned(), asked.planned()
        more = after.profile.peak(tier) - before.profile.peak(tier)
        assert 0 <= more - 4 * numel < 100_000 * (home == "nvme") + 1
        assert homes(after)["average"] == {tier.value: more} and "average" not in homes(before)
    peak = ask(str(config), machine, Training(seq=64, ema="host")).planned().profile.peak(Tier.HOST)
    for nbytes, fits in ((peak, True), (peak - 1, False)):
        small = replace(asked, ema="host", machine=replace(machine, host_mem=nbytes, nvme=0))
        assert small.fits() == fits
    on_cpu = replace(asked, ema="host", machine=machine_of({}, device="cpu"))
    assert homes(on_cpu.planned())["average"] == {"device": 4 * numel}


def test_wrapping_takes_a_chunk_and_its_values_beside_what_was_wrapped(config):
    """Which is more than an iteration with few tokens takes, where fp32 originals go to files: at
    most with the last chunk, which has the largest parameter."""
    machine = machine_of({"device_mem": 90 << 20, "host_mem": 90 << 20, "nvme": 1 << 40},
                         device="cpu")  # fmt: skip
    training = Training(seq=8, lora=2, update="serial", keep_originals=True)
    asked = ask(str(config), machine, training)
    result = asked.planned()
    assert result.plan.original_home is Tier.NVME
    frozen = [c for c in asked.layout.chunks if not c.trainable]
    last, numel = frozen[-1], 4000 * 512
    assert max(slot.numel for slot in last.slots) == numel
    there = sum(c.payload_bytes for c in asked.layout.chunks[: last.id])
    blocks = BLOCKS_OF_ORIGINALS * 4 * BLOCK_NUMEL
    peak = result.profile.peak(Tier.DEVICE)
    own = asked.process(result)
    most = there + last.payload_bytes + 4 * numel + blocks
    assert most > peak and own.products + own.scratch + own.set_up == most - peak
    in_16_bits = replace(asked, itemsizes=[2] * len(asked.itemsizes))
    assert in_16_bits.process(in_16_bits.planned()).set_up < 4 << 20


def test_a_module_with_its_values_has_all_of_them_when_its_first_chunk_is_filled(config):
    machine = machine_of({"device_mem": 90 << 20, "host_mem": 90 << 20, "nvme": 1 << 40},
                         device="cpu")  # fmt: skip
    training = Training(seq=8, lora=2, update="serial", loaded=True, keep_originals=True)
    asked = ask(str(config), machine, training)
    result = asked.planned()
    peak, own = result.profile.peak(Tier.DEVICE), asked.process(result)
    chunks = asked.layout.chunks
    values = [sum(slot.numel for slot in c.slots) * (4 if c.id in asked.with_originals else 2)
              for c in chunks]  # fmt: skip
    most = wrapped = 0
    for i, (chunk, shard) in enumerate(zip(chunks, result.plan.shards, strict=True)):
        blocks = BLOCKS_OF_ORIGINALS * 4 * min(BLOCK_NUMEL, chunk.shard_numel)
        blocks *= chunk.id in asked.with_originals and not chunk.trainable
        most = max(most, wrapped + sum(values[i:]) + chunk.payload_bytes + blocks)
        wrapped += chunk.payload_bytes * (shard.param_home is Tier.DEVICE)
    known = own.products + own.scratch + own.set_up
    assert most > sum(values) and known == most - peak
    assert replace(asked, loaded=False).process(result).set_up < own.set_up


def test_wrapping_has_originals_in_memory_where_state_goes_to_files_only_with_the_optimizer(config):
    """A module is wrapped before anybody says so: its fp32 values stay in RAM until then."""
    machine = machine_of({"nvme": 1 << 40}, device="cpu")
    machine = replace(machine, process=replace(machine.process, thread=0))
    training = Training(seq=8, optimizer="sgd", nvme_fraction=1.0, update="serial")
    asked = ask(str(config), machine, training)
    result, chunks = asked.planned(), asked.layout.chunks
    assert len(asked.with_originals) == len(chunks)
    assert all({*shard.state_homes} == {Tier.NVME} for shard in result.plan.shards)
    before = sum(c.payload_bytes + 4 * c.shard_numel for c in chunks[:-1])
    peak, own, last = result.profile.peak(Tier.DEVICE), asked.process(result), chunks[-1]
    values = 4 * max(slot.numel for slot in last.slots)
    most = before + last.payload_bytes + 4 * last.payload_numel + values
    assert own.products + own.set_up == most - peak > 0


def test_objects_of_blocks_count_by_the_files_that_have_them(config):
    machine = machine_of({"nvme": 1 << 40}, device="cpu")
    found = {}
    for fraction in (0.0, 1.0):
        for update in ("serial", "tail"):
            asked = ask(
                str(config), machine, Training(seq=8, nvme_fraction=fraction, update=update)
            )
            result = asked.planned()
            blocks = sum(len(sizes.blocks) for sizes in result.plan.chunks)
            in_files = sum(s.grad_home is Tier.NVME for s in result.plan.shards)
            assert not in_files and all(s.param_home is Tier.DEVICE for s in result.plan.shards)
            found[fraction, update] = asked.process(result).blocks / blocks
    assert found[0.0, "serial"] == BLOCK_OBJECTS
    assert found[1.0, "serial"] == BLOCK_OBJECTS + STATE_FILE_OBJECTS
    assert found[1.0, "tail"] == BLOCK_OBJECTS + STATE_FILE_OBJECTS + TAIL_OBJECTS
