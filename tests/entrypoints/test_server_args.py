"""Flags come from the dataclasses, and every mistake is named with its fix."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.server_args import build_parser, compose, parse_command_line, with_seed
from baton.entrypoints.server_config import ServerConfig, UsageError
from baton.runtime.config import ModelArgs
from baton.scheduler.config import SchedulerConfig

MODEL = ["--model-path", "m"]


def test_flag_defaults_match_the_dataclasses() -> None:
    args = parse_command_line(MODEL)
    assert args.model == ModelArgs(model_path="m")
    assert args.scheduler == SchedulerConfig()
    assert args.server == ServerConfig()
    assert args.tokenizer_path == args.served_model_name == "m"


def test_served_model_name_is_the_path_of_the_model_by_default() -> None:
    assert parse_command_line(MODEL).served_model_name == "m"
    assert parse_command_line([*MODEL, "--served-model-name", "n"]).served_model_name == "n"


def test_every_flag_sets_exactly_its_field() -> None:
    """Each flag is given a value other than its default; exactly its field changes."""
    other = {
        "int": lambda d: str(d + 32768),
        "float": lambda d: str(d / 2 + 0.1),
        "str": lambda d: d + "x",
        "bool": None,
    }
    special = {"model_impl": "baton", "load_format": "dummy", "dtype": "float16", "device": "cpu",
               "kv_cache_dtype": "int8", "quantization": "int8",
               "attention_backend": "torch_native",
               "linear_backend": "onednn", "schedule_policy": "lpm", "radix_eviction_policy": "lfu",
               "log_level": "debug", "page_size": "16", "item_trie": "t=x.npy", "overlap_schedule": "on",
               "random_seed": "7", "api_key": "k", "lora_paths": "a=x", "pin_time": "cdf",
               "pooling": "mean", "ds_heavy_channel_type": "k", "log_requests_level": "2",
               "speculative_algorithm": "NGRAM",
               "sampling_defaults": "openai", "unknown_fields": "warn"}  # fmt: skip
    base = parse_command_line(MODEL)
    for part in ("model", "scheduler", "server"):
        for field in dataclasses.fields(getattr(base, part)):
            flag = "--" + field.name.replace("_", "-")
            if field.name in special:
                argv = [flag, special[field.name]]
            else:
                make = other[str(field.type)]
                switch = flag.replace("--", "--no-", 1) if field.default is True else flag
                argv = [switch] if make is None else [flag, make(field.default)]
            if field.name.startswith("ds_") or field.name == "enable_double_sparsity":
                argv = ["--enable-double-sparsity", "--ds-channel-config-path", "file", *argv]
            if field.name.startswith("pin_"):
                argv += ["--schedule-policy", "handoff"]
            if field.name == "ssl_keyfile":
                argv += ["--ssl-certfile", "x"]
            changed = parse_command_line([*([] if field.name == "model_path" else MODEL), *argv])
            assert getattr(getattr(changed, part), field.name) != getattr(getattr(base, part), field.name), flag
            others = {p for p in ("model", "scheduler", "server") if getattr(changed, p) != getattr(base, p)}
            assert others == {part}, flag


def test_command_line_and_keywords_agree() -> None:
    argv = [*MODEL, "--page-size", "16", "--disable-radix-cache", "--port", "0", "--drain-timeout", "2"]
    keywords = {"model_path": Path("m"), "page_size": 16, "disable_radix_cache": True, "port": 0, "drain_timeout": 2}
    assert parse_command_line(argv) == compose(keywords)


def test_random_seed_is_drawn_unless_given() -> None:
    args = parse_command_line(MODEL)
    assert args.scheduler.random_seed is None and "default: None" not in build_parser().format_help()
    first, second = (with_seed(args).scheduler.random_seed for _ in range(2))
    assert first is not None and second is not None and first != second
    given = parse_command_line([*MODEL, "--random-seed", "0"])
    assert with_seed(given) is given and given.worker_config.scheduler.random_seed == 0
    assert compose({"model_path": "m", "random_seed": None}) == args
    for wrong in (-1, "1", 2.0, True):
        with pytest.raises(UsageError, match="--random-seed"):
            compose({"model_path": "m", "random_seed": wrong})


def test_item_trie_flag_is_repeatable() -> None:
    args = parse_command_line([*MODEL, "--item-trie", "a=x.npy", "--item-trie", "b=/y=z.npy"])
    assert args.worker_config.item_tries == {"a": "x.npy", "b": "/y=z.npy"}
    assert args == compose({"model_path": "m", "item_trie": ["a=x.npy", "b=/y=z.npy"]})
    assert compose({"model_path": "m", "item_trie": "a=x.npy"}).worker_config.item_tries == {"a": "x.npy"}
    assert parse_command_line(MODEL).worker_config.item_tries == {}
    config = parse_command_line([*MODEL, "--max-item-tries", "3", "--max-item-trie-mb", "2"]).worker_config
    assert (config.max_item_tries, config.max_item_trie_bytes) == (3, 2**21)


def test_worker_config_holds_what_the_worker_needs() -> None:
    config = compose({"model_path": "m", "page_size": 16, "log_level": "debug", "api_key": "k"}).worker_config
    assert (config.model.model_path, config.scheduler.page_size, config.log_level) == ("m", 16, "debug")
    assert "k" not in str(dataclasses.asdict(config).values()).split("'")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--model-path is missing"),
        ([*MODEL, "--pagesize", "1"], "unknown flag --pagesize; did you mean --page-size?"),
        ([*MODEL, "--port=1", "--hots=x"], "unknown flag --hots; did you mean --host?"),
        ([*MODEL, "--zzz"], "unknown flag --zzz; see --help"),
        ([*MODEL, "extra"], "unexpected argument 'extra'"),
        ([*MODEL, "--port", "abc"], "--port: invalid int value: 'abc'"),
        ([*MODEL, "--port", "70000"], "--port is 70000; use 0 to 65535"),
        ([*MODEL, "--port"], "--port: expected one argument"),
        ([*MODEL, "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        ([*MODEL, "--page-size", "3"], "--page-size is 3; use a power of two"),
        ([*MODEL, "--disk-cache-gb", "inf"], "--disk-cache-gb is inf; use a number of GiB"),
        ([*MODEL, "--record-requests-hashed"], "--record-requests-hashed needs --record-requests PATH"),
        ([*MODEL, "--record-requests-gb", "0"], "--record-requests-gb is 0.0; use a number of GiB above 0"),
        ([*MODEL, "--record-requests-gb", "nan"], "--record-requests-gb is nan"),
        ([*MODEL, "--page-size", "0"], "--page-size is 0"),
        ([*MODEL, "--page-size", "64", "--max-total-tokens", "10"], "at least one page"),
        ([*MODEL, "--mem-fraction-static", "1.5"], "--mem-fraction-static is 1.5"),
        ([*MODEL, "--max-running-requests", "0"], "--max-running-requests is 0; use 1 or more"),
        ([*MODEL, "--context-length", "-1"], "--context-length is -1"),
        ([*MODEL, "--watchdog-timeout", "1"], "the worker reports once a second"),
        ([*MODEL, "--ready-timeout", "nan"], "--ready-timeout is nan"),
        ([*MODEL, "--normalize-prefix", "dates,x"], "--normalize-prefix x: no such rule; use claude-code-billing"),
        (
            [*MODEL, "--normalize-prefix", "dates", "--no-auto-continue"],
            "leave it out, or leave out --no-auto-continue",
        ),
        ([*MODEL, "--drain-timeout", "-1"], "--drain-timeout is -1.0; use 0 or more"),
        ([*MODEL, "--decode-interval", "0"], "--decode-interval is 0; use 1 or more"),
        ([*MODEL, "--max-queued-requests", "-1"], "--max-queued-requests is -1; use 0 or more"),
        ([*MODEL, "--request-timeout", "-1"], "--request-timeout is -1.0; use 0 or more"),
        ([*MODEL, "--max-client-leased-ratio", "2"], "--max-client-leased-ratio is 2.0; use a share"),
        ([*MODEL, "--hit-rate-alert", "1.5"], "--hit-rate-alert is 1.5; use a share between 0 and 1"),
        ([*MODEL, "--hit-rate-alert", "nan"], "--hit-rate-alert is nan; use a share between 0 and 1"),
        ([*MODEL, "--max-prompts-per-request", "0"], "--max-prompts-per-request is 0; use 1 or more"),
        ([*MODEL, "--cuda-graph-max-bs", "-1"], "--cuda-graph-max-bs is -1; use 0 for no graphs"),
        ([*MODEL, "--ssl-keyfile", "k.pem"], "--ssl-keyfile is given without --ssl-certfile"),
        ([*MODEL, "--api-key", "k", "--api-key-file", "f"], "--api-key and --api-key-file are both given"),
        ([*MODEL, "--api-key", ""], "--api-key is empty; a server without a key is one without the flag"),
        ([*MODEL, "--admin-api-key-file= "], "--admin-api-key-file is empty"),
        ([*MODEL, "--max-body-mb", "0"], "--max-body-mb is 0; use 1 or more"),
        ([*MODEL, "--item-trie", "items.npy"], "--item-trie is 'items.npy'; it takes NAME=FILE.npy"),
        ([*MODEL, "--item-trie", "a="], "--item-trie is 'a='; it takes NAME=FILE.npy"),
        ([*MODEL, "--item-trie", "=x.npy"], "an item trie cannot be named ''"),
        ([*MODEL, "--item-trie", "a b=x.npy"], "an item trie cannot be named 'a b'"),
        ([*MODEL, "--item-trie", "a=x", "--item-trie", "a=y"], "--item-trie names 'a' twice"),
    ],
)
def test_command_line_mistakes_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_command_line(argv)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_sise": 1}, "unknown setting 'page_sise'; did you mean page_size?"),
        ({"page_size": "16"}, "--page-size is '16'; it takes a whole number"),
        ({"page_size": True}, "--page-size is True; it takes a whole number"),
        ({"drain_timeout": "1"}, "it takes a number"),
        ({"disable_radix_cache": 1}, "it takes true or false"),
        ({"dtype": "int8"}, "--dtype is 'int8'; use one of auto, float32"),
        ({"item_trie": 3}, "--item-trie is 3; it takes a string or a list of strings"),
        ({"item_trie": ["a=b", 3]}, "it takes a string or a list of strings"),
    ],
)
def test_keyword_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        compose({"model_path": "m", **settings})
    assert message in str(caught.value)


def test_help_lists_every_flag_with_its_default() -> None:
    text = build_parser().format_help()
    for title in ("model:", "scheduler and KV cache:", "server:"):
        assert title in text
    assert "--page-size INT" in text and "(default: 1)" in text and "(default: 0)" in text


@pytest.mark.parametrize("flags", [["--pin-time", "cdf"], ["--pin-seconds", "5"]])
def test_pin_flags_require_a_pinning_policy(flags: list[str]) -> None:
    assert parse_command_line([*MODEL, *flags, "--schedule-policy", "continuum"])
    with pytest.raises(ValueError, match=f"{flags[0]} is .*, but --schedule-policy fcfs pins nothing; use auto"):
        parse_command_line([*MODEL, *flags, "--schedule-policy", "fcfs"])
