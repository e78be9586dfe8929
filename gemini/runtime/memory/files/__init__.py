"""Tensors in files, whole and by block."""
