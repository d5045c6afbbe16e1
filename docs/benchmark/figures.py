"""All figures of the docs, from run folders and committed CSVs.

    python docs/benchmark/figures.py                 every figure
    python docs/benchmark/figures.py --only sets     one of them

Run folders that a figure needs are made in runs/figures if they are not there: seconds each, same seed, same picture.
"""

import csv
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from matplotlib.animation import FuncAnimation, PillowWriter
from scipy.spatial import ConvexHull
from scipy.stats import chi2, norm, t

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "docs" / "benchmark"))
from report import by_upsilon, grid_column, grid_flags, load, per_seed  # noqa: E402

import ersac_tabular as tabular  # noqa: E402
from ersac_epinet import worst_case_gaussian, worst_case_gaussian_box  # noqa: E402
from ersac_tabular import center, ellipsoid_radius, worst_case_box, worst_case_ellipsoid, worst_case_hull  # noqa: E402

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999"  # colour-blind safe
SETS = {"box": (GREEN, "box (SAC-N)"), "hull": (BLUE, "convex hull"), "ellipsoid": (ORANGE, "ellipsoid, υ = 0.9")}
METHODS = {"SAC-N": (GREEN, "s"), "CH-N": (BLUE, "^"), "Ell_0.9-N": (ORANGE, "o"), "Ell-Epi": ("#56B4E9", "v")}
METHODS |= {"Ell-Epi*": (PURPLE, "D"), "BC": ("black", "x")}
TAUS = {0.1: (ORANGE, "τ = 0.1, risk-seeking"), 0.5: (GREY, "τ = 0.5, neutral"), 0.9: (BLUE, "τ = 0.9, risk-averse")}
plt.rcParams.update({"figure.dpi": 160, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"legend.frameon": False, "svg.hashsalt": "ersac", "figure.constrained_layout.use": True})


@dataclass
class Args:
    only: str | None = None
    """one figure: visitation, sets, curves, upsilon, critics, epinet, idea, learning, grid, entropy, soak, gym_upsilon,
    schedules, atari, calibration, hedging, targets, budget, growth or valley; None makes them all"""
    out: str = str(ROOT / "docs" / "figures")
    """folder for the pictures"""
    runs: str = str(ROOT / "runs" / "figures")
    """folder for the run folders that the pictures need"""


def run_folder(runs, name, seed, *flags):
    """The finished run folder of the experiment `name` and a seed, made by ersac_tabular.py if it is missing."""
    finished = f"*__{name}__{seed}__*/result.json"
    if not list(Path(runs).glob(finished)):
        command = [sys.executable, ROOT / "ersac_tabular.py", "--exp-name", name, "--seed", seed, "--output-dir", runs]
        subprocess.run(list(map(str, (*command, *flags))), check=True)
    return sorted(Path(runs).glob(finished))[0].parent


