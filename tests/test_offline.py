"""Every kernel compiles for SM90 and SM100 without a GPU, spills no more than on record, and puts matrix products on
the tensor cores: a sample of its configurations, or with `-m slow` all of them."""

import json

import pytest

from octavo.launch import rules
from tests import offline

triton = pytest.importorskip("triton")
ON_RECORD = triton.__version__ == offline.RECORDED

# unquantized dW that is added to a float32 buffer, by the kernels for any GPU
SERIALIZED = {"grouped plain depth in Triton bf16 to fp32", "grouped plain depth in Triton fp16 to fp32"}


@pytest.fixture(scope="module", params=["sample", pytest.param("jobs", marks=pytest.mark.slow)])
def results(request) -> list[dict]:
    return offline.compile_all(getattr(offline, request.param)())


def test_every_configuration_is_on_record():
    """A new kernel, or one that went, needs `python -m tests.offline` and a look at the difference."""
    on_record = json.loads(offline.RECORD.read_text())
    every = offline.variants()
    recorded = {(name, architecture) for name, found in on_record.items() for architecture in found}
    assert recorded == {(every[i].name, f"sm{sm}") for i, sm in offline.jobs()}


def test_the_sample_has_every_kernel_on_every_architecture(results):
    every = offline.variants()
    of = lambda jobs: {(id(every[i].kernel), sm) for i, sm in jobs}  # noqa: E731
    assert of(offline.sample()) == of(offline.jobs())
    assert len(results) >= len(offline.sample())


def test_every_kernel_is_found_and_has_a_configuration():
    """A jitted function that is launched, and that no `variants()` names, would not be compiled here."""
    assert {offline.kernel_name(v) for v in offline.variants()} == offline.kernels()


def test_every_jitted_function_is_a_part_of_a_configuration():
    """One that is not is unused, or a kernel whose name does not end in `_kernel`."""
    starts = {
        id(f): f for v in offline.variants() for f in (v.kernel, *v.constants.values()) if hasattr(f, "arg_names")
    }
    compiled = {id(f) for start in starts.values() for f in rules.reached(start)}
    assert [name for name, function in offline.jitted().items() if id(function) not in compiled] == []


def test_a_launch_takes_every_configuration():
    assert [why for variant in offline.variants() if (why := offline.unsupported_reason(variant))] == []


def test_every_configuration_compiles(results):
    assert [f"{r['name']} on SM{r['architecture']}: {r['error']}" for r in results if "error" in r] == []


@pytest.mark.skipif(not ON_RECORD, reason=f"the record is of Triton {offline.RECORDED}")
def test_no_configuration_spills_more_than_on_record(results):
    on_record = json.loads(offline.RECORD.read_text())
    worse = [
        f"{r['name']} on SM{r['architecture']}: {r['spilled']} bytes, on record {bound}"
        for r in results
        if r["spilled"] > (bound := on_record[r["name"]][f"sm{r['architecture']}"][1])
    ]
    assert not worse, "\n".join(worse)


def test_nothing_spills_on_hopper_that_is_not_known_to(results):
    """With Triton 3.6 nothing does; the matrix of a later version may list some configurations."""
    known = offline.known_spills()
    assert known == {} or not ON_RECORD
    spilling = {r["name"]: r["spilled"] for r in results if r["architecture"] == 90 and r["spilled"]}
    assert {name: spilled for name, spilled in spilling.items() if spilled > known.get(name, 0)} == {}


def test_matrix_products_run_on_the_tensor_cores(results):
    matmuls = [r for r in results if r["is_matmul"]]
    assert matmuls
    assert [r["name"] for r in matmuls if not r["tensor_core"]] == []


def test_no_product_waits_for_the_one_before(results):
    """ptxas lets products wait for each other if an accumulator is moved while it is written, and only prints that."""
    assert [r["name"] for r in results if r["serialized"] and r["name"] not in SERIALIZED] == []


def test_names_are_distinct():
    names = [v.name for v in offline.variants()]
    assert len(names) == len(set(names))


def test_the_command_rewrites_the_lines_that_it_is_asked_for_alone(monkeypatch, tmp_path, capsys):
    copy, before = tmp_path / "offline.json", json.loads(offline.RECORD.read_text())
    part = offline.variants()[0].name
    copy.write_text(json.dumps(before | {part: {"sm90": [0, 0]}, f"{part}, gone": {}}))
    monkeypatch.setattr(offline, "RECORD", copy)
    monkeypatch.setattr(offline, "compile_all", lambda chosen: [offline.compile_one(job) for job in chosen])
    assert offline.main(["--only", part]) == 0
    assert json.loads(copy.read_text()).keys() == before.keys()
    assert set(json.loads(copy.read_text())[part]) == {"sm90", "sm100"}
    assert json.loads(copy.read_text())[part]["sm90"][0] > 0
    assert offline.main(["--only", "no such kernel"]) == 2
    assert "'no such kernel'" in capsys.readouterr().out


def test_the_command_explains_itself_and_compiles_nothing(monkeypatch, capsys):
    monkeypatch.setattr(offline, "compile_all", lambda chosen: pytest.fail("compiled"))
    with pytest.raises(SystemExit) as end:
        offline.main(["--help"])
    assert end.value.code == 0 and "--only" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        offline.main(["--onyl", "x"])
    assert end.value.code == 2
