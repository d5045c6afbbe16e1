"""Committed CSVs to the tables of the docs, byte for byte.

    python docs/benchmark/report.py

Every table stands in a page between `<!-- table: NAME -->` and `<!-- end -->`; this command rewrites what is between.
An interval is the mean over seeds plus-minus a 90 % Student-t interval; each seed is averaged over the taus first.
The paper's own numbers are in docs/benchmark/paper_*.csv.
"""

import csv
import itertools
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gen_report  # noqa: E402

DOCS = Path(__file__).resolve().parents[1]
METHODS = {("box", None): "SAC-N", ("hull", None): "CH-N", ("ellipsoid", 1.0): "Ell-N", ("ellipsoid", 0.9): "Ell_0.9-N"}
ENVS, TAUS = ("MachineReplacement", "RiverSwim"), (0.1, 0.5, 0.9)


@dataclass
class Args:
    csvs: str = str(DOCS / "benchmark")
    """folder with the CSVs"""
    docs: str = str(DOCS)
    """folder with the pages"""


def load(path):
    """Rows of a CSV with numbers as numbers and the method's name; nothing if the file is not there yet."""
    if not Path(path).exists():
        return []
    with open(path, newline="") as f:
        rows = [{k: number(v) for k, v in row.items()} for row in csv.DictReader(f)]
    for row in rows:
        if "uncertainty_set" in row:
            kind = row["uncertainty_set"]
            row["method"] = METHODS.get((kind, row["upsilon"] if kind == "ellipsoid" else None))
    return rows


def number(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"True": True, "False": False}.get(text, text)


def per_seed(rows, column, **where):
    """The column of the chosen rows, averaged within each seed, in the order of the seeds."""
    chosen = [row for row in rows if all(row[k] == v for k, v in where.items())]
    return np.array(
        [np.mean([r[column] for r in chosen if r["seed"] == s]) for s in sorted({r["seed"] for r in chosen})]
    )


def interval(x, digits=0):
    """mean ± half width of the 90 % interval of the mean; of a single seed just its number"""
    if len(x) == 1:
        return f"{x[0]:.{digits}f}"
    half = stats.t.ppf(0.95, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x))
    return f"{x.mean():.{digits}f} ± {half:.{digits}f}"


def gained(gain):
    """Differences by seed: mean ± half width, and how many seeds gained; nothing if there is no seed."""
    gain = np.array(list(gain))
    return f"{interval(gain, 1)} ({(gain > 0).sum()} of {len(gain)})" if len(gain) else ""


def marked(columns, digits=0):
    """Intervals; bold the best and underlined the worst mean, if ahead of (behind) all others by 1 or more."""
    cells, means = [interval(x, digits) for x in columns], [x.mean() for x in columns]
    order = np.argsort(means)
    if len(cells) < 2:
        return cells
    if means[order[-1]] - means[order[-2]] >= 1:
        cells[order[-1]] = f"**{cells[order[-1]]}**"
    if means[order[1]] - means[order[0]] >= 1:
        cells[order[0]] = f"<u>{cells[order[0]]}</u>"
    return cells


def markdown(header, rows):
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def how_many_are_clear(rows):
    """How many paired differences exclude 0: of many 90 % intervals some do by chance."""
    found = re.findall(r"(-?[\d.]+) ± ([\d.]+)", " ".join(" ".join(map(str, row)) for row in rows))
    clear = sum(abs(float(mean)) > float(half) for mean, half in found)
    chance = f"By chance alone about {len(found) / 10:.0f} would." if len(found) > 4 else ""
    return f"{clear} of these {len(found)} intervals exclude 0. {chance}".rstrip()


def compared(header, rows):
    """A table of paired differences, and how many of them exclude 0."""
    return markdown(header, rows) + "\n\n" + how_many_are_clear(rows)


def paper_grid(rows, paper, column="normalized_return", taus=False):
    """The paper's table beside ours: our mean ± interval and in brackets the paper's mean."""
    table = []
    for env in ENVS:
        for size in (10, 100, 1000):
            for tau in TAUS if taus else ("all",):
                where = {"env_id": env, "dataset_size": size} | ({"expectile_tau": tau} if taus else {})
                cells = marked([per_seed(rows, column, method=m, **where) for m in METHODS.values()])
                (theirs,) = [
                    r for r in paper if (r["env_id"], r["dataset_size"], r["expectile_tau"]) == (env, size, tau)
                ]
                cells = [f"{cell} ({theirs[m]})" for cell, m in zip(cells, METHODS.values())]
                behaviour = per_seed(rows, "behaviour_normalized_return", method="SAC-N", **where).mean()
                support = interval(per_seed(rows, "support_optimum", method="SAC-N", **where))
                label = [env, f"{size}×", *([tau] if taus else [])]
                table.append([*label, *cells, support, f"{behaviour:.0f} ({theirs['behaviour']})"])
    header = ["MDP", "data", *(["τ"] if taus else []), *METHODS.values(), "value iteration on the data"]
    return markdown([*header, "behaviour policy"], table)


def differences(rows, column="normalized_return"):
    """Paired by seed (same data, resamples and initial tables): one method minus another, and how many seeds gained."""
    pairs = [("CH-N", "SAC-N"), ("Ell-N", "SAC-N"), ("Ell_0.9-N", "SAC-N"), ("Ell_0.9-N", "Ell-N")]
    table = []
    for env in ENVS:
        for size in (10, 100, 1000):
            cells = []
            for pair in pairs:
                first, second = (per_seed(rows, column, env_id=env, dataset_size=size, method=m) for m in pair)
                cells.append(gained(first - second))
            table.append([env, f"{size}×", *cells])
    return compared(["MDP", "data", *(f"{first} − {second}" for first, second in pairs)], table)


def against_box(rows):
    """Ell_0.9-N against SAC-N at every risk level: paired difference, ratio of the means, and the behaviour policy."""
    table = []
    for env in ENVS:
        for size in (10, 100, 1000):
            for tau in TAUS:
                here = [r for r in rows if (r["env_id"], r["dataset_size"], r["expectile_tau"]) == (env, size, tau)]
                ell = per_seed(here, "normalized_return", method="Ell_0.9-N")
                box = per_seed(here, "normalized_return", method="SAC-N")
                behaviour = here[0]["behaviour_normalized_return"]
                ratio = f"{100 * (ell.mean() / box.mean() - 1):+.0f} %"
                first = [per_seed(here, "normalized_return_state1", method=m) for m in ("Ell_0.9-N", "SAC-N")]
                gains = [interval(gain, 1) for gain in (ell - box, first[0] - first[1], ell - behaviour)]
                table.append([env, f"{size}×", tau, gains[0], ratio, gains[1], gains[2]])
    header = [
        "MDP",
        "data",
        "τ",
        "Ell_0.9-N − SAC-N",
        "relative to SAC-N",
        "from state 1",
        "Ell_0.9-N − behaviour policy",
    ]
    return compared(header, table)


