"""README and docs: tables are what the report makes of the committed CSVs; flags and files that they name exist."""

import ast
import csv
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
sys.path.insert(0, str(ROOT / "docs" / "benchmark"))
import report  # noqa: E402


def arguments(script):
    """Names of a script's command-line arguments."""
    tree = ast.parse((ROOT / script).read_text())
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    return {item.target.id.replace("_", "-") for item in args.body if isinstance(item, ast.AnnAssign)}


def commands(page):
    """(script, rest of the command) for every command line with one of our scripts."""
    text = page.read_text().replace("\\\n", " ")
    return re.findall(r"python ((?:docs/benchmark/)?\w+\.py)([^\n`#|]*)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_and_file_of_a_page_exists(page):
    for script, rest in commands(page):
        assert (ROOT / script).exists(), script
        for flag in re.findall(r"--([a-z][a-z0-9-]*)", re.sub(r'"[^"]*"', "", rest)):  # --flags="..." is passed on
            known = arguments(script) | {"help"}
            assert flag in known or flag.removeprefix("no-") in known, (script, flag)
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


def test_tables_of_the_docs_are_made_from_the_committed_csvs():
    made = report.tables(ROOT / "docs" / "benchmark")
    pattern = r"<!-- table: ((?:tabular|gym|grid|calibration|sets|speed|soak|atari|gen)\w*) -->"
    named = {name for page in PAGES for name in re.findall(pattern, page.read_text())}
    assert named == set(made)
    for page in PAGES:
        assert report.fill(page.read_text(), made) == page.read_text(), f"run docs/benchmark/report.py: {page.name}"


def test_report_on_a_small_csv(tmp_path):
    rng = np.random.default_rng(0)
    columns = ["arguments", "env_id", "dataset_size", "expectile_tau", "uncertainty_set", "upsilon", "seed"]
    results = ["normalized_return", "normalized_return_stochastic", "normalized_return_state1"]
    results += ["normalized_return_stochastic_state1", "behaviour_normalized_return", "support_optimum"]
    rows = []
    for env in report.ENVS:
        for size in (10, 100, 1000):
            for tau in report.TAUS:
                for (kind, upsilon), _ in report.METHODS.items():
                    for seed in (100, 101, 102):
                        row = [
                            "x",
                            env,
                            size,
                            tau,
                            kind,
                            upsilon or 0.9,
                            seed,
                            *rng.uniform(0, 100, len(results)).round(3),
                        ]
                        rows.append(dict(zip(columns + results, row)))
    with open(tmp_path / "tabular_paper.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, columns + results)
        writer.writeheader()
        writer.writerows(rows)
    made = report.tables(tmp_path)
    names = ("aggregated", "detailed", "differences", "against_box", "evaluations", "by_tau")
    assert set(made) == {f"tabular_{name}" for name in names}
    # one cell of each kind, computed by hand
    chosen = [r for r in rows if (r["env_id"], r["dataset_size"]) == ("RiverSwim", 10)]
    box, ell = (
        np.array([np.mean([r["normalized_return"] for r in part if r["seed"] == s]) for s in (100, 101, 102)])
        for part in (
            [r for r in chosen if r["uncertainty_set"] == "box"],
            [r for r in chosen if r["uncertainty_set"] == "ellipsoid" and r["upsilon"] == 0.9],
        )
    )
    low, high = stats.t.interval(0.9, 2, loc=box.mean(), scale=stats.sem(box))
    (line,) = [x for x in made["tabular_aggregated"].splitlines() if x.startswith("| RiverSwim | 10×")]
    assert f"{box.mean():.0f} ± {(high - low) / 2:.0f}" in line and "(47)" in line and "(60)" in line
    gain = ell - box
    half = stats.t.ppf(0.95, 2) * gain.std(ddof=1) / np.sqrt(3)
    (line,) = [x for x in made["tabular_differences"].splitlines() if x.startswith("| RiverSwim | 10×")]
    assert f"{gain.mean():.1f} ± {half:.1f} ({(gain > 0).sum()} of 3)" in line
    # against the box in one cell, and how many of the 54 intervals of that table exclude 0
    here = [r for r in chosen if r["expectile_tau"] == 0.9]
    box = np.array([r["normalized_return"] for r in here if r["uncertainty_set"] == "box"])
    ell = np.array([r["normalized_return"] for r in here if (r["uncertainty_set"], r["upsilon"]) == ("ellipsoid", 0.9)])
    half = stats.t.ppf(0.95, 2) * (ell - box).std(ddof=1) / np.sqrt(3)
    lines = made["tabular_against_box"].splitlines()
    (line,) = [x for x in lines if x.startswith("| RiverSwim | 10× | 0.9 ")]
    assert f"| {(ell - box).mean():.1f} ± {half:.1f} | {100 * (ell.mean() / box.mean() - 1):+.0f} % |" in line
    box = [r["normalized_return_state1"] for r in here if r["uncertainty_set"] == "box"]
    ell = [r["normalized_return_state1"] for r in here if (r["uncertainty_set"], r["upsilon"]) == ("ellipsoid", 0.9)]
    gain = np.subtract(ell, box)
    half = stats.t.ppf(0.95, 2) * gain.std(ddof=1) / np.sqrt(3)
    assert line.split(" | ")[5] == f"{gain.mean():.1f} ± {half:.1f}"
    clear = 0
    for x in lines[2:20]:
        for part in (x.split("|")[column] for column in (4, 6, 7)):
            mean, half = map(float, part.split("±"))
            clear += mean - half > 0 or mean + half < 0
    assert lines[-1] == f"{clear} of these 54 intervals exclude 0. By chance alone about 5 would."
    # another evaluation at another size
    chosen = [r for r in rows if (r["env_id"], r["dataset_size"]) == ("RiverSwim", 100)]
    mean = np.mean([r["normalized_return_state1"] for r in chosen if r["uncertainty_set"] == "hull"])
    cells = table_line(made["tabular_evaluations"], "RiverSwim", "100×", "greedy, state 1")
    assert cells[4].startswith(f"{mean:.0f} ± ")
    assert len(made["tabular_evaluations"].splitlines()) == 2 + 2 * (4 + 2 + 2)  # the stochastic policy at 10× alone
    chosen = [r for r in rows if (r["env_id"], r["dataset_size"], r["uncertainty_set"]) == ("RiverSwim", 10, "box")]
    mean = np.mean([r["normalized_return_stochastic"] for r in chosen])
    cells = table_line(made["tabular_evaluations"], "RiverSwim", "10×", "stochastic, uniform start")
    assert cells[3].startswith(f"{mean:.0f} ± ")
    # the command fills a page, and a second time changes nothing
    (tmp_path / "page.md").write_text("a\n<!-- table: tabular_aggregated -->\nold\n<!-- end -->\nb\n")
    command = [sys.executable, str(ROOT / "docs/benchmark/report.py"), "--csvs", str(tmp_path), "--docs", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "page.md rewritten\n"
    page = (tmp_path / "page.md").read_text()
    assert made["tabular_aggregated"] in page and "old" not in page and page.startswith("a\n") and page.endswith("b\n")
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_report_of_targets_on_a_small_csv(tmp_path):
    """Each setting in its own line, shared and own side by side; seeds are averaged over the taus."""
    rows = []
    for targets, extra, bootstrap, score in (
        ("shared", "", True, 40),
        ("own", "", True, 60),
        ("own", "--prior 0 1", False, 10),
    ):
        for tau, seed in ((0.1, 100), (0.5, 100), (0.1, 101), (0.5, 101)):
            row = dict(env_id="RiverSwim", dataset_size=10, expectile_tau=tau, uncertainty_set="hull", upsilon=0.9)
            row |= dict(bootstrap=bootstrap, seed=seed, arguments=f"--targets {targets} {extra}")
            rows.append(row | dict(normalized_return=score + 10 * tau, normalized_return_state1=score / 2))
    written(tmp_path / "tabular_targets.csv", rows)
    table = report.tables(tmp_path)["tabular_targets"]
    assert len(table.splitlines()) == 2 + 4
    cells = table_line(table, "RiverSwim", "10×", "resampled", "all values", "uniform")
    assert cells[5:] == ["", "", "43 ± 0", "63 ± 0", "", "", "", ""]
    cells = table_line(table, "RiverSwim", "10×", "the same", "below", "state 1")
    assert cells[5:] == ["", "", "", "5 ± 0", "", "", "", ""]
    gains = report.tables(tmp_path)["tabular_targets_gain"]
    cells = table_line(gains, "RiverSwim", "10×", "resampled", "all values", "uniform")
    assert cells[5:] == ["", "20.0 ± 0.0 (2 of 2)", "", ""]
    assert table_line(gains, "RiverSwim", "10×", "the same", "below", "uniform")[5:] == [""] * 4  # own alone


def test_report_of_images_on_a_small_csv(tmp_path):
    """Returns seed by seed, and minus the clone of the same seed; runs with other flags are the ablation's."""
    columns = "method,dataset_id,seed,flags,eval_return_mean,eval_return_std,best_return,q_star_minus_return,seconds"
    lines = [
        columns,
        *(f"BC-pixels,ersac/pong/mixed-v0,{s},,{x},1,,,60" for s, x in ((100, -10), (101, -6), (102, -8))),
    ]
    lines += [f"Ell-Epi*-pixels,ersac/pong/mixed-v0,{s},,{x},1,5,-0.25,120" for s, x in ((102, 2), (100, -1), (101, 1))]
    lines += ["SAC-N-pixels,ersac/breakout/mixed-v0,100,,30,2,40,0.5,120"]
    lines += ["Ell-Epi*-pixels,ersac/pong/mixed-v0,100,--n-step 1,-20,1,5,-0.25,120"]
    (tmp_path / "atari.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "atari_tuning.csv").write_text("\n".join(lines) + "\n")
    made = report.tables(tmp_path)
    _, _, clone, ours, other = made["atari_methods"].splitlines()
    assert clone.startswith("| Pong | BC | -10.0, -6.0, -8.0 | -8.0 ± ") and clone.endswith("|  |  | 1 |")
    gain = np.array([9.0, 7.0, 10.0])
    half = stats.t.ppf(0.95, 2) * gain.std(ddof=1) / np.sqrt(3)
    assert ours.startswith("| Pong | Ell-Epi\\* | -1.0, 1.0, 2.0 | 0.7 ± ")
    assert ours.endswith(f"| {gain.mean():.1f} ± {half:.1f} | 5, 5, 5 | 2 |")
    assert other == "| Breakout | SAC-N | 30.0 | 30.0 |  | 40 | 2 |"
    assert made["atari_ablation"].splitlines()[-1] == "| Pong | Ell-Epi\\* | `--n-step 1` | 100 | -20.0 ± 1.0 | -0.25 |"


def written(path, rows):
    """A CSV of dicts."""
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")


def table_line(table, *start):
    """The cells of the one line that starts with these."""
    (found,) = [x for x in table.splitlines() if x.startswith("| " + " | ".join(start))]
    return [x.strip() for x in found.strip("|").split("|")]


def row_of_a_sweep(method, size, tau, seed, score, flags="", env_id="LunarLander-v3", early_fraction=0.0):
    row = dict(method=method, dataset_id=f"ersac/x/y-s{seed}-v0", seed=seed, flags=flags, env_id=env_id)
    row |= dict(dataset_size=size, expectile_tau=tau, early_fraction=early_fraction, normalized_return=score)
    row |= dict(best_return=2 * score + 8, eval_return_mean=2 * score, random_return=0, reference_return=200)
    return row | dict(training_entropy=0.25, q_star_minus_return=-score / 10, seconds=120)


def test_report_of_shapes_on_a_small_csv(tmp_path):
    """The ellipsoid minus the box, paired by seed; a seed that one of them lacks, and other flags, do not count."""
    runs = (
        ("Box-N-own", 100, "", 80),
        ("Box-N-own", 101, "", 90),
        ("Box-N-own", 102, "", 70),
        ("Ell_0.9-N-own", 100, "", 84),
        ("Ell_0.9-N-own", 101, "", 96),
        ("Ell_0.9-N-own", 103, "", 10),
        ("Ell_0.9-N-own", 102, "--prior-scale 30", 10),
        ("Box-Epi*-own", 100, "", 60),
        ("Ell-Epi*-own", 100, "", 57),
        ("Ell-Epi", 101, "", 40),
        ("Ell-Epi", 100, "", 20),
        ("Ell-Epi*", 100, "", 10),
        ("Ell-Epi*", 101, "", 50),
    )
    written(tmp_path / "grid.csv", [row_of_a_sweep(m, 1000, 0.5, seed, score, flags) for m, seed, flags, score in runs])
    made = report.tables(tmp_path)
    table = made["grid_shapes"].splitlines()
    half = stats.t.ppf(0.95, 1) * np.std([4, 6], ddof=1) / np.sqrt(2)
    assert table[2] == f"| LunarLander-v3 | 1,000 | 0.5 | 80, 90 | 85 | 5.0 ± {half:.1f} (2 of 2) |"
    assert table[-1] == "0 of these 1 intervals exclude 0."
    (once,) = made["grid_once"].splitlines()[2:]
    assert once.startswith("| Ell-Epi | 1,000 | 0.5 | 20, 40 | 30 | Ell-Epi\\* | 0.0 ± ") and once.endswith(
        "(1 of 2) |"
    )
    epinet = made["grid_shapes_epinet"].splitlines()
    assert epinet[2] == "| LunarLander-v3 | 1,000 | 0.5 | 60 | 60 | -3.0 (0 of 1) |"


def test_report_of_equal_pessimism_on_a_small_csv(tmp_path):
    """Both settings of the box beside the ellipsoid, on the seeds that have both; the charge is the last one logged."""
    runs = (
        ("Box-Epi*-own", 100, "", 80, 3.0),
        ("Box-Epi*-own", 101, "", 90, 5.0),
        ("Box-Epi*-own", 102, "", 10, 9.0),  # not run with the other upsilon
        ("Box-Epi*-own", 100, "--upsilon 0.6", 70, 2.0),
        ("Box-Epi*-own", 101, "--upsilon 0.6", 76, 2.5),
        ("Ell-Epi*-own", 100, "", 84, 2.25),
        ("Ell-Epi*-own", 101, "", 96, 2.5),
        ("Ell-Epi*-own", 102, "", 99, 7.0),
    )
    rows = [row_of_a_sweep(m, 10_000, 0.5, seed, score, flags) for m, seed, flags, score, _ in runs]
    points = []
    for row, (*_, charge) in zip(rows, runs):
        named = {name: row[name] for name in ("method", "dataset_id", "seed", "flags")}
        for update, value in ((1000, 50.0), (2000, charge)):
            points.append(named | {"update": update, "charts/q_gap": value, "charts/std_data_actions": 1.0})
    for name in ("grid", "tuning"):
        written(tmp_path / f"{name}.csv", rows)
        written(tmp_path / f"{name}_curves.csv", points)
    made = report.tables(tmp_path)
    half = [stats.t.ppf(0.95, 1) * np.std(gain, ddof=1) / np.sqrt(2) for gain in ([4, 6], [14, 20])]
    assert made["grid_pessimism"].splitlines()[2:] == [
        f"| 10,000 | 0.5 | 0.9 | 4.00 | 2.38 | 80, 90 | 85 | 5.0 ± {half[0]:.1f} (2 of 2) |",
        f"| 10,000 | 0.5 | 0.6 | 2.25 | 2.38 | 70, 76 | 73 | 17.0 ± {half[1]:.1f} (2 of 2) |",
        "",
        "0 of these 2 intervals exclude 0.",
    ]
    assert made["grid_pessimism_tuning"] == made["grid_pessimism"]
    assert table_line(made["grid_shapes_epinet"], "LunarLander-v3")[4] == "60"  # mean of 80, 90, 10
    assert "--upsilon" not in made["grid_ablation"]


def test_report_of_the_earlier_sweep_on_a_small_csv(tmp_path):
    """Only rows with the sweep's arguments count; upsilon and the schedule have tables of their own."""
    scores = {  # method, size, tau, flags: returns of seeds 100, 101, ...
        ("SAC-N", 100_000, 0.5, ""): (10.0, 30.0, 20.0),
        ("Ell_0.9-N", 100_000, 0.5, ""): (25.0, 35.0, 15.0),
        ("Ell_0.9-N", 100_000, 0.5, "--alpha 1"): (99.0, 97.0),
        ("Ell_0.9-N", 100_000, 0.5, "--alpha 2"): (99.0,),  # one seed: not in the table
        ("Ell-Epi", 100_000, 0.5, ""): (5.0, 7.0),
        ("BC", 100_000, 0.5, ""): (80.0, 90.0),
        ("Ell_0.9-N", 1000, 0.5, ""): (1.0, 3.0),
        ("Ell_0.9-N", 1000, 0.5, "--upsilon 0.5"): (10.0,),
        ("Ell_0.9-N", 1000, 0.5, "--upsilon 0.5 --alpha 1"): (0.0,),
        ("SAC-N", 10_000, 0.9, ""): (5.0, 45.0),
        ("CH-N", 10_000, 0.9, ""): (8.0, 48.0),
        ("Ell_0.9-N", 10_000, 0.9, ""): (11.0, 51.0),
        ("SAC-N", 10_000, 0.9, "--total-updates 10000"): (10.0, 50.0),
        ("CH-N", 10_000, 0.9, "--total-updates 10000"): (16.0, 56.0),
        ("Ell_0.9-N", 10_000, 0.9, "--total-updates 10000"): (22.0,),  # so that seed 100 alone counts
    }
    rows = []
    for (method, size, tau, flags), values in scores.items():
        rows += [row_of_a_sweep(method, size, tau, seed, x, flags) for seed, x in enumerate(values, 100)]
    written(tmp_path / "gym.csv", rows)
    made = report.tables(tmp_path)
    header = made["gym_detailed"].splitlines()[0]
    assert header == "| environment | transitions | τ | SAC-N | CH-N | Ell_0.9-N | Ell-Epi | BC | seeds |"
    cells = table_line(made["gym_detailed"], "LunarLander-v3", "100,000", "0.5")
    half = stats.t.ppf(0.95, 2) * 10 / np.sqrt(3)
    assert cells[3] == f"20.0 ± {half:.1f}" and cells[5].startswith("25.0 ± ") and cells[-1] == "2/3"
    assert cells[7].startswith("**85.0 ±") and cells[6].startswith("<u>6.0 ±")
    cells = table_line(made["gym_slices"], "LunarLander-v3", "100,000", "0.5", "Ell_0.9-N")
    half = stats.t.ppf(0.95, 1)  # two seeds, whose standard error is 1
    assert cells[4:] == ["`--alpha 1`", f"98.0 ± {half:.1f}", f"30.0 ± {5 * half:.1f}", "0.25", "2"]
    assert made["gym_upsilon"].splitlines() == [
        "| υ | ellipsoid of ten critics |",
        "| --- | --- |",
        "| 0.5 | 10 (1) |",
        f"| 0.9 | 2 ± {half:.0f} (2) |",
    ]
    assert table_line(made["gym_schedule"], "10,000", "0.9", "10,000")[3:] == ["10", "16", "22", "6", "12", "1"]
    assert table_line(made["gym_schedule"], "10,000", "0.9", "20,000")[3:] == ["5", "8", "11", "3", "6", "1"]
    (tmp_path / "page.md").write_text("<!-- table: gym_upsilon -->\nold\n<!-- end -->\n")
    command = [sys.executable, str(ROOT / "docs/benchmark/report.py"), "--csvs", str(tmp_path), "--docs", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "page.md rewritten\n"
    assert (tmp_path / "page.md").read_text() == f"<!-- table: gym_upsilon -->\n{made['gym_upsilon']}\n<!-- end -->\n"
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_report_of_the_grid_on_a_small_csv(tmp_path):
    """Paired by seed, whatever the order of the rows; runs with changed settings do not count."""
    box = {104: 50.0, 100: 10.0, 101: 20.0, 102: 30.0, 103: 40.0}
    rows = [row_of_a_sweep("SAC-N", 10_000, 0.5, seed, score) for seed, score in box.items()]
    rows += [row_of_a_sweep("Ell_0.9-N", 10_000, 0.5, s, x) for s, x in ((101, 25.0), (100, 12.0), (102, 29.0))]
    rows += [row_of_a_sweep("Ell_0.9-N", 10_000, 0.5, 103, 99.0, "--alpha 1")]
    rows += [row_of_a_sweep("SAC-N", 10_000, 0.5, s, x, "--total-updates 40000") for s, x in ((101, 18.0), (100, 15.0))]
    rows += [row_of_a_sweep("SAC-N", 100_000, 0.5, 100, 70.0, early_fraction=0.5)]
    rows += [row_of_a_sweep("SAC-N", 1000, 0.5, 100, 60.0, "--total-updates 2000", "CartPole-v1")]
    rows += [row_of_a_sweep("SAC-N", 1000, 0.5, 101, 0.0, "", "CartPole-v1")]  # too many updates for CartPole's cell
    rows += [row_of_a_sweep("Ell-Epi*-own", 1000, 0.5, 100, 90.0, "", "CartPole-v1")]
    rows += [row_of_a_sweep("BC", 10_000, 0.5, 100, 20.0)]
    rows += [row_of_a_sweep("BC", 10_000, 0.9, 100, 30.0), row_of_a_sweep("BC", 10_000, 0.1, 100, 40.0)]
    written(tmp_path / "grid.csv", rows)
    made = report.tables(tmp_path)
    header = made["grid_networks"].splitlines()[0]
    assert header == "| environment | transitions | τ | Ell-Epi\\*-own | Ell_0.9-N | SAC-N | BC |"
    half = stats.t.ppf(0.95, 4) * np.std([10, 20, 30, 40, 50], ddof=1) / np.sqrt(5)
    cells = table_line(made["grid_networks"], "LunarLander-v3", "10,000", "0.5")
    assert cells[3] == "not run" and cells[4].startswith("22 ± ") and cells[4].endswith("(3)")
    assert cells[5] == f"30 ± {half:.0f}" and cells[6] == "20 (1)"
    cells = table_line(made["grid_networks"], "CartPole-v1", "1,000", "0.5")
    assert cells[3:] == ["90 (1)", "not run", "60 (1)", "not run"]
    gain = np.array([2.0, 5.0, -1.0])
    half = stats.t.ppf(0.95, 2) * gain.std(ddof=1) / np.sqrt(3)
    cells = table_line(made["grid_sets"], "LunarLander-v3", "10,000", "0.5")
    assert cells[3:] == ["", f"2.0 ± {half:.1f} (2 of 3)", "", ""]
    assert made["grid_sets"].endswith("0 of these 1 intervals exclude 0.")
    cells = table_line(made["grid_seeds"], "LunarLander-v3", "10,000", "0.5")
    assert cells[3:] == ["", "12, 25, 29", "", "10, 20, 30, 40, 50"]
    cells = table_line(made["grid_cloning"], "LunarLander-v3", "10,000", "0.5")
    assert cells[3:] == ["-10.0 (0 of 1)", "", "-8.0 (0 of 1)", "", "", ""]
    assert table_line(made["grid_best"], "LunarLander-v3", "10,000", "0.5")[-1] == "4 ± 0"  # 8 of 200
    assert table_line(made["grid_longer"], "10,000", "0.5", "20,000")[3:] == [
        "10, 20",
        "15",
        f"3.5 ± {stats.t.ppf(0.95, 1) * 1.5:.1f} (2 of 2)",
    ]
    assert table_line(made["grid_longer"], "10,000", "0.5", "40,000")[3:5] == ["15, 18", "16"]
    assert table_line(made["grid_entropy"], "LunarLander-v3", "100,000, mixed")[-1] == "0.25 (1)"
    assert table_line(made["grid_bound"], "LunarLander-v3", "100,000, mixed")[-1] == "-7.0 (1)"
    assert "CartPole" not in made["grid_bound"]
    ours = 100 * (2 * 30 + 102) / 150
    assert table_line(made["grid_paper_scale"], "10,000", "0.5")[2] == f"93 / {ours:.0f}"
    front = table_line(made["grid_front"], "10,000 ")
    assert front[1:4] == ["not run", "not run", f"30 ± {stats.t.ppf(0.95, 4) * np.sqrt(250) / np.sqrt(5):.0f}"]
    assert table_line(made["grid_front"], "10,000, risk-averse")[4] == "30"
    assert " 40 |" not in made["grid_front"]  # the front page leaves tau 0.1 to the results
    done = box.keys()
    cells = table_line(made["grid_missing"], "SAC-N")  # planned: 7 cells of 5 seeds, 3 of 3, 5 of 5
    assert cells[1:] == [str(len(done) + 2), str(69 - len(done) - 2), "2.0", f"{(69 - len(done) - 2) * 2 / 60:.1f}"]


def test_report_over_the_seven_cells_on_a_small_csv(tmp_path):
    """Averaged over the cells before the interval; the most behind is a matter of means; no gaps allowed."""
    rng = np.random.default_rng(0)
    scores = {method: rng.integers(0, 100, (5, 7)) for method in ("Ell_0.9-N", "SAC-N", "BC", "BC-top", "CQL")}
    cells = [(size, tau, 0.0) for tau in (0.5, 0.9) for size in (1000, 10_000, 100_000)] + [(100_000, 0.5, 0.5)]
    rows = []
    for method, table in scores.items():
        for i, seed in enumerate((100, 101, 102, 103, 104)):
            for j, (size, tau, early) in enumerate(cells):
                row = row_of_a_sweep(method, size, tau, seed, int(table[i, j]), early_fraction=early)
                rows.append(row | {"training_entropy": (i + j) / 10})
    rows.append(row_of_a_sweep("CH-N", 1000, 0.5, 100, 50))  # lacks all other runs
    for seed, size in itertools.product((100, 101, 102, 103, 104), (1000, 10_000)):  # pooled apart from LunarLander
        for method, score in (("SAC-N", 90), ("Ell_0.9-N", 93)):
            rows.append(row_of_a_sweep(method, size, 0.5, seed, score, "--total-updates 2000", "CartPole-v1"))
    written(tmp_path / "grid.csv", rows)
    made = report.tables(tmp_path)["grid_overall"]
    cells = table_line(made, "Ell_0.9-N")
    mine = [sum(row) / 7 for row in scores["Ell_0.9-N"].tolist()]
    half = stats.t.ppf(0.95, 4) * np.std(mine, ddof=1) / np.sqrt(5)
    assert cells[1] == f"{sum(mine) / 5:.1f} ± {half:.1f}"
    gain = [mine[i] - sum(scores["BC-top"][i].tolist()) / 7 for i in range(5)]
    half = stats.t.ppf(0.95, 4) * np.std(gain, ddof=1) / np.sqrt(5)
    assert cells[3] == f"{sum(gain) / 5:.1f} ± {half:.1f} ({sum(g > 0 for g in gain)} of 5)"
    assert cells[4] == str(scores["Ell_0.9-N"].min())
    behind = [
        max(scores[p][:, j].mean() for p in ("BC", "BC-top", "CQL")) - scores["Ell_0.9-N"][:, j].mean()
        for j in range(7)
    ]
    names = ["1,000", "10,000", "100,000", "1,000, τ = 0.9", "10,000, τ = 0.9", "100,000, τ = 0.9", "100,000, mixed"]
    assert cells[5] == f"{max(behind):.0f} ({names[int(np.argmax(behind))]})"
    assert table_line(made, "SAC-N")[2] == "" and "CH-N" not in made
    gain = [mine[i] - sum(scores["SAC-N"][i].tolist()) / 7 for i in range(5)]
    half = stats.t.ppf(0.95, 4) * np.std(gain, ddof=1) / np.sqrt(5)
    pooled = f"{sum(gain) / 5:.1f} ± {half:.1f} ({sum(g > 0 for g in gain)} of 5), 7 cells"
    assert "CartPole" not in report.tables(tmp_path)["grid_entropy_return"]  # nearly all of its runs have 100
    sets = report.tables(tmp_path)["grid_sets"]
    assert table_line(sets, "LunarLander-v3", "mean over cells")[4] == pooled
    assert table_line(sets, "CartPole-v1", "mean over cells")[4] == "3.0 ± 0.0 (5 of 5), 2 cells"
    assert made.splitlines()[-1].startswith("Differences: ") and "of these 8 intervals" in made


def test_report_of_spread_and_entropy_on_a_small_csv(tmp_path):
    """The spread is that of the last update of each run; the rank correlation is over the runs of the three sets."""
    rng = np.random.default_rng(1)
    rows, points, entropies, scores = [], [], [], []
    for method in ("SAC-N", "CH-N", "Ell_0.9-N", "BC"):
        for seed in (100, 101, 102, 103):
            row = row_of_a_sweep(method, 10_000, 0.5, seed, float(rng.integers(100)))
            row["training_entropy"] = rng.uniform()
            rows.append(row)
            name = {key: row[key] for key in ("method", "dataset_id", "seed", "flags")}
            points += [name | {"update": update, "charts/std_data_actions": 100 * update} for update in (1, 2)]
            if method != "BC":
                entropies.append(row["training_entropy"])
                scores.append(row["normalized_return"])
    written(tmp_path / "grid.csv", rows)
    written(tmp_path / "grid_curves.csv", points)
    made = report.tables(tmp_path)
    assert table_line(made["grid_spread"], "LunarLander-v3", "10,000")[3:] == ["200.00 ± 0.00 (4)"] * 3
    found = []
    for x, y in ((entropies, scores), (entropies[4:], scores[4:])):  # with and without the box
        below = [sum(other < one for other in x) + sum(other == one for other in x) / 2 for one in x]  # ranks
        lower = [sum(other < one for other in y) + sum(other == one for other in y) / 2 for one in y]
        found += [f"{np.corrcoef(below, lower)[0, 1]:.2f}", str(len(x))]
    assert table_line(made["grid_entropy_return"], "LunarLander-v3", "10,000")[3:] == found


def test_best_and_worst_are_marked_by_the_papers_rule():
    columns = [np.array([x - 1.0, x, x + 1.0]) for x in (50.0, 52.4, 51.2)]
    assert report.marked(columns) == ["<u>50 ± 2</u>", "**52 ± 2**", "51 ± 2"]
    assert report.marked([x / 10 for x in columns]) == ["5 ± 0", "5 ± 0", "5 ± 0"]  # less than 1 apart


def test_functions_of_the_index_exist_in_the_scripts_it_names():
    """docs/index.md maps the paper to the code: every function is in every script of its row."""
    text = (ROOT / "docs" / "index.md").read_text().split("## From the paper to the code")[1].split("\n## ")[0]
    short = {"tabular": "ersac_tabular", "ensemble": "ersac_ensemble", "epinet": "ersac_epinet", "atari": "ersac_atari"}
    found = 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) == 3 and "`" in cells[2] and "--" not in cells[2] and "__main__" not in cells[2]:
            names = list(short) if cells[1] == "all four" else cells[1].split(", ")
            for script in (short.get(name, "gen_expectile_data") for name in names):
                tree = ast.parse((ROOT / f"{script}.py").read_text())
                defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
                for function in re.findall(r"`(\w+)`", cells[2]):
                    assert function in defined, (script, function)
                    found += 1
    assert found > 30


# ----- every command of the pages, in a copy of the repository, with its budget cut down
FEW = "--total-updates 2 --eval-interval 1 --eval-episodes 1"
CUT = {
    "ersac_tabular.py": "--total-updates 5 --eval-interval 5",
    "ersac_ensemble.py": f"{FEW} --dataset-size 1000",
    "ersac_epinet.py": f"{FEW} --dataset-size 1000",
    "ersac_atari.py": f"{FEW} --clone-updates 1 --batch-size 4",
    "gen_expectile_data.py": "--dataset-size 500 --eval-episodes 2",
    "docs/benchmark/clone.py": "--total-updates 2 --eval-episodes 1 --dataset-size 1000",
    "docs/benchmark/cql.py": "--total-updates 2 --eval-episodes 1 --dataset-size 1000",
    "docs/benchmark/epinet_toy.py": "--seeds 1 --counts 1 3",
    "docs/benchmark/gen_report.py": "--report-only",
    "docs/benchmark/hover.py": "--seeds 1 --start-steps 4096",
    "docs/benchmark/record_atari.py": "--steps 60 --max-episode-steps 30 --reference-episodes 1 --overwrite",
    "docs/benchmark/soak.py": "--minutes 0.3 --interval 3 --out short.csv",  # the figures need the long one
    "docs/benchmark/speed.py": "--rounds 1 --updates 1 --transitions 256",
    "docs/benchmark/sweep.py": "--envs CartPole-v1 --sizes 1000 --taus 0.5 --early-fraction 0 --methods BC --seeds 100"
    " --datasets",  # with no name: those of the environments
    "docs/benchmark/tabular.py": "--num-seeds 0",  # what is missing takes hours
}
TRAINING = "--start-steps 4096 --finish-steps 4096 --floor -100000"  # where a command trains policies anew


@pytest.mark.slow
def test_every_command_of_the_docs_runs(tmp_path, datasets):
    """As printed, but for the budget: what is given last counts. Downloads are left out."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "runs", ".venv", "__pycache__", "wandb"))
    environment = os.environ | {"MINARI_DATASETS_PATH": str(tmp_path / "minari"), "OMP_NUM_THREADS": "1"}
    mine = tmp_path / "minari" / "my" / "minari-dataset-v0"
    shutil.copytree(datasets / "test" / "cartpole-v0", mine)
    metadata = (mine / "data" / "metadata.json").read_text()
    (mine / "data" / "metadata.json").write_text(metadata.replace("test/cartpole-v0", "my/minari-dataset-v0"))
    found = dict.fromkeys((script, rest.strip()) for page in PAGES for script, rest in commands(page))
    order = sorted(found, key=lambda command: "record_atari" not in command[0])  # the recording is used by others
    ran, failed = 0, []
    for script, rest in order:
        words = shlex.split(rest)
        if script == "ersac_atari.py" and ("--env-id" in words or "my/images-v0" in words) or "--resume" in words:
            continue  # needs a download, or a data set or run folder of the reader's own
        cut = CUT.get(script, "") if "--help" not in words else ""
        cut += f" {TRAINING}" if script.startswith("gen") and {"--retrain", "Acrobot-v1"} & {*words} else ""
        command = [sys.executable, script, *words, *cut.split()]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        failed += [f"{' '.join(command[1:])}\n{done.stderr[-600:]}"] if done.returncode else []
        ran += 1
    assert ran > 30
    assert not failed, pytest.fail("\n\n".join(failed))
