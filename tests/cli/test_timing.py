"""Threads that are kept on one core while a host is timed are let go of afterwards."""

import os
import threading

import pytest

from octavo.cli.timing import on_one_core

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self/task") or len(os.sched_getaffinity(0)) < 2,
    reason="threads are found in /proc, and kept on one of several cores",
)


def cores() -> dict[int, set[int]]:
    return {int(name): os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")}


@pytest.fixture
def another_thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield thread.native_id
    done.set()
    thread.join()


def test_all_threads_share_a_core_and_get_theirs_back(another_thread):
    before = cores()
    with on_one_core():
        inside = cores()
        begun = threading.Event()
        late = threading.Thread(target=begun.wait)
        late.start()
    after = cores()
    begun.set()
    late.join()
    assert another_thread in inside
    assert len(set.union(*inside.values())) == 1
    assert {thread: after[thread] for thread in before} == before
    assert after[late.native_id] == os.sched_getaffinity(0), "it began on the one core"


def test_threads_get_their_cores_back_after_an_exception():
    before = cores()
    with pytest.raises(KeyError), on_one_core():
        raise KeyError
    after = cores()  # a thread of an earlier test may have ended meanwhile
    assert threading.get_native_id() in after
    assert after == {thread: before[thread] for thread in after}
