"""Finds a model's calls of tools in the text that it writes, as it writes it. No HTTP, no model."""
