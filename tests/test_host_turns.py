"""benchmarks/host_turns.py: two checkouts in turns, each measured by a process that imports its own code."""

import json

import pytest

from benchmarks import host_turns


def test_the_least_of_the_turns_counts():
    plain = "nn.Linear, of a stack"
    turns = {
        "before": [{plain: 100.0, "fp8-block, MoE": 900.0}, {plain: 110.0, "fp8-block, MoE": 800.0}],
        "after": [{plain: 100.0, "fp8-block, MoE": 400.0}, {plain: 90.0, "fp8-block, MoE": 600.0}],
    }
    rows = [line.split() for line in host_turns.render(turns).splitlines()[1:]]
    assert [row[-4:] for row in rows] == [["100", "90", "0.900", "1.00"], ["800", "400", "0.500", "4.44"]]


@pytest.mark.slow
def test_this_checkout_beside_itself(tmp_path, capsys):
    (tmp_path / "octavo").symlink_to(host_turns.ROOT / "octavo")
    command = [str(tmp_path), "--turns", "1", "--rounds", "1", "--steps", "1", "--device", "cpu"]
    assert host_turns.main([*command, "--json", str(tmp_path / "turns.json")]) == 0
    found = json.loads((tmp_path / "turns.json").read_text())["us"]
    assert [len(found[name]) for name in ("before", "after")] == [1, 1]
    assert found["before"][0].keys() == found["after"][0].keys() and "fp8-delayed, MoE" in capsys.readouterr().out


def test_a_folder_without_octavo_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        host_turns.main([str(tmp_path)])
    assert "has no octavo/" in capsys.readouterr().err


def test_a_turn_that_fails_ends_with_its_error(tmp_path):
    (tmp_path / "octavo").mkdir()
    (tmp_path / "octavo" / "__init__.py").write_text("raise RuntimeError('an old fault')\n")
    with pytest.raises(SystemExit, match="an old fault"):
        host_turns.turn_of(tmp_path, ["--device", "cpu"])
