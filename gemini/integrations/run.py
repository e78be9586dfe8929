"""Command `python -m gemini run`: torchrun, on this machine or on hosts that ssh reaches."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from gemini.arguments import LAST_WORDS, REFUSED, STOPPED, Parser

_LINE = "[rank ${rank}] "  # before what a rank prints
_SHARED = ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
POLL_SECONDS = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc_per_node",
        "--nproc-per-node",
        type=int,
        default=1,
        metavar="N",
        help="ranks of each host",
    )
    parser.add_argument("--nnodes", type=int, help="use the first so many hosts")
    parser.add_argument("--host", help="hosts by name, with commas; reached by ssh")
    parser.add_argument("--hostfile", type=Path, help="a file with a host in every line")
    parser.add_argument("--include", help="of the hostfile, these alone")
    parser.add_argument("--exclude", help="of the hostfile, all but these")
    parser.add_argument("--master_addr", "--master-addr", help="of the first host")
    parser.add_argument(
        "--master_port",
        "--master-port",
        type=int,
        default=29500,
        help="where ranks of several hosts meet",
    )
    parser.add_argument("--ssh-port", type=int, help="by default what ssh takes")
    parser.add_argument("--node_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--colossalai", action="store_true", help="the script imports colossalai: it gets this"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def main(arguments: Sequence[str]) -> int:
    """Command `python -m gemini run`."""
    parser = Parser(
        prog="python -m gemini run",
        description="A script on all ranks: torchrun on this machine, or on hosts by ssh.",
        epilog="exit status: 0 all ranks ended well, else that of the first rank that failed, "
        "2 wrong flags or a refused train, 130 stopped by Ctrl-C",
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except ValueError as error:
        parser.error(str(error))


def run(options: argparse.Namespace) -> int:
    """Run the script on all hosts; returns 0 or the status of the first command that failed.

    Raises ValueError for a wrong choice of hosts.
    """
    # SIGTERM raises in place of ending this process, so that `finally` ends those it started
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with tempfile.TemporaryDirectory(prefix="gemini-run-") as logs:
            hosts = [] if options.node_rank is not None else chosen_hosts(options)
            if not hosts:
                nodes = 1 if options.node_rank is None else options.nnodes or 1
                command = _torchrun(options, options.node_rank or 0, nodes, logs)
                return _run([command], _with_colossalai(logs) if options.colossalai else {})
        options.master_addr = options.master_addr or hosts[0]
        return _run([_over_ssh(options, h, node, len(hosts)) for node, h in enumerate(hosts)])
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def chosen_hosts(options: argparse.Namespace) -> list[str]:
    """Hosts in order; empty for this machine alone. Raises ValueError."""
    if options.host and options.hostfile:
        raise ValueError("--host and --hostfile; expected one of the two")
    if (options.include or options.exclude) and not options.hostfile:
        raise ValueError("--include and --exclude choose from --hostfile; expected it beside them")
    if options.include and options.exclude:
        raise ValueError("--include and --exclude; expected one of the two")
    hosts: list[str] = []
    if options.host:
        hosts = _split(options.host)
    if options.hostfile:
        lines = [
            line.partition("#")[0].split()
            for line in options.hostfile.read_text(encoding="utf-8").splitlines()
        ]
        hosts = [words[0] for words in lines if words]
        named = _split(options.include or options.exclude or "")
        unknown = [host for host in named if host not in hosts]
        if unknown:
            raise ValueError(f"{unknown[0]} is not in {options.hostfile}; expected one of {hosts}")
        if options.include:
            hosts = [host for host in hosts if host in named]
        if options.exclude:
            hosts = [host for host in hosts if host not in named]
        if not hosts:
            raise ValueError(f"no host of {options.hostfile} is left; expected one at least")
    if options.nnodes is not None and options.nnodes > max(1, len(hosts)):
        raise ValueError(
            f"--nnodes {options.nnodes} with {max(1, len(hosts))} hosts; expected as many in "
            "--host or --hostfile"
        )
    return hosts[: options.nnodes]


def _with_colossalai(folder: str) -> dict[str, str]:
    """Environment in which processes, and those that they spawn, import colossalai from here."""
    from .colossalai import write_finder

    names = Path(folder, "names")
    write_finder(names)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(names), os.environ.get("PYTHONPATH"))))}


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _torchrun(options: argparse.Namespace, node: int, nodes: int, logs: str) -> list[str]:
    command = [
        sys.executable, "-m", "gemini.integrations.torchrun",
        f"--nproc-per-node={options.nproc_per_node}", "--tee=3", f"--log-dir={logs}",
    ]  # fmt: skip
    if nodes == 1 and options.master_addr is None:
        command += ["--standalone"] if options.master_port == 29500 else []
    if nodes > 1 or options.master_addr is not None or options.master_port != 29500:
        command += [
            f"--nnodes={nodes}", f"--node-rank={node}",
            f"--master-addr={options.master_addr or 'localhost'}",
            f"--master-port={options.master_port}",
        ]  # fmt: skip
    return [
        *command,
        "-m",
        "gemini.integrations.recorded",
        *(["-m"] if options.module else []),
        options.script,
        *options.arguments,
    ]


def _run(commands: Sequence[Sequence[str]], added: Mapping[str, str] = MappingProxyType({})) -> int:
    """Run commands at the same time; one that fails ends all. Returns its status, or 0.

    The line of a refused or stopped rank is printed at the end.
    """
    stdin = None if len(commands) == 1 else subprocess.DEVNULL
    environment = {**os.environ, **added, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": _LINE}
    with tempfile.TemporaryDirectory(prefix="gemini-run-") as folder:
        said = Path(folder) / "last"
        processes = [
            subprocess.Popen(
                command, env=environment | {LAST_WORDS: str(said)}, stdin=stdin,
                start_new_session=True,
            )
            for command in commands
        ]  # fmt: skip
        try:
            while not (failed := [p.returncode for p in processes if p.poll()]):
                if all(process.returncode == 0 for process in processes):
                    return 0
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:  # which a terminal sends to this session alone
            for process in processes:
                _end(process, signal.SIGINT)
            sys.stderr.write(said.read_text(encoding="utf-8") if said.exists() else "stopped\n")
            return STOPPED
        finally:
            for process in processes:
                _end(process)
        if not said.exists():
            return max(failed[0], 1)
        sys.stderr.write(said.read_text(encoding="utf-8"))
        return REFUSED


def _over_ssh(options: argparse.Namespace, host: str, node: int, nodes: int) -> list[str]:
    again = [
        sys.executable, "-m", "gemini", "run", f"--nproc_per_node={options.nproc_per_node}",
        f"--nnodes={nodes}", f"--node_rank={node}", f"--master_addr={options.master_addr}",
        f"--master_port={options.master_port}", *(["--colossalai"] if options.colossalai else []),
        *(["-m"] if options.module else []),
        options.script, *options.arguments,
    ]  # fmt: skip
    variables = [f"{name}={os.environ[name]}" for name in _SHARED if name in os.environ]
    there = f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*variables, *again])}"
    port = [] if options.ssh_port is None else ["-p", str(options.ssh_port)]
    # BatchMode: ssh fails in place of asking for a password, for which it would wait forever
    return ["ssh", "-o", "BatchMode=yes", *port, host, there]


def _end(process: subprocess.Popen[bytes], *first: signal.Signals) -> None:
    """End a process and its children, and wait for it."""
    # it was started as a session of its own, so its group has no process of ours
    for number in (*first, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue
