"""The command ``baton``: one name for the programs of this package.

baton demo                             a server on the bundled toy model, and what it does with requests
baton serve --model-path FOLDER        the server; the same as ``baton-server`` and ``launch_server``
baton analyze LOG                      what a recorded log says about cache sizes
baton simulate …                       a workload on the real scheduler, with a simulated device
baton bench --base-url URL             load on a server: throughput and latencies
baton convert FOLDER --output DIR      weights in pickles to safetensors, or floats to few bits
baton ds-channels --model-path FOLDER …    the channels that --enable-double-sparsity needs
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from .version import baton_version

COMMANDS = {
    "demo": ("examples.demo", "serve the bundled toy model and show what the cache reuses"),
    "serve": ("entrypoints.launch_server", "run a server"),
    "analyze": ("entrypoints.analyze.__main__", "analyse recorded requests: hit rates, and sizes of the tiers"),
    "simulate": ("entrypoints.simulate.__main__", "run a workload on the real scheduler with a simulated device"),
    "bench": ("entrypoints.bench.__main__", "send load to a server and measure throughput and latencies"),
    "ds-channels": ("entrypoints.ds_channels", "find the heavy channels of a model's keys, for double sparsity"),
    "convert": ("entrypoints.convert_weights", "convert pickled weights to safetensors, or floats to few bits"),
}
"""Name -> module of baton with a ``main(argv)``, one line of help. Imported when it is used."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; 2 for an unknown command."""
    given = list(sys.argv[1:] if argv is None else argv)
    name, *rest = given or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version", "version"):
        print(f"baton {baton_version()}")
        return 0
    if name not in COMMANDS:
        print(f"baton: unknown command {name!r}; it is one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"baton.{COMMANDS[name][0]}")
    return module.main(rest)


def _help() -> str:
    lines = [f"  {name:10} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(["usage: baton COMMAND …", "", *lines, "", "baton COMMAND --help lists a command's flags."])


if __name__ == "__main__":
    sys.exit(main())
