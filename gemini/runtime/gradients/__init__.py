"""Gradients between backward and step, as a user may see and change them."""
