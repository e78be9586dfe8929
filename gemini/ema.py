"""An exponential moving average of weights, sharded as they are.

Each rank averages its own shards, element by element, so the bits are those of
`torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn` over fp32 weights, at any world
size and in any home.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from gemini.arguments import by_name
from gemini.checkpoint.load import load_accepted
from gemini.checkpoint.model.keys import random_state, set_random_state
from gemini.checkpoint.save import save_checkpoint
from gemini.chunk.storage import Chunk
from gemini.optim.rules.saved import is_count
from gemini.placement.problem import average_bytes
from gemini.placement.tiers import Tier
from gemini.runtime.memory.originals import Originals, original_homes

from .ddp import GeminiDDP

HOMES = {"host": Tier.HOST, "nvme": Tier.NVME}


@by_name
class EMA:
    """Average of a wrapped module's weights.

        ema = EMA(model, decay=0.999)
        for batch in loader:
            ...
            optimizer.step()
            ema.update()
        with ema.swapped():
            evaluate(model)

    decay: share of the average that an update keeps, 0 to 1.
    home: `"host"`, RAM of this rank, 4 bytes a parameter of its shards; `"nvme"`, a file in the
        folder of the placement policy; `"auto"`, NVMe for a shard whose state is on NVMe, else
        host. The budget of that tier counts it.

    An update averages the fp32 masters and reads them from their home: for state on NVMe from the
    disk, after the tail of the last step has ended. Frozen parameters and buffers are not averaged:
    they are the model's own.

    Raises ValueError for a module that is not wrapped, a decay outside 0 to 1 and an unknown home,
    and BudgetError if the home has no room for the average.
    """

    def __init__(self, model: GeminiDDP, decay: float = 0.999, home: str = "auto") -> None:
        if not isinstance(model, GeminiDDP):
            raise ValueError(
                f"an EMA of a {type(model).__name__}; expected a GeminiDDP: a plain module has "
                "torch.optim.swa_utils.AveragedModel"
            )
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay}; expected 0 to 1")
        if home not in ("auto", *HOMES):
            raise ValueError(f"home={home!r}; expected 'auto', 'host' or 'nvme'")
        self.decay = decay
        self.num_averaged = 0  # the first update copies, as torch's does
        self._model = model
        engine = model.engine
        specs = [chunk.spec for chunk in engine.chunks]
        self._chunks = [chunk for chunk in engine.chunks if chunk.spec.trainable]
        found = original_homes(specs, engine.planning.plan)
        homes = {c: Tier.NVME if t is Tier.NVME else Tier.HOST for c, t in found.items()}
        if home != "auto":
            homes = dict.fromkeys(homes, HOMES[home])
        config = engine.storage.config
        self._kept = Originals(
            specs, homes, torch.device("cpu"), replace(config, label=f"{config.label}ema-")
        )
        self._ready("EMA()")
        self._nbytes = average_bytes(
            [chunk.spec for chunk in self._chunks],
            {c: engine.planning.inputs.memory if t is Tier.HOST else t for c, t in homes.items()},
            config.block_numel,
        )
        engine.keep_average(self._kept, self._nbytes)
        self._copy()

    def _ready(self, what: str) -> None:
        if self._model.engine.is_swapped:
            raise RuntimeError(f"{what} while the average is swapped in; leave the context first")
        if self._model.engine.is_unwrapped:
            raise RuntimeError("this module was unwrapped; use model.module, or wrap it again")
        self._model.engine.write_back_changes()

    @torch.no_grad()
    def _copy(self) -> None:
        for chunk in self._chunks:
            self._kept.put(chunk.spec.id, self._model.engine.weights.master_of(chunk))
        self._kept.release_staging()

    @torch.no_grad()
    def update(self) -> None:
        """Move the average of this rank's shards by `(1 - decay) * (weight - average)`.

        Call it after a step; the first call copies the weights. Raises RuntimeError inside
        `swapped`, and the error of the last step's tail.
        """
        with self._model.engine.lock:
            self._update()

    def _update(self) -> None:
        self._ready("update()")
        if self.num_averaged:
            for chunk in self._chunks:
                average = self._kept.get(chunk.spec.id)
                assert average is not None
                average.lerp_(self._model.engine.weights.master_of(chunk), 1 - self.decay)
                self._kept.put(chunk.spec.id, average)
            self._kept.release_staging()
        else:
            self._copy()
        self.num_averaged += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Exchange weights and average for the body: modules, state dicts and checkpoints then have
        the average. All ranks enter.

        The model's weights come back bit for bit, also if the body raises. Weights that the body
        loads become the average; a step is refused.
        """
        engine = self._model.engine
        swapped: list[Chunk] = []
        with ExitStack() as stack:
            with engine.lock:
                engine.refuse_beside_pass("ema.swapped()")
                self._ready("swapped()")
                engine.call("ema.swapped()")
                stack.enter_context(engine.swapped())
            try:
                with engine.lock:
                    for chunk in self._chunks:
                        self._exchange(chunk)
                        swapped.append(chunk)
                    self._release_payloads()
                yield
            finally:
                with engine.lock:
                    engine.write_back_changes()
                    # Only chunks that were exchanged: any other would get the average for good.
                    for chunk in swapped:
                        self._exchange(chunk)
                    self._release_payloads()

    @torch.no_grad()
    def _exchange(self, chunk: Chunk) -> None:
        engine = self._model.engine
        average, weights = self._kept.get(chunk.spec.id), engine.weights.master_of(chunk)
        assert average is not None
        engine.weights.set_master(chunk, average.clone())
        self._kept.put(chunk.spec.id, average.copy_(weights))

    def _release_payloads(self) -> None:
        """Release payloads, so that the next gather takes the exchanged shards."""
        engine = self._model.engine
        self._kept.release_staging()
        engine.manager.release_all()
        engine.weights.after_step(trained=False)
        params = [slot.param for chunk in self._chunks for slot in chunk.spec.slots]
        engine.weights.user_writes.stepped(params)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save a checkpoint of the averaged weights by `gemini.save_checkpoint`. All ranks call."""
        with self.swapped():
            save_checkpoint(path, self._model, extra={"num_averaged": self.num_averaged})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a checkpoint of `save`, at any world size. Random numbers stay as they are.

        All ranks call. Raises as `load_checkpoint`, and CorruptError for a checkpoint of other
        weights than an average's, before anything is changed.
        """
        random = random_state()
        with self.swapped():
            extra = load_accepted(path, self._model, accept=_num_averaged)
        set_random_state(random)
        self.num_averaged = _num_averaged(extra)

    @property
    def nvme_bytes(self) -> int:
        """Bytes of this rank's average on disk."""
        return self._kept.file_bytes

    def close(self) -> None:
        """Free the average's memory and files. All ranks call."""
        self._kept.clear()
        if self._nbytes:
            self._model.engine.forget_average(self._kept, self._nbytes)
            self._nbytes = ()


def _num_averaged(extra: Any) -> int:
    """Number of updates of a saved average. Raises ValueError for another checkpoint's `extra`."""
    found: Any = extra.get("num_averaged") if isinstance(extra, dict) else None
    if not is_count(found):
        raise ValueError(f"num_averaged={found!r:.80}; expected a checkpoint of EMA.save()")
    return int(found)
