"""Layers in blocks over q x q (x d) ranks: those of 2D, 2.5D and 3D tensor parallelism."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gemini
from bench.shared.models import seeded
from bench.shared.reference import everything, same
from bench.shared.workers import run_ranks
from gemini import GeminiDDP
from gemini.integrations import Booster, HybridParallelPlugin
from gemini.integrations.classic import ColoInitContext, initialize, layers
from gemini.integrations.classic.blocks import (
    BlockDropout,
    Linear2D,
    Linear2p5D,
    Linear3D,
    join_blocks,
    split_blocks,
)
from gemini.integrations.config import ParallelMode, global_context, plugin_of, read_config
from gemini.parallel.sizes import dims_of
from optim import HybridAdam
from tests.support.meshes import ADAM, MAX_NORM, STAGES
from tests.support.said import said

CUBE, SQUARE = ("3d", 8, 1), ("2d", 4, 1)
KINDS = {"2d": Linear2D, "2.5d": Linear2p5D, "3d": Linear3D}
ROWS, IN, OUT, CLASSES = 8, 12, 16, 8
LAYERS = {4: [SQUARE, ("2.5d", 4, 1)], 8: [("2.5d", 8, 2), CUBE, SQUARE]}
EXACT = 1e-12  # of sums of some 20 products in fp64, in another order
CLOSE = 1e-6  # of values below 4 in fp32


def configured(mode, size, depth, **more):
    tensor = {"size": size, "mode": mode, "depth": depth}
    global_context.config = read_config({"parallel": {"tensor": tensor}, **more})


# -- one layer --


class Received(TorchDispatchMode):
    """Elements that this rank receives in collectives, by kind, as rings pass them on."""

    def __init__(self):
        super().__init__()
        self.elements = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            kind = "panels" if args[0].is_floating_point() else "numbers of rows"
            self.elements[kind] += abs(args[0].numel() - args[1].numel())
        elif name == "c10d::allreduce_":
            size = args[0][0].numel()
            ranks = dist.get_world_size(dist.ProcessGroup.unbox(args[1]))
            self.elements["copies"] += 2 * (ranks - 1) * size / ranks
        elif name == "c10d::broadcast_":
            group = dist.ProcessGroup.unbox(args[1])
            self.elements["panels"] += args[0][0].numel() * (dist.get_rank(group) != args[2])
        elif name == "c10d::recv_":
            self.elements["exchange"] += args[0][0].numel()
        elif name.startswith("c10d::") and name != "c10d::send":
            raise AssertionError(f"{name} is not counted")
        return func(*args, **(kwargs or {}))


def drawn(*shape, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def largest(a, b):
    return float((a - b).abs().max())


def one_layer(mode, bias, shape):
    """Differences to `nn.Linear`, shapes of blocks, and what was received."""
    with seeded(3):
        layer = KINDS[mode](IN, OUT, bias, torch.float64)
    with seeded(3):
        plain = nn.Linear(IN, OUT, bias, dtype=torch.float64)
    x, whole = (drawn(*shape, IN).requires_grad_() for _ in range(2))
    sent = drawn(*shape, OUT, seed=2)
    block = split_blocks(x)
    own = split_blocks(sent)
    with Received() as received:
        y = layer(block)
        # what the plain backward starts with, in blocks
        dx, *grads = torch.autograd.grad(y, [block, *layer.parameters()], own)
    expected = plain(whole)
    expected.backward(sent)
    names = [name for name, _ in layer.named_parameters()]
    found = {"y": largest(join_blocks(y), expected), "dx": largest(join_blocks(dx), whole.grad)}
    for name, grad in zip(names, grads, strict=True):
        there = getattr(plain, name).grad
        found[name] = largest(grad.full_tensor(), there.T if name == "weight" else there)
    join_blocks(layer(split_blocks(x))).backward(sent)
    found["dx by split and join"] = largest(x.grad, whole.grad)
    shapes = [tuple(t.shape) for t in (block, y, layer.weight.to_local())]
    return found, shapes, dict(received.elements)


def by_summa():
    """Difference of a forward to SUMMA's, and what was received in the two."""
    layer = Linear2D(IN, OUT, False, torch.float64)
    mesh = layer.weight.device_mesh
    x, weight = split_blocks(drawn(ROWS, IN)), layer.weight.to_local().detach()
    row, column = mesh.get_group("2d_row"), mesh.get_group("2d_col")
    y = torch.zeros(ROWS // 2, OUT // 2).double()
    with Received() as of_summa:
        for k in range(2):
            sent = x.clone(), weight.clone()
            dist.broadcast(sent[0], group=row, group_src=k)
            dist.broadcast(sent[1], group=column, group_src=k)
            y += sent[0] @ sent[1]
    with Received() as of_panels, torch.no_grad():
        difference = largest(layer(x), y)
    return difference, dict(of_summa.elements), dict(of_panels.elements)


def frozen_parts():
    """A layer whose weight is frozen, and one whose input needs no gradient."""
    with seeded(3):
        layer = Linear2D(IN, OUT, dtype=torch.float64)
    x = drawn(ROWS, IN).requires_grad_()
    expected = (torch.ones(ROWS, OUT).double() @ layer.weight.full_tensor().T).detach()
    layer.weight.requires_grad_(False)
    join_blocks(layer(split_blocks(x))).sum().backward()
    found = [largest(x.grad, expected), layer.weight.grad is None]
    layer.weight.requires_grad_(True)
    join_blocks(layer(split_blocks(x.detach()))).sum().backward()
    rows = x.detach().sum(0)[:, None].expand(IN, OUT)
    found.append(largest(layer.weight.grad.full_tensor(), rows))
    with torch.autocast("cpu", torch.bfloat16):
        found.append(layer(split_blocks(x.float())).dtype)
    return found


def dropped():
    """Elements that a rank drops of ones, what it drops when it computes them again, and the next
    number of the common generator."""
    torch.manual_seed(5)
    drop = layers.Dropout(0.5)
    x = torch.ones(6, 64, requires_grad=True)
    y = checkpoint(lambda x: drop(x) * x, x, use_reentrant=False)
    y.sum().backward()
    again = torch.equal(x.grad, 2 * y.detach())
    following = torch.rand(())
    drop.eval()
    return y.detach(), again, float(following), torch.equal(drop(x), x)


def places():
    """Of this rank in its grid, as the documents' pages ask for them, and its block of rows."""
    at = {
        "2d": ("2D_COL", "2D_ROW"), "2.5d": ("2P5D_DEP", "2P5D_COL", "2P5D_ROW"),
        "3d": ("3D_WEIGHT", "3D_INPUT", "3D_OUTPUT"),
    }[global_context.config.parallel["tensor"]["mode"]]  # fmt: skip
    x = whole = drawn(ROWS, IN)
    for name in at:
        mode = getattr(ParallelMode, f"PARALLEL_{name}")
        ranks, place = global_context.get_world_size(mode), global_context.get_local_rank(mode)
        x = x.chunk(ranks, -1 if name == at[-1] else 0)[place]
    return torch.equal(x, split_blocks(whole))


def on_a_grid(rank, cases):
    found = {}
    for mode, size, depth in cases:
        configured(mode, size, depth)
        rows = {
            (bias, shape): one_layer(mode, bias, shape)
            for bias, shape in ((True, (ROWS,)), (False, (ROWS, 3)))
        }
        found[mode, size] = rows, places()
        if mode == "2d":
            found["frozen"], found["dropped"] = frozen_parts(), dropped()
            found["summa"] = by_summa()
        # a last batch, as torch.chunk cuts it
        rows = 4 - (dist.get_rank() == 0)
        found["unequal"] = said(
            Linear3D(8, 8) if mode == "3d" else join_blocks, torch.ones(rows, 4)
        )
    return found


@pytest.fixture(scope="module", params=LAYERS)
def grids(request):
    return run_ranks(on_a_grid, request.param, LAYERS[request.param], processes=True)


def test_a_layer_in_blocks_is_nn_linear(grids):
    """Outputs, gradients of inputs, weights and biases, of rows [R] and [R, 3]."""
    for found in grids:
        for key, value in found.items():
            if isinstance(key, str):
                continue
            rows, is_chunked = value
            assert is_chunked
            for (bias, _), (differences, shapes, _) in rows.items():
                assert len(differences) == 4 + bias
                assert max(differences.values()) < EXACT, (key, differences)
                assert shapes == shapes_of(key, shapes[0][1:-1])


def shapes_of(key, between):
    """Of x, y and the weight, as the documents print them."""
    rows = ROWS // (2 if key == SQUARE[:2] or key == ("2.5d", 4) else 4)
    out = OUT // (4 if key == CUBE[:2] else 2)
    return [(rows, *between, IN // 2), (rows, *between, OUT // 2), (IN // 2, out)]


def by_the_papers(mode, size, bias, rows):
    """Elements that a rank receives: the table in classic/blocks.py, and what is beside it."""
    q, depth = 2, size // 4
    x, w, y = rows * IN, IN * OUT, rows * OUT
    copied = OUT / q * bias  # the bias, which q ranks of a dimension have alike
    if mode == "3d":
        return {"panels": 2 * (q - 1) * (x + w + y) / q**3, "copies": 4 * (q - 1) / q * copied}
    over_depth = 2 * (depth - 1) / depth * (w / q**2 + copied)
    return {
        "panels": 3 * (q - 1) * (x / depth + w) / q**2,
        "copies": 2 * (q - 1) / q * copied + over_depth,
    }


def test_what_a_rank_receives_is_what_the_papers_say(grids):
    exchanged = []
    for found in grids:
        for key, value in found.items():
            if isinstance(key, str):
                continue
            for (bias, shape), (_, _, received) in value[0].items():
                rows = torch.Size(shape).numel()
                exchanged += [received.pop("exchange", 0) / rows] if key == CUBE[:2] else []
                assert received.pop("numbers of rows", 0) == (7 if key == CUBE[:2] else 0)
                expected = by_the_papers(*key, bias, rows)
                assert received == {kind: n for kind, n in expected.items() if n}, key
    # pairs of ranks of a cube: Y / q^3, forward and backward
    assert sorted(exchanged) == ([0] * 8 + [2 * OUT / 8] * 8 if len(grids) == 8 else [])


def test_panels_are_what_summa_broadcasts(grids):
    for found in grids:
        difference, of_summa, of_panels = found["summa"]
        assert difference < EXACT and of_summa == of_panels == {"panels": (ROWS + OUT) * IN / 4}


def test_what_needs_no_gradient_sends_nothing_for_it_and_autocast_is_followed(grids):
    for found in grids:
        dx, no_gradient, dw, dtype = found["frozen"]
        assert dx < EXACT and no_gradient and dw < EXACT and dtype == torch.bfloat16


def test_ranks_of_a_grid_drop_different_elements_and_go_on_alike(grids):
    masks, again, following, evaluated = zip(*(found["dropped"] for found in grids), strict=True)
    assert all(again) and all(evaluated) and len(set(following)) == 1
    for i, mask in enumerate(masks[:4]):
        assert set(mask.unique().tolist()) == {0.0, 2.0}
        assert not any(torch.equal(mask, other) for other in masks[:i])


def test_blocks_of_unequal_rows_are_refused_on_all_ranks_of_a_grid(grids):
    for found in grids[:4]:
        assert "ranks have blocks of [3, 4" in found["unequal"]


# -- training --


class Plain(nn.Module):
    """Logits [R, CLASSES] of x [R, IN]."""

    linear = nn.Linear

    def __init__(self):
        super().__init__()
        with seeded(1):
            self.norm = nn.LayerNorm(IN)
            self.up, self.down = self.linear(IN, OUT), self.linear(OUT, CLASSES)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(self.enter(self.norm(x)))))

    def enter(self, x):
        return x


class InBlocks(Plain):
    """With logits in blocks, and a norm that all ranks have whole."""

    linear = staticmethod(layers.Linear)

    def enter(self, x):
        return split_blocks(x)


def batch(step, part=0, parts=1):
    draw = torch.Generator().manual_seed(step)
    x, label = torch.randn(16, IN, generator=draw), torch.randint(CLASSES, (16,), generator=draw)
    return x.chunk(parts)[part], label.chunk(parts)[part]


def plain_training(steps):
    """Losses, and parameters at the end."""
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in range(steps):
        x, label = batch(step)
        loss = nn.functional.cross_entropy(model(x), label)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def in_an_engine(model):
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    engine, *_ = initialize(model, optimizer, layers.CrossEntropyLoss())

    def step(data):
        _, _, loss = engine.execute_schedule(iter([data]))
        engine.step()
        engine.zero_grad()
        return loss

    return engine.model, optimizer, step


def in_a_booster(model):
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    booster = Booster(plugin=plugin_of(global_context.config, zero_stage=2))
    model, optimizer, *_ = booster.boost(model, optimizer)
    return model, optimizer, partial(one_step, model, optimizer)


def in_shards(model):
    """Of parameters, too, on ranks that have the same blocks."""
    mesh = plugin_of(global_context.config).sizes.mesh(torch.device("cpu"))
    options = {"placement_policy": STAGES[3], "max_norm": MAX_NORM, "precision": "fp32"}
    model = GeminiDDP(model, mesh=mesh, **options)
    optimizer = HybridAdam(model.parameters(), **ADAM)
    return model, optimizer, partial(one_step, model, optimizer)


def one_step(model, optimizer, data):
    loss = layers.CrossEntropyLoss()(model(data[0]), data[1])
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


WRAPPED = {"engine": in_an_engine, "booster": in_a_booster, "shards": in_shards}
RUNS = {
    4: [(SQUARE, "engine"), (SQUARE, "booster")],
    8: [(CUBE, "engine"), (("2.5d", 8, 2), "booster"), (SQUARE, "engine"), (SQUARE, "shards")],
}
STEPS = 4


def trained(rank, runs, here, before):
    """Losses and parameters of each run; then what the last run has of another's checkpoint."""
    found = []
    for grid, wrapped in runs:
        configured(*grid, clip_grad_norm=MAX_NORM)
        model, optimizer, step = WRAPPED[wrapped](InBlocks())
        parts = global_context.get_world_size(ParallelMode.DATA)
        part = global_context.get_local_rank(ParallelMode.DATA)
        losses = []
        for i in range(STEPS):
            loss = step(batch(i, part, parts))
            dist.all_reduce(loss)
            losses.append(float(loss) / dist.get_world_size())
        found.append((losses, everything(model, optimizer), model.digest()))
        if before is not None:
            gemini.load_checkpoint(before, model, optimizer)
            found[-1] += (everything(model, optimizer),)
    if before is None:
        gemini.save_checkpoint(here, model, optimizer)
    optimizer.close()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("blocks") / "saved")
    return {
        ranks: run_ranks(trained, ranks, rows, path, path if ranks == 8 else None, processes=True)
        for ranks, rows in RUNS.items()
    }


