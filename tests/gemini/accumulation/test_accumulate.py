"""Micro-batches layer by layer: the bits of one after the other, wherever model data lives."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini
from bench.shared.models import seeded
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.placement.tiers import Tier
from optim import HybridAdam

VOCAB, WIDTH = 23, 8
SMALL = {"min_chunk_size_m": 0.0005}
ON_HOST = StaticPlacement(offload_param_frac=1.0, offload_optim_frac=1.0)
IN_FILES = AutoPlacement("96KiB", block_numel=1024)  # of which 64 are buffers
MANY = 9  # layers, that some are in files


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, hidden, scale, *, other=None):
        inner = torch.nn.functional.gelu(self.inner(self.norm(hidden))) * scale
        return (hidden + nn.functional.dropout(self.outer(inner), self.dropout), None)


class Chained(nn.Module):
    """Embedding, blocks, norm and a head, which may be the embedding."""

    def __init__(self, *, dropout=0.0, tied=True, frozen=False, num_layers=3):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:  # as of a base with adapters
            self.requires_grad_(False)
            for block in self.blocks[1:]:
                block.inner.requires_grad_(True)
        self.dropout = dropout

    def forward(self, ids):
        hidden = nn.functional.dropout(self.embedding(ids), self.dropout)
        for block in self.blocks:
            hidden = block(hidden, 1.5, other=ids > 2)[0]
        return self.head(nn.functional.dropout(self.norm(hidden), self.dropout))


def batches(step, k=3, seed=0):
    """Of several lengths."""
    generator = torch.Generator().manual_seed(100 * seed + step)
    return [torch.randint(VOCAB, (2, 4 + j), generator=generator) for j in range(k)]


def loss_of(output, ids):
    """Of the next token, in the share of this micro-batch."""
    return (
        nn.functional.cross_entropy(output[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()) / 3
    )


def wrapped(placement="cuda", *, device="cpu", precision="fp32", **module):
    options = {"precision": precision, **SMALL}
    with seeded(3):
        chained = Chained(**module)
    model = GeminiDDP(chained, device, placement, **options)
    return model, HybridAdam(model.parameters(), lr=1e-2)


def trained(model, optimizer, order, steps=3, **options):
    """Losses, digest, and the next random number."""
    losses = []
    torch.manual_seed(1)
    for step in range(steps):
        losses += gemini.accumulate(model, batches(step), loss_of, order=order, **options)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in losses], model.digest(), float(torch.rand(()))


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("placement", "precision"),
    [("cuda", "fp32"), (ON_HOST, "bf16"), (IN_FILES, "fp32")],
    ids=["device", "host", "files"],
)
def test_bits_are_those_of_one_micro_batch_after_the_other(placement, precision, tied, dropout):
    def run(order):
        device = SimBackend() if placement is ON_HOST else "cpu"
        module = {"tied": tied, "dropout": dropout, "num_layers": MANY if in_files else 3}
        model, optimizer = wrapped(placement, device=device, precision=precision, **module)
        with warnings.catch_warnings():  # a budget of a few KiB is passed by activations
            warnings.simplefilter("ignore", gemini.BudgetWarning)
            found = trained(model, optimizer, order)
        assert (model.engine.cycle.accumulated.counted_bytes > 0) == (placement != "cuda")
        assert model.engine.storage.params is not None or not in_files
        return found

    in_files = placement is IN_FILES
    assert run("layers") == run("batches")


@pytest.mark.parametrize("order", ["layers", "batches"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_bits_and_random_numbers_are_those_of_a_users_own_loop(dropout, order):
    model, optimizer = wrapped(dropout=dropout)
    expected = []
    torch.manual_seed(1)
    for step in range(2):
        for ids in batches(step):
            loss = loss_of(model(ids), ids)
            loss.backward()
            expected.append(float(loss.detach()))
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    left = float(torch.rand(()))
    assert trained(*wrapped(dropout=dropout), order, steps=2) == (expected, model.digest(), left)


def test_a_shape_is_measured_once_and_only_where_something_is_random():
    def norms(dropout):
        model, optimizer = wrapped(dropout=dropout)
        called, found = [], []
        model.module.norm.register_forward_hook(lambda *_: called.append(1))
        for _ in range(2):
            called.clear()
            trained(model, optimizer, "layers", steps=1)
            found.append(len(called))
        return found

    # norms of a step: of epilogues, twice for a tied weight, and in the first step one that is
    # compared; beside them, whole forwards: of the last one, or then of all three again
    assert norms(0.0) == [6 + 1 + 1, 6]
    assert norms(0.25) == [6 + 1 + 1 + 3, 6]


@pytest.mark.parametrize("what", ["by data", "seeds", "turns back"])
def test_random_numbers_that_nobody_can_foresee_are_refused(what):
    """And the steps of the other order run."""
    model, optimizer = wrapped(dropout=0.25)
    start = torch.get_rng_state()
    seen = []

    def drawn(module, args):
        seen.append(1)
        if what == "by data" and len(seen) > 20:
            torch.rand(1 + len(seen))
        if what == "seeds":
            torch.manual_seed(1 << 40)
        if what == "turns back":
            torch.set_rng_state(start)

    model.module.norm.register_forward_pre_hook(drawn)
    is_late = what == "by data"
    with pytest.raises(ValueError, match=r"random numbers|seeds torch's") as refused:
        for step in range(9):
            gemini.accumulate(model, batches(step), loss_of, order="layers")
            optimizer.step()
            optimizer.zero_grad()
    assert ("call zero_grad() before you go on" in str(refused.value)) == is_late
    if is_late:
        with pytest.raises(RuntimeError, match="zero_grad"):
            optimizer.step()
        optimizer.zero_grad()
    gemini.accumulate(model, batches(0), loss_of, order="batches")
    optimizer.step()


def test_layers_come_twice_a_step_and_steps_follow_the_plan():
    counts = {}
    for order in ("layers", "batches"):
        model, optimizer = wrapped(ON_HOST, device=SimBackend(), num_layers=5)
        gathers = []
        for step in range(4):
            before = model.engine.manager.gathers_of.total()
            trained(model, optimizer, order, steps=1)
            gathers.append(model.engine.manager.gathers_of.total() - before)
            same = batches(0)
            assert [ids.shape for ids in same] == [ids.shape for ids in batches(step)]
        assert not model.memory_stats.deviations
        counts[order] = gathers[-1]
    chunks = len(model.engine.chunks)
    assert counts["layers"] <= 2 * chunks < counts["batches"]


def test_a_step_that_compares_losses_is_no_sample():
    """One epilogue runs more in it than in those that would follow its plan."""
    model, optimizer = wrapped(ON_HOST, device=SimBackend())
    trained(model, optimizer, "layers", steps=3)
    (trace,) = model.engine.sampler.traces("train")
    entered = [m.module for m in trace.moments if (m.phase, m.edge) == ("forward", "enter")]
    assert entered.count("norm") == 2 * 3  # of a tied head each epilogue runs twice


def test_a_frozen_base_passes_gradients_on_to_the_layers_that_are_trained():
    runs = [trained(*wrapped(frozen=True, dropout=0.25), order) for order in ("layers", "batches")]
    assert runs[0] == runs[1]


def test_one_micro_batch_is_a_forward_and_its_backward():
    digests = []
    for order in ("layers", "batches"):
        model, optimizer = wrapped(dropout=0.25)
        torch.manual_seed(1)
        gemini.accumulate(model, batches(0, k=1), loss_of, order=order)
        optimizer.step()
        digests.append(model.digest())
    assert digests[0] == digests[1]


def test_fp16_has_its_loss_scale():
    runs = []
    for order in ("layers", "batches"):
        runs.append(trained(*wrapped(ON_HOST, device=SimBackend(), precision="fp16"), order))
    assert runs[0] == runs[1]


def test_evaluation_and_a_skipped_step_between():
    found = []
    for order in ("layers", "batches"):
        model, optimizer = wrapped(ON_HOST, device=SimBackend(), dropout=0.25)
        trained(model, optimizer, order, steps=1)
        with torch.no_grad():
            loss = float(loss_of(model.eval()(batches(7)[0]), batches(7)[0]))
        model.train()
        gemini.accumulate(model, batches(8), loss_of, order=order)
        optimizer.zero_grad()
        found.append((loss, trained(model, optimizer, order)))
    assert found[0] == found[1]


def test_gradients_add_to_those_that_there_are():
    digests = []
    for order in ("layers", "batches"):
        model, optimizer = wrapped()
        for seed in (1, 2):
            gemini.accumulate(model, batches(0, seed=seed), loss_of, order=order)
        optimizer.step()
        digests.append(model.digest())
    assert digests[0] == digests[1]


# -- what ends in the middle --


class Lost(Exception):
    pass


@pytest.mark.parametrize("placement", ["cuda", ON_HOST], ids=["device", "host"])
@pytest.mark.parametrize("at", ["loss", "layer", "backward"])
def test_an_error_leaves_nothing_behind(placement, at):
    device = SimBackend() if placement is ON_HOST else "cpu"
    model, optimizer = wrapped(placement, device=device, dropout=0.25)
    other = wrapped(placement, device=device if placement == "cuda" else SimBackend(), dropout=0.25)
    trained(model, optimizer, "layers", steps=1)
    trained(*other, "layers", steps=1)
    before, layers = torch.get_rng_state(), list(model.module.blocks)

    def loss(output, ids):
        if at == "loss" and ids.shape[1] == 5:
            raise Lost
        return loss_of(output, ids)

    def fails(module, *_):
        if at == "layer" or (at == "backward" and torch.is_grad_enabled()):
            raise Lost

    handle = layers[1].register_forward_pre_hook(fails)
    with pytest.raises(Lost):
        gemini.accumulate(model, batches(1), loss, order="layers")
    handle.remove()
    assert list(model.module.blocks) == layers
    torch.get_rng_state()
    if at != "layer":
        with pytest.raises(RuntimeError, match="zero_grad"):
            optimizer.step()
    optimizer.zero_grad()
    torch.set_rng_state(before)
    assert trained(model, optimizer, "layers") == trained(*other, "layers")


# -- what is no chain --


class Twisted(Chained):
    def __init__(self, twist):
        super().__init__()
        self.twist = twist
        if twist == "shared":
            self.blocks[1].inner.weight = self.blocks[0].inner.weight
        if twist == "lists":
            self.others = nn.ModuleList([nn.Linear(1, 1)])
        if twist == "buffer":
            self.blocks[1].norm = nn.BatchNorm1d(WIDTH)
            self.blocks[1].norm.forward = lambda x: self.blocks[1].norm.running_mean.add_(1) * 0 + x

    def forward(self, ids):
        hidden = self.embedding(ids)
        first = hidden
        for i, block in enumerate(self.blocks):
            if self.twist == "skips" and i == 1:
                continue
            if self.twist == "between":
                hidden = hidden * 2
            scale = self.embedding.weight[0, 0] if self.twist == "needs" else 1.5
            hidden = block(hidden, {"cache": {1}} if self.twist == "cache" else scale)[0]
        return self.head(hidden + (first if self.twist == "around" else 0))


@pytest.mark.parametrize(
    ("twist", "said"),
    [
        ("shared", "is a parameter of another part"),
        ("lists", "2 lists of layers"),
        ("skips", "was called where"),
        ("between", "other hidden states"),
        ("cache", "which calls of layers may change"),
        ("buffer", "buffer that a forward changes"),
    ],
)
def test_what_is_no_chain_is_refused_by_name(twist, said):
    model = GeminiDDP(Twisted(twist), "cpu", "cuda", precision="fp32", **SMALL)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=said) as refused:
        if twist == "cache":
            model.module.blocks[0].forward = lambda hidden, scale: (hidden, None)
        gemini.accumulate(model, batches(0), loss_of, order="layers")
    assert 'order="batches"' in str(refused.value)
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)  # a loop in the other order has its bits


@pytest.mark.parametrize(
    ("twist", "said"), [("needs", "gradient of its own"), ("around", "used behind the last layer")]
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradients_past_the_chain_are_refused_before_any_is_formed(twist, said, tied):
    module = Twisted(twist)
    if not tied:
        module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    model = GeminiDDP(module, "cpu", "cuda", precision="fp32", **SMALL)
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    before = model.digest()
    for _ in range(2):  # what was refused is looked at again
        with pytest.raises(ValueError, match=said) as refused:
            gemini.accumulate(model, batches(0), loss_of, order="layers")
        assert 'order="batches"' in str(refused.value)
    assert all(param.grad is None for param in model.parameters())
    with pytest.raises(RuntimeError, match="without a gradient"):
        optimizer.step()
    assert model.digest() == before
    gemini.accumulate(model, batches(0), loss_of, order="batches")  # nothing was left open


def test_a_learned_start_that_goes_around_is_refused():
    class Learned(Chained):
        def __init__(self):
            super().__init__()
            self.start = nn.Parameter(torch.ones(2, 4, WIDTH))

        def forward(self, ids):
            hidden = self.start
            for block in self.blocks:
                hidden = block(hidden, 1.5)[0]
            return self.head(self.norm(hidden + self.start))

    model = GeminiDDP(Learned(), "cpu", "cuda", precision="fp32", **SMALL)
    with pytest.raises(ValueError, match="used behind the last layer"):
        gemini.accumulate(model, [ids[:, :4] for ids in batches(0)], loss_of, order="layers")


def test_what_goes_around_without_a_gradient_does_no_harm():
    digests = []
    for order in ("layers", "batches"):
        with seeded():
            module = Twisted("around")
        module.embedding.weight.requires_grad_(False)
        model = GeminiDDP(module, "cpu", "cuda", precision="fp32", **SMALL)
        digests.append(trained(model, HybridAdam(model.parameters(), lr=1e-2), order))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("placement", "ranks", "order"),
    [
        ("cuda", 1, "batches"),
        (IN_FILES, 1, "layers"),
        ("cuda", 2, "layers"),
        (StaticPlacement(shard_param_frac=0), 2, "batches"),
    ],
)
def test_layers_take_turns_where_weights_come(placement, ranks, order):
    """Elsewhere the forwards that they run again would be for nothing."""

    def taken(rank):
        model, _ = wrapped(placement, num_layers=MANY)
        gemini.accumulate(model, batches(0), loss_of)
        return model.engine.cycle.accumulated.order

    assert run_ranks(taken, ranks) == [order] * ranks


def test_wrong_arguments():
    model, _ = wrapped()
    for arguments, said in (
        ((model, []), "at least one"),
        ((model.module, batches(0)), "expected a GeminiDDP"),
        ((model, batches(0)), "expected loss="),
    ):
        with pytest.raises(ValueError, match=said):
            gemini.accumulate(*arguments)
    with pytest.raises(ValueError, match="expected one of"):
        gemini.accumulate(model, batches(0), loss_of, order="rows")
    with torch.no_grad(), pytest.raises(RuntimeError, match="forms no gradients"):
        gemini.accumulate(model, batches(0), loss_of)


# -- ranks --


def ranks_share(drawn):
    """Threads have one generator between them, which each call restores as it found it: whoever
    came last may have found another one's."""
    dist.barrier()
    torch.set_rng_state(drawn)
    dist.barrier()


