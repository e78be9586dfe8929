"""What is installed: the wheel, its types, what an import imports, and -O, -OO and -W error."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import warnings
from pathlib import Path

import pytest

from gemini import names

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PUBLIC = {
    "gemini": "gemini",
    "gemini.optim": "optim",
    "gemini.nvme": "io/nvme",
    "gemini.kernels_triton": "kernels_triton",
}
SHORT = {"optim", "nvme", "kernels_triton"}
SOURCES = ("gemini", "optim", "io", "kernels_triton", "pyproject.toml", "README.md", "LICENSE")
SDIST = "from setuptools import build_meta; print(build_meta.build_sdist('.'))"

ONE_STEP = """
import os, sys
import torch
import gemini, nvme, optim
for module in (gemini, nvme, optim,):
    if not module.__file__.startswith(sys.prefix):
        raise SystemExit(f"{module.__name__} is not the installed one: {module.__file__}")
torch.manual_seed(0)
model = gemini.GeminiDDP(torch.nn.Linear(8, 8), device="cpu")
optimizer = optim.HybridAdam(
    model.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=os.environ["HERE"]
)
losses = []
for _ in range(3):
    loss = model(torch.ones(2, 8)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if not losses[-1] < losses[0]:
    raise SystemExit(f"the loss does not fall: {losses}")
"""

USER_CODE = """
from gemini.units import parse_bytes
import nvme
size: str = parse_bytes("1GiB")
nvme.probe(3)
import torch
from gemini import GeminiDDP, HybridAdam, load_pretrained
model = GeminiDDP(torch.nn.Linear(2, 2), "cpu", max_norm=1.0, precision="bf16", max_prefetch=2)
HybridAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
GeminiDDP(model, max_nrom=1.0)
GeminiDDP(model, max_prefetch="2")
HybridAdam(model.parameters(), weight_decya=0.1)
load_pretrained("folder", max_norm=1.0, max_nrom=1.0)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Python of a clean environment with the wheel of an sdist, our dependencies, nothing of ours.

    The other packages come from the environment of the tests, by a path line: its own `.pth`
    files, and so an editable install of this project, are not read.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:  # a copy: building in place leaves `build/`, and takes stale files from it
        path = ROOT / name
        if path.is_dir():
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, source / name, symlinks=True, ignore=left_out)
        else:
            shutil.copy(path, source / name)
    pip = [sys.executable, "-m", "pip"]
    sdist = subprocess.run(
        [sys.executable, "-c", SDIST],
        check=True,
        cwd=source,
        capture_output=True,
        text=True,
        encoding="utf-8",
    ).stdout.split()[-1]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", folder, source / sdist], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    subprocess.run([*pip, "--python", python, "install", "-q", "--no-deps", wheel], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "venv/lib" / version / "site-packages"
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def run_there(python, *arguments, **environment):
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    return subprocess.run(
        [python, *arguments], env={**inherited, **environment}, cwd=python.parent,
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip


@pytest.mark.ci
def test_the_wheel_in_a_clean_environment_trains_a_step(installed, tmp_path):
    done = run_there(installed, "-W", "error:::gemini", "-c", ONE_STEP, HERE=str(tmp_path))
    if "which is RAM" in done.stderr:
        pytest.skip("the folder for temporary files is in RAM")
    assert done.returncode == 0, done.stderr
    done = run_there(installed, "-m", "gemini", "doctor", "--json", "--dir", str(tmp_path))
    assert done.returncode == 0 and '"ok": true' in done.stdout, done.stderr
    (licence,) = (installed.parent.parent / "lib").glob(
        "*/site-packages/gemini_memory-*/**/LICENSE"
    )
    assert "Apache License" in licence.read_text(encoding="utf-8")


@pytest.mark.ci
def test_a_cpu_needs_no_triton(tmp_path):
    blocked = "import sys; sys.modules['triton'] = None\n"
    code = blocked + ONE_STEP.replace("module.__file__.startswith(sys.prefix)", "True")
    done = subprocess.run(
        [sys.executable, "-c", code], env={**_environment(), "HERE": str(tmp_path)},
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    if "which is RAM" in done.stderr:
        pytest.skip("the folder for temporary files is in RAM")
    assert done.returncode == 0, done.stderr


OWN = {"optim/__init__.py": "", "bench/__init__.py": "", "nvme.py": "", "kernels_triton.py": ""}
OF_OURS = ONE_STEP.replace("gemini, nvme, optim", "gemini").replace("optim.H", "gemini.H")


@pytest.mark.ci
def test_a_user_has_names_of_our_folders(installed, tmp_path):
    own = tmp_path / "own"
    for name, text in OWN.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text, encoding="utf-8")
    (own / "script.py").write_text(
        "import bench, kernels_triton, nvme, optim" + OF_OURS, encoding="utf-8"
    )
    done = run_there(installed, own / "script.py", HERE=str(tmp_path))
    if "which is RAM" in done.stderr:
        pytest.skip("the folder for temporary files is in RAM")
    assert done.returncode == 0, done.stderr
    said = run_there(installed, "-m", "gemini", "doctor", "--dir", tmp_path, PYTHONPATH=str(own))
    for name in ("optim", "nvme", "kernels_triton"):
        assert f"import {name} finds {own}" in said.stdout, said.stdout


def test_a_short_name_is_the_same_module():
    import gemini.nvme.files.calls
    import gemini.optim.rules.clipping
    import nvme.files.calls
    import optim.rules.clipping

    assert optim.rules.clipping is gemini.optim.rules.clipping
    assert nvme.files.calls is gemini.nvme.files.calls and nvme is gemini.nvme
    assert optim.rules.clipping.__spec__.name == "gemini.optim.rules.clipping"
    assert gemini.HybridAdam is optim.HybridAdam and names.shadowed() == {}


@pytest.mark.ci
def test_a_type_checker_sees_the_types_of_the_wheel(installed, tmp_path):
    (tmp_path / "user.py").write_text(USER_CODE, encoding="utf-8")
    # ours alone is asked about: torch takes mypy half a minute
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*,triton.*]\nfollow_imports = skip\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", installed, "user.py"],
        cwd=tmp_path, capture_output=True, text=True, encoding="utf-8",
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")},
    )  # fmt: skip
    assert "user.py:4: error: Incompatible types in assignment" in done.stdout, done.stdout
    assert 'user.py:5: error: Argument 1 to "probe"' in done.stdout, done.stdout
    refused = re.findall(
        r"user.py:(\d+): error: .*?\"(max_nrom|max_prefetch|weight_decya)\"", done.stdout
    )
    assert refused == [("10", "max_nrom"), ("11", "max_prefetch"), ("12", "weight_decya"),
                       ("13", "max_nrom")]  # fmt: skip


