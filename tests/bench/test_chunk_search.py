import json
import sys

import pytest

from bench import chunk_search
from gemini.chunk.sizing.search import repeated_blocks, search_chunk_configuration
from gemini.plan import models

MUST_REACH = [
    "gpt2", "gpt2-xl", "bert-large", "t5-large", "opt-6.7b", "llama-7b", "llama-70b", "mixtral-8x7b"
]  # fmt: skip
NUMELS = {  # as published, tied parameters once
    "gpt2": 124_439_808,
    "bert-large": 336_226_108,
    "t5-large": 737_668_096,
    "opt-6.7b": 6_658_473_984,
    "llama-7b": 6_738_415_616,
    "llama-70b": 68_976_648_192,
    "mixtral-8x7b": 46_702_792_704,
    "vit-base": 86_567_656,
}


@pytest.mark.parametrize("name", sorted({*MUST_REACH, *NUMELS}))
def test_known_models_waste_little_or_it_is_said_what_that_would_cost(name):
    model = models.build(name)
    assert all(param.is_meta for param in model.parameters())
    found = search_chunk_configuration(model)
    assert found.used_numel == sum(param.numel() for param in model.parameters())
    assert found.used_numel == NUMELS.get(name, found.used_numel)
    assert found.persistent_waste_fraction <= 0.001
    (group,) = found.groups
    if found.gathered_waste_fraction > 0.01:
        for packing in group.candidates:
            dear = packing.peak_gathered_bytes > 1.1 * group.chosen.peak_gathered_bytes
            assert dear or group.waste_fraction(packing) > 0.01
        assert "left over at most 1% would cost +" in chunk_search.report(name, found)
    largest = max(param.numel() for param in model.parameters())
    assert group.capacity <= max(largest, repeated_blocks(found.layout.params).largest_numel)
    assert found.num_chunks >= 8


def test_large_models_waste_at_most_one_percent():
    for name in ("gpt2-xl", "t5-large", "opt-6.7b", "llama-7b", "llama-70b", "mixtral-8x7b"):
        assert search_chunk_configuration(models.build(name)).gathered_waste_fraction <= 0.01


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["chunk_search", *map(str, arguments)])
    chunk_search.main()


def test_command_writes_a_table_json_and_a_picture(monkeypatch, tmp_path, capsys):
    where = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ("--model", "gpt2", "--world-size", 3, "--json", where[0], "--plot", where[1])
    run(monkeypatch, *arguments)
    printed = capsys.readouterr().out
    assert "used number: 118.68 Mi elements" in printed
    assert "| state on NVMe |" in printed
    result = json.loads(where[0].read_text(encoding="utf-8"))
    assert result["model"] == "gpt2" and result["used_numel"] == 124_439_808
    chosen = [c for c in result["candidates"] if c["chosen"]]
    assert [c["capacity"] for c in chosen] == [result["capacity"]]
    assert chosen[0]["num_chunks"] == result["num_chunks"]
    assert chosen[0]["gathered_waste_fraction"] == result["gathered_waste_fraction"]
    # a third of the state, each chunk's shard up to 255 elements longer
    state = result["bytes_per_rank"]["state on NVMe"]["nvme"]
    assert 0 <= state - 12 * 124_439_808 / 3 <= 12 * 256 * result["num_chunks"]
    assert where[1].read_bytes().startswith(b"\x89PNG")
