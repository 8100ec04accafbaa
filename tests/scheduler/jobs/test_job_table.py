"""Which jobs are known, and who is forgotten."""

from __future__ import annotations

import time

from baton.scheduler.jobs.job_table import JobTable


def crowd(table: JobTable, count: int) -> None:
    """So many jobs begin, and are all at work at the same time."""
    for number in range(count):
        job, _ = table.open("", f"job{number}", 0.0, number)
        table.began(job, f"r{number}", 1)


def end(table: JobTable, number: int) -> None:
    job = table.get("", f"job{number}")
    assert job is not None
    table.left(job, f"r{number}")


def test_jobs_at_work_are_kept_and_the_idle_ones_go_once_there_is_room_for_none() -> None:
    table = JobTable(2)
    crowd(table, 5)
    assert len(table) == 5
    for number in (1, 3, 4):
        end(table, number)
    _, gone = table.open("", "new", 1.0, 5)
    assert [job.id for job in gone] == ["job1", "job3", "job4"]
    assert [job.id for job in table.of_namespace("")] == ["job0", "job2", "new"]


def test_a_job_that_begins_anew_counts_once() -> None:
    table = JobTable(2)
    for number, name in enumerate(("over", "idle")):
        table.open("", name, 0.0, number)
    over = table.get("", "over")
    assert over is not None
    over.is_over = True
    _, gone = table.open("", "over", 1.0, 2)
    assert gone == [over]
    assert [job.id for job in table.of_namespace("")] == ["idle", "over"]


def test_a_crowd_that_has_ended_is_forgotten_at_once() -> None:
    """It took time with the third power of the crowd: a second for 1000, a minute and a half for 4000."""
    table = JobTable(8)
    crowd(table, 2000)
    for number in range(2000):
        end(table, number)
    began = time.perf_counter()
    _, gone = table.open("", "new", 1.0, 2000)
    assert time.perf_counter() - began < 1.0
    assert len(gone) == 1993 and len(table) == 8


def test_a_full_table_of_jobs_at_work_is_not_searched() -> None:
    """Each new one looked at all of them: six seconds for a full queue of 16384."""
    table = JobTable(4096)
    began = time.perf_counter()
    crowd(table, 16384)
    assert time.perf_counter() - began < 2.0 and len(table) == 16384


def test_a_job_that_is_heard_of_while_it_is_idle_goes_later() -> None:
    table = JobTable(2)
    crowd(table, 2)
    for number in range(2):
        end(table, number)
    first = table.get("", "job0")
    assert first is not None
    table.heard(first, 1.0)
    _, gone = table.open("", "new", 1.0, 2)
    assert [job.id for job in gone] == ["job1"]


def test_what_ends_after_its_job_was_forgotten_brings_nothing_back() -> None:
    table = JobTable(2)
    crowd(table, 1)
    job = table.get("", "job0")
    assert job is not None
    table.remove(job)
    again, _ = table.open("", "job0", 1.0, 1)
    table.began(again, "r1", 1)
    table.left(job, "r0")
    for name in ("a", "b", "c"):
        table.open("", name, 2.0, 2)
    assert table.get("", "job0") is again, "it is at work"
