"""What this process does to memory of a device, and to what is pinned of the host's, as a log.

The stub logs copies, events and waits. Of kernels it knows no arguments: accesses of torch's
operators are recorded as they are dispatched, those of Triton's as they are launched, by their
tables, and those of the host where it copies memory and where its threads move files. Who of the
host waits for which thread is noted, too, and what files move: a replay has clocks of their own
for threads (`tests.cuda_stub.replay`).
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from gemini.kernels_triton.tiles import GRAD, NUM_COLUMNS, NUMEL, PARAM, STATE
from gemini.nvme.files.file import OpenFile
from gemini.optim.state import memory
from gemini.optim.step.tail import Gate
from tests.cuda_stub.counts import place
from tests.cuda_stub.races import Call, parse

Span = tuple[int, int, bool]  # address, bytes, whether it is written
STUB = ctypes.CDLL(None)
STUB.stub_logged.restype = ctypes.c_char_p
STUB.stub_place.argtypes, STUB.stub_place.restype = [ctypes.c_long], ctypes.c_long
STUB.stub_note.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
STUB.stub_touch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 3]
# They touch no values, or only where the stub logs a copy and a wait for it.
NO_VALUES = (
    "aten.empty", "aten.new_empty", "aten.resize_", "aten.set_", "aten.record_stream",
    "aten._unsafe_view", "aten._local_scalar_dense", "aten.lift",
)  # fmt: skip
# Of Triton's kernels: arguments that are written, whole; all others are read.
WRITTEN = {
    "prologue_kernel": ("steps", "coefficients", "control"),
    "norm_kernel": ("sums", "bad"),
    "finish_kernel": ("out_sum", "out_bad"),
    "tally_kernel": ("control",),
    "_digest_kernel": ("sums",),
    "update_kernel": (),
    "largest_kernel": ("most",),
    "pack_kernel": ("sent",),
    "unpack_kernel": ("values",),
}
STATE_OF_UPDATE = ("master", *(f"{kind}{i}" for kind in ("state", "shared") for i in range(3)))
_places: list[str] = []
_open: list[None] = []  # not empty while there is a log
_numbers = itertools.count(1)  # of signals
_own: set[int] = set()  # threads that work beside the loop
_signals: dict[object, int] = {}  # of gates, of work of threads and of its results, by `id`


def touch(spans: list[Span], *, by_host: bool = False) -> None:
    """Log work on the current stream, or of the host, and what it touches."""
    spans = [span for span in spans if span[1]]
    if spans:
        n = len(spans)
        at, nbytes, writes = zip(*spans, strict=True)
        STUB.stub_touch(
            0 if by_host else torch.cuda.current_stream().cuda_stream, by_host, n,
            (ctypes.c_void_p * n)(*at), (ctypes.c_size_t * n)(*nbytes), (ctypes.c_int * n)(*writes),
        )  # fmt: skip


def span_of(tensor: Tensor, writes: bool) -> Span:
    """Bytes from the first element to the last: elements between them may be others'."""
    if not tensor.numel():
        return 0, 0, writes
    reach = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (reach + 1) * tensor.element_size(), writes


@contextmanager
def placed(name: str) -> Iterator[None]:
    """What this thread asks for in here comes from where it is now."""
    _places.append(f"{name} in {place()}")
    before = STUB.stub_place(len(_places) - 1)
    try:
        yield
    finally:
        STUB.stub_place(before)


@contextmanager
def _by_host(name: str, spans: list[Span]) -> Iterator[None]:
    """Work of the host that may be under way while other threads give work to the device: at its
    begin it comes after what it needs, and at its end nothing may have come between."""
    with placed(name):
        touch(spans, by_host=True)
        yield
        touch(spans, by_host=True)


def _note(what: str, number: int = 0, nbytes: int = 0) -> None:
    STUB.stub_note(what.encode(), number, nbytes)


def _signal(of: object) -> None:
    """Note that this thread goes on past what others wait for."""
    number = _signals[of] = next(_numbers)
    _note("signal", number)


