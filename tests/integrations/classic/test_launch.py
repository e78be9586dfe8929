"""Processes join by whatever started them; torchrun under `gemini run` says who failed first."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.shared.workers import run_processes
from gemini.__main__ import main
from gemini.integrations import HybridParallelPlugin
from gemini.integrations import launch as doors
from gemini.integrations.config import AMP_TYPE, global_context, plugin_of, read_config
from gemini.launcher import run
from gemini.launcher.recorded import InOrder
from gemini.launcher.run import chosen_hosts, num_hosts
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import os, signal, sys
rank = int(os.environ["RANK"])
print("hello", rank, sys.argv[1:], flush=True)
if sys.argv[1:] != ["die"]:
    from colossalai.context import ParallelMode
if sys.argv[1:] == ["fail"]:
    if rank == 1:
        raise KeyError("the culprit")
    signal.pause()
if sys.argv[1:] == ["die"]:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_without_torchrun_a_process_is_a_group_of_one(alone):
    doors.launch_from_torch({})
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    drawn = torch.rand(3)
    doors.launch_from_torch()  # again: nothing happens
    torch.manual_seed(1024)
    assert torch.equal(torch.rand(3), drawn)
    with pytest.raises(RuntimeError, match="launch once"):
        doors.launch(1, 2, "localhost", 29500)
    doors.DistCoordinator().destroy()
    assert not dist.is_initialized()


@pytest.mark.parametrize("starter", ["", "_from_slurm", "_from_openmpi"])
def test_the_configuration_of_old_scripts_comes_first(alone, starter, monkeypatch):
    """As their documents write it, by position."""
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("SLURM_NPROCS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    place = ("localhost", free_port(), "gloo")
    getattr(doors, f"launch{starter}")({}, *(() if starter else (0, 1)), *place)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    getattr(doors, f"launch{starter}")({"BATCH_SIZE": 3}, *(() if starter else (0, 1)), *place)
    assert global_context.config.BATCH_SIZE == 3
    doors.launch_from_torch(config={})
    assert global_context.config == {"BATCH_SIZE": 3}


@pytest.mark.parametrize(("backend", "gpu"), [("nccl", True), (None, True), ("gloo", False)])
def test_nccl_is_told_which_gpu_is_whose(backend, gpu, monkeypatch):
    """Else it connects at the first collective, and guesses at a barrier."""
    did = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: did.append(device))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **given: did.append(given.get("device_id"))
    )
    doors.launch(5, 8, "localhost", 29500, backend, local_rank=3, verbose=False)
    own = torch.device("cuda", 1)
    assert did == [own, own if gpu else None]


CONFIG = """
import math
from gemini.integrations.config import AMP_TYPE

