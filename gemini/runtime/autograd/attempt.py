"""One forward that may be run again: it found no memory, and model data can make room for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gemini.runtime.passes import Passes
from gemini.runtime.schedule.sampler import Sampler
from gemini.runtime.sharding import Sharding
from gemini.runtime.step.homes import MovingHomes
from gemini.trees import tensors_in


class Attempt:
    """First attempt at an outermost forward, with all that a second one must begin with."""

    def __init__(
        self,
        sharding: Sharding,
        passes: Passes,
        sampler: Sampler,
        homes: MovingHomes,
        module: nn.Module,
        inputs: Any,
    ) -> None:
        self._comm, self._sampler = sharding.comm, sampler
        self._passes, self._homes = passes, homes
        self._buffers = Versions(module.buffers())
        self._inputs = Versions(tensors_in(inputs))
        self._random = torch.get_rng_state()
        device = sharding.backend.device
        self._device = device if device.type == "cuda" else None
        self._drawn = None if self._device is None else torch.cuda.get_rng_state(self._device)

    def may_be_repeated(self, error: BaseException) -> bool:
        """Whether the forward that ended with `error` left everything as it was.

        Where it ran out of memory and did not, the error gets a note that says what forbids it.
        """
        if not isinstance(error, torch.OutOfMemoryError):
            return False
        reason = self._against()
        if reason is not None:
            error.add_note(f"this forward is not tried again in lower homes: {reason}")
        return reason is None

    def _against(self) -> str | None:
        """Reason against a second attempt; None: there is none.

        What Python of the module did besides, in counters or logs, nobody can see: it happens
        twice.
        """
        if self._comm.world_size > 1:
            return "other ranks are in the same one, and may have memory for it"
        if self._passes.graph_is_open:  # as this forward began: its own was dropped as it failed
            return "an earlier one waits for its backward"
        if self._buffers.have_changed:
            return "it has changed buffers of the module already"
        if self._inputs.have_changed:
            return "it has changed its inputs already"
        if not self._homes.may_demote():
            return "nothing on the device could leave it"
        return None

    def make_room(self, inputs: Any) -> None:
        """Move all that may leave the device, and bring random generators back."""
        self._sampler.abandon()
        self._homes.demote_all()
        torch.set_rng_state(self._random)
        if self._device is not None and self._drawn is not None:
            torch.cuda.set_rng_state(self._drawn, self._device)
        self._sampler.begin(inputs, again=True)  # what was known of such inputs was too little


class Versions:
    """Tensors, and how often each was changed in place."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # those of inference mode have no version, and nothing that records may change them
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._tensors]

    @property
    def have_changed(self) -> bool:
        return self._versions != [tensor._version for tensor in self._tensors]
