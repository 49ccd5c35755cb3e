"""Checkpoints that are damaged, foreign or of another model are refused in a sentence, and change nothing."""

import ast
import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from octavo.checkpoints import structure, tensor_file
from octavo.checkpoints.tensor_file import TensorFile
from octavo.errors import InvalidCheckpoint, Unsupported
from tests.support.small_run import FILES, Net, assert_same, make, signed, values


def refused(saved, sentence=None, error=Unsupported, model=None, optimizer=None):
    """Loading raises, and changes nothing."""
    path, own, its = saved
    model, optimizer = own if model is None else model, its if optimizer is None else optimizer
    before = values(model, optimizer)
    with pytest.raises(error, match=sentence) as unsupported_reason:
        octavo.load_checkpoint(path, model, optimizer)
    assert_same(values(model, optimizer), before)
    return str(unsupported_reason.value)


# -- damaged and foreign files -----------------------------------------------------------------------------------------


def forge(path, name, change):
    """Changes a file, its size and SHA-256 in the manifest, and that of the manifest, as a program would that writes
    checkpoints by hand."""
    file = tensor_file.read(path / name)
    (path / name).unlink()
    digest = tensor_file.write(path / name, *change(dict(file.tensors), dict(file.metadata)))
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["files"][name] = digest._asdict()
    (path / "checkpoint.json").write_text(json.dumps(signed(manifest)))


