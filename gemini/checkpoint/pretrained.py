"""Weights in Hugging Face's layout, into chunks and masters and back, a tensor at a time.

`load_pretrained` never has the whole model: a rank has its shards, one chunk and one tensor.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from gemini import strangers
from gemini.arguments import passes_on
from gemini.checkpoint.format.manifest import FormatError
from gemini.checkpoint.ranks import Ranks
from gemini.checkpoint.untrusted.lazy_tensors import INDEX, TORCH_INDEX, LazyTensors
from gemini.comm.connect import everyone, is_pipeline
from gemini.ddp import GeminiDDP
from gemini.options import ModuleOptions
from gemini.placement.policy import AutoPlacement
from gemini.plan.models import config_fields, model_class_of
from gemini.plan.quantised import stacked_experts
from gemini.runtime.wrap.materialise import Materialiser, init_empty

from .converted import converted
from .export import export_safetensors
from .quantise import (
    config_of,
    put_experts,
    put_quantised,
    quantised,
    quantised_experts,
    without_memory,
)

if TYPE_CHECKING:
    from gemini.decoding.decode import Serving

log = logging.getLogger("gemini")

SINGLE = "model.safetensors"
_LEFT = ("*.bin", "*.pth", "*.gguf")  # on the hub: nobody here reads them
_WEIGHTS = ("*.safetensors", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot")


@passes_on(GeminiDDP)
def load_pretrained(
    folder_or_index: str | os.PathLike[str],
    model_class: type[nn.Module] | None = None,
    *,
    config: Any = None,
    dtype: torch.dtype | None = None,
    init_missing: bool = False,
    revision: str | None = None,
    quantize: Any = None,
    lora: Any = None,
    trust_remote_code: bool = False,
    serve: bool = False,
    device_budget: int | str | None = None,
    host_budget: int | str | None = None,
    nvme_dir: str | None = None,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    **options: Unpack[ModuleOptions],
) -> GeminiDDP:
    """Load a Hugging Face model from a folder of weights, or the hub, and wrap it. All ranks call.

    Weights are read a tensor at a time, on rank 0, into the chunk that is being filled: no rank
    ever has all of them. fp32 masters start from the values in the files.

    folder_or_index: a folder of `save_pretrained` or `export_safetensors`, or the index in it:
        safetensors, or else `pytorch_model*.bin`. A relative path that does not exist is an id on
        the hub (`"Qwen/Qwen2-0.5B"`), and is downloaded to the cache of `huggingface_hub`, once a
        host.
    model_class: a class of `transformers`, or any whose constructor takes the config; None is the
        class that the config names.
    config: replaces the folder's own.
    dtype: of the parameters before they are wrapped, and so of the weights that are exported later;
        None is the dtype in the files.
    init_missing: True lets the model initialise parameters that no file has, such as a new head's,
        and logs their names; False refuses them. Under `lora` they are those of `modules_to_save`,
        or of the head that a task of classification trains.
    revision: a branch, tag or commit on the hub; None is the newest.
    quantize: `"nf4"` (with quantised statistics, as in QLoRA), `"int8"`, or a
        `transformers.BitsAndBytesConfig`: the linear layers that transformers would quantise become
        bitsandbytes layers, one weight at a time. `"nf4"` quantises stacked experts too, which stay
        in 16 bits in transformers, and here with a config.
    lora: a `peft.LoraConfig`; the base is frozen and its adapters are trained. Adapters are made
        before the base has its values: no DoRA, PiSSA or others that start from them.
    trust_remote_code: True runs the Python code that the folder brings for its model, with your
        rights: read it first. False runs none, and refuses a model that needs it.
    serve: True loads a causal language model that only decodes: all is frozen, in the dtype of the
        files, without gradients or state, and `model.generate` of transformers drives it. What the
        budgets have no room for on the device is read for every token, and no more.
    device_budget, host_budget, nvme_dir: see `gemini.AutoPlacement`; of `serve` alone.
    max_tokens, max_sequences: that `serve` decodes at once, by default 2048 and 16: the cache and
        the activations of so many are in the plan, and a pass with more raises ValueError.
    options: of `GeminiDDP`.

    Raises FormatError for a folder without weights, or with a link out of it or another thing that
    is no file, ValueError for weights that are missing from it or of another shape, for a config
    that names no model of transformers, for an id that the hub does not give, and for adapters that
    start from the base's values, and ImportError if transformers, peft or bitsandbytes is missing.
    """
    _check_options(lora, options)
    budgets = {"device_budget": device_budget, "host_budget": host_budget, "nvme_dir": nvme_dir}
    bounds = {"max_tokens": max_tokens, "max_sequences": max_sequences}
    serving = _serving(serve, lora, budgets, bounds)
    path = downloaded(folder_or_index, revision).absolute()
    folder = path.parent if path.is_file() else path
    check_readable(folder)
    comm = everyone(options.get("process_group"), options.get("mesh"))
    with ExitStack() as stack:
        module = _empty_module(folder, model_class, config, trust_remote_code)
        files = converted(module, LazyTensors(folder, stack))
        values = _Values(module, files, reads=comm.rank == 0)
        if values.missing:
            _check_missing(values, files.folder, type(module), asked=init_missing)
            values.initialise_missing()
        options["init_state_dict"] = values
        values.cast(dtype)
        served = None if serving is None else serving.begin(module, options)
        if quantize is not None:
            values.quantise(config_of(quantize, dtype or values.dtype_of("", torch.bfloat16)))
        if lora is not None:
            module = values.adapt(lora)
        # after adapters: peft would take the layers that make weights of experts for targets
        values.quantise_experts(module, quantize)
        if served is None:
            return GeminiDDP(module, **options)
        return served.hooked(GeminiDDP(module, **served.options(module, options)).eval())


def _serving(
    serve: bool, lora: Any, budgets: dict[str, Any], bounds: dict[str, int | None]
) -> Serving | None:
    """What to serve with. Raises ValueError for arguments that exclude each other."""
    if not serve:
        given = [name for name, value in budgets.items() if value is not None]
        if given:
            raise ValueError(
                f"{given[0]}= without serve=True; expected "
                f"placement_policy=gemini.AutoPlacement({given[0]}=...)"
            )
        if any(bound is not None for bound in bounds.values()):
            raise ValueError("max_tokens= or max_sequences= without serve=True; expected neither")
        return None
    if lora is not None:
        raise ValueError("serve=True with lora=; expected none: adapters are merged first")
    from gemini.decoding.decode import Serving

    given_bounds = {name: bound for name, bound in bounds.items() if bound is not None}
    return Serving(AutoPlacement(**budgets, steady_cap_ratio=1.0), **given_bounds)


def _check_options(lora: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError for other values than the folder's, for a part of a model, and for adapters
    that start from values of the base."""
    if "init_state_dict" in options:
        raise ValueError(
            "init_state_dict= with load_pretrained; expected none: values are the folder's"
        )
    if is_pipeline(options.get("process_group"), options.get("mesh")):
        raise ValueError(
            'load_pretrained reads a whole model, and a module on a mesh with "pp" is a part of '
            "one; expected GeminiDDP(layers, mesh=mesh) and gemini.load_checkpoint"
        )
    if lora is None:
        return
    init = getattr(lora, "init_lora_weights", True)
    said = "use_dora=True" if getattr(lora, "use_dora", False) else f"init_lora_weights={init!r}"
    if said == "use_dora=True" or init not in (True, False, "gaussian", "orthogonal"):
        raise ValueError(
            f"lora= has {said}, which begins with the base's values, and those come when the "
            "module is wrapped; expected neither: load the base with transformers' "
            "from_pretrained, give it to get_peft_model, and wrap that"
        )


