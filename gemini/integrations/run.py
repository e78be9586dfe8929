"""`python -m gemini run`: torchrun on every host, and the error of the rank that failed first."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

_LINE = "[rank ${rank}] "  # before what a rank prints
_SHARED = ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_ERROR = "@gemini-error "  # before a host's first error, on its way to the first host
_KEPT_LINES = 200
POLL_SECONDS = 0.1
GRACE_SECONDS = 3.0  # for torchrun to end by itself, once a rank has failed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc_per_node", "--nproc-per-node", type=int, default=1, metavar="N")
    parser.add_argument("--nnodes", type=int, help="use the first so many hosts")
    parser.add_argument("--host", help="hosts by name, with commas; reached by ssh")
    parser.add_argument("--hostfile", type=Path, help="a file with a host in every line")
    parser.add_argument("--include", help="of the hostfile, these alone")
    parser.add_argument("--exclude", help="of the hostfile, all but these")
    parser.add_argument("--master_addr", "--master-addr", help="of the first host")
    parser.add_argument("--master_port", "--master-port", type=int, default=29500)
    parser.add_argument("--ssh-port", type=int)
    parser.add_argument("--node_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def run(options: argparse.Namespace) -> int:
    """The exit status: 0, or that of what failed. Raises ValueError for hosts that are none."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:  # what it started ends with it
        if options.node_rank is not None:
            return _run_node(options, options.node_rank, options.nnodes or 1, behind_ssh=True)
        hosts = chosen_hosts(options)
        if not hosts:
            return _run_node(options, 0, 1, behind_ssh=False)
        return _run_hosts(options, hosts)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def chosen_hosts(options: argparse.Namespace) -> list[str]:
    """In order; empty for this machine alone."""
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
            line.partition("#")[0].split() for line in options.hostfile.read_text().splitlines()
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


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _torchrun(options: argparse.Namespace, node: int, nodes: int, logs: str) -> list[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run",
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


def _run_node(options: argparse.Namespace, node: int, nodes: int, *, behind_ssh: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="gemini-run-") as logs:
        environment = {**os.environ, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": _LINE}
        process = subprocess.Popen(
            _torchrun(options, node, nodes, logs),
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        rest: deque[str] = deque(maxlen=_KEPT_LINES)
        reader = threading.Thread(target=_pass_on_ranks, args=(process.stderr, rest))
        reader.start()
        try:
            status = _wait_for_node(process, Path(logs))
        finally:
            _end(process)
            reader.join()
        error = first_error(Path(logs))
    if status and error is not None:
        _say_first(error, behind_ssh=behind_ssh)
    elif status:  # killed, say: torchrun knows by what
        sys.stderr.writelines(rest)
    return 0 if status == 0 else status if status > 0 else 1


def _wait_for_node(process: subprocess.Popen[str], logs: Path) -> int:
    """torchrun's status; of several hosts, it would wait for those that nobody has told."""
    failed_at = None
    while True:
        try:
            return process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if failed_at is None and first_error(logs) is not None:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
                return 1


def _pass_on_ranks(stream: IO[str] | None, rest: deque[str]) -> None:
    """What ranks print; what torchrun itself says is kept in `rest`."""
    assert stream is not None
    for line in stream:
        if line.startswith("[rank "):
            sys.stderr.write(line)
            sys.stderr.flush()
        else:
            rest.append(line)


def first_error(logs: Path) -> dict[str, Any] | None:
    """`{"rank", "time", "text"}` of the rank that failed first, of those that could say so."""
    found = []
    for path in logs.rglob("error.json"):
        try:
            said = json.loads(path.read_text())
            found.append({"rank": said["rank"], "time": said["time"], "text": said["text"]})
        except (ValueError, KeyError, TypeError):
            continue
    return min(found, key=lambda error: error["time"], default=None)


def _say_first(error: dict[str, Any], *, behind_ssh: bool) -> None:
    if behind_ssh:
        sys.stdout.write(f"{_ERROR}{json.dumps(error)}\n")
    else:
        sys.stderr.write(f"\nrank {error['rank']} failed first:\n{error['text'].rstrip()}\n")


def _run_hosts(options: argparse.Namespace, hosts: Sequence[str]) -> int:
    """One ssh for each host; where one fails, all are ended."""
    if options.master_addr is None:
        options.master_addr = hosts[0]
    errors: list[dict[str, Any]] = []
    processes = [
        subprocess.Popen(
            _over_ssh(options, host, node, len(hosts)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for node, host in enumerate(hosts)
    ]
    readers = [
        threading.Thread(target=_read_host, args=(process.stdout, errors)) for process in processes
    ]
    for reader in readers:
        reader.start()
    status = 0
    try:
        while any(process.poll() is None for process in processes) and not status:
            status = next(_failures(processes), 0)
            time.sleep(POLL_SECONDS)
        status = status or next(_failures(processes), 0)
    finally:
        for process in processes:
            _end(process)
        for reader in readers:
            reader.join()
    if errors:
        _say_first(min(errors, key=lambda error: error["time"]), behind_ssh=False)
    return status if status >= 0 else 1


def _failures(processes: Sequence[subprocess.Popen[str]]) -> Iterator[int]:
    return (process.returncode for process in processes if process.poll())


def _over_ssh(options: argparse.Namespace, host: str, node: int, nodes: int) -> list[str]:
    again = [
        sys.executable, "-m", "gemini", "run", f"--nproc_per_node={options.nproc_per_node}",
        f"--nnodes={nodes}", f"--node_rank={node}", f"--master_addr={options.master_addr}",
        f"--master_port={options.master_port}", *(["-m"] if options.module else []),
        options.script, *options.arguments,
    ]  # fmt: skip
    variables = [f"{name}={os.environ[name]}" for name in _SHARED if name in os.environ]
    there = f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*variables, *again])}"
    port = [] if options.ssh_port is None else ["-p", str(options.ssh_port)]
    return ["ssh", "-o", "BatchMode=yes", *port, host, there]


def _read_host(stream: IO[str] | None, errors: list[dict[str, Any]]) -> None:
    assert stream is not None
    for line in stream:
        if line.startswith(_ERROR):
            errors.append(json.loads(line.removeprefix(_ERROR)))
        else:
            sys.stdout.write(line)
            sys.stdout.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """End a process with all that it started, and wait for it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue
