"""`python -m gemini doctor`: what this machine has, how fast it is, and what to do about it."""