@pytest.mark.ci
@pytest.mark.parametrize(
    ("ranks", "run"), [(n, i) for n, rows in RUNS.items() for i in range(len(rows))]
)
def test_training_in_blocks_has_losses_and_updates_of_the_plain_model(runs, ranks, run):
    losses, params = plain_training(STEPS)
    for one in runs[ranks]:
        assert one[run][0] == pytest.approx(losses, abs=CLOSE)
        assert one[run][2] == runs[ranks][0][run][2]
    for name, value in params.items():
        whole = runs[ranks][0][run][1][name]
        assert largest(value.T if whole.dim() > 1 else value, whole) < CLOSE, name


@pytest.mark.ci
@pytest.mark.unlike
def test_a_checkpoint_of_whole_tensors_loads_into_another_grid(runs):
    saved = runs[4][0][-1][1]
    assert len(saved) > 10 and all(same(run[3], saved) for run in runs[8][0])


# -- refusals --


def refused(rank):
    configured(*SQUARE)
    found = {
        "in": said(Linear2D, 7, 4), "out": said(Linear2D, 4, 7), "mode": said(Linear3D, 8, 8),
        "gathered": said(lambda: layers.Linear(4, 4, gather_output=True)),
        "1d": said(layers.Embedding, 8, 8), "whole": said(Linear2D(8, 8), torch.ones(4, 8)),
        "rows": said(split_blocks, torch.ones(7, 8)),
        "columns": said(split_blocks, torch.ones(8, 7)),
    }  # fmt: skip
    with ColoInitContext():
        found["later"] = said(Linear2D, 8, 8)
    booster = Booster(plugin=plugin_of(global_context.config, zero_stage=1))
    found["none"] = said(booster.boost, nn.Linear(4, 4))
    found["ranks differ"] = said(Linear2D, 4 + 4 * rank, 4)
    configured("3d", 8, 1)
    found["size"] = said(Linear3D, 8, 8)
    return found


