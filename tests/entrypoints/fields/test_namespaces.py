"""Salts and keys: structured, of bounded length, and kept as digests."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from baton.entrypoints.fields.namespaces import MAX_KEY_CHARS, namespace_of, read_client, read_namespaces
from baton.entrypoints.fields.reading import PerPrompt
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.native.generate import parse_generate
from baton.entrypoints.openai.completions import parse_completion
from baton.scheduler.outcome import RequestRefused


def read(**fields: object) -> str:
    (namespace,) = read_namespaces(PerPrompt(fields, 1, is_batch=False))
    return namespace


def test_salt_and_key_pairs_give_distinct_namespaces() -> None:
    parts = ["", "a", "k", "ak", "a\0k", "\0", "a\0", "\0k", "\ud800"]
    pairs = list(itertools.product(parts, repeat=2))
    namespaces = {pair: read(cache_salt=pair[0], extra_key=pair[1]) for pair in pairs}
    assert len(set(namespaces.values())) == len(pairs), "no two pairs share a cache"
    assert read(cache_salt="a", extra_key="k") == namespaces["a", "k"] == namespace_of("a", "k")
    assert read() == read(cache_salt="", extra_key="") == namespaces["", ""] == ""
    assert read(cache_salt="a") == read(cache_salt="a", extra_key=None) == namespaces["a", ""]


def test_namespace_digest_hides_the_salt() -> None:
    """Nor does the same salt give the same digest in another process."""
    digest = namespace_of("secret", "")
    assert len(digest) == 32 and "secret" not in digest
    code = "from baton.entrypoints.fields.namespaces import namespace_of; print(namespace_of('secret', ''))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert len(other) == 32 and other != digest


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_limits(name: str) -> None:
    assert len(read(**{name: "x" * MAX_KEY_CHARS})) == 32
    with pytest.raises(RequestRefused, match=f"{name} has {MAX_KEY_CHARS + 1} characters") as refusal:
        read(**{name: "x" * (MAX_KEY_CHARS + 1)})
    assert status_of(refusal.value) == 400 and refusal.value.param == name
    with pytest.raises(RequestRefused, match="it takes a string"):
        read(**{name: 5})


def test_user_is_stored_as_a_digest() -> None:
    assert read_client({"user": "anna"}) == read_client({"user": "anna"}) != read_client({"user": "bob"})
    assert "anna" not in read_client({"user": "anna"}) and read_client({}) == ""
    with pytest.raises(RequestRefused, match="user has 2000 characters"):
        read_client({"user": "x" * 2000})


def test_client_is_derived_from_user_or_salt() -> None:
    def client(**fields: str) -> str:
        return parse_generate({"text": "a", **fields}).prompts[0].spec.client

    assert client(user="anna", cache_salt="s") == client(user="anna") != ""
    assert client(cache_salt="s") == client(cache_salt="s") != client(cache_salt="t")
    assert client() == ""
    prompts = parse_generate({"text": ["a", "b"], "user": "anna"}).prompts
    assert prompts[0].spec.client == prompts[1].spec.client == client(user="anna")
    assert parse_completion({"prompt": "a", "user": "anna"}).batch.prompts[0].spec.client == client(user="anna")
