"""Command `python -m gemini from-deepspeed`: a JSON file of DeepSpeed's as Python, or as YAML.

Pure. What is said of keys that become no argument is in deepspeed.toml.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gemini.arguments import Parser, did_you_mean

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NOTHING = "nothing: the plan sizes and orders what moves"
# class of theirs -> ours, its options that have the same names, and `optim` of a YAML file
ADAM = ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad")
OPTIMIZERS = {
    "adam": ("HybridAdam", ADAM, "adamw_torch"),
    "adamw": ("HybridAdam", ADAM, "adamw_torch"),
    "lamb": ("HybridLamb", ("lr", "betas", "eps", "weight_decay", "bias_correction"), None),
    "lion": ("HybridLion", ("lr", "betas", "weight_decay"), "lion_32bit"),
    "sgd": ("HybridSGD", ("lr", "momentum", "weight_decay", "dampening", "nesterov"), "sgd"),
    "adagrad": ("HybridAdagrad", ("lr", "eps", "weight_decay", "lr_decay"), "adagrad"),
    "muon": ("HybridMuon", ("lr", "momentum", "weight_decay"), None),
}
ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
SCHEDULES = {
    "WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine",
}  # fmt: skip
SCALE = {
    "initial_scale_power": "initial_scale", "loss_scale_window": "growth_interval",
    "hysteresis": "hysteresis", "min_loss_scale": "min_scale",
}  # fmt: skip
DTYPES = {"bfp16": "bf16", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
SECTIONS = ("zero_optimization", "bf16", "bfloat16", "fp16", "optimizer")


class Converted:
    """One file: arguments of `GeminiDDP` and of an optimizer, keys of a YAML file, and what is said
    of the rest.

    Raises ValueError for what is no such file.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.model: dict[str, Any] = {}
        self.optimizer = "HybridAdam"
        self.options: dict[str, Any] = {}
        self.yaml: dict[str, Any] = {}
        self.notes: list[tuple[str, str]] = []
        self._config = config
        self._zero(self._section("zero_optimization"))
        self._precision()
        self._optimizer(self._section("optimizer"))
        self._rest()

    def _section(self, name: str) -> Mapping[str, Any]:
        found = self._config.get(name, {})
        if not isinstance(found, Mapping):
            raise ValueError(f"{name} is {found!r}; expected an object")
        return found

    def _value(self, where: str, name: str, value: Any) -> Any:
        """A value, or what Trainer puts in place of "auto"."""
        if value != "auto":
            return value
        field, usual = TABLE["auto"].get(name, (None, None))
        said = f"Trainer takes TrainingArguments.{field}, {usual} unless given"
        self.notes.append((where, said if field else "Trainer chooses it; nothing here"))
        return tuple(usual) if isinstance(usual, list) else usual

    def _zero(self, zero: Mapping[str, Any]) -> None:
        stage = self._value("zero_optimization.stage", "stage", zero.get("stage", 0))
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_optimization.stage is {stage!r}; expected 0, 1, 2 or 3")
        if stage == 0:
            self.notes.append(("zero_optimization.stage", "state is sharded; results are the same"))
        self.model["placement_policy"] = f"zero{max(stage, 1)}"
        homes = {part: zero.get(part) or {} for part in ("offload_optimizer", "offload_param")}
        fractions: dict[str, float] = {}
        for part, home in homes.items():
            device, path = home.get("device", "none"), home.get("nvme_path")
            name = "offload_optim_frac" if part == "offload_optimizer" else "offload_param_frac"
            if device == "cpu":
                fractions[name] = float(home.get("ratio", 1.0))
            elif device == "nvme" and part == "offload_optimizer":
                self.options["nvme_offload_fraction"] = float(home.get("ratio", 1.0))
                self.options["nvme_offload_dir"] = str(path or "/fast/disk")
            elif device not in ("nvme", "none", None):
                where = f"zero_optimization.{part}.device"
                raise ValueError(f"{where} is {device!r}; expected cpu, nvme or none")
            if device == "nvme":
                self.yaml["nvme"] = str(path or "/fast/disk")
            self._said(f"zero_optimization.{part}", home, ("device", "nvme_path", "ratio"))
        if homes["offload_param"].get("device") == "nvme":
            self.model["placement_policy"] = _Code(f"AutoPlacement(nvme_dir={self.yaml['nvme']!r})")
            self.notes.append(
                ("zero_optimization.offload_param", "give device_budget= and host_budget= too")
            )
        elif fractions:
            shards = {"shard_param_frac": float(stage == 3), "shard_grads": stage > 1}
            if "offload_optim_frac" in fractions:
                shards["offload_grads"] = True
            self.model["placement_policy"] = _Code(
                f"StaticPlacement({_arguments({**shards, **fractions})})"
            )
        self._said("zero_optimization", zero, ("stage", *homes), TABLE["said_of_zero"])

    def _said(
        self,
        where: str,
        section: Mapping[str, Any],
        taken: Sequence[str],
        said: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Say what becomes of the other keys of a section."""
        for name in (name for name in section if name not in taken):
            known = [*taken, *said, *TABLE["plan"]]
            unknown = f"no key of DeepSpeed's that is known here; {did_you_mean(name, known)}"
            plan = NOTHING if name in TABLE["plan"] else unknown
            self.notes.append((f"{where}.{name}".lstrip("."), said.get(name, plan)))

    def _precision(self) -> None:
        self.model["precision"] = "fp32"
        for name, ours in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
            given = self._section(name)
            if self._value(f"{name}.enabled", "enabled", given.get("enabled", False)):
                self.model["precision"] = ours
        half = self._section("fp16")
        if self.model["precision"] == "fp16":
            scale = half.get("loss_scale", 0)
            options = {
                SCALE[name]: half[name] for name in SCALE if half.get(name, "auto") != "auto"
            }
            if "initial_scale" in options:
                options["initial_scale"] = _Code(f"2.0**{options['initial_scale']}")
            if scale not in (0, "auto"):
                self.model["loss_scale"] = float(scale)
            elif options:
                self.model["loss_scale"] = _Code(f"LossScale({_arguments(options)})")
        cast = {"auto_cast": "inputs are cast, unless cast_inputs=False"}
        self._said("fp16", half, ("enabled", "loss_scale", *SCALE), cast)
        norm = self._config.get("gradient_clipping", 0.0)
        norm = float(self._value("gradient_clipping", "gradient_clipping", norm))
        self.yaml["max_norm"] = norm
        if norm:
            self.model["max_norm"] = norm
        travels = self._config.get("communication_data_type")
        if travels is not None:
            if travels not in DTYPES:
                raise ValueError(
                    f"communication_data_type is {travels!r}; {did_you_mean(travels, list(DTYPES))}"
                )
            self.model["communication_dtype"] = DTYPES[travels]

    def _optimizer(self, given: Mapping[str, Any]) -> None:
        kind = str(given.get("type", "AdamW"))
        params = dict(given.get("params", {}))
        if not given:
            self.notes.append(("optimizer", "the file has none: write the options of yours"))
        if kind.lower() in ONE_BIT:
            self.notes.append(("optimizer.type", f"{kind} is not there; HybridAdam sends it all"))
        elif kind.lower() not in OPTIMIZERS:
            raise ValueError(
                f"optimizer.type is {kind!r}; {did_you_mean(kind, [*OPTIMIZERS, *ONE_BIT])}"
            )
        self.optimizer, names, optim = OPTIMIZERS.get(kind.lower(), OPTIMIZERS["adam"])
        for name in names:
            if name in params:
                value = self._value(f"optimizer.params.{name}", name, params.pop(name))
                self.options[name] = tuple(value) if isinstance(value, list) else value
        if kind.lower() == "adam" and params.get("adam_w_mode") is False:
            self.options["adamw_mode"] = False
            self.notes.append(("optimizer.params.adam_w_mode", "no `optim` of a YAML file has it"))
        self._said("optimizer.params", params, ("adam_w_mode", "torch_adam", *names))
        for name in ("lr", "weight_decay"):
            if name in self.options:
                self.yaml[name] = self.options[name]
        if optim is not None:
            self.yaml["optim"] = optim

    def _rest(self) -> None:
        accumulate = self._config.get("gradient_accumulation_steps", 1)
        if isinstance(accumulate, int):
            self.yaml["accumulate"] = accumulate
            if isinstance(batch := self._config.get("train_batch_size"), int):
                self.yaml["batch"] = batch // accumulate
        scheduler = self._section("scheduler")
        if scheduler.get("type") in SCHEDULES:
            self.yaml["schedule"] = SCHEDULES[scheduler["type"]]
            warmup = scheduler.get("params", {}).get("warmup_num_steps")
            if isinstance(warmup, int):
                self.yaml["warmup"] = warmup
        for name, value in self._config.items():
            if value == "auto" and name in TABLE["auto"]:
                self._value(name, name, value)
        rest = {name: 0 for name in self._config if name not in SECTIONS}
        self._said("", rest, ("gradient_clipping", "communication_data_type"), TABLE["said"])

    def as_python(self) -> str:
        """Two calls, and a comment for each key that is no argument."""
        used = f"{self.model} {self.optimizer}"
        classes = ("AutoPlacement", "GeminiDDP", "HybridAdam", "HybridLion", "HybridSGD",
                   "LossScale", "StaticPlacement")  # fmt: skip
        names = [n for n in classes if n in used or n == "GeminiDDP"]
        lines = [f"from gemini import {', '.join(names)}"]
        if self.optimizer not in classes:
            lines.append(f"from gemini.optim import {self.optimizer}")
        trained = "model" if self.optimizer == "HybridMuon" else "model.parameters()"
        lines += [
            "", f"model = GeminiDDP(model, {_arguments(self.model)})",
            f"optimizer = {self.optimizer}({', '.join([trained, *_each(self.options)])})",
        ]  # fmt: skip
        return "\n".join([*lines, *self._comments()]) + "\n"

    def as_yaml(self) -> str:
        """Keys of `python -m gemini train`'s file, whose model, data and out are yours."""
        head = "# python -m gemini train THIS --model ... --data ... --out ..."
        keys = [f"{name}: {_yaml(value)}" for name, value in sorted(self.yaml.items())]
        return "\n".join([head, *keys, *self._comments()]) + "\n"

    def _comments(self) -> list[str]:
        notes: dict[str, str] = {}
        for key, said in self.notes:
            before = notes.get(key, said)
            notes[key] = before if said in before else f"{before}; {said}"
        return ["", *(f"# {key}: {said}" for key, said in notes.items())] if notes else []


class _Code(str):
    """Python that stands for itself."""

    def __repr__(self) -> str:
        return str(self)


def _each(values: Mapping[str, Any]) -> Iterator[str]:
    return (f"{name}={value!r}" for name, value in values.items())


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(_each(values))


def _yaml(value: Any) -> str:
    """A number that YAML reads as one: 3e-05 is a text there, and 3.0e-05 none."""
    text = json.dumps(value)
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}.0e{exponent}" if e and "." not in text and text[0] != '"' else text


def main(arguments: Sequence[str]) -> int:
    """Print what a file is here."""
    parser = Parser(
        prog="python -m gemini from-deepspeed",
        description="A JSON file of DeepSpeed's as Python, with a comment for each key that has no "
        "argument here.",
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--yaml", action="store_true", help="for `python -m gemini train`")
    options = parser.parse_args(arguments)
    try:
        config = json.loads(options.file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"holds a {type(config).__name__}; expected an object")
        converted = Converted(config)
    except (OSError, ValueError) as error:
        parser.error(f"{options.file}: {error}")
    sys.stdout.write(converted.as_yaml() if options.yaml else converted.as_python())
    return 0
