"""Weights that leave a model that trains: for a sampler, an evaluation, another process."""
