"""Which tier everything lives on. Pure."""
