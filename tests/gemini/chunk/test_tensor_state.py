import pytest

from gemini.runtime.schedule.tensor_mgr import (
    LEGAL,
    IllegalTransition,
    TensorState,
    check_transition,
)


def test_every_state_has_a_row_and_can_be_left():
    assert set(LEGAL) == set(TensorState)
    assert all(LEGAL.values())
    # a backward that has ended leaves nothing else, and asks nobody
    assert all(TensorState.HOLD in after for old, after in LEGAL.items() if old != TensorState.HOLD)


def test_an_illegal_transition_names_the_parameter_and_both_states():
    with pytest.raises(IllegalTransition, match=r"h\.0\.w went from free to compute"):
        check_transition("h.0.w", TensorState.FREE, TensorState.COMPUTE)
