"""`python -m gemini train`: fine-tunes models of Hugging Face's. trl trains; this puts together."""