_HIDDEN = 1
BATCH_SIZE, NUM_MICRO_BATCHES = 8, 4
parallel = dict(pipeline=dict(size=2), tensor=dict(size=2, mode='1d'))
fp16 = dict(mode=AMP_TYPE.NAIVE, log_num_zeros_in_grad=False, initial_scale=2.0 ** 20)
clip_grad_norm = 1.0
"""


def test_a_configuration_describes_a_plugin(alone, tmp_path):
    """As a Python file, as YAML and as a dict; what is of the script alone is read from it."""
    (tmp_path / "config.py").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "config.yaml").write_text("parallel: {tensor: 2}\nLOG: x\n", encoding="utf-8")
    parsed = doors.get_default_parser().parse_args(["--config", str(tmp_path / "config.py")])
    doors.launch_from_torch(config=parsed.config)
    config = global_context.config
    assert sorted(config) == [
        "BATCH_SIZE", "NUM_MICRO_BATCHES", "clip_grad_norm", "fp16", "parallel"
    ]  # fmt: skip
    assert plugin_of(config, zero_stage=1) == HybridParallelPlugin(
        tp_size=2, pp_size=2, num_microbatches=4, precision="fp16", initial_scale=2.0**20,
        max_norm=1.0, zero_stage=1,
    )  # fmt: skip
    config = read_config(tmp_path / "config.yaml")
    assert config.LOG == "x" and plugin_of(config).tp_size == 2
    assert plugin_of({"parallel": {"moe": {"size": 2}, "data": 4}}).ep_size == 2
    shared = plugin_of({"parallel": {"tensor": {"size": 4, "mode": "sequence"}}})
    assert shared == HybridParallelPlugin(
        tp_size=1, pp_size=1, sp_size=4, enable_sequence_parallelism=True,
        sequence_parallelism_mode="ring_attn", precision="fp32",
    )  # fmt: skip
    assert plugin_of({"parallel": {"tensor": {"size": 1, "mode": "sequence"}}}).sharing == 1
    with pytest.raises(AttributeError, match=r"no EPOCHS; expected one of \['LOG', 'parallel'\]"):
        _ = config.EPOCHS
    for wrong, text in (
        ({"parallel": {"tensor": {"size": 4, "mode": "4d"}}}, "tensor mode '4d'"),
        ({"parallel": {"sequence": 2}}, r"\['sequence'\]; expected '1d', '2d', '2.5d', '3d' or"),
        ({"fp16": {"mode": AMP_TYPE.APEX}}, "fp16 has mode 'apex'"),
        ({"fp16": {"log_num_zeros_in_grad": True}}, "log_num_zeros_in_grad"),
    ):
        with pytest.raises(ValueError, match=text):
            plugin_of(wrong)
    with pytest.raises(ValueError, match=r"config='config.json'; expected a .py"):
        read_config("config.json")


def test_strangers_are_refused(alone, monkeypatch):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    with pytest.raises(ValueError, match=r"SLURM_PROCID is not set; expected a process that srun"):
        doors.launch_from_slurm("localhost", 29500)


def test_the_parser_of_old_scripts():
    parsed = doors.get_default_parser().parse_args(["--rank", "3", "--host", "h"])
    assert (parsed.rank, parsed.host, parsed.port, parsed.backend) == (3, "h", 29500, "nccl")


def test_the_coordinator_of_one_process(capsys, monkeypatch, tmp_path):
    coordinator = doors.DistCoordinator()
    assert (coordinator.rank, coordinator.world_size, coordinator.local_rank) == (0, 1, 0)
    assert coordinator.is_master() and coordinator.is_node_master()
    assert coordinator.is_last_process()
    coordinator.print_on_master("said")
    coordinator.print_on_node_master("too")
    with coordinator.priority_execution():
        coordinator.block_all()
    assert coordinator.on_master_only()(lambda: 3)() == 3
    assert capsys.readouterr().out == "said\ntoo\n"
    logger = doors.get_dist_logger()
    logger.info("from rank 0")
    assert capsys.readouterr().err == "[rank 0] from rank 0\n"
    monkeypatch.setattr(doors, "rank", lambda: 3)  # made before there was a group
    logger.info("and %s", "later")
    assert capsys.readouterr().err == "[rank 3] and later\n"
    logger.info("of one", ranks=[0])
    logger.log_to_file(tmp_path / "logs", suffix="x")
    logger.warning("of %d", 3, ranks=[1, 3])
    assert capsys.readouterr().err == "[rank 3] of 3\n"
    assert (tmp_path / "logs/rank_3_x.log").read_text(encoding="utf-8") == "of 3\n"
    logger.handlers.pop().close()


def _by_starter(rank, starter, port, folder):
    names = {
        "slurm": ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID"),
        "openmpi": tuple(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK")),
    }[starter]
    os.environ.update(zip(names, (str(rank), "2", str(rank)), strict=True))
    getattr(doors, f"launch_from_{starter}")(host="localhost", port=port, config={})
    coordinator, path = doors.DistCoordinator(), Path(folder) / "first"
    with coordinator.priority_execution(executor_rank=1):
        was_there = path.exists()
        path.touch()
    total = torch.ones(1) + rank
    dist.all_reduce(total)
    alone = coordinator.on_master_only()(lambda: "master")()
    ends = coordinator.is_last_process(), coordinator.is_master(dist.group.WORLD)
    coordinator.destroy()
    return was_there, float(total), alone, ends


@pytest.mark.ci
@pytest.mark.parametrize("starter", ["slurm", "openmpi"])
def test_ranks_join_by_their_starter_and_one_goes_first(starter, tmp_path):
    results = run_processes(_by_starter, 2, starter, free_port(), str(tmp_path))
    assert results == [
        (True, 3.0, "master", (False, True)), (False, 3.0, None, (True, False)),
    ]  # fmt: skip


def hosts(**given):
    from argparse import Namespace

    usual = {"host": None, "hostfile": None, "include": None, "exclude": None, "nnodes": None,
             "master_addr": None}  # fmt: skip
    return chosen_hosts(Namespace(**{**usual, **given}))


def test_hosts_are_chosen_by_name(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a slots=2\n# none\nb\n\nc\n", encoding="utf-8")
    assert hosts() == []
    assert hosts(host="x, y") == ["x", "y"]
    assert hosts(hostfile=file) == ["a", "b", "c"]
    assert hosts(hostfile=file, nnodes=(2, 2)) == ["a", "b"]
    assert hosts(hostfile=file, nnodes=(1, 2)) == ["a", "b"]
    assert hosts(hostfile=file, nnodes=(2, 9)) == ["a", "b", "c"]
    for joined in ((1, 2), (2, 3), (2, 2)):
        assert hosts(nnodes=joined, master_addr="a") == []
    assert hosts(hostfile=file, include="c,a") == ["a", "c"]
    assert hosts(hostfile=file, exclude="a") == ["b", "c"]
    for wrong in (
        {"include": "a"}, {"hostfile": file, "include": "z"}, {"host": "a", "hostfile": file},
        {"host": "a", "nnodes": (2, 2)}, {"host": "a", "nnodes": (2, 3)}, {"nnodes": (2, 2)},
        {"nnodes": (2, 3)}, {"hostfile": file, "exclude": "a,b,c"},
        {"hostfile": file, "include": "a", "exclude": "b"}, {"hostfile": file, "exclude": "z"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            hosts(**wrong)
    assert (num_hosts("3"), num_hosts("1:4")) == ((3, 3), (1, 4))
    for text in ("0", "4:1", "many", "1:x", ""):
        with pytest.raises(ValueError, match="expected a number of hosts, or two such as 1:4"):
            num_hosts(text)


def test_hosts_that_join_by_themselves_number_themselves():
    """Those that ssh starts have numbers, of which torchrun's static rendezvous needs one each."""
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    for number in (None, 1):
        rank = [] if number is None else [f"--node_rank={number}"]
        options = parser.parse_args(["--nnodes=2", "--master_addr=a", *rank, "script.py"])
        options.nnodes = num_hosts(options.nnodes)
        flags = run.torchrun_command(options, "logs")
        assert ("--rdzv-backend=c10d" in flags) is (number is None)
        assert ("--node-rank=1" in flags) is (number == 1)


