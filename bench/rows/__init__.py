"""Rows of `bench.train`: what they are, the processes that run them, what they measured."""
