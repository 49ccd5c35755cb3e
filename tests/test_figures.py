"""Figures of the README and of the pages are those of the committed results that they name."""

import re
import statistics

import pytest

import octavo
from benchmarks import picture
from tests.support.figures import (
    BENCHMARKS,
    EXPERTS,
    HOST,
    LOG,
    LOSS,
    README,
    ROOT,
    cases,
    kept,
    keyed,
    results,
    section,
    shapes,
    tables,
)

LAYER = [8192, 4096, 14336]
LINEAR, MLP, GROUPED = "linear-h200", "mlp-h200", "grouped-h200"
MOE, GEMMS, PERMUTE = "moe-h200", "grouped-gemms-h200", "permute-h200"
MIXTURES = "moe-memory-h200"
CHOOSING, FAQ = "docs/choosing-a-recipe.md", "docs/faq.md"


def layer(name=LINEAR):
    """Returns the cases of the linear layer that the tables show, 8192 tokens of 4096→14336."""
    (found,) = [cases(shape["results"]) for shape in results(name)["shapes"] if shape["shape"] == LAYER]
    return found


def mlp(name=MLP):
    return cases(results(name)["results"])


def parity():
    return {row["recipe"]: row for row in results("parity-h200")["results"]}


def gap(recipe):
    row = parity()[recipe]
    return f"{row['mean_percent']:+.2f} ± {row['stdev_percent']:.2f}"


def emulated(what="linear"):
    """Returns the times of emulated recipes as multiples of bf16's."""
    found = {row["case"]: row["ms"] for row in results("emulated-h200")[what]}
    return {name: ms / found["bf16"] for name, ms in found.items()}


def both(row):
    return f"{row['ms']:.3f} / {row['graph_ms']:.3f}"


# -- README ------------------------------------------------------------------------------------------------------------


def test_the_recipes_of_the_readme():
    rows = keyed(tables(README, "## Recipes and hardware")[0])
    fused = mlp()
    assert list(rows) == [name for name in octavo.recipes.SHIPPED if name in parity() and name != "bf16"]
    for name, cells in rows.items():
        times = f"{fused['bf16 compiled']['ms'] / fused[name]['ms']:.2f}" if name in fused else "–"
        assert cells[-2:] == [times, gap(name)], name


def test_each_claim_of_the_readme_has_its_ratio_and_its_committed_result():
    whole = {row["case"]: row["ms"] for row in results("model-h200")["results"]}
    kinds = [whole["bf16, compiled"] / whole[f"octavo fp8-delayed, {kind}, compiled"] for kind in ("convert", "blocks")]
    of_8, of_128, of_64 = shapes(MIXTURES)
    experts = [found["grouped_mm bf16, compiled"]["ms"] / found["fp8-delayed"]["ms"] for found in (of_8, of_64, of_128)]
    fused = mlp()
    ratios = [*kinds, *experts, fused["bf16 compiled"]["ms"] / fused["fp8-delayed"]["ms"]]
    files = ["model-h200"] * 2 + [MIXTURES] * 3 + [MLP, "parity-h200"]
    links = [f"[{name}](benchmarks/results/{name}.json)" for name in files]
    said = [*(f"{ratio:.2f}" for ratio in ratios), f"gap {gap('fp8-delayed')} %"]
    assert [row[1:] for row in tables(README, "# Octavo")[0][1:]] == [
        list(pair) for pair in zip(said, links, strict=True)
    ]
    assert "was {:.2f} to {:.2f} times as fast as compiled bf16".format(*kinds) in section("docs/index.md", "# Octavo")


def test_the_experts_of_the_readme_are_those_of_the_result():
    claimed = re.findall(r"a layer of (\d+) experts.*, (\d+) for each token", section(README, "# Octavo"))
    measured = [tuple(shape["shape"][1:3]) for shape in results(MIXTURES)["shapes"]]
    assert sorted((int(experts), int(chosen)) for experts, chosen in claimed) == sorted(measured)


def test_the_cost_of_emulation():
    text = " ".join(section(README, "## Limits").split())
    assert f"about {emulated()['mxfp8']:.1f} and {emulated()['nvfp4']:.1f} times as long as bf16" in text


def test_the_picture_and_the_page_are_drawn_from_the_results():
    assert picture.TARGET.read_text() == picture.draw(), "run python3 -m benchmarks.picture"
    assert picture.PAGE.read_text() == picture.page(), "run python3 -m benchmarks.picture"


