"""Continuum's policy, after the fork of vLLM of that name, as far as its behaviour is published."""

from __future__ import annotations

from .job_order import JobOrder


class Continuum(JobOrder):
    """Pins every step for a fixed time, unless its tool is known to take longer; runs steps in the order of their
    jobs."""
