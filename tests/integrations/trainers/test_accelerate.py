"""accelerate's loop over a sharded model, beside the same loop over plain torch, at one rank."""

import copy
import math

import pytest
import torch
from accelerate import load_checkpoint_in_model, utils
from accelerate.tracking import GeneralTracker
from torch import nn

from gemini import GeminiDDP, Metrics
from optim import HybridAdam
from tests.integrations.cases import accelerate_runs as runs


@pytest.fixture(autouse=True)
def fresh_state():
    """accelerate keeps one state for the process."""
    runs.reset()
    yield
    runs.reset()


SAME = {
    "as it is": {},
    "state on NVMe": {"adam": {"nvme_offload_fraction": 1.0}},
    "gradients clipped by value": {"clip": "value"},
    "by hand": {"by_hand": True},
}


@pytest.mark.parametrize("case", SAME)
def test_losses_norms_rates_and_evaluation_are_plain_accelerates(case):
    options = dict(SAME[case])
    adam = options.pop("adam", None)
    want = runs.loop(runs.plain(), **options)
    runs.reset()
    got = runs.loop(runs.ours(adam=adam), **options)
    assert runs.difference(got, want) < 1e-5
    assert "clip" in options or want.norms.max() > runs.CLIP


@pytest.mark.parametrize(("precision", "error"), [("bf16", 0.03), ("fp16", 0.01)])
def test_16_bits_stay_near_fp32(precision, error):
    """`error`: some ulp of the precision, in norms of the gradient."""
    want = runs.loop(runs.plain())
    runs.reset()
    got = runs.loop(
        runs.ours({"loss_scale": 256.0} if precision == "fp16" else {}, mixed_precision=precision)
    )
    assert 1e-7 < runs.difference(got, want) < error


def test_outputs_of_mixed_precision_are_fp32():
    model, *_ = runs.prepared(runs.ours(mixed_precision="bf16"))
    assert model.engine.dtype is torch.bfloat16
    assert model(torch.ones(2, 9)).dtype is torch.float32


@pytest.mark.ci
def test_a_compiled_model_trains_as_an_eager_one():
    """By dynamo's backend that compiles nothing: what is tested is where the graph begins."""
    want = runs.loop(runs.plain())
    runs.reset()
    accelerator = runs.ours(dynamo_backend="eager")
    parts = runs.prepared(accelerator)
    assert parts[0].module._compiled_call_impl is not None
    assert runs.difference(runs.train(accelerator, *parts), want) < 1e-5


def test_no_state_travels_at_prepare(monkeypatch):
    def refuse(*_):
        raise AssertionError("the state was asked for")

    monkeypatch.setattr(HybridAdam, "state_dict", refuse)
    monkeypatch.setattr(HybridAdam, "load_state_dict", refuse)
    accelerator = runs.ours()
    model, optimizer = runs.net_and_optimizer()
    _, prepared = accelerator.prepare(model, optimizer)
    assert prepared.optimizer is optimizer and isinstance(optimizer, HybridAdam)


def test_trackers_are_given_what_steps_moved(caplog):
    class Kept(GeneralTracker):
        name, requires_logging_directory, tracker = "kept", False, None

        def __init__(self):
            super().__init__()
            self.rows = []

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **_):
            self.rows.append((step, values))

    kept = Kept()
    accelerator = runs.ours(adam={"nvme_offload_fraction": 1.0}, log_with=kept)
    accelerator.init_trackers("runs")
    model, optimizer, loader, schedule = runs.prepared(accelerator)
    metrics = Metrics(model, optimizer)
    for step in range(2):
        assert caplog.text.count("gemini update by cpu: state on nvme") == 1
        accelerator.log(metrics.as_dict(), step=step)
        runs.train(accelerator, model, optimizer, loader, schedule)
    accelerator.log({"loss": 1.0, **metrics.as_dict()}, step=2)
    (_, before), _, (step, values) = kept.rows
    assert step == 2 and values["loss"] == 1.0 and "gemini/nvme_read_bytes" not in before
    assert values["gemini/nvme_read_bytes"] > 0 and values["gemini/skipped"] == 0


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0), (1, 3, 0, 2)])
def test_any_order_of_prepare(order):
    want = runs.loop(runs.plain())
    runs.reset()
    got = runs.loop(runs.ours(), order=order)
    assert runs.difference(got, want) < 1e-5


