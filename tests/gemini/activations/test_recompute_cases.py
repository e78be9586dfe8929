"""Layers computed again in backward, in what programs do with layers: the bits of plain, a layer
that is kept with a warning, or an error; nothing else."""

import copy
import random
import warnings
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP, LossScale
from gemini.memtracer.module_calls import repeated_blocks
from gemini.placement.plan import Recomputed
from gemini.placement.tiers import Tier
from gemini.runtime.schedule.planning import Planning
from optim import HybridAdam, NvmeConfig

D = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(D), nn.Dropout(0.1)
        self.a, self.b = nn.Linear(D, 8 * D), nn.Linear(8 * D, D)

    def forward(self, x):
        return x + self.drop(self.b(nn.functional.gelu(self.a(self.norm(x)))))


class OwnParameter(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return super().forward(x * self.scale) * self.scale


class Checkpoints(Block):
    def forward(self, x):
        again = checkpoint(super().forward, x, use_reentrant=False)
        return checkpoint(super().forward, again, use_reentrant=True)


class FrozenNorm(Block):
    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(D).eval()

    def train(self, mode=True):
        super().train(mode)
        self.batch.eval()
        return self

    def forward(self, x):
        return super().forward(self.batch(x.transpose(1, 2)).transpose(1, 2))


class CountsInPython(Block):
    """The number matters in every third call, long after the proof."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (2.0 if self.calls % 3 == 0 else 1.0)


class KeepsLosses(Block):
    def __init__(self):
        super().__init__()
        self.losses = []

    def forward(self, x):
        self.losses.append(x.mean())
        return super().forward(x)


class DrawsSeldom(Block):
    def forward(self, x):
        return super().forward(x) if random.random() < 2 else x


class Stack(nn.Module):
    def __init__(self, kind=Block, call="plain", n=3):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(D, D)
        self.blocks = nn.ModuleList(kind() for _ in range(n))
        self.last = nn.Linear(D, D)
        self.call = call

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = getattr(self, f"_{self.call}")(block, x)
        return self.last(x).square().mean()

    def _plain(self, block, x):
        return block(x)

    def _twice(self, block, x):
        return block(block(x))

    def _changed_output(self, block, x):
        return block(x).mul_(0.5)


class Tupled(Block):
    def forward(self, x, *, scale, mask=None, extra=()):
        out = super().forward(x)
        for one in extra:
            out = out + one
        return (out * scale if mask is None else out * mask, {"more": out.mean()})


class TupledStack(Stack):
    def _plain(self, block, x):
        extra = [x * 2, torch.ones(D)]
        out, more = block(x=x, scale=0.5, mask=x.detach() > 0, extra=extra)
        return out + more["more"]


class ListFilled(Block):
    def forward(self, x, kept):
        kept.append(x.mean())
        return super().forward(x)


class FilledStack(Stack):
    def forward(self, x):
        kept = []
        x = self.first(x)
        for block in self.blocks:
            x = block(x, kept)
        return self.last(x).square().mean() + sum(kept)


def feed(step, length=8):
    return torch.randn(4, length, D, generator=torch.Generator().manual_seed(step))


@pytest.fixture
def choose(monkeypatch):
    """Layers of all iterations of training, whatever plans say."""

    def chosen(names):
        found = Recomputed(tuple(names), len(names), 0.0)
        monkeypatch.setattr(Planning, "recomputed_for", lambda self, signature: found)

    return chosen


def auto(**options):
    return AutoPlacement("64MiB", activations="auto", **options)


def names_of(module):
    return [name for name, _ in repeated_blocks(module)]


def trained(module, policy, run=None, steps=5, each=None, **options):
    """each: called with every step's report and the model."""
    options = {"precision": "fp32", "min_chunk_size_m": 0.002, **options}
    model = GeminiDDP(copy.deepcopy(module), "cpu", policy, **options)
    optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=NvmeConfig(block_numel=8192))
    for step in range(steps):
        torch.manual_seed(step)
        random.seed(step)
        if run is None:
            model(feed(step)).backward()
        else:
            run(model, optimizer, step)
        optimizer.step()
        if each is not None:
            each(optimizer.last_report, model)
        optimizer.zero_grad()
    return model


