"""Plugins' sizes above 1: meshes, modules that torch splits, and models cut into stages."""
