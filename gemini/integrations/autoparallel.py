"""`autoparallelize`: the plugin of the layout that takes least time, of all that plugins run."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from gemini import AutoPlacement, StaticPlacement
from gemini.api import Placement, by_name, world_size
from gemini.integrations.options import option
from gemini.integrations.plugins.hybrid import HybridParallelPlugin
from gemini.layouts.cluster import Cluster
from gemini.layouts.layout import PLANNED, GlobalBatch, ParallelLayout
from gemini.layouts.machines import cluster_here, cluster_named, cluster_of
from gemini.layouts.models import first_tensor, shape_of
from gemini.layouts.search import Found, search
from gemini.plan.machine import Hardware
from gemini.plan.models import checkpointed

_DIMENSIONS = 2  # of a batch of tokens: rows, and tokens of each


@by_name
@dataclass(frozen=True)
class AutoParallelPlugin(HybridParallelPlugin):
    """`HybridParallelPlugin` of a layout that `autoparallelize` found.

    found: all layouts with their prices; `layout` is the one of this plugin.
    """

    found: Found | None = option(None, kind=Found, expected="what a search found")

    @property
    def layout(self) -> ParallelLayout:
        """The layout that was found. Raises ValueError for a plugin that nobody searched for."""
        return self._found().best.layout

    def explain(self) -> str:
        """Say in lines what was chosen, and of the next five layouts why each loses. Raises
        ValueError for a plugin that nobody searched for."""
        return self._found().explain()

    def _found(self) -> Found:
        if self.found is None:
            raise ValueError("found=None; expected a plugin that gemini.autoparallelize returned")
        return self.found

    def prepare(self, model: nn.Module, device: torch.device) -> None:
        super().prepare(model, device)
        if self.layout.recompute:  # before layers are split, cut or wrapped
            checkpointed(model)


@by_name
def autoparallelize(
    model: nn.Module, batch: Any, *, devices: int | None = None,
    machine: Cluster | Hardware | str | None = None, precision: str = "bf16",
    recompute: bool | None = None, state: str = "fp32", pipelines: bool = True, **options: Any,
) -> AutoParallelPlugin:  # fmt: skip
    """Find the layout in which a step takes least time, among all that plugins run. Collective.

    model: of transformers, on the meta device or with values; it is not changed, and priced as if
        all its parameters are trained. Any other module gets data parallelism, shards and homes.
    batch: inputs of one step of all ranks, rows first, as keyword arguments or one tensor; only
        shapes matter.
    devices: ranks of a named card; None: those of torch.distributed.
    machine: a card's name (`"h100"`), what `gemini.plan.machine.machine_of` returned, or a
        `Cluster`; None: this machine, measured by all ranks.
    recompute: whether layers are computed again in backward; None: if it is faster, or nothing
        else fits.
    state: of `HybridAdam`, which the loop makes.
    pipelines: False leaves out layouts whose step is `booster.execute_pipeline`.
    options: of `HybridParallelPlugin` that no layout decides: `max_norm`, `custom_policy`, ...

    A loop that has no pipeline runs `plugin.layout.micro_batches` forwards and backwards of
    `plugin.layout.batch` rows before a step. Raises ValueError if nothing fits, and for options
    that a layout decides.
    """
    step = _batch_of(batch)
    cluster = _cluster(machine, devices, precision)
    shape = shape_of(model, batch, seq=step.seq, precision=precision)
    if not pipelines:
        shape = replace(shape, can=shape.can - {"pp"})
    found = search(shape, cluster, step, state=state, recompute=recompute)
    decided = options_of(found.best.layout, shape.layers, cluster)
    twice = sorted(decided.keys() & options.keys())
    if twice:
        raise ValueError(f"{', '.join(twice)} in autoparallelize(); expected none: it decides them")
    known = {one.name for one in fields(HybridParallelPlugin)}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} in autoparallelize(); expected options of HybridParallelPlugin"
        )
    return AutoParallelPlugin(precision=precision, found=found, **decided, **options)


def _batch_of(batch: Any) -> GlobalBatch:
    """Rows and tokens of one step's inputs; a row of anything else is one token."""
    first = first_tensor(batch)
    is_tokens = first.dim() == _DIMENSIONS and not first.is_floating_point()
    return GlobalBatch(first.shape[0], first.shape[1] if is_tokens else 1)


def _cluster(
    machine: Cluster | Hardware | str | None, devices: int | None, precision: str
) -> Cluster:
    if machine is None:
        found = cluster_here(precision)
    elif isinstance(machine, str):
        found = cluster_named(machine, devices or world_size())
    elif isinstance(machine, Hardware):
        found = cluster_of(machine)
    else:
        found = machine
    if devices is not None and found.ranks != devices:
        raise ValueError(
            f"devices={devices} with a machine of {found.ranks} ranks; expected one number"
        )
    return found


def options_of(layout: ParallelLayout, layers: int, cluster: Cluster) -> dict[str, Any]:
    """Options of `HybridParallelPlugin` for a layout.

    layers: of the model, which the stages of a pipeline share as evenly as they can.
    """
    found: dict[str, Any] = {
        "tp_size": layout.tp, "pp_size": layout.pp, "extra_dp_size": layout.replicas,
        "ep_size": layout.ep, "zero_stage": 2 if layout.zero == "2" else 1,
        "placement_policy": _placement(layout, cluster),
    }  # fmt: skip
    if layout.pp > 1:
        found |= {
            "pp_style": layout.style, "num_model_chunks": layout.chunks,
            "num_microbatches": layout.micro_batches, "dp_outside": False,
            "num_layers_per_stage": layout.layers_of_stages(layers),
        }  # fmt: skip
    if layout.sp > 1:
        found |= {
            "enable_sequence_parallelism": True, "sp_size": layout.sp,
            "sequence_parallelism_mode": layout.sp_mode,
        }  # fmt: skip
    elif layout.in_sequence:
        found["enable_sequence_parallelism"] = True
    return found


def _placement(layout: ParallelLayout, cluster: Cluster) -> Placement | None:
    """Placement of model data; None: the stage's own."""
    if layout.zero == "3":
        return StaticPlacement.zero(3)
    if layout.zero == PLANNED:
        # RAM is a node's, and so is the device where ranks compute with the CPU
        device = cluster.device_bytes * (1 if cluster.has_host_tier else cluster.per_node)
        host = cluster.host_bytes * cluster.per_node
        return AutoPlacement(device_budget=f"{device}B", host_budget=f"{host}B")
    return None
