"""A simulated device, for tests and benches without a GPU: `SimBackend`."""

from .device import SimBackend

__all__ = ["SimBackend"]
