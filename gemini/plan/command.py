"""`python -m gemini plan`: arguments, and what is printed and written."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from gemini.arguments import Parser
from gemini.optim.rules.state_layout import KINDS
from gemini.placement.picture import write_timeline
from gemini.placement.timeline import planned_timeline
from gemini.placement.timetable.updates import AUTO, UPDATES
from gemini.units import parse_bytes

from .machine import CARDS, TYPICAL, Hardware, machine_of
from .quantised import KINDS as QUANTISED
from .question import AVERAGES
from .words import OPTIM

OF_ONE_MACHINE = (
    "gpu", "machine", "world_size", "ranks_per_node", "device", "device_mem", "host_mem", "nvme",
    "nvme_fraction", "bandwidths", "verbose", "print_args", "timeline", "json",
)  # fmt: skip


TRUST_HELP = (
    "run the Python code that the model's folder brings, with your rights: read it first. Without "
    "this flag none of it runs"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", metavar="MODEL",
        help="a name, a hub id, a folder, a config.json or package.module:factory",
    )  # fmt: skip
    parser.add_argument("--model", help="the same")
    parser.add_argument("--trust-remote-code", action="store_true", help=TRUST_HELP)
    parser.add_argument("--batch", type=int, default=1, help="of a rank")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument(
        "--lengths", type=int, default=1,
        help="number of lengths of inputs in a run, up to --seq: a CPU compiles products for each",
    )  # fmt: skip
    parser.add_argument("--accumulate", type=int, default=1, help="forwards before a step")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument(
        "--checkpointing", action=argparse.BooleanOptionalAction, default=False,
        help="activations are computed again in backward",
    )  # fmt: skip
    parser.add_argument(
        "--by-trl", action="store_true", help="as python -m gemini train does it: trl's loss"
    )
    parser.add_argument("--update", choices=[*UPDATES, AUTO], default=AUTO, help="of GeminiDDP")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--optimizer", choices=("adamw", "lion", "sgd"), default="adamw")
    parser.add_argument("--ema", choices=AVERAGES, help="where an average of the weights is")
    parser.add_argument("--state", choices=KINDS, default="fp32", help="of HybridAdam")
    parser.add_argument("--quantize", choices=QUANTISED, help="of the base under --lora")
    parser.add_argument("--gpu", choices=CARDS, help="memory and speeds of a data sheet")
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="what python -m gemini doctor --json prints"
    )
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int, help="default: at most 8")
    parser.add_argument("--device", choices=sorted(TYPICAL), default="cuda")
    parser.add_argument("--device-mem", type=_size, help="of each device")
    parser.add_argument("--host-mem", type=_size, help="RAM of each node")
    parser.add_argument("--nvme", type=_size, help="disk of each node")
    parser.add_argument(
        "--nvme-fraction", type=float, default=0.0, help="of the state, at least, on NVMe"
    )
    parser.add_argument("--bandwidths", type=Path, help="JSON, bytes a second; see Bandwidths")
    parser.add_argument("--activation-bytes", type=_size, help="of a batch of 1; not traced")
    parser.add_argument("--verbose", action="store_true", help="every kind, tier and link")
    parser.add_argument(
        "--print-args", action="store_true", help="only arguments of python -m gemini train"
    )
    parser.add_argument(
        "--fits", type=Path, metavar="FOLDER",
        help="write what-fits.md and what-fits.html there: MODEL, or the usual ones, on many cards",
    )  # fmt: skip
    parser.add_argument("--timeline", type=Path, help=".svg, .png, .pdf or .json")
    parser.add_argument("--json", type=Path)


_MOST = 1 << 24  # of each number: far above any run, and below what sizes of tensors overflow at
_MOST_BYTES = 1 << 50


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:  # whose words argparse leaves out
        raise argparse.ArgumentTypeError(str(error)) from None


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check arguments. Ends the process for impossible ones, as argparse does."""
    for name in OF_ONE_MACHINE if args.fits is not None else ():
        if getattr(args, name) not in (None, False, 0.0, parser.get_default(name)):
            flag = name.replace("_", "-")
            parser.error(f"--{flag} beside --fits, which has machines of its own; leave it away")
    if (args.what is None) == (args.model is None) and not (args.fits and args.what is None):
        parser.error("expected one model")
    for name in ("world_size", "batch", "seq", "lengths", "accumulate", "lora"):
        least = int(name != "lora")
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
        if getattr(args, name) > _MOST:
            parser.error(f"--{name.replace('_', '-')} must be at most {_MOST}")
    if args.batch * args.seq > _MOST:
        parser.error(f"--batch times --seq must be at most {_MOST} tokens")
    if args.activation_bytes is not None and not 0 <= args.activation_bytes <= _MOST_BYTES:
        parser.error(f"--activation-bytes must be from 0 to {_MOST_BYTES}")
    for name in ("json", "timeline", "fits"):
        path = getattr(args, name)
        blocked = (
            next((one for one in (path, *path.parents) if one.exists()), None) if path else None
        )
        if blocked is None:
            continue
        if name == "fits" and not blocked.is_dir():
            parser.error(f"--fits {path}: {blocked} is a file; expected a folder, or a new one")
        if name != "fits" and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"--{name} {path}; expected a file in a folder that is there")
    if args.quantize and not args.lora:
        parser.error(f"--quantize {args.quantize} without --lora; expected adapters of a rank")
    if args.print_args and args.precision != "bf16":
        parser.error(f"--print-args with --precision {args.precision}; train computes in bf16")
    if args.print_args and (args.optimizer, args.state) not in OPTIM:
        parser.error(f"--print-args with --state {args.state}; train has fp32 and 8bit of adamw")
    if args.print_args and args.ema:
        parser.error("--print-args with --ema; train has no average of weights")
    if not 0 <= args.nvme_fraction <= 1:
        parser.error("--nvme-fraction must be from 0 to 1")
    args.ranks_per_node = args.ranks_per_node or min(8, args.world_size)
    if not 1 <= args.ranks_per_node <= args.world_size:
        parser.error("--ranks-per-node must be at least 1 and at most --world-size")


