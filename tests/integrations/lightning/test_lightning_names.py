"""Names: those of the registry, and those of Lightning 1's ColossalAIStrategy."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("lightning")

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import StrategyRegistry

from gemini import AutoPlacement, StaticPlacement
from gemini.integrations.lightning import ColossalAIStrategy, GeminiFabricStrategy, GeminiStrategy
from optim import LossScale
from tests.integrations.cases.lightning_runs import Later, Net, loader, trainer

pytestmark = pytest.mark.usefixtures("alone")


CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 1
  logger: false
  enable_progress_bar: false
  enable_checkpointing: false
  enable_model_summary: false
  callbacks:
    - class_path: gemini.integrations.lightning.GeminiMetrics
  strategy: {}
"""
STRATEGY = """
    class_path: gemini.integrations.lightning.GeminiStrategy
    init_args:
      adam:
        nvme_offload_fraction: 1.0
    dict_kwargs:
      max_norm: 0.5
"""


class Fed(Net):
    """With data of its own."""

    def __init__(self):
        super().__init__()

    def train_dataloader(self):
        return loader()

    def on_train_end(self):
        self.settings = self.trainer.strategy.model.engine.precision_settings


@pytest.mark.parametrize(("strategy", "norm"), [(STRATEGY, 0.5), ("gemini", 0.0)])
def test_a_config_of_lightning_cli_names_the_strategy(tmp_path, caplog, strategy, norm):
    """By its class, which imports it; by its name where the config names another class of ours."""
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    (tmp_path / "config.yaml").write_text(CONFIG.format(strategy), encoding="utf-8")
    arguments = ["fit", "--config", str(tmp_path / "config.yaml")]
    found = LightningCLI(Fed, save_config_callback=None, args=arguments)
    assert isinstance(found.trainer.strategy, GeminiStrategy)
    assert found.model.settings.max_norm == norm and len(found.model.losses) == 1
    assert ("state on nvme" in caplog.text) == bool(norm)
    assert caplog.text.count("gemini optimizer") == 1


def test_colossal_ais_parameters_are_those_of_the_engine(monkeypatch):
    given = []
    monkeypatch.setattr(GeminiStrategy, "__init__", lambda self, *a, **o: given.append((a, o)))
    ColossalAIStrategy(initial_scale=32, force_outputs_fp32=True)
    ColossalAIStrategy(chunk_size=2**20, enable_distributed_storage=False, placement_policy="cpu")
    (policy, options), (other, sized) = given
    assert policy == ("auto",) and other == (StaticPlacement.zero(2, cpu_offload=True),)
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
    ("name", "policy", "on_disk"),
    [("gemini", AutoPlacement(), False), ("gemini_nvme", AutoPlacement(), True),
     ("zero1", StaticPlacement.zero(1), False), ("zero2", StaticPlacement.zero(2), False)],
)  # fmt: skip
def test_registered_names_place_what_they_say(tmp_path, name, policy, on_disk):
    seen = []

    class Asks(Net):
        def on_train_batch_end(self, out, batch, i):
            strategy = self.trainer.strategy
            engine = strategy.model.engine
            seen.append((engine.planning.policy, self.trainer.optimizers[0].nvme_bytes))

    trainer(name, tmp_path, max_steps=1).fit(Asks(), loader())
    ((placed, nbytes),) = seen
    assert placed == policy and (nbytes > 0) == on_disk
    assert type(StrategyRegistry.get(name)) is GeminiStrategy
    assert type(STRATEGY_REGISTRY.get(name)) is GeminiFabricStrategy


def test_a_policy_that_keeps_nothing_has_nothing_to_gather_late(tmp_path):
    strategy = GeminiStrategy(overlap_allgather=True)
    with pytest.raises(ValueError, match='expected placement_policy="zero1"'):
        trainer(strategy, tmp_path, max_steps=1).fit(Net(), loader())


def test_without_lightning_the_extra_is_named():
    code = (
        "import sys\n"
        "sys.modules['lightning'] = None\n"
        "import gemini, gemini.integrations\n"
        "import gemini.integrations.lightning\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8"
    )
    assert "ImportError: gemini.integrations.lightning is for the package lightning" in done.stderr
    assert "pip install lightning" in done.stderr
