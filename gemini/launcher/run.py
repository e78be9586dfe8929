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
_NAMES = "from gemini.integrations.colossalai import put_up\n\nput_up()\n"  # what they import
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
    parser.add_argument(
        "--nnodes",
        metavar="N",
        help="use the first so many hosts, or without --host as many as run this with one "
        "--master_addr; 1:4: as many of 1 to 4 as are there, and those that are left if one is "
        "lost",
    )
    parser.add_argument(
        "--max_restarts",
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="begin all ranks again, up to N times, if one has died: a script loads its last "
        "checkpoint, as train does",
    )
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


def num_hosts(text: str) -> tuple[int, int]:
    """Least and most hosts, of `"4"` or `"1:4"`. Raises ValueError."""
    least, _, most = text.partition(":")
    numbers = [int(number) if number.isdecimal() else 0 for number in (least, most or least)]
    if not 1 <= numbers[0] <= numbers[1]:
        raise ValueError(f"--nnodes {text}; expected a number of hosts, or two such as 1:4")
    return numbers[0], numbers[1]


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
    options.nnodes = None if options.nnodes is None else num_hosts(options.nnodes)
    # SIGTERM raises in place of ending this process, so that `finally` ends those it started
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with tempfile.TemporaryDirectory(prefix="gemini-run-") as logs:
            hosts = [] if options.node_rank is not None else chosen_hosts(options)
            if not hosts:
                added = _environment(options, logs)
                return _run(
                    [torchrun_command(options, logs)], added, begins_again=_begins_again(options)
                )
        options.master_addr = options.master_addr or hosts[0]
        least = min(_least_hosts(options) or len(hosts), len(hosts))
        options.nnodes = least, len(hosts)
        return _run([_over_ssh(options, h, node) for node, h in enumerate(hosts)], least=least)
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
    if options.nnodes is None:
        return hosts
    least, most = options.nnodes
    if not hosts and options.master_addr is not None:
        return []  # this host joins others, on each of which somebody runs this command
    if least > max(1, len(hosts)):
        raise ValueError(
            f"--nnodes {least if least == most else f'{least}:{most}'} with {max(1, len(hosts))} "
            "hosts; expected as many in --host or --hostfile"
        )
    return hosts[:most]


def _least_hosts(options: argparse.Namespace) -> int:
    """Hosts with which a job goes on; 0 where it needs all of them."""
    least, most = options.nnodes or (1, 1)
    return least if least < most else 0


def _begins_again(options: argparse.Namespace) -> bool:
    """Whether ranks may begin again, after one has died or a host has come or gone."""
    return options.max_restarts > 0 or _least_hosts(options) > 0


def _environment(options: argparse.Namespace, folder: str) -> dict[str, str]:
    """What torchrun gets beside this process's environment. folder: for files."""
    added = {}
    if _begins_again(options):
        # a store that outlives ranks has the addresses of the dead ones, and gloo calls them
        added["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if options.colossalai:  # processes, and those that they spawn, import it from here
        from gemini.migrate.colossal import ROOT

        names = Path(folder, "names")
        names.mkdir()
        names.joinpath(f"{ROOT}.py").write_text(_NAMES, encoding="utf-8")
        paths = (str(names), os.environ.get("PYTHONPATH"))
        added["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return added


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def torchrun_command(options: argparse.Namespace, logs: str) -> list[str]:
    command = [
        sys.executable, "-m", "gemini.launcher.torchrun",
        f"--nproc-per-node={options.nproc_per_node}", "--tee=3", f"--log-dir={logs}",
        f"--max-restarts={options.max_restarts}",
    ]  # fmt: skip
    least, most = options.nnodes or (1, 1)
    address = options.master_addr or "localhost"
    if most == 1 and options.master_addr is None and options.master_port == 29500:
        command += ["--standalone"]
    elif _begins_again(options) or (most > 1 and options.node_rank is None):
        # hosts begin again together, and number themselves, in this kind of rendezvous alone
        command += [
            f"--nnodes={least}:{most}", "--rdzv-backend=c10d", "--rdzv-id=gemini",
            f"--rdzv-endpoint={address}:{options.master_port}",
        ]  # fmt: skip
    else:
        command += [
            f"--nnodes={most}", f"--node-rank={options.node_rank or 0}",
            f"--master-addr={address}", f"--master-port={options.master_port}",
        ]  # fmt: skip
    return [
        *command,
        "-m",
        "gemini.launcher.recorded",
        *(["-m"] if options.module else []),
        options.script,
        *options.arguments,
    ]


def _run(
    commands: Sequence[Sequence[str]],
    added: Mapping[str, str] = MappingProxyType({}),
    *,
    least: int | None = None,
    begins_again: bool = False,
) -> int:
    """Run commands at the same time, as long as at least `least` of them (None: all) have not
    failed. Returns the status of the first that failed then, or 0.

    begins_again: a command runs its ranks again if one fails; but not if one was refused.

    The line of a refused or stopped rank is printed at the end.
    """
    least = len(commands) if least is None else least
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
            while True:
                statuses = [process.poll() for process in processes]
                failed = [status for status in statuses if status]
                if len(processes) - len(failed) < least or (begins_again and said.exists()):
                    break
                if None not in statuses:
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
            return max(*failed[:1], 1)
        sys.stderr.write(said.read_text(encoding="utf-8"))
        return REFUSED


def _over_ssh(options: argparse.Namespace, host: str, node: int) -> list[str]:
    least, most = options.nnodes
    again = [
        sys.executable, "-m", "gemini", "run", f"--nproc_per_node={options.nproc_per_node}",
        f"--nnodes={least}:{most}", f"--node_rank={node}", f"--master_addr={options.master_addr}",
        f"--master_port={options.master_port}", f"--max_restarts={options.max_restarts}",
        *(["--colossalai"] if options.colossalai else []),
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
