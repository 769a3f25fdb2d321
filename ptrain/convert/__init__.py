"""Export to Transformers folders, and text generation."""
