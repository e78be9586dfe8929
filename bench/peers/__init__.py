"""Other packages on the same work, each in a process of its own."""