def by_evaluation(rows):
    """The exact evaluations: greedy or, at 10×, stochastic policy; uniform start or state 1."""
    columns = {
        "normalized_return": "greedy, uniform start",
        "normalized_return_state1": "greedy, state 1",
        "normalized_return_stochastic": "stochastic, uniform start",
        "normalized_return_stochastic_state1": "stochastic, state 1",
    }
    table = []
    for env in ENVS:
        for size in sorted({r["dataset_size"] for r in rows}):
            for column, label in columns.items():
                if size == 10 or "stochastic" not in label:
                    where = dict(env_id=env, dataset_size=size)
                    scores = [per_seed(rows, column, method=m, **where) for m in METHODS.values()]
                    gain = scores[-1] - scores[0]
                    table.append([env, f"{size}×", label, *map(interval, scores), interval(gain, 1)])
    return markdown(["MDP", "data", "evaluation", *METHODS.values(), "Ell_0.9-N − SAC-N"], table)


def no_bootstrap(rows):
    """Every critic sees the same data: distance to value iteration on the data, for two initial tables."""
    table = []
    for prior, label in ((True, "below all attainable values"), (False, "all attainable values")):
        for env in ENVS:
            chosen = [r for r in rows if ("--prior" in r["arguments"]) == prior and r["env_id"] == env]
            for tau in (*TAUS, None) if chosen else ():
                where = {"expectile_tau": tau} if tau else {}
                cells = [
                    interval(per_seed(chosen, "normalized_return", method=m, **where), 1) for m in METHODS.values()
                ]
                cells.append(interval(per_seed(chosen, "support_optimum", method="SAC-N", **where), 1))
                table.append([label, env, tau or "mean", *cells])
    return markdown(["initial tables", "MDP, 10×", "τ", *METHODS.values(), "value iteration on the data"], table)


def by_targets(rows, gains=False):
    """Shared and own targets, with and without bootstrap, for two ranges of initial tables; mean over the taus. Or own
    minus shared targets, paired by seed."""
    evaluations = {"normalized_return": "uniform", "normalized_return_state1": "state 1"}
    kinds = ("shared", "own")
    table = []
    for env, size, bootstrap, low in itertools.product(ENVS, (10, 100), (True, False), (False, True)):
        here = [r for r in rows if (r["env_id"], r["dataset_size"], r["bootstrap"]) == (env, size, bootstrap)]
        here = [r for r in here if ("--prior" in r["arguments"]) == low]
        if not here:
            continue
        setting = [env, f"{size}×", "resampled" if bootstrap else "the same", "below" if low else "all values"]
        for column, start in evaluations.items():
            line = [*setting, start]
            for method in METHODS.values():
                mine = [[r for r in here if f"--targets {kind}" in r["arguments"]] for kind in kinds]
                shared, own = (per_seed(some, column, method=method) for some in mine)
                if gains:
                    line.append(gained(own - shared) if len(own) and len(own) == len(shared) else "")
                else:
                    line += [interval(y) if len(y) else "" for y in (shared, own)]
            table.append(line)
    header = ["MDP", "data", "critics' data", "initial tables", "start"]
    if gains:
        return compared([*header, *METHODS.values()], table)
    return markdown([*header, *(f"{method} {kind}" for method in METHODS.values() for kind in kinds)], table)


def by_tau(rows):
    """Ell_0.9-N by the behaviour policy's risk level, mean over data sizes, with the paper's numbers."""
    paper = {"MachineReplacement": (93, 95, 94), "RiverSwim": (87, 87, 84)}
    table = []
    for env, theirs in paper.items():
        columns = [per_seed(rows, "normalized_return", env_id=env, expectile_tau=t, method="Ell_0.9-N") for t in TAUS]
        table.append([env, *(f"{interval(x)} ({n})" for x, n in zip(columns, theirs))])
    return markdown(["MDP", *(f"τ = {t}" for t in TAUS)], table)


def by_critics(fewer, paper):
    """Return against the number of critics at 10x, mean over the taus; 100 are in the paper's grid."""
    rows = [r | {"N": int(r["arguments"].split()[-1])} for r in fewer]
    rows += [r | {"N": 100} for r in paper if r["dataset_size"] == 10]
    table = []
    for env in ENVS:
        for n in sorted({r["N"] for r in rows}):
            columns = [per_seed(rows, "normalized_return", env_id=env, method=m, N=n) for m in METHODS.values()]
            table.append([env, n, *marked(columns)])
    return markdown(["MDP, 10×", "N", *METHODS.values()], table)


def runtime(rows):
    """The paper's runtimes (s per epoch, LunarLander) and ours (ms per update), both relative to SAC-N."""
    paper = {"SAC-N": 0.35, "CH-N": 0.42, "Ell_0.9-N": 0.56, "Ell-Epi": 0.60, "Ell-Epi*": 0.10}
    names = ("ensemble.py box", "ensemble.py hull", "ensemble.py ellipsoid", "epinet.py ell-epi, N indices")
    at = {(r["contender"].removeprefix("ersac_"), r["num_critics"]): r["ms_per_update"] for r in rows}
    table = []
    for (method, seconds), name in zip(paper.items(), (*names, "epinet.py ell-epi-star")):
        ours = [at.get((name, N), at.get((name, 1))) / at["ensemble.py box", N] for N in (100, 10)]
        table.append([method.replace("*", "\\*"), *(f"{x:.2f}" for x in (seconds / paper["SAC-N"], *ours))])
    return markdown(["method", "the paper", "ours, N = 100", "ours, N = 10"], table)


def rates(rows):
    """How often the set keeps its promise at 10x: states with a valid lower bound, states with the truth inside."""
    table = []
    for env in ENVS:
        chosen = [r for r in rows if r["env_id"] == env]
        for kind in ("box", "hull", "ellipsoid"):
            for upsilon in sorted({r["upsilon"] for r in chosen if r["uncertainty_set"] == kind}):
                cells = [
                    interval(100 * per_seed(chosen, column, uncertainty_set=kind, upsilon=upsilon))
                    for column in ("lower_bound_rate", "coverage_rate")
                ]
                returns = interval(per_seed(chosen, "normalized_return", uncertainty_set=kind, upsilon=upsilon))
                table.append([env, kind, upsilon if kind == "ellipsoid" else "", *cells, returns])
    return markdown(["MDP, 10×", "set", "υ", "lower bound valid, %", "true Q inside, %", "normalised return"], table)


def tuning(rows):
    """All settings tried before the defaults were fixed, on seeds 0 to 9, mean over the taus at 10×."""
    table = []
    changes = sorted({re.sub(r".*--upsilon \S+ ", "", row["arguments"]) for row in rows}, key=str)
    for change in changes:
        for env in ENVS:
            chosen = [r for r in rows if r["arguments"].endswith(change) and r["env_id"] == env]
            cells = [interval(per_seed(chosen, "normalized_return", method=m)) for m in METHODS.values()]
            table.append([f"`{change}`", env, *cells])
    return markdown(["changed from the defaults", "MDP", *METHODS.values()], table)


