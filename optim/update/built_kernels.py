"""Compiled CPU kernels: built once for a machine, and kept in a cache.

A kernel is a shared library of one C++ loop (`kernel_specs.py`), which the machine's compiler makes
in a second. The library is code that this process runs, for this processor: so its folder is the
user's own (`kernel_cache.py`), and its name has a digest of all that went into it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from .kernel_cache import KernelBuildError, cache_folder, check_owned, locked
from .kernel_specs import KernelSpec

log = logging.getLogger("gemini")

BUILD_SECONDS = 120.0  # of one kernel; 1 on 2 cores
LAST_LINES = 12  # of a compiler that failed
FLAGS = (
    "-std=c++17", "-O3",
    "-mcpu=native" if platform.machine().startswith("ppc") else "-march=native",
    "-ffp-contract=off",  # the bits of the formula
    "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-fopenmp-simd",  # which change no value
    "-fPIC", "-shared", "-pthread",
)  # fmt: skip


def compiler() -> str | None:
    """C++ compiler to use: the one that CXX names, or the first that is found."""
    named = os.environ.get("CXX")
    names = [named] if named else ["g++", "clang++", "c++"]
    return next((found for found in map(shutil.which, names) if found), None)


class Rows:
    """Rows that one call of a kernel works on; see `cpp_loops`."""

    def __init__(self) -> None:
        self._alive: list[Sequence[Tensor]] = []
        self.words = array("q")
        self.scalars = array("f")

    def add(
        self,
        columns: Sequence[Tensor],
        numel: int,
        scalars: Sequence[float] = (),
        numbers: Sequence[int] = (),
    ) -> None:
        """Add one row: contiguous columns, `numel` elements of the first; scalars, rounded to fp32;
        numbers, passed on as int64."""
        self._alive.append(columns)
        self.words.append(numel)
        self.words.extend([column.data_ptr() for column in columns])
        self.words.extend(numbers)
        self.scalars.extend(scalars)


class Kernel:
    """Loaded library of an update. A call takes no lock of Python's, and holds none."""

    def __init__(self, path: Path) -> None:
        self._run = ctypes.CDLL(str(path)).run
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = [pointer, count, pointer, count, count]

    def __call__(self, rows: Rows, num_threads: int) -> None:
        """Update all rows, with at most `num_threads` threads, which end with the call."""
        refused = self._run(
            rows.words.buffer_info()[0], len(rows.words),
            rows.scalars.buffer_info()[0], len(rows.scalars), num_threads,
        )  # fmt: skip
        assert not refused, "rows of another kernel"


_loaded: dict[Path, Kernel] = {}


def kernels(specs: Sequence[KernelSpec]) -> list[Kernel]:
    """Load kernels, in order; missing ones are built first, which takes some seconds.

    Raises KernelBuildError where there is no compiler, it fails, or the cache cannot be used.
    """
    cxx = compiler()
    if cxx is None:
        raise KernelBuildError("no C++ compiler was found; install g++")
    folder = cache_folder()
    paths = [folder / library_name(spec, cxx) for spec in specs]
    if not all(path in _loaded or path.exists() for path in paths):
        with locked(folder):
            # Asked again under the lock: another process may have built them meanwhile.
            missing = {
                path: spec for path, spec in zip(paths, specs, strict=True) if not path.exists()
            }
            if missing:
                _build(missing, folder, cxx)
    return [_load(path) for path in paths]


def _load(path: Path) -> Kernel:
    if path not in _loaded:
        check_owned(path, stat.S_ISREG)
        try:
            _loaded[path] = Kernel(path)
        except (OSError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise KernelBuildError(f"{path} does not load ({reason}); delete it") from error
    return _loaded[path]


def library_name(spec: KernelSpec, cxx: str) -> str:
    """Name of a library in the cache, with a digest of all that went into it and the processor."""
    try:
        source = spec.source
    except NotImplementedError as error:
        raise KernelBuildError(f"{spec.name} cannot be a loop: {error}") from error
    facts = [source, FLAGS, cxx, _first_line(cxx, os.stat(cxx).st_mtime_ns), processor()]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]
    return f"{spec.name}-{digest}.so"


@functools.cache
def _first_line(cxx: str, changed: int) -> str:
    """Version line of the compiler; `changed`, its time of change, is the key of this cache."""
    done = subprocess.run(
        [cxx, "--version"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    return done.stdout.partition("\n")[0]


@functools.cache
def processor() -> str:
    """Instruction sets of this machine's processor, as text."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    return platform.machine() + (flags[0] if flags else platform.processor())


# -- building --


def _build(missing: dict[Path, KernelSpec], folder: Path, cxx: str) -> None:
    """Build all missing libraries, or none; remove what killed builds have left."""
    log.warning(
        "compiling the CPU update (%s) into %s, which takes a few seconds, once for this machine; "
        'cpu_path="eager" avoids it',
        ", ".join(spec.name for spec in missing.values()),
        folder,
    )
    for left in sorted(folder.glob("build-*")):
        shutil.rmtree(left, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
            made = {path: Path(work) / path.name for path in missing}
            for path, spec in missing.items():
                compile_library(spec, made[path], cxx)
            # Synced, then renamed: a crash leaves no half library for another process to load.
            for path, library in made.items():
                library.chmod(0o600)
                with library.open("rb") as file:
                    os.fsync(file.fileno())
                library.replace(path)
    except OSError as error:
        raise KernelBuildError(f"the folder for compiled kernels: {error}") from error


def compile_library(spec: KernelSpec, library: Path, cxx: str) -> None:
    """Run the compiler, in a session of its own so that all its processes can be ended."""
    source = library.with_suffix(".cpp")
    source.write_text(spec.source, encoding="utf-8")
    process = subprocess.Popen(
        [cxx, *FLAGS, "-o", str(library), str(source)],
        env={**os.environ, "TMPDIR": str(library.parent)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=BUILD_SECONDS)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise KernelBuildError(f"the compiler took more than {BUILD_SECONDS:.0f} s") from None
    if process.returncode != 0:
        lines = [line for line in said.splitlines() if line.strip()]
        last = "".join(f"\n    {line[:300]}" for line in lines[-LAST_LINES:])
        raise KernelBuildError(f"the compiler failed; its last lines:{last}")
