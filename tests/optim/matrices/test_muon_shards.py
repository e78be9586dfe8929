"""HybridMuon over shards, and HybridLamb: the same bits in every home and at any number of ranks;
faults."""

import functools

import pytest
import torch
from torch import nn

import gemini
from bench.shared.models import seeded
from bench.shared.simulated.copies import copies_of
from bench.shared.threads import run_threads
from gemini import AutoPlacement, GeminiDDP
from gemini.placement.sizes import BudgetError
from gemini.units import PAGE_BYTES, align_up
from optim import HybridLamb, HybridMuon, NvmeConfig
from optim.matrices.sites import DeviceSite
from optim.matrices.updater import MatrixUpdater
from optim.rules import matrix_rule
from optim.rules.orthogonal import orthogonal
from tests.golden import bits as program
from tests.support.loops.tails import differences, everything, on_host
from tests.support.plain_training import update_error

KINDS = ("bf16", "fp32", "rounded", "fp16")


def _muon(params, cpu_path="auto", **places):
    params = list(params)
    groups = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() < 2], "use_muon": False},
    ]
    return HybridMuon(groups, lr=1e-2, **places)


def _lamb(params, **places):
    return HybridLamb(params, lr=1e-2, weight_decay=0.01, **places)


# LAMB's blocks are updated behind the next forward; Muon's never are
RULES = {"muon": (_muon, "serial"), "lamb": (_lamb, "tail")}
ROOMY = {"files": "files of more room"}  # which a matrix of Muon's needs
HOMES = {
    "muon": [ROOMY.get(home, home) for home in list(program.HOMES)[1:]],
    "lamb": list(program.HOMES)[1:],
}
DEVICES = {
    "muon": ("device", "device, host", "device, host, disk", "disk"),
    "lamb": ("device", "host"),
}


@pytest.fixture(autouse=True)
def of_the_program(monkeypatch):
    """The golden program (it clips, skips, accumulates, leaves out, resumes) with these rules."""
    for rule, (make, _) in RULES.items():
        monkeypatch.setitem(program.RULES, rule, make)
        for kind in KINDS:
            monkeypatch.setitem(program.KINDS, f"{rule}, {kind}", (rule, kind))
    for home, options in {
        "on device": {"state": 0.0},
        "on host": {},
        "on disk": {"disk": 1.0},
        "on device, host": {"state": 0.6},
        "on device, host, disk": {"params": 0.5, "grads": True, "state": 0.8, "disk": 0.4},
    }.items():
        make = functools.partial(on_host, "stream", **options)
        monkeypatch.setitem(program.HOMES, home, make)
    roomy = lambda: {**program._in_files(), "placement_policy": AutoPlacement("2MiB")}  # noqa: E731
    monkeypatch.setitem(program.HOMES, ROOMY["files"], roomy)


def _bits(rule, kind, home, folder, num_ranks=1):
    def work(rank):
        return program.bits(f"{rule}, {kind}", home, RULES[rule][1], folder)

    if num_ranks == 1:
        return work(0)
    return run_threads(work, num_ranks, backend="gloo")[0]


def _cells(homes):
    """Of each home one kind while editing, two to land, and all."""
    marks = ([], [pytest.mark.ci], [pytest.mark.deep], [pytest.mark.deep])
    return [
        pytest.param(rule, home, kind, marks=marks[(i + j) % len(KINDS)])
        for rule in RULES
        for i, home in enumerate(homes[rule])
        for j, kind in enumerate(KINDS)
    ]


@pytest.mark.parametrize(("rule", "home", "kind"), _cells(HOMES))
def test_bits_do_not_depend_on_where_state_lives(rule, home, kind, tmp_path):
    want = _bits(rule, kind, "resident", tmp_path / "resident")
    assert _bits(rule, kind, home, tmp_path / "there") == want


@pytest.mark.parametrize(("rule", "home", "kind"), _cells(DEVICES))
def test_a_device_has_the_bits_of_the_host(rule, home, kind, tmp_path, monkeypatch):
    """A norm of kernels is another's by its last bit: where that shows, no step clips."""
    clips, steps = 2, list(program.STEPS)
    if rule == "muon" or kind == "rounded":
        steps[clips] = steps[1]
    monkeypatch.setattr(program, "STEPS", tuple(steps))
    want = _bits(rule, kind, "resident", tmp_path / "resident")
    assert _bits(rule, kind, f"on {home}", tmp_path / "there") == want