PAPERS = ("SAC-N", "CH-N", "Ell_0.9-N", "Ell-Epi", "Ell-Epi*")  # the paper's five methods with networks
GYM = ("SAC-N", "CH-N", "Ell-N", "Ell_0.9-N", "EDAC", "Ell-Epi", "Ell-Epi*", "BC")


def grid_flags(row):
    """The arguments of a run of the grid beside the scripts' defaults, for the sake of time: fewer updates of the
    ensemble and of the sampled Epinet on CartPole, the latter with smaller minibatches."""
    if row["method"] in ("BC", "Ell-Epi*") or row["env_id"] != "CartPole-v1":
        return ""
    return "--batch-size 128 --total-updates 10000" if row["method"] == "Ell-Epi" else "--total-updates 2000"


def grid_rows(rows):
    """Rows of the paper's grid, and their (environment, size, tau) in order."""
    rows = [r for r in rows if r["flags"] == grid_flags(r) and r["dataset_size"] != ""]
    return rows, sorted({cell(r) for r in rows})


def gym(rows, methods):
    """Networks: a row for each environment, data size and tau, last policies over the seeds. Methods without a run are
    left out."""
    rows, keys = grid_rows(rows)
    methods = [m for m in methods if any(r["method"] == m for r in rows)]
    table = []
    for key in keys:
        where = dict(zip(("env_id", "dataset_size", "expectile_tau"), key))
        columns = {m: per_seed(rows, "normalized_return", method=m, **where) for m in methods}
        shown = dict(zip([m for m in methods if len(columns[m])], marked([x for x in columns.values() if len(x)], 1)))
        seeds = sorted({len(x) for x in columns.values() if len(x)})
        table.append([key[0], f"{key[1]:,}", key[2], *(shown.get(m, "") for m in methods), "/".join(map(str, seeds))])
    return markdown(["environment", "transitions", "τ", *(m.replace("*", "\\*") for m in methods), "seeds"], table)


def cell(row):
    return row["env_id"], row["dataset_size"], row["expectile_tau"]


def slices(rows):
    """Runs with one setting changed and more than one seed: returns and entropies, beside those of the sweep where the
    same seeds have them. Those with another upsilon alone, with little data, are in a table of their own."""
    table = []
    grid, changed = ([r for r in rows if (r["flags"] == grid_flags(r)) == same] for same in (True, False))
    keys = {(*cell(r), r["flags"], r["method"]) for r in changed}
    keys -= {(*cell(r), r["flags"], r["method"]) for r in by_upsilon(rows)}
    for key in sorted(keys, key=lambda key: (key[0], key[1] or math.inf, *key[2:])):  # mixed data have no size: last
        chosen = [r for r in changed if (*cell(r), r["flags"], r["method"]) == key]
        seeds = {r["seed"] for r in chosen}
        if len(seeds) == 1:
            continue
        before = [r for r in grid if (cell(r), r["method"]) == (key[:3], key[4]) and r["seed"] in seeds]
        line = [interval(per_seed(x, "normalized_return"), 1) if x else "" for x in (chosen, before)]
        spread = [r["training_entropy"] for r in chosen if r["training_entropy"] not in ("", None)]
        line.append(f"{np.mean(spread):.2f}" if spread else "")
        table.append(
            [
                key[0],
                f"{key[1]:,}" if key[1] else "mixed",
                key[2],
                key[4].replace("*", "\\*"),
                f"`{key[3]}`" if key[3] else "the defaults",
                *line,
                len(seeds),
            ]
        )
    header = ["environment", "transitions", "τ", "method", "arguments", "return", "return in the sweep"]
    return markdown([*header, "entropy in training", "seeds"], table)


LITTLE = {"env_id": "LunarLander-v3", "dataset_size": 1000, "expectile_tau": 0.5}  # few data, so that the sets matter


def by_upsilon(rows):
    """Rows of that cell in which upsilon alone differs from the grid, and the grid's own, which have 0.9; the value is
    in the column "upsilon". Methods that were never run with another one are left out."""
    found = []
    for r in rows:
        flags, *value = r["flags"].split("--upsilon ")
        if all(r[k] == v for k, v in LITTLE.items()) and flags.strip() == grid_flags(r):
            found.append(r | {"upsilon": number(value[0]) if value else 0.9})
    found = [r for r in found if isinstance(r["upsilon"], int | float)]  # no other argument behind it
    changed = {r["method"] for r in found if r["upsilon"] != 0.9}
    return [r for r in found if r["method"] in changed]


def gym_upsilon(rows):
    """Return against upsilon; in brackets the number of seeds."""
    rows = by_upsilon(rows)
    methods = [m for m in GYM if any(r["method"] == m for r in rows)]
    table = []
    for value in sorted({r["upsilon"] for r in rows}):
        columns = [per_seed(rows, "normalized_return", upsilon=value, method=m) for m in methods]
        table.append([value, *(f"{interval(x)} ({len(x)})" if len(x) else "" for x in columns)])
    names = {"Ell_0.9-N": "ellipsoid of ten critics"}
    return markdown(["υ", *(names.get(m, m).replace("*", "\\*") for m in methods)], table)


def schedule(rows):
    """Where the ensemble was also run with half the updates, and step sizes that fall twice as fast: returns with both,
    on the seeds that have all of them, and the differences to the box, paired by seed."""
    methods, half, table = ("SAC-N", "CH-N", "Ell_0.9-N"), "--total-updates 10000", []
    rows = [r for r in rows if r["env_id"] == "LunarLander-v3" and r["dataset_size"] != "" and r["method"] in methods]
    for key in sorted({cell(r) for r in rows if r["flags"] == half}):
        scores = {}  # (flags, method): {seed: return}
        for r in rows:
            if cell(r) == key:
                scores.setdefault((r["flags"], r["method"]), {})[r["seed"]] = r["normalized_return"]
        seeds = sorted(set.intersection(*(set(scores.get((f, m), {})) for f in (half, "") for m in methods)))
        for flags, updates in ((half, "10,000"), ("", "20,000")) if seeds else ():
            box, hull, ell = (np.array([scores[flags, m][s] for s in seeds]) for m in methods)
            line = [interval(x) for x in (box, hull, ell, hull - box, ell - box)]
            table.append([f"{key[1]:,}", key[2], updates, *line, len(seeds)])
    return markdown(["transitions", "τ", "updates", *methods, "CH-N − SAC-N", "Ell_0.9-N − SAC-N", "seeds"], table)


def gym_tuning(rows):
    """Every setting tried before the defaults were fixed, as it was run."""
    table = []
    for r in rows:
        best = f"{r['best_return']:.0f}" if r["best_return"] != "" else ""
        data = r["dataset_id"].removeprefix("ersac/")
        line = [r["method"].replace("*", "\\*"), data, r["seed"], f"`{r['flags']}`" if r["flags"] else ""]
        table.append([*line, f"{r['normalized_return']:.1f}", f"{r['eval_return_mean']:.0f}", best])
    header = ["method", "data set", "seed", "arguments", "normalised return", "return"]
    return markdown([*header, "best evaluation on the way"], table)


