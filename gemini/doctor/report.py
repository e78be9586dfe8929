"""Report on a machine: facts as frozen values, findings from them, and their text. Pure.

Speeds are bytes a second, sizes are bytes. None is a figure that could not be measured.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gemini.placement.speeds import KeptSpeeds
from gemini.units import GIB, MIB, format_bytes

NEEDED = ("torch", "numpy", "psutil", "safetensors")
STATE_BYTES_MOVED = 22  # an element and step of Adam on NVMe: 10 read, 12 written (ADR 0002)
SLOW_DISK = 1.0e9  # mixed; below it a step of 10**9 parameters takes 22 s and more
SLOW_BF16 = 0.5  # of the speed of fp32: a processor without instructions for it has 0.01
SLOW_LINK = 10e9  # a way; PCIe 3 x16 has 12
SLOW_RAM = 8e9  # a copy's bytes read and written; one DDR4 channel has 15 to 20
SMALL_MEMLOCK = 64 * MIB
SMALL_DISK = 16 * GIB


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about one CUDA device: memory and speeds."""

    name: str
    capability: str  # "9.0"
    total_bytes: int
    free_bytes: int
    copy_bytes_per_s: float  # read and written within the device
    host_to_device: float  # from pinned memory
    device_to_host: float
    both_ways: float  # each way, where both copy at the same time
    flops: float  # a second, of a layer's forward and backward in bf16
    numa_node: int | None = None  # that pinned memory is on; None: wherever the system has it


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """Facts about one folder for files. `error`: why it cannot be used; the rest is unset then."""

    path: str
    error: str | None = None
    file_system: str = "unknown"
    free_bytes: int = 0
    direct: bool = False  # takes O_DIRECT
    engine: str = ""  # the fastest
    read: float = 0.0
    write: float = 0.0
    left_bytes: int = 0  # in files of processes that died

    @property
    def mixed(self) -> float:
        """Speed of reading and writing the same bytes one after the other, as a step does."""
        return 2 / (1 / self.read + 1 / self.write)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a machine, as `gemini.doctor.measure.examine` finds them."""

    versions: tuple[tuple[str, str | None], ...]  # (package, version); None is not installed
    cores: int
    load_average: float
    ram_bytes: int
    ram_left_bytes: int  # of the machine and of its cgroup
    ram_copy_bytes_per_s: float  # read and written
    cpu_flops: dict[str, float]  # a second, of a matrix product, by precision
    memlock_bytes: int | None  # None is no limit
    huge_pages: str | None  # "always", "madvise" or "never"
    temporary_file_system: str  # of the folder for temporary files
    c_compiler: str | None
    cxx_compiler: str | None
    shadowed: dict[str, str]  # short names of ours, and where an import finds others
    malloc_tuned: bool  # MALLOC_MMAP_THRESHOLD_ is set
    restarts_cleanly: bool  # TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set
    process: dict[str, int] | None  # as `gemini.doctor.process.measured` finds it
    devices: tuple[DeviceFacts, ...]
    folders: tuple[FolderFacts, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding on a machine and its remedy.

    level: `"error"` (does not run), `"slow"`, `"note"`. is_timed: it follows from a measured speed.
    """

    level: str
    what: str
    remedy: str
    is_timed: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """Facts and findings about a machine, the worst finding first."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether the library runs here: no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def bandwidths(self) -> dict[str, float]:
        """Measured speeds by the names of `gemini.placement.sizes.Bandwidths`, bytes a second.

        Of several devices or folders the slowest counts. `python -m gemini plan --machine` reads
        this.
        """
        found = self._links()
        usable = [folder for folder in self.facts.folders if folder.error is None]
        if usable:
            found["nvme_read"] = min(folder.read for folder in usable)
            found["nvme_write"] = min(folder.write for folder in usable)
        return found

    def _links(self) -> dict[str, float]:
        """Speeds of all but the folders."""
        facts = self.facts
        found = {"host_memory": facts.ram_copy_bytes_per_s}
        if not facts.devices:
            own = {"device_memory": facts.ram_copy_bytes_per_s, "flops": facts.cpu_flops["bf16"]}
            return found | own
        found["device_memory"] = min(d.copy_bytes_per_s for d in facts.devices)
        found["flops"] = min(d.flops for d in facts.devices)
        # An update streams blocks both ways at once.
        found["host_to_device"] = min(min(d.host_to_device, d.both_ways) for d in facts.devices)
        found["device_to_host"] = min(min(d.device_to_host, d.both_ways) for d in facts.devices)
        return found

    def to_keep(self, day: str) -> KeptSpeeds | None:
        """Speeds for plans of later runs; None: the machine was busy, and nobody would trust them.

        day: of the measurement.
        """
        if _is_busy(self.facts):
            return None
        folders = {
            os.path.realpath(folder.path): {"nvme_read": folder.read, "nvme_write": folder.write}
            for folder in self.facts.folders
            if folder.error is None
        }
        names = tuple(device.name for device in self.facts.devices)
        return KeptSpeeds(day, names, self._links(), folders)

    def as_json(self) -> dict[str, Any]:
        """Report as plain values for JSON: facts, findings, `bandwidths` and `ok`."""
        return {
            **asdict(self.facts),
            "versions": dict(self.facts.versions),
            "findings": [asdict(finding) for finding in self.findings],
            "bandwidths": self.bandwidths(),
            "ok": self.ok,
        }


def judge(facts: Facts) -> Report:
    """Findings that follow from facts: what is slow or missing, and its remedy. Speeds of a busy
    machine are not judged."""
    order = {"error": 0, "slow": 1, "note": 2}
    found = [*_software(facts), *_memory(facts), *_devices(facts)]
    for folder in facts.folders:
        found += _folder(folder)
    if _is_busy(facts):
        found = [finding for finding in found if not finding.is_timed]
    return Report(facts, tuple(sorted(found, key=lambda finding: order[finding.level])))


def _is_busy(facts: Facts) -> bool:
    return facts.load_average > facts.cores


def _software(facts: Facts) -> Iterator[Finding]:
    versions = dict(facts.versions)
    for name in NEEDED:
        if versions.get(name) is None:
            yield Finding("error", f"{name} is not installed", f"pip install {name}")
    if versions.get("triton") is None:
        level = "error" if facts.devices else "note"
        yield Finding(level, "triton is not installed, which a GPU needs", "pip install triton")
    for name, place in facts.shadowed.items():
        yield Finding(
            "note",
            f"import {name} finds {place} here, which is not of this installation",
            f"write gemini.{name}, as everything of ours does",
        )
    if facts.devices and facts.c_compiler is None:
        yield Finding(
            "error",
            "no C compiler, which Triton needs to launch kernels",
            "install gcc, or name a compiler in CC",
        )
    if facts.cxx_compiler is None:
        yield Finding(
            "note",
            "no C++ compiler: CPU updates of large 16-bit models take up to 2 times as long",
            'install g++; or nothing: cpu_path="auto", the default, does without it',
        )
    if facts.memlock_bytes is not None and facts.memlock_bytes < SMALL_MEMLOCK:
        yield Finding(
            "note",
            f"the limit on locked memory is {format_bytes(facts.memlock_bytes)}",
            "raise it (`ulimit -l unlimited`, or memlock in limits.conf) where pinned staging is "
            "refused",
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    if _is_busy(facts):
        yield Finding(
            "note",
            f"the load average is {facts.load_average:.1f} on {facts.cores} cores",
            "measure again on a quiet machine: these speeds are too low, and are not judged",
        )
    if facts.ram_copy_bytes_per_s < SLOW_RAM:
        yield Finding(
            "slow",
            f"RAM copies at {_speed(facts.ram_copy_bytes_per_s)}",
            "use more memory channels, or bind the process to one NUMA node",
            is_timed=True,
        )
    if facts.huge_pages == "never":
        yield Finding(
            "slow",
            "transparent huge pages are off: the first touch of every large buffer is slow",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if not facts.devices and not facts.malloc_tuned:
        yield Finding(
            "note",
            "malloc keeps freed memory: resident memory is 8 to 14 % above what is in use",
            "export MALLOC_MMAP_THRESHOLD_=1048576 MALLOC_TRIM_THRESHOLD_=1048576 "
            "THP_MEM_ALLOC_ENABLE=1",
        )
    if facts.temporary_file_system in ("tmpfs", "ramfs"):
        yield Finding(
            "note",
            f"the folder for temporary files is on {facts.temporary_file_system}, which is RAM",
            "name a folder on a disk in nvme_offload_dir or AutoPlacement(nvme_dir=...)",
        )


def _devices(facts: Facts) -> Iterator[Finding]:
    if not facts.devices:
        yield Finding("note", "no CUDA device", "nothing: modules compute on the CPU")
        if not facts.restarts_cleanly:
            yield Finding(
                "note",
                "torchrun --max-restarts fails once more before ranks of gloo begin again",
                "python -m gemini run --max-restarts, or "
                "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun",
            )
        bf16, fp32 = facts.cpu_flops["bf16"], facts.cpu_flops["fp32"]
        if bf16 < SLOW_BF16 * fp32:
            yield Finding(
                "slow",
                f"the CPU multiplies matrices of bf16 at {_flops(bf16)}, of fp32 at {_flops(fp32)}",
                'wrap with precision="fp32", or use a processor with instructions for bf16 '
                "(AVX-512 BF16, AMX)",
                is_timed=True,
            )
    for device in facts.devices:
        for way, speed in (
            ("to the device", device.host_to_device),
            ("from the device", device.device_to_host),
        ):
            if speed < SLOW_LINK:
                yield Finding(
                    "slow",
                    f"{device.name}: copies {way} run at {_speed(speed)}",
                    "use a slot with 16 lanes, and bind the process to the device's NUMA node",
                    is_timed=True,
                )


def _folder(folder: FolderFacts) -> Iterator[Finding]:
    if folder.error is not None:
        yield Finding("error", folder.error, "name another folder with --dir")
        return
    if not folder.direct:
        yield Finding(
            "slow",
            f"{folder.path} ({folder.file_system}) refuses O_DIRECT: buffered I/O, which passes "
            "through the page cache",
            "name a folder on ext4 or xfs on a local disk",
        )
    if folder.mixed < SLOW_DISK:
        seconds = STATE_BYTES_MOVED * 1e9 / folder.mixed
        yield Finding(
            "slow",
            f"{folder.path} reads and writes {_speed(folder.mixed)}: {seconds:.0f} s a step for "
            "each 10**9 parameters whose state is there",
            "name a faster disk, or several of them (nvme_offload_dir takes a list)",
            is_timed=True,
        )
    if folder.left_bytes:
        yield Finding(
            "note",
            f"{folder.path} has {format_bytes(folder.left_bytes)} in files of processes that died",
            f"python -m gemini clean {shlex.quote(folder.path)} lists them",
        )
    if folder.free_bytes < SMALL_DISK:
        yield Finding(
            "slow",
            f"{folder.path} has {format_bytes(folder.free_bytes)} free, which holds the state of "
            f"{folder.free_bytes / 24e6:.0f} million parameters",
            "free some space: Adam's state takes 24 bytes a parameter on disk (docs/memory.md)",
        )


_OWN = {
    "floor": "its libraries", "product": "a compiled product", "parameter": "a wrapped parameter",
    "thread": "a tile of each thread that updates",
}  # fmt: skip


def render(report: Report) -> str:
    """Text of a report."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    facts = report.facts
    for name, version in facts.versions:
        yield f"{name:14s} {version or 'not installed'}"
    yield (
        f"{'cores':14s} {facts.cores}, load average {facts.load_average:.1f}; C compiler "
        f"{facts.c_compiler or 'none'}, C++ compiler {facts.cxx_compiler or 'none'}"
    )
    yield (
        f"{'RAM':14s} {format_bytes(facts.ram_bytes)}, {format_bytes(facts.ram_left_bytes)} left, "
        f"copies at {_speed(facts.ram_copy_bytes_per_s)}"
    )
    found = ", ".join(f"{_flops(speed)} in {name}" for name, speed in facts.cpu_flops.items())
    yield f"{'CPU':14s} multiplies matrices at {found}"
    costs = facts.process or {}
    own = ", ".join(f"{format_bytes(nbytes)} for {_OWN[name]}" for name, nbytes in costs.items())
    yield f"{'a process':14s} {own or 'not measured'}"
    limit = "none" if facts.memlock_bytes is None else format_bytes(facts.memlock_bytes)
    yield f"{'locked memory':14s} limit {limit}"
    yield f"{'huge pages':14s} {facts.huge_pages or 'unknown'}"
    for device in facts.devices:
        yield (
            f"{'device':14s} {device.name} ({device.capability}), "
            f"{format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} free, copies "
            f"at {_speed(device.copy_bytes_per_s)}; link {_speed(device.host_to_device)} to it, "
            f"{_speed(device.device_to_host)} from it, {_speed(device.both_ways)} each way at "
            f"once; multiplies at {device.flops / 1e12:.3g} TFLOP/s{_place(device)}"
        )
    for folder in facts.folders:
        if folder.error is not None:
            yield f"{'folder':14s} {folder.path}: not usable"
            continue
        yield (
            f"{'folder':14s} {folder.path} on {folder.file_system}, "
            f"{format_bytes(folder.free_bytes)} free, O_DIRECT {'yes' if folder.direct else 'no'}; "
            f"engine {folder.engine}: reads {_speed(folder.read)}, writes {_speed(folder.write)}"
        )
    for finding in report.findings:
        yield f"\n[{finding.level}] {finding.what}\n    {finding.remedy}"


def _place(device: DeviceFacts) -> str:
    if device.numa_node is None:
        return ""
    return f"; pinned host memory on its NUMA node, {device.numa_node}"


def _flops(per_s: float) -> str:
    return f"{per_s / 1e9:.3g} GFLOP/s"


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
