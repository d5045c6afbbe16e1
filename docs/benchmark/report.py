"""Committed CSVs to the tables of the docs, byte for byte.

    python docs/benchmark/report.py                     fill the pages
    python docs/benchmark/report.py --show alternating  print one table
    python docs/benchmark/report.py --compare my.csv    rows of sweep.py --out my.csv beside the committed ones

Every table stands in a page between `<!-- table: NAME -->` and `<!-- end -->`; this command rewrites what is between.
An interval is the mean over seeds plus-minus a 90 % Student-t interval; in tables each seed is averaged over the taus
first. The paper's own numbers are in docs/benchmark/paper_*.csv.
"""

import csv
import itertools
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


@dataclass
class Args:
    csvs: str = str(DOCS / "benchmark")
    """folder with the CSVs"""
    docs: str = str(DOCS)
    """folder with the pages"""
    show: str | None = None
    """print this table and leave the pages alone"""
    compare: str | None = None
    """CSV of sweep.py to compare with the committed rows; leaves the pages alone"""


def number(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"True": True, "False": False}.get(text, text)


def load(path):
    """Rows of a CSV with numbers as numbers."""
    with open(path, newline="") as f:
        return [{k: number(v) for k, v in row.items()} for row in csv.DictReader(f)]


def per_seed(rows, column, **where):
    """The column of the chosen rows, averaged within each seed, in the order of the seeds."""
    chosen = [row for row in rows if all(row[k] == v for k, v in where.items())]
    seeds = sorted({r["seed"] for r in chosen})
    return np.array([np.mean([r[column] for r in chosen if r["seed"] == s]) for s in seeds])


def half_width(x):
    """Of the 90 % interval of the mean over the last axis."""
    n = x.shape[-1]
    return stats.t.ppf(0.95, n - 1) * x.std(-1, ddof=1) / np.sqrt(n)


def interval(x, digits=0):
    """mean ± half width; of a single seed just its number, of none nothing"""
    if len(x) < 2:
        return f"{x[0]:.{digits}f}" if len(x) else ""
    return f"{x.mean():.{digits}f} ± {half_width(x):.{digits}f}"


def gained(gain):
    """Differences by seed: mean ± half width, and how many seeds gained; nothing if there is no seed."""
    gain = np.array(list(gain))
    return f"{interval(gain, 1)} ({(gain > 0).sum()} of {len(gain)})" if len(gain) else ""


def listed(x):
    return ", ".join(f"{y:.0f}" for y in x)


def marked(columns, digits=0):
    """Intervals; bold the best and underlined the worst mean, if ahead of (behind) all others by 1 or more."""
    cells = [interval(x, digits) for x in columns]
    means = [x.mean() for x in columns]
    order = np.argsort(means)
    if means[order[-1]] - means[order[-2]] >= 1:
        cells[order[-1]] = f"**{cells[order[-1]]}**"
    if means[order[1]] - means[order[0]] >= 1:
        cells[order[0]] = f"<u>{cells[order[0]]}</u>"
    return cells


def markdown(header, rows):
    header = [str(name).replace("*", "\\*") for name in header]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def compared(header, rows, first=0):
    """A table of paired differences; how many exclude 0, and how many still do when all are tested at once at a level
    of 10 % (Holm, 1979). Those in columns before the first are no differences."""
    text = " ".join(str(cell) for row in rows for cell in row[first:])
    found = re.findall(r"(-?[\d.]+) ± ([\d.]+) \(\d+ of (\d+)\)", text)
    p_values = []
    for mean, half, n in found:
        t = float(mean) / max(float(half), 1e-9) * stats.t.ppf(0.95, int(n) - 1)
        p_values.append(2 * stats.t.sf(abs(t), int(n) - 1))
    holm = 0
    for p in sorted(p_values):
        if p > 0.1 / (len(found) - holm):
            break
        holm += 1
    clear = f"{sum(p < 0.1 for p in p_values)} of these {len(found)} differences exclude 0"
    return f"{markdown(header, rows)}\n\n{clear}, {holm} after Holm's correction for testing all of them."