# -- choosing a recipe -------------------------------------------------------------------------------------------------


def test_the_decision_table():
    rows = keyed(tables(CHOOSING, "## Decision table")[1])
    fused, linear = mlp(), layer()
    assert set(rows) == set(octavo.recipes.SHIPPED) & set(linear)  # each that was measured
    assert len(rows) >= 7
    for name, cells in rows.items():
        row, slow = linear[name], {"mxfp8", "nvfp4"}
        times = 1 / emulated()[name] if name in slow else linear["nn.Linear"]["graph_ms"] / row["graph_ms"]
        assert cells[:5] == [
            f"{times:.2f}",
            f"{fused['bf16 compiled']['ms'] / fused[name]['ms']:.2f}" if name in fused else "–",
            f"{row['saved_mib']:.0f}",
            f"{row['peak_mib']:.0f}",
            gap(name),
        ], name


def test_the_table_of_experts():
    rows = keyed(tables(CHOOSING, "## Layers of experts")[0])
    assert rows
    for name, cells in rows.items():
        want = [1 / found[case]["graph_of_bf16"] for found in shapes(GROUPED) for case in (name, f"{name}, cached")]
        assert cells == [f"{times:.2f}" for times in want], name


def test_cases_in_which_fp8_loses():
    text = section(CHOOSING, "## When FP8 loses")
    stack = results("host-h200")["subjects"]["of a stack"]
    small, plain = (statistics.median(stack[case]["eager"]) for case in ("octavo fp8-block", "nn.Linear"))
    assert f"`fp8-block` takes the host {small:.0f} µs, `nn.Linear` {plain:.0f}" in text

    def span(rows, form):
        return f"{min(rows):{form}} to {max(rows):{form}}"

    assert f"`mxfp8` takes {emulated()['mxfp8']:.2f} times bf16's time, `nvfp4` {emulated()['nvfp4']:.2f}" in text
    few = shapes("grouped-crossover-h200")[:3]
    whole, cached = ([found[case]["graph_of_bf16"] for found in few] for case in ("fp8-delayed", "fp8-delayed, cached"))
    assert f"`fp8-delayed` takes {span(whole, '.2f')} times" in text and f"({span(cached, '.2f')})" in text
    peaks = layer()["fp8-delayed"]["peak_mib"], layer()["nn.Linear"]["peak_mib"]
    assert "peak {:.0f} MiB against {:.0f}".format(*peaks) in text


# -- FAQ ---------------------------------------------------------------------------------------------------------------


def test_the_table_beside_torchao_of_the_faq():
    rows = tables(FAQ, "## How does Octavo differ from torchao?")[1][1:]
    block, fused, linear = mlp("block-h200"), mlp("mlp-torchao-h200"), layer("linear-slow-host-h200")

    def row(found, first, peer, field, form, file):
        return [
            *(format(found[key][field], form) for key in (first, "fp8-delayed", "fp8-current", peer)),
            f"`{file}.json`",
        ]

    compiled = "torchao tensorwise compiled"
    assert [each[1:] for each in rows] == [
        row(block, "bf16", "torchao tensorwise", "ms", ".2f", "block-h200"),
        row(block, "bf16", "torchao tensorwise", "peak_mib", ".0f", "block-h200"),
        row(fused, "bf16 compiled", compiled, "ms", ".2f", "mlp-torchao-h200"),
        row(fused, "bf16 compiled", compiled, "kept_mib", ".0f", "mlp-torchao-h200"),
        row(linear, "nn.Linear", compiled, "ms", ".2f", "linear-slow-host-h200"),
    ]


# -- benchmarks --------------------------------------------------------------------------------------------------------


def test_the_summary_of_the_benchmarks():
    rows = tables(BENCHMARKS, "# Benchmarks")[0][1:]
    pairs = [
        (layer()["nn.Linear"]["ms"], layer()["fp8-delayed"]["ms"], ".3f"),
        (mlp()["bf16 compiled"]["ms"], mlp()["fp8-delayed"]["ms"], ".3f"),
        (mlp("block-h200")["bf16"]["ms"], mlp("block-h200")["fp8-delayed"]["ms"], ".2f"),
        (shapes(GROUPED)[0]["grouped_mm bf16"]["ms"], shapes(GROUPED)[0]["fp8-delayed"]["ms"], ".3f"),
        (shapes(MIXTURES)[1]["grouped_mm bf16, compiled"]["ms"], shapes(MIXTURES)[1]["fp8-delayed"]["ms"], ".3f"),
    ]
    want = [[f"{base:{form}} ms", f"{ours:{form}} ms", f"{base / ours:.2f}"] for base, ours, form in pairs]
    assert [row[1:4] for row in rows] == want


