"""What to change where the recording server computed prompt tokens again although it had their K and V."""

from __future__ import annotations

from typing import Any

from .wording import counted


def advise(
    misses: list[dict[str, Any]], prompt_tokens: int, states: dict[str, Any] | None, windows: dict[str, Any] | None
) -> list[str]:
    """A paragraph for each reason that has a remedy. misses: rows of the report. states, windows: its parts for such
    models; None without --model, or for another one."""
    found = []
    for row in misses:
        if row["reason"] == "no_state" and row["tokens"]:
            found.append(f"{_seen(row, prompt_tokens)} no recurrent state behind them. {_for_states(states)}")
        if row["reason"] == "no_window" and row["tokens"]:
            found.append(f"{_seen(row, prompt_tokens)} no whole window before their end. {_for_windows(windows)}")
    return found


def _seen(row: dict[str, Any], prompt_tokens: int) -> str:
    tokens = f"{counted(row['tokens'], 'prompt token')} ({row['tokens'] / max(1, prompt_tokens):.1%} of all)"
    return f"{row['reason']}: {tokens} of {counted(row['requests'], 'request')} had K and V, but"


def _for_states(states: dict[str, Any] | None) -> str:
    if states is None:
        return (
            "Raise --max-states (--model FOLDER computes how many are worthwhile), or keep states in a host cache "
            "(--host-cache-gb). Requests of programs that return to earlier turns keep more of them with retain_states."
        )
    number = states["max_states"]
    if number is None:
        advice = "Set --max-states as high as memory allows, or keep states in a host cache (--host-cache-gb)."
    else:  # a recording does not have the server's own number
        advice = (
            f"The curve asks for --max-states of at least {number}. If the server had as many, states were lost to "
            "concurrent requests (a host cache, --host-cache-gb, keeps them), or prompts part at places that only the "
            "second one shows, where no number helps."
        )
    if states["older_turns"]:
        advice += (
            f" {counted(states['older_turns'], 'request')} went back to an earlier turn: retain_states of 2 or more on "
            "requests of such conversations keeps the states of several turns before others."
        )
    return advice


def _for_windows(windows: dict[str, Any] | None) -> str:
    use_host = "With a host cache (--host-cache-gb) all layers share one pool, and no window is lost before its KV."
    if windows is None or not windows["window_tokens"]:
        return f"Raise --swa-full-tokens-ratio (by default the server takes at most 0.2). {use_host}"
    now = windows["window_tokens"] / windows["pool_tokens"]
    wanted = min(1.0, now * max(2.0, windows["prompts_in_pool"] / windows["windows_in_pool"]))
    return (
        f"A pool of {windows['pool_tokens']:,} tokens has {windows['window_tokens']:,} for windows, a share of "
        f"{now:.2g}: try --swa-full-tokens-ratio {wanted:.2g}. {use_host}"
    )
