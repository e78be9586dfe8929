"""Monitors of memory in use and at most: live storages, the process, the CUDA allocator."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.trees import tensors_in

from .trace import LEAST_SAVED_BYTES

log = logging.getLogger("gemini")

PROCESS_NOISE_BYTES = 32 << 20  # what libraries and malloc may keep of an iteration
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_HIGHEST, _RESIDENT = b"VmHWM:", b"VmRSS:"
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_RESET_PEAK = "5"  # man 5 proc: resets VmHWM


class Monitor(Protocol):
    """Monitor of one compute device: memory above what it was at `start`."""

    includes_model_data: bool
    certain_bytes: int  # of the last `period`, what can be nothing else than memory in use

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def period(self) -> int:
        """The most bytes at once since the last call; begins the next period."""
        ...


class SavedBytes(Protocol):
    """Bytes of storages that autograd saved for backward: all, and those on the compute device."""

    @property
    def live_bytes(self) -> int: ...

    @property
    def resident_bytes(self) -> int: ...

    def holds(self, storage: UntypedStorage) -> bool: ...


class StorageTracker(TorchDispatchMode):
    """Tracker of storages that operators made and that are still alive, in bytes. Works on fake
    tensors.

    Storages of `ignore`d tensors (model data) are not counted, nor what operators allocate inside
    and free again. A storage that is resized counts as it was when an operator last returned it.
    """

    includes_model_data = False

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}  # id: its storage and its bytes
        self._ignored: set[int] = set()
        self._ignored_refs: list[weakref.ref[Any]] = []
        self.paused = False  # what is made is model data
        self.live_bytes = 0
        self.certain_bytes = 0
        self._peak = 0

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors' storages."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._ignored:
                continue
            self._forget(key)
            self._ignored.add(key)
            self._ignored_refs.append(
                weakref.ref(storage, lambda _, key=key: self._ignored.discard(key))  # type: ignore[misc]
            )

    def counts(self, tensor: Tensor) -> bool:
        """Whether its storage is counted."""
        return tensor.untyped_storage()._cdata in self._live

    def start(self) -> None:
        self.__enter__()

    def stop(self) -> None:
        self.__exit__(None, None, None)

    def period(self) -> int:
        self.certain_bytes, self._peak = self._peak, self.live_bytes
        return self.certain_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._ignored:
            return
        if self.paused and key not in self._live:
            self.ignore((tensor,))
            return
        # no reference to the storage is kept: it must die when the program drops it
        known = self._live.get(key)
        if known is None:
            gone = weakref.ref(storage, lambda _: self._forget(key))
            self._live[key] = (gone, nbytes)
            self.live_bytes += nbytes
        elif known[1] != nbytes:
            self._live[key] = (known[0], nbytes)
            self.live_bytes += nbytes - known[1]
        self._peak = max(self._peak, self.live_bytes)

    def _forget(self, key: int) -> None:
        known = self._live.pop(key, None)
        if known is not None:
            self.live_bytes -= known[1]


class SavedCounter:
    """Counter of storages that are saved for backward, of those that a tracker counts; of fake
    tensors too. live_bytes: of those that are not small, each once."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker
        self._uses: Counter[int] = Counter()  # by the key of a storage, which its tensors keep
        self.live_bytes = 0

    @property
    def resident_bytes(self) -> int:
        """All of them: a counter moves nothing."""
        return self.live_bytes

    def holds(self, storage: UntypedStorage) -> bool:
        """Whether a storage is saved, and counted."""
        return self._uses[storage._cdata] > 0

    def counting(self, changed: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """Context of forward and backward. changed: called when a tensor was saved, or is read."""

        def saved(tensor: Tensor) -> _Saved:
            found = self._saved(tensor)
            changed()
            return found

        def read(saved: _Saved) -> Tensor:
            changed()
            return saved.tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(saved, read)
        return cast(AbstractContextManager[None], hooks)

    def _saved(self, tensor: Tensor) -> _Saved:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        saved = _Saved(tensor)
        if nbytes >= LEAST_SAVED_BYTES and self._tracker.counts(tensor):
            if not self._uses[key]:
                self.live_bytes += nbytes
            self._uses[key] += 1
            weakref.finalize(saved, self._dropped, key, nbytes).atexit = False
        return saved

    def _dropped(self, key: int, nbytes: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self.live_bytes -= nbytes


class _Saved:
    """Tensor in the hands of autograd, which lets go of it with the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class ForwardTracker(StorageTracker):
    """Tracker of a forward, inside `tracking`; storages that it left count until the iteration is
    over.

    It is active there only: between forward and backward, modes of the caller may begin and end.
    """

    def start(self) -> None:
        self._live.clear()
        self.live_bytes = self._peak = 0

    def stop(self) -> None:
        self._live.clear()

    @contextmanager
    def tracking(self) -> Iterator[None]:
        with self:
            yield


class ProcessMonitor:
    """Monitor of the process's resident memory above what it was at `start`: VmHWM, reset every
    period.

    Raises OSError at `start` where the kernel does not allow the reset.
    """

    includes_model_data = True
    certain_bytes = 0  # it may be libraries, and what malloc keeps

    def __init__(self) -> None:
        self._base = 0

    def start(self) -> None:
        reset_peak_rss()
        self._base = peak_rss_bytes()

    def stop(self) -> None:
        return

    def period(self) -> int:
        return reset_peak_rss() - self._base


def process_monitor() -> ProcessMonitor | None:
    """Monitor of this process; None where the kernel does not allow the reset."""
    try:
        reset_peak_rss()
    except OSError as error:
        log.info("activations are not measured: %s", error)
        return None
    return ProcessMonitor()


class CudaMonitor:
    """Monitor of the CUDA allocator's statistics of one device; reading does not synchronise it.

    `margin` counts what the allocator holds in part-used blocks since the start, which a period's
    peak may not be able to use; in expandable segments all of it can be used. Every period begins
    the device's peak statistics anew, those that `torch.cuda.max_memory_allocated()` shows.
    """

    includes_model_data = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = 0
        self._base_split = 0
        self.certain_bytes = 0

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._base = torch.cuda.memory_allocated(self._device)
        self._base_split = self._split_bytes(torch.cuda.memory_stats(self._device))

    def stop(self) -> None:
        return

    def period(self) -> int:
        statistics = torch.cuda.memory_stats(self._device)
        peak = int(statistics["allocated_bytes.all.peak"])
        margin = max(0, self._split_bytes(statistics) - self._base_split)
        torch.cuda.reset_peak_memory_stats(self._device)
        self.certain_bytes = peak - self._base
        return peak + margin - self._base

    def _split_bytes(self, statistics: Mapping[str, int]) -> int:
        asked = (os.environ.get(name, "") for name in ALLOCATOR_SETTINGS)
        if any("expandable_segments:True" in settings for settings in asked):
            return 0
        return int(statistics["inactive_split_bytes.all.current"])


_highest_bytes = 0  # before resets


def process_peak_rss_bytes() -> int:
    """Most resident memory of this process since it began, whatever was reset meanwhile."""
    return max(_highest_bytes, peak_rss_bytes())


def peak_rss_bytes() -> int:
    """VmHWM: the most resident memory of this process since it began, or since the last reset."""
    return _status_bytes(_HIGHEST)


def resident_bytes(*, trimmed: bool = True) -> int:
    """VmRSS: resident memory of this process. trimmed: without what malloc can give back."""
    gc.collect()
    if trimmed:
        ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes(_RESIDENT)


def _status_bytes(field: bytes) -> int:
    status = _STATUS.read_bytes()
    start = status.find(field)
    if start < 0:
        raise OSError(f"{_STATUS} has no {field.decode()[:-1]}")
    return int(status[start + len(field) :].split(None, 1)[0]) * 1024


def reset_peak_rss(*, forget: bool = False) -> int:
    """Begin VmHWM anew at what is resident now. Returns what it was, which
    `process_peak_rss_bytes` remembers. forget: that begins anew too."""
    global _highest_bytes
    peak = peak_rss_bytes()
    _highest_bytes = 0 if forget else max(_highest_bytes, peak)
    _CLEAR_REFS.write_text(_RESET_PEAK, encoding="utf-8")
    return peak
