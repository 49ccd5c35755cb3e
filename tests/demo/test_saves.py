"""`octavo train --out DIR --resume`: Ctrl-C saves, and the resumed runs have every bit of uninterrupted ones."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from octavo.checkpoints import tensor_file
from octavo.cli import main
from octavo.demo import corpus, training
from octavo.demo.gpt import GPT, Shape

SMALL = Shape(width=32, layers=1, heads=2, context=16)
STEPS = 6
COMMAND = ("train", "--device", "cpu", "--steps", str(STEPS), "--batch", "2")
TEXT, HELD_OUT = corpus.load()
SAVED = ("model.safetensors", "recipe.safetensors", "optimizer.safetensors")  # the run's own file has times


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """A model and a text of a moment's work, and Ctrl-C as Python has it."""
    monkeypatch.setitem(training.SIZES, "small", SMALL)
    monkeypatch.setattr(corpus, "load", lambda path=None: (TEXT[:4000], HELD_OUT[:500]))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pressing(monkeypatch, *calls):
    """Presses Ctrl-C in these calls of the loss, which count from 1: six steps and two evaluations a run."""
    loss_of, count = training.loss_of, [0]

    def counted(*args, **settings):
        count[0] += 1
        if count[0] in calls:
            signal.raise_signal(signal.SIGINT)
        return loss_of(*args, **settings)

    monkeypatch.setattr(training, "loss_of", counted)
    return lambda: monkeypatch.setattr(training, "loss_of", loss_of)


def steps_in(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("step-"))


def report(path):
    found = json.loads(path.read_text())
    kept = ("recipe", "loss", "losses", "windows", "numerics", "kept_mib")
    return [{k: run[k] for k in kept} for run in (found["bf16"], *found["recipes"])]


