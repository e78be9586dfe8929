"""A plan is a certificate: what it says is enough is enough, and not much more than that.

    python -m bench.certificate --draws 200 --seed 0 --json PATH

Each draw is a dense model (of 100 MiB and more of parameters, or smaller), adapters or none, a
batch, checkpointing, an optimizer, a share of state on NVMe, `update=`, a budget of RAM, whether
the module has its values before it is wrapped, and the length of each iteration's inputs: one for
all, or up to three, the longest at any place.
`gemini plan` answers; then another process trains three iterations under a hard limit: the plan's
peak and the process's own bytes, its floor among them, which `gemini.doctor.process` measures once,
in a process that trains small models of another kind. Nothing is measured of the process that is
limited.
Models with experts are no part of it: of these oneDNN compiles products without end.
MALLOC_MMAP_THRESHOLD_ is 65536: without it malloc keeps tens of MiB of what was freed, of
activations of small models. Outputs live through backward, and the process ends when steps have
ended: `optimizer.close()` would keep masters, 4 bytes a parameter beside the state.

The parent looks at VmHWM of /proc every 10 ms and kills the process where it is above the limit;
VmHWM forgets no peak, so one between two looks is found by the next, and by a last look at the end.
It is no RLIMIT_DATA, which counts stacks of threads that nobody touched, and no cgroup, which needs
root.

killed: accepted draws that needed more than the answer. Bar: none.
slack: share of an answer above the floor that was not needed. Bar: a median of 8 %.
refused: trained with as much as the plan asks for, under 1.05 of the budget that was refused. Bar:
90 % are killed there.

It goes on where it was stopped, by rows of this commit in `--rows`. `--json` is written after every
draw, with the number of draws `asked` beside those that were made: a run that is cut off has its
figures there. Exit status 1: a bar is missed, a draw failed, or fewer were made than asked.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import gemini
from bench.predict import EXACT_MALLOC
from bench.support.machine import MALLOC_ENVIRONMENT, commit, write_result
from gemini.doctor.process import measure
from gemini.memtracer.monitor import process_peak_rss_bytes
from gemini.nvme import default_folder
from gemini.optim import HybridAdam, HybridLion, HybridSGD
from gemini.placement.tiers import Tier
from gemini.plan import models
from gemini.plan.ask import ask
from gemini.plan.changes import enough
from gemini.plan.machine import ProcessCosts, machine_of
from gemini.plan.question import Question
from gemini.plan.training import Training
from gemini.units import MIB

STEPS = 3
LOOKS = 0.01  # seconds between two
MORE = 1.05  # of a refused budget
MOST_SECONDS = 1200.0
LOADED = 0.25  # of the draws
BARS = {"killed": 0, "median_slack": 0.08, "refused_rightly": 0.9}
ENVIRONMENT = {
    **MALLOC_ENVIRONMENT,
    **EXACT_MALLOC,
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
ROOMY = {"device_mem": 1 << 50, "host_mem": 1 << 50, "nvme": 1 << 50}
WITHOUT = "experts on a CPU, whose products oneDNN compiles without end"
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": HybridAdam, "lion": HybridLion, "sgd": lambda params, **o: HybridSGD(
        params, lr=1e-3, momentum=0.9, **o),
}  # fmt: skip
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral", "GPT2")
SMALL = (256, 384, 512), (2, 8), (2000, 8000, 16000)  # hidden, layers, vocabulary
LARGE = (896, 1024), (4, 6), (16000, 32000)  # 100 MiB of parameters and more


@dataclass(frozen=True, slots=True)
class Draw:
    """What is trained, and on what. budget: of what all in RAM would take; None: no limit."""

    family: str
    hidden: int
    layers: int
    vocab: int
    batch: int
    seq: int
    lora: int
    checkpointing: bool
    optimizer: str
    nvme_fraction: float
    update: str
    budget: float | None
    lengths: tuple[int, ...]  # of each iteration
    loaded: bool  # the module has its values before it is wrapped

    @classmethod
    def of(cls, seed: int, number: int) -> Draw:
        """The same for the same numbers."""
        dice = random.Random(f"{seed} {number}")
        hidden, layers, vocab = dice.choice((SMALL, LARGE))
        seq = dice.choice((32, 64, 128, 256))
        lengths = [seq, *(dice.choice((seq, dice.randint(8, seq))) for _ in range(STEPS - 1))]
        if dice.random() < 0.5:
            lengths = [seq] * STEPS
        dice.shuffle(lengths)
        return cls(
            dice.choice(FAMILIES), dice.choice(hidden), dice.randint(*layers), dice.choice(vocab),
            dice.randint(1, 6), seq, dice.choice((0, 0, 4, 16)), dice.random() < 0.5,
            dice.choice(("adamw", "adamw", "lion", "sgd")),
            dice.choice((0.0, 0.0, 0.0, 0.5, 1.0)), dice.choice(("auto", "auto", "serial")),
            dice.choice((None, *(dice.uniform(0.1, 1.1) for _ in range(3)))), tuple(lengths),
            dice.random() < LOADED,
        )  # fmt: skip

    def model(self, device: str = "meta") -> Any:
        """Model of transformers."""
        import transformers

        kind: Any = transformers
        sizes: dict[str, Any] = {"vocab_size": self.vocab}
        if self.family == "GPT2":
            sizes |= {"n_embd": self.hidden, "n_layer": self.layers, "n_head": 4}
        else:
            sizes |= {
                "hidden_size": self.hidden, "intermediate_size": 3 * self.hidden,
                "num_hidden_layers": self.layers, "num_attention_heads": 8,
                "num_key_value_heads": 4, "head_dim": self.hidden // 8,
            }  # fmt: skip
        head = "LMHeadModel" if self.family == "GPT2" else "ForCausalLM"
        config = getattr(kind, f"{self.family}Config")(**sizes)
        with torch.device(device):
            return getattr(kind, f"{self.family}{head}")(config)

    def prepared(self) -> Any:
        """With its checkpointing and its adapters, as it is trained."""
        model = self.model("cpu" if self.loaded else "meta")
        if self.checkpointing:
            model = models.checkpointed(model)
        add = models.adapted if self.loaded else models.add_lora
        return add(model, self.lora) if self.lora else model

    def question(self, costs: ProcessCosts) -> Question:
        """Of a machine that has room for all of it."""
        training = Training(
            self.batch, self.seq, self.lora, self.checkpointing, "bf16", self.optimizer,
            self.nvme_fraction, update=self.update, lengths=len({*self.lengths}),
            loaded=self.loaded,
        )  # fmt: skip
        machine = machine_of(ROOMY, device="cpu")
        machine = replace(machine, folder=str(default_folder()), process=costs)
        return ask(self.model(), machine, training)


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a plan says of a draw, and how to train it so."""

    needs: int  # bytes of RAM, of which the floor is `floor`
    budget: int  # the same, of what was refused
    floor: int
    is_refused: bool
    policy: Any
    trace: Any
    update: str
    on_disk: int
    own: dict[str, int] | None = None  # bytes of the process, as the plan has them