# ===== Tables instead of networks: rows of tables.csv
TABULAR = ("SAC-N", "CH-N", "Ell-N", "Ell_0.9-N")
ENVS, SIZES = ("MachineReplacement", "RiverSwim"), (10, 100, 1000)


def paper_grid(rows, paper):
    """The paper's table beside ours: our mean ± interval and in brackets the paper's mean."""
    table = []
    for env, size in itertools.product(ENVS, SIZES):
        here = [r for r in rows if (r["env_id"], r["dataset_size"]) == (env, size)]
        (theirs,) = [r for r in paper if (r["env_id"], r["dataset_size"], r["expectile_tau"]) == (env, size, "all")]
        cells = marked([per_seed(here, "normalized_return", method=m) for m in TABULAR])
        cells = [f"{cell} ({theirs[m]})" for cell, m in zip(cells, TABULAR)]
        behaviour = np.mean([r["behaviour_normalized_return"] for r in here])
        support = interval(per_seed(here, "support_optimum", method="SAC-N"))
        table.append([env, f"{size}×", *cells, support, f"{behaviour:.0f} ({theirs['behaviour']})"])
    return markdown(["MDP", "data", *TABULAR, "value iteration on the data", "behaviour policy"], table)


def differences(rows):
    """Paired by seed (same data, resamples and initial tables): one method minus another, and how many seeds gained."""
    pairs = [("CH-N", "SAC-N"), ("Ell-N", "SAC-N"), ("Ell_0.9-N", "SAC-N"), ("Ell_0.9-N", "Ell-N")]
    table = []
    for env, size in itertools.product(ENVS, SIZES):
        where = {"env_id": env, "dataset_size": size}
        scores = {m: per_seed(rows, "normalized_return", method=m, **where) for m in TABULAR}
        table.append([env, f"{size}×", *(gained(scores[first] - scores[second]) for first, second in pairs)])
    return compared(["MDP", "data", *(f"{first} − {second}" for first, second in pairs)], table)


def by_targets(rows):
    """Shared and own targets, with and without bootstrap, for two ranges of initial tables; mean over the taus."""
    starts = {"normalized_return": "uniform", "normalized_return_state1": "state 1"}
    table = []
    for env, size, bootstrap, low in itertools.product(ENVS, (10, 100), (True, False), (False, True)):
        here = [r for r in rows if (r["env_id"], r["dataset_size"], r["bootstrap"]) == (env, size, bootstrap)]
        here = [r for r in here if ("--prior" in r["arguments"]) == low]
        for column, start in starts.items() if here else ():
            line = [env, f"{size}×", "resampled" if bootstrap else "the same", "below" if low else "all values", start]
            for method in TABULAR:
                own = f"{method.replace('SAC', 'Box')}-own"
                line += [interval(per_seed(here, column, method=m)) for m in (method, own)]
            table.append(line)
    header = [name for m in TABULAR for name in (f"{m} shared", f"{m.replace('SAC', 'Box')} own")]
    return markdown(["MDP", "data", "critics' data", "initial tables", "start", *header], table)


def calibration(learned, fixed):
    """RiverSwim, 100 transitions per state, tau 0.5: how often the set holds the truth, and bounds it from below."""
    header, columns = ["υ"], []
    for what, column in (("holds Q", "coverage_rate"), ("bounds V", "lower_bound_rate")):
        for targets, (policy, rows) in itertools.product(("own", "shared"), (("fixed", fixed), ("learned", learned))):
            header.append(f"{what}: {targets}, {policy} π")
            columns.append((column, targets, rows))
    lines = []
    for upsilon in sorted({r["upsilon"] for r in fixed}):
        where = {"dataset_size": 100, "expectile_tau": 0.5, "upsilon": upsilon}
        lines.append([upsilon, *(interval(per_seed(rows, x, targets=y, **where), 2) for x, y, rows in columns)])
    return markdown(header, lines)