def test_what_cannot_be_in_blocks_is_refused_by_name():
    for found in run_ranks(refused, 4, processes=True):
        for name, text in {
            "in": "in_features=7 of Linear2D; expected a multiple of 2",
            "out": "out_features=7 of Linear2D; expected a multiple of 2",
            "mode": "a layer or function of mode '3d' in a configuration with mode '2d'",
            "gathered": "gather_output=True in mode '2d'; expected join_blocks(output)",
            "1d": "VocabParallelEmbedding1D in a configuration with mode '2d'; expected Linear",
            "whole": "Linear2D was given 8 features; expected the 4 of this rank's block",
            "rows": "dimension 0 of a tensor [7, 8]; expected a multiple of 2",
            "columns": "dimension -1 of a tensor [8, 7]; expected a multiple of 2",
            "later": "Linear2D in a context that makes parameters later",
            "none": "no parameter is split over dimension 2d_col",
            "ranks differ": "ranks issue different collectives: as number 0, rank 0 sends whole",
            "size": "tp_size=8 for 4 ranks",
        }.items():
            assert text in found[name], (name, found[name])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp_size": 6, "tp_mode": "2d"}, "mode='2d' for 6 ranks; expected q * q ranks"),
        ({"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 3},
         "mode='2.5d' for 8 ranks and depth=3; expected q * q * depth ranks"),
        ({"tp_size": 9, "tp_mode": "3d"}, "mode='3d' for 9 ranks; expected q * q * q ranks"),
        ({"tp_size": 4, "tp_mode": "2d", "tp_depth": 2}, "it is for tp_mode='2.5d'"),
        ({"tp_size": 4, "tp_mode": "4d"}, "expected '1d', '2d', '2.5d' or '3d'"),
        ({"tp_size": 1, "tp_mode": "2d"}, "it is for tp_size above 1"),
        ({"tp_size": 4, "tp_mode": "2d", "pp_size": 2}, "pp_size=2 with tp_mode='2d'"),
        ({"tp_size": 4, "tp_mode": "2d", "enable_sequence_parallelism": True},
         "enable_sequence_parallelism=True; expected False"),
        ({"tp_size": 4, "tp_mode": "2d", "enable_sequence_parallelism": True, "sp_size": 2,
          "sequence_parallelism_mode": "ring_attn"},
         "sp_size=2 with tp_mode='2d'; expected data parallelism alone"),
        ({"tp_size": 4, "tp_mode": "2d", "ep_size": 2}, "it is for tp_size=1"),
        ({"tp_size": 4, "tp_mode": "2d", "parallel_output": False}, "it is for tp_size above 1"),
        ({"tp_size": 4, "tp_mode": "2d", "custom_policy": {"a": "colwise"}}, "tp_mode='1d'"),
    ],
)  # fmt: skip
def test_options_of_a_plugin_without_a_meaning_are_refused(options, text):
    given = {"pp_size": 1, "precision": "fp32", "zero_stage": 1} | options
    assert text in said(lambda: HybridParallelPlugin(**given), error=ValueError)


