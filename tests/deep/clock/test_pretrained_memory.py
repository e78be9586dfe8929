"""What loading and saving a folder of Hugging Face's take beside the model."""

import subprocess
import sys

from tests.integrations.cases.trainer_runs import model_and_data

MEMORY = """
import gc, re, sys
import torch
import transformers
from gemini import load_pretrained
from gemini.checkpoint.pretrained import write_weights

large, small, back = sys.argv[1:]
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

peak = 0
def watched(method):
    def call(*args, **options):
        global peak
        result = method(*args, **options)
        peak = max(peak, anonymous())
        return result
    return call

write_weights(back + "/small", load_pretrained(small))  # what is imported and made once
gc.collect()
torch.Tensor.copy_, torch.Tensor.to = watched(torch.Tensor.copy_), watched(torch.Tensor.to)
before = anonymous()
model = load_pretrained(large, precision="bf16", min_chunk_size_m=0.5, search_range_m=0.5)
loading, before, peak = peak - before, anonymous(), 0
write_weights(back + "/large", model)
print(loading, peak - before, sum(p.numel() for p in model.parameters()))
"""


def test_loading_and_saving_take_no_second_copy(tmp_path):
    """bf16 weights and fp32 originals are 6 bytes a parameter; a chunk on its way is 6 more, and
    a whole one of 2**20 elements that is written is 4 and its copy 4.

    24 MiB: what the allocator keeps of freed buffers.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=512, n_layer=8, n_head=8, vocab_size=1000, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf", max_shard_size="20MB")
    model_and_data()[0].save_pretrained(tmp_path / "small")
    places = [str(tmp_path / name) for name in ("hf", "small", "back")]
    out = subprocess.run(
        [sys.executable, "-c", MEMORY, *places],
        check=True,
        capture_output=True,
        text=True,
        encoding="utf-8",
    ).stdout
    loading, saving, numel = map(int, out.split()[-3:])
    chunk, slack = 2**20, 24 * 2**20
    assert numel > 25e6
    assert loading < 6 * (numel + chunk) + slack
    assert saving < 8 * chunk + slack
