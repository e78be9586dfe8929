"""The ranks of a save or a load: one error on all, and DCP's calls on a group of their own."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from gemini.checkpoint.format.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    MismatchError,
)
from gemini.ddp import GeminiDDP
from gemini.runtime.comm.communicator import Communicator

from .writer import Writer

T = TypeVar("T")
_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (CheckpointError, CorruptError, FormatError, MismatchError)
}
_gloo_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Ranks:
    """All ranks that call together.

    first: this one describes what all that hold the same parameters have alike.
    is_pipeline: other ranks hold other parameters.
    """

    def __init__(self, model: nn.Module, call: str, parts: Sequence[GeminiDDP] = ()) -> None:
        """`call`: the function that all ranks are in, for the error where one is not.

        parts: of a pipeline, where `model` is such. Raises CheckpointError for a call that has none
            and gets one.
        """
        together = model.engine.together if isinstance(model, GeminiDDP) else None
        if together is not None and not parts:
            raise CheckpointError(
                f"{call} is of a whole model, and this module is a part of a pipeline; "
                "save_checkpoint saves all stages, and loads into the whole model in one process, "
                "or at another number of stages"
            )
        engines = [part.engine for part in parts] or (
            [model.engine] if isinstance(model, GeminiDDP) else []
        )
        for engine in engines:
            engine.call(call)
        self._comm = engines[0].comm if engines else Communicator()
        self.first = self._comm.rank == 0
        self.is_pipeline = bool(engines and engines[0].together)
        if engines and engines[0].together is not None:
            self._comm = engines[0].together.comm
            self._comm.call(call)
        self.rank, self.world_size = self._comm.rank, self._comm.world_size

    def gather(self, value: T) -> list[T]:
        return self._comm.gather_objects(value)

    def same(self, what: str, value: str) -> None:
        """Raise CheckpointError on every rank where `value` differs between them."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise CheckpointError(
                    f"ranks do not agree on {what}: rank 0 has {values[0]}, rank {rank} has {other}"
                )

    def together(self, work: Callable[[], T]) -> T:
        """`work()` on every rank; where it fails on any, the same CheckpointError on all."""
        value, failure = None, None
        try:
            value = work()
        except Exception as error:
            failure = error
        said = None if failure is None else (_kind_of(failure), _text_of(failure))
        failed = {rank: one for rank, one in enumerate(self.gather(said)) if one is not None}
        if failed:
            raise _together(failed) from failure
        return value  # type: ignore[return-value]

    def save(self, state: dict[str, Any], writer: Writer, group: Any) -> None:
        """`dcp.save`. Raises CheckpointError on every rank."""
        planner = DefaultSavePlanner(flatten_sharded_tensors=False)
        in_dcp(
            lambda: dcp_save(
                state,
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=self.world_size == 1,
            ),
            self.rank,
        )

    def group(self) -> Any:
        """A gloo group for what DCP says to itself, beside training. Collective the first time."""
        if self.world_size == 1:
            return None
        parent = self._comm.process_group
        if parent not in _gloo_groups:
            members = dist.get_process_group_ranks(parent)
            _gloo_groups[parent] = dist.new_group(
                members, backend="gloo", use_local_synchronization=True
            )
        return _gloo_groups[parent]


def in_dcp(work: Callable[[], Any], rank: int = 0) -> None:
    """Run what calls DCP. Its errors become one CheckpointError, of their kind; what is none on
    this rank (KeyboardInterrupt, SystemExit) stays what it is."""
    try:
        with warnings.catch_warnings():
            # that there is no process group is no news
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            work()
    except CheckpointException as error:
        own = error.failures.get(rank)
        if own is not None and not isinstance(own[0], Exception):
            raise own[0] from error
        failed = {rank: (_kind_of(one), _text_of(one)) for rank, (one, _) in error.failures.items()}
        raise _together(failed) from error


def _together(failed: dict[int, tuple[str, str]]) -> CheckpointError:
    """One error from those of some ranks; of their kind, where they are of one."""
    kinds = {kind for kind, _ in failed.values()}
    texts = list(dict.fromkeys(text for _, text in failed.values()))
    kind = _KINDS[kinds.pop()] if len(kinds) == 1 else CheckpointError
    if len(texts) == 1 and (0 in failed or len(failed) == 1):
        ranks = ", ".join(str(rank) for rank in failed)
        return kind(texts[0] if 0 in failed else f"rank {ranks}: {texts[0]}")
    return kind("; ".join(f"rank {rank}: {text}" for rank, (_, text) in failed.items()))


def _kind_of(error: BaseException) -> str:
    return type(error).__name__ if type(error).__name__ in _KINDS else "CheckpointError"


def _text_of(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"
