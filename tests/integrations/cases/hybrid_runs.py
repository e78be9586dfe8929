"""Tiny models of transformers that a plugin splits, cuts and replicates; and one process of torch.

Each step has PARTS calls, whose losses are means over their rows and add up to a mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.shared.models import seeded
from bench.shared.reference import same
from gemini import GeminiDDP
from gemini.integrations import Booster, HybridParallelPlugin, chunk_loss
from gemini.parallel.pipelined import Pipelined
from optim import HybridAdam
from tests.support import plain_training
from tests.support.meshes import ADAM, MAX_NORM, PARTS, STEPS

ROWS, TIME, WORDS, MICRO = 4, 12, 96, 2
WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**WIDTH, "intermediate_size": 48, "num_key_value_heads": 2}
FOUR = {"num_hidden_layers": 4}
GPT2 = {
    "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MOE = LLAMA | {"num_experts_per_tok": 2}
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
BERT = WIDTH | {
    "intermediate_size": 64, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", LLAMA | FOUR),
    # words that two ranks do not divide
    "Llama tied": ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True, "vocab_size": 97}),
    "Llama tied, 4": (
        "LlamaForCausalLM", LLAMA | FOUR | {"tie_word_embeddings": True, "vocab_size": 97}
    ),
    "Qwen2": ("Qwen2ForCausalLM", LLAMA),
    "Qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 8}),
    "Mistral": ("MistralForCausalLM", LLAMA),
    "Gemma": ("GemmaForCausalLM", LLAMA | {"head_dim": 8, "tie_word_embeddings": True}),
    "Mixtral": ("MixtralForCausalLM", MOE | {"num_local_experts": 4}),
    "Qwen2-MoE": (
        "Qwen2MoeForCausalLM",
        MOE | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    ),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        MOE | {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8},
    ),
    "GPT-2": ("GPT2LMHeadModel", GPT2),
    "GPT-2 dropped": ("GPT2LMHeadModel", GPT2 | {"resid_pdrop": 0.2}),
    "GPT-2 tied": ("GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": True}),
    "BERT": ("BertForMaskedLM", BERT),
    "BERT tied": ("BertForMaskedLM", BERT | {"tie_word_embeddings": True}),
    "OPT": (
        "OPTForCausalLM",
        WIDTH | {"word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": 32,
                 "dropout": 0.0},
    ),
    "BLOOM": (
        "BloomForCausalLM",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0,
         "attention_dropout": 0.0},
    ),
    "BLOOM post": (
        "BloomForCausalLM",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0,
         "attention_dropout": 0.0, "apply_residual_connection_post_layernorm": True},
    ),
    "GPT-J": (
        "GPTJForCausalLM",
        {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "Falcon": (
        "FalconForCausalLM",
        WIDTH | {"new_decoder_architecture": True, "num_kv_heads": 2, "hidden_dropout": 0.0,
                 "attention_dropout": 0.0},
    ),
    "Falcon alibi": (
        "FalconForCausalLM",
        WIDTH | {"multi_query": False, "alibi": True, "bias": True, "hidden_dropout": 0.0,
                 "attention_dropout": 0.0},
    ),
    "T5": ("T5ForConditionalGeneration", T5),
    "T5 gated": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": True, "vocab_size": 97},
    ),
    "ViT": (
        "ViTForImageClassification",
        WIDTH | {"intermediate_size": 64, "image_size": 16, "patch_size": 8, "num_labels": 6,
                 "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}  # fmt: skip
# whose sequences ranks share: padded on the right, with other numbers of labels in each part
SHARED = {
    "Llama shared": ("LlamaForCausalLM", LLAMA),
    "Llama long shared": KINDS["Llama"],
    "Qwen2-MoE long shared": ("Qwen2MoeForCausalLM", KINDS["Qwen2-MoE"][1] | FOUR),
    "GPT-2 shared": ("GPT2LMHeadModel", GPT2),
    "Qwen2-MoE shared": KINDS["Qwen2-MoE"],
    "BLOOM shared": KINDS["BLOOM"],
}
SHARED_TIME = 16
# fp32: other orders of sums, of micro-batches and ranks, and of what is split
BOUND = 1.5e-6
CUT = {"tp_size": 1, "pp_size": 2}
BOTH = {"tp_size": 2, "pp_size": 2}
INTERLEAVED = {"pp_style": "interleaved", "num_model_chunks": 2}
ZBV = {"pp_style": "zbv", "num_model_chunks": 2}  # one process has the first and the last stage
Batch = dict[str, Tensor]
Case = tuple[str, str, dict[str, Any]]  # its name, a kind of model, options of `Run`


def made(kind: str) -> nn.Module:
    """Biases and scales differ from what they begin as: a wrong one shows."""
    name, options = (KINDS | SHARED)[kind]
    with seeded(), torch.no_grad():  # in turns: modules of transformers are imported by threads
        import transformers

        model_class = getattr(transformers, name)
        config = model_class.config_class(
            **{"vocab_size": WORDS, "tie_word_embeddings": False} | options
        )
        model: nn.Module = model_class(config)
        for name, param in model.named_parameters():
            if param.dim() == 1:
                param.add_(torch.randn_like(param) * 0.05)
            elif "experts" in name:
                param.normal_(std=0.1)
    return model


def batches(kind: str, places: int) -> list[list[list[Batch]]]:
    """By step, by call, by place."""
    draw = torch.Generator().manual_seed(3)

    def one() -> Batch:
        if kind == "ViT":
            pixels = torch.randn(ROWS, 3, 16, 16, generator=draw)
            labels = torch.randint(0, 6, (ROWS,), generator=draw)
            return {"pixel_values": pixels, "labels": labels}
        time = SHARED_TIME if kind in SHARED else TIME
        ids = torch.randint(4, WORDS, (ROWS, time), generator=draw)
        mask = torch.ones_like(ids)
        if kind in SHARED:
            mask[0, 11:] = mask[3, 14:] = 0
            labels = ids.masked_fill(mask == 0, -100)
            labels[1, :6] = -100
            return {"input_ids": ids, "attention_mask": mask, "labels": labels}
        mask[0, :3] = 0  # padded on the left
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    return [[[one() for _ in range(places)] for _ in range(PARTS)] for _ in range(STEPS)]


def parts_of(calls: list[list[Batch]]) -> list[Batch]:
    """All micro-batches of a step."""
    return [
        {name: value.tensor_split(MICRO)[i] for name, value in batch.items()}
        for places in calls
        for batch in places
        for i in range(MICRO)
    ]


def criterion(outputs: Any, batch: Any) -> Tensor:
    loss: Tensor = outputs.loss / PARTS
    return loss


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def reference(kind: str, places: int = 1) -> dict[str, Tensor]:
    """Of one process of torch in fp32."""
    model = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)  # type: ignore[arg-type]
    for calls in batches(kind, places):
        parts = parts_of(calls)
        for part in parts:
            (model(**part).loss / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def one_process(kind: str, precision: str, places: int = 1) -> dict[str, Tensor]:
    """Of this engine in one process."""
    model = GeminiDDP(made(kind), precision=precision, max_norm=MAX_NORM)
    optimizer = HybridAdam(model.parameters(), **ADAM)  # type: ignore[arg-type]
    for calls in batches(kind, places):
        parts = parts_of(calls)
        for part in parts:
            (model(**part).loss / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.float() for name, value in state_of(model).items()}


class Run:
    """One rank of a plugin's run."""

    def __init__(
        self, kind: str, plugin: Any = HybridParallelPlugin, tokens: int = 0,
        change: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        """tokens: whose logits exist at a time; 0 is all. change: of the model, before boost."""
        model = made(kind)
        if change is not None:
            change(model)
        if tokens:
            chunk_loss(model, tokens)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)  # type: ignore[arg-type]
        given = {"precision": "fp32", "max_norm": MAX_NORM} | options
        self.kind, self.plugin = kind, plugin(**given)
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self.place, self.places = self.plugin.sizes.data_place(
            dist.get_rank(), dist.get_world_size()
        )
        self.said: list[Any] = []  # of each step

    def call(self, batch: Batch) -> None:
        if isinstance(self.model, Pipelined):
            self.booster.execute_pipeline(iter([batch]), self.model, criterion, self.optimizer)
            return
        for i in range(MICRO):
            part = {name: value.tensor_split(MICRO)[i] for name, value in batch.items()}
            loss = criterion(self.model(**part), part) / MICRO
            self.booster.backward(loss, self.optimizer)

    def train(self, steps: int = STEPS) -> None:
        for calls in batches(self.kind, self.places)[:steps]:
            for places in calls:
                self.call(places[self.place])
            self.optimizer.step()
            report = self.optimizer.last_report
            self.said.append((report.grad_norm, report.skipped, report.loss_scale))
            self.optimizer.zero_grad()

    def weights(self, folder: str, name: str) -> dict[str, Tensor]:
        """Whole, of all stages: what a Booster saves, as rank 0 reads it again."""
        path = Path(folder) / f"{name}.pt"
        self.booster.save_model(self.model, path)
        return torch.load(path) if dist.get_rank() == 0 else {}


