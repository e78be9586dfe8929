"""Micro-batches of a loop that gives them one by one: Trainer's bits in both orders."""

import json

import pytest
import torch

from gemini.accumulation.chain import NoChainError
from gemini.integrations.accelerate import GeminiAccelerator

pytestmark = pytest.mark.ci  # transformers takes seconds to import
ORDERS = ("batches", "layers")


def gpt2(dropout):
    import transformers

    config = transformers.GPT2Config(
        n_embd=24, n_layer=3, n_head=2, vocab_size=97, n_positions=16, bos_token_id=0,
        eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def trained(folder, order, dropout=0.0, cls=None, **arguments):
    """Figures of all steps, and the digest at the end."""
    from gemini.integrations.transformers import GeminiTrainer
    from tests.integrations.cases.trainer_runs import run

    done = run(
        folder, gpt2(dropout), cls=cls or GeminiTrainer, given={"accumulate_order": order},
        **{"gradient_accumulation_steps": 3, **arguments},
    )  # fmt: skip
    return done.steps.tolist(), done.eval_loss, done.trainer.model_wrapped.digest()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_both_orders_of_trainer_have_the_same_bits(tmp_path, dropout):
    layers, batches = (trained(tmp_path / order, order, dropout) for order in ORDERS)
    assert layers == batches


def test_the_last_step_of_an_epoch_may_have_fewer_micro_batches(tmp_path):
    short = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 20}
    found = [trained(tmp_path / order, order, 0.2, **short) for order in ORDERS]
    assert found[0] == found[1] and len(found[0][0]) == 2  # of three, and of one


def test_a_run_in_one_order_resumes_in_the_other(tmp_path):
    from tests.integrations.cases.trainer_runs import run

    def half(order, folder, **more):
        from gemini.integrations.transformers import GeminiTrainer

        return run(
            folder, gpt2(0.2), cls=GeminiTrainer, given={"accumulate_order": order},
            gradient_accumulation_steps=2, save_strategy="steps", save_steps=3, **more,
        )  # fmt: skip

    whole = half("batches", tmp_path / "a")
    half("layers", tmp_path / "b")
    resumed = half("layers", tmp_path / "b", resume=tmp_path / "b/checkpoint-3")
    assert resumed.trainer.model_wrapped.digest() == whole.trainer.model_wrapped.digest()
    history = json.loads(
        (tmp_path / "b/checkpoint-6/trainer_state.json").read_text(encoding="utf-8")
    )
    assert history["global_step"] == 6


def test_an_unknown_order_is_refused(tmp_path):
    with pytest.raises(ValueError, match="accumulate_order='rows'; expected one of"):
        trained(tmp_path, "rows")


def trainer_whose(step):
    """Trainer with another `compute_loss`."""
    from gemini.integrations.transformers import GeminiTrainer

    class Other(GeminiTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return step(super().compute_loss, model, inputs, *args, **kwargs)

    return Other


def twice(loss, model, inputs, *args, **kwargs):
    return loss(model, inputs, *args, **kwargs) + loss(model, inputs, *args, **kwargs)


def noisy(loss, model, inputs, *args, **kwargs):
    return loss(model, inputs, *args, **kwargs) * torch.rand(()) if torch.rand(1) < 2 else None


def silent(loss, model, inputs, *args, **kwargs):
    return model.module(**inputs).loss


@pytest.mark.parametrize(
    ("step", "said"),
    [(twice, "calls its model more than once"), (noisy, "draws random numbers before"),
     (silent, "does not call its model")],
)  # fmt: skip
def test_a_step_that_cannot_be_taken_apart_is_refused(tmp_path, step, said):
    with pytest.raises(NoChainError, match=f"{said}.*order=.batches. takes one"):
        trained(tmp_path, "layers", cls=trainer_whose(step))


def test_what_a_trainer_counts_of_a_step_is_counted_once(tmp_path):
    """A loss is computed two times and more layer by layer, for tied weights."""
    from gemini.integrations.transformers import GeminiTrainer

    counted = {}

    class Counting(GeminiTrainer):
        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            self._metrics = getattr(self, "_metrics", {"seen": []})
            self._metrics["seen"].append(1)
            counted[self.args.output_dir] = self._metrics["seen"]
            return found

        def evaluate(self, *args, **kwargs):
            counted[self.args.output_dir] = len(self._metrics["seen"])
            self.done = counted[self.args.output_dir]
            found = super().evaluate(*args, **kwargs)
            counted[self.args.output_dir] = self.done
            return found

    for order in ORDERS:
        trained(tmp_path / order, order, cls=Counting)
    assert set(counted.values()) == {6 * 3}


def test_a_loop_of_accelerate_gives_its_model_to_accumulate():
    """`accelerator.accumulate` asks for a loss before the next batch is there: its order is one
    after the other. The prepared model goes into `gemini.accumulate`."""
    import gemini

    digests = []
    for order in ORDERS:
        accelerator = GeminiAccelerator(cpu=True, gemini={"min_chunk_size_m": 0.004})
        model = gpt2(0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        torch.manual_seed(1)
        for step in range(3):
            ids = torch.randint(97, (3, 2, 16), generator=torch.Generator().manual_seed(step))
            given = [{"input_ids": one, "labels": one} for one in ids]
            gemini.accumulate(model, given, lambda output, _: output.loss / 3, order=order)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        digests.append(model.digest())
    assert digests[0] == digests[1]
