"""The cache of compiled kernels and what a machine without a working compiler gets."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.workers import run_ranks
from gemini import GeminiDDP
from optim import HybridAdam
from optim.adam import AdamRule
from optim.adaptive import LionRule
from optim.rules import config
from optim.rules.config import COMPILED_FROM_NUMEL, UpdateFacts, wants_compiled
from optim.update import built_kernels, kernel_cache
from optim.update.built_kernels import kernels
from optim.update.kernel_cache import KernelBuildError
from optim.update.kernel_specs import SquaresSpec, UpdateSpec

SPEC = SquaresSpec(torch.bfloat16, 1024, 2048)
LARGE = UpdateFacts(COMPILED_FROM_NUMEL, has_master=True)


NEEDS_COMPILER = pytest.mark.skipif(built_kernels.compiler() is None, reason="no C++ compiler")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Empty, on a machine with a compiler that fails, whatever this one has."""
    give_compiler(monkeypatch, tmp_path, "exit 1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / kernel_cache.FOLDER


def give_compiler(monkeypatch, folder, script):
    """Of all compilers only this one; it writes a line for each call that compiles."""
    path = folder / "bin" / "g++"
    path.parent.mkdir(parents=True, exist_ok=True)
    calls = folder / "calls"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *--version) echo fake 1.0; exit 0;; esac\n'
        f"echo called >> {calls}\n{script}\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return calls


# -- the choice ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu_path", "facts", "compiled"),
    [
        ("auto", LARGE, True),
        ("auto", UpdateFacts(COMPILED_FROM_NUMEL - 1, has_master=True), False),
        ("auto", UpdateFacts(10**12, has_master=False), False),
        ("auto", UpdateFacts(10**12, has_master=False, rounds_at_random=True), False),
        ("eager", UpdateFacts(10**12, has_master=True), False),
        ("compile", UpdateFacts(1, has_master=False), True),
    ],
)
def test_the_path_follows_from_the_model_alone(cpu_path, facts, compiled):
    assert wants_compiled(cpu_path, facts) is compiled


