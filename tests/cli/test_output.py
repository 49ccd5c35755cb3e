"""The output of a command: a file written whole or not at all, the results so far after Ctrl-C, no traceback."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import octavo
from octavo.cli import bench, doctor, explain_command, main, output, train
from octavo.cli.bench import block_bench, host_bench
from octavo.cli.commands import COMMANDS, make_parser
from octavo.demo import training
from octavo.demo.gpt import Shape
from octavo.errors import Unsupported
from octavo.recipes import SHIPPED

ROOT = Path(octavo.__file__).parents[1]
SUITES = {name: bench.suite_of(name) for name in bench.SUITES if name not in ("block", "host")}


@pytest.fixture(autouse=True)
def _ctrl_c_raises():
    """Whatever started the tests may have Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def parsed(*words):
    """The arguments of a command line."""
    return make_parser(octavo.__version__).parse_args(words)


def press_ctrl_c(*args, **settings):
    signal.raise_signal(signal.SIGINT)


def said(capsys):
    """(printed, the one line of the command on stderr)"""
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("octavo")]
    assert len(lines) == 1 and "Traceback" not in printed.err
    return printed.out, lines[0]


def after(calls, function, then=press_ctrl_c):
    """The function, until it was called that often."""
    left = [calls]

    def counted(*args, **settings):
        left[0] -= 1
        if left[0] < 0:
            then()
        return function(*args, **settings)

    return counted


# -- real processes ---------------------------------------------------------------------------------------------------


def start(*arguments, **settings):
    # a shell starts background processes with Ctrl-C ignored, and processes of theirs inherit it
    return subprocess.Popen(
        [sys.executable, "-m", "octavo", *arguments], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **settings,
    )  # fmt: skip


def test_ctrl_c_in_a_process_keeps_the_losses_so_far(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("old")
    process = start(
        "train", "--device", "cpu", "--steps", "40", "--batch", "1", "--json", str(path), stdout=subprocess.PIPE
    )
    first = process.stderr.readline()
    assert "10/40" in first and path.read_text() == "old"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    *_, last = err.splitlines()
    assert last == f"octavo train: interrupted. The results so far were written to {path} and printed."
    assert "Traceback" not in err
    report = json.loads(path.read_text())
    assert report["interrupted"] is True
    run = report["recipe"] if "recipe" in report else report["bf16"]
    assert run["loss"] is None and 10 <= len(run["losses"]) <= 40
    assert f"was interrupted after step {len(run['losses'])}" in out
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_reader_that_goes_away_is_no_error():
    read, write = os.pipe()
    os.close(read)
    process = start("doctor", "--device", "cpu", stdout=write)
    os.close(write)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 141


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_doctor_prints_the_recipes_it_has_checked(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "probe", after(2, doctor.probe))
    assert main(["doctor", "--device", "cpu"]) == 130
    out, line = said(capsys)
    assert "\nfp8-delayed " in out and "\nfp8-current " not in out
    assert f"Interrupted: 2 of {len(SHIPPED)} recipes were checked" in out and "All " not in out
    assert line == "octavo doctor: interrupted. The results so far were printed."


def test_an_interrupted_doctor_prints_the_recipes_checked_as_json(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "probe", after(1, doctor.probe))
    assert main(["doctor", "--device", "cpu", "--json"]) == 130
    report = json.loads(said(capsys)[0])
    assert list(report["recipes"]) == ["bf16"] and report["interrupted"] is True


def test_ctrl_c_inside_of_a_probe_is_no_failed_probe(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gemm", after(4, doctor.gemm))
    assert main(["doctor", "--device", "cpu"]) == 130
    out, _ = said(capsys)
    assert "failed" not in out and f"Interrupted: 1 of {len(SHIPPED)}" in out


@pytest.fixture
def small(monkeypatch):
    text, held_out = train.corpus.load()
    monkeypatch.setitem(training.SIZES, "small", Shape(width=32, layers=1, heads=2, context=16))
    monkeypatch.setattr(train.corpus, "load", lambda path=None: (text[:4000], held_out[:500]))


@pytest.mark.parametrize(
    ("losses", "kept"),
    [(0, None), (1, [1]), (5, [4]), (9, [4, 3]), (11, [4, 4])],
)
def test_train_keeps_every_step(losses, kept, small, monkeypatch, tmp_path, capsys):
    """Four steps a run, and two batches of evaluation after each."""
    path = tmp_path / "run.json"
    path.write_text("old")
    monkeypatch.setattr(training, "loss_of", after(losses, training.loss_of))
    assert main(["train", "--device", "cpu", "--steps", "4", "--batch", "2", "--json", str(path)]) == 130
    out, line = said(capsys)
    if kept is None:
        assert line == f"octavo train: interrupted. There were no results yet. {path} was not written."
        assert path.read_text() == "old" and out == ""
        return
    report = json.loads(path.read_text())
    runs = [report["bf16"], *report.get("recipes", [])]
    assert [len(run["losses"]) for run in runs] == kept
    assert report["interrupted"] is True and "gap_percent" not in runs[-1]
    assert all(loss > 0 for run in runs for loss in run["losses"])
    assert "was interrupted after step" in out
    assert ("bf16 (torch)  4." in out or "bf16 (torch)  5." in out) == (len(runs) > 1), "a run that ended has its row"


def test_explain_says_that_nothing_was_written(monkeypatch, tmp_path, capsys):
    (tmp_path / "pressed.py").write_text("import signal\ndef f():\n    signal.raise_signal(signal.SIGINT)\n")
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "pressed:f", "--json", "report.json"]) == 130
    assert said(capsys) == ("", "octavo explain: interrupted. Nothing was written.")
    assert not (tmp_path / "report.json").exists()


