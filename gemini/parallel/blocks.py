"""Tensor parallelism in 2, 2.5 and 3 dimensions: `nn.Linear` in blocks.

R rows · I, O features in and out · q ranks of a mesh dimension · d depth · P ranks in all
x [R / rows, I / q], weight [I / q, O / q] (3d: [I / q, O / q^2]), bias [O / q]: blocks of this rank
X = R * I, W = I * O, Y = R * O: elements of the whole

A weight is a DTensor of the whole [in, out], which is `nn.Linear`'s transposed: its `shape` is that
of the whole, and its `to_local()` is this rank's block. Values are those that the first rank draws,
as `nn.Linear` does. Activations are plain tensors, which torch's elementwise functions take.

Elements that a rank receives for one layer, forward and backward:

    2d    3 (q - 1) (X + W) / q^2        Xu et al., An Efficient 2D Method, arXiv 2104.05343
    2.5d  3 (q - 1) (X / d + W) / q^2    Wang et al., Tesseract, arXiv 2105.14500
    3d    2 (q - 1) (X + W + Y) / q^3    Bian et al., Maximizing Parallelism, arXiv 2105.14450

The papers and the documents price the time of such transfers. A tree's broadcasts take
log2(q) (X + W) / q for each of three products. The documents' 6 (q - 1) / q and
3 (q - 1) (d + 1) / (d q) are q times the first two rows at X = W = 1: rings that pass a whole block
on from rank to rank. Their 6 (q - 1) / q^3 is the third row at X = W = Y = 1.

[Note: panels] The first two are SUMMA's, which computes Y = X W, dX = dY W^T and dW = X^T dY in q
steps each. A step of the first broadcasts a block of X along each row of the mesh and one of W
along each column; the others broadcast one operand and sum the other. A rank is the root of one of
q steps and receives a block of n elements in the others: (q - 1) n, as in one all-gather of a
panel, or one reduce-scatter, which is what there is here, with one product. The price is memory:
while a product runs, a rank has panels of (X + W) / q elements (2.5d: X / d), and SUMMA
2 (X + W) / q^2. Backward gathers anew, so only blocks are kept for it. In 3d gathered panels of
(X + W) / q^2 are kept, as the paper counts: gathering them anew would be (q - 1) (X + W) / q^3
more.

An MLP of I -> 4 I -> I features in 1d receives 4 (P - 1) R I / P. With P = q^2, 2d receives less
if 15 + 24 I / R < 4 (q + 1): from 9 ranks on if R is much larger than I, from 81 on if R = I.

Beside these: an all-reduce of the weight's gradient over the depth, 2 (d - 1) W / (d q^2), and of
the bias's over the ranks that have the same block of it; in 3d two exchanges of Y / q^3 between
pairs of ranks, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from gemini.comm.communicator import all_gather_tensor, reduce_scatter_tensor
from gemini.comm.connect import announce, this_device

from .sizes import Layout

Group = dist.ProcessGroup | None  # None: this rank alone
Map = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Ranks that split layers in blocks: a part of a plugin's mesh; None is one rank alone."""

    layout: Layout
    mesh: DeviceMesh | None

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # of the same ranks

    @property
    def axes(self) -> tuple[str, ...]:
        """Dimensions that are there: those of one rank are left out."""
        known = (*self.layout.rows, *self.layout.weight)
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return tuple(name for name in names if name in known)

    def size(self, *axes: str) -> int:
        """Ranks in these dimensions together."""
        return prod(self._mesh[axis].size() for axis in axes if axis in self.axes)

    def group(self, axis: str) -> Group:
        return self._mesh.get_group(axis) if axis in self.axes else None

    def at(self, axis: str) -> int:
        """Place of this rank in a dimension."""
        return self._mesh.get_local_rank(axis) if axis in self.axes else 0

    def copies(self, cut: Mapping[str, int]) -> tuple[dist.ProcessGroup, ...]:
        """Groups of the dimensions that do not cut a parameter."""
        return tuple(self._mesh.get_group(axis) for axis in self.axes if axis not in cut)

    def place(self) -> int:
        """Row-major place of this rank."""
        index = 0
        for axis in self.axes:
            index = index * self.size(axis) + self.at(axis)
        return index

    def partner(self) -> int | None:
        """Number among all ranks of the one at (l, i, j), for this one at (j, i, l); None for
        itself."""
        if self.mesh is None:
            return None
        inner, middle, outer = (self.at(axis) for axis in self.axes)
        return None if inner == outer else int(self.own.mesh[outer, middle, inner])

    @property
    def own(self) -> DeviceMesh:
        """Mesh of these dimensions alone."""
        return self._mesh[self.axes]

    @property
    def cuts(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Dimensions of an activation with the axes that cut them, the outer one first."""
        return (0, self.layout.rows), (-1, (self.layout.columns,))

    @property
    def _mesh(self) -> DeviceMesh:
        assert self.mesh is not None
        return self.mesh


class BlockLinear(nn.Module):
    """Linear layer in blocks: blocks of the input in, blocks of the output out.

    Of q x q ranks each has a block; rows and features of input and output are cut in q. On d layers
    of such ranks each has 1/d of the rows, and the same weight.
    """

    def __init__(
        self,
        grid: Grid,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draw the whole as `nn.Linear` does, and keep this rank's blocks. Collective.

        Raises ValueError for features that the ranks do not divide, and within a context that makes
        parameters later.
        """
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._grid = grid
        cut = self._grid.layout.weight
        for dim, (name, size) in enumerate(
            (("in_features", in_features), ("out_features", out_features))
        ):
            ranks = self._grid.size(*(axis for axis in cut if cut[axis] == dim))
            if size % ranks:
                raise ValueError(
                    f"{name}={size} of {type(self).__name__}; expected a multiple of {ranks}, the "
                    "ranks that divide it"
                )
        whole = nn.Linear(in_features, out_features, bias, dtype=dtype)
        if whole.weight.is_meta:
            raise ValueError(
                f"{type(self).__name__} in a context that makes parameters later; expected it "
                "outside: a rank keeps its blocks alone"
            )
        self._of_bias = {self._grid.layout.columns: 0}
        self.weight = _cut(whole.weight.detach().T, self._grid, cut)
        held = None if whole.bias is None else _cut(whole.bias.detach(), self._grid, self._of_bias)
        self.register_parameter("bias", held)

    def forward(self, x: Tensor) -> Tensor:
        """Block of x W + b from the block x [rows, ..., I / q]. Collective.

        Raises ValueError for an input that is not cut, and in 3d as `join_blocks` does.
        """
        grid = self._grid
        features = self.in_features // grid.size(grid.layout.columns)
        if x.shape[-1] != features:
            raise ValueError(
                f"{type(self).__name__} was given {x.shape[-1]} features; expected the {features} "
                "of this rank's block, as split_blocks gives it"
            )
        weight = _Shared.apply(_local(self.weight), grid.copies(grid.layout.weight))
        bias = None
        if self.bias is not None:
            bias = _Shared.apply(_local(self.bias), grid.copies(self._of_bias))
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        y = self._product(x, weight)
        return y if bias is None else y + bias

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Product of the whole tensors, from blocks: this rank's block. See [Note: panels]."""
        along = (
            self._grid.group(self._grid.layout.columns),
            self._grid.group(self._grid.layout.rows[-1]),
        )
        y: Tensor = _Panels.apply(x, weight, *along)
        return y

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class CubeLinear(BlockLinear):
    """Linear layer over q x q x q ranks: rows are cut in q^2, features in q.

    A rank (j, i, l) of the mesh has rows (i, j) and features l of its input. Its product is of rows
    i and features j: sums over l leave rows (i, l). The paper changes the roles of j and l from
    layer to layer; here pairs of ranks exchange their blocks, so that every output is cut as every
    input, whatever order layers run in.
    """

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        _check_rows(x, self._grid)
        group, partner = self._grid.group, self._grid.partner()
        panel = _Mapped.apply(x, _gathered, _summed, group("3d_input"), 0)
        columns = _Mapped.apply(weight, _gathered, _summed, group("3d_weight"), 1)
        y: Tensor = _Mapped.apply(panel @ columns, _summed, _gathered, group("3d_output"), 0)
        return y if partner is None else _Mapped.apply(y, _exchanged, _exchanged, partner)


def split(x: Tensor, grid: Grid) -> Tensor:
    """This rank's block of a tensor [R, ..., I] that all ranks of a grid have alike.

    Its gradient is whole on all of them: backward is collective. Of one rank alone it is `x`.
    Until `join`, parameters of other layers would have another gradient on each rank.
    Raises ValueError for sizes that the ranks do not divide.
    """
    for dim, axes in grid.cuts:
        if x.shape[dim] % grid.size(*axes):
            raise ValueError(
                f"dimension {dim} of a tensor {[*x.shape]}; expected a multiple of "
                f"{grid.size(*axes)}, the ranks that divide it"
            )
    block: Tensor = _Mapped.apply(x, _own, _joined, grid)
    return block


def join(x: Tensor, grid: Grid) -> Tensor:
    """Whole tensor [R, ..., O] of the blocks of all ranks of a grid, on each of them. Collective.

    What follows is computed by all ranks alike, so the gradient of a block is that of its elements.
    Of one rank alone it is `x`. Raises ValueError for blocks of unequal rows, if they are on the
    CPU.
    """
    _check_rows(x, grid)
    whole: Tensor = _Mapped.apply(x, _joined, _own, grid)
    return whole


class GridDropout(nn.Dropout):
    """Dropout of blocks: ranks of a grid draw different elements, and their generators stay alike.

    grid: None is `nn.Dropout`.
    """

    def __init__(self, grid: Grid | None, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__(p, inplace)
        self._grid = grid

    def forward(self, x: Tensor) -> Tensor:
        if self._grid is None or not self.training:
            return super().forward(x)
        # one number of the common generator, which recomputation restores
        seed = int(torch.randint(2**40, (), device="cpu")) * self._grid.size(*self._grid.axes)
        own = torch.Generator(x.device).manual_seed(seed + self._grid.place())
        kept = torch.empty_like(x).bernoulli_(1 - self.p, generator=own).div_(1 - self.p or 1.0)
        return x.mul_(kept) if self.inplace else x * kept


def _cut(whole: Tensor, grid: Grid, cut: Mapping[str, int]) -> nn.Parameter:
    """Parameter with the first rank's values, as blocks over the grid. Collective."""
    whole = whole.contiguous()
    if grid.mesh is None:
        return nn.Parameter(whole)
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    announce(None, "a layer in blocks", [("whole", whole)])
    placed = [Shard(cut[axis]) if axis in cut else Replicate() for axis in grid.axes]
    return nn.Parameter(distribute_tensor(whole.to(this_device()), grid.own, placed))


def _local(param: Any) -> Tensor:
    local: Tensor = param.to_local() if hasattr(param, "to_local") else param
    return local


def _check_rows(x: Tensor, grid: Grid) -> None:
    """Raise ValueError on all ranks of a grid whose blocks have unequal rows. Collective.

    On the CPU alone, where a collective of unequal sizes would end the process: on a GPU the host
    would wait for it in every layer.
    """
    if grid.mesh is None or x.device.type != "cpu":
        return
    rows = torch.tensor([x.shape[0]])
    for axis in grid.axes:
        rows = _gathered(rows, grid.group(axis), 0)
    if (rows != rows[0]).any():
        raise ValueError(
            f"ranks have blocks of {rows.tolist()} rows; expected as many on each, as split_blocks "
            "gives them: drop_last=True leaves out what the ranks do not divide"
        )


# -- collectives, as torch differentiates them --


def _gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    """Blocks of all ranks of a group, next to each other in `dim`."""
    if group is None:
        return x
    ranks = dist.get_world_size(group)
    found = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    all_gather_tensor(found, x.contiguous(), group=group)
    return torch.cat(found.chunk(ranks), dim) if dim else found


def _summed(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's block in `dim` of the sum over a group."""
    if group is None:
        return x
    ranks = dist.get_world_size(group)
    parts = torch.cat(x.chunk(ranks, dim)) if dim else x.contiguous()
    found = x.new_empty(parts.shape[0] // ranks, *parts.shape[1:])
    reduce_scatter_tensor(found, parts, group=group)
    return found


def _joined(x: Tensor, grid: Grid) -> Tensor:
    for dim, axes in grid.cuts:
        for axis in reversed(axes):
            x = _gathered(x, grid.group(axis), dim)
    return x


def _own(x: Tensor, grid: Grid) -> Tensor:
    for dim, axes in grid.cuts:
        for axis in axes:
            x = x.chunk(grid.size(axis), dim)[grid.at(axis)]
    return x.contiguous()


def _exchanged(x: Tensor, partner: int) -> Tensor:
    """The block of another rank, which takes this one's."""
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    sent = dist.P2POp(dist.isend, x.contiguous(), partner)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, found, partner)]):
        work.wait()
    return found


class _Panels(torch.autograd.Function):
    """y = x w by panels along a row and a column of a mesh. Keeps blocks alone for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, row: Group, column: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.along = row, column
        return _gathered(x, row, -1) @ _gathered(weight, column, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x, weight), (row, column) = ctx.saved_tensors, ctx.along
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _summed(dy @ _gathered(weight, column, 0).T, row, -1)
        if ctx.needs_input_grad[1]:
            panel = _gathered(x, row, -1).flatten(0, -2)
            dw = _summed(panel.T @ dy.flatten(0, -2), column, 0)
        return dx, dw, None, None


class _Mapped(torch.autograd.Function):
    """A linear map of this rank's tensor, whose gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map, *given: Any) -> Tensor:
        ctx.back = back, there, *given
        return there(x, *given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Mapped.apply(grads[0], *ctx.back), *(None for _ in ctx.back)


class _Shared(torch.autograd.Function):
    """A parameter that several ranks have alike, whose gradient is the sum over them."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        ctx.groups = groups
        return param.view_as(param)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.groups:
            grad = grad.clone(memory_format=torch.contiguous_format)
        for group in ctx.groups:
            dist.all_reduce(grad, group=group)
        return grad, None
