"""octavo.MoE: y, gradients, losses and load against a loop over experts in float64; graphs, copies, training."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import moe
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from tests.support.linear_oracle import assert_same
from tests.support.mixtures import D, E, K, N, T, batch, mixture, step
from tests.support.sequentials import FUSED_AT_ONCE, GRAD_ERROR, Graphs, every, fill
from tests.support.steps import assert_equal, assert_state, compiled, relative_error

RICH = {
    "score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "expert_bias": True, "aux_loss_coef": 0.5,
    "z_loss_coef": 0.1, "shared_ffn_size": 40, "shared_gate": True,
}  # fmt: skip


# -- a loop in float64 -------------------------------------------------------------------------------------------------


def mlp(x, w1, w2):
    a, b = (x @ w1.T).chunk(2, -1)
    return (F.silu(a) * b) @ w2.T


def chosen(logits, bias, rich):
    """Weights and experts in torch's float64: DeepSeek-V3's rule, or Mixtral's."""
    if not rich:
        weights, index = logits.softmax(-1).topk(K)
        return weights / weights.sum(-1, keepdim=True), index
    ranked = logits.sigmoid() + bias
    groups = ranked.view(-1, 4, E // 4).topk(2).values.sum(-1).topk(2).indices
    inside = torch.zeros(len(ranked), 4).scatter_(1, groups, 1.0).repeat_interleave(E // 4, 1)
    index = ranked.masked_fill(inside == 0, -torch.inf).topk(K).indices
    weights = logits.sigmoid().gather(1, index)
    return 2.5 * weights / weights.sum(-1, keepdim=True), index


def in_float64(model, x, dy, rich):
    p = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    x = x.double().requires_grad_()
    logits = x @ p["router.weight"].T
    weights, index = chosen(logits, model.expert_bias, rich)
    y = torch.zeros_like(x)
    for e in range(E):
        tokens, assignments = torch.where(index == e)
        out = mlp(x[tokens], p["experts.fc1.weight"][e], p["experts.fc2.weight"][e])
        y = y.index_add(0, tokens, weights[tokens, assignments, None] * out)
    load, loss = torch.bincount(index.flatten(), minlength=E), torch.zeros(())
    if rich:
        gate = (x @ p["shared_gate.weight"].T).sigmoid()
        y = y + gate * mlp(x, p["shared.fc1.weight"], p["shared.fc2.weight"])
        probs = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        loss = 0.5 * E * (load / (T * K) * probs.mean(0)).sum() + 0.1 * logits.logsumexp(-1).square().mean()
    ((y * dy).sum() + loss).backward()
    return [y.detach(), loss.detach(), load, x.grad, *(each.grad for each in p.values())]


@pytest.mark.parametrize("settings", [{}, RICH], ids=["plain", "rich"])
@every
def test_against_float64(recipe, settings):
    model, data = mixture(recipe, **settings), batch()
    found, want = step(model, *data), in_float64(model, *data, bool(settings))
    assert torch.equal(found[2], want[2])
    torch.testing.assert_close(found[1].double(), want[1].double(), rtol=1e-5, atol=0)
    for i, (a, b) in enumerate(zip([found[0], *found[3:]], [want[0], *want[3:]], strict=True)):
        assert relative_error(a, b) < GRAD_ERROR[recipe.split("(")[0]], f"{i}: {relative_error(a, b):.3g}"


def test_a_mixture_is_its_parts_one_by_one():
    model, (x, _) = mixture(), batch()
    weights, index = moe.route(model.router(x), K)
    assert_same(model(x), model.experts(x, index, weights))
    assert torch.equal(model.load, moe.counts(index, E))


# -- shapes and padding ------------------------------------------------------------------------------------------------


def test_leading_dims_are_kept():
    x, dy = batch()
    found, want = (step(mixture(**RICH), x.view(shape), dy.view(shape)) for shape in ((4, T // 4, D), (T, D)))
    assert found[0].shape == found[3].shape == (4, T // 4, D)
    assert_equal([a.reshape(b.shape) for a, b in zip(found, want, strict=True)], want)


@pytest.mark.parametrize("tokens", [0, 1, 25, T])
def test_padding_takes_no_part(tokens):
    """Results are those of the tokens alone; the shared MLP runs for padding too."""
    settings = {**RICH, "shared_ffn_size": None, "shared_gate": False}
    model, twin, (x, dy) = mixture(**settings), mixture(**settings), batch()
    found = step(model, x, dy, tokens=torch.tensor(tokens))
    want = step(twin, x[:tokens], dy[:tokens])
    assert not found[0][tokens:].any() and not found[3][tokens:].any()
    assert torch.equal(found[2], want[2])
    for a, b in zip(found, want, strict=True):
        a = a[:tokens] if a.shape == x.shape else a
        # float32 products of other shapes round otherwise
        assert relative_error(a, b) < 1e-3 if tokens else not a.any()
    assert_equal(step(model, x, dy, tokens=tokens), found)


# -- losses and load ---------------------------------------------------------------------------------------------------


def test_numbers_of_experts_out_of_range_are_refused():
    with pytest.raises(UnsupportedShape, match="1 to 4096 experts, got num_experts=0"):
        octavo.MoE(D, N, 0, 1)
    with pytest.raises(UnsupportedConfig, match="from 1 to num_experts, 8, got 100"):
        octavo.MoE(D, N, E, K, dispatcher=moe.LocalDispatch(), num_local_experts=100)


def test_convert_leaves_the_router_alone_whatever_it_is_called():
    for model, settings in (
        (nn.Sequential(mixture()), {"high_precision": ()}),
        (nn.ModuleDict({"gate": moe.Router(D, E), "fc": nn.Linear(D, D)}), {}),
    ):
        octavo.convert(model, "fp8-block", **settings)
        assert [type(m) for m in model.modules() if isinstance(m, moe.Router)] == [moe.Router]


def test_a_reverted_shared_mlp_takes_no_flag():
    model, (x, _) = mixture(shared_ffn_size=40), batch()
    octavo.revert(model)
    assert model(x, is_first_microbatch=True).isfinite().all()


def test_the_last_loss_is_dropped_before_a_forward():
    """It would keep gradient accumulators of its stream, which a capture on another stream refuses."""
    model, (x, _) = mixture(aux_loss_coef=0.5), batch()
    model(x)
    assert model.aux_loss.requires_grad
    seen = []
    model.router.register_forward_pre_hook(lambda *_: seen.append(model.aux_loss.requires_grad))
    model(x)
    assert seen == [False] and model.aux_loss.requires_grad


def test_losses_are_those_of_the_functions():
    model, (x, _) = mixture(aux_loss_coef=0.5, z_loss_coef=0.25), batch()
    assert model.aux_loss.item() == 0
    model(x)
    logits = model.router(x)
    index = moe.route(logits, K)[1]
    want = 0.5 * moe.aux_loss(logits, index) + 0.25 * moe.z_loss(logits)
    torch.testing.assert_close(model.aux_loss, want)
    model.eval()(x)
    assert model.aux_loss.item() == 0 and not model.aux_loss.requires_grad
    plain = mixture()
    plain(x)
    assert plain.aux_loss.item() == 0 and plain.aux_loss.shape == ()


def test_the_load_is_of_the_last_forward_and_is_not_saved():
    model, (x, _) = mixture(), batch()
    model(x), model(x[:10])
    assert model.load.sum() == 10 * K and model.load.dtype == torch.int64
    assert "load" not in model.state_dict() and "load" in dict(model.named_buffers())


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [("bf16", RICH), (FUSED_AT_ONCE["fp8-delayed"], RICH), ("fp8-block", {"aux_loss_coef": 0.1}), ("nvfp4", {})],
    ids=["bf16, rich", "fp8-delayed, rich", "fp8-block", "nvfp4"],
)
def test_compiled_has_the_bits_of_eager(recipe, settings):
    """One graph for all steps, with a bias that changes between them; the experts are one node each way."""
    model, twin, graphs = mixture(recipe, **settings), mixture(recipe, **settings), Graphs()
    call = compiled(lambda x: (model(x), model.aux_loss), backend=graphs)
    for seed in range(3):
        data = batch(seed)
        assert_equal(step(model, *data, call=call), step(twin, *data), f"step {seed}")
        for each in (model, twin):
            octavo.step(each)
            if each.expert_bias is not None:
                moe.update_bias(each.expert_bias, each.load, 0.02)
    shared = int(model.shared is not None)
    assert len(graphs.forward) == 1 and graphs.runs() == (2 + shared, 1 + shared)  # forward sorts in a node of its own
    assert_state(model, twin)


@pytest.mark.usefixtures("fresh_compiler")
def test_explain_shows_one_run_of_the_experts():
    report = octavo.explain(mixture(aux_loss_coef=0.1), batch()[0])
    assert (report.graphs, len(report.breaks), report.count("octavo::run_bwd", "backward")) == (1, 0, 1)
    assert any("experts" in str(run) for run in report.runs)


@pytest.mark.usefixtures("fresh_compiler")
def test_in_a_checkpoint():
    """The loss is an attribute, which a checkpoint inside of a graph cannot set: only eager takes one with losses."""
    for settings, ways in (({}, ("eager", "compiled")), ({"aux_loss_coef": 0.1}, ("eager",))):
        data, want = batch(), step(mixture(**settings), *batch())
        for way in ways:
            model = mixture(**settings)

            def call(x, model=model):
                return checkpoint(model, x, use_reentrant=False), model.aux_loss

            assert_equal(step(model, *data, call=compiled(call) if way == "compiled" else call), want)


def test_two_runs_have_the_same_bits():
    want = step(mixture("nvfp4", **RICH), *batch())
    for _ in range(4):
        assert_equal(step(mixture("nvfp4", **RICH), *batch()), want)


# -- the module --------------------------------------------------------------------------------------------------------


def test_a_state_dict_has_plain_names_and_tensors():
    model = mixture(**RICH)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert shapes == {
        "router.weight": (E, D), "expert_bias": (E,), "shared_gate.weight": (1, D),
        "experts.fc1.weight": (E, 2 * N, D), "experts.fc2.weight": (E, D, N),
        "shared.fc1.weight": (80, D), "shared.fc2.weight": (D, 40),
    }  # fmt: skip
    other = octavo.MoE(D, N, E, K, recipe="fp8-block", **RICH)
    other.load_state_dict(model.state_dict())
    assert_equal(step(other, *batch()), step(model, *batch()))


def test_made_on_the_meta_device():
    model = octavo.MoE(D, N, E, K, recipe="fp8-delayed", device="meta", **RICH)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model = model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not model.expert_bias.any() and not model.load.any()
    assert all(t.isfinite().all() for t in step(model, *batch()))


@pytest.mark.parametrize("how", ["assigned", "to_empty"])
def test_counts_of_a_module_that_was_made_on_the_meta_device(how):
    """They are in no state dict, and start at zero on the device of the weights."""
    settings = {"dispatcher": moe.LocalDispatch(T * K - 12), **RICH}
    twin = mixture(**settings)
    model, state = octavo.MoE(D, N, E, K, recipe="fp8-block", device="meta", **settings), twin.state_dict()
    if how == "assigned":
        model.load_state_dict(copy.deepcopy(state), assign=True)
    else:
        empty_like = torch.empty_like
        with pytest.MonkeyPatch.context() as patch:  # memory with any values
            patch.setattr(torch, "empty_like", lambda t, **given: empty_like(t, **given).fill_(7))
            model.to_empty(device="cpu")
        model.load_state_dict(state)
        assert not model.load.any()
    assert model.overflow() == 0
    assert_equal(step(model, *batch()), step(twin, *batch()))
    assert model.overflow() == 12
    for module in (model, twin):
        moe.update_bias(module.expert_bias, module.load)
    assert_same(model.expert_bias, twin.expert_bias)


def test_the_repr_has_what_differs_from_the_default():
    assert repr(mixture()).splitlines()[1].strip() == "num_experts=8, top_k=2"
    assert "z_loss_coef=0.1, expert_bias=True\n" in repr(mixture(**RICH))


def test_codes_are_refused_as_x():
    codes = octavo.quant.Block1D().quantize_groups(batch()[0], torch.tensor([T]))
    for layer in (mixture(), octavo.Linear(D, N, recipe="fp8-block")):
        with pytest.raises(UnsupportedDtype, match="got a GroupedTensor: only"):
            layer(codes)
    with pytest.raises(UnsupportedDtype, match=r"MoE takes a tensor, got a QTensor.*Pass dequantize\(\)"):
        mixture()(octavo.quant.Block1D().quantize(batch()[0]))


def test_copies_of_a_trained_module():
    """A loss of the last forward is part of autograd's graph, and stays behind."""
    model, data = mixture(**RICH), batch()
    model(data[0])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.aux_loss.item() == 0 and torch.equal(other.load, model.load)
        assert_equal(step(other, *data), step(mixture(**RICH), *data))


def test_a_cast_leaves_the_bias_in_float32():
    model = mixture(**RICH).bfloat16()
    assert model.router.weight.dtype == torch.bfloat16
    assert_same(model.expert_bias, torch.linspace(-0.2, 0.2, E))
    y = model(batch(dtype=torch.bfloat16)[0])
    assert y.dtype == torch.bfloat16 and model.aux_loss.dtype == torch.float32


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_state_of_16_bits_leaves_the_bias_in_float32(device, assign):
    state = {name: value.bfloat16() for name, value in mixture(**RICH).state_dict().items()}
    model = octavo.MoE(D, N, E, K, recipe="fp8-block", device=device, **RICH)
    if not assign:
        model = model.to_empty(device="cpu")
    model.load_state_dict(state, assign=assign)
    assert_same(model.expert_bias, torch.linspace(-0.2, 0.2, E).bfloat16().float())
    model(batch()[0])
    moe.update_bias(model.expert_bias, model.load)
    assert "expert_bias" in dict(model.named_buffers())


def test_convert_leaves_the_router_alone():
    model = nn.Sequential(fill(octavo.MoE(D, N, E, K, shared_ffn_size=40, shared_gate=True)))
    report = octavo.convert(model, "fp8-block")
    assert {row.path: row.reason for row in report.rows} == {
        "0.router": "router", "0.shared_gate": "router", "0.experts.fc1": "converted", "0.experts.fc2": "converted",
        "0.shared.fc1": "converted", "0.shared.fc2": "converted",
    }  # fmt: skip
    twin, (x, _) = mixture(shared_ffn_size=40, shared_gate=True), batch()
    assert_same(model(x), twin(x))
    octavo.revert(model)
    assert relative_error(model(x), twin(x)) < 0.1


def test_the_recipe_of_autocast():
    model, (x, _) = mixture(None, shared_ffn_size=40), batch()
    with octavo.autocast("fp8-block"):
        y = model(x)
    assert_same(y, mixture(shared_ffn_size=40)(x))


def test_cached_weights():
    model, twin = mixture(shared_ffn_size=40), mixture(shared_ffn_size=40)
    for i in range(2):
        assert_equal(step(model, *batch(i), is_first_microbatch=i == 0), step(twin, *batch(i)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    with pytest.raises(UnsupportedConfig, match="changed"):
        model(batch()[0], is_first_microbatch=False)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-block", "nvfp4"])
def test_training_reduces_the_loss(recipe):
    torch.manual_seed(0)
    model = octavo.MoE(D, N, E, K, recipe=recipe, aux_loss_coef=0.01, shared_ffn_size=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    x, losses = torch.randn(128, D), []
    target = torch.tanh(x @ torch.randn(D, D) / D**0.5)
    with octavo.attach(model, optimizer):
        for _ in range(15):
            loss = (model(x) - target).square().mean()
            (loss + model.aux_loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]


# -- the router's layer ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_logits_of_16_bits_have_the_same_bits_in_a_graph(way):
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    model, twin = (mixture(aux_loss_coef=0.1, shared_ffn_size=40).to(dtype) for _ in range(2))
    data, call = batch(dtype=dtype), compiled(lambda x: (model(x), model.aux_loss))
    # forward alone: a backward inside of torch.autocast multiplies in 16 bits where it is eager
    under = torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast")
    found, want = (
        step(model, *data, call=under(call)),
        step(twin, *data, call=under(lambda x: (twin(x), twin.aux_loss))),
    )
    assert_equal(found, want)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    if way == "autocast":
        assert torch.equal(found[2], moe.counts(moe.route(twin.router(data[0]), K)[1], E))


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    for settings, match in (
        ({"score": "relu"}, "score"),
        ({"activation": "swish"}, "activation"),
        ({"groups": 3, "top_groups": 1}, "groups divides"),
        ({"shared_gate": True}, "shared_ffn_size"),
        ({"num_local_experts": 4}, "dispatcher"),
        ({"scale_bias": True}, "scale_bias"),
        ({"recipe": "fp8"}, "recipe"),
    ):
        with pytest.raises(UnsupportedConfig, match=match):
            octavo.MoE(D, N, E, K, **settings)
    with pytest.raises(UnsupportedConfig, match="top_k is a number from 1 to 8"):
        octavo.MoE(D, N, E, 9)
    model, (x, _) = mixture(), batch()
    for wrong in (x[0], x[:, :-1]):
        with pytest.raises(UnsupportedShape, match="This MoE takes inputs"):
            model(wrong)
    with pytest.raises(UnsupportedDtype, match="MoE takes x"):
        model(x.double())
