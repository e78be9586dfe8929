"""Training of a model: all that is asked of it before there is a model or a machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gemini.placement.orders import BATCHES, LAYERS
from gemini.placement.policy import AUTO, KEEP, SPILL
from gemini.placement.timetable.updates import TAIL

KINDS = ("nf4", "int8")  # of a base under adapters
QUANTISED = ("adamw",)  # optimizers whose state may be kept in fewer bits
AVERAGES = {"host": "RAM", "nvme": "disk"}  # homes of `gemini.EMA`, in words
_GO = {
    KEEP: "",
    SPILL: ", the oldest below the device where it has no room",
    AUTO: ", or below the device, or computed again, as the plan says",
}


@dataclass(frozen=True, slots=True)
class Training:
    """Training of a model.

    batch, seq: sequences of a rank in one forward, and their tokens.
    accumulate: forwards and backwards before a step, in the order of `gemini.accumulate`.
    lora: rank of adapters; 0 trains the whole model. lora_targets: as `models.adapters_of`.
    quantize: of the base under adapters: one of `KINDS`; None leaves it in 16 bits.
    precision: of `ask.DTYPES`. optimizer: of `ask.LAYOUTS`. state: as `HybridAdam` takes it.
    nvme_fraction: of the optimizer's state, at least, on NVMe.
    activation_bytes: of one sample, where nothing can be traced.
    update: of `GeminiDDP`.
    by_trl: as `python -m gemini train` does it: with trl's loss, a frozen base in 16 bits.
    ema: home of an average of the weights, as `gemini.EMA` has it; None: there is none.
    trust_remote_code: whether the code of the model's own folder is run, which its config names.
    lengths: of inputs that differ in a run, `seq` the longest: a CPU compiles products for each.
    scores: whether a reward model is trained, with a head of one score.
    loaded: whether the module has its values before it is wrapped, as `from_pretrained` leaves it.
    keep_originals, canonical: of `GeminiDDP`.
    activations: where they go: of `AutoPlacement`.
    chunked: whether `chunk_loss` has changed the model: the logits of a few tokens exist at a time.
    """

    batch: int = 1
    seq: int = 1024
    lora: int = 0
    checkpointing: bool = False
    precision: str = "bf16"
    optimizer: str = "adamw"
    nvme_fraction: float = 0.0
    activation_bytes: int | None = None
    accumulate: int = 1
    update: str = TAIL
    by_trl: bool = False
    ema: str | None = None
    state: str = "fp32"
    quantize: str | None = None
    trust_remote_code: bool = False
    lengths: int = 1
    lora_targets: tuple[str, ...] | None = None
    scores: bool = False
    loaded: bool = False
    keep_originals: bool = False
    activations: str = KEEP
    chunked: bool = False
    accumulate_order: str = BATCHES
    canonical: bool = False

    def __post_init__(self) -> None:
        if self.quantize is not None and (self.quantize not in KINDS or not self.lora):
            raise ValueError(
                f"quantize={self.quantize!r} with lora={self.lora}; expected one of {KINDS}, of a "
                "base that is frozen under adapters: give their rank"
            )
        if self.state != "fp32" and self.optimizer not in QUANTISED:
            raise ValueError(
                f"state={self.state!r} with {self.optimizer}; expected fp32, or one of {QUANTISED}"
            )

    @property
    def by_layers(self) -> bool:
        """Whether micro-batches run layer by layer."""
        return self.accumulate > 1 and self.accumulate_order == LAYERS

    def in_words(self) -> tuple[str, str]:
        trained = f"LoRA of rank {self.lora}" if self.lora else "all parameters trained"
        trained += f" on a base in {self.quantize}" if self.quantize else ""
        kept = "computed again in backward" if self.checkpointing else "kept for backward"
        kept += _GO[self.activations]
        times = f", {self.accumulate} times a step" if self.accumulate > 1 else ""
        if self.by_layers:
            times += " layer by layer"
        how = "traced" if self.activation_bytes is None else "given"
        loss = "of a reward model" if self.scores else "with the loss of trl"
        how += ", with the loss of chunk_loss" if self.chunked else ""
        average = f", their average in {AVERAGES[self.ema]}" if self.ema else ""
        return (
            f"batch of a rank {self.batch}{times}, {self.seq} tokens, {self.precision}, "
            f"{self.optimizer} with {self.state} state, {trained}{average} (as asked)",
            f"activations: {kept} ({how}{f', {loss}' if self.by_trl else ''})",
        )
