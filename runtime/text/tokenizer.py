"""A model's tokenizer, from its folder: text -> ids, ids -> text, messages -> prompt text.

A thin layer on the ``tokenizers`` library. It does not import transformers, and so not torch: the HTTP and detokenizer
processes start quickly. What transformers adds to tokenizer.json from tokenizer_config.json is added here as well
(extra tokens, flags of tokens, the chat template); a test compares the two. As there, tokenizer.json alone
says which special tokens go around a prompt; add_bos_token and add_eos_token belong to older formats.

Not done, on purpose: ``clean_up_tokenization_spaces``, which eats spaces the model did write.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from .chat_template import ChatTemplate, ChatTemplateError
from .token_bytes import TokenBytes, UnsupportedDecoder
from .tokenizer_conversion import ConversionFailed, converted_folder, tokenizer_sources

_ANCHORS = ("\n", "\t", "|", "\x01")
"""A text is tokenised after the first of these that does not merge with it."""

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of chat templates that have a meaning."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """The folder has no usable tokenizer; the message says why."""


class Tokenizer:
    """See the module. Safe to share between threads once loaded."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict,
        chat_templates: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``config``: the content of tokenizer_config.json, ``chat_templates``: name -> Jinja source."""
        # tokenizer.json may ask for both; prompts are never cut or padded here.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = {name: _content(config[name]) for name in NAMED_TOKENS if config.get(name) is not None}
        """Named special tokens of tokenizer_config.json: bos_token -> its text, …"""
        _add_missing_tokens(backend, config, self.special_tokens)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.token_bytes = TokenBytes(backend)
        """For IncrementalDecoder and stop strings."""
        self.chat_templates = {name: self._compiled(name, source) for name, source in chat_templates.items()}
        """By name; `default` is that of a model with a single one."""

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json and what lies beside it in folder ``path``; without tokenizer.json, convert what there
        is (`tokenizer_conversion`). Raises TokenizerError."""
        folder = converted = Path(path)
        if not (folder / "tokenizer.json").is_file():
            if not tokenizer_sources(folder):
                if (folder / "no_tokenizer.txt").is_file():  # of a GGUF file; the text says why
                    raise TokenizerError(_read_text(folder / "no_tokenizer.txt"))
                raise TokenizerError(
                    f"no tokenizer.json in {str(folder)!r}, and no tokenizer in an older format (tokenizer.model, "
                    "vocab.json with merges.txt, tekken.json, *.tiktoken); set --tokenizer-path"
                )
            try:
                converted = converted_folder(folder)
            except ConversionFailed as error:
                raise TokenizerError(str(error)) from error
        file = converted / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{file} cannot be read: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        for older in (folder / "special_tokens_map.json", converted / "tokenizer_config.json"):
            named = _read_json(older)
            config = {name: named[name] for name in NAMED_TOKENS if named.get(name) is not None} | config
        try:
            templates = find_chat_templates(folder, config)
            if not templates and converted != folder:  # mistral-common has templates for tekken.json
                templates = find_chat_templates(converted, {})
            return cls(backend, config, templates)
        except (UnsupportedDecoder, ChatTemplateError) as error:
            raise TokenizerError(f"{folder}: {error}") from error

    def _compiled(self, name: str, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self.special_tokens)
        except ChatTemplateError as error:
            raise error if name == DEFAULT else ChatTemplateError(f"chat template {name}: {error}") from None

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template for chats without tools, if there is one."""
        return self.chat_templates.get(DEFAULT)

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's vocabulary may be larger (padding rows)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` leaves out."""
        return self.token_bytes.special_ids

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; with the bos (and whatever else the model's post-processor adds) if asked."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_piece(self, piece: str) -> tokenizers.Encoding:
        """Encode a part of a text, with the place of each token, for `encode_slices`. Releases the GIL."""
        return self._backend.encode_batch([piece], add_special_tokens=False)[0]

    @functools.cached_property
    def special_ids_around(self) -> tuple[list[int], list[int]] | None:
        """The ids that `encode` puts before and after those of a text; None if it does more than that."""
        plain, whole = self.encode("x", False), self.encode("x")
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        return None

    @functools.cached_property
    def special_ids_around_pair(self) -> tuple[list[int], list[int], list[int]] | None:
        """The ids that the post-processor puts before, between and after two texts that are encoded as a pair; None if
        it does more than that."""
        one, two = self.encode("x", False), self.encode("y", False)
        whole = self._backend.encode("x", "y", add_special_tokens=True).ids
        for start in range(len(whole) - len(one) - len(two) + 1):
            if whole[start : start + len(one)] != one:
                continue
            middle = start + len(one)
            for other in range(middle, len(whole) - len(two) + 1):
                if whole[other : other + len(two)] == two:
                    return whole[:start], whole[middle:other], whole[other + len(two) :]
        return None

    @functools.cached_property
    def longest_token(self) -> int:
        """In characters of the vocabulary, of which a character of text takes one or more."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of a text that continues another: no special tokens around it, and no space before it.

        SentencePiece tokenizers (Llama 2, Mistral) put a space before the first word of a text; in mid-text it would
        split a word. So they get the text after an anchor, and the anchor's ids are cut off.
        """
        if not self._puts_space_first:
            return self.encode(text, False)
        for anchor in _ANCHORS:
            ids, anchor_ids = self.encode_batch([anchor + text, anchor], False)
            if ids[: len(anchor_ids)] == anchor_ids:
                return ids[len(anchor_ids) :]
        return self.encode(text, False)

    @property
    def special_ids_around_continuation(self) -> tuple[list[int], list[int]] | None:
        """`special_ids_around` for `encode_continuation`."""
        return None if self._puts_space_first else ([], [])

    def encode_continuation_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not self._puts_space_first:
            return self.encode_batch(texts, False)
        return [self.encode_continuation(text) for text in texts]

    @functools.cached_property
    def _puts_space_first(self) -> bool:
        return self.token_bytes[self.encode("x", False)[0]].startswith(b" ")

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` for each; drops the GIL, which `encode` keeps."""
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole text's ids (the inverse of `encode`). For generated ids, which continue a text, use
        `incremental_decode`: it keeps a first token's space."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, its space kept; U+FFFD where it is part of a character."""
        return self.token_bytes[token_id].decode("utf-8", self.token_bytes.errors)

    def apply_chat_template(
        self,
        messages: list[dict],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text; encode it with add_special_tokens=False: the template writes those itself.

        Raises ChatTemplateError where the model has no template or the template refuses the messages.
        """
        template = (self.chat_templates.get(TOOL_USE) if tools else None) or self.chat_template
        if template is None:
            raise ChatTemplateError("this model has no chat template; send a plain text prompt instead of messages")
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)


def _content(token: str | dict) -> str:
    return token if isinstance(token, str) else token["content"]


def _read_json(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


def find_chat_templates(folder: Path, config: dict) -> dict[str, str]:
    """Name -> Jinja source, as transformers finds them. The first of these that is there has all of them:

    - chat_template.jinja, which is `default`, and additional_chat_templates/NAME.jinja
    - `chat_template` of tokenizer_config.json (``config``): a source, or a list of {name, template}
    - chat_template.json: the same in a separate object, as older processors wrote it

    A single template is `default` whatever its name. Raises TokenizerError.
    """
    files = [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    found = {file.stem: _read_text(file) for file in files if file.is_file()}
    if "chat_template" in found:
        found[DEFAULT] = found.pop("chat_template")
    found = found or _named_templates(config.get("chat_template"), folder / "tokenizer_config.json")
    if not found:
        file = folder / "chat_template.json"
        found = _named_templates(_read_json(file).get("chat_template"), file)
    return {DEFAULT: next(iter(found.values()))} if len(found) == 1 else found


def _named_templates(given: Any, file: Path) -> dict[str, str]:
    if given is None:
        return {}
    named = [{"name": DEFAULT, "template": given}] if isinstance(given, str) else given
    found: dict[str, str] = {}
    for entry in named if isinstance(named, list) else [named]:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise TokenizerError(f"{file}: chat_template takes Jinja source, or a list of objects of name and template")
        found[name] = source
    return found


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict, named: dict[str, str]) -> None:
    """Add the tokens (or flags of tokens) that only tokenizer_config.json knows."""
    known = {token.content: _flags(token) for token in backend.get_added_tokens_decoder().values()}
    for _, fields in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        token = tokenizers.AddedToken(
            fields["content"],
            **{key: fields[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in fields},
            special=fields.get("special", False) or fields["content"] in named.values(),
        )
        if known.get(token.content) != _flags(token):
            backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
            known[token.content] = _flags(token)
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    for content in [*named.values(), *map(_content, extra)]:
        if content not in known:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True)])
            known[content] = ()


def _flags(token: tokenizers.AddedToken) -> tuple:
    return token.single_word, token.lstrip, token.rstrip, token.normalized, token.special
