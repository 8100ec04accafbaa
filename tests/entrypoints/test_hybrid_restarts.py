"""A chat with a hybrid model goes through restarts of its server: each turn computes what is new in it, and no more."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.common.models import save_random_model, write_tokenizer
from benchmarks.hybrids.models import LFM2_TINY
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}.\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""Every character is one token of the tokenizer, and an answer's tokens encode to themselves again."""
AROUND = len(".\n[user] .\n[assistant] ")
"""Tokens between an answer and the next one, beside the user's message."""


def wait_for_state(server: ServerUnderTest, count: int) -> None:
    """Until so many states are on disk, and no copy is under way any more. There are no others: those of the server's
    own requests are not stored."""
    deadline = time.monotonic() + 60
    while True:
        disk = server.client.get("/cache/tiers").json()["disk"]
        if disk["used_states"] >= count and not disk["copies_under_way"]:
            assert disk["used_states"] == count
            return
        assert time.monotonic() < deadline, disk
        time.sleep(0.02)


def test_chat_continues_where_it_ended_before_the_restart(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_random_model(model, LFM2_TINY | {"bos_token_id": None, "eos_token_id": None})
    write_tokenizer(model, LFM2_TINY["vocab_size"])
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ["--max-total-tokens", "4096", "--chat-template", str(template), "--host-cache-ratio", "2"]
    flags += ["--served-model-name", "model", "--context-length", "2048", "--linear-backend", "torch"]
    flags += ["--disk-cache-path", str(tmp_path / "kv"), "--disk-cache-gb", "0.2"]
    messages, computed = [{"role": "user", "content": "a" * 150}], []
    for turn in range(3):
        with ServerUnderTest(model, tmp_path, *flags, behaviour=None) as server:
            server.wait_ready()
            body = {"model": "model", "messages": messages, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
            answer = server.client.post("/v1/chat/completions", json=body).json()
            usage = answer["usage"]
            computed.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
            wait_for_state(server, 2 * (turn + 1))
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "b" * (70 + turn)}]
        messages = [{"role": each["role"], "content": each["content"]} for each in messages]
    assert computed[1:] == [AROUND + 70 + 1, AROUND + 71 + 1], "the last token of an answer has not been computed"
