"""Kept versions: commits before the last one that a store does not write over (ADR 0016).

The newest are a history, by which a run goes back some steps. Any other commit may be pinned: it
stays while its witness, a file of whoever pinned it, is there, and the store's files with it when
the process has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemini.units import BlockId

from .files.orphan_files import is_gone, write_pins
from .layout import Index


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """Commit that is found by its index, also by another process, while `witness` exists."""

    index: Index
    witness: Path


class KeptVersions:
    """Commits before the last one, at most `most`, in `most` + 2 extents of every block.

    Invariant, whenever a block is written: the last commit and those that are kept are at most
    `most` + 1, so one extent of every block is free.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.history: list[Index] = []  # of one step each, without a gap; the oldest first
        self.pinned: list[PinnedVersion] = []
        self._seen: set[Path] = set()  # witnesses that were seen

    def committed(self, before: Index, now: Index) -> None:
        """Note that `now` counts in place of `before`: as the next step, or as that step,
        rewritten."""
        if before.sequence and now.step > before.step:
            self.history.append(before)
        self._fit()

    def clear(self) -> None:
        """Forget the history: no step before the last commit can be gone back to."""
        self.history.clear()

    def rewound(self, steps: int) -> None:
        """Drop the newest `steps` of the history, which are the last commit or after it now."""
        del self.history[-steps:]

    def free_version(self, block: BlockId, last: Index) -> int:
        """Version to which the next write of a block goes."""
        indexes = (last, *self.history, *(pin.index for pin in self.pinned))
        taken = {index.entries[block].version for index in indexes}
        return min(set(range(self.most + 2)) - taken)

    def pin(self, index: Index, witness: Path, paths: Sequence[Path]) -> PinnedVersion:
        """Keep `index`, the last commit; `settle` follows, before the next write.

        paths: of the store's files, with each of which a file of pins is written. Raises OSError,
        and pins nothing then.
        """
        pin = PinnedVersion(index, witness)
        self.pinned.append(pin)
        try:
            self.say(paths)
        except BaseException:
            self.pinned.remove(pin)
            raise
        return pin

    def settle(self, pin: PinnedVersion) -> None:
        """End a pin: its witness was made, or never will be. Forgets pins whose witnesses it
        replaced."""
        if is_gone(pin.witness):
            self.pinned.remove(pin)
        self._fit()

    def say(self, paths: Sequence[Path], *, is_closed: bool = False) -> bool:
        """Write the files of pins of the store's files. Returns whether anything is pinned."""
        witnesses = [pin.witness for pin in self.pinned]
        if is_closed:
            witnesses = [witness for witness in witnesses if not is_gone(witness)]
        for path in paths:
            write_pins(path, witnesses, is_closed=is_closed)
        return bool(witnesses)

    def _fit(self) -> None:
        """Forget commits that are pinned no more, and the oldest of the history beyond `most`."""
        for pin in list(self.pinned):
            # a network may show a name late: a witness that was never seen is not gone
            if not is_gone(pin.witness):
                self._seen.add(pin.witness)
            elif pin.witness in self._seen:
                self.pinned.remove(pin)
        # by identity: a commit that was gone back to is in the same extents as before
        pinned = {id(pin.index.entries) for pin in self.pinned}
        while len(pinned.union(id(index.entries) for index in self.history)) > self.most:
            del self.history[0]
