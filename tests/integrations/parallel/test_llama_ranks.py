"""Models of transformers by their own plans, split or cut by a plugin; against one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.shared.workers import run_ranks
from gemini.integrations import Booster, GeminiPlugin, HybridParallelPlugin

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.ci

STEPS, ROWS, TIME = 4, 4, 10
# eps so large that an update shows the gradient and not its sign alone
ADAM = {"lr": 0.05, "eps": 0.1, "weight_decay": 0.1}
# fp32, sums over ranks and micro-batches in another order
TOLERANCE = 1e-5
PIPELINE = {"tp_size": 1, "pp_size": 2, "precision": "fp32", "num_microbatches": 2}
SPLIT = {"tp_size": 2, "precision": "fp32"}
CASES = {
    "llama tp": ("Llama", False, lambda: GeminiPlugin(**SPLIT)),
    "llama tied tp": ("Llama", True, lambda: GeminiPlugin(**SPLIT)),
    "llama sequence": (
        "Llama", False, lambda: GeminiPlugin(**SPLIT, enable_sequence_parallelism=True)
    ),
    "qwen3 tp": ("Qwen3", False, lambda: HybridParallelPlugin(pp_size=1, zero_stage=1, **SPLIT)),
    "qwen3 sequence": (
        "Qwen3", True, lambda: HybridParallelPlugin(
            pp_size=1, enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather",
            **SPLIT
        )
    ),
    "llama 1f1b": ("Llama", False, lambda: HybridParallelPlugin(**PIPELINE)),
    "qwen3 zbv": (
        "Qwen3", False, lambda: HybridParallelPlugin(
            pp_style="zbv", num_model_chunks=2, zero_stage=1, **PIPELINE
        )
    ),
}  # fmt: skip


def model_of(family, tied):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
        initializer_range=0.2,
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(config)


def batch_of(step):
    """The same on all ranks. Rows are padded on the left."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 97, (ROWS, TIME), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def loss_of(outputs, batch):
    assert batch["input_ids"].shape[1] == TIME
    return outputs.loss


def wanted(family, tied):
    model = model_of(family, tied)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in range(STEPS):
        loss = model(**batch_of(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, model.state_dict()


def trained(name, folder):
    """Losses of this rank, or None where others have them; its weights as they are saved."""
    family, tied, plugin = CASES[name]
    module = model_of(family, tied)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAM)
    booster = Booster(plugin=plugin())
    model, optimizer, *_ = booster.boost(module, optimizer)
    losses = []
    for step in range(STEPS):
        if hasattr(model, "stages"):
            batches = iter([batch_of(step)])
            found = booster.execute_pipeline(batches, model, loss_of, optimizer)["loss"]
        else:
            found = model(**batch_of(step)).loss
            booster.backward(found, optimizer)
        optimizer.clip_grad_by_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(None if found is None else float(found))
    booster.save_model(model, folder / name, shard=True, use_safetensors=True)
    return losses


def work(rank, folder):
    found = {name: trained(name, Path(folder)) for name in CASES}
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(work, 2, str(folder), processes=True)


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_transformers_trains_by_its_own_plan(results, name):
    folder, ranks = results
    family, tied, _ = CASES[name]
    losses, weights = wanted(family, tied)
    seen = [found[name] for found in ranks if found[name][0] is not None]
    assert seen and all(one == pytest.approx(losses, rel=TOLERANCE) for one in seen)
    saved = type(model_of(family, tied)).from_pretrained(folder / name)
    before = model_of(family, tied).state_dict()
    for key, value in saved.state_dict().items():
        update = weights[key] - before[key]
        assert (value - weights[key]).norm() < 1e-4 * update.norm(), key
