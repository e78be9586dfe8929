"""What examples/ has for clusters: slurm.sbatch over a stand-in for srun, manifests whose commands
their own parsers take, the Dockerfile, and Ray's loop in a worker's thread without Ray."""

import argparse
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch.distributed as dist
import yaml
from torch.distributed.run import config_from_args
from torch.distributed.run import get_args_parser as torchruns_parser

from bench.shared.workers import run_ranks
from gemini.launcher import run as gemini_run
from gemini.train.config import parse as parse_train
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
# Two nodes, both here
SRUN = """#!/bin/sh
"$@" & first=$!
"$@" || exit 1
wait $first
"""
# Its cleaning is written down, and done by no process
PYTHON = """#!/bin/sh
case "$*" in *"gemini clean"*) echo "$@" >> {cleaned} ;; *) exec {python} "$@" ;; esac
"""
JOB = """
import sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(ranks)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {ranks.item()} {sys.argv[1:]}")
dist.destroy_process_group()
"""


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """A folder in which srun, scontrol and python are found first."""
    programs = {
        "srun": SRUN, "scontrol": "#!/bin/sh\necho localhost\necho other\n",
        "python": PYTHON.format(cleaned=tmp_path / "cleaned", python=sys.executable),
    }  # fmt: skip
    for name, text in programs.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    values = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")]), "NVME_DIR": "/fast",
        "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_NODELIST": "node[1-2]",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.ci
def test_ranks_of_two_nodes_meet_and_each_cleans_its_disk(nodes):
    command = ["bash", str(EXAMPLES / "slurm.sbatch"), "job.py", "--x", "a b"]
    done = subprocess.run(command, cwd=nodes, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"rank \d of .*?\]", done.stdout))
    assert said == [f"rank {rank} of 2: 3 ['--x', 'a b']" for rank in (0, 1)]
    assert (nodes / "cleaned").read_text(encoding="utf-8") == "-m gemini clean /fast --remove\n" * 2


