"""Runs in SGLang's environment: a program of its frontend language on a server, and what came of it as JSON.

python sglang_frontend.py URL
"""

import json
import sys
from importlib import import_module
from typing import Any

sgl: Any = import_module("sglang")  # not a package of the environment that type checkers see
endpoint = sgl.RuntimeEndpoint(sys.argv[1])
sgl.set_default_backend(endpoint)


@sgl.function
def program(s, file):
    s += f"How many lines are in {file}?\n"
    s += sgl.gen("answer", max_tokens=8, temperature=0, ignore_eos=True)
    branches = s.fork(2)
    for number, branch in enumerate(branches):
        branch += f" {number}"
        branch += sgl.gen("branch", max_tokens=4, temperature=0, ignore_eos=True)
    s["branches"] = [branch["branch"] for branch in branches]
    s += sgl.select("choice", choices=["manual.md", "notes.txt"])


one = program.run(file="manual.md")
streamed = program.run(file="manual.md", stream=True)
pieces = list(streamed.text_iter("answer"))
batch = program.run_batch([{"file": "manual.md"}, {"file": "notes.txt"}], progress_bar=False)
endpoint.cache_prefix("How many")
endpoint.flush_cache()
print(
    json.dumps(
        {
            "answer": one["answer"],
            "branches": one["branches"],
            "choice": one["choice"],
            "streamed": "".join(pieces),
            "num_pieces": len(pieces),
            "batch": [state["answer"] for state in batch],
            "served": endpoint.get_server_info()["served_model_name"],
        }
    )
)
