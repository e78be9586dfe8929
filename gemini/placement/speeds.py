"""Speeds that plans count with: kept ones, which `python -m gemini doctor` measured, or usual ones.
Pure.

They order homes and updates, and price them; they limit nothing, so no bit depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .sizes import Bandwidths, least_bandwidths

# A usual disk and usual memory, in bytes a second
USUAL = Bandwidths(
    host_to_device=20e9, device_to_host=20e9, nvme_read=1.5e9, nvme_write=1.2e9, collective=10e9,
    device_memory=500e9, host_memory=20e9, flops=1e12,
)  # fmt: skip
CPU_MEMORY = 20e9
FOLDER = ("nvme_read", "nvme_write")  # names of a folder's speeds
NOT_MEASURED = "usual ones: `python -m gemini doctor` measures this machine's, and keeps them"


def usual_speeds(has_host_tier: bool) -> Bandwidths:
    """Bandwidths of a machine that nobody has timed."""
    return USUAL if has_host_tier else replace(USUAL, device_memory=CPU_MEMORY)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of one rank's links, and in words where they are from."""

    links: Bandwidths
    origin: str = NOT_MEASURED
    measured: frozenset[str] = frozenset()  # of `links`; others are usual


USUAL_SPEEDS = Speeds(USUAL)


def agreed(speeds: Sequence[Speeds]) -> Speeds:
    """The least of all ranks, link by link. Origins that differ are all named."""
    origins = dict.fromkeys(one.origin for one in speeds)
    everywhere = frozenset.intersection(*(one.measured for one in speeds))
    links = least_bandwidths([one.links for one in speeds])
    return Speeds(links, "; elsewhere ".join(origins), everywhere)


@dataclass(frozen=True, slots=True)
class KeptSpeeds:
    """Speeds of one machine, bytes a second, for all that runs on it.

    day: of the measurement. devices: names of its CUDA devices. links: by names of `Bandwidths`.
    folders: by path, by the names in `FOLDER` that were measured.
    """

    day: str
    devices: tuple[str, ...]
    links: Mapping[str, float]
    folders: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, told: object) -> KeptSpeeds:
        """Speeds as `as_json` gave them. Raises ValueError for anything else."""
        if not isinstance(told, dict) or told.keys() != set(cls.__slots__):
            raise ValueError(f"expected an object with {', '.join(cls.__slots__)}")
        day, devices, links, folders = (told[name] for name in cls.__slots__)
        if not isinstance(day, str) or not isinstance(devices, list):
            raise ValueError("expected a text as the day and a list of devices")
        if not isinstance(folders, dict) or any(
            not isinstance(one, dict) or not one.keys() <= set(FOLDER) for one in folders.values()
        ):
            raise ValueError(f"expected {', '.join(FOLDER)} of each folder")
        for one in (links, *folders.values()):
            if not isinstance(one, dict) or any(type(value) is not float for value in one.values()):
                raise ValueError("expected speeds as numbers with a point")
            Bandwidths.from_json(one)  # refuses unknown names and what is not above 0
        return cls(day, tuple(map(str, devices)), links, folders)

    def as_json(self) -> dict[str, Any]:
        return asdict(replace(self, links=dict(self.links), folders=dict(self.folders)))

    def beside(self, before: KeptSpeeds | None) -> KeptSpeeds:
        """These, with the folders that were measured before on the same machine."""
        if before is None or before.devices != self.devices:
            return self
        return replace(self, folders={**before.folders, **self.folders})

    def of_rank(self, folder: str | None, ranks_per_node: int, *, has_host_tier: bool) -> Speeds:
        """Speeds of one of the ranks that share RAM and disks, and on a CPU its cores too.

        folder: of `folders`, the one for files; None: none of them. What was not measured is usual.
        """
        shared = {"host_memory"}
        if not has_host_tier:
            shared |= {"device_memory", "flops"}
        found = {
            name: speed / ranks_per_node if name in shared else speed
            for name, speed in self.links.items()
        }
        if folder is not None:
            disk = self.folders[folder]
            found |= {name: speed / ranks_per_node for name, speed in disk.items()}
        without = "" if folder is not None else ", but for disks: `doctor --dir FOLDER` has theirs"
        links = replace(usual_speeds(has_host_tier), **found)
        return Speeds(links, f"measured on {self.day}{without}", frozenset(found))
