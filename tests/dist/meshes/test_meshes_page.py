"""docs/meshes.md: its blocks run, and what goes with what is tried and not claimed."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gemini
from bench.shared.models import Routed, seeded
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.integrations import HybridParallelPlugin
from optim import HybridAdam

pytestmark = pytest.mark.ci
PAGE = Path(__file__).resolve().parents[3] / "docs/meshes.md"
COLUMNS = {
    "replicas": ("replicate", "shard"),
    "tensor parallel": ("dp", "tp"),
    "experts": ("efsdp", "ep"),
}


class Two(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        with seeded():
            self.norm = nn.LayerNorm(16, device=device)
            self.up = nn.Linear(16, 36, device=device)
            self.down = nn.Linear(36, 16, device=device)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


def plain(column):
    with seeded():
        return Routed(4, 16, 36) if column == "experts" else Two()


class Maker:
    """Wraps a module as a column of the table says, with the options of a row."""

    def __init__(self, column, folder):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=COLUMNS[column])
        self.column, self.folder = column, folder
        self.weight = "experts.up" if column == "experts" else "up.weight"  # a split one

    def model(self, module=None, **options):
        module = plain(self.column) if module is None else module
        if self.column == "experts":
            module.experts.split(self.mesh["ep"])
        if self.column == "tensor parallel":
            from torch.distributed.tensor.parallel import (
                ColwiseParallel,
                RowwiseParallel,
                parallelize_module,
            )

            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(module, self.mesh["tp"], plan)
        return GeminiDDP(module, mesh=self.mesh, min_chunk_size_m=0.001, **options)

    def trained(self, adam=(), **options):
        model = self.model(**options)
        optimizer = HybridAdam(model.parameters(), lr=1e-2, **dict(adam))
        self.backward(model)
        return model, optimizer

    @staticmethod
    def backward(model, factor=1.0):
        x = torch.ones(3, 16) * (1 + dist.get_rank() // 2) * factor
        model(x).float().pow(2).sum().backward()

    def step(self, adam=(), **options):
        model, optimizer = self.trained(adam, **options)
        optimizer.step()
        assert not optimizer.last_report.skipped
        return model, optimizer


def stages(make):
    for stage in ("zero1", "zero2", StaticPlacement(1.0)):
        make.step(placement_policy=stage)


def budget(make):
    model, _ = make.step(placement_policy=AutoPlacement(device_budget="1GiB", nvme_dir=make.folder))
    assert "total" in str(model.memory_report()) and model.explain(make.weight)


def state_on_nvme(make):
    model, optimizer = make.step(
        adam={"nvme_offload_fraction": 1.0, "nvme_offload_dir": make.folder}
    )
    with optimizer.parked("nvme"):
        pass
    make.backward(model)
    optimizer.step()
    optimizer.close()


def accumulation(make):
    model = make.model(max_norm=0.5)
    optimizer = HybridAdam(model.parameters())
    with model.no_sync():
        make.backward(model)
    make.backward(model)
    optimizer.step()
    assert optimizer.last_report.grad_norm > 0


def skip(make):
    model, optimizer = make.trained()
    optimizer.zero_grad()
    make.backward(model, math.inf if dist.get_rank() == 3 else 1.0)
    before = model.state_dict()
    optimizer.step()
    after = model.state_dict()
    assert optimizer.last_report.skipped
    assert all(torch.equal(after[name], value) for name, value in before.items())


def state_dicts(make):
    model, optimizer = make.step()
    saved = model.state_dict(), optimizer.state_dict()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])


def checkpoints(make):
    model, optimizer = make.step()
    path = f"{make.folder}/{make.column}"
    gemini.save_checkpoint(path, model, optimizer)
    gemini.save_checkpoint(f"{path}-later", model, optimizer, async_save=True).wait()
    gemini.load_checkpoint(path, model, optimizer)


def whole_gradients(make):
    model, _ = make.trained()
    assert {n: g.shape for n, g in model.named_gradients()} == {
        n: p.shape for n, p in plain(make.column).named_parameters()
    }
    model.map_gradients(lambda name, part: part.mul_(0.5))


def leaving(make):
    model, _ = make.step()
    with model.summon_full_params():
        wanted = {
            name: getattr(param.detach(), "full_tensor", param.detach)().clone()
            for name, param in model.module.named_parameters()
        }
    found = {}
    for bucket in model.weights(bytes="100B"):
        found |= {name: value.clone() for name, value in bucket.tensors.items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def parks(make):
    model, optimizer = make.step(placement_policy=AutoPlacement(nvme_dir=make.folder))
    before = model.digest()
    assert model.park("nvme").ram > 0
    model.resume()
    assert model.digest() == before
    optimizer.close()


def hooked(make):
    found = []
    for factor in (1.0, 0.5):
        model = make.model()
        model.set_all_reduce_hook(lambda shard, by=factor: shard.mul_(by))
        make.backward(model)
        found.append({name: g.clone() for name, g in model.named_gradients()})
    whole, half = found
    assert any(torch.any(g != 0) for g in whole.values())
    assert all(torch.equal(half[name], g * 0.5) for name, g in whole.items())


def grad(make):
    model, _ = make.trained()
    assert model.module.get_parameter(make.weight).grad is not None


def whole_parameters(make):
    model, _ = make.step()
    shape = plain(make.column).get_parameter(make.weight).shape
    with model.summon_full_params():
        assert model.module.get_parameter(make.weight).shape == shape
    assert model.unwrap().get_parameter(make.weight).shape == shape


def unfreezing(make):
    module, name = plain(make.column), make.weight.split(".")[0]
    module.get_submodule(name).requires_grad_(False)
    model = make.model(module)
    optimizer = HybridAdam(model.parameters())
    make.backward(model)
    optimizer.step()
    model.module.get_submodule(name).requires_grad_(True)
    make.backward(model)
    optimizer.step()


def empty(make):
    with gemini.init_empty():
        module = plain(make.column)
    make.model(module)


ROWS = {
    "ZeRO-1, 2 and 3": stages,
    "`AutoPlacement`, `memory_report`, `explain`": budget,
    "state on NVMe, parking": state_on_nvme,
    "accumulation, `no_sync`, clipping": accumulation,
    "skipped steps": skip,
    "`state_dict` of model and optimizer": state_dicts,
    "checkpoints, asynchronous too": checkpoints,
    "`named_gradients`, `map_gradients`": whole_gradients,
    "`weights()`": leaving,
    "`park`, `resume`": parks,
    "`set_all_reduce_hook`": hooked,
    "`p.grad`": grad,
    "`summon_full_params`, `unwrap`": whole_parameters,
    "unfreezing": unfreezing,
    "without fp32 masters": lambda make: make.step(master_weights=False),
    "`communication_dtype`": lambda make: make.step(communication_dtype="fp32"),
    "`overlap_allgather`": lambda make: make.step(
        placement_policy="zero2", overlap_allgather=True
    ),
    "fp16": lambda make: make.step(precision="fp16", loss_scale=8.0),
    "`trace=`": lambda make: make.model(
        trace=gemini.trace(Two(), (torch.ones(3, 16),), precision="bf16")
    ),
    "`init_empty`": empty,
    "`init_state_dict=`": lambda make: make.model(
        init_state_dict=plain(make.column).state_dict()
    ),
}  # fmt: skip


def tried(rank, folder):
    table = []
    for name, row in ROWS.items():
        cells = []
        for column in COLUMNS:
            try:
                row(Maker(column, folder))
                cells.append("yes")
            except (ValueError, RuntimeError) as error:
                cells.append(f"refused: {error}")
        table.append((name, cells))
    run_page(folder)
    return table


def run_page(folder):
    names = {"GeminiDDP": GeminiDDP, "model": Two(), "split": Two(), "routed": plain("experts")}
    blocks = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    (shared,) = (block for block in blocks if "HybridParallelPlugin" in block)
    blocks.remove(shared)  # whose model is one of transformers: `test_sequences.py` trains those
    exec(shared.partition("loss = ")[0], {"HybridParallelPlugin": HybridParallelPlugin})
    (searched,) = (block for block in blocks if "autoparallelize" in block)
    blocks.remove(searched)  # of 64 ranks, who are asked about and not there
    asked = {"gemini": gemini, "model": torch.nn.Linear(3, 2), "batch": torch.ones(64, 3)}
    exec(searched.partition("model, optimizer")[0], asked)
    assert asked["plugin"].found.cluster.ranks == 64
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
        Maker.backward(names["model"])


def test_the_table_of_the_page_is_what_happens_and_its_blocks_run(tmp_path):
    results = run_ranks(tried, 4, str(tmp_path), processes=True)
    assert all(table == results[0] for table in results)
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, cells in results[0]:
        shown = ["refused" if cell.startswith("refused") else cell for cell in cells]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    refusals = [cell for _, cells in results[0] for cell in cells if cell != "yes"]
    assert all("expected" in said or "use model." in said for said in refusals), refusals
    page = PAGE.read_text(encoding="utf-8")
    shown = page.split("<!-- table meshes -->\n")[1].split("<!-- end -->")[0].strip().splitlines()
    assert shown == lines, "\n".join(lines)