@pytest.mark.ci
def test_the_unwrapped_model_is_the_inner_one_and_saves_fp32(tmp_path):
    accelerator = runs.ours(mixed_precision="bf16")
    model, _ = accelerator.prepare(*runs.net_and_optimizer())
    assert isinstance(model, GeminiDDP) and accelerator.unwrap_model(model) is model.module
    assert accelerator.prepare(model) is model and len(accelerator._models) == 1
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, tmp_path, max_shard_size="400B")
    plain, _ = runs.net_and_optimizer()
    load_checkpoint_in_model(plain, str(tmp_path))
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    assert (tmp_path / "model.safetensors.index.json").exists()
    accelerator.save_model(model, tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    accelerator.save_model(model, tmp_path, safe_serialization=False)
    whole = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(whole[name], state[name]) for name in state)


def test_a_state_that_is_loaded_goes_on_with_the_same_bits(tmp_path):
    accelerator = runs.ours(mixed_precision="fp16", project_dir=str(tmp_path))
    parts = runs.prepared(accelerator)
    counted = runs.Counted()
    accelerator.register_for_checkpointing(counted)
    seen = []
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append(models))
    accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(models))
    runs.train(accelerator, *parts)
    counted.value = 7
    accelerator.save_state(str(tmp_path / "s"))
    whole = runs.train(accelerator, *parts)
    digest = parts[0].digest()
    counted.value = 0
    accelerator.load_state(str(tmp_path / "s"))
    assert (
        counted.value == 7 and [[m is parts[0] for m in models] for models in seen] == [[True]] * 2
    )
    again = runs.train(accelerator, *parts)
    assert torch.equal(again.losses, whole.losses) and parts[0].digest() == digest
    names = {path.name for path in (tmp_path / "s").iterdir()}
    assert {"gemini_0", "scheduler.bin", "random_states_0.pkl"} <= names
    assert not {"model.safetensors", "optimizer.bin"} & names


def test_checkpoints_that_accelerate_names_are_found_again(tmp_path):
    project = utils.ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1
    )
    accelerator = runs.ours(project_config=project)
    model, *rest = runs.prepared(accelerator)
    for _ in range(2):
        accelerator.save_state()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]
    before = model.digest()
    runs.train(accelerator, model, *rest)
    assert model.digest() != before
    accelerator.load_state()
    assert model.digest() == before


def test_an_overflow_moves_no_schedule():
    accelerator = runs.ours({"loss_scale": 16.0}, mixed_precision="fp16")
    model, optimizer, _, schedule = runs.prepared(accelerator)
    rates = []
    for factor in (math.inf, 1.0):
        accelerator.backward(model(torch.ones(2, 9)).sum() * factor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
        assert accelerator.optimizer_step_was_skipped == math.isinf(factor)
    assert rates[0] == runs.RATE > rates[1]


def test_a_model_without_parameters_stays_as_it_is():
    accelerator = runs.ours()
    loss = nn.MSELoss()
    assert accelerator.prepare(loss) is loss


def test_a_loss_scale_of_accelerates_is_taken():
    scaler = utils.GradScalerKwargs(init_scale=256.0)
    accelerator = runs.ours(mixed_precision="fp16", kwargs_handlers=[scaler])
    model, optimizer, *_ = runs.prepared(accelerator)
    accelerator.backward(model(torch.ones(2, 9)).mean())
    optimizer.step()
    assert optimizer.optimizer.last_report.outcome.wait().loss_scale == 256.0


def test_buffers_are_rank_0s_as_under_ddp_unless_it_is_said():
    kept = nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9))
    assert runs.ours().prepare(copy.deepcopy(kept)).broadcast_buffers
    runs.reset()
    handler = utils.DistributedDataParallelKwargs(broadcast_buffers=False)
    own = runs.ours(kwargs_handlers=[handler])
    assert not own.prepare(kept).broadcast_buffers


REFUSED = {
    "fsdp_plugin given to GeminiAccelerator; expected none": lambda: runs.ours(
        fsdp_plugin=utils.FullyShardedDataParallelPlugin()
    ),
    r"AutocastKwargs given to .*expected none": lambda: runs.ours(
        kwargs_handlers=[utils.AutocastKwargs(enabled=False)]
    ),
    "with fp16; expected a loss scale": lambda: runs.ours(
        mixed_precision="fp16", kwargs_handlers=[utils.GradScalerKwargs(enabled=False)]
    ),
    r"'bf16' and gemini=dict\(precision='fp16'\); expected": lambda: runs.ours(
        mixed_precision="bf16", gemini={"precision": "fp16"}
    ),
    r"comm_hook='fp16' .* expected none": lambda: runs.ours(
        kwargs_handlers=[utils.DistributedDataParallelKwargs(
            comm_hook=utils.DDPCommunicationHookType.FP16
        )]
    ),
}  # fmt: skip


@pytest.mark.parametrize("says", REFUSED)
def test_what_has_no_meaning_here_is_refused_by_name(says):
    with pytest.raises(ValueError, match=says):
        REFUSED[says]().prepare(nn.Linear(2, 2))
