"""Layers of 1D tensor parallelism, and parameters that are told how they are cut: against one
process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.shared.models import seeded
from bench.shared.workers import run_ranks
from gemini.chunk.local import is_dtensor
from gemini.integrations.classic import ColoInitContext, GeminiDDP, HybridAdam, initialize, layers
from gemini.integrations.classic.tensors import (
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)
from gemini.integrations.config import global_context, read_config
from tests.support import plain_training
from tests.support.said import said

# fp32: sums in other orders
TOLERANCE = 1.5e-6
WORDS, WIDTH, ROWS, STEPS, CLIP = 12, 6, 4, 3, 0.05
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}


pytestmark = pytest.mark.one_process("how layers begin is patched in this process")


@pytest.fixture(autouse=True)
def drawn_alike(monkeypatch):
    alike(monkeypatch, nn.Linear, "reset_parameters")
    alike(monkeypatch, nn.Embedding, "reset_parameters")


def alike(monkeypatch, kind, name):
    """Layers of a size begin alike, whoever makes them: ranks are threads and draw from one."""
    plain = getattr(kind, name)

    def drawn(*args):
        with seeded():
            plain(*args)

    monkeypatch.setattr(kind, name, drawn)


class Words(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.words = layers.Embedding(WORDS, WIDTH)
        self.places = layers.Embedding1D(8, WIDTH)
        self.up = layers.Linear(WIDTH, 4 * WIDTH)
        self.down = layers.Linear(4 * WIDTH, WIDTH)
        self.norm, self.dropout = layers.LayerNorm(WIDTH), layers.Dropout(0.0)
        if tied:
            self.head = layers.Classifier(WIDTH, WORDS, self.words.weight, gather_output=True)
        else:
            self.head = layers.Classifier1D(WIDTH, WORDS)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return self.head(self.dropout(self.norm(x)))


def loss_of(logits, ids):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batch(step, place=0, of=1):
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (ROWS, 8), generator=draw).chunk(of)[place]


def update_error(found, model, start):
    want = dict(model.named_parameters())
    return plain_training.update_error(*([x[name] for name in want] for x in (found, want, start)))


def plainly(model, of=batch, loss=loss_of):
    """One process of torch; what it begins with."""
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model(of(step)), of(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return start


def of_layers(_, tied, tp):
    tensor = {"size": tp, "mode": "1d"}
    global_context.config = read_config({"parallel": {"tensor": tensor}, "clip_grad_norm": CLIP})
    model = Words(tied)
    shapes = [getattr(p, "_local_tensor", p).shape for p in (model.up.weight, model.down.weight)]
    shapes.append(model.up(torch.ones(3, WIDTH)).shape)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    engine = initialize(model, optimizer, loss_of)[0]
    place = dist.get_rank() // tp, dist.get_world_size() // tp
    for step in range(STEPS):
        ids = batch(step, *place)
        engine.zero_grad()
        engine.backward(engine.criterion(engine(ids), ids))
        engine.step()
    return [tuple(shape) for shape in shapes], engine.model.state_dict()


@pytest.mark.parametrize(
    "ranks, tp, tied", [(1, 1, True), (2, 2, True), (2, 2, False), (4, 2, False)]
)
def test_layers_that_are_split_as_they_are_made_train_as_those_of_torch(ranks, tp, tied):
    model = Words(tied)
    start = plainly(model)
    found = run_ranks(of_layers, ranks, tied, tp)
    inner = 4 * WIDTH // tp
    assert all(shapes == [(inner, WIDTH), (WIDTH, inner), (3, inner)] for shapes, _ in found)
    assert update_error(found[0][1], model, start) <= TOLERANCE


def stacked():
    return nn.Sequential(*(
        layers.Linear(of, to) for of, to in [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * 2
    ))  # fmt: skip


def in_stages(_):
    parallel = {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}
    options = {"parallel": parallel, "NUM_MICRO_BATCHES": 2, "clip_grad_norm": CLIP}
    global_context.config = read_config(options)
    model = stacked()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    engine = initialize(model, optimizer, nn.MSELoss())[0]
    for step in range(STEPS):
        engine.zero_grad()
        engine.execute_schedule(iter([(drawn(step), drawn(step))]))
        engine.step()
    return {name: x for stage in engine.model for name, x in stage.state_dict().items()}


def drawn(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def test_layers_that_are_split_as_they_are_made_are_cut_into_stages():
    model = stacked()
    start = plainly(model, drawn, nn.functional.mse_loss)
    stages = run_ranks(in_stages, 4)
    found = {name: x for stage in stages for name, x in stage.items()}
    assert update_error(found, model, start) <= TOLERANCE


def test_a_linear_layer_takes_parts_where_the_one_before_gives_them():
    kinds = [layers.Linear(4, 8), layers.Linear(8, 4), layers.Linear(4, 8), layers.Linear(4, 8)]
    names = [type(layer).__name__.rpartition("_")[2] for layer in kinds]
    assert names == ["Col", "Row", "Col", "Col"]
    layers.Linear(4, 8, gather_output=True)
    assert type(layers.Linear(8, 4)) is layers.Linear1D_Col


def uneven(_):
    global_context.config = read_config({"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
    return said(lambda: layers.Linear(4, 7))


def test_sizes_that_ranks_do_not_divide_are_refused():
    refusal = "Linear1D_Col has out_features=7, which 2 ranks do not divide"
    assert all(refusal in text for text in run_ranks(uneven, 2))


class Told(nn.Module):
    """Whose layers have the names of GPT-2's."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.attn = nn.ModuleDict({"c_proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)}
        )
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        x = self.attn["c_proj"](x)
        x = x + self.mlp["c_proj"](nn.functional.gelu(self.mlp["c_fc"](x)))
        return self.head(self.ln(x))


