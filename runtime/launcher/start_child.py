"""``python -m baton.runtime.launcher.start_child MODULE ARGUMENTS…``: run a child's module without garbage collection
until its start has ended.

Imports and a model make a million objects, and all of them stay; collections would visit them again and again, for a
quarter of a second. `settle_memory`, at the end of the start, collects once and turns collection on.
"""

from __future__ import annotations

import runpy
import sys

from ..settled_memory import pause_collection

if __name__ == "__main__":
    pause_collection()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
