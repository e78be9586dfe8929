"""Host and device of the simulated device are different memory to every operator of torch too."""

from __future__ import annotations

from bench.shared.simulated import SimBackend
from bench.shared.simulated.operators import COPIES, Operators
from bench.shared.simulated.pages import Place


class Apart(Operators):
    """Fails where an operator is given memory of both, or a kernel the host's.

    What torch made of nothing is nobody's, and passes.
    """

    def __init__(self, backend: SimBackend) -> None:
        super().__init__(backend)
        self.operators = 0  # that were given memory of either

    def check(self, name: str, places: set[Place | None]) -> None:
        self.operators += bool(places)
        if len(places) > 1 and name not in COPIES:
            raise AssertionError(f"{name} is given memory of the device and of the host")
        if "host" in places and name.startswith("gemini::"):
            raise AssertionError(f"{name} is given host memory")
