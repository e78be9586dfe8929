"""GeminiStrategy at 2 ranks, some of it at 4, beside Lightning's own DDP, in the same processes.

In fp32 the two differ by the order of sums in reductions and norms: 1e-5, relative.
"""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
)

from bench.shared.workers import run_ranks
from gemini.comm.communicator import Communicator
from gemini.integrations.lightning import GeminiStrategy
from gemini.integrations.lightning.shared import REGISTERED
from tests.integrations.cases.lightning_runs import (
    SMALL,
    ByHand,
    Net,
    SaveAt,
    Tuned,
    as_torchrun,
    close,
    loader,
    trainer,
)

pytestmark = pytest.mark.ci

FOUR = ("accumulated, norm clipped", "value clipped", "zero2, gathered late")
LATE = {"overlap_allgather": True, "communication_dtype": "fp32"}
# trainer options by case; the strategy's beside them
CASES = {
    "plain": ({}, {}),
    "accumulated, norm clipped": ({"accumulate_grad_batches": 3, "gradient_clip_val": 0.4}, {}),
    "value clipped": ({"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}, {}),
    "state on disk": ({"gradient_clip_val": 0.4}, "gemini_nvme"),
    "zero1": ({"accumulate_grad_batches": 2}, "zero1"),
    "zero2": ({"accumulate_grad_batches": 2}, "zero2"),
    "zero1, gathered late": ({"accumulate_grad_batches": 2}, LATE | {"placement_policy": "zero1"}),
    "zero2, gathered late": ({"gradient_clip_val": 0.4}, LATE | {"placement_policy": "zero2"}),
}
MIXED = {"bf16-mixed": "bf16-mixed", "fp16": None}
FIRST, SAVED_AT, MICRO_STEPS = 2, 3, 8


def strategy(given, **options):
    if isinstance(given, str):
        given = REGISTERED[given]
    return GeminiStrategy(**{**SMALL, **given, **options})


def fit(folder, chosen, **options):
    """Numbers of one fit, and the weights that it leaves on this rank."""
    module = Net()
    trainer(chosen, folder, **options).fit(module, loader(), loader())
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return {**module.numbers(), "rows": module.rows, "weights": weights}


def evaluations(folder, chosen):
    """Each before any fit, of one module."""
    module = Net()
    for name in ("validate", "test", "predict"):
        getattr(trainer(chosen(), folder), name)(module, loader())
    return module.evals


def resumed(folder, chosen, path, **options):
    """Saved in the middle of an accumulation; the run that saved, and one that goes on."""
    both = {"accumulate_grad_batches": 2, "limit_val_batches": 0, **options}
    first, second = Net(), Net()
    run = trainer(chosen(), folder, callbacks=[SaveAt(path, SAVED_AT)], **both)
    run.fit(first, loader())
    trainer(chosen(), folder, **both).fit(second, loader(), ckpt_path=path)
    return first.numbers(), second.numbers()


def crossed(folder, world_size):
    """Losses of fits that go on from one file: by who goes on, and who saved."""
    options = {"limit_val_batches": 0}
    chosen = {"ddp": lambda: "ddp", "ours": functools.partial(strategy, {}, checkpoint="full")}
    found = {}
    for saver, make in chosen.items():
        path = f"{folder}/{world_size}.{saver}.ckpt"
        trainer(make(), folder, callbacks=[SaveAt(path, FIRST)], **options).fit(Net(), loader())
        for taker, make_taker in chosen.items():
            module = Net()
            trainer(make_taker(), folder, **options).fit(module, loader(), ckpt_path=path)
            found[taker, saver] = module.losses
    return found


def averaged(folder, chosen, kind):
    if kind == "swa":
        callback = StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2)
    else:
        callback = EMAWeightAveraging(decay=0.5)
    return fit(
        folder, chosen, callbacks=[callback], max_epochs=2, max_steps=-1, limit_train_batches=2,
        val_check_interval=1.0,
    )  # fmt: skip


def other_loops(folder, chosen):
    """Losses with manual optimization, and behind a finder of the rate; and that rate."""
    finder = LearningRateFinder(min_lr=1e-3, num_training_steps=6)
    one, two = ByHand(), Tuned()
    trainer(chosen(), folder, limit_val_batches=0).fit(one, loader())
    run = trainer(chosen(), folder, limit_val_batches=0, callbacks=[finder])
    run.fit(two, loader())
    return [*one.losses, *two.losses, two.lr]


def counted(folder, accumulate):
    """Chunks, and reductions of them, of a fit of one step."""
    calls, before = [], Communicator.reduce_scatter

    def count(self, shard, payload, label):
        calls.append(label)
        return before(self, shard, payload, label)

    Communicator.reduce_scatter = count
    try:
        chosen = strategy({})
        fit(folder, chosen, accumulate_grad_batches=accumulate, max_steps=1, limit_val_batches=0)
    finally:
        Communicator.reduce_scatter = before
    return len(set(calls)), len(calls)


def gathered_late(folder):
    """(whether weights are on their way, the dtype that gradients travel in) behind each step."""
    found = []

    class Asks(Callback):
        def on_train_batch_end(self, trainer, module, out, batch, i):
            engine = trainer.strategy.model.engine
            found.append(
                (bool(engine.weights.regather.arriving), engine.precision_settings.travels_as)
            )

    options = {"overlap_allgather": True, "communication_dtype": "bf16"}
    chosen = strategy("zero1", **options)
    fit(folder, chosen, max_steps=2, limit_val_batches=0, callbacks=[Asks()])
    return found


def trained(rank, folder):
    """Fits of every kind, in one process tree."""
    as_torchrun(rank)
    found = {"reductions": counted(folder, 4), "late": gathered_late(folder)}
    for case, (options, given) in CASES.items():
        if dist.get_world_size() == 2 or case in FOUR:
            found[case] = fit(folder, "ddp", **options), fit(folder, strategy(given), **options)
    if dist.get_world_size() > 2:
        return found
    for case, precision in MIXED.items():
        own = {} if precision else {"precision": "fp16"}
        found[case] = found["plain"][0], fit(folder, strategy({}, **own), precision=precision)
    return found


def more(rank, folder):
    """What else a Trainer does, in another."""
    as_torchrun(rank)
    world = dist.get_world_size()
    chosen = {"ddp": lambda: "ddp", "ours": lambda: strategy({})}
    found = {
        "evaluations": tuple(evaluations(folder, make) for make in chosen.values()),
        "other loops": tuple(other_loops(folder, make) for make in chosen.values()),
        "resumed": tuple(
            resumed(folder, make, f"{folder}/{world}.{name}") for name, make in chosen.items()
        ),
        "crossed": crossed(folder, world),
    }
    for kind in ("swa", "ema"):
        found[kind] = tuple(averaged(folder, make(), kind) for make in chosen.values())
    return found


def go_on(rank, folder, saved_by):
    """A fit that goes on from what another number of ranks saved."""
    as_torchrun(rank)
    found = []
    for chosen, kind in (("ddp", "ddp"), (strategy({}), "ours")):
        module = Net()
        run = trainer(chosen, folder, accumulate_grad_batches=2, limit_val_batches=0)
        run.fit(module, loader(), ckpt_path=f"{folder}/{saved_by}.{kind}")
        found.append(module.numbers())
    return found


@functools.cache
def shared_folder():
    return tempfile.TemporaryDirectory()


@functools.cache
def results(world_size, work=trained):
    return run_ranks(work, world_size, shared_folder().name, processes=True)


@pytest.mark.parametrize(
    ("world_size", "case"), [*((2, case) for case in CASES), *((4, case) for case in FOUR)]
)
def test_losses_norms_rates_and_evaluation_are_those_of_ddp(world_size, case):
    for found in results(world_size):
        want, got = found[case]
        for name in ("losses", "norms", "rates", "evals"):
            close(got[name], want[name])
        for name, value in want["weights"].items():
            torch.testing.assert_close(got["weights"][name], value, rtol=1e-5, atol=1e-6)
            assert type(got["weights"][name]) is torch.Tensor


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_see_the_rows_that_ddp_shows_them(world_size):
    found = [rank["value clipped"] for rank in results(world_size)]
    seen = [set(got["rows"]) for _, got in found]
    assert [got["rows"] for _, got in found] == [want["rows"] for want, _ in found]
    assert len(set.union(*seen)) == sum(map(len, seen))


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_accumulation_reduces_each_chunk_once(world_size):
    for found in results(world_size):
        chunks, reductions = found["reductions"]
        assert reductions == chunks > 1


def test_weights_are_on_their_way_behind_a_step_where_that_is_asked_for():
    for found in results(2):
        assert found["late"] == [(True, "bfloat16")] * 2


@pytest.mark.parametrize("case", MIXED)
def test_16_bits_train_as_fp32_does_to_their_precision(case):
    """2**-8 of a weight in bf16, through three layers."""
    for found in results(2):
        want, got = found[case]
        close(got["losses"], want["losses"], rtol=0.02)
        close(got["evals"], want["evals"], rtol=0.02)
        assert got["losses"] != want["losses"]


def test_validation_test_and_prediction_need_no_fit():
    for found in results(2, more):
        want, got = found["evaluations"]
        close(got, want)


def test_manual_optimization_and_a_finder_of_the_rate_are_those_of_ddp():
    for found in results(2, more):
        want, got = found["other loops"]
        close(got, want)


def test_a_fit_goes_on_from_the_middle_of_an_accumulation():
    """As DDP's does: what was accumulated is not saved, by neither."""
    for found in results(2, more):
        want, got = found["resumed"]
        assert len(got[1]["losses"]) == MICRO_STEPS - SAVED_AT
        for i in range(2):
            for name in ("losses", "norms", "rates"):
                close(got[i][name], want[i][name])


def test_a_file_of_either_strategy_goes_on_with_the_other():
    for found in results(2, more):
        for losses in found["crossed"].values():
            close(losses, found["crossed"]["ddp", "ddp"])


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_weight_averages_are_those_of_ddp(kind):
    for found in results(2, more):
        want, got = found[kind]
        close(got["losses"], want["losses"])
        close(got["evals"], want["evals"])
        for name, value in want["weights"].items():
            torch.testing.assert_close(got["weights"][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("saved_by", "world_size"), [(2, 1), (2, 4)])
def test_a_fit_goes_on_at_another_world_size(saved_by, world_size):
    results(saved_by, more)
    for want, got in run_ranks(go_on, world_size, shared_folder().name, saved_by, processes=True):
        for name in ("losses", "norms", "rates"):
            close(got[name], want[name])


def test_a_sharded_checkpoint_is_one_folder_without_whole_weights():
    results(2, more)
    path = Path(shared_folder().name) / "2.ours"
    assert {"manifest.json", ".metadata"} <= {file.name for file in path.iterdir()}