def test_every_file_of_the_benchmarks_has_its_age():
    """Those of the log are older, and say so themselves."""
    shown = [re.findall(r"`([\w-]+)`", row[1]) for row in tables(BENCHMARKS, "## Which code was measured")[0][1:]]
    aged = [name for names in shown for name in names]
    pages = [(ROOT / page).read_text() for page in (BENCHMARKS, EXPERTS, LOSS, HOST)]
    linked = {name for text in pages for name in re.findall(r"results/([\w-]+)\.json", text)}
    assert sorted(aged) == sorted(linked)


@pytest.mark.parametrize(
    ("page", "heading", "file"),
    [
        (BENCHMARKS, "## One linear layer", LINEAR),
        (BENCHMARKS, "### Beside torchao", "linear-slow-host-h200"),
        (EXPERTS, "## Layers of experts", GROUPED),
    ],
)
def test_tables_of_eager_and_graph_times(page, heading, file):
    named = {
        "torch's grouped_mm, bf16": "grouped_mm bf16",
        "torchao tensorwise, compiled": "torchao tensorwise compiled",
    }
    named["torchao rowwise, compiled"] = "torchao rowwise compiled"
    rows = tables(page, heading)[0][1:]
    assert f"{file}.json" in section(page, heading) and len(rows) > 5
    for label, *cells in rows:
        case = label.replace("`", "").removesuffix(" (emulated)")
        case = named.get(case, case)
        if case == "FP8 floor":
            entries = results(file)["shapes"]
            want = [f"{each.get('floor_ms') or each['floors']['fp8_ms']:.3f}" for each in entries]
        else:
            found = [each[case] for each in shapes(file)]
            want = [both(row) if "graph_ms" in row else f"{row['ms']:.3f}" for row in found]
        assert cells == want, label


def test_the_memory_of_a_linear_layer():
    head, *rows = tables(BENCHMARKS, "## One linear layer")[1]
    for (_, *cells), field in zip(rows, ("saved_mib", "peak_mib"), strict=True):
        for names, cell in zip(head[1:], cells, strict=True):
            first, *others = names.split(", ")
            for name in (first, *(f"fp8{other}" for other in others)):
                assert cell == f"{layer()[name][field]:.0f}", name


def test_the_table_of_the_mlp():
    named = {
        "plain torch, bf16, compiled": "bf16 compiled",
        "fp8-delayed, keep_weight_codes=True": "fp8-delayed, weight codes kept",
        "fp8-delayed, not fused (rules=None)": "fp8-delayed, not fused",
    }
    rows = tables(BENCHMARKS, "## A norm and an MLP")[0][1:]
    assert rows.pop()[:2] == ["FP8 floor", f"{results(MLP)['floors']['fp8_ms']:.3f}"]
    for label, *cells in rows:
        case = label.replace("`", "")
        row = mlp()[named.get(case, case)]
        graph = f"{row['graph_ms']:.3f}" if "graph_ms" in row else "–"
        assert cells == [f"{row['ms']:.3f}", graph, f"{row['kept_mib']:.0f}"], label
    older, text = mlp("mlp-torchao-h200"), section(BENCHMARKS, "## A norm and an MLP").replace("\n", " ")
    times = [older[case]["ms"] for case in ("bf16 compiled", "fp8-delayed", "torchao tensorwise compiled")]
    assert "bf16 compiled {:.3f} ms, fp8-delayed {:.3f}, torchao tensorwise compiled {:.3f}".format(*times) in text


