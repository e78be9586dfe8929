"""Chunks: runs of whole parameters in flat buffers, and where everything lies in them."""