class GPT2(nn.Module):
    """transformers' own, whose linear layers have their weights [in, out]."""

    def __init__(self):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        with seeded():
            self.model = GPT2LMHeadModel(
                GPT2Config(
                    n_embd=WIDTH, n_layer=2, n_head=2, n_positions=8, vocab_size=WORDS,
                    embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, initializer_range=0.2,
                )
            )  # fmt: skip

    def forward(self, ids):
        return self.model(input_ids=ids).logits


def told(model, pg):
    """As the documents' tensor_parallelize, for torch's layers too, whose weights are [out, in]."""
    for name, layer in model.named_modules():
        linear = isinstance(layer, nn.Linear)
        out, into = (0, -1) if linear else (-1, 0)
        for of, param in layer.named_parameters(recurse=False):
            if hasattr(param, "visited"):
                continue
            param.set_process_group(pg)
            param.set_dist_spec(ReplicaSpec())
            cut = [pg.tp_world_size()]
            if "c_fc" in name:
                param.set_tensor_spec(ShardSpec([out], cut), ComputeSpec(ComputePattern.TP1D))
                param.compute_spec.set_output_replicate(False)
            elif "mlp.c_proj" in name:
                if of == "weight":
                    param.set_dist_spec(ShardSpec([into], cut))
            elif "wte" in name or "wpe" in name:
                param.set_dist_spec(ShardSpec([-1], cut))
            elif "c_attn" in name or "c_proj" in name:
                param.set_dist_spec(ShardSpec([out], cut))
            param.visited = True


def empty(kind=Told, **options):
    with seeded(), ColoInitContext(**options):  # of the whole process, and ranks are threads
        model = kind()
    dist.barrier()
    return model


