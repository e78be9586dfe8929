"""What a step asks of the host, counted: `python -m bench.host.NAME`."""
