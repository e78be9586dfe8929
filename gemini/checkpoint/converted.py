"""Tensors of files under the names of a transformers model.

Files may have a tensor for each expert, and the module one for all of them. This module merges,
splits and renames tensors by the rules of `from_pretrained`, one parameter at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gemini.checkpoint.untrusted.lazy_tensors import DTYPE_NAMES, LazyTensors


def converted(module: nn.Module, files: LazyTensors) -> LazyTensors:
    """Tensors of `files` under the module's names."""
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
        return files
    if not isinstance(module, PreTrainedModel):
        return files
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
            conversions[name] = _Conversion(name, rule, module, files)
        conversions[name].sources.append((pattern or key, key))
    return files.with_others(
        {name: one for one in conversions.values() for name in one.described_all()}
    )


class _Conversion:
    """Conversion of tensors of the files into one or more parameters.

    sources: (pattern, key in the files), in order.
    """

    def __init__(self, name: str, rule: Any, module: Any, files: LazyTensors) -> None:
        self._name, self._rule, self._module, self._files = name, rule, module, files
        self.sources: list[tuple[str, str]] = []
        self._shapes: dict[str, torch.Size] = {}

    def _made(self, source: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Converted tensors by the module's names; `source` gives a tensor of the files by key."""
        # A rule collects the tensors that it is given: a copy, so that each call starts empty.
        rule = copy.deepcopy(self._rule)
        for pattern, key in self.sources:
            rule.add_tensor(self._name, key, pattern, lambda key=key: source(key))
        found = rule.convert(self._name, model=self._module, config=self._module.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in found.items()
        }

    def described_all(self) -> Mapping[str, torch.Size]:
        """Shapes by the module's names. The rule runs on the meta device: no file is read."""
        specs = {key: self._files.spec_of(key) for _, key in self.sources}
        made = self._made(lambda key: torch.empty(specs[key].shape, device="meta"))
        self._shapes = {name: value.shape for name, value in made.items()}
        return self._shapes

    def described(self, name: str) -> tuple[str, torch.Size]:
        """(dtype, shape) of a converted tensor; the dtype is that of its first source."""
        return DTYPE_NAMES[self._files.spec_of(self.sources[0][1]).dtype], self._shapes[name]

    def get_tensor(self, name: str) -> Tensor:
        return self._made(self._files.__getitem__)[name]

    mapped = get_tensor
