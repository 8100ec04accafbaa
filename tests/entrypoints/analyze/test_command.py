"""The command as an operator calls it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from baton.entrypoints.analyze.__main__ import main
from baton.entrypoints.engine import Engine
from tests.entrypoints.analyze.test_model_config_size import GEMMA3, QWEN3_NEXT, write_config

ROOT = Path(__file__).parents[3]
TOY_MODEL = ROOT / "examples" / "toy_model"


def write_lines(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def turns(count: int) -> list[dict]:
    history: list[int] = []
    lines = []
    for number in range(count):
        history = [*history, *range(100 * number, 100 * number + 50)]
        lines.append({"time": 10.0 * number, "input_ids": history, "output_ids": [5, 6, 7]})
        history = [*history, 5, 6, 7]
    return lines


def test_report_is_written_as_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_lines(tmp_path / "log", *turns(12), "{broken")
    out = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert main([log, "--model", str(TOY_MODEL), *out]) == 0
    table = capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["requests"]["requests"] == 12 and report["turns"]["requests"] == 11
    assert report["log"]["bad"] == 1 and report["log"]["first_bad"][0][0] == 13
    found = sum(53 * number - 1 for number in range(1, 12))
    assert report["requests"]["endless_hits"] == found
    rate = found / report["requests"]["prompt_tokens"]
    assert report["hit_rate"]["endless"] == rate == report["hit_rate"]["by_size"][-1]["hit_rate"]
    for words in (
        "12 requests",
        f"{rate:.1%}",
        "1 of 13 items are broken",
        "number 13: invalid JSON",
        "MiB",
        "flags:",
    ):
        assert words in table
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_hybrids_are_told_of_their_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = turns(12)
    lines[-1]["missed_tokens"] = {"no_state": 400}
    log = write_lines(tmp_path / "log", *lines)
    write_config(tmp_path, **QWEN3_NEXT)
    out = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert main([log, "--model", str(tmp_path), *out]) == 0
    table, report = capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())
    assert report["states"]["bytes_per_state"] == 77_266_944 and report["states"]["turns"] == 11
    for words in (
        "Recurrent states of 73.7 MiB",
        "--max-states 7 takes 663 MiB: 4 find 80% of these hits, and running requests need 3",
        "no_state: 400 prompt tokens",
        "with 7 states, 663 MiB",
        "flags: --max-total-tokens 636 --max-states 7",
    ):
        assert words in table
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_models_with_windows_are_told_of_two_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_lines(tmp_path / "log", *turns(5))
    write_config(tmp_path, **GEMMA3)
    assert main([log, "--model", str(tmp_path), "--pool-tokens", "100000", "--plot", str(tmp_path / "r.png")]) == 0
    table = capsys.readouterr().out
    assert "Layers with a sliding window of 1,024 tokens" in table and "100,000 tokens, 4.58 GiB" not in table
    assert "with a host tier all layers share one pool, which takes 4.58 GiB for as many" in table
    small = [log, "--model", str(tmp_path), "--pool-gb", "0.01", "--swa-full-tokens-ratio", "0.5"]
    assert main(small) == 0
    assert "so few that all layers share one pool" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["no-such-file"], "no-such-file cannot be read: No such file"),
        (["LOG", "--model", "no-folder"], "config.json cannot be read"),
        (["LOG", "--tokenizer", "no-folder"], "no tokenizer.json in 'no-folder'"),
        (["EMPTY"], "is empty"),
        (["BROKEN"], "has no readable request among 1 items; item 1"),
        (["LOG", "--format", "mooncake"], "item 1: it has no input_length"),
        (["LOG", "--block-tokens", "16"], "--block-tokens is for logs in the format mooncake"),
    ],
)
def test_failures_are_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], reason: str
) -> None:
    files = {
        "LOG": write_lines(tmp_path / "log", {"input_ids": [1]}),
        "EMPTY": write_lines(tmp_path / "empty"),
        "BROKEN": write_lines(tmp_path / "broken", "x"),
    }
    assert main([files.get(word, word) for word in argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("baton analyze: ") and error.count("\n") == 1 and reason in error


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--pool-gb", "1"], "--pool-gb needs --model"),
        (["--pool-gb", "-1"], "-1 is not a number above 0"),
        (["--bytes-per-state", "5"], "--bytes-per-state needs --kv-bytes-per-token"),
        (["--swa-full-tokens-ratio", "0.5"], "--swa-full-tokens-ratio needs --model"),
        (["--swa-full-tokens-ratio", "0.5", "--model", "m", "--kv-bytes-per-token", "9"], "leave out --kv-bytes"),
        (["--page-size", "x"], "x is not a whole number"),
        (["--reach", "0.9", "0.8", "1"], "give growing shares"),
        (["--reach", "0.9", "0.95", "2"], "2 is not a share"),
        (["--bytes-per-token", "3", "--tokenizer", "x"], "is for text without a tokenizer"),
        (["--chat-template", "x"], "--chat-template needs --tokenizer"),
        (["--json", "/no/such/folder/x"], "there is no folder /no/such/folder"),
    ],
)
def test_contradictory_options_are_refused(capsys: pytest.CaptureFixture[str], argv: list[str], reason: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["log", *argv])
    assert ended.value.code == 2 and reason in capsys.readouterr().err


def test_analysis_runs_without_torch(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log", *[{"messages": [{"role": "user", "content": "How many lines?"}]}] * 3)
    code = (
        "import sys; from baton.entrypoints.analyze.__main__ import main;"
        f"main([{log!r}, '--model', {str(TOY_MODEL)!r}]); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 requests" in done.stdout and "token ids" in done.stdout


@pytest.mark.parametrize("hashed", [False, True])
def test_analysis_of_recorded_log_matches_engine_hits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hashed: bool
) -> None:
    """One request at a time in a pool with room for all: the curve's end is what the engine's own cache found."""
    log, page = tmp_path / "log", 16 if hashed else 1
    settings = {"max_total_tokens": 8192, "device": "cpu", "dtype": "float32", "disable_cuda_graph": True}
    recording = {"record_requests": str(log), "record_requests_hashed": hashed}
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    cached = asked = 0
    with Engine(model_path=str(TOY_MODEL), page_size=page, **settings, **recording) as engine:
        text = "<|im_start|>system\nYou answer in bash.<|im_end|>\n" * 3
        for job in range(3):
            answer = engine.generate(f"{text}How many lines are in file {job}?", sampling, retain_ttl=60)
            answers = [answer]
            for turn in range(4):
                parent = answers[-1]["meta_info"]["id"]
                suffix = f"<|im_end|>\nNow file {turn}.{job}, and say why it is so, in one sentence."
                answers.append(
                    engine.generate(continuation_of=parent, continuation_suffix=suffix, sampling_params=sampling)
                )
            cached += sum(each["meta_info"]["cached_tokens"] for each in answers)
            asked += sum(each["meta_info"]["prompt_tokens"] for each in answers)
    assert main([str(log), "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["requests"]["requests"] == 15 and report["requests"]["prompt_tokens"] == asked
    assert report["hit_rate"]["recorded"] == cached / asked
    assert report["turns"]["named_parents"] == 12 == report["turns"]["requests"]
    if hashed:
        assert cached - 15 * page <= report["requests"]["endless_hits"] <= cached
    else:
        assert report["requests"]["endless_hits"] == cached
    assert f"found {cached / asked:.1%}" in capsys.readouterr().out


VALUES = ["1" * 400, "Infinity", "-Infinity", "NaN", "1e999", "-1", "0", "true", "null", '"x"', "[]", "{}", "[[]]"]
VALUES += ["1e-320", "1e18", "99999999999999999999", "-5e17", '"\\ud800"', "[1e400]", '[{"role": 1}]', '"00ff"']
ITEMS = [
    {"input_ids": [1, 2, 3], "output_ids": [4], "time": 1, "seconds": 2, "namespace": "n", "cached_tokens": 1},
    {
        "input_blocks": "00" * 16,
        "block_tokens": 16,
        "input_tokens": 20,
        "output_blocks": ["00" * 8],
        "output_tokens": 3,
    },
    {"input_ids": [1, 2, 3], "output_ids": [4], "state_points": [1, 2], "retain_states": 2, "finish": "abort"},
    {"text": "x", "output_text": "y", "time": 3, "continuation_of": "z"},
    {"messages": [{"role": "user", "content": "x"}], "tools": [], "time": 3},
    {"id": "1", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": [1]},
    {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}},
]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: " ".join([*item][:3]))
@pytest.mark.parametrize("array", [False, True], ids=["lines", "array"])
def test_fuzzed_log_items_still_yield_a_report(tmp_path: Path, item: dict, array: bool) -> None:
    rng = random.Random(1)
    lines = [json.dumps(item)]
    for _ in range(200):
        changed = dict.fromkeys(rng.sample(list(item), rng.randint(1, 2)))
        marked = {name: f"@{name}" if name in changed else value for name, value in item.items()}
        line = json.dumps(marked)
        for name in changed:
            line = line.replace(f'"@{name}"', rng.choice(VALUES))
        if not array and rng.random() < 0.3:
            at = rng.randrange(len(line))
            line = line[:at] + rng.choice(["", "9", '"', "}", "\x00"]) + line[at + rng.randrange(3) :]
        lines.append(line)
    log = tmp_path / "log"
    log.write_text("[" + ",\n".join(lines) + "]" if array else "\n".join(lines))
    hybrid = ["--kv-bytes-per-token", "1000", "--bytes-per-state", "50000"]
    assert main([str(log), "--json", str(tmp_path / "r.json"), *hybrid]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["states"] is not None
    assert report["log"]["bad"] > 0 and report["log"]["items"] == 201


def test_misses_are_grouped_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = turns(3)
    lines[1]["missed_tokens"] = {"evicted": 30, "required": 1}
    lines[2]["missed_tokens"] = {"unseen": 9, "required": 1, "x" * 99: 4}
    log = write_lines(tmp_path / "log", *lines, {"input_ids": [1], "missed_tokens": {"evicted": -1}})
    assert main([log, "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["misses"] == [
        {"reason": "evicted", "tokens": 30, "share": 30 / 41, "requests": 1},
        {"reason": "unseen", "tokens": 9, "share": 9 / 41, "requests": 1},
        {"reason": "required", "tokens": 2, "share": 2 / 41, "requests": 2},
    ]
    assert report["log"]["bad"] == 1
    table = capsys.readouterr().out
    assert "evicted" in table and "73.2%" in table
    assert main([write_lines(tmp_path / "plain", *turns(3))]) == 0
    assert "cache_report" not in capsys.readouterr().out
