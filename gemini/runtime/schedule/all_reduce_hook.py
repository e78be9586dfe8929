"""Hook between reduction and step, by FSDP2's name: gradients are averaged over replica groups.

[Note: all-reduce hook] It runs when the backward that reduces has ended, before anybody reads,
clips or votes on a gradient, and not in `step()`: who commits a step, as torchft's manager does,
asks for errors of the all-reduce before. Chunks come in the order of the layout, not in that of
their reductions, which a replica group that has just started learns anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.comm.communicator import Communicator

Hook = Callable[[Tensor], Any]  # of [S] on the device, which it changes in place


class AllReduceHook:
    """A hook, and whether it has had the gradients that are there."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        comm: Communicator,
        hook: Hook,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """chunks: in the order of the layout. stream: on which it runs; None: the backward's."""
        self._chunks, self._comm, self._hook, self._stream = chunks, comm, hook, stream
        self._has_run = False
        self._has_failed = False

    def forget(self) -> None:
        """Gradients were dropped, or zeroed: the next ones are new."""
        self._has_run = self._has_failed = False

    def check_backward(self) -> None:
        """Raise RuntimeError for a backward that would add to what the hook has had."""
        if self._has_run:
            raise RuntimeError(
                "backward() adds to gradients that the all-reduce hook has had; run all backwards "
                "of a step but the last in no_sync(), and zero_grad() behind the step"
            )

    @torch.no_grad()
    def run(self, there: Sequence[bool]) -> None:
        """Give the hook every reduced shard, unless it has had them. Collective.

        there: by parameter, whether some rank has a gradient. Raises on every rank where it raises
        on one: then gradients are no more to be used.
        """
        if self._has_failed:
            raise RuntimeError(
                "the all-reduce hook ended in an error, so gradients are of several replica "
                "groups; call zero_grad() before you go on"
            )
        if self._has_run:
            return
        self._has_run = self._has_failed = True
        error: Exception | None = None
        try:
            for chunk in self._chunks:
                if chunk.gradient.exists and any(there[slot.param] for slot in chunk.spec.slots):
                    self._give(chunk)
        except Exception as raised:
            error = raised
        self._raise_what_any_rank_raised(error)
        self._has_failed = False

    def _give(self, chunk: Chunk) -> None:
        """Give the hook a reduced gradient, brought to the device."""
        chunk.gradient.change(self._on_stream if self._stream else self._called, wide=False)

    def _called(self, shard: Tensor) -> None:
        work = self._hook(shard)
        if hasattr(work, "wait"):  # of an asynchronous collective
            work.wait()

    def _on_stream(self, shard: Tensor) -> None:
        assert self._stream is not None
        ours = torch.cuda.current_stream(shard.device)
        self._stream.wait_stream(ours)
        with torch.cuda.stream(self._stream):
            self._called(shard)
        shard.record_stream(self._stream)
        ours.wait_stream(self._stream)

    def _raise_what_any_rank_raised(self, error: Exception | None) -> None:
        comm = self._comm
        if comm.world_size > 1:
            failed = comm.numbers([error is not None], torch.float64)
            comm.all_reduce(failed).wait()
            if failed.item():
                said = comm.gather_objects(None if error is None else str(error))
                if error is None:
                    rank, text = next((r, t) for r, t in enumerate(said) if t is not None)
                    raise RuntimeError(f"the all-reduce hook failed on rank {rank}: {text}")
        if error is not None:
            raise error
