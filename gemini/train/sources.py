"""Sources of rows, as --data names them: files here, and data sets on the hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini import strangers

from .rows import read

JSON = "json"  # of `load_dataset`'s readers
_READERS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_PACKED = (".gz", ".bz2", ".xz", ".zip", ".zst")
_ENDINGS = (".jsonl", ".json", ".txt", *_READERS, *_PACKED)
_HUB = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(/(?P<subset>[\w.-]+))?(:(?P<split>.+))?")


@dataclass(frozen=True, slots=True)
class RowSource:
    """Rows of one kind of files, or of a split on the hub.

    name: as it was given. reader: of `load_dataset`: its own, or an id on the hub.
    files: in their order; none on the hub. subset, split: on the hub.
    """

    name: str
    reader: str
    files: tuple[str, ...] = ()
    subset: str | None = None
    split: str = "train"

    def load(self, flag: str, *, streaming: bool) -> Any:
        """Rows as a data set. Raises ValueError for what cannot be read."""
        from datasets import load_dataset

        options: dict[str, Any] = {"split": self.split, "streaming": streaming}
        if self.files:
            options["data_files"] = [*map(glob.escape, self.files)]
        if self.reader == "csv":  # a text that is empty or NA is a text
            sep = "\t" if ".tsv" in Path(self.files[0]).suffixes else ","
            options |= {"keep_default_na": False, "sep": sep}
        try:
            return load_dataset(self.reader, self.subset, trust_remote_code=False, **options)
        except Exception as error:  # by its ending a file may be taken for a compressed one
            cause = error.__cause__
            said = strangers.said(cause if isinstance(cause, Exception) else error)
            if not self.files:
                raise ValueError(
                    f"{flag} {self.name} is no file here, and the hub gives no rows ({said}); "
                    "expected a file, or org/name:split"
                ) from None
            kind = "JSONL" if self.reader == JSON else self.reader.upper()
            raise ValueError(f"{flag} {self.name} cannot be read as {kind}: {said}") from None

    def parts(self, rows: Any) -> Iterable[tuple[str, Iterable[Any]]]:
        """Rows as they are looked at: those of JSONL from the files, with the file's name."""
        if self.reader != JSON:
            return [(self.name, rows)]
        return ((file, read(Path(file))) for file in self.files)


def sources_of(given: str, flag: str) -> list[RowSource]:
    """Sources that --data lists with commas: paths, globs, and `org/name:split` on the hub.

    A path that exists is no list. Raises ValueError for what is neither.
    """
    if Path(given).exists():
        return [_source(given, flag)]
    return [_source(one.strip(), flag) for one in given.split(",")]


def weights_of(given: str | None, sources: list[RowSource]) -> list[float] | None:
    """Share of each source in the mixture. Raises ValueError for others than one a source."""
    if given is None:
        return None
    try:
        found = [float(one) for one in given.split(",")]
    except ValueError:
        found = []
    if len(found) != len(sources) or not all(0 < one < float("inf") for one in found):
        raise ValueError(
            f"--weights {given} of {len(sources)} sources in --data; expected a number above 0 for "
            "each, as 3,1"
        )
    return [one / sum(found) for one in found]


def _source(given: str, flag: str) -> RowSource:
    found = _HUB.fullmatch(given)
    is_file = Path(given).exists() or given.lower().partition(":")[0].endswith(_ENDINGS)
    if found is not None and not is_file:
        return RowSource(given, found["id"], (), found["subset"], found["split"] or "train")
    files = files_of(given, flag)
    readers = sorted({_reader(file) for file in files})
    if len(readers) > 1:
        raise ValueError(
            f"{flag} {given} has files of {' and '.join(readers)}; expected one kind, or several "
            "sources with a comma between them"
        )
    return RowSource(given, readers[0], tuple(files))


def _reader(file: str) -> str:
    endings = [one for one in Path(file.lower()).suffixes if one not in _PACKED]
    return _READERS.get(endings[-1], JSON) if endings else JSON


def files_of(pattern: str, flag: str) -> list[str]:
    """Files of a path, or of a glob where no such path exists. Raises ValueError if there are none,
    and for what is no file."""
    here = Path(pattern).exists()
    found = [pattern] if here else sorted(glob.glob(pattern, recursive=True))
    if not found:
        raise ValueError(
            f"{flag} {pattern} is no file; expected JSONL, CSV or Parquet, or org/name:split on "
            "the hub"
        )
    for name in found:
        if Path(name).is_dir():
            raise ValueError(f"{flag} {name} is a folder; expected files in it: '{name}/*.jsonl'")
        if not Path(name).is_file():
            raise ValueError(f"{flag} {name} is no regular file; expected JSONL, CSV or Parquet")
    return found
