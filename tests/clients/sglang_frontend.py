"""Runs in SGLang's environment: programs of its frontend language on a server, and what came of them as JSON.

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


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["lines", "words"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}


@sgl.function
def forms(s):
    s += "A command: "
    s += sgl.gen("regex", max_tokens=32, regex="(wc|ls) -[a-z]{1,3}")
    s += "\nAn object: "
    s += sgl.gen("json_schema", max_tokens=200, json_schema=json.dumps(SCHEMA))
    s += "\nA file: "
    s += sgl.gen("choices", choices=["manual.md", "notes.txt"])
    for kind in (int, bool):
        s += f"\nA value ({kind.__name__}): "
        s += sgl.gen(kind.__name__, max_tokens=32, dtype=kind)


one = program.run(file="manual.md")
streamed = program.run(file="manual.md", stream=True)
pieces = list(streamed.text_iter("answer"))
batch = program.run_batch([{"file": "manual.md"}, {"file": "notes.txt"}], progress_bar=False)
formed = forms.run(temperature=0)
names = ("regex", "json_schema", "choices", "int", "bool")
streamed_forms = forms.run(temperature=0, stream=True)
pieces_of_json = list(streamed_forms.text_iter("json_schema"))
streamed_forms.sync()
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
            "schema": SCHEMA,
            "texts": {name: formed[name] for name in names},
            "ended": [formed.get_meta_info(name)["finish_reason"]["type"] for name in names if name != "choices"],
            "streamed_json": "".join(pieces_of_json),
            "served": endpoint.get_server_info()["served_model_name"],
        }
    )
)
