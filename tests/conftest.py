"""Set before torch is imported: some virtual machines die on bfloat16 matmuls, and compiler caches are a test's own."""

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="octavo-inductor-"))

import pytest
import torch
from hypothesis import settings

from tests import fast, samples

# pytest listens to every logger, and for whoever listens torch.compile writes out its graphs: an eighth of its time
logging.getLogger("torch.__trace").disabled = True

# the machines that run this vary by a factor of ten in speed: no deadlines, and the same examples every time
settings.register_profile("octavo", deadline=None, derandomize=True)
settings.load_profile("octavo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="one case of each test function that takes little time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        kept = fast.chosen(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    else:
        samples.mark_the_rest(items)
    # two minutes in one fixture: at the end of a run it would keep one process busy, and the other waiting
    items.sort(key=lambda item: item.path.name != "test_offline.py")
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(autouse=True, scope="module")
def _nothing_old_to_collect() -> Iterator[None]:
    """What compilers keep grows with every test, and a collection would look at all of it each time."""
    yield
    gc.collect()
    gc.freeze()  # what dies of it later is not collected: it is what compilers keep for good


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_recorded() -> None:
    """A test that counts calls, or replaces functions, sees its own first ones."""
    from octavo.runtime import call_cache as calls

    calls.forget()


@pytest.fixture
def large_memory() -> Iterator[None]:
    """Takes tens of gigabytes of a GPU: one test of all processes at a time, and nothing is kept."""
    import fcntl  # not on Windows

    with (Path(tempfile.gettempdir()) / "octavo-large-memory").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Four processes that run functions: `ranks.run(job, *arguments, size=2)`.

    Each test file has its own: a job of two ranks that makes groups leaves the other two behind in torch's count of
    groups, and a later job that makes groups on all four would wait forever.
    """
    from tests.support.ranks import Pool

    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture
def expert_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry of experts that transformers would have, empty."""
    from tests.support.dispatched_experts import PACKAGE, package

    monkeypatch.setitem(sys.modules, PACKAGE, package())


@pytest.fixture
def fresh_compiler() -> None:
    """Graphs of other tests are forgotten, and the counters of torch.compile begin at zero."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def forgetful_compiler(fresh_compiler: None) -> Iterator[None]:
    """The same, and the graphs of this test are forgotten after it: what was refused leaves a mark on its function."""
    yield
    torch._dynamo.reset()
