"""Booster: what wraps, saves and loads by a plugin."""
