"""What one more block costs, and what a newcomer reads: python -m tests.support.spine

Counted while it runs, so that no figure is met by moving code out of sight. `tests/test_spine.py`
holds the bars. A call is one of a function of ours, a generator's resumption or a comprehension
(Python 3.12 has fewer of these).

block       one more block with state in a file: 8 and 16 chunks of bf16 shards of a block each, a
            steady step of each, the difference by block. What pools of threads run is a row of its
            own, all other threads are the step's; a tail belongs to its step.
device      the same, of 4 and 8 on the simulated device, `update="tail"`. What happens in one of
            its calls is not counted; kernels are, as the interpreter runs them (37 calls a block).
types       whose methods run for that block, on any thread
classes     and tokens, lines: of the rooms below
five lines  README's: lines of the functions that they run, from the import on
save, load  what a second one runs and a step does not, with state in a file

The same on every machine: one core; transfers end before they are waited for, so that no loop asks
twice; copies of the simulated device are as late as they may be; no pass of the collector.
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("gemini", "optim", "kernels_triton", "io/nvme")
LINKS = {f"gemini/{Path(part).name}/": f"{part}/" for part in SOURCES[1:]}

# Whose a call is, by the first of these that its file begins with; else the step's in one of the
# rooms below, and the engine's elsewhere.
OWNERS = {
    "io/nvme/": "store",
    "optim/update/": "update",
    "optim/rules/": "update",
    "optim/state/pieces.py": "update",  # tiles of what it is given
    "kernels_triton/": "update",
    "gemini/runtime/memory/user_writes.py": "engine",
}
# Rooms of step, state, memory, targets, matrices and saved state are what is *not* listed here: a
# new folder is one of them, and its calls are the step's, until somebody says here that it is not.
OTHER_ROOMS = (
    *("gemini/accumulation", "gemini/activations"),
    *("gemini/checkpoint", "gemini/chunk", "gemini/doctor", "gemini/integrations"),
    *(
        "gemini/memtracer",
        "gemini/mesh",
        "gemini/migrate",
        "gemini/parallel",
        "gemini/placement",
        "gemini/plan",
    ),
    *(
        "gemini/decoding",
        "gemini/layouts",
        "gemini/launcher",  # starts ranks
        "gemini/embedding",  # steps of its own, in which no block takes part
        "gemini/samplers",
        "gemini/serving",
        "gemini/train",
        "gemini/transfer",
        "gemini/receipts",  # digests of what there is behind a step
        "gemini/runtime/canonical",  # sums of gradients before it
        "gemini/runtime/autograd",
        "gemini/comm",
    ),
    "gemini/runtime/gradients",
    *("gemini/runtime/inspect", "gemini/runtime/pipeline", "gemini/runtime/schedule"),
    *("gemini/runtime/wrap", "optim/rules", "optim/update", "io/nvme", "kernels_triton"),
)
FACES = ("gemini", "gemini/runtime", "optim")  # of these only the folders in them
NO_CLASSES = ("optim/matrices",)  # a room whose classes are not counted with the others'


def in_source(filename: str) -> str | None:
    """A file of ours from the root, by its real folder; None: it is another's."""
    path = os.path.relpath(filename, ROOT)
    for link, folder in LINKS.items():
        if path.startswith(link):
            return folder + path.removeprefix(link)
    return path if path.startswith(tuple(f"{part}/" for part in SOURCES)) else None


def is_room(folder: str) -> bool:
    inside = any(f"{folder}/".startswith(f"{other}/") for other in OTHER_ROOMS)
    return folder not in FACES and not inside


def owner_of(path: str) -> str:
    for start, owner in OWNERS.items():
        if path.startswith(start):
            return owner
    return "step" if is_room(str(Path(path).parent)) else "engine"


# -- calls --


