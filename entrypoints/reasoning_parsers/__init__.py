"""Separates what a model thinks from what it answers, as it writes. No HTTP, no model."""
