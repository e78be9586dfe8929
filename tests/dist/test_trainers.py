"""accelerate and Hugging Face's Trainer at several ranks, beside the same over torch's DDP.

1e-5: what rounding in another order leaves of fp32 after some steps of different updates.
"""

import os
from pathlib import Path

import pytest
import torch

from bench.shared.workers import run_ranks
from tests.integrations.cases import accelerate_runs, method_runs, trainer_runs

pytestmark = pytest.mark.ci
TRAINER = {
    "as it is": {},
    "everything gathered": {"gemini": {"shard": 0.0}},
    "state on NVMe": {"adam": {"nvme_offload_fraction": 1.0}},
}


def options_of(case):
    from gemini import StaticPlacement

    options = dict(case)
    if "gemini" in options:
        options["gemini"] = {"placement_policy": StaticPlacement(options["gemini"]["shard"])}
    return options


def at_rank(rank, work, *args):
    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun sets it
    return work(rank, *args)


def at_ranks(work, world_size, *args):
    return run_ranks(at_rank, world_size, work, *args, processes=True)


def trains(rank, folder, names):
    from gemini.integrations.transformers import GeminiTrainer

    folder = Path(folder)
    want = trainer_runs.run(folder)
    runs = {
        name: trainer_runs.run(folder, cls=GeminiTrainer, **options_of(TRAINER[name]))
        for name in names
    }
    clips = float(want.steps[0, 1]) > trainer_runs.ARGUMENTS["max_grad_norm"]
    return {name: run.differs(want) for name, run in runs.items()}, clips


@pytest.mark.parametrize(
    ("world_size", "names"), [(2, list(TRAINER)), (4, ["as it is"])], ids=["2", "4"]
)
def test_trainers_losses_norms_rates_and_evaluation_are_ddps(tmp_path, world_size, names):
    for differences, clips in at_ranks(trains, world_size, str(tmp_path), names):
        assert clips and max(differences.values()) < 1e-5, differences


def methods(rank, folder):
    """By method: the largest difference to plain trl's losses and norms, and their least norm."""
    found = {}
    for name in method_runs.METHODS:
        want = method_runs.run(name, Path(folder))
        got = method_runs.run(name, Path(folder), ours=True)
        found[name] = ((got - want).abs().max().item(), want[:, 1].min().item())
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_methods_of_trl_train_as_over_ddp(tmp_path, world_size):
    """Supervised, by preferences, by a reward model, and by rewards of what is generated."""
    from tests.support.model_folder import make_folder

    make_folder(tmp_path / "model")
    for found in at_ranks(methods, world_size, str(tmp_path)):
        assert found.keys() == {"sft", "dpo", "reward", "grpo"}
        for difference, norm in found.values():
            assert norm > 0 and difference < 1e-5, found


SAVED = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}


def saves_and_resumes(rank, folder):
    from gemini.integrations.transformers import GeminiTrainer

    folder = Path(folder)
    whole = trainer_runs.run(folder / "a", cls=GeminiTrainer, **SAVED, **BEST)
    # `load_best_model_at_end`: the last is the best here
    weights = whole.trainer.model_wrapped.state_dict()
    kept = trainer_runs.checkpoints(folder / "a")
    resumed = trainer_runs.run(
        folder / "b", cls=GeminiTrainer, resume=folder / "a" / "checkpoint-4"
    )
    same = torch.equal(resumed.steps, whole.steps) and resumed.eval_loss == whole.eval_loss
    saved = trainer_runs.weights_of(folder / "a" / "checkpoint-6")
    equal = all(torch.equal(saved[name], weights[name]) for name in weights)
    try:
        trainer_runs.run(folder / "c", wrapped())
        said = ""
    except RuntimeError as error:
        said = str(error)
    return same, equal, kept, said, whole.steps


def wrapped():
    from gemini import GeminiDDP

    return GeminiDDP(trainer_runs.model_and_data()[0], precision="fp32")


