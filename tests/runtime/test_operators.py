"""Octavo's operators as torch sees them: opcheck, modes that watch, fakes of the shapes that come out."""

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from octavo.runtime.graph_nodes import UNDECLARED_WRITES
from tests.support.compiled_twins import assert_results, batch, every, pair, results, stepped
from tests.support.linear_oracle import OTHERS, make, spiky
from tests.support.recipe_traits import QUANTIZED, is_stochastic
from tests.support.recorded_operators import Recorder, hides_writes, recorded, without_gradients
from tests.support.same_tensors import facts
from tests.support.steps import assert_state

pytestmark = pytest.mark.usefixtures("fresh_compiler")
ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
WAYS = {
    "plain": ({}, {}),
    "cached": ({}, {"is_first_microbatch": True}),
    "main_grad": ({"fuse_wgrad_accumulation": True}, {}),
    "delayed dw": ({"delay_wgrad_compute": True}, {}),
}
CHECKED = [*[(recipe, "plain") for recipe in SHIPPED], *[(recipe, "cached") for recipe in QUANTIZED],
           ("fp8-delayed", "main_grad"), ("nvfp4", "delayed dw")]  # fmt: skip


@pytest.mark.parametrize(("recipe", "way"), CHECKED)
def test_opcheck_of_every_operator_of_a_step(recipe, way):
    options, flags = WAYS[way]
    layer = make(recipe, 17, 12, **options)
    layer.weight.main_grad = torch.zeros(12, 17)
    x, dy = batch(0, 9, 17, 12)
    calls = recorded(layer, x.requires_grad_(), dy, **flags)
    names = [str(op) for op, _ in calls]
    assert names == ["octavo.refresh.default"] * (way == "cached") + ["octavo.run.default", "octavo.run_bwd.default"]
    for op, args in calls[:1] if way == "cached" and not is_stochastic(recipe) else calls:
        tests = [test for test in ALL if test != "test_schema" or not hides_writes(op, args)]
        if op is torch.ops.octavo.run.default:
            assert [t.requires_grad for t in args[0][::-1]][:2] == [True, True], "x and the weight"
        else:
            args = without_gradients(args)
        assert set(torch.library.opcheck(op, args, test_utils=tests).values()) == {"SUCCESS"}


@every
def test_a_mode_sees_our_operators_in_eager_and_changes_nothing(recipe):
    layer, twin = pair(recipe)
    for i in range(2):
        calls = []
        want = results(twin, twin, *batch(i), is_first_microbatch=True)
        with Recorder(calls):
            found = results(layer, layer, *batch(i), is_first_microbatch=True)
        assert_results(found, want)
        names = [str(op).split(".")[1] for op, _ in calls]
        assert names == ["run", "run_bwd"]
        stepped(layer, twin)
    assert_state(layer, twin)


def assert_fakes_agree(op, args):
    args = without_gradients(args)
    with FakeTensorMode() as mode:
        fake = op(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, args))
    real = op(*args)
    fakes, reals = ([] if out is None else list(out) for out in (fake, real))
    assert all(isinstance(t, FakeTensor) for t in fakes)
    assert [facts(t) for t in fakes] == [facts(t) for t in reals], f"{op} {args[-1]}"


@settings(max_examples=50)
@given(
    recipe=st.sampled_from([*SHIPPED, *OTHERS]),
    lead=st.one_of(st.tuples(st.integers(0, 70)), st.tuples(st.integers(0, 5), st.integers(0, 14))),
    k=st.integers(1, 70),
    n=st.integers(1, 70),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    frozen=st.sampled_from(["", "weight", "input", "bias"]),
    turned=st.booleans(),
    option=st.sampled_from(["", "", "fuse_wgrad_accumulation", "delay_wgrad_compute", "return_bias"]),
    first=st.sampled_from([None, None, True]),
    output=st.booleans(),
)
def test_fakes_agree_with_what_the_operators_give(
    recipe, lead, k, n, bias, dtype, frozen, turned, option, first, output
):
    assume(not (output and (recipe == "bf16" or option == "return_bias" or "fprop='bf16'" in recipe)))
    layer = make(recipe, k, n, bias=bias, dtype=dtype, **({option: True} if option else {}))
    layer.weight.main_grad = torch.zeros(n, k)
    layer.weight.requires_grad_(frozen != "weight")
    if bias:
        layer.bias.requires_grad_(frozen != "bias")
    x = spiky(*lead, k, dtype=dtype) if 0 not in lead else torch.zeros(*lead, k, dtype=dtype)
    if turned:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    dy = torch.ones(*lead, n, dtype=dtype)
    calls = recorded(layer, x.requires_grad_(frozen != "input"), dy, is_first_microbatch=first, fp8_output=output)
    assert calls
    for op, args in calls:
        assert_fakes_agree(op, args)


def test_a_mode_changes_no_check_and_no_buffer_of_eager_mode():
    layer = make("fp8-current", fuse_wgrad_accumulation=True)
    x, dy = spiky(24, 48), spiky(24, 40)
    with FlopCounterMode(display=False):
        y = layer(x, is_first_microbatch=True)
        layer.weight.main_grad = torch.zeros(40, 48)  # only now
        y.backward(dy)
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(UnsupportedConfig, match="has changed since"):
            layer(x, is_first_microbatch=False)
    assert layer.weight.main_grad.any()


def test_the_page_names_every_operator_whose_schema_hides_writes():
    page = (Path(__file__).parents[2] / "docs" / "compile.md").read_text()
    section = page.split("## Writes that are not in the schema")[1].split("\n## ")[0]
    for op in UNDECLARED_WRITES:
        assert f"`{op.name().removeprefix('octavo::')}`" in section.replace("`octavo::", "`"), op


WRITING = [("fp8-delayed", {}), ("nvfp4", {}), ("fp8-current", {"fuse_wgrad_accumulation": True})]


@pytest.mark.parametrize(("recipe", "options"), WRITING, ids=[recipe for recipe, _ in WRITING])
def test_opcheck_fails_for_hidden_writes_in_its_schema_test_alone_as_the_page_says(recipe, options):
    layer = make(recipe, 17, 12, **options)
    layer.weight.main_grad = torch.zeros(12, 17)
    x, dy = batch(0, 9, 17, 12)
    failed = []
    for op, args in recorded(layer, x.requires_grad_(), dy):
        args = args if op is torch.ops.octavo.run.default else without_gradients(args)
        found = torch.library.opcheck(op, args, raise_exception=False)
        failed += [(op, test, str(said)) for test, said in found.items() if said != "SUCCESS"]
    assert failed
    for op, test, said in failed:
        assert op in UNDECLARED_WRITES and test == "test_schema" and "not defined as mutable but was mutated" in said
