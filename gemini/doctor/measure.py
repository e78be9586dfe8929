"""Measurement of a machine in a few seconds: what it has, and its speeds. Leaves no files."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from gemini import names, numa, nvme
from gemini.nvme.files.file import create_files, file_system, free_bytes, remove_files
from gemini.optim.update.built_kernels import compiler
from gemini.runtime.memory.backend import Backend, make_backend
from gemini.runtime.memory.machine import memory_left
from gemini.units import PAGE_BYTES

from . import process
from .report import NEEDED, DeviceFacts, Facts, FolderFacts

PACKAGES = ("gemini-memory", *NEEDED, "triton", "transformers")
COPY_BYTES = 256 << 20
MATRIX = 256  # rows and columns
_WIDTH = {"cpu": 256, "cuda": 8192}  # of a layer that is timed, and rows that it is given
ROUNDS = 5
PROBE_SECONDS = 2.0


def examine(
    folders: Sequence[str | os.PathLike[str]] = (),
    *,
    copy_bytes: int = COPY_BYTES,
    probe_seconds: float = PROBE_SECONDS,
) -> Facts:
    """Measure RAM, every CUDA device and `folders`, by default the default folder for files.

    copy_bytes: bytes of every copy that is timed.
    probe_seconds: seconds that each folder takes, about.
    """
    return Facts(
        versions=_versions(),
        cores=len(os.sched_getaffinity(0)),
        load_average=os.getloadavg()[0],
        ram_bytes=psutil.virtual_memory().total,
        ram_left_bytes=memory_left(),
        ram_copy_bytes_per_s=2 * _copy_speed(make_backend(torch.device("cpu")), copy_bytes),
        cpu_flops={"bf16": _flops(torch.bfloat16), "fp32": _flops(torch.float32)},
        memlock_bytes=_memlock(),
        huge_pages=_huge_pages(),
        temporary_file_system=file_system(Path(tempfile.gettempdir())),
        c_compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        cxx_compiler=compiler(),
        shadowed=names.shadowed(),
        malloc_tuned="MALLOC_MMAP_THRESHOLD_" in os.environ,
        restarts_cleanly=os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1",
        process=process.measured(),
        devices=tuple(_device(i, copy_bytes) for i in range(torch.cuda.device_count())),
        folders=tuple(_folder(f, probe_seconds) for f in folders or _default_folders()),
    )


def _versions() -> tuple[tuple[str, str | None], ...]:
    found: list[tuple[str, str | None]] = [("python", platform.python_version())]
    for package in PACKAGES:
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            found.append((package, None))
    return tuple(found)


def _memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _huge_pages() -> str | None:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return None
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else None


def _default_folders() -> tuple[Path, ...]:
    return (nvme.default_folder(),)


def _folder(folder: str | os.PathLike[str], seconds: float) -> FolderFacts:
    try:
        path = nvme.check_folder(folder)
        files = create_files([path], [PAGE_BYTES], label="doctor-")
        direct = files[0].direct
        remove_files(files)
        speed = nvme.probe(path, seconds=seconds)
    except nvme.NvmeError as error:
        return FolderFacts(str(folder), error=str(error))
    return FolderFacts(
        path=str(path), file_system=file_system(path), free_bytes=free_bytes(path), direct=direct,
        engine=speed.engine, read=speed.read, write=speed.write,
        left_bytes=sum(left.nbytes for left in nvme.left_in(path)),
    )  # fmt: skip


def _device(index: int, nbytes: int) -> DeviceFacts:
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        backend = make_backend(device)
        free, total = torch.cuda.mem_get_info(device)
        # three buffers of this size are on the device at once
        nbytes = min(nbytes, free // 4)
        on_device = backend.allocate(nbytes, torch.uint8)
        pinned = backend.allocate_host(nbytes, torch.uint8)
        major, minor = torch.cuda.get_device_capability(device)
        return DeviceFacts(
            name=torch.cuda.get_device_name(device),
            capability=f"{major}.{minor}",
            total_bytes=total,
            free_bytes=free,
            copy_bytes_per_s=2 * _copy_speed(backend, nbytes),
            host_to_device=_speed(backend, on_device, pinned),
            device_to_host=_speed(backend, pinned, on_device),
            both_ways=_both_ways(backend, (on_device, pinned), nbytes),
            flops=flops_of(device),
            numa_node=numa.node_of_device(index),
        )


def _copy_speed(backend: Backend, nbytes: int) -> float:
    """Copy speed within the device, bytes a second; each byte is counted once."""
    # both are written before they are timed: first touches of their pages would count as copying
    source = backend.allocate(nbytes, torch.uint8).fill_(1)
    return _speed(backend, backend.allocate(nbytes, torch.uint8).fill_(0), source)


def _speed(backend: Backend, dst: Tensor, src: Tensor) -> float:
    """Copy speed from `src` to `dst`, bytes a second: the best of `ROUNDS` after a warm-up."""

    return src.nbytes / _copied(backend, [(dst, src)])


def _both_ways(backend: Backend, first: tuple[Tensor, Tensor], nbytes: int) -> float:
    """Copy speed each way, bytes a second, while as much is copied the other way.

    first: a tensor of the device and one of the host, of `nbytes`.
    """
    other = backend.allocate_host(nbytes, torch.uint8)
    return nbytes / _copied(backend, [first, (other, torch.zeros_like(first[0]))])


def _copied(backend: Backend, pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Seconds of copies (dst, src) begun together: the best of `ROUNDS` after a warm-up."""

    def copy() -> None:
        for ticket in [backend.copy(dst, src) for dst, src in pairs]:
            ticket.wait()
        if backend.device.type == "cuda":
            torch.cuda.synchronize(backend.device)

    return min([_seconds(copy) for _ in range(ROUNDS + 1)][1:])


def _flops(dtype: torch.dtype) -> float:
    """FLOP a second of a matrix product on the CPU, the best of `ROUNDS`."""
    matrix = torch.ones(MATRIX, MATRIX, dtype=dtype)
    return 2 * MATRIX**3 / min(_seconds(lambda: matrix @ matrix) for _ in range(ROUNDS))


def flops_of(device: torch.device) -> float:
    """FLOP a second of a layer's forward and backward in bf16; the best of three."""
    size = _WIDTH[device.type]
    layer = torch.nn.Linear(size, size, bias=False, dtype=torch.bfloat16, device=device)
    rows = torch.ones(size, size, dtype=torch.bfloat16, device=device, requires_grad=True)
    return 6 * size**3 / min(_pass_seconds(layer, rows) for _ in range(3))


def _pass_seconds(layer: torch.nn.Module, rows: torch.Tensor) -> float:
    started = time.perf_counter()
    layer(rows).sum().backward()
    assert rows.grad is not None
    rows.grad[0, 0].item()  # a device has ended with it
    return time.perf_counter() - started


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
