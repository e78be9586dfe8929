"""One step of one or more targets, written once for plain modules and for shards."""
