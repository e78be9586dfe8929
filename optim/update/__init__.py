"""How a block is updated: by the CPU, eager or compiled, or by Triton."""
