"""Ranks that read parameters in different orders, or of which one does something alone.

Wherever nothing else puts ranks in order they meet first: they read what they asked for, or all of
them end in an error that names both. Nothing ends by a signal.
"""

import logging
import os
import re
import threading
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini
from bench.shared.models import seeded
from bench.shared.threads import collect
from bench.shared.workers import run_ranks
from gemini import GeminiDDP
from gemini.comm import communicator
from gemini.comm.collective_log import SequenceError
from gemini.comm.communicator import Communicator
from gemini.comm.user_calls import UserCalls
from optim import HybridAdam
from tests.support.said import said
from tests.support.until import until

pytestmark = pytest.mark.ci

DEADLINE_SECONDS = 0.05  # then ranks compare what they do; one that is late is still waited for


class Layers(nn.Module):
    """Square layers, of which every one is a chunk; `widths` make chunks of several sizes."""

    def __init__(self, widths=(24,) * 7):
        super().__init__()
        with seeded():
            self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))
            self.order = list(range(len(self.layers)))

    def forward(self, x):
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return x


ODD_WIDTHS = (24, 31, 40, 13, 24)


def wrapped(module, **options):
    model = GeminiDDP(
        module, precision="fp32", min_chunk_size_m=1 / 2**20, search_range_m=0, **options
    )
    model.engine.comm.deadline_seconds = DEADLINE_SECONDS
    assert len(model.engine.chunks) == len(module.layers)
    return model


