"""`python -m bench.nvme`: the disk through fio, our engines and others', and a step on it.

Rows: GB (10**9) a second and CPU seconds a GB, medians of interleaved rounds over one file that is
preallocated and was written before (peers that insist on files of their own write those). `step` is
`optimizer.step()` of a GeminiDDP with bf16 weights, whose whole state is on disk, against its bytes
over what fio did right before and behind it: mixed half and half, or first read and then written,
whichever is faster. What is faster than fio by more than a twentieth has no ceiling: then the
command fails, and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.support.machine import write_result
from gemini import GeminiDDP
from gemini.nvme import (
    PIECE_BYTES,
    BufferPool,
    Engine,
    NvmeError,
    ThreadEngine,
    Transfer,
    check_folder,
    default_folder,
)
from gemini.nvme.engines.tensornvme import TensorNvmeEngine
from gemini.nvme.files.file import OpenFile
from gemini.optim import HybridAdam
from gemini.tickets import Ticket
from gemini.units import parse_bytes

from .support import fio

TRANSFER_BYTES = 12 << 20  # a block of fp32 Adam state with its master
PEER_BYTES = 1 << 30  # what the slow rows move, at most
ENGINES = ("psync", "io_uring")  # of fio
Sweep = Callable[[], None]


class Timed:
    """Seconds and CPU seconds of every round of one sweep of `nbytes`."""

    def __init__(self, sweep: Sweep, nbytes: int) -> None:
        self._sweep, self.nbytes = sweep, nbytes
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def run(self, counts: bool) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        self._sweep()
        if counts:
            self.seconds.append(time.perf_counter() - wall)
            self.cpu_seconds.append(time.process_time() - cpu)

    @property
    def gb_s(self) -> list[float]:
        return [self.nbytes / seconds / 1e9 for seconds in self.seconds]


class EngineRow:
    """One of our engines over the file: whole blocks, as many at a time as the pipeline has."""

    def __init__(self, engine: Engine, file: OpenFile, nbytes: int, checksums: bool) -> None:
        self._engine, self._file, self._checksums = engine, file, checksums
        self._pool = BufferPool(fio.DEPTH, TRANSFER_BYTES)
        self._offsets = range(0, nbytes // TRANSFER_BYTES * TRANSFER_BYTES, TRANSFER_BYTES)
        self.nbytes = len(self._offsets) * TRANSFER_BYTES
        self.read = Timed(lambda: self._sweep(engine.read), self.nbytes)
        self.write = Timed(lambda: self._sweep(engine.write), self.nbytes)

    def _sweep(self, submit: Callable[[Transfer], Ticket[int]]) -> None:
        buffers = [self._pool.take() for _ in range(self._pool.count)]
        under_way: deque[Ticket[int]] = deque()
        for i, offset in enumerate(self._offsets):
            if len(under_way) == len(buffers):
                under_way.popleft().wait()
            view = buffers[i % len(buffers)].view
            under_way.append(submit(Transfer(self._file, offset, view, self._checksums)))
        while under_way:
            under_way.popleft().wait()
        os.fdatasync(self._file.fd)
        for buffer in buffers:
            self._pool.give(buffer)


class TensorNvmeRow:
    """tensornvme's Offloader as its users call it: asynchronous, `DEPTH` tensors at a time.

    To the disk and from it: its file has no direct I/O, so what was written is synced, and dropped
    from the page cache, before it is read.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        from tensornvme._C import Offloader

        path = folder / "tensornvme"
        self._offloader = Offloader(str(path), 16, "uring")
        self._file = path.open("r+b")
        self._tensors = [
            torch.randint(0, 255, (TRANSFER_BYTES,), dtype=torch.uint8) for _ in range(fio.DEPTH)
        ]
        count = nbytes // TRANSFER_BYTES
        self.read = Timed(lambda: self._sweep("read", count), count * TRANSFER_BYTES)
        self.write = Timed(lambda: self._sweep("write", count), count * TRANSFER_BYTES)

    def _sweep(self, kind: str, count: int) -> None:
        move = getattr(self._offloader, f"async_{kind}")
        for i in range(count):
            move(self._tensors[i % fio.DEPTH], str(i))
            if i % fio.DEPTH == fio.DEPTH - 1:
                self._offloader.synchronize()  # its `sync_read_events` waits for writes alone
        self._offloader.synchronize()
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class DeepSpeedRow:
    """DeepSpeed's aio_handle, tuned as its own tuner does: 4 MiB blocks, events overlapped."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        handle = AsyncIOBuilder().load().aio_handle(PIECE_BYTES, 32, False, True, fio.DEPTH)
        path, count = str(folder / "deepspeed"), nbytes // (16 * PIECE_BYTES)
        tensor = handle.new_cpu_locked_tensor(16 * PIECE_BYTES, torch.empty(0, dtype=torch.uint8))
        Path(path).write_bytes(b"")

        def sweep(move: Callable[[Tensor, str, int], int]) -> None:
            for i in range(count):
                if move(tensor, path, i * tensor.nbytes) < 0:
                    raise RuntimeError("aio_handle failed")

        self.read = Timed(lambda: sweep(handle.sync_pread), count * tensor.nbytes)
        self.write = Timed(lambda: sweep(handle.sync_pwrite), count * tensor.nbytes)


class TorchRow:
    """torch.save, to the disk, and torch.load, from it: the page cache is synced and dropped."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._path = folder / "torch.pt"
        self._tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        self.read, self.write = Timed(self._load, nbytes), Timed(self._save, nbytes)

    def _save(self) -> None:
        with self._path.open("wb") as file:
            torch.save(self._tensor, file)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _load(self) -> None:
        torch.load(self._path)


