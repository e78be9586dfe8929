"""`python -m gemini plan`: what `train` would do, on any machine; what is printed and written."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch

from gemini.arguments import Parser
from gemini.comm.connect import everyone
from gemini.layouts.layout import GlobalBatch
from gemini.layouts.machines import cluster_of
from gemini.layouts.models import shape_of
from gemini.layouts.search import search
from gemini.nvme import NvmeError
from gemini.optim.rules.state_layout import KINDS
from gemini.placement.picture import write_timeline
from gemini.placement.timeline import planned_timeline
from gemini.plan import table, words
from gemini.plan.ask import DTYPES, ask, plan_for
from gemini.plan.machine import CARDS, TYPICAL, Hardware, machine_of
from gemini.plan.models import MODELS, build, is_trained_by_trl
from gemini.plan.training import AVERAGES, Training
from gemini.settings import flag, setting
from gemini.units import format_bytes, parse_bytes

from .config import ELSEWHERE, TrainConfig, quiet
from .plan import disk_of, hardware, training_of

_machine, _loop, _output = (
    partial(setting, group=group, is_typed=True)
    for group in ("the machine that is asked about", "a loop of your own", "output")
)
OF_ONE_MACHINE = (
    "gpu", "machine", "world_size", "ranks_per_node", "device", "device_mem", "host_mem", "nvme",
    "nvme_fraction", "bandwidths", "verbose", "print_args", "timeline", "json",
)  # fmt: skip
# with one of them it is another machine than this one
_OF_ANOTHER = {"gpu", "machine", "world_size", "ranks_per_node", "device", "bandwidths"}
HERE = "here"
OF_SEARCH = {"gpus", "nodes", "global_batch"}
ASKED_BY_SEARCH = {
    "search", "model", "gpu", "machine", "world_size", "ranks_per_node", "device", "device_mem",
    "host_mem", "bandwidths", "precision", "state", "optim", "batch", "accumulate", "seq",
    "checkpointing",
}  # fmt: skip
_MOST = 1 << 24  # of ranks and tokens: below what sizes of tensors overflow at
_MOST_BYTES = 1 << 50


@dataclass(frozen=True, kw_only=True)
class PlanConfig(TrainConfig):
    """Config of a plan: that of a run, a machine, and what is printed and written."""

    gpu: str | None = _machine(None, "memory and speeds of a data sheet", one_of=tuple(CARDS))
    machine: str | None = _machine(
        None, "a file of python -m gemini doctor --json; or here: this one, measured as by train"
    )
    world_size: int = _machine(1, "ranks; those of run --nproc_per_node", least=1, most=_MOST)
    ranks_per_node: int = _machine(0, "ranks of a node; 0: at most 8", least=0, most=_MOST)
    gpus: int = _machine(0, "ranks of --search, one a card; 0: --world-size", least=0, most=_MOST)
    nodes: int = _machine(0, "that --gpus are on; 0: 8 on each", least=0, most=_MOST)
    device: str = _machine("cuda", "cuda or cpu", one_of=tuple(sorted(TYPICAL)))
    bandwidths: str | None = _machine(None, "a file of JSON, bytes a second; see Bandwidths")
    by_trl: bool | None = setting(
        None,
        "as train does it, with the loss of trl; by default where train would train it",
        group="a loop of your own",
    )
    precision: str = _loop("bf16", "of computing", one_of=tuple(DTYPES))
    state: str | None = _loop(None, "of HybridAdam; by default that of --optim", one_of=KINDS)
    ema: str | None = _loop(None, "where an average of the weights is", one_of=tuple(AVERAGES))
    nvme_fraction: float = _loop(0.0, "share of the state, at least, on NVMe", least=0, most=1)
    activation_bytes: str | None = _loop(None, "of a batch of 1; not traced", is_size=True)
    lengths: int = _loop(
        0, "of inputs that differ in a run, up to --seq: a CPU compiles products for each; 0: as "
        "many as train pads to", least=0, most=_MOST,
    )  # fmt: skip
    loaded: bool = _loop(
        False, "the module has its values before it is wrapped, as from_pretrained leaves it"
    )
    keep_originals: bool = _loop(False, "fp32 values of frozen weights stay beside the 16-bit ones")
    chunk_loss: bool = _loop(
        False, "the loss has logits of a few tokens at a time: gemini.integrations.chunk_loss"
    )
    search: bool = _output(
        False, "every layout over --gpus that the plugins run is priced: the fastest, and why the "
        "next ones lose",
    )  # fmt: skip
    global_batch: int = _loop(
        0, "of --search: sequences of a step, of all ranks; 0: --batch on each, --accumulate times",
        least=0, most=_MOST,
    )  # fmt: skip
    longest: bool = _output(False, "the longest --seq that fits, each length traced")
    verbose: bool = _output(False, "every kind, tier and link")
    print_args: bool = _output(False, "only flags of train, with which it plans the same")
    fits: str | None = _output(
        None, "a folder for what-fits.md and what-fits.html: one model, or the usual, on many cards"
    )
    timeline: str | None = _output(None, "a file: .svg, .png, .pdf or .json")
    json: str | None = _output(None, "a file for all numbers")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch * self.seq > self.world_size * _MOST:
            raise ValueError(f"--batch times --seq; expected at most {_MOST} tokens a rank")
        if self.activation_bytes and parse_bytes(self.activation_bytes) > _MOST_BYTES:
            raise ValueError(f"--activation-bytes; expected at most {_MOST_BYTES}")
        if self.ranks_per_node > self.world_size:
            raise ValueError(
                f"--ranks-per-node {self.ranks_per_node}; expected at most --world-size"
            )
        if self.nodes and (self.gpus or self.world_size) % self.nodes:
            raise ValueError(f"--nodes {self.nodes}; expected a divisor of --gpus")
        for name in ("json", "timeline", "fits"):
            _check_output(name, getattr(self, name))
        if self.print_args and self.precision != "bf16":
            raise ValueError(
                f"--print-args with --precision {self.precision}; expected bf16, in which train "
                "computes"
            )
        if self.print_args and self.state not in (None, words.OPTIMIZERS[self.optim][1]):
            raise ValueError(
                f"--print-args with --state {self.state}; expected an --optim with such a state"
            )
        if self.print_args and self.ema:
            raise ValueError("--print-args with --ema; expected none: train has no average")

    @property
    def run(self) -> TrainConfig:
        """Config of the run that is planned."""
        return TrainConfig(**{one.name: getattr(self, one.name) for one in fields(TrainConfig)})

    def training(self, what: str | Path) -> Training:
        """Training of the run, and what a loop of your own has beside it. Raises ValueError."""
        asked = training_of(self, self.world_size)
        by_trl = is_trained_by_trl(what) if self.by_trl is None else self.by_trl
        if self.chunk_loss and self.by_trl is None:
            by_trl = False
        nbytes = None if self.activation_bytes is None else parse_bytes(self.activation_bytes)
        return replace(
            asked, by_trl=by_trl and nbytes is None, precision=self.precision, ema=self.ema,
            state=self.state or asked.state, nvme_fraction=self.nvme_fraction,
            activation_bytes=nbytes, lengths=self.lengths or asked.lengths, loaded=self.loaded,
            keep_originals=self.keep_originals, chunked=self.chunk_loss,
        )  # fmt: skip


def _check_output(name: str, given: str | None) -> None:
    """Raise ValueError for an output that cannot be written."""
    if given is None:
        return
    path = Path(given)
    blocked = next((one for one in (path, *path.parents) if one.exists()), path)
    if name == "fits" and blocked.exists() and not blocked.is_dir():
        raise ValueError(f"--fits {path}: {blocked} is a file; expected a folder, or a new one")
    if name != "fits" and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"--{name} {path}; expected a file in a folder that is there")


PARSER = Parser(
    prog="python -m gemini plan",
    usage="%(prog)s [MODEL|config.yaml] [flags]", other_names=ELSEWHERE,
    description="Does a model fit, where does everything go, how long does a step take: asked on "
    "any machine,\nwithout weights and without a GPU. Flags and YAML are those of train, with "
    "their defaults.",
    epilog="""examples:
  python -m gemini plan llama-3.1-8b --lora 16 --gpu rtx4090
  python -m gemini plan Qwen/Qwen2.5-7B-Instruct --gpu l4 --host-mem 24GiB --nvme 500GB
  python -m gemini plan config.yaml                what train config.yaml does on this machine
  python -m gemini plan config.yaml --gpu h100     the same run on another

