"""When the gradients of a chunk are reduced."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from gemini.runtime.schedule.reducer import Reducer


class Gradient:
    def __init__(self, log, name):
        self.log, self.name, self.num_arrived = log, name, 0

    def add(self, slot, grad):
        self.num_arrived += 1

    def drop(self):
        self.num_arrived = 0

    def begin_reduce(self):
        self.log.append(self.name)
        self.num_arrived = 0

    def end_reduce(self):
        pass

    def end_backward_unreduced(self):
        pass


@pytest.fixture
def log():
    return []


@pytest.fixture
def chunks(log):
    """Two chunks of one parameter, used in this order in forward."""
    slots = [(SimpleNamespace(param=i),) for i in range(2)]
    specs = [SimpleNamespace(id=i, trainable=True, slots=slots[i]) for i in range(2)]
    return [SimpleNamespace(spec=spec, gradient=Gradient(log, spec.id)) for spec in specs]


def test_a_chunk_waits_for_the_end_of_every_call_that_uses_it(chunks, log):
    reducer = Reducer(chunks, by_moment=True)
    reducer.announce([0, 1])
    reducer.begin()
    reducer.opened([1], whole=False)
    reducer.reduce_due(2, False)
    assert log == []
    reducer.closed([1], whole=False)
    reducer.reduce_due(2, False)
    assert log == [1]
    reducer.finish()
    assert log == [1, 0]


def test_a_gradient_is_present_from_its_arrival_until_all_are_dropped(chunks):
    reducer = Reducer(chunks, by_moment=False)
    reducer.begin()
    reducer.arrived(chunks[1], 0, torch.ones(1))
    assert reducer.present == [False, True]
    reducer.finish()
    reducer.set_present(0)
    assert reducer.present == [True, True]
    reducer.set_present(1, there=False)
    assert reducer.present == [True, False]
    reducer.drop_gradients()
    assert reducer.present == [False, False]


def test_a_chunk_whose_gradient_came_twice_is_waited_for_twice_the_next_time(chunks, log):
    reducer = Reducer(chunks, by_moment=False)
    grad = torch.ones(1)
    for arrivals in ([1, 0, 0], [1, 0, 0]):
        log.clear()
        reducer.begin()
        for chunk in arrivals[:2]:
            reducer.arrived(chunks[chunk], 0, grad)
        begun = list(log)
        reducer.arrived(chunks[0], 0, grad)
        reducer.finish()
    assert begun == [1] and log == [1, 0]


def test_what_waits_for_the_end_is_reduced_behind_the_others(chunks, log):
    reducer = Reducer(chunks, by_moment=False, at_end={1})
    for _ in range(2):
        log.clear()
        reducer.begin()
        reducer.arrived(chunks[1], 0, torch.ones(1))
        assert log == []
        reducer.arrived(chunks[0], 0, torch.ones(1))
        assert log == [0]
        reducer.finish()
        assert log == [0, 1]


def test_nothing_is_reduced_under_no_sync(chunks, log):
    reducer = Reducer(chunks, by_moment=False)
    reducer.synchronise = False
    reducer.begin()
    reducer.arrived(chunks[1], 0, torch.ones(1))
    reducer.finish()
    assert log == [] and reducer.unsynchronised


CALLS = ((0,), (1,), (0,))  # of which backward begins behind two, in the second again


def test_a_chunk_has_its_place_behind_the_last_call_and_gradient_of_any_rank(chunks, log):
    agree = mock.Mock(side_effect=lambda chunks: chunks)
    reducer = Reducer(chunks, by_moment=True, agree=agree)
    reducer.begin(CALLS, 2)
    reducer.arrived(chunks[1], 0, torch.ones(1))
    assert reducer.is_learning and reducer.found({0: 1, 1: 2}) == {0: 1, 1: 2}
    reducer.reduce_due(3, True)
    reducer.arrived(chunks[1], 0, torch.ones(1))
    found = reducer.found({0: 3, 1: 2})
    assert found == {0: 3, 1: 3} and log == []
    reducer.register_order((CALLS, 2), [{0: 4}, found])
    reducer.finish()
    log.clear()
    agree.side_effect = lambda chunks: pytest.fail("all ranks know")
    reducer.begin(CALLS, 2)
    assert not reducer.is_learning
    begun = []
    for num_calls in (3, 4, 5):
        reducer.reduce_due(num_calls, True)
        begun.append(list(log))
    assert begun == [[], [1], [1, 0]]
    reducer.reset()
    reducer.forget_places()
    reducer.begin(CALLS, 2)
    assert reducer.is_learning


def test_what_another_rank_does_not_propose_is_reduced_at_the_end(chunks, log):
    proposed, answers = [], iter([[], [0], []])
    reducer = Reducer(
        chunks, by_moment=True, agree=lambda due: proposed.append(due) or next(answers)
    )
    reducer.announce([0, 1])
    reducer.begin()
    reducer.opened([0, 1], whole=False)
    reducer.closed([0, 1], whole=False)
    for num_calls in (3, 4, 5):
        reducer.reduce_due(num_calls, False)
    assert proposed == [[1, 0], [1, 0], [1]] and log == [0]
    reducer.finish()
    assert log == [0, 1]
