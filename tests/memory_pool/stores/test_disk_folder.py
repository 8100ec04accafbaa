"""One pool at a time holds a folder; what others put there stays, what earlier pools left unfinished goes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from baton.memory_pool.stores import pool_folder
from baton.memory_pool.stores.block_keys import model_digest
from baton.memory_pool.stores.disk_pool import DiskPoolError
from tests.doubles import disk_blocks
from tests.doubles.disk_blocks import BLOCK, MODEL, file_of, fill, holds, key_of, open_pool, payload_of

ROOT = Path(__file__).parents[3]
HELD = (
    rf"{model_digest(MODEL).hex()} is in use by process {os.getpid()} on \S+; end that server, or give this one another"
)


def inner(folder: Path) -> Path:
    return folder / model_digest(MODEL).hex()


class TestLock:
    def test_second_pool_on_one_folder_is_refused(self, tmp_path: Path) -> None:
        pool = open_pool(tmp_path)
        fill(pool, [1])
        for _ in range(2):  # being refused changes nothing
            with pytest.raises(DiskPoolError, match=HELD):
                open_pool(tmp_path)
        assert holds(pool, key_of(1))
        pool.close()
        pool = open_pool(tmp_path)
        assert holds(pool, key_of(1))
        pool.close()

    def test_folder_lock_error_names_process_and_lock_ends_with_it(self, tmp_path: Path) -> None:
        paths = [str(ROOT / ".typing"), *filter(None, [os.environ.get("PYTHONPATH")])]
        child = subprocess.Popen(
            [sys.executable, disk_blocks.__file__, str(tmp_path), str(BLOCK), str(1 << 20), "1"],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            assert child.stdout is not None and child.stdout.readline() == b"storing\n"
            with pytest.raises(DiskPoolError, match=f"in use by process {child.pid} on "):
                open_pool(tmp_path)
        finally:
            child.kill()
            child.communicate()
        assert child.returncode == -signal.SIGKILL
        open_pool(tmp_path).close()

    def test_failed_start_releases_folder_lock(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", fails_with(errno.EIO))
            with pytest.raises(DiskPoolError, match=r"cannot read \S+: Input/output error; check the disk"):
                open_pool(tmp_path)
        open_pool(tmp_path).close()

    def test_refused_pools_leak_no_descriptors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = open_pool(tmp_path)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(DiskPoolError):
            open_pool(tmp_path)
        monkeypatch.setattr(os, "listdir", fails_with(errno.EIO))
        with pytest.raises(DiskPoolError):
            open_pool(tmp_path / "other")
        monkeypatch.undo()
        assert len(os.listdir("/proc/self/fd")) == before
        pool.close()
        assert len(os.listdir("/proc/self/fd")) == before - 2

    def test_file_system_without_locks_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fcntl, "flock", fails_with(errno.ENOLCK))
        with pytest.raises(DiskPoolError, match=r"cannot lock \S+: No locks available; .* local disk"):
            open_pool(tmp_path)

    def test_symlink_in_place_of_lock_file_is_refused(self, tmp_path: Path) -> None:
        open_pool(tmp_path / "kv").close()
        (tmp_path / "outside").write_text("untouched")
        (inner(tmp_path / "kv") / "lock").unlink()
        (inner(tmp_path / "kv") / "lock").symlink_to(tmp_path / "outside")
        with pytest.raises(DiskPoolError, match="cannot write in"):
            open_pool(tmp_path / "kv")
        assert (tmp_path / "outside").read_text() == "untouched"

    def test_full_disk_stays_readable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = open_pool(tmp_path)
        fill(pool, [1])
        pool.close()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fails_with(errno.ENOSPC))
            pool = open_pool(tmp_path)
        assert holds(pool, key_of(1))
        with pytest.raises(DiskPoolError, match="in use by another process"):
            open_pool(tmp_path)
        pool.close()


def fails_with(code: int):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


class TestFolder:
    def test_cache_files_are_accessible_to_owner_only(self, tmp_path: Path) -> None:
        old = os.umask(0)
        try:
            pool = open_pool(tmp_path / "a" / "kv")
            fill(pool, range(3))
        finally:
            os.umask(old)
        modes = {
            path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "a" / "kv", *tmp_path.rglob("kv/**/*")]
        }
        assert len(modes) == 9
        assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes
        pool.close()

    @pytest.mark.parametrize("which", ["outer", "inner"])
    def test_folder_open_to_other_users_is_warned_about(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str
    ) -> None:
        tmp_path.chmod(0o700)
        open_pool(tmp_path).close()
        assert not caplog.records
        open_up = tmp_path if which == "outer" else inner(tmp_path)
        open_up.chmod(0o710)
        open_pool(tmp_path).close()
        (message,) = caplog.messages
        assert message.startswith(f"other users can access {open_up} (mode 710, owner {os.geteuid()})")

    def test_folder_owned_by_another_user_is_warned_about(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch
    ) -> None:
        tmp_path.chmod(0o700)
        owner = tmp_path.stat().st_uid
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        monkeypatch.setattr(pool_folder, "_TRUSTED", ())
        open_pool(tmp_path).close()
        assert [f"owner {owner}" in message for message in caplog.messages] == [True, True]

    @pytest.mark.parametrize("place", ["file", "file/kv", "link"])
    def test_path_that_is_not_a_folder_is_refused(self, tmp_path: Path, place: str) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        with pytest.raises(DiskPoolError, match=r"cannot hold the disk cache: .*; give it a folder of its own"):
            open_pool(tmp_path / place)

    @pytest.mark.parametrize("call", ["mkdir", "makedirs"])
    def test_folder_that_cannot_be_created_is_refused(self, tmp_path: Path, monkeypatch, call: str) -> None:
        monkeypatch.setattr(os, call, fails_with(errno.EACCES))
        with pytest.raises(
            DiskPoolError, match="cannot hold the disk cache: Permission denied; give it a folder of its own"
        ):
            open_pool(tmp_path / "kv")

    @pytest.mark.skipif(not Path("/sys").is_dir(), reason="needs a folder in which not even root may write")
    def test_unwritable_folder_is_refused(self) -> None:
        with pytest.raises(DiskPoolError, match=r"/sys cannot hold the disk cache: .*; give it a folder of its own"):
            open_pool(Path("/sys"))

    def test_unwritable_model_folder_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        open_pool(tmp_path).close()
        real = os.open

        def refuse(path, flags, *args, **kwargs):
            if flags & os.O_CREAT:
                raise OSError(errno.EACCES, "Permission denied")
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(DiskPoolError, match=r"cannot write in .*: Permission denied; give the disk cache a folder"):
            open_pool(tmp_path)

    def test_symlink_in_place_of_model_folder_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "kv").mkdir()
        inner(tmp_path / "kv").symlink_to(tmp_path / "outside")
        with pytest.raises(DiskPoolError, match="cannot hold the disk cache"):
            open_pool(tmp_path / "kv")
        assert not list((tmp_path / "outside").iterdir())

    def test_cache_folder_may_be_symlink(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "kv").symlink_to(tmp_path / "disk")
        pool = open_pool(tmp_path / "kv")
        fill(pool, [1])
        assert file_of(tmp_path / "disk", key_of(1)).exists()
        pool.close()


def test_closed_disk_pool_touches_no_files(tmp_path: Path) -> None:
    """It touches neither its folder, which may be another's, nor descriptors that got its numbers."""
    pool = open_pool(tmp_path)
    fill(pool, [1])
    pool.close()
    successor = open_pool(tmp_path)
    pool.close()
    assert not holds(pool, key_of(1)) and not pool.write_block(key_of(2), payload_of(key_of(2)), 0.0)
    assert holds(successor, key_of(1)) and not successor.contains(key_of(2))
    successor.close()


