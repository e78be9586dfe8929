"""How large chunks are: the search, what it packs and what that wastes. Pure."""
