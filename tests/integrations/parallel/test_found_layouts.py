"""Layouts that `autoparallelize` finds: plugins take each, and train as one process."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from bench.shared.models import seeded
from bench.shared.workers import run_ranks
from gemini import autoparallelize
from gemini.integrations.autoparallel import AutoParallelPlugin, options_of
from gemini.integrations.classic import wrappers
from gemini.layouts.cluster import Cluster, Link
from gemini.layouts.layout import (
    INTERLEAVED,
    PLANNED,
    RING,
    ULYSSES,
    GlobalBatch,
    ParallelLayout,
    meshes_of,
    runs_of,
)
from gemini.layouts.machines import cluster_here, cluster_named
from gemini.layouts.models import shape_of
from gemini.layouts.search import search
from gemini.placement.policy import StaticPlacement
from gemini.placement.sizes import Bandwidths
from gemini.units import GIB
from optim import HybridAdam
from tests.integrations.cases.hybrid_runs import Run, check_trained, made

pytest.importorskip("transformers")
pytestmark = pytest.mark.ci
LINK = Link(1e-5, 1e10)
SPEEDS = Bandwidths(flops=1e12, device_memory=1e10, host_to_device=1e10, device_to_host=1e10)
CLUSTER = Cluster(4, 8, 8 * GIB, 8 * GIB, SPEEDS, 5e11, 1e11, 1e10, LINK, LINK)
LAYERS = 4  # of the kind that is shared
OF_RUN = ("tp_size", "pp_size", "sp_size")


def options(**sizes):
    """Of a run of this layout, at which sequences are not shared unless it says so."""
    found = options_of(ParallelLayout(**sizes), LAYERS, CLUSTER)
    found.pop("num_microbatches", None)
    return found | {"sp_size": found.get("sp_size", 1)}


KIND = "Llama long shared"
CASES = {
    2: [
        ("stage 3", KIND, options(data=2, zero="3")),
        ("stage 3 of shared sequences", KIND, options(sp=2, sp_mode=RING, zero="3")),
        ("planned stages", KIND, options(pp=2, zero=PLANNED)),
    ],
    4: [
        ("planned, split", "Llama", options(data=2, tp=2, in_sequence=True, zero=PLANNED)),
        (
            "stages of stage 3, shared", KIND,
            options(pp=2, style=INTERLEAVED, chunks=2, sp=2, sp_mode=ULYSSES, zero="3"),
        ),
        ("replicas of stage 3", KIND, options(data=4, replicas=2, zero="3")),
    ],
}  # fmt: skip


def test_a_layout_trains_as_one_process(found, ranks, case):
    check_trained(found[ranks], case)


def tiny():
    """Llama of four layers, whose heads two ranks can divide, on the meta device."""
    with torch.device("meta"):
        return made_empty()


def made_empty():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_the_plugin_takes_every_layout_that_is_priced(ranks):
    shape, cluster = shape_of(tiny(), seq=24), replace(CLUSTER, ranks=ranks)
    step = GlobalBatch(24, 24)
    seen = [run for mesh in meshes_of(shape, cluster, step) for run in runs_of(mesh, shape)]
    assert {run.zero for run in seen} >= {"1", PLANNED}
    for layout in seen:
        plugin = AutoParallelPlugin(precision="bf16", **options_of(layout, shape.layers, cluster))
        places = {plugin.sizes.data_place(rank, ranks) for rank in range(ranks)}
        assert places == {(i, layout.data) for i in range(layout.data)}, layout
        for role, stride in layout.stride.items():
            assert ranks == 1 or stride < ranks or getattr(layout, role) == 1, layout


def test_neighbours_are_those_that_the_price_takes_them_for():
    layout = ParallelLayout(data=4, replicas=2, tp=2, pp=2, sp=2, batch=1, micro_batches=2)
    plugin = AutoParallelPlugin(precision="bf16", **options_of(layout, LAYERS, CLUSTER))
    named = {"shard": "data", "replicate": "replicas", "cp": "sp"}
    stride = 1
    for name, size in reversed(plugin.sizes.dims(layout.ranks)):
        assert layout.stride[named.get(name, name)] == stride, name
        stride *= size
    assert stride == layout.ranks


def on_rank(rank, clusters):
    """The losses of a step in the layout found for each, and what was found."""
    found = {}
    for name, cluster in clusters.items():
        given = {}

        def plugin(cluster=cluster, given=given, **options):
            inputs = torch.zeros(4, 16, dtype=torch.int64)
            given["plugin"] = autoparallelize(
                tiny(), {"input_ids": inputs}, machine=cluster, recompute=True, **options
            )
            return given["plugin"]

        run = Run(KIND, plugin=plugin)
        run.train(1)
        plan = given["plugin"]
        modules = list(run.model.modules())
        again = any(getattr(one, "gradient_checkpointing", False) for one in modules)
        found[name] = plan.layout, run.said[0][0], plan.explain(), again
        run.optimizer.close()
    return found


def plain_norm(rank):
    """Of a step whose layers run once."""
    run = Run(KIND, tp_size=1, pp_size=1, zero_stage=1)
    run.train(1)
    run.optimizer.close()
    return run.said[0][0]


def test_it_is_boosted_as_usual_and_computes_again_what_it_was_priced_with():
    slow, fast = Link(1e-5, 1e5), Link(1e-2, 1e15)
    clusters = {
        "in stages": replace(CLUSTER, ranks=2, inside=slow, across=slow),
        "over data": replace(CLUSTER, ranks=2, inside=fast, across=fast),
    }
    of_ranks = run_ranks(on_rank, 2, clusters)
    for name in clusters:
        (layout, norm, told, again), (other, theirs, *_) = (found[name] for found in of_ranks)
        assert layout == other and norm == theirs  # by all ranks
        assert layout.recompute and again and str(layout) in told
    stages, data = (of_ranks[0][name][0] for name in clusters)
    assert (stages.pp, data.pp, data.data) == (2, 1, 2)
    # the layers ran twice, and the norm is that of a run in which none did
    assert of_ranks[0]["over data"][1] == pytest.approx(run_ranks(plain_norm, 2)[0], rel=1e-6)


def test_options_that_a_layout_decides_are_refused():
    ids = {"input_ids": torch.zeros(8, 16, dtype=torch.int64)}
    find = partial(autoparallelize, tiny(), ids, machine=CLUSTER)
    with pytest.raises(ValueError, match=r"tp_size in autoparallelize\(\); expected none"):
        find(tp_size=2)
    with pytest.raises(ValueError, match="tp_sizes in autoparallelize"):
        find(tp_sizes=2)
    with pytest.raises(ValueError, match="devices=8 with a machine of 4 ranks"):
        find(devices=8)
    with pytest.raises(ValueError, match="fits in no layout"):
        autoparallelize(tiny(), ids, machine=replace(CLUSTER, device_bytes=1000, host_bytes=1000))
    with pytest.raises(ValueError, match="no tensor"):
        autoparallelize(tiny(), {}, machine=CLUSTER)
    assert find(max_norm=2.0).max_norm == 2.0
    assert find().found.shape.can > find(pipelines=False).found.shape.can
    with pytest.raises(ValueError, match="devices=8 with a machine of 1 ranks"):
        autoparallelize(tiny(), ids, devices=8)  # links that are not there cannot be measured
    with pytest.raises(ValueError, match="cpu_offload=True with placement_policy"):
        AutoParallelPlugin(
            tp_size=1, pp_size=1, zero_stage=1, cpu_offload=True,
            placement_policy=StaticPlacement.zero(3),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"that gemini\.autoparallelize returned"):
        AutoParallelPlugin(tp_size=1, pp_size=1).explain()


def test_a_card_is_named_with_its_links():
    found = autoparallelize(
        tiny(), torch.zeros(64, 16, dtype=torch.int64), machine="h100", devices=16
    ).found
    assert found.cluster == cluster_named("h100", 16)
    assert found.cluster.inside.bytes_per_s > 5 * found.cluster.across.bytes_per_s
    with pytest.raises(ValueError, match="--gpu h1000"):
        cluster_named("h1000", 8)


@pytest.mark.parametrize(
    "kind",
    ["Llama", "GPT-2 tied", "Qwen2-MoE", "BERT", "OPT", "BLOOM", "Gemma", "Falcon", "T5", "ViT"],
)
def test_shapes_count_all_parameters_and_change_no_model(kind):
    model = made(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.ones(2, 8, dtype=torch.int64)
    inputs = {"pixel_values": torch.ones(2, 3, 16, 16)} if kind == "ViT" else {"input_ids": ids}
    shape = shape_of(model, inputs | ({"decoder_input_ids": ids} if kind == "T5" else {}), seq=8)
    assert shape.numel == sum(p.numel() for p in model.parameters())
    assert shape.saved.whole >= 0 and shape.saved.total > 0
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    can = {key: {"tp", "pp"} for key in ("BERT", "ViT", "Falcon")}
    can |= {"Qwen2-MoE": {"ep", "tp", "pp", "sp"}, "T5": set()}
    assert shape.can - {"recompute"} == can.get(kind, {"tp", "pp", "sp"})
    assert shape.is_causal == (kind not in ("BERT", "ViT", "T5"))


def test_split_layers_save_what_the_plugin_splits():
    """Of Llama: two norms see whole rows; queries, keys, values and the MLP are split."""
    shape = shape_of(tiny(), seq=24)
    half = shape.saved.of_rank(2, in_sequence=False)
    assert half == pytest.approx(shape.saved.whole + shape.saved.split / 2)
    products = 2 * (32 + 16 + 16 + 32 + 3 * 48)  # what 16-bit products are given
    assert shape.saved.split >= products
    assert shape.reduces == (2, 5)  # torch's styles reduce the input's gradient of each product
    assert shape.split_numel == 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48


class Convolved(nn.Module):
    """An image network, as ResNets are: with no config, and no plan of its layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def auto(rank):
    """The page's loop on the documents' two kinds of models: digests before and behind a step."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 12, 12, generator=draw)
    tokens = torch.randint(0, 96, (8, 16), generator=draw)
    with seeded():
        network = Convolved()
    found = []
    for model, samples in ((network, {"x": images}), (made("GPT-2"), {"input_ids": tokens})):
        model = wrappers.autoparallelize(model, samples, solver_preference="standard")
        optimizer = HybridAdam(model.parameters(), lr=0.1)
        before = model.digest()
        out = model(**{name: value.tensor_split(2)[rank] for name, value in samples.items()})
        getattr(out, "logits", out).float().pow(2).mean().backward()
        optimizer.step()
        found.append((before, model.digest()))
        optimizer.close()
    return found


def test_the_old_name_returns_the_model_in_its_layout():
    one, two = run_ranks(auto, 2)
    assert one == two
    assert all(before != behind for before, behind in one)
    with pytest.raises(ValueError, match="expected meta_args"):
        wrappers.autoparallelize(tiny())


def measured(rank):
    return cluster_here()


def test_ranks_agree_on_what_they_measured():
    one, two = run_ranks(measured, 2)
    assert one == two and one.ranks == 2
    assert one.speeds.flops > 0 and one.inside.bytes_per_s > 0 and one.scatter == 2


def test_the_best_of_equal_layouts_has_the_fewest_dimensions():
    shape = shape_of(tiny(), seq=24)
    alone = search(shape, replace(CLUSTER, ranks=1), GlobalBatch(1, 24))
    assert alone.best.layout == ParallelLayout(zero="1", batch=1)
