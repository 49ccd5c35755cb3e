"""Inductor's disk cache: a second process finds the graphs of the first."""

import hashlib
import json

import pytest
from torch._dynamo.utils import counters

from octavo.runtime.digest import DIGEST
from tests.support.compiled_twins import batch, results
from tests.support.linear_oracle import make
from tests.support.processes import output_of
from tests.support.steps import compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def inductor_step():
    """One step under Inductor: a digest of what it gave, and what the compiler's caches said."""
    layer = make("fp8-current")
    found = results(layer, compiled(layer, backend="inductor"), *batch(0))
    counted = {f"{group}.{key}": counters[group][key]
               for group in ("aot_autograd", "inductor") for key in counters[group] if "cache_" in key}  # fmt: skip
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in found.values())).hexdigest()
    return {"digest": digest, "counters": counted, "sources": DIGEST}


def test_a_second_process_finds_the_graphs_in_the_disk_cache(tmp_path, monkeypatch):
    """The first process is this one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first = inductor_step()
    script = f"import json; from {__name__} import inductor_step; print(json.dumps(inductor_step()))"
    second = json.loads(output_of(script).splitlines()[-1])
    assert first["sources"] == second["sources"], "octavo/ was edited while this test ran"

    def count(run, what):
        return sum(value for key, value in run["counters"].items() if what in key)

    assert count(first, "cache_miss") and not count(first, "cache_hit")
    assert count(second, "cache_hit") and not count(second, "cache_miss")
    assert not count(second, "cache_bypass")
    assert first["digest"] == second["digest"]
