"""A watcher gets the use of each pool as the scheduler's statistics have it."""

from __future__ import annotations

from baton.scheduler.live_view.snapshots import load_now
from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import Harness


def worked(**options) -> Harness:
    """Two prompts that share their beginning have been computed, and one is running."""
    harness = Harness(num_tokens=1024, page_size=16, context=256, **options)
    for name, prompt in (("a", prompt_of(80)), ("b", [*prompt_of(48), 1, 2])):
        harness.add(name, prompt, 4)
        harness.run()
    harness.add("c", prompt_of(40, 3), 9)
    harness.step()
    return harness


def test_load_counts_states_on_both_tiers() -> None:
    harness = worked(states=8, host_tokens=1024, host_states=6)
    harness.cache.evict_states(1, kept_too=True)
    load, stats = load_now(harness.scheduler), harness.scheduler.stats()
    states, [host] = stats.states, stats.tiers
    assert (load.states_total, load.states_free, load.states_held) == (8, states.free, states.held)
    assert (load.states_cached, load.states_kept, load.states_evicted) == (states.in_tree, states.kept, 1)
    assert load.states_held > load.states_cached > load.states_kept > 0
    assert (load.host_states_total, load.host_states_used, load.host_states_evicted) == (6, host.used_states, 0)
    assert load.host_states_used > 0 and load.window_total == 0


def test_load_counts_the_pool_for_windows() -> None:
    harness = worked(window=20)
    harness.cache.evict_windows(16)
    load, windows = load_now(harness.scheduler), harness.scheduler.stats().window_pool
    assert (load.window_total, load.window_free) == (windows.total_tokens, windows.free_tokens)
    assert (load.window_evictable, load.window_evicted) == (windows.evictable_tokens, windows.evicted_tokens)
    assert load.window_evicted >= 16
    assert load.window_evictable and load.window_total > load.window_free + load.window_evictable
    assert load.states_total == load.host_states_total == 0