A model is a name, a hub id, a folder, a config.json or package.module:factory. Names:
"""
    + ", ".join(MODELS)
    + "\n\nexit status: 0 it fits, 1 it does not, 2 the question is refused",
)  # fmt: skip
PlanConfig.add_to(PARSER)


def machine_from(config: PlanConfig, is_here: bool) -> Hardware:
    """Machine of a config: this one, or that of the flags. Raises ValueError for files and cards
    that are not known."""
    if is_here:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return hardware(config, everyone(None, None), device)
    given: dict[str, int] = {
        name: parse_bytes(getattr(config, name))
        for name in ("device_mem", "host_mem")
        if getattr(config, name) is not None
    }
    folder = "."
    if config.nvme is not None:
        given["nvme"], folder = disk_of(config.nvme)
    return machine_of(
        given, device=config.device, world_size=config.world_size,
        ranks_per_node=config.ranks_per_node or min(8, config.world_size), gpu=config.gpu,
        report=None if config.machine is None else Path(config.machine),
        speeds=None if config.bandwidths is None else Path(config.bandwidths), folder=folder,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status 1: it does not fit; 2: the question is refused."""
    try:
        config, typed, file = PlanConfig.parse(
            PARSER, sys.argv[1:] if argv is None else argv, of_file=TrainConfig
        )
        if "print_config" in typed:
            sys.stdout.write(config.run.as_yaml())
            return 0
        quiet()
        if config.fits is not None:
            beside = next((name for name in OF_ONE_MACHINE if name in typed), None)
            if beside is not None:
                raise ValueError(
                    f"{flag(beside)} beside --fits; expected none: it has machines of its own"
                )
            return _write_fits(config)
        if not config.model:
            raise ValueError("expected one model: a name, a hub id, a folder or a config.json")
        what: str | Path = config.model
        if file is not None and "model" not in typed and ":" in config.model:
            what = Path(config.model)  # a file imports no module
        _check_search(config, typed)
        if config.search:
            sys.stdout.write(_searched(config, what) + "\n")
            return 0
        is_here = config.machine == HERE or (file is not None and not typed & _OF_ANOTHER)
        plan = plan_for(
            what, machine_from(config, is_here), config.training(what), longest=config.longest
        )
        return _told(config, plan)
    except (ValueError, OSError, NvmeError, ImportError) as error:
        PARSER.error(str(error))


