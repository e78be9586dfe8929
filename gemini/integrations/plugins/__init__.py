"""Plugins: options, and how a module and its optimizer are wrapped with them."""
