"""Finds a model's files: in a local folder, or under a hub id, which is downloaded once. No torch."""

from __future__ import annotations

import shlex
from pathlib import Path

from .gguf_folder import MARK, gguf_folder
from .load_errors import ModelLoadError as ModelLoadError
from .load_errors import UnsupportedModelError as UnsupportedModelError

PATTERNS = ["*.json", "*.py", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken"]

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
"""File suffixes of weights written by torch.save. Loading one may run any code, so they are refused."""

_SAFETENSORS = "Baton reads GGUF files and Hugging Face folders: config.json, tokenizer.json and *.safetensors"


def resolve_model_folder(model_path: str) -> Path:
    """The local folder of model_path: the path itself if it is a folder, else the hub id's snapshot. For a GGUF file,
    and for a folder whose weights are one GGUF file, it is the folder that `gguf_folder` makes. A GGUF file of the hub
    is ``OWNER/NAME/FILE.gguf``.

    Raises ModelLoadError if it is neither, or if the folder can hold no model: empty, or weights of another format and
    no tokenizer beside them. (Weights of a folder with a tokenizer are looked at when they are loaded.)
    """
    if not model_path:
        raise ModelLoadError("no model given; set --model-path to a Hugging Face folder or a hub id")
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return _with_a_model(folder, f"--model-path {model_path}")
    if folder.exists():
        if folder.suffix.lower() == ".gguf":
            return gguf_folder(folder)
        raise ModelLoadError(
            f"--model-path {model_path} is a file; give the folder that holds config.json, or a file *.gguf"
        )
    is_hub_file = folder.suffix.lower() == ".gguf" and model_path.count("/") > 1
    if model_path.startswith(("/", ".", "~")) or (model_path.count("/") > 1 and not is_hub_file):
        raise ModelLoadError(f"--model-path {model_path}: there is no such folder")
    from huggingface_hub import hf_hub_download, snapshot_download  # a slow import that local folders do not need

    try:
        if is_hub_file:
            owner, name, file = model_path.split("/", 2)
            return gguf_folder(Path(hf_hub_download(f"{owner}/{name}", file)))
        found = Path(snapshot_download(model_path, allow_patterns=PATTERNS))
    except ModelLoadError:
        raise
    except Exception as error:  # network, authentication and naming errors share no base class
        raise ModelLoadError(
            f"--model-path {model_path} is no local folder and could not be fetched from the hub: {error}"
        ) from error
    return _with_a_model(found, f"--model-path {model_path}")


def foreign_weights(folder: Path) -> str | None:
    """Error text for a folder with weights but no *.safetensors: its weight files and the remedy. None otherwise."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    if any(file.suffix == ".safetensors" for file in files):
        return None
    if found := _gguf_files(folder):
        names = ", ".join(file.name for file in found)
        number = "a GGUF file" if len(found) == 1 else "several GGUF files"
        return f"holds {number} ({names}); give the path of the one to serve"
    if found := [file.name for file in files if file.suffix in PICKLE_SUFFIXES]:
        return (
            f"holds its weights as pickles ({found[0]}), which can run code when they are loaded; convert them once, "
            f"with `{conversion_command(folder)}`, or give a release in safetensors"
        )
    return None


def conversion_command(folder: Path) -> str:
    """The command that converts a folder of pickled weights, ready for a shell."""
    output = folder.resolve().with_name(f"{folder.resolve().name}-safetensors")
    return shlex.join(["python", "-m", "baton.entrypoints.convert_weights", str(folder), "--output", str(output)])


def _with_a_model(folder: Path, named: str) -> Path:
    """The folder, or the one that stands for its GGUF file, if it may hold a model or a tokenizer. Raises
    ModelLoadError."""
    if not any(folder.iterdir()):
        raise ModelLoadError(f"{named} is an empty folder. {_SAFETENSORS}; was the download finished?")
    found = _gguf_files(folder)
    if len(found) == 1 and not (folder / MARK).exists() and not any(folder.glob("*.safetensors")):
        return gguf_folder(found[0])
    if not (folder / "tokenizer.json").exists() and (trouble := foreign_weights(folder)):
        raise ModelLoadError(f"{named} {trouble}")
    return folder


def _gguf_files(folder: Path) -> list[Path]:
    """Those that may hold a language model: not the encoders of pictures beside it."""
    files = [file for file in folder.iterdir() if file.suffix.lower() == ".gguf" and file.is_file()]
    return sorted(file for file in files if not file.name.startswith("mmproj"))
