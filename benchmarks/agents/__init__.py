"""Benchmarks of agents' jobs, whose tools run between requests, on a live server."""
