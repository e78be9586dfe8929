"""`python -m gemini plan`: does a model fit, where is what, how long does a step take."""