def gym_tried(rows):
    """How many settings each method was tried with on seeds below 100: the budget behind its defaults."""
    table = []
    for m in GYM:
        chosen = [r for r in rows if r["method"] == m]
        if chosen:
            settings = {r["flags"] for r in chosen}
            data = {r["dataset_id"] for r in chosen}
            table.append([m.replace("*", "\\*"), len(settings), len(data), len(chosen)])
    return markdown(["method", "settings", "data sets", "runs"], table)


def charges(rows):
    """What each set takes off a value, for Gaussian critics."""
    names = {"box": "box", "hull": "hull", "ellipsoid_1.0": "ellipsoid, υ = 1"}
    names |= {f"ellipsoid_{u}": f"ellipsoid, υ = {u}" for u in (0.9, 0.5)}
    table = []
    for r in rows:
        label = [r["num_actions"], r["policy"], r["correlation"], r["num_critics"]]
        table.append([*label, *(f"{r[name]:.1f}" for name in names)])
    return markdown(["actions", "policy", "ρ", "N", *names.values()], table)


def speed(rows, epinet):
    """Milliseconds per update, all rounds' range, and the ratio to SAC-N (box, no layer norm) at the same N; for the
    Epinet, to SAC-N with N = 100. One page has the ensembles and their peers, one the Epinet."""
    table = []
    for r in rows:
        closed = r["num_critics"] == 1
        sac_n = r["contender"] == "ersac_ensemble.py box" and r["num_critics"] == 100
        if epinet != ("epinet" in r["contender"]) and not (epinet and sac_n):
            continue
        scatter = f"{r['lowest']:.1f} to {r['highest']:.1f}"
        N = "" if closed else r["num_critics"]
        table.append([r["contender"], N, f"{r['ms_per_update']:.1f}", scatter, f"{r['ratio_to_box']:.3g}"])
    return markdown(["what", "N", "ms per update", "lowest to highest", "relative to box"], table)


def speed_profile(rows):
    """Where the time of an update goes: milliseconds, a column for every run."""
    runs = list(dict.fromkeys(r["run"] for r in rows))
    at = {(r["run"], r["kind"]): r["ms_per_update"] for r in rows}
    table = []
    for kind in dict.fromkeys(r["kind"] for r in rows):
        table.append([kind, *(f"{max(at[run, kind], 0):.2f}" for run in runs)])
    return markdown(["milliseconds per update", *(run.replace("*", "\\*") for run in runs)], table)


def soak(rows, parts):
    """Memory and speed of a long run, in parts of equal length."""
    table, edges = [], np.linspace(rows[0]["seconds"], rows[-1]["seconds"], parts + 1)
    for begin, end in zip(edges, edges[1:]):
        part = [r for r in rows if begin <= r["seconds"] <= end]
        memory, (first, *_, last) = [r["rss_mb"] for r in part], part
        speed = (last["update"] - first["update"]) / (last["cpu_seconds"] - first["cpu_seconds"])
        cells = [f"{begin / 60:.0f} to {end / 60:.0f}", f"{min(memory):.0f} to {max(memory):.0f}"]
        table.append([*cells, f"{last['update']:,}", f"{speed:.0f}"])
    return markdown(["minutes", "resident memory, MB", "updates so far", "updates per second of processor time"], table)


def atari_game(row):
    """The game of a run on images, by its data set."""
    return row["dataset_id"].split("/")[1].capitalize()


def atari_methods(rows):
    """Runs on images: last policies seed by seed, and minus the clone of the same seed."""
    rows = [r for r in rows if not r["flags"]]
    lines = []
    for game, method in dict.fromkeys((atari_game(r), r["method"]) for r in rows):
        here = [r for r in rows if atari_game(r) == game]
        clone = {r["seed"]: r["eval_return_mean"] for r in here if r["method"] == "BC-pixels"}
        runs = sorted((r for r in here if r["method"] == method), key=lambda r: r["seed"])
        returns = np.array([r["eval_return_mean"] for r in runs])
        gain = np.array([r["eval_return_mean"] - clone[r["seed"]] for r in runs if r["seed"] in clone])
        line = [game, method.removesuffix("-pixels").replace("*", "\\*")]
        line += [", ".join(f"{x:.1f}" for x in returns), interval(returns, 1)]
        line.append(interval(gain, 1) if method != "BC-pixels" and len(gain) else "")
        line.append("" if method == "BC-pixels" else ", ".join(f"{r['best_return']:.0f}" for r in runs))
        lines.append([*line, f"{np.mean([r['seconds'] for r in runs]) / 60:.0f}"])
    header = ["game", "method", "seed by seed from 100 on", "mean", "minus the clone, paired", "best during training"]
    return markdown([*header, "minutes"], lines)


def atari_ablation(rows):
    """Images on a tuning seed: the default, and one change at a time."""
    lines = []
    for row in rows:
        made = [atari_game(row), row["method"].removesuffix("-pixels").replace("*", "\\*")]
        made.append(f"`{row['flags']}`" if row["flags"] else "" if row["method"] == "BC-pixels" else "nothing")
        made += [row["seed"], f"{row['eval_return_mean']:.1f} ± {row['eval_return_std']:.1f}"]
        made.append("" if row["q_star_minus_return"] == "" else f"{row['q_star_minus_return']:.2f}")
        lines.append(made)
    return markdown(["game", "method", "changed", "seed", "return ± std over episodes", "q\\* minus return"], lines)


def atari_speed(rows, methods):
    """Updates per second, and the time of 100 heads over one at batch 32."""
    table = []
    for algo, name in methods.items():
        at = {(r["batch_size"], r["heads"]): r for r in rows if r["algo"] == algo}
        heads = max(n for _, n in at)
        speeds = [at[batch, heads]["updates_per_second"] for batch in (32, 256)]
        one = f"{100 * (at[32, 1]['updates_per_second'] / speeds[0] - 1):.0f} %" if heads == 100 else ""
        scatter = max(r["scatter_percent"] for r in at.values())
        table.append([name, heads, *(f"{x:.1f}" for x in speeds), one, f"{scatter:.1f} %"])
    return markdown(["method", "heads", "batch 32", "batch 256", "time over one head", "scatter, at most"], table)


GRID = ("Ell-Epi*-own", "Box-Epi*-own", "Ell_0.9-N-own", "Box-N-own", "Ell-Epi*", "Ell_0.9-N", "CH-N", "SAC-N")
PEERS = ("BC", "BC-top", "CQL")


def grid_cell(row):
    """Environment, data and risk level of a run."""
    sizes = {1000: "1,000", 10_000: "10,000", 100_000: "100,000"}
    if "hovering" in row["dataset_id"]:
        return row["env_id"], "10,000, hovering", 0.5
    mixed = ", mixed" if row["early_fraction"] else ""
    return row["env_id"], sizes[row["dataset_size"]] + mixed, row["expectile_tau"]


