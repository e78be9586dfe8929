"""Machines that are asked about: cards by name, a doctor's report, and assumptions. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gemini.placement.sizes import Bandwidths, Budgets
from gemini.placement.speeds import FOLDER, KeptSpeeds
from gemini.units import GIB, Bytes, format_bytes

# Where nothing was measured: an accelerator on PCIe 4, one disk; and a desktop's cores
TYPICAL = {
    "cuda": Bandwidths(
        host_to_device=24e9, device_to_host=24e9, nvme_read=5e9, nvme_write=3e9, collective=40e9,
        device_memory=1.4e12, host_memory=120e9, flops=120e12,
    ),
    "cpu": Bandwidths(
        nvme_read=2e9, nvme_write=2e9, collective=2e9, device_memory=20e9, host_memory=20e9,
        flops=3e11,
    ),
}  # fmt: skip
PCIE = {4: 24e9, 5: 50e9}  # a way, x16
USABLE_FLOPS = 0.4  # of a data sheet's, in forward and backward
CONTEXT_BYTES = GIB  # of a card's memory, for CUDA's own
USUAL_RAM = 64 * GIB  # of a node, where nobody says
SYSTEM_BYTES = (
    2 * GIB
)  # of a node's RAM, for its system and the page cache that it cannot do without
PROCESS_BYTES = 3 * GIB  # of it for each rank: interpreter, libraries, CUDA's own, a loader


@dataclass(frozen=True, slots=True)
class Card:
    """Data sheet of a GPU."""

    gib: int
    bytes_per_s: float
    flops: float  # dense bf16, sums in fp32
    pcie: int

    @property
    def usable_bytes(self) -> int:
        return self.gib * GIB - CONTEXT_BYTES

    @property
    def speeds(self) -> dict[str, float]:
        """Speeds by names of `Bandwidths`."""
        link = PCIE[self.pcie]
        return {
            "host_to_device": link, "device_to_host": link, "device_memory": self.bytes_per_s,
            "flops": USABLE_FLOPS * self.flops,
        }  # fmt: skip


CARDS = {
    "rtx4080": Card(16, 717e9, 97e12, 4),
    "rtx3090": Card(24, 936e9, 71e12, 4),
    "rtx4090": Card(24, 1008e9, 165e12, 4),
    "l4": Card(24, 300e9, 121e12, 4),
    "rtx5090": Card(32, 1792e9, 209e12, 5),
    "a100-40g": Card(40, 1555e9, 312e12, 4),
    "l40s": Card(48, 864e9, 362e12, 4),
    "a100": Card(80, 2039e9, 312e12, 4),
    "h100": Card(80, 3350e9, 989e12, 5),
    "h200": Card(141, 4800e9, 989e12, 5),
}


@dataclass(frozen=True, slots=True)
class ProcessCosts:
    """RAM of a process that no plan counts, as `gemini.doctor.process` measures it.

    floor: interpreter, libraries and threads; None where it was not measured.
    product: code of one matrix product in 16 bits that the CPU compiles; 0: it compiles none.
    parameter: objects of one wrapped parameter.
    thread: one tile of scratch in all threads that update, and what else these take.
    """

    floor: int | None
    product: int
    parameter: int
    thread: int


TYPICAL_PROCESS = ProcessCosts(None, 9 << 16, 12 << 10, 6 << 20)  # of a processor with AVX-512


@dataclass(frozen=True, slots=True)
class Hardware:
    """Hardware that is asked about; memory and disk are of one device and of one node.

    sources: origin of a number, by its name here or in `Bandwidths`; others are assumed.
    """

    world_size: int
    ranks_per_node: int
    device_mem: int
    host_mem: int
    nvme: int
    bandwidths: Bandwidths
    device: str = "cuda"
    sources: tuple[tuple[str, str], ...] = ()
    folder: str = "."  # of files
    is_here: bool = False  # measured where it is asked; flags are those of `train`
    process: ProcessCosts = TYPICAL_PROCESS
    run_speeds: Bandwidths | None = None  # a run chooses homes with these; None: with usual ones

    def budgets(self) -> Budgets:
        """Budgets of one rank. On `cpu` the device is the node's RAM."""
        on_cpu = self.device == "cpu"
        device = min(self.device_mem, self.host_mem) if on_cpu else self.device_mem
        node = Budgets(Bytes(device), Bytes(self.host_mem), Bytes(self.nvme))
        return node.divided(self.ranks_per_node, self.ranks_per_node if on_cpu else 1)

    def assumptions(self, what: Mapping[str, str]) -> Iterator[str]:
        """Each number with its source. what: numbers that mattered, name to words."""
        sources = dict(self.sources)
        for name, words in what.items():
            if name in ("device_mem", "host_mem", "nvme"):
                number = format_bytes(getattr(self, name))
            else:
                speed = getattr(self.bandwidths, name)
                number = f"{speed / 1e12:.3g} TFLOP/s" if name == "flops" else _per_second(speed)
            yield f"{words}: {number} ({sources.get(name, 'assumed')})"