class TestStart:
    def test_unfinished_blocks_are_removed_at_start(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        pool = open_pool(tmp_path)
        fill(pool, range(4))
        pool.close()
        files = [file_of(tmp_path, key_of(number)) for number in range(4)]
        shutil.copyfile(files[0], files[0].with_suffix(".tmp"))
        files[1].rename(files[1].with_suffix(".tmp"))
        os.truncate(files[2], 100)
        pool = open_pool(tmp_path)
        assert sorted(pool.by_age()) == sorted([key_of(0), key_of(3)])
        assert sorted(tmp_path.rglob("??/*")) == sorted([files[0], files[3]])
        (message,) = caplog.messages
        assert "removed 3 unfinished or truncated blocks; left 0 files that are not its own: -" in message
        pool.close()

    def test_foreign_files_are_kept_at_start(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        pool = open_pool(tmp_path)
        fill(pool, range(2))
        pool.close()
        model, block = inner(tmp_path), file_of(tmp_path, key_of(1))
        name = block.name
        theirs = [
            tmp_path / "README",
            *(model / each for each in ("notes", "0g", "abc", "ff", "AB/" + "ab" * 20)),
            *(
                block.parent / each
                for each in ("x", name[:-1], name + "0", name + ".bak", "x.tmp", name.upper()[:-1] + "A")
            ),
            block.with_name("ff" + name[2:]),  # in the wrong sub-folder
            block.with_name("ee" + name[2:] + ".tmp"),
        ]
        for path in theirs:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(block.read_bytes())
        link, folder = (block.with_name(f"01{number:038x}") for number in (1, 2))
        link.symlink_to(block)
        (folder / "inside").mkdir(parents=True)
        (model / "ee").symlink_to(block.parent)
        pool = open_pool(tmp_path)
        assert sorted(pool.by_age()) == sorted(map(key_of, range(2)))
        assert all(path.is_file() for path in theirs) and link.is_symlink() and (folder / "inside").is_dir()
        (message,) = caplog.messages
        assert re.search(r"removed 0 .* left 16 files that are not its own: (\S+, ){4}\S+$", message), message
        pool.close()

    def test_clean_folder_logs_nothing(self, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd) -> None:
        pool = open_pool(tmp_path)
        fill(pool, range(3))
        pool.close()
        caplog.clear()
        caplog.set_level(logging.INFO)
        open_pool(tmp_path).close()
        assert not caplog.records and capfd.readouterr() == ("", "")

    def test_file_removed_during_start_scan_is_ignored(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = open_pool(tmp_path)
        fill(pool, range(3))
        pool.close()
        scandir = os.scandir

        class Entries:
            def __init__(self, fd: int) -> None:
                with scandir(fd) as entries:
                    self.entries = list(entries)
                for entry in self.entries:
                    if entry.name == key_of(1).hex():
                        os.unlink(entry.name, dir_fd=fd)

            def __enter__(self):
                return iter(self.entries)

            def __exit__(self, *reason) -> None:
                pass

        monkeypatch.setattr(os, "scandir", Entries)
        pool = open_pool(tmp_path)
        assert sorted(pool.by_age()) == sorted([key_of(0), key_of(2)])
        pool.close()

    def test_blocks_of_another_size_are_removed_at_start(self, tmp_path: Path) -> None:
        """They would never be read, and the capacity is for all of the model's blocks."""
        pool = open_pool(tmp_path)
        fill(pool, range(3))
        pool.close()
        pool = open_pool(tmp_path, block_bytes=2 * BLOCK)
        assert len(pool) == 0 and not list(tmp_path.rglob("??/*"))
        assert pool.write_block(key_of(1), payload_of(key_of(1), 2 * BLOCK), 0.0)
        pool.close()

    def test_disk_pool_does_not_import_torch(self) -> None:
        code = "import sys, baton.memory_pool.stores.disk_pool; assert 'torch' not in sys.modules"
        paths = [str(ROOT / ".typing"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
