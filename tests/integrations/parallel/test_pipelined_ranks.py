"""One model in two stages: what a batch may be, what comes back, what is saved, what is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bench.shared.models import seeded
from bench.shared.workers import run_ranks
from gemini.integrations import Booster, HybridParallelPlugin
from tests.support.said import said

pytestmark = pytest.mark.ci

# fp32, and sums over micro-batches
TOLERANCE = 1e-5


def made():
    with seeded():
        layers = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)]
    return nn.Sequential(*layers)


def batch(rows, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=draw), torch.randn(rows, 3, generator=draw)


def criterion(outputs, micro):
    return nn.functional.mse_loss(outputs, micro[1])


def boosted(**options):
    module = made()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    given = {"tp_size": 1, "pp_size": 2, "precision": "fp32", "microbatch_size": 2}
    booster = Booster(plugin=HybridParallelPlugin(**(given | options)))
    return booster, *booster.boost(module, optimizer)[:2]


def shapes(rank, folder):
    """Batches of other numbers of rows, an evaluation between; losses and outputs."""
    booster, model, optimizer = boosted()
    seen = []
    for rows in (8, 4, 4, 8, 6):
        found = booster.execute_pipeline(
            iter([batch(rows)]), model, criterion, optimizer, return_outputs=True
        )
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            after = booster.execute_pipeline(iter([batch(rows)]), model, criterion)
        seen.append((found["loss"], found["outputs"], after["loss"]))
    silent = booster.execute_pipeline(
        iter([batch(4)]), model, criterion, optimizer, return_loss=False
    )
    optimizer.zero_grad()
    booster.save_model(model, folder / "weights.pt")
    booster.save_model(model, folder / "later", shard=True, use_async=True).wait()
    return seen, silent


def refusals(rank, folder):
    booster, model, optimizer = boosted()

    def run(data, *rest):
        return lambda: booster.execute_pipeline(iter([data]), model, criterion, *rest)

    module = made()
    of_one = torch.optim.SGD(module[0].parameters(), lr=0.1)
    refused = {
        "rows": run(batch(7), optimizer),
        "form": run({"x": batch(4)[0]}, optimizer),
        "other rows": run((batch(4)[0], batch(3)[1]), optimizer),
        "no optimizer": run(batch(4)),
        "called": lambda: model(batch(4)[0]),
        "state": model.state_dict,
        "one file": lambda: booster.save_optimizer(optimizer, folder / "optimizer"),
        "one stage's": lambda: booster.boost(module, of_one),
        "layers": lambda: boosted(num_layers_per_stage=[1, 1]),
        "ranks": lambda: boosted(pp_size=3),
    }
    texts = {name: said(work) for name, work in refused.items()}
    booster.execute_pipeline(iter([batch(4)]), model, criterion, optimizer)
    optimizer.step()  # what was refused has changed nothing
    return texts


def work(rank, folder):
    return shapes(rank, Path(folder)), refusals(rank, Path(folder))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    return folder, run_ranks(work, 2, str(folder))


def test_batches_of_any_number_of_rows_give_what_the_model_gives(results):
    folder, ((first, _), (last, _)) = results
    module = made()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert all(loss is outputs is after is None for loss, outputs, after in first[0])
    for rows, (loss, outputs, after) in zip((8, 4, 4, 8, 6), last[0], strict=True):
        data = batch(rows)
        want = module(data[0])
        assert outputs.shape == want.shape and not outputs.requires_grad
        torch.testing.assert_close(outputs, want, rtol=TOLERANCE, atol=1e-6)
        criterion(want, data).backward()
        assert float(loss) == pytest.approx(float(criterion(want, data).detach()), rel=TOLERANCE)
        optimizer.step()
        optimizer.zero_grad()
        assert float(after) == pytest.approx(
            float(criterion(module(data[0]), data).detach()), rel=TOLERANCE
        )
    assert last[1] == first[1] == {"loss": None, "outputs": None}
    for name in ("weights.pt", "later"):
        loaded = made()
        Booster().load_model(loaded, folder / name)
        for key, value in module.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[key], value, rtol=TOLERANCE, atol=1e-6)


def test_what_cannot_be_run_is_refused_by_name(results):
    for _, texts in results[1]:
        assert "a batch of 7 rows with microbatch_size=2; expected" in texts["rows"]
        assert "the batch has a dict; expected a tensor, or a tuple that" in texts["form"]
        assert "the batch has 4 rows, and a tensor of shape (3, 3); expected" in texts["other rows"]
        assert "expected it, or torch.no_grad() around" in texts["no optimizer"]
        assert "call booster.execute_pipeline(data_iter, model" in texts["called"]
        assert "call booster.save_model(model, ...)" in texts["state"]
        assert "of a pipeline in one file; expected shard=True" in texts["one file"]
        assert "no parameter of the stages of place 1 in" in texts["one stage's"]
        assert "num_layers_per_stage=[1, 1] for 5 layers in 2 stages" in texts["layers"]
        assert "pp_size=3 for 2 ranks; expected sizes" in texts["ranks"]