# ===== Networks: rows of networks.csv
SETS = ("Ell-Epi*-own", "Box-Epi*-own", "Ell_0.9-N-own", "Box-N-own", "Ell-Epi*", "Ell_0.9-N", "CH-N", "SAC-N")
PAPER = ("SAC-N", "CH-N", "Ell_0.9-N", "Ell-Epi", "Ell-Epi*")  # the columns of its table
CLONES = ("BC", "BC-sampled", "BC-top", "BC-top10", "BC-weighted")
D3 = ("CQL-untuned", "CQL", "BCQ", "DDQN")
RIVALS = ("BC", "BC-top", "CQL-untuned", "CQL")
MAIN = ("Ell-Epi*-own", "Ell_0.9-N-own", "Ell_0.9-N", "SAC-N", "Ell-Epi*")
MAIN += ("BC", "BC-top", "BC-top10", "CQL-untuned", "CQL")


def labelled(rows):
    """Rows with their method's usual settings, and in the column "cell" environment, data and risk level."""
    found = []
    for row in rows:
        short = row["env_id"] == "CartPole-v1" and row["method"] in PAPER
        size = "10,000, hovering" if "hovering" in row["dataset_id"] else f"{row['dataset_size']:,}"
        if row["switch_prob"]:
            size += f", alternating, {100 - 100 * row['early_fraction']:.0f} % good"
        elif row["early_fraction"]:
            size += ", mixed"
        usual = row["flags"] == ("--total-updates 2000" if short else "")
        found.append(row | {"cell": (row["env_id"], size, row["expectile_tau"] or 0.5), "usual": usual})
        if isinstance(row.get("std_other_actions"), float):  # older rows have none, and cloning has nan
            found[-1]["spread_ratio"] = row["std_other_actions"] / row["std_data_actions"]
    return found


def cells_of(rows):
    """All cells: LunarLander before CartPole, by risk level and size, the unusual data last."""

    def place(cell):
        env_id, data, tau = cell
        size, _, kind = data.partition(", ")
        return env_id != "LunarLander-v3", kind != "", "alternating" in kind, kind, tau, int(size.replace(",", ""))

    return sorted({r["cell"] for r in rows}, key=place)


def present(rows, methods):
    return [m for m in methods if any(r["method"] == m and r["usual"] for r in rows)]


def by_seed(rows, cell, method, name="normalized_return"):
    """A column of a method's runs in a cell, by seed."""
    return {r["seed"]: r[name] for r in rows if (r["method"], r["cell"], r["usual"]) == (method, cell, True)}


def gain(rows, cell, first, second):
    """First minus second method on the same data, by seed."""
    x, y = by_seed(rows, cell, first), by_seed(rows, cell, second)
    return {seed: x[seed] - y[seed] for seed in sorted(x.keys() & y.keys())}


def networks(rows, methods, name="normalized_return", digits=0, missing="not run"):
    """Mean ± interval of a column: a row for every cell, a column for every method. In brackets the number of seeds
    where it is not five."""
    methods = present(rows, methods)
    lines = []
    for cell in cells_of(rows):
        columns = [np.array(list(by_seed(rows, cell, m, name).values())) for m in methods]
        cells = [interval(y, digits) + (f" ({len(y)})" if len(y) != 5 else "") if len(y) else missing for y in columns]
        if any(map(len, columns)):
            lines.append([*cell, *cells])
    return markdown(["environment", "transitions", "τ", *methods], lines)


