"""A server in a few lines for the language's tests: token ids are code points, and it knows who continues whom.

It answers from a script, keeps records and leases like the real one, and writes down every call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from baton.entrypoints.lang import BackendError
from baton.runtime.text.chat_template import ChatTemplate

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

Script = Callable[[str, dict[str, Any]], str]
"""(whole prompt, sampling_params) -> what the model would go on with, stop strings included."""


@dataclass
class FakeBackend:
    """``script`` may raise BackendError. ``hold``: requests wait for this event, or for their abort. ``ticks``: streams
    take one for each of their events. found: sequences that a beam search finds at most. Items have three tokens."""

    script: Script = lambda prompt, sampling: f"[{len(prompt)}]"
    template: str = CHAT
    score: Callable[[str, str], float | list[float]] = lambda prompt, choice: -1.0
    """(text before, text) -> the logprob of each of its tokens, or of all of them."""
    hold: threading.Event | None = None
    ticks: threading.Semaphore | None = None
    found: int = 1000
    calls: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    leases: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)
    records: dict[str, list[str]] = field(default_factory=dict)
    """rid -> what a child of each sample inherits."""
    computed: list[str] = field(default_factory=list)
    """What each request had to prefill."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def generate(self, fields: dict[str, Any]) -> Any:
        rids = fields["rid"]
        if isinstance(rids, str):
            return self._one(fields)
        each = "continuation_suffix" if "continuation_of" in fields else "input_ids"
        return [self._one({**fields, "rid": r, each: one}) for r, one in zip(rids, fields[each], strict=True)]

    def stream(self, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        answer = self._one(fields)
        for end in range(1, len(answer["text"])):
            self._tick()
            yield {**answer, "text": answer["text"][:end], "meta_info": {"finish_reason": None}}
        self._tick()
        yield answer

    def _tick(self) -> None:
        if self.ticks is not None:
            self.ticks.acquire()

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    def release(self, rid: str) -> None:
        with self._lock:
            self.released.append(rid)
            self.leases.discard(rid)

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(char) for char in ("^" if add_special_tokens else "") + text]

    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.template, {})

    def forget(self) -> None:
        """As after too many finished requests."""
        self.records.clear()
        self.leases.clear()

    def _one(self, fields: dict[str, Any]) -> Any:
        with self._lock:
            self.calls.append(fields)
        prompt = self._prompt(fields)
        sampling = fields["sampling_params"]
        while self.hold is not None and not self.hold.wait(0.005):
            if fields["rid"] in self.aborted:
                return _answer(fields["rid"], prompt, "", {"type": "abort", "message": "aborted by the client"})
        bias = sampling.get("logit_bias")
        said = chr(int(max(bias, key=bias.__getitem__))) if bias else self.script(prompt, sampling)
        text, finish = said[: sampling.get("max_new_tokens", 128)], None
        for stop in [sampling["stop"]] if isinstance(sampling.get("stop"), str) else sampling.get("stop") or []:
            if stop in text:
                text, finish = text[: text.index(stop)], {"type": "stop", "matched": stop}
        if text and ord(text[-1]) in sampling.get("stop_token_ids", []):
            text, finish = text[:-1], {"type": "stop", "matched": ord(text[-1])}
        if "item_trie" in sampling:
            text, finish = text[:3], {"type": "stop", "matched": "item"}
        finish = finish or {"type": "length", "length": len(text)}
        n = sampling.get("n", 1)
        is_search = "beam_width" in sampling
        texts = [text] if n == 1 else [f"{text}{i}" for i in range(min(n, self.found) if is_search else n)]
        with self._lock:
            self.records[fields["rid"]] = [prompt + text for text in texts]
            if fields.get("retain_ttl"):
                self.leases.add(fields["rid"])
        answers = [_answer(fields["rid"], prompt, text, finish) for text in texts]
        for rank, answer in enumerate(answers):
            if is_search:
                answer["meta_info"] |= {"sequence_score": -rank, "cumulative_logprob": -2 * rank}
            answer["meta_info"]["retained"] = {"tokens": 1, "ttl": 1.0} if fields.get("retain_ttl") else None
            if fields.get("return_logprob"):
                start = fields.get("logprob_start_len", -1) % (len(prompt) + 1)
                choice = prompt[start:]
                scored = self.score(prompt[:start], choice)
                values = scored if isinstance(scored, list) else [scored] * len(choice)
                rows = [[value, ord(char), char] for value, char in zip(values, choice, strict=True)]
                if start == 0:
                    rows[0][0] = None  # nothing stands before it
                answer["meta_info"]["input_token_logprobs"] = rows
        return answers[0] if n == 1 else answers

    def _prompt(self, fields: dict[str, Any]) -> str:
        with self._lock:
            if "continuation_of" not in fields:
                prompt = "^" + fields["text"] if "text" in fields else "".join(map(chr, fields["input_ids"]))
                self.computed.append(prompt)
                return prompt
            parent = fields["continuation_of"]
            if parent not in self.records:
                raise BackendError(f"{parent} is no longer on record", status=410, code="parent_forgotten")
            if not fields.get("keep_parent"):
                self.leases.discard(parent)
            suffix = fields.get("continuation_suffix", "") or "".join(map(chr, fields.get("continuation_ids", [])))
            self.computed.append(suffix)
            return self.records[parent][fields.get("continuation_index", 0)] + suffix


def _answer(rid: str, prompt: str, text: str, finish: dict[str, Any]) -> dict[str, Any]:
    ids = [ord(char) for char in text]
    if isinstance(finish.get("matched"), int):
        ids.append(finish["matched"])
    meta = {"id": rid, "finish_reason": finish, "prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    return {"text": text, "output_ids": ids, "meta_info": meta}