def update_error(
    found: dict[str, Tensor], want: dict[str, Tensor], start: dict[str, Tensor]
) -> float:
    """Relative, over all weights."""
    assert found.keys() == want.keys()
    names = [name for name, value in want.items() if value.is_floating_point()]
    return plain_training.update_error(*([x[n] for n in names] for x in (found, want, start)))


@dataclass(frozen=True)
class Trained:
    """What one rank has of a run. again: `weights`, when they were loaded from what they are.

    said: by each step. copies: of weights that stages tie, by this rank's stages.
    """

    weights: dict[str, Tensor]
    again: dict[str, Tensor]
    said: list[Any]
    copies: list[Tensor]


def trained(rank: int, cases: Sequence[Case], folder: str) -> dict[str, Trained]:
    found = {}
    for name, kind, options in cases:
        run = Run(kind, **options)
        if options.get("max_norm") == 0.0:
            run.optimizer.step = functools.partial(clipped, run, run.optimizer.step)
        run.train()
        weights = again = run.weights(folder, name)
        copies: list[Tensor] = []
        if isinstance(run.model, Pipelined):
            copies = [copy for part in run.model for copy in copies_in(part)]
        else:
            run.model.load_state_dict(run.model.state_dict())
            again = run.weights(folder, name)
        found[name] = Trained(weights, again, run.said, copies)
        run.optimizer.close()
    return found


