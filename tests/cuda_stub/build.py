"""The stub of CUDA for the torch of this Python, in a folder of its own for each source of it."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_paths()["purelib"])
IS_CUDA = re.compile(r"(?:__)?cuda[A-Z]\w*|cublas\w+|cu[A-Z]\w*")
DEFINED = re.compile(rf"^(?:[\w*]+ )+\**({IS_CUDA.pattern})\(", re.MULTILINE)


def asked_for() -> set[str]:
    """Of CUDA's runtime, of its driver and of cuBLAS: what torch's libraries link to."""
    libraries = sorted((SITE / "torch/lib").glob("lib*.so"))
    said = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout
    names = {line.split()[1].partition("@")[0] for line in said.splitlines() if " U " in line}
    return {name for name in names if IS_CUDA.fullmatch(name)}


def folder_with_stub(cache: Path) -> Path:
    """It has `libstub.so`, and the same as `libcuda.so.1`; made where it is not there."""
    runtime = (HERE / "runtime.cpp").read_text(encoding="utf-8")
    names = sorted(asked_for() - set(DEFINED.findall(runtime)))
    assert len(names) > 50, "expected torch's CUDA build"
    others = "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in names)
    include = next(SITE.glob("nvidia/cu[0-9]*/include"))
    key = hashlib.sha256(f"{runtime}{others}{include}".encode()).hexdigest()[:16]
    folder = cache / key
    if not (folder / "libcuda.so.1").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "others.cpp").write_text(others, encoding="utf-8")
        subprocess.run(
            ["g++", "-O1", "-shared", "-fPIC", "-std=c++17", "-w", f"-I{HERE / 'include'}",
             f"-I{include}", HERE / "runtime.cpp", folder / "others.cpp",
             "-o", folder / "libstub.so"],
            check=True,
        )  # fmt: skip
        (folder / "libcuda.so.1").symlink_to("libstub.so")
    return folder