def metrics(folder):
    with open(folder / "metrics.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def visitation(args):
    """How often the behaviour policies visit each state and which action they take there, for the three risk levels."""
    fig, axes = plt.subplots(2, 2, figsize=(7.5, 4.2), sharex="col")
    for column, env in enumerate(("MachineReplacement", "RiverSwim")):
        for i, (tau, (colour, label)) in enumerate(TAUS.items()):
            P, R = tabular.riverswim() if env == "RiverSwim" else tabular.machine_replacement()
            behaviour = tabular.expectile_value_iteration(P, R, tau, 0.9).argmax(-1)  # [S]
            visits = np.zeros_like(P)  # of the ten data sets of 1000x, [S, A, S]
            for seed in range(100, 110):
                visits += tabular.collect(P, behaviour, 1000 * len(P), 0.1, 0.1, np.random.default_rng([seed, 0]))
            share = visits.sum(-1) / visits.sum()  # [S, A]
            states = np.arange(1, len(share) + 1)
            axes[0, column].bar(states + 0.28 * (i - 1), share.sum(-1), 0.28, color=colour, label=label)
            axes[1, column].plot(states, share[:, 1] / share.sum(-1), "o-", ms=3, lw=1, color=colour)
        axes[0, column].set_title({"MachineReplacement": "Machine Replacement"}.get(env, env))
        axes[1, column].set_ylim(-0.05, 1.05)
        axes[1, column].set_xlabel("state")
    axes[0, 0].set_ylabel("share of the data")
    axes[1, 0].set_ylabel("share of action 1\n(replace / swim right)")
    axes[0, 0].legend(fontsize=8)
    fig.savefig(f"{args.out}/tabular_visitation.png")


def draw_outlines(ax, q, upsilon=0.9):
    """Critics' points q [N, 2] of one state and the three sets around them."""
    points = q.numpy()
    ax.scatter(*points.T, s=5, color=GREY, label="critics", zorder=1)
    low, high = points.min(0), points.max(0)
    ax.plot(*np.array([low, (high[0], low[1]), high, (low[0], high[1]), low]).T, color=GREEN, lw=1.2)
    corners = points[ConvexHull(points).vertices]
    ax.plot(*np.vstack([corners, corners[:1]]).T, color=BLUE, lw=1.2)
    mu, d = center(q[:, None])  # [1, 2], [1, 2, N]
    angle = torch.linspace(0, 2 * torch.pi, 200, dtype=q.dtype)
    factor = torch.linalg.cholesky(d[0] @ d[0].T / len(q))
    ring = mu + ellipsoid_radius(d, upsilon) * torch.stack([angle.cos(), angle.sin()], -1) @ factor.T
    ax.plot(*ring.T, color=ORANGE, lw=1.2)


def worst_cases(q, upsilon=0.9, sweep=21):
    """pi from action 0 to action 1, [sweep, 2], and q* of each set, [sweep, 2]."""
    p = torch.linspace(0.001, 0.999, sweep, dtype=q.dtype)
    pi = torch.stack([1 - p, p], -1)  # [sweep, 2]
    many = q[:, None].expand(-1, sweep, -1)
    worst = {"box": worst_case_box(many, pi), "hull": worst_case_hull(many, pi)}
    worst["ellipsoid"] = worst_case_ellipsoid(many, pi, upsilon)
    return pi, worst


def idea(args):
    """The method in one moving picture: as the policy goes from one action to the other, so does the worst case."""
    torch.manual_seed(3)
    q = torch.randn(40, 2).double() @ torch.tensor([[1.0, 0.5], [0.0, 0.8]]).double() + torch.tensor([0.3, 0.0])
    frames = 30
    pi, worst = worst_cases(q, sweep=frames)
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.2, 3.1), dpi=180)  # large letters, for phones
    draw_outlines(left, q)
    left.set(xlabel="Q(s, a₁)", ylabel="Q(s, a₂)", title="critics, sets, worst case q*", aspect="equal")
    value = {kind: (pi * q_star).sum(-1) for kind, q_star in worst.items()}
    for kind, (colour, label) in SETS.items():
        right.plot(pi[:, 1], value[kind], color=colour, lw=1.2, label=label)
    right.plot(pi[:, 1], (pi * q.mean(0)).sum(-1), color=GREY, lw=1, ls=":", label="mean critic")
    right.set(xlabel="π(a₂∣s)", title="value counted on, ⟨π, q*⟩")
    right.legend(fontsize=8.5, loc="center left", bbox_to_anchor=(0, 0.62))
    crosses = {kind: left.plot([], [], "x", color=SETS[kind][0], ms=10, mew=2.5, zorder=4)[0] for kind in SETS}
    dots = {kind: right.plot([], [], "o", color=SETS[kind][0], ms=6)[0] for kind in SETS}

    def frame(i):
        for kind in SETS:
            crosses[kind].set_data(*worst[kind][i, :, None])
            dots[kind].set_data([pi[i, 1]], [value[kind][i]])

    there_and_back = [*range(frames), *range(frames - 2, 0, -1)]
    animation = FuncAnimation(fig, frame, there_and_back)
    animation.save(f"{args.out}/idea.gif", PillowWriter(fps=12))
    frame(frames // 3)
    fig.savefig(f"{args.out}/idea.png")


def draw_sets(ax, q):
    """Outlines, and q* of each set as pi goes from action 0 to action 1."""
    draw_outlines(ax, q)
    for kind, q_star in worst_cases(q)[1].items():
        ax.plot(*q_star.T, "x", color=SETS[kind][0], ms=6, mew=1.6, zorder=3, label=f"{SETS[kind][1]}: q*")


def sets(args):
    """Box, hull and ellipsoid at three states, early and late in training, with the worst case as the policy varies."""
    fig, axes = plt.subplots(2, 3, figsize=(7.5, 5.0))
    for row, updates in enumerate((1, 1000)):
        flags = ("--env-id", "MachineReplacement", "--total-updates", updates)
        folder = run_folder(args.runs, f"sets-{updates}", 100, *flags)
        checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
        for ax, state in zip(axes[row], (0, 4, 9)):
            draw_sets(ax, checkpoint["q"][:, state])
            n = checkpoint["visits"].sum(-1)[state].int().tolist()
            ax.set_title(f"state {state + 1}, update {updates}\nseen: run {n[0]}×, replace {n[1]}×", fontsize=8)
            ax.set_xlabel("Q(s, run)", fontsize=8)
        axes[row, 0].set_ylabel("Q(s, replace)", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    fig.savefig(f"{args.out}/tabular_sets.png")


def curves(args):
    """Return and policy entropy during training, mean and standard error over ten seeds."""
    fig, axes = plt.subplots(1, 2, figsize=(7.5, 2.8))
    for kind, (colour, label) in SETS.items():
        flags = ("--uncertainty-set", kind, "--expectile-tau", 0.1)
        runs = [metrics(run_folder(args.runs, f"curves-{kind}", seed, *flags)) for seed in range(100, 110)]
        for ax, name in zip(axes, ("eval/normalized_return", "charts/policy_entropy")):
            y = np.stack([run[name] for run in runs])
            mean, error = y.mean(0), y.std(0, ddof=1) / np.sqrt(len(y))
            ax.plot(runs[0]["update"], mean, color=colour, label=label, lw=1.5)
            ax.fill_between(runs[0]["update"], mean - error, mean + error, color=colour, alpha=0.2, lw=0)
    for ax, title in zip(
        axes, ("normalised return of the greedy policy", "policy entropy on the data's states (nats)")
    ):
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("update")
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=8, loc="lower right", ncols=3, columnspacing=1, handlelength=1)
    fig.savefig(f"{args.out}/tabular_curves.png")


def upsilon(args):
    """Return, lower-bound rate and coverage against upsilon at 10x; 0.9 and 1.0 are in the paper's grid."""
    rows = []
    for name in ("tabular_upsilon.csv", "tabular_paper.csv"):
        with open(ROOT / "docs" / "benchmark" / name, newline="") as f:
            rows += [r for r in csv.DictReader(f) if (r["dataset_size"], r["uncertainty_set"]) == ("10", "ellipsoid")]
    fig, axes = plt.subplots(1, 3, figsize=(7.5, 2.7), sharex=True)
    names = {"normalized_return": "normalised return", "lower_bound_rate": "states with ⟨π, q*⟩ ≤ true value"}
    names |= {"coverage_rate": "states with true Q inside the set"}
    for ax, (name, title) in zip(axes, names.items()):
        for env, colour in (("MachineReplacement", PURPLE), ("RiverSwim", BLUE)):
            levels = sorted({float(row["upsilon"]) for row in rows})
            per_seed = {
                (level, seed): np.mean(
                    [
                        float(r[name])
                        for r in rows
                        if (r["env_id"], float(r["upsilon"]), r["seed"]) == (env, level, seed)
                    ]
                )
                for level in levels
                for seed in sorted({r["seed"] for r in rows})
            }  # mean over the three taus
            y = np.array([[v for (level, _), v in per_seed.items() if level == l] for l in levels])  # [levels, seeds]
            error = y.std(-1, ddof=1) / np.sqrt(y.shape[-1])
            ax.errorbar(levels, y.mean(-1), error, color=colour, marker="o", ms=3, lw=1.2, label=env)
        ax.set_title(title, fontsize=8.5)
        ax.set_xlabel("υ, share of critics in the ellipsoid", fontsize=8)
    axes[1].plot([0, 1], [1, 1], ":", color=GREY, lw=1)
    axes[2].plot([0, 1], [0, 1], ":", color=GREY, lw=1, label="coverage = υ")
    for ax in axes[1:]:
        ax.set_ylim(-0.05, 1.05)
    axes[2].legend(fontsize=7)
    fig.savefig(f"{args.out}/tabular_upsilon.png")


def read(name):
    """Columns of a committed CSV."""
    with open(ROOT / "docs" / "benchmark" / name, newline="") as f:
        rows = list(csv.DictReader(f))
    return {key: np.array([float(row[key]) for row in rows]) for key in rows[0]}


def epinet(args):
    """What the Epinet knows of its ignorance, from epinet_toy.py: spread against data points, and along a line."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(7.5, 2.9))
    data = read("epinet_std.csv")
    counts = np.unique(data["n"])
    for name, colour, label in (
        ("seen", BLUE, "the pair that was tried n times"),
        ("other_action", ORANGE, "the same state, other action"),
        ("far_state", PURPLE, "a state far away"),
    ):
        y = np.stack([data[name][data["n"] == n] for n in counts])  # [counts, seeds]
        left.plot(counts, y.mean(1), "o-", ms=3, lw=1.2, color=colour, label=label)
        left.fill_between(counts, y.min(1), y.max(1), color=colour, alpha=0.15, lw=0)
    left.plot(counts, counts**-0.5, ":", color="black", lw=1, label="theory: 1/√n")
    left.set(xscale="log", yscale="log", xlabel="data points n", ylabel="standard deviation of q")
    left.legend(fontsize=7)
    data = read("epinet_line.csv")
    x = np.unique(data["x"])
    for name, colour, label in (
        ("seen_action", BLUE, "action in the data"),
        ("other_action", ORANGE, "other action"),
        ("before", GREY, "before any data"),
    ):
        y = np.stack([data[name][data["x"] == v] for v in x])  # [states, seeds]
        right.plot(x, y.mean(1), lw=1.2, color=colour, label=label)
    for low, high, text in ((-2, -1, "1000"), (0.2, 0.6, "10")):
        right.axvspan(low, high, color="black", alpha=0.07, lw=0)
        right.text((low + high) / 2, 1.7, text, ha="center", fontsize=7)
    right.set(xlabel="state (shaded: number of data points)", ylim=(0, 1.8))
    right.legend(fontsize=7, loc="center left", bbox_to_anchor=(0, 0.77))
    fig.savefig(f"{args.out}/epinet_std.png")


def learning(args):
    """LunarLander: return, spread and value of the Epinet's front-door run beside the paper's form of the ensemble."""
    fig, axes = plt.subplots(1, 3, figsize=(7.5, 2.6))
    for name, colour, label in (
        ("lunarlander_epinet.csv", BLUE, "Epinet"),
        ("lunarlander_ensemble.csv", ORANGE, "ten critics"),
    ):
        run = read(name)
        axes[0].plot(run["update"], run["eval/return"], color=colour, lw=1.3, label=label)
        axes[1].plot(run["update"], run["charts/std_data_actions"], color=colour, lw=1.3)
        axes[1].plot(run["update"], run["charts/std_other_actions"], "--", color=colour, lw=1.3)
        axes[2].plot(run["update"], run["charts/q_minus_return"], color=colour, lw=1.3)
    titles = ("return of the greedy policy", "spread at data (–) and other (- -) actions", "value − observed return")
    for ax, title in zip(axes, titles):
        ax.set_title(title, fontsize=8)
        ax.set_xlabel("update", fontsize=8)
        ax.tick_params(labelsize=7)
    axes[1].set_ylim(0, None)
    axes[2].axhline(0, color=GREY, ls=":", lw=1)
    axes[0].legend(fontsize=7, loc="center right")
    fig.savefig(f"{args.out}/lunarlander_learning.png")


def soak(args):
    """Memory and speed of an hour's run, from soak.py."""
    run = read("soak.csv")
    fig, (left, right) = plt.subplots(1, 2, figsize=(7.5, 2.3))
    left.plot(run["seconds"] / 60, run["rss_mb"], color=BLUE, lw=1.3)
    left.set(ylim=(0, 1.2 * run["rss_mb"].max()), xlabel="minutes", title="resident memory, MB")
    step = 10  # rows, five minutes
    speed = (run["update"][step:] - run["update"][:-step]) / (run["cpu_seconds"][step:] - run["cpu_seconds"][:-step])
    right.plot(run["seconds"][step:] / 60, speed, color=BLUE, lw=1.3)
    right.set(ylim=(0, 1.2 * speed.max()), xlabel="minutes", title="updates per second of processor time")
    fig.savefig(f"{args.out}/soak.png")


def atari(args):
    """Greedy return while learning from recorded images: every seed, a panel per method, and the clone's mean."""
    runs = load(ROOT / "docs" / "benchmark" / "atari.csv")
    with open(ROOT / "docs" / "benchmark" / "atari_curves.csv", newline="") as f:
        curves = list(csv.DictReader(f))
    game = runs[0]["dataset_id"]  # the first game of the sweep is the one with all seeds
    runs = [r for r in runs if r["dataset_id"] == game and not r["flags"]]
    methods = [m for m in dict.fromkeys(r["method"] for r in runs) if m != "BC-pixels"]
    clone = np.mean([r["eval_return_mean"] for r in runs if r["method"] == "BC-pixels"])
    fig, axes = plt.subplots(1, len(methods), figsize=(2.6 * len(methods), 2.8), sharey=True, squeeze=False)
    for ax, method in zip(axes[0], methods):
        seeds = sorted({r["seed"] for r in runs if r["method"] == method})
        for seed, colour in zip(seeds, (BLUE, ORANGE, GREEN)):
            mine = [r for r in curves if r["method"] == method and r["seed"] == str(seed) and not r["flags"]]
            mine = [r for r in mine if r["dataset_id"] == game]
            x = [int(r["update"]) for r in mine]
            y = [float(r["eval/return"]) for r in mine]
            ax.plot(x, y, "o-", ms=2.5, lw=1.1, color=colour, label=f"seed {seed}")
            (last,) = [r["eval_return_mean"] for r in runs if r["method"] == method and r["seed"] == seed]
            ax.plot([x[-1] * 1.07], [last], "D", ms=5, color=colour)
        for level, name in ((clone, "clone"), (runs[0]["random_return"], "random play")):
            ax.axhline(level, color=GREY, lw=0.8, ls=":")
            ax.annotate(name, (0, level), xycoords=("axes fraction", "data"), va="bottom", fontsize=7)
        ax.set(xlabel="updates after cloning", title=method.removesuffix("-pixels"))
    axes[0, 0].set_ylabel("return")
    axes[0, 0].legend(fontsize=7)
    fig.savefig(f"{args.out}/atari.png")


def grid(args):
    """LunarLander, last policy: against the size of the data by risk level, and on data of mixed quality."""
    rows = load(ROOT / "docs" / "benchmark" / "grid.csv")
    methods = {name: style for name, style in METHODS.items() if name not in ("Ell-Epi", "BC")}
    methods |= {"Ell-Epi*-own": ("#56B4E9", "v"), "BC": METHODS["BC"]}
    fig, axes = plt.subplots(1, 4, figsize=(9.5, 3.1), sharey=True, width_ratios=(3, 3, 3, 2))
    for i, (method, (colour, marker)) in enumerate(methods.items()):
        faint = dict(color=colour, marker=marker, ms=3, alpha=0.4, mew=0.8, ls="none")
        for ax, tau in zip(axes, (0.1, 0.5, 0.9)):
            shift = 1.09 ** (i - 2.5)
            points = []
            for size in (1000, 10_000, 100_000):
                y = list(grid_column(rows, ("LunarLander-v3", f"{size:,}", tau), method).values())
                ax.plot([size * shift] * len(y), y, **faint)
                if y:
                    points.append((size * shift, np.mean(y)))
            if points:
                style = ":" if method == "BC" else "-"
                ax.plot(*zip(*points), color=colour, lw=1.2, marker=marker, ms=4.5, ls=style)
            ax.set(xscale="log", xlim=(600, 170_000), xlabel="transitions")
            ax.set_title(f"{TAUS[tau][1].split(', ')[1]} data", fontsize=8.5)
        y = list(grid_column(rows, ("LunarLander-v3", "100,000, mixed", 0.5), method).values())
        axes[3].plot([i] * len(y), y, **faint)
        if y:
            axes[3].plot([i], [np.mean(y)], marker, color=colour, ms=6)
    axes[3].set_title("100,000 of mixed quality", fontsize=8.5)
    axes[3].set(xticks=[], xlim=(-0.7, len(methods) - 0.3))
    axes[0].set_ylabel("normalised return")
    handles = [plt.Line2D([], [], color=c, marker=m, ms=4.5, lw=1.2) for c, m in methods.values()]
    fig.legend(handles, methods, loc="outside lower center", ncols=len(methods), fontsize=8)
    for ax in axes:
        ax.axhline(100, color=GREY, lw=0.8, ls=":")
        ax.axhline(0, color=GREY, lw=0.8, ls=":")
        ax.tick_params(labelsize=7.5)
    fig.savefig(f"{args.out}/grid.png")


def mean_and_range(ax, rows, column, colour, label):
    """A column of the learning curves against the update: mean over the seeds, shaded from lowest to highest."""
    updates = sorted({r["update"] for r in rows})
    y = [[r[column] for r in rows if r["update"] == u] for u in updates]
    ax.plot(updates, [np.mean(x) for x in y], color=colour, lw=1.3, label=label)
    ax.fill_between(updates, [min(x) for x in y], [max(x) for x in y], color=colour, alpha=0.15, lw=0)


def entropy(args):
    """Policy entropy in training on LunarLander: one alpha, little and much data; and one target entropy."""
    rows = load(ROOT / "docs" / "benchmark" / "gym_curves.csv")
    panels = {
        "LunarLander, 1000, α = 0.003": ("ersac/lunarlander/tau50-1k-v0", None),
        "LunarLander, 100,000, α = 0.003": ("ersac/lunarlander/tau50-100k-v0", None),
        "LunarLander, 100,000, α learned": ("ersac/lunarlander/tau50-100k-v0", "--autotune --total-updates 10000"),
    }
    fig, axes = plt.subplots(1, 3, figsize=(7.5, 2.8))
    for ax, (title, (data, flags)) in zip(axes, panels.items()):
        size = int(data.split("-")[-2].removesuffix("k")) * 1000
        for method, (colour, _) in METHODS.items():
            usual = grid_flags({"method": method, "env_id": "LunarLander-v3", "dataset_size": size})
            chosen = [r for r in rows if (r["method"], r["dataset_id"]) == (method, data)]
            chosen = [r for r in chosen if r["flags"] == (usual if flags is None else flags) and r["seed"] >= 100]
            if chosen:
                mean_and_range(ax, chosen, "charts/policy_entropy", colour, method)
        if flags:
            ax.axhline(0.3 * np.log(4), color=GREY, lw=0.8, ls=":")
        ax.set_title(title, fontsize=8.5)
        ax.set_xlabel("update", fontsize=8)
        ax.tick_params(labelsize=7)
        ax.set_ylim(0, None)
    axes[0].set_ylim(0, 1.2 * axes[0].get_ylim()[1])  # room for the legend
    axes[0].set_ylabel("policy entropy, nats")
    axes[0].legend(fontsize=7, loc="upper right", ncols=2, columnspacing=1, handlelength=1)
    fig.savefig(f"{args.out}/gym_entropy.png")


def schedules(args):
    """LunarLander with 1000 transitions: return while learning with half the updates and with all of them."""
    rows = load(ROOT / "docs" / "benchmark" / "gym_curves.csv")
    rows = [r for r in rows if r["dataset_id"] == "ersac/lunarlander/tau50-1k-v0" and r["seed"] >= 100]
    fig, axes = plt.subplots(1, 2, figsize=(7.5, 2.8), sharey=True, width_ratios=(1, 2))
    for ax, flags, title in ((axes[0], "--total-updates 10000", "10,000 updates"), (axes[1], "", "20,000 updates")):
        for method in ("SAC-N", "CH-N", "Ell_0.9-N"):
            colour, _ = METHODS[method]
            chosen = [r for r in rows if (r["method"], r["flags"]) == (method, flags)]
            mean_and_range(ax, chosen, "eval/return", colour, method)
        ax.set(title=f"{title}, step sizes fall to 0", xlabel="update")
        ax.xaxis.set_major_locator(plt.MultipleLocator(5000))
        ax.title.set_fontsize(8.5)
    axes[0].set_ylabel("return, ten episodes")
    axes[1].legend(fontsize=7, loc="lower right")
    fig.savefig(f"{args.out}/gym_schedules.png")


def critics(args):
    """Return against the number of critics at 10x; 100 are in the paper's grid. Mean over the three taus."""
    fewer = load(ROOT / "docs" / "benchmark" / "tabular_critics.csv")
    rows = [r | {"N": int(r["arguments"].split()[-1])} for r in fewer]
    paper = load(ROOT / "docs" / "benchmark" / "tabular_paper.csv")
    rows += [r | {"N": 100} for r in paper if r["dataset_size"] == 10]
    fig, axes = plt.subplots(1, 2, figsize=(7.5, 2.8))
    names = {"SAC-N": GREEN, "CH-N": BLUE, "Ell-N": PURPLE, "Ell_0.9-N": ORANGE}
    for ax, env in zip(axes, ("MachineReplacement", "RiverSwim")):
        for i, (method, colour) in enumerate(names.items()):
            counts = np.array(sorted({r["N"] for r in rows}))
            y = np.stack([per_seed(rows, "normalized_return", env_id=env, method=method, N=n) for n in counts])
            error = y.std(1, ddof=1) / np.sqrt(y.shape[1])
            ax.errorbar(
                counts * 1.03 ** (i - 1.5), y.mean(1), error, color=colour, marker="o", ms=3, lw=1.2, label=method
            )
        ax.set(xscale="log", xticks=counts, xticklabels=counts, xlabel="critics N", title=env)
        ax.minorticks_off()
    axes[0].set_ylabel("normalised return")
    axes[1].legend(fontsize=7)
    fig.savefig(f"{args.out}/tabular_critics.png")


def gym_upsilon(args):
    """LunarLander with 1000 neutral transitions: return against upsilon, every seed and their mean."""
    rows = by_upsilon(load(ROOT / "docs" / "benchmark" / "gym.csv"))
    fig, ax = plt.subplots(figsize=(5, 2.8))
    for i, method in enumerate(dict.fromkeys(r["method"] for r in rows)):
        colour, marker = METHODS[method]
        values = np.array(sorted({r["upsilon"] for r in rows if r["method"] == method}))
        y = [per_seed(rows, "normalized_return", method=method, upsilon=v) for v in values]
        for value, seeds in zip(values, y):
            ax.plot([value + 0.006 * i] * len(seeds), seeds, marker, color=colour, ms=3, alpha=0.4, mew=0.8, ls="none")
        name, mean = method.replace("_0.9", ""), [seeds.mean() for seeds in y]
        ax.plot(values + 0.006 * i, mean, color=colour, lw=1.2, marker=marker, ms=4.5, label=name)
    ax.axhline(0, color=GREY, lw=0.8, ls=":")
    ax.set(xlabel="share of the samples in the set, υ", ylabel="normalised return")
    ax.legend(fontsize=7)
    fig.savefig(f"{args.out}/gym_upsilon.png")


TARGETS = {"own": (BLUE, "own targets"), "shared": (ORANGE, "shared targets, the paper's form")}


def calibration(args):
    """RiverSwim: how often the ellipsoid holds the truth, and bounds it from below, against upsilon; 90 % intervals."""
    learned = load(ROOT / "docs" / "benchmark" / "tabular_calibration.csv")
    learned = [r | {"targets": "own" if "--targets own" in r["arguments"] else "shared"} for r in learned]
    fixed = load(ROOT / "docs" / "benchmark" / "calibration.csv")
    fig, axes = plt.subplots(2, 3, figsize=(7.5, 4.8), sharex=True, sharey=True)
    columns = [(10, "10 transitions per state"), (100, "100 per state"), (1000, "1000 per state")]
    for column, (size, title) in enumerate(columns):
        for targets, (colour, label) in TARGETS.items():
            for rows, style, policy in ((fixed, "-", "fixed policy"), (learned, "--", "learned policy")):
                where = {"dataset_size": size, "expectile_tau": 0.5, "targets": targets}
                values = sorted({r["upsilon"] for r in rows if all(r[k] == v for k, v in where.items())})
                if not values:  # not run yet
                    continue
                for row, name in enumerate(("coverage_rate", "lower_bound_rate")):
                    y = [per_seed(rows, name, upsilon=v, **where) for v in values]  # levels, each with its seeds
                    mean = np.array([x.mean() for x in y])
                    half = np.array([interval(x) for x in y])
                    axes[row, column].plot(values, mean, style, color=colour, lw=1.3, label=f"{label}, {policy}")
                    axes[row, column].fill_between(values, mean - half, mean + half, color=colour, alpha=0.12)
        levels = np.linspace(0.01, 0.999, 100)
        axes[0, column].plot([0, 1], [0, 1], ":", color="black", lw=1, label="a calibrated set")
        axes[1, column].plot(levels, norm.cdf(np.sqrt(chi2.ppf(levels, 2))), ":", color="black", lw=1)
        axes[0, column].set_title(title, fontsize=9)
        axes[1, column].set_xlabel("υ")
    axes[0, 0].set(ylabel="share of states: set holds Q", ylim=(-0.05, 1.05))
    axes[1, 0].set_ylabel("share of states: ⟨π, q*⟩ ≤ value")
    fig.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7.5)
    fig.savefig(f"{args.out}/calibration.png")


