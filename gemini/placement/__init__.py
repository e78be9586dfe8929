"""Where model data lives: policies and plans. Pure."""
