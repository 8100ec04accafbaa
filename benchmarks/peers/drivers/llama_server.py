"""llama.cpp's server, from the package ``xllamacpp``, until a signal ends it. Runs under the python of that package's
environment, which has nothing of ours:

    PYTHON llama_server.py '{"model": FILE, "port": 8000, "threads": 2, "n_ctx": 4096}'

"kv" is the type of K and V: F32, else F16. Other keys are settings of llama.cpp's, by their names in ``CommonParams``.
All others are at their defaults.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from typing import Any


def start(model: str, threads: int, kv: str = "F32", **settings: Any) -> Any:
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kv}")
    params.verbosity = 1
    for name, value in settings.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


if __name__ == "__main__":
    server = start(**json.loads(sys.argv[1]))
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
