"""Config of `python -m gemini train`: one schema for flags and YAML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from gemini.arguments import end, nearest
from gemini.integrations.config import read_yaml
from gemini.placement.timetable.updates import AUTO, UPDATES
from gemini.plan.command import TRUST_HELP
from gemini.plan.quantised import KINDS as QUANTISED
from gemini.units import parse_bytes

# fields that may change when a run goes on: where and how it computes, not what
OF_THE_MACHINE = (
    "out", "device_mem", "host_mem", "nvme", "checkpointing", "update", "save_every", "keep",
    "log_every", "samples", "sample_tokens", "report_to", "trust_remote_code", "reward",
)  # fmt: skip
# no key of a YAML file, which may be anybody's: only who types a command lets code run
OF_THE_COMMAND = ("trust_remote_code", "reward")

ANSWERS = "answers"
LOSSES = (ANSWERS, "all")
METHODS = ("sft", "dpo", "grpo")
_MOST = 1 << 32

# names of Trainer's, trl's and other tools' configs -> ours
ELSEWHERE = {
    "model_name_or_path": "model", "base_model": "model", "model_id": "model",
    "dataset": "data", "dataset_name": "data", "datasets": "data", "train_file": "data",
    "data_path": "data", "validation_file": "eval_data", "val_set_size": "held_out",
    "output_dir": "out", "learning_rate": "lr", "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule", "warmup_steps": "warmup", "optimizer": "optim",
    "max_length": "seq", "max_seq_length": "seq", "cutoff_len": "seq", "sequence_len": "seq",
    "per_device_train_batch_size": "batch", "micro_batch_size": "batch", "batch_size": "batch",
    "gradient_accumulation_steps": "accumulate", "num_train_epochs": "epochs",
    "num_epochs": "epochs", "max_steps": "steps", "max_grad_norm": "max_norm",
    "gradient_clipping": "max_norm", "gradient_checkpointing": "checkpointing",
    "save_steps": "save_every", "save_total_limit": "keep", "logging_steps": "log_every",
    "eval_steps": "save_every", "lora_r": "lora", "lora_rank": "lora", "r": "lora",
    "load_in_4bit": "quantize", "load_in_8bit": "quantize", "sample_packing": "packing",
    "lora_target_modules": "lora_targets", "target_modules": "lora_targets",
    "num_generations": "completions", "reward_funcs": "reward", "rl": "method",
    "streaming": "stream", "interleave_probs": "weights", "assistant_only_loss": "loss",
    "train_on_inputs": "loss", "completion_only_loss": "loss",
}  # fmt: skip


def _says(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """Config of one run: its fields are the flags, and the keys of a YAML file.

    Raises ValueError for a value outside its range.
    """

    model: str = _says("", "a folder that from_pretrained reads, or an id on the hub")
    data: str = _says(
        "",
        "JSONL, CSV or Parquet, a file or a glob; org/name:split on the hub; several with commas",
    )
    weights: str | None = _says(None, "3,1: shares of the sources of --data in each batch")
    stream: bool = _says(False, "--data is read while it trains, for --steps")
    loss: str = _says(ANSWERS, "answers: of chats and completions; all: prompts as well")
    from_scratch: bool = _says(False, "new weights for the config of --model, for pretraining")
    method: str = _says("sft", "sft, dpo (pairs, with --lora) or grpo (prompts and a --reward)")
    beta: float | None = _says(None, "weight of the reference in dpo and grpo; by default trl's")
    reward: str | None = _says(
        None, "FILE.py:FUNCTION of grpo, which is run. No key of config.yaml"
    )
    completions: int = _says(8, "of each prompt in grpo, half of --seq long at most")
    out: str = _says("", "a folder: checkpoints, report.html, and at the end the model")
    device_mem: str | None = _says(None, "22GiB, of each device; by default most of what is left")
    host_mem: str | None = _says(None, "48GiB, of each node; by default most of what is left")
    nvme: str | None = _says(None, "a folder on a fast disk; without one nothing goes to files")
    lora: int = _says(0, "rank of LoRA adapters on all linear layers; 0 trains the whole model")
    lora_alpha: float | None = _says(None, "scale of the adapters; by default twice their rank")
    lora_dropout: float = _says(0.0, "share of the adapters' inputs that is dropped")
    lora_targets: str | None = _says(None, "q_proj,v_proj: layers by the ends of their names")
    quantize: str | None = _says(None, "nf4 or int8, of the frozen weights under LoRA")
    optim: str = _says("adamw_torch", "adamw_torch, sgd, lion_32bit ..., as Trainer's optim")
    update: str = _says(
        AUTO, "when blocks are updated, as GeminiDDP's; auto is the fastest as planned"
    )
    seq: int = _says(2048, "most tokens of a sequence; longer ones are cut, or packed")
    batch: int = _says(8, "sequences of a forward, on all ranks together")
    accumulate: int = _says(1, "forwards and backwards before a step")
    packing: bool = _says(False, "several rows share a sequence, and do not see each other")
    checkpointing: bool = _says(True, "activations are computed again in backward, not kept")
    epochs: float = _says(1.0, "passes over the data")
    steps: int = _says(0, "optimizer steps, in place of --epochs")
    lr: float = _says(2e-5, "learning rate")
    schedule: str = _says("cosine", "of the learning rate, as Trainer's lr_scheduler_type")
    warmup: int = _says(0, "steps in which the learning rate rises")
    weight_decay: float = _says(0.0, "decoupled")
    max_norm: float = _says(1.0, "gradients are clipped to it; 0 does not")
    seed: int = _says(0, "of the order of the data, of the split and of new weights")
    eval_data: str | None = _says(None, "held-out data, in place of --held-out")
    held_out: float = _says(0.02, "share of --data that is held out; 0 evaluates nothing")
    save_every: int = _says(200, "steps between checkpoints, with an evaluation")
    keep: int = _says(2, "checkpoints that stay")
    log_every: int = _says(10, "steps between lines of the log and points of the report")
    samples: int = _says(3, "prompts of the held-out data that are continued at the end")
    sample_tokens: int = _says(64, "most tokens of a continuation")
    report_to: str = _says("none", "tensorboard, wandb, ... as Trainer's report_to")
    trust_remote_code: bool = _says(False, f"{TRUST_HELP}. No key of config.yaml")

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, float):
                _check(math.isfinite(value), name, value, "a finite number")
            elif isinstance(value, int):  # of a word: torch's seeds, and what is counted
                _check(value < _MOST, name, value, f"less than {_MOST}")
        _check(self.seed >= 0, "seed", self.seed, "0 or more")
        for name in ("lora", "steps", "warmup", "samples", "held_out", "max_norm", "weight_decay"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in (
            "seq", "batch", "accumulate", "save_every", "keep", "log_every", "sample_tokens",
            "completions",
        ):  # fmt: skip
            _check(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _check(self.held_out < 1, "held_out", self.held_out, "a share below 1")
        _check(self.epochs > 0, "epochs", self.epochs, "more than 0")
        _check(self.lr > 0, "lr", self.lr, "more than 0")
        _check(
            self.update in (*UPDATES, AUTO), "update", self.update, f"{AUTO}, {', '.join(UPDATES)}"
        )
        _check(self.loss in LOSSES, "loss", self.loss, " or ".join(LOSSES))
        _check(self.method in METHODS, "method", self.method, ", ".join(METHODS))
        if self.method == "dpo":  # whose reference is the base, with its adapters off
            _check(self.lora > 0, "method", "dpo", "--lora with it: the reference is the base")
        if self.from_scratch:
            _check(not self.lora, "lora", self.lora, "0 with --from-scratch: nothing is frozen")
        _check(self.method == "sft" or not self.packing, "packing", True, "--method sft with it")
        _check(0 <= self.lora_dropout < 1, "lora_dropout", self.lora_dropout, "a share below 1")
        if self.stream:
            _check(self.steps > 0, "steps", self.steps, "1 or more with --stream, which has no end")
        if self.quantize is not None:
            known = self.quantize in QUANTISED and self.lora > 0
            _check(known, "quantize", self.quantize, f"{' or '.join(QUANTISED)}, with --lora")
        for name in ("device_mem", "host_mem"):
            if getattr(self, name) is not None:
                parse_bytes(getattr(self, name))

    @property
    def targets(self) -> tuple[str, ...] | None:
        """Ends of the names of adapted layers; None: all linear ones."""
        given = self.lora_targets
        return None if given is None else tuple(one.strip() for one in given.split(","))

    def batch_of_rank(self, world_size: int) -> int:
        """Sequences of one rank's forward. Raises ValueError if ranks do not divide the batch."""
        if self.batch % world_size:
            raise ValueError(
                f"--batch {self.batch} on {world_size} ranks; expected a multiple of them"
            )
        return self.batch // world_size

    def changed_from(self, other: TrainConfig) -> list[str]:
        """Names of changed fields that make this another run than `other`."""
        mine, others = asdict(self), asdict(other)
        return [k for k in mine if k not in OF_THE_MACHINE and mine[k] != others[k]]


