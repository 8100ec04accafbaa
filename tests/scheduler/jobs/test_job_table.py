"""Which jobs are known, and who is forgotten."""

from __future__ import annotations

from baton.scheduler.jobs import job_table
from baton.scheduler.jobs.job_table import JobTable
from tests.doubles.counted_lines import lines_run


def crowd(table: JobTable, count: int) -> None:
    """So many jobs begin, and are all at work at the same time."""
    for number in range(count):
        job, _ = table.open_job("", f"job{number}", 0.0, number)
        table.open_request(job, f"r{number}", 1)


def end(table: JobTable, number: int) -> None:
    job = table.get_job("", f"job{number}")
    assert job is not None
    table.close_sequence(job, f"r{number}")


def test_full_job_table_forgets_only_idle_jobs() -> None:
    table = JobTable(2)
    crowd(table, 5)
    assert len(table) == 5
    for number in (1, 3, 4):
        end(table, number)
    _, gone = table.open_job("", "new", 1.0, 5)
    assert [job.id for job in gone] == ["job1", "job3", "job4"]
    assert [job.id for job in table.select_jobs("", "")] == ["job0", "job2", "new"]


def test_finished_jobs_are_unended_while_requests_are_open() -> None:
    table = JobTable(8)
    crowd(table, 3)
    for number in (0, 1):
        job = table.get_job("", f"job{number}")
        assert job is not None
        job.is_over = True
    end(table, 0)
    end(table, 2)
    assert [job.id for job in table.unended_jobs()] == ["job2", "job1"]
    end(table, 1)
    assert [job.id for job in table.unended_jobs()] == ["job2"]


def test_jobs_are_selected_by_namespace_and_id_prefix() -> None:
    table = JobTable(8)
    for number, (namespace, name) in enumerate((("", "a/1"), ("", "b/1"), ("salt", "a/2"), ("", "ab/1"))):
        table.open_job(namespace, name, 0.0, number)
    assert [job.id for job in table.select_jobs("", "a/")] == ["a/1"]
    assert [job.id for job in table.select_jobs("salt", "a/")] == ["a/2"] and table.select_jobs("salt", "b/") == []
    assert [job.id for job in table.select_jobs(None, "")] == ["a/1", "b/1", "a/2", "ab/1"]


def test_reopened_job_counts_once() -> None:
    table = JobTable(2)
    for number, name in enumerate(("over", "idle")):
        table.open_job("", name, 0.0, number)
    over = table.get_job("", "over")
    assert over is not None
    over.is_over = True
    _, gone = table.open_job("", "over", 1.0, 2)
    assert gone == [over]
    assert [job.id for job in table.select_jobs("", "")] == ["idle", "over"]


def test_forgetting_many_idle_jobs_takes_linear_time() -> None:
    """It took time with the third power of the crowd: a second for 1000, a minute and a half for 4000."""

    def lines_of(size: int) -> int:
        table = JobTable(8)
        crowd(table, size)
        for number in range(size):
            end(table, number)
        lines = lines_run(lambda: table.open_job("", "new", 1.0, size), job_table)
        assert len(table) == 8 and table.get_job("", f"job{size - 1}") is not None
        assert table.get_job("", f"job{size - 8}") is None
        return lines

    assert lines_of(500) < lines_of(1000) < 2.1 * lines_of(500)


def test_opening_job_does_not_scan_busy_jobs() -> None:
    """Each new one looked at all of them: six seconds for a full queue of 16384."""
    table = JobTable(64)
    crowd(table, 64)
    few = lines_run(lambda: table.open_job("", "one more", 0.0, 64), job_table)
    crowd(table, 4096)
    assert lines_run(lambda: table.open_job("", "another", 0.0, 5000), job_table) <= few + 10 and len(table) > 4096


def test_activity_of_idle_job_delays_its_eviction() -> None:
    table = JobTable(2)
    crowd(table, 2)
    for number in range(2):
        end(table, number)
    first = table.get_job("", "job0")
    assert first is not None
    table.touch_job(first, 1.0)
    _, gone = table.open_job("", "new", 1.0, 2)
    assert [job.id for job in gone] == ["job1"]


def test_late_end_of_forgotten_job_changes_nothing() -> None:
    table = JobTable(2)
    crowd(table, 1)
    job = table.get_job("", "job0")
    assert job is not None
    table.remove_job(job)
    again, _ = table.open_job("", "job0", 1.0, 1)
    table.open_request(again, "r1", 1)
    table.close_sequence(job, "r0")
    for name in ("a", "b", "c"):
        table.open_job("", name, 2.0, 2)
    assert table.get_job("", "job0") is again, "it is at work"


def test_flooding_client_evicts_only_its_own_jobs() -> None:
    table = JobTable(4)
    for number in range(4):
        table.open_job("", f"bob/{number}", float(number), number, "bob")
    table.open_job("", "alice/1", 5.0, 5, "alice")  # bob's oldest goes for it
    for number in range(6, 40):
        job, gone = table.open_job("", f"bob/{number}", float(number), number, "bob")
        table.open_request(job, f"r{number}", 1)
        table.close_sequence(job, f"r{number}")
        assert [each.client for each in gone] == ["bob"] and len(table) == 4
    assert table.get_job("", "alice/1") is not None
    table.open_job("", "alice/2", 41.0, 41, "alice")
    _, gone = table.open_job("", "alice/3", 42.0, 42, "alice")
    assert [each.id for each in gone] == ["alice/1"], "each had half of the table"
