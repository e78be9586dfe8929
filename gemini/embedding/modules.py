"""`CachedEmbedding` and `CachedEmbeddingBag`: torch's modules over rows that live elsewhere."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gemini.arguments import passes_on
from gemini.comm.communicator import Communicator
from gemini.nvme import NvmeError, local_folder
from gemini.optim.state.memory import memory_of

from . import saving
from .exchange import RowExchange
from .file_home import SUFFIX, FileHome, RowLayout
from .homes import HostHome, RowHome
from .rules import RowAdagrad, RowRule
from .table import RowReport, RowTable

B = TypeVar("B")
Grads = tuple[Tensor, Tensor]  # (ids [n] on the host, each once, ascending; gradients [n, dim])
_INITIAL_NUMEL = 1 << 20  # of a table's first values, drawn at once: as torch draws them whole


class CachedRows(nn.Module):
    """What both modules have: rows, their updates, their window and their checkpoints.

        emb = gemini.CachedEmbedding(10_000_000, 16, cache_rows=500_000, rule=RowAdagrad(lr=0.01))
        for batch in emb.prefetch(loader, ids=lambda batch: batch["ids"]):
            model(batch).backward()
            optimizer.step()  # of everything else
            emb.step()

    num_embeddings, embedding_dim: of the whole table, over all ranks. Rows are kept and updated in
        fp32; results have the dtype in which a wrapper computes (GeminiDDP's, or `.to(dtype)`).
    cache_rows: rows on `device`, of each rank; at least those of one batch, or of all micro-batches
        of a step.
    home: where all rows and their state are: `"host"` memory, or `"nvme"`, a file in `nvme_dir`.
    lookahead: batches beyond the current one that `prefetch` takes from its loader.
    rule: `RowSGD`, `RowAdagrad` or `LazyAdam`; may be set between two steps.
    name: of the file. recover: go on with what an ended process left in it, at its last step.
    process_group: ranks that share the rows; a forward, `prefetch` and every method is collective.
    frozen: without gradients.

    Only rows that a backward reached are updated, by `step()`. Gradients are means over ranks.
    Raises ValueError, on every rank, for what does not fit or is not built.
    """

    buffers_as_weights = ("_computes_in",)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        cache_rows: int,
        home: Literal["host", "nvme"] = "host",
        lookahead: int = 8,
        rule: RowRule | None = None,
        nvme_dir: str | os.PathLike[str] | None = None,
        name: str = "embedding",
        recover: bool = False,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        frozen: bool = False,
        padding_idx: int | None = None,
        _weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        _check(num_embeddings, embedding_dim, cache_rows, lookahead, dtype)
        if home not in ("host", "nvme") or (home == "nvme") != (nvme_dir is not None):
            raise ValueError(
                f"home={home!r} with nvme_dir={nvme_dir!r}; expected 'host' without, or 'nvme' "
                "with a folder"
            )
        if recover and home != "nvme":
            raise ValueError("recover=True; expected home='nvme': host memory ends with a process")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.lookahead, self.frozen = lookahead, frozen
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx={padding_idx}; expected one of {num_embeddings} rows")
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        rule = rule or RowAdagrad()
        comm = Communicator(process_group)
        self._exchange = RowExchange(comm, num_embeddings)
        owned, width = self._exchange.owned, embedding_dim + rule.state_numel(embedding_dim)
        cache_rows = max(1, min(cache_rows, owned))
        at_home: RowHome
        if nvme_dir is None:
            at_home = HostHome(owned, width, memory_of(torch.device(device or "cpu")))
        else:
            path = local_folder(nvme_dir)
            path /= f"{name}-{comm.rank}-of-{comm.world_size}{SUFFIX}"
            what = f"{type(rule).__name__} of {num_embeddings} x {embedding_dim}"
            layout = RowLayout(owned, width, cache_rows, what)
            at_home = self._agreed(lambda: FileHome(path, layout, opens=recover))
        self._table = RowTable(owned, embedding_dim, cache_rows, rule, at_home)
        self._table.move(lambda cache: cache.to(device))
        # has the dtype that a wrapper, or `.to(dtype)`, gives modules: forward's result has it too
        self.register_buffer("_computes_in", torch.empty(0, device=device), persistent=False)
        self._lock = threading.RLock()  # another thread may evaluate
        self._arrived: list[tuple[int, Grads]] = []  # (backward, gradients), in order
        self._sum: Grads | None = None  # of all ranks, of this rank's rows; None: not made yet
        self._ahead: deque[Any] | None = None  # batches of `prefetch`
        if isinstance(at_home, FileHome) and recover:
            file = at_home
            steps = comm.gather_objects(file.last_step)
            self._agreed(lambda: file.recover(min(steps)))
        else:
            self._agreed(lambda: self._table.fill(self._first_parts(_weight), 0))

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> Self:
        """Module with these rows, frozen unless `freeze=False`; options as of the class."""
        num, dim = embeddings.shape
        return cls(num, dim, frozen=freeze, _weight=embeddings, **options)

    def _first_parts(self, weight: Tensor | None) -> Iterator[Tensor]:
        """First records of this rank's rows: torch's values of the whole table under this seed."""
        num, dim = self.num_embeddings, self.embedding_dim
        count = max(16, _INITIAL_NUMEL // dim // 16 * 16)
        starts = [0, *range(count, num - 16, count)]  # the last part is not shorter than 16 rows
        for start, end in zip(starts, [*starts[1:], num], strict=True):
            part = torch.empty(end - start, dim) if weight is None else weight[start:end]
            if weight is None:
                nn.init.normal_(part)
                if self.padding_idx is not None and start <= self.padding_idx < end:
                    part[self.padding_idx - start] = 0
            comm = self._exchange.comm
            own = part.detach()[(comm.rank - start) % comm.world_size :: comm.world_size].float()
            state = own.new_zeros(len(own), self._table.width - dim, device="cpu")
            yield torch.cat([own.cpu(), state], 1)

    # -- batches --

    def prefetch(self, loader: Iterable[B], ids: Callable[[B], Any]) -> Iterator[B]:
        """Iterator of the batches of `loader`, whose rows are in the cache when one is given.

        ids: of a batch, all ids that its forward will look up: a tensor, or several in a list,
            tuple or dict. Others are looked up too, as without a loader.
        It takes `lookahead` batches more than it gave. Raises ValueError if a batch does not fit.
        """
        if self._ahead is not None:
            raise ValueError("rows of another loader are prefetched; expected one loop at a time")
        return self._prefetch(iter(loader), ids)

    def _prefetch(self, loader: Iterator[B], ids: Callable[[B], Any]) -> Iterator[B]:
        self._ahead, has_ended = deque(), False
        try:
            while True:
                while not has_ended and len(self._ahead) <= self.lookahead:
                    batch = next(loader, _END)
                    wanted = None if batch is _END else torch.unique(_flat(ids(batch)))
                    route = self._exchange.route(wanted)
                    has_ended = route is None
                    if route is not None:
                        self._table.announce(route.rows.tolist())
                        self._ahead.append(batch)
                if not self._ahead:
                    return
                with self._lock:
                    self._agreed(self._table.next_batch)
                yield self._ahead.popleft()
        finally:
            self._ahead = None
            with self._lock:
                self._table.forget()

    def _look_up(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """(weights [n, dim] of the distinct ids, places of `ids` in them, that of the padding)."""
        flat, found = _flat(ids), None
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.num_embeddings:
            found = ValueError(
                f"ids from {int(flat.min())} to {int(flat.max())}; expected 0 to "
                f"{self.num_embeddings - 1}"
            )
            flat = flat[:0]
        distinct, inverse = torch.unique(flat, return_inverse=True)
        learns = torch.is_grad_enabled() and not self.frozen
        with self._lock, torch.no_grad():
            route = self._exchange.route(distinct)
            assert route is not None
            slots = self._agreed(lambda: self._slots(route.rows, learns), found)
            weights = self._table.cache[slots, : self.embedding_dim]
            weights = self._exchange.fetch(route, weights)
        if learns:
            weights.requires_grad_().register_post_accumulate_grad_hook(
                lambda leaf: self._take(distinct, leaf)
            )
        padding = None
        if self.padding_idx is not None:
            place = int(torch.searchsorted(distinct, self.padding_idx))
            is_there = place < len(distinct) and int(distinct[place]) == self.padding_idx
            padding = place if is_there else None
        return weights, inverse.view(ids.shape).to(ids.device), padding

    def _slots(self, rows: Tensor, waits: bool) -> Tensor:
        """Slots of rows that may be asked for by several ranks."""
        distinct, inverse = torch.unique(rows, return_inverse=True)
        return self._table.slots_of(distinct.tolist(), waits=waits)[inverse]

    def _take(self, ids: Tensor, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        if self.padding_idx is not None:  # its row is not learnt
            learnt = ids != self.padding_idx
            ids, grad = ids[learnt], grad[learnt.to(grad.device)]
        self._arrived.append((torch._C._current_graph_task_id(), (ids, grad)))
        self._sum = None

    # -- steps --

    @property
    def rule(self) -> RowRule:
        """Rule of the coming step."""
        return self._table.rule

    @rule.setter
    def rule(self, rule: RowRule) -> None:
        if type(rule) is not type(self._table.rule):
            raise ValueError(
                f"rule={rule!r} has other state; expected a {type(self._table.rule).__name__}, as "
                "dataclasses.replace(emb.rule, lr=...) makes one"
            )
        self._table.rule = rule

    def grad_norm(self) -> Tensor:
        """Norm of the gradients of all rows over all ranks, fp64, on the host; not finite if one
        of them is not. For a clip beside other parameters: `step(scale)` takes the factor."""
        grads = self._gradients()[1].double()
        return self._exchange.total((grads * grads).sum().cpu().view(1))[0].sqrt()

    def step(self, scale: float | Tensor = 1.0) -> None:
        """Update the rows whose gradients have arrived, times `scale`, and forget the gradients.

        Nothing happens if no rank's backward reached the module. scale: of a clip, or 1 / loss
        scale, or both. Raises NvmeError, or ValueError on the other ranks, if one cannot write;
        then the last step stays whole.
        """
        rows, grads = self._gradients()
        arrived = torch.tensor([len(self._arrived)], dtype=torch.float64)
        if not self._exchange.total(arrived).item():
            return
        with self._lock, torch.no_grad():
            scaled = grads * torch.as_tensor(scale, dtype=torch.float32, device=grads.device)
            self._agreed(lambda: self._table.prepare(rows.tolist(), scaled))
            self._table.confirm()
        self._forget_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that have arrived: in place of `step()` if it is to be skipped."""
        super().zero_grad(set_to_none)
        self._forget_gradients()

    def undo(self) -> None:
        """Go back to before the last step, once. Raises ValueError if there is none."""

        def prepare() -> None:
            if not self._table.can_undo:
                raise ValueError("no step to undo; expected one since the last undo or load")
            self._table.prepare_undo()

        with self._lock:
            self._agreed(prepare)
            self._table.confirm()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self._arrived.clear()
        self._sum = None
        self._table.let_go()

    @torch.no_grad()
    def _gradients(self) -> Grads:
        """Gradients of this rank's rows, as means over ranks. Collective."""
        exchange, world_size = self._exchange, self._exchange.comm.world_size
        changed = exchange.total(torch.tensor([float(self._sum is None)]).double())
        if self._sum is not None and not changed.item():
            return self._sum
        # 1. of one backward, as autograd adds what reaches one weight; then backwards in order
        none = torch.empty(0, dtype=torch.int64), self._table.cache.new_empty(0, self.embedding_dim)
        backwards = [
            _added([grads for _, grads in parts])
            for _, parts in groupby(self._arrived, key=lambda part: part[0])
        ]
        ids, grads = _added(backwards) if backwards else none
        self._arrived = [(-1, (ids, grads))] if backwards else []
        # 2. over ranks, in their order
        if world_size > 1:
            route = exchange.route(ids)
            assert route is not None
            ids, grads = _added(exchange.give(route, grads))
            grads /= world_size
        self._sum = ids, grads
        return self._sum

    # -- all rows --

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a new `folder` with all rows, their state, the step and the rule's settings. It
        has that name when it is whole."""
        saving.save(self._table, self._exchange, Path(folder))

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Take rows, state and step from a folder of `save`, of any world size. Gradients are
        forgotten. Raises CheckpointError or ValueError; see `saving.load`."""
        self._refuse_in_loop("load")
        saving.load(self._table, self._exchange, Path(folder))
        self._forget_gradients()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Add `weight` [num_embeddings, embedding_dim], as torch has it: all of it in memory."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._refuse_ranks("state_dict()", "save(folder)")
        parts = [part[:, : self.embedding_dim].clone() for part in self._table.parts()]
        destination[f"{prefix}weight"] = torch.cat(parts)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Take `weight`; state and step stay, as those of an optimizer do."""
        self._refuse_ranks("load_state_dict()", "load(folder)")
        self._refuse_in_loop("load_state_dict")
        weight = state_dict.get(f"{prefix}weight")
        if weight is None:
            missing_keys.extend([f"{prefix}weight"] if strict else [])
            return
        shape = (self.num_embeddings, self.embedding_dim)
        if tuple(weight.shape) != shape:
            error_msgs.append(f"{prefix}weight has shape {tuple(weight.shape)}, expected {shape}")
            return

        def changed() -> Iterator[Tensor]:
            at = 0
            for part in parts:
                part[:, : self.embedding_dim] = weight[at : at + len(part)]
                at += len(part)
                yield part

        parts = self._table.parts()
        self._table.fill(changed(), self._table.home.step)
        self._forget_gradients()

    def report(self) -> RowReport:
        """Hits, misses and bytes of this rank: planned beside counted."""
        return self._table.report(self.lookahead)

    def close(self) -> None:
        """Let the home go: its file stays, and `recover=True` opens it."""
        self._table.home.close()

    # -- of all modules --

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"a {type(self).__name__} has no weight: its rows are in their home, and step() "
                "updates them; state_dict() makes the whole, from_pretrained() takes it"
            )
        return super().__getattr__(name)

    def __getstate__(self) -> NoReturn:
        raise ValueError(
            f"a {type(self).__name__} cannot be copied or pickled; expected save() and load()"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._table.move(fn)
        return self

    def extra_repr(self) -> str:
        """Sizes, as torch prints those of its modules."""
        cached = len(self._table.cache)
        return f"{self.num_embeddings}, {self.embedding_dim}, cache_rows={cached}, {self.rule}"

    def _refuse_in_loop(self, what: str) -> None:
        if self._ahead is not None:
            raise ValueError(f"{what} within a loop over prefetch(); expected it before or behind")

    def _refuse_ranks(self, what: str, instead: str) -> None:
        if self._exchange.comm.world_size > 1:
            raise ValueError(f"{what} of rows that ranks share; expected {instead} on every rank")

    def _agreed(self, work: Callable[[], B], found: Exception | None = None) -> B:
        """Result of this rank's `work`, if no rank's raises, and `found` is None on all. Else it
        raises, on every rank."""
        result: Any = None
        if found is None:
            try:
                result = work()
            except (ValueError, NvmeError) as error:
                found = error
        comm = self._exchange.comm
        failed = torch.zeros(comm.world_size, dtype=torch.float64)
        failed[comm.rank] = float(found is not None)
        ranks = self._exchange.total(failed).nonzero().view(-1).tolist()
        if found is not None:
            raise found
        if ranks:
            raise ValueError(f"ranks {ranks} refused; expected what their messages say")
        return result  # type: ignore[no-any-return]


class CachedEmbedding(CachedRows):
    """`torch.nn.Embedding` whose rows are in a cache over a home; see `CachedRows`.

    max_norm and sparse are refused: the one changes rows in a forward, and updates are sparse in
    any case.
    """

    @passes_on(CachedRows.__init__)
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        *,
        cache_rows: int,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        **options: Any,
    ) -> None:
        _refuse(max_norm, sparse)
        super().__init__(
            num_embeddings,
            embedding_dim,
            cache_rows=cache_rows,
            padding_idx=padding_idx,
            **options,
        )
        self.scale_grad_by_freq = scale_grad_by_freq

    def forward(self, input: Tensor) -> Tensor:
        """Rows of `input` [...]: [..., embedding_dim]."""
        weights, places, padding = self._look_up(input)
        found = F.embedding(
            places, weights, padding_idx=padding, scale_grad_by_freq=self.scale_grad_by_freq
        )
        return found.to(self._computes_in.dtype)


class CachedEmbeddingBag(CachedRows):
    """`torch.nn.EmbeddingBag` whose rows are in a cache over a home; see `CachedRows`."""

    @passes_on(CachedRows.__init__)
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        *,
        cache_rows: int,
        scale_grad_by_freq: bool = False,
        mode: Literal["sum", "mean", "max"] = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        _refuse(max_norm, sparse)
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode={mode!r}; expected 'sum', 'mean' or 'max'")
        super().__init__(num_embeddings, embedding_dim, cache_rows=cache_rows, **options)
        self.scale_grad_by_freq, self.mode = scale_grad_by_freq, mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Bags [number of bags, embedding_dim] of `input`, as torch takes it with `offsets`."""
        weights, places, padding = self._look_up(input)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(weights.dtype)
        found = F.embedding_bag(
            places,
            weights,
            offsets,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
        return found.to(self._computes_in.dtype)


_END: Any = object()  # of a loader


def _check(
    num_rows: int, dim: int, cache_rows: int, lookahead: int, dtype: torch.dtype | None
) -> None:
    sizes = {"num_embeddings": num_rows, "embedding_dim": dim, "cache_rows": cache_rows}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}; expected at least 1")
    if lookahead < 0:
        raise ValueError(f"lookahead={lookahead}; expected a number of batches from 0 up")
    if dtype not in (None, torch.float32):
        raise ValueError(
            f"dtype={dtype}; expected torch.float32: rows are updated as they are kept"
        )


def _refuse(max_norm: float | None, sparse: bool) -> None:
    if max_norm is not None:
        raise ValueError(
            f"max_norm={max_norm} changes rows in a forward; expected None, and a norm of the "
            "output where the loss needs one"
        )
    if sparse:
        raise ValueError("sparse=True; expected False: only rows of a batch are updated anyway")


def _flat(ids: Any) -> Tensor:
    """Ids of a tensor, or of all tensors in it, [n] int64 on the host."""
    if isinstance(ids, Tensor):
        return ids.detach().reshape(-1).cpu().long()
    parts: Sequence[Any] = list(ids.values() if isinstance(ids, dict) else ids)
    return torch.cat([_flat(part) for part in parts]) if parts else torch.empty(0).long()


def _added(parts: Sequence[Grads]) -> Grads:
    """Sum of gradients, those of one id in the order of `parts`."""
    if len(parts) == 1:
        return parts[0]
    ids, where = torch.unique(torch.cat([ids for ids, _ in parts]), return_inverse=True)
    total = parts[0][1].new_zeros(len(ids), parts[0][1].shape[1])
    for places, (_, grads) in zip(where.split([len(i) for i, _ in parts]), parts, strict=True):
        places = places.to(total.device)
        total[places] = total[places] + grads  # each id once: no order within a part
    return ids, total
