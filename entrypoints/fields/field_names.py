"""What an API calls the fields that the shared readers, the tokenizer manager and the worker speak of.

They refuse in SGLang's names: ``max_new_tokens``, ``input_ids``, ``sampling_params.top_p``. The clients of another API
should read its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...scheduler.refusal import RequestRefused

_SAMPLING = "sampling_params."
_EITHER_PROMPT = "text or input_ids"


class FieldNames:
    """The names of one API in which sampling parameters stand beside the other fields."""

    def __init__(self, *, prompt: str, renamed: Mapping[str, str]) -> None:
        """prompt: the field that brings what SGLang calls ``text`` or ``input_ids``. renamed: SGLang's name -> the
        API's, for names that are no everyday words."""
        # `text` is an everyday word: it is a field only where an error says that it is (``param``).
        self._in_messages = {_SAMPLING: "", _EITHER_PROMPT: prompt, "input_ids": prompt, **renamed}
        self._params = {"text": prompt, "input_ids": prompt, **renamed}
        words = "|".join(map(re.escape, ("input_ids", *renamed)))
        self._pattern = re.compile(rf"{re.escape(_SAMPLING)}|{_EITHER_PROMPT}|\b(?:{words})\b")

    @contextmanager
    def translated(self) -> Iterator[None]:
        """A RequestRefused that is raised within comes out in the API's names."""
        try:
            yield
        except RequestRefused as refused:
            message = self._pattern.sub(lambda found: self._in_messages[found[0]], refused.message)
            param = (refused.param or "").removeprefix(_SAMPLING)
            param = self._params.get(param, param) or None
            raise RequestRefused(message, status=refused.status, code=refused.code, param=param) from refused.__cause__
