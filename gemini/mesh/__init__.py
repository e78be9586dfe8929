"""Meshes: what each of their dimensions is for, and which rank has what. Pure."""