def train(model, optimizer):
    model(torch.ones(2, 24)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- reads in any order ----------------------------------------------------------------------


def read_in_orders(rank, widths):
    model = wrapped(Layers(widths))
    optimizer = HybridAdam(model.parameters(), lr=0.1)
    train(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    params = dict(model.named_parameters())
    with model.summon_full_params(writeback=False):
        want = {name: param.detach().clone() for name, param in params.items()}
    generator = torch.Generator().manual_seed(rank)
    wrong = []
    for _ in range(6):
        order = [names[i] for i in torch.randperm(len(names), generator=generator).tolist()]
        read = {name: params[name].detach().clone() for name in order}
        wrong += [name for name in names if not torch.equal(read[name], want[name])]
        train(model, optimizer)
        with model.summon_full_params(writeback=False):
            want = {name: param.detach().clone() for name, param in params.items()}
    return wrong


@pytest.mark.parametrize("widths", [(24,) * 7, ODD_WIDTHS], ids=["equal sizes", "odd sizes"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_read_parameters_in_orders_of_their_own(widths, world_size):
    assert run_ranks(read_in_orders, world_size, widths) == [[]] * world_size


def read_beside_a_forward(rank):
    """In a thread, what this rank has a part of; and then training goes on."""
    model = wrapped(Layers(), placement_policy="zero3")
    optimizer, said = HybridAdam(model.parameters(), lr=0.1), []
    train(model, optimizer)

    def read():
        released = next(chunk for chunk in model.engine.chunks if not chunk.gathered)
        try:
            list(model.parameters())[released.spec.slots[0].param].detach().sum()
        except RuntimeError as error:
            said.append(str(error))

    def beside(*_):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    handle = model.module.layers[3].register_forward_hook(beside)
    train(model, optimizer)
    handle.remove()
    train(model, optimizer)
    return said


def test_a_thread_that_would_gather_beside_a_forward_is_refused():
    for (refusal,) in run_ranks(read_beside_a_forward, 2):
        assert "is released, and read while another thread runs a forward" in refusal


def penalty_in_orders(rank, wraps):
    module = Layers(ODD_WIDTHS)
    model = wrapped(module) if wraps else module
    make = HybridAdam if wraps else torch.optim.AdamW
    options = {} if wraps else {"foreach": False}
    optimizer = make(model.parameters(), lr=0.1, eps=1.0, weight_decay=0.0, **options)
    start = [param.detach().clone() for param in Layers(ODD_WIDTHS).parameters()]
    for _ in range(3):
        params = list(model.parameters())
        if rank == 1:
            params.reverse()
        penalty = sum(param.pow(2).sum() for param in params)
        (model(torch.ones(2, 24)).square().mean() + 0.01 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.summon_full_params() if wraps else nullcontext():
        return [(p.detach() - s) for p, s in zip(model.parameters(), start, strict=True)]


def test_a_penalty_over_weights_in_another_order_on_every_rank_has_the_updates_of_torch():
    want = torch.cat([u.flatten() for u in penalty_in_orders(0, False)])
    for update in run_ranks(penalty_in_orders, 2, True):
        got = torch.cat([u.flatten() for u in update])
        assert float((got - want).norm() / want.norm()) < 1e-6  # fp32 sums in another order


def save_pretrained(rank, folder, chunk_m, config):
    from transformers import GPT2LMHeadModel

    with seeded():
        plain = GPT2LMHeadModel(config)
    want = {name: value.clone() for name, value in plain.state_dict().items()}
    model = GeminiDDP(plain, precision="fp32", min_chunk_size_m=chunk_m, search_range_m=0)
    model.save_pretrained(folder)
    with seeded():  # it draws what it then reads
        again = GPT2LMHeadModel.from_pretrained(folder).state_dict()
    return [name for name, value in want.items() if not torch.equal(again[name], value)]


@pytest.mark.parametrize("chunk_m", [1e-6, 0.01, 0.05])
def test_save_pretrained_of_a_wrapped_model_writes_its_weights(tmp_path, chunk_m):
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: F401 (once, before the threads)

    config = GPT2Config(n_embd=48, n_layer=3, n_head=4, vocab_size=131, n_positions=32)
    assert run_ranks(save_pretrained, 2, str(tmp_path), chunk_m, config) == [[], []]


# -- passes that differ ----------------------------------------------------------------------


def evaluate_in_orders(rank, widths, warm, grad, order):
    """What a rank is told after `warm` evaluations, when rank 1 runs layers in another order."""
    model = wrapped(Layers(widths))
    with torch.set_grad_enabled(grad):
        for _ in range(warm):
            model(torch.ones(2, 24))
        if rank == 1:
            model.order[:] = order
        return said(lambda: [model(torch.ones(2, 24)) for _ in range(2)], error=SequenceError)


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [0, 1, 3, 2, 4, 5], [0, 1, 2]])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("warm", [0, 3])
def test_an_evaluation_in_which_ranks_differ_returns_on_no_rank(warm, grad, order):
    """Also in the first one, where no rank knows what comes."""
    for text in run_ranks(evaluate_in_orders, 2, (24,) * 7, warm, grad, order):
        assert "rank 0" in text and "rank 1" in text, text


def test_an_evaluation_with_other_sizes_ends_in_an_error_and_not_in_a_signal():
    for text in run_ranks(evaluate_odd, 2):
        assert "layers.1.weight" in text and "layers.2.weight" in text


class Parallel(Layers):
    """Layers of several sizes that can run in any order."""

    def forward(self, x):
        return sum(self.layers[i](x[:, : self.layers[i].in_features]).sum() for i in self.order)


def evaluate_odd(rank):
    model = wrapped(Parallel((24, 7, 20, 3, 24)))
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 24))
        if rank == 1:
            model.order[1:3] = [2, 1]
        return said(model, torch.ones(2, 24), error=SequenceError)


# -- a rank that is late ---------------------------------------------------------------------


class EndsAtTheDeadline:
    """A collective that ends between the end of a wait for it and the question whether it did."""

    def __init__(self, work):
        self._work = work

    def wait(self, timeout=None):
        self._work.wait()
        if timeout is not None:
            raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return self._work.is_completed()


def sum_that_is_late(rank):
    total = torch.ones(1)
    ticket = Communicator().all_reduce(total)
    replace(ticket, work=EndsAtTheDeadline(ticket.work)).wait()
    return total.item()


def test_a_collective_that_ends_at_the_deadline_has_not_failed():
    assert run_ranks(sum_that_is_late, 2) == [2, 2]


# -- one rank alone --------------------------------------------------------------------------


def alone(rank, folder, what):
    """Rank 0 does something alone, between steps; what every rank was told."""
    model = wrapped(Layers())
    optimizer = HybridAdam(model.parameters(), lr=0.1)
    train(model, optimizer)
    train(model, optimizer)
    if what.startswith("named"):
        model(torch.ones(2, 24)).sum().backward()
    calls = {
        "model.state_dict()": model.state_dict,
        "optimizer.state_dict()": optimizer.state_dict,
        "save_checkpoint()": lambda: gemini.save_checkpoint(f"{folder}/c", model, optimizer),
        "export_safetensors()": lambda: gemini.export_safetensors(f"{folder}/e", model),
        "model.digest()": model.digest,
        "summon_full_params()": lambda: model.summon_full_params().__enter__(),
        "named_gradients()": lambda: list(model.named_gradients()),
        "layers.2.weight": lambda: model.module.layers[2].weight.norm().item(),
    }

    def goes_on():
        if rank == 0:
            calls[what]()
        train(model, optimizer)
        train(model, optimizer)

    return said(goes_on, error=SequenceError)


@pytest.mark.parametrize(
    "what",
    ["model.state_dict()", "optimizer.state_dict()", "save_checkpoint()", "export_safetensors()",
     "model.digest()", "summon_full_params()", "named_gradients()", "layers.2.weight"],
)  # fmt: skip
def test_what_one_rank_does_alone_ends_in_an_error_that_names_it(tmp_path, what):
    assert all(what in text for text in run_ranks(alone, 2, str(tmp_path), what))


def last_of_all(rank):
    model = wrapped(Layers())
    if rank == 1:
        del model
        collect()
        return "ended"
    with pytest.raises(SequenceError, match=r"model.state_dict\(\), and rank 1 has ended"):
        model.state_dict()
    return "told"


def test_a_rank_that_has_ended_is_not_waited_for():
    assert run_ranks(last_of_all, 2) == ["told", "ended"]


# -- forks -----------------------------------------------------------------------------------


def _what_a_forked_child_is_told(rank):
    model = wrapped(Layers())
    optimizer = HybridAdam(model.parameters())
    train(model, optimizer)
    texts = []
    for use in (lambda: model(torch.ones(2, 24)), model.state_dict):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.write(writer, said(use).encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader) as pipe:
            texts.append(pipe.read())
    train(model, optimizer)
    return texts


def test_a_forked_child_of_a_rank_is_refused_and_the_ranks_go_on():
    for texts in run_ranks(_what_a_forked_child_is_told, 2, processes=True):
        told = "wrap the module in the process that trains"
        assert [text.count(told) for text in texts] == [1, 1]


# -- collectives of the user's own -----------------------------------------------------------


def logged_here():
    """Errors that this process says from now on."""
    logged, handler = [], logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("gemini").addHandler(handler)
    return logged


def reads_while_others_wait(rank, deadline_seconds, goes_on):
    """Rank 0 reads a parameter, and the others wait for it in torch's own barrier."""
    communicator.DEADLINE_SECONDS = deadline_seconds
    model = GeminiDDP(Layers(), precision="fp32", min_chunk_size_m=1 / 2**20, search_range_m=0)
    logged = logged_here()
    if rank == 0:
        with pytest.raises(SequenceError) if goes_on else nullcontext():
            model.module.layers[2].weight.data.norm()
    try:
        dist.barrier()
    except RuntimeError as error:
        error.add_note("logged: " + "".join(logged))
        raise
    return logged


def told_of(rank):
    return (
        f"rank 0 reads chunk 2 (layers.2.weight), and waits for rank {rank}, which is in "
        "torch.distributed.barrier() and waits for rank 0"
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_reads_while_others_are_in_a_barrier_ends_them_all(world_size):
    """As TRL's server mode does. Every rank is told of the parameter and of both ranks."""
    with pytest.raises(AssertionError) as raised:
        run_ranks(reads_while_others_wait, world_size, 1.0, False, processes=True)
    texts = dict(re.findall(r"^(\d): (.*?)(?=^\d: |\Z)", str(raised.value), re.M | re.S))
    assert any(f"SequenceError: {told_of(rank)}" in texts["0"] for rank in range(1, world_size))
    for rank in range(1, world_size):
        assert f"logged: {told_of(rank)}" in texts[str(rank)]
        assert "SequenceError" not in texts[str(rank)]  # it is in code of the user's


def test_a_rank_that_comes_to_the_barrier_after_its_error_is_waited_for():
    first, second = run_ranks(reads_while_others_wait, 2, 1.0, True, processes=True)
    assert first == [] and len(second) == 1 and second[0].startswith(told_of(1))


def reads_while_two_others_talk(rank, looked):
    """Rank 1 waits for rank 2, which comes late; both come to the read then."""
    communicator.DEADLINE_SECONDS = DEADLINE_SECONDS
    look, looks = UserCalls.look, []

    def counted(self, before):
        if rank == 1 and self.meeting.waiting() is not None:
            looks.append(before)
        if len(looks) > 4:
            looked.touch()
        return look(self, before)

    UserCalls.look = counted  # of this process
    model, logged = wrapped(Layers()), logged_here()
    value = torch.zeros(1)
    if rank == 1:
        dist.recv(value, src=2)
    if rank == 2:
        until(looked.exists)
        dist.send(value, dst=1)
    return model.module.layers[2].weight.data.norm().item(), *logged


def test_a_rank_that_waits_for_a_third_one_is_late_and_not_lost(tmp_path):
    found = run_ranks(reads_while_two_others_talk, 3, tmp_path / "looked", processes=True)
    assert len(set(found)) == 1 and len(found[0]) == 1
