"""`initialize`, its engine, and `Trainer` with hooks: against a plain loop of torch."""

import logging
import sys

import pytest
import torch
from torch import nn

from bench.shared.models import seeded
from bench.shared.workers import run_ranks
from gemini.integrations import parts
from gemini.integrations.classic import (
    GRADIENT_HANDLER,
    LAYERS,
    MODELS,
    BaseGradientHandler,
    InterleavedPipelineSchedule,
    MultiTimer,
    PipelinableContext,
    PipelineSchedule,
    Trainer,
    build_pipeline_model,
    convert_to_amp,
    get_dataloader,
    hooks,
    initialize,
    partition_balanced,
    partition_uniform,
    spawn,
)
from gemini.integrations.config import (
    AMP_TYPE,
    ParallelMode,
    global_context,
    is_using_pp,
    read_config,
)

# fp32: sums in other orders
TOLERANCE = 1e-6
ROWS, PARTS, CLIP = 4, 3, 0.05
pytestmark = pytest.mark.usefixtures("elsewhere")


def made():
    with seeded():
        return nn.Sequential(
            nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)
        )


def data(count, first=0):
    return [
        (torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(i)), torch.arange(ROWS) % 3)
        for i in range(first, first + count)
    ]


def started(config, model=None, schedule=None):
    global_context.config = read_config(config)
    model = made() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    return initialize(model, optimizer, nn.CrossEntropyLoss(), schedule=schedule)[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 7)
        self.third, self.last = nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x):
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x))
        return self.last(x)


def net():
    with seeded():
        return Net()


