"""FSDP2 that gathers weights as codes: losses and gradients are those of gathering float32 values, at half of bf16's
bytes; each shard is cast once a step."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo._torch.cuda import is_capturing
from octavo.communication import sharded_weights
from octavo.communication.sharded_weights import ShardedWeight
from octavo.distributed import ColwiseParallel, RowwiseParallel, gather_codes
from octavo.optim import adamw
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import assert_same
from tests.support.linear_shards import message

K, N, ROWS, STEPS, MICROBATCHES = 256, 512, 32, 2, 4
WHOLE = ("fp8-current", "fp8-delayed")  # recipes with one scale for a weight
# of bf16's bytes, at most
BYTES = {"fp8-current": 0.5, "fp8-delayed": 0.5, "fp8-block": 0.52, "fp8-rowwise": 0.52, "mxfp8": 0.52, "nvfp4": 0.29}


def built(recipe, sizes=(K, N, K), seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.GELU(), nn.Linear(sizes[1], sizes[2]))
    octavo.convert(model, recipe)
    return model


def sharded(model, group, codes, **settings):
    if codes:
        gather_codes(model)
    settings.setdefault("mesh", DeviceMesh.from_group(group, "cpu"))
    for layer in model:
        if isinstance(layer, octavo.Linear):
            fully_shard(layer, **settings)
    return fully_shard(model, **settings)


class Sent:
    """Bytes of FSDP2's all-gathers."""

    def __enter__(self):
        self.bytes, self.patch, gather = 0, pytest.MonkeyPatch(), DefaultAllGather.__call__

        def counted(own, output_tensor, input_tensor, *arguments, **keywords):
            self.bytes += input_tensor.numel() * input_tensor.element_size()
            return gather(own, output_tensor, input_tensor, *arguments, **keywords)

        self.patch.setattr(DefaultAllGather, "__call__", counted)
        return self

    def __exit__(self, *error):
        self.patch.undo()


def batch(rank, number, k=K):
    return torch.randn(ROWS, k, generator=torch.Generator().manual_seed(100 * number + rank))


def trained(model, group, rank, compiled=False, optimizer=torch.optim.AdamW, steps=STEPS):
    """Losses, and the gradients of each step."""
    layers = [layer for layer in model if isinstance(layer, octavo.Linear)]
    call = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer, losses, gradients = optimizer(model.parameters(), lr=0.01), [], []
    for step in range(steps):
        for microbatch in range(MICROBATCHES):
            y = call(batch(rank, MICROBATCHES * step + microbatch, layers[0].in_features))
            loss = (y.float() - 1).square().mean()
            loss.backward()
            losses.append(loss.detach())
        gradients.append([p.grad.full_tensor().cpu() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        octavo.step(model, group)
    return losses, gradients


def compared(group, rank, recipe, size, settings, sizes=(K, N, K), compiled=False):
    """The runs with values and with codes, their bytes, and casts of a shard."""
    mesh = DeviceMesh.from_group(group, "cpu")  # a new group would have to be made on all ranks of the pool
    if settings == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "shard"))
    more = {
        "cpu offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "kept": {"reshard_after_forward": False},
    }.get(settings, {})
    found = []
    for codes in (False, True):
        model = built(recipe, sizes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Sent() as sent:
                run = trained(sharded(model, group, codes, mesh=mesh, **more), group, rank, compiled)
        texts = [str(one.message) for one in caught if "gather_codes" in str(one.message)]
        found.append((run, sent.bytes, texts, [p._sharded.casts for p in model if codes and hasattr(p, "_sharded")]))
    return found


def assert_alike(found):
    for (values, *_), (codes, *_) in found:
        for step, (mine, theirs) in enumerate(zip(codes[1], values[1], strict=True)):
            for i, (g, want) in enumerate(zip(mine, theirs, strict=True)):
                assert_same(g, want, f"step {step}, gradient {i}")
        assert_same(torch.stack(codes[0]), torch.stack(values[0]), "losses")


@pytest.mark.parametrize("recipe", BYTES)
def test_codes_train_as_values_at_half_of_the_bytes(ranks, recipe):
    found = ranks.run(compared, recipe, 2, "", size=2)
    assert_alike(found)
    biases = 4 * (N + K) * 2 * MICROBATCHES * STEPS / 2  # float32, in forward and backward
    for (_, values, *_), (_, codes, said, casts) in found:
        assert (codes - biases) <= BYTES[recipe] * (values - biases) / 2
        assert casts == [STEPS, STEPS] and not said


@pytest.mark.parametrize("recipe", BYTES)
def test_one_rank_trains_as_values(ranks, recipe):
    found = ranks.run(compared, recipe, 1, "", size=1)
    assert_alike(found)
    _, sent, said, casts = found[0][1]
    assert casts == [STEPS, STEPS] and not said and not sent


@pytest.mark.parametrize(
    ("settings", "recipe"),
    [("hsdp", "fp8-delayed"), ("cpu offload", "fp8-current")],
)
def test_over_four_ranks(ranks, settings, recipe):
    found = ranks.run(compared, recipe, 4, settings)
    assert_alike(found)
    assert all(not said for _, (_, _, said, _) in found)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SHIPPED)