def layers_of(model):
    return model.engine.sampler.layers


def check(choose, module, run=None, refuses=None, **options):
    """Bits of plain, with all layers computed again, or all refused for a reason. Returns the
    layers."""
    plain = trained(module, "cuda", run, **options)
    names = names_of(module)
    choose(names)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = trained(module, auto(), run, **options)
    said = [str(one.message) for one in said if "never again in backward" in str(one.message)]
    assert model.digest() == plain.digest()
    layers = layers_of(model)
    if refuses is None:
        assert not said and layers.proved.keys() == set(names) and layers.names == set(names)
    else:
        assert len(said) == 1 and refuses in said[0] and not layers.names
    return layers


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(lambda: Stack(OwnParameter), id="own parameter"),
        pytest.param(lambda: Stack(Checkpoints), id="checkpoints inside"),
        pytest.param(lambda: Stack(FrozenNorm), id="frozen norm"),
        pytest.param(lambda: Stack(call="twice"), id="called twice"),
        pytest.param(lambda: Stack(call="changed_output"), id="output changed in place"),
        pytest.param(lambda: TupledStack(Tupled), id="names, lists, tuples"),
    ],
)
def test_layers_have_the_bits_of_plain(choose, module):
    check(choose, module())


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: Stack(CountsInPython), "changes buffers, attributes"),
        (lambda: Stack(KeepsLosses), "changes buffers, attributes"),
        (lambda: Stack(DrawsSeldom), "draws from random"),
        (lambda: FilledStack(ListFilled), "what it is given"),
    ],
    ids=["counter", "losses", "seldom", "list"],
)
def test_layers_with_effects_are_kept(choose, module, reason):
    check(choose, module(), refuses=reason)


def test_layers_with_hooks_inside_are_kept(choose):
    """A hook whose numbers enter the loss would count a layer twice."""

    class Hooked(Stack):
        def __init__(self):
            super().__init__()
            self.seen = []
            for block in self.blocks:
                block.a.register_forward_hook(self.note)

        def note(self, module, args, output):
            self.seen.append(output.square().mean())

        def forward(self, x):
            self.seen.clear()
            loss = super().forward(x)
            return loss + sum(self.seen)

        def __deepcopy__(self, memo):
            return Hooked()

    check(choose, Hooked(), refuses="have hooks")


def test_tied_weights(choose):
    module = Stack()
    module.last.weight = module.first.weight
    module.blocks[2].a.weight = module.blocks[0].a.weight
    check(choose, module)


def test_accumulation_clipping_and_longer_batches(choose):
    """Every step is clipped, and a longer call than any before is proved anew."""
    norms = []

    def run(model, optimizer, step):
        with model.no_sync():
            model(feed(step, 8 + 4 * step)).backward()
        model(feed(step + 9)).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.1)))

    layers = check(choose, Stack(), run, each=lambda report, model: norms.append(report.grad_norm))
    assert len(norms) == 20 and min(norms) > 0.1 and norms[:10] == norms[10:]
    assert set(layers.longest.values()) == {feed(0, 8 + 4 * 4).numel()}
    clip = lambda m, o, n: (m(feed(n)).backward(), o.clip_grad_norm_(0.1))  # noqa: E731
    first, other = (trained(Stack(), "cuda", run, steps=2).digest() for run in (clip, None))
    assert first != other


def test_two_forwards_before_their_backwards(choose):
    def run(model, optimizer, step):
        (model(feed(step)) + model(feed(step + 9))).backward()

    check(choose, Stack(), run)


def test_autocast_and_modes_that_change(choose):
    """Each kind of call is proved; evaluation between forward and backward is an error."""

    def run(model, optimizer, step):
        model.train(step % 2 == 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=step > 2):
            loss = model(feed(step))
        loss.backward()

    layers = check(choose, Stack(), run)
    # trained and evaluated without autocast, and both with it
    assert [len(kinds) for kinds in layers.proved.values()] == [4, 4, 4]


