"""A sample of `python -m tests.hashes` has the hashes on record, and the comparison sees what it should."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from tests.hashes import __main__ as command
from tests.hashes import models, play, record
from tests.hashes.cases import CASES, chosen
from tests.hashes.values import grid

SAMPLE = (
    "Linear | bf16 | bf16 | plain",
    "Linear | fp8-delayed(history=2,algorithm='most_recent',margin=1) | fp32 | plain",
    "Linear | fp8-block | bf16 | main_grad",
    "Linear | nvfp4 | fp16 | plain",
    "GroupedLinear | fp8-current | bf16 | main_grad",
    "GroupedLinear, by group | mxfp8 | bf16 | plain",
    "LayerNormMLP, swiglu | fp8-block | fp32 | plain",
    "residual block | fp8-current | fp32 | plain",
    "linear, bias, add | fp8-rowwise | fp32 | plain",
    "LayerNorm | bf16 | plain",
    "Quantize | mxfp8 | bf16 | plain",
    "custom operation, linear | fp8-current | fp32 | plain",
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SAMPLE)
def test_the_hashes_of_a_sample_are_those_on_record(name):
    case, sections = CASES[name], record.read(record.path_of("cpu"))
    section = play.section_of(case)
    if section not in sections:
        pytest.skip(f"{name} runs torch's own arithmetic, and there is no record for {section}")
    found = play.line_of(case)
    assert found == sections[section][name], record.difference(sections[section][name], found)


def test_every_case_is_on_record_once():
    """A new case, or one that went, needs `python -m tests.hashes --write`."""
    sections = record.read(record.path_of("cpu"))
    portable = {name for name, case in CASES.items() if case.is_portable}
    assert set(sections[record.ANY]) == portable
    others = [lines for section, lines in sections.items() if section != record.ANY]
    assert others and all(set(lines) == set(CASES) - portable for lines in others)


def test_other_quantizers_and_dtypes_give_other_hashes():
    lines = {name: line for lines in record.read(record.path_of("cpu")).values() for name, line in lines.items()}
    for layer in ("Linear", "GroupedLinear", "LayerNormMLP"):
        for part, gemm in (("y", "fprop"), ("dx", "dgrad"), ("dw", "wgrad")):
            own = {
                (*operands_of(recipe, gemm), dtype): record.parts(lines[f"{layer} | {recipe} | {dtype} | plain"])[part]
                for recipe in octavo.recipes.SHIPPED
                for dtype in ("bf16", "fp32")
            }
            assert len(set(own.values())) == len(own) >= 14, (layer, part)


def operands_of(recipe, gemm):
    """What decides the result of a GEMM on a CPU: quantizers, and whether scales are those of earlier steps."""
    recipe = octavo.recipe(recipe)
    pair = getattr(recipe.linear(), gemm)
    return recipe.stateful, pair.left, pair.right


# -- the matrix --------------------------------------------------------------------------------------------------------


def test_every_operation_is_in_a_case():
    one_each = {id(case.kind): case for case in CASES.values()}.values()
    kinds = {type(m) for case in one_each for m in case.kind.build(case.recipe).modules()}
    named = {getattr(ops, name) for name in ops.__all__ if isinstance(getattr(ops, name), type)}
    bases = {ops.Activation, ops.BasicOperation, ops.FusibleOperation, ops.OperationFuser}
    foreign = {ops.RotaryAttention}  # attention has torch's bits, which differ between chips
    missing = {kind for kind in named - bases - foreign if issubclass(kind, nn.Module)} - kinds
    assert not missing
    assert {octavo.LayerNormLinear, octavo.LayerNormMLP, octavo.Sequential} <= kinds


def test_every_recipe_is_in_a_case():
    assert {octavo.recipe(case.recipe) for case in CASES.values() if case.recipe} >= {
        octavo.recipe(name) for name in octavo.recipes.SHIPPED
    }


def rules_in_the_docs() -> set[str]:
    text = (Path(octavo.__file__).parent.parent / "docs" / "fusion-rules.md").read_text()
    return set(re.findall(r"^\| `([a-z-]+)` \| (?:forward|backward|both) \|", text, re.M))


def test_every_fusion_of_the_docs_has_a_case():
    assert len(rules_in_the_docs()) > 10
    assert rules_in_the_docs() - {"linear-rotary"} <= {kind.rule for kind in models.FUSIONS.values()}


@pytest.mark.parametrize("layer", [name for name, kind in (models.FUSIONS | models.CUSTOM).items() if kind.rule])
def test_a_fusion_fires_where_its_case_runs(layer):
    case = CASES[f"{layer} | fp8-current | fp32 | plain"]
    fired = play.built(case, "cpu").explain(*play._inputs(case, "0.0", "cpu")).fired
    assert case.kind.rule in fired


def test_nothing_but_the_public_api_is_used():
    for path in record.FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found = [a.name for a in node.names if a.name.startswith("octavo")]
                assert found in ([], ["octavo"]), f"{path.name} imports {found}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("octavo"):
                assert node.module == "octavo", f"{path.name} imports from {node.module}"
                # values is not in __all__, but docs/writing-an-operation.md has it
                assert {a.name for a in node.names} <= {*octavo.__all__, "values"}


# -- hashing -----------------------------------------------------------------------------------------------------------


def test_inputs_are_the_same_everywhere():
    found = [("", "", grid("x 0.0", 5, 40).to(dtype)) for dtype in play.DTYPES.values()]
    assert play.digest(found)[:16] == "65322189667d9373"
    assert torch.equal(grid("x", 3, 40).bfloat16().float(), grid("x", 3, 40))


def hashed(value, label="y"):
    return play.digest([("y", label, value)])


def test_a_hash_sees_a_bit_a_sign_a_shape_a_dtype_and_a_label():
    x = grid("x", 4, 6)
    flipped = x.clone()
    flipped.view(torch.int32)[2, 3] ^= 1
    signed = torch.zeros(4, 6)
    signed[1, 1] = -0.0
    values = [x, flipped, torch.zeros(4, 6), signed, x.view(6, 4), x.view(torch.int32), x.double(), None, "text"]
    assert len({hashed(v) for v in values}) == len(values)
    assert hashed(x, "dx") != hashed(x)
    assert hashed(x.T.contiguous().T) == hashed(x)  # how it lies in memory is not part of it
    assert hashed(torch.tensor([-float("nan"), 1.0])) == hashed(torch.tensor([float("nan"), 1.0]))
    assert hashed(torch.tensor([float("inf"), 1.0])) != hashed(torch.tensor([float("nan"), 1.0]))


def test_compiled_bits_that_differ_are_an_error(monkeypatch):
    case, real = CASES["ReLU | fp32 | plain"], play.played

    def off_by_a_bit(case, device, wrap):
        found = real(case, device, wrap)
        _, label, dx = next(entry for entry in found if entry[0] == "dx")
        return found if wrap.__name__ != "changed" else [(p, n, dx * 2 if n == label else v) for p, n, v in found]

    def compiled_by(backend):
        def changed(call):
            return call

        return changed

    monkeypatch.setattr(play, "played", off_by_a_bit)
    monkeypatch.setattr(play, "compiled_by", compiled_by)
    with pytest.raises(play.Differs, match=r"ReLU.*aot_eager gives other bits than eager in dx0 0\.0\."):
        play.line_of(case)


def test_our_nodes_are_counted():
    assert play.line_of(CASES["ReLU | fp32 | plain"]).endswith("nodes=1+1")


# -- the record --------------------------------------------------------------------------------------------------------


def test_a_difference_names_its_parts():
    sections = {record.ANY: {"a": "11 y=1 dx=2 nodes=1+1", "b": "22 y=1", "old": "33 y=1"}}
    found = {record.ANY: {"a": "99 y=1 dx=3 nodes=2+1", "b": "22 y=1", "c": "44 y=1"}}
    outcome = record.compare(sections, found, {"a", "b", "c"})
    assert outcome.changed == {"a": "dx 2 -> 3, nodes 1+1 -> 2+1"}
    assert (outcome.new, outcome.gone, outcome.elsewhere) == (["c"], ["old"], [])
    assert not outcome.is_clean
    assert record.compare(sections, {record.ANY: {"b": "22 y=1"}}, {"a", "b", "old"}).is_clean


def test_torchs_own_arithmetic_is_skipped_on_another_version():
    sections = {record.ANY: {"a": "11 y=1"}, "torch 1.0, probe 12": {"b": "22 y=1"}}
    outcome = record.compare(sections, {"torch 2.0, probe 34": {"b": "99 y=9"}}, {"a", "b"})
    assert outcome.is_clean and outcome.elsewhere == ["b"]
    outcome = record.compare(sections, {"torch 1.0, probe 12": {"b": "99 y=9"}}, {"a", "b"})
    assert outcome.changed == {"b": "y 1 -> 9"}
    # a case that no longer holds everywhere is said, and so is one that no record has
    outcome = record.compare(sections, {"torch 2.0, probe 34": {"a": "11 y=1", "c": "1 y=1"}}, {"a", "b", "c"})
    assert outcome.new == ["a", "c"]


def test_writing_keeps_what_was_not_run():
    sections = {record.ANY: {"a": "1 y=1", "b": "2 y=2", "gone": "3 y=3"}, "torch 1": {"c": "4 y=4"}}
    found = {record.ANY: {"a": "9 y=9"}, "torch 2": {"c": "5 y=5"}}
    merged = record.merged(sections, found, {"a", "b", "c"})
    assert merged == {record.ANY: {"a": "9 y=9", "b": "2 y=2"}, "torch 1": {"c": "4 y=4"}, "torch 2": {"c": "5 y=5"}}
    assert record.merged(sections, {"torch 2": {"a": "1 y=1"}}, {"a", "b", "c"})[record.ANY] == {"b": "2 y=2"}


def test_the_command_tells_a_change_and_writes(tmp_path, capsys):
    path, name = tmp_path / "cpu.json", "ReLU | fp32 | plain"
    only = ["--only", name]
    assert command.main(only, path) == 1 and f"new      {name}" in capsys.readouterr().out
    assert command.main([*only, "--write"], path) == 0
    assert command.main(only, path) == 0
    assert "1 cases ran, 0 failed, 0 changed" in capsys.readouterr().out
    line = record.read(path)[record.ANY][name]
    right = record.parts(line)["dx"]
    record.write(path, {record.ANY: {name: line.replace(f"dx={right}", "dx=zzzz")}})
    assert command.main(only, path) == 1
    assert f"changed  {name}: dx zzzz -> {right}" in capsys.readouterr().out
    assert command.main(["--only", "no such case"], path) == 2


def test_a_case_that_fails_is_told_and_keeps_its_line(tmp_path, capsys, monkeypatch):
    def fail(case, device, graphs):
        raise RuntimeError("out of order")

    monkeypatch.setattr(play, "line_of", fail)
    path, name = tmp_path / "cpu.json", "ReLU | fp32 | plain"
    record.write(path, {record.ANY: {name: "1 y=1"}})
    assert command.main(["--only", name, "--write"], path) == 1
    assert "out of order" in capsys.readouterr().out
    assert record.read(path) == {record.ANY: {name: "1 y=1"}}


def test_patterns_are_parts_of_names_or_globs():
    assert [case.name for case in chosen("ReLU | fp32 | plain")] == ["ReLU | fp32 | plain"]
    assert {case.layer for case in chosen("ReLU | fp32")} == {"ReLU", "SReLU", "ScaledSReLU"}
    assert {case.recipe for case in chosen("Linear | mxfp8 | *")} == {"mxfp8"}
    assert len(chosen()) == len(CASES)
