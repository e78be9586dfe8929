"""`model.set_all_reduce_hook`: replica groups that no mesh knows, against a mesh of replicas."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gemini
from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import everything, same
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP
from optim import HybridAdam
from tests.support.meshes import ADAM, MAX_NORM, STAGES, own_parts, passes

pytestmark = pytest.mark.ci
STEPS, PARTS = 3, 2
GROUPS = 2  # of as many ranks each as are left


class Groups:
    """Two replica groups of the ranks of this world: each trains in a group of its own, and `hook`
    averages over ranks with the same shard. Half of a power of two: the mean of a mesh, to the bit.
    """

    def __init__(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        each = world // GROUPS
        shards = [dist.new_group([g * each + i for i in range(each)]) for g in range(GROUPS)]
        same_shard = [dist.new_group([i, each + i]) for i in range(each)]
        self.own, self.across = shards[rank // each], same_shard[rank % each]
        self.seen = []

    def hook(self, shard):
        self.seen.append((shard.numel(), shard.dtype))
        dist.all_reduce(shard, group=self.across)
        shard.div_(GROUPS)


def wrapped(groups, stage=3, precision="fp32", policy=None, adam=ADAM, **options):
    """Replica groups with a hook; groups=None: a mesh of as many replicas."""
    if groups is None:
        shape = GROUPS, dist.get_world_size() // GROUPS
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        where = {"mesh": mesh}
    else:
        where = {"process_group": groups.own}
    model = GeminiDDP(
        Tower(), placement_policy=policy or STAGES[stage], precision=precision,
        min_chunk_size_m=0.004, **where, **options,
    )  # fmt: skip
    if groups is not None:
        model.set_all_reduce_hook(groups.hook)
    return model, HybridAdam(model.parameters(), **adam)


def train(model, optimizer):
    norms = []
    for _ in passes(model, token_batches(STEPS, PARTS * dist.get_world_size()), no_sync=True):
        norms.append(float(model.clip_grad_norm_(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def of_both(rank, stage, precision, options):
    found = []
    for groups in (Groups(), None):
        model, optimizer = wrapped(groups, stage, precision, **options)
        # before homes may rise, as they do sooner on a busy machine
        assert "policy" not in options or model.engine.storage.gradient_files is not None
        found.append((train(model, optimizer), model.digest(), everything(model, optimizer)))
        optimizer.close()
        if groups is not None:
            chunks = [c.spec.shard_numel for c in model.engine.chunks]
            calls = [numel for numel, _ in groups.seen]
            assert calls == chunks * STEPS  # every shard once a step, in the order of the layout
    return found


def check_equal(found, bound=0.0):
    """Of all ranks, each of (rest, weights and state) of groups and of a mesh: the first rank of
    each group has all weights, and of a mesh the first rank alone."""
    each = len(found) // GROUPS
    for rank, (hooked, meshed) in enumerate(found):
        assert hooked[:-1] == meshed[:-1]
        if rank % each == 0:
            assert all(
                torch.allclose(value, found[0][1][-1][name], rtol=0, atol=bound)
                for name, value in hooked[-1].items()
            )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_groups_with_a_hook_have_the_bits_of_a_mesh(stage, precision):
    # digests and norms are equal; half of a subnormal number of fp16 has no bits, in moments
    bound = 3 * 2**-37 if precision == "fp16" else 0.0  # once in each of three steps
    check_equal(run_ranks(of_both, 4, stage, precision, {}), bound)


def test_a_step_that_goes_on_behind_its_call_has_them_too(tmp_path):
    """State and gradients in files: the hook gets the shard on the device."""
    policy = AutoPlacement(device_budget="600KiB", host_budget="600KiB", nvme_dir=str(tmp_path))
    options = {"policy": policy, "update": "tail"}
    check_equal(run_ranks(of_both, 4, 3, "bf16", options))


def of_groups_of_one(rank):
    """A group of one rank reads, clips by value and by norm as torch does."""
    found = []
    for hooked in (True, False):
        groups = Groups() if hooked else None
        model, optimizer = wrapped(groups)
        for _ in passes(model, token_batches(2, dist.get_world_size(), seed=0)):
            read = [p.grad.clone() for p in model.parameters()]
            torch.nn.utils.clip_grad_value_(list(model.parameters()), 1e-2)
            norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        found.append(([g.tolist() for g in read], float(norm), everything(model, optimizer)))
        optimizer.close()
    return found


def test_what_reads_and_clips_gradients_gets_averages():
    check_equal(run_ranks(of_groups_of_one, 2))


def loss_of_outputs(logits, ids):
    return token_loss(lambda _: logits, ids)


def of_accumulate(rank):
    found = []
    for groups in (Groups(), None):
        model, optimizer = wrapped(groups)
        for parts in token_batches(2, PARTS * dist.get_world_size()):
            gemini.accumulate(model, own_parts(parts), loss_of_outputs, order="batches")
            # whoever commits a step asks here: torchft's manager does
            assert groups is None or len(groups.seen) % len(model.engine.chunks) == 0
            assert groups is None or groups.seen
            optimizer.step()
            optimizer.zero_grad()
        found.append((model.digest(), everything(model, optimizer)))
        optimizer.close()
    return found


def test_micro_batches_are_averaged_before_the_step():
    check_equal(run_ranks(of_accumulate, 4))


def of_no_backward_that_reduces(rank):
    found = []
    for groups in (Groups(), None):
        model, optimizer = wrapped(groups)
        (parts,) = token_batches(1, dist.get_world_size())
        with model.no_sync():
            token_loss(model, own_parts(parts)[0]).backward()
        assert groups is None or not groups.seen
        optimizer.step()
        found.append((model.digest(), everything(model, optimizer)))
        optimizer.close()
    return found


def test_behind_no_sync_alone_the_step_runs_it():
    check_equal(run_ranks(of_no_backward_that_reduces, 4))


def with_overflow(rank):
    """A gradient of one group is not finite: all groups skip, and the scales stay equal."""
    groups = Groups()
    model, optimizer = wrapped(groups, precision="fp16")
    outcomes = []
    for step, parts in enumerate(token_batches(3, dist.get_world_size())):
        loss = token_loss(model, own_parts(parts)[0])
        (loss * (float("inf") if step == 1 and rank == 0 else 1.0)).backward()
        optimizer.step()
        report = optimizer.last_report
        outcomes.append((report.skipped, report.loss_scale if step else None))
        optimizer.zero_grad()
    digest = model.digest()
    optimizer.close()
    return outcomes, digest


def test_groups_skip_together():
    found = run_ranks(with_overflow, 4)
    assert [skipped for skipped, _ in found[0][0]] == [False, True, False]
    assert all(one == found[0] for one in found)


def failing(rank):
    """The hook fails on one rank, in one step, at its second chunk."""
    groups = Groups()
    model, optimizer = wrapped(groups)
    said, calls = [], []

    def hook(shard):
        calls.append(shard)
        if rank == 1 and len(calls) == 2:
            raise ConnectionError("a group is gone")

    model.set_all_reduce_hook(hook)
    before = everything(model, optimizer)
    (parts,) = token_batches(1, dist.get_world_size())
    part = own_parts(parts)[0]
    if rank >= 2:  # the other group has no failure
        token_loss(model, part).backward()
    for act in (token_loss(model, part).backward, optimizer.step) if rank < 2 else ():
        with pytest.raises((ConnectionError, RuntimeError)) as error:
            act()
        said.append(str(error.value))
    kept = same(before, everything(model, optimizer))
    optimizer.zero_grad()
    token_loss(model, part).backward()
    optimizer.step()
    went_on = not same(before, everything(model, optimizer))
    optimizer.close()
    return said, kept, went_on


def test_a_hook_that_fails_on_one_rank_fails_on_all_of_its_group_and_nothing_has_changed():
    found = run_ranks(failing, 4)
    assert found[1][0][0] == "a group is gone"
    assert found[0][0][0] == "the all-reduce hook failed on rank 1: a group is gone"
    for rank in (0, 1):
        assert "call zero_grad() before you go on" in found[rank][0][1]
        assert found[rank][1:] == (True, True)


def refusals(rank):
    groups = Groups()
    model, optimizer = wrapped(groups)
    (parts,) = token_batches(1, dist.get_world_size())
    part = own_parts(parts)[0]
    token_loss(model, part).backward()
    with pytest.raises(RuntimeError, match="gradients that the all-reduce hook has had"):
        token_loss(model, part).backward()
    with pytest.raises(RuntimeError, match="beside gradients that another step is to take"):
        model.set_all_reduce_hook(None)
    optimizer.step()
    with pytest.raises(RuntimeError, match="gradients that the all-reduce hook has had"):
        token_loss(model, part).backward()
    optimizer.zero_grad(set_to_none=False)
    calls = len(groups.seen)
    token_loss(model, part).backward()
    assert len(groups.seen) == 2 * calls
    optimizer.zero_grad()
    model.set_all_reduce_hook(None)
    token_loss(model, part).backward()
    token_loss(model, part).backward()
    assert len(groups.seen) == 2 * calls
    optimizer.close()


def test_a_backward_that_would_add_to_averages_is_refused():
    run_ranks(refusals, 2)


def test_what_uses_gradients_early_is_refused_by_name():
    with pytest.raises(ValueError, match=r'update="speculate" updates with gradients'):
        GeminiDDP(Tower(), update="speculate").set_all_reduce_hook(print)
    with pytest.raises(ValueError, match="stream= of an all-reduce hook is for a CUDA device"):
        GeminiDDP(Tower()).set_all_reduce_hook(print, stream=object())


def test_a_work_that_the_hook_returns_is_waited_for():
    """As `lambda shard: manager.allreduce(shard)` does."""

    class Work:
        def __init__(self, shard):
            self.thread = threading.Thread(target=shard.fill_, args=(0.5,))

        def wait(self):
            self.thread.start()
            self.thread.join()

    model = GeminiDDP(Tower(), precision="fp32")
    model.set_all_reduce_hook(Work)
    token_loss(model, token_batches(1, 1)[0][0]).backward()
    assert all(torch.all(p.grad == 0.5) for p in model.parameters() if p.grad is not None)


def dropping(rank, skips):
    """Sizes of shards that a hook gets where all ranks drop the gradients of layers in `skips`
    before the step reduces those of `no_sync`."""
    groups = Groups()
    model, optimizer = wrapped(groups)
    with model.no_sync():
        token_loss(model, own_parts(*token_batches(1, dist.get_world_size()))[0]).backward()
    for number in skips:
        for param in model.module.layers[number].parameters():
            param.grad = None
    optimizer.step()
    skipped = {id(p) for number in skips for p in model.module.layers[number].parameters()}
    params = model.engine.params
    used = [
        chunk.spec.shard_numel for chunk in model.engine.chunks
        if not all(id(params[slot.param]) in skipped for slot in chunk.spec.slots)
    ]  # fmt: skip
    found = [numel for numel, _ in groups.seen]
    optimizer.close()
    return found, used, len(model.engine.chunks)


def test_a_hook_gets_no_chunk_without_a_gradient():
    """Nor has another group one of it: sizes would not fit."""
    for found, used, num_chunks in run_ranks(dropping, 2, (1, 2)):
        assert found == used and len(used) < num_chunks