def interval(y):
    """Half the width of a 90 % interval for the mean over the last axis."""
    n = y.shape[-1]
    return t.ppf(0.95, n - 1) * y.std(-1, ddof=1) / np.sqrt(n)


def hedging(args):
    """Two actions with equal means: the value counted on against the policy, for the ellipsoid and its bounding box."""
    fig, axes = plt.subplots(1, 2, figsize=(7.5, 2.8), sharey=True)
    radius = np.sqrt(chi2.ppf(0.9, 2))
    p = torch.linspace(0, 1, 201).double()
    pi = torch.stack([1 - p, p], -1)  # [201, 2]
    mu = torch.zeros(len(p), 2).double()
    cases = ((0.0, "errors of the two actions independent"), (0.8, "correlation 0.8"))
    for ax, (correlation, title) in zip(axes, cases):
        scale = torch.tensor([1.0, 2.0]).double()  # the second action is twice as uncertain
        sigma_bar = scale[:, None] * torch.tensor([[1.0, 0.0], [correlation, (1 - correlation**2) ** 0.5]]).double()
        sigma_bar = sigma_bar.expand(len(p), 2, 2)  # [201, A, d_z]
        worst = {"ellipsoid": worst_case_gaussian(mu, sigma_bar, pi, radius)}
        worst["box"] = worst_case_gaussian_box(mu, sigma_bar, pi, radius)
        for kind, q_star in worst.items():
            value = (pi * q_star).sum(-1)
            best = value.argmax()
            ax.plot(p, value, color=SETS[kind][0], lw=1.4, label=f"{kind}, best at π(a₂) = {p[best]:.2f}")
            ax.plot(p[best], value[best], "o", color=SETS[kind][0], ms=6)
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("π(a₂∣s), the more uncertain action")
        ax.legend(fontsize=7.5, loc="lower left")
    axes[0].set_ylabel("value counted on, ⟨π, q*⟩")
    fig.savefig(f"{args.out}/hedging.png")


