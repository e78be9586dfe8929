"""Choices of a user: where an optimizer's state lives and how it is updated. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gemini.arguments import by_name
from gemini.units import NUM_VERSIONS, check_block_numel

if TYPE_CHECKING:
    from gemini.nvme import WriteMeter


CPU_PATHS = ("auto", "eager", "compile")
COMPILED_FROM_NUMEL = 1 << 26  # a step gains 50 ms there on 2 cores: 100 of them pay for the build


@by_name
@dataclass(frozen=True, slots=True)
class NvmeConfig:
    """Configuration of state on disk. The defaults need no thought.

    Raises ValueError for a block size, depth or number of versions that cannot be.
    """

    # those over which blocks are striped, or the name of one; empty: a temporary folder on a disk
    folders: tuple[str, ...] = ()
    depth: int = 2  # blocks read ahead
    checksums: bool = True
    allow_ram: bool = False
    write_budget: int | None = None  # bytes over the whole run
    # what all files of the optimizer that this belongs to have written; made by the optimizer
    meter: WriteMeter | None = field(default=None, compare=False, repr=False)
    engine: Any = "threads"  # or "tensornvme", or an Engine
    # elements of a block, a multiple of 1024; of a wrapped module a wish: see AutoPlacement; None:
    # as many as suit the device, and fit
    block_numel: int | None = None
    # of a wrapped module: steps that `model.rewind` can go back, and saves that `pinned=True` may
    # pin, together; each takes the state's bytes on disk once more
    keep_versions: int = 0

    @property
    def num_versions(self) -> int:
        """Versions of every block on disk: one that counts, one that is written, and those that are
        kept."""
        return NUM_VERSIONS + self.keep_versions

    def __post_init__(self) -> None:
        if isinstance(self.folders, str | os.PathLike):  # not a folder for each letter
            object.__setattr__(self, "folders", (os.fspath(self.folders),))
        if self.block_numel is not None:
            check_block_numel(self.block_numel)
        if self.depth < 1:
            raise ValueError(f"nvme depth={self.depth}; expected at least 1")
        if not self.keep_versions:
            return
        from gemini.nvme import MOST_VERSIONS

        if not 0 < self.keep_versions <= MOST_VERSIONS - NUM_VERSIONS:
            raise ValueError(
                f"keep_versions={self.keep_versions}; expected 0 to {MOST_VERSIONS - NUM_VERSIONS}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> NvmeConfig:
        """The object itself: it is frozen, and an engine cannot be copied."""
        return self


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Choices of one optimizer, as its targets get them."""

    nvme_fraction: float = 0.0
    nvme: NvmeConfig = NvmeConfig()
    cpu_path: str = "auto"
    optimizer: str = ""  # its class, and what it stands for: said when its state is made

    def __post_init__(self) -> None:
        if not 0 <= self.nvme_fraction <= 1:
            raise ValueError(
                f"nvme_offload_fraction={self.nvme_fraction} is outside [0, 1]; "
                "it is the share of the optimizer state's bytes that goes to disk"
            )
        if self.nvme.keep_versions and self.nvme_fraction < 1:
            raise ValueError(
                f"NvmeConfig(keep_versions={self.nvme.keep_versions}) keeps versions of all state, "
                f"and with nvme_offload_fraction={self.nvme_fraction:g} some is in memory, which "
                "has one; expected nvme_offload_fraction=1.0"
            )
        if self.cpu_path not in CPU_PATHS:
            raise ValueError(f"cpu_path={self.cpu_path!r}; expected one of {list(CPU_PATHS)}")


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """Facts that choose the CPU path: of the whole model, so the same on every rank and tier."""

    numel: int  # of all parameters that are updated, over all ranks
    has_master: bool  # fp32 masters of 16-bit weights
    rounds_at_random: bool = False
    is_float64: bool = False  # parameters and state


def wants_compiled(cpu_path: str, facts: UpdateFacts) -> bool:
    """Whether the update is to be compiled.

    `"auto"` does where fp32 masters make eager operators convert, and the model is large. Raises
    ValueError for a path that this model cannot take.
    """
    if cpu_path == "compile" and facts.rounds_at_random:
        raise ValueError(
            'master_weights=False rounds at random, which cpu_path="compile" does not; '
            'use cpu_path="eager"'
        )
    if cpu_path == "compile" and facts.is_float64:
        raise ValueError('cpu_path="compile" is not for float64 parameters; use cpu_path="eager"')
    if cpu_path == "auto":
        return facts.has_master and facts.numel >= COMPILED_FROM_NUMEL
    return cpu_path == "compile"
