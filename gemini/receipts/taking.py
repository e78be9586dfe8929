"""Receipts of a run as it goes: `Receipts` beside the loop, or `python -m gemini train --receipts`.

    receipts = Receipts(folder, model, optimizer, facts={"lr": "1e-4"})
    for batch in loader:
        receipts.saw(batch)
        ...
        optimizer.step()
        receipts.stepped()

A receipt reads every weight once (2 or 4 bytes a parameter), with `state` every plane, too. It
waits for an update that goes on behind `step()`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gemini import __version__
from gemini.arguments import by_name
from gemini.ddp import GeminiDDP
from gemini.kernels_triton.digest import digest_reference
from gemini.optim.state.state_stream import StateRun
from gemini.runtime.inspect.digest import of_run, param_sums
from gemini.trees import tensors_in

from .chain import FILE, Receipt, first_of, read

_ROOT = Path(__file__).resolve().parents[1]
_WORD = 64  # bits of a digest


@by_name
class Receipts:
    """Receipts of one run, in `receipts.jsonl`, one line each time that `stepped` is called.

    folder: of the run, on rank 0; None keeps them in memory alone. model, optimizer: whose weights
        and state they are. facts: what else the run follows from, by name, such as its flags.

    All ranks make it, and call its methods. A file that is there already is gone on with, behind
    step `step`: what later steps have left is dropped. Raises ReceiptError for one of another run.
    """

    def __init__(
        self,
        folder: str | Path | None,
        model: GeminiDDP,
        optimizer: Any,
        facts: Mapping[str, str] | None = None,
        step: int = 0,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._engine = model.engine
        self._batches: list[str] = []
        self.step = step
        self.made: list[Receipt] = []
        writes = folder is not None and self._engine.comm.rank == 0
        self._path = Path(folder) / FILE if folder is not None and writes else None
        first = first_of({**of_code(), **(facts or {})})
        if self._path is not None and self._path.exists() and step:
            self.made = [one for one in read(self._path) if one.step <= step]
        self.made = self.made or [first]
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("".join(one.line() for one in self.made), encoding="utf-8")

    def saw(self, batch: Any) -> None:
        """Note a micro-batch: its tensors, wherever they are in it. Not collective."""
        said = hashlib.sha256()
        for tensor in tensors_in(batch, objects=1):
            flat = tensor.detach().cpu().contiguous()
            said.update(f"{tuple(flat.shape)} {flat.dtype};".encode())
            said.update(flat.view(-1).view(torch.uint8).numpy().tobytes())
        self._batches.append(said.hexdigest())

    def stepped(self, *, state: bool = False) -> Receipt:
        """Write the receipt of a step that was taken. Collective. state: also of all its planes."""
        self.step += 1
        return self.take(state=state)

    def take(self, *, state: bool = False, alone: bool = False) -> Receipt:
        """Write what there is now as the receipt of step `step`. Collective. alone: of weights and
        state, and neither of micro-batches nor of random numbers."""
        made = Receipt(
            self.step,
            self.made[-1].hash,
            "" if alone else self._batch(),
            "" if alone else _random(),
            self._weights(),
            self._state() if state else {},
        )
        self.made.append(made)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(made.line())
        return made

    def _batch(self) -> str:
        """Digest of the micro-batches of all ranks, in the order of their numbers."""
        mine, self._batches = self._batches, []
        of_ranks = self._engine.comm.gather_objects(mine)
        count = max(map(len, of_ranks))
        numbered = [one[j] for j in range(count) for one in of_ranks if j < len(one)]
        return hashlib.sha256(" ".join(numbered).encode()).hexdigest()[:16]

    def _weights(self) -> dict[str, str]:
        with self._engine.lock:
            self._engine.weights.settle()
            sums = param_sums(self._engine.weights)
        names = [spec.name for spec in self._engine.layout.params]
        return {name: _hex(total) for name, total in zip(names, sums, strict=True)}

    def _state(self) -> dict[str, str]:
        """By `parameter/plane`, over all ranks: every element counts with its place."""
        engine, target = self._engine, self._engine.target
        if target is None:
            return {}
        sums: dict[str, int] = {}

        def look(run: StateRun) -> None:
            key = f"{run.name}/{run.plane}"
            salt = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
            sums[key] = sums.get(key, 0) + int(
                of_run(run.values, run.start, salt, digest_reference)
            )

        self._optimizer.visit_state(look)
        keys = sorted({key for of_rank in engine.comm.gather_objects([*sums]) for key in of_rank})
        mine = torch.tensor([_signed(sums.get(key, 0)) for key in keys], dtype=torch.int64)
        there = mine.to(engine.comm.device)
        engine.comm.all_reduce(there).wait()
        counts = {
            f"{engine.layout.params[i].name}/step": _hex(int(views[param]["step"]))
            for views in (target.state_views(),)
            for i, param in enumerate(engine.params)
            if param in views
        }
        return {**dict(zip(keys, map(_hex, there.tolist()), strict=True)), **counts}


def of_code() -> dict[str, str]:
    """Facts of the code: versions, and a digest of this package's own files."""
    said = hashlib.sha256()
    for path in code_files():
        said.update(f"{path};".encode())
        said.update((_ROOT / path).read_bytes())
    return {
        "gemini": __version__, "torch": str(torch.__version__), "code": said.hexdigest()[:16],
    }  # fmt: skip


def code_files() -> list[str]:
    """Paths of this package's own files, in order: the same in a clone, where some of its folders
    are links, and in an installed package."""
    found = (
        Path(folder, name).relative_to(_ROOT).as_posix()
        for folder, _, names in os.walk(_ROOT, followlinks=True)
        for name in names
        if name.endswith(".py")
    )
    return sorted(found)


def _random() -> str:
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]


def _signed(total: int) -> int:
    """A sum as int64, which wraps."""
    total %= 1 << _WORD
    return total - (1 << _WORD) if total >= 1 << (_WORD - 1) else total


def _hex(total: int) -> str:
    return f"{total % (1 << _WORD):016x}"
