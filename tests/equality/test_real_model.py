"""A model that was really trained, against transformers, token for token: `make test-real`.

What is compared is not only Baton with transformers: both would read a wrong folder alike. So the model also has to
know some facts, and to find English likely.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.entrypoints.engine import Engine
from baton.runtime.checkpoint.model_files import resolve_model_folder
from baton.runtime.text.tokenizer import Tokenizer

FOLDER = Path(os.environ.get("BATON_REAL_MODEL", "build/models/SmolLM2-135M-Instruct"))
GGUF = FOLDER.with_name(f"{FOLDER.name}.gguf")
NEW_TOKENS = 64
TIE = 1e-3
"""A token may differ only where transformers' own two best logits are closer: float32 sums in another order."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (FOLDER / "config.json").exists(), reason=f"{FOLDER} is not there; run make real-model"),
]

SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Schreibe drei Wörter mit ä, ö und ü. 你好，世界! 🙂👩‍👧 — Привет"}],
    [
        {
            "role": "user",
            "content": "Write a Python function that adds the numbers 12, 345 and 6789:\n\n\tdef add(a, b):",
        }
    ],
    [
        SYSTEM,
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because air scatters blue light more than red light."},
        {"role": "user", "content": "And why are sunsets red?"},
    ],
]
TEXTS = [
    "Once upon a time",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "| year | 1998 | 2024 |\n|---|---|---|\n| price |  17.50 |",
    "The quick brown fox jumps over the lazy dog. " * 30 + "And then",
]
ENGLISH = (
    "The sun is the star at the center of the solar system. It is a massive, hot ball of plasma, and its light and "
    "heat make life on Earth possible. The Earth travels around the sun once a year."
)


@dataclass
class Reference:
    """Greedy output of transformers for one prompt."""

    ids: list[int]
    tokens: list[int]
    gaps: list[float]
    """Between the two best logits, at each token."""
    logprobs: list[float]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the folder that stands for the GGUF file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


# -- the tokenizer -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [19556, 905]),
        ("x  3", [104, 256, 35]),  # GPT-2 would take a space into the number
        ("a\n12 34  5\t6", [81, 198, 33, 34, 216, 35, 36, 256, 37, 197, 38]),
        ("It's 2024's 1st", [1589, 506, 216, 34, 32, 34, 36, 506, 216, 33, 302]),
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
        ("½ ² Ⅷ", [16738, 216, 19133, 216, 173, 223, 117]),
    ],
)
def test_tokenizer_ids_match_published_ids(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenization_matches_transformers(tokenizer: Tokenizer, theirs: Any) -> None:
    pages = [file.read_text() for file in sorted(Path(__file__).parents[2].glob("docs/**/*.md"))]
    assert len(pages) > 10
    contents = [message["content"] for chat in CHATS for message in chat]
    for text in [*pages, *TEXTS, *contents, " a", "a ", "\n\n", "<|im_start|><|endoftext|> <|im_end|>\n"]:
        ids = tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: chat[-1]["content"][:12])
@pytest.mark.parametrize("generate", [True, False])
def test_chat_rendering_matches_transformers(
    tokenizer: Tokenizer, theirs: Any, chat: list[dict[str, str]], generate: bool
) -> None:
    ours = tokenizer.apply_chat_template(chat, add_generation_prompt=generate)
    assert ours == theirs.apply_chat_template(chat, add_generation_prompt=generate, tokenize=False)
    assert ours.startswith("<|im_start|>system\nYou ") and ours.endswith("assistant\n" if generate else "<|im_end|>\n")


@pytest.mark.skipif(not GGUF.exists(), reason=f"{GGUF} is not there; run make real-model")
def test_tokenizer_of_the_gguf_file_is_the_same(tokenizer: Tokenizer, cache: None) -> None:
    own = Tokenizer.load(resolve_model_folder(str(GGUF)))
    root = Path(__file__).parents[2]
    texts = [file.read_text() for file in (*root.glob("docs/**/*.md"), *root.glob("runtime/**/*.py"))]
    for text in [*texts, *TEXTS, "½ ² Ⅷ e\u0301 \ufeff\x00", "<|im_start|>user\nhi<|im_end|>", "  a\t\t b\r\n"]:
        ids = tokenizer.encode(text)
        assert own.encode(text) == ids
        assert own.decode(ids, skip_special_tokens=False) == text
    assert own.special_tokens == tokenizer.special_tokens and own.special_ids == tokenizer.special_ids
    for chat in CHATS:
        assert own.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)


