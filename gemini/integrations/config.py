"""Configurations of old scripts: a Python or YAML file, or a dict, of features and other names.

`parallel`, `fp16` and `clip_grad_norm` are options of a plugin (`plugin_of`). Other names are the
script's own, read as `global_context.config.BATCH_SIZE`. One of them is `gradient_accumulation`,
the number of backwards before a step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.api import rank, world_size
from gemini.integrations.options import SCALE_NAMES
from gemini.migrate.colossal import config_in
from gemini.parallel.sizes import BLOCKS, LAYOUTS

if TYPE_CHECKING:  # what is launched need not import plugins
    from gemini.integrations.plugins.hybrid import HybridParallelPlugin


class AMP_TYPE:
    """Kinds of 16-bit training, for `fp16 = dict(mode=...)` of a configuration."""

    TORCH = "torch"
    NAIVE = "naive"
    APEX = "apex"


class Config(dict[str, Any]):
    """Values of a configuration, by keys and by attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the configuration has no {name}; expected one of {sorted(self)}")
        return self[name]


class ParallelMode(Enum):
    """Kinds of rank groups: all ranks, other data, parts of layers, stages of a pipeline.

    Those of 2D, 2.5D and 3D are the ranks of one row, column, ... of the mesh.
    """

    GLOBAL = "global"
    DATA = "data"
    TENSOR = "tensor"
    PARALLEL_1D = "1d"
    SEQUENCE = "sequence"
    PIPELINE = "pipe"
    PARALLEL_2D_ROW = "2d_row"
    PARALLEL_2D_COL = "2d_col"
    PARALLEL_2P5D_ROW = "2p5d_row"
    PARALLEL_2P5D_COL = "2p5d_col"
    PARALLEL_2P5D_DEP = "2p5d_dep"
    PARALLEL_3D_INPUT = "3d_input"
    PARALLEL_3D_WEIGHT = "3d_weight"
    PARALLEL_3D_OUTPUT = "3d_output"


class GlobalContext:
    """Configuration that the process was launched with, for all of its modules."""

    def __init__(self) -> None:
        self.config = Config()

    @property
    def pipeline_parallel_size(self) -> int:
        return self.get_world_size(ParallelMode.PIPELINE)

    def is_initialized(self, mode: ParallelMode) -> bool:
        """Whether groups of this kind have several ranks."""
        return self.get_world_size(mode) > 1

    def get_global_rank(self) -> int:
        return rank()

    def get_world_size(self, mode: ParallelMode) -> int:
        return self._place(mode)[1]

    def get_local_rank(self, mode: ParallelMode) -> int:
        return self._place(mode)[0]

    def _place(self, mode: ParallelMode) -> tuple[int, int]:
        """Place of this rank and number of places, by the sizes of the configuration's plugin."""
        if mode is ParallelMode.GLOBAL:
            return rank(), world_size()
        sizes = plugin_of(self.config, zero_stage=1).sizes
        if mode is ParallelMode.DATA:
            return sizes.data_place(rank(), world_size())
        names = {
            ParallelMode.PIPELINE: ["pp"], ParallelMode.SEQUENCE: ["cp"],
            ParallelMode.PARALLEL_1D: ["tp"], ParallelMode.TENSOR: ["tp", *BLOCKS],
        }  # fmt: skip
        return sizes.place(names.get(mode, [mode.value]), rank(), world_size())


global_context = GlobalContext()


def is_using_pp() -> bool:
    """Whether the configuration has a pipeline."""
    return global_context.is_initialized(ParallelMode.PIPELINE)


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> Config:
    """Read a configuration from a dict or a trusted file: a `.py` file is run.

    Names that begin with an underscore, modules, functions and classes are left out.
    Raises ValueError for a file of another kind.
    """
    if isinstance(config, Mapping):
        return Config(config)
    return Config(
        (name, value) for name, value in config_in(Path(config)).items()
        if not name.startswith("_") and not callable(value) and type(value).__name__ != "module"
    )  # fmt: skip


def plugin_of(config: Mapping[str, Any], **options: Any) -> HybridParallelPlugin:
    """Make the plugin that a configuration describes.

    config: from `read_config`. parallel: `dict(pipeline=2, tensor=dict(size=2, mode="1d"), moe=2)`;
        each size may be `dict(size=)`. fp16: its `mode` and the loss scale; without it modules
        compute in fp32. clip_grad_norm: of every step. NUM_MICRO_BATCHES: of a pipeline.
    options: for `HybridParallelPlugin`; they override the configuration.
    Raises ValueError for an unknown mode of tensor parallelism or of fp16, and for unknown names in
    `parallel` and `fp16`.
    """
    parallel = dict(config.get("parallel") or {})
    tensor = parallel.pop("tensor", 1)
    tensor = tensor if isinstance(tensor, Mapping) else {"size": tensor}
    mode = tensor.get("mode")
    found: dict[str, Any] = {
        **_split(_size(tensor), mode, int(tensor.get("depth", 1))),
        "pp_size": _size(parallel.pop("pipeline", 1)), "ep_size": _size(parallel.pop("moe", 1)),
    }  # fmt: skip
    parallel.pop("data", None)  # what is left of the ranks
    if mode not in (None, "1d", "sequence", *LAYOUTS) or parallel:
        raise ValueError(
            f"parallel has tensor mode {mode!r} and {sorted(parallel)}; expected '1d', "
            f"{', '.join(map(repr, LAYOUTS))} or 'sequence', and pipeline, tensor, moe and data"
        )
    found |= _precision(config.get("fp16"))
    if config.get("clip_grad_norm"):
        found["max_norm"] = float(config["clip_grad_norm"])
    if found["pp_size"] > 1 and "NUM_MICRO_BATCHES" in config:
        found["num_microbatches"] = int(config["NUM_MICRO_BATCHES"])
    from gemini.integrations.plugins.hybrid import HybridParallelPlugin

    return HybridParallelPlugin(**(found | options))


def _size(asked: Any) -> int:
    return int(asked.get("size", 1) if isinstance(asked, Mapping) else asked or 1)


def _split(size: int, mode: str | None, depth: int) -> dict[str, Any]:
    """Options by which `size` ranks have parts of layers, or of sequences."""
    if mode in LAYOUTS and size > 1:
        return {"tp_size": size, "tp_mode": mode, "tp_depth": depth}
    if mode != "sequence" or size == 1:
        return {"tp_size": size}
    return {
        "tp_size": 1, "sp_size": size, "enable_sequence_parallelism": True,
        "sequence_parallelism_mode": "ring_attn",
    }  # fmt: skip


def _precision(fp16: Mapping[str, Any] | None) -> dict[str, Any]:
    if fp16 is None:
        return {"precision": "fp32"}
    given = dict(fp16)
    mode = given.pop("mode", AMP_TYPE.TORCH)
    if not given.pop("enabled", True):
        return {"precision": "fp32"}
    if "init_scale" in given:  # of torch's scaler
        given["initial_scale"] = given.pop("init_scale")
    given = {name: value for name, value in given.items() if value is not False}
    if mode not in (AMP_TYPE.TORCH, AMP_TYPE.NAIVE) or not set(given) <= set(SCALE_NAMES):
        raise ValueError(
            f"fp16 has mode {mode!r} and {sorted(given)}; expected AMP_TYPE.TORCH or NAIVE, and of "
            f"{sorted(SCALE_NAMES)}"
        )
    return {"precision": "fp16", **given}