@dataclass
class Calls:
    """Calls by (file, function), by whether a pool ran them, and types of `self`."""

    of_step: Counter[tuple[str, str]] = field(default_factory=Counter)
    of_pools: Counter[tuple[str, str]] = field(default_factory=Counter)
    types: Counter[str] = field(default_factory=Counter)
    waits: int = 0

    def more(self, few: Calls, blocks: int) -> Calls:
        """By block, of what is called oftener than with so many blocks fewer."""
        found = Calls()
        for name in ("of_step", "of_pools", "types"):
            mine, theirs = getattr(self, name), getattr(few, name)
            getattr(found, name).update(
                {key: (count - theirs[key]) / blocks for key, count in mine.items()}
            )
        return found

    def by_owner(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (path, _), count in self.of_step.items():
            found[owner_of(path)] += count
        return found

    def files(self) -> set[str]:
        return {path for (path, _), count in self.of_step.items() if count > 0}


class Hook:
    """A profile hook of all threads that start behind it; counts while it is `on`."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.on = False
        self._trainer = threading.get_ident()
        self._steps = True  # the thread that trains is in its step
        self._paths: dict[CodeType, str | None] = {}
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not self.on:
            return
        if not self._steps and threading.get_ident() == self._trainer:
            return
        code = frame.f_code
        if code not in self._paths:
            self._paths[code] = path_of(code, frame.f_globals)
        path = self._paths[code]
        if path is None:
            return
        is_pools, is_simulated = _above(frame.f_back)
        if is_simulated:
            return
        first = code.co_varnames[:1] if code.co_argcount else ()
        with self._lock:
            into = self.calls.of_pools if is_pools else self.calls.of_step
            into[path, code.co_qualname] += 1
            if first == ("self",) and not is_pools:
                kind = type(frame.f_locals["self"])
                self.calls.types[f"{kind.__module__}.{kind.__qualname__}"] += 1

    def step(self, step: Callable[[], object], settle: Callable[[], object]) -> Calls:
        """Calls of a step, and of what goes on when it has returned, until it is settled."""
        gc.collect()
        gc.disable()
        self.calls, self.on, self._steps = Calls(), True, True
        sys.settrace(self)
        try:
            step()
            self._steps = False
            settle()
        finally:
            sys.settrace(None)
            self.on = False
            gc.enable()
        return self.calls


def path_of(code: CodeType, names: dict[str, Any]) -> str | None:
    """Where its call counts. Of code that was made while we ran, all but a dataclass's methods."""
    if not code.co_filename.startswith("<"):
        return in_source(code.co_filename)
    module = sys.modules.get(str(names.get("__name__")))
    is_generated = getattr(module, "__file__", None) and not code.co_name.startswith("__")
    return in_source(str(module.__file__)) if module and is_generated else None


def _above(frame: FrameType | None) -> tuple[bool, bool]:
    """Whether a pool of threads runs what this calls; whether the simulated device does."""
    is_simulated = False
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith("concurrent/futures/thread.py") and frame.f_code.co_name == "_worker":
            return True, is_simulated
        is_simulated |= "/bench/shared/simulated/" in name
        frame = frame.f_back
    return False, is_simulated


@contextmanager
def quick_pools() -> Iterator[None]:
    """What a pool is given ends before the next line runs. Those that update start by a meeting of
    their threads, and are waited for anyway."""
    submit = ThreadPoolExecutor.submit

    def at_once(pool: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> Future[Any]:
        future = submit(pool, *args, **kwargs)
        if not getattr(pool, "_thread_name_prefix", "").startswith("optim"):
            wait([future])
        return future

    with mock.patch.object(ThreadPoolExecutor, "submit", at_once):
        yield


def of_blocks(num_blocks: int, hook: Hook, folder: str, device: Any = None) -> Calls:
    """A steady step of so many blocks, each a chunk with its state in a file."""
    import torch
    from torch import nn

    from gemini import GeminiDDP, StaticPlacement
    from gemini.optim import HybridAdam, NvmeConfig

    width = 32 if device else 64
    options: dict[str, Any] = {"update": "tail"} if device else {}
    model = GeminiDDP(
        nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_blocks))),
        device or "cpu",
        StaticPlacement(1.0, 0.0, 0.0) if device else StaticPlacement(),
        min_chunk_size_m=width * width / 2**20,
        **options,
    )
    optimizer = HybridAdam(
        model.parameters(),
        nvme=NvmeConfig(block_numel=width * width),
        nvme_offload_fraction=1.0,
        nvme_offload_dir=folder,
    )
    rows = torch.ones(2, width)
    calls, taken = Calls(), []
    for turn in range(4):
        loss = model(rows).float().sum()
        # Where the last gradients were, so that no table with addresses is right by chance
        taken += [torch.empty(width * width, dtype=torch.bfloat16) for _ in range(256)]
        loss.backward()
        if turn < 3:
            optimizer.step()
            optimizer.zero_grad()
            continue
        with waits(device) as waited:
            calls = hook.step(optimizer.step, lambda: optimizer.last_report.behind.wait())
        calls.waits = len(waited)
    optimizer.close()
    return calls