def test_the_tables_of_a_mixture():
    heading = "## A mixture of experts"
    (_, *times), (_, *spent) = tables(EXPERTS, heading)[:2]
    ((_, *memory),) = tables(LOG, heading)
    entries = results(MOE)["shapes"]
    assert times.pop() == ["FP8 floor", *(f"{e['floor_ms']['fp8']:.3f}" for e in entries)]
    assert len(times) == len(memory) == 9 and f"{MOE}.json" in section(EXPERTS, heading)

    def named(label):
        return {"torch, bf16, compiled": "grouped_mm bf16, compiled"}.get(label, label.replace("`", ""))

    for label, *cells in times:
        assert cells == [f"{found[named(label)]['ms']:.3f}" for found in shapes(MOE)], label
    for label, *cells in memory:
        assert cells == [kept(found[named(label)]) for found in shapes(MOE)], label
    kernels = [{k["kernel"]: k["ms"] for k in e["kernels"]["fp8-delayed"]} for e in entries]
    rest = [sum(found.values()) for found in kernels]
    for label, *cells in spent[:-1]:
        name = re.search(r"`(\w+)`", label).group(1)
        assert cells == [f"{found[name]:.3f}" for found in kernels], label
        rest = [total - found[name] for total, found in zip(rest, kernels, strict=True)]
    assert spent[-1][1:] == [f"{total:.2f}" for total in rest]


def test_the_tables_of_grouped_gemms():
    found = {
        (tuple(e["shape"]), row["recipe"], row["gemm"]): row for e in results(GEMMS)["shapes"] for row in e["results"]
    }
    parts = ("fprop", "dgrad", "wgrad")
    _, (_, *rates), (_, *spread) = tables(EXPERTS, "## Layers of experts")[:3]
    layers = [tuple(e["shape"]) for e in results(GROUPED)["shapes"]]
    for name, cells in keyed(rates).items():
        want = [", ".join(f"{found[each, name, part]['tflops']:.0f}" for each in layers) for part in parts]
        assert cells == want, name
    for name, cells in keyed(spread).items():
        ms = [sum(found[(n, 65536, 4096, 1536), name, part]["ms"] for part in parts) for n in (64, 128, 256)]
        assert cells == [f"{each:.2f}" for each in (*ms, ms[2] / ms[0])], name
    assert len(rates) == len(spread) == 2


def test_the_table_of_moving_tokens():
    (_, *rows), entries = tables(EXPERTS, "### Moving tokens")[0], results(PERMUTE)["shapes"]
    assert len(rows) == 8
    assert f"{results(PERMUTE)['copy']['gb_per_s'] / 1000:.2f} TB/s" in section(EXPERTS, "### Moving tokens")
    for label, *cells in rows:
        share = "of_copy" if label.startswith("cast") else "of_copy_once"
        found = [cases(e["results"])[label] for e in entries]
        assert cells == [f"{row['ms']:.3f} ({row[share]:.2f})" for row in found], label


def test_the_table_of_few_tokens():
    rows = tables(EXPERTS, "### Few tokens for each expert")[0][1:]
    found = [*shapes("grouped-crossover-h200"), shapes(GROUPED)[1]]
    for (_, *cells), case in zip(rows, ("fp8-delayed", "fp8-delayed, cached"), strict=True):
        assert cells == [f"{each[case]['graph_of_bf16']:.2f}" for each in found], case


def test_the_spread_of_runs_on_file():
    rows = tables(LOG, "## How far runs differ")[0][1:]
    assert len(rows) > 10
    for label, *cells in rows:
        file = re.search(r"\[([\w-]+)\.json\]", label).group(1)
        if file.startswith("mlp"):
            base, ours = (mlp(file)[case]["ms"] for case in ("bf16 compiled", "fp8-delayed"))
        elif file.startswith("linear"):
            base, ours = (layer(file)[case]["graph_ms"] for case in ("nn.Linear", "fp8-delayed"))
        else:
            base, ours = (shapes(file)[0][case]["graph_ms"] for case in ("grouped_mm bf16", "fp8-delayed"))
        assert cells == [f"{base:.3f}", f"{ours:.3f}", f"{base / ours:.2f}"], file


def test_the_tables_of_the_output_of_fc1_in_fp8():
    found = results("fc1-storage-cpu")
    (_, *losses), (_, *errors) = tables(LOSS, "### Experts with the output of fc1 in FP8")
    gaps = [[], *found["gaps_percent"].values()]
    for row, loss, gap in zip(losses, found["losses"].values(), gaps, strict=True):
        assert row[2:] == [" ".join(f"{x:.4f}" for x in loss), " ".join(f"{x:+.2f}" for x in gap)]
    for row, measured in zip(errors, found["gradient_errors"].values(), strict=True):
        assert row[1:] == [f"{100 * measured[name]:.2f} %" for name in ("dx", "dprobs", "dw1", "dw2")]
    assert found["ok"]


