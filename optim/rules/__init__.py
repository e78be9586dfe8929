"""What is computed, and how it is said: formulas, planes, clipping, the loss scale, the report."""
