import pytest

from gemini.tickets import Done, TicketGroup


def test_done_answers_at_once():
    assert Done(3).ready() and Done(3).wait() == 3


def test_together_waits_for_all_parts_before_it_raises():
    waited = []

    class Part:
        def __init__(self, name, error=None):
            self.name, self.error = name, error

        def ready(self):
            return self.name != "slow"

        def wait(self):
            waited.append(self.name)
            if self.error:
                raise self.error
            return self.name

    both = TicketGroup(
        [Part("a", ValueError("first")), Part("slow"), Part("b", ValueError("second"))]
    )
    assert not both.ready()
    with pytest.raises(ValueError, match="first"):
        both.wait()
    assert waited == ["a", "slow", "b"]
    assert TicketGroup([Done(1), Done(2)]).wait() == (1, 2)
