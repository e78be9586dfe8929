"""I/O engines; see `nvme.engine` for the protocol."""