def _steps(rank, placement, order, no_sync=False):
    """Losses and digest of a rank; every step adds two accumulations up."""
    many = 24 if isinstance(placement, AutoPlacement) else 3
    model, optimizer = wrapped(placement, precision="bf16", num_layers=many)
    found = []
    for step in range(3):
        for seed in (rank, 2 + rank):
            with model.no_sync() if no_sync and seed == rank else nullcontext():
                given = batches(step, seed=seed)
                found += gemini.accumulate(model, given, loss_of, order=order)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    in_files = {shard.param_home is Tier.NVME for shard in model.engine.plan.shards}
    assert (True in in_files) == isinstance(placement, AutoPlacement)
    return [float(loss) for loss in found], model.digest()


def _both_orders(rank, drawn, placement, no_sync):
    found = [_steps(rank, placement, order, no_sync) for order in ("layers", "batches")]
    ranks_share(drawn)
    return found


@pytest.mark.parametrize("no_sync", [False, True], ids=["reduced", "no_sync"])
@pytest.mark.parametrize(
    "placement", ["cuda", "zero1", "zero2", ON_HOST, AutoPlacement("116KiB", block_numel=1024)]
)
def test_two_ranks_have_the_bits_of_the_other_order(placement, no_sync):
    ranks = run_ranks(_both_orders, 2, torch.get_rng_state(), placement, no_sync)
    for layers, one_by_one in ranks:
        assert layers == one_by_one
    assert ranks[0][0][0] != ranks[1][0][0] and ranks[0][0][1] == ranks[1][0][1]