def pooled(rows, env_id, first, second):
    """The mean of the differences over an environment's cells that have seeds 100 to 104, seed by seed, and how many
    cells they are. Averaged within a seed, because its data sets are alike: the small ones are the beginning of the
    large ones."""
    gains = [gain(rows, cell, first, second) for cell in cells_of(rows) if cell[0] == env_id]
    gains = [g for g in gains if all(seed in g for seed in range(100, 105))]
    if len(gains) < 2:
        return ""
    return f"{gained(np.mean([g[seed] for g in gains]) for seed in range(100, 105))}, {len(gains)} cells"


def pairs(rows, chosen):
    """Differences of two methods on the same data, paired by seed, and how many seeds gained; below them the mean over
    the cells."""
    lines = [[*cell, *(gained(gain(rows, cell, *pair).values()) for pair in chosen)] for cell in cells_of(rows)]
    for env_id in ("LunarLander-v3", "CartPole-v1"):
        lines.append([env_id, "mean over cells", "", *(pooled(rows, env_id, *pair) for pair in chosen)])
    lines = [line for line in lines if any(line[3:])]
    return compared(["environment", "transitions", "τ", *(f"{first} − {second}" for first, second in chosen)], lines)


def changed(rows, flags, methods, against=None):
    """Methods with other settings on the same data, seed by seed; and another method, or the same with its usual
    settings, minus that, paired."""
    lines = []
    for cell, method in itertools.product(cells_of(rows), methods):
        here = [r for r in rows if (r["method"], r["cell"], r["flags"]) == (method, cell, flags)]
        other = {r["seed"]: r["normalized_return"] for r in here}
        usual, ours = by_seed(rows, cell, method), by_seed(rows, cell, against or method)
        if other:
            line = [cell[1], cell[2], method.replace("*", "\\*"), listed(usual[s] for s in other if s in usual)]
            lines.append([*line, listed(other.values()), gained(ours[s] - other[s] for s in other if s in ours)])
    last = f"{against or 'usual setting'} − changed"
    return markdown(["transitions", "τ", "method", "seed by seed", f"with `{flags}`", last], lines)


def paper_networks(rows, paper, policies):
    """The paper's network table: ours, and in brackets the paper's number, whose scale is another. The behaviour policy
    is the committed one, with its random actions."""
    ends = {r["env_id"]: (r["random_return"], r["reference_return"]) for r in rows if r["reference_return"]}
    behaviour = {}
    for r in policies:
        low, high = ends[r["env_id"]]
        if r["seed"] == 1:
            behaviour[r["env_id"], r["tau"]] = 100 * (r["noisy_return"] - low) / (high - low)
    lines = []
    for theirs in paper:
        taus = (0.1, 0.5, 0.9) if theirs["expectile_tau"] == "all" else (theirs["expectile_tau"],)
        line = []
        for method in PAPER:
            cells = [(theirs["env_id"], f"{theirs['dataset_size']:,}", tau) for tau in taus]
            columns = [by_seed(rows, cell, method) for cell in cells]
            seeds = sorted(set.intersection(*map(set, columns)))
            y = np.array([np.mean([scores[seed] for scores in columns]) for seed in seeds])
            line.append(f"{interval(y) or '–'} ({theirs[method]})")
        collected = np.mean([behaviour[theirs["env_id"], tau] for tau in taus])
        line.append(f"{collected:.0f} ({theirs['behaviour']})")
        lines.append([theirs["env_id"], f"{theirs['dataset_size']:,}", theirs["expectile_tau"], *line])
    return markdown(["environment", "transitions", "τ", *PAPER, "behaviour policy"], lines)


