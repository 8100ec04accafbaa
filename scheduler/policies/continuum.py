"""Continuum's policy, after the fork of vLLM of that name, as far as its behaviour is published."""

from __future__ import annotations

from .job_order import JobOrder


class Continuum(JobOrder):
    """Pins every tool for a fixed time, unless it is known to take longer; steps in the order of their jobs."""
