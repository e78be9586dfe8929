"""Pipelines by torch's own schedules, against one process: updates, norms, gathers, errors."""

import errno
import re
import tempfile
import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.shared.reference import everything, same
from bench.shared.workers import run_ranks
from gemini import (
    AutoPlacement,
    BudgetWarning,
    GeminiDDP,
    export_safetensors,
    load_checkpoint,
    load_pretrained,
    save_checkpoint,
)
from gemini.pipeline import GeminiStage
from optim import HybridAdam
from tests.support.disks.faults import failing
from tests.support.pipelines import (
    ADAM,
    MAX_NORM,
    MICROBATCHES,
    SCHEDULES,
    STEPS,
    Part,
    Whole,
    batches,
    loss_of,
    mesh_of_pipelines,
    pipeline,
    reference,
    update_error,
)
from tests.support.said import said

pytestmark = pytest.mark.ci

ZERO_2, ZERO_3 = 0.0, 1.0
# fp32 sums of other orders: micro-batches, ranks, and stages in the norm. One process differs from
# itself by 1e-7 when it adds micro-batches in another order
BOUND = 2e-6
EVALUATED = ("Interleaved1F1B", "ZBVZeroBubble")  # the last with neighbours on one rank
ROOM_KIB = 200  # of a rank on the device: some of a stage's payloads, not all


def cases_at(world_size):
    """Of schedules and sharding: all that a test compares with, at two ranks each of both."""
    zero_2 = list(SCHEDULES) if world_size == 2 else ["1F1B", "InterleavedZeroBubble"]
    zero_3 = ["1F1B", *EVALUATED] if world_size == 2 else list(SCHEDULES)
    return [*((kind, ZERO_2) for kind in zero_2), *((kind, ZERO_3) for kind in zero_3)]


CASES = [(world_size, *case) for world_size in (2, 4) for case in cases_at(world_size)]


