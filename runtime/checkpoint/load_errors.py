"""Errors of loading a model; `model_files` has them too."""

from __future__ import annotations


class ModelLoadError(ValueError):
    """The model cannot be served with these settings; the message says what is wrong and what to change."""


class UnsupportedModelError(ModelLoadError):
    """An implementation has no code for this model; another one may have it."""