def assert_same_runs(first, second):
    runs = [name for name in os.listdir(second) if (second / name).is_dir()]
    assert len(runs) > 1
    for run in runs:
        for name in SAVED:
            last = f"{run}/step-{STEPS:06d}/{name}"
            assert (first / last).read_bytes() == (second / last).read_bytes(), last


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the report of an uninterrupted command, by its options."""
    known = {}

    def run(*options):
        if options not in known:
            folder = tmp_path_factory.mktemp("whole")
            assert main([*COMMAND, *options, "--out", str(folder), "--json", str(folder / "run.json")]) == 0
            known[options] = folder, report(folder / "run.json")
        return known[options]

    return run


MIXTURE = "nvfp4 --model moe"
WHEN = [(recipe, pressed) for recipe in ("bf16", "fp8-delayed", "nvfp4", MIXTURE) for pressed in (3, 10)]
WHEN += [("fp8-delayed", pressed) for pressed in (1, 6, 7, 14)]  # at both ends of a run, and in the evaluation


@pytest.mark.parametrize(("recipe", "pressed"), WHEN)
def test_an_interrupted_and_resumed_command_has_every_bit(recipe, pressed, whole, monkeypatch, tmp_path, capsys):
    options = ("--recipe", *recipe.split())
    folder, wanted = whole(*options)
    command = [*COMMAND, *options, "--out", str(tmp_path / "out"), "--json", str(tmp_path / "run.json")]
    restore = pressing(monkeypatch, pressed)
    assert main(command) == 130
    restore()
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo train: interrupted. The results so far were written to")
    assert f"The run is saved in {tmp_path / 'out'}. To go on with it: octavo train " in line
    again = shlex.split(line.partition("To go on with it: ")[2])
    assert again[0] == "octavo" and again[-1] == "--resume"
    assert main(again[1:]) == 0
    assert report(tmp_path / "run.json") == wanted
    assert_same_runs(tmp_path / "out", folder)


@pytest.mark.parametrize("pressed", [3, 10, 19])  # in the baseline, in the first recipe, in the second
def test_several_recipes_resume_with_every_bit(pressed, whole, monkeypatch, tmp_path, capsys):
    options = ("--recipe", "fp8-delayed", "--recipe", "nvfp4(rht=False,stochastic=True)")
    folder, wanted = whole(*options)
    restore = pressing(monkeypatch, pressed)
    assert main([*COMMAND, *options, "--out", str(tmp_path / "out"), "--json", str(tmp_path / "run.json")]) == 130
    restore()
    *_, line = capsys.readouterr().err.splitlines()
    again = shlex.split(line.partition("To go on with it: ")[2])
    assert main(again[1:]) == 0
    assert report(tmp_path / "run.json") == wanted
    assert_same_runs(tmp_path / "out", folder)
    assert sorted(name for name in os.listdir(folder) if (folder / name).is_dir()) == [
        "bf16", "fp8-delayed", "nvfp4-rht-false"
    ]  # fmt: skip


def test_a_new_recipe_starts_beside_the_runs_of_a_folder(whole, tmp_path):
    folder, wanted = whole("--recipe", "fp8-delayed")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    command = [*COMMAND, "--recipe", "fp8-delayed,bf16", "--out", str(copy), "--resume"]
    assert main([*command, "--json", str(tmp_path / "a")]) == 0
    found = report(tmp_path / "a")
    assert found[:2] == wanted and found[2]["recipe"] == "bf16" and len(found[2]["losses"]) == STEPS
    assert steps_in(copy / "bf16-2") == [f"step-{STEPS:06d}"]


def test_interrupted_again_and_again(whole, monkeypatch, tmp_path):
    folder, wanted = whole("--recipe", "fp8-delayed")
    command = [*COMMAND, "--recipe", "fp8-delayed", "--out", str(tmp_path), "--json", str(tmp_path / "run.json")]
    for attempt in range(30):
        restore = pressing(monkeypatch, 2 if attempt % 2 else 1)
        more = ["--resume"] if attempt else []
        code = main([*command, *more])
        restore()
        if steps_in(tmp_path / "bf16")[-1:] == [f"step-{STEPS:06d}"]:
            break
        assert code == 130
    assert main([*command, "--resume"]) == 0
    assert report(tmp_path / "run.json") == wanted
    assert_same_runs(tmp_path, folder)


def test_a_finished_command_resumes_to_the_same_table(whole, tmp_path):
    folder, wanted = whole("--recipe", "fp8-delayed")
    assert (
        main([*COMMAND, "--recipe", "fp8-delayed", "--out", str(folder), "--resume", "--json", str(tmp_path / "a")])
        == 0
    )
    assert report(tmp_path / "a") == wanted
    seconds = [json.loads(path.read_text())["recipes"][0]["seconds"] for path in (folder / "run.json", tmp_path / "a")]
    assert seconds[1] == pytest.approx(seconds[0], abs=0.5)


def test_the_weights_are_those_of_the_stock_model(whole):
    folder, _ = whole("--recipe", "fp8-delayed")
    weights = load_file(folder / "fp8-delayed/step-000006/model.safetensors")
    assert GPT(SMALL, seed=1, plain=True).load_state_dict(weights, strict=True)


def test_the_second_ctrl_c_stops_at_once(monkeypatch, tmp_path, capsys):
    loss_of = training.loss_of

    def pressed_twice(*args, **settings):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        return loss_of(*args, **settings)

    monkeypatch.setattr(training, "loss_of", pressed_twice)
    assert main([*COMMAND, "--out", str(tmp_path)]) == 130
    assert f"Nothing was saved to {tmp_path} yet." in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("every", "kept"), [("2", [2, 4, 6]), ("4", [4, 6]), ("9", [6])])
def test_save_every(every, kept, tmp_path):
    assert main([*COMMAND, "--out", str(tmp_path), "--save-every", every]) == 0
    for run in ("bf16", "fp8-current"):
        assert steps_in(tmp_path / run) == [f"step-{step:06d}" for step in kept]


def test_before_the_first_step_there_is_nothing_to_resume(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(training, "GPT", lambda *args, **more: signal.raise_signal(signal.SIGINT))
    assert main([*COMMAND, "--out", str(tmp_path)]) == 130
    assert f"Nothing was saved to {tmp_path} yet." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--resume"], "--resume needs the folder of the run. Pass --out DIR too."),
        (["--save-every", "3"], "--save-every needs the folder of the run. Pass --out DIR too."),
        (["--out", "DONE"], "--out DONE has checkpoints already. Pass --resume to go on with them, or name"),
        (["--out", "NEW", "--resume"], "--resume goes on with a run, and NEW has no complete checkpoint. Leave it out"),
        (["--out", "FILE"], "--out cannot be written to FILE: File exists. Name another folder."),
        (["--out", "DONE", "--resume", "--seed", "3"], "The run in DONE/bf16 has --seed 0, got 3. Resume it with"),
        (["--out", "DONE", "--resume", "--steps", "9"], "The run in DONE/bf16 has --steps 6, got 9. Resume it with"),
        (["--out", "DONE", "--resume", "--model", "moe"], "The run in DONE/bf16 has --model gpt, got moe."),
        (
            ["--out", "DONE", "--resume", "--size", "32,2,2,16"],
            "The run in DONE/bf16 has --size width 32, layers 1, heads 2, context 16, got width 32, layers 2",
        ),
        (["--out", "DONE", "--resume", "--data", "TEXT"], "The run in DONE/bf16 has --data the book, got TEXT."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_refusal_is_a_sentence(options, sentence, whole, tmp_path, capsys):
    folder, _ = whole("--recipe", "fp8-delayed")
    (tmp_path / "file").write_text("")
    places = {"DONE": str(folder), "NEW": str(tmp_path / "new"), "FILE": str(tmp_path / "file"), "TEXT": __file__}
    for word, place in places.items():
        sentence = sentence.replace(word, place)
    before = steps_in(folder / "bf16")
    recipe = [] if "--recipe" in options else ["--recipe", "fp8-delayed"]
    assert main([*COMMAND, *recipe, *[places.get(option, option) for option in options]]) == 2
    assert f"octavo train: {sentence}" in capsys.readouterr().err
    assert steps_in(folder / "bf16") == before


def test_a_full_disk_is_a_sentence(monkeypatch, tmp_path, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "write", full)
    assert main([*COMMAND, "--out", str(tmp_path)]) == 2
    assert f"--out cannot be written to {tmp_path / 'bf16'}: No space left" in capsys.readouterr().err
    assert os.listdir(tmp_path / "bf16") == []


def test_a_damaged_checkpoint_is_a_sentence(monkeypatch, tmp_path, capsys):
    assert main([*COMMAND, "--out", str(tmp_path)]) == 0
    path = tmp_path / "bf16/step-000006/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main([*COMMAND, "--out", str(tmp_path), "--resume"]) == 2
    assert f"octavo train: {path} is damaged or no file of a checkpoint: its SHA-256" in capsys.readouterr().err


@pytest.mark.parametrize("resume", [(), ("--resume",)], ids=["anew", "resumed"])
@pytest.mark.parametrize("every", ["4", "6"])
def test_a_run_does_not_pass_a_checkpoint_that_it_could_not_save_again(every, resume, tmp_path, capsys):
    assert main([*COMMAND, "--out", str(tmp_path), "--save-every", every]) == 0
    short = tmp_path / "fp8-current/step-000006/model.safetensors"
    os.truncate(short, 100)
    capsys.readouterr()
    assert main([*COMMAND, "--out", str(tmp_path), "--save-every", every, *resume]) == 2
    said = capsys.readouterr().err
    assert f"octavo train: {short} is damaged or no file of a checkpoint: the file was written with" in said
    start = "step-000004" if every == "4" else "its beginning"
    assert said.endswith(f"To go on with {start}, remove the newer folders in {tmp_path / 'fp8-current'}.\n")


def test_ctrl_c_in_a_process_saves(tmp_path):
    command = [sys.executable, "-m", "octavo", "train", "--device", "cpu", "--steps", "40", "--batch", "1"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "a b")], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert "10/40" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert "Saving after this step. Ctrl-C again stops without saving." in err
    (step,) = steps_in(tmp_path / "a b/bf16")
    assert 10 <= int(step.removeprefix("step-")) <= 40
    *_, line = err.splitlines()
    assert line.endswith(f"octavo train --device cpu --steps 40 --batch 1 --out '{tmp_path}/a b' --resume")