@contextmanager
def waits(device: Any) -> Iterator[list[None]]:
    """Copies that this thread waits for, as the host."""
    found: list[None] = []
    if device is None:
        yield found
        return
    waiter, inner = threading.get_ident(), device.host_waited

    def waited() -> None:
        if threading.get_ident() == waiter:
            found.append(None)
        inner()

    device.host_waited = waited
    try:
        yield found
    finally:
        del device.host_waited


def simulated() -> Any:
    """A device whose copies are as late as they may be."""
    from bench.shared.simulated import SimBackend

    never = mock.Mock(**{"random.return_value": 1.0})
    with mock.patch("random.Random", return_value=never):
        device = SimBackend(updates_by_triton=True)
    device.shards_start_on_host = False
    return device


def block_rows(hook: Hook, folder: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Rows of the table that are of a block, and what they are made of."""
    few, many = (of_blocks(blocks, hook, folder) for blocks in (8, 16))
    block = many.more(few, 8)
    few, many = (of_blocks(blocks, hook, folder, simulated()) for blocks in (4, 8))
    device = many.more(few, 4)
    owners = block.by_owner()
    types = sorted(name for name, count in block.types.items() if count > 0)
    rows: dict[str, float] = {
        "block": sum(block.of_step.values()),
        **{f"block, {owner}": owners[owner] for owner in ("step", "store", "update", "engine")},
        "block, pools": sum(block.of_pools.values()),
        "device": sum(device.of_step.values()),
        "device, pools": sum(device.of_pools.values()),
        "device, files": len(device.files()),
        "device, waits of step()": many.waits,
        "types": len(types),
    }
    parts: dict[str, Any] = {
        "types": types,
        "files": sorted(block.files()),
        "device files": sorted(device.files()),
        **{
            name: {f"{path}:{function}": n for (path, function), n in calls.most_common() if n}
            for name, calls in (
                ("block", block.of_step), ("block, pools", block.of_pools),
                ("device", device.of_step), ("device, pools", device.of_pools),
            )
        },
    }  # fmt: skip
    return rows, parts


# -- the five lines --


def five_lines(folder: str, fraction: float) -> dict[str, Any]:
    """Files loaded, and lines by file of functions run, in a process that has loaded none."""
    import torch
    from torch import nn

    ran = Ran()
    from gemini import GeminiDDP, HybridAdam

    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model = GeminiDDP(module, precision="bf16", max_norm=1.0)
    on_disk: Any = (
        {"nvme_offload_fraction": fraction, "nvme_offload_dir": folder} if fraction else {}
    )
    optimizer = HybridAdam(model.parameters(), lr=3e-4, weight_decay=0.01, **on_disk)
    for _ in range(3):
        loss = model(torch.ones(2, 64)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    lines = {path: len(found) for path, found in sorted(ran.lines().items())}
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    loaded = {in_source(os.path.realpath(file)) for file in files if file}
    return {
        "loaded": sorted(path for path in loaded if path),
        "lines": {path: count for path, count in lines.items() if count},
    }


class Ran:
    """Functions that ran, on threads that began since then too, until `lines` is asked."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        threading.settrace(self._hook)
        sys.settrace(self._hook)

    def _hook(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self._codes.add(frame.f_code)

    def lines(self) -> dict[str, set[int]]:
        """By file of ours."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        starts: dict[str, set[tuple[int, str]]] = {}
        for code in self._codes:
            path = in_source(os.path.realpath(code.co_filename))
            if path is not None:
                starts.setdefault(path, set()).add((code.co_firstlineno, code.co_name))
        return {path: lines_of(path, begun) for path, begun in starts.items()}


def beyond_the_step(folder: str) -> dict[str, dict[str, dict[str, int]]]:
    """Of a save and a load that are not the first: lines by file of functions that no step runs.
    "files": in files of which a step runs nothing; "lines": in all."""
    from torch import nn, ones

    from gemini import GeminiDDP, HybridAdam, load_checkpoint, save_checkpoint

    model = GeminiDDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), precision="bf16")
    optimizer = HybridAdam(model.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=folder)

    def step() -> None:
        model(ones(2, 64)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    all_of = Path(folder) / "saved", model, optimizer
    save, load = (partial(work, *all_of) for work in (save_checkpoint, load_checkpoint))
    works: dict[str, Callable[[], object]] = {"step": step, "save": save, "load": load}
    ran: dict[str, dict[str, set[int]]] = {}
    for work in (*works.values(), step):
        work()
    for name, work in works.items():
        watch = Ran()
        work()
        ran[name] = watch.lines()
    found = {}
    for name in ("save", "load"):
        more = {path: lines - ran["step"].get(path, set()) for path, lines in ran[name].items()}
        lines = {path: len(lines) for path, lines in sorted(more.items()) if lines}
        files = {path: count for path, count in lines.items() if path not in ran["step"]}
        found[name] = {"files": files, "lines": lines}
    return found


def lines_of(path: str, begun: set[tuple[int, str]]) -> set[int]:
    """Lines of a file's functions that begin there, decorators and what stands in them too."""
    found: set[int] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(node.lineno, *(d.lineno for d in node.decorator_list), node.lineno)
            if (first, node.name) in begun:
                found.update(range(first, (node.end_lineno or first) + 1))
    return found


def in_a_child(work: Callable[[], Any]) -> Any:
    """The answer of work in a fork: what it loads, this process has not."""
    reads, writes = os.pipe()
    if not (pid := os.fork()):
        with os.fdopen(writes, "w", encoding="utf-8") as out:
            json.dump(work(), out)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"a child ended with {status}"
    return json.loads(text)


# -- rooms --


def rooms() -> dict[str, list[Path]]:
    """Files of each room of step, state and memory, by folder."""
    found: dict[str, list[Path]] = {}
    for part in SOURCES:
        for path in sorted((ROOT / part).rglob("*")):
            folder = path.parent.relative_to(ROOT).as_posix()
            by_a_link = in_source(str(path)) != path.relative_to(ROOT).as_posix()
            if path.is_file() and path.suffix != ".pyc" and is_room(folder) and not by_a_link:
                found.setdefault(folder, []).append(path)
    return found


def classes(paths: Iterable[Path]) -> tuple[list[str], list[str]]:
    """Names of classes, and of those the Protocols."""
    nodes = [
        node
        for path in paths
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    protocols = [n for n in nodes if any("Protocol" in ast.unparse(base) for base in n.bases)]
    return [node.name for node in nodes], [node.name for node in protocols]


LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
# f-strings in parts, since Python 3.12: one token each, as before
F_BEGINS, F_ENDS = (getattr(tokenize, f"FSTRING_{end}", -1) for end in ("START", "END"))


def tokens(text: str) -> int:
    """Tokens of a source, a docstring one of them; and those of the sources that it has as text."""
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        depth -= token.type == F_ENDS
        if not depth and token.type not in LAYOUT:
            count += 1 if token.type != tokenize.STRING else 1 + _tokens_within(token.string)
        depth += token.type == F_BEGINS
        count -= token.type == F_BEGINS and depth == 1  # its end has been counted, or will be
    return count


def _tokens_within(literal: str) -> int:
    """Of a literal that is statements: code that runs where no one reads it."""
    if "\n" not in literal:
        return 0
    try:
        text = ast.literal_eval(literal)
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return 0
    return tokens(text) if any(not isinstance(node, ast.Expr) for node in body) else 0


def room_rows() -> tuple[dict[str, float], dict[str, Any]]:
    found = rooms()
    by_room: dict[str, tuple[int, int]] = {}
    for folder, paths in found.items():
        texts = [(path.suffix, path.read_text(encoding="utf-8")) for path in paths]
        by_room[folder] = (
            sum(tokens(text) if suffix == ".py" else len(text.split()) for suffix, text in texts),
            sum(text.count("\n") for _, text in texts),
        )
    named, protocols = classes(
        path for folder, paths in found.items() if folder not in NO_CLASSES for path in paths
    )
    rows: dict[str, float] = {
        "classes": len(named),
        "protocols": len(protocols),
        "tokens": sum(count for count, _ in by_room.values()),
        "lines": sum(count for _, count in by_room.values()),
    }
    return rows, {"rooms": by_room, "classes": named, "protocols": protocols}


def measured() -> dict[str, Any]:
    """All rows and their parts. A process that has loaded nothing of ours is given."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    logging.disable(logging.CRITICAL)
    import torch
    import torch._dynamo  # as the first optimizer does, once for all

    torch.set_num_threads(1)
    with quick_pools(), tempfile.TemporaryDirectory() as folder:
        os.environ["GEMINI_SPEEDS"] = str(Path(folder) / "none")  # nobody has measured this machine
        runs = {
            name: in_a_child(partial(five_lines, folder, fraction))
            for name, fraction in (("resident", 0.0), ("nvme", 1.0))
        }
        beyond = in_a_child(partial(beyond_the_step, tempfile.mkdtemp(dir=folder)))
        hook = Hook()
        threading.settrace(hook)
        rows, parts = block_rows(hook, folder)
    for name, run in runs.items():
        rows[f"five lines, {name}: lines"] = sum(run["lines"].values())
        rows[f"five lines, {name}: files"] = len(run["lines"])
    for name, more in beyond.items():
        rows[f"{name}: files beyond the step"] = len(more["files"])
        rows[f"{name}: lines beyond the step"] = sum(more["lines"].values())
    rows["five lines: files loaded"] = len(runs["resident"]["loaded"])
    of_rooms, of_parts = room_rows()
    return {"rows": rows | of_rooms, "parts": {**parts, **of_parts, "five lines": runs, **beyond}}


def in_own_process() -> dict[str, Any]:
    """`measured` of a process whose variables are no others than those of any run."""
    own = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    kept = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONHASHSEED")
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.spine", "--json"],
        cwd=ROOT,
        env={**{name: os.environ[name] for name in kept if name in os.environ}, **own},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert found.returncode == 0, found.stderr[-4000:]
    answer: dict[str, Any] = json.loads(found.stdout)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="measure here, and print all of it")
    parser.add_argument("--parts", action="store_true", help="print what rows are made of")
    options = parser.parse_args()
    if options.json:
        json.dump(measured(), sys.stdout)
        return
    found = in_own_process()
    for name, value in found["rows"].items():
        print(f"{value:10,.8g}".replace(",", " ") + f"  {name}")
    if options.parts:
        print(json.dumps(found["parts"], indent=1))


if __name__ == "__main__":
    main()
