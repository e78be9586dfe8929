"""Kernels of the update: one frame, and a formula an optimizer."""
