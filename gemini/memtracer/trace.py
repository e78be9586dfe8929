"""Trace: what one iteration asks for, moment by moment. Pure.

A moment is a module boundary: before the chunks of a module are gathered (`enter`), or after they
may be released (`leave`), in forward or in backward. A trace names parameters and not chunks, so it
holds for every layout, can be made before there is one, and can order one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from gemini.chunk.layout import ParamSpec
from gemini.digests import digest_of
from gemini.units import Bytes, ChunkId, Moment, ParamId

FORMAT_VERSION = 2
_WITHOUT_SAVED = 1  # the format before: nobody had counted what is saved for backward
ASSUMED_SIGNATURE = "assumed"  # of inputs that nobody saw: it stands for all
LEAST_SAVED_BYTES = 1 << 18  # of a storage that may leave the device: smaller ones stay
MOST = 1 << 50  # bytes, or ids: more than there is anywhere

Kind = Literal["train", "eval"]
Phase = Literal["forward", "backward"]
Edge = Literal["enter", "leave"]
_EDGES: tuple[Edge, Edge] = ("enter", "leave")


class TraceError(ValueError):
    """Trace that cannot be used: of another model, of another format, or damaged."""


@dataclass(frozen=True, slots=True)
class TraceMoment:
    """Module boundary, and the period from it to the next one."""

    phase: Phase
    edge: Edge
    module: str
    params: tuple[ParamId, ...]  # of the module itself; needed from `enter` until `leave`
    # most that is not model data at once, in the period, if all stays that is saved for backward
    non_model_bytes: Bytes
    seconds: float = 0.0  # of the period; 0 where nothing was timed
    saved_bytes: int = 0  # of these, saved for backward all through the period; 0: unknown

    @property
    def rest_bytes(self) -> Bytes:
        """Bytes that are there whatever becomes of those saved for backward."""
        return Bytes(self.non_model_bytes - self.saved_bytes)

    @property
    def event(self) -> tuple[str, str, str, tuple[ParamId, ...]]:
        """Event of a moment that must be the same in the next iteration: all but measurements."""
        return (self.phase, self.edge, self.module, self.params)

    def __str__(self) -> str:
        return f"{self.phase} {self.edge} of {self.module or 'the root module'}"


@dataclass(frozen=True, slots=True)
class Layer:
    """Repeated block of a model, which may be computed again in backward.

    saved_bytes: of what its call saves for backward, but for what it is given or gives.
    input_bytes: of what it is given and nobody saves, which stays if it is computed again.
    seconds: of its forward; 0 where nothing was timed.
    """

    name: str
    saved_bytes: Bytes
    input_bytes: Bytes
    seconds: float = 0.0


class Departure:
    """Departure from a plan; `str` says what happened."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Deviation(Departure):
    """First moment at which an iteration differed from its trace."""

    moment: Moment
    expected: TraceMoment | None  # None: the trace ended before
    found: TraceMoment | None  # None: the iteration ended before

    def __str__(self) -> str:
        expected = self.expected or "the end of the iteration"
        return f"moment {self.moment}: expected {expected}, found {self.found or 'its end'}"


