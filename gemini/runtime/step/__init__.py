"""The optimizer step over shards."""
