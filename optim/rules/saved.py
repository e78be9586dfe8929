"""Small values of a saved state, which may be anybody's: is each what it takes the place of? Pure.

Planes are compared with parameters by their shapes. A step count, a counter of the loss scale or an
option is one number: a wrong one is found in no shape, and makes every weight NaN in the next step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

MOST_STEPS = 1 << 31  # of a run: step counts are below
_LARGEST_SCALE = 3.4028234663852886e38  # of fp32
_COUNTS = ("good_steps", "hysteresis_left", "skipped_steps")


def number_of(value: Any) -> float | int | None:
    """Number of a value, or of a tensor or array of one element; None for others, for flags, and
    for a whole number that no float is."""
    if hasattr(value, "numel"):
        if value.numel() != 1:
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return None if isinstance(value, int) and abs(value) >= _LARGEST_SCALE else value


def is_count(value: Any) -> bool:
    """Whether a value is a number of steps."""
    number = number_of(value)
    return number is not None and 0 <= number < MOST_STEPS and number == int(number)


def check_steps(state: Iterable[Any]) -> None:
    """Raise ValueError if the saved planes of a parameter have a step count that is none."""
    for planes in state:
        if isinstance(planes, Mapping) and not is_count(planes.get("step", 0)):
            raise ValueError(f"a saved state has step={planes['step']!r:.80}; {_EXPECTED}")


_EXPECTED = f"expected a whole number from 0 to {MOST_STEPS - 1}"


def check_counters(saved: Any) -> None:
    """Raise ValueError unless `saved` has counters of a loss scale, or none."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"saved counters are a {type(saved).__name__}; expected a dict of numbers")
    for name in _COUNTS:
        if not is_count(saved.get(name, 0)):
            raise ValueError(f"saved counters have {name}={saved[name]!r:.80}; {_EXPECTED}")
    if "scale" not in saved:
        return
    scale = number_of(saved["scale"])
    if scale is None or not 0 < scale <= _LARGEST_SCALE:
        raise ValueError(
            f"saved counters have scale={saved['scale']!r:.80}; expected a number above 0, in fp32"
        )
    for name in _COUNTS[:2]:
        if name not in saved:
            raise ValueError(f"saved counters have a scale and no {name}; expected both")


def is_alike(own: Any, saved: Any) -> bool:
    """Whether a saved value can take the place of `own`: a finite number of a number, a flag of a
    flag, a text of a text, and so on in as long a container.

    None stands for what an option leaves open: anything plain can take its place.
    """
    if saved is None:
        return own is None or isinstance(own, bool)
    number = number_of(saved)
    if own is None:
        return number is not None or isinstance(saved, (bool, str, tuple, list, dict))
    if isinstance(own, (tuple, list)):
        return (
            isinstance(saved, (tuple, list))
            and len(saved) == len(own)
            and all(b is None or is_alike(a, b) for a, b in zip(own, saved, strict=True))
        )
    if number_of(own) is not None:
        return number is not None and -math.inf < number < math.inf
    return type(own) is type(saved)
