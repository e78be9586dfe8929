"""From a module to chunks, and back to a plain module."""