# -- verification ------------------------------------------------------------------------------------------------------


def test_runs_on_the_gpu_are_on_record():
    rows = tables("docs/verification.md", "## Runs on the GPU")[0][1:]
    runs = results("gpu-tests-h200")["runs"]
    for label, passed, failed in rows:
        named = re.findall(r"commit (\w+)", label) or [""]  # a tree that is no commit: any run on record
        counts = [(run["passed"], run["failed"]) for run in runs if named[0] in run["what"]]
        assert (int(passed), int(failed.split(":")[0])) in counts, label


# -- later runs --------------------------------------------------------------------------------------------------------


def test_the_table_of_emulated_formats():
    rows = keyed(tables(BENCHMARKS, "### Emulated formats")[0])
    for name, cells in rows.items():
        want = []
        for what in ("linear", "experts"):
            (row,) = [row for row in results("emulated-h200")[what] if row["case"] == name]
            want += [f"{row['ms']:.3f}", f"{emulated(what)[name]:.2f}", f"{row['peak_mib']:.0f}"]
        assert cells == want, name


def test_the_table_of_whole_mixtures():
    found = [{row["case"]: row for row in shape["results"]} for shape in results(MOE)["shapes"]]
    for label, *cells in tables(EXPERTS, "### `octavo.MoE`")[0][1:]:
        case = label.replace("`", "").replace("MoE,", "MoE")
        case = "grouped_mm bf16, compiled" if case.startswith("torch") else case
        want = [f"{s[case]['ms']:.3f}, {s[case]['tokens_per_s'] / 1e3:.0f} k, {kept(s[case])}" for s in found]
        assert cells == want, label


def test_the_table_of_mixtral():
    rows = tables(EXPERTS, "### A converted Mixtral")[0][1:]
    for cells, row in zip(rows, results("mixtral-h200")["results"], strict=True):
        assert cells[1:] == [f"{row['losses'][0]:.4f}", f"{row['losses'][-1]:.4f}", f"{row['ms']:.1f}"]
        assert row["recipe"].split(",")[0] in cells[0].replace("transformers, bf16", "bf16")
    assert f"transformers {results('mixtral-h200')['transformers']}" in section(EXPERTS, "### A converted Mixtral")


def test_the_table_of_the_host():
    names = {"one tiny layer": "layer", "of a stack of sixteen": "of a stack", "8192 × 4096→4096": "at size"}
    subjects = results("host-h200")["subjects"]
    for label, *cells in tables(HOST, "## Host time")[0][1:]:
        subject, case = label.replace("`", "").split(": ")
        case = f"octavo {case}" if case.startswith("fp8") else case
        for mode, cell in zip(("eager", "compiled"), cells, strict=True):
            assert cell == f"{statistics.median(subjects[names[subject]][case][mode]):.0f}", label
    over = {
        mode: [statistics.median(subjects["layer"][case][mode]) for case in ("octavo fp8-delayed", "nn.Linear")]
        for mode in ("eager", "compiled")
    }
    added = [round(octavo) - round(stock) for octavo, stock in (over["compiled"], over["eager"])]
    text = " ".join(section(HOST, "## Host time").split())
    assert f"fp8-delayed adds {added[0]} µs to a tiny `nn.Linear`, and eager {added[1]}" in text
    graph = [round(compiled) - round(eager) for compiled, eager in zip(over["compiled"], over["eager"], strict=True)]
    assert f"by {graph[1]} µs for `nn.Linear`, and by {graph[0]} for fp8-delayed" in text
    stack = results("host-before-h200")["runs"][0]["subjects"]["of a stack"]
    peer, own = (statistics.median(stack[case]["compiled"]) for case in ("torchao tensorwise", "octavo fp8-delayed"))
    assert f"took {peer:.0f} with torchao and {own:.0f} with fp8-delayed" in " ".join(
        section(LOG, "## Host time").split()
    )


