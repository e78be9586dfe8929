"""Hugging Face's Trainer over a sharded model, beside the same Trainer over plain torch.

At one rank; `tests/dist/test_trainers.py` has more. 1e-5: what rounding in another order leaves of
fp32 after six steps of different updates.
"""

import copy
import math
import os
import sys

import pytest
import torch
from torch import nn

from gemini import GeminiDDP
from gemini.checkpoint import CheckpointError
from optim import (
    HybridAdafactor,
    HybridAdagrad,
    HybridAdam,
    HybridLion,
    HybridRMSprop,
    HybridScheduleFreeAdamW,
    HybridSGD,
)
from tests.integrations.cases.trainer_runs import (
    STEPS,
    checkpoints,
    model_and_data,
    run,
    weights_of,
)

pytestmark = pytest.mark.ci  # tests/borrowed/test_trainer.py is in every run


def trainer():
    from gemini.integrations.transformers import GeminiTrainer

    return GeminiTrainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The plain run that most are compared with."""
    return run(tmp_path_factory.mktemp("plain"))


SAME = {
    "as it is": {},
    "state on NVMe": {"adam": {"nvme_offload_fraction": 1.0}},
    "activation checkpointing": {"activation_checkpointing": True},
    "evaluated before": {"eval_on_start": True},
}


@pytest.mark.parametrize("case", SAME)
def test_losses_norms_rates_and_evaluation_are_plain_trainers(tmp_path, plain, case):
    got = run(tmp_path, cls=trainer(), **SAME[case])
    assert len(got.steps) == STEPS and got.steps[0, 1] > 0.5  # it clips
    assert got.differs(plain) < 1e-5
    optimizer = got.trainer.optimizer.optimizer
    assert isinstance(optimizer, HybridAdam)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert (optimizer.nvme_bytes > 0) == ("adam" in SAME[case])


def test_metrics_go_where_the_trainer_logs(tmp_path, caplog):
    from transformers import TrainerCallback

    from gemini.integrations.transformers import MetricsCallback

    class Writer(TrainerCallback):  # as tensorboard's and wandb's
        rows = ()

        def on_log(self, *_, logs, **__):
            self.rows = (*self.rows, logs)

    class Measured(trainer()):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.add_callback(MetricsCallback(self))

    writer = Writer()
    adam = {"nvme_offload_fraction": 1.0}
    done = run(tmp_path, cls=Measured, adam=adam, max_steps=3, given={"callbacks": [writer]})
    assert caplog.text.count("gemini optimizer HybridAdam in place of torch.optim.AdamW") == 1
    history = [log for log in done.trainer.state.log_history if "gemini/skipped" in log]
    assert [log["step"] for log in history] == [2, 3]  # of the steps before these
    assert [row for row in writer.rows if "gemini/skipped" in row]
    assert all(log["gemini/nvme_write_bytes"] > 0 for log in history)


def test_noise_on_embeddings_is_the_same(tmp_path):
    want = run(tmp_path, neftune_noise_alpha=1.0)
    assert run(tmp_path, cls=trainer(), neftune_noise_alpha=1.0).differs(want) < 1e-5


BY_NAME = {"sgd": HybridSGD, "adagrad": HybridAdagrad, "rmsprop": HybridRMSprop}


@pytest.mark.parametrize("name", BY_NAME)
def test_an_optimizer_of_torchs_by_name(name, tmp_path):
    options = {"optim": name, "max_grad_norm": 0.0, "optim_args": "weight_decay=0.1"}
    want, got = run(tmp_path, **options), run(tmp_path, cls=trainer(), **options)
    assert got.differs(want) < 1e-5 and isinstance(got.trainer.optimizer.optimizer, BY_NAME[name])


def test_lion_by_name_needs_no_other_package(tmp_path):
    got = run(
        tmp_path, cls=trainer(), optim="lion_32bit", learning_rate=1e-3,
        adam={"nvme_offload_fraction": 1.0},
    )  # fmt: skip
    optimizer = got.trainer.optimizer.optimizer
    assert type(optimizer) is HybridLion and optimizer.nvme_bytes > 0
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert got.steps[:, 0].std() > 0 and torch.isfinite(got.steps).all()


def test_adamw_of_8_bits_by_name_needs_no_other_package(tmp_path, plain, caplog):
    with caplog.at_level("INFO", "gemini"):
        got = run(tmp_path, cls=trainer(), optim="adamw_bnb_8bit")
    assert 1e-5 < got.differs(plain) < 0.3
    groups = got.trainer.optimizer.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert "gemini optimizer HybridAdam(state='8bit')" in caplog.text
    assert "is HybridAdam(state='8bit'): moments are companded codes" in caplog.text


def test_adafactor_by_name_is_transformers(tmp_path):
    options = {"optim": "adafactor", "learning_rate": 1e-3}
    want, got = run(tmp_path, **options), run(tmp_path, cls=trainer(), **options)
    # Rows are summed in another order, and how far that goes depends on the machine: 1.1e-5 on one.
    assert got.differs(want) < 2e-5
    optimizer = got.trainer.optimizer.optimizer
    assert type(optimizer) is HybridAdafactor
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_schedule_free_by_name_evaluates_its_average(tmp_path):
    got = run(
        tmp_path, cls=trainer(), optim="schedule_free_adamw", optim_args="r=0.5,weight_lr_power=1",
        lr_scheduler_type="constant", warmup_steps=2, learning_rate=1e-2,
    )  # fmt: skip
    optimizer = got.trainer.optimizer.optimizer
    assert type(optimizer) is HybridScheduleFreeAdamW
    group = optimizer.param_groups[0]
    assert (group["r"], group["weight_lr_power"], group["warmup_steps"]) == (0.5, 1.0, 2)
    averaged = got.trainer.evaluate()["eval_loss"]
    assert group["train_mode"] is False
    optimizer.train()
    y = got.trainer.model_wrapped.state_dict()["transformer.wte.weight"].clone()
    optimizer.eval()
    x = got.trainer.model_wrapped.state_dict()["transformer.wte.weight"]
    assert not torch.equal(x, y) and math.isfinite(averaged)


@pytest.mark.parametrize(("precision", "error"), [("bf16", 0.03), ("fp16", 0.01)])
def test_16_bits_stay_near_fp32(tmp_path, plain, precision, error):
    """`error`: some ulp of the precision, 2**-8 and 2**-11, in norms of the gradient."""
    got = run(tmp_path, cls=trainer(), gemini={"precision": precision})
    assert 1e-7 < got.differs(plain) < error
    wrapped = got.trainer.model_wrapped
    assert wrapped.state_dict()["transformer.wte.weight"].dtype is torch.float32


def test_the_precision_is_the_arguments_own(tmp_path):
    got = run(tmp_path, cls=trainer(), bf16=True, max_steps=1)
    assert got.trainer.model_wrapped.engine.dtype is torch.bfloat16
    model, _ = model_and_data()
    loaded_in_16 = run(tmp_path, model.to(torch.bfloat16), cls=trainer(), max_steps=1)
    assert loaded_in_16.trainer.model_wrapped.engine.dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"mixed_precision='bf16' and .*'fp16'.*; expected one"):
        run(tmp_path, cls=trainer(), bf16=True, gemini={"precision": "fp16"})


def test_saved_weights_are_what_from_pretrained_finds(tmp_path):
    got = run(tmp_path, cls=trainer(), max_steps=2, gemini={"precision": "bf16"})
    (tmp_path / ".weights").mkdir()  # of a save that was killed
    (tmp_path / ".weights/model.safetensors").touch()
    got.trainer.save_model()
    got.trainer.save_model()  # again, over what is there
    saved, want = weights_of(tmp_path), got.trainer.model_wrapped.state_dict()
    assert saved.keys() == want.keys()
    assert all(torch.equal(saved[name], want[name]) for name in want)
    assert not (tmp_path / ".weights").exists()
    assert (tmp_path / "training_args.bin").exists() and (tmp_path / "config.json").exists()


def test_a_run_resumes_with_the_same_bits(tmp_path):
    whole = run(tmp_path, cls=trainer(), save_strategy="steps", save_steps=2, save_total_limit=2)
    assert checkpoints(tmp_path) == ["checkpoint-4", "checkpoint-6"]
    resumed = run(tmp_path, cls=trainer(), resume=tmp_path / "checkpoint-4")
    assert torch.equal(resumed.steps, whole.steps) and resumed.eval_loss == whole.eval_loss
    digests = [one.trainer.model_wrapped.digest() for one in (whole, resumed)]
    assert digests[0] == digests[1]


def test_a_checkpoint_is_looked_at_before_anything_of_it_is_read(tmp_path):
    """A pipe in the place of Trainer's own files would be waited for, a link be followed."""
    run(tmp_path, cls=trainer(), save_strategy="steps", save_steps=2, max_steps=2)
    folder, away = tmp_path / "checkpoint-2", tmp_path / "away"
    names = ["trainer_state.json", "rng_state.pth", "gemini"]
    for name in names:
        path = folder / name
        for change in (
            os.mkfifo,
            lambda p: p.symlink_to(away),
            lambda p: p.write_text("[" * 10**5, encoding="utf-8"),
        ):
            path.rename(away)
            change(path)
            if path.is_file() and name != "trainer_state.json" and not path.is_symlink():
                path.unlink()  # which is no JSON: its own reader refuses it
            else:
                with pytest.raises(CheckpointError, match=f"{name}|latest"):  # which leads to it
                    run(tmp_path, cls=trainer(), resume=folder, max_steps=2)
                path.unlink()
            away.rename(path)


