"""Schema of a run: its fields are flags of `train` and of `plan`, and keys of a YAML file."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gemini.arguments import Parser, by_name
from gemini.placement.orders import BATCHES, LAYERS, ORDERS
from gemini.placement.policy import ACTIVATIONS, AUTO
from gemini.placement.timetable.updates import ASKED, RETIRED, TAIL
from gemini.plan.training import KINDS as QUANTISED
from gemini.plan.words import OPTIMIZERS
from gemini.settings import Settings, flag, setting

# fields that may change when a run goes on: where and how it computes, not what
OF_THE_MACHINE = (
    "out", "device_mem", "host_mem", "nvme", "nvme_write_budget", "checkpointing",
    "activations", "update", "accumulate_order",
    "save_every", "keep", "log_every", "samples", "sample_tokens", "report_to", "trust_remote_code",
    "reward", "merge", "receipts",
)  # fmt: skip

PADDED_PARTS = 8  # sequences are padded to so many lengths, each of which is planned once
ANSWERS = "answers"
METHODS = ("sft", "dpo", "reward", "grpo")
SCHEDULES = (  # of Trainer's, those that need nothing more
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt", "reduce_lr_on_plateau",
)  # fmt: skip
# names of Trainer's, trl's and other tools' configs -> ours
ELSEWHERE = {
    "model_name_or_path": "model", "base_model": "model", "model_id": "model",
    "tokenizer_name": "tokenizer", "tokenizer_name_or_path": "tokenizer",
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

TRUST_HELP = (
    "run the Python code that the model's folder brings, with your rights: read it first. Without "
    "this flag none of it runs"
)
_data, _memory, _weights, _step, _log = (
    partial(setting, group=group)
    for group in ("model and data", "memory", "what is trained", "steps", "checkpoints and log")
)


@by_name
@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """Config of one run: its fields are the flags, and the keys of a YAML file.

    Raises ValueError for a value outside its range.
    """

    model: str = _data("", "a folder that from_pretrained reads, or an id on the hub")
    data: str = _data(
        "",
        "JSONL, CSV or Parquet, a file or a glob; org/name:split on the hub; several with commas",
    )
    tokenizer: str | None = _data(None, "a folder or an id, in place of the tokenizer of --model")
    weights: str | None = _data(None, "3,1: shares of the sources of --data in each batch")
    stream: bool = _data(False, "--data is read while it trains, for --steps")
    loss: str = _data(
        ANSWERS, "answers: of chats and completions; all: prompts as well", one_of=(ANSWERS, "all")
    )
    from_scratch: bool = _weights(
        False,
        "new weights for the config of --model, for pretraining; with --tokenizer --model may also "
        "be a name of plan's",
    )
    method: str = _weights(
        "sft",
        "sft, dpo (pairs, with --lora), reward (pairs, for a model that scores) or grpo (prompts "
        "and a --reward)",
        one_of=METHODS,
    )
    beta: float | None = _weights(None, "weight of the reference in dpo and grpo; by default trl's")
    reward: str | None = _weights(
        None, "FILE.py:FUNCTION of grpo, which is run. No key of config.yaml", is_typed=True
    )
    completions: int = _weights(8, "of each prompt in grpo, half of --seq long at most", least=1)
    out: str = _data("", "a folder: checkpoints, report.html, and at the end the model")
    device_mem: str | None = _memory(
        None, "what the run may take of each device; by default most of what is left", is_size=True
    )
    host_mem: str | None = _memory(
        None,
        "the same of each node's RAM, where the system and each process take some, too",
        is_size=True,
    )
    nvme: str | None = _memory(
        None, "a folder on a fast disk, for plan also its size; without one nothing goes to files"
    )
    nvme_write_budget: str | None = _memory(
        None, "what steps may write there in all; one that would pass it is not taken", is_size=True
    )
    lora: int = _weights(
        0, "rank of LoRA adapters on all linear layers; 0 trains the whole model", least=0
    )
    lora_alpha: float | None = _weights(None, "scale of the adapters; by default twice their rank")
    lora_dropout: float = _weights(
        0.0, "share of the adapters' inputs that is dropped", least=0, below=1
    )
    lora_targets: str | None = _weights(None, "q_proj,v_proj: layers by the ends of their names")
    merge: bool = _weights(
        False, "adapters are added to the base at the end, whole weights are written"
    )
    quantize: str | None = _weights(
        None, "nf4 or int8, of the frozen weights under LoRA", one_of=QUANTISED
    )
    optim: str = _weights(
        "adamw_torch",
        "adamw_torch, sgd, lion_32bit ..., as Trainer's optim",
        one_of=tuple(OPTIMIZERS),
    )
    update: str = _memory(
        TAIL,
        "when blocks are updated, as GeminiDDP's; auto, of earlier versions, is tail",
        one_of=(*ASKED, *RETIRED),
    )
    seq: int = _step(2048, "most tokens of a sequence; longer ones are cut, or packed", least=1)
    batch: int = _step(8, "sequences of a forward, on all ranks together", least=1)
    accumulate: int = _step(1, "forwards and backwards before a step", least=1)
    accumulate_order: str = _memory(
        BATCHES,
        "layers: those of --accumulate run through a layer before the next, so weights are read "
        "twice a step and hidden states stay; batches: one by one, with the same bits",
        one_of=ORDERS,
    )
    canonical: bool = _step(
        False,
        "gradients are summed in one order: as many sequences a step, as many in a forward of a "
        "rank, have the same bits on 1, 2, 4 ... ranks",
    )
    packing: bool = _step(False, "several rows share a sequence, and do not see each other")
    checkpointing: bool = _memory(True, "activations are computed again in backward, not kept")
    activations: str = _memory(
        AUTO,
        "spill: the oldest go to RAM and --nvme; auto: or are computed again",
        one_of=ACTIVATIONS,
    )
    epochs: float = _step(1.0, "passes over the data", above=0)
    steps: int = _step(0, "optimizer steps, in place of --epochs", least=0)
    lr: float = _step(2e-5, "learning rate", above=0)
    schedule: str = _step(
        "cosine", "of the learning rate, as Trainer's lr_scheduler_type", one_of=SCHEDULES
    )
    warmup: int = _step(0, "steps in which the learning rate rises", least=0)
    weight_decay: float = _step(0.0, "decoupled", least=0)
    max_norm: float = _step(1.0, "gradients are clipped to it; 0 does not", least=0)
    seed: int = _data(0, "of the order of the data, of the split and of new weights", least=0)
    eval_data: str | None = _data(None, "held-out data, in place of --held-out")
    held_out: float = _data(
        0.02, "share of --data that is held out; 0 evaluates nothing", least=0, below=1
    )
    save_every: int = _log(200, "steps between checkpoints, with an evaluation", least=1)
    keep: int = _log(2, "checkpoints that stay", least=1)
    log_every: int = _log(10, "steps between lines of the log and points of the report", least=1)
    samples: int = _log(3, "prompts of the held-out data that are continued at the end", least=0)
    sample_tokens: int = _log(64, "most tokens of a continuation", least=1)
    receipts: bool = _log(
        False, "each step leaves digests in receipts.jsonl, for python -m gemini audit"
    )
    report_to: str = _log("none", "tensorboard, wandb, ... as Trainer's report_to")
    trust_remote_code: bool = _data(False, f"{TRUST_HELP}. No key of config.yaml", is_typed=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantize is not None and not self.lora:
            raise ValueError(f"--quantize {self.quantize}; expected --lora with it, for adapters")
        if self.merge and not self.lora:
            raise ValueError("--merge; expected --lora with it: nothing else is added to a base")
        if self.nvme_write_budget is not None and self.nvme is None:
            raise ValueError("--nvme-write-budget; expected --nvme with it, a folder")
        if self.method == "dpo" and not self.lora:  # whose reference is the base, adapters off
            raise ValueError("--method dpo; expected --lora with it: the reference is the base")
        if self.from_scratch and self.lora:
            raise ValueError(
                f"--lora {self.lora}; expected 0 with --from-scratch: nothing is frozen"
            )
        if self.packing and self.method != "sft":
            raise ValueError(f"--packing with --method {self.method}; expected --method sft")
        if self.accumulate_order != BATCHES and self.method in ("dpo", "grpo"):
            raise ValueError(
                f"--accumulate-order {self.accumulate_order} with --method {self.method}; expected "
                "batches: a micro-batch runs more than one forward"
            )
        if self.canonical and (self.by_layers or self.method == "grpo"):
            raise ValueError(
                "--canonical with --accumulate-order layers or --method grpo; expected batches, "
                "and another method"
            )
        if self.stream and not self.steps:
            raise ValueError("--stream; expected --steps with it: a stream has no end")

    @property
    def targets(self) -> tuple[str, ...] | None:
        """Ends of the names of adapted layers; None: all linear ones."""
        given = self.lora_targets
        return None if given is None else tuple(one.strip() for one in given.split(","))

    @property
    def scores(self) -> bool:
        """Whether the model gives a sequence one score."""
        return self.method == "reward"

    @property
    def by_layers(self) -> bool:
        """Whether micro-batches run layer by layer, each layer's forward twice."""
        return self.accumulate > 1 and self.accumulate_order == LAYERS

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """Lengths that batches are padded to, rising to `seq`: so many shapes are planned, and no
        batch is longer than what the plan has traced."""
        if self.packing:
            return (self.seq,)
        parts = min(PADDED_PARTS, self.seq)
        return tuple(-(-self.seq * part // parts) for part in range(1, parts + 1))

    def batch_of_rank(self, world_size: int) -> int:
        """Sequences of one rank's forward. Raises ValueError if ranks do not divide the batch."""
        if self.batch % world_size:
            raise ValueError(
                f"--batch {self.batch} on {world_size} ranks; expected a multiple of them"
            )
        return self.batch // world_size


PARSER = Parser(
    prog="python -m gemini train",
    usage="%(prog)s [MODEL|config.yaml] [flags]", other_names=ELSEWHERE,
    description="Fine-tunes a model within the memory that is given; goes on where it was stopped.",
    epilog="""examples:
  python -m gemini train Qwen/Qwen2.5-0.5B --data chat.jsonl --out runs/1 --lora 16
  python -m gemini train config.yaml --lr 1e-4         flags win over the file
  python -m gemini plan config.yaml                    does it fit, and how fast
  python -m gemini run --nproc_per_node 2 -m gemini train config.yaml

exit status: 0 trained, 1 failed on the way, 2 refused before any work, 130 stopped by Ctrl-C""",
)  # fmt: skip
TrainConfig.add_to(PARSER)


def parse(arguments: Sequence[str]) -> tuple[TrainConfig, bool]:
    """Parse flags and a YAML file; returns the config, and whether to print it and end.

    Raises ValueError for wrong values in the file. Ends the process for wrong flags.
    """
    config, typed, _ = TrainConfig.parse(PARSER, arguments)
    return config, "print_config" in typed


def quiet() -> None:
    """Leave out what other packages say of themselves when they are imported: of kernels that they
    lack here, say, which look like errors of the command."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|trl|peft")
    for name in ("torchao", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def check(config: TrainConfig) -> None:
    """Raise ValueError for a missing model, data, output folder or reward."""
    for name in ("model", "data", "out"):
        if not getattr(config, name):
            raise ValueError(f"no {flag(name)}; expected it as a flag, or as a key in the YAML")
    if config.method == "grpo" and config.reward is None:
        raise ValueError("--method grpo; expected --reward FILE.py:FUNCTION with it")


def read_config(path: Path) -> TrainConfig:
    """Read a file of `as_yaml`. Raises ValueError."""
    return TrainConfig(**TrainConfig.from_yaml(path, ELSEWHERE))