def test_the_image_copies_what_there_is_and_installs_an_extra_that_there_is():
    text = (EXAMPLES / "Dockerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    assert len(copied) > 5 and all((ROOT / name).exists() for name in copied)
    (extra,) = re.findall(r"pip install .*\[(\w+)\]", text)
    assert extra in project["optional-dependencies"]
    assert re.search(r"^FROM python:3\.(\d+)$", text, re.M)[1] >= project["requires-python"][-2:]


# -- manifests: what a controller sets is written here as its source has it --

PODS = 2


def documents(name):
    return list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")))


def check_pod(pod):
    """Every mount has its volume. Returns the one container."""
    (container,) = pod["containers"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    return container


def check_train(arguments):
    """`arguments` is what begins with `gemini train`, and writes where there are mounts."""
    module, command, *flags = arguments
    assert (module, command) == ("gemini", "train")
    flags.remove("/shared/config.yaml")  # which is not here
    config, _ = parse_train(["model", *flags])
    assert (config.out, config.nvme) == ("/shared/runs/1", "/nvme")


def check_gemini_run(args, address):
    """torchrun's flags that `gemini run` makes of a container's arguments."""
    command, *args = args
    parser = argparse.ArgumentParser()
    gemini_run.add_arguments(parser)
    options = parser.parse_args(args)
    assert command == "run" and options.module
    check_train([options.script, *options.arguments])
    options.nnodes = gemini_run.num_hosts(options.nnodes)
    assert gemini_run.chosen_hosts(options) == []  # each pod runs it, and joins the others
    _, _, runner, *flags = gemini_run.torchrun_command(options, "logs")
    assert runner == "gemini.launcher.torchrun"
    config, _, _ = config_from_args(torchruns_parser().parse_args(flags))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (PODS, PODS, 8)
    assert (config.rdzv_backend, config.max_restarts) == ("c10d", 3)
    assert config.rdzv_endpoint == f"{address}:29500"


def test_pods_of_a_job_meet_at_the_first_by_the_name_that_the_service_gives_it():
    service, job = documents("kubernetes")
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == PODS
    pod = spec["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    check_gemini_run(check_pod(pod)["args"], f"{job['metadata']['name']}-0.{pod['subdomain']}")


def test_pods_of_a_job_set_meet_at_the_first():
    (job_set,) = documents("jobset")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    spec, name = replicated["template"]["spec"], job_set["metadata"]["name"]
    assert replicated["replicas"] == 1 and spec["completions"] == spec["parallelism"] == PODS
    # of a set, a job, its number, a pod's number; the set's name is the domain
    address = f"{name}-{replicated['name']}-0-0.{name}"
    check_gemini_run(check_pod(spec["template"]["spec"])["args"], address)


def torchrun_of(container, variables, monkeypatch):
    """torchrun's configuration by a container's command and what the controller sets."""
    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", value)
    torchrun, *flags = [*container["command"], *container["args"]]
    assert torchrun == "torchrun"
    options = torchruns_parser().parse_args(flags)
    assert options.module and options.training_script == "gemini.launcher.recorded"
    is_module, *arguments = options.training_script_args
    assert is_module == "-m"
    check_train(arguments)
    return config_from_args(options)[0]


def test_torchrun_takes_the_variables_of_kubeflows_controllers(monkeypatch):
    job, train_job = documents("kubeflow")
    elastic, (worker,) = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"].values()
    assert worker["replicas"] == elastic["maxReplicas"] == PODS
    variables = {
        "RDZV_ENDPOINT": f"{job['metadata']['name']}-worker-0:23456",
        "RDZV_BACKEND": elastic["rdzvBackend"],
        "NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "NPROC_PER_NODE": str(elastic["nProcPerNode"]),
        "MAX_RESTARTS": str(elastic["maxRestarts"]),
    }
    with monkeypatch.context() as patched:
        container = check_pod(worker["template"]["spec"])
        assert container["name"] == "pytorch"  # the one that the controller gives them to
        config = torchrun_of(container, variables, patched)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, PODS, 8)
    assert (config.rdzv_endpoint, config.max_restarts) == ("gemini-worker-0:23456", 3)

    trainer = train_job["spec"]["trainer"]
    variables = {
        "NNODES": str(trainer["numNodes"]), "NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "NODE_RANK": "1", "MASTER_PORT": "29400", "MASTER_ADDR": "gemini-node-0-0.gemini",
    }  # fmt: skip
    config = torchrun_of(trainer, variables, monkeypatch)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (PODS, PODS, 8)
    assert (config.rdzv_backend, config.rdzv_configs["rank"]) == ("static", 1)
    assert config.rdzv_endpoint == "gemini-node-0-0.gemini:29400"


# -- Ray Train --


def ray_of(folder, kills):
    """Modules `ray` and `ray.train`, as far as the example's loop uses them. kills: report of rank
    1 at which it dies. The newest reported checkpoint is in `folder`/newest, which outlives us."""
    newest, reports = folder / "newest", []

    def report(metrics, checkpoint, checkpoint_upload_mode):
        assert checkpoint_upload_mode == "no copy"
        dist.barrier()  # it is one of all workers
        reports.append(metrics)
        if dist.get_rank() == 0:
            newest.write_text(checkpoint.path, encoding="utf-8")
        if dist.get_rank() == 1 and len(reports) == kills:
            os.kill(os.getpid(), signal.SIGKILL)

    def get_checkpoint():
        kept = newest.exists() and newest.read_text(encoding="utf-8")
        return SimpleNamespace(path=kept) if kept else None

    train = ModuleType("ray.train")
    train.report, train.get_checkpoint = report, get_checkpoint
    train.get_context = lambda: SimpleNamespace(get_experiment_name=lambda: "run")
    train.Checkpoint = lambda path: SimpleNamespace(path=path)
    train.CheckpointUploadMode = SimpleNamespace(NO_UPLOAD="no copy")
    ray = ModuleType("ray")
    ray.train = train
    return {"ray": ray, "ray.train": train}, reports


def in_a_thread_of_a_worker(rank, folder, kills):
    """What Ray does in a process of a worker; the reports, or what the loop raised."""
    loop = runpy.run_path(str(EXAMPLES / "ray_train.py"))["loop"]
    settings = {"out": str(folder), "steps": 9, "every": 2, "nvme": f"{folder}/{{rank}}"}
    modules, reports = ray_of(folder, kills)
    raised = []

    def run():
        try:
            loop(settings)
        except BaseException as error:
            raised.append(error)

    with patch.dict(sys.modules, modules):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    if raised:
        raise raised[0]
    return reports


@pytest.mark.ci
def test_rays_loop_in_a_workers_thread_goes_on_when_a_worker_was_killed(tmp_path):
    disturbed, undisturbed = tmp_path / "1", tmp_path / "2"
    for folder in (disturbed, undisturbed):
        (folder / "run").mkdir(parents=True)
    whole = run_ranks(in_a_thread_of_a_worker, 2, undisturbed, 0, processes=True)
    assert [metrics["step"] for metrics in whole[0]] == [2, 4, 6, 8, 9]
    with pytest.raises(EOFError):  # of a process that is gone
        run_ranks(in_a_thread_of_a_worker, 2, disturbed, 3, processes=True)
    again = run_ranks(in_a_thread_of_a_worker, 2, disturbed, 0, processes=True)
    assert again[0][0]["step"] in (6, 8)  # the other may have died before rank 0 wrote down 6
    assert [reports == whole[rank][-len(reports) :] for rank, reports in enumerate(again)] == [
        True, True,
    ]  # fmt: skip
    assert not list(tmp_path.rglob("*.blocks"))
