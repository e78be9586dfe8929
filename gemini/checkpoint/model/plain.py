"""Checkpoints of plain modules whose optimizer is ours: runs, so that state on disk is streamed."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gemini.checkpoint.format.boxes import Region
from gemini.checkpoint.format.data_file import can_be_raw
from gemini.checkpoint.format.manifest import CheckpointError
from gemini.chunk.layout import ShardSegment, saved_params
from gemini.module_face import saved_buffers
from gemini.optim.base import TieredOptimizer
from gemini.optim.plain.target import PlainTarget
from gemini.saved_names import SavedNames
from gemini.units import ParamId

from .state import ModuleRuns, WeightStream


def can_be_runs(module: nn.Module) -> bool:
    """Whether a module's state dict has only parameters and buffers, in memory as in a file."""
    params = saved_params(module)
    known = {name for _, names in params for name in names} | dict(saved_buffers(module)).keys()
    return known == {*map(SavedNames(module).saved, module.state_dict())} and all(
        param.is_contiguous() and can_be_raw(param.dtype) and not isinstance(param, DTensor)
        for param, _ in params
    )


def plain_runs(
    module: nn.Module, optimizer: TieredOptimizer, *, weights: bool = True
) -> ModuleRuns:
    """Runs of a module that `can_be_runs`, and of the state of its optimizer.

    Raises CheckpointError for an optimizer over other parameters.
    """
    named = saved_params(module)
    params = {names[0]: param.detach() for param, names in named}
    flats = {n: param.view(-1) for n, param in params.items()} if weights else {}
    by_id = {id(param): names[0] for param, names in named}
    targets = [target for target in optimizer.targets if isinstance(target, PlainTarget)]
    whole: dict[str, dict[str, Tensor]] = {}
    for target in targets:
        strangers = [param for param in target.params if id(param) not in by_id]
        if strangers or len(targets) < len(optimizer.targets):
            raise CheckpointError(
                "the optimizer updates parameters that the module does not have; save a "
                "module that holds all of them"
            )
        planes = {plane.name for plane in target.planes}
        whole |= {
            by_id[id(param)]: {name: state[name] for name in state if name not in planes}
            for param, state in target.state_views().items()
        }
    segments = [
        (flat, [ShardSegment(ParamId(i), 0, flat.numel(), 0)])
        for i, flat in enumerate(flats.values())
        if flat.numel()
    ]
    return ModuleRuns(
        names=[names for _, names in named],
        regions={name: Region.whole(param.shape) for name, param in params.items()},
        buffers=dict(saved_buffers(module)) if weights else {},
        weights=WeightStream(list(flats), segments, lambda flat: flat),
        states=[stream for target in targets for stream in target.streams(by_id)],
        dtypes={name: flat.dtype for name, flat in flats.items()},
        whole=lambda: whole,
    )
