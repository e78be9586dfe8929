"""Where the engine meets torch's autograd: calls, and casts at the boundary."""