def _check(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"{_flag(name)} {value}; expected {expected}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parser() -> Any:
    """Parser of the command line, an `argparse.ArgumentParser`."""
    from transformers.hf_argparser import HfArgumentParser

    kind: Any = TrainConfig
    made: Any = HfArgumentParser(
        kind, prog="python -m gemini train", allow_abbrev=False,
        description="Fine-tunes a model within the memory that is given; goes on where it was "
        "killed. Ranks: python -m gemini run --nproc_per_node N -m gemini train ...",
    )  # fmt: skip
    made.error = partial(end, made, other_names=ELSEWHERE)
    made.add_argument("config", nargs="?", metavar="config.yaml", help="flags as keys; flags win")
    made.add_argument("--print-config", action="store_true", help="all of it as YAML, and end")
    return made


def parse(arguments: Sequence[str]) -> tuple[TrainConfig, bool]:
    """Parse flags and a YAML file; returns the config, and whether to print it and end.

    Raises ValueError for wrong values. Ends the process, as argparse does, for an unknown flag.
    """
    made = parser()
    file = made.parse_args(arguments).config
    given = [] if file is None else _as_flags(Path(file))
    config, rest = made.parse_args_into_dataclasses([*given, *arguments])
    return config, rest.print_config


def check(config: TrainConfig) -> None:
    """Raise ValueError for a missing model, data, output folder or reward."""
    for name in ("model", "data", "out"):
        if not getattr(config, name):
            raise ValueError(f"no {_flag(name)}; expected it as a flag, or as a key in the YAML")
    if config.method == "grpo":
        _check(config.reward is not None, "method", "grpo", "--reward FILE.py:FUNCTION with it")


def _as_flags(path: Path) -> list[str]:
    """Flags for the values of a YAML file, so that both are parsed alike. Raises ValueError."""
    return [f"{_flag(name)}={value}" for name, value in _read(path).items()]


def _read(path: Path) -> dict[str, Any]:
    """Read a YAML file. Raises ValueError for an unknown key, and for a list or dict."""
    found = read_yaml(path)
    names = [one.name for one in fields(TrainConfig) if one.name not in OF_THE_COMMAND]
    for name, value in found.items():
        if name in OF_THE_COMMAND:
            raise ValueError(
                f"{path} has the key {name}, and a file does not let code run; expected "
                f"{_flag(name)} on the command line"
            )
        if name not in names:
            near, here = nearest(name, names), ELSEWHERE.get(str(name))
            also = f"; did you mean {near}?" if near else f"; expected one of {', '.join(names)}"
            also = f"; {name} is {here} here" if here else also
            raise ValueError(f"{path} has the key {name!r}, which is no flag{also}")
        if isinstance(value, (dict, list)):
            raise ValueError(f"{path} has a {type(value).__name__} as {name}; expected one value")
    return {name: value for name, value in found.items() if value is not None}


def read_config(path: Path) -> TrainConfig:
    """Read a file that `as_yaml` wrote. Raises ValueError."""
    (config,) = parser().parse_args_into_dataclasses(_as_flags(path))[:1]
    assert isinstance(config, TrainConfig)
    return config


def as_yaml(config: TrainConfig) -> str:
    """YAML of all fields but those of the command line, which `read_config` reads."""
    import yaml

    said = {name: value for name, value in asdict(config).items() if name not in OF_THE_COMMAND}
    text: str = yaml.safe_dump(said, sort_keys=False)
    return text
