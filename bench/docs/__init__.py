"""README's tables and picture, and every result made again: `python -m bench.docs.NAME`."""
