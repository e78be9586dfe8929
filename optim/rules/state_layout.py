"""Which columns of state an optimizer keeps for every element, as data. Pure.

Kernels, planner, store and checkpoint read this value; none of them knows an optimizer by name.
"""

from __future__ import annotations

from dataclasses import dataclass

MASTER = "master"  # fp32 weights; the visible parameter is their rounded copy
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Plane:
    """One column of state: one value an element of the parameter."""

    name: str
    dtype: str

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The planes of one optimizer, in the order in which a block stores them."""

    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        names = [plane.name for plane in self.planes]
        if len(set(names)) != len(names):
            raise ValueError(f"plane names {names} are not unique")

    @property
    def bytes_per_element(self) -> int:
        return sum(plane.itemsize for plane in self.planes)

    @property
    def has_master(self) -> bool:
        return self.planes[0].name == MASTER

    def with_master(self) -> StateLayout:
        """The same state under 16-bit parameters: fp32 master weights in front."""
        return StateLayout((Plane(MASTER, "float32"), *self.planes))

    def in_float64(self) -> StateLayout:
        """The same state of float64 parameters."""
        return StateLayout(tuple(Plane(plane.name, "float64") for plane in self.planes))

    @property
    def dtype(self) -> str:
        """What updates are computed in."""
        return "float64" if self.planes[0].dtype == "float64" else "float32"

    @property
    def undo_itemsize(self) -> int:
        """Bytes of one value of the undo plane."""
        return ITEMSIZE[self.dtype]

    def offsets(self, numel: int) -> tuple[int, ...]:
        """Byte offset of every plane in a block of `numel` elements."""
        offsets, end = [], 0
        for plane in self.planes:
            offsets.append(end)
            end += numel * plane.itemsize
        return tuple(offsets)

    def block_nbytes(self, numel: int) -> int:
        """Bytes of a block of `numel` elements, all planes."""
        return numel * self.bytes_per_element
