"""Files that a run writes: whole or not at all, and by one process at a time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from eval import durable


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, type(tmp_path).replace

    def synced(descriptor):
        done.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def replaced(*names):
        done.append("name")
        return replace(*names)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(type(tmp_path), "replace", replaced)
    durable.write_atomically(tmp_path / "new" / "file", "text")
    assert done == ["file", "name", "directory"]
    durable.append(tmp_path / "new" / "file", [" and", "more"])
    assert done[3:] == ["file"]
    assert (tmp_path / "new" / "file").read_text() == "text and\nmore\n"


def test_half_a_surrogate_pair_is_written_as_json_escapes_it(tmp_path):
    path = tmp_path / "file"
    durable.write_atomically(path, "\ud83d\n")
    durable.append(path, ["ä\ud83d"])
    assert path.read_bytes() == b"\\ud83d\n\xc3\xa4\\ud83d\n"


def test_lines_end_where_they_were_written_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes("one\ntwo ä".encode()[:-1])  # within a character
    assert durable.whole_lines(path) == [b"one"]


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path):
    path = tmp_path / "run" / "samples.jsonl"
    with durable.locked(path):
        with pytest.raises(ValueError, match=r"/run': another command is writing samples\.jsonl"):
            durable.locked(path).__enter__()
        with durable.locked(path.with_name("samples.1-of-2.jsonl")):
            pass  # a part of its own
    with durable.locked(path):
        pass


def test_a_killed_writer_holds_no_lock(tmp_path):
    path = tmp_path / "samples.jsonl"
    code = (
        "import os, pathlib; from eval import durable\n"
        f"with durable.locked(pathlib.Path({str(path)!r})): os._exit(1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
    assert path.with_name(".samples.jsonl.lock").exists()
    with durable.locked(path):
        pass