def test_the_runs_of_a_whole_model_in_the_log():
    for label, _, *cells in tables(LOG, "## A whole model")[0][1:]:
        found = {row["case"]: row["ms"] for row in results(re.search(r"\[([\w-]+)\.json", label).group(1))["results"]}
        blocks, base = found["octavo fp8-delayed, blocks, compiled"], found["bf16, compiled"]
        assert cells == [f"{blocks:.2f}", f"{blocks / base:.3f}"], label


def part_of_a_model(kernel):
    """Returns the row of the table of kernels that a GPU kernel belongs to."""
    starts = {
        "nvjet_sm90_q": "matrix products in FP8",
        "nvjet": "products of the head",
        "_forward": "SwiGLU",
        "_backward": "SwiGLU",
        "_sums": "SwiGLU",
        "_cast": "other casts",
        "_rotate": "rotary",
        "_back_": "rotary",
    }
    words = {"cudnn": "attention", "FusedOptimizer": "AdamW", "embedding": "embedding", "softmax": "loss"}
    named = [part for start, part in starts.items() if kernel.startswith(start)]
    return (named + [part for word, part in words.items() if word in kernel] + ["the rest"])[0]


def test_the_table_of_a_whole_models_kernels():
    (row,) = [row for row in results("model-h200")["results"] if row["case"] == "octavo fp8-delayed, blocks, compiled"]
    parts = {}
    for each in row["kernels"]:
        part = part_of_a_model(each["kernel"])
        parts[part] = parts.get(part, 0) + each["ms"]
    assert f"take {sum(parts.values()):.1f} ms of the GPU" in section(BENCHMARKS, "## A whole model")
    shown = tables(BENCHMARKS, "## A whole model")[1][1:]
    assert len(shown) == len(parts)
    for ms, label in shown:
        (found,) = [parts[part] for part in parts if label.startswith(part)]
        assert ms == f"{found:.1f}", label


def test_the_table_of_inspects_cost():
    eager = [row for row in results("inspect-cost-h200")["results"] if row["mode"] == "eager"]
    found = {f"`{row['recipe']}`": row for row in eager}
    for recipe, *cells, peak in tables("docs/inspect.md", "## What it costs")[0][1:]:
        row = found[recipe]
        assert [float(cell) for cell in cells] == [float(f"{ms:.3g}") for ms in row["ms"].values()]
        assert peak == f"{row['peak_mib']['before']:.0f}, {row['peak_mib']['every=1']:.0f}"


def test_the_tables_of_nvfp4s_gap():
    found = {row["candidate"]: row for row in results("nvfp4-gap-h200")["results"]}
    by_means = {f"{row['mean_percent']:+.2f} ± {row['stdev_percent']:.2f}": name for name, row in found.items()}
    shown = tables(LOSS, "### What costs NVFP4 its gap")[0][1:]
    rows = {" ".join(f"{gap:+.2f}" for gap in row["gaps_percent"]): row for row in found.values()}
    for _, gaps, mean, stdev in shown:
        assert (mean, stdev) == (f"{rows[gaps]['mean_percent']:+.2f}", f"{rows[gaps]['stdev_percent']:.2f}")
    assert rows[shown[0][1]]["candidate"] == "nvfp4"
    heading = "## NVFP4 closer to bf16"
    of_mixtures = {row["candidate"]: row for row in results("nvfp4-gap-moe-h200")["results"]}
    assert [by_means[cell] for _, cell, _ in tables(CHOOSING, heading)[0][1:]] == ["last 10 % bf16", "last block bf16"]
    for _, gpt, mixture in tables(CHOOSING, heading)[0][1:]:
        row = of_mixtures[by_means[gpt]]
        assert mixture == f"{row['mean_percent']:+.2f} ± {row['stdev_percent']:.2f}" and row["mean_percent"] < 1.5
    shown = tables(LOSS, "### A mixture of experts")[1][1:]
    rows |= {" ".join(f"{gap:+.2f}" for gap in row["gaps_percent"]): row for row in of_mixtures.values()}
    for _, gaps, mean, stdev in shown:
        assert (mean, stdev) == (f"{rows[gaps]['mean_percent']:+.2f}", f"{rows[gaps]['stdev_percent']:.2f}")
    assert f"ended {found['nvfp4']['mean_percent']:.2f} % above bf16" in section(CHOOSING, heading)
    assert all(found[name]["mean_percent"] < 1.5 for name in ("last 10 % bf16", "last block bf16"))