def gemini_run(tmp_path, *arguments, path=""):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")])}
    environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    *flags, what = arguments
    return subprocess.run(
        [sys.executable, "-m", "gemini", "run", *flags, str(script), what],
        env=environment, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip


@pytest.mark.ci
def test_run_starts_all_ranks_and_ends_with_the_first_error(tmp_path):
    done = gemini_run(tmp_path, "--colossalai", "--nproc_per_node", "2", "well")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"[rank {rank}] hello {rank} ['well']" in done.stdout
    done = gemini_run(tmp_path, "--colossalai", "--nproc_per_node", "2", "fail")
    assert done.returncode == 1
    root = done.stderr.partition("Root Cause (first observed failure)")[2]
    assert "KeyError: 'the culprit'" in root and "script.py" in root and ": 1 (local" in root
    done = gemini_run(tmp_path, "die")
    assert done.returncode == 128 + signal.SIGKILL and "SIGKILL" in done.stderr
    assert "elastic_launch" not in done.stderr  # the summary, without a traceback of torchrun's


def test_a_failure_is_recorded_behind_those_that_it_may_come_from(tmp_path, monkeypatch):
    """torchrun's records count seconds, and its root cause is the first of them."""
    seconds = []
    for rank in (1, 0):
        file = tmp_path / str(rank) / "error.json"
        file.parent.mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        InOrder().record_exception(KeyError(rank))
        seconds.append(
            int(json.loads(file.read_text(encoding="utf-8"))["message"]["extraInfo"]["timestamp"])
        )
    assert seconds[1] > seconds[0]


def ssh_that(tmp_path, does):
    """Folder of an ssh that is this script; its third argument is the host."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\n{does}", encoding="utf-8")
    ssh.chmod(0o755)
    return str(ssh.parent)


@pytest.mark.parametrize(("nnodes", "status"), [((), 7), (("--nnodes", "1:2"), 0)])
def test_a_job_goes_on_with_the_hosts_that_it_needs(nnodes, status, tmp_path, monkeypatch):
    folder = ssh_that(tmp_path, 'test "$3" = one || exit 7\n')
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    hosts = tmp_path / "hosts"
    hosts.write_text("one\ntwo\n", encoding="utf-8")
    assert main(["run", "--hostfile", str(hosts), *nnodes, "script.py"]) == status


@pytest.mark.ci
def test_run_reaches_hosts_by_ssh_and_ends_all_where_one_fails(tmp_path):
    folder = ssh_that(tmp_path, 'echo "$3" >> hosts\nfor last; do :; done\nexec sh -c "$last"\n')
    done = gemini_run(
        tmp_path, "--colossalai", "--host", "one,two", "--master_addr", "localhost",
        "--master_port", str(free_port()), "fail", path=folder,
    )  # fmt: skip
    assert done.returncode == 1
    assert sorted((tmp_path / "hosts").read_text(encoding="utf-8").split()) == ["one", "two"]
    assert "[rank 0] hello 0 ['fail']" in done.stdout
    root = done.stderr.partition("Root Cause (first observed failure)")[2]
    assert "KeyError: 'the culprit'" in root


def test_check_is_the_doctor_and_benchmark_says_where_to_measure(capsys, tmp_path):
    assert main(["check", "-i", "--dir", str(tmp_path)]) in (0, 1)
    assert "torch" in capsys.readouterr().out
    assert main(["benchmark", "--gpus", "4"]) == 2
    assert "gemini plan" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "--include", "h", "script.py"])
    assert "expected it beside them" in capsys.readouterr().err