def clipped(run: Run, step: Callable[[], None]) -> None:
    run.optimizer.clip_grad_by_norm(MAX_NORM)
    step()


def copies_in(part: Any) -> list[Tensor]:
    """What a stage has of a tied weight, under the one name that it has there."""
    state = part.state_dict()
    names = [spec.names for spec in part.engine.layout.params if len(spec.names) > 1]
    return [state[name] for alike in names for name in alike if name in state]


def check_trained(results: Sequence[dict[str, Trained]], case: Case) -> list[Tensor]:
    """All ranks came to what one process comes to. Returns their copies of a tied weight."""
    name, kind, options = case
    of_ranks = [found[name] for found in results]
    places = len(of_ranks)
    for size in ("tp_size", "pp_size", "sp_size"):
        places //= options.get(size, 1)
    first, precision = of_ranks[0], options.get("precision", "fp32")
    start, want = state_of(made(kind)), reference(kind, places)
    bound = BOUND
    if precision != "fp32":
        bound = 1.1 * update_error(one_process(kind, precision, places), want, start)
        assert bound < 0.02
    assert update_error(first.weights, want, start) < bound
    assert same(first.again, first.weights)  # loading what is there changes no bit
    assert len({tuple(one.said) for one in of_ranks}) == 1  # a norm, a scale, a skip, bit for bit
    assert {scale for *_, scale in first.said} == {65536.0 if precision == "fp16" else 1.0}
    copies = [copy for one in of_ranks for copy in one.copies]
    assert all(torch.equal(copies[0], copy) for copy in copies)
    return copies
