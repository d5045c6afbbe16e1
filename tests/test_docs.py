"""Protects README and docs: tables and figures are what report.py and figures.py make of the committed CSVs; flags,
files and functions that pages name exist; every command runs. And the formulas behind the tables."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT
from scipy import stats

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
sys.path.insert(0, str(ROOT / "docs" / "benchmark"))
import figures  # noqa: E402
import report  # noqa: E402


def arguments(script):
    """Names of a script's command-line arguments."""
    tree = ast.parse((ROOT / script).read_text())
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    return {item.target.id.replace("_", "-") for item in args.body if isinstance(item, ast.AnnAssign)}


def commands(page):
    """(script, rest of the command) for every command line with one of our scripts."""
    text = page.read_text().replace("\\\n", " ")
    return re.findall(r"python ((?:docs/benchmark/)?(?!my_)\w+\.py)([^\n`#|]*)", text)


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
    named = {name for page in PAGES for name in re.findall(r"<!-- table: (\w+) -->", page.read_text())}
    assert len(named) > 10 and named <= set(made)
    for page in PAGES:
        assert report.fill(page.read_text(), made) == page.read_text(), f"run docs/benchmark/report.py: {page.name}"


@pytest.mark.slow
def test_figures_of_the_docs_are_made_from_the_committed_csvs(tmp_path):
    """All but gen_visitation.png, which is gen_report.py's."""
    for figure in figures.FIGURES:
        figure(figures.Args(out=str(tmp_path), runs=str(tmp_path / "runs")))
    shown = {name for page in PAGES for name in re.findall(r"figures/(\w+\.(?:png|gif))", page.read_text())}
    assert shown - {path.name for path in tmp_path.iterdir()} == {"gen_visitation.png"}
    for path in tmp_path.glob("*.png"):
        before = matplotlib.image.imread(ROOT / "docs" / "figures" / path.name)
        after = matplotlib.image.imread(path)
        assert before.shape == after.shape and np.abs(before - after).mean() < 0.002, path.name


# ----- the formulas behind the tables
def row(method, seed, score, size=10_000, tau=0.5, flags="", early=0.0, switch=0.0):
    """A row of networks.csv."""
    name = {"method": method, "dataset_id": f"ersac/x/y-s{seed}-v0", "seed": seed, "flags": flags}
    data = {"env_id": "LunarLander-v3", "dataset_size": size, "expectile_tau": tau}
    return name | data | {"early_fraction": early, "switch_prob": switch, "normalized_return": score}


def test_an_interval_is_that_of_students_t():
    x = np.array([3.0, 7.0, 8.0, 20.0])
    low, high = stats.t.interval(0.9, 3, loc=x.mean(), scale=stats.sem(x))
    assert report.interval(x, 2) == f"{x.mean():.2f} ± {(high - low) / 2:.2f}"
    assert report.interval(x[:1]) == "3" and report.interval(x[:0]) == ""
    assert report.gained(x - 7.5).endswith("(2 of 4)")


def test_differences_are_counted_alone_and_by_holms_correction():
    rng = np.random.default_rng(17)
    gains = [20 * rng.normal(shift, 1, 5) for shift in (0, 0.9, 1.5, 3, 6, -2)]
    p = np.array([stats.ttest_1samp(x, 0).pvalue for x in gains])
    adjusted = [max((len(p) - (p < q).sum()) * q for q in p[p <= one]) for one in p]  # Holm's adjusted p-values
    clear, holm = (p < 0.1).sum(), sum(x <= 0.1 for x in adjusted)
    assert 0 < holm < clear < 6
    line = ["9.0 ± 0.1 (5 of 5)", *map(report.gained, gains)]  # the first is no difference
    text = report.compared(list("abcdefg"), [line], first=1)
    assert f"\n\n{clear} of these 6 differences exclude 0, {holm} after Holm" in text


def test_best_and_worst_are_marked_by_the_papers_rule():
    columns = [np.array([x - 1.0, x, x + 1.0]) for x in (50.0, 52.4, 51.2)]
    assert report.marked(columns) == ["<u>50 ± 2</u>", "**52 ± 2**", "51 ± 2"]
    assert report.marked([x / 10 for x in columns]) == ["5 ± 0", "5 ± 0", "5 ± 0"]  # less than 1 apart


def test_differences_are_paired_by_seed_and_pooled_within_it():
    """Rows with other flags, and seeds that one method lacks, do not count."""
    rng = np.random.default_rng(0)
    scores = {(m, size, s): rng.integers(100) for m in "ab" for size in (1000, 10_000) for s in range(100, 105)}
    rows = [row(m, seed, score, size) for (m, size, seed), score in scores.items()]
    rows += [row("a", 105, 1000), row("a", 100, 1000, flags="--alpha 1"), row("b", 109, 1000, 100_000)]
    rows = report.labelled(rows)
    small, large = (np.array([scores["a", n, s] - scores["b", n, s] for s in range(100, 105)]) for n in (1000, 10_000))
    first, second, mean, _, text = report.pairs(rows, [("a", "b")]).splitlines()[2:]
    assert first == f"| LunarLander-v3 | 1,000 | 0.5 | {report.gained(small)} |"
    assert second == f"| LunarLander-v3 | 10,000 | 0.5 | {report.gained(large)} |"
    assert f"| {report.gained((small + large) / 2)}, 2 cells |" in mean and "of these 3 differences" in text


