"""What only a GPU can show: no synchronisation, CUDA graphs, launches a step, memory in time.

`bench.gpu` has a section for each of these.
"""

import pytest
import torch
from torch import nn

from gemini import GeminiDDP, StaticPlacement
from optim import HybridAdam, HybridMuon, NvmeConfig
from optim.adam import AdamRule
from optim.rules.clipping import Clip
from optim.state.pieces import Piece
from optim.update.triton_update import TritonUpdater
from tests.support.plain_training import update_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RULE = AdamRule()
HYPER = RULE.hyper(
    {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1,
        "adamw_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False,
    }
)  # fmt: skip


@pytest.fixture
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def five_hundred_tensors():
    params = [nn.Parameter(torch.randn(1 + 37 * i, device="cuda")) for i in range(500)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def test_a_step_on_a_plain_module_never_waits(no_synchronisation):
    torch.cuda.set_sync_debug_mode("default")
    params = five_hundred_tensors()
    optimizer = HybridAdam(params, lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        schedule.step()
        optimizer.step()


def steps_without_a_wait(precision, max_norm):
    """The report of the last one."""
    torch.cuda.set_sync_debug_mode("default")
    model = GeminiDDP(
        nn.Sequential(nn.Linear(64, 999), nn.Linear(999, 64)),
        precision=precision,
        max_norm=max_norm,
    )
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    x = torch.randn(8, 64, device="cuda")
    for step in range(4):
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        model(x).float().pow(2).mean().backward()
        if max_norm == 0:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    return optimizer.last_report


PRECISIONS = pytest.mark.parametrize(
    ("precision", "max_norm"), [("bf16", 1.0), ("fp16", 1.0), ("fp16", 0.0)]
)


@PRECISIONS
def test_a_step_of_an_engine_never_waits(no_synchronisation, precision, max_norm):
    """With the loss scale too, and with a clip that is called for each step."""
    steps_without_a_wait(precision, max_norm)


@pytest.mark.values
@PRECISIONS
def test_the_report_of_a_step_is_read_later(no_synchronisation, precision, max_norm):
    report = steps_without_a_wait(precision, max_norm)
    assert report.grad_norm > 0 and not report.skipped


def pieces_and_slabs(numels=(1000, 4096, 100_003)):
    total = sum(-(-n // 64) * 64 for n in numels)
    slabs = {name: torch.zeros(total, device="cuda") for name in ("exp_avg", "exp_avg_sq")}
    pieces, at = [], 0
    for i, n in enumerate(numels):
        planes = tuple(slab[at : at + n] for slab in slabs.values())
        param, grad = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
        pieces.append(Piece(param, grad, None, planes, HYPER, 0, i))
        at += -(-n // 64) * 64
    return pieces, slabs


@pytest.mark.values
def test_a_step_is_captured_in_a_graph_and_replayed():
    runs = []
    for captured in (False, True):
        torch.manual_seed(0)
        pieces, slabs = pieces_and_slabs()
        updater = TritonUpdater(RULE, [0] * 3, torch.device("cuda"))
        updater.set_limits(Clip(max_norm=0.5))

        def step(updater=updater, pieces=pieces, slabs=slabs):
            updater.measure(pieces)
            updater.begin([HYPER], with_norm=True)
            updater.update(pieces, slabs)

        step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            for _ in range(3):
                graph.replay()
        else:
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        assert updater.steps.tolist() == [4, 4, 4]
        runs.append([piece.param.clone() for piece in pieces])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.values  # the profiler asks the device
def test_norm_clip_and_update_of_500_tensors_are_at_most_three_launches():
    """Sums of tiles; the prologue, which finishes them; the update."""
    pieces, slabs = pieces_and_slabs([1 + 37 * i for i in range(500)])
    updater = TritonUpdater(RULE, [0] * 500, torch.device("cuda"))
    updater.set_limits(Clip(max_norm=0.5))
    with torch.profiler.profile() as profile:
        for turn in range(2):
            if turn:
                torch.cuda.synchronize()
            updater.measure(pieces)
            updater.begin([HYPER], with_norm=True)
            updater.update(pieces, slabs)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    ours = [name for name in kernels if name.endswith("_kernel")]
    assert len(ours) <= 2 * 3


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_muon_on_a_gpu_is_torchs(fraction):
    """The same operators on the same matrices; what undoes a step leaves room for none."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    start = [torch.randn(s, device="cuda", generator=generator) for s in ((96, 160), (64, 33))]
    ours, theirs = ([nn.Parameter(p.clone()) for p in start] for _ in range(2))
    optimizers = [
        HybridMuon(ours, lr=0.1, nvme_offload_fraction=fraction),
        torch.optim.Muon(theirs, lr=0.1),
    ]
    for _ in range(3):
        for mine, his in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, device="cuda", generator=generator)
            his.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert update_error(ours, theirs, start) < 1e-6


def test_muon_over_shards_steps_with_state_on_nvme():
    """Blocks of a matrix wait for each other, each with weights on their way to the host."""
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    model = GeminiDDP(
        module, "cuda", StaticPlacement(), precision="fp32", min_chunk_size_m=64 * 64 / 2**20
    )
    optimizer = HybridMuon(
        model, lr=0.1, nvme=NvmeConfig(block_numel=1024), nvme_offload_fraction=1.0
    )
    model.engine.control_vector.scale.copy_(torch.tensor(1.0))  # no kernel of the stub wrote it
    for _ in range(3):
        model(torch.ones(4, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.last_report.update_path == "torch"
    optimizer.close()


@pytest.mark.values
@pytest.mark.parametrize("params", [0.0, 1.0])
def test_memory_is_not_handed_on_before_updates_beside_have_read_it(params):
    """Layers whose forward is over long before their state has come."""
    weights = []
    for update in ("serial", "tail"):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(1537, 1537) for _ in range(12)))
        model = GeminiDDP(
            module, "cuda", StaticPlacement(1.0, 1.0, params), min_chunk_size_m=3, update=update,
            max_norm=0.1,
        )  # fmt: skip
        optimizer = HybridAdam(model.parameters(), lr=1e-3, nvme=NvmeConfig(block_numel=1 << 18))
        for step in range(6):
            x = torch.full((64, 1537), 0.01 * (step + 1), device="cuda")
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        behind = optimizer.last_report.behind.wait()
        assert (behind.seconds > 0) == (update == "tail")
        weights.append([value.cpu() for value in model.state_dict().values()])
        optimizer.close()
    assert all(map(torch.equal, *weights))


def test_a_parked_module_gives_the_device_back_and_a_hook_runs_on_its_stream():
    model = GeminiDDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), precision="bf16")
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    stream, seen = torch.cuda.Stream(), []

    def hook(shard):
        seen.append((shard.device.type, torch.cuda.current_stream() == stream))

    model.set_all_reduce_hook(hook, stream=stream)
    for _ in range(2):
        model(torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = torch.cuda.memory_allocated()
        parked = model.park("host")
        assert parked.device == parked.to_host > 0 == parked.ram == parked.to_nvme
        assert torch.cuda.memory_allocated() == before - parked.device
        model.resume()
        assert torch.cuda.memory_allocated() == before
    assert set(seen) == {("cuda", True)}
    optimizer.close()