def targets(args):
    """LunarLander, 10,000 transitions: what the worst case promises and what the policy gets, in both forms."""
    rows = load(ROOT / "docs" / "benchmark" / "grid_curves.csv")
    rows = [r for r in rows if r["dataset_id"].startswith("ersac/lunarlander/tau50-10k-s") and not r["flags"]]
    fig, axes = plt.subplots(1, 2, figsize=(7.5, 2.8))
    for method, (colour, label) in zip(("Ell-Epi*-own", "Ell-Epi*"), TARGETS.values()):
        chosen = [r for r in rows if r["method"] == method]
        mean_and_range(axes[0], chosen, "charts/q_star_minus_return", colour, label)
        mean_and_range(axes[1], chosen, "eval/return", colour, label)
    axes[0].set_title("q* of the data's action − return that followed", fontsize=9)
    axes[0].axhline(0, color=GREY, ls=":", lw=1)
    axes[1].set_title("return of the greedy policy, ten episodes", fontsize=9)
    axes[1].legend(fontsize=7.5, loc="lower right")
    for ax in axes:
        ax.set_xlabel("update")
    fig.savefig(f"{args.out}/targets.png")


def valley(args):
    """LunarLander, 100,000 transitions, the paper's form: values sink below the returns before the policy gets good."""
    rows = load(ROOT / "docs" / "benchmark" / "gym_curves.csv")
    rows = [r for r in rows if r["dataset_id"] == "ersac/lunarlander/tau50-100k-v0" and not r["flags"]]
    rows = [r for r in rows if r["seed"] in (100, 101, 102)]
    fig, axes = plt.subplots(1, 3, figsize=(7.5, 2.6))
    columns = {
        "eval/return": "return of the greedy policy",
        "charts/q_minus_return": "value − observed return",
        "charts/std_data_actions": "spread at data actions",
    }
    for ax, (column, title) in zip(axes, columns.items()):
        for method in ("SAC-N", "CH-N", "Ell_0.9-N", "Ell-Epi"):
            chosen = [r for r in rows if r["method"] == method]
            mean_and_range(ax, chosen, column, METHODS[method][0], method)
        ax.set_title(title, fontsize=8)
        ax.set_xlabel("update", fontsize=8)
        ax.set_xticks([0, 10_000, 20_000])
        ax.tick_params(labelsize=7)
    axes[1].axhline(0, color=GREY, ls=":", lw=1)
    axes[0].legend(fontsize=7, loc="lower right")
    fig.savefig(f"{args.out}/valley.png")