def paper_by_tau(rows, tabular, paper):
    """The paper's Table 2: Ell_0.9-N by risk level, over the sizes that have all five seeds at every level (tables: all
    sizes, ten seeds); in brackets the paper's mean."""
    lines = []
    for theirs in paper:
        line = []
        for tau in (0.1, 0.5, 0.9):
            if theirs["env_id"] in ENVS:
                where = {"env_id": theirs["env_id"], "expectile_tau": tau, "method": "Ell_0.9-N"}
                y = per_seed(tabular, "normalized_return", **where)
            else:
                cells = [(theirs["env_id"], size, tau) for size in ("1,000", "10,000", "100,000")]
                columns = [by_seed(rows, cell, "Ell_0.9-N") for cell in cells]
                seeds = sorted(set.intersection(*map(set, columns)))
                y = np.array([np.mean([scores[seed] for scores in columns]) for seed in seeds])
            line.append(f"{interval(y) or '–'} ({theirs[f'tau{tau}']})")
        lines.append([theirs["env_id"], *line])
    return markdown(["environment", "τ = 0.1", "τ = 0.5", "τ = 0.9"], lines)


# ===== Alternating data, and the main result
def alternating(rows):
    """Data in which two policies take turns, seeds 110 to 114: scores with every seed and the share of runs below 60;
    the default minus each rival, paired."""
    rows = [r for r in rows if r["switch_prob"] and 110 <= r["seed"] <= 114]
    if not rows:
        return {"alternating": "", "alternating_gains": ""}
    methods = present(rows, (*SETS, *CLONES, *D3))
    rivals = [m for m in methods if m in (*CLONES, *D3)]
    scores, gains = [], []
    for cell in cells_of(rows):
        columns = [by_seed(rows, cell, m) for m in methods]
        cells = [f"{np.mean([*y.values()]):.0f} ({listed(y[s] for s in sorted(y))})" if y else "" for y in columns]
        scores.append([cell[1], *cells])
        gains.append([cell[1], *(gained(gain(rows, cell, "Ell-Epi*-own", m).values()) for m in rivals)])
    every = [[r["normalized_return"] for r in rows if r["method"] == m and r["usual"]] for m in methods]
    scores.append(["runs below 60", *(f"{sum(x < 60 for x in y)} of {len(y)}" for y in every)])
    gains = compared(["transitions", *(f"default − {m}" for m in rivals)], gains)
    return {"alternating": markdown(["transitions", *methods], scores), "alternating_gains": gains}


def main_rows(rows):
    """The runs behind the main table: all kinds of LunarLander data, five seeds each."""
    rows = [r for r in rows if r["env_id"] == "LunarLander-v3" and r["expectile_tau"] != 0.1]
    return [r for r in rows if 100 <= r["seed"] <= 104 or (r["switch_prob"] and 110 <= r["seed"] <= 114)]


def main_scores(rows):
    """Means over five seeds on all kinds of LunarLander data: labels, methods, scores [kinds, methods] or NaN."""
    rows = main_rows(rows)
    methods = present(rows, MAIN)
    labels, scores = [], []
    for cell in cells_of(rows):
        columns = [list(by_seed(rows, cell, m).values()) for m in methods]
        complete = [len(y) == 5 for y in columns]
        if any(complete):
            plain = ", neutral" if "," not in cell[1].split(",000")[1] else ""
            labels.append(cell[1] + (", risk-averse" if cell[2] == 0.9 else plain))
            scores.append([np.mean(y) if all_there else np.nan for y, all_there in zip(columns, complete)])
    return labels, methods, np.array(scores)


def main_table(rows):
    """Default, rivals and the paper's sets on all kinds of data; in brackets the points behind the row's best."""
    labels, methods, scores = main_scores(rows)
    lines = []
    for label, line in zip(labels, scores):
        behind = line - np.nanmax(line)
        cells = [f"{x:.0f} ({d:.0f})" if d <= -0.5 else f"**{x:.0f}**" for x, d in zip(line, behind)]
        lines.append([label, *(cell if cell != "**nan**" else "" for cell in cells)])
    return markdown(["transitions", *methods], lines)