def certify(draw: Draw, costs: ProcessCosts) -> Certificate:
    """A refused one is trained with as much as the plan asks for."""
    question = draw.question(costs)
    whole = replace(question, nvme_fraction=0.0).planned().profile.peak(Tier.DEVICE)
    budget = ROOMY["device_mem"] if draw.budget is None else int(draw.budget * whole)
    asked = replace(question, machine=replace(question.machine, device_mem=budget))
    is_refused = not asked.fits()
    if is_refused:
        asked = enough(asked)
    planned = asked.planned()
    if asked.update == "auto":
        asked = replace(asked, update=planned.best_update)
        planned = asked.planned()
    process = asked.process(planned)
    own = process.total
    return Certificate(
        planned.profile.peak(Tier.DEVICE) + own, budget + own, costs.floor or 0, is_refused,
        asked.policy, asked.trace, asked.update, planned.profile.peak(Tier.NVME), asdict(process),
    )  # fmt: skip


def train(draw: Draw, plan: Certificate) -> int:
    """Train in this process; the peak until the optimizer is closed, which would keep masters
    beside its state."""
    torch.manual_seed(0)
    options = {"placement_policy": plan.policy, "trace": plan.trace, "update": plan.update}
    wrapped = gemini.GeminiDDP(draw.prepared(), device="cpu", **options)
    trained = [param for param in wrapped.parameters() if param.requires_grad]
    optimizer = OPTIMIZERS[draw.optimizer](trained, nvme_offload_fraction=draw.nvme_fraction)
    for length in draw.lengths:
        ids = torch.randint(draw.vocab, (draw.batch, length))
        outputs = wrapped(input_ids=ids, labels=ids, use_cache=False)
        outputs.loss.backward()
        del outputs  # logits live through backward, as `gemini.trace` has it
        optimizer.step()
        optimizer.zero_grad()
    optimizer.last_report.behind.wait()  # the tail of the last step
    return process_peak_rss_bytes()


def run(draw: Draw, costs: ProcessCosts) -> dict[str, Any]:
    """A row of the result."""
    with tempfile.TemporaryDirectory(dir=default_folder()) as folder:  # what is killed leaves files
        return _run(draw, costs, folder)