def test_dimensions_of_a_grid():
    assert dims_of("2d", 9, 1) == (("2d_col", 3), ("2d_row", 3))
    assert dims_of("2.5d", 12, 3) == (("2p5d_dep", 3), ("2p5d_col", 2), ("2p5d_row", 2))
    assert dims_of("3d", 125, 1) == tuple(
        (f"3d_{name}", 5) for name in ("input", "weight", "output")
    )


@pytest.mark.parametrize("kind", KINDS.values())
def test_without_ranks_a_layer_is_whole(kind, monkeypatch):
    monkeypatch.setattr(global_context, "config", read_config({}))
    with seeded(3):
        layer = kind(IN, OUT)
    with seeded(3):
        plain = nn.Linear(IN, OUT)
    x = torch.ones(5, IN)
    assert torch.equal(layer.weight, plain.weight.T) and not isinstance(layer.weight, nn.Linear)
    assert torch.equal(join_blocks(layer(split_blocks(x))), x @ plain.weight.T + plain.bias)
    assert type(layers.Linear(IN, OUT)) is layers.Linear1D_Col
    assert repr(layer).endswith("(in_features=12, out_features=16, bias=True)")
    dropout = BlockDropout(1.0)
    assert torch.equal(dropout(x), torch.zeros(5, IN))
