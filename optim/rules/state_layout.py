"""Which columns of state an optimizer keeps for every element, as data. Pure.

Kernels, planner, store and checkpoint read this value; none of them knows an optimizer by name.
"""

from __future__ import annotations

from dataclasses import dataclass

MASTER = "master"  # fp32 weights; the visible parameter is their rounded copy
REMAINDER = "remainder"  # what bf16 weights lack of their masters; see `split_master.py`
WEIGHT = "weight"  # bf16 parameters of one version on disk, beside their remainders
WEIGHT_DTYPE = "bfloat16"  # of the parameters whose masters may be split
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


@dataclass(frozen=True, slots=True)
class Plane:
    """One column of state: one value an element of the parameter."""

    name: str
    dtype: str
    keeps_ties: bool = False  # never negative: its sign may say how a master was rounded

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The planes of one optimizer, in the order in which a block stores them."""

    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"plane names {self.names} are not unique")

    @property
    def names(self) -> list[str]:
        return [plane.name for plane in self.planes]

    @property
    def bytes_per_element(self) -> int:
        return sum(plane.itemsize for plane in self.planes)

    @property
    def has_master(self) -> bool:
        """fp32 weights are known, as a plane or as what the parameters lack of them."""
        return self.planes[0].name in (MASTER, REMAINDER)

    @property
    def is_split(self) -> bool:
        """Masters share their upper half with the parameters."""
        return self.planes[0].name == REMAINDER

    @property
    def tie_keeper(self) -> str:
        """The plane whose sign belongs to the masters."""
        return next(plane.name for plane in self.planes if plane.keeps_ties)

    def splits(self, dtype: str) -> bool:
        """Whether masters of parameters of this dtype may be kept as what those lack of them."""
        keeps_ties = any(plane.keeps_ties for plane in self.planes)
        return self.has_master and keeps_ties and dtype == WEIGHT_DTYPE

    def with_master(self) -> StateLayout:
        """The same state under 16-bit parameters: fp32 master weights in front."""
        return StateLayout((Plane(MASTER, "float32"), *self.planes))

    def with_remainder(self) -> StateLayout:
        """With what masters have beyond bf16 parameters, in place of the masters.

        They stay where no plane can keep their ties.
        """
        if not any(plane.keeps_ties for plane in self.planes):
            return self
        others = (plane for plane in self.planes if plane.name != MASTER)
        return StateLayout((Plane(REMAINDER, "int16"), *others))

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
