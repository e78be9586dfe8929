"""States of a parameter and the transitions that are legal. Pure."""

from __future__ import annotations

from enum import Enum


class TensorState(Enum):
    """Where the bytes of one parameter are: `shard` persists, `payload` is what a gather makes."""

    __hash__ = object.__hash__  # members are compared by identity; enum's own hash is in Python

    FREE = "free"  # no values anywhere yet
    HOLD = "hold"  # shard only, or payload idle: may be released and moved
    COMPUTE = "compute"  # payload on the compute device, in use by a module: stays there
    HOLD_AFTER_FORWARD = "hold_after_forward"  # as HOLD; its backward is still to come
    HOLD_AFTER_BACKWARD = "hold_after_backward"  # as HOLD; its module is done with it
    READY_FOR_REDUCE = "ready_for_reduce"  # its gradient has arrived in the chunk's gradient buffer


_S = TensorState
LEGAL: dict[TensorState, frozenset[TensorState]] = {
    _S.FREE: frozenset({_S.HOLD}),
    _S.HOLD: frozenset({_S.COMPUTE, _S.READY_FOR_REDUCE, _S.FREE}),
    _S.COMPUTE: frozenset(
        {
            _S.COMPUTE,  # entered again before it was left: reused or nested modules
            _S.HOLD_AFTER_FORWARD,
            _S.HOLD_AFTER_BACKWARD,
            _S.READY_FOR_REDUCE,
            _S.HOLD,
        }
    ),
    _S.HOLD_AFTER_FORWARD: frozenset({_S.COMPUTE, _S.READY_FOR_REDUCE, _S.HOLD}),
    _S.HOLD_AFTER_BACKWARD: frozenset({_S.COMPUTE, _S.READY_FOR_REDUCE, _S.HOLD}),
    _S.READY_FOR_REDUCE: frozenset(
        {
            _S.COMPUTE,  # used again: reentrant checkpointing, tied modules
            _S.READY_FOR_REDUCE,
            _S.HOLD,
        }
    ),
}


class IllegalTransition(RuntimeError):
    """A bug of the engine, not of its user."""


def check_transition(name: str, old: TensorState, new: TensorState) -> TensorState:
    """`new`, if a parameter in state `old` may take it. Raises IllegalTransition with its name."""
    if new not in LEGAL[old]:
        allowed = ", ".join(sorted(state.value for state in LEGAL[old]))
        raise IllegalTransition(
            f"parameter {name} went from {old.value} to {new.value}; expected one of: {allowed}"
        )
    return new
