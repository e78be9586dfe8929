"""What a measurement was made on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

# design, section 6: without these, malloc inflates resident memory by 8 to 14 %
MALLOC_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "THP_MEM_ALLOC_ENABLE": "1",
}


def machine() -> dict[str, Any]:
    """Processor, cores, memory, device and load."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "cpu": names[0] if names else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _gpu(),
        "bf16_products": _bf16_products(),
        "system": platform.platform(),
        "load_average": os.getloadavg(),
    }


def peak_rss_mib() -> float:
    """VmHWM of this process: the largest resident memory it had."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def busy_fraction(seconds: float = 1.0) -> float:
    """Of all cores' time, what is used while nothing of ours runs."""
    return psutil.cpu_percent(interval=seconds) / 100


def versions() -> dict[str, str]:
    """Versions of what matters, and the commit that is checked out."""
    found = {"python": platform.python_version(), "commit": commit()}
    for package in ("torch", "triton", "numpy", "transformers", "isal"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def write_result(path: Path, figures: Mapping[str, Any]) -> None:
    """Write figures with the command, commit, versions and machine that made them; whole or not at
    all."""
    found = versions()
    made_by = {
        "command": command(),
        "commit": found["commit"],
        "versions": found,
        "machine": machine(),
    }
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps({**figures, **made_by}, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def command() -> str:
    """The command line of this process, whichever interpreter it is."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def commit() -> str:
    """The commit of this tree, with `+` where files differ from it; results are no part of that."""
    others = (":(top)", ":(top,exclude)bench/results")
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *others)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    here = os.path.dirname(os.path.abspath(__file__))
    return subprocess.run(
        ["git", "-C", here, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout.strip()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _bf16_products() -> str:
    from bench.support import matmul

    return matmul.products()
