"""Who is told what happens to an engine: in order, and only as long as it is there."""

from dataclasses import fields
from unittest import mock

import pytest

from bench.shared.models import Tower
from gemini import GeminiDDP
from gemini.runtime.events import EngineEvent, EngineEvents
from gemini.runtime.memory.shard_storage import ShardStorage
from optim import HybridAdam
from tests.support.loops.tails import SMALL, wrapped

CHECK = {"forward": 1}  # of the module, which listens as long as it is wrapped


def listeners(engine):
    """Names of events, and how many listen."""
    events = [field.name for field in fields(EngineEvents)]
    found = {name: len(getattr(engine.events, name).listeners) for name in events}
    return {name: count for name, count in found.items() if count}


def test_all_that_listen_are_told_in_order_of_listening():
    event, told = EngineEvent(), []

    def first(number):
        told.append(("first", number))

    def second(number):
        told.append(("second", number))

    for listener in (first, second):
        event.listen(listener)
    event(1)
    event.leave(first)
    event(2)
    assert told == [("first", 1), ("second", 1), ("second", 2)]
    with pytest.raises(ValueError):
        event.leave(first)


@pytest.mark.parametrize("update", ["serial", "tail"])
def test_an_optimizer_that_is_closed_is_told_nothing(update):
    model, optimizer = wrapped(update)
    optimizer.bind()
    assert listeners(model.engine) == {**CHECK, "keeping": 1}
    optimizer.close()
    assert listeners(model.engine) == CHECK


def test_an_optimizer_that_could_not_be_made_is_told_nothing():
    model = GeminiDDP(Tower(), **SMALL)
    full = mock.patch.object(ShardStorage, "place_gradients", side_effect=OSError("full"))
    with full, pytest.raises(OSError, match="full"):
        HybridAdam(model.parameters())
    assert listeners(model.engine) == CHECK and model.engine.target is None
    optimizer = HybridAdam(model.parameters())
    assert listeners(model.engine) == {**CHECK, "keeping": 1}
    optimizer.close()