def test_bench_block_keeps_its_rows(monkeypatch, tmp_path, capsys):
    path = tmp_path / "block.json"
    row = {"eager_ms": 1.0, "ms": 2.0, "compile_s": 1.0, "peak_mib": None, "eager_peak_mib": None}
    monkeypatch.setattr(block_bench, "_case", after(2, lambda name, *_: {"case": name, **row}))
    command = ["bench", "block", "--device", "cpu", "--size", "tiny", "--no-peers", "--json", str(path)]
    assert main(command) == 130
    out, line = said(capsys)
    report = json.loads(path.read_text())
    assert [r["case"] for r in report["results"]] == ["bf16", "octavo fp8-delayed"]
    assert (report["host"], report["interrupted"]) == ([], True)
    assert "\nocta" in out and "reduce-overhead" not in out
    assert line.endswith(f"were written to {path} and printed.")


class OnTheCpu(TorchFunctionMode):
    """A GPU's tensors, made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*[("cpu" if arg == "cuda" else arg) if isinstance(arg, str) else arg for arg in args], **kwargs)


ARGUMENTS = {
    "quantize": ["--rows", "128", "--columns", "128"],
    "linear": ["--shape", "16,32,32", "--shape", "16,32,64", "--recipes", "fp8-block", "--no-peers"],
    "grouped": ["--shape", "2,256,128,128", "--recipes", "bf16,fp8-block", "--no-peers"],
    "grouped-gemms": ["--shape", "2,256,128,128", "--shape", "3,256,128,128", "--recipes", "bf16,fp8-block"],
    "mlp": ["--shape", "16,32,64", "--recipes", "fp8-block", "--no-peers"],
    "moe": ["--shape", "16,4,2,32,64", "--recipes", "fp8-block", "--no-peers"],
    "model": ["--device", "cpu", "--size", "tiny", "--recipes", "fp8-block", "--no-peers"],
    "permute": ["--shape", "16,4,2,32"],
    "host": ["--recipes", "fp8-block", "--no-peers"],
}


@pytest.fixture
def measured(monkeypatch):
    """A suite run without a GPU: every reading is 1, and Ctrl-C comes at the n-th. Returns how many there were."""

    def run(name, n, target):
        readings = [0]

        def read(value):
            def reading(*args, **settings):
                readings[0] += 1
                if readings[0] - 1 == n:
                    press_ctrl_c()
                return value

            return reading

        names = ("as it is", "one thread", "one core")
        timers = {
            "device_ms": (1.0, [1.0]), "copy_ms": (1.0, [1.0]), "eager_ms": (1.0, [1.0]), "host_us": 1.0,
            "hosts_us": dict.fromkeys(names, 1.0),
            "peak_mib": 1.0, "_memory": {"saved_mib": 1.0, "peak_mib": 1.0}, "kept_mib": 1.0,
            "kernels_ms": [{"kernel": "k", "calls": 1.0, "ms": 1.0}],
            "step_ms": (1.0, [1.0]), "step_seconds": 1.0,
        }  # fmt: skip
        for module in SUITES.values():
            for timer, value in timers.items():
                if hasattr(module, timer):
                    monkeypatch.setattr(module, timer, read(value))
            if hasattr(module, "calibrated_step"):
                monkeypatch.setattr(module, "calibrated_step", lambda *args: lambda: None)
        monkeypatch.setattr(host_bench, "training_step", lambda *args: lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        facts = {"gpu": "a GPU", "torch": "2", "triton": "3"}
        monkeypatch.setattr("octavo.cli.machine.describe", lambda device: facts)
        monkeypatch.setattr("octavo.cli.machine.parse_device", torch.device)
        arguments = parsed("bench", name, *ARGUMENTS[name], "--json", target)
        with OnTheCpu():
            output.produce(partial(bench.measure, arguments), bench.render, target)
        return readings[0]

    return run


def is_part(part, whole):
    """Whether an interrupted report has the beginning of a whole one's lists, and of its dicts, and nothing else."""
    if isinstance(whole, dict):
        return part.keys() <= whole.keys() and all(is_part(part[key], whole[key]) for key in part)
    if isinstance(whole, list):
        return len(part) <= len(whole) and all(map(is_part, part, whole))
    return part == whole or part is None


