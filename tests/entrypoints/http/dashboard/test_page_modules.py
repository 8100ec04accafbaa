"""The page's modules that draw nothing, called in the browser one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.doubles import dashboard_scenes as scenes
from tests.doubles.fake_dashboard import FakeDashboard

pytestmark = pytest.mark.process

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call(browser: Any) -> Iterator[Call]:
    """call(module, body, argument): the value of a function's body with the module as ``m``."""
    with FakeDashboard(scenes.hello(), scenes.update()) as dashboard:
        page = browser.new_page()
        page.goto(dashboard.url)

        def caller(module: str, body: str, argument: Any = None) -> Any:
            url = f"{dashboard.url}/{module}.js"
            return page.evaluate(
                f"async ([url, argument]) => {{ const m = await import(url); {body} }}", [url, argument]
            )

        yield caller
        page.close()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_event_parser_accepts_any_chunking(size: int, call: Call) -> None:
    stream = ': ping\n\nevent: a\ndata: {"x": "é\\n🏃"}\n\nevent: b\r\ndata: {"y":\r\ndata:  2}\r\n\r\n'
    stream += "id: 4\n\ndata: 3\n\nevent: cut\ndata: 1"
    body = """
        const found = [];
        const parser = new m.EventParser((name, data) => found.push([name, data]));
        const [text, size] = argument;
        for (let at = 0; at < text.length; at += size) parser.feed(text.slice(at, at + size));
        return found;"""
    expected = [["a", {"x": "é\n🏃"}], ["b", {"y": 2}], ["message", 3]]
    assert call("data/stream", body, [stream, size]) == expected


def test_endless_event_is_an_error(call: Call) -> None:
    body = """
        const parser = new m.EventParser(() => {});
        const piece = "x".repeat(1024 * 1024);
        for (let fed = 1; fed <= 100; fed++) {
            try { parser.feed(piece); } catch (error) { return [error.name, fed]; }
        }"""
    assert call("data/stream", body) == ["RangeError", 33]


def test_counts_durations_and_shares_are_formatted(call: Call) -> None:
    body = """return [
        [0, 950, 9870, 12345, 1234567].map(m.count),
        [0.0004, 0.34, 0.9999, 4.21, 59.7, 200, 8000, -3].map(m.duration),
        [0, 0.004, 0.0999, 0.5, 1].map(m.percent),
    ];"""
    counts, durations, shares = call("drawing/format", body)
    assert counts == ["0", "950", "9,870", "12.3K", "1.23M"]
    assert durations == ["0 ms", "340 ms", "1.0 s", "4.2 s", "1 min 0 s", "3 min 20 s", "2 h 13 min", "0 ms"]
    assert shares == ["0 %", "0.4 %", "10 %", "50 %", "100 %"]


def test_control_and_invisible_characters_in_names_are_escaped(call: Call) -> None:
    names = ["a\x00\x1b[31m\n", "\u202egnp", "\u200b\u200b", "\ufeff", "\u00ad\u2060\u3164", "\U000e0041x"]
    shown = call("drawing/format", "return argument.map((name) => m.visible(name));", names)
    signs = ["a␀␛[31m␊", "‹202E›gnp", "‹200B›‹200B›", "‹FEFF›", "‹00AD›‹2060›‹3164›", "‹E0041›x"]
    assert shown == signs
    blank = [" ", "\u00a0\u3000", "\u200d", "", "a b", "👩\u200d🚀"]
    assert call("drawing/format", "return argument.map((name) => m.visible(name));", blank) == [
        "␣", "␣␣", "␣", "", "a b", "👩\u200d🚀",
    ]  # fmt: skip


def test_text_is_truncated_at_character_boundaries(call: Call) -> None:
    assert call("drawing/format", "return m.shortened('ab🏃🏃', 4);") == "ab…"
    assert call("drawing/format", "return m.shortened('abcd', 4);") == "abcd"