def test_a_plain_trainers_checkpoint_resumes(tmp_path, plain):
    run(tmp_path, save_strategy="steps", save_steps=4)
    assert run(tmp_path, cls=trainer(), resume=tmp_path / "checkpoint-4").differs(plain) < 1e-5


BEST = {
    "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    "load_best_model_at_end": True, "save_total_limit": 1, "learning_rate": 1.0,
    "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("alone", [True, False])
def test_the_best_model_comes_back(tmp_path, alone):
    """The rate is so large that the first evaluation is the best."""
    want = run(tmp_path / "a", **BEST, save_only_model=alone)
    got = run(tmp_path / "b", cls=trainer(), **BEST, save_only_model=alone)
    assert want.trainer.state.best_global_step == got.trainer.state.best_global_step < STEPS
    assert got.eval_loss == pytest.approx(want.eval_loss, rel=1e-5)
    assert checkpoints(tmp_path / "a") == checkpoints(tmp_path / "b")


class Hungry(nn.Module):
    """Runs out of memory above a batch of 2."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config
        self.seen = []

    def forward(self, input_ids, labels=None):
        self.seen.append(len(input_ids))
        out = self.inner(input_ids=input_ids, labels=labels)
        if self.training and len(input_ids) > 2:
            raise RuntimeError("CUDA out of memory.")
        return out


def test_a_batch_that_does_not_fit_is_made_smaller(tmp_path):
    hungry = Hungry(model_and_data()[0])
    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    want = run(tmp_path, hungry, **options)
    got = run(tmp_path, hungry, cls=trainer(), **options)
    assert got.trainer.model.seen[:2] == [4, 4 * 9 // 10]
    assert got.differs(want) < 1e-5


def test_evaluation_and_prediction_need_no_training(tmp_path):
    from transformers import Trainer, TrainingArguments

    model, data = model_and_data()
    found = []
    for cls in (Trainer, trainer()):
        args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
        one = cls(copy.deepcopy(model), args, eval_dataset=data[:6])
        found.append((one.evaluate()["eval_loss"], one.predict(data[:6]).predictions))
    assert isinstance(one.model_wrapped, GeminiDDP)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.allclose(*[torch.tensor(predictions) for _, predictions in found], rtol=1e-5)


def test_several_devices_of_one_process_are_one(tmp_path):
    """Else Trainer would take DataParallel's batches."""
    from transformers import TrainingArguments

    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    assert args.n_gpu == 0
    args._n_gpu = 2
    one = trainer()(model_and_data()[0], args)
    assert one.args.n_gpu == 1 and one._train_batch_size == args.per_device_train_batch_size


def test_a_model_is_not_moved_to_the_device_before_it_is_wrapped(tmp_path, monkeypatch):
    """It need not fit there."""
    from transformers import TrainingArguments

    model, _ = model_and_data()
    moved = []
    monkeypatch.setattr(type(model), "to", lambda self, *args, **_: moved.append(args) or self)
    trainer()(model, TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
    assert moved == []


def test_training_twice_goes_on(tmp_path):
    want, got = run(tmp_path), run(tmp_path, cls=trainer())
    for one in (want, got):
        one.trainer.train()
    assert got.trainer.evaluate()["eval_loss"] == pytest.approx(
        want.trainer.evaluate()["eval_loss"], rel=1e-5
    )


REFUSED = {
    "a projected one": (
        {"optim": "galore_adafactor", "optim_target_modules": "c_attn"},
        r"args.optim='galore_adafactor' has no form.*adamw_torch",
    ),
    "a bnb optimizer": ({"optim": "lion_8bit"}, r"args.optim='lion_8bit' has no form"),
    "a save on each node": ({"save_on_each_node": True}, "save_on_each_node=True.* expected False"),
    "another cast": ({"bf16_full_eval": True}, "expected neither: it evaluates"),
    "an option of Adam's": ({"adam": {"lr": 1.0}}, "lr beside an optimizer of torch's"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_here_is_refused_by_name(tmp_path, case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        run(tmp_path, cls=trainer(), **options)


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_a_missing_package_is_named(monkeypatch, name):
    for module in [m for m in sys.modules if m.startswith(f"gemini.integrations.{name}")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"needs {name}.*pip install .*{name}"):
        __import__(f"gemini.integrations.{name}")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_generation_of_rewards_reads_a_prefix_once(tmp_path, monkeypatch, checkpointing):
    """Each further token is alone in its forward, as over plain torch: a cache has the others."""
    pytest.importorskip("trl")
    from transformers.models.llama.modeling_llama import LlamaAttention

    from tests.integrations.cases import method_runs
    from tests.support.model_folder import make_folder

    make_folder(tmp_path / "model")
    forward = LlamaAttention.forward

    def lengths_and_steps(ours):
        lengths = []

        def seen(self, hidden_states, *args, **kwargs):
            lengths.append(hidden_states.shape[1])
            return forward(self, hidden_states, *args, **kwargs)

        monkeypatch.setattr(LlamaAttention, "forward", seen)
        steps = method_runs.run("grpo", tmp_path, ours=ours, checkpointing=checkpointing)
        return lengths, steps

    (plain, want), (ours, got) = map(lengths_and_steps, (False, True))
    assert ours == plain and ours.count(1) > len(ours) / 3
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def peak_of_method(method, folder, **given):
    """Bytes of storages at the peak of the second step, of what operators made since the trainer
    was; its model has adapters."""
    import importlib

    import transformers
    from datasets import Dataset
    from peft import LoraConfig

    from gemini.integrations.transformers import GeminiTrainerMixin
    from gemini.memtracer.monitor import StorageTracker
    from tests.support.model_folder import TEXT

    name = {"sft": "SFT", "dpo": "DPO"}[method]
    base = getattr(importlib.import_module(f"trl.trainer.{method}_trainer"), f"{name}Trainer")
    options = getattr(importlib.import_module(f"trl.trainer.{method}_config"), f"{name}Config")
    cut = [TEXT[100 * i : 100 * i + 100] for i in range(8)]
    pairs = {"sft": ("completion",), "dpo": ("chosen", "rejected")}[method]
    rows = [{"prompt": t[:20], **dict.fromkeys(pairs, t[20:])} for t in cut]
    args = options(
        output_dir=str(folder / "out"), max_steps=2, report_to="none", use_cpu=True, bf16=False,
        per_device_train_batch_size=4 // len(pairs), pad_to_multiple_of=96, max_length=96,
        save_strategy="no", gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tracker = StorageTracker()

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            tracker.period()

    with tracker:
        trainer = type("Ours", (GeminiTrainerMixin, base), {})(
            model, args=args, train_dataset=Dataset.from_list(rows),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
            peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
            gemini={"precision": "fp32"}, **given,
        )  # fmt: skip
        trainer.add_callback(Steps())
        trainer.train()
    return tracker.period()


def test_preferences_take_no_more_memory_than_as_many_supervised_sequences(tmp_path):
    """The reference is the base with adapters off: there is no second one."""
    pytest.importorskip("trl")
    import transformers

    from tests.support.model_folder import make_folder

    make_folder(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    supervised, preferred = (peak_of_method(m, tmp_path) for m in ("sft", "dpo"))
    assert preferred <= 1.1 * supervised
    second = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert peak_of_method("dpo", tmp_path, ref_model=second) > 1.1 * supervised
