"""Every code block of Colossal-AI's documents: run as it is, by a test of its own, or its names are
among those without a door. See blocks.toml."""

import ast
import os
import re
import sys
import tomllib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bench.shared.workers import run_processes
from gemini.integrations.colossalai import put_up
from gemini.integrations.config import global_context, plugin_of, read_config
from gemini.migrate import colossal
from tests.integrations.cases import documents
from tests.support.ports import free_port
from tests.support.said import said

ROOT = Path(__file__).resolve().parents[3]
BLOCKS, TESTED = documents.read()
CHAPTERS = list(dict.fromkeys(block["page"] for block in BLOCKS if "code" in block))


def test_each_block_is_run_or_said_to_have_no_door():
    table = tomllib.loads(colossal.TABLE.read_text(encoding="utf-8"))
    names = " ".join([row.get("title", "") for row in table["missing"]])
    names += "".join(f".{name}`" for name in colossal.names().missing)
    for block in BLOCKS:
        assert block["lines"] and len({"no_door", "code"} & block.keys()) == 1
        assert all(name in block["code"] for name in block.get("needs", ()))
        for name in block.get("no_door", ()):
            assert re.search(rf"[`.]{re.escape(name)}[`(]", names), name
    for test in TESTED:
        path, _, name = test.partition("::")
        functions = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        assert name in {getattr(node, "name", None) for node in functions}, test
    lines = [
        *((block["page"], n) for block in BLOCKS if "code" in block for n in block["lines"]),
        *((page, n) for pages in TESTED.values() for page, lines in pages.items() for n in lines),
    ]
    assert max(Counter(lines).values()) == 1


def module(name, **names):
    made = ModuleType(name)
    vars(made).update(names)
    return made


def tiny(num_classes=10, drop_rate=0.0):
    return nn.Sequential(nn.Flatten(), nn.Dropout(drop_rate), nn.Linear(48, num_classes))


class Small(nn.Module):
    """With the children of a ResNet."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.ReLU()
        self.maxpool, self.layer1, self.layer2 = nn.MaxPool2d(2), nn.Identity(), nn.Identity()
        self.layer3, self.layer4, self.avgpool = nn.Identity(), nn.Identity(), nn.AvgPool2d(2)
        self.fc = nn.Linear(2, 10)


class PatchEmbed(nn.Module):
    def __init__(self, img_size, patch_size, in_chans, embed_dim):
        super().__init__()
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class Block(nn.TransformerEncoderLayer):
    def __init__(self, dim, num_heads, **options):
        super().__init__(dim, num_heads, 2 * dim, dropout=0.0, batch_first=True)


def loaders(batch_size, *args, **options):
    return DataLoader(images(), batch_size), DataLoader(images(), batch_size)


def images(*args, **options):
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randn(24, 3, 4, 4, generator=draw)
    return TensorDataset(pixels, torch.randint(0, 10, (24,), generator=draw))


def small_world(needs):
    """What would be downloaded, in place of these packages: models, data and how it is changed."""
    models = module("torchvision.models", resnet34=tiny, resnet50=Small)
    data = module("torchvision.datasets", CIFAR10=images, Caltech101=images)
    vision = module("torchvision", models=models, datasets=data, transforms=MagicMock())
    parts = {"PatchEmbed": PatchEmbed, "Block": Block, "trunc_normal_": nn.init.trunc_normal_}
    vit = module("timm.models.vision_transformer", _init_vit_weights=lambda layer: None, **parts)
    timm = module("timm.models", vit_base_patch16_224=tiny, vision_transformer=vit)
    cifar = module("titans.dataloader.cifar10", build_cifar=loaders)
    made = {
        "torchvision": vision, "torchvision.models": models, "torchvision.datasets": data,
        "torchvision.transforms": vision.transforms, "timm": module("timm", models=timm),
        "timm.models": timm, "torchvision.models.resnet": MagicMock(), "titans": MagicMock(),
        "torch.utils.tensorboard": MagicMock(), "titans.dataloader": MagicMock(),
        "titans.dataloader.cifar10": cifar,
    }  # fmt: skip
    return {name: one for name, one in made.items() if name.partition(".")[0] in needs}


def needs_of(blocks):
    """Packages of all of them."""
    return {"torch", *(name for block in blocks for name in block.get("needs", ()))}


@pytest.fixture
def small(elsewhere, monkeypatch, tmp_path):
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    with suppress(ImportError):  # it looks for torchvision when its first model is imported
        from transformers import GPT2LMHeadModel  # noqa: F401
    put_up()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", CHAPTERS)
def test_the_code_of_a_page_runs_as_it_is(small, page, monkeypatch):
    names = {"__name__": "script"}
    blocks = [block for block in BLOCKS if block["page"] == page and "code" in block]
    needs = needs_of(blocks)
    if "transformers" in needs:
        pytest.importorskip("transformers")
    for name, made in small_world(needs).items():
        monkeypatch.setitem(sys.modules, name, made)
    for block in blocks:
        if "file" in block:
            Path(block["file"]).write_text(block["code"], encoding="utf-8")
            continue
        exec(compile(block["code"], f"{page}, line {block['lines'][0]}", "exec"), names)
        if "raises" in block:
            assert block["raises"] in said(lambda: plugin_of(names))
        elif "plugin" in block:
            plugin = plugin_of(read_config(names), zero_stage=1)
            parallel = names.get("parallel", {})
            assert (plugin.pp_size > 1) == ("pipeline" in parallel)
            assert (plugin.tp_size > 1) == ("tensor" in parallel)
            assert (plugin.precision == "fp16") == ("fp16" in names)


def _sized(rank, ranks, port, folder):
    """The blocks for so many ranks, in one process of each."""
    import transformers.models.gpt2  # noqa: F401, before what it looks for is small

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="localhost",
        MASTER_PORT=str(port), DATA=folder,
    )  # fmt: skip
    place = ("--rank", rank, "--world_size", ranks, "--port", port)
    sys.argv = ["script", *map(str, place)]
    torch.set_num_threads(1)
    torch.Tensor.cuda = lambda self: self
    put_up()
    blocks = [block for block in BLOCKS if block.get("ranks") == ranks]
    sys.modules.update(small_world(needs_of(blocks)))
    unconfigured = global_context.config
    ran = []
    for block in blocks:
        global_context.config = unconfigured
        code = block["code"]
        for here, there in block["sized"].items():
            assert here in code
            code = code.replace(here, there)
        names = {"__name__": "script"}
        exec(compile(code, f"{block['page']}, line {block['lines'][0]}", "exec"), names)
        if "spawned" in names:
            names["spawned"](rank, ranks, port)
        assert dist.get_world_size() == ranks
        ran.append(block["page"])
    dist.destroy_process_group()
    return ran


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_code_for_several_ranks_runs_on_as_many(ranks, tmp_path):
    pytest.importorskip("transformers")
    found = run_processes(_sized, ranks, ranks, free_port(), str(tmp_path))
    pages = [block["page"] for block in BLOCKS if block.get("ranks") == ranks]
    assert pages and found == [pages] * ranks