def budget(args):
    """What k online episodes buy when choosing among the policies of the grid, from budget.py."""
    rows = load(ROOT / "docs" / "benchmark" / "budget.csv")
    grid = [r for r in load(ROOT / "docs" / "benchmark" / "grid.csv") if not r["flags"]]
    names = {
        "ersac/lunarlander/tau50-1k-v0": "1,000 neutral",
        "ersac/lunarlander/tau50-10k-v0": "10,000 neutral",
        "ersac/lunarlander/tau50-early50-100k-v0": "100,000 mixed",
    }
    fig, axes = plt.subplots(1, 3, figsize=(7.5, 2.8))
    for ax, (name, title) in zip(axes, names.items()):
        line = [r for r in rows if (r["dataset"], r["rule"]) == (name, "bandit")]
        ax.plot([r["k"] for r in line], [r["value"] for r in line], color=BLUE, lw=1.4, label="chosen by a bandit")
        levels = (("Ell-Epi*-own", PURPLE, "-", "the default, no episode"), ("BC", "black", ":", "cloning, no episode"))
        for method, colour, style, label in levels:
            mine = [r for r in grid if r["method"] == method]
            y = [r["normalized_return"] for r in mine if r["dataset_id"].replace(f"-s{r['seed']}-", "-") == name]
            ax.axhline(np.mean(y), color=colour, ls=style, lw=1.2, label=label)
        ax.set(xscale="log", xlabel="online episodes k")
        ax.set_title(f"{title}, {line[0]['policies']} policies", fontsize=9)
    axes[0].set_ylabel("normalised return")
    axes[1].legend(fontsize=7, loc="lower right")
    fig.savefig(f"{args.out}/budget.png")


