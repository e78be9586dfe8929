"""GeminiStrategy in one process: what it maps, what it refuses, and what it leaves behind."""

import inspect
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("lightning")

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import AsyncCheckpointIO, DoublePrecision, MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from gemini import GeminiDDP, StaticPlacement
from gemini.integrations.lightning import (
    ColossalAIStrategy,
    GeminiFabricStrategy,
    GeminiPrecision,
    GeminiStrategy,
)
from optim import HybridAdam, HybridSGD, LossScale
from tests.integrations.lightning_runs import (
    ADAM,
    SMALL,
    ByHand,
    Net,
    SaveAt,
    Tuned,
    loader,
    trainer,
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Lightning makes a process group of one, and leaves it."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def ours(**options):
    return GeminiStrategy(**{**SMALL, **options})


class Seen(Net):
    """Remembers what a step was given and what it ran in."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def loss(self, batch):
        out = self(batch[0])
        self.seen.append((batch[0].dtype, batch[1].clone(), out.dtype, self.head.weight.dtype))
        return nn.functional.mse_loss(out, batch[1])


class Target(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.ones(24), torch.full((5,), 1.001), i


# -- precision -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "option", "dtype", "out"),
    [
        ("32-true", None, torch.float32, torch.float32),
        ("bf16-mixed", None, torch.bfloat16, torch.bfloat16),
        ("bf16-true", None, torch.bfloat16, torch.bfloat16),
        (None, "fp16", torch.float16, torch.float32),
    ],
)
def test_modules_compute_in_the_precision_and_targets_keep_their_bits(
    tmp_path, precision, option, dtype, out
):
    module = Seen()
    run = trainer(ours(precision=option), tmp_path, max_steps=1, precision=precision)
    run.fit(module, DataLoader(Target(), batch_size=2))
    batch, target, output, weight = module.seen[-1]
    assert (weight, output) == (dtype, out) and batch == torch.float32
    assert torch.equal(target, torch.full((2, 5), 1.001))
    assert module.head.weight.dtype == torch.float32


def test_what_a_step_calls_below_a_module_is_cast_too(tmp_path):
    class Below(Seen):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(24, 5)})])

        def on_before_optimizer_step(self, optimizer):
            pass  # not all have a gradient

        def loss(self, batch):
            return nn.functional.mse_loss(self.parts[0]["a"](batch[0]), batch[1])

    trainer(ours(), tmp_path, max_steps=2, precision="bf16-mixed").fit(Below(), loader())


def test_fp16_says_mixed_and_has_the_loss_scale_that_was_given(tmp_path):
    assert GeminiPrecision("16-mixed").precision == "16-mixed"
    scales = []

    class Asks(Net):
        def on_before_optimizer_step(self, optimizer):
            scales.append(float(self.trainer.strategy.model.engine.scaler.scale))

    options = {"loss_scale": LossScale(initial_scale=64.0)}
    run = trainer(ours(**options), tmp_path, plugins=[GeminiPrecision("16-mixed")], max_steps=1)
    run.fit(Asks(), loader())
    assert scales == [64.0]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: GeminiPrecision("16-true"), ValueError, "16-true.*fp32 masters.*16-mixed"),
        (lambda: GeminiPrecision("64-true"), ValueError, "64-true.*expected one of 32-true"),
        (
            lambda: GeminiStrategy(precision_plugin=DoublePrecision()),
            ValueError,
            "DoublePrecision does what Gemini does",
        ),
        (
            lambda: GeminiStrategy(
                precision_plugin=MixedPrecision(
                    "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0)
                )
            ),
            ValueError,
            "GradScaler with options of its own.*loss_scale=",
        ),
        (lambda: GeminiStrategy("const"), ValueError, "ConstPlacement needs its bytes"),
        (lambda: GeminiStrategy(checkpoint="both"), ValueError, '"sharded" or "full"'),
        (lambda: GeminiStrategy(max_nrom=1.0), TypeError, "max_nrom= is no option.*max_norm"),
        (lambda: GeminiStrategy(cast_inputs=True), TypeError, "cast_inputs= is the strategy's own"),
        (
            lambda: GeminiStrategy(checkpoint_io=AsyncCheckpointIO()),
            ValueError,
            "AsyncCheckpointIO would not be asked",
        ),
        (lambda: ColossalAIStrategy(use_chunk=False), ValueError, "min_chunk_size_m=0"),
        (lambda: ColossalAIStrategy(placement_policy="const"), ValueError, "auto, cuda, cpu"),
        (
            lambda: ColossalAIStrategy(placement_policy="cuda", gpu_margin_mem_ratio=0.5),
            ValueError,
            "gpu_margin_mem_ratio=0.5 with",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_when_it_is_asked(make, error, says):
    with pytest.raises(error, match=says):
        make()


class Two(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.body, self.head)]

    def on_fit_start(self):
        raise AssertionError("it was not refused")


class Adagrad(Net):
    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters())


class OwnAdam(Net):
    def configure_optimizers(self):
        return HybridAdam(self.parameters(), lr=0.1)


def by_hand(kind):
    """A module that steps by itself."""

    class ByHand(kind):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    return ByHand


@pytest.mark.parametrize(
    ("kind", "options", "given", "says"),
    [
        (by_hand(Two), {}, {}, r"returned 2 optimizers \(SGD, SGD\)"),
        (Adagrad, {}, {}, "Adagrad has no form whose state is sharded"),
        (
            OwnAdam,
            {"adam": {"nvme_offload_fraction": 1.0}},
            {},
            "nvme_offload_fraction.*HybridAdam",
        ),
        (Net, {"max_norm": 1.0}, {"gradient_clip_val": 1.0}, "a step clips once"),
        (by_hand(Net), {"precision": "fp16"}, {}, "automatic_optimization=False in fp16"),
        (Net, {"precision": "fp16"}, {"precision": "bf16-mixed"}, "expected one of the two"),
        (Net, {}, {"sync_batchnorm": True}, "sync_batchnorm=True"),
        (
            Net,
            {"precision": "bf16"},
            {"callbacks": [EMAWeightAveraging()]},
            "EMAWeightAveraging reads and writes weights of bf16",
        ),
        (
            Net,
            {"precision": "bf16"},
            {"callbacks": [StochasticWeightAveraging(0.1)]},
            "StochasticWeightAveraging reads and writes",
        ),
    ],
)
def test_what_a_fit_cannot_do_is_refused_before_a_step(tmp_path, kind, options, given, says):
    with pytest.raises(ValueError, match=says):
        trainer(ours(**options), tmp_path, **given).fit(kind(), loader())


# -- optimizers and loops --------------------------------------------------------------------


def test_an_optimizer_of_this_project_is_used_as_it_is(tmp_path):
    module = OwnAdam()
    run = trainer(ours(), tmp_path, max_steps=1)
    run.fit(module, loader())
    assert type(run.optimizers[0]) is HybridAdam


def test_torchs_sgd_is_converted_and_its_schedule_follows(tmp_path):
    class Sgd(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            config = {"scheduler": schedule, "monitor": "flat", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

        def on_train_batch_start(self, batch, i):
            self.log("flat", 1.0)

    runs = []
    for strategy in ("ddp", ours()):
        module = Sgd()
        runs.append(trainer(strategy, tmp_path))
        runs[-1].fit(module, loader())
        runs[-1].found = module.numbers()
    want, got = (run.found for run in runs)
    assert type(runs[1].optimizers[0]) is HybridSGD
    assert len(set(want["rates"])) > 2
    assert got["rates"] == want["rates"]
    torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-5, atol=0)


class Thaws(Net):
    """Its body is frozen at first."""

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], **ADAM)

    def on_before_optimizer_step(self, optimizer):
        pass


def finetuning():
    from lightning.pytorch.callbacks import BaseFinetuning

    class Finetuning(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.body)

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.body, optimizer, lr=0.01)

    return Finetuning()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ByHand, {}),
        (Thaws, {"callbacks": finetuning, "max_epochs": 2, "limit_train_batches": 2}),
        (Tuned, {"callbacks": lambda: LearningRateFinder(min_lr=1e-3, num_training_steps=8)}),
    ],
)
def test_other_loops_are_those_of_ddp(tmp_path, kind, options):
    found = []
    for strategy in ("ddp", ours()):
        module = kind()
        given = {**options, "limit_val_batches": 0, "max_steps": 4}
        if "callbacks" in given:
            given["callbacks"] = [given["callbacks"]()]
        trainer(strategy, tmp_path, **given).fit(module, loader())
        found.append([*module.losses, getattr(module, "lr", 0.0)])
    assert len(found[0]) > 4
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)
    assert os.listdir(tmp_path) == []


def test_the_batch_size_finder_is_refused_by_name(tmp_path):
    """By Lightning itself, as with its other strategies for several processes."""
    with pytest.raises(MisconfigurationException, match="Batch size finder is not supported"):
        trainer(ours(), tmp_path, callbacks=[BatchSizeFinder()]).fit(Tuned(), loader())


# -- models ----------------------------------------------------------------------------------


class Later(Net):
    """Makes its layers when it is asked to."""

    def __init__(self):
        super().__init__()
        del self.body, self.head
        self.body = None
        self.was_meta = []

    def configure_model(self):
        if self.body is None:
            torch.manual_seed(0)
            self.body = nn.Linear(24, 31)
            self.head = nn.Linear(31, 5)
            self.was_meta.append(self.head.weight.is_meta)


class LaterAsInLightning1(Later):
    configure_model = LightningModule.configure_model

    def configure_sharded_model(self):
        Later.configure_model(self)


@pytest.mark.parametrize("kind", [Later, LaterAsInLightning1])
@pytest.mark.parametrize("empty", [False, True])
def test_a_model_that_is_made_late_may_have_no_memory_until_it_is_wrapped(tmp_path, kind, empty):
    want, got = kind(), kind()
    torch.manual_seed(0)
    trainer("ddp", tmp_path).fit(want, loader())
    torch.manual_seed(0)
    trainer(ours(empty_init=empty), tmp_path).fit(got, loader())
    assert got.was_meta == [empty]
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-5, atol=0)


def test_a_model_is_made_empty_by_init_module(tmp_path):
    run = trainer(ours(), tmp_path, max_steps=1)
    with run.init_module(empty_init=True):
        module = Net()
    assert module.head.weight.is_meta
    run.fit(module, loader())
    assert module.losses[0] > 0 and not module.head.weight.is_meta


# -- the end ---------------------------------------------------------------------------------


def spilled(folder):
    return [str(path) for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("fails", [False, True])
def test_a_fit_leaves_a_plain_module_and_no_files(tmp_path, fails):
    class Fails(Net):
        def training_step(self, batch, i):
            here.append(spilled(tmp_path))
            if fails and i == 2:
                raise KeyError("in a step")
            return super().training_step(batch, i)

    here, module = [], Fails()
    adam = {"nvme_offload_fraction": 1.0, "nvme_offload_dir": str(tmp_path)}
    run = trainer(ours(precision="bf16", adam=adam), tmp_path / "root")
    if fails:
        with pytest.raises(KeyError):
            run.fit(module, loader())
    else:
        run.fit(module, loader())
    assert here[-1] and spilled(tmp_path) == []
    for param in module.parameters():
        assert type(param) is nn.Parameter and param.device.type == "cpu"
        assert not torch.equal(param, param.bfloat16().float())
    with torch.no_grad():
        assert module(torch.ones(2, 24)).isfinite().all()
    GeminiDDP(module, precision="fp32")


def test_a_trainer_fits_tests_and_fits_again(tmp_path):
    options = {"max_epochs": 1, "max_steps": -1, "limit_train_batches": 2, "limit_val_batches": 0}
    plain, module = Net(), Net()
    for strategy, model in (("ddp", plain), (ours(), module)):
        one = trainer(strategy, tmp_path, **options)
        one.fit(model, loader())
        one.test(model, loader())
        one.fit_loop.max_epochs = 2
        one.fit(model, loader())
    assert len(module.losses) == 4
    torch.testing.assert_close(module.losses, plain.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(module.evals, plain.evals, rtol=1e-5, atol=0)


# -- checkpoints -----------------------------------------------------------------------------


def test_model_checkpoint_keeps_the_best_folders(tmp_path):
    callback = ModelCheckpoint(tmp_path / "best", save_top_k=1, monitor="step", mode="max",
                               every_n_train_steps=1, save_last=True)  # fmt: skip
    run = trainer(ours(), tmp_path, callbacks=[callback], enable_checkpointing=True, max_steps=3)
    module = Net()
    run.fit(module, loader())
    found = {path.name for path in (tmp_path / "best").iterdir() if path.is_dir()}
    assert found == {"epoch=0-step=3.ckpt", "last.ckpt", "latest"}
    weights = module.head.weight.detach().clone()
    nn.init.zeros_(module.head.weight)
    run.test(module, loader(), ckpt_path="best")
    assert torch.equal(module.head.weight, weights)


def test_the_full_file_is_one_that_plain_lightning_loads(tmp_path):
    path = tmp_path / "whole.ckpt"
    module = Net()
    run = trainer(ours(checkpoint="full", precision="bf16"), tmp_path, callbacks=[SaveAt(path, 4)])
    run.fit(module, loader())
    loaded = Net.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    saved = torch.load(path, weights_only=True)
    assert set(saved["state_dict"]) == set(module.state_dict())
    assert saved["optimizer_states"][0]["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_weights_alone_are_saved_and_cannot_be_gone_on_from(tmp_path):
    run, module = trainer(ours(), tmp_path), Net()
    run.fit(module, loader())
    with pytest.raises(ValueError, match="state went when the fit ended"):
        run.save_checkpoint(tmp_path / "all")
    run.save_checkpoint(tmp_path / "weights", weights_only=True)
    other = Net()
    trainer(ours(), tmp_path).validate(other, loader(), ckpt_path=tmp_path / "weights")
    trainer(ours(), tmp_path).validate(module, loader())
    assert other.evals == module.evals[-len(other.evals) :]
    with pytest.raises(ValueError, match="no optimizer state"):
        trainer(ours(), tmp_path).fit(other, loader(), ckpt_path=tmp_path / "weights")


def test_values_that_a_hook_saves_for_weights_are_not_dropped(tmp_path):
    class Replaces(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["state_dict"] = {"head.bias": torch.zeros(5)}

    with pytest.raises(ValueError, match=r"checkpoint\['state_dict'\].*checkpoint=\"full\""):
        trainer(ours(), tmp_path, callbacks=[SaveAt(tmp_path / "x", 1)]).fit(Replaces(), loader())

    class ReplacesState(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["optimizer_states"] = [{"state": {}}]

    with pytest.raises(ValueError, match=r"checkpoint\['optimizer_states'\]"):
        run = trainer(ours(), tmp_path, callbacks=[SaveAt(tmp_path / "x", 1)])
        run.fit(ReplacesState(), loader())

    class Reads(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["state_dict"]["head.bias"]

    with pytest.raises(KeyError, match="holds no whole weights in memory"):
        trainer(ours(), tmp_path, callbacks=[SaveAt(tmp_path / "y", 1)]).fit(Reads(), loader())


def test_what_else_a_module_and_callbacks_save_comes_back(tmp_path):
    class Counts(Net):
        count = 0

        def on_save_checkpoint(self, checkpoint):
            checkpoint["count"] = 7

        def on_load_checkpoint(self, checkpoint):
            self.count = checkpoint["count"]

    path = tmp_path / "x"
    trainer(ours(), tmp_path, callbacks=[SaveAt(path, 2)]).fit(Counts(), loader())
    module = Counts()
    run = trainer(ours(), tmp_path)
    run.fit(module, loader(), ckpt_path=path)
    assert module.count == 7 and run.global_step == 4 and len(module.losses) == 2


def test_a_folder_of_another_program_is_said_to_be_one(tmp_path):
    import gemini

    module = Net()
    gemini.save_checkpoint(tmp_path / "x", GeminiDDP(Net(), precision="fp32"))
    with pytest.raises(ValueError, match=r"nothing of Lightning's.*gemini.load_checkpoint"):
        trainer(ours(), tmp_path).validate(module, loader(), ckpt_path=tmp_path / "x")


# -- names -----------------------------------------------------------------------------------

SEED = (
    "(use_chunk=True, chunk_size=None, enable_distributed_storage=True, placement_policy='auto', "
    "force_outputs_fp32=False, gpu_margin_mem_ratio=0.0, chunk_search_range=67108864, "
    "chunk_search_n_grids=4096, min_chunk_size=33554432, initial_scale=65536, min_scale=1, "
    "growth_factor=2, backoff_factor=0.5, growth_interval=1000, hysteresis=2, "
    "max_scale=4294967296, accelerator=None, parallel_devices=None, cluster_environment=None, "
    "checkpoint_io=None, precision_plugin=None)"
)


def test_colossal_ais_strategy_has_the_parameters_that_it_had():
    found = inspect.signature(ColossalAIStrategy)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    assert str(inspect.Signature(bare)) == SEED


def test_colossal_ais_parameters_are_those_of_the_engine(monkeypatch):
    given = []
    monkeypatch.setattr(GeminiStrategy, "__init__", lambda self, *a, **o: given.append((a, o)))
    ColossalAIStrategy(initial_scale=32, force_outputs_fp32=True)
    ColossalAIStrategy(chunk_size=2**20, enable_distributed_storage=False, placement_policy="cpu")
    (policy, options), (other, sized) = given
    assert policy == ("auto",) and other == (StaticPlacement(0.0, 1.0, 0.0),)
    assert options["loss_scale"] == LossScale(initial_scale=32) and options["force_outputs_fp32"]
    assert (options["search_range_m"], options["min_chunk_size_m"]) == (64, 32)
    assert (sized["search_range_m"], sized["min_chunk_size_m"]) == (0, 1)


def test_colossal_ais_methods_do_what_they_did(tmp_path):
    seen = {}

    class Asks(Later):
        configure_model = LightningModule.configure_model

        def configure_sharded_model(self):
            Later.configure_model(self)

        def on_train_batch_end(self, out, batch, i):
            strategy = self.trainer.strategy
            state = strategy.lightning_module_state_dict()
            seen["state"] = {name: value.device.type for name, value in state.items()}
            seen["rank zero"] = strategy.lightning_module_state_dict(rank_zero_only=True).keys()
            seen["reduced"] = strategy.reduce("text"), strategy.reduce(torch.ones(2)).tolist()
            seen["gathered"] = strategy.all_gather(torch.ones(2)).shape
            seen["flags"] = (
                strategy.handles_gradient_accumulation,
                strategy.restore_checkpoint_after_setup,
                strategy.root_device,
            )
            seen["dtype"] = self.head.weight.dtype
            optimizer, before = self.trainer.optimizers[0], self.head.bias.detach().clone()
            strategy.optimizer_step(optimizer, 0, lambda: None, self)
            seen["stepped"] = not torch.equal(before, self.head.bias)

    trainer("colossalai", tmp_path, max_steps=1).fit(Asks(), loader())
    names = {"body.weight", "body.bias", "head.weight", "head.bias"}
    assert seen["state"] == dict.fromkeys(names, "cpu") and set(seen["rank zero"]) == names
    assert seen["reduced"] == ("text", [1.0, 1.0]) and seen["gathered"] in ((1, 2), (2,))
    assert seen["flags"] == (False, True, torch.device("cpu"))
    assert seen["dtype"] == torch.float16 and seen["stepped"]


@pytest.mark.parametrize(
    ("name", "kept", "on_disk"),
    [("gemini", False, False), ("gemini_nvme", False, True), ("zero1", True, False),
     ("zero2", True, False)],
)  # fmt: skip
def test_registered_names_place_what_they_say(tmp_path, name, kept, on_disk):
    seen = []

    class Asks(Net):
        def on_train_batch_end(self, out, batch, i):
            strategy = self.trainer.strategy
            placement = strategy.model.engine.planning.inputs
            seen.append((len(strategy.model.engine.kept), self.trainer.optimizers[0].nvme_bytes))
            assert placement is not None

    trainer(name, tmp_path, max_steps=1).fit(Asks(), loader())
    ((num_kept, nbytes),) = seen
    assert (num_kept > 0) == kept and (nbytes > 0) == on_disk
    assert type(StrategyRegistry.get(name)) is GeminiStrategy
    assert type(STRATEGY_REGISTRY.get(name)) is GeminiFabricStrategy


def test_without_lightning_the_extra_is_named():
    code = (
        "import sys\n"
        "sys.modules['lightning'] = None\n"
        "import gemini, gemini.integrations\n"
        "import gemini.integrations.lightning\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: gemini.integrations.lightning is for the package lightning" in done.stderr
    assert "pip install 'gemini-memory[lightning]'" in done.stderr
