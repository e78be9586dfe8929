"""accelerate's own checks, which ship in its wheel, with `GeminiAccelerator` where its own was.

Source: accelerate.test_utils.scripts: test_sync, test_script, test_distributed_data_loop, called
as their `main` calls them, unchanged. `CHECKS` pass at these world sizes; `REFUSED` do not, each
for the reason beside it. Checks of data loaders that make no accelerator are not listed.
"""

import importlib
import os
from functools import partial

import pytest
import torch

from bench.shared.workers import run_ranks
from tests.integrations.cases import accelerate_runs

pytestmark = pytest.mark.ci
SCRIPTS = "accelerate.test_utils.scripts"
ACCUMULATES = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]

# script, check, world sizes, arguments; "accelerator" is made for it
CHECKS = [
    ("test_sync", "test_noop_sync", (1,), [("accelerator",)]),
    ("test_sync", "test_distributed_sync", (2,), [("accelerator",)]),
    ("test_sync", "test_distributed_sync_multiple_fwd", (2,), [("accelerator",)]),
    ("test_sync", "test_gradient_accumulation", (2,), ACCUMULATES),
    ("test_sync", "test_gradient_accumulation_with_opt_and_scheduler", (1,), [()]),
    ("test_sync", "test_gradient_accumulation_with_opt_and_scheduler", (2,), ACCUMULATES),
    ("test_sync", "test_dataloader_break", (1, 2), [()]),
    ("test_script", "process_execution_check", (1, 2), [()]),
    ("test_script", "check_seedable_sampler", (1, 2), [()]),
    ("test_script", "check_seedable_sampler_with_data_seed", (1, 2), [()]),
    ("test_script", "check_seedable_sampler_in_batch_sampler_shard", (2,), [()]),
    ("test_script", "training_check", (1, 2), [(False,), (True,)]),  # in fp32, see below
    ("test_script", "test_trigger", (1, 2), [()]),
    ("test_distributed_data_loop", "test_default_ensures_even_batch_sizes", (2,), [()]),
    ("test_distributed_data_loop", "test_can_disable_even_batches", (2,), [()]),
    ("test_distributed_data_loop", "test_pickle_accelerator", (2,), [()]),
]  # fmt: skip

# script, check, world size, the error's words, why
REFUSED = [
    (
        "test_distributed_data_loop", "test_can_join_uneven_inputs", 2, "expected even batches",
        "a rank that has no batch left takes no part in gathers: a sharded model cannot run",
    ),
    (
        "test_distributed_data_loop", "test_join_can_override_even_batches", 2,
        "expected even batches", "the same",
    ),
    (
        "test_distributed_data_loop", "test_join_can_override_for_mixed_type_dataloaders", 2,
        "expected even batches", "the same",
    ),
    (
        "test_distributed_data_loop",
        "test_join_raises_warning_for_iterable_when_overriding_even_batches", 2,
        "expected even batches", "the same",
    ),
]  # fmt: skip


def at_rank(rank, work, world_size):
    os.environ.update(LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true")
    return work(rank, world_size)


def with_ours(script):
    """The script, which makes our accelerators."""
    from gemini.integrations.accelerate import GeminiAccelerator

    module = importlib.import_module(f"{SCRIPTS}.{script}")
    module.Accelerator = partial(GeminiAccelerator, gemini=accelerate_runs.SMALL)
    module.is_bf16_available = lambda *_: False  # its 16-bit parts: see below
    module.is_fp16_available = lambda *_: False
    return module


def error_of(module, name, arguments):
    """What the check raises, or None."""
    accelerate_runs.reset_but_ranks()
    accelerator = module.Accelerator()  # as their `main` begins
    made = [accelerator if value == "accelerator" else value for value in arguments]
    try:
        getattr(module, name)(*made)
    except Exception as error:
        return f"{name}{arguments}: {type(error).__name__}: {error}"


def all_checks(rank, world_size):
    failed = [
        error_of(with_ours(script), name, arguments)
        for script, name, sizes, calls in CHECKS
        if world_size in sizes
        for arguments in calls
    ]
    refused = {
        name: error_of(with_ours(script), name, ())
        for script, name, size, *_ in REFUSED
        if size == world_size
    }
    return [error for error in failed if error is not None], refused


@pytest.mark.parametrize("world_size", [1, 2])
def test_accelerates_checks_pass_or_are_refused(world_size):
    for failed, refused in run_ranks(at_rank, world_size, all_checks, world_size, processes=True):
        assert failed == []
        for _, name, size, words, _ in REFUSED:
            if size == world_size:
                assert refused[name] is not None and words in refused[name]


def bf16_part(rank, world_size):
    """The bf16 run of `training_check`, which expects what fp32 gives, to 1e-6; fp16's is alike.

    Under autocast a product with a scalar is no bf16 operator, so its model computes in fp32; here
    it computes in bf16, of 2**-8, and an unwrapped model's own parameters are bf16. fp32 masters
    are what `model.unwrap()` gives.
    """
    script = with_ours("test_script")
    accelerate_runs.reset_but_ranks()
    accelerator = script.Accelerator(mixed_precision="bf16")
    generator = torch.Generator()
    train_set, want = script.mock_training(32 * world_size, 8 * world_size, generator)
    loader = script.generate_baseline_dataloader(train_set, generator, 8)
    model = script.RegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
    script.set_seed(42)
    generator.manual_seed(42)
    for _ in range(3):
        for batch in loader:
            model.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch["x"]).float(), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
    assert accelerator.unwrap_model(model).a.dtype is torch.bfloat16
    plain = model.unwrap()
    for name in ("a", "b"):
        torch.testing.assert_close(getattr(plain, name), getattr(want, name), rtol=2**-8, atol=0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_its_bf16_run_computes_in_bf16_and_unwraps_to_fp32(world_size):
    run_ranks(at_rank, world_size, bf16_part, world_size, processes=True)
