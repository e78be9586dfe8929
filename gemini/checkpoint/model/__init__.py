"""What a module and its optimizer have to save."""