def with_tensor(name, tensor):
    return lambda tensors, metadata: ({k: t for k, t in {**tensors, name: tensor}.items() if t is not None}, metadata)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_and_nothing_is_loaded(name, saved):
    path, *_ = saved
    content = (path / name).read_bytes()
    for at in {0, 7, 8, 20, len(content) // 2, len(content) - 1}:
        (path / name).write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        assert str(path / name) in refused(saved, "is damaged or no file of a checkpoint", InvalidCheckpoint)
    for length in (0, 4, 8, 100, len(content) - 1):
        (path / name).write_bytes(content[:length])
        refused(saved, f"was written with {len(content)} bytes, and has {length}", InvalidCheckpoint)
    (path / name).write_bytes(content + b"x")
    refused(saved, "was written with", InvalidCheckpoint)
    (path / name).unlink()
    refused(saved, "is not complete", InvalidCheckpoint)
    (path / name).mkdir()
    refused(saved, error=InvalidCheckpoint)


FORGED = {
    "a weight is missing": ("model", with_tensor("up.weight", None), "missing up.weight, unknown nothing"),
    "a weight is unknown": ("model", with_tensor("up.wait", torch.zeros(1)), "missing nothing, unknown up.wait"),
    "a shape": ("model", with_tensor("up.weight", torch.zeros(32, 48)), r"up.weight of this model is \(48, 32\), and"),
    "a dtype": ("model", with_tensor("up.weight", torch.zeros(48, 32).half()), "is torch.float32, and torch.float16"),
    "a scale of zero": ("recipe", with_tensor("up.scaling.forward.encode", torch.zeros(2)), "finite and positive"),
    "a missing scale": ("recipe", with_tensor("up.scaling.forward.encode", None), "missing up.scaling.forward.encode"),
    "an unknown scale": ("recipe", with_tensor("up.scale", torch.ones(1)), "unknown up.scale"),
    "a state of generators": ("run", with_tensor("random.torch", torch.zeros(5056).byte()), "refuses its state"),
    "a state of other size": ("run", with_tensor("random.torch", torch.zeros(3).byte()), "refuses its state"),
    "a state without its tensor": ("run", with_tensor("random.torch", None), "its structure has {'tensor'"),
    "a tensor without a place": ("run", with_tensor("more", torch.zeros(1)), "does not have the tensor 'more'"),
    "no structure": ("run", lambda tensors, metadata: (tensors, {}), "no 'structure'"),
    "moments of other shape": ("optimizer", with_tensor("state.state.0.exp_avg", torch.zeros(3, 3)), "exp_avg"),
    "moments of other dtype": ("optimizer", with_tensor("state.state.0.exp_avg", torch.ones(48, 32).half()), "exp_av"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change", "sentence"), FORGED.values(), ids=FORGED)
def test_what_does_not_fit_is_refused_and_nothing_is_loaded(name, change, sentence, saved):
    forge(saved[0], f"{name}.safetensors", change)
    refused(saved, sentence)


TREES = {
    "a list": [], "a number": 3, "an object": {"object": 1}, "a tag too many": {"tuple": [], "dict": []},
    "a dict of pairs of three": {"dict": [[1, 2, 3]]}, "a key twice": {"dict": [["a", 1], ["a", 2]]},
    "a key of true": {"dict": [[True, 1]]}, "an unknown tensor": {"dict": [["a", {"tensor": "b"}]]},
    "a tensor twice": {"dict": [["t", {"tensor": "t"}], ["b", {"tensor": "t"}]]},
    "a tensor by another path": {"dict": [["a", {"tensor": "t"}]]}, "a list as key": {"dict": [[["a"], 1]]},
    "a tensor of number": {"dict": [["a", {"tensor": 0}]]},
}  # fmt: skip


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_structure_that_no_checkpoint_has_is_refused(tree):
    tensors = {"t": torch.zeros(1)} if '"t"' in json.dumps(tree) else {}
    text = json.dumps(tree, separators=(",", ":"))  # as a checkpoint has it
    file = TensorFile(tensors, {"structure": text}, tensor_file.Digest(0, ""))
    with pytest.raises(InvalidCheckpoint, match=r"run.safetensors is damaged"):
        structure.decoded(Path("run.safetensors"), file)


def test_values_are_not_nested_without_end(tmp_path):
    deep = []
    for _ in range(40):
        deep = [deep]
    with pytest.raises(Unsupported, match="up to 32 deep"):
        octavo.save_checkpoint(tmp_path, nn.Linear(2, 2), extra={"deep": deep})
    text = '{"dict":[["a",' + "[" * 60 + "]" * 60 + "]]}"
    with pytest.raises(InvalidCheckpoint):
        structure.decoded(Path("a"), TensorFile({}, {"structure": text}, tensor_file.Digest(0, "")))


def manifest_with(**changes):
    return lambda manifest: {k: v for k, v in {**manifest, **changes}.items() if v is not None}


MANIFESTS = {
    "empty": lambda manifest: "", "no JSON": lambda manifest: "{", "a list": lambda manifest: [],
    "of another program": manifest_with(format="zip"), "no step": manifest_with(step=None),
    "a negative step": manifest_with(step=-3), "a step of text": manifest_with(step="3"),
    "no files": manifest_with(files=None), "files of nothing": manifest_with(files={}),
    "a file elsewhere": lambda m: {**m, "files": {"../step-000003/model.safetensors": m["files"]["model.safetensors"]}},
    "an absolute file": lambda m: {**m, "files": {**m["files"], "/etc/hostname": {"bytes": 1, "sha256": ""}}},
    "a digest of text": lambda m: {**m, "files": {**m["files"], "model.safetensors": "abc"}},
    "a name with a NUL": manifest_with(files={"a\0b": {"bytes": 1, "sha256": "0"}}),
    "half of a character": manifest_with(files={"\ud800": {"bytes": 1, "sha256": "0"}}),
    "a later version": manifest_with(version=3), "an earlier version": manifest_with(version=1),
    "no version": manifest_with(version=None), "no recipes": manifest_with(recipes=None),
    "recipes of nothing": manifest_with(recipes=[]),
    "a recipe of number": manifest_with(recipes={"up": 8}),
    "large": lambda m: " " * 17_000_000 + json.dumps(m),
}  # fmt: skip


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
@pytest.mark.parametrize("has_digest", [True, False], ids=["with a digest", "without a digest"])
def test_a_manifest_of_another_kind_is_refused(has_digest, change, saved):
    path, *_ = saved
    manifest = json.loads((path / "checkpoint.json").read_text())
    del manifest["sha256"]
    changed = change(manifest)
    if isinstance(changed, dict) and has_digest:
        changed = signed(changed)
    (path / "checkpoint.json").write_text(changed if isinstance(changed, str) else json.dumps(changed))
    assert "its SHA-256 is" not in refused(saved, error=InvalidCheckpoint)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("none", "There is no folder .*none"),
        ("file", "file is a file, and"),
        ("empty", "empty has no complete checkpoint"),
    ],
)
def test_where_no_checkpoint_is(path, sentence, tmp_path, saved):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    text = refused((tmp_path / path, *saved[1:]), sentence, InvalidCheckpoint)
    assert text.endswith("Pass the folder that octavo.save_checkpoint was given, or a checkpoint in it.")


def test_links_to_files_elsewhere_are_hashed_too(saved):
    path, *_ = saved
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("/etc/hostname")
    refused(saved, error=InvalidCheckpoint)


# -- other models and optimizers ---------------------------------------------------------------------------------------


def test_another_model_is_refused(saved):
    path, _, optimizer = saved
    refused(saved, r"up.weight of this model is \(48, 16\)", model=make(width=16)[0])
    refused(saved, "is torch.bfloat16, and torch.float32 in the checkpoint", model=make(dtype=torch.bfloat16)[0])
    refused(saved, "missing 0.weight", model=nn.Sequential(octavo.Linear(2, 2)))
    meta = make()[0].to("meta")
    with pytest.raises(Unsupported, match="is on the meta device"):
        octavo.load_checkpoint(path, meta)
    for wrong in (None, Net, "model", optimizer):
        with pytest.raises(Unsupported, match="takes a model"):
            octavo.load_checkpoint(path, wrong)
        with pytest.raises(Unsupported, match="takes a model"):
            octavo.save_checkpoint(path, wrong)


OTHERS = {
    "fp8-current": "in fp8-current", "fp8-delayed(margin=1)": "in fp8-delayed(margin=1)", None: "without a recipe",
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block"])
def test_another_recipe_is_refused_by_the_layer(recipe, other, tmp_path):
    model, optimizer = make(recipe)
    octavo.save_checkpoint(tmp_path, model, optimizer, step=3)
    torch.manual_seed(1)
    resumed = Net()
    if other is not None:
        octavo.convert(resumed, other)
    said = refused((tmp_path, resumed, torch.optim.AdamW(resumed.parameters())))
    assert said == (
        f"'up' was saved in {recipe}, and is {OTHERS[other]} in this model; 2 more layers differ too. Convert the "
        "model with the recipes of the checkpoint, and load it. To go on in other recipes, call octavo.revert(model) "
        "after that, and convert again."
    )


def test_a_recipe_for_layers_that_were_saved_without_one_is_refused(tmp_path):
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), octavo.Linear(4, 4))
    octavo.save_checkpoint(tmp_path, plain)
    octavo.load_checkpoint(tmp_path, nn.Sequential(octavo.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    octavo.convert(plain, "bf16", exclude="0")
    with pytest.raises(
        Unsupported, match=r"^'2' was saved without a recipe, and is in bf16 in this model. .* load it first"
    ):
        octavo.load_checkpoint(tmp_path, plain)


def test_a_checkpoint_of_one_layer_names_the_model(tmp_path):
    octavo.save_checkpoint(tmp_path, octavo.Linear(4, 4, recipe="fp8-block"))
    with pytest.raises(Unsupported, match=r"^The model was saved in fp8-block, and is in mxfp8"):
        octavo.load_checkpoint(tmp_path, octavo.Linear(4, 4, recipe="mxfp8"))


def test_a_policy_at_another_step_is_named(tmp_path):
    policy = octavo.Policy([{"recipe": "bf16", "from_step": 2}, ("*", "fp8-block")])
    model = Net()
    octavo.convert(model, policy, step=2)
    octavo.save_checkpoint(tmp_path, model, step=2)
    early, late = Net(), Net()
    octavo.convert(early, policy)
    octavo.convert(late, policy, step=2)
    with pytest.raises(Unsupported, match=r"'up' was saved in bf16, .* octavo.convert\(model, policy, step=N\)\."):
        octavo.load_checkpoint(tmp_path, early)
    octavo.load_checkpoint(tmp_path, late)
    assert torch.equal(late.up.weight, model.up.weight)


def test_a_run_goes_on_in_another_recipe_after_it_was_loaded_in_its_own(tmp_path):
    model, optimizer = make("fp8-block")
    octavo.save_checkpoint(tmp_path, model, optimizer, step=3)
    resumed, other = make("fp8-block", seed=1)
    octavo.load_checkpoint(tmp_path, resumed, other)
    octavo.revert(resumed)
    octavo.convert(resumed, "mxfp8")
    assert str(resumed.up.recipe) == "mxfp8" and torch.equal(resumed.up.weight, model.up.weight)


def test_a_manifest_with_the_paths_of_very_many_layers_is_read(tmp_path):
    """A few long paths stand for many: a mixture may have a Linear for each expert."""
    layer = octavo.Linear(1, 1, bias=False, recipe="fp8-block")
    model = nn.ModuleDict({f"{i}" + "l" * 50_000: copy.deepcopy(layer) for i in range(30)})
    octavo.save_checkpoint(tmp_path, model)
    assert (tmp_path / "step-000000/checkpoint.json").stat().st_size > 1_000_000
    octavo.load_checkpoint(tmp_path, model)


def test_swapped_arguments_and_an_extra_that_is_no_dict_are_refused(saved):
    path, model, _ = saved
    sentence = r"takes a model \(an nn.Module\) second, after the folder, got the string 'run'. Swap the arguments."
    with pytest.raises(Unsupported, match=sentence):
        octavo.load_checkpoint(model, "run")
    with pytest.raises(Unsupported, match=sentence):
        octavo.save_checkpoint(model, "run", step=1)
    with pytest.raises(Unsupported, match="extra is a dict, got list"):
        octavo.save_checkpoint(path.parent, model, step=4, extra=[1, 2])


def test_another_optimizer_is_refused(saved):
    path, model, _ = saved
    parameters = list(model.parameters())
    for optimizer, sentence in (
        (torch.optim.SGD(parameters), "has the state of AdamW, and the optimizer is SGD"),
        (torch.optim.AdamW(parameters[::-1]), "has 'up.weight' .48, 32. where this one has"),
        (torch.optim.AdamW(parameters[:3]), r"has groups of \[8\] parameters, and this one of \[3\]"),
        (torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}]), "and this one of .3, 5."),
        (torch.optim.AdamW([p.detach().clone() for p in parameters]), "where this one has ''"),
    ):
        refused(saved, sentence, optimizer=optimizer)
    for wrong in (parameters, "adam", model, torch.optim.lr_scheduler):
        with pytest.raises(Unsupported, match=r"takes a torch\.optim\.Optimizer"):
            octavo.load_checkpoint(path, model, wrong)