def test_bf16(choose):
    check(choose, Stack(), lambda m, o, step: m(feed(step).bfloat16()).backward(), precision="bf16")


def test_fp16_with_an_overflow(choose):
    def run(model, optimizer, step):
        loss = model(feed(step).half() * (1e4 if step == 2 else 1))
        optimizer.backward(loss)

    skipped = []
    each = lambda report, model: skipped.append((report.skipped, report.loss_scale))  # noqa: E731
    scale = LossScale(1024.0, hysteresis=1)
    check(choose, Stack(), run, each=each, precision="fp16", loss_scale=scale)
    assert [one for one, _ in skipped] == [False, False, True, False, False] * 2
    assert skipped[:5] == skipped[5:] and skipped[2][1] > skipped[3][1]


def test_a_proof_is_of_one_kind_of_call(choose):
    """A list that a later call gets is seen, and the layer is kept from then on."""

    class Late(Block):
        def forward(self, x, kept=None):
            if kept is not None:
                kept.append(x.mean())
            return super().forward(x)

    class LateStack(Stack):
        kept = None

        def forward(self, x):
            return super().forward(x) + (sum(self.kept) if self.kept else 0)

        def _plain(self, block, x):
            return block(x, self.kept) if self.kept is not None else block(x)

    def run(model, optimizer, step):
        model.module.kept = [] if step > 1 else None
        model(feed(step)).backward()

    check(choose, LateStack(Late), run, refuses="what it is given")


def switching(where):
    class Switches(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))
            self.grows = False

        def forward(self, x):
            if self.grows:
                self.scale.add_(1)
            return super().forward(x) * self.scale

    choose_all, module = where, Stack(Switches)
    choose_all(names_of(module))
    model = GeminiDDP(module, "cpu", auto(), precision="fp32", min_chunk_size_m=0.002)
    model(feed(0)).backward()
    return model, module.blocks[1]


def test_a_forward_that_changes_buffers_after_its_proof_is_an_error(choose):
    model, block = switching(choose)
    block.grows = True
    with pytest.raises(RuntimeError, match="in a later forward"):
        model(feed(1)).backward()


@pytest.mark.parametrize("change", ["buffer", "mode", "number"])
def test_a_change_between_forward_and_backward_is_an_error(choose, change):
    model, block = switching(choose)
    loss = model(feed(1))
    if change == "buffer":
        block.scale.add_(1)
    elif change == "mode":
        model.eval()
    else:
        block.grows = 2
    with pytest.raises(RuntimeError, match=r"blocks\.\d is computed again.*its backward"):
        loss.backward()


@pytest.mark.parametrize("by_name", [False, True])
def test_an_input_changed_in_place_afterwards_is_an_error(choose, by_name):
    """Where plain would not need it any more, it is one too: nothing is silent."""

    class Shifts(Stack):
        def forward(self, x):
            x = self.first(x) * 1
            given = x * 1
            out = self.blocks[0](x=given) if by_name else self.blocks[0](given)
            given.add_(1)
            return out.square().mean()

    module = Shifts()
    choose(names_of(module))
    model = GeminiDDP(module, "cpu", auto(), precision="fp32", min_chunk_size_m=0.002)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(feed(0)).backward()


@pytest.mark.parametrize("is_in_files", [False, True])
def test_released_between_calls_with_state_in_files(choose, is_in_files, tmp_path):
    """A layer that is computed again gathers its parameters again."""
    module = Stack(OwnParameter, n=12)
    plain = trained(module, "cuda", steps=3)
    choose(names_of(module))
    below = {"nvme_dir": str(tmp_path), "block_numel": 8192} if is_in_files else {}
    placement = AutoPlacement("768KiB" if is_in_files else "64MiB", activations="auto", **below)
    written = []

    def each(report, model):
        written.append(report.nvme_written_total)

    model = trained(module, placement, steps=3, each=each)
    assert model.digest() == plain.digest()
    assert layers_of(model).proved.keys() == set(names_of(module))
    homes = {home for shard in model.engine.plan.shards for home in shard.state_homes}
    assert (Tier.NVME in homes) == is_in_files != model.engine.sharding.all_gathered
    assert all(a < b for a, b in pairwise([0, *written])) if is_in_files else not any(written)


