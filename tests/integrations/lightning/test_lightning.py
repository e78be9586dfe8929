"""GeminiStrategy in one process: what it maps, and what it refuses."""

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins import AsyncCheckpointIO, DoublePrecision, MixedPrecision
from torch.utils.data import DataLoader

from gemini.integrations.lightning import GeminiPrecision, GeminiStrategy
from optim import HybridAdam, LossScale
from tests.integrations.cases.lightning_runs import Net, loader, ours, trainer

pytestmark = pytest.mark.usefixtures("alone")


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
            scales.append(float(self.trainer.strategy.model.engine.control_vector.scale))

    options = {"loss_scale": LossScale(initial_scale=64.0)}
    run = trainer(ours(**options), tmp_path, plugins=[GeminiPrecision("16-mixed")], max_steps=1)
    run.fit(Asks(), loader())
    assert scales == [64.0]


SCALER = {"init_scale": 2.0}


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("precision_plugin", DoublePrecision, "DoublePrecision does what Gemini does"),
        (
            "precision_plugin",
            lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **SCALER)),
            "GradScaler with options of its own.*loss_scale=",
        ),
        ("checkpoint_io", AsyncCheckpointIO, "AsyncCheckpointIO would not be asked"),
    ],
)
def test_what_cannot_be_done_is_refused_when_it_is_asked(option, value, says):
    with pytest.raises(ValueError, match=says):
        GeminiStrategy(**{option: value()})


class Two(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.body, self.head)]

    def on_fit_start(self):
        raise AssertionError("it was not refused")


class Rprop(Net):
    def configure_optimizers(self):
        return torch.optim.Rprop(self.parameters())


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
        (Rprop, {}, {}, "Rprop has no form whose state is sharded"),
        (OwnAdam, {"adam": {"nvme_offload_fraction": 1.0}}, {}, "nvme_offload_fr.*HybridAdam"),
        (Net, {"max_norm": 1.0}, {"gradient_clip_val": 1.0}, "a step clips once"),
        (by_hand(Net), {"precision": "fp16"}, {}, "automatic_optimization=False in fp16"),
        (Net, {"precision": "fp16"}, {"precision": "bf16-mixed"}, "expected one of the two"),
        (Net, {}, {"sync_batchnorm": True}, "sync_batchnorm=True"),
        (
            Net, {"precision": "bf16"}, {"callbacks": [EMAWeightAveraging()]},
            "EMAWeightAveraging reads and writes weights of bf16",
        ),
        (
            Net, {"precision": "bf16"}, {"callbacks": [StochasticWeightAveraging(0.1)]},
            "StochasticWeightAveraging reads and writes",
        ),
    ],
)  # fmt: skip
def test_what_a_fit_cannot_do_is_refused_before_a_step(tmp_path, kind, options, given, says):
    with pytest.raises(ValueError, match=says):
        trainer(ours(**options), tmp_path, **given).fit(kind(), loader())