def _check_search(config: PlanConfig, typed: Set[str]) -> None:
    """Raise ValueError for flags that a search does not ask for, or that nothing else asks for."""
    if not config.search:
        alone = sorted(typed & OF_SEARCH)
        if alone:
            raise ValueError(f"{flag(alone[0])} without --search; expected both")
        return
    beside = sorted(typed - OF_SEARCH - ASKED_BY_SEARCH)
    if beside:
        raise ValueError(
            f"{flag(beside[0])} beside --search; expected none: all parameters are trained, by "
            "Adam, with the model's own loss"
        )
    if words.OPTIMIZERS[config.optim][0] != "adamw":
        raise ValueError(f"--optim {config.optim} beside --search; expected one of AdamW's")


def _searched(config: PlanConfig, what: str | Path) -> str:
    """Layouts of a model in lines. Raises ValueError if none fits."""
    if config.machine == HERE:
        raise ValueError(
            f"--machine {HERE} with --search; expected a card or a report: "
            "gemini.autoparallelize measures this machine"
        )
    ranks = config.gpus or config.world_size
    per_node = ranks // config.nodes if config.nodes else config.ranks_per_node or min(8, ranks)
    machine = machine_from(replace(config, world_size=ranks, ranks_per_node=per_node), False)
    shape = shape_of(build(what), seq=config.seq, precision=config.precision)
    rows = config.global_batch or ranks * config.batch * config.accumulate
    state = config.state or words.OPTIMIZERS[config.optim][1]
    recompute = True if config.checkpointing else None
    cluster = cluster_of(machine, config.gpu)
    found = search(shape, cluster, GlobalBatch(rows, config.seq), state=state, recompute=recompute)
    numbers = {"device_mem": "device memory", "flops": "computing"}
    inside, across = (
        format_bytes(int(link.bytes_per_s)) for link in (cluster.inside, cluster.across)
    )
    of = f"{ranks} ranks of {per_node} a node"
    return "\n".join([
        f"{config.model} on {of}, {rows} x {config.seq} tokens a step:",
        found.explain(), *machine.assumptions(numbers),
        f"links: {inside}/s inside of a node, {across}/s of a rank across",
    ])  # fmt: skip