def plain(steps, model):
    """Weights after steps of PARTS batches each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(steps):
        for image, label in data(PARTS, PARTS * step):
            (nn.functional.cross_entropy(model(image), label) / PARTS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def near(found, want):
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_so_many_backwards_as_the_configuration_says_are_one_step():
    engine = started({"gradient_accumulation": PARTS, "clip_grad_norm": CLIP})
    engine.train()
    stepped, first = [], []
    for image, label in data(2 * PARTS):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(image), label))
        stepped.append(engine.step())
        first.append(float(engine.model.state_dict()["0.weight"][0, 0]))
    assert stepped == [False, False, True] * 2
    assert len(set(first[:2])) == 1 and len(set(first)) == 3
    near(engine.model.state_dict(), plain(2, made()))


def through_stages(rank, chunks, schedule=None):
    global_context.config = read_config({
        "gradient_accumulation": PARTS, "clip_grad_norm": CLIP, "parallel": {"pipeline": 2},
        **({} if schedule else {"NUM_MICRO_BATCHES": 2}),
    })  # fmt: skip
    pipelinable, tanh = PipelinableContext(), (torch.tanh, "behind")
    with pipelinable:
        net()
    pipelinable.to_layer_list(["first", tanh, "second", torch.tanh, "third", tanh, "last"])
    place = global_context.get_local_rank(ParallelMode.PIPELINE)
    assert place == rank and is_using_pp() and not global_context.is_initialized(ParallelMode.DATA)
    model = pipelinable.partition(chunks, global_context.pipeline_parallel_size, place)
    engine = started(global_context.config, model, schedule)
    assert len(engine.model.stages) == chunks
    trainer = Trainer(engine)
    hook = hooks.LossHook()
    trainer.fit(data(2 * PARTS), 1, hooks=[hook, hooks.AccuracyHook(hooks.Accuracy())],
                test_dataloader=data(2))  # fmt: skip
    state = {k: v for part in engine.model for k, v in part.state_dict().items()}
    return state, trainer.metrics


SCHEDULES = {1: PipelineSchedule(2), 2: InterleavedPipelineSchedule(2, 2)}


@pytest.mark.parametrize(("chunks", "schedule"), [(1, None), (2, None), *SCHEDULES.items()])
def test_a_fit_through_stages_is_the_loop(chunks, schedule):
    (first, metrics), (last, other) = run_ranks(through_stages, 2, chunks, schedule)
    model, test = net(), data(2)
    near(first | last, plain(2, model))
    logits = [model(image).detach() for image, _ in test]
    loss = sum(nn.functional.cross_entropy(x, y) for x, (_, y) in zip(logits, test, strict=True))
    right = sum(hooks.Accuracy()(x, y) for x, (_, y) in zip(logits, test, strict=True))
    assert metrics["test loss"] == pytest.approx(float(loss) / 2, rel=1e-5)
    assert metrics["test accuracy"] == float(right) / (2 * ROWS)
    assert {n: other[n] for n in ("test loss", "test accuracy")} == {
        n: metrics[n] for n in ("test loss", "test accuracy")
    }


class Recorder(hooks.BaseHook):
    def __init__(self, told, priority=10):
        super().__init__(priority)
        self.told = told

    def __getattribute__(self, name):
        if name.startswith(("before_", "after_")):
            return lambda *args: self.told.append((name, self.priority))
        return super().__getattribute__(name)


def test_hooks_are_called_in_order_and_say_what_there_is(caplog):
    engine = started({"fp16": {"mode": "torch", "init_scale": 64.0}})
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    told, logger = [], logging.getLogger("said")
    timer = MultiTimer()
    trainer = Trainer(engine, timer=timer, logger=logger)
    with caplog.at_level(logging.INFO):
        trainer.fit(
            data(3), epochs=4, max_steps=5, test_dataloader=data(1), test_interval=2,
            hooks=[
                Recorder(told, 5), Recorder(told, 1), hooks.LossHook(), hooks.ThroughputHook(),
                hooks.LRSchedulerHook(schedule, by_epoch=True), hooks.LogMetricByStepHook(),
                hooks.LogMetricByEpochHook(logger), hooks.LogMemoryByEpochHook(logger),
                hooks.SaveCheckpointHook(2, "saved"), hooks.AccuracyHook(hooks.Accuracy()),
            ],
        )  # fmt: skip
    events = [name for name, priority in told if priority == 1]
    assert events == [name for name, priority in told if priority == 5]
    assert [priority for _, priority in told[:2]] == [1, 5]
    epochs = ["before_train_epoch", *["before_train_iter", "after_train_iter"] * 3]
    second = [*epochs[:5], "after_train_epoch"]
    tested = ["before_test", "before_test_epoch", "before_test_iter", "after_test_iter",
              "after_test_epoch", "after_test"]  # fmt: skip
    assert events == [
        "before_train", *epochs, "after_train_epoch", *second, *tested, "after_train"
    ]  # fmt: skip
    assert trainer.cur_step == 5 and trainer.step_metrics["loss"] == trainer.metrics["loss"]
    assert trainer.metrics["rows a second"] > 0 and trainer.metrics["lr"] == 0.01 / 4
    assert "epoch 1, test: " in caplog.text and "test accuracy" in caplog.text
    assert "epoch 0, memory" in caplog.text
    assert timer.get_timer("Train-step").get_history_mean() > 0
    again = started({})
    again.booster.load_model(again.model, "saved/epoch_1/model")
    again.booster.load_optimizer(again.optimizer, "saved/epoch_1/optimizer")
    near(again.model.state_dict(), engine.model.state_dict())


@GRADIENT_HANDLER.register_module
class Doubling(BaseGradientHandler):
    seen = 0

    def handle_gradient(self):
        type(self).seen += 1
        self.map_gradients(lambda name, grad: grad * 2)


def test_a_handler_that_the_configuration_names_sees_gradients():
    engine = started({"gradient_handler": [{"type": "Doubling"}]})
    image, label = data(1)[0]
    engine.backward(engine.criterion(engine(image), label))
    norm = [grad.norm() for _, grad in engine.model.named_gradients()]
    engine.step()
    assert Doubling.seen == 1
    report = engine.optimizer.last_report
    assert report.grad_norm == pytest.approx(2 * float(torch.stack(norm).norm()), rel=1e-5)


def test_what_replicas_reduce_needs_no_handler_and_names_are_registered():
    trained = []
    for handlers in ([], [{"type": "DataParallelGradientHandler"}]):
        torch.manual_seed(0)
        engine = started({"gradient_handler": handlers})
        image, label = data(1)[0]
        engine.backward(engine.criterion(engine(image), label))
        engine.step()
        trained.append(engine.model.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    assert (
        LAYERS.register_module(Recorder) is Recorder and LAYERS.get_module("Recorder") is Recorder
    )
    assert LAYERS.has("Recorder") and not MODELS.has("Recorder")
    with pytest.raises(ValueError, match=r"no 'Recorder' in MODELS; expected one of \[\], regist"):
        MODELS.get_module("Recorder")


def test_what_a_schedule_cannot_do_is_refused_and_what_it_need_not_is_said(caplog, monkeypatch):
    monkeypatch.setattr(parts, "said_already", set())
    with pytest.raises(ValueError, match="data_process_func is a function; expected None"):
        PipelineSchedule(2, data_process_func=len)
    with caplog.at_level(logging.WARNING):
        InterleavedPipelineSchedule(2, 3, tensor_shape=(2, 3), scatter_gather_tensors=True)
    assert "tensor_shape of a schedule (stages tell each other shapes)" in caplog.text
    assert "scatter_gather_tensors of a schedule" in caplog.text


def test_layers_are_shared_out_evenly_or_by_weight():
    assert partition_uniform(12, 2, 2) == [[(0, 3), (6, 9)], [(3, 6), (9, 12)]]
    assert partition_uniform(7, 3, 1) == [[(0, 2)], [(2, 4)], [(4, 7)]]
    assert partition_balanced([1, 1, 1, 5, 1, 1, 4], 3, 1) == [[(0, 3)], [(3, 4)], [(4, 7)]]
    assert partition_balanced([1, 2, 3, 4, 5, 6], 2, 2) == [[(0, 3), (4, 5)], [(3, 4), (5, 6)]]
    with pytest.raises(ValueError, match="7 layers in num_chunks=2; expected a number that"):
        partition_uniform(7, 3, 2)
    with pytest.raises(ValueError, match="2 layers in 3 parts; expected one or more in each"):
        partition_balanced([1, 1], 3, 1)


def test_a_sequence_is_of_one_module_and_computes_as_it():
    pipelinable = PipelinableContext()
    with pytest.raises(ValueError, match=r"no layers; call to_layer_list\(\) first"):
        pipelinable.partition(1, 1, 0)
    with pipelinable:
        made(), made()
    with pytest.raises(ValueError, match="2 modules were built inside PipelinableContext"):
        pipelinable.to_layer_list()
    pipelinable = PipelinableContext()
    with pipelinable:
        model = made()
    pipelinable.to_layer_list()
    layers, x = pipelinable.partition(1, 2, 0), torch.ones(2, 5)
    assert torch.equal(layers(x), model(x)) and layers[2] is model[2]
    assert build_pipeline_model(model, num_chunks=2).num_chunks == 2


def loads(rank):
    global_context.config = read_config({"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
    rows = get_dataloader(torch.arange(8).float(), batch_size=8, generator=torch.Generator())
    modes = (ParallelMode.GLOBAL, ParallelMode.DATA, ParallelMode.TENSOR)
    places = [(global_context.get_local_rank(m), global_context.get_world_size(m)) for m in modes]
    return next(iter(rows)).tolist(), places, global_context.get_global_rank()


def test_ranks_that_split_layers_load_the_same_rows():
    found = run_ranks(loads, 4)
    assert [sorted(rows) for rows, *_ in found] == [found[i][0] for i in (0, 0, 2, 2)]
    assert [places for _, places, _ in found] == [
        [(0, 4), (0, 2), (0, 2)], [(1, 4), (0, 2), (1, 2)],
        [(2, 4), (1, 2), (0, 2)], [(3, 4), (1, 2), (1, 2)],
    ]  # fmt: skip
    assert [rank for *_, rank in found] == [0, 1, 2, 3]


class Writer:
    """As torch's, which needs the package."""

    def __init__(self, folder, said):
        self.folder, self.said = folder, said

    def add_scalar(self, name, value, step):
        self.said.append((name, step))

    def close(self):
        self.said.append(self.folder)


