"""A server by its URL, under SGLang's name and with the methods that its programs call."""

from __future__ import annotations

from typing import Any

from .http_backend import HttpBackend


class RuntimeEndpoint(HttpBackend):
    """An `HttpBackend` that asks the server at once who it is. ``verify``: a file of certificates (PEM) to trust.

    Raises BackendError if the server does not answer, and ValueError for a chat template by name.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        if chat_template_name is not None:
            raise ValueError(
                f"RuntimeEndpoint: chat_template_name is {chat_template_name!r}; roles are written by the model's own "
                "template, and there is no table of others: leave it out, or put a chat_template.jinja into "
                "the model's folder"
            )
        super().__init__(base_url, api_key=api_key, ca_file=verify)
        self.model_info: dict[str, Any] = self.get_model_info()

    @property
    def base_url(self) -> str:
        return self.url

    def get_model_name(self) -> str:
        """The path of the model that the server loaded."""
        return self.model_info["model_path"]

    def cache_prefix(self, prefix_str: str) -> None:
        """Have the server compute this text, so that the prompts which begin with it find it in the cache."""
        self.generate({"text": prefix_str, "sampling_params": {"max_new_tokens": 1}})
