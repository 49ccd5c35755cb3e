"""`octavo train`: what it prints and writes, what it refuses, and the small things it is made of."""

import io
import json
import math
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import octavo
from octavo.cli import main, train
from octavo.demo import corpus, training
from octavo.demo.gpt import BYTES, GPT, Shape
from octavo.demo.progress import LINES, Progress
from octavo.demo.train_text import gap_text
from octavo.errors import UnsupportedShape
from octavo.recipes import SHIPPED, recipe
from tests.support.demo_runs import trained

SMALL = Shape(width=32, layers=1, heads=2, context=16)


COMMAND = ("train", "--device", "cpu", "--steps", "6", "--batch", "2")
TEXT, HELD_OUT = corpus.load()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """A model and a text of a moment's work."""
    monkeypatch.setitem(training.SIZES, "small", SMALL)
    monkeypatch.setattr(corpus, "load", lambda path=None: (TEXT[:4000], HELD_OUT[:500]))


def test_ends_with_a_table_of_both_runs(capsys):
    assert main(COMMAND) == 0
    printed = capsys.readouterr()
    lines = {line.split("  ")[0]: line.split() for line in printed.out.splitlines() if line}
    assert lines["recipe"] == ["recipe", "loss", "gap", "tokens/s"]
    assert 4 < float(lines["bf16 (torch)"][2]) < 6
    assert 4 < float(lines["fp8-current"][1]) < 6
    assert lines["fp8-current"][2][0] in "+-" and lines["fp8-current"][3] == "±" and lines["fp8-current"][5] == "%"
    assert printed.err.count("bf16 (torch)") == printed.err.count("fp8-current") == LINES


