"""What a user gave to a run, checked before any work: paths, names, and what fits together."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gemini import nvme, strangers
from gemini.checkpoint.pretrained import check_id, downloaded
from gemini.plan.models import MODELS, build, is_trained_by_trl, known_name

from .config import TrainConfig
from .sources import sources_of, weights_of

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers
_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta")


def check_inputs(config: TrainConfig) -> None:
    """Raise ValueError for a model, data or folders that are none, and for an unknown report."""
    model, out = Path(config.model).expanduser(), Path(config.out).expanduser()
    for name in ("model", "tokenizer"):
        given = getattr(config, name)
        path = Path(given or ".").expanduser()
        if not path.exists():
            check_id(given)
        elif not path.is_dir():
            raise ValueError(
                f"--{name} {given} is a file; expected a folder that from_pretrained reads, or an "
                "id on the hub"
            )
    if model.is_dir() and not (model / "config.json").is_file():
        raise ValueError(f"--model {config.model} has no config.json; expected one beside weights")
    weights_of(config.weights, sources_of(config.data, "--data"))
    if config.eval_data is not None:
        sources_of(config.eval_data, "--eval-data")
    blocked = next((one for one in (out, *out.parents) if one.exists()), None)
    if blocked is not None and not blocked.is_dir():
        raise ValueError(
            f"--out {config.out}: {blocked} is a file; expected a folder, or a new one"
        )
    if config.nvme is not None:
        nvme.check_folder(config.nvme)
    _check_reports(config.report_to)


def _check_reports(names: str) -> None:
    """Make the callbacks of --report-to once: those of packages that are missing say so."""
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    try:
        known = [] if names in ("none", "all") else [names]
        for made in get_reporting_integration_callbacks(known):
            made()
    except (ImportError, RuntimeError, ValueError) as error:
        raise ValueError(f"--report-to {names}: {error}; expected none, or what is here") from None


def model_and_tokenizer(config: TrainConfig) -> tuple[str | Path, Path]:
    """What the model is made of, a folder or a name of plan's, and the folder of its tokenizer.

    An id on the hub is downloaded; of a model that is trained from scratch all but the weights.
    Raises ValueError for an id that the hub does not give, with what needs no network.
    """
    name = config.model.lower()
    is_name = name in MODELS and not Path(config.model).expanduser().exists()
    if is_name and config.from_scratch and config.tokenizer is not None:
        if not is_trained_by_trl(name):
            raise ValueError(f"--model {name} is no causal language model; expected one")
        return name, downloaded(config.tokenizer, weights=False).absolute()
    try:
        folder = downloaded(config.model, weights=not config.from_scratch).absolute()
    except ValueError as error:
        known = name if is_name else known_name(config.model)
        also = ""
        if known is not None and config.from_scratch:
            also = f"; or --model {known} --tokenizer FOLDER, which needs no network"
        elif is_name:
            also = f"; as a name of plan's {config.model} has sizes, and no weights"
        raise ValueError(f"{error}{also}") from error
    if config.tokenizer is None:
        return folder, folder
    return folder, downloaded(config.tokenizer, weights=False).absolute()


def read_tokenizer(config: TrainConfig, folder: Path) -> Any:
    """Tokenizer in a folder. Raises ValueError if transformers reads none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # a folder is anybody's, and fails in any way
        given, how = f"--model {config.model}", "one beside the weights, or --tokenizer FOLDER"
        if config.tokenizer is not None:
            given, how = f"--tokenizer {config.tokenizer}", "a folder of save_pretrained"
        raise ValueError(
            f"{given} has no tokenizer that transformers reads ({strangers.said(error)}); "
            f"expected {how}"
        ) from None


def check_fit(
    config: TrainConfig, what: str | Path, tokenizer: Any
) -> tuple[int | None, list[str]]:
    """Raise ValueError where --seq or the tokenizer does not fit the model.

    Returns the positions that the model has a table of, and what else is worth saying. Positions of
    a rotary embedding go on behind the last that was trained; a table ends: there None is no limit.
    """
    settings = _settings(what)
    rows = getattr(settings, "vocab_size", None)
    tokens = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
    if isinstance(rows, int) and tokens > rows:
        whose = f"the tokenizer of --model {config.model}"
        if config.tokenizer is not None:
            whose = f"--tokenizer {config.tokenizer} for --model {config.model}"
        how = f"model.resize_token_embeddings({tokens}), save_pretrained, and train that"
        if config.from_scratch:
            how = f"a config.json with a vocab_size of {tokens}, or another --tokenizer"
        raise ValueError(
            f"{whose} has {tokens} tokens, and its embedding {rows} rows; expected no more tokens "
            f"than rows: {how}"
        )
    most = getattr(settings, "max_position_embeddings", None)
    is_rotary = any(getattr(settings, name, None) for name in _ROTARY)
    if not isinstance(most, int) or most <= 0:
        return None, []
    if config.seq > most and not is_rotary:
        raise ValueError(
            f"--seq {config.seq} is more than the {most} positions of the model; expected --seq "
            f"{most} or less"
        )
    if not is_rotary:
        return most, []
    goes_on = (
        f"--seq {config.seq} is more than the {most} positions of the model: its rotary embedding "
        "goes on behind them, where it was not trained"
    )
    return None, [goes_on] if config.seq > most else []


class _EndAtMask(TorchFunctionMode):
    """Ends a forward where transformers looks in positions for where documents end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.diff:
            self.is_reached = True
            raise StopIteration
        return func(*args, **(kwargs or {}))


def check_packing(model: nn.Module) -> None:
    """Raise ValueError for a model in which packed documents would see each other.

    Documents are apart by their positions, of which transformers makes the mask of attention; a
    convolution or a recurrence along the sequence has none.

    model: on the meta device, and of no other use.
    """
    settings: Any = model.config
    settings.pad_token_id = None  # of which it would look for values in tokens without a mask
    kinds = set(getattr(settings.get_text_config(), "layer_types", None) or ()) - _ATTENTION
    convolves = any(isinstance(module, nn.Conv1d) for module in model.modules())
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    mask = _EndAtMask()
    with suppress(Exception), mask:  # it may take no positions, or do something else with them
        model(input_ids=ids, position_ids=ids, use_cache=False)
    if kinds or convolves or not mask.is_reached:
        raise ValueError(
            f"--packing with {type(model).__name__}: documents in one sequence would see each "
            "other, as not all of its layers are attention with a mask of positions; expected no "
            "--packing"
        )


def _settings(what: str | Path) -> Any:
    """Configuration of the language model in a folder, or of a name of plan's; None if its type is
    not known here."""
    from transformers import AutoConfig

    if isinstance(what, str):
        named: Any = build(what)
        return named.config
    try:
        fields = strangers.read_json(what / "config.json")
        return AutoConfig.for_model(**fields).get_text_config()
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # the plan says what is wrong with it