@dataclass(frozen=True, slots=True)
class Trace:
    """Trace of one iteration of one kind, for inputs of one signature."""

    kind: Kind
    signature: str  # of the inputs: see `input_signature`
    model_digest: str  # see `model_digest`
    moments: tuple[TraceMoment, ...]
    layers: tuple[Layer, ...] = ()  # in the order of their calls; see `memtracer.layers`
    recomputed: int = 0  # the first so many of them were computed again in backward

    def digest(self) -> str:
        """Digest of the sequence of events; measurements do not enter."""
        events = (self.kind, self.signature, self.model_digest, [m.event for m in self.moments])
        return digest_of(events)

    @property
    def peak_non_model_bytes(self) -> Bytes:
        return Bytes(max((m.non_model_bytes for m in self.moments), default=0))

    @property
    def peak_saved_bytes(self) -> Bytes:
        return Bytes(max((m.saved_bytes for m in self.moments), default=0))

    def non_model_within(self, most: int | None) -> list[int]:
        """Non-model bytes on the device at every moment, if at most `most` of the saved ones stay;
        None: all."""
        if most is None:
            return [m.non_model_bytes for m in self.moments]
        return [m.rest_bytes + min(m.saved_bytes, most) for m in self.moments]

    def param_order(self, specs: Sequence[ParamSpec]) -> tuple[str, ...]:
        """Names of parameters in the order of their first use: `order` of `ChunkLayout.build`."""
        used = dict.fromkeys(param for moment in self.moments for param in moment.params)
        return tuple(specs[param].name for param in used)

    def calls(self, chunk_of: Mapping[ParamId, ChunkId]) -> tuple[tuple[ChunkId, ...] | None, ...]:
        """Chunks of the call that begins, by moment, in id order; None where a call ends."""
        return tuple(
            tuple(sorted({chunk_of[param] for param in moment.params}))
            if moment.edge == "enter"
            else None
            for moment in self.moments
        )

    def chunk_needs(self, chunk_of: Mapping[ParamId, ChunkId]) -> tuple[tuple[ChunkId, ...], ...]:
        """Chunks that some open module uses, by moment, in id order."""
        users: dict[ChunkId, int] = {}
        needs = []
        phase = ""
        for moment in self.moments:
            if moment.phase != phase:  # calls that never ended do not reach into the next phase
                users.clear()
                phase = moment.phase
            for chunk in sorted({chunk_of[param] for param in moment.params}):
                users[chunk] = users.get(chunk, 0) + (1 if moment.edge == "enter" else -1)
                if users[chunk] <= 0:
                    del users[chunk]
            needs.append(tuple(sorted(users)))
        return tuple(needs)

    def deviation_of(self, found: Trace) -> Deviation | None:
        """First moment at which `found` differs from this trace; None where none does."""
        for i in range(max(len(self.moments), len(found.moments))):
            expected = self.moments[i] if i < len(self.moments) else None
            other = found.moments[i] if i < len(found.moments) else None
            if expected is None or other is None or expected.event != other.event:
                return Deviation(Moment(i), expected, other)
        return None

    def check_model(self, specs: Sequence[ParamSpec]) -> None:
        """Check that the trace is of this model. Raises TraceError for another, or names that it
        lacks."""
        if self.model_digest != model_digest(specs):
            raise TraceError(
                f"this trace was made of another model (digest {self.model_digest}, this model has "
                f"{model_digest(specs)}): parameters differ in number, order, name or shape; "
                "make a new one with gemini.trace"
            )
        for i, moment in enumerate(self.moments):
            if max(moment.params, default=0) >= len(specs):
                raise TraceError(
                    f"moment {i} of this trace needs parameter {max(moment.params)}, and this "
                    f"model has {len(specs)}; make a new one with gemini.trace"
                )

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_json()), encoding="utf-8")

    def to_json(self) -> dict[str, object]:
        return {"format": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file of `save`. Raises TraceError for a file that is no trace."""
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise TraceError(f"{path} is no trace: {error}") from error

    @classmethod
    def from_json(cls, data: object) -> Trace:
        """Trace of a value of `to_json`, of this format or the one before. Raises TraceError for
        anything else: every field is checked."""
        known = FORMAT_VERSION, _WITHOUT_SAVED
        if not isinstance(data, dict) or data.get("format") not in known:
            version = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise TraceError(f"no trace of format {FORMAT_VERSION}: found {version!r}")
        fields = _Fields(data)
        moments, has_saved = fields.array("moments"), data["format"] == FORMAT_VERSION
        layers = [_Fields(one, f"layer {i}: ") for i, one in enumerate(data.get("layers", ()))]
        recomputed = data.get("recomputed", 0)
        return cls(
            fields.one_of("kind", get_args(Kind)),
            fields.text("signature"),
            fields.text("model_digest"),
            tuple(_moment(_Fields(m, f"moment {i}: "), has_saved) for i, m in enumerate(moments)),
            tuple(map(_layer, layers)),
            fields.number(recomputed, "recomputed", most=len(layers)),
        )


def _moment(fields: _Fields, has_saved: bool) -> TraceMoment:
    non_model = fields.number(fields.value("non_model_bytes"), "non_model_bytes")
    saved = (
        fields.number(fields.value("saved_bytes"), "saved_bytes", most=non_model)
        if has_saved
        else 0
    )
    params = [fields.number(value, "a parameter") for value in fields.array("params")]
    return TraceMoment(
        fields.one_of("phase", get_args(Phase)),
        fields.one_of("edge", get_args(Edge)),
        fields.text("module"),
        tuple(ParamId(param) for param in params),
        Bytes(non_model),
        float(fields.number(fields.value("seconds"), "seconds", kinds=(int, float))),
        saved,
    )


def _layer(fields: _Fields) -> Layer:
    saved, given = (
        Bytes(fields.number(fields.value(name), name)) for name in ("saved_bytes", "input_bytes")
    )
    seconds = float(fields.number(fields.value("seconds"), "seconds", kinds=(int, float)))
    return Layer(fields.text("name"), saved, given, seconds)


class _Fields:
    """Checked fields of a JSON object. Each raises TraceError with `where` it is."""

    def __init__(self, data: object, where: str = "") -> None:
        self._where = where
        if not isinstance(data, dict):
            self._refuse(f"it is {data!r}; expected an object")
        self._data: dict[str, Any] = data

    def value(self, name: str) -> Any:
        if name not in self._data:
            self._refuse(f"it has no {name}")
        return self._data[name]

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str):
            self._refuse(f"{name} is {value!r}; expected text")
        return str(value)

    def array(self, name: str) -> list[Any]:
        value = self.value(name)
        if not isinstance(value, (list, tuple)):  # `to_json` has tuples, a file lists
            self._refuse(f"{name} is {value!r}; expected a list")
        return list(value)

    def one_of(self, name: str, expected: tuple[Any, ...]) -> Any:
        value = self.value(name)
        if not isinstance(value, str) or value not in expected:
            self._refuse(f"{name} is {value!r}; expected one of {[*expected]}")
        return value

    def number(
        self, value: Any, name: str, kinds: tuple[type[float], ...] = (int,), most: int = MOST
    ) -> Any:
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value <= most:
            kind = "a whole number" if kinds == (int,) else "a number"
            self._refuse(f"{name} is {value!r}; expected {kind} from 0 to {most}")
        return value

    def _refuse(self, what: str) -> NoReturn:
        raise TraceError(f"this trace is damaged: {self._where}{what}")


def model_digest(specs: Sequence[ParamSpec]) -> str:
    """Digest of a model as traces see it: parameters' names and shapes, in order."""
    return hashlib.sha256(repr([(s.name, s.shape) for s in specs]).encode()).hexdigest()[:16]


def sequential_trace(
    specs: Sequence[ParamSpec],
    non_model_bytes: int | Sequence[int] = 0,
    *,
    kind: Kind = "train",
    signature: str = ASSUMED_SIGNATURE,
    overlap: bool = False,
) -> Trace:
    """Trace of modules that run in registration order, and backwards in backward.

    For planning before anything ran. A module is a run of parameters whose names differ in their
    last part only; modules of tied names run last, as heads do. `non_model_bytes`: of every moment,
    or of all of them. `overlap`: in backward a module begins before the one it follows ends, as it
    does where the gradient of its output ends that one.
    """
    modules: dict[str, list[ParamId]] = {}
    for i, spec in enumerate(specs):
        modules.setdefault(spec.name.rpartition(".")[0], []).append(ParamId(i))
    for i, spec in enumerate(specs):
        for alias in spec.aliases:
            modules.setdefault(alias.rpartition(".")[0], []).append(ParamId(i))
    events: list[tuple[Phase, Edge, str]] = [
        ("forward", edge, name) for name in modules for edge in _EDGES
    ]
    if kind == "train":
        backward: list[tuple[Phase, Edge, str]] = [
            ("backward", edge, name) for name in reversed(modules) for edge in _EDGES
        ]
        # (enter, leave), (enter, leave), ...: each leave changes places with the enter that follows
        for i in range(1, len(backward) - 1, 2) if overlap else ():
            backward[i : i + 2] = backward[i + 1], backward[i]
        events += backward
    if isinstance(non_model_bytes, int):
        non_model_bytes = [non_model_bytes] * len(events)
    moments = tuple(
        TraceMoment(phase, edge, name, tuple(modules[name]), Bytes(nbytes))
        for (phase, edge, name), nbytes in zip(events, non_model_bytes, strict=True)
    )
    return Trace(kind, signature, model_digest(specs), moments)


def reduce_traces(traces: Sequence[Trace]) -> Trace:
    """Reduce the traces of all ranks to one: the most seconds of every period, and the most bytes,
    of those saved for backward and of the rest.

    Raises TraceError, naming the rank, where a rank saw other events than rank 0.
    """
    first = traces[0]
    for rank, trace in enumerate(traces):
        deviation = first.deviation_of(trace)
        if deviation is not None:
            raise TraceError(f"rank {rank} ran another sequence than rank 0: {deviation}")
    moments = tuple(
        replace(
            same[0],
            non_model_bytes=Bytes(max(m.rest_bytes for m in same) + saved),
            seconds=max(m.seconds for m in same),
            saved_bytes=saved,
        )
        for same in zip(*(trace.moments for trace in traces), strict=True)
        for saved in (max(m.saved_bytes for m in same),)
    )
    return replace(first, moments=moments)
