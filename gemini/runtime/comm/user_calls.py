"""A rank that is in a collective of the user's own, while another waits in a meeting for it.

Neither can go on: the one waits for a rank that reads a parameter, say, and that one for this to
come and gather it. Nothing of ours runs in such a rank but a thread, which looks now and then
whether somebody waits, and says where this rank is. Then both know, and raise.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import PurePath
from types import FrameType
from typing import Any

from .collective_log import SequenceError
from .meeting import MeetingPoint

LOOKS_PER_DEADLINE = 4
_OF_TORCH = ("distributed_c10d.py", "c10d_logger.py")
_OF_TWO_RANKS = ("send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv")


class UserCalls:
    """The thread of one rank, and what it says of the rank's own thread: the one that made it.

    deadline: seconds, asked again before each look. members: ranks of a group of the user's, by
    their numbers here; None is the default group.
    """

    def __init__(
        self,
        meeting: MeetingPoint,
        rank: int,
        deadline: Callable[[], float],
        members: Callable[[Any], list[int]],
    ) -> None:
        self.meeting, self.rank = meeting, rank
        self._deadline, self._members = deadline, members
        self._thread = threading.get_ident()
        stop = threading.Event()
        weakref.finalize(self, stop.set)
        work = threading.Thread(
            target=_look_on, args=(weakref.ref(self), stop), name="gemini-user-calls", daemon=True
        )
        work.start()

    @property
    def seconds(self) -> float:
        """Until the next look."""
        return self._deadline() / LOOKS_PER_DEADLINE

    def look(self, before: tuple[int, int] | None) -> tuple[int, int] | None:
        """Where this rank is in a collective of the user's; where it is there still, say so to who
        waits for it, and raise in its own thread once it leaves."""
        waiting = self.meeting.waiting()
        frame = sys._current_frames().get(self._thread) if waiting is not None else None
        call = None if frame is None else _users_call(frame)
        if waiting is None or frame is None or call is None:
            return None
        here = id(frame), frame.f_lasti
        reader, does = waiting
        if here == before and reader in self._members(call.f_locals.get("group")):
            name = f"torch.distributed.{call.f_code.co_name}()"
            # first: the end of the reader may be what ends this rank's call
            _raise_in(self._thread, text_of(reader, does, self.rank, name))
            self.meeting.answer(name)
            return None
        return here


def text_of(reader: int, does: str, rank: int, call: str) -> str:
    """What both ranks are told."""
    return (
        f"rank {reader} {does}, and waits for rank {rank}, which is in {call} and waits for rank "
        f"{reader}. All ranks must do so before they go on; take it out of what one rank runs alone"
    )


def _look_on(reference: weakref.ref[UserCalls], stop: threading.Event) -> None:
    before = None
    while True:
        user_calls = reference()
        if user_calls is None:
            return
        seconds = user_calls.seconds
        del user_calls  # or it would live as long as its thread
        if stop.wait(seconds):
            return
        user_calls = reference()
        try:
            before = None if user_calls is None else user_calls.look(before)
        except (RuntimeError, ValueError):  # the store or the group is gone: all is over
            return
        del user_calls


def _users_call(frame: FrameType) -> FrameType | None:
    """The collective of torch.distributed in which a thread is, where it is none of ours."""
    call = None
    caller: FrameType | None = frame
    while caller is not None and PurePath(caller.f_code.co_filename).name in _OF_TORCH:
        call = caller if caller.f_code.co_filename.endswith(_OF_TORCH[0]) else call
        caller = caller.f_back
    own = str(caller.f_globals.get("__name__")) if caller is not None else ""
    has_others = call is not None and call.f_code.co_name not in _OF_TWO_RANKS
    return call if has_others and not own.startswith("gemini.runtime.comm.") else None


def _raise_in(thread: int, text: str) -> None:
    """A SequenceError in another thread, when it comes back to Python."""
    error = type("SequenceError", (SequenceError,), {"__init__": _init_of(text)})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _init_of(text: str) -> Callable[[SequenceError], None]:
    return lambda self: RuntimeError.__init__(self, text)