def grid_cells(rows):
    """All cells that have rows: LunarLander before CartPole, by risk level and size, the unusual data last."""

    def place(cell):
        env_id, data, tau = cell
        size = int(data.split(", ")[0].replace(",", ""))
        return env_id != "LunarLander-v3", ", " in data, tau, size

    return sorted({grid_cell(r) for r in rows}, key=place)


def usual(row):
    """Whether a run of the grid has its method's settings. On CartPole the paper's sets have 2000 updates."""
    short = row["env_id"] == "CartPole-v1" and row["method"] in ("SAC-N", "CH-N", "Ell_0.9-N")
    return row["flags"] == ("--total-updates 2000" if short else "")


def grid_column(rows, cell, method, column="normalized_return"):
    """A column of a method's runs in a cell, by seed."""
    return {r["seed"]: r[column] for r in rows if r["method"] == method and grid_cell(r) == cell and usual(r)}


def grid_table(rows, methods, column, digits):
    """Mean ± interval of a column: a row for every cell, a column for every method. In brackets the number of seeds
    where it is not five."""
    methods = [m for m in methods if any(r["method"] == m and usual(r) for r in rows)]
    lines = []
    for cell in grid_cells(rows):
        line = []
        for method in methods:
            y = np.array(list(grid_column(rows, cell, method, column).values()))
            seeds = f" ({len(y)})" if len(y) != 5 else ""
            line.append(interval(y, digits) + seeds if len(y) else "not run")
        if any(x != "not run" for x in line):
            lines.append([*cell, *line])
    return markdown(["environment", "transitions", "τ", *(m.replace("*", "\\*") for m in methods)], lines)


def grid_front(rows):
    """The front page: LunarLander, neutral and risk-averse data, own targets against the paper's form and cloning."""
    names = {"Ell-Epi*-own": "Epinet, own targets", "Ell-Epi*": "Epinet, the paper's form"}
    names |= {"SAC-N": "SAC-N, the paper's form"}
    names |= {"BC": "cloning", "BC-top": "cloning the better half", "CQL": "CQL (d3rlpy)"}
    kinds = {0.5: "", 0.9: ", risk-averse"}
    lines = []
    for cell in grid_cells(rows):
        if cell[0] == "LunarLander-v3" and cell[2] in kinds:
            columns = [np.array(list(grid_column(rows, cell, m).values())) for m in names]
            lines.append([cell[1] + kinds[cell[2]], *(interval(y) if len(y) else "not run" for y in columns)])
    return markdown(["transitions", *names.values()], lines)


def grid_gain(rows, cell, first, second):
    """First minus second method on the same data, by seed."""
    x, y = grid_column(rows, cell, first), grid_column(rows, cell, second)
    return {seed: x[seed] - y[seed] for seed in sorted(x.keys() & y.keys())}


def grid_pooled(rows, env_id, first, second):
    """The mean of the differences over an environment's cells that have seeds 100 to 104, seed by seed, and how many
    cells they are. Averaged within a seed, because its data sets are alike: the small ones are the beginning of the
    large ones."""
    seeds = range(100, 105)
    gains = [grid_gain(rows, cell, first, second) for cell in grid_cells(rows) if cell[0] == env_id]
    gains = [gain for gain in gains if all(seed in gain for seed in seeds)]
    if len(gains) < 2:
        return ""
    means = [np.mean([gain[seed] for gain in gains]) for seed in seeds]
    return f"{gained(means)}, {len(gains)} cells"


def grid_pairs(rows, pairs, titles=None, lowest=False):
    """Differences of two methods on the same data, paired by seed, and how many seeds gained. Before them the lowest
    seed of the first method, if wanted; if not, the mean over the cells below them."""
    lines = []
    for cell in grid_cells(rows):
        line = [gained(grid_gain(rows, cell, *pair).values()) for pair in pairs]
        if any(line):
            worst = [f"{min(grid_column(rows, cell, pairs[0][0]).values()):.0f}"] if lowest else []
            lines.append([*cell, *worst, *line])
    for env_id in ("LunarLander-v3", "CartPole-v1"):
        pooled = [grid_pooled(rows, env_id, *pair) for pair in pairs]
        if any(pooled) and not lowest:
            lines.append([env_id, "mean over cells", "", *pooled])
    titles = titles or [f"{first} − {second}".replace("*", "\\*") for first, second in pairs]
    return compared(["environment", "transitions", "τ", *(["lowest seed"] if lowest else []), *titles], lines)


def grid_shapes(rows, box, ellipsoid):
    """Own targets: the ellipsoid minus the box on the same data, with nothing else changed."""
    lines = []
    for cell in grid_cells(rows):
        gain = grid_gain(rows, cell, ellipsoid, box)
        if gain:
            scores = [grid_column(rows, cell, box)[seed] for seed in gain]
            seed_by_seed = ", ".join(f"{x:.0f}" for x in scores)
            lines.append([*cell, seed_by_seed, f"{np.mean(scores):.0f}", gained(gain.values())])
    for env_id in ("LunarLander-v3", "CartPole-v1"):
        if pooled := grid_pooled(rows, env_id, ellipsoid, box):
            lines.append([env_id, "mean over cells", "", "", "", pooled])
    header = ["environment", "transitions", "τ", "box, seed by seed from 100 on", "box, mean", "ellipsoid − box"]
    return compared(header, lines)


def grid_once(rows):
    """Methods that were run in one cell: their scores, and minus the method that they change, on the same data."""
    lines = []
    for method, plain in (("EDAC", "SAC-N"), ("Ell-Epi", "Ell-Epi*")):
        for cell in grid_cells(rows):
            gain = grid_gain(rows, cell, method, plain)
            if gain:
                scores = [grid_column(rows, cell, method)[seed] for seed in gain]
                line = [method, cell[1], cell[2], ", ".join(f"{x:.0f}" for x in scores), f"{np.mean(scores):.0f}"]
                lines.append([*line, plain.replace("*", "\\*"), gained(gain.values())])
    return markdown(["method", "transitions", "τ", "seed by seed from 100 on", "mean", "minus", "difference"], lines)


def run_name(row):
    """What names a run, in the CSV of the runs and in that of their curves."""
    return row["method"], row["dataset_id"], row["seed"], row["flags"]


def last_points(curves):
    """The last point of every run's curve."""
    return {run_name(point): point for point in curves}  # in the order of the updates


