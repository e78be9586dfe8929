"""The target of a plain module: its parameters, their views, their step."""