@pytest.mark.parametrize("name", SUITES)
def test_a_bench_keeps_its_rows_wherever_it_is_interrupted(name, measured, tmp_path, capsys):
    total = measured(name, -1, str(tmp_path / "whole.json"))
    whole, text = json.loads((tmp_path / "whole.json").read_text()), capsys.readouterr().out
    assert "interrupted" not in whole and total >= 8
    kept = 0
    for n in range(total):
        path = tmp_path / f"{n}.json"
        with pytest.raises(output.Interrupted) as stop:
            measured(name, n, str(path))
        printed = capsys.readouterr().out
        if path.exists():
            part = json.loads(path.read_text())
            assert part.pop("interrupted") is True
            assert is_part(part, whole)
            assert printed and len(printed) <= len(text)
            kept += 1
        else:
            assert printed == "" and str(stop.value).endswith("was not written.")
    assert kept >= total // 3


def test_a_second_ctrl_c_does_not_cut_the_writing(monkeypatch, tmp_path, capsys):
    path = tmp_path / "report.json"
    write = output.write
    monkeypatch.setattr(output, "write", lambda *args: (press_ctrl_c(), write(*args), press_ctrl_c()))

    def fill(report):
        report["rows"] = [1]
        press_ctrl_c()

    with pytest.raises(output.Interrupted, match=r"were written to .*report.json and printed\."):
        output.produce(fill, lambda report: "a row", str(path))
    assert json.loads(path.read_text()) == {"rows": [1], "interrupted": True}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


def test_a_report_is_made_in_any_thread(tmp_path):
    path = tmp_path / "report.json"
    made = []
    call = partial(output.produce, lambda report: report.update(rows=1), lambda report: "", str(path))
    thread = threading.Thread(target=lambda: made.append(call()))
    thread.start()
    thread.join()
    assert made == [{"rows": 1}] == [json.loads(path.read_text())]


# -- the file of --json -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_work(monkeypatch):
    def work(*args, **settings):
        pytest.fail("the work began")

    for module, name in ((train, "compare"), (block_bench, "measure"), (explain_command, "loaded")):
        monkeypatch.setattr(module, name, work)


