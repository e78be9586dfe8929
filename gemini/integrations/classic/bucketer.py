"""ReduceScatterBucketer: many small reduce-scatters as few large ones. It uses no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Callback = Callable[[Tensor], Any]
# torch 2.13 renames it
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class _Bucket:
    """Bucket of waiting tensors: for each rank the first `filled` of S elements."""

    data: Tensor  # [W, S]
    filled: int = 0
    waiting: list[tuple[Callback | None, torch.Size, int]] = field(default_factory=list)


class ReduceScatterBucketer:
    """Bucketer of reduce-scatters: sums small tensors over ranks, many in one collective.

    bucket_size_mb: MiB of one bucket over all ranks; 0 or less reduces each call by itself. There
        is a bucket for each process group, dtype and device.

    All ranks make the same calls in the same order, also those that callbacks make.
    """

    def __init__(self, bucket_size_mb: float = 25) -> None:
        self.bucket_size_mb = bucket_size_mb
        self._buckets: dict[tuple[Any, torch.dtype, torch.device], _Bucket] = {}

    @torch.no_grad()
    def reduce_scatter_async(
        self,
        input_list: Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        callback_fn: Callback | None = None,
    ) -> None:
        """Take this rank's tensors, one for each rank of `group`, of one shape, dtype and device.

        callback_fn: called with the sum of all ranks' tensors for this rank: at once for a tensor
            larger than a bucket, else by `flush` at the latest. Callbacks may run in another order
            than calls.

        Raises ValueError for another number of tensors, and for tensors that are not alike.
        """
        world_size = dist.get_world_size(group)
        first = input_list[0] if input_list else None
        if first is None or len(input_list) != world_size:
            raise ValueError(
                f"input_list has {len(input_list)} tensors; expected one for each of the "
                f"{world_size} ranks of the group"
            )
        for other in input_list:
            if (other.shape, other.dtype, other.device) != (first.shape, first.dtype, first.device):
                raise ValueError(
                    f"input_list has a tensor of shape {tuple(other.shape)} in {other.dtype} on "
                    f"{other.device} beside one of shape {tuple(first.shape)} in {first.dtype} on "
                    f"{first.device}; expected tensors that are alike"
                )
        capacity = int(max(0, self.bucket_size_mb) * 2**20) // first.element_size() // world_size
        if first.numel() > capacity:
            whole = torch.stack([tensor.reshape(-1) for tensor in input_list])
            result = _reduced(whole, group).view(first.shape)
            if callback_fn is not None:
                callback_fn(result)
            return
        key = (group, first.dtype, first.device)
        # a loop: emptying runs callbacks, which may call this and fill the bucket again
        while True:
            bucket = self._buckets.get(key)
            if bucket is None or bucket.filled + first.numel() <= capacity:
                break
            self._empty(key, bucket)
        if bucket is None:
            data = torch.empty(world_size, capacity, dtype=first.dtype, device=first.device)
            bucket = self._buckets[key] = _Bucket(data)
        for row, tensor in zip(bucket.data, input_list, strict=True):
            row[bucket.filled : bucket.filled + tensor.numel()].copy_(tensor.reshape(-1))
        bucket.waiting.append((callback_fn, first.shape, bucket.filled))
        bucket.filled += first.numel()

    @torch.no_grad()
    def flush(self) -> None:
        """Reduce all waiting tensors, and those that callbacks add meanwhile."""
        while True:
            waiting = [(key, bucket) for key, bucket in self._buckets.items() if bucket.waiting]
            if not waiting:
                return
            for key, bucket in waiting:
                if bucket.waiting:  # a callback may have flushed it
                    self._empty(key, bucket)

    def free(self) -> None:
        """Free the memory of all buckets. Raises RuntimeError if a tensor waits in one."""
        if any(bucket.waiting for bucket in self._buckets.values()):
            raise RuntimeError(
                "tensors wait in the buckets and would be lost; call flush() before free()"
            )
        self._buckets.clear()

    def _empty(self, key: tuple[Any, torch.dtype, torch.device], bucket: _Bucket) -> None:
        """Reduce a bucket, then run its callbacks."""
        result = _reduced(bucket.data[:, : bucket.filled], key[0])
        # emptied before callbacks run, as they may add to this bucket
        waiting, bucket.waiting, bucket.filled = bucket.waiting, [], 0
        for callback, shape, start in waiting:
            if callback is not None:
                callback(result[start : start + shape.numel()].view(shape))


def _reduced(data: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over ranks of row `rank` of `data` [W, n]: [n]."""
    result = torch.empty(data.shape[1], dtype=data.dtype, device=data.device)
    if data.shape[1]:
        _reduce_scatter(result, data.contiguous().view(-1), group=group)
    return result
