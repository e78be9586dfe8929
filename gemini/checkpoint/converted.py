"""Tensors of files under the names that a model of transformers has for them.

Files may have an expert a tensor where a module has all of them in one: what `from_pretrained`
merges, splits or renames is made so here, one parameter at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gemini.checkpoint.untrusted.lazy_tensors import LazyTensors, TensorSpec


def converted(module: nn.Module, files: LazyTensors) -> ConvertedTensors:
    """Files as a module names their tensors."""
    found = ConvertedTensors(files)
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:  # an older one, whose modules have the names of files
        return found
    if not isinstance(module, PreTrainedModel):
        return found
    there = module.state_dict()
    transforms: Any = get_model_conversion_mapping(module)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    conversions: dict[str, _Conversion] = {}
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(
            key, renamings, converters, module.base_model_prefix, there
        )
        if name not in there or (pattern is None and name == key):
            continue
        if name not in conversions:
            rule = WeightRenaming(key, name) if pattern is None else by_pattern[pattern]
            conversions[name] = _Conversion(name, rule, module)
        conversions[name].sources.append((pattern or key, key))
    for one in conversions.values():
        found.add(one)
    return found


class _Conversion:
    """What becomes one parameter, or several: sources are (pattern, key in the files), in order."""

    def __init__(self, name: str, rule: Any, module: Any) -> None:
        self._name, self._rule, self._module = name, rule, module
        self.sources: list[tuple[str, str]] = []

    def made(self, source: Callable[[str], Tensor]) -> Mapping[str, Any]:
        """By name of the module's, of tensors that `source` gives by their keys."""
        rule = copy.deepcopy(self._rule)
        for pattern, key in self.sources:
            rule.add_tensor(self._name, key, pattern, lambda key=key: source(key))
        found = rule.convert(self._name, model=self._module, config=self._module.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in found.items()
        }


class ConvertedTensors(Mapping[str, Tensor]):
    """Those of files, and what conversions make of them when it is asked for."""

    def __init__(self, files: LazyTensors) -> None:
        self.folder = files.folder
        self._files = files
        self._conversions: dict[str, tuple[_Conversion, TensorSpec]] = {}

    def add(self, conversion: _Conversion) -> None:
        """Nothing is read: what shapes become is asked without values."""
        specs = {key: self._files.spec_of(key) for _, key in conversion.sources}
        dtype = next(iter(specs.values())).dtype
        made = conversion.made(lambda key: torch.empty(specs[key].shape, device="meta"))
        for name, value in made.items():
            spec = TensorSpec(name, dtype, tuple(value.shape))
            self._conversions[name] = conversion, spec

    def spec_of(self, name: str) -> TensorSpec:
        """Its dtype, which is that of the first of its sources, and shape."""
        found = self._conversions.get(name)
        return self._files.spec_of(name) if found is None else found[1]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._conversions:
            return self._files[name]
        value: Tensor = self._conversions[name][0].made(self._files.__getitem__)[name]
        return value

    def __iter__(self) -> Iterator[str]:
        yield from self._files
        yield from self._conversions

    def __len__(self) -> int:
        return len(self._files) + len(self._conversions)

    def __contains__(self, name: object) -> bool:
        return name in self._conversions or name in self._files
