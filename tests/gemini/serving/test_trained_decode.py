"""Models that train, and decode between two steps: tokens of plain ones, planned as cycles."""

import copy

import pytest
import torch
import transformers

from bench.shared.simulated import SimBackend
from gemini import AutoPlacement, GeminiDDP
from optim import HybridAdam

KIB = 1024
CONFIG = {
    "hidden_size": 64, "vocab_size": 128, "num_attention_heads": 4, "intermediate_size": 176,
    "num_hidden_layers": 4, "num_key_value_heads": 2,
}  # fmt: skip
LONG, NEW = 12, 40


def llama():
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**CONFIG))


class Trained:
    """A Llama on the simulated device, whose long batches leave weights little room."""

    def __init__(self, kib):
        self.sim = SimBackend(1)
        self.model = GeminiDDP(
            llama(), self.sim, AutoPlacement(f"{kib}KiB", "64MiB"), min_chunk_size_m=0.005,
            search_range_m=0.0, max_norm=1.0, precision="fp32",
        )  # fmt: skip
        self.optimizer = HybridAdam(self.model.parameters(), lr=1e-2)
        self.generator = torch.Generator().manual_seed(1)
        self.gathered = []  # bytes, of each token

    def train(self, steps):
        for _ in range(steps):
            ids = torch.randint(128, (2, LONG), generator=self.generator)
            with self.sim.running():
                self.model(input_ids=ids, labels=ids).loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def generate(self, ids, new=NEW):
        manager = self.model.engine.manager
        sizes = [chunk.spec.payload_bytes for chunk in self.model.engine.chunks]
        before = [0]

        def count(*_):
            total = sum(n * sizes[chunk] for chunk, n in manager.gathers_of.items())
            self.gathered.append(total - before[0])
            before[0] = total

        count()
        self.gathered.clear()
        handle = self.model.module.register_forward_hook(count)
        self.model.eval()
        self.sim.pages.peak_device_bytes = 0
        try:
            with self.sim.running():
                return answers(self.model, ids, new)
        finally:
            handle.remove()
            self.model.train()


def answers(model, ids, new=NEW):
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
        pad_token_id=1,
    )  # fmt: skip


def prompts(count=2):
    return torch.randint(2, 128, (count, 6), generator=torch.Generator().manual_seed(2))


def plain_of(model):
    module = llama().eval()
    module.load_state_dict(copy.deepcopy(model.state_dict()))
    return module


@pytest.mark.parametrize("kib", [900, 1000, 1100, 1200, 1400, 1 << 14])
def test_tokens_are_plain_ones_and_what_has_room_is_read_once(kib):
    trained = Trained(kib).train(3)
    assert torch.equal(trained.generate(prompts()), answers(plain_of(trained.model), prompts()))
    print(kib, trained.gathered, trained.sim.peak_device_bytes // KIB)
    for trace in trained.model.engine.sampler.traces():
        print(trace.signature, trace.peak_non_model_bytes)
    print(trained.model.memory_report())
