"""The three tiers. Pure."""

from __future__ import annotations

from enum import Enum


class Tier(Enum):
    """Kind of memory that bytes are in."""

    DEVICE = "device"  # memory of the compute device
    HOST = "host"  # RAM, pinned where it pays; the same memory on a CPU compute device
    NVME = "nvme"  # files