def train(model, optimizer, batches):
    for parts in batches:
        token_loss(model, parts[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.last_report.update_path


def test_a_small_model_starts_no_compiler(cache, tmp_path, monkeypatch):
    calls = give_compiler(monkeypatch, tmp_path, "exit 1")
    model = GeminiDDP(Tower(), device="cpu")
    assert train(model, HybridAdam(model.parameters()), token_batches(1, 1)) == "cpu"
    assert not calls.exists() and not cache.exists()


def large_tower(cpu_path="auto", **options):
    model = GeminiDDP(Tower(), device="cpu", **{"precision": "bf16", **options})
    return model, HybridAdam(model.parameters(), lr=1e-2, cpu_path=cpu_path)


@pytest.fixture
def every_model_is_large(monkeypatch):
    monkeypatch.setattr(config, "COMPILED_FROM_NUMEL", 1)


def test_without_a_compiler_auto_is_eager_and_says_so_once(
    cache, monkeypatch, caplog, every_model_is_large
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    model, optimizer = large_tower()
    assert train(model, optimizer, token_batches(2, 1)) == "cpu"
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "not compiled" in record.message and "install g++" in record.message
    with pytest.raises(KernelBuildError, match="install g"):
        large_tower("compile")


@pytest.mark.ci
def test_the_last_lines_of_a_compiler_that_fails_are_told(
    cache, tmp_path, monkeypatch, caplog, every_model_is_large
):
    calls = give_compiler(monkeypatch, tmp_path, "echo cc1plus: out of memory >&2; exit 1")
    model, optimizer = large_tower()
    assert train(model, optimizer, token_batches(1, 1)) == "cpu"
    assert calls.exists()
    starting, failing = (r.message for r in caplog.records if r.levelno >= logging.WARNING)
    assert "once for this machine" in starting
    assert "cc1plus: out of memory" in failing and len(failing.splitlines()) < 15
    with pytest.raises(KernelBuildError, match="cc1plus: out of memory"):
        large_tower("compile")
    assert sorted(p.name for p in cache.iterdir()) == ["lock"]


def test_a_compiler_that_hangs_is_ended(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(built_kernels, "BUILD_SECONDS", 0.2)
    give_compiler(monkeypatch, tmp_path, "sleep 600")
    with pytest.raises(KernelBuildError, match="more than 0 s"):
        kernels([SPEC])
    assert sorted(p.name for p in cache.iterdir()) == ["lock"]


def without_compiler_on_rank_1(rank):
    config.COMPILED_FROM_NUMEL = 1
    if rank == 1:
        os.environ["CXX"] = "no-such-compiler"
    model, optimizer = large_tower(min_chunk_size_m=0.004)
    path = train(model, optimizer, token_batches(1, 2))
    model, error = GeminiDDP(Tower(), device="cpu"), None
    try:
        HybridAdam(model.parameters(), cpu_path="compile")
    except KernelBuildError as raised:
        error = str(raised)
    return path, error


@NEEDS_COMPILER
@pytest.mark.ci
@pytest.mark.ci
def test_if_one_rank_cannot_compile_none_does():
    found = run_ranks(without_compiler_on_rank_1, 2, processes=True)
    assert [path for path, _ in found] == ["cpu", "cpu"]
    assert all("rank 1: no C++ compiler" in error for _, error in found)


# -- the folder ------------------------------------------------------------------------------


def test_a_folder_that_others_can_write_to_is_refused(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o770)
    with pytest.raises(KernelBuildError, match="can be written by others"):
        kernels([SPEC])


def test_a_folder_of_another_user_is_refused(cache, monkeypatch):
    cache.mkdir(parents=True, mode=0o700)
    owner = cache.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(KernelBuildError, match="belongs to another user"):
        kernels([SPEC])


@pytest.mark.parametrize("target", ["ours", "missing"])
def test_a_link_in_the_place_of_the_cache_is_refused(target, cache, tmp_path):
    cache.parent.mkdir(parents=True, mode=0o700)
    (tmp_path / "ours").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / target)
    with pytest.raises(KernelBuildError, match=f"{kernel_cache.FOLDER} is a link"):
        kernels([SPEC])
    assert list((tmp_path / "ours").iterdir()) == [] and not (tmp_path / "missing").exists()


def test_a_link_in_the_place_of_a_library_is_refused(cache, tmp_path):
    path = path_of(SPEC, cache)
    (tmp_path / "other.so").write_bytes(b"\x7fELF")
    path.symlink_to(tmp_path / "other.so")
    with pytest.raises(KernelBuildError, match=r"\.so is a link"):
        kernels([SPEC])


def test_a_home_that_is_a_link_is_followed_once(tmp_path, monkeypatch):
    """The path that is used has no link in it: it cannot lead elsewhere after it was checked."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to("disk")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert kernel_cache.cache_folder() == (tmp_path / "disk").resolve() / kernel_cache.FOLDER


@pytest.mark.parametrize("mode, sticky_mode", [(0o777, 0o1777), (0o775, 0o1775)])
def test_a_folder_above_in_which_others_can_rename_is_refused(
    mode, sticky_mode, tmp_path, monkeypatch
):
    above = tmp_path / "above"
    (above / "cache").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(above / "cache"))
    monkeypatch.setattr(kernel_cache, "is_private_group", lambda gid: False)
    above.chmod(mode)
    with pytest.raises(KernelBuildError, match=f"because they can write to {above}, and code"):
        kernel_cache.cache_folder()
    above.chmod(sticky_mode)
    kernel_cache.cache_folder()
    if mode == 0o775:
        above.chmod(mode)
        monkeypatch.setattr(kernel_cache, "is_private_group", lambda gid: True)
        kernel_cache.cache_folder()


def test_a_folder_above_of_another_user_is_refused(tmp_path, monkeypatch):
    above = tmp_path / "above"
    above.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(above))
    real, mine = os.stat, os.geteuid()

    def stat_of_another(path, **options):
        found = real(path, **options)
        if os.fspath(path) != os.fspath(above):
            return found
        return os.stat_result([*found[:4], mine + 7, *found[5:10]])

    monkeypatch.setattr(os, "stat", stat_of_another)
    with pytest.raises(KernelBuildError, match=f"because they can write to {above}, and code"):
        kernel_cache.cache_folder()


@pytest.mark.parametrize("name, members, private", [
    ("me", [], True), ("me", ["me"], True), ("me", ["you"], False), ("users", [], False),
])  # fmt: skip
def test_a_group_is_private_that_has_the_users_name_and_nobody_else(
    name, members, private, monkeypatch
):
    user = SimpleNamespace(pw_name="me")
    group = SimpleNamespace(gr_name=name, gr_mem=members)
    monkeypatch.setattr(kernel_cache.pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(kernel_cache.grp, "getgrgid", lambda gid: group)
    assert kernel_cache.is_private_group(5) is private


def test_a_library_that_others_can_write_to_is_refused(cache):
    path = path_of(SPEC, cache)
    path.write_bytes(b"\x7fELF")
    path.chmod(0o622)
    with pytest.raises(KernelBuildError, match="can be written by others"):
        kernels([SPEC])
    path.chmod(0o600)
    with pytest.raises(KernelBuildError, match="does not load"):
        kernels([SPEC])


def test_no_folder_is_told(tmp_path, monkeypatch):
    give_compiler(monkeypatch, tmp_path, "exit 1")
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(KernelBuildError, match="XDG_CACHE_HOME"):
        kernels([SPEC])


def path_of(spec, cache):
    """Where the library of a specification is looked for on this machine."""
    kernel_cache.cache_folder()
    return cache / built_kernels.library_name(spec, built_kernels.compiler())


def test_another_processor_compiler_or_formula_is_another_library(cache, tmp_path, monkeypatch):
    bf16, fp32 = torch.bfloat16, torch.float32
    adam = UpdateSpec(AdamRule(), bf16, bf16, True)
    here = [path_of(adam, cache)]
    assert path_of(UpdateSpec(AdamRule(), bf16, bf16, True), cache) == here[0]
    here.append(path_of(UpdateSpec(AdamRule(), bf16, fp32, True), cache))
    here.append(path_of(UpdateSpec(LionRule(), bf16, bf16, True), cache))
    monkeypatch.setattr(built_kernels, "processor", lambda: "with fewer instructions")
    here.append(path_of(adam, cache))
    give_compiler(monkeypatch, tmp_path / "other", "exit 1")
    here.append(path_of(adam, cache))
    monkeypatch.setattr(built_kernels, "FLAGS", (*built_kernels.FLAGS, "-g"))
    here.append(path_of(adam, cache))
    monkeypatch.setattr(
        AdamRule, "formula", staticmethod(lambda param, grad, c, **planes: (grad, planes))
    )
    here.append(path_of(UpdateSpec(AdamRule(), bf16, bf16, True), cache))
    assert len(set(here)) == len(here)


class PowerRule(AdamRule):
    """A rule of a user's whose formula is not made of exact operators."""

    @staticmethod
    def formula(param, grad, c, **planes):
        return param - grad.exp(), planes


def test_a_formula_that_cannot_be_a_loop_is_told_by_its_operator(
    cache, monkeypatch, caplog, every_model_is_large
):
    monkeypatch.setattr(HybridAdam, "rule_for", lambda self, groups: PowerRule())
    model, optimizer = large_tower()
    assert train(model, optimizer, token_batches(1, 1)) == "cpu"
    assert any("calls torch's exp" in record.message for record in caplog.records)
    with pytest.raises(KernelBuildError, match=r"calls torch's exp of torch\.float32"):
        large_tower("compile")


# -- real builds -----------------------------------------------------------------------------

BUILD = """
import logging, sys
logging.basicConfig(format="%(message)s")
from optim.update.built_kernels import Rows, kernels
from optim.update.kernel_specs import SquaresSpec
import torch
(kernel,) = kernels([SquaresSpec(torch.bfloat16, 1024, 2048)])
rows, sums = Rows(), torch.zeros(2, dtype=torch.float64)
rows.add((torch.ones(3000, dtype=torch.bfloat16), sums), 3000)
kernel(rows, 2)
print(sums.tolist())
"""


def environment(**more):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


@NEEDS_COMPILER
@pytest.mark.ci
def test_two_processes_build_once_as_ranks_and_whatever_their_settings(tmp_path):
    odd = {
        "XDG_CACHE_HOME": str(tmp_path), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x", "PYTHONWARNINGS": "error::FutureWarning",
        "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD], env=environment(**odd, RANK=str(rank)), text=True,
            encoding="utf-8",
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert [out.strip() for out, _ in said] == ["[2048.0, 952.0]"] * 2
    assert sum("once for this machine" in errors for _, errors in said) == 1
    folder = tmp_path / kernel_cache.FOLDER
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(p.suffix for p in folder.iterdir()) == ["", ".so"]


LOAD = """
import sys, torch
from optim.adam import AdamRule
from optim.update.compiled_update import CompiledUpdate
CompiledUpdate(AdamRule(), [(torch.bfloat16, torch.bfloat16, True)])
assert "torch._inductor" not in sys.modules and "torch._dynamo" not in sys.modules
"""


@NEEDS_COMPILER
@pytest.mark.ci
def test_loading_takes_no_compiler_into_the_process():
    for _ in range(2):  # built by the first one, if nobody did before
        done = subprocess.run(
            [sys.executable, "-c", LOAD],
            env=environment(),
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
        assert done.returncode == 0, done.stderr
