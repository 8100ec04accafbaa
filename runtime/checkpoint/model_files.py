"""Finds a model's files: in a local folder, or under a hub id, which is downloaded once. No torch."""

from __future__ import annotations

from pathlib import Path

PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


class ModelLoadError(ValueError):
    """The model cannot be served as asked; the message says what is wrong and what to change."""


def resolve_model_folder(model_path: str) -> Path:
    """The local folder of model_path: the path itself if it is a folder, else the hub id's snapshot.

    Raises ModelLoadError if it is neither.
    """
    if not model_path:
        raise ModelLoadError("no model given; set --model-path to a Hugging Face folder or a hub id")
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelLoadError(f"--model-path {model_path} is a file; give the folder that holds config.json")
    if model_path.startswith(("/", ".", "~")) or model_path.count("/") > 1:
        raise ModelLoadError(f"--model-path {model_path}: there is no such folder")
    from huggingface_hub import snapshot_download  # a slow import that local folders do not need

    try:
        return Path(snapshot_download(model_path, allow_patterns=PATTERNS))
    except Exception as error:  # network, authentication and naming errors share no base class
        raise ModelLoadError(
            f"--model-path {model_path} is no local folder and could not be fetched from the hub: {error}"
        ) from error
