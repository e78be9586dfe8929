"""Steps that training may go back to: commits on disk, and copies in memory (ADR 0016)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from gemini.nvme import Index, KeptVersions
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.state.nvme_state import NvmeState
from gemini.optim.state.tiered_state import TieredState
from gemini.runtime.events import EngineEvent
from gemini.runtime.memory.shard_storage import ShardStorage

# copies of the tensors that a step begins from and no store has: counts of steps (which key the
# noise of rounding, too), lines, the loss scale with its counters, and persistent buffers
StepMemory = tuple[Tensor, ...]


class KeptSteps:
    """Copies of memory for every commit that the store keeps. One thread at a time.

    A version is the state that the step after it began from: what a user wrote to weights between
    the two belongs to it, as skipped steps do.
    """

    def __init__(
        self,
        tiered_state: TieredState,
        storage: ShardStorage,
        control_vector: ControlVector,
        buffers: Callable[[], Iterable[Tensor]],
        forward: EngineEvent[[]],
    ) -> None:
        """buffers: persistent ones of the module. forward: tells that one begins."""
        self._tiered_state, self._storage, self._now = tiered_state, storage, buffers
        self._by_step: dict[int, StepMemory] = {}  # by the number of the commit
        # persistent ones, as the first forward behind the last step found them
        self._buffers: tuple[Tensor, ...] | None = None
        self._control, self._forward = control_vector, forward
        self._forward.listen(self.begin_forward)

    @property
    def nvme(self) -> NvmeState:
        """State on disk. When more parameters are trained, it is another object without
        history."""
        assert self._tiered_state.nvme is not None
        return self._tiered_state.nvme

    @property
    def versions(self) -> KeptVersions:
        """Versions that the store keeps."""
        return self.nvme.store.versions

    @property
    def has_checksums(self) -> bool:
        """Whether what is read of a version is verified."""
        return self.nvme.store.checksums

    def begin_forward(self) -> None:
        """Copy buffers before the first forward after a step: a later one has changed them."""
        if self._buffers is None:
            self._buffers = tuple(buffer.clone() for buffer in self._now())

    def begin_step(self, whole: Sequence[Tensor]) -> None:
        """Copy what a step begins from; it may be the same step again."""
        self.begin_forward()
        assert self._buffers is not None
        numbers = {index.step for index in self.nvme.commits}
        self._by_step = {n: memory for n, memory in self._by_step.items() if n in numbers}
        copies = [tensor.clone() for tensor in (*whole, self._control.tensor)]
        self._by_step[self.nvme.store.committed_step] = (*copies, *self._buffers)

    def end_step(self) -> None:
        """Note that the step counts."""
        self._buffers = None

    def forget(self) -> None:
        """Forget all kept steps: something was loaded, and none of them leads to it."""
        self.nvme.forget_kept()
        self._by_step.clear()
        self._buffers = None

    def check(self, steps: int) -> tuple[list[Index], StepMemory]:
        """Read once what a rewind reads. Returns the commits from the one of `steps` steps before
        to the last, and the memory of the first.

        Raises ValueError if so many are not kept, `nvme.NvmeError` for blocks that cannot be read,
        and RuntimeError for an average of weights, which has one version.
        """
        if self._storage.averages:
            raise RuntimeError(
                "rewind() of a model with an EMA, of which no versions are kept; close() it "
                "before, and make another"
            )
        commits = list(self.nvme.commits)
        if not 1 <= steps < len(commits):
            raise ValueError(
                f"rewind({steps}), and {len(commits) - 1} steps are kept since the state was made, "
                f"loaded or rewound, beside {len(self.versions.pinned)} that are pinned; expected "
                "one of these, or a larger NvmeConfig(keep_versions=...)"
            )
        commits = commits[-1 - steps :]
        self.nvme.check_commit(steps)
        return commits, self._by_step[commits[0].step]

    def put_back(self, memory: StepMemory, whole: Sequence[Tensor]) -> None:
        """Copy back what memory had then."""
        now = (*whole, self._control.tensor, *self._now())
        for tensor, then in zip(now, memory, strict=True):
            tensor.copy_(then)
        self._control.changed()
        self._buffers = None

    def close(self) -> None:
        """Stop keeping steps."""
        self._forward.leave(self.begin_forward)
