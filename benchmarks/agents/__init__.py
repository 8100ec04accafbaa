"""Agents' jobs: requests with tools that run between them, against a live server."""
