"""Flags of SGLang and vLLM: those that are Baton's by another name, those that change nothing, those refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton.entrypoints.foreign_flags import FOREIGN, OTHER_VALUES, SGLANG_NAMES, VLLM_NAMES, Alias, NoEffect, Refused
from baton.entrypoints.lang.backends.runtime import command_line
from baton.entrypoints.server_args import build_parser, compose, own_settings, parse_command_line
from baton.entrypoints.server_config import ServerArgs, UsageError

MODEL = ["--model-path", "m"]

OWN = {action.dest for action in build_parser()._actions}


def plain(args: ServerArgs) -> dict[str, Any]:
    return dataclasses.asdict(args)


# -- the tables --------------------------------------------------------------------------------------------------------


def test_foreign_flag_tables_are_consistent() -> None:
    assert not FOREIGN.keys() & OWN and not (SGLANG_NAMES | VLLM_NAMES) & (OWN | FOREIGN.keys())
    assert len(SGLANG_NAMES) > 300 and len(VLLM_NAMES) > 150
    assert OTHER_VALUES.keys() <= OWN
    for name, known in FOREIGN.items():
        if isinstance(known, Alias):
            assert known.to in OWN and set(known.unless) <= OWN, name
            values = [known.value] if known.value is not None else list((known.values or {}).values())
            for value in values:
                assert compose({"model_path": "m", known.to: value}), name
        else:
            assert known.about if isinstance(known, NoEffect) else known.instead, name


def test_flags_named_in_hints_exist() -> None:
    flags = {option for action in build_parser()._actions for option in action.option_strings}
    for name, known in FOREIGN.items():
        hint = known.instead if isinstance(known, Refused) else known.about
        for word in hint.replace(",", " ").replace(")", " ").replace("(", " ").replace(";", " ").split():
            assert not word.startswith("--") or word in flags, (name, word)


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--max-model-len 4096", "--context-length 4096"),
        ("--max-model-len=4k", "--context-length 4000"),
        ("--max-model-len 4K", "--context-length 4096"),
        ("--max-model-len auto", ""),
        ("--max-num-seqs 8 --max-num-batched-tokens 1024", "--max-running-requests 8 --chunked-prefill-size 1024"),
        ("--block-size 16 --seed 7", "--page-size 16 --random-seed 7"),
        ("--gpu-memory-utilization 0.5", "--mem-fraction-static 0.5"),
        ("--enforce-eager --no-enable-prefix-caching", "--disable-cuda-graph --disable-radix-cache"),
        ("--disable-overlap-schedule", "--overlap-schedule off"),
        ("--generation-config vllm", "--sampling-defaults openai"),
        ("--load-format safetensors --dtype half", "--dtype float16"),
        ("--schedule-policy lmcache-like --host-cache-gb 1", "--schedule-policy fcfs --host-cache-gb 1"),
        ("--enable-hierarchical-cache", "--host-cache-ratio 2"),
        ("--enable-hierarchical-cache --hicache-ratio 3", "--host-cache-ratio 3"),
        ("--hicache-size 5 --enable-hicache --hicache-write-policy write_back",
         "--host-cache-gb 5 --host-write-policy write_back"),
        ("--kv-offloading-size 2.5", "--host-cache-gb 2.5"),
        ('--allowed-origins ["https://example.org"]', "--cors-origin https://example.org"),
        ("--shutdown-timeout 9", "--drain-timeout 9"),
        ("--scheduling-policy fcfs", "--schedule-policy fcfs"),
        ("-c 4096 -np 2 --alias mine -fa on --jinja -cb",
         "--context-length 4096 --max-running-requests 2 --served-model-name mine"),
        ("--ctx-size 0", "--context-length 0"),
        ("--enable-lora --lora-modules a=/x b=/y --max-loras 4 --max-lora-rank 64 --max-cpu-loras 2",
         "--lora-paths a=/x b=/y --max-loaded-loras 2"),
        ("--disable-hybrid-swa-memory", "--swa-full-tokens-ratio 1"),
        ("--disable-hybrid-kv-cache-manager", "--swa-full-tokens-ratio 1"),
        ("--disable-log-stats --enable-log-requests", "--log-interval 0 --log-requests"),
        # Nothing at all
        ("--tp-size 1 --tensor-parallel-size 1 -tp 1 --pp-size=1 --nnodes 1 --node-rank 0", ""),
        ("--enable-metrics --enable-prefix-caching --enable-chunked-prefill --enable-auto-tool-choice", ""),
        ("--disable-log-requests --no-enable-log-requests --no-enable-lora", ""),
        ("--kv-cache-dtype auto --tokenizer-mode auto --distributed-executor-backend mp", ""),
        ("--stream-interval 1 --skip-server-warmup --no-enable-expert-parallel", ""),
        ("--device cpu --load-format auto", "--device cpu"),
    ],
)  # fmt: skip
def test_foreign_command_lines_are_translated(theirs: str, ours: str) -> None:
    args = parse_command_line([*MODEL, *theirs.split()])
    assert plain(args) | {"notes": ()} == plain(parse_command_line([*MODEL, *ours.split()]))


def test_each_foreign_flag_gets_a_log_line() -> None:
    argv = (
        "--max-model-len 64 --enforce-eager --enable-metrics --tp-size 1 --enable-hierarchical-cache --port 1 "
        "--schedule-policy=lmcache-like"
    )
    assert parse_command_line([*MODEL, *argv.split()]).notes == (
        "--max-model-len is --context-length here",
        "--enforce-eager is --disable-cuda-graph here",
        "--enable-metrics has no effect: GET /metrics is always there",
        "--tp-size has no effect: one server runs one model on one device; tensor, pipeline and data parallelism are "
        "not supported yet",
        "--schedule-policy lmcache-like is fcfs here",
        "--enable-hierarchical-cache is --host-cache-ratio 2.0 here (SGLang's default size)",
    )
    assert parse_command_line([*MODEL, "--port", "1"]).notes == ()


def test_model_may_be_a_positional_argument() -> None:
    for argv in (["m"], ["-m", "m"], ["--port", "1", "m"], ["m", "--max-model-len", "64"], ["--model", "m"]):
        assert parse_command_line(argv).model.model_path == "m"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("-ngl 99", r"--n-gpu-layers is not supported: the whole model is on one device, which --device selects"),
        ("-x", r"unknown flag -x; flags have two dashes here, see --help"),
        ("--tp-size 2", r"--tp-size is 2; only 1 is supported: one server runs one model on one device"),
        ("-tp 4", r"--tp is 4; only 1"),
        ("--quantization bitsandbytes", r"--quantization: invalid choice: 'bitsandbytes'"),
        ("--lora-target-modules all", r"--lora-target-modules is not supported: every linear layer"),
        ("--scheduling-policy priority", r"--scheduling-policy is priority; use fcfs, or --schedule-policy"),
        ("--max-model-len many", r"--max-model-len is many; use a number of tokens"),
        ("--max-model-len", r"--max-model-len: expected one argument"),
        ("--block-size abc", r"--page-size: invalid int value: 'abc'"),
        ("--enforce-eager=1", r"--enforce-eager takes no value; it is --disable-cuda-graph$"),
        ("--enable-metrics=true", r"--enable-metrics takes no value"),
        ('--allowed-origins ["a","b"]', r"--allowed-origins is \[\"a\",\"b\"\]; use one origin"),
        ("--hicache-storage-backend file", r"--disk-cache-path and --disk-cache-gb"),
        ("--no-enable-chunked-prefill", r"a --chunked-prefill-size as large as the context"),
        ("--moe-a2a-backend deepep", r"--moe-a2a-backend, a flag of SGLang, is not supported yet"),
        ("--limit-mm-per-prompt {}", r"--limit-mm-per-prompt, a flag of vLLM, is not supported yet"),
        ("--enable-eplb", r"--enable-eplb, a flag of SGLang and vLLM, is not supported yet"),
        ("--enable-hierarchical-cahce", r"unknown flag --enable-hierarchical-cahce"),
    ],
)
def test_refused_foreign_flags_name_the_remedy(argv: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_command_line([*MODEL, *argv.split()])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_command_line(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("baton ")


# -- keywords of Engine and Runtime ------------------------------------------------------------------------------------


def test_foreign_engine_keywords_are_translated() -> None:
    given = {
        "model": "m", "tp_size": 1, "seed": 5, "max_model_len": 64, "enable_metrics": False, "trust_remote_code": False,
        "gpu_memory_utilization": 0.5, "enforce_eager": True, "quantization": None, "skip_tokenizer_init": False,
        "lora_paths": None, "disable_log_stats": True, "block_size": 16, "dtype": "half",
    }  # fmt: skip
    ours = {
        "model_path": "m", "random_seed": 5, "context_length": 64, "mem_fraction_static": 0.5,
        "disable_cuda_graph": True, "page_size": 16, "dtype": "float16", "log_interval": 0.0,
        "trust_remote_code": False, "lora_paths": None,
    }  # fmt: skip
    assert compose(given) == compose(ours)
    assert own_settings(given)[0] == ours
    assert parse_command_line(command_line(own_settings(given)[0])) == compose(ours), "as Runtime starts its server"


def test_zero_values_are_not_ignored() -> None:
    args = compose({"model": "m", "seed": 0, "hicache_size": 0, "shutdown_timeout": 0})
    assert (args.scheduler.random_seed, args.tiers.host_cache_gb, args.server.drain_timeout) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp_size": 2}, "--tp-size is 2; only 1"),
        ({"moe_a2a_backend": "deepep"}, "a flag of SGLang, is not supported yet"),
        ({"max_model_len": 64, "context_length": 32}, "--context-length is given twice, under two names"),
        ({"pagesize": 1}, "unknown setting 'pagesize'; did you mean page_size"),
    ],
)
def test_unsupported_foreign_keywords_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compose({"model_path": "m", **given})