def _with_dropout(rank):
    found = []
    for order in ("layers", "batches"):
        model, optimizer = wrapped(dropout=0.25)
        torch.manual_seed(rank)
        for step in range(3):
            given = batches(step, seed=rank)
            if rank and step:  # of a shape that is new to this rank alone
                given[1] = torch.cat([given[1]] * 2, dim=1)
            gemini.accumulate(model, given, loss_of, order=order)
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append((model.digest(), float(torch.rand(()))))
    return found


def test_two_processes_have_random_numbers_of_their_own():
    for layers, one_by_one in run_ranks(_with_dropout, 2, processes=True):
        assert layers == one_by_one


def _other_numbers(rank, drawn, order):
    model, optimizer = wrapped("cuda")
    before = model.digest()
    with pytest.raises(RuntimeError) as refused:
        gemini.accumulate(model, batches(0, k=2 + rank), loss_of, order=order)
    with pytest.raises(RuntimeError, match="without a gradient"):
        optimizer.step()
    unchanged = model.digest() == before
    ranks_share(drawn)
    return str(refused.value), unchanged


@pytest.mark.parametrize("order", ["layers", "batches"])
def test_other_numbers_of_micro_batches_are_refused_on_every_rank(order):
    for said, unchanged in run_ranks(_other_numbers, 2, torch.get_rng_state(), order):
        assert "of 2 micro-batches" in said and "of 3 micro-batches" in said
        assert unchanged