def test_json_has_every_step(tmp_path):
    path = tmp_path / "run.json"
    assert main([*COMMAND, "--recipe", "fp8-block(scale='fp32')", "--seed", "3", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["plan"] == {
        "steps": 6, "batch": 2, "seed": 3, "device": "cpu", "compile": False,
        "shape": {"width": 32, "layers": 1, "heads": 2, "context": 16, "family": "gpt", "mixture": None},
        "data": None, "samples": 0, "every": None, "ranks": None, "codes": False,
    }  # fmt: skip
    (subject,) = report["recipes"]
    assert subject["recipe"] == "fp8-block(scale='fp32')"
    assert report["machine"]["torch"] == torch.__version__
    for run in (report["bf16"], subject):
        assert len(run["losses"]) == 6
        assert run["losses"][0] > run["losses"][-1]
        assert run["tokens_per_s"] > 0 and run["seconds"] > 0 and run["load"] == []
    assert subject["gap_percent"] == pytest.approx(100 * (subject["loss"] / report["bf16"]["loss"] - 1))


def test_several_recipes_and_a_policy_share_one_baseline(tmp_path, capsys):
    path, policy = tmp_path / "run.json", tmp_path / "mine.toml"
    policy.write_text('[[rules]]\nlayers = "*"\nrecipe = "mxfp8"\n')
    command = [*COMMAND, "--recipe", "fp8-block,nvfp4(rht=False,stochastic=False)", "--recipe", "fp8-current"]
    assert main([*command, "--policy", str(policy), "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("bf16 (torch)") == LINES
    report = json.loads(path.read_text())
    names = ["fp8-block", "nvfp4(stochastic=False,rht=False)", "fp8-current", "mine.toml"]
    assert [run["recipe"] for run in report["recipes"]] == names
    assert len({run["loss"] for run in report["recipes"]}) >= 3  # two kinds of blocks are one in so small a model
    for run in report["recipes"]:
        gap = 100 * (run["loss"] / report["bf16"]["loss"] - 1)
        assert run["gap_percent"] == pytest.approx(gap)
        line = next(line for line in printed.out.splitlines() if line.startswith(run["recipe"] + "  "))
        assert gap_text(run) in line
    alone = trained("fp8-current", SMALL, steps=6)
    assert report["recipes"][2]["losses"] == alone.losses and report["recipes"][2]["loss"] == alone.loss


@pytest.mark.parametrize(
    ("gap", "noise", "said"),
    [
        (1.234, 0.056, "+1.23 ± 0.06 %"),
        (-0.001, 0.0042, "+0.00 ± < 0.01 %"),
        (-0.2, 0.005001, "-0.20 ± 0.01 %"),
        (0.0, 0.0, "+0.00 ± 0.00 %"),
        (0.5, None, "+0.50 %"),
        (math.nan, math.nan, "+nan ± nan %"),
    ],
)
def test_a_small_noise_is_not_shown_as_none(gap, noise, said):
    assert gap_text({"gap_percent": gap, "gap_noise_percent": noise}) == said


def test_the_noise_of_a_gap_is_that_of_a_paired_mean():
    def outcome(*windows):
        return training.Outcome("", sum(windows) / len(windows), [], 1.0, 1.0, list(windows))

    base = outcome(1.0, 2.0, 3.0)
    assert training.gap_noise(outcome(1.1, 2.1, 3.1), base) == pytest.approx(0, abs=1e-9)  # all pieces agree
    assert training.gap_noise(outcome(1.0, 2.0, 3.3), base) == pytest.approx(100 * 0.1732 / 3**0.5 / 2, rel=1e-3)
    assert training.gap_noise(outcome(1.0), outcome(1.0)) is None


def test_a_llama_trains_and_its_layers_are_all_converted(tmp_path, capsys):
    path = tmp_path / "run.json"
    assert main([*COMMAND, "--model", "llama", "--size", "128,1,4,16", "--recipe", "mxfp8", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["plan"]["shape"]["family"] == "llama"
    assert all(run["losses"][-1] < run["losses"][0] for run in (report["bf16"], *report["recipes"]))
    model = GPT(training.shape_of("llama", "128,1,4,16"), seed=0)
    made = training.converted(model, recipe("mxfp8"))  # its qkv has 256 outputs, as its head has
    assert [row.path for row in made if row.recipe] == [
        "blocks.0.attention.qkv", "blocks.0.attention.out", "blocks.0.mlp.up", "blocks.0.mlp.down"
    ]  # fmt: skip


@pytest.mark.parametrize("size", ["64,2,4,8", "32, 1, 2, 16"])
def test_a_size_is_a_name_or_four_numbers(size, tmp_path):
    path = tmp_path / "run.json"
    assert main([*COMMAND, "--size", size, "--json", str(path)]) == 0
    shape = json.loads(path.read_text())["plan"]["shape"]
    assert [shape[name] for name in ("width", "layers", "heads", "context")] == [int(n) for n in size.split(",")]


@pytest.mark.parametrize("name", ["fp8-delayed", "nvfp4", None])
def test_samples_change_no_bit_of_a_run(name):
    plan = training.Plan(4, 2, shape=SMALL, samples=2)
    found = training.train(plan, recipe(name) if name else None)
    assert found.losses == trained(name, SMALL).losses and found.loss == trained(name, SMALL).loss
    assert found.kept_mib > 0
    assert [sample["step"] for sample in found.numerics] == ([] if name is None else [2, 4])
    if name == "nvfp4":
        tensors = found.numerics[-1]["layers"]["blocks.0.mlp.down"]
        assert tensors["x"]["underflow"] > 0 and 0.9 < tensors["dw"]["cosine"] < 1


def test_a_model_of_experts_trains(capsys):
    assert main([*COMMAND, "--model", "moe", "--recipe", "fp8-block"]) == 0
    losses, load = capsys.readouterr().out.split("expert load")
    assert "fp8-block" in losses and "fp8-block" in load and "even load: 12.5 %" in load


POLICY = """
[[rules]]
layers = "*.up"
recipe = "none"

[[rules]]
layers = "*.atention"
recipe = "mxfp8"

[[rules]]
layers = "*"
recipe = "fp8-delayed"
wgrad = "bf16"

[[rules]]
layers = "head"
recipe = "bf16"
from_step = 4
"""


@pytest.mark.filterwarnings("error")
def test_a_policy_takes_the_place_of_a_recipe(tmp_path, capsys):
    path, target = tmp_path / "policy.toml", tmp_path / "run.json"
    path.write_text(POLICY.partition('\n[[rules]]\nlayers = "head"')[0])
    assert main([*COMMAND, "--policy", str(path), "--json", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("policy.toml  ") for line in lines) == 1
    assert "1     '*.up': none                    1" in lines
    assert "3     '*': fp8-delayed(wgrad='bf16')  3" in lines
    assert "Rule 2 ('*.atention': mxfp8) decides for no layer: it matches none. Did you mean '*.attention'?" in lines
    report = json.loads(target.read_text())
    policy = report["policies"]["policy.toml"]
    assert policy["layers"] == [1, 0, 3] and policy["rules"][0]["recipe"] == "none"
    (subject,) = report["recipes"]
    assert subject["recipe"] == "policy.toml" and len(subject["losses"]) == 6
    assert [row["recipe"] for row in report["routes"]] == [
        "policy.toml: mxfp8", "policy.toml: fp8-delayed(wgrad='bf16')"
    ]  # fmt: skip


def test_a_policy_that_is_refused_costs_no_run(tmp_path, capsys):
    path = tmp_path / "policy.toml"
    path.write_text(POLICY.replace('"*"', '"blocks"'))
    assert main([*COMMAND, "--policy", str(path)]) == 2
    printed = capsys.readouterr()
    assert "octavo train: convert cannot take head: it would get bf16 at step 4" in printed.err
    assert "loss" not in printed.err


def test_a_policy_that_gives_no_recipe_costs_no_run(tmp_path, capsys):
    path = tmp_path / "policy.toml"
    path.write_text("")
    assert main([*COMMAND, "--policy", str(path)]) == 2
    printed = capsys.readouterr().err
    assert "octavo train: The policy gives no layer a recipe, so there is nothing to compare." in printed
    assert "loss" not in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--policy", "nowhere.toml"], "The policy file nowhere.toml cannot be read: No such file or directory."),
        (["--steps", "0"], "--steps and --batch must be 1 or more, got 0 and 8."),
        (["--batch", "0"], "--steps and --batch must be 1 or more, got 200 and 0."),
        (["--device", "abacus"], "There is no device called 'abacus'. Use cpu or cuda[:index]."),
        (["--json", "nowhere/run.json"], "--json writes into a folder that exists, got nowhere/run.json."),
        (["--size", "tall"], "--size is one of small, medium, large, huge, or width,layers,heads,context such as"),
        (["--size", "8,2"], "--size is one of small, medium, large, huge, or width,layers,heads,context such as"),
        (
            ["--size", "100,2,3,64"],
            "A model has sizes from 1 up and an even number of channels in each head, got width",
        ),
        (["--recipe", "mxfp8,mxfp8"], "mxfp8 was given twice, and would be one line of the table. Leave one out."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_refusal_is_a_sentence(arguments, sentence, capsys):
    assert main(["train", "--device", "cpu", *arguments]) == 2
    assert f"octavo train: {sentence}" in capsys.readouterr().err


def test_an_unknown_recipe_names_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main([*COMMAND, "--recipe", "fp9"])
    assert "There is no recipe 'fp9'. Names: bf16, fp8-block" in capsys.readouterr().err


def test_compiling_without_a_compiler_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(train.shutil, "which", lambda name: None)
    assert main(["train", "--device", "cpu", "--compile"]) == 2
    assert "needs a C++ compiler, and none of g++, clang++, c++ is here. Install one, or" in capsys.readouterr().err


def test_compile_takes_both_runs_whole(monkeypatch):
    """By a compiler that only traces: no code is generated, so that none needs to be here."""
    graphs, compile_ = [], torch.compile

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    monkeypatch.setattr(train.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch, "compile", lambda model, **settings: compile_(model, backend=backend, **settings))
    plan = training.Plan(4, 2, shape=SMALL, compile=True)
    assert training.train(plan, None).losses == pytest.approx(trained(None, SMALL).losses, rel=1e-4)
    whole = len(graphs)
    assert training.train(plan, recipe("fp8-current")).losses == pytest.approx(
        trained("fp8-current", SMALL).losses, rel=1e-4
    )
    assert len(graphs) == 2 * whole
    assert {sum("octavo.run" in name for name in graph) for graph in graphs[whole:]} == {4 * SMALL.layers}


@pytest.mark.parametrize("name", [None, *SHIPPED])
def test_a_seed_fixes_a_run(name):
    first, again, other = trained(name, SMALL), trained(name, SMALL), trained(name, SMALL, seed=1)
    assert first.losses == again.losses
    assert first.loss == again.loss
    assert first.losses[0] != other.losses[0]


def test_every_recipe_starts_from_the_same_weights_and_batches():
    losses = {name: trained(name, SMALL, steps=1).losses[0] for name in (None, *SHIPPED)}
    assert max(losses.values()) / min(losses.values()) < 1.005
    assert len({round(loss, 7) for loss in losses.values()}) > 3  # and each quantizes in its own way


@pytest.mark.filterwarnings("error")
def test_delayed_scaling_is_stepped(monkeypatch):
    """A run that forgot octavo.step would be warned, and its windows would stay empty."""
    models = []
    monkeypatch.setattr(training, "GPT", lambda *given, **more: models.append(GPT(*given, **more)) or models[-1])
    trained("fp8-delayed", SMALL, steps=6)
    windows = [value for key, value in octavo.state_dict(models[0]).items() if key.endswith("history")]
    assert windows and all((window.count_nonzero(1) == 6).all() for window in windows)


# -- the model -------------------------------------------------------------------------------------------------------


def test_a_position_reads_only_those_before_it():
    model, tokens = GPT(SMALL, seed=0), torch.randint(BYTES, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % BYTES
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_attention_knows_the_order():
    model = GPT(SMALL, seed=0)
    there, back = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(there[0, -1], back[0, -1], atol=1e-6)


def test_the_first_loss_is_that_of_a_guess():
    loss = training.loss_of(GPT(Shape(), seed=0), torch.randint(BYTES, (4, 65)), torch.float32)
    assert loss.item() == pytest.approx(torch.tensor(BYTES).log().item(), rel=0.02)


def test_weights_come_from_the_seed_alone():
    weights = []
    for seed, noise in ((5, 0), (5, 1), (6, 0)):
        torch.manual_seed(noise)
        weights.append(torch.cat([p.detach().flatten() for p in GPT(SMALL, seed=seed).parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("sizes", [{"width": 30, "heads": 4}, {"width": 12, "heads": 4}, {"layers": 0}], ids=str)
def test_sizes_without_meaning_are_refused(sizes):
    with pytest.raises(UnsupportedShape, match="an even number of channels in each head, got width"):
        Shape(**sizes)


# -- the text --------------------------------------------------------------------------------------------------------


def test_the_book_is_clean_and_all_there():
    book = bytes(torch.cat([TEXT, HELD_OUT]).tolist()).decode("ascii")
    assert book.strip().startswith("ALICE'S ADVENTURES IN WONDERLAND") and book.strip().endswith("THE END")
    assert book.count("CHAPTER ") == 12
    assert set(book) <= set(map(chr, range(32, 127))) | {"\n"}
    assert not any(word in book.lower() for word in ("gutenberg", "copyright", "license", "edition"))
    assert len(HELD_OUT) == pytest.approx(0.1 * len(book), abs=1)


def test_batches_are_pieces_of_the_text_shifted_by_one():
    text = torch.arange(200, dtype=torch.uint8)
    found = list(corpus.batches(text, steps=50, batch=4, context=10, seed=0))
    assert len(found) == 50
    for batch in found:
        assert batch.shape == (4, 11) and batch.dtype == torch.int64
        assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)
    every = torch.cat(found)
    assert every.min() == 0 and every.max() == 199  # both ends are reached


def test_windows_predict_each_byte_once():
    found = corpus.windows(torch.arange(100, dtype=torch.uint8), context=9)
    assert found[:, 1:].flatten().tolist() == list(range(1, 100))


def test_a_context_longer_than_the_text_is_refused():
    for call in (
        lambda t: corpus.windows(t, context=20),
        lambda t: next(corpus.batches(t, steps=1, batch=1, context=20, seed=0)),
    ):
        with pytest.raises(UnsupportedShape, match="shorter than its text of 20 bytes, got 20"):
            call(torch.zeros(20, dtype=torch.uint8))


def data_file(folder, content):
    path = folder / "mine.txt"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "text", ["A line of text.\n" * 40, "日本語のテキスト。\n" * 40, "caf\xe9\n\t" * 100], ids=["", "ja", "fr"]
)
def test_any_text_can_be_trained_on(text, tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    path = data_file(tmp_path, text.encode("latin-1" if "\xe9" in text else "utf-8"))
    assert main([*COMMAND, "--size", "32,1,2,16", "--data", str(path), "--html", str(tmp_path / "page.html")]) == 0
    assert "fp8-current" in capsys.readouterr().out and str(path) in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "--data cannot read FILE: No such file or directory. Name a file of text, or leave --data out for the"),
        (b"", "--data FILE is empty. Name a file of text."),
        (b"short", "--data FILE has 5 bytes, and a context of 16 needs 171: its last tenth is held out. Take a longer"),
        (b"\x7fELF\0\0\1" * 100, "--data FILE is no text: 300 of its first 700 bytes are control codes. Name a file"),
        ("utf-16 " .encode("utf-16") * 100, "--data FILE is no text: "),
    ],
    ids=["missing", "empty", "short", "binary", "utf-16"],
)  # fmt: skip
def test_a_file_that_is_no_text_is_a_sentence(content, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    path = tmp_path / "mine.txt" if content is None else data_file(tmp_path, content)
    assert main([*COMMAND, "--size", "32,1,2,16", "--data", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"octavo train: {sentence.replace('FILE', str(path))}" in said and "loss" not in said


def test_a_folder_is_no_text(tmp_path, capsys, monkeypatch):
    monkeypatch.undo()
    assert main([*COMMAND, "--data", str(tmp_path)]) == 2
    assert f"--data reads one file of text, got the folder {tmp_path}. Name a file in it." in capsys.readouterr().err


def test_a_long_text_holds_a_bounded_part_out(tmp_path, monkeypatch):
    monkeypatch.undo()
    text, held_out = corpus.load(str(data_file(tmp_path, b"0123456789abcde\n" * 2**19)))
    assert len(held_out) == corpus.MOST_HELD_OUT and len(text) == 2**23 - corpus.MOST_HELD_OUT


# -- the clock ------------------------------------------------------------------------------------------------------


@pytest.fixture
def now(monkeypatch):
    """The time, to be set."""
    found = [0.0]
    monkeypatch.setattr(training.time, "perf_counter", lambda: found[0])
    return found


def test_a_clock_leaves_the_first_step_and_samples_out_of_its_rates(now):
    clock = training.Clock(training.Plan(4, 2, shape=SMALL))  # 32 bytes a step
    for step, seconds in enumerate((100.0, 1.0, 2.0, 2.0), start=1):
        now[0] += seconds
        clock.tick(step)
        if step > 1:
            with clock.stopped():
                now[0] += 1000.0
    assert clock.so_far() == pytest.approx(3 * 32 / 5)
    assert clock.first == 100 and clock.ended == 105 and clock.rate() == pytest.approx(2 * 32 / 4)
    saved, later = clock.times(), training.Clock(training.Plan(4, 2, shape=SMALL))
    later.go_on(saved)
    assert later.first == 100 and later.ended == 105


def test_the_time_left_is_that_of_steps_without_the_first_and_pauses(now):
    clock = training.Clock(training.Plan(10, 2, shape=SMALL))
    said = []
    for step, seconds in enumerate((100.0, 2.0, 2.0), start=1):
        now[0] += seconds
        clock.tick(step)
        said.append(clock.text(step))
        with clock.stopped():
            now[0] += 1000.0
    assert said == ["100 s, 900 s left", "102 s, 16 s left", "104 s, 14 s left"]
    assert clock.text(10) == "104 s"


def test_the_time_left_of_a_resumed_run_counts_only_its_own_steps(now):
    clock = training.Clock(training.Plan(100, 2, shape=SMALL))
    clock.go_on({"first": 1.0, "middle": 500.0, "seconds": 900.0})
    for step, seconds in ((91, 30.0), (92, 2.0)):
        now[0] += seconds
        clock.tick(step)
    assert clock.text(92) == "932 s, 16 s left"


def test_a_run_stops_its_clock_while_tensors_are_sampled(monkeypatch):
    stopped = []
    monkeypatch.setattr(training.Clock, "stopped", lambda self: nullcontext(stopped.append(self)))
    training.train(training.Plan(4, 2, shape=SMALL, samples=2), recipe("mxfp8"))
    assert len(stopped) == 2


# -- progress --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Stderr is a terminal."""
    found = Terminal()
    monkeypatch.setattr("octavo.demo.progress.sys", SimpleNamespace(stderr=found))
    return found


@pytest.fixture
def stream(terminal, monkeypatch):
    """Stderr is a terminal, and rich is not installed."""
    monkeypatch.setitem(sys.modules, "rich", None)
    return terminal


@pytest.mark.parametrize("total", [1, 2, 3, 4, 7, 200])
def test_a_file_gets_a_few_lines(total, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    progress = Progress("bf16", total)
    for step in range(1, total + 1):
        if progress.due(step):
            progress.show(step, "loss 1.000")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == min(total, LINES)
    assert lines[-1].startswith(f"bf16  {total}/{total}  loss 1.000")
    assert "\r" not in stream.getvalue()


def test_a_terminal_gets_one_line_rewritten(stream, now):
    progress = Progress("bf16", 100)
    shown = []
    for step in range(1, 101):
        now[0] += 0.03
        if progress.due(step):
            shown.append(step)
            progress.show(step, "loss 1.000")
    progress.close()
    assert shown[:3] == [1, 5, 9] and shown[-1] == 100
    assert stream.getvalue().count("\r") == len(shown)
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().endswith("\n")


@pytest.mark.parametrize("steps", [3, 10, 0])
def test_progress_that_stops_early_ends_its_line(steps, stream, now):
    """Text after it begins on a line of its own."""
    progress = Progress("bf16", 10)
    for step in range(1, steps + 1):
        progress.show(step, "loss 1.000")
    progress.close()
    progress.close()
    assert stream.getvalue().endswith("loss 1.000\n" if steps else "") and stream.getvalue().count("\n") == (steps > 0)


def test_a_terminal_with_rich_gets_its_bar(terminal):
    pytest.importorskip("rich")
    progress = Progress("bf16 [x]", 3)
    assert terminal.getvalue() == "", "nothing is drawn before the first step"
    for step in range(1, 4):
        progress.show(step, f"loss {step}.000")
    progress.close()
    assert all(text in terminal.getvalue() for text in ("bf16 [x]", "loss 3.000", "3/3"))


@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_page_is_written_and_named(where, tmp_path, capsys):
    target = tmp_path / "page.html" if where == "file" else tmp_path / "run" / "report.html"
    options = ["--html", str(target)] if where == "file" else ["--out", str(target.parent)]
    assert main(["train", "--steps", "2", "--batch", "1", "--device", "cpu", *options]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"The page of this report is {target}.")
    text = target.read_text()
    assert "fp8-current" in text and text.count("<polyline") == 3 and "reference" in text