def downloaded(
    model: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True
) -> Path:
    """Path of a model: a local path as it is, or the folder that an id on the hub is downloaded to.

    weights: False leaves them on the hub: only the config and the tokenizer are asked for.

    Raises ValueError if the hub does not have the id, or, offline, the cache does not; and for a
    path that is no id, and does not exist.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    check_id(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    left = [*_LEFT, *(() if weights else _WEIGHTS)]
    try:
        found = snapshot_download(str(model), revision=revision, ignore_patterns=left)
    except LocalEntryNotFoundError as error:  # neither in the cache nor within reach
        off = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
        why = "HF_HUB_OFFLINE is set" if off else "no network reaches the hub"
        raise ValueError(
            f"{model} is no folder here, and {why}; expected a folder, or an id that was "
            "downloaded before"
        ) from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"{model} is no folder here, and the hub says: {said}") from None
    return Path(found)


def check_id(model: str | os.PathLike[str]) -> None:
    """Raise ValueError for a path, which is no id on the hub, whatever there is."""
    name = os.fspath(model)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/"):
        raise ValueError(f"there is no folder {name}; expected one, or an id on the hub")


def write_weights(
    folder: str | os.PathLike[str], model: GeminiDDP, *, max_shard_size: int | str = "5GB"
) -> None:
    """Write weights and config into a folder that may have other files. All ranks call.

    Like `export_safetensors`, but weights in `folder` are replaced. A single file is named
    `model.safetensors`, without an index.
    """
    ranks = Ranks(model, "save_model()")
    target = Path(folder).expanduser().absolute()
    fresh = target / ".weights"

    def begin() -> None:
        target.mkdir(parents=True, exist_ok=True)
        if fresh.exists():  # of a save that did not end
            shutil.rmtree(fresh)

    ranks.together(lambda: begin() if ranks.rank == 0 else None)
    export_safetensors(fresh, model, max_shard_size=max_shard_size)
    ranks.together(lambda: replace_weights(target, fresh) if ranks.rank == 0 else None)


def replace_weights(target: Path, fresh: Path) -> None:
    """Move the files of `fresh`, complete weights in a folder of `target`, in place of its own. A
    single file of weights loses its index, and is named `model.safetensors`."""
    olds = {*target.glob("model*.safetensors"), *target.glob("pytorch_model*.bin")}
    for old in sorted(olds | {target / INDEX, target / TORCH_INDEX}):
        old.unlink(missing_ok=True)
    written = sorted(fresh.iterdir())
    weights = [path for path in written if path.suffix == ".safetensors"]
    if len(weights) == 1:
        weights[0].rename(target / SINGLE)
        (fresh / INDEX).unlink()
    for path in sorted(fresh.iterdir()):
        path.rename(target / path.name)
    fresh.rmdir()


def _check_missing(values: _Values, folder: Path, kind: type[nn.Module], *, asked: bool) -> None:
    """Log parameters that no file has; raise ValueError unless the model was `asked` to initialise
    them."""
    names = ", ".join(values.missing)
    if not asked:
        raise ValueError(
            f"{folder} has no weights for {names} of {kind.__name__}; expected all of them: give "
            "the class that was saved as model_class=, or init_missing=True, which initialises them"
        )
    log.warning("%s has no weights for %s: they begin as the model initialises them", folder, names)


def check_readable(folder: Path) -> None:
    """Raise FormatError unless everything in a folder may be opened: transformers reads it by
    name."""
    try:
        strangers.check_folder(folder)
    except OSError as error:
        raise FormatError(f"{folder} cannot be read: {strangers.said(error)}") from error


def _empty_module(
    folder: Path, model_class: type[nn.Module] | None, config: Any, trust_remote_code: bool
) -> nn.Module:
    """Module with parameters on the meta device, tied by the model's own rule."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "gemini.load_pretrained needs transformers; pip install transformers"
        ) from error
    make: Callable[[Any], nn.Module] | None = model_class
    if config is None:
        config_fields(folder / "config.json")
        try:
            config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # a config is anybody's, and fails in any way
            raise FormatError(
                f"the config in {folder} is of no model: {strangers.said(error)}"
            ) from error
    if make is None:
        names = getattr(config, "architectures", None)
        make = model_class_of(names)
        if make is None and trust_remote_code and getattr(config, "auto_map", None):
            make = partial(
                transformers.AutoModelForCausalLM.from_config, trust_remote_code=trust_remote_code
            )
        if make is None:
            shown = f"{names!r:.80}" if names else "no architecture"
            raise ValueError(
                f"the config in {folder} names {shown}; expected one of "
                "transformers' classes of models: give model_class="
            )
    try:
        with init_empty():
            module = make(config)
    except Exception as error:
        if model_class is not None:
            raise
        raise FormatError(
            f"the config in {folder} is of no model: {strangers.said(error)}"
        ) from error
    tie: Any = getattr(module, "tie_weights", None)
    if tie is not None:
        tie()
    return module


