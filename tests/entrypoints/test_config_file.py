"""--config FILE: what the file says, what the command line says of the same, and mistakes with the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.entrypoints.server_args import compose, parse_command_line
from baton.entrypoints.server_config import ServerArgs, UsageError


def parsed(folder: Path, text: str, *argv: str) -> ServerArgs:
    file = folder / "server.yaml"
    file.write_text(text)
    return parse_command_line(["--config", str(file), *argv])


def test_config_file_sets_flags(tmp_path: Path) -> None:
    text = """
model-path: m
page_size: 16           # dashes or underscores
--port: 0
disable-radix-cache: true
dashboard: false
drain-timeout: 2
served-model-name: "7"
item-trie:
  - a=x.npy
  - b=y.npy
disk-cache-gb: null
"""
    assert parsed(tmp_path, text) == compose(
        {
            "model_path": "m", "page_size": 16, "port": 0, "disable_radix_cache": True, "dashboard": False,
            "drain_timeout": 2, "served_model_name": "7", "item_trie": ["a=x.npy", "b=y.npy"],
        }
    )  # fmt: skip


def test_command_line_overrides_config_file(tmp_path: Path) -> None:
    text = "model: m\nport: 1\nitem-trie: [a=x.npy, b=y.npy]\nmax-model-len: 64\ndashboard: false\n"
    args = parsed(tmp_path, text, "--port", "2", "--item-trie", "c=z.npy", "--context-length", "32", "--dashboard")
    assert args == compose(
        {"model_path": "m", "port": 2, "item_trie": ["c=z.npy"], "context_length": 32, "dashboard": True}
    )


def test_config_file_and_command_line_settings_combine(tmp_path: Path) -> None:
    args = parsed(tmp_path, "disk-cache-path: /d\nhost-cache-gb: 1\n", "m", "--disk-cache-gb", "3")
    assert (args.tiers.disk_cache_path, args.tiers.disk_cache_gb) == ("/d", 3.0)


def test_foreign_flags_in_config_file_are_translated(tmp_path: Path) -> None:
    args = parsed(tmp_path, "model: m\ntensor-parallel-size: 1\nmax_num_seqs: 4\n")
    assert args.scheduler.max_running_requests == 4
    assert "--max-num-seqs is --max-running-requests here" in args.notes


def test_empty_config_file_sets_nothing(tmp_path: Path) -> None:
    assert parsed(tmp_path, "# nothing yet\n", "m") == compose({"model_path": "m"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pagesize: 1", r"unknown setting 'pagesize'; did you mean page_size\?"),
        ("port: many", r"--port is 'many'; it takes a whole number"),
        ("port: 1\nport: 2", r"is not valid YAML: port is given twice"),
        ("page-size: 1\npage_size: 2", r"--page-size is given twice"),
        ("[1, 2]", r"holds no settings"),
        ("port: {a: 1}", r"--port has settings below it"),
        ("port: [1", r"is not valid YAML"),
        ("model: !!python/object/apply:os.getcwd []", r"is not valid YAML"),
        ('api-key: ""', r"--api-key is empty; a server without a key is one without the flag"),
        ("api-key: [one, ' ']", r"--api-key is empty"),
        ("admin-api-key: 1234", r"--admin-api-key is 1234; it takes a string"),
        ("config: other.yaml", r"names another config file"),
    ],
)
def test_config_file_errors_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=rf"--config .*server\.yaml: {message}"):
        parsed(tmp_path, text, "--model-path", "m")


def test_missing_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--config .*none\.yaml: cannot be read: No such file"):
        parse_command_line(["--config", str(tmp_path / "none.yaml"), "m"])
