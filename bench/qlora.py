"""LoRA on a quantised base of random weights, in one process: what `bench.capacity --qlora` runs.

    python -m bench.qlora --make --base FOLDER --shape llama-3.2-3b      16-bit weights in files
    python -m bench.qlora --base FOLDER --json OUT --device-budget 1.7GiB --nvme-dir DIR
    python -m bench.qlora --base FOLDER --json OUT --pair

`gemini.load_pretrained(quantize="nf4", lora=)` trains under the budget, on one sequence, with
gradient checkpointing. `--pair`: plain peft and that without a budget take turns, everything
resident.
`--cold`: files of the base leave the page cache before every forward and every backward.
`--accumulate K --order layers`: so many micro-batches a step, by `gemini.accumulate`; layer by
layer without checkpointing, as layers run twice anyway.
bytes_read, planned_read_bytes: by step, of all its micro-batches; None where homes have changed.
What malloc keeps counts in a budget, too: without the variables that `bench.capacity` sets, steps
read more than was planned.
`--hold`: the process stays when it is done, until its standard input ends.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import gemini
from bench.support.timing import interleaved, median_ratio
from gemini import AutoPlacement, GeminiDDP
from gemini.dtypes import BYTES
from gemini.memtracer.monitor import process_peak_rss_bytes
from gemini.optim import HybridAdam
from gemini.placement.orders import BATCHES, LAYERS, ORDERS

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-3b": {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
    },
    "small": {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 4096,
    },
}  # fmt: skip
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LEARNING_RATE = 1e-3
M = TypeVar("M", bound=nn.Module)


def make_base(folder: Path, shape: str) -> None:
    """A Llama in bf16 with tied embeddings, a file a layer; a layer in memory at a time."""
    import transformers
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(
        **SHAPES[shape], tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
        dtype="bfloat16", max_position_embeddings=1024,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.tie_weights()
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    files: dict[str, dict[str, torch.Size]] = {}
    for name, param in model.named_parameters():
        of_layer = name.split("layers.")[1].split(".")[0] if "layers." in name else "rest"
        files.setdefault(f"model-{of_layer}.safetensors", {})[name] = param.shape
    generator = torch.Generator().manual_seed(0)
    for file, shapes in files.items():
        values = {name: _drawn(shape, generator) for name, shape in shapes.items()}
        save_file(values, folder / file, {"format": "pt"})
    index = {name: file for file, shapes in files.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}),
        encoding="utf-8",
    )


def _drawn(shape: torch.Size, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)


def adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS)


def ours(folder: Path, policy: Any, order: str = BATCHES) -> GeminiDDP:
    torch.manual_seed(0)
    model = gemini.load_pretrained(folder, quantize="nf4", lora=adapters(), placement_policy=policy)
    return model.train() if order == LAYERS else _checkpointed(model, model.module)


def plain(folder: Path) -> nn.Module:
    """The same by transformers and peft, with adapters in the base's dtype."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, trust_remote_code=False
    )
    model: nn.Module = get_peft_model(base, adapters(), autocast_adapter_dtype=False)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.to(torch.bfloat16)
    return _checkpointed(model, model)


