"""The engine on the simulated device: late copies, poisoned memory, Triton in the interpreter."""

import pytest
import torch

from bench.shared.models import Tower, token_batches
from bench.shared.simulated import SimBackend
from gemini import AutoPlacement, GeminiDDP, trace
from optim import HybridAdam
from tests.support.apart import Apart
from tests.support.checkpoints import train
from tests.support.spilled import SMALL


@pytest.mark.parametrize("on_host", [False, True])
def test_a_backend_says_where_shards_start(on_host):
    """And no name of it does."""
    device = SimBackend(1)
    device.shards_start_on_host = on_host
    model = GeminiDDP(Tower(), device, **SMALL)
    assert {chunk.shard_on_host for chunk in model.engine.chunks} == {on_host}


def test_the_device_skips_a_step_that_is_not_finite_and_says_so_when_asked():
    from bench.shared.models import token_loss

    model = GeminiDDP(Tower(), SimBackend(updates_by_triton=True), **SMALL)
    optimizer = HybridAdam(model.parameters())
    (batch,) = token_batches(1, 1)
    train(model, optimizer, [batch])
    steps = optimizer.targets[0].step_counts
    shards = [chunk.shard.clone() for chunk in model.engine.chunks]
    model.layers[2][1].weight.register_hook(lambda grad: grad * float("inf"))
    token_loss(model, batch[0]).backward()
    optimizer.step()
    assert optimizer.last_report.skipped
    assert optimizer.last_report.nonfinite == "layers.2.1.weight on rank 0"
    assert optimizer.targets[0].step_counts == steps
    for chunk, before in zip(model.engine.chunks, shards, strict=True):
        assert torch.equal(chunk.shard, before)


def test_a_copy_has_not_happened_before_its_ticket_is_waited_for():
    backend = SimBackend(seed=3)
    source = torch.arange(64.0)
    pairs = [(backend.allocate(64, torch.float32), source + i) for i in range(20)]
    tickets = [backend.copy(dst, src) for dst, src in pairs]
    assert any(not ticket.ready() for ticket in tickets)
    for (dst, src), ticket in zip(pairs, tickets, strict=True):
        assert ticket.ready() or bool(dst.isnan().all())
        ticket.wait()
        assert torch.equal(dst, src)


def test_freed_memory_is_poisoned_and_counted():
    backend = SimBackend()
    tensor = backend.allocate(256, torch.float32)
    tensor.fill_(1.0)
    backend.free(tensor)
    assert bool(tensor.isnan().all()) and backend.device_bytes == 0
    backend.refill(tensor)
    assert backend.device_bytes == 1024 == backend.peak_device_bytes
    with pytest.raises(AssertionError, match="under a copy"):
        ticket = backend.copy(tensor, torch.zeros(256))
        while ticket.ready():
            ticket = backend.copy(tensor, torch.zeros(256))
        backend.free(tensor)


def hostile():
    return SimBackend(seed=1, updates_by_triton=True)


def host_pair(backend):
    device = backend.allocate(64, torch.float32).fill_(2.0)
    return backend.allocate_host(64, torch.float32), device


def test_the_host_sees_a_copy_when_it_has_waited_and_not_when_the_device_has():
    backend = hostile()
    host, device = host_pair(backend)
    ticket = backend.copy(host, device)
    ticket.order()
    others = []
    for _ in range(20):  # other copies do not end it by chance
        device, host_too = (
            backend.allocate(8, torch.float32),
            backend.allocate_host(8, torch.float32),
        )
        others.append(backend.copy(device, host_too))
    assert bool(host.isnan().all()) and backend.host_waits == 0
    ticket.wait()
    assert host.tolist() == [2.0] * 64 and backend.host_waits == 1


def test_a_copy_back_to_the_device_finds_what_was_ordered_before_it():
    backend = hostile()
    host, device = host_pair(backend)
    backend.copy(host, device).order()
    back = backend.allocate(64, torch.float32)
    backend.copy(back, host).wait()
    assert back.tolist() == [2.0] * 64


def there_and_back(backend):
    """A block of 64 in host memory that is on its way to the device and, updated, back."""
    host = backend.allocate_host(64, torch.float32).fill_(1.0)
    staged = backend.allocate(64, torch.float32)
    coming = backend.copy_all([(staged, host)])
    coming.order()
    staged.add_(1.0)
    return host, staged, backend.copy_all([(host, staged)])


def test_a_copy_that_others_come_behind_on_the_device_has_not_ended_for_the_host():
    """Nor has what came before it: the disk may not write the buffer yet."""
    backend = hostile()
    host, staged, leaving = there_and_back(backend)
    source = backend.allocate_host(64, torch.float32).fill_(5.0)
    coming = backend.copy_all([(staged, source)], [leaving])
    coming.order()
    assert not leaving.ready() and bool(host.isnan().all())
    assert staged.tolist() == [5.0] * 64
    source.fill_(7.0)
    with pytest.raises(AssertionError, match="written while the copy reads it"):
        backend.synchronize()


def test_copies_of_a_stream_end_in_their_order_and_with_all_that_they_came_behind():
    backend = hostile()
    blocks = [there_and_back(backend) for _ in range(3)]
    others = backend.allocate_host(64, torch.float32)
    later = backend.copy_all([(backend.allocate(64, torch.float32), others)])
    later.order()
    blocks[1][2].settle()
    assert [leaving.ready() for _, _, leaving in blocks] == [True, True, False]
    assert backend.host_waits == 1
    for host, _, _ in blocks[:2]:
        assert host.tolist() == [2.0] * 64
        host.zero_()  # a disk reads the next block into it
    others.zero_()  # which a copy still reads, as nobody has waited for it
    with pytest.raises(AssertionError, match="written while the copy reads it"):
        backend.synchronize()


