"""The files of a store, and the system calls that make, change and sync them."""
