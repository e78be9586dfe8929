"""Layout of state as data: the columns that an optimizer keeps for every element. Pure.

Kernels, planner, store and checkpoint read this value; none of them knows an optimizer by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from gemini.units import PARAM_ALIGN_NUMEL

MASTER = "master"  # fp32 weights; the visible parameter is their rounded copy
REMAINDER = "remainder"  # what bf16 weights lack of their masters; see `split_master.py`
WEIGHT = "weight"  # bf16 parameters of one version on disk, written with their remainders
WEIGHT_DTYPE = "bfloat16"  # of the parameters whose masters may be split
ITEMSIZE = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1,
}  # fmt: skip
GROUP_NUMEL = 8  # elements of an 8-bit plane that share an exponent
SCALE = ".scale"  # suffix to the name of the plane of what they share
FILLER = "filler"


@dataclass(frozen=True, slots=True)
class Plane:
    """Column of state: one value an element of the parameter, or a group of them."""

    name: str
    dtype: str
    keeps_ties: bool = False  # never negative: its sign may say how a master was rounded
    group: int = 1  # elements
    under_root: bool = False  # not above 15 roots of the plane that never is negative

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def numel(self, elements: int) -> int:
        """Number of values of `numel` elements."""
        return -(-elements // self.group)


@dataclass(frozen=True, slots=True)
class Kind:
    """In what planes are kept between updates.

    stored: what a plane of a layout is kept as, and behind it what groups of elements share.
    home: modules that decode and encode, by name: `optim.rules.HOME` whole planes, and
        `optim.update.HOME_loop` tiles; they have what those of `quantised` have. Kernels know it
        by its row in `kernels_triton.quantised.CODECS`.
    """

    stored: Callable[[StateLayout, Plane], Sequence[Plane]]
    home: str = "quantised"
    is_coarse: bool = False  # decoded planes may be out of proportion to each other
    has_roots: bool = False  # planes `under_root` are kept as ratios to it
    in_files: str | None = None  # name of it there; None: the same


def _bf16(layout: StateLayout, plane: Plane) -> Sequence[Plane]:
    return (replace(plane, dtype="bfloat16"),)


def _8bit(layout: StateLayout, plane: Plane) -> Sequence[Plane]:
    shared = Plane(plane.name + SCALE, "uint8", group=GROUP_NUMEL)
    return _codes(plane) if layout.is_under_root(plane) else (*_codes(plane), shared)


def _linear(layout: StateLayout, plane: Plane) -> Sequence[Plane]:
    return (*_codes(plane), Plane(plane.name + SCALE, "float32", group=PARAM_ALIGN_NUMEL))


def _codes(plane: Plane) -> Sequence[Plane]:
    return (replace(plane, dtype="uint8" if plane.keeps_ties else "int8"),)


# A kind is a row, and the modules of its home.
KIND_OF = {
    "fp32": Kind(lambda layout, plane: (plane,)),
    "bf16": Kind(_bf16),
    "8bit": Kind(_8bit, is_coarse=True, has_roots=True, in_files="8bit-float"),
    "8bit-linear": Kind(_linear, in_files="8bit"),  # as earlier versions pinned them; only read
}
KINDS = tuple(name for name in KIND_OF if name != "8bit-linear")  # that a user may ask for


def kind_of(name: str) -> Kind:
    """Kind that a user asks for. Raises ValueError for an unknown one."""
    if name not in KINDS:
        raise ValueError(f"state={name!r}; expected one of {list(KINDS)}")
    return KIND_OF[name]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Planes of one optimizer, in the order in which a block stores them.

    kind: of `KIND_OF`; but for "fp32", memory and disk have what `stored` says, and a rule, a
        checkpoint and a state dict these planes.
    """

    planes: tuple[Plane, ...]
    kind: str = "fp32"

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"plane names {self.names} are not unique")
        if self.kind not in KIND_OF:
            kind_of(self.kind)

    @property
    def names(self) -> list[str]:
        return [plane.name for plane in self.planes]

    @property
    def bytes_per_element(self) -> float:
        """Bytes an element of whole masters and planes as kept; of 8 bits with a share of
        what groups share."""
        return sum(plane.itemsize / plane.group for plane in self.stored().planes)

    @property
    def is_quantised(self) -> bool:
        """Whether planes are kept in fewer bits than updates are computed in. Then no master is
        half-way between two weights."""
        return self.kind != "fp32"

    @property
    def home(self) -> str:
        """Home of its kind."""
        return KIND_OF[self.kind].home

    @property
    def codec(self) -> Any:
        """Module that decodes and encodes whole planes; see `Kind`."""
        return import_module(f"gemini.optim.rules.{self.home}")

    def is_under_root(self, plane: Plane) -> bool:
        """Whether codes of a plane are ratios to the root of another plane."""
        has_roots = plane.under_root and KIND_OF[self.kind].has_roots
        return has_roots and any(p.keeps_ties for p in self.planes)

    @property
    def coding_order(self) -> list[int]:
        """Planes but masters by position, in the order in which they are coded: what others are
        under the root of is the first."""
        planes = [plane for plane in self.planes if plane.name not in (MASTER, REMAINDER)]
        return sorted(range(len(planes)), key=lambda i: not planes[i].keeps_ties)

    @property
    def has_master(self) -> bool:
        """Whether fp32 weights are known, as a plane or as the remainders of the parameters."""
        return self.planes[0].name in (MASTER, REMAINDER)

    @property
    def is_split(self) -> bool:
        """Whether masters share their upper half with the parameters."""
        return self.planes[0].name == REMAINDER

    @property
    def tie_keeper(self) -> str:
        """Plane whose sign belongs to the masters, where planes are not quantised."""
        return next(plane.name for plane in self.planes if plane.keeps_ties)

    def splits(self, dtype: str) -> bool:
        """Whether masters of parameters of this dtype may be split."""
        return self.has_master and self._can_split and dtype == WEIGHT_DTYPE

    @property
    def _can_split(self) -> bool:
        return self.is_quantised or any(plane.keeps_ties for plane in self.planes)

    def with_master(self) -> StateLayout:
        """Layout of the same state under 16-bit parameters: fp32 master weights in front."""
        return replace(self, planes=(Plane(MASTER, "float32"), *self.planes))

    def with_remainder(self) -> StateLayout:
        """Layout with remainders in place of the masters.

        Masters stay where no plane can keep their ties.
        """
        if not self._can_split:
            return self
        others = (plane for plane in self.planes if plane.name != MASTER)
        return replace(self, planes=(Plane(REMAINDER, "int16"), *others))

    def stored(self) -> StateLayout:
        """Layout of memory and disk: planes as their kind keeps them, and after all of them what
        groups share."""
        if not self.is_quantised:
            return self
        planes, shared = list[Plane](), list[Plane]()
        for plane in self.planes:
            own, *rest = (plane,)
            if plane.name not in (MASTER, REMAINDER):
                own, *rest = KIND_OF[self.kind].stored(self, plane)
            planes.append(own)
            shared += rest
        return StateLayout((*planes, *shared))

    def in_float64(self) -> StateLayout:
        """Layout of the same state of float64 parameters. Raises ValueError where it is
        quantised."""
        if self.is_quantised:
            raise ValueError(
                f"state={self.kind!r} quantises what fp32 updates compute, and a parameter is "
                'float64; expected state="fp32"'
            )
        return StateLayout(tuple(Plane(plane.name, "float64") for plane in self.planes))

    @property
    def shares(self) -> list[int | None]:
        """Position in `stored` of what the groups of each plane share; None: they share nothing."""
        names = self.stored().names
        shared = (name + SCALE for name in self.names)
        return [names.index(name) if name in names else None for name in shared]

    @property
    def dtype(self) -> str:
        """Dtype in which updates are computed."""
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
            end += plane.numel(numel) * plane.itemsize
        return tuple(offsets)

    def only(self, names: Set[str]) -> StateLayout:
        """Layout with these of the rule's planes, and masters as they are; where nothing is left,
        with a byte for a group of elements."""
        others = (MASTER, REMAINDER)
        kept = [plane for plane in self.planes if plane.name in names or plane.name in others]
        if not kept:  # every block has a plane, and the dtype of updates is its first one's
            wide = self.dtype == "float64"
            kept = [self.planes[0] if wide else Plane(FILLER, "uint8", group=PARAM_ALIGN_NUMEL)]
        return self if tuple(kept) == self.planes else replace(self, planes=tuple(kept))

    def block_nbytes(self, numel: int) -> int:
        """Bytes of a block of `numel` elements, all planes."""
        return sum(plane.numel(numel) * plane.itemsize for plane in self.planes)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of state: which of a rule's planes each parameter has, by its index; the others have
    all.

    A block has those of all parameters in it, so only the few that hold parameters of two kinds
    keep a plane for elements that have none.
    """

    of_param: tuple[frozenset[str] | None, ...] = ()

    def has(self, param: int, plane: str) -> bool:
        """Whether a parameter has a plane; every one has its master."""
        found = self.of_param[param] if param < len(self.of_param) else None
        return found is None or plane == MASTER or plane in found

    def by_name(self, names: Sequence[str]) -> dict[str, Set[str]]:
        """Planes of parameters that have only some, masters too; `names[i]` is that of i."""
        pairs = zip(names, self.of_param, strict=False)
        return {name: planes | {MASTER} for name, planes in pairs if planes is not None}

    def of(self, params: Collection[int], layout: StateLayout) -> StateLayout:
        """Layout of these parameters together; the whole layout of none."""
        if not self.of_param or not params:
            return layout
        return layout.only(
            {p.name for p in layout.planes if any(self.has(i, p.name) for i in params)}
        )


ALL_COLUMNS = Columns()