@pytest.mark.parametrize(
    ("num_ranks", "rule", "home"),
    [
        (2, "muon", "partly on disk"),
        (2, "lamb", "partly on disk"),
        *(
            pytest.param(*case, marks=pytest.mark.ci)
            for case in (
                (2, "muon", ROOMY["files"]), (2, "lamb", "files"), (4, "muon", "disk"),
                (4, "muon", "resident"), (4, "lamb", "resident"),
            )
        ),
    ],
)  # fmt: skip
def test_bits_do_not_depend_on_the_number_of_ranks(num_ranks, rule, home, tmp_path):
    """Gradients are exact sums: one rank's part of a loss that no rank's data changes."""
    kind = KINDS[(num_ranks + len(home)) % 2] if rule == "muon" else "bf16"
    many = _bits(rule, kind, home, tmp_path / "many", num_ranks)
    assert many == _bits(rule, kind, home, tmp_path / "one")


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_clipped_updates_are_torchs(fraction):
    """Clipping changes what a gradient adds to the momentum, and no direction. In fp32: iterations
    in bf16 make 1 % of the last bit of a norm."""
    model, optimizer = _made(fraction, precision="fp32")
    optimizer.param_groups[0]["ns_dtype"] = "fp32"
    plain, start = _net(), _net()
    theirs = HybridMuon(plain, lr=0.02, ns_dtype="fp32")
    for step in range(3):
        x = torch.arange(16).add(7 * step) % 50
        for module in (model, plain):
            module(x).square().sum().backward()
        optimizer.clip_grad_norm_(0.5 / 4**step)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5 / 4**step)
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    with model.summon_full_params(writeback=False):
        ours = list(model.module.parameters())
        assert update_error(ours, list(plain.parameters()), list(start.parameters())) < 1e-5
    optimizer.close()


# -- two ranks -----------------------------------------------------------------------------------


def _net():
    with seeded():
        return nn.Sequential(
            nn.Embedding(50, 48), nn.Linear(48, 130), nn.Tanh(), nn.LayerNorm(130),
            nn.Linear(130, 64), nn.Tanh(), nn.Linear(64, 48, bias=False),
        )  # fmt: skip


MATRICES = 3


def _made(fraction, **options):
    model = GeminiDDP(_net(), **options)
    nvme = NvmeConfig(block_numel=1024)
    return model, HybridMuon(model, lr=0.02, nvme_offload_fraction=fraction, nvme=nvme)