WRITING = {
    "train": ["train", "--device", "cpu"],
    "bench": ["bench", "block", "--device", "cpu", "--size", "tiny"],
    "explain": ["explain", "nowhere:f"],
}
PLACES = {
    "missing folder": ("missing/report.json", "--json writes into a folder that exists, got"),
    "a folder": ("folder", "--json writes a file, got the folder"),
    "a file as folder": ("file/report.json", "--json writes into a folder that exists, got"),
    "a long name": ("x" * 300, "File name too long. Name another file."),
    "nothing": ("", "--json writes a file, got the folder"),
    "a link to a missing folder": ("link", "Name another file."),
}


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("place", PLACES)
def test_an_unwritable_file_is_found_before_the_work(place, command, no_work, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "missing" / "report.json")
    before = sorted(os.listdir(tmp_path))
    monkeypatch.chdir(tmp_path)
    target, sentence = PLACES[place]
    assert main([*WRITING[command], "--json", target]) == 2
    out, line = said(capsys)
    assert out == "" and sentence in line and line.startswith(f"octavo {command}: ")
    assert sorted(os.listdir(tmp_path)) == before and (tmp_path / "file").read_text() == "old"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a folder in which not even root can make a file")
def test_a_folder_that_takes_no_files_is_found_before_the_work(no_work, capsys):
    assert main([*WRITING["train"], "--json", "/proc/report.json"]) == 2
    assert "--json cannot be written to /proc/report.json: " in said(capsys)[1]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_missing_permission_is_found_before_the_work(what, no_work, tmp_path, monkeypatch, capsys):
    """As a user without rights; root may write anything."""
    path = tmp_path / "report.json"
    path.write_text("old")
    path.chmod(0o444)
    if os.geteuid() == 0:
        monkeypatch.setattr(output.os, "access", lambda path, mode: what != "file")
    if what == "folder":
        path.chmod(0o644)
        tmp_path.chmod(0o555)
        if os.geteuid() == 0:
            unsupported_reason = partial(os.open, "/proc/none", os.O_CREAT)
            monkeypatch.setattr(output.tempfile, "TemporaryFile", lambda dir: unsupported_reason())
    try:
        assert main([*WRITING["train"], "--json", str(path)]) == 2
    finally:
        tmp_path.chmod(0o755)
    assert "Name another file." in said(capsys)[1]
    assert path.read_text() == "old"


def test_a_check_changes_nothing(tmp_path):
    path, fresh = tmp_path / "report.json", tmp_path / "fresh.json"
    path.write_text("old")
    before = path.stat()
    output.check(str(path))
    output.check(str(fresh))
    output.check("-")
    assert path.stat() == before and os.listdir(tmp_path) == ["report.json"]


def test_work_that_fails_leaves_the_old_file(small, monkeypatch, tmp_path):
    path = tmp_path / "run.json"
    path.write_text("old")

    def fail():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(training, "loss_of", after(3, training.loss_of, fail))
    with pytest.raises(RuntimeError, match="out of memory"):
        main(["train", "--device", "cpu", "--steps", "4", "--json", str(path)])
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["run.json"]


