"""Stages of a pipeline: micro-batches of a schedule, and one step of all stages together."""
