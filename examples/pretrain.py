"""Llama from a config, with new weights, on streamed text, in a loop of one's own.

    python examples/pretrain.py --text corpus.txt --layers 12 --width 768 --out runs/new
    torchrun --nproc_per_node 2 examples/pretrain.py --text corpus.txt --out runs/new

Bytes are the tokens, so no tokenizer is needed. No rank has the model whole: it is made empty, and
gets its weights where it is sharded. With a tokenizer, `python -m gemini train --from-scratch` does
this.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import gemini
from gemini import AutoPlacement, GeminiDDP, HybridAdam


def batches(text: Path, batch: int, seq: int, rank: int, ranks: int) -> Iterator[Tensor]:
    """Consecutive windows of a file, int64 [batch, seq], each to one rank, again and again."""
    while True:
        with text.open("rb") as file:
            for number in range(text.stat().st_size // (batch * seq)):
                window = bytearray(file.read(batch * seq))
                if number % ranks == rank:
                    yield torch.frombuffer(window, dtype=torch.uint8).view(batch, seq).long()


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32, not in bf16")
    parser.add_argument("--device-budget", help="as in 22GiB; what does not fit goes elsewhere")
    parser.add_argument("--nvme-dir", help="a folder on a fast disk")
    parser.add_argument("--plain", action="store_true", help="torch alone, to compare with")
    return parser.parse_args(given)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, save the model, and return the losses."""
    given = arguments(argv)
    cuda = torch.cuda.is_available()
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
    torch.manual_seed(0)
    with gemini.init_empty():
        llama = LlamaForCausalLM(LlamaConfig(
            vocab_size=256, hidden_size=given.width, intermediate_size=3 * given.width,
            num_hidden_layers=given.layers, num_attention_heads=max(1, given.width // 64),
            max_position_embeddings=given.seq, bos_token_id=None, eos_token_id=None,
        ))  # fmt: skip
    options: dict[str, Any] = {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    model: torch.nn.Module = llama
    optimizer: torch.optim.Optimizer
    if given.plain:
        model = GeminiDDP(llama, precision="fp32").unwrap().to(device)  # the same new weights
        model = DistributedDataParallel(model) if dist.is_initialized() else model
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    else:
        placement = AutoPlacement(device_budget=given.device_budget, nvme_dir=given.nvme_dir)
        precision = "fp32" if given.fp32 else "bf16"
        model = GeminiDDP(llama, placement_policy=placement, precision=precision)
        optimizer = HybridAdam(model.parameters(), **options)
    schedule = get_cosine_schedule_with_warmup(optimizer, given.steps // 10, given.steps)
    losses = []
    data = batches(given.text, given.batch, given.seq, rank, ranks)
    for step, ids in enumerate(islice(data, given.steps)):
        loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    if isinstance(model, GeminiDDP):
        gemini.export_safetensors(given.out, model)  # all ranks call; from_pretrained reads it
    return losses


if __name__ == "__main__":
    main()