def test_every_package_is_in_the_wheel_and_says_that_it_is_typed():
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    found = set()
    for name, place in PUBLIC.items():
        assert (ROOT / place / "py.typed").exists()
        for file in (ROOT / place).rglob("*.py"):
            found.add(".".join((name, *file.parent.relative_to(ROOT / place).parts)))
    assert listed == found | SHORT


IMPORTED = """
import sys
import torch
before = set(sys.modules)
import gemini, optim
imported = set(sys.modules) - before
gemini.GeminiDDP, optim.HybridAdam
wrapping = set(sys.modules) - before
print(*imported, "|", *wrapping)
"""
OURS = {"gemini", "optim", "nvme", "kernels_triton"}
LIGHT = {"isal", "numpy", "decimal", "_decimal", "fractions", "statistics", "_statistics"}
LIGHT |= {"secrets", "hmac", "html", "shlex"}


@pytest.mark.ci
def test_importing_is_ours_alone_and_wrapping_needs_nothing_heavy_beside_torch():
    """What `import torch` has not imported already. Seconds: tests/deep/clock/."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], check=True, env=_environment(), stdout=subprocess.PIPE,
        text=True, encoding="utf-8",
    )  # fmt: skip
    imported, wrapping = (set(part.split()) for part in done.stdout.split("|"))
    assert imported == {"gemini", "gemini.arguments", "gemini.names", "gemini.optim", "optim"}
    torchs = {name for name in wrapping if name.startswith("torch.")}
    assert all(name.startswith("torch.distributed._composable") for name in torchs)
    assert {name.partition(".")[0] for name in wrapping - torchs} <= OURS | LIGHT


OPTIMIZED = (
    "tests/gemini/test_agreement.py",
    "tests/gemini/training/test_overflow.py",
    "tests/gemini/tiers/test_nvme_faults.py",
    "tests/gemini/tiers/test_sim.py::test_freed_memory_is_poisoned_and_counted",
    "tests/optim/state/test_on_disk.py",
    "tests/nvme/test_faults.py",
)


@pytest.mark.ci
def test_nothing_depends_on_asserts(tmp_path):
    """The steps, the store and its faults under `python -O`, where an `assert` is not run.

    pytest's own rewriting keeps the asserts of test files, which the first run shows.
    """
    false = tmp_path / "test_false.py"
    false.write_text("def test_false():\n    assert 1 == 2\n", encoding="utf-8")
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, false], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 1, "a false assert passed"
    done = subprocess.run(
        [*command, *OPTIMIZED],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout


BARE = """
import contextlib, importlib, io, sys, traceback
import gemini
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ValueError as error:  # transformers reads docstrings of its own, too
        if "transformers" not in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise
from gemini.__main__ import main
from gemini.checkpoint.__main__ import main as of_checkpoints
for command, words in (
    (main, []), (main, ["train"]), (main, ["plan"]), (main, ["run"]), (of_checkpoints, []),
):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        command([*words, "--help"])
    if "--help" not in said.getvalue():
        raise SystemExit(f"no help of {command.__module__} {words}")
import torch
model = gemini.GeminiDDP(torch.nn.Linear(8, 8))
optimizer = gemini.HybridAdam(model.parameters(), nvme_offload_fraction=1.0)
before = model.digest()
model(torch.ones(2, 8)).float().square().mean().backward()
optimizer.step()
if gemini.GeminiDDP.__doc__ or model.digest() == before:
    raise SystemExit("it has docstrings, or did not train")
"""


@pytest.mark.ci
def test_everything_is_imported_helps_and_trains_without_docstrings():
    """Under `python -OO`."""
    done = subprocess.run(
        [sys.executable, "-OO", "-c", BARE, *modules()],
        env=_environment(), capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.parametrize("module", ["gemini.runtime.x", "gemini.optim.x", "bench.x"])
def test_a_warning_from_our_own_code_is_an_error_in_tests(module):
    with pytest.raises(DeprecationWarning):
        warnings.warn_explicit("old", DeprecationWarning, "x.py", 1, module=module)


def modules():
    """Every file of the source by its long name, and the short names of packages."""
    for name, place in PUBLIC.items():
        for file in sorted((ROOT / place).rglob("*.py")):
            parts = file.relative_to(ROOT / place).with_suffix("").parts
            yield ".".join((name, *parts)).removesuffix(".__init__")
    yield from SHORT


@pytest.mark.ci
def test_importing_everything_warns_of_nothing():
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *modules()],
        env=_environment(), capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")])}
