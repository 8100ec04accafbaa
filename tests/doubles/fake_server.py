"""The real launcher, HTTP server and detokenizer around the fake worker; flags as for launch_server."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from baton.entrypoints.launch_server import main

if __name__ == "__main__":
    status = main(worker_command=[str(Path(__file__).with_name("fake_worker.py"))])
    if status == 0:
        print(f"{gc.get_freeze_count()} objects are never visited by the garbage collector")
    sys.exit(status)
