"""The real launcher, HTTP server and detokenizer around the scripted worker; flags as for launch_server."""

from __future__ import annotations

import sys
from pathlib import Path

from baton.entrypoints.launch_server import main

if __name__ == "__main__":
    sys.exit(main(worker_command=[str(Path(__file__).with_name("scripted_worker.py"))]))