@pytest.mark.parametrize("settings", ["", "hsdp", "cpu offload", "kept"])
def test_every_recipe_over_four_ranks(ranks, settings, recipe):
    assert_alike(ranks.run(compared, recipe, 4, settings))


@pytest.mark.parametrize("recipe", ["fp8-delayed"])
def test_uneven_shards_are_padded(ranks, recipe):
    found = ranks.run(compared, recipe, 4, "", (48, 50, 7))
    assert_alike(found)
    assert all(values > codes for (_, values, *_), (_, codes, *_) in found)


def test_shards_that_cut_a_block_are_gathered_as_values_and_say_so(ranks):
    found = ranks.run(compared, "fp8-block", 4, "", (K, 192, K))
    assert_alike(found)
    for _, (_, _, said, _) in found:
        assert any("cut blocks of 128" in text for text in said)


def test_compiled_blocks(ranks):
    assert_alike(ranks.run(compared, "fp8-block", 2, "", (K, N, K), True, size=2))


def beside_split_layers(group, rank):
    """Losses and gradients of a model whose pair of layers is split over two ranks, and whose last layer is whole, with
    values and with codes; and the class of each weight."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    for codes in (False, True):
        model = built("fp8-block").append(octavo.Linear(K, K, recipe="fp8-block"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        own = sharded(model, group, codes, mesh=mesh["dp"])
        kinds = [type(layer.weight.to_local()) for layer in own if isinstance(layer, octavo.Linear)]
        found.append((trained(own, group, rank // 2), kinds))
    return found


@pytest.mark.slow
def test_layers_that_are_split_gather_values_beside_those_that_gather_codes(ranks):
    for (values, plain), (codes, kinds) in ranks.run(beside_split_layers):
        assert set(plain) == {torch.Tensor} and kinds == [torch.Tensor, torch.Tensor, ShardedWeight]
        assert_alike([((values,), (codes,))])


def whole_step(model, x):
    model(x).sum().backward()
    model[0].backward_dw()


def with_settings(group, rank):
    """Losses with values and codes where layers keep codes of the weight, and what options that need a whole weight
    say."""
    losses, refusals = [], []
    for codes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(octavo.Linear(K, K, recipe="fp8-current", keep_weight_codes=True))
        losses.append(torch.stack(trained(sharded(model, group, codes), group, rank)[0]))
        for name in ("delay_wgrad_compute", "fuse_wgrad_accumulation"):
            layer = octavo.Linear(K, K, recipe="fp8-current", **{name: True})
            refusals.append(message(whole_step, sharded(nn.Sequential(layer), group, codes), batch(rank, 0)))
    return losses, refusals


def test_settings_that_need_a_whole_weight_are_refused_as_with_values(ranks):
    for (values, codes), (*of_values, delayed, fused) in ranks.run(with_settings, size=2):
        assert_same(codes, values, "losses")
        assert of_values == [delayed, fused]
        assert "needs the whole weight" in delayed and "weight.main_grad" in fused


def in_bf16(group, rank, recipe):
    """Losses of values in float32 and of codes, with parameters in bf16, and the dtypes of gradients."""
    losses = []
    for codes in (False, True):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(built(recipe), group, codes, mp_policy=policy)
        losses.append(torch.stack(trained(model, group, rank)[0]))
    return losses


def test_mixed_precision_casts_the_float32_shard(ranks):
    for values, codes in ranks.run(in_bf16, "fp8-current", size=2):
        assert (values - codes).abs().max() < 0.02 * values.max()


def kept_bytes(group, rank, recipe):
    """Bytes of the whole weight's codes that are left after forward and after backward, of all of them."""
    model, seen = sharded(built(recipe), group, True), {}

    def note(layer, _):
        seen[layer] = layer.weight.tensors()

    for layer in model:
        if isinstance(layer, octavo.Linear):
            layer.register_forward_pre_hook(note)
    loss = model(batch(rank, 0)).square().mean()

    def left():
        tensors = [t for inner in seen.values() for t in inner.values() if t.numel() > 1]
        return sum(t.untyped_storage().size() for t in tensors), sum(t.nbytes for t in tensors)

    after_forward = left()
    loss.backward()
    return after_forward, left()


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
def test_nothing_of_a_whole_weight_is_kept(ranks, recipe):
    for forward, backward in ranks.run(kept_bytes, recipe, size=2):
        assert forward[0] == backward[0] == 0 and forward[1] >= 2 * K * N