class Counts(OwnParameter):
    """Counts its calls in the process of one rank."""

    def __init__(self):
        super().__init__()
        self.counts = False
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.counts:
            self.calls += 1
        return super().forward(x)


def ranks_trained(rank, module, policy, counts=None):
    module = copy.deepcopy(module)
    module.blocks[1].counts = rank == counts
    model = GeminiDDP(module, "cpu", policy, precision="fp32", min_chunk_size_m=0.002)
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    found = []
    for step in range(4):
        # ranks have inputs of their own lengths
        model(feed(10 * step + rank, 8 + 4 * rank * (step % 2))).backward()
        found.append(model.engine.plan.recomputed is not None)
        optimizer.step()
        optimizer.zero_grad()
    layers = layers_of(model)
    proved = [] if layers is None else sorted(layers.proved)
    most = max(model.engine.sampler.device_peaks.values(), default=0)
    return model.digest(), proved, most, found[-1]


def without_draws():
    module = Stack(Counts)
    for block in module.blocks:
        block.drop.p = 0.0  # ranks that are threads share a generator
    return module


def test_two_ranks_compute_the_same_layers_again(choose):
    module = without_draws()
    plain = run_ranks(ranks_trained, 2, module, "zero3")
    choose(names_of(module))
    found = run_ranks(ranks_trained, 2, module, auto())
    assert [one[0] for one in found] == [one[0] for one in plain]
    assert all(one[1] == names_of(module) for one in found)


def test_what_one_rank_refuses_no_rank_computes_again(choose):
    module = without_draws()
    choose(names_of(module))
    plain = run_ranks(ranks_trained, 2, module, "zero3", 1)
    with pytest.warns(UserWarning, match="never again in backward"):
        found = run_ranks(ranks_trained, 2, module, auto(), 1)
    assert [one[0] for one in found] == [one[0] for one in plain]
    assert all(one[1] == ["blocks.0", "blocks.2"] for one in found)


def failed_alone(rank, module, when):
    """Error of a step in which a proved layer of rank 1 changes what it had left alone."""
    module = copy.deepcopy(module)
    model = GeminiDDP(module, "cpu", auto(), precision="fp32", min_chunk_size_m=0.002)
    model.engine.comm.deadline_seconds = 0.05  # then ranks compare what they do
    model(feed(rank)).backward()
    model.zero_grad()
    module.blocks[1].counts = rank == 1 and when == "forward"
    with pytest.raises(RuntimeError) as error:
        loss = model(feed(rank))
        if rank == 1 and when == "backward":
            module.blocks[1].calls += 1
        loss.backward()
    return str(error.value)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_what_fails_on_one_rank_is_an_error_on_all(choose, when):
    """The others would wait for its collectives."""
    module = without_draws()
    choose(names_of(module))
    other, mine = run_ranks(failed_alone, 2, module, when)
    assert "blocks.1 is computed again in backward" in mine
    assert "rank 1" in other and "blocks.1 is computed again in backward" in other
    assert {"forward": "a later forward", "backward": "its backward"}[when] in other


def process_trained(rank):
    module = Stack(OwnParameter)
    digests = []
    for policy in ("zero3", auto()):
        torch.manual_seed(rank)  # each draws its own dropout
        found = Recomputed(tuple(names_of(module)), 3, 0.0)
        with patch.object(Planning, "recomputed_for", lambda self, signature, found=found: found):
            digests.append(ranks_trained(rank, module, policy)[:2])
    return digests


@pytest.mark.ci
def test_two_processes_draw_their_own():
    for plain, again in run_ranks(process_trained, 2, processes=True):
        assert plain[0] == again[0] and again[1] == names_of(Stack())
