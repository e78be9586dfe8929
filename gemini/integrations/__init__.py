"""Doors: other libraries' loops reach the memory manager through here. The engine imports none.

One file a door. A file imports its own optional package, and says which extra installs it.
"""
