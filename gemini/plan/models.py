"""Models without weights: on the meta device, from their published sizes.

`build` takes a name, a hub id, a folder, a `config.json`, or `package.module:factory`.
transformers is imported where a configuration is needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini import strangers
from gemini.arguments import nearest
from gemini.chunk.layout import distinct
from gemini.memtracer.module_calls import has_experts

from .activations import SCORING
from .activations import scores as scores_sequences

# class of the configuration, class of the model, and what differs from the class's defaults
_Entry = tuple[str, str, dict[str, Any]]
ATTENTION_PRODUCTS = 6  # forward and backward of an attention that is one operator
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size",
)  # fmt: skip


def _decoder(family: str, *sizes: int, **more: Any) -> _Entry:
    """Family with llama's names; sizes as in `_FIELDS`, the last ones may be the defaults."""
    config = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    fields = dict(zip(_FIELDS, sizes, strict=False))
    return config, f"{family}ForCausalLM", {**fields, **more}


def _gpt2(**fields: int) -> _Entry:
    return "GPT2Config", "GPT2LMHeadModel", fields


_TIED = {"tie_word_embeddings": True}
_OPT = {"num_attention_heads": 32}

MODELS: dict[str, _Entry] = {
    "gpt2": _gpt2(),
    "gpt2-medium": _gpt2(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": _gpt2(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": _gpt2(n_embd=1600, n_layer=48, n_head=25),
    "bert-base": ("BertConfig", "BertForPreTraining", {}),
    "bert-large": (
        "BertConfig", "BertForPreTraining",
        dict(zip(_FIELDS, (1024, 4096, 24, 16), strict=False)),
    ),
    "t5-small": ("T5Config", "T5ForConditionalGeneration", {}),
    "t5-large": (
        "T5Config", "T5ForConditionalGeneration",
        {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_layers": 24, "num_heads": 16},
    ),
    "opt-1.3b": _decoder(
        "OPT", hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, word_embed_proj_dim=2048,
        **_OPT,
    ),
    "opt-6.7b": _decoder(
        "OPT", hidden_size=4096, ffn_dim=16384, num_hidden_layers=32, word_embed_proj_dim=4096,
        **_OPT,
    ),
    "llama-150m": _decoder("Llama", 768, 2304, 12, 12),
    "llama-7b": _decoder("Llama", 4096, 11008),
    "llama-13b": _decoder("Llama", 5120, 13824, 40, 40),
    "llama-70b": _decoder("Llama", 8192, 28672, 80, 64, 8),
    "llama-3.2-1b": _decoder("Llama", 2048, 8192, 16, 32, 8, 128256, **_TIED),
    "llama-3.2-3b": _decoder("Llama", 3072, 8192, 28, 24, 8, 128256, **_TIED),
    "llama-3.1-8b": _decoder("Llama", 4096, 14336, 32, 32, 8, 128256),
    "llama-3.3-70b": _decoder("Llama", 8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _decoder("Llama", 16384, 53248, 126, 128, 8, 128256),
    "qwen2.5-0.5b": _decoder("Qwen2", 896, 4864, 24, 14, 2, 151936, **_TIED),
    "qwen2.5-1.5b": _decoder("Qwen2", 1536, 8960, 28, 12, 2, 151936, **_TIED),
    "qwen2.5-3b": _decoder("Qwen2", 2048, 11008, 36, 16, 2, 151936, **_TIED),
    "qwen2.5-7b": _decoder("Qwen2", 3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _decoder("Qwen2", 5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _decoder("Qwen2", 5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _decoder("Qwen2", 8192, 29568, 80, 64, 8, 152064),
    "qwen3-0.6b": _decoder("Qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, **_TIED),
    "qwen3-1.7b": _decoder("Qwen3", 2048, 6144, 28, 16, 8, 151936, head_dim=128, **_TIED),
    "qwen3-4b": _decoder("Qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, **_TIED),
    "qwen3-8b": _decoder("Qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "qwen3-14b": _decoder("Qwen3", 5120, 17408, 40, 40, 8, 151936, head_dim=128),
    "qwen3-32b": _decoder("Qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128),
    "qwen3-30b-a3b": _decoder(
        "Qwen3Moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8,
    ),
    "gemma-2-2b": _decoder("Gemma2", 2304, 9216, 26, 8, 4, 256000, head_dim=256),
    "gemma-2-9b": _decoder("Gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256),
    "gemma-2-27b": _decoder("Gemma2", 4608, 36864, 46, 32, 16, 256000, head_dim=128),
    "gemma-3-1b": _decoder("Gemma3", 1152, 6912, 26, 4, 1, 262144, head_dim=256),
    "mistral-7b": _decoder("Mistral", 4096, 14336, 32, 32, 8, 32768),
    "mistral-nemo-12b": _decoder("Mistral", 5120, 14336, 40, 32, 8, 131072, head_dim=128),
    "mistral-small-24b": _decoder("Mistral", 5120, 32768, 40, 32, 8, 131072, head_dim=128),
    "mixtral-8x7b": _decoder("Mixtral"),
    "mixtral-8x22b": _decoder("Mixtral", 6144, 16384, 56, 48, 8, 32768),
    "deepseek-v2-lite": _decoder(
        "DeepseekV2", 2048, 10944, 27, 16, 16, 102400, moe_intermediate_size=1408,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1,
        kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    "vit-base": ("ViTConfig", "ViTForImageClassification", {"num_labels": 1000}),
}  # fmt: skip


_PUBLISHERS = (
    "meta-llama", "qwen", "google", "mistralai", "openai-community", "facebook", "deepseek-ai",
    "google-t5", "google-bert", "unsloth",
)  # fmt: skip
_VARIANT = re.compile(r"(-(instruct|chat|it|base|hf|uncased|v0\.1|v0\.3|2407|2501|2506))+$")
# ids whose sizes are those of another name, or of none
_SAME = {
    "llama-2-7b-hf": "llama-7b", "llama-2-7b-chat-hf": "llama-7b", "llama-2-13b-hf": "llama-13b",
    "llama-2-13b-chat-hf": "llama-13b", "llama-2-70b-hf": "llama-70b",
    "llama-2-70b-chat-hf": "llama-70b", "llama-3.1-70b": "llama-3.3-70b",
    "llama-3.1-70b-instruct": "llama-3.3-70b", "meta-llama-3-8b": "llama-3.1-8b",
    "meta-llama-3-8b-instruct": "llama-3.1-8b", "mistral-nemo-base-2407": "mistral-nemo-12b",
    "mistral-nemo-instruct-2407": "mistral-nemo-12b", "mistral-7b-v0.1": "",
    "mistral-7b-instruct-v0.1": "",
}  # fmt: skip


def build(what: str | Path, *, trust_remote_code: bool = False, scores: bool = False) -> nn.Module:
    """Build a model on the meta device; see `maker`."""
    return _meta(maker(what, trust_remote_code=trust_remote_code, scores=scores))


def maker(
    what: str | Path, *, trust_remote_code: bool = False, scores: bool = False
) -> Callable[[], Any]:
    """Maker of the model with random weights. Raises ValueError for a name that is not known.

    what: a path is a folder, or a config.json, and nothing else: whoever reads a name in a file
        of others gives a `Path`. A text is also a name, a hub id, or package.module:factory, which
        is imported, unless a folder of that name exists.
    trust_remote_code: run the model's own code if its config names some.
    scores: one score of a sequence in place of tokens, as a reward model has it.
    """
    place = _place(what)
    if isinstance(place, Path):
        return _from_config(place, trust_remote_code=trust_remote_code, scores=scores)
    if place not in MODELS:
        return _factory(place)
    config_class, model_class, changes = MODELS[place]
    transformers = _transformers()
    config = getattr(transformers, config_class)(**changes)
    if scores:
        return lambda: _scoring(config, trust_remote_code=False)
    return lambda: getattr(transformers, model_class)(config)


def _scoring(config: Any, *, trust_remote_code: bool) -> Any:
    """Model that gives a sequence one score."""
    config.num_labels = 1
    text = config.get_text_config()
    if text.pad_token_id is None:  # the trainer sets that of the tokenizer
        text.pad_token_id = 0
    return _transformers().AutoModelForSequenceClassification.from_config(
        config, trust_remote_code=trust_remote_code
    )


def is_trained_by_trl(what: str | Path) -> bool:
    """Whether `python -m gemini train` would train the model: a causal language model or one that
    scores, where trl is installed. Raises ValueError as `maker` does."""
    place = _place(what)
    if isinstance(place, Path):
        names = config_fields(place).get("architectures") or ["ForCausalLM"]
        name = names[0] if isinstance(names, list) else None
    else:
        name = MODELS[place][1] if place in MODELS else None
    kinds = ("ForCausalLM", "LMHeadModel", SCORING)
    is_known = isinstance(name, str) and name.endswith(kinds)
    return is_known and importlib.util.find_spec("trl") is not None


def _place(what: str | Path) -> str | Path:
    """Known name, config.json, or package.module:factory, as `maker` reads it."""
    path = Path(what).expanduser()
    if isinstance(what, Path) or what.endswith(".json") or path.is_dir():
        path = path.resolve()  # a link that the caller names is followed, and none in a folder
        return path / "config.json" if path.is_dir() else path
    if what.lower() in MODELS:
        return what.lower()
    if ":" in what:
        return what
    if what.startswith((".", "/", "~")):
        raise ValueError(f"there is no folder {what}; expected one with a config.json")
    if "/" in what:
        return _of_hub(what)
    near = nearest(what, MODELS)
    names = f"one of {', '.join(MODELS)}" if near is None else "a name that --help lists"
    raise ValueError(
        f"no model {what!r}; {'' if near is None else f'did you mean {near}? '}expected {names}, a "
        "hub id, a folder, the path of a config.json, or package.module:factory"
    )


def add_lora(model: nn.Module, rank: int, targets: Sequence[str] | None = None) -> nn.Module:
    """The model with PEFT's LoRA adapters of `rank`, all else frozen: see `adapters_of`."""
    return _meta(lambda: adapted(model, rank, targets))


def adapters_of(model: nn.Module, rank: int, targets: Sequence[str] | None = None) -> Any:
    """Make a `peft.LoraConfig` for layers by the ends of their names; by default for all linear
    layers but the head, and for no layer whose name one of the experts' has."""
    try:
        import peft
    except ImportError as error:
        raise ValueError("LoRA needs the package peft; pip install peft") from error
    task = "CAUSAL_LM" if hasattr(model, "generate") else None
    if scores_sequences(model):
        task = "SEQ_CLS"  # with which peft trains the head
    return peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, task_type=task,
        target_modules=_linear_layers(model) if targets is None else [*targets],
    )  # fmt: skip


def adapted(model: nn.Module, rank: int, targets: Sequence[str] | None = None) -> Any:
    """Add adapters, see `adapters_of`. Inputs of a checkpointed model ask for gradients, as
    trainers have it."""
    config = adapters_of(model, rank, targets)
    import peft

    found: Any = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        found.enable_input_require_grads()
    return found


def _linear_layers(model: nn.Module) -> list[str] | None:
    """Last parts of the names of linear layers; None leaves them to peft, for a model that is not
    transformers'.

    Names that experts share among them are left out: peft reads all of them as the experts'.
    """
    if not hasattr(model, "get_output_embeddings"):
        return None
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    head = getattr(model, "score", None) if head is None else head

    def names(module: nn.Module) -> set[str]:
        return {name.rpartition(".")[2] for name, layer in module.named_modules()
                if type(layer).__name__ in ("Linear", "Conv1D") and layer is not head}  # fmt: skip

    shared = set[str]().union(*(names(m) for m in model.modules() if has_experts(m)))
    return sorted(names(model) - shared)


def checkpointed(model: nn.Module) -> nn.Module:
    """The model, which computes activations again in backward. Before `add_lora`."""
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        enable = getattr(model, name, None)
        if enable is not None:
            enable({"use_reentrant": False})
            return model
    raise ValueError(
        f"{type(model).__name__} has no gradient_checkpointing_enable; expected a model of "
        "transformers, or a factory that checkpoints"
    )


def experts_of(model: nn.Module) -> tuple[int, float]:
    """Number of experts in all layers, and the share of them that a token is sent to."""
    config: Any = getattr(model, "config", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, n) for n in names if getattr(config, n, None)), 1)
    if experts == 1:
        return 0, 1.0
    layers = sum(map(has_experts, model.modules()))
    return layers * experts, getattr(config, "num_experts_per_tok", experts) / experts


def products_of(model: nn.Module) -> int:
    """Number of matrix products of an iteration, each shape once; those of experts are left out.

    A weight has one forward, one for the gradient of its input, and one for its own where it is
    trained.
    """
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    trained: dict[tuple[int, ...], bool] = {}
    for param, names in distinct(model.named_parameters(remove_duplicate=False)):
        is_head = len(names) > 1
        if param.ndim == 2 and (is_head or id(param) not in looked_up):
            shape = tuple(param.shape)
            trained[shape] = trained.get(shape, False) or param.requires_grad
    return ATTENTION_PRODUCTS + sum(2 + is_trained for is_trained in trained.values())


def used_numel(model: nn.Module, *, only_trained: bool = False) -> int:
    """Elements of matrices that a token is multiplied by: of experts, of as many as it is sent to.

    Embeddings are looked up, but where the head multiplies by them too. only_trained: of matrices
    whose gradients are computed.
    """
    _, share = experts_of(model)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = (m for m in model.modules() if not isinstance(m, nn.Embedding))
    tables -= {id(getattr(layer, "weight", None)) for layer in layers}
    return sum(
        round(param.numel() * (share if ".experts." in name else 1))
        for name, param in model.named_parameters()
        if param.dim() > 1 and id(param) not in tables and (param.requires_grad or not only_trained)
    )


def flops_of(model: nn.Module, seq: int, *, checkpointing: bool) -> float:
    """Operations of one token, in forward and backward of a sequence of `seq`."""
    used, attention = used_numel(model), _attention_flops(model, seq)
    is_eager = getattr(getattr(model, "config", None), "_attn_implementation", "eager") == "eager"
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    again = 2 * used + attention - (0 if head is None else 2 * head.weight.numel())
    weights = used_numel(model, only_trained=True)
    # two products more for each of forward; a kernel computes the scores again
    backward = 2 * used + 2 * weights + attention * (2 if is_eager else 2.5)
    return 2 * used + attention + checkpointing * again + backward


def _attention_flops(model: nn.Module, seq: int) -> float:
    """Operations of one token's queries with all keys of its sequence, in forward: scores, and sums
    of values.

    A kernel that knows of a causal mask computes half of them. One that is given the mask computes
    all: eager attention, a window that is shorter than the sequence, encoders and their decoders.
    """
    config: Any = getattr(model, "config", None)
    may_skip = getattr(config, "_attn_implementation", "eager") != "eager"
    may_skip &= not getattr(config, "is_encoder_decoder", False)
    flops = 0.0
    for module in model.modules():
        if getattr(module, "is_causal", None) is None:
            continue
        num_heads = _first_of((module, config), "num_attention_heads", "num_heads", "n_heads")
        keys = _first_of(
            (module,), "qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim"
        )
        values = getattr(module, "v_head_dim", keys)
        window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
        skips = may_skip and module.is_causal and (window is None or window >= seq)
        flops += 2 * seq * num_heads * (keys + values) / (2 if skips else 1)
    return flops


def _first_of(owners: Sequence[Any], *names: str) -> int:
    """First attribute that is there; 0: none is, as in a layer that nobody has seen."""
    found = (getattr(owner, name, None) for owner in owners for name in names)
    return next((number for number in found if isinstance(number, int)), 0)


def itemsizes(model: nn.Module) -> list[int]:
    """Bytes an element of every parameter, in registration order."""
    return [param.dtype.itemsize for param in model.parameters()]


def _meta(make: Callable[[], Any]) -> nn.Module:
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a module, got a {type(model).__name__}")
    on_others = [name for name, param in model.named_parameters() if not param.is_meta]
    if on_others:
        raise ValueError(
            f"parameter {on_others[0]} was not made there; expected all on the meta device"
        )
    return model


def _factory(what: str) -> Callable[[], Any]:
    """Model of `package.module:factory`, called without arguments."""
    module, _, name = what.partition(":")
    if not module or module.startswith("."):
        raise ValueError(f"{what} names no module; expected package.module:factory")
    try:
        factory = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"{what}: {error}; expected package.module:factory") from error
    if not callable(factory):
        raise ValueError(f"{module} has no callable {name!r}; expected a factory")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ValueError(
            f"{what}: {error}; expected a factory, which is called without arguments"
        ) from None
    except ValueError:  # it shows no signature: the call says what it takes
        pass
    return factory  # type: ignore[no-any-return]


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            "a model by its name or configuration needs the package transformers; "
            "pip install transformers"
        ) from error


def _of_hub(what: str) -> str | Path:
    """config.json of a hub id: from the cache, else the known name that it stands for, which
    needs no network, else downloaded."""
    _transformers()
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    cached = try_to_load_from_cache(what, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    known = known_name(what)
    if known is not None:
        return known
    try:  # which, other than a download of one file, does not wait for a network that is not there
        return Path(snapshot_download(what, allow_patterns=["config.json"])) / "config.json"
    except LocalEntryNotFoundError:
        said = "no network reaches the hub"
    except (OSError, ValueError) as error:  # what the hub raises is one of these
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        said = f"the hub does not give its config.json ({said})"
    raise ValueError(
        f"{what} is no folder here, and {said}; expected a folder, its config.json, or a name that "
        "is known here"
    )


def known_name(what: str) -> str | None:
    """Name in `MODELS` of the same sizes as a hub id of their publishers; None for any other."""
    owner, _, name = what.lower().partition("/")
    if owner not in _PUBLISHERS:
        return None
    name = _SAME.get(name, _VARIANT.sub("", name.removeprefix("meta-")))
    return name if name in MODELS else None


def model_class_of(names: Any) -> Any:
    """Class of transformers that the `architectures` of a config name first; None for a name of
    anything but a model."""
    first = names[0] if isinstance(names, (list, tuple)) and names else None
    if not isinstance(first, str):
        return None
    transformers = _transformers()
    try:
        found: Any = getattr(transformers, first, None)
    except (ImportError, RuntimeError):  # it needs a package that is not here
        return None
    is_class = isinstance(found, type) and found is not transformers.PreTrainedModel
    return found if is_class and issubclass(found, transformers.PreTrainedModel) else None


def config_fields(path: Path) -> dict[str, Any]:
    """Fields of a config.json. Raises ValueError for a file of anything else."""
    try:
        fields = strangers.read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {strangers.said(error)}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a {type(fields).__name__}; expected a model's config")
    return fields


def _from_config(path: Path, *, trust_remote_code: bool, scores: bool) -> Callable[[], Any]:
    """Class that a config.json names as its architecture, else a causal language model; one that
    `scores`, whatever it names."""
    transformers = _transformers()
    fields = config_fields(path)
    runs_code = trust_remote_code and "auto_map" in fields

    def make() -> Any:
        try:
            if runs_code:
                config = transformers.AutoConfig.from_pretrained(
                    path.parent, trust_remote_code=trust_remote_code
                )
            else:
                config = transformers.AutoConfig.for_model(**fields)
            if scores:
                model = _scoring(config, trust_remote_code=trust_remote_code)
            elif (kind := model_class_of(fields.get("architectures"))) is not None:
                model = kind(config)
            else:
                model = transformers.AutoModelForCausalLM.from_config(
                    config, trust_remote_code=trust_remote_code
                )
            dtype = config.dtype  # of the weights in its folder
            dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
            return model if dtype is None else model.to(dtype)
        except Exception as error:  # a config is anybody's, and fails in any way
            raise ValueError(
                f"{path} describes no model that can be made: {strangers.said(error)}"
            ) from error

    return make