@pytest.mark.skipif(not GGUF.exists(), reason=f"{GGUF} is not there; run make real-model")
def test_gguf_file_is_served_as_it_is(prompts: list[str], references: list[Reference], cache: None) -> None:
    """A token may differ where transformers, on the widened numbers, is nearly undecided: kernels for few bits may
    round activations."""
    options = {"temperature": 0.0, "max_new_tokens": 24}
    with Engine(model_path=str(GGUF), device="cpu", dtype="float32", max_total_tokens=8192) as engine:
        for prompt, reference in zip(prompts, references, strict=True):
            answer = engine.generate(prompt, options)
            wanted = reference.tokens[: len(answer["output_ids"])]
            assert len(answer["output_ids"]) >= min(24, len(reference.tokens) - 1)
            first = next((i for i, pair in enumerate(zip(answer["output_ids"], wanted)) if pair[0] != pair[1]), None)
            assert first is None or reference.gaps[first] < 0.3, (prompt[-40:], first)


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.apply_chat_template(chat) for chat in CHATS] + TEXTS


@pytest.fixture(scope="module")
@torch.inference_mode()
def references(prompts: list[str], theirs: Any) -> list[Reference]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER)
    found = []
    for prompt in prompts:
        inputs = theirs(prompt, return_tensors="pt")
        options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **options)
        logprobs = torch.cat(output.logits).log_softmax(-1)
        best = logprobs.topk(2).values
        ids = inputs["input_ids"][0].tolist()
        tokens = output.sequences[0, len(ids) :].tolist()
        found.append(Reference(ids, tokens, (best[:, 0] - best[:, 1]).tolist(), best[:, 0].tolist()))
    return found


@pytest.fixture(scope="module", params=[(1, "off"), (16, "off"), (16, "NGRAM")], ids="pages of {0[0]}, {0[1]}".format)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    page_size, algorithm = request.param
    options = {"page_size": page_size, "speculative_algorithm": algorithm}
    with Engine(model_path=str(FOLDER), device="cpu", max_total_tokens=8192, **options) as running:
        yield running


def assert_same(answer: dict, reference: Reference) -> int:
    """Returns how many tokens are the same."""
    assert answer["meta_info"]["prompt_tokens"] == len(reference.ids)
    for position, (mine, their) in enumerate(zip(answer["output_ids"], reference.tokens)):
        if mine != their:
            gap = reference.gaps[position]
            assert gap < TIE, f"token {position} is {mine}, transformers says {their} with a gap of {gap}"
            return position
    assert len(answer["output_ids"]) == len(reference.tokens)
    return len(reference.tokens)


def test_generation_matches_transformers(engine: Engine, prompts: list[str], references: list[Reference]) -> None:
    """All at once; then one by one, with what the first round left in the cache."""
    options = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    for answer, reference in zip(engine.generate(prompts, options, return_logprob=True), references, strict=True):
        same = assert_same(answer, reference)
        logprobs = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(logprobs[:same], reference.logprobs[:same], atol=1e-4)
    page = engine.args.scheduler.page_size
    for prompt, reference in zip(prompts, references, strict=True):
        answer = engine.generate(prompt, options)
        assert_same(answer, reference)
        assert answer["meta_info"]["cached_tokens"] == (len(reference.ids) - 1) // page * page
        drafts = engine.args.scheduler.speculative_algorithm != "off"
        assert (answer["meta_info"].get("spec_accept_token_num", 0) > len(reference.tokens) // 3) == drafts


# -- whether it is the model it should be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is the capital of France?", "Paris"),
        ("What is the capital of Germany?", "Berlin"),
        ("Which planet is known as the Red Planet?", "Mars"),
    ],
)
def test_model_answers_general_knowledge_questions(
    engine: Engine, tokenizer: Tokenizer, question: str, word: str
) -> None:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}])
    answer = engine.generate(prompt, {"temperature": 0, "max_new_tokens": NEW_TOKENS})
    assert word in answer["text"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


def test_english_has_lower_perplexity_than_its_reverse(engine: Engine) -> None:
    english, reverse = perplexity(engine, ENGLISH), perplexity(engine, " ".join(reversed(ENGLISH.split())))
    assert english < 15 and reverse > 20 * english


def perplexity(engine: Engine, text: str) -> float:
    answer = engine.generate(text, {"temperature": 0, "max_new_tokens": 1}, return_logprob=True, logprob_start_len=0)
    logprobs = [logprob for logprob, _, _ in answer["meta_info"]["input_token_logprobs"][1:]]
    return math.exp(-sum(logprobs) / len(logprobs))