def saved(group, rank, folder, size):
    model = sharded(built("fp8-current"), group, True)
    trained(model, group, rank, steps=1)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder, process_group=group)
    return {name: t.full_tensor() for name, t in model.state_dict().items()}


def loaded(group, rank, folder, codes):
    model = sharded(built("fp8-current", seed=1), group, codes)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_model_state_dict(model, state["model"])
    y = model(batch(0, 0))
    return {name: t.full_tensor() for name, t in model.state_dict().items()}, y


def test_checkpoints_load_over_other_numbers_of_ranks_and_without_octavo(ranks, tmp_path):
    (want, *_) = ranks.run(saved, str(tmp_path), 4)
    stock = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K))
    state = {"model": stock.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(tmp_path))
    single = built("fp8-current", seed=1)
    single.load_state_dict(state["model"])
    results = ranks.run(loaded, str(tmp_path), True, size=2)
    for name in want:
        assert_same(state["model"][name], want[name], name)
        for found, _ in results:
            assert_same(found[name], want[name], name)
    for _, y in results:
        assert_same(y, single(batch(0, 0)), "y")


def from_meta(group, rank):
    with torch.device("meta"):
        model = built("fp8-current")
    sharded(model, group, True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    state = {name: t for name, t in built("fp8-current").state_dict().items()}

    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    return trained(model, group, rank, steps=1), trained(
        sharded(built("fp8-current"), group, True), group, rank, steps=1
    )


def test_a_model_from_the_meta_device(ranks):
    for mine, theirs in ranks.run(from_meta, size=2):
        assert_same(torch.stack(mine[0]), torch.stack(theirs[0]), "losses")


def test_a_shard_is_values_to_copies_and_files(tmp_path):
    model = gather_codes(built("fp8-block"))
    values = model[0].weight.shard
    assert type(model[0].weight) is ShardedWeight and type(copy.deepcopy(model)[0].weight) is nn.Parameter
    torch.save(model.state_dict(), tmp_path / "file")
    assert_same(torch.load(tmp_path / "file", weights_only=True)["0.weight"], values, "a file")
    assert gather_codes(model)[0].weight is model[0].weight  # a second call changes nothing


def by_octavos_optimizer(group, rank):
    """Losses of values and of codes, casts, and the kinds of tensors that the optimizer's kernel was given."""
    kinds, update, found = set(), adamw.adamw, []
    adamw.adamw = lambda values, *rest, **named: (kinds.add(type(values)), update(values, *rest, **named))[1]
    try:
        for codes in (False, True):
            model = sharded(built("fp8-current"), group, codes)
            found.append(torch.stack(trained(model, group, rank, optimizer=octavo.optim.AdamW)[0]))
    finally:
        adamw.adamw = update
    return found, [layer._sharded.casts for layer in model if isinstance(layer, octavo.Linear)], kinds


def test_octavos_optimizer_writes_to_the_memory_of_a_shard(ranks):
    for (values, codes), casts, kinds in ranks.run(by_octavos_optimizer, size=2):
        assert_same(codes, values, "losses")
        assert casts == [STEPS, STEPS] and kinds <= {torch.Tensor, nn.Parameter}


def by_a_compiled_step(group, rank):
    """Losses of values, and of codes whose optimizer steps in a graph, and casts."""
    found = []
    for codes in (False, True):
        model = sharded(built("fp8-block"), group, codes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step, own = torch.compile(optimizer.step, backend="aot_eager") if codes else optimizer.step, []
        for number in range(STEPS):
            loss = (model(batch(rank, number)) - 1).square().mean()
            loss.backward()
            step()
            optimizer.zero_grad()
            own.append(loss.detach())
        found.append(torch.stack(own))
    return found, [layer._sharded.casts for layer in model if isinstance(layer, octavo.Linear)]


def test_an_optimizer_in_a_graph_writes_to_shards(ranks):
    for (values, codes), casts in ranks.run(by_a_compiled_step, size=1):
        assert_same(codes, values, "losses")
        assert codes[1] < codes[0] and casts == [STEPS, STEPS]


def in_captures(group, rank, recipe):
    """Casts of a weight and its codes after each gather, around a capture of a whole step, by what came before."""
    layer = built(recipe)[0]
    gather_codes(nn.Sequential(layer))
    source, mesh, found = layer._sharded, DeviceMesh.from_group(group, "cpu"), {}
    rows = layer.weight.shard.chunk(2)[rank]

    def gather(name, capturing=False):
        sharded_weights.is_capturing = lambda: capturing
        codes = source.to_gather(rows, mesh, None)[0][0].clone()
        found[name] = source.casts, codes

    try:
        gather("eager")
        gather("kept")
        rows.mul_(2)  # a replay's write, which nothing tells of
        gather("forward of a capture", True)
        gather("its backward", True)
        gather("after it")
        gather("kept again")
        sharded_weights.is_capturing = lambda: True
        source.note_write()
        gather("after a captured optimizer")
        rows.mul_(2)
        gather("after its replay")
    finally:
        sharded_weights.is_capturing = is_capturing
    return found


def test_a_capture_casts_what_its_replays_find(ranks):
    for found in ranks.run(in_captures, "fp8-block(scale='fp32')", size=2):
        assert [casts for casts, _ in found.values()] == [1, 1, 2, 3, 4, 4, 5, 6]
    for found in ranks.run(in_captures, "fp8-current", size=2):  # the amax of the whole weight is agreed on anew
        assert_same(found["forward of a capture"][1], found["eager"][1], "codes of twice the weight")


def observed(group, rank):
    """The running amaxes of a model that was called in training, before that in eval mode, and twice; and casts."""
    found = []
    for modes in ((True,), (False, True), (True, True)):
        model = sharded(built("fp8-delayed"), group, True)
        for mode in modes:
            model.train(mode)(batch(rank, 0)).sum().backward()
        layer = model[0]
        found.append((layer._sharded.casts, layer._hidden._buffers[sharded_weights.AMAXES].clone()))
    return found


def test_a_cast_tells_delayed_scaling_of_the_amax_that_training_has(ranks):
    for once, later, twice in ranks.run(observed, size=2):
        assert once[0] == later[0] == twice[0] == 1
        assert once[1][1] > 0 and torch.equal(later[1], once[1]) and torch.equal(twice[1], once[1])


def refused(group, rank):
    model = fully_shard(built("fp8-block"), mesh=DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(octavo.errors.UnsupportedConfig, match="sharded already"):
        gather_codes(model)
    return True


def test_a_sharded_model_is_refused(ranks):
    assert ranks.run(refused, size=2) == [True, True]


def kept_by_default(group, rank):
    """`keep_weight_codes` of layers that FSDP2 shards, by whether the program chose it, and the loss."""
    found = {}
    for chosen in (None, True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K))
        octavo.convert(model, "fp8-current", keep_weight_codes=chosen)
        model.append(octavo.Linear(K, K, recipe="fp8-block", keep_weight_codes=chosen))
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        model(batch(rank, 0)).square().sum().backward()
        found[chosen] = [layer.keep_weight_codes for layer in model], [p.grad.full_tensor() for p in model.parameters()]
    return found


def test_a_sharded_layer_keeps_no_codes_unless_told_to(ranks):
    for found in ranks.run(kept_by_default, size=2):
        assert [found[chosen][0] for chosen in found] == [[False] * 3, [True] * 3, [False] * 3]
        for mine, theirs in zip(found[None][1], found[True][1], strict=True):
            assert_same(mine, theirs, "a gradient")
    layer = octavo.Linear(K, N, recipe="fp8-block")
    assert layer.keep_weight_codes is True
