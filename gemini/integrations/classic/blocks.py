"""Layers of `colossalai.nn` for 2D, 2.5D and 3D tensor parallelism, over the configuration's ranks.

What they compute and what ranks receive for it is in `gemini.parallel.blocks`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from gemini.api import this_device
from gemini.integrations.config import global_context, plugin_of
from gemini.parallel.blocks import BlockLinear, CubeLinear, Grid, GridDropout, join, split
from gemini.parallel.sizes import LAYOUTS


def grid_of(*modes: str) -> Grid:
    """Grid of the configuration. Collective.

    modes: that the caller knows. Raises ValueError for a configuration with another one.
    """
    plugin = plugin_of(global_context.config, zero_stage=1)
    if plugin.tp_size == 1:
        return Grid(LAYOUTS[modes[0]], None)
    if plugin.tp_mode not in modes:
        named = " or ".join(map(repr, modes))
        raise ValueError(
            f"a layer or function of mode {named} in a configuration with mode {plugin.tp_mode!r}; "
            f"expected launch(config=dict(parallel=dict(tensor=dict(size=, mode={named}))))"
        )
    return Grid(LAYOUTS[plugin.tp_mode], plugin.sizes.mesh(this_device()))


class _Configured(BlockLinear):
    """Base of layers over the grid of the configuration, which has their mode."""

    mode: ClassVar[str]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """See `gemini.parallel.blocks.BlockLinear`. Collective.

        Raises ValueError as it does, and for a configuration of another mode.
        """
        super().__init__(grid_of(self.mode), in_features, out_features, bias, dtype)


class Linear2D(_Configured):
    """Linear layer of which each of q x q ranks has a block; rows and features of its input and
    output are cut in q."""

    mode = "2d"


class Linear2p5D(_Configured):
    """`Linear2D` on d layers of q x q ranks, each with 1/d of the rows and the same weight."""

    mode = "2.5d"


class Linear3D(_Configured, CubeLinear):
    """Linear layer over q x q x q ranks: rows are cut in q^2, features in q."""

    mode = "3d"


def split_blocks(x: Tensor) -> Tensor:
    """This rank's block of a tensor [R, ..., I] that all ranks of the configuration's grid have
    alike; see `gemini.parallel.blocks.split`. Without a mesh it is `x`. Raises ValueError."""
    return split(x, grid_of(*LAYOUTS))


def join_blocks(x: Tensor) -> Tensor:
    """Whole tensor [R, ..., O] of the blocks of all ranks of the configuration's grid. Collective.

    See `gemini.parallel.blocks.join`. Without a mesh it is `x`. Raises ValueError.
    """
    return join(x, grid_of(*LAYOUTS))


class BlockDropout(GridDropout):
    """Dropout of blocks, in the grid of the configuration; in another mode it is `nn.Dropout`."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        mode = plugin_of(global_context.config, zero_stage=1).tp_mode
        super().__init__(grid_of(mode) if mode in LAYOUTS else None, p, inplace)