def growth(args):
    """Milliseconds per update against critics, minibatch and actions, from speed.py; the slope of the last step."""
    rows = load(ROOT / "docs" / "benchmark" / "speed_growth.csv")
    fig, axes = plt.subplots(1, 3, figsize=(7.5, 2.8), sharey=True)
    labels = {"N": "critics N, or dimensions of the index", "batch": "minibatch", "actions": "actions"}
    colours = {"ensemble": ORANGE, "Ell-Epi*": PURPLE, "Ell-Epi*-own": BLUE}
    for ax, (varied, label) in zip(axes, labels.items()):
        for method, colour in colours.items():
            line = [r for r in rows if (r["method"], r["varied"]) == (method, varied)]
            x = np.array([r["value"] for r in line])
            y = np.array([r["ms_per_update"] for r in line])
            slope = np.log(y[-1] / y[-2]) / np.log(x[-1] / x[-2])
            ax.plot(x, y, "o-", ms=3, lw=1.2, color=colour, label=f"{method}, slope {slope:.2f}")
        ax.set(xscale="log", yscale="log", xlabel=label, xticks=x, xticklabels=x)
        ax.minorticks_off()
        ax.legend(fontsize=7)
    axes[0].set_ylabel("milliseconds per update")
    fig.savefig(f"{args.out}/speed_growth.png")


FIGURES = {"visitation": visitation, "sets": sets, "curves": curves, "upsilon": upsilon, "critics": critics}
FIGURES |= {"epinet": epinet, "idea": idea, "learning": learning, "grid": grid, "entropy": entropy, "soak": soak}
FIGURES |= {"gym_upsilon": gym_upsilon, "schedules": schedules, "atari": atari}
FIGURES |= {"calibration": calibration, "hedging": hedging, "targets": targets, "budget": budget, "growth": growth}
FIGURES |= {"valley": valley}
if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.only not in (None, *FIGURES):
        sys.exit(f"--only {args.only}: there is no such figure; choose one of {', '.join(FIGURES)}.")
    for name, figure in FIGURES.items():
        if args.only in (None, name):
            figure(args)
            print(f"{name} done")