def _told(config: PlanConfig, plan: words.Answer) -> int:
    """Print and write an answer."""
    name = config.model
    if config.print_args:
        if plan.asked.chunked:
            raise ValueError("--print-args; expected no chunk_loss in the plan: train has none")
        lines = [words.train_arguments(plan, config.optim)]
    else:
        lines = [*words.five_lines(name, plan), *(words.all_lines(plan) if config.verbose else ())]
    sys.stdout.write("\n".join(lines) + "\n")
    if config.json is not None:
        said = json.dumps({"model": name, **words.as_json(plan)}, indent=1)
        Path(config.json).write_text(said, encoding="utf-8")
    if config.timeline is not None:
        asked = plan.asked
        inputs, result = asked.priced()
        picture = planned_timeline(
            result, inputs, budgets=asked.machine.budgets(),
            title=f"{name}, batch {asked.batch} x {asked.seq} tokens of a rank",
            verdict=words.verdict(plan),
        )  # fmt: skip
        write_timeline(picture, Path(config.timeline))
    return 0 if plan.fits else 1


def _write_fits(config: PlanConfig) -> int:
    """Write two pages, of all parameters and of LoRA, after each model, so that an end loses
    little."""
    assert config.fits is not None
    folder = Path(config.fits)
    folder.mkdir(parents=True, exist_ok=True)
    table_rows: list[table.FitRow] = []
    for model in [config.model] if config.model else table.MODELS:
        asked = config.training(model)
        for training, lora in (("all parameters", 0), ("LoRA adapters", config.lora or 16)):
            quantize = asked.quantize if lora and config.lora else None
            question = ask(
                model, machine_from(config, False), replace(asked, lora=lora, quantize=quantize)
            )
            table_rows += table.rows(model, training, question)
        kept = "computed again in backward" if asked.checkpointing else "kept for backward"
        times = f"{asked.accumulate} x " if asked.accumulate > 1 else ""
        order = " layer by layer" if asked.by_layers else ""
        title = (
            f"One card, {times}{asked.batch} x {asked.seq} tokens{order}, {asked.precision} under "
            f"{asked.optimizer} with {asked.state} state, activations {kept}. Planned, not "
            "measured: speeds of data sheets, an assumed disk. The system and the process keep a "
            "part of the RAM."
        )
        (folder / "what-fits.md").write_text(table.markdown(table_rows, title), encoding="utf-8")
        (folder / "what-fits.html").write_text(table.page(table_rows, title), encoding="utf-8")
    return 0