def usable_ram(ram: int, ranks: int) -> int:
    """RAM of a node for a plan: less what its system and the processes of its ranks take."""
    return max(0, ram - SYSTEM_BYTES - ranks * PROCESS_BYTES)


def _per_second(speed: float) -> str:
    return f"{speed / 1e9:.3g} GB/s"


def machine_of(
    given: Mapping[str, int],
    *,
    device: str = "cuda",
    world_size: int = 1,
    ranks_per_node: int = 1,
    gpu: str | None = None,
    report: Path | None = None,
    speeds: Path | None = None,
    folder: str = ".",
) -> Hardware:
    """Machine of the sizes `given` (device_mem, host_mem, nvme), else of files, the card,
    assumptions. There is no disk that nobody gave.

    report: output of `python -m gemini doctor --json`. speeds: JSON, by names of `Bandwidths`.
    Raises ValueError for a card that is not known and for other files.
    """
    if gpu is not None and (gpu not in CARDS or device == "cpu"):
        raise ValueError(
            f"--gpu {gpu} with --device {device}; expected cuda, of {', '.join(CARDS)}"
        )
    ram = usable_ram(USUAL_RAM, ranks_per_node)
    numbers: dict[str, Any] = {"device_mem": 24 * GIB, "host_mem": ram, "nvme": 0}
    links: dict[str, float] = {}
    process, run_speeds = TYPICAL_PROCESS, None
    kept = format_bytes(USUAL_RAM - ram)
    sources = {
        "host_mem": f"assumed: {format_bytes(USUAL_RAM)} less {kept} for system and processes",
        "nvme": "no --nvme",
    }
    if gpu is not None:
        numbers["device_mem"] = CARDS[gpu].usable_bytes
        links |= CARDS[gpu].speeds
        sources |= dict.fromkeys(("device_mem", *links), f"data sheet of {gpu}")
        sources["flops"] = f"{USABLE_FLOPS:g} of the data sheet of {gpu}"
    if report is not None:
        told = _read(report)
        sizes, speeds_there, found = _of_report(told, report)
        of_rank = speeds_there.of_rank(found, ranks_per_node, has_host_tier=device != "cpu")
        run_speeds = of_rank.links
        measured = {name: getattr(run_speeds, name) for name in sorted(of_rank.measured)}
        sizes["host_mem"] = max(0, sizes["host_mem"] - ranks_per_node * PROCESS_BYTES)
        folder = found if folder == "." else folder
        process = _process(told, report)
        numbers |= sizes
        links |= measured
        sources |= dict.fromkeys((*sizes, *measured), f"measured, {report}")
    if speeds is not None:
        said = {name: float(value) for name, value in _speeds(_read(speeds)).items()}
        links |= said
        sources |= dict.fromkeys(said, f"{speeds}")
    numbers |= given
    sources |= dict.fromkeys(given, "given")
    return Hardware(
        world_size, ranks_per_node, numbers["device_mem"], numbers["host_mem"], numbers["nvme"],
        replace(TYPICAL[device], **links), device, tuple(sources.items()), folder,
        process=process, run_speeds=run_speeds,
    )  # fmt: skip


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON; {error}") from None


def _speeds(told: Any) -> dict[str, float]:
    Bandwidths.from_json(told)  # refuses unknown names
    return dict(told)


def _of_report(told: Any, path: Path) -> tuple[dict[str, int], KeptSpeeds, str]:
    """Sizes, speeds as the doctor there kept them, and the folder with most room."""
    if not isinstance(told, dict) or not {"bandwidths", "ram_bytes"} <= told.keys():
        raise ValueError(f"{path} is no report; expected that of python -m gemini doctor --json")
    sizes = {"host_mem": told["ram_left_bytes"], "nvme": 0}
    if told["devices"]:
        sizes["device_mem"] = min(one["free_bytes"] for one in told["devices"])
    else:
        sizes["device_mem"] = told["ram_left_bytes"]
    usable = [one for one in told["folders"] if one["error"] is None]
    nowhere: dict[str, Any] = {"free_bytes": 0, "path": "."}
    most = max(usable, key=lambda one: one["free_bytes"], default=nowhere)
    sizes["nvme"] = most["free_bytes"]
    links = _speeds(told["bandwidths"])
    disk = {name: links.pop(name) for name in FOLDER if name in links}
    found = str(most["path"])
    return sizes, KeptSpeeds("", (), links, {found: disk}), found


def _process(told: Any, path: Path) -> ProcessCosts:
    """Costs of a process; assumed where the report is older than their measurement."""
    costs = told.get("process")
    if costs is None:
        return TYPICAL_PROCESS
    names = [field.name for field in fields(ProcessCosts)]
    if not isinstance(costs, dict) or any(not isinstance(costs.get(n), int) for n in names):
        raise ValueError(f"process of {path} is {costs!r}; expected whole numbers of {names}")
    return ProcessCosts(*(costs[name] for name in names))
