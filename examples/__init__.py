"""Runnable examples: a trained toy model and a demonstration of the server."""