def test_a_checkpoint_without_an_optimizer_says_so(tmp_path):
    model, optimizer = make()
    octavo.save_checkpoint(tmp_path, model)
    refused((tmp_path, model, optimizer), "was saved without an optimizer", InvalidCheckpoint)


def test_an_optimizer_that_refuses_its_state_leaves_the_model_as_it_was(saved):
    def raises(*_):
        raise RuntimeError("a hook")

    saved[2].register_load_state_dict_pre_hook(raises)
    refused(saved, "a hook", RuntimeError)


# -- no pickle ---------------------------------------------------------------------------------------------------------


PICKLES = {"pickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}


def pickling(source):
    """The lines of a source that write a pickle, or run what one names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and PICKLES & {name.name for name in node.names}:
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module in PICKLES:
            yield node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.save", "torch.load"):
            if not any(ast.unparse(each) == "weights_only=True" for each in node.keywords):
                yield node.lineno


def test_the_package_never_pickles_or_unpickles():
    root = Path(octavo.__file__).parent
    found = [path.name for path in root.rglob("*.py") if any(pickling(path.read_text()))]
    assert found == ["inert_pickle.py"]  # which runs nothing that a pickle names (test_te_checkpoint.py)
    for source in ("x = torch.load(path)", "import pickle", "from pickle import loads", "torch.save(x, path)"):
        assert any(pickling(source)), source
    assert not any(pickling("torch.load(path, weights_only=True)"))