def test_tensorboard_is_told_metrics_by_iteration_and_epoch(monkeypatch):
    from types import ModuleType

    there = ModuleType("torch.utils.tensorboard")
    said = []
    there.SummaryWriter = lambda folder: Writer(folder, said)
    monkeypatch.setitem(sys.modules, there.__name__, there)
    hook, other = hooks.TensorboardHook("logs", ranks=[0]), hooks.TensorboardHook("logs", ranks=[1])
    Trainer(started({})).fit(data(2), 1, test_dataloader=data(1), hooks=[hook, hooks.LossHook()])
    assert said == [("loss", 1), ("loss", 2), ("train loss", 0), ("test loss", 0), "logs/rank_0"]
    other.after_train(None)
    assert len(said) == 5
    monkeypatch.setitem(sys.modules, there.__name__, None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        hooks.TensorboardHook("logs")


def test_amp_by_a_mode_scales_losses():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"init_scale": 4.0}
    model, optimizer, loss_of = convert_to_amp(
        model, optimizer, nn.CrossEntropyLoss(), AMP_TYPE.TORCH, options
    )
    image, label = data(1)[0]
    loss = loss_of(model(image), label)
    want = torch.autograd.grad(loss, next(model.parameters()), retain_graph=True)[0]
    optimizer.backward(loss)
    torch.testing.assert_close(next(model.parameters()).grad, 4 * want)
    with pytest.raises(ValueError, match=r"mode='apex'; expected AMP_TYPE.TORCH or"):
        convert_to_amp(model, optimizer, loss_of, AMP_TYPE.APEX)


def test_one_rank_is_spawned_here_and_more_as_processes(monkeypatch):
    ran = []
    spawn(
        lambda rank, world_size, port, more: ran.append((rank, world_size, port > 0, more)), more=7
    )
    assert ran == [(0, 1, True, 7)]
    monkeypatch.setattr(
        torch.multiprocessing, "spawn", lambda run, nprocs: [run(rank) for rank in range(nprocs)]
    )
    spawn(lambda rank, world_size, port: ran.append((rank, world_size, port)), 2)
    assert [(rank, of) for rank, of, _ in ran[1:]] == [(0, 2), (1, 2)] and ran[1][2] == ran[2][2]