def _checkpointed(model: M, module: Any) -> M:
    module.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def step_of(model: nn.Module, ids: Tensor) -> Callable[[], float]:
    optimizer = HybridAdam((p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def pair(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step of plain peft and of ours, in turns."""
    ids = inputs(args)
    models = {"plain": plain(args.base), "ours": ours(args.base, "cuda")}
    variants = {name: step_of(model, ids) for name, model in models.items()}
    first = {name: step() for name, step in variants.items()}
    seconds = interleaved(variants, args.steps, torch.device("cpu"))
    return {
        **{f"{name}_step_seconds": statistics.median(found) for name, found in seconds.items()},
        "overhead": median_ratio(seconds, "ours", "plain"),
        "first_losses": first,
    }


def inputs(args: argparse.Namespace) -> Tensor:
    """int64 [1, seq]: the same in every step."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (1, args.seq), generator=generator)


def under_a_budget(args: argparse.Namespace) -> dict[str, Any]:
    """What a run took, step by step, and what of it was planned."""
    nvme_dir = str(args.nvme_dir)
    order = args.order if args.accumulate > 1 else BATCHES
    model = ours(args.base, AutoPlacement(args.device_budget, nvme_dir=nvme_dir), order)
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # adapters were many small tensors before their chunk
    wrapped_rss = _rss_bytes()
    engine, ids = model.engine, inputs(args)
    optimizer = HybridAdam(model.parameters(), lr=LEARNING_RATE)
    losses, seconds, read, planned = [], [], [], []
    for _ in range(args.steps):
        files, before = engine.storage.frozen, engine.storage.traffic().nvme_read
        cool(args)
        started, forward = time.perf_counter(), 0.0
        if args.accumulate > 1:
            losses.append(accumulated(model, [ids] * args.accumulate, order))
        else:
            loss = model(input_ids=ids, labels=ids).loss
            forward = time.perf_counter() - started
            cool(args)
            started = time.perf_counter()
            loss.backward()
            losses.append(float(loss.item()))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(forward + time.perf_counter() - started)
        iterations = args.accumulate if order == BATCHES else 1
        planned.append(iterations * engine.planning.plan.frozen_read_bytes)
        # files that a step has made or removed count from 0
        is_known = engine.storage.frozen is files
        read.append(engine.storage.traffic().nvme_read - before if is_known else None)
    peak = process_peak_rss_bytes()
    return {
        "losses": losses,
        "step_seconds": seconds,
        "bytes_read": read,
        "planned_read_bytes": planned,
        "peak_rss_bytes": peak,
        "parts": parts_of(model, wrapped_rss),
        "read_gb_per_s": read_gb_per_s(model, args),
        "frozen_file_bytes": engine.storage.frozen_file_bytes,
    }


def accumulated(model: GeminiDDP, parts: list[Tensor], order: str) -> float:
    """Mean loss of one accumulation. parts: int64 [1, seq] of each micro-batch."""
    given = [{"input_ids": ids, "labels": ids} for ids in parts]

    def share(output: Any, batch: Any) -> Tensor:
        loss: Tensor = output.loss / len(parts)
        return loss

    return float(sum(gemini.accumulate(model, given, share, order=order)))


def parts_of(model: GeminiDDP, wrapped_rss: int) -> dict[str, int]:
    """Bytes of what a run cannot do without: its least peak is their sum.

    libraries: what the process had when the module was wrapped, and none of its model data.
    """
    engine = model.engine
    frozen = [spec for spec in engine.layout.chunks if not spec.trainable]
    layers = [spec.payload_bytes for spec in frozen if spec.dtype == BYTES]
    trained = sum(spec.payload_bytes for spec in engine.layout.chunks if spec.trainable)
    rows = model.memory_report().rows
    measured = {row.kind: row.measured_bytes or 0 for row in rows if row.tier == "device"}
    return {
        "embedding_and_head": sum(s.payload_bytes for s in frozen if s.dtype != BYTES),
        "two_layers": 2 * max(layers),
        "adapters": 2 * trained + measured.get("state", 0),
        "activations": measured.get("non-model", 0),
        "libraries": wrapped_rss,
    }


def read_gb_per_s(model: GeminiDDP, args: argparse.Namespace) -> float:
    """GB (10**9) a second at which chunks of the base come from its files in this run."""
    files = model.engine.storage.frozen
    if files is None:
        return 0.0
    sizes = {chunk: model.engine.plan.chunks[chunk].shard_bytes for chunk in files}
    into = torch.empty(max(sizes.values()), dtype=torch.uint8)
    cool(args)
    started = time.perf_counter()
    for chunk, nbytes in sizes.items():
        dtype = model.engine.layout.chunks[chunk].dtype
        kind = torch.uint8 if dtype == BYTES else getattr(torch, dtype)
        files.read(chunk, into[:nbytes].view(kind)).wait()
    return sum(sizes.values()) / (time.perf_counter() - started) / 1e9


def cool(args: argparse.Namespace) -> None:
    """Where it is asked for, no page of the base's files stays in memory."""
    for path in base_files(args.nvme_dir) if args.cold else ():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def base_files(folder: Path) -> Iterator[Path]:
    return folder.glob("gemini-base-*")


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-3b")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--order", choices=ORDERS, default=LAYERS)
    parser.add_argument("--device-budget")
    parser.add_argument("--nvme-dir", type=Path)
    parser.add_argument("--json", type=Path)
    for flag in ("--make", "--pair", "--cold", "--hold"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    if args.make:
        make_base(args.base, args.shape)
        return
    result = pair(args) if args.pair else under_a_budget(args)
    part = args.json.with_suffix(".part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(args.json)
    if args.hold:
        sys.stdin.read()


if __name__ == "__main__":
    main()
