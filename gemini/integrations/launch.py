"""Start of a process in a group: from torchrun, Slurm, Open MPI or by hand. Loggers by rank."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from gemini.api import rank, rest_at_exit, world_size
from gemini.integrations.config import global_context, read_config
from gemini.integrations.parts import seed_all

log = logging.getLogger("gemini")
P = ParamSpec("P")
T = TypeVar("T")
Given = str | os.PathLike[str] | Mapping[str, Any] | None  # a configuration, or its file


def _config_first(launcher: Callable[P, None]) -> Callable[P, None]:
    """Decorator of a launcher that takes a configuration as its first argument, as old ones did."""

    @functools.wraps(launcher)
    def launched(*args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], Mapping):
            kwargs["config"] = args[0]
            args = args[1:]
        launcher(*args, **kwargs)

    return launched


@_config_first
def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    config: Given = None,
) -> None:
    """Join a process group whose rank 0 listens at `host`:`port`.

    backend: `"nccl"` is gloo where there is no CUDA.
    local_rank: number of the CUDA device; None is LOCAL_RANK, else `rank` modulo the devices.
    seed: of all random numbers, the same on every rank.

    config: a dict, which may be the first argument, or a Python or YAML file. It becomes
        `gemini.integrations.config.global_context.config`, which the script reads, and `plugin_of`
        if the script describes its plugin so.

    A second call for the same rank and world size only takes the configuration. Raises RuntimeError
    for another rank or world size.
    """
    _take_config(config)
    if _is_joined(rank, world_size):
        return
    method = f"tcp://{host}:{port}"
    _join(backend, local_rank, seed, verbose, rank, world_size, init_method=method)


@_config_first
def launch_from_torch(
    backend: str | None = None, seed: int = 1024, verbose: bool = True, config: Given = None
) -> None:
    """Launch with torchrun's variables; without them, as a group of this process alone.

    See `launch`.
    """
    _take_config(config)
    there = "RANK" in os.environ
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if _is_joined(rank, world_size):
        return
    if there:
        _join(backend, None, seed, verbose, rank, world_size, init_method="env://")
    else:
        _join(backend, 0, seed, verbose, 0, 1, store=HashStore())


@_config_first
def launch_from_slurm(
    host: str,
    port: int,
    backend: str | None = "nccl",
    seed: int = 1024,
    verbose: bool = True,
    config: Given = None,
) -> None:
    """Launch with ranks from SLURM_PROCID, SLURM_NPROCS and SLURM_LOCALID; see `launch`."""
    rank, size = (_from_environment(name, "srun") for name in ("SLURM_PROCID", "SLURM_NPROCS"))
    local = int(os.environ["SLURM_LOCALID"]) if "SLURM_LOCALID" in os.environ else None
    launch(rank, size, host, port, backend, local, seed, verbose, config)


@_config_first
def launch_from_openmpi(
    host: str,
    port: int,
    backend: str | None = "nccl",
    seed: int = 1024,
    verbose: bool = True,
    config: Given = None,
) -> None:
    """Launch with ranks from OMPI_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK; see `launch`."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    rank, size, local = (_from_environment(name, "mpirun") for name in names)
    launch(rank, size, host, port, backend, local, seed, verbose, config)


def get_default_parser() -> argparse.ArgumentParser:
    """Parser for scripts that take the arguments of `launch`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--world_size", type=int, default=1)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--config", help="a Python or YAML file, for launch(config=)")
    return parser


class _RankHandler(logging.Handler):
    """Handler that looks up stderr and this process's rank anew for each message."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"[rank {rank()}] {self.format(record)}\n")