@pytest.mark.parametrize("reaches", [0.0, 0.5, 1.0])
def test_how_likely_a_copy_has_ended_that_is_asked_for_is_given(reaches):
    backend = SimBackend(seed=2, updates_by_triton=True, reaches=reaches)
    copies = [there_and_back(backend)[2] for _ in range(20)]
    ended = [copy.ready() for copy in copies]
    assert any(ended) == (reaches > 0) and all(ended) == (reaches == 1)
    assert backend.host_waits == 0


def test_a_kernel_is_given_no_memory_that_it_does_not_reach():
    backend = hostile()
    host, device = host_pair(backend)
    assert backend.address(device) == device.data_ptr()
    with pytest.raises(AssertionError, match="host memory"):
        backend.address(host[8:])
    backend.free(device)
    with pytest.raises(AssertionError, match="freed memory"):
        backend.address(device)


def test_staging_is_host_memory_as_long_as_it_is_pinned():
    backend = hostile()
    staging = torch.zeros(64)
    unpin = backend.pin(staging.data_ptr(), staging.nbytes)
    assert backend.place_of(staging[3:]) == "host"
    unpin()
    assert backend.place_of(staging) is None


def test_freed_memory_is_neither_copied_nor_written():
    backend = hostile()
    host, device = host_pair(backend)
    backend.free(device)
    with pytest.raises(AssertionError, match="a copy is given freed memory"):
        backend.copy(host, device)
    backend.check()
    device[3] = 1.0  # who had it before still writes it, and another chunk is there by now
    with pytest.raises(AssertionError, match="written that was freed"):
        backend.allocate(8, torch.float32)


def test_bytes_count_until_the_device_comes_behind_the_copy_that_reads_them():
    backend = hostile()
    host, device = host_pair(backend)
    assert backend.device_bytes == 256
    ticket = backend.copy(host, device)
    del device
    assert backend.device_bytes == 256
    ticket.order()
    assert backend.device_bytes == 0 and bool(host.isnan().all())
    ticket.wait()
    assert host.tolist() == [2.0] * 64


def test_state_in_slabs_is_counted_as_long_as_it_is_there():
    backend = hostile()
    slab = backend.zeros(64, torch.float32, on_host=False)
    backend.zeros(64, torch.float32, on_host=True)
    assert backend.device_bytes == 256
    del slab
    assert backend.device_bytes == 0


@pytest.mark.parametrize("computes", [True, False])
def test_the_device_stalls_where_it_had_nothing_to_do_behind_the_copy(computes):
    backend = hostile()
    host, device = host_pair(backend)
    there, used = (backend.allocate(64, torch.float32).zero_() for _ in range(2))
    with Apart(backend):  # which sees the simulator's own operators too
        out = backend.copy(host, device)
        come = backend.copy(there, backend.allocate_host(64, torch.float32))
        if computes:
            used.add_(1)
        out.order()
        come.order()
    assert (backend.stalls, backend.starved) == ((0, 0) if computes else (1, 1))


def test_copies_are_of_memory_that_is_pinned():
    backend = hostile()
    with pytest.raises(AssertionError, match="not pinned"):
        backend.copy(backend.allocate(64, torch.float32), torch.zeros(64))


def test_what_operators_make_counts_where_it_is_while_a_program_runs():
    backend = SimBackend()
    host, device = host_pair(backend)
    before = backend.device_bytes
    doubled = device * 2
    assert backend.device_bytes == before  # nobody runs a program
    with backend.running():
        made = device * 2
        assert backend.device_bytes == before + made.nbytes
        again, copies = made.view(8, 8), host + 1
        assert copies.nbytes and backend.device_bytes == before + made.nbytes
        staging = torch.ones(1024)
        assert backend.device_bytes == before + made.nbytes + staging.nbytes
        backend.pin(staging.data_ptr(), staging.nbytes)  # it is the host's
        assert backend.device_bytes == before + made.nbytes
        del made
        assert backend.device_bytes > before
        del again
    assert backend.device_bytes == before and doubled.nbytes


def test_a_traced_iteration_has_the_loss_and_the_temporaries_of_its_backward():
    """All that a card would hold, as a trace on fake tensors has it, byte by byte."""
    ids = torch.zeros(4, 9, dtype=torch.int64)
    sim = SimBackend()
    model = GeminiDDP(Tower(), sim, AutoPlacement("90KiB", "2MiB"), precision="fp32", **SMALL)

    def loss(logits):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(36).long())

    with sim.running():
        logits = model(ids)
        loss(logits).backward()
    model.engine.sampler.end()
    (traced,) = model.memory_stats.traces.values()
    expected = trace(Tower(), (ids,), loss=loss, precision="fp32")
    assert traced.peak_non_model_bytes == expected.peak_non_model_bytes


def test_an_operator_that_finds_no_memory_says_so_as_on_a_card():
    backend = SimBackend()
    with backend.running():
        backend.pages.limit_bytes = 4096
        kept = torch.zeros(512)
        with pytest.raises(torch.OutOfMemoryError, match="has 4096 bytes"):
            torch.zeros(1024)
        assert backend.device_bytes == kept.nbytes