def run_the_page(rank, page):
    """The block of docs/pipelines.md over `Whole` in two stages; fp32 weights of its stage."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    whole = Whole()
    names = {
        "pp": 2, "dp": 1, "layers": Part(whole, rank, 2), "device": torch.device("cpu"),
        "n_microbatches": MICROBATCHES, "loss": loss_of,
        "batches": [(ids, ids) for ids in (torch.cat(one) for one in batches(MICROBATCHES))],
    }  # fmt: skip
    exec(compile(block.replace('"cuda"', '"cpu"'), "docs/pipelines.md", "exec"), names)
    found = {name: weight.clone() for name, weight in names["part"].state_dict().items()}
    names["optimizer"].close()
    return found


def test_the_block_of_the_page_trains_both_stages():
    page = (Path(__file__).resolve().parents[3] / "docs/pipelines.md").read_text(encoding="utf-8")
    start = Whole().state_dict()
    for found in run_ranks(run_the_page, 2, page):
        assert found and all(not torch.equal(start[n], found[n].to(start[n])) for n in found)


def in_steps(model, data, calls=1):
    """Norms of all steps; `calls` of the schedule before each."""
    norms = []
    for i in range(0, len(data), calls):
        for parts in data[i : i + calls]:
            model.run(parts)
        norms.append(model.step())
    return norms


def trained(kind, shard_frac=ZERO_3, **options):
    model = pipeline(kind, shard_frac, **options)
    data = batches(MICROBATCHES * max(1, dist.get_world_size() // 2))
    norms = in_steps(model, data)
    found = model.weights(), norms, model.gathers()
    model.close()
    return found


def saved_and_loaded(data, folder):
    """Saved by two stages behind a step, loaded by four and by two, and the next step of each."""
    model = pipeline("1F1B")
    in_steps(model, data[:1])
    save_checkpoint(f"{folder}/two", model.parts[0], model.optimizer)
    in_steps(model, data[1:])
    found = {"went on": model.weights()}
    model.close()
    for kind in ("1F1B", "ZBVZeroBubble"):
        model = pipeline(kind)
        load_checkpoint(f"{folder}/two", torch.nn.ModuleList(model.parts), model.optimizer)
        ticket = save_checkpoint(
            f"{folder}/{kind}", torch.nn.ModuleList(model.parts), model.optimizer, async_save=True
        )
        in_steps(model, data[1:])
        ticket.wait()
        found[kind] = model.weights()
        model.close()
    return found


def on_every_rank(rank, folder):
    """All cases, in one process tree."""
    replicas = dist.get_world_size() // 2
    data = batches(MICROBATCHES * replicas)
    found = {case: trained(*case) for case in cases_at(dist.get_world_size())}

    with tempfile.TemporaryDirectory() as disks:
        disk = {"nvme_offload_fraction": 1.0, "nvme_offload_dir": disks}
        found["on NVMe"] = trained("Interleaved1F1B", adam=disk)

    room = f"{ROOM_KIB * dist.get_world_size()}KiB"  # budgets are of a node
    for kind in ("1F1B", "InterleavedZeroBubble"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)  # of activations: there is none to spare
            found["no room", kind] = trained(
                kind, placement_policy=AutoPlacement(device_budget=room, host_budget="1GiB")
            )

    model = pipeline("ZBVZeroBubble")
    norms = in_steps(model, [parts for parts in data for _ in range(2)], calls=2)
    found["accumulated"] = model.weights(), norms
    model.close()

    model = pipeline("1F1B", max_norm=0.0)
    norms = []
    for parts in data:
        with model.parts[0].no_sync():
            model.run(parts)
        norms.append(float(model.optimizer.clip_grad_norm_(MAX_NORM)))
        norms.append(model.step())
    found["clipped by the loop"] = model.weights(), norms
    model.close()

    found["bf16"] = trained("DualPipeV", precision="bf16")
    found["fp16"] = trained("InterleavedZeroBubble", precision="fp16")
    found["skip"] = skipped(data)
    found["failed"] = failed(data)
    for kind in EVALUATED:
        found["eval", kind] = evaluated(kind, data)
    found["loaded"] = saved_and_loaded(data, folder)
    return found


def skipped(data):
    """A gradient of the first stage is not finite: nobody steps."""
    model = pipeline("1F1B")
    in_steps(model, data[:1])
    before = contents(model)
    model.run(data[1])
    if model.stages[0].is_first:
        model.parts[0].embed.weight.grad.mul_(float("inf"))
    model.optimizer.step()
    report = model.optimizer.last_report
    after = contents(model)
    model.close()
    return report.skipped, report.nonfinite, bool(before) and same(before, after)


def contents(model):
    """Weights, moments and step counts of all parts; where this rank is the first of a stage."""
    found = model.weights()
    for name, planes in model.optimizer.state_dict()["state"].items():
        found |= {f"{name}/{plane}": values.clone() for plane, values in planes.items()}
    return found


def failed(data):
    """The disk of the last rank fails in a step: all stages stay at the last step."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with tempfile.TemporaryDirectory() as folder:
        disk = {"nvme_offload_fraction": 1.0, "nvme_offload_dir": folder}
        model = pipeline("Interleaved1F1B", adam=disk)
        model.run(data[0])
        before = digests(model)
        with failing("pwritev", errno.ENOSPC, folder) if is_last else nullcontext():
            text = said(model.optimizer.step)
        after = digests(model)
        model.optimizer.step()  # the gradients are still there
        moved = digests(model)
        model.close()
    return text, before == after, all(a != b for a, b in zip(moved, before, strict=True))


def digests(model):
    """Of weights, step counts and loss scale, by part."""
    return [part.digest() for part in model.parts]


def evaluated(kind, data):
    """Outputs of an evaluation, and whether weights stay gathered behind it."""
    model = pipeline(kind)
    ids = model.batch(data[0])
    inputs = (ids,) if model.stages[0].is_first else ()
    with torch.no_grad():
        out = model.schedule.eval(*inputs, target=ids)
        open_ones = [part.engine.passes.in_schedule for part in model.parts]
    norms = in_steps(model, data)
    weights = model.weights()
    model.close()
    return out, open_ones, weights, norms


@cache
def folder_of(world_size):
    return tempfile.TemporaryDirectory()


@cache
def ran(world_size):
    return run_ranks(on_every_rank, world_size, folder_of(world_size).name, processes=True)


