"""Bytes that chunks hold in memory, kept up to date by the chunks themselves. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Account:
    """Sums over all chunks that are counted here."""

    payloads: int = 0  # gathered, on the device
    device_shards: int = 0  # beside the payloads
    host_shards: int = 0
    gradients: int = 0  # on the device