class _Values(Mapping[str, Tensor]):
    """Tensors of files by the names of the module; read on one rank, zeros on the others."""

    def __init__(self, module: nn.Module, files: LazyTensors, *, reads: bool) -> None:
        self._module, self._files, self._reads = module, files, reads
        self._made: Materialiser | None = None
        self.missing: list[str] = []  # parameters that no file has
        self._file_name: dict[str, str] = {}
        self.quantised: dict[int, Callable[[], Tensor]] = {}  # see `Materialiser`
        self._adapters: dict[str, Tensor] = {}
        prefix = getattr(module, "base_model_prefix", "")
        tied: dict[int, list[str]] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            tied.setdefault(id(param), []).append(name)
        for names in tied.values():
            places = [place for name in names for place in places_of(name, prefix)]
            there = next((place for place in places if place in files), None)
            if there is not None:
                self._file_name.update(dict.fromkeys(names, there))
            else:
                self.missing.append(names[0])
        if not self._file_name:
            raise FormatError(f"no file of {files.folder} has weights of {type(module).__name__}")

    def dtype_of(self, name: str, other: torch.dtype) -> torch.dtype:
        """Dtype of a parameter in its file; `other` if that is not floating.

        A parameter that no file has gets the dtype of the first one that a file has.
        """
        place = self._file_name.get(name) or next(iter(self._file_name.values()))
        found = self._files.spec_of(place).dtype
        return found if found.is_floating_point else other

    def cast(self, dtype: torch.dtype | None) -> None:
        """Give parameters this dtype, None: that of their files; and buffers their values."""
        for name, param in self._module.named_parameters():
            param.data = param.data.to(dtype or self.dtype_of(name, param.dtype))
        buffers = dict(self._module.named_buffers())
        for name in sorted(buffers.keys() & self._files.keys()):
            buffers[name].data = self._files[name].to(buffers[name].dtype)

    def quantise(self, config: Any) -> None:
        """Replace linear layers by bitsandbytes layers, whose weights are quantised one at a time,
        on request: at most one is in memory unquantised."""
        templates: dict[Any, nn.Parameter] = {}
        for name, layer in put_quantised(self._module, config):
            place = self._taken(f"{name}.weight")
            weight = without_memory(layer, self._files.spec_of(place).dtype, templates)
            self._make(weight, place, partial(quantised, layer))

    def quantise_experts(self, module: nn.Module, quantize: object) -> None:
        """Replace stacked experts by NF4 parameters, which are quantised one at a time, where
        `quantize` asks for that."""
        templates: dict[Any, nn.Parameter] = {}
        for name, experts, key in [*stacked_experts(module, quantize)]:
            place = self._taken(name)
            weight = put_experts(experts, key, self._files.spec_of(place).dtype, templates)
            self._make(weight, place, quantised_experts)

    def _taken(self, name: str) -> str:
        place = self._file_name.pop(name, None)
        if place is None:
            raise ValueError(
                f"no file has {name}, and what a model initialises is not quantised; expected a "
                "folder with all weights, or quantize=None"
            )
        return place

    def _make(
        self, weight: nn.Parameter, place: str, quantised_one: Callable[[Tensor], Tensor]
    ) -> None:
        """Register the function that quantises `weight` from the values at `place`, on request."""

        def made() -> Tensor:
            return quantised_one(self._files[place]) if self._reads else weight.data

        self.quantised[id(weight)] = made

    def adapt(self, lora: Any) -> nn.Module:
        """Module with peft's adapters, which have their values already."""
        try:
            from peft import get_peft_model
        except ImportError as error:
            raise ImportError("lora= needs peft; pip install peft") from error
        for name in self.missing:  # a new head, of which peft makes the copy that is trained
            param = self._module.get_parameter(name)
            assert self._made is not None
            made = nn.Parameter(self._made.take(param), param.requires_grad)
            torch.utils.swap_tensors(param, made)
        missing, self.missing = self.missing, []
        plain = {id(param): name for name, param in self._module.named_parameters()}
        for param in self._module.parameters():
            # peft makes adapters on the device of the weight: on the meta device they would have
            # no values. An expanded zero has the shape and takes one element.
            if param.is_meta:
                empty = torch.zeros((), dtype=param.dtype).expand(param.shape)
                torch.utils.swap_tensors(param, nn.Parameter(empty, param.requires_grad))
        model: nn.Module = get_peft_model(self._module, lora)  # type: ignore[arg-type]
        before, self._file_name = self._file_name, {}
        for name, param in model.named_parameters():
            if id(param) in self.quantised:
                continue
            if plain.get(id(param)) in before:
                self._file_name[name] = before[plain[id(param)]]
            elif plain.get(id(param)) in missing and ".original_module." not in name:
                raise ValueError(
                    f"no file has {plain[id(param)]}, and lora= freezes it as it is initialised; "
                    "expected a folder with all weights, or modules_to_save with its layer"
                )
            else:
                self._adapters[name] = param.data
        return model

    def initialise_missing(self) -> None:
        """Let the model initialise the parameters that no file has, on request."""
        self._made = Materialiser(self._module)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._adapters:
            return self._adapters[name]
        if name not in self._file_name:
            assert self._made is not None
            return self._made.take(self._module.get_parameter(name))
        if self._reads:
            return self._files[self._file_name[name]]
        return torch.zeros(()).expand(self._files.spec_of(self._file_name[name]).shape)

    def __contains__(self, name: object) -> bool:
        # Mapping's own `__contains__` would read the tensor.
        is_here = name in self._file_name or name in self._adapters
        return is_here or (self._made is not None and name in self.missing)

    def __iter__(self) -> Iterator[str]:
        yield from self._file_name
        yield from self._adapters
        yield from () if self._made is None else self.missing

    def __len__(self) -> int:
        return len(list(iter(self)))


def places_of(name: str, prefix: str) -> list[str]:
    """Names that a parameter may have in a file: of a base model, or of a model with a head."""
    found = [name]
    if prefix:
        found.append(f"{prefix}.{name}")
        if name.startswith(f"{prefix}."):
            found.append(name.removeprefix(f"{prefix}."))
    return found