def _refused_by_one(rank, drawn):
    model, _ = wrapped("cuda")
    seen = []

    def odd(output, ids):  # on rank 1 the second forward has another loss
        seen.append(rank)
        return loss_of(output, ids) + (len(seen) if rank else 0)

    with pytest.raises(ValueError) as refused:
        gemini.accumulate(model, batches(0), odd, order="layers")
    ranks_share(drawn)
    return str(refused.value)


def test_what_one_rank_refuses_all_refuse():
    on_other, own = run_ranks(_refused_by_one, 2, torch.get_rng_state())
    assert "more than its chain" in own and on_other == f"on rank 1: {own}"


def _fails_alone(rank, drawn, order, at):
    model, optimizer = wrapped("cuda")
    for step in range(2):
        gemini.accumulate(model, batches(step, seed=rank), loss_of, order=order)
        optimizer.step()
        optimizer.zero_grad()
    before, calls = model.digest(), []

    def loss(output, ids):
        calls.append(ids)
        if rank == 1 and len(calls) == at:
            raise Lost("of my own")
        return loss_of(output, ids)

    with pytest.raises((Lost, RuntimeError)) as failed:
        gemini.accumulate(model, batches(2, seed=rank), loss, order=order)
    optimizer.zero_grad()
    unchanged = model.digest() == before
    found = []
    for step in (3, 4):  # what follows has the bits of a run without the step that failed
        found += gemini.accumulate(model, batches(step, seed=rank), loss_of, order=order)
        optimizer.step()
        optimizer.zero_grad()
    whole, its = wrapped("cuda")
    for step in (0, 1, 3, 4):
        gemini.accumulate(whole, batches(step, seed=rank), loss_of, order=order)
        its.step()
        its.zero_grad()
    same = model.digest() == whole.digest()
    ranks_share(drawn)
    return f"{type(failed.value).__name__}: {failed.value}", unchanged, same


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("order", ["layers", "batches"])
def test_a_rank_that_fails_in_its_loss_ends_the_step_on_all(order, at):
    (other, *rest), (own, *own_rest) = run_ranks(_fails_alone, 2, torch.get_rng_state(), order, at)
    assert own == "Lost: of my own"
    assert other.startswith("RuntimeError: rank 1 failed") and other.endswith("Lost: of my own")
    assert rest == own_rest == [True, True]