def test_a_write_that_fails_leaves_the_old_file_and_prints_the_text(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.json"
    path.write_text("old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output.os, "replace", full)
    with pytest.raises(Unsupported, match=r"could not be written to .*: No space left on device\. Name another"):
        output.deliver({"rows": 1}, "a table", str(path))
    assert capsys.readouterr().out == "a table\n"
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["run.json"]


def test_a_file_is_replaced_behind_its_link_and_keeps_its_mode(tmp_path):
    (tmp_path / "there").mkdir()
    path, link = tmp_path / "there" / "report.json", tmp_path / "link"
    path.write_text("old, and longer than what is new")
    path.chmod(0o640)
    link.symlink_to(path)
    output.write(link, "new")
    assert path.read_text() == "new" and link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_new_file_has_the_mode_of_any_other(tmp_path):
    (tmp_path / "other").write_text("")
    output.write(tmp_path / "report.json", "new")
    assert (tmp_path / "report.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_pipe_and_a_device_are_written_to(tmp_path):
    read, write = os.pipe()
    with os.fdopen(read) as pipe:
        output.check(f"/dev/fd/{write}")
        output.deliver({"rows": 1}, "", f"/dev/fd/{write}")
        os.close(write)
        assert json.load(pipe) == {"rows": 1}
    output.check("/dev/null")
    output.deliver({"rows": 1}, "", "/dev/null")
    assert not os.path.isfile("/dev/null")


def test_json_is_printed_instead_of_the_table(small, capsys):
    assert main(["train", "--device", "cpu", "--steps", "2", "--batch", "1", "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["recipes"][0]["losses"]) == 2
    assert not os.path.exists("-")


# -- arguments --------------------------------------------------------------------------------------------------------


def test_the_bare_command_prints_its_help(capsys):
    assert main([]) == 2
    printed = capsys.readouterr().err
    assert all(re.search(rf"\n    {name}\s", printed) for name in COMMANDS)
    assert main(["bench"]) == 2
    printed = capsys.readouterr().err
    assert all(re.search(rf"\n    {name}\s", printed) for name in bench.SUITES)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"octavo {octavo.__version__}\n"


@pytest.mark.parametrize("words", [["--version"], ["--help"], []], ids=str)
def test_the_script_answers_before_torch_is_imported(words):
    code = (
        f"import sys, octavo_command\nsys.argv[1:] = {words}\n"
        "try:\n    code = octavo_command.main()\n"
        "except SystemExit as stop:\n    code = stop.code\n"
        "assert not {'torch', 'octavo'} & set(sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (0 if words else 2), done.stderr
    said = f"octavo {octavo.__version__}\n" if words == ["--version"] else "Check how each recipe runs on this machine"
    assert said in done.stdout + done.stderr


def test_the_script_runs_a_command():
    code = (
        "import sys, octavo_command; sys.argv[1:] = ['doctor', '--device', 'abacus']; sys.exit(octavo_command.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "octavo doctor: There is no device called 'abacus'" in done.stderr


HELPED = [["doctor"], ["train"], ["bench"], ["explain"], *[["bench", name] for name in bench.SUITES]]


@pytest.mark.parametrize("command", HELPED, ids=" ".join)
def test_help_has_an_example_that_is_accepted_and_a_default_for_every_option(command, capsys):
    with pytest.raises(SystemExit):
        parsed(*command, "--help")
    text = capsys.readouterr().out
    (example,) = [line for line in text.splitlines() if line.startswith("example: octavo ")]
    words = example.removeprefix("example: octavo ").split(" > ")[0].replace('"', "").split()
    assert parsed(*words).command == command[0]
    options = text[text.index("\noptions:") :].split("\n  -")[2:]
    for option in options:
        assert "default: " in " ".join(option.split()) or option.startswith("-json"), option
    for internal in ("add_arguments", "orientation", "peers is", "suite is a file"):
        assert internal not in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["dcotor"], "invalid choice: 'dcotor' (choose from"),
        (["bench", "liner"], "invalid choice: 'liner' (choose from"),
        (
            ["bench", "linear", "--shape", "1,2"],
            "expected tokens,in,out, each 1 or more, such as 4096,4096,4096; got '1,2'",
        ),
        (["bench", "linear", "--shape", "1,2,x"], "got '1,2,x'"),
        (["bench", "grouped", "--shape", "1,2,3,0"], "expected experts,tokens,in,out, each 1 or more"),
        (["bench", "mlp", "--shape", "0,2,3"], "tokens,hidden,feed-forward"),
        (["bench", "quantize", "--rows", "0"], "expected a whole number from 1 up, got '0'"),
        (["bench", "quantize", "--rows", "9" * 5000], "expected a whole number from 1 up, got"),
        (["bench", "linear", "--recipes", "fp8-block,fp9"], "There is no recipe 'fp9'"),
        (["bench", "block", "--recipes", ""], "There is no recipe ''"),
        (["train", "--seed", "9" * 30], "expected a whole number from -2^63 up to 2^63 - 1"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_wrong_value_is_refused_with_what_is_allowed(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("device", ["meta", "mps", "cuda:99", "abacus", "cpu:x"])
def test_a_device_that_is_not_served_is_refused(device, capsys):
    assert main(["doctor", "--device", device]) == 2
    line = said(capsys)[1]
    assert device in line or "the last is cuda:" in line


def test_recipes_with_settings_are_listed():
    text = "fp8-current(pow2=True,fast=('fprop','dgrad')), fp8-block(scale='fp32'),nvfp4"
    found = parsed("bench", "linear", "--recipes", text).recipes
    assert found == ["fp8-current(pow2=True,fast=('fprop','dgrad'))", "fp8-block(scale='fp32')", "nvfp4"]
    assert parsed("bench", "linear").recipes == list(SHIPPED)