Row = EngineRow | TensorNvmeRow | DeepSpeedRow | TorchRow


class Fio:
    """fio's runs, by engine and kind."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path, self._nbytes = path, nbytes
        self.runs: dict[str, list[fio.FioRun]] = {}
        self.rounds: dict[str, list[list[float]]] = {"read": [], "write": []}  # GB/s of all runs

    def run(self, kind: str, counts: bool, *, begins: bool) -> None:
        """With every engine. `begins`: a round does."""
        if counts and begins:
            self.rounds[kind].append([])
        for engine in ENGINES:
            found = fio.run(engine, kind, self._path, self._nbytes)
            if counts:
                self.runs.setdefault(f"{engine}/{kind}", []).append(found)
                self.rounds[kind][-1].append(getattr(found, f"{kind}_gb_s"))

    def best(self, kind: str) -> list[float]:
        """GB/s of every round, of the fastest run in it."""
        return [max(speeds) for speeds in self.rounds[kind]]

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for engine in ENGINES:
            reads, writes = self.runs[f"{engine}/read"], self.runs[f"{engine}/write"]
            found.append(
                {
                    "name": f"fio/{engine}",
                    "read_gb_s": statistics.median(r.read_gb_s for r in reads),
                    "write_gb_s": statistics.median(w.write_gb_s for w in writes),
                    "cpu_s_per_gb": statistics.median(r.cpu_s_per_gb for r in [*reads, *writes]),
                }
            )
        return found


def make_rows(folder: Path, file: OpenFile, nbytes: int) -> tuple[dict[str, Row], dict[str, str]]:
    """Rows by name, and why others are absent."""
    peer_bytes = min(nbytes, PEER_BYTES)
    makers: dict[str, Callable[[], Row]] = {
        "ours/threads": lambda: EngineRow(ThreadEngine(), file, nbytes, False),
        "ours/threads-checksum": lambda: EngineRow(ThreadEngine(), file, nbytes, True),
        # its reads are those of the threads
        "ours/tensornvme": lambda: EngineRow(TensorNvmeEngine(), file, nbytes, False),
        "tensornvme": lambda: TensorNvmeRow(folder, peer_bytes),
        "deepspeed/aio": lambda: DeepSpeedRow(folder, peer_bytes),
        "torch/save-load": lambda: TorchRow(folder, peer_bytes),
    }
    rows: dict[str, Row] = {}
    reasons: dict[str, str] = {}
    for name, make in makers.items():
        try:
            rows[name] = make()
        except (ImportError, NvmeError, RuntimeError, OSError) as error:
            lines = str(error).strip().splitlines() or [""]
            reasons[name] = f"{type(error).__name__}: {lines[-1]}"
    return rows, reasons


class Weights(nn.Module):
    """`numel` parameters in tensors of a block's size, with a gradient that costs little."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(
            torch.full((min(1 << 20, numel - start),), 0.01) for start in range(0, numel, 1 << 20)
        )

    def forward(self) -> Tensor:
        return torch.stack([part.sum() for part in self.parts]).float().sum()