def risk(rows):
    """Over the kinds of data that a method has five runs of: the mean; the most that it is behind a kind's best
    rival, paired; runs below 60, with the exact interval of their share; and, on the data that both have, how many
    runs fail for only one of it and the default, with the exact test of McNemar."""
    rows = main_rows(rows)
    scores = {m: {cell: by_seed(rows, cell, m) for cell in cells_of(rows)} for m in present(rows, MAIN)}
    scores = {m: {cell: y for cell, y in scores[m].items() if len(y) == 5} for m in scores}
    fails = {m: {(c, seed): x < 60 for c in scores[m] for seed, x in scores[m][c].items()} for m in scores}
    lines = []
    for method, mine in scores.items():
        behind = {}
        for cell, y in mine.items():
            rivals = {m: np.mean([*scores[m][cell].values()]) for m in scores if m in MAIN[5:] and cell in scores[m]}
            best = max(rivals, key=rivals.get)
            behind[cell] = (rivals[best] - np.mean([*y.values()]), best)
        worst = max(behind, key=behind.get)
        gap = np.array([*gain(rows, worst, behind[worst][1], method).values()])
        where = worst[1] + (", τ = 0.9" if worst[2] == 0.9 else "")
        failed = fails[method].values()
        share = stats.binomtest(sum(failed), len(failed)).proportion_ci(0.9)
        both = fails[method].keys() & fails[MAIN[0]].keys()
        only = [sum(fails[x][k] and not fails[y][k] for k in both) for x, y in ((method, MAIN[0]), (MAIN[0], method))]
        p = stats.binomtest(only[0], sum(only)).pvalue if sum(only) else 1.0
        line = [method.replace("*", "\\*"), len(mine), f"{np.mean([[*y.values()] for y in mine.values()]):.0f}"]
        line += [f"{interval(gap)} ({where})" if behind[worst][0] >= 0.5 else "0"]
        line += [f"{sum(failed)} of {len(failed)}", f"{100 * share.low:.0f} to {100 * share.high:.0f} %"]
        lines.append([*line, *(["", ""] if method == MAIN[0] else [f"{only[0]} : {only[1]}", f"{p:.2g}"])])
    header = ["method", "kinds of data", "mean", "most behind the best rival", "runs below 60", "their share"]
    return markdown([*header, "only it fails : only the default", "p"], lines)


def runtime(ours, paper):
    """The paper's runtime table, seconds per epoch, beside our milliseconds per update, both relative to SAC-N."""
    times = {(r["contender"], r["num_critics"]): r["ms_per_update"] for r in ours}
    lines = []
    for row in paper:
        method = row["method"]
        line = [
            method.replace("*", "\\*"),
            row["seconds_per_epoch"],
            f"{row['seconds_per_epoch'] / paper[0]['seconds_per_epoch']:.2f}",
        ]
        for N in (100, 10):
            time = times.get((method, N), times.get((method, "")))
            line += [time, f"{time / times['SAC-N', N]:.2f}"] if time else ["", ""]
        lines.append(line)
    header = ["method", "paper, s per epoch", "relative"]
    return markdown([*header, *(x for N in (100, 10) for x in (f"ours, N = {N}, ms per update", "relative"))], lines)


def tuning_runs(rows):
    """How much each method was tuned: runs, settings and data sets of tuning.csv."""
    lines = []
    for method in sorted({r["method"] for r in rows}):
        mine = [r for r in rows if r["method"] == method]
        settings, data = ({r[name] for r in mine} for name in ("flags", "dataset_id"))
        lines.append([method.replace("*", "\\*"), len(mine), len(settings), len(data)])
    return markdown(["method", "tuning runs", "settings", "data sets"], lines)


