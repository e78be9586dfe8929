"""Whole tensors, digests and reports of an engine."""