def grid_pessimism(rows, curves):
    """The Epinet's box with another upsilon: what both sets charge after the last update, and the ellipsoid minus the
    box on the same data."""
    last = last_points(curves)
    settings = sorted({r["flags"] for r in rows if r["method"] == "Box-Epi*-own" and "--upsilon" in r["flags"]})
    lines = []
    for cell, flags in itertools.product(grid_cells(rows), ["", *settings]):
        here = [r for r in rows if grid_cell(r) == cell]
        boxes = {r["seed"]: r for r in here if (r["method"], r["flags"]) == ("Box-Epi*-own", flags)}
        ellipsoids = {r["seed"]: r for r in here if (r["method"], r["flags"]) == ("Ell-Epi*-own", "")}
        tried = {r["seed"] for r in here if r["method"] == "Box-Epi*-own" and r["flags"]}
        seeds = sorted(boxes.keys() & ellipsoids.keys() & tried)
        if seeds:
            line = [cell[1], cell[2], flags.removeprefix("--upsilon ") or "0.9"]
            for runs in (boxes, ellipsoids):
                taken = [last[run_name(runs[seed])]["charts/q_gap"] for seed in seeds]
                line.append(f"{np.mean(taken):.2f}")
            scores = [boxes[seed]["normalized_return"] for seed in seeds]
            gain = [ellipsoids[seed]["normalized_return"] - x for seed, x in zip(seeds, scores)]
            lines.append([*line, ", ".join(f"{x:.0f}" for x in scores), f"{np.mean(scores):.0f}", gained(gain)])
    if not lines:
        return ""
    header = ["transitions", "τ", "υ of the box", "charge of the box", "charge of the ellipsoid"]
    return compared([*header, "box, seed by seed", "box, mean", "ellipsoid − box"], lines)


def grid_paper_scale(rows, paper):
    """LunarLander: the paper's number, and ours on the scale of the authors' repository: 0 is a return of -102, 100 is
    one of 48."""
    methods = [m for m in PAPERS if any(r["method"] == m for r in rows)]
    lines = []
    for r in paper:
        cell = (r["env_id"], f"{r['dataset_size']:,}", r["expectile_tau"])
        columns = [list(grid_column(rows, cell, m, "eval_return_mean").values()) for m in methods]
        if r["env_id"] == "LunarLander-v3" and any(columns):
            ours = [f"{100 * (np.mean(y) + 102) / 150:.0f}" if y else "–" for y in columns]
            lines.append([cell[1], cell[2], *(f"{r[m]} / {x}" for m, x in zip(methods, ours))])
    return markdown(["transitions", "τ", *(m.replace("*", "\\*") for m in methods)], lines)


def grid_best(rows):
    """The best evaluation on the way, which nobody could have chosen offline, minus the last policy, in points."""
    found = []
    for r in rows:
        if r["best_return"] != "":
            gain = 100 * (r["best_return"] - r["eval_return_mean"]) / (r["reference_return"] - r["random_return"])
            found.append(r | {"best_minus_last": gain})
    return grid_table(found, GRID, "best_minus_last", 0)


def grid_spread(rows, curves):
    """How far the critics differ about the data's own actions after the last update, by data set."""
    last = last_points(curves)
    found = []
    for row in rows:
        if run_name(row) in last:
            found.append(row | {"spread": last[run_name(row)]["charts/std_data_actions"]})
    return grid_table(found, GRID, "spread", 2)


def grid_seeds(rows):
    """The paper's form seed by seed, in the order of the seeds."""
    methods = ("Ell-Epi*", "Ell_0.9-N", "CH-N", "SAC-N")
    lines = []
    for cell in grid_cells(rows):
        columns = [grid_column(rows, cell, method) for method in methods]
        if any(columns):
            scores = [", ".join(f"{column[seed]:.0f}" for seed in sorted(column)) for column in columns]
            lines.append([*cell, *scores])
    return markdown(["environment", "transitions", "τ", *(m.replace("*", "\\*") for m in methods)], lines)


def grid_longer(rows):
    """The box with twice the updates, and the ellipsoid with the usual number minus it, on the same data."""
    lines = []
    for cell in grid_cells(rows):
        here = [r for r in rows if r["method"] == "SAC-N" and grid_cell(r) == cell]
        longer = {r["seed"]: r["normalized_return"] for r in here if r["flags"] == "--total-updates 40000"}
        usual_box, ellipsoid = grid_column(rows, cell, "SAC-N"), grid_column(rows, cell, "Ell_0.9-N")
        seeds = sorted(longer.keys() & usual_box.keys() & ellipsoid.keys())
        if seeds:
            for updates, box in (("20,000", usual_box), ("40,000", longer)):
                scores = ", ".join(f"{box[seed]:.0f}" for seed in seeds)
                mean = np.mean([box[seed] for seed in seeds])
                gain = [ellipsoid[seed] - box[seed] for seed in seeds]
                lines.append([cell[1], cell[2], updates, scores, f"{mean:.0f}", gained(gain)])
    header = ["transitions", "τ", "updates of SAC-N", "SAC-N, seed by seed from 100 on", "mean", "Ell_0.9-N − SAC-N"]
    return markdown(header, lines) if lines else ""


def grid_entropy_return(rows):
    """Over the runs of the paper's ensembles in a cell: does less entropy in training go with a lower return? Not on
    CartPole, where nearly all runs have 100."""
    methods = ("SAC-N", "CH-N", "Ell_0.9-N")
    lines = []
    for cell in grid_cells([r for r in rows if r["env_id"] == "LunarLander-v3"]):
        runs = [r for r in rows if grid_cell(r) == cell and r["method"] in methods and usual(r)]
        others = [r for r in runs if r["method"] != "SAC-N"]
        if min(len(others), len(runs) - len(others)) >= 4:
            line = []
            for some in (runs, others):
                rho, _ = stats.spearmanr([r["training_entropy"] for r in some], [r["normalized_return"] for r in some])
                line += [f"{rho:.2f}", len(some)]
            lines.append([*cell, *line])
    return markdown(["environment", "transitions", "τ", "rank correlation", "runs", "without the box", "runs"], lines)


def grid_overall(rows):
    """LunarLander, the seven cells with all methods: every seed is averaged over the cells first. The last column is
    the most that a method's mean stays behind the best baseline of a cell. A method that lacks a run is left out."""
    cells = [("LunarLander-v3", size, tau) for tau in (0.5, 0.9) for size in ("1,000", "10,000", "100,000")]
    cells.append(("LunarLander-v3", "100,000, mixed", 0.5))
    seeds = range(100, 105)
    scores = {}  # of a method: seeds x cells
    for method in (*GRID, *PEERS):
        columns = [grid_column(rows, cell, method) for cell in cells]
        if all(seed in column for column in columns for seed in seeds):
            scores[method] = np.array([[column[seed] for column in columns] for seed in seeds])
    if not {"SAC-N", *PEERS} <= scores.keys():
        return ""
    best = np.max([scores[peer].mean(0) for peer in PEERS], axis=0)  # per cell
    lines = []
    for method, y in scores.items():
        line = [method.replace("*", "\\*"), interval(y.mean(1), 1)]
        for other in ("SAC-N", "BC-top"):
            line.append("" if method == other else gained((y - scores[other]).mean(1)))
        behind = best - y.mean(0)
        worst = int(behind.argmax())
        data = cells[worst][1] + (", τ = 0.9" if cells[worst][2] == 0.9 else "")
        lines.append([*line, f"{y.min():.0f}", f"{behind.max():.0f} ({data})" if behind.max() >= 0.5 else "0"])
    header = ["method", "mean over seven cells", "minus SAC-N", "minus BC-top", "lowest run"]
    table = markdown([*header, "most behind the best of BC, BC-top and CQL"], lines)
    return f"{table}\n\nDifferences: {how_many_are_clear([line[2:4] for line in lines])}"