def test_pool_levels_count_each_slot_once(call: Call) -> None:
    cases = [
        scenes.stats(free=10, evictable=20, protected=30, private=5, leased=12, total=65),
        scenes.stats(free=10, evictable=20, protected=30, private=5, leased=33, total=65),
        scenes.stats(free=10, evictable=20, protected=30, private=5, leased=99, total=65),
    ]
    body = "return argument.map(m.levels);"
    for stats, levels in zip(cases, call("data/series", body, cases)):
        assert sum(levels.values()) == stats["total"] and min(levels.values()) >= 0
        assert levels["leased"] == min(stats["leased"], 35)


def test_series_keep_ten_minutes(call: Call) -> None:
    body = """
        const series = new m.Series();
        for (let t = 1000; t <= 2000; t += 4) series.add(t, { ...argument, queries: 10 * t, hits: 5 * t, free: t });
        return [series.at("free", 2000), series.at("free", 1999), series.at("queries", 1998), series.at("free", 1401),
            Number.isNaN(series.at("free", 1400)), Number.isNaN(series.at("free", 2001)), series.hitRate(2000),
            series.rate("queries", 1450), [...series.rings.values()].every((ring) => ring.length === 600)];"""
    assert call("data/series", body, scenes.stats()) == [2000, 1996, 19980, 1400, True, True, 0.5, 10, True]


def test_hit_rate_covers_one_minute(call: Call) -> None:
    body = """
        const series = new m.Series();
        for (let t = 0; t <= 100; t++) series.add(t, { ...argument, queries: 10 * t, hits: 10 * Math.max(0, t - 88) });
        return [series.hitRate(100), series.hitRate(80), series.hitRate(0)];"""
    assert call("data/series", body, scenes.stats()) == pytest.approx([120 / 600, 0, float("nan")], nan_ok=True)


def rows(call: Call, lives: list[dict[str, Any]], from_: float = 0, to: float = 100) -> list[list[Any]]:
    body = """
        const [lives, from, to] = argument;
        const kept = new Map(lives.map((life) => [m.lifeKey(life), life]));
        return m.rowsOf(kept, from, to).map((row) => [row.life.rid, row.depth, row.parent?.life.rid ?? null]);"""
    return call("lives/lives", body, [lives, from_, to])


def test_children_follow_parents_and_newest_family_is_first(call: Call) -> None:
    def at(rid: str, begin: float, **fields: Any) -> dict[str, Any]:
        return scenes.life(rid, [["decode", begin, begin + 1, 1]], **fields)

    lives = [
        at("a", 1),
        at("b", 2),
        at("a2", 5, parent="a"),
        at("a3", 7, parent="a2"),
        at("fork", 6, parent="a"),
        at("c", 6.5),
    ]
    assert rows(call, lives) == [
        ["a", 0, None], ["a2", 1, "a"], ["a3", 2, "a2"], ["fork", 1, "a"], ["c", 0, None], ["b", 0, None],
    ]  # fmt: skip
    # Outside the time that is shown there is no row, and no parent to stand below.
    assert rows(call, lives, from_=6.2) == [["a3", 0, None], ["c", 0, None], ["fork", 0, None]]
    assert [rid for rid, _, _ in rows(call, lives, to=3)] == ["b", "a"]


def job_rows(call: Call, lives: list[dict[str, Any]], folded: list[str]) -> list[list[Any]]:
    body = """
        const [lives, folded] = argument;
        const kept = new Map(lives.map((life) => [m.lifeKey(life), life]));
        const folds = new Set(folded.map(m.jobKey));
        const name = (row) => row.life?.rid ?? `job ${row.job}`;
        return m.rowsOf(kept, 0, 100, folds).map((row) => [name(row), row.depth, row.header?.job ?? null]);"""
    return call("lives/lives", body, [lives, folded])