def machine_from(args: argparse.Namespace) -> Hardware:
    """Machine of the arguments. Raises ValueError for files and cards that are not known."""
    sizes = {name: getattr(args, name) for name in ("device_mem", "host_mem", "nvme")}
    return machine_of(
        {name: size for name, size in sizes.items() if size is not None},
        device=args.device, world_size=args.world_size, ranks_per_node=args.ranks_per_node,
        gpu=args.gpu, report=args.machine, speeds=args.bandwidths,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status 1: it does not fit."""
    parser = Parser(
        prog="python -m gemini plan",
        description="Does a model fit, where does everything go, how long does a step take: asked "
        "on any machine, without weights and without a GPU. Exit status 1: it does not fit.",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    check(parser, args)
    if args.fits is not None:
        return _write_fits(args)
    from . import words
    from .ask import Training, plan_for

    name = args.model if args.what is None else args.what
    try:
        machine = machine_from(args)
        training = Training(**{f.name: getattr(args, f.name) for f in fields(Training)})
        plan = plan_for(name, machine, training)
    except (ValueError, OSError) as error:
        sys.exit(f"gemini plan: {error}")
    if args.print_args:
        lines = [words.train_arguments(plan, args.optimizer, args.state)]
    else:
        lines = [*words.five_lines(name, plan), *(words.all_lines(plan) if args.verbose else ())]
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"model": name, **words.as_json(plan)}, indent=1), encoding="utf-8"
        )
    if args.timeline is not None:
        inputs, result = plan.asked.priced()
        picture = planned_timeline(
            result, inputs, budgets=machine.budgets(),
            title=f"{name}, batch {plan.asked.batch} x {plan.asked.seq} tokens of a rank",
            verdict=words.verdict(plan),
        )  # fmt: skip
        try:
            write_timeline(picture, args.timeline)
        except (ValueError, ImportError) as error:
            sys.exit(f"gemini plan: {error}")
    return 0 if plan.fits else 1


def _write_fits(args: argparse.Namespace) -> int:
    """Write two pages, of all parameters and of LoRA, after each model, so that an end loses
    little."""
    from . import table
    from .ask import Training, ask

    name = args.model if args.what is None else args.what
    args.fits.mkdir(parents=True, exist_ok=True)
    table_rows: list[table.FitRow] = []
    for model in [name] if name else table.MODELS:
        for training, lora in (("all parameters", 0), ("LoRA adapters", args.lora or 16)):
            asked = Training(
                args.batch, args.seq, lora, True, args.precision, args.optimizer,
                activation_bytes=args.activation_bytes, ema=args.ema, state=args.state,
                trust_remote_code=args.trust_remote_code,
            )  # fmt: skip
            question = ask(model, machine_from(args), asked)
            table_rows += table.rows(model, training, question)
        title = (
            f"One card, {args.batch} x {args.seq} tokens, {args.precision} under {args.optimizer} "
            f"with {args.state} state, activations computed again in backward. "
            "Planned, not measured: speeds of data sheets, an assumed disk."
        )
        (args.fits / "what-fits.md").write_text(table.markdown(table_rows, title), encoding="utf-8")
        (args.fits / "what-fits.html").write_text(table.page(table_rows, title), encoding="utf-8")
    return 0