def planned():
    """The grid as it was planned: (environment, data, risk level), methods and seeds."""
    everything = (*GRID, *PEERS)
    first = range(100, 105)
    for tau in (0.5, 0.9):
        for size in ("1,000", "10,000", "100,000"):
            yield ("LunarLander-v3", size, tau), everything, first
    yield ("LunarLander-v3", "100,000, mixed", 0.5), everything, first
    yield ("LunarLander-v3", "10,000, hovering", 0.5), ("Ell-Epi*-own", "Ell_0.9-N-own", "Ell-Epi*", *PEERS), first
    for size in ("1,000", "10,000", "100,000"):
        yield ("LunarLander-v3", size, 0.1), ("Ell-Epi*-own", "Ell_0.9-N", "SAC-N", "BC"), range(100, 103)
    easy = ("Ell-Epi*-own", "Ell_0.9-N-own", "Box-N-own", "Ell_0.9-N", "CH-N", "SAC-N", "BC")
    for size, tau in (("1,000", 0.5), ("10,000", 0.5), ("100,000", 0.5), ("1,000", 0.9), ("10,000", 0.9)):
        yield ("CartPole-v1", size, tau), easy, first


def grid_missing(rows):
    """What the plan still lacks, and the hours that it takes: runs times the median time of those that are done."""
    missing, done = {}, {}
    for cell, methods, seeds in planned():
        for method in methods:
            have = grid_column(rows, cell, method)
            done[method] = done.get(method, 0) + sum(seed in have for seed in seeds)
            missing[method] = missing.get(method, 0) + sum(seed not in have for seed in seeds)
    lines = []
    for method in missing:
        seconds = [r["seconds"] for r in rows if r["method"] == method]
        line = [method.replace("*", "\\*"), done[method], missing[method], "", ""]
        if seconds:
            minutes = np.median(seconds) / 60
            line[3:] = f"{minutes:.1f}", f"{missing[method] * minutes / 60:.1f}"
        lines.append(line)
    return markdown(["method", "runs here", "missing", "minutes per run", "hours of one core"], lines)


def grid_ablation(rows):
    """10,000 neutral transitions: the default of the Epinet with one part taken away, on the seeds that have it."""
    here = [r for r in rows if grid_cell(r) == ("LunarLander-v3", "10,000", 0.5)]
    own = {r["seed"]: r["normalized_return"] for r in here if r["method"] == "Ell-Epi*-own" and not r["flags"]}
    lines = []
    changed = [r for r in here if r["method"] == "Ell-Epi*-own" and r["flags"] and "--upsilon" not in r["flags"]]
    for flags in dict.fromkeys(r["flags"] for r in changed):
        score = {r["seed"]: r["normalized_return"] for r in changed if r["flags"] == flags}
        seeds = sorted(score)
        y = np.array([score[s] for s in seeds])
        loss = np.array([score[s] - own[s] for s in seeds])
        lines.append([f"`{flags}`", interval(y), interval(loss), len(seeds)])
    return markdown(["changed", "normalised return", "minus the default, paired", "seeds"], lines)


def grid_earlier(rows):
    """Ten critics with own targets and a setting that is not the default: what made us change it."""
    lines = []
    for cell in grid_cells(rows):
        for method, flags in dict.fromkeys((r["method"], r["flags"]) for r in rows):
            y = per_seed([r for r in rows if grid_cell(r) == cell], "normalized_return", method=method, flags=flags)
            if method.endswith("N-own") and flags and len(y):
                scores = ", ".join(f"{x:.0f}" for x in y)
                lines.append([cell[1], method, f"`{flags}`", scores, f"{y.mean():.0f}"])
    return markdown(["transitions", "method", "changed", "seed by seed from 100 on", "mean"], lines)


def grid_tuning(rows):
    """Every setting tried on the tuning cells, seed by seed from 0 on: the mean over the cells, and how many runs."""
    cells = ["tau50-1k", "tau50-10k", "tau50-early50-100k", "hovering-10k"]
    titles = ["1,000", "10,000", "100,000, mixed", "10,000, hovering"]
    lines = []
    for method, flags in dict.fromkeys((r["method"], r["flags"]) for r in rows):
        line = [method.replace("*", "\\*"), f"`{flags}`" if flags else "as in sweep.py"]
        found = []
        for cell in cells:
            mine = [r for r in rows if (r["method"], r["flags"]) == (method, flags)]
            mine = [r for r in mine if re.fullmatch(rf"ersac/lunarlander/{cell}(-s\d)?-v0", r["dataset_id"])]
            scores = [r["normalized_return"] for r in sorted(mine, key=lambda r: r["seed"])]
            line.append(", ".join(f"{x:.0f}" for x in scores))
            found.append(scores)
        mean = f"{np.mean([np.mean(scores) for scores in found]):.1f}" if all(found) else ""
        lines.append([*line, mean, sum(map(len, found))])
    return markdown(["method", "flags", *titles, "mean over the four", "runs"], lines)


def calibration(learned, fixed):
    """RiverSwim, 100 transitions per state, tau 0.5: how often the set holds the truth, and bounds it from below."""
    learned = [r | {"targets": "own" if "--targets own" in r["arguments"] else "shared"} for r in learned]
    lines = []
    for upsilon in sorted({r["upsilon"] for r in fixed}):
        line = [upsilon]
        for column in ("coverage_rate", "lower_bound_rate"):
            for targets in ("own", "shared"):
                for rows in (fixed, learned):
                    where = dict(dataset_size=100, expectile_tau=0.5, targets=targets, upsilon=upsilon)
                    y = per_seed(rows, column, **where)
                    line.append(interval(y, 2) if len(y) else "")
        lines.append(line)
    header = ["υ"]
    for what in ("holds Q", "bounds V"):
        for targets in ("own", "shared"):
            header += [f"{what}: {targets}, fixed π", f"{what}: {targets}, learned π"]
    return markdown(header, lines)


