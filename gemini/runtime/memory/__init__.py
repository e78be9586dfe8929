"""Where model data is: backends, shards, files, the ledger."""
