"""First come, first served, with a host cache behind it such as LMCache: no pins, and no order of jobs.

It is what the other policies for agents are compared with.
"""

from __future__ import annotations

from .fcfs import FirstComeFirstServed


class LMCacheLike(FirstComeFirstServed):
    """As fcfs. It takes a host tier (``--host-cache-gb``), which the server checks."""