def tables(folder):
    """Every table by name. A table whose CSV is missing is left out."""
    folder = Path(folder)
    paper, same = load(folder / "tabular_paper.csv"), load(folder / "tabular_no_bootstrap.csv")
    tried, theirs = load(folder / "tabular_tuning.csv"), load(DOCS / "benchmark" / "paper_tabular.csv")
    smaller = load(folder / "tabular_upsilon.csv")
    made = {}
    if paper:
        made["tabular_aggregated"] = paper_grid(paper, theirs)
        made["tabular_detailed"] = paper_grid(paper, theirs, taus=True)
        made["tabular_differences"] = differences(paper)
        made["tabular_against_box"] = against_box(paper)
        made["tabular_evaluations"] = by_evaluation(paper)
        made["tabular_by_tau"] = by_tau(paper)
    if same:
        made["tabular_no_bootstrap"] = no_bootstrap(same)
    if both := load(folder / "tabular_targets.csv"):
        made["tabular_targets"] = by_targets(both)
        made["tabular_targets_gain"] = by_targets(both, gains=True)
    if paper and (fewer := load(folder / "tabular_critics.csv")):
        made["tabular_critics"] = by_critics(fewer, paper)
    if paper and smaller:
        made["tabular_rates"] = rates(smaller + [row for row in paper if row["dataset_size"] == 10])
    if tried:
        made["tabular_tuning"] = tuning(tried)
    networks, timed = load(folder / "gym.csv"), load(folder / "speed.csv")
    if networks:
        made["gym_detailed"] = gym(networks, GYM)
        made["gym_slices"] = slices(networks)
        made["gym_schedule"] = schedule(networks)
        if by_upsilon(networks):
            made["gym_upsilon"] = gym_upsilon(networks)
    if grid := load(folder / "grid.csv"):
        made["grid_networks"] = grid_table(grid, (*GRID, *PEERS), "normalized_return", 0)
        made["grid_front"] = grid_front(grid)
        pairs = [("CH-N", "SAC-N"), ("Ell_0.9-N", "SAC-N"), ("Ell_0.9-N", "CH-N"), ("Ell-Epi*", "Ell_0.9-N")]
        made["grid_sets"] = grid_pairs(grid, pairs)
        pairs = [("Box-N-own", "SAC-N"), ("Ell_0.9-N-own", "Ell_0.9-N"), ("Ell-Epi*-own", "Ell-Epi*")]
        pairs += [("Ell-Epi*-own", "Ell_0.9-N"), ("Ell-Epi*-own", "Ell_0.9-N-own")]
        made["grid_targets"] = grid_pairs(grid, pairs)
        if any(r["method"] in ("EDAC", "Ell-Epi") for r in grid):
            made["grid_once"] = grid_once(grid)
        pairs = [(m, "BC") for m in ("SAC-N", "CH-N", "Ell_0.9-N", "Ell-Epi*")]
        made["grid_cloning"] = grid_pairs(grid, [*pairs, ("SAC-N", "BC-top"), ("Ell_0.9-N", "BC-top")])
        made["grid_entropy"] = grid_table([r for r in grid if r["training_entropy"] != ""], GRID, "training_entropy", 2)
        ended = [r for r in grid if r["env_id"] != "CartPole-v1"]  # its episodes are cut off: returns are not known
        ended = [r for r in ended if r["q_star_minus_return"] != ""]
        made["grid_bound"] = grid_table(ended, GRID, "q_star_minus_return", 1)
        made["grid_best"] = grid_best(grid)
        made["grid_entropy_return"] = grid_entropy_return(grid)
        made["grid_longer"] = grid_longer(grid)
        made["grid_seeds"] = grid_seeds(grid)
        made["grid_paper_scale"] = grid_paper_scale(grid, load(DOCS / "benchmark" / "paper_gym.csv"))
        made["grid_missing"] = grid_missing(grid)
        made["grid_overall"] = grid_overall(grid)
        if any(r["flags"] for r in grid):
            made["grid_ablation"] = grid_ablation(grid)
        against = [f"− {peer}" for peer in PEERS]
        made["grid_epinet"] = grid_pairs(grid, [("Ell-Epi*-own", peer) for peer in PEERS], against, lowest=True)
        made["grid_ensemble"] = grid_pairs(grid, [("Ell_0.9-N-own", peer) for peer in PEERS], against, lowest=True)
        made["grid_shapes"] = grid_shapes(grid, "Box-N-own", "Ell_0.9-N-own")
        made["grid_shapes_epinet"] = grid_shapes(grid, "Box-Epi*-own", "Ell-Epi*-own")
        made["grid_earlier"] = grid_earlier(grid)
        if curves := load(folder / "grid_curves.csv"):
            made["grid_spread"] = grid_spread(grid, curves)
            if table := grid_pessimism(grid, curves):
                made["grid_pessimism"] = table
    if settings := load(folder / "tuning.csv"):
        made["grid_tuning"] = grid_tuning(settings)
        if table := grid_pessimism(settings, load(folder / "tuning_curves.csv")):
            made["grid_pessimism_tuning"] = table
    learned, fixed = load(folder / "tabular_calibration.csv"), load(folder / "calibration.csv")
    if learned and fixed:
        made["calibration"] = calibration(learned, fixed)
    if tried := load(folder / "gym_tuning.csv"):
        made["gym_tuning"], made["gym_tried"] = gym_tuning(tried), gym_tried(tried)
    if charged := load(folder / "charges.csv"):
        made["sets_charges"] = charges(charged)
    if watched := load(folder / "soak.csv"):
        made["soak"] = soak(watched, 6)
    if watched := load(folder / "soak_ensemble.csv"):
        made["soak_ensemble"] = soak(watched, 3)
    if timed:
        made["speed"] = speed(timed, epinet=False)
        made["speed_epinet"] = speed(timed, epinet=True)
        made["speed_paper"] = runtime(timed)
    profiled = load(folder / "speed_profile.csv")
    if profiled:
        made["speed_profile"] = speed_profile(profiled)
    methods = {"sac-n": "SAC-N", "ersac-ch-n": "ERSAC-CH-N", "ersac-ell-n": "ERSAC-Ell-N"}
    methods |= {"ersac-ell-epi-star": "ERSAC-Ell-Epi*", "cql": "CQL", "iql": "IQL", "brac-bcq": "BRAC-BCQ"}
    if (folder / "gen_policies.csv").exists():
        made |= gen_report.all_tables()
    atari, atari_tuning = load(folder / "atari.csv"), load(folder / "atari_tuning.csv")
    if atari:
        made["atari_methods"] = atari_methods(atari)
    if atari_tuning:
        made["atari_ablation"] = atari_ablation(atari_tuning)
    atari_timed = load(folder / "speed_atari.csv")
    if atari_timed:
        made["atari_speed"] = atari_speed(atari_timed, methods)
    if (folder / "paper_atari.csv").exists():
        with open(folder / "paper_atari.csv", newline="") as f:
            header, *rows = csv.reader(f)
        made["atari_paper"] = markdown(header, rows).replace("*", "\\*")
    return made


def fill(page, made):
    """The page with what stands between the markers of each table replaced."""
    for name, table in made.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page = re.sub(pattern, lambda m, table=table: f"{m[1]}{table}\n{m[2]}", page, flags=re.S)
    return page


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    made = tables(args.csvs)
    readme = Path(args.docs).parent / "README.md"
    for path in [*sorted(Path(args.docs).rglob("*.md")), *([readme] if Path(args.docs) == DOCS else [])]:
        page = path.read_text()
        unknown = set(
            re.findall(r"<!-- table: ((?:tabular|gym|grid|calibration|sets|speed|soak|atari|gen)\w*) -->", page)
        ) - set(made)
        if unknown:
            print(f"{path.name}: no CSV for {', '.join(sorted(unknown))}; left as they are", file=sys.stderr)
        if fill(page, made) != page:
            path.write_text(fill(page, made))
            print(f"{path.name} rewritten")
