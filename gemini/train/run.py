"""Run of `python -m gemini train`, from its flags to a folder that `from_pretrained` reads."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from gemini.arguments import stopped
from gemini.checkpoint.pretrained import check_readable, downloaded, load_pretrained
from gemini.checkpoint.ranks import Ranks
from gemini.comm.communicator import Communicator
from gemini.comm.connect import everyone
from gemini.ddp import GeminiDDP
from gemini.nvme import NvmeError
from gemini.plan.ask import plan_for
from gemini.plan.models import adapters_of, build, maker
from gemini.plan.question import Question
from gemini.plan.words import five_lines
from gemini.runtime.wrap.materialise import init_empty

from .config import OF_THE_MACHINE, PARSER, TrainConfig, check, parse, quiet, read_config

CONFIG, REPORT, CARD = "config.yaml", "report.html", "README.md"
PRECISION = "bf16"
_BLANKS = 16  # characters that are shown of a text of blanks
T = TypeVar("T")
log = logging.getLogger("gemini")


def main(arguments: Sequence[str]) -> int:
    """Command `python -m gemini train`. The exit status is 2 for a refused run, 130 for one that
    was stopped."""
    try:
        config, shown = parse(arguments)
        if shown:
            sys.stdout.write(config.as_yaml())
            return 0
        check(config)
        quiet()
        if isinstance(sys.stdout, io.TextIOWrapper):  # a file has each loss when it is logged
            sys.stdout.reconfigure(line_buffering=True)
        job = prepare(config)
    except ImportError as error:
        PARSER.error(f"{error}; pip install trl peft datasets matplotlib")
    except (ValueError, NvmeError) as error:
        PARSER.error(str(error))
    try:
        job.run()
    except KeyboardInterrupt:
        return stopped(f"the same command continues from step {_saved_step(job.out)}")
    return 0


def _saved_step(out: Path) -> int:
    from .trainer import last_checkpoint

    newest = last_checkpoint(out)
    return 0 if newest is None else int(newest.name.rpartition("-")[2])


@dataclass
class Job:
    """Run that was planned and loaded, ready to train."""

    config: TrainConfig
    trainer: Any
    data: Any
    tokenizer: Any
    plan: str
    planned_seconds: float  # of a step
    resumed_from: Path | None
    comm: Communicator
    positions: int | None  # that the model has a table of

    @property
    def out(self) -> Path:
        return Path(self.config.out)

    def run(self) -> None:
        """Train, and leave the model in `out` with its report. All ranks call."""
        trainer = self.trainer
        resumed = None if self.resumed_from is None else str(self.resumed_from)
        trainer.train(resume_from_checkpoint=resumed)
        log, step = trainer.state.log_history, trainer.state.global_step
        self._save()
        # The model is there: what follows is told if it fails, and fails nothing. On all ranks, as
        # each forward gathers parameters from all of them.
        if self.data.held_out is not None and not any(
            "eval_loss" in entry and entry["step"] == step for entry in log
        ):
            self._attempt("the last evaluation", trainer.evaluate)
        samples = self._attempt("samples", self._samples) or []
        if self.comm.rank:
            return
        self._attempt(CARD, self._write_card)
        for prompt, answer in samples:
            _say(f"\n{prompt}\n--> {answer}\n")
        written = f", {self.out / REPORT}" if self.report(samples) else ""
        _say(f"\nwritten: {self.out} (from_pretrained reads it){written}\n")

    def _save(self) -> None:
        """Leave weights, or the adapters by themselves, in `out`. All ranks call."""
        if not self.config.merge:
            self.trainer.save_model(self.config.out)
            return
        from .merge import ADAPTER, write_merged

        adapter, config = self.out / ADAPTER, self.config
        self.trainer.save_model(str(adapter))
        base = downloaded(config.model).absolute()

        def merge() -> None:
            module = build(base, trust_remote_code=config.trust_remote_code, scores=config.scores)
            write_merged(module, base, adapter, self.out)
            self.tokenizer.save_pretrained(self.out)

        ranks = Ranks(self.trainer.model_wrapped, "save_model()")
        ranks.together(lambda: merge() if ranks.rank == 0 else None)

    def _write_card(self) -> None:
        from .report import card

        losses = [entry["eval_loss"] for entry in self.trainer.state.log_history
                  if "eval_loss" in entry]  # fmt: skip
        text = card(self.config, losses[-1] if losses else None, config=self.config.as_yaml())
        (self.out / CARD).write_text(text, encoding="utf-8")

    def report(self, samples: Sequence[tuple[str, str]] = ()) -> bool:
        """Write the report; returns whether it was written. A report that cannot be is told."""
        from .report import write_report

        def write() -> bool:
            write_report(
                self.out / REPORT, self.trainer.state.log_history,
                title=f"{self.config.model} on {self.config.data}", plan=self.plan,
                config=self.config.as_yaml(), samples=samples,
                planned_seconds=self.planned_seconds,
            )  # fmt: skip
            return True

        return self._attempt(REPORT, write) or False

    def _attempt(self, what: str, work: Callable[[], T]) -> T | None:
        """Result of what the trained model does not need; None if it fails, which is told."""
        try:
            return work()
        except Exception as error:
            if self.comm.rank == 0:
                said = f"{type(error).__name__}: {error}".replace("\n", " ")
                log.warning("no %s: %s. The trained model is not affected", what, said)
            return None

    @torch.no_grad()
    def _samples(self) -> list[tuple[str, str]]:
        """Prompts from the held-out rows, and the model's continuations. All ranks call, with
        equal prompts."""
        if self.config.scores:  # which scores, and continues nothing
            return []
        model = self.trainer.model_wrapped.eval()
        found = []
        for ids in self.data.prompts(self.tokenizer, self.config.samples):
            tokens = self.config.sample_tokens
            if self.positions is not None:  # the end of a prompt, and room to go on
                ids = ids[-max(self.positions // 2, self.positions - tokens) :]
                tokens = min(tokens, self.positions - len(ids))
            given = torch.tensor([ids], device=self.trainer.args.device)
            out = model.generate(
                input_ids=given, attention_mask=torch.ones_like(given), do_sample=False,
                max_new_tokens=tokens,
            )[0]  # fmt: skip
            answer = self.tokenizer.decode(out[len(ids) :])
            found.append((self.tokenizer.decode(ids), visible(answer)))
        return found


def prepare(config: TrainConfig) -> Job:
    """Plan a run, print the plan, and load what it needs. All ranks call.

    Raises ValueError for a refused run; if it does not fit, with the cheapest change.
    """
    from .inputs import (
        check_fit,
        check_inputs,
        check_packing,
        model_and_tokenizer,
        read_tokenizer,
    )

    world_size = _world_size()
    config.batch_of_rank(world_size)
    check_inputs(config)  # before trl, which takes seconds to import
    _status("importing trl")
    from .data import load
    from .merge import check_merge
    from .plan import hardware, training_of
    from .trainer import arguments, last_checkpoint, make_trainer, reward_of

    reward = {} if config.reward is None else {"reward_funcs": reward_of(config.reward)}
    out = Path(config.out)
    resumed_from = last_checkpoint(out)
    if resumed_from is not None:
        check_same_run(config, out)
    on_cpu = not torch.cuda.is_available()
    args = arguments(config, world_size, on_cpu=on_cpu)  # ranks are connected from here on
    comm = everyone(None, None)
    # a path and no text: what a config says of a model is a folder or an id, and no module
    _status(f"reading {config.model}")
    what, place = model_and_tokenizer(config)
    for folder in dict.fromkeys((what, place)):
        _check_folder(folder, warns=config.trust_remote_code and comm.rank == 0)
    tokenizer = read_tokenizer(config, place)
    positions, said = check_fit(config, what, tokenizer)
    if config.packing:
        check_packing(build(what, trust_remote_code=config.trust_remote_code))
    if config.merge:
        empty = build(what, trust_remote_code=config.trust_remote_code, scores=config.scores)
        check_merge(empty, adapters_of(empty, config.lora, config.targets))
    _status(f"reading {config.data}")
    with args.main_process_first():  # which leaves its rows to the others
        data = load(config, tokenizer)
    # of a text nothing is lost; of the rest what --seq cuts without --packing
    if config.packing:
        args.packing_strategy = "bfd_split" if data.form.kind == "text" else "bfd"
    if comm.rank == 0:
        sys.stdout.writelines(f"{line}\n" for line in (*said, *data.said))
    _status("measuring this machine" + (f" and {config.nvme}" if config.nvme else ""))
    machine = hardware(config, comm, torch.device(args.device))
    _status("tracing the model, and planning")
    planned = plan_for(what, machine, training_of(config, comm.world_size))
    if not planned.fits:
        raise ValueError(f"it does not fit: {planned.why}; cheapest change: {planned.change}")
    plan = "\n".join(five_lines(config.model, planned))
    if comm.rank == 0:
        going_on = "" if resumed_from is None else f"goes on from {resumed_from}\n"
        sys.stdout.write(f"{plan}\n{going_on}")
        sys.stdout.flush()
        out.mkdir(parents=True, exist_ok=True)
        (out / CONFIG).write_text(config.as_yaml(), encoding="utf-8")
    options = _options(planned.asked)
    _status("making weights" if config.from_scratch else "loading weights")
    if isinstance(what, str) or config.from_scratch:
        model = _new_model(what, config, options)
    else:
        model = _loaded_model(what, config, options)
    trainer = make_trainer(
        config, model, args, train_dataset=data.train, eval_dataset=data.held_out,
        processing_class=tokenizer, **reward,
        adam={"nvme_write_budget": config.nvme_write_budget} if config.nvme_write_budget else None,
    )  # fmt: skip
    job = Job(
        config, trainer, data, tokenizer, plan, planned.seconds, resumed_from, comm, positions
    )
    if comm.rank == 0:
        trainer.add_callback(_reports(job))
    if config.receipts:
        from .receipts import Following

        trainer.add_callback(Following(trainer, config, out))
    return job


def _check_folder(what: str | Path, *, warns: bool) -> None:
    """Raise FormatError for a folder with anything that may not be opened."""
    if isinstance(what, str):  # a name
        return
    check_readable(what)
    if warns:
        log.warning("--trust-remote-code: code in %s runs with your rights; read it first", what)


def check_same_run(config: TrainConfig, out: Path) -> None:
    """Raise ValueError if `out` has checkpoints of another run."""
    before = read_config(out / CONFIG)
    changed = config.changed_from(before, OF_THE_MACHINE)
    if changed:
        listed = ", ".join(f"{n} was {getattr(before, n)}" for n in changed)
        raise ValueError(
            f"{out} has checkpoints of another run: {listed}; expected the same, or another --out"
        )


def _loaded_model(folder: Path, config: TrainConfig, options: dict[str, Any]) -> GeminiDDP:
    """Wrapped model with weights and adapters, which is never whole in memory. All ranks call."""
    trusts, scores = config.trust_remote_code, config.scores
    adapters, empty = None, None
    if config.lora or scores:
        empty = build(folder, trust_remote_code=trusts, scores=scores)
    if config.lora:
        assert empty is not None
        adapters = adapters_of(empty, config.lora, config.targets)
        adapters.lora_alpha = config.lora_alpha or adapters.lora_alpha
        adapters.lora_dropout = config.lora_dropout
    if scores:  # its head is new unless the folder has one
        assert empty is not None
        options = options | {
            "model_class": type(empty),
            "config": empty.config,
            "init_missing": True,
        }
    torch.manual_seed(config.seed)  # the same adapters and head on all ranks
    model = load_pretrained(
        folder, quantize=config.quantize, lora=adapters, precision=PRECISION,
        force_outputs_fp32=True, trust_remote_code=trusts, **options,
    )  # fmt: skip
    if adapters is not None:  # the name that others know the base by: no folder of a cache
        is_here = Path(config.model).expanduser().exists()
        adapters.base_model_name_or_path = str(folder) if is_here else config.model
    return model


def _new_model(what: str | Path, config: TrainConfig, options: dict[str, Any]) -> GeminiDDP:
    """Wrapped model with new weights, which is never whole in memory. All ranks call."""
    with init_empty():
        module = maker(what, trust_remote_code=config.trust_remote_code, scores=config.scores)()
    module.tie_weights()
    torch.manual_seed(config.seed)  # the same weights on all ranks
    return GeminiDDP(module, precision=PRECISION, force_outputs_fp32=True, **options)


def _options(asked: Question) -> dict[str, Any]:
    """Options with which a module is wrapped to be placed as it was planned."""
    return {
        "placement_policy": asked.policy, "trace": asked.trace, "update": asked.update,
        "canonical": asked.canonical,
    }  # fmt: skip


def _status(phase: str) -> None:
    """Say on rank 0 what takes time before training."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{phase} ...\n")
        sys.stderr.flush()


def visible(text: str) -> str:
    """Text without the blank lines at its end, of which a young model writes many; the first of
    them, escaped, if there is nothing else."""
    return text.rstrip() or repr(text[:_BLANKS])


def printable(text: str) -> str:
    """Text that the screen takes: what its encoding lacks is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _say(text: str) -> None:
    """Write to stdout if somebody reads it."""
    with suppress(OSError):
        sys.stdout.write(printable(text))
        sys.stdout.flush()


def _world_size() -> int:
    """World size by torchrun's variable: Trainer needs a rank's batch before ranks connect."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _reports(job: Job) -> Any:
    """Callback that writes a report with every checkpoint, so that a killed run has one too."""
    from transformers import TrainerCallback

    from .trainer import append, metrics_file

    class Reports(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            file = metrics_file(args)
            file.unlink(missing_ok=True)  # of steps behind the checkpoint that it goes on from
            append(file, state.log_history)

        def on_save(self, *_: Any, **__: Any) -> None:
            job.report()

    return Reports()
