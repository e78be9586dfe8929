"""Measurements: `python -m bench.NAME`. Not part of the wheel."""
