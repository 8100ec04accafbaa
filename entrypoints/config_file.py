"""Reads the YAML file of ``--config``: the flags of a server, without the dashes in front, and their values.

model-path: /models/SmolLM2-135M-Instruct
port: 30000
disable_radix_cache: true
item-trie: [a=a.npy, b=b.npy]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .server_config import UsageError, flag_name


def read_config_file(path: str) -> dict[str, Any]:
    """Name in snake_case -> value, a scalar or a list; null is left out. Raises UsageError, without the file's name."""
    try:
        content = yaml.load(Path(path).expanduser().read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError("holds no settings; it takes lines such as 'port: 30000'")
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name in settings:
            raise UsageError(f"{flag_name(name)} is given twice; keep one")
        if name == "config":
            raise UsageError("names another config file; put its settings here")
        if isinstance(value, dict):
            raise UsageError(f"{flag_name(name)} has settings below it; it takes a value, or a list")
        if value is not None:
            settings[name] = value
    return settings


class _Loader(yaml.SafeLoader):
    """Plain data, and an error for a key that is there twice, which YAML forbids and PyYAML lets pass."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
