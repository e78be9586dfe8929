"""Experts that torch has split over "ep", below the engine; against one process."""

from dataclasses import dataclass

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.shared.models import Mixture, seeded, token_batches, token_loss
from bench.shared.reference import everything, flat, relative_error, same
from bench.shared.workers import run_ranks
from gemini import GeminiDDP
from optim import HybridAdam
from tests.support.meshes import (
    ADAM,
    MAX_NORM,
    PARTS,
    STAGES,
    STEPS,
    Kit,
    MeshCase,
    check_checkpoint,
    check_on_disk,
    check_reads,
    on_disk,
    reads,
    reference,
)
from tests.support.said import said

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # one process reads
]
BOUND = 2e-6  # the issue's: fp32, where sums have another order
NAMES = {
    1: ("ep",),
    2: ("efsdp", "ep"),
    3: ("dp_replicate", "efsdp", "ep"),
    4: ("dp_replicate", "efsdp", "ep", "tp"),
}


@dataclass(frozen=True)
class Case(MeshCase):
    """shape: of `NAMES`."""

    count: int = 4  # experts of a layer

    @property
    def tp(self):
        return self.shape[3] if len(self.shape) == 4 else 1


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)])


def split(module, mesh):
    for layer in (*module.layers, module.rare):
        layer.experts.split(mesh["ep"])
    if "tp" in mesh.mesh_dim_names:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in (*module.layers, module.rare):
            parallelize_module(layer, mesh["tp"], plan)


def wrapped(case, seed=0, adam=ADAM):
    mesh = mesh_of(case.shape)
    module = Mixture(seed, case.count)
    split(module, mesh)
    model = GeminiDDP(
        module, placement_policy=STAGES[case.stage], precision=case.precision, max_norm=MAX_NORM,
        mesh=mesh, min_chunk_size_m=0.004,
    )  # fmt: skip
    return model, HybridAdam(model.parameters(), **adam)


def batches(count, num_parts, seed=1):
    """In the second step no rank has an id for the rare experts, in the third the first part."""
    found = token_batches(count, num_parts, seed)
    for step, parts in enumerate(found):
        for i, part in enumerate(parts):
            if step == 1 or (step == 2 and i > 0):
                parts[i] = part % Mixture.RARE
    return found


KIT, NAMED = Kit(Mixture, wrapped, batches), ("rare.experts.up", "head.weight")  # split, and not


def rare_experts(model, optimizer):
    return {k: v for k, v in everything(model, optimizer).items() if "rare.experts" in k}


def in_order(state, count=4):
    names = [name for name, _ in Mixture(count=count).named_parameters()]
    return flat([state[name] for name in names]) if state else None


# -- updates --


def update(rank, case):
    sizes = dict(zip(NAMES[len(case.shape)], case.shape, strict=True))
    is_first = rank < sizes["ep"] * case.tp  # of the ranks that have the same experts
    model, optimizer = wrapped(case, seed=0 if is_first else 5)
    rare = []
    norms = KIT.train(
        model, optimizer, case, stepped=lambda: rare.append(rare_experts(model, optimizer))
    )
    engine = model.engine
    chunks = {c.group: c.num_shards for c in engine.layout.chunks}
    gathered = {engine.layout.chunks[g.chunk].group for g in engine.planning.plan.gathers}
    said = model.explain("layers.0.experts.up")
    weights, digest = in_order(model.state_dict(), case.count), model.digest()
    optimizer.close()
    return weights, digest, norms, rare, chunks, gathered, said