def test_job_requests_are_grouped_and_folded_under_its_row(call: Call) -> None:
    def at(rid: str, begin: float, **fields: Any) -> dict[str, Any]:
        return scenes.life(rid, [["decode", begin, begin + 1, 1]], **fields)

    lives = [
        at("a", 1, job_id="x"),
        at("b", 2, job_id="y"),
        at("a2", 5, parent="a", job_id="x"),
        at("c", 6, job_id="alone"),
        at("a3", 7, job_id="x"),
        at("d", 8),
        at("b2", 9, job_id="y"),
    ]
    y = [["job y", 0, None], ["b", 1, "y"], ["b2", 1, "y"]]
    x = [["job x", 0, None], ["a", 1, "x"], ["a2", 2, "x"], ["a3", 1, "x"]]
    d, c = ["d", 0, None], ["c", 0, None]
    assert job_rows(call, lives, []) == [*y, d, *x, c], "the job that was at work last comes first, its steps in order"
    assert job_rows(call, lives, ["x", "alone", "gone"]) == [*y, d, x[0], c], "a single request is no group"


def test_handoff_labels_avoid_the_now_line(call: Call) -> None:
    body = "return m.placeLabel(argument.texts, (words) => words.length, argument.end, argument.now, argument.right);"

    def place(end: int, now: int, right: int) -> dict[str, Any] | None:
        return call("lives/lives_paint", body, {"texts": ["x" * 50, "x" * 10], "end": end, "now": now, "right": right})

    assert place(100, 200, 300) == {"words": "x" * 50, "from": 100}, "before it"
    assert place(180, 200, 300) == {"words": "x" * 50, "from": 200}, "beyond it"
    assert place(160, 200, 250) == {"words": "x" * 10, "from": 160}, "the name alone before it"
    assert place(190, 200, 230) == {"words": "x" * 10, "from": 200}, "the name alone beyond it"
    assert place(190, 200, 210) is None


def test_reused_rids_and_parent_cycles_are_shown(call: Call) -> None:
    def at(rid: str, index: int, begin: float, parent: str | None = None) -> dict[str, Any]:
        life = scenes.life(rid, [["decode", begin, begin + 1, 1]], index=index)
        return life if parent is None else life | {"parent": parent}

    # A child belongs to the last before it; a life that names itself, or its own child, is shown like any other.
    lives = [
        at("x", 0, 1),
        at("x", 1, 5),
        at("child", 0, 4, "x"),
        at("self", 0, 2, "self"),
        at("p", 0, 3, "q"),
        at("q", 0, 3, "p"),
    ]
    shown = rows(call, lives)
    assert ["child", 1, "x"] in shown and ["self", 0, None] in shown
    assert sorted(rid for rid, _, _ in shown) == ["child", "p", "q", "self", "x", "x"]


def test_inconsistent_tree_snapshot_is_drawn(call: Call) -> None:
    spans = [
        scenes.span(1, -1, 0, 10, 20),
        scenes.span(2, 0, 10, 50, 50),  # larger than its parent's whole
        scenes.span(2, 0, 10, 5, 5),  # a second one of this id
        scenes.span(4, 2, 15, 5, 5),  # below what was left out
        scenes.span(5, 99, 15, 5, 5),  # without a parent
        scenes.span(6, -1, 0, 0, 0),
    ]
    body = """
        const icicle = new m.Icicle(argument, "*");
        return [...icicle.byKey.values()].map(({ key, left, share }) => [key, left, share]);"""
    placed = {key: (left, share) for key, left, share in call("tree/icicle", body, scenes.tree(spans))}
    assert placed == {"root": (0, 1), "1": (0, 1), "2": (0, 1), "6": (1, 0)}


def test_clock_stops_when_the_server_is_silent(call: Call) -> None:
    body = """
        const clock = new m.Clock();
        clock.heard(50);
        const soon = clock.now();
        const real = performance.now.bind(performance);
        performance.now = () => real() + 60_000;
        const late = clock.now();
        performance.now = real;
        clock.freeze(true);
        clock.heard(90);
        const frozen = clock.now();
        clock.freeze(false);
        return [soon >= 50 && soon < 51, late, frozen < 52, clock.now() >= 90];"""
    assert call("data/clock", body) == [True, 57, True, True]
