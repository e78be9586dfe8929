"""Where optimizer state is: slabs, blocks on disk, parking."""