# ===== Images
def pixels(rows, kind, tuning=False):
    """Runs on images of alternating or mixed data: last policies seed by seed, and minus the greedy and the sampling
    clone of the same seed. On tuning seeds: each change of the settings, and the critic's error."""
    rows = [r for r in rows if f"/{kind}-" in r["dataset_id"] and (r["seed"] < 100) == tuning]
    rows = [r | {"game": r["dataset_id"].split("/")[1].capitalize()} for r in rows]
    lines = []
    for game, method, flags in dict.fromkeys((r["game"], r["method"], r["flags"]) for r in rows):
        runs = [r for r in rows if (r["game"], r["method"], r["flags"]) == (game, method, flags)]
        returns = {r["seed"]: r["eval_return_mean"] for r in sorted(runs, key=lambda r: r["seed"])}
        line = [game, method.removesuffix("-pixels").replace("*", "\\*")]
        line += [f"`{flags}`" if flags else ""] if tuning else []
        line += [", ".join(f"{x:.1f}" for x in returns.values())]
        if tuning:
            lines.append([*line, ", ".join(f"{r['q_star_minus_return']:.2f}" for r in runs if r["best_return"] != "")])
            continue
        line.append(interval(np.array([*returns.values()]), 1))
        for clone in ("BC-pixels", "BC-sampled-pixels"):
            other = {r["seed"]: r["eval_return_mean"] for r in rows if (r["game"], r["method"]) == (game, clone)}
            line.append(gained(returns[s] - other[s] for s in returns if s in other) if method != clone else "")
        lines.append([*line, f"{np.mean([r['seconds'] for r in runs]) / 60:.0f}"])
    header = ["game", "method", *(["changed"] if tuning else []), "seed by seed"]
    header += ["q* minus return"] if tuning else ["mean", "minus the clone", "minus the sampling clone", "minutes"]
    return markdown(header, lines)


# ===== All of them
def tables(folder):
    """Every table by name."""
    folder = Path(folder)
    mdps, theirs = load(folder / "tables.csv"), load(folder / "paper_tabular.csv")
    study = {name: [r for r in mdps if r["study"] == name] for name in dict.fromkeys(r["study"] for r in mdps)}
    paper = study["paper"]
    learned = [r | {"targets": re.search("--targets (own|shared)", r["arguments"])[1]} for r in study["calibration"]]
    made = gen_report.all_tables() | {
        "tabular_aggregated": paper_grid(paper, theirs),
        "tabular_differences": differences(paper),
        "tabular_targets": by_targets(study["targets"]),
        "calibration": calibration(learned, load(folder / "calibration.csv")),
    }
    everything = labelled(load(folder / "networks.csv"))
    made |= alternating(everything)
    rows = [r for r in everything if not r["switch_prob"]]
    images = load(folder / "pixels.csv")
    lander = [r for r in rows if r["env_id"] == "LunarLander-v3" and r["cell"][2] != 0.1]
    curved = [r for r in lander if r["q_star_minus_return"] != ""]
    own = [("Box-N-own", "SAC-N"), ("Ell_0.9-N-own", "Ell_0.9-N"), ("Ell-Epi*-own", "Ell-Epi*")]
    own += [("Ell-Epi*-own", "Ell_0.9-N-own")]
    sets = [("CH-N", "SAC-N"), ("Ell_0.9-N", "SAC-N"), ("Ell_0.9-N", "CH-N"), ("Ell-Epi*", "Ell_0.9-N")]
    forms = ("Ell-Epi*-own", "Ell_0.9-N-own", "Ell-Epi*", "Ell_0.9-N", "CH-N", "SAC-N")
    both = [r for r in everything if r.get("spread_ratio", np.nan) > 0]
    heads = ("Ell-Epi-own", "Ell-Epi*-own", "Ell-Epi", "Ell-Epi*")
    general = [r for r in rows if r["cell"] in {x["cell"] for x in rows if x["method"] == "Ell-Epi"}]
    return made | {
        "main": main_table(everything),
        "risk": risk(everything),
        "grid_networks": networks(rows, (*SETS, *RIVALS)),
        "grid_sets": pairs(lander, sets),
        "grid_targets": pairs(lander, own),
        "tuning_runs": tuning_runs(load(folder / "tuning.csv")),
        "heads": networks(general, heads),
        "heads_gains": pairs(general, [heads[:2], heads[2:], ("Ell-Epi-own", "Ell-Epi")]),
        "heads_spread": networks(general, heads, "std_data_actions", 2),
        "grid_longer": changed(rows, "--total-updates 40000", ["SAC-N"], "Ell_0.9-N"),
        "grid_spread": networks(curved, forms, "std_data_actions", 2),
        "grid_ratio": networks(both, dict.fromkeys(heads + forms), "spread_ratio", 2, ""),
        "grid_bound": networks(curved, forms, "q_star_minus_return", 1),
        "paper_networks": paper_networks(rows, load(folder / "paper_gym.csv"), load(folder / "gen_policies.csv")),
        "paper_by_tau": paper_by_tau(rows, paper, load(folder / "paper_by_tau.csv")),
        "atari_methods": pixels(images, "alternating"),
        "atari_tuning": pixels(images, "alternating", tuning=True),
        "atari_mixed": pixels(images, "mixed"),
        "atari_mixed_tuning": pixels(images, "mixed", tuning=True),
        "atari_paper": plain(folder / "paper_atari.csv"),
        "sets_charges": plain(folder / "charges.csv"),
        "speed": plain(folder / "speed.csv"),
        "paper_runtime": runtime(load(folder / "speed.csv"), load(folder / "paper_runtime.csv")),
    }