def resumes_alone(rank, folder):
    """At one rank, with as many rows a step."""
    from gemini.integrations.transformers import GeminiTrainer

    run = trainer_runs.run(
        Path(folder) / "d", cls=GeminiTrainer, resume=Path(folder) / "a" / "checkpoint-4",
        gradient_accumulation_steps=4,
    )  # fmt: skip
    return run.steps


def test_trainer_saves_resumes_and_says_what_plain_trainer_cannot(tmp_path):
    """Two ranks; then one goes on from what they saved."""
    found = at_ranks(saves_and_resumes, 2, str(tmp_path))
    for same, equal, kept, said, _ in found:
        assert same and equal and kept == ["checkpoint-4", "checkpoint-6"]
        assert "use GeminiTrainer or GeminiAccelerator" in said
    (alone,) = at_ranks(resumes_alone, 1, str(tmp_path))
    torch.testing.assert_close(alone[4:], found[0][-1][4:], rtol=1e-5, atol=0)


def loops(rank, folder):
    from gemini import StaticPlacement

    cases = {
        "as it is": ({}, {}, {}),
        "everything gathered": ({"placement_policy": StaticPlacement(0.0)}, {}, {}),
        "on NVMe": ({}, {"adam": {"nvme_offload_fraction": 1.0}}, {}),
        "by value": ({}, {}, {"clip": "value"}),
        "by hand": ({}, {}, {"by_hand": True}),
    }
    differences = {}
    for name, (gemini, options, how) in cases.items():
        accelerate_runs.reset_but_ranks()
        want = accelerate_runs.loop(accelerate_runs.plain(), **how)
        accelerate_runs.reset_but_ranks()
        accelerator = accelerate_runs.ours(gemini, **options)
        parts = accelerate_runs.prepared(accelerator)
        differences[name] = accelerate_runs.difference(
            accelerate_runs.train(accelerator, *parts, **how), want
        )
    model = parts[0]
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/weights")
    digest = model.digest()
    accelerate_runs.train(accelerator, *parts)
    moved = model.digest() != digest
    accelerator.load_state(f"{folder}/state")
    return differences, moved and model.digest() == digest, accelerator.get_state_dict(model)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.unlike), 4])
def test_accelerates_loop_is_ddps_and_its_state_goes_on(tmp_path, world_size):
    from safetensors.torch import load_file

    found = at_ranks(loops, world_size, str(tmp_path))
    for differences, goes_on, _ in found:
        assert goes_on and max(differences.values()) < 1e-5, differences
    saved, whole = load_file(tmp_path / "weights/model.safetensors"), found[0][2]
    assert saved.keys() == whole.keys() and not any(state for *_, state in found[1:])
    assert all(torch.equal(saved[name], whole[name]) for name in saved)


def loads(rank, folder):
    """Rank 0 alone reads tensors; every rank has the weights."""
    import gemini
    from gemini.checkpoint.untrusted.lazy_tensors import LazyTensors

    read, taken = LazyTensors.__getitem__, []
    LazyTensors.__getitem__ = lambda self, name: taken.append(name) or read(self, name)
    model = gemini.load_pretrained(folder, precision="bf16", **trainer_runs.SMALL)
    plain = model.unwrap()
    return len(taken), {name: value.clone() for name, value in plain.state_dict().items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_folder_is_read_once_for_all_ranks(tmp_path, world_size):
    model, _ = trainer_runs.model_and_data()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    want = model.state_dict()
    found = at_ranks(loads, world_size, str(tmp_path))
    assert [reads for reads, _ in found] == [len(want) - 1, *[0] * (world_size - 1)]  # one is tied
    for _, got in found:
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)


def alone_among_ranks(rank):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    os.environ.pop("LOCAL_RANK", None)
    os.environ.pop("WORLD_SIZE", None)  # not started by a launcher
    from gemini.integrations.accelerate import GeminiAccelerator

    with pytest.raises(ValueError, match=r"2 ranks and accelerate 1.*expected as many"):
        GeminiAccelerator()


def test_ranks_that_accelerate_does_not_know_of_are_refused():
    at_ranks(alone_among_ranks, 2)
