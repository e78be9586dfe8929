"""Blocks of state on disk: what each consists of, and those that a save has pinned."""