def test_alternating_and_main_tables():
    """Means and every seed, runs below 60, points behind the row's best; a method without runs is left out."""
    scores = {"Ell-Epi*-own": (90, 50, 95, 88, 77), "BC": (10, 70, 20, 0, 5), "CQL": (60, 59, 61, 80, 90)}
    rows = []
    for method, values in scores.items():
        for i, score in enumerate(values):
            rows.append(row(method, 110 + i, score, early=0.8, switch=0.1))
            rows.append(row(method, 100 + i, score + 1))
    rows.append(row("BC", 115, 99, early=0.8, switch=0.1))  # a later report's seed
    rows = report.labelled(rows)
    made = report.alternating(rows)
    header, _, line, below = made["alternating"].splitlines()
    assert header == "| transitions | Ell-Epi\\*-own | BC | CQL |"
    assert line.startswith("| 10,000, alternating, 20 % good | 80 (90, 50, 95, 88, 77) | 21 (10, 70, 20, 0, 5) |")
    assert below == "| runs below 60 | 1 of 5 | 4 of 5 | 1 of 5 |"
    gain = np.subtract(scores["Ell-Epi*-own"], scores["BC"])
    assert f"good | {report.gained(gain)} |" in made["alternating_gains"]
    plain, turns = report.main_table(rows).splitlines()[2:]
    assert plain == "| 10,000, neutral | **81** | 22 (-59) | 71 (-10) |" and "good | **80** | 21 (-59) |" in turns
    ours, clones, _ = report.risk(rows).splitlines()[2:]
    assert ours.startswith("| Ell-Epi\\*-own | 2 | 80 | 0 | 2 of 10 |")
    gap = report.interval(np.subtract(scores["CQL"], scores["BC"]))
    low, high = stats.beta.ppf(0.05, 8, 3), stats.beta.ppf(0.95, 9, 2)  # Clopper and Pearson
    share = f"{100 * low:.0f} to {100 * high:.0f} %"
    assert clones.startswith(f"| BC | 2 | 22 | {gap} (10,000) | 8 of 10 | {share} | 8 : 2")
    assert clones.endswith(f"| {2 * (45 + 10 + 1) / 2**10:.2g} |")  # 8 or more heads of 10, either side


def test_runs_on_images_are_compared_with_both_clones_of_the_same_seed():
    """A row of other data, of a tuning seed or with other flags does not count."""
    scores = {"BC-pixels": (-20.0, -21.0), "BC-sampled-pixels": (-19.0, -19.5), "Ell-Epi*-pixels": (-10.0, -14.0)}
    rows = [(m, "alternating", 100 + i, x, "") for m, values in scores.items() for i, x in enumerate(values)]
    rows += [("CQL-pixels", "mixed", 100, 5.0, ""), ("Ell-Epi*-pixels", "alternating", 0, 7.0, "--n-step 1")]
    names = ("method", "dataset_id", "seed", "eval_return_mean", "flags")
    rows = [dict(zip(names, r)) | {"seconds": 90, "best_return": 1, "q_star_minus_return": 0.5} for r in rows]
    rows = [r | {"dataset_id": f"ersac/pong/{r['dataset_id']}-s{r['seed']}-v0"} for r in rows]
    greedy, sampled, ours = report.pixels(rows, "alternating").splitlines()[2:]
    assert greedy.endswith(f"|  | {report.gained([-1.0, -1.5])} | 2 |") and sampled.startswith("| Pong | BC-sampled |")
    mean = report.interval(np.array([-10.0, -14.0]), 1)
    gains = f"{report.gained([10.0, 7.0])} | {report.gained([9.0, 5.5])}"
    assert ours == f"| Pong | Ell-Epi\\* | -10.0, -14.0 | {mean} | {gains} | 2 |"
    tuned = report.pixels(rows, "alternating", tuning=True).splitlines()[2:]
    assert tuned == ["| Pong | Ell-Epi\\* | `--n-step 1` | 7.0 | 0.50 |"]