def _run(draw: Draw, costs: ProcessCosts, folder: str) -> dict[str, Any]:
    plan = _apart(lambda: certify(draw, costs))
    plan = replace(plan, policy=replace(plan.policy, nvme_dir=folder)) if plan.policy else plan
    limit = plan.floor + int(MORE * (plan.budget - plan.floor)) if plan.is_refused else plan.needs
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_told, args=(
        lambda: train(draw, plan), its))  # fmt: skip
    process.start()
    its.close()
    peak, is_killed, end = 0, False, time.monotonic() + MOST_SECONDS
    assert process.pid is not None
    while not mine.poll(LOOKS):
        peak = max(peak, _high_water(process.pid))
        if peak > limit or time.monotonic() > end:
            is_killed = True
            os.kill(process.pid, signal.SIGKILL)
            break
    if not is_killed:
        said = mine.recv()
        if isinstance(said, str):
            raise RuntimeError(said)
        peak = max(peak, said)  # a process begins VmHWM anew when it samples an iteration
        is_killed = peak > limit
    process.join()
    return {
        **asdict(draw), "refused": plan.is_refused, "used": plan.update, "on_disk": plan.on_disk,
        "needs": plan.needs - plan.floor, "allowed": limit - plan.floor,
        "took": peak - plan.floor, "killed": is_killed, "own": plan.own,
    }  # fmt: skip


def _high_water(pid: int) -> int:
    """VmHWM; 0 of a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def _told(work: Callable[[], Any], told: Connection) -> None:
    try:
        told.send(work())
    except BaseException:
        told.send(traceback.format_exc())


def _apart(work: Callable[[], Any]) -> Any:
    """What it returns, from a process that is gone then."""
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_told, args=(work, its))
    process.start()
    its.close()
    found = mine.recv()
    process.join()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is asked of all draws."""
    accepted = [row for row in rows if not row["refused"]]
    refused = [row for row in rows if row["refused"]]
    slack = [1 - row["took"] / row["needs"] for row in accepted if not row["killed"]]
    return {
        "draws": len(rows),
        "accepted": len(accepted),
        "killed": sum(row["killed"] for row in accepted),
        "killed_by_family": dict(Counter(row["family"] for row in accepted if row["killed"])),
        "most_above": max((row["took"] / row["needs"] - 1 for row in accepted), default=0.0),
        "median_slack": statistics.median(slack) if slack else math.nan,
        "refused": len(refused),
        "refused_rightly": sum(row["killed"] for row in refused) / len(refused) if refused else 1.0,
        "bars": BARS,
        "without": WITHOUT,
        "limit": "VmHWM at most process.floor + allowed: looked at every 10 ms, and at the end; a "
        "process above it is killed",
    }


def is_met(found: dict[str, Any]) -> bool:
    """All bars, by all draws that were asked."""
    return bool(
        found["draws"] == found["asked"]
        and not found["failed"]
        and found["killed"] <= BARS["killed"]
        and found["median_slack"] <= BARS["median_slack"]
        and found["refused_rightly"] >= BARS["refused_rightly"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="draw to begin with: a portion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no draw begins after")
    parser.add_argument("--rows", type=Path, help="default: runs/certificate-SEED.jsonl")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = args.rows or Path("runs") / f"certificate-{args.seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    now = commit()
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for library in ("peft", "transformers.models"):  # once, for all processes
        importlib.import_module(library)
    costs = ProcessCosts(**_apart(measure))
    print(f"a process: {costs}; without {WITHOUT}", flush=True)
    known = {row["number"]: row for row in map(json.loads, lines) if row["commit"] == now}
    end, failed = time.monotonic() + 60 * args.minutes, list[int]()

    def found() -> dict[str, Any]:
        """Figures of the draws that were made until now; they replace those in the file."""
        rows = [known[number] for number in range(args.draws) if number in known]
        figures = {"asked": args.draws, **summary(rows), "failed": failed}
        if args.json is not None:
            write_result(args.json, {**figures, "process": asdict(costs), "rows": rows})
        return figures

    with path.open("a", encoding="utf-8") as kept:
        for number in range(args.first, args.draws):
            if number in known:
                continue
            if time.monotonic() > end:
                break
            draw = Draw.of(args.seed, number)
            try:
                row = {"number": number, "commit": now, **run(draw, costs)}
            except RuntimeError as error:  # a draw that cannot be trained ends no other
                failed.append(number)
                print(f"{number:4d} {draw}: failed: {error}", flush=True)
                continue
            known[number] = row
            kept.write(json.dumps(row) + "\n")
            kept.flush()
            print(f"{number:4d} {_in_words(row)}", flush=True)
            found()
    figures = found()
    print(json.dumps(figures, indent=1))
    return 0 if is_met(figures) else 1


def _in_words(row: dict[str, Any]) -> str:
    verdict = "refused" if row["refused"] else f"needs {row['needs'] / MIB:.0f} MiB"
    said = "killed" if row["killed"] else "lived"
    names = ("family", "hidden", "layers", "batch", "seq", "lora", "checkpointing", "optimizer",
             "nvme_fraction", "used", "budget")  # fmt: skip
    what = " ".join(str(row[name])[:8] for name in names)
    return (
        f"{what}: {verdict}, took {row['took'] / MIB:.0f} of {row['allowed'] / MIB:.0f} MiB: {said}"
    )


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ENVIRONMENT})
    sys.exit(main())
