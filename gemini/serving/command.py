"""`python -m gemini generate`: prompts, continued by a model that need not fit in memory."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemini.arguments import Parser
from gemini.placement.sizes import BudgetError
from gemini.units import MAX_SEQUENCES, MAX_TOKENS

_GROUPS = ("device_budget", "host_budget", "nvme_dir", "max_tokens", "max_sequences")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model, its budgets and its bounds."""
    parser.add_argument("model", help="a folder that from_pretrained reads, or an id on the hub")
    parser.add_argument(
        "--device-mem", dest="device_budget", metavar="SIZE", help="by default most of what is left"
    )
    parser.add_argument("--host-mem", dest="host_budget", metavar="SIZE", help="the same of RAM")
    parser.add_argument(
        "--nvme", dest="nvme_dir", metavar="DIR", help="a folder for weights that fit in neither"
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=MAX_TOKENS, metavar="N",
        help="of all sequences at once, prompts and answers: the cache of keys and values has "
        "room for so many",
    )  # fmt: skip
    parser.add_argument(
        "--max-sequences",
        type=positive,
        default=MAX_SEQUENCES,
        metavar="N",
        help="that are decoded at once",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that the folder brings"
    )


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer of the options. Raises ValueError, BudgetError and FormatError."""
    import torch
    from transformers import AutoTokenizer

    from gemini.checkpoint.pretrained import check_readable, downloaded, load_pretrained
    from gemini.strangers import said

    path = downloaded(options.model)
    folder = path.parent if path.is_file() else path
    check_readable(folder)  # before transformers opens what it finds there by name
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=options.trust_remote_code, padding_side="left"
        )
    except Exception as error:  # a folder is anybody's, and fails in any way
        raise ValueError(
            f"{options.model} has no tokenizer: {said(error)}; expected one beside its weights"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(0)
    bounds = {name: getattr(options, name) for name in _GROUPS}
    model = load_pretrained(path, serve=True, trust_remote_code=options.trust_remote_code, **bounds)
    return model, tokenizer


def main(arguments: Sequence[str]) -> int:
    """Command `python -m gemini generate`."""
    parser = Parser(
        prog="python -m gemini generate",
        description="Continue prompts with a model that need not fit in memory: what the budgets\n"
        "have no room for is read for every token, once for all prompts.",
        epilog="exit status: 0 all prompts are continued, 1 the model does not fit, 2 wrong flags "
        "or a refused model",
    )
    add_model(parser)
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt in every line")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=64, metavar="N", help="of each answer"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token"
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON for each prompt")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # of any locale
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        prompts = _prompts(options)
        model, tokenizer = load(options)
        for start in range(0, len(prompts), options.max_sequences):
            some = prompts[start : start + options.max_sequences]
            for prompt, answer in zip(some, continued(model, tokenizer, some, options),
                                      strict=True):  # fmt: skip
                line = json.dumps({"prompt": prompt, "answer": answer})
                sys.stdout.write(f"{line if options.json else prompt + answer}\n")
    except BudgetError as error:
        sys.stderr.write(f"python -m gemini generate: {error}\n")
        return 1
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def continued(
    model: Any, tokenizer: Any, prompts: Sequence[str], options: argparse.Namespace
) -> list[str]:
    """Answers to prompts that are decoded in one pass a token. Raises ValueError for more tokens
    than the plan has room for."""
    import torch

    found, device = tokenizer(list(prompts), return_tensors="pt", padding=True), device_of(model)
    given = {name: found[name].to(device) for name in ("input_ids", "attention_mask")}
    length = given["input_ids"].shape[1]
    asked = len(prompts) * (length + options.max_new_tokens)
    if asked > options.max_tokens:
        raise ValueError(
            f"{len(prompts)} prompts of up to {length} tokens and {options.max_new_tokens} new "
            f"ones each are {asked} tokens; expected at most --max-tokens {options.max_tokens}"
        )
    sampling: dict[str, Any] = {"do_sample": options.temperature > 0}
    if options.temperature > 0:
        sampling["temperature"] = options.temperature
    with torch.no_grad():
        out = model.generate(
            **given, max_new_tokens=options.max_new_tokens, pad_token_id=tokenizer.pad_token_id,
            **sampling,
        )  # fmt: skip
    return [tokenizer.decode(row[length:], skip_special_tokens=True) for row in out]


def device_of(model: Any) -> Any:
    """Device that a loaded model computes on."""
    return next(model.parameters()).device


def _prompts(options: argparse.Namespace) -> list[str]:
    """Raises ValueError where there is none."""
    prompts = list(options.prompt)
    if options.prompts is not None:
        lines = options.prompts.read_text(encoding="utf-8").splitlines()
        prompts += [line for line in lines if line.strip()]
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise ValueError("no prompt; expected --prompt TEXT, or --prompts FILE with lines of text")
    return prompts


def positive(text: str) -> int:
    """Number of a flag. Raises ArgumentTypeError below 1."""
    said = f"{text!r}; expected a whole number from 1 on"
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(said)
    return int(text)
