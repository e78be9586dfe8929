"""RAM of a process that no plan counts, measured in one that trains small models.

Their products are too small for oneDNN, so the floor has none of its code in it: what a model has
compiled is counted by the model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from torch.utils.checkpoint import checkpoint

from gemini.ddp import GeminiDDP
from gemini.memtracer.monitor import resident_bytes
from gemini.optim import HybridAdam, StepReport

HIDDEN, ROWS = 16, 8
LAYERS = 96  # whose parameters are counted
WIDTH, PRODUCTS = 128, 24  # numbers of rows of a layer that has three products of each
UPDATED = 1 << 20  # elements of a layer: more than a tile of an update
STEPS = 2


class _Layers(nn.Module):
    """Stack of small linear layers, called as checkpointed blocks are."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(count))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = rows + silu(checkpoint(layer, rows, use_reentrant=False))
        return cross_entropy(rows.float(), torch.zeros(len(rows), dtype=torch.int64))


def measure() -> dict[str, int]:
    """Bytes of this process, which trains for it.

    floor: interpreter, libraries and threads, with what malloc keeps of them: 9 MiB of a heap in
        which other objects lie by then.
    product: code of one matrix product in 16 bits that the processor compiles; 0: it compiles none.
    parameter: objects of one wrapped parameter, and its share of its module.
    thread: one tile of scratch in all threads that update, and what else these take.
    """
    for update, fraction in (("tail", 1.0), ("serial", 0.0)):
        _train_small(update, fraction)
    _multiply(1, ROWS)
    floor, before = resident_bytes(trimmed=False), resident_bytes()
    layers = _Layers(LAYERS)
    _train(layers, {"rows": torch.ones(ROWS, HIDDEN)}, "serial", 0.0)
    numel = sum(param.numel() for param in layers.parameters())
    objects = resident_bytes() - before - 4 * numel
    del layers
    before = resident_bytes()
    _multiply(PRODUCTS, ROWS * ROWS)
    product = (resident_bytes() - before) // (3 * PRODUCTS)
    found = {
        "floor": floor, "product": product, "parameter": objects // 2 // LAYERS,
        "thread": _thread_bytes(),
    }  # fmt: skip
    return {name: max(0, nbytes) for name, nbytes in found.items()}


def measured() -> dict[str, int] | None:
    """Measurement of a new process, which has loaded what a run loads; None where none can."""
    done = subprocess.run(
        [sys.executable, "-m", __name__], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        encoding="utf-8",
    )  # fmt: skip
    if done.returncode:  # a kernel that does not begin VmHWM anew, say
        return None
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def _train_small(update: str, fraction: float) -> None:
    """Train a model of transformers, plain and with adapters; layers alone where there is none."""
    _train(_Layers(1), {"rows": torch.ones(ROWS, HIDDEN)}, update, fraction)
    try:
        import transformers
        from peft import LoraConfig, get_peft_model
    except ImportError:
        return
    config = transformers.LlamaConfig(
        vocab_size=HIDDEN, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    ids = torch.zeros(1, ROWS, dtype=torch.int64)
    for has_adapters in (False, True):
        model: Any = transformers.LlamaForCausalLM(config)
        model.gradient_checkpointing_enable()
        if has_adapters:
            model.enable_input_require_grads()
            model = get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj"]))
        _train(model, {"input_ids": ids, "labels": ids, "use_cache": False}, update, fraction)


def _train(model: nn.Module, inputs: dict[str, Any], update: str, fraction: float) -> None:
    wrapped = GeminiDDP(model, device="cpu", update=update)
    trained = [param for param in wrapped.parameters() if param.requires_grad]
    optimizer = HybridAdam(trained, lr=0.0, nvme_offload_fraction=fraction)
    for _ in range(STEPS):
        outputs = wrapped(**inputs)
        (outputs if isinstance(outputs, Tensor) else outputs.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    _wait(optimizer.last_report)
    optimizer.close(keep_masters=False)


def _thread_bytes() -> int:
    """Bytes that updates in a thread have touched, beside parameters, state and gradients."""
    before = resident_bytes()
    wrapped = GeminiDDP(nn.LayerNorm(UPDATED), device="cpu", update="tail")
    optimizer = HybridAdam(wrapped.parameters(), lr=0.0)
    for _ in range(STEPS):
        wrapped(torch.ones(1, UPDATED)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    _wait(optimizer.last_report)
    kept = resident_bytes() - before
    optimizer.close(keep_masters=False)
    return kept - 2 * UPDATED * (2 + 12)


def _wait(report: StepReport | None) -> None:
    """Wait for the tail of a step."""
    if report is not None:
        report.behind.wait()


def _multiply(count: int, first: int) -> None:
    """Forward and backward of a layer with `count` numbers of rows."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    for rows in range(first, first + count):
        values = torch.ones(rows, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        layer(values).sum().backward()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()) + "\n")