def updates(rank, cases):
    got = [update(rank, case) for case in cases]
    wanted = {(case.tp, case.count) for case in cases}
    return got, {
        (tp, count): reference(Mixture(count=count), batches(STEPS, PARTS * 4 // tp))
        for tp, count in sorted(wanted)[rank::4]
    }


CASES = [
    Case(stage=1),
    Case(stage=2),
    Case(stage=3),
    Case(stage=2, count=5),  # three on one rank, two on the other
    Case((1, 4), 1),
    Case((1, 4), 2),
    Case((4,), 3),
    Case((2, 1, 2), 3),
    Case((1, 1, 2, 2), 3),
]


def test_updates_agree_with_one_process():
    results = run_ranks(updates, 4, CASES)
    wanted = {key: want for result in results for key, want in result[1].items()}
    for i, case in enumerate(CASES):
        start = flat(list(Mixture(count=case.count).parameters()))
        found = [result[0][i] for result in results]
        weights, _, norms, rare, shards, gathered, said = found[0]
        want = wanted[case.tp, case.count]
        assert relative_error(weights - start, want - start) < BOUND, case
        assert len({digest for _, digest, *_ in found}) == 1, case
        assert all(other[2] == norms for other in found), case
        assert max(norms) > 0.3, "clipped"
        assert same(rare[0], rare[1]), "experts that no rank had tokens for are what they were"
        assert not same(rare[1], rare[2]), "those that one rank had tokens for are trained"
        sizes = dict(zip(NAMES[len(case.shape)], case.shape, strict=True))
        efsdp = sizes.get("efsdp", 1)
        assert shards.pop("ep") == efsdp and set(shards.values()) == {efsdp * sizes["ep"]}, case
        assert ("ep" in gathered) == (case.stage == 3 and efsdp > 1), case
        assert f"split over ep: here ({-(-case.count // sizes['ep'])}, 32, 24)" in said


# -- what goes with it --


def refused(rank):
    from torch.distributed.tensor import Replicate, distribute_tensor

    module, mesh = Mixture(), mesh_of((2, 2))
    split(module, mesh)
    replicated = Mixture()
    split(replicated, mesh)
    whole = distribute_tensor(replicated.head.weight.detach(), mesh["ep"], [Replicate()])
    replicated.head.weight = nn.Parameter(whole)
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    refusals = (module, None), (module, other), (Mixture(), mesh), (replicated, mesh)
    return [said(lambda m=m, on=on: GeminiDDP(m, mesh=on), error=ValueError) for m, on in refusals]


def goes_with_it(rank, folder):
    last_has_none = Case((1, 4), 2, count=5)
    return (
        reads(KIT, [Case(count=5), last_has_none], *NAMED),
        on_disk(KIT, [Case(precision="bf16")] * 2, folder),
        refused(rank),
    )


@pytest.mark.unlike
def test_readers_state_dicts_disks_and_refusals(tmp_path):
    """Though each rank has other experts."""
    found, disk, texts = zip(*run_ranks(goes_with_it, 4, str(tmp_path)), strict=True)
    check_reads(found, Mixture(count=5), *NAMED)
    check_on_disk(disk)
    expected = (
        "is a DTensor, split over a mesh; expected GeminiDDP(mesh=)",
        "mesh dimension ep, and mesh=(dp=4)",
        "no parameter is split over dimension ep",
        "head.weight is replicated over mesh dimension ep, whose ranks have other tokens",
    )
    for part, text in zip(expected, texts[0], strict=True):
        assert part in text


def test_a_checkpoint_is_of_whole_tensors_and_loads_at_any_ep(tmp_path):
    others = {4: [Case((4, 1)), Case((4,))], 2: [Case((1, 2))]}
    check_checkpoint(KIT, Case(), others, str(tmp_path / "saved"))


# -- transformers' own plan --


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=32, experts_implementation="eager",
    )  # fmt: skip
    with seeded():
        return MixtralForCausalLM(config).train()


def logits_loss(model, ids):
    return token_loss(lambda given: model(input_ids=given).logits, ids)


def mixtral_update(rank):
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    module, mesh = mixtral(), mesh_of((2, 2))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("all", "tp"))["tp"]
    _, plan, _ = module._resolve_parallel_plans(DistributedConfig(fsdp_size=4, ep_size=2))
    apply_expert_parallelism(module, mesh["ep"], alone, plan)
    model = GeminiDDP(
        module, placement_policy=STAGES[3], precision="fp32", max_norm=0.3, mesh=mesh,
        min_chunk_size_m=0.004,
    )  # fmt: skip
    optimizer = HybridAdam(model.parameters(), **ADAM)
    for parts in token_batches(2, 4):
        logits_loss(model, parts[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    groups = {chunk.group for chunk in model.engine.layout.chunks}
    found = model.state_dict()
    optimizer.close()
    return groups, [found[name] for name, _ in mixtral().named_parameters() if found]


@pytest.mark.ci
def test_experts_that_transformers_has_split_train_as_in_one_process():
    pytest.importorskip("transformers.distributed.expert_parallel")
    groups, found = run_ranks(mixtral_update, 4)[0]
    want = reference(mixtral(), token_batches(2, 4), loss_of=logits_loss)
    start = flat(list(mixtral().parameters()))
    assert groups == {"world", "ep"}
    assert relative_error(flat(found) - start, want - start) < BOUND
