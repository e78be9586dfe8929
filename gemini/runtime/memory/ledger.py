"""Bytes of model data by tier and kind: exact, now and at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from gemini.chunk.gradient import Account
from gemini.chunk.storage import Chunk
from gemini.optim.state.tiered_state import TieredState
from gemini.placement.overruns import Overruns
from gemini.placement.tiers import Tier

from .shard_storage import ShardStorage

Bytes = dict[tuple[Tier, str], int]


class MemoryLedger:
    """Ledger of one engine's model data. Kinds are those of `gemini.placement.predict`.

    A total takes as long for many chunks as for few: chunks keep their account up to date.

    host: the tier of host memory; it is the device where that is the CPU.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        storage: ShardStorage | None = None,
        host: Tier = Tier.DEVICE,
    ) -> None:
        self._account = Account()
        for chunk in chunks:
            chunk.count_in(self._account)
        self.storage = storage
        self._host = host
        self._state: TieredState | None = None
        self._staging_bytes: Callable[[], int] = int
        self._kept_bytes: Callable[[], int] = int
        self._saved_staging_bytes: Callable[[], int] = int
        self.limited = False  # `note` has budgets to compare with
        self._overruns: Overruns | None = None
        self._judges = True  # `note` compares with budgets
        self.watched = False  # `note` takes peaks
        self.peaks: dict[Tier, dict[str, int]] = {}  # by kind, when a tier held most

    def stop_judging(self) -> None:
        """Compare with no budget until `judge_again`."""
        self._judges = False

    def judge_again(self) -> None:
        self._judges = True

    def take_peaks(self, *, anew: bool) -> None:
        """Take peaks until `keep_peaks`. anew: forget those of before."""
        self.watched = True
        if anew:
            self.peaks.clear()

    def keep_peaks(self) -> None:
        self.watched = False

    def count_state(self, state: TieredState, staging_bytes: Callable[[], int]) -> None:
        """Count the optimizer's state. staging_bytes: of its staging on the device."""
        self._state, self._staging_bytes = state, staging_bytes

    def forget_state(self) -> None:
        """Count no state any more: the optimizer was closed."""
        self._state, self._staging_bytes = None, int

    def hold(self, nbytes: Callable[[], int]) -> None:
        """Count gradients on the device that the loop has dropped and a tail still needs."""
        self._kept_bytes = nbytes

    def count_saved(self, staging_bytes: Callable[[], int]) -> None:
        """Count host memory through which activations, no model data, leave the device."""
        self._saved_staging_bytes = staging_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients on the device, with those that a tail keeps or that are leaving."""
        leaving = 0 if self.storage is None else self.storage.leaving_bytes
        return self._account.gradients + self._kept_bytes() + leaving

    @property
    def kept_bytes(self) -> int:
        """Bytes of gradients that were dropped and that a tail still needs."""
        return self._kept_bytes()

    def judge_by(self, overruns: Overruns) -> None:
        """Report to `overruns` what passes a budget."""
        self._overruns = overruns
        self.limited = bool(overruns.limits)

    def totals(self) -> dict[Tier, int]:
        """Bytes on every tier, now; cheaper than `bytes_in_use`, which sorts by kind."""
        account, storage, state = self._account, self.storage, self._state
        device = account.payloads + account.device_shards + account.gradients
        device += self._staging_bytes() + self._kept_bytes()
        host, nvme = account.host_shards + self._saved_staging_bytes(), 0
        apart = 0  # only where the host is another memory
        if storage is not None:
            device += storage.leaving_bytes
            device += storage.originals.memory_bytes[Tier.DEVICE]
            apart += storage.originals.memory_bytes[Tier.HOST]
            in_memory, in_files = storage.average_bytes
            marks = storage.mark_bytes
            device += marks[0]
            host += storage.staging_bytes + in_memory + marks[1]
            nvme = storage.file_bytes + in_files
        if state is not None:
            device += sum(slab.nbytes for slab in state.device_slabs)
            nvme += state.nvme_bytes
            host += 0 if state.nvme is None else state.nvme.staging_bytes
        if storage is not None and storage.host_gradients is not None:
            apart += storage.host_gradients.nbytes
        if state is not None:
            apart += sum(slab.nbytes for slab in state.host_slabs)
        if self._host is Tier.DEVICE:
            device, host = device + host, 0
        return {Tier.DEVICE: device, Tier.HOST: host + apart, Tier.NVME: nvme}

    def bytes_in_use(self) -> Bytes:
        """Bytes by tier and kind, now; kinds without bytes are left out. NVMe: bytes of files."""
        account = self._account
        found: Counter[tuple[Tier, str]] = Counter()
        found[Tier.DEVICE, "parameters"] = account.payloads + account.device_shards
        found[self._host, "parameters"] += account.host_shards
        found[Tier.DEVICE, "gradients"] = account.gradients + self._kept_bytes()
        found[Tier.DEVICE, "staging"] = self._staging_bytes()
        self._add_storage(found)
        state = self._state
        if state is not None:
            found[Tier.DEVICE, "state"] += sum(slab.nbytes for slab in state.device_slabs)
            found[Tier.HOST, "state"] += sum(slab.nbytes for slab in state.host_slabs)
            if state.nvme is not None:
                found[Tier.NVME, "state"] += state.nvme_bytes
                found[self._host, "staging"] += state.nvme.staging_bytes
        return {key: nbytes for key, nbytes in found.items() if nbytes}

    def _add_storage(self, found: Counter[tuple[Tier, str]]) -> None:
        storage = self.storage
        if storage is None:
            return
        for tier, nbytes in storage.originals.memory_bytes.items():
            found[tier, "originals"] += nbytes
        found[Tier.NVME, "originals"] += storage.originals.file_bytes
        in_memory, in_files = storage.average_bytes
        on_device, on_host = storage.mark_bytes
        found[Tier.DEVICE, "average"] += on_device  # marks count with averages
        found[self._host, "average"] += in_memory + on_host
        found[Tier.NVME, "average"] += in_files
        if storage.params is not None:
            found[Tier.NVME, "parameters"] += storage.params.file_bytes
        found[Tier.NVME, "parameters"] += storage.frozen_file_bytes
        if storage.gradient_files is not None:
            files = storage.gradient_files.files
            found[Tier.NVME, "gradients"] += sum(file.file_bytes for file in files)
        if storage.host_gradients is not None:
            found[Tier.DEVICE, "gradients"] += storage.leaving_bytes
            found[Tier.HOST, "gradients"] += storage.host_gradients.nbytes
        found[self._host, "staging"] += storage.staging_bytes + self._saved_staging_bytes()

    def memory_bytes(self) -> int:
        """Bytes that are not on NVMe."""
        totals = self.totals()
        return totals[Tier.DEVICE] + totals[Tier.HOST]

    def device_bytes(self) -> int:
        """Bytes on the compute device."""
        return self.totals()[Tier.DEVICE]

    def note(self, where: str = "in an iteration") -> None:
        """Compare the bytes in use now with the budgets, and take them into `peaks`."""
        if self._overruns is not None and self.limited and self._judges:
            for tier, nbytes in self.totals().items():
                self._overruns.check(tier, nbytes, 0, where)
        if not self.watched:
            return
        by_tier: dict[Tier, dict[str, int]] = {}
        for (tier, kind), nbytes in self.bytes_in_use().items():
            by_tier.setdefault(tier, {})[kind] = nbytes
        for tier, kinds in by_tier.items():
            if sum(kinds.values()) > sum(self.peaks.get(tier, {}).values()):
                self.peaks[tier] = kinds
