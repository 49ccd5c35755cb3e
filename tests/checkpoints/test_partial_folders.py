"""Folders that killed saves leave: the next save removes them, and leaves those of saves that are under way."""

import os
import shutil
import threading

import pytest
from torch import nn

import octavo
from octavo.checkpoints import folder, tensor_file
from tests.support.processes import output_of

SCRIPT = """
import os, signal
from torch import nn
import octavo
from octavo.checkpoints import tensor_file
model, write = nn.Linear(64, 64), tensor_file.write
for step in (1, 2, 3):
    if os.fork() == 0:
        def killed(path, *rest):
            write(path, *rest)
            os.kill(os.getpid(), signal.SIGKILL)
        tensor_file.write = killed
        octavo.save_checkpoint({folder!r}, model, step=step)
    os.wait()
print(sorted(name[:9] for name in os.listdir({folder!r})))
octavo.save_checkpoint({folder!r}, model, step=4)
print(os.listdir({folder!r}))
"""


def test_the_next_save_removes_the_folders_of_killed_ones(tmp_path):
    printed = output_of(SCRIPT.format(folder=str(tmp_path))).splitlines()
    assert printed == [str([".partial-"] * 3), "['step-000004']"]


def test_a_save_leaves_the_folder_of_one_that_is_under_way(tmp_path, monkeypatch):
    model, write = nn.Linear(4, 4), tensor_file.write
    halfway, go_on = threading.Event(), threading.Event()

    def waits(path, *rest):
        digest = write(path, *rest)
        if threading.current_thread() is other and path.name == "model.safetensors":
            halfway.set()
            assert go_on.wait(60)
        return digest

    monkeypatch.setattr(tensor_file, "write", waits)
    other = threading.Thread(target=octavo.save_checkpoint, args=(tmp_path, model), kwargs={"step": 1})
    other.start()
    assert halfway.wait(60)
    octavo.save_checkpoint(tmp_path, model, step=2)
    names = sorted(os.listdir(tmp_path))
    go_on.set()
    other.join()
    assert [name[:9] for name in names] == [".partial-", "step-0000"]
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000002"]
    assert octavo.load_checkpoint(tmp_path / "step-000001", model).step == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_new_folder_that_another_save_takes_for_a_dead_one_is_made_again(when, tmp_path, monkeypatch):
    lock, removed = folder._lock, []

    def late(path):
        if when == "after" and not removed:
            handle = lock(path)
        if not removed:
            removed.append(path)
            shutil.rmtree(path)
        return handle if when == "after" and len(removed) == 1 and not path.exists() else lock(path)

    monkeypatch.setattr(folder, "_lock", late)
    octavo.save_checkpoint(tmp_path, nn.Linear(2, 2), step=1)
    assert removed and os.listdir(tmp_path) == ["step-000001"]


def test_where_the_system_has_no_locks_folders_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "fcntl", None)
    (tmp_path / ".partial-00000000").mkdir()
    octavo.save_checkpoint(tmp_path, nn.Linear(2, 2), step=1)
    assert sorted(os.listdir(tmp_path)) == [".partial-00000000", "step-000001"]


def test_only_folders_of_octavos_names_are_removed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    for name in (".partial-notes", ".partial-0000000", "partial-00000000"):
        (tmp_path / name).mkdir()
    (tmp_path / ".partial-00000001").symlink_to("elsewhere")
    (tmp_path / ".partial-00000002").touch()
    os.mkfifo(tmp_path / ".partial-00000003")
    (tmp_path / ".partial-00000004" / "inside").mkdir(parents=True)
    before = sorted(os.listdir(tmp_path))
    octavo.save_checkpoint(tmp_path, nn.Linear(2, 2), step=1)
    before.remove(".partial-00000004")
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "step-000001"])
    assert (tmp_path / "elsewhere" / "kept").exists()


def test_a_folder_that_cannot_be_removed_does_not_stop_a_save(tmp_path, monkeypatch):
    (tmp_path / ".partial-00000000").mkdir()
    monkeypatch.setattr(folder.os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    octavo.save_checkpoint(tmp_path, nn.Linear(2, 2), step=1)
    assert (tmp_path / "step-000001" / "checkpoint.json").exists()


def test_no_lock_stays_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for step in range(3):
        (tmp_path / f".partial-0000000{step}").mkdir()
        octavo.save_checkpoint(tmp_path, nn.Linear(2, 2), step=step)
    with pytest.raises(octavo.errors.Unsupported):
        octavo.save_checkpoint(tmp_path, nn.Linear(2, 2, device="meta"), step=9)
    assert len(os.listdir("/proc/self/fd")) == before
