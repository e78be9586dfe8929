"""Ranks of a save or a load: an error of one is raised on all; a save has a group of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from gemini.checkpoint.format.manifest import CheckpointError
from gemini.comm.communicator import Communicator
from gemini.ddp import GeminiDDP

T = TypeVar("T")
_Said = tuple[type[CheckpointError], str]  # of an error, for other ranks
_gloo_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Ranks:
    """All ranks of one save or load.

    first: this rank describes the values that all ranks with the same parameters share.
    is_pipeline: other ranks have other parameters.
    """

    def __init__(self, model: nn.Module, call: str, parts: Sequence[GeminiDDP] = ()) -> None:
        """Check that all ranks call the same function.

        call: its name, for the error if a rank is elsewhere. parts: of `model`, see `parts_of`.
        Raises CheckpointError for one part of a pipeline in a call that takes none.
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
        """Run `work()` on every rank; if it fails on any, raise one CheckpointError on all."""
        value, failure = None, None
        # The error waits until all ranks have gathered: a rank that raised at once would leave the
        # others in the collective.
        try:
            value = work()
        except Exception as error:
            failure = error
        failed = _failed(self.gather(None if failure is None else _said(failure)))
        if failed:
            raise _together(failed) from failure
        return value  # type: ignore[return-value]

    def through_first(
        self, work: Callable[[], T], whole: Callable[[list[T]], list[Any]], group: Any
    ) -> Any:
        """Run `work` on every rank and `whole` on rank 0, over the list of all results; return this
        rank's entry of the list that `whole` returns. Collective over `group`.

        If either fails on any rank, all raise the same CheckpointError; a KeyboardInterrupt or
        SystemExit is raised as it is on the rank that has it.
        """
        mine, failure = _tried(work)
        every = self._at_first((mine, None if failure is None else _said(failure)), group)
        answers: list[Any] | None = None
        if every is not None:
            failed, values = _failed([said for _, said in every]), None
            if not failed:
                values, failure = _tried(lambda: whole([value for value, _ in every]))
                failed = {} if failure is None else {0: _said(failure)}
            answers = [(value, failed) for value in values or [None] * len(every)]
        value, failed = self._from_first(answers, group)
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if failed:
            raise _together(failed) from failure
        return value

    def _at_first(self, value: Any, group: Any) -> list[Any] | None:
        """Values of all ranks on rank 0, None on the others."""
        if self.world_size == 1:
            return [value]
        found: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, found, group=group, group_dst=0)
        return found

    def _from_first(self, values: list[Any] | None, group: Any) -> Any:
        """This rank's entry of rank 0's `values`."""
        if self.world_size == 1:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values, group=group, group_src=0)
        return mine[0]

    def group(self) -> Any:
        """Gloo group for the collectives of a save in a thread. Collective the first time."""
        if self.world_size == 1:
            return None
        # A group of its own: in the group of training the thread's collectives would have no order
        # among those of the steps that run meanwhile.
        parent = self._comm.process_group
        if parent not in _gloo_groups:
            members = dist.get_process_group_ranks(parent)
            _gloo_groups[parent] = dist.new_group(
                members, backend="gloo", use_local_synchronization=True
            )
        return _gloo_groups[parent]


def _tried(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _failed(said: Sequence[_Said | None]) -> dict[int, _Said]:
    return {rank: one for rank, one in enumerate(said) if one is not None}


def _together(failed: dict[int, _Said]) -> CheckpointError:
    """One error from those of some ranks; its class is theirs if they share one."""
    kinds = list(dict.fromkeys(kind for kind, _ in failed.values()))
    texts = list(dict.fromkeys(text for _, text in failed.values()))
    kind = kinds[0] if len(kinds) == 1 else CheckpointError
    if len(texts) == 1 and (0 in failed or len(failed) == 1):
        ranks = ", ".join(str(rank) for rank in failed)
        return kind(texts[0] if 0 in failed else f"rank {ranks}: {texts[0]}")
    return kind("; ".join(f"rank {rank}: {text}" for rank, (_, text) in failed.items()))


def _said(error: BaseException) -> _Said:
    if isinstance(error, CheckpointError):
        return type(error), str(error)
    return CheckpointError, f"{type(error).__name__}: {error}"