def measure_step(folder: Path, file: Path, nbytes: int, numel: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step with all state on disk, and the least for its bytes, in turn."""
    model = GeminiDDP(Weights(numel))
    optimizer = HybridAdam(model.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=folder)
    model().backward()
    optimizer.step()  # the first writes every second version for the first time
    optimizer.step()
    seconds, bounds, mixed, stalled = [], [], [], []
    for _ in range(rounds):
        before = _through_fio(file, nbytes)
        started = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        report = optimizer.last_report
        assert report is not None
        moved = report.traffic.nvme_read + report.traffic.nvme_write
        runs = [*before, *_through_fio(file, nbytes)]
        mixed.append(max(before[-len(ENGINES) :], key=lambda run: run.read_gb_s))
        bounds.append(least_seconds(report.traffic.nvme_read, report.traffic.nvme_write, runs))
        stalled.append(report.stalled_seconds)
    optimizer.close()
    return {
        "seconds": statistics.median(seconds),
        "bound_seconds": statistics.median(bounds),
        "ratio": statistics.median(s / b for s, b in zip(seconds, bounds, strict=True)),
        "stalled_seconds": statistics.median(stalled),
        "gb_moved": moved / 1e9,
        "numel": numel,
        "mixed": {
            "name": "fio/mixed",
            "read_gb_s": statistics.median(run.read_gb_s for run in mixed),
            "write_gb_s": statistics.median(run.write_gb_s for run in mixed),
            "cpu_s_per_gb": statistics.median(run.cpu_s_per_gb for run in mixed),
        },
    }


def _through_fio(file: Path, nbytes: int) -> list[fio.FioRun]:
    """Of each kind, with every engine: io_uring's one thread goes through the file in order, as a
    step does."""
    kinds = ("read", "write", "rw")
    return [fio.run(engine, kind, file, nbytes) for kind in kinds for engine in ENGINES]


def least_seconds(read: int, written: int, runs: Sequence[fio.FioRun]) -> float:
    """For so many bytes on a disk that does what it did in the best of `runs` of each kind."""
    both = [run for run in runs if run.read_gb_s and run.write_gb_s]
    alone = [run for run in runs if run not in both]
    mixed = (read + written) / max(run.read_gb_s + run.write_gb_s for run in both)
    apart = read / max(run.read_gb_s for run in alone) + written / max(
        run.write_gb_s for run in alone
    )
    return min(mixed, apart) / 1e9


def measure_rows(
    folder: Path, file: OpenFile, nbytes: int, rounds: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    rows, reasons = make_rows(folder, file, nbytes)
    ceiling = Fio(file.path, nbytes)
    for turn in range(rounds + 1):  # the first does not count
        for kind in ("write", "read"):  # the ceiling right before and behind what is held to it
            ceiling.run(kind, turn > 0, begins=True)
            for name, row in rows.items():
                getattr(row, kind).run(turn > 0)
                if name == "ours/threads":
                    ceiling.run(kind, turn > 0, begins=False)
    found = ceiling.rows()
    for name, row in rows.items():
        cpu = sum(row.read.cpu_seconds + row.write.cpu_seconds)
        moved = (row.read.nbytes + row.write.nbytes) * rounds / 1e9
        found.append(
            {
                "name": name,
                "read_gb_s": statistics.median(row.read.gb_s),
                "write_gb_s": statistics.median(row.write.gb_s),
                "cpu_s_per_gb": cpu / moved,
            }
        )
    found += [{"name": name, "reason": reason} for name, reason in reasons.items()]
    ours = rows["ours/threads"]
    ratios = {
        "ours/threads read / fio's best": _paired(ours.read.gb_s, ceiling.best("read")),
        "ours/threads write / fio's best": _paired(ours.write.gb_s, ceiling.best("write")),
    }
    for name in ("ours/tensornvme", "tensornvme", "deepspeed/aio"):
        if name in rows:
            ratios[f"ours/threads write / {name}"] = _paired(ours.write.gb_s, rows[name].write.gb_s)
            ratios[f"ours/threads read / {name}"] = _paired(ours.read.gb_s, rows[name].read.gb_s)
    return found, ratios


def _paired(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def ceilings(ratios: dict[str, float], step: dict[str, Any] | None) -> dict[str, float]:
    """Speeds over those that bound them."""
    found = {name: ratio for name, ratio in ratios.items() if "fio" in name}
    return found if step is None else {**found, "a step over its bound": 1 / step["ratio"]}


def show(rows: list[dict[str, Any]], ratios: dict[str, float], step: dict[str, Any] | None) -> None:
    for row in rows:
        if "reason" in row:
            print(f"{row['name']:24s} {row['reason']}")
        else:
            print(
                f"{row['name']:24s} read {row['read_gb_s']:5.2f} write {row['write_gb_s']:5.2f} "
                f"GB/s {row['cpu_s_per_gb']:6.3f} CPU s/GB"
            )
    for name, value in ratios.items():
        print(f"{name:40s} {value:6.2f}")
    if step is not None:
        print(
            f"step of {step['numel'] / 1e6:.0f} M: {step['seconds']:.2f} s for "
            f"{step['gb_moved']:.1f} GB, bound {step['bound_seconds']:.2f} s, "
            f"ratio {step['ratio']:.2f}, stalled {step['stalled_seconds']:.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="default: a temporary folder on a disk")
    parser.add_argument("--size", default="4GiB")
    parser.add_argument("--numel", type=int, default=500_000_000, help="of the step; 0: none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    why_not = fio.available()
    if why_not is not None:
        raise SystemExit(why_not)
    nbytes = parse_bytes(args.size)
    with tempfile.TemporaryDirectory(dir=check_folder(args.dir or default_folder())) as name:
        folder = Path(name)
        path = folder / "blocks"
        file = OpenFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600), True)
        os.posix_fallocate(file.fd, 0, nbytes)
        rows, ratios = measure_rows(folder, file, nbytes, args.rounds)
        step = None
        if args.numel:
            step = measure_step(folder, path, nbytes, args.numel, args.rounds)
            rows.insert(2, step.pop("mixed"))
        show(rows, ratios, step)
        fio.check_ceilings(ceilings(ratios, step))
    if args.json is not None:
        write_result(args.json, {"rows": rows, "step": step, "ratios": ratios})


if __name__ == "__main__":
    main()
