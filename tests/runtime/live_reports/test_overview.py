"""What the HTTP process keeps of the worker's reports."""

from __future__ import annotations

from baton.runtime.live_reports.report_client import MAX_LIVES, Overview
from baton.runtime.messages import WatchReport
from baton.scheduler.live_view.reports import Life, LoadNow, Phase, RunningNow

LOAD = LoadNow(*range(16))


def life(rid: str, end: str | None = None, *phases: Phase) -> Life:
    return Life(rid, 0, 0.0, 5, 0, 0, [*phases], end=end)  # type: ignore[arg-type]


def rids(lives: list[Life]) -> list[str]:
    return [each.rid for each in lives]


def test_overview_changes_version_when_report_is_complete() -> None:
    overview = Overview()
    running = RunningNow("a", "decode", 5, 6, 1)
    overview.merge_report(WatchReport(t=1.0, load=LOAD, running=[running], waiting=[]))
    overview.merge_report(WatchReport(t=1.1, leases=[], num_leases=7))
    overview.merge_report(WatchReport(t=1.2, jobs=[], num_jobs=9))
    overview.merge_report(WatchReport(t=1.3, lives=[life("a")]))
    assert overview.version == 0, "it is not whole"
    overview.merge_report(WatchReport(t=1.4, is_last=True))
    assert (overview.version, overview.t, overview.load) == (1, 1.4, LOAD)
    assert overview.running == [running] and (overview.num_leases, overview.num_jobs) == (7, 9)
    overview.merge_report(WatchReport(t=2.0, running=[], waiting=[]))
    assert overview.running == [] and overview.load == LOAD and overview.num_leases == 7


def test_lives_since_a_version() -> None:
    overview = Overview()
    for number in range(4):
        overview.merge_report(WatchReport(t=number, lives=[life("always"), life(f"r{number}", "stop")]))
        overview.merge_report(WatchReport(t=number, is_last=True))
    assert rids(overview.lives_since(-1)) == ["r0", "r1", "r2", "always", "r3"]
    assert rids(overview.lives_since(2)) == ["r2", "always", "r3"]
    assert overview.lives_since(4) == []
    overview.merge_report(WatchReport(t=9, lives=[life("late")]))
    assert rids(overview.lives_since(4)) == ["late"], "it belongs to the report that is not whole yet"


def test_number_of_kept_lives_is_bounded() -> None:
    overview = Overview()
    overview.merge_report(WatchReport(t=0, lives=[life("open")]))
    for number in range(3 * MAX_LIVES):
        overview.merge_report(WatchReport(t=0, lives=[life(f"r{number}", "stop")]))
    kept = rids(overview.lives_since(-1))
    assert (
        len(kept) == MAX_LIVES and kept[0] == "open" and kept[1:3] == [f"r{2 * MAX_LIVES + 1}", f"r{2 * MAX_LIVES + 2}"]
    )
    for number in range(MAX_LIVES + 5):
        overview.merge_report(WatchReport(t=0, lives=[life(f"open{number}")]))
    kept = rids(overview.lives_since(-1))
    assert len(kept) == MAX_LIVES and "open" not in kept and kept[-1] == f"open{MAX_LIVES + 4}"


def test_a_restarted_recording_drops_open_lives() -> None:
    overview = Overview()
    leased: Phase = ("leased", 1.0, None, 5)
    ended: Phase = ("leased", 1.0, 2.0, 5)
    overview.merge_report(
        WatchReport(t=0, lives=[life("open"), life("leased", "stop", leased), life("ended", "stop", ended)])
    )
    overview.merge_report(WatchReport(t=0, is_first=True, lives=[life("new")]))
    assert rids(overview.lives_since(-1)) == ["ended", "new"]