@cache
def wanted(world_size):
    return reference(batches(MICROBATCHES * (world_size // 2)))


def whole(world_size, case):
    """The weights of all stages."""
    weights = {}
    for found in ran(world_size):
        for name, value in found[case][0].items():
            assert name not in weights or torch.equal(weights[name], value)
            weights[name] = value
    return weights


WORLDS = [2, 4]


@pytest.mark.parametrize(("world_size", "kind", "zero"), CASES)
def test_a_pipeline_trains_as_one_process_does(kind, zero, world_size):
    assert update_error(whole(world_size, (kind, zero)), wanted(world_size)) < BOUND
    norms = {tuple(found[kind, zero][1]) for found in ran(world_size)}
    assert len(norms) == 1 and None not in next(iter(norms))  # bit for bit


@pytest.mark.parametrize("world_size", WORLDS)
def test_in_bf16_a_pipeline_trains_as_fp32_does_to_its_rounding(world_size):
    data = batches(MICROBATCHES * (world_size // 2))
    plain = update_error(reference(data, dtype=torch.bfloat16), wanted(world_size))
    # as one process in bf16, whose activations are bf16 too; a tenth for sums in other orders
    assert update_error(whole(world_size, "bf16"), wanted(world_size)) < 1.1 * plain < 0.02
    assert len({tuple(found["bf16"][1]) for found in ran(world_size)}) == 1


def in_fp16(data):
    """Of this engine in one process."""
    model = GeminiDDP(Whole(), precision="fp16", max_norm=MAX_NORM)
    optimizer = HybridAdam(model.parameters(), **ADAM)
    for parts in data:
        for ids in parts:
            (loss_of(model(ids), ids) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.float() for name, value in model.state_dict().items()}
    optimizer.close()
    return found


@pytest.mark.parametrize("world_size", WORLDS)
def test_in_fp16_halves_of_backwards_have_one_loss_scale(world_size):
    alone = update_error(in_fp16(batches(MICROBATCHES * (world_size // 2))), wanted(world_size))
    assert update_error(whole(world_size, "fp16"), wanted(world_size)) < 1.1 * alone < 0.01
    assert len({tuple(found["fp16"][1]) for found in ran(world_size)}) == 1


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_stage_is_gathered_once_for_all_micro_batches(kind):
    for found in ran(4):
        for gathers, chunks in found[kind, ZERO_3][2]:
            assert gathers == STEPS * chunks > 0
    for found in ran(2):
        assert not any(gathers for gathers, _ in found[kind, ZERO_2][2])


@pytest.mark.parametrize("kind", ["1F1B", "InterleavedZeroBubble"])
def test_without_room_micro_batches_gather_for_themselves(kind):
    assert update_error(whole(4, ("no room", kind)), wanted(4)) < BOUND
    gathers = [pair for found in ran(4) for pair in found["no room", kind][2]]
    assert any(count > STEPS * chunks > 0 for count, chunks in gathers)


@pytest.mark.parametrize("world_size", WORLDS)
def test_state_on_disk_has_the_same_bits(world_size):
    resident = whole(world_size, ("Interleaved1F1B", ZERO_3))
    for name, value in whole(world_size, "on NVMe").items():
        assert torch.equal(value, resident[name]), name


@pytest.mark.parametrize("world_size", WORLDS)
def test_calls_of_a_schedule_add_up(world_size):
    data = [[*parts, *parts] for parts in batches(MICROBATCHES * (world_size // 2))]
    want = reference(data, divisor=len(data[0]) // 2)
    assert update_error(whole(world_size, "accumulated"), want) < BOUND


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.unlike), 4])
def test_a_clip_is_one_of_the_whole_model(world_size):
    clipped, plain = whole(world_size, "clipped by the loop"), whole(world_size, ("1F1B", ZERO_3))
    assert all(torch.equal(clipped[name], plain[name]) for name in plain)
    for found in ran(world_size):
        asked, stepped = found["clipped by the loop"][1][::2], found["clipped by the loop"][1][1::2]
        assert asked == stepped == found["1F1B", ZERO_3][1]


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_gradient_that_is_not_finite_lets_all_stages_skip(world_size):
    for found in ran(world_size):
        was_skipped, where, unchanged = found["skip"]
        assert was_skipped and unchanged
        assert where == ran(world_size)[0]["skip"][1]
        assert where.startswith("embed.weight on rank ")


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_stage_that_fails_leaves_all_at_the_last_step(world_size):
    for rank, found in enumerate(ran(world_size)):
        text, unchanged, moved = found["failed"]
        assert unchanged and moved
        last = world_size - 1
        expected = "No space left" if rank == last else f"failed on ranks [{last}]"
        assert expected in text and (rank == last or "No space left" in text)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("kind", EVALUATED)
def test_an_evaluation_between_steps_changes_nothing(kind, world_size):
    data = batches(MICROBATCHES * (world_size // 2))
    model = Whole()
    for rank, found in enumerate(ran(world_size)):
        out, open_ones, weights, norms = found["eval", kind]
        assert open_ones == [False, False]
        assert norms == found[kind, ZERO_3][1]
        plain = found[kind, ZERO_3][0]
        assert all(torch.equal(weights[name], plain[name]) for name in weights)
        if out is None:
            continue
        dp = rank % (world_size // 2)
        ids = torch.cat(data[0][dp * MICROBATCHES : (dp + 1) * MICROBATCHES])
        torch.testing.assert_close(out, model(ids), rtol=1e-5, atol=1e-6)  # fp32, other kernels


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_checkpoint_loads_at_any_number_of_stages(world_size):
    weights = {}
    for found in ran(world_size):
        for case, part in found["loaded"].items():
            weights.setdefault(case, {}).update(part)
    for name, value in weights["went on"].items():
        assert torch.equal(weights["1F1B"][name], value), name  # the same run, bit for bit
    want = wanted(world_size)
    assert update_error(weights["ZBVZeroBubble"], want) < BOUND  # its sums are in another order
    # one process: what was saved by two stages and by four is one model
    models = {}
    for case in ("two", "1F1B", "ZBVZeroBubble"):
        model = GeminiDDP(Whole(), precision="fp32", min_chunk_size_m=0.004)
        optimizer = HybridAdam(model.parameters(), **ADAM)
        load_checkpoint(f"{folder_of(world_size).name}/{case}", model, optimizer)
        models[case] = everything(model, optimizer)
        optimizer.close()
    assert same(models["two"], models["1F1B"]) and same(models["two"], models["ZBVZeroBubble"])
    moments = [name for name in models["two"] if name.endswith("/exp_avg")]
    assert len(moments) == len(want) and all(models["two"][name].any() for name in moments)


def refusals(rank):
    """What is refused, in words."""
    mesh, texts = mesh_of_pipelines(), {}

    def refused(name, work):
        texts[name] = said(work)

    pp = mesh.get_local_rank("pp")
    options = {"precision": "fp32", "min_chunk_size_m": 0.004}
    whole = Whole()
    part = GeminiDDP(Part(whole, pp, 4), mesh=mesh, **options)
    other = GeminiDDP(Part(whole, pp + 2, 4), mesh=mesh, **options)
    device, group = torch.device("cpu"), mesh.get_group("pp")
    stages = [GeminiStage(part, pp, 4, device, group=group)]
    stages.append(GeminiStage(other, pp + 2, 4, device, group=group))
    refused("one module, two stages", lambda: GeminiStage(part, pp + 2, 4, device))
    refused("dw_builder", lambda: GeminiStage(part, pp, 4, device, dw_builder=print))
    refused("plain", lambda: GeminiStage(Whole(), 0, 2, device))
    refused("export", lambda: export_safetensors("nowhere", part))
    others = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "x"))
    refused("x", lambda: GeminiDDP(Whole(), mesh=others))
    refused("pretrained", lambda: load_pretrained("nowhere", mesh=mesh))
    refused("both", lambda: GeminiDDP(Whole(), mesh=mesh, process_group=group))
    assert [stage.stage_index for stage in stages] == [pp, pp + 2]
    optimizer = HybridAdam(part.parameters(), lr=1e-2)
    refused("half of the stages", lambda: optimizer.targets[0].joint.seats)
    optimizer.close()

    tied = Whole()
    name = "head" if pp else "embed"
    layer = torch.nn.Linear(33, 97, bias=False)
    layers = {"embed": layer, name: getattr(tied, name)} if pp else {"embed": layer}
    part = GeminiDDP(torch.nn.ModuleDict(layers), mesh=mesh, **options)
    GeminiStage(part, pp, 2, device)
    optimizer = HybridAdam(part.parameters(), lr=1e-2)
    refused("tied", lambda: optimizer.targets[0].joint.seats)
    return texts


def test_what_cannot_be_is_refused_by_name():
    for texts in run_ranks(refusals, 2, processes=True):
        assert "of 4 already, and cannot be stage" in texts["one module, two stages"]
        assert "dw_builder gives gradients" in texts["dw_builder"]
        assert 'a dimension "pp"' in texts["plain"]
        assert "mesh= and process_group=" in texts["both"]
        assert "load_pretrained reads a whole model" in texts["pretrained"]
        assert "('pp', 'x'), and parameters are split over ();" in texts["x"]
        assert "this module is a part of a pipeline" in texts["export"]
        assert "have the stages [[0], [1]] of 4" in texts["half of the stages"]
        assert "embed.weight of stage 0 and embed.weight of stage 1" in texts["tied"]