def test_the_shares_of_nvfp4s_casts():
    best = {}
    for row in results("nvfp4-casts-h200")["results"]:
        best[row["case"]] = max(best.get(row["case"], 0), row["of_copy"])
    text = " ".join(section(LOG, "## Casting to low precision").split())
    shown = re.search(r"([\d.]+) of copy for weights, ([\d.]+) for activations and ([\d.]+) for gradients", text)
    assert shown.groups() == tuple(f"{best[case]:.2f}" for case in ("weights", "activations", "gradients"))


def test_the_loss_of_weights_that_are_codes():
    found = results("parity-codes-h200")
    assert found["codes"] and len(found["seeds"]) == 4
    want = [
        [f"`{row['recipe']}`", " ".join(f"{gap:+.2f}" for gap in row["gaps_percent"]), f"{row['mean_percent']:+.2f}"]
        for row in found["results"]
    ]
    assert [cells[:3] for cells in tables(LOSS, "### Weights that are codes")[0][1:]] == want
    assert abs(next(row["mean_percent"] for row in found["results"] if row["recipe"] == "fp8-block")) <= 0.2


def test_the_table_of_saved_tensors_on_the_host():
    found = results("offload-h200")["results"]
    delayed, block = (
        {row["share"]: row for row in found if row["recipe"] == recipe} for recipe in ("fp8-delayed", "fp8-block")
    )
    (_, first, *rest) = tables("docs/training.md", "## Saved tensors on the host")[0]
    assert first[:2] == ["nothing", "0"]
    shares = [share for share in delayed if share is not None]
    assert len(rest) == len(shares)
    for cells, share in zip(rest, shares, strict=True):
        row, other = delayed[share], block[share]
        assert cells == [
            f"{row['moved_mib'] / row['saved_mib']:.0%}",
            f"{row['moved_mib']:.0f} of {row['saved_mib']:.0f}",
            f"{row['of_step']:.3f}",
            f"{row['peak_mib']:.0f}",
            f"{other['of_step']:.3f}",
            f"{other['peak_mib']:.0f}",
        ]


def test_the_table_of_weights_that_fsdp_gathers_as_codes():
    found = {(row["recipe"], row["way"]): row["ratio"] for row in results("fsdp-codes-h200")["results"]}
    ways = ("eager", "compiled", "captured")
    listed = tables("docs/distributed.md", "### FSDP2 that gathers codes")
    shown = next(rows for rows in listed if rows[0][-1] == "captured")
    assert len(shown) == 4
    for name, *cells in shown[1:]:
        assert cells == [f"{found[name.strip('`'), way]:.2f}" for way in ways], name


def test_the_ways_of_one_rank_of_experts():
    rows = [row for row in results("expert-parallel-ways-h200")["results"] if row["case"] == "ep_group of one rank"]
    text = " ".join(section(EXPERTS, "### Experts over ranks, with one rank").split())
    want = "took {} times one process eager, {} captured, {} compiled, and {} compiled and captured"
    assert want.format(*(f"{row['of_one_process']:.3f}" for row in rows)) in text
    assert max(row["of_one_process"] for row in rows) <= 1.05


def test_the_table_of_vision_models():
    names = {"ViT-B/16": "vit", "DiT-B/2": "dit"}
    rows = tables(LOSS, "### Vision models")[0][1:]
    assert len(rows) == 2
    for label, *cells in rows:
        (found,) = results(f"vision-{names[label]}-h200")["results"]
        assert cells == [
            " ".join(f"{loss:.4f}" for loss in found["bf16"]),
            " ".join(f"{gap:+.2f}" for gap in found["gaps_percent"]),
            f"{found['mean_percent']:+.2f}",
            f"{found['spread_percent']:.2f}",
        ], label


def test_the_table_of_nanochat():
    found = {row["recipe"]: row for row in results("nanochat-h200")["results"]}
    rows = tables(BENCHMARKS, "### nanochat beside torchao")[0][1:]
    assert len(rows) == len(found)
    for label, *cells in rows:
        row = found[label.replace("`", "").split()[0]]
        times = row["tokens_per_s"] / found["bf16"]["tokens_per_s"]
        want = [f"{row['ms']:.1f}", f"{row['tokens_per_s']:,.0f}", f"{times:.2f}", f"{row['peak_gib']:.1f}"]
        assert cells == want, label
