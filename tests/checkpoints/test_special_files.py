"""What is no regular file is refused at once: FIFOs have no writer, devices no end, sockets and folders no bytes."""

import os
import signal
import socket
from contextlib import contextmanager

import pytest

import octavo
from octavo.checkpoints import tensor_file
from octavo.errors import InvalidCheckpoint
from octavo.integrations import recipe_file
from tests.support.small_run import FILES, assert_same, values


@contextmanager
def seconds(number):
    """Raises in a block that takes longer, such as one that waits for the writer of a FIFO."""

    def late(*_):
        raise AssertionError(f"took more than {number} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(number)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def bind(path):
    os.chdir(path.parent)  # the path of a socket is short
    socket.socket(socket.AF_UNIX).bind(path.name)


KINDS = {
    "a FIFO": os.mkfifo, "zeros without end": lambda path: path.symlink_to("/dev/zero"), "a socket": bind,
    "a folder": lambda path: path.mkdir(), "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "an empty device": lambda path: path.symlink_to("/dev/null"),
    "a link to nothing": lambda path: path.symlink_to("x"), "a link to itself": lambda path: path.symlink_to(path),
    "a link to a FIFO": lambda path: linked(path),
}  # fmt: skip


def linked(path):
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@kinds
@pytest.mark.parametrize("name", [*FILES, "checkpoint.json"])
def test_what_is_no_regular_file_is_refused_at_once(name, make, saved, monkeypatch):
    path, model, optimizer = saved
    before = values(model, optimizer)
    monkeypatch.chdir(path)
    (path / name).unlink()
    make(path / name)
    for named in (path, path.parent):
        with seconds(20), pytest.raises(InvalidCheckpoint, match=name):
            octavo.load_checkpoint(named, model, optimizer)
    assert_same(values(model, optimizer), before)


@kinds
def test_the_reader_refuses_a_special_file_without_a_manifest_too(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "file")
    with seconds(20), pytest.raises(InvalidCheckpoint, match="file"):
        tensor_file.read(tmp_path / "file")
    with seconds(20), pytest.raises(InvalidCheckpoint, match="file"):
        recipe_file.load(tmp_path / "file", octavo.Linear(2, 2))


@kinds
def test_a_run_that_is_no_folder_is_refused_at_once(make, saved, tmp_path, monkeypatch):
    _, model, optimizer = saved
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "file")
    with seconds(20), pytest.raises(InvalidCheckpoint, match="file"):
        octavo.load_checkpoint(tmp_path / "file", model, optimizer)


@kinds
def test_a_step_that_is_no_folder_is_not_the_newest(make, saved, monkeypatch):
    path, model, optimizer = saved
    monkeypatch.chdir(path.parent)
    make(path.with_name("step-000009"))
    with seconds(20), pytest.warns(UserWarning, match="1 newer checkpoint that cannot be loaded"):
        assert octavo.load_checkpoint(path.parent, model, optimizer).step == 3


def test_paths_that_the_system_refuses_are_named(saved):
    _, model, optimizer = saved
    for path in ("x" * 5000, "a\0b"):
        with pytest.raises(InvalidCheckpoint, match=r"Pass the folder that octavo\.save_checkpoint was given"):
            octavo.load_checkpoint(path, model, optimizer)


def test_links_to_regular_files_are_read(saved, tmp_path):
    path, model, optimizer = saved
    for name in (*FILES, "checkpoint.json"):
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
    (tmp_path / "latest").symlink_to(path)
    assert octavo.load_checkpoint(tmp_path / "latest", model, optimizer).step == 3