def of_told(_, tp, kind, start):
    pg = ProcessGroup(tp_degree=tp)
    model = empty(kind, device="cpu", default_pg=pg, default_dist_spec=ShardSpec([-1], [tp]))
    told(model, pg)
    model = GeminiDDP(model, precision="fp32", max_norm=CLIP, min_chunk_size_m=0.001)
    model.load_state_dict(start, strict=False)
    cut = sum(map(is_dtensor, model.parameters()))
    optimizer = HybridAdam(model.parameters(), **ADAM)
    for step in range(STEPS):
        ids = batch(step, pg.dp_local_rank(), pg.dp_world_size())
        optimizer.zero_grad()
        loss_of(model(ids), ids).backward()
        optimizer.step()
    return cut, model.state_dict()


@pytest.mark.parametrize("kind", [Told, GPT2])
@pytest.mark.parametrize("ranks, tp", [(1, 1), (2, 2), (4, 2)])
def test_what_parameters_were_told_is_how_layers_are_split(ranks, tp, kind, monkeypatch):
    if kind is GPT2:
        transformers = pytest.importorskip("transformers")
        alike(monkeypatch, transformers.GPT2LMHeadModel, "_init_weights")
    model = kind()
    start = plainly(model)
    found = run_ranks(of_told, ranks, tp, kind, start)
    many = {Told: 8, GPT2: 2 + 2 * 8}[kind] if tp > 1 else 0
    assert all(cut == many for cut, _ in found)
    assert update_error(found[0][1], model, start) <= TOLERANCE


def refusals(_):
    pg, found = ProcessGroup(tp_degree=2), []
    for name, spec in (("ln", ShardSpec([0], [2])), ("attn.c_proj", ShardSpec([0], [3]))):
        model = empty(default_pg=pg)
        model.get_submodule(name).weight.set_dist_spec(spec)
        found.append(said(lambda model=model: GeminiDDP(model)))
    model = empty(default_dist_spec=ShardSpec([0], [1]))
    model.wte.weight.set_process_group(pg)
    return [*found, said(lambda: GeminiDDP(model))]


def test_specs_that_no_layer_computes_with_are_refused():
    assert "1 ranks" in said(lambda: ProcessGroup(tp_degree=3))
    assert "expected one dimension" in said(lambda: ShardSpec([0, 1], [2, 2]))
    assert "expected a ProcessGroup" in said(lambda: ColoInitContext(default_pg=3).__enter__())
    for texts in run_ranks(refusals, 2):
        assert "ln.weight has a ShardSpec; expected it of the weight of a Linear" in texts[0]
        assert "num_partitions=[3]; expected [2]" in texts[1]
        assert "num_partitions=[1]; expected [2]" in texts[2]


def of_tensors(rank):
    pg = ProcessGroup(tp_degree=2, dp_degree=2)
    spec = ColoTensorSpec(pg, ShardSpec(dims=[-1], num_partitions=[pg.tp_world_size()]))
    local = torch.full((2, 3, 1), float(rank), requires_grad=True)
    cut = ColoTensor.from_torch_tensor(local, spec)
    whole = cut.to_replicate()
    shapes = [cut.shape, whole.shape, cut.size_global()]
    values = whole.data[0, 0].tolist()
    whole.set_dist_spec(ShardSpec([0], [pg.tp_world_size()]))
    shapes.append(whole.shape)
    (3 * whole.dtensor).sum().backward()
    again = said(lambda: whole.set_dist_spec(ShardSpec([0], [4])))
    places = pg.tp_local_rank(), pg.dp_local_rank(), pg.dp_world_size()
    return [tuple(shape) for shape in shapes], values, local.grad.unique().tolist(), places, again


def test_a_tensor_is_cut_gathered_and_cut_otherwise():
    for rank, (shapes, values, grad, places, again) in enumerate(run_ranks(of_tensors, 4)):
        assert shapes == [(2, 3, 1), (2, 3, 2), (2, 3, 2), (1, 3, 2)]
        assert values == [rank // 2 * 2, rank // 2 * 2 + 1]  # neighbours have one tensor
        assert grad == [3.0] and "expected [2]" in again
        assert places == (rank % 2, rank // 2, 2)