def _waited(of: object) -> None:
    """Note that this thread has waited for a signal."""
    if of in _signals:
        _note("wait", _signals[of])


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _open:
            return func(*args, **kwargs)
        with placed(str(func)):
            out = func(*args, **kwargs)
            if func.namespace != "gemini" and not str(func).startswith(NO_VALUES):
                self._touch(func._schema, args, kwargs, out)
        return out

    def _touch(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        is_alias = any(found.alias_info is not None for found in schema.returns)
        if is_alias and not any(written):
            return  # a view
        touched = [(out, True)] if not is_alias else []
        for i, (argument, writes) in enumerate(zip(schema.arguments, written, strict=True)):
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            touched.append((given, writes))
        found = [
            (leaf, writes)
            for values, writes in touched
            for leaf in tree_leaves(values)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        ]
        on_device = [span_of(tensor, writes) for tensor, writes in found if tensor.is_cuda]
        if on_device:  # a copy from the host, or to it, the stub logs itself
            touch(on_device)
        else:
            touch([span_of(tensor, writes) for tensor, writes in found], by_host=True)


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Launch nothing, and log what the kernel would touch."""
    name = kernel.fn.__name__
    given = dict(zip(kernel.arg_names, args, strict=False))
    spans = [
        span_of(value, argument in WRITTEN[name])
        for argument, value in given.items()
        if isinstance(value, Tensor) and argument not in STATE_OF_UPDATE
    ]
    with placed(name):
        if name in ("update_kernel", "norm_kernel"):
            spans += _of_segments(name, given)
        touch(spans)
    for argument in ("sums", "bad") if name == "norm_kernel" else ():
        # nothing is computed, and what was there before would be no norm
        ctypes.memset(given[argument].data_ptr(), 0, given[argument].nbytes)


def _of_segments(name: str, given: dict[str, Any]) -> Iterator[Span]:
    """Memory that a launch reaches by its tables, which the stub has in the host's memory."""
    tiles = _values(given["tiles"], ctypes.c_int32)
    rows = _values(given["segments"], ctypes.c_int64)
    grad_bytes = given["GRAD_DTYPE"].primitive_bitwidth // 8
    updates = name == "update_kernel"
    param_dtype = given["PARAM_DTYPE" if updates else "OUT_DTYPE"]
    for segment in sorted(set(tiles[::2])):
        row = rows[segment * NUM_COLUMNS :][:NUM_COLUMNS]
        yield row[GRAD], row[NUMEL] * grad_bytes, False
        if updates or given["WRITES"]:
            yield row[PARAM], row[NUMEL] * param_dtype.primitive_bitwidth // 8, True
        if updates:
            yield from _of_state(given, row[STATE], row[NUMEL])


def _of_state(given: dict[str, Any], offset: int, numel: int) -> Iterator[Span]:
    """Planes in which elements have a value each, and then what groups of 8 share."""
    planes = given["NUM_PLANES"]
    names = [f"state{i}" for i in range(planes)]
    if given["HAS_MASTER"] or given["SPLIT"]:
        names.append("master")
    own = {given[name].data_ptr(): given[name] for name in names}
    for address, plane in own.items():
        size = plane.element_size()
        yield address + offset * size, numel * size, True
    for i in range(planes):
        shared = given[f"shared{i}"]
        if shared.data_ptr() not in own:
            yield shared.data_ptr() + offset // 8, -(-numel // 8), True


def _values(tensor: Tensor, of: Any) -> list[int]:
    return list((of * tensor.numel()).from_address(tensor.data_ptr()))


def _moved(move: Callable[..., None]) -> Callable[..., None]:
    def moving(self: Any, kind: str, piece: memoryview, offset: int) -> None:
        at = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        with _by_host(f"file's {kind}", [(at, piece.nbytes, kind == "read")]):
            _note("read from disk" if kind == "read" else "write to disk", 0, piece.nbytes)
            move(self, kind, piece, offset)

    return moving


def _copied(copy: Callable[..., None]) -> Callable[..., None]:
    def copying(dst: Tensor, values: Tensor) -> None:
        with _by_host("copy_alone", [span_of(values, False), span_of(dst, True)]):
            copy(dst, values)

    return copying


def _started(start: Callable[..., None]) -> Callable[..., None]:
    def starting(thread: threading.Thread) -> None:
        _signal(("start", id(thread)))
        start(thread)

    return starting


def _run(run: Callable[..., None]) -> Callable[..., None]:
    def running(thread: threading.Thread) -> None:
        _own.add(threading.get_native_id())
        _waited(("start", id(thread)))
        with _Operators():  # a mode is of one thread
            run(thread)

    return running


def _submitted(submit: Callable[..., Any]) -> Callable[..., Any]:
    def submitting(self: Any, work: Callable[..., Any], *given: Any, **named: Any) -> Any:
        number = next(_numbers)

        def doing() -> Any:
            _waited(("work", number))
            try:
                return work(*given, **named)
            finally:
                _signal(("done", number))

        _signal(("work", number))
        future = submit(self, doing)
        future.number_of_signal = number
        return future

    return submitting


def _result(result: Callable[..., Any]) -> Callable[..., Any]:
    def found(self: Any, timeout: float | None = None) -> Any:
        try:
            return result(self, timeout)
        finally:
            _waited(("done", getattr(self, "number_of_signal", 0)))

    return found


def _opened(opens: Callable[..., None]) -> Callable[..., None]:
    def opening(self: Gate) -> None:
        _signal(("gate", id(self)))
        opens(self)

    return opening


def _gate_waited(wait: Callable[..., None]) -> Callable[..., None]:
    def waiting(self: Gate) -> None:
        wait(self)
        _waited(("gate", id(self)))

    return waiting


@contextmanager
def watched() -> Iterator[None]:
    """All threads that begin in here are recorded, by logs that are opened in here."""
    copy = memory.copy_alone
    users = [m for m in list(sys.modules.values()) if getattr(m, "copy_alone", None) is copy]
    patches = [
        patch.object(JITFunction, "run", _launch),
        patch.object(threading.Thread, "start", _started(threading.Thread.start)),
        patch.object(threading.Thread, "run", _run(threading.Thread.run)),
        patch.object(ThreadPoolExecutor, "submit", _submitted(ThreadPoolExecutor.submit)),
        patch.object(Future, "result", _result(Future.result)),
        patch.object(Gate, "open", _opened(Gate.open)),
        patch.object(Gate, "wait", _gate_waited(Gate.wait)),
        patch.object(OpenFile, "move", _moved(OpenFile.move)),
        *(patch.object(user, "copy_alone", _copied(copy)) for user in users),
    ]
    for each in patches:
        each.start()
    try:
        with _Operators():
            yield
    finally:
        for each in patches:
            each.stop()


@contextmanager
def recorded(*, late: bool) -> Iterator[list[Call]]:
    """Calls of all that is done in here, when it is left. late: no event is done until somebody has
    waited for it; else each that is asked is done. Of threads, 0 is the loop's."""
    calls: list[Call] = []
    STUB.stub_late(late)
    STUB.stub_log(1)
    _open.append(None)
    try:
        yield calls
    finally:
        _open.clear()
        STUB.stub_log(0)
        STUB.stub_late(0)
    found = parse(STUB.stub_logged().decode(), _places)
    # torch's thread of a backward goes on where the loop waits
    calls += [one if one.thread in _own else Call(*one[:4], 0, one.place) for one in found]
