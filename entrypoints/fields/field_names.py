"""Translates errors into the field names of another API.

The shared readers, the tokenizer manager and the worker use SGLang's names in errors: ``max_new_tokens``,
``input_ids``, ``sampling_params.top_p``. Clients of another API should read that API's names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ...scheduler.outcome import ContextOverflow, RequestRefused

_SAMPLING = "sampling_params."
_EITHER_PROMPT = "text or input_ids"


class FieldNames:
    """The field names of an API that has sampling parameters beside the other fields, not in an object."""

    def __init__(
        self,
        *,
        prompt: str,
        renamed: Mapping[str, str],
        overflow_words: Callable[[ContextOverflow], str],
        params: Mapping[str, str] | None = None,
    ) -> None:
        """prompt: the API's field for SGLang's ``text`` and ``input_ids``. renamed: SGLang's name -> the API's; only
        names that are not everyday words. overflow_words: what the API's clients look for where a request is longer
        than the context. params: others that are everyday words, and change only in an error's ``param``."""
        self._overflow_words = overflow_words
        # `text` is an everyday word: it is a field only if the error's ``param`` says so.
        self._in_messages = {_SAMPLING: "", _EITHER_PROMPT: prompt, "input_ids": prompt, **renamed}
        self._params = {"text": prompt, "input_ids": prompt, **renamed, **(params or {})}
        words = "|".join(map(re.escape, ("input_ids", *renamed)))
        self._pattern = re.compile(rf"{re.escape(_SAMPLING)}|{_EITHER_PROMPT}|\b(?:{words})\b")

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Raise any RequestRefused from inside the block again, in the API's names."""
        try:
            yield
        except RequestRefused as refused:
            message = self._pattern.sub(lambda found: self._in_messages[found[0]], refused.message)
            param = (refused.param or "").removeprefix(_SAMPLING)
            param = self._params.get(param, param) or None
            if (overflow := refused.overflow) is not None:
                message = self._overflow_words(overflow)
            raise RequestRefused(message, code=refused.code, param=param, overflow=overflow) from refused.__cause__
