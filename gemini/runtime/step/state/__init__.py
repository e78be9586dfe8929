"""The optimizer state behind the shards of an engine, and the ways in which others see it."""