def _train(model, optimizer, first, last, accumulate=1):
    for step in range(first, last):
        x = torch.arange(16).add(7 * step) % 50
        for _ in range(accumulate):
            (model(x).float().square().sum() / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_all_ranks_together_make_a_matrix_orthogonal_once_a_step(fraction, monkeypatch):
    """However often gradients are added up; and each owns some of the work."""
    made = []
    monkeypatch.setattr(
        matrix_rule, "orthogonal", lambda x, *a, **k: made.append(1) or orthogonal(x, *a, **k)
    )

    def work(rank):
        before = len(made)
        model, optimizer = _made(fraction)
        _train(model, optimizer, 0, 2, accumulate=4)
        optimizer.close()
        return before

    run_threads(work, 2, backend="gloo")
    assert len(made) == 2 * MATRICES


@pytest.mark.parametrize("fails", [0, 1])
def test_a_rank_that_fails_keeps_nobody_waiting_and_no_rank_steps(fails, monkeypatch):
    """What others exchange goes on to its end; the next step is as if nothing had been."""
    real = MatrixUpdater.update_block

    def work(rank):
        model, optimizer = _made(1.0)
        _train(model, optimizer, 0, 1)
        before, broken = model.digest(), []

        def breaks(self, block, planes, views):
            if rank == fails and len(broken) == 2:
                broken.append(block)
                raise OSError("on purpose")
            broken.append(block)
            return real(self, block, planes, views)

        optimizer.targets[0].executor.updater_of = _patched(
            optimizer.targets[0].executor.updater_of, breaks
        )
        with pytest.raises((OSError, RuntimeError), match="on purpose"):
            _train(model, optimizer, 1, 2)
        del optimizer.targets[0].executor.updater_of
        assert model.digest() == before
        optimizer.zero_grad()
        _train(model, optimizer, 1, 2)
        found = model.digest()
        optimizer.close()
        return found

    found = run_threads(work, 2, backend="gloo")
    model, optimizer = _made(0.0)
    _train(model, optimizer, 0, 2)
    assert found == [model.digest()] * 2


def _patched(make, staged):
    def made(*args):
        updater = make(*args)
        updater.update_block = lambda *given: staged(updater, *given)
        return updater

    return made


def test_a_step_that_fails_on_a_device_while_blocks_wait_changes_nothing(monkeypatch):
    """Each block that waits has weights of its own to go back to, and no copy fills its buffer when
    that is another's."""
    model, optimizer = program.made("muon, fp32", "on disk", "serial")
    program.backward(model, optimizer, 0.5)
    before, taken_in, real = everything(model, optimizer), [], MatrixUpdater.update_block
    momenta, take_back = [], DeviceSite.take_back

    def breaks(self, block, planes, views):
        if len(taken_in) == 3:
            raise MemoryError("on purpose")
        taken_in.append(block.id)
        updates = real(self, block, planes, views)
        assert self.is_waiting(block)
        return updates

    def leaves(*given):
        momenta.append(take_back(*given))
        return momenta[-1]

    join, under_way = MatrixUpdater.join, []

    def joins(self):
        join(self)  # and what comes behind it gives the buffers to others
        under_way.extend(copy for copies in momenta for copy in copies_of(copies))

    monkeypatch.setattr(DeviceSite, "take_back", leaves)
    monkeypatch.setattr(MatrixUpdater, "update_block", breaks)
    monkeypatch.setattr(MatrixUpdater, "join", joins)
    with pytest.raises(MemoryError, match="on purpose"):
        optimizer.step()
    assert len(momenta) == 3 and not under_way
    assert differences(everything(model, optimizer), before) == []
    optimizer.close()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_checkpoint_goes_on_at_another_number_of_ranks(num_ranks, tmp_path):
    def saves(rank):
        model, optimizer = _made(0.6, precision="fp32")
        _train(model, optimizer, 0, 2)
        gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
        found = model.digest(), optimizer.state_dict()["state"]
        optimizer.close()
        return found

    def goes_on(rank):
        model, optimizer = _made(0.3, precision="fp32")
        gemini.load_checkpoint(tmp_path / "saved", model, optimizer)
        found, state = model.digest(), optimizer.state_dict()["state"]
        optimizer.close()
        return found, {name: set(planes) for name, planes in state.items()}

    want, planes = run_threads(saves, 2, backend="gloo")[0]
    found = [goes_on(0)] if num_ranks == 1 else run_threads(goes_on, num_ranks, backend="gloo")
    got, kept = found[0]
    assert got == want
    assert kept == {name: set(values) for name, values in planes.items()}
    assert "momentum_buffer" in kept["1.weight"] and "exp_avg" not in kept["1.weight"]


# -- plans and refusals --------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_what_is_planned_of_state_is_what_there_is(fraction):
    """Blocks of matrices alone have one plane, besides masters; of a mixed block all planes."""
    model, optimizer = _made(fraction)
    state = optimizer.targets[0].tiered_state
    planned = sum(chunk.state_bytes for chunk in model.engine.plan.chunks)
    sizes = [state.layout_of(block).block_nbytes(block.numel) for block in state.space.blocks]
    assert (
        planned == sum(sizes) < state.layout.block_nbytes(sum(b.numel for b in state.space.blocks))
    )
    if state.nvme is not None:
        spans = state.nvme.flow.spans
        on_disk = [
            state.layout_of(span.record.block).block_nbytes(span.record.block.numel)
            for span in spans
        ]
        pages = [align_up(nbytes, PAGE_BYTES) for nbytes in on_disk]
        assert state.nvme.written_bytes_per_step == sum(pages)


def test_a_budget_that_staging_does_not_fit_names_the_largest_matrix():
    with pytest.raises(
        BudgetError, match=r"wait in memory for the largest .*4\.weight \[64, 130\]"
    ):
        model = GeminiDDP(_net(), placement_policy=AutoPlacement("180KiB", block_numel=1024))
        HybridMuon(model, lr=0.02, nvme_offload_fraction=1.0)


def test_versions_that_stay_have_the_planes_of_their_blocks(tmp_path):
    """A rewind, and a checkpoint that is pinned to a store."""

    def made():
        model = GeminiDDP(_net())
        nvme = NvmeConfig(block_numel=1024, keep_versions=2)
        return model, HybridMuon(model, lr=0.02, nvme_offload_fraction=1.0, nvme=nvme)

    model, optimizer = made()
    digests = []
    for step in range(4):
        _train(model, optimizer, step, step + 1)
        digests.append(model.digest())
    model.rewind(2)
    assert model.digest() == digests[1]
    gemini.save_checkpoint(tmp_path / "pinned", model, optimizer, pinned=True)
    _train(model, optimizer, 2, 3)
    again, other = made()
    gemini.load_checkpoint(tmp_path / "pinned", again, other)
    _train(again, other, 2, 3)
    assert again.digest() == model.digest() == digests[2]