class DistLogger(logging.Logger):
    """Logger whose messages can be limited to some ranks: `logger.info("built", ranks=[0])`."""

    def _log(  # type: ignore[override]
        self, level: int, msg: object, args: Any, *, ranks: Sequence[int] | None = None, **more: Any
    ) -> None:
        """Log a message on some ranks; `ranks=None` is all."""
        if ranks is None or rank() in ranks:
            more["stacklevel"] = more.get("stacklevel", 1) + 1
            super()._log(level, msg, args, **more)

    def log_to_file(
        self,
        path: str | os.PathLike[str],
        mode: str = "a",
        level: str = "INFO",
        suffix: str | None = None,
    ) -> None:
        """Also write messages from `level` on to a file of this rank in the folder `path`."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{rank()}" + ("" if suffix is None else f"_{suffix}")
        handler = logging.FileHandler(folder / f"{name}.log", mode)
        handler.setLevel(level)
        self.addHandler(handler)


def get_dist_logger(name: str = "gemini.training") -> DistLogger:
    """Logger that prints from INFO on, with the rank before each message."""
    logger: Any = logging.getLogger(name)
    logger.__class__ = DistLogger
    made: DistLogger = logger
    if not logger.handlers:
        logger.addHandler(_RankHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return made


class DistCoordinator:
    """Coordinator of ranks: which rank this is, and work that one does first or alone.

    Without a process group it is rank 0 of 1.
    """

    @property
    def rank(self) -> int:
        return rank()

    @property
    def world_size(self) -> int:
        return world_size()

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Whether this is the first rank of the group."""
        if process_group is None:
            return self.rank == 0
        return dist.get_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_rank == 0

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        if process_group is None:
            return self.rank == self.world_size - 1
        return dist.get_rank(process_group) == dist.get_world_size(process_group) - 1

    def print_on_master(self, msg: str, process_group: dist.ProcessGroup | None = None) -> None:
        if self.is_master(process_group):
            sys.stdout.write(f"{msg}\n")

    def print_on_node_master(self, msg: str) -> None:
        if self.is_node_master():
            sys.stdout.write(f"{msg}\n")

    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """Context whose body one rank runs first, then the others: so that one downloads, say.

        Collective. If that rank fails, the others still run the body.
        """
        mine = self.rank if process_group is None else dist.get_rank(process_group)
        if mine != executor_rank:
            self.block_all(process_group)
        # also after an error: the others wait in the barrier
        try:
            yield
        finally:
            if mine == executor_rank:
                self.block_all(process_group)

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Wait until all ranks of the group call this."""
        if self.world_size > 1:
            dist.barrier(process_group)

    def destroy(self, process_group: dist.ProcessGroup | None = None) -> None:
        """End the process group; None ends all. Delete models that use it before."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group(process_group)

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
        """Decorator: the first rank runs the function, on the others it returns None."""

        def decorator(function: Callable[P, T]) -> Callable[P, T | None]:
            @functools.wraps(function)
            def on_master(*args: P.args, **kwargs: P.kwargs) -> T | None:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return on_master

        return decorator


def priority_execution(executor_rank: int = 0) -> Any:
    """Context whose body one rank runs first; see `DistCoordinator.priority_execution`."""
    return DistCoordinator().priority_execution(executor_rank)


def _join(
    backend: str | None,
    local_rank: int | None,
    seed: int,
    verbose: bool,
    rank: int,
    world_size: int,
    **meeting: Any,
) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        local = int(os.environ.get("LOCAL_RANK", rank)) if local_rank is None else local_rank
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if backend is None or (backend == "nccl" and not cuda):
        backend = "nccl" if cuda else "gloo"
    if backend == "nccl":
        meeting["device_id"] = device
    dist.init_process_group(backend, rank=rank, world_size=world_size, **meeting)
    rest_at_exit()  # modules of torch hold groups too, in cycles
    seed_all(seed)
    if verbose and rank == 0:
        log.info("%d ranks over %s, seed %d", world_size, backend, seed)


def _is_joined(rank: int, world_size: int) -> bool:
    if not dist.is_initialized():
        return False
    there = (dist.get_rank(), dist.get_world_size())
    if there != (rank, world_size):
        raise RuntimeError(
            f"this process is rank {there[0]} of {there[1]} already, and was launched as rank "
            f"{rank} of {world_size}; launch once, or destroy the process group before"
        )
    return True


def _take_config(config: Given) -> None:
    if config:
        global_context.config = read_config(config)


def _from_environment(name: str, starter: str) -> int:
    if name not in os.environ:
        raise ValueError(f"{name} is not set; expected a process that {starter} started")
    return int(os.environ[name])