def test_runtimes_are_relative_to_the_box_and_tuning_runs_are_counted():
    ours = [("SAC-N", 100, 100.0), ("SAC-N", 10, 10.0), ("Ell-Epi*", "", 5.0)]
    ours = [dict(zip(("contender", "num_critics", "ms_per_update"), x)) for x in ours]
    paper = [{"method": "SAC-N", "seconds_per_epoch": 0.4}, {"method": "Ell-Epi*", "seconds_per_epoch": 0.1}]
    last = report.runtime(ours, paper).splitlines()[-1]
    assert last == "| Ell-Epi\\* | 0.1 | 0.25 | 5.0 | 0.05 | 5.0 | 0.50 |"
    runs = [row("BC", 0, 50), row("BC", 1, 60), row("BC", 0, 70, flags="--lr 1")]
    assert report.tuning_runs(runs).splitlines()[2:] == ["| BC | 3 | 2 | 2 |"]


def test_rows_made_again_are_compared_over_the_seeds_that_both_have(tmp_path, capsys):
    def write(name, rows):
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    write("networks.csv", [row("BC", seed, score) for seed, score in ((100, 90), (101, 94), (102, 50))])
    for name in ("tuning.csv", "pixels.csv"):
        write(name, [row("CH-N", 100, 0)])
    tolerance = 2 * np.std([90, 94, 50], ddof=1)  # two standard errors of a difference of means over two seeds
    near = [row("BC", 100, 92 - tolerance + 1), row("BC", 101, 92 - tolerance + 1), row("BC", 105, 0)]
    assert report.compare(write("near.csv", near), tmp_path)
    assert f"2 seeds | {93 - tolerance:.1f} | committed 92.0 |" in capsys.readouterr().out
    far = [row("BC", 100, 92 - tolerance - 1), row("BC", 101, 92 - tolerance - 1)]
    assert not report.compare(write("far.csv", far), tmp_path)
    assert not report.compare(write("none.csv", [row("EDAC", 100, 50)]), tmp_path)  # nothing to compare is no success


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
    "ersac_ensemble.py": FEW,
    "ersac_epinet.py": FEW,
    "ersac_atari.py": f"{FEW} --clone-updates 1 --critic-warmup 1 --batch-size 4",
    "gen_expectile_data.py": "--dataset-size 500 --eval-episodes 2",
    "docs/benchmark/clone.py": "--total-updates 2 --eval-episodes 1",
    "docs/benchmark/d3.py": "--total-updates 2 --eval-episodes 1",
    "docs/benchmark/epinet_toy.py": "--seeds 1 --counts 1 3",
    "docs/benchmark/gen_report.py": "--report-only",
    "docs/benchmark/hover.py": "--seeds 1 --start-steps 4096",
    "docs/benchmark/record_atari.py": "--steps 60 --max-episode-steps 30 --reference-episodes 1 --overwrite",
    "docs/benchmark/speed.py": "--rounds 1 --updates 1",
    "docs/benchmark/sweep.py": "--datasets ersac/cartpole/tau50-1k-s{seed}-v0 --methods BC --seeds 100 --flags=",
}
TRAINING = "--start-steps 4096 --finish-steps 4096 --floor -100000 --overwrite --dataset-id my/trained-v0"


@pytest.mark.slow
def test_every_command_of_the_docs_runs(tmp_path, datasets):
    """As printed, but for the budget: what is given last counts. Downloads are left out."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "runs", ".venv", "__pycache__", "wandb"))
    environment = os.environ | {"MINARI_DATASETS_PATH": str(tmp_path / "minari"), "OMP_NUM_THREADS": "1"}
    for name in ("my/minari-dataset-v0", "my/cartpole-v0", "ersac/lunarlander/tau50-early80-switch10-100k-v0"):
        mine = tmp_path / "minari" / name  # a reader's own, or from a command that is cut down here
        shutil.copytree(datasets / "test" / "cartpole-v0", mine)
        metadata = (mine / "data" / "metadata.json").read_text()
        (mine / "data" / "metadata.json").write_text(metadata.replace("test/cartpole-v0", name))
    found = dict.fromkeys((script, rest.strip()) for page in PAGES for script, rest in commands(page))
    order = sorted(found, key=lambda command: "record_atari" not in command[0])  # the recording is used by others
    ran, failed = 0, []
    for script, rest in order:
        words = shlex.split(rest)
        download = any(re.match("atari/|hf://|my/images", word) for word in words)
        if script == "ersac_atari.py" and "--dataset-id" not in words or download or "--resume" in words:
            continue  # needs a download, or a data set or run folder of the reader's own
        cut = CUT.get(script, "") if "--help" not in words else ""
        if script in ("ersac_ensemble.py", "ersac_epinet.py"):
            cut += "" if "--dataset-id" in words else " --dataset-size 1000"
        cut += f" {TRAINING}" if script.startswith("gen") and {"--retrain", "Acrobot-v1"} & {*words} else ""
        command = [sys.executable, script, *words, *cut.split()]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        failed += [f"{' '.join(command[1:])}\n{done.stderr[-600:]}"] if done.returncode else []
        ran += 1
    assert ran > 20
    assert not failed, pytest.fail("\n\n".join(failed))