def plain(path):
    """A CSV as it is."""
    with open(path, newline="") as f:
        header, *rows = csv.reader(f)
    return markdown([name.replace("_", " ") for name in header], [[x.replace("*", "\\*") for x in r] for r in rows])


def compare(path, folder):
    """Rows made again against the committed ones: by method the means over the seeds that both have. Machines round
    differently, so that a run is another draw: the tolerance is two standard errors of a difference of means, by the
    scatter of the committed seeds, and at least 1 point. Whether some are there and all within it."""
    mine = load(path)
    names = ("tables",) if "study" in mine[0] else ("networks", "tuning", "pixels")
    committed = [row for name in names for row in load(Path(folder) / f"{name}.csv")]

    def cell(row):
        if "study" in row:
            return row["method"], row["study"], row["arguments"]
        return row["method"], re.sub(r"-s\d+(?=-v)", "", row["dataset_id"]), row["flags"]

    within = []
    for name in dict.fromkeys(map(cell, mine)):
        new, old = ({r["seed"]: r["normalized_return"] for r in x if cell(r) == name} for x in (mine, committed))
        seeds = sorted(new.keys() & old.keys())
        if not seeds:
            print(*name, "no committed row", sep=" | ")
            continue
        scatter = np.std(list(old.values()), ddof=1) if len(old) > 1 else np.inf
        tolerance = max(1, 2 * scatter * np.sqrt(2 / len(seeds)))
        x, y = np.mean([new[s] for s in seeds]), np.mean([old[s] for s in seeds])
        within.append(abs(x - y) <= tolerance)
        verdict = f"{x - y:+.1f}, tolerance {tolerance:.1f}"
        print(*name, f"{len(seeds)} seeds", f"{x:.1f}", f"committed {y:.1f}", verdict, sep=" | ")
    return bool(within) and all(within)


def fill(page, made):
    """The page with what stands between the markers of each table replaced."""
    for name, table in made.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page = re.sub(pattern, lambda m, table=table: f"{m[1]}{table}\n{m[2]}", page, flags=re.S)
    return page


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.compare:
        sys.exit(0 if compare(args.compare, args.csvs) else "Nothing to compare, or cells outside their tolerance.")
    made = tables(args.csvs)
    if args.show:
        print(made.get(args.show) or f"--show: choose from {', '.join(made)}")
        sys.exit(args.show not in made)
    readme = Path(args.docs).parent / "README.md"
    for path in [readme, *sorted(Path(args.docs).rglob("*.md"))]:
        page = path.read_text()
        if fill(page, made) != page:
            path.write_text(fill(page, made))
            print(f"{path.name} rewritten")
