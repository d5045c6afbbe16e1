"""All figures of the docs, from run folders and committed CSVs.

    python docs/benchmark/figures.py                 every figure
    python docs/benchmark/figures.py --only sets     one of them

Run folders and data that a figure needs are made in runs/figures if they are not there: same seed, same picture.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import minari
import numpy as np
import torch
import tyro
from matplotlib.animation import FuncAnimation, PillowWriter
from scipy.spatial import ConvexHull
from scipy.stats import chi2, norm

ROOT = Path(__file__).resolve().parents[2]
CSVS = ROOT / "docs" / "benchmark"
sys.path[:0] = [str(ROOT), str(CSVS)]
from calibration import radius_squared  # noqa: E402
from report import MAIN, by_seed, cells_of, half_width, labelled, load, main_rows, main_scores, per_seed  # noqa: E402

from ersac_epinet import worst_case_gaussian, worst_case_gaussian_box  # noqa: E402
from ersac_tabular import (  # noqa: E402
    worst_case_box,
    worst_case_ellipsoid,
    worst_case_hull,
)

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999"  # colour-blind safe
SETS = {"box": (GREEN, "box (SAC-N)"), "hull": (BLUE, "convex hull"), "ellipsoid": (ORANGE, "ellipsoid, υ = 0.9")}
LEARNING = {"Ell-Epi*-own": ("#56B4E9", "Epinet, own targets (default)")}
LEARNING |= {"SAC-N": (GREEN, "box of ten critics (SAC-N)"), "Ell_0.9-N": (ORANGE, "ellipsoid of ten critics")}
PROFILE = LEARNING | {"Ell-Epi*": (BLUE, "Epinet, the paper's form"), "BC": (GREY, "cloning")}
PROFILE |= {"BC-top": ("black", "better half cloned"), "CQL-untuned": (PURPLE, "CQL, untuned")}
TARGETS = {"own": (BLUE, "own targets"), "shared": (ORANGE, "shared targets, the paper's form")}
PIXELS = {"Ell-Epi*-pixels": BLUE, "SAC-N-pixels": GREEN, "CQL-pixels": PURPLE}
plt.rcParams.update({"figure.dpi": 160, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"legend.frameon": False, "svg.hashsalt": "ersac", "figure.constrained_layout.use": True})


@dataclass
class Args:
    only: str | None = None
    """one figure by its function's name; None makes them all"""
    out: str = str(ROOT / "docs" / "figures")
    """folder for the pictures"""
    runs: str = str(ROOT / "runs" / "figures")
    """folder for the run folders and data that the pictures need"""


def run_folder(runs, updates):
    """The run of ersac_tabular.py after so many updates, made if it is missing."""
    finished = f"*__sets-{updates}__100__*/result.json"
    if not list(Path(runs).glob(finished)):
        flags = f"--exp-name sets-{updates} --seed 100 --env-id MachineReplacement --total-updates {updates}"
        command = [sys.executable, str(ROOT / "ersac_tabular.py"), *flags.split(), "--output-dir", runs]
        subprocess.run(command, check=True)
    return sorted(Path(runs).glob(finished))[0].parent


def draw_outlines(ax, q, upsilon=0.9):
    """Critics' points q [N, 2] of one state and the three sets around them."""
    points = q.numpy()
    ax.scatter(*points.T, s=5, color=GREY, label="critics", zorder=1)
    low, high = points.min(0), points.max(0)
    ax.plot(*np.array([low, (high[0], low[1]), high, (low[0], high[1]), low]).T, color=GREEN, lw=1.2)
    corners = points[ConvexHull(points).vertices]
    ax.plot(*np.vstack([corners, corners[:1]]).T, color=BLUE, lw=1.2)
    mu = q.mean(0)
    factor = torch.linalg.cholesky((q - mu).T @ (q - mu) / len(q))
    angle = torch.linspace(0, 2 * torch.pi, 200, dtype=q.dtype)
    circle = torch.stack([angle.cos(), angle.sin()], -1)  # [200, 2]
    ring = mu + radius_squared(q[:, None], upsilon).sqrt() * circle @ factor.T
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


def sets(args):
    """Box, hull and ellipsoid at three states, early and late in training, with the worst case as the policy varies."""
    fig, axes = plt.subplots(2, 3, figsize=(7.5, 5.0))
    for row, updates in enumerate((1, 1000)):
        checkpoint = torch.load(run_folder(args.runs, updates) / "checkpoint.pt", weights_only=True)
        for ax, state in zip(axes[row], (0, 4, 9)):
            q = checkpoint["q"][:, state]  # [N, A]
            draw_outlines(ax, q)
            for kind, q_star in worst_cases(q)[1].items():
                ax.plot(*q_star.T, "x", color=SETS[kind][0], ms=6, mew=1.6, zorder=3, label=f"{SETS[kind][1]}: q*")
            n = checkpoint["visits"].sum(-1)[state].int().tolist()
            ax.set_title(f"state {state + 1}, update {updates}\nseen: run {n[0]}×, replace {n[1]}×", fontsize=8)
            ax.set_xlabel("Q(s, run)", fontsize=8)
        axes[row, 0].set_ylabel("Q(s, replace)", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    fig.savefig(f"{args.out}/tabular_sets.png")


def epinet(args):
    """What the Epinet knows of its ignorance, from epinet_toy.py: spread against data points, and along a line. Linear
    heads, and general ones dashed."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(7.5, 2.9))

    def draw(ax, rows, x, names):
        points = np.array(sorted({r[x] for r in rows}))
        for (name, label), colour in zip(names.items(), (BLUE, ORANGE, PURPLE)):
            for heads in dict.fromkeys(r["heads"] for r in rows):
                style = "-" if heads == "linear" else "--"
                y = [per_seed(rows, name, heads=heads, **{x: point}).mean() for point in points]
                ax.plot(points, y, style, lw=1.2, color=colour, label=label if heads == "linear" else None)
        return points

    names = {"seen": "the pair that was tried n times", "other_action": "the same state, other action"}
    counts = draw(left, load(CSVS / "epinet_std.csv"), "n", names | {"far_state": "a state far away"})
    left.plot(counts, counts**-0.5, ":", color="black", lw=1, label="theory: 1/√n")
    left.set(xscale="log", yscale="log", xlabel="data points n", ylabel="standard deviation of q")
    names = {"seen_action": "action in the data", "other_action": "other action", "before": "before any data"}
    draw(right, load(CSVS / "epinet_line.csv"), "x", names)
    for low, high, text in ((-2, -1, "1000"), (0.2, 0.6, "10")):
        right.axvspan(low, high, color="black", alpha=0.07, lw=0)
        right.text((low + high) / 2, 19, text, ha="center", fontsize=7)
    right.set(xlabel="state (shaded: number of data points)", yscale="log", ylim=(0.03, 30))
    right.plot([], [], "--", color=GREY, lw=1.2, label="dashed: general heads")
    left.legend(fontsize=7, loc="lower left")
    right.legend(fontsize=7, loc="lower right")
    fig.savefig(f"{args.out}/epinet_std.png")


def learning(args):
    """Alternating data with a fifth of good steps: return while learning, every seed, and where the clone ends."""
    rows, curves = load(CSVS / "networks.csv"), load(CSVS / "networks_curves.csv")
    fig, axes = plt.subplots(1, 3, figsize=(7.5, 2.6), sharey=True)
    for ax, (method, (colour, label)) in zip(axes, LEARNING.items()):
        mine = [r for r in curves if "early80-switch10-100k" in r["dataset_id"] and r["method"] == method]
        for seed in sorted({r["seed"] for r in mine if 110 <= r["seed"] <= 114}):
            run = [r for r in mine if r["seed"] == seed and r["flags"] == ""]
            ax.plot([r["update"] for r in run], [r["eval/return"] for r in run], color=colour, lw=0.9, alpha=0.7)
        clones = [r for r in rows if "early80-switch10-100k" in r["dataset_id"] and r["method"] == "BC"]
        for level, name in (
            (np.mean([r["eval_return_mean"] for r in clones]), "clone"),
            (clones[0]["reference_return"], "good policy"),
        ):
            ax.axhline(level, color=GREY, lw=0.8, ls=":")
            ax.annotate(name, (1, level), xycoords=("axes fraction", "data"), va="bottom", ha="right", fontsize=7)
        ax.set_title(label, fontsize=8.5)
        ax.set(xlabel="update", xlim=(0, 20_500), ylim=(-420, 330))
        ax.tick_params(labelsize=7)
    axes[0].set_ylabel("return of the greedy policy")
    fig.savefig(f"{args.out}/learning.png")


def atari(args):
    """Pong in which two controllers take turns: greedy return while learning, every seed, and where the clones end."""
    runs = [r for r in load(CSVS / "pixels.csv") if "pong/alternating" in r["dataset_id"]]
    runs = [r for r in runs if r["seed"] >= 100 and not r["flags"]]
    curves = [r for r in load(CSVS / "pixels_curves.csv") if "pong/alternating" in r["dataset_id"] and not r["flags"]]
    methods = [m for m in dict.fromkeys(r["method"] for r in runs) if not m.startswith("BC")]
    ends = {
        m: np.mean([r["eval_return_mean"] for r in runs if r["method"] == f"{m}-pixels"]) for m in ("BC", "BC-sampled")
    }
    levels = [("clone", ends["BC"], "top"), ("sampling clone", ends["BC-sampled"], "bottom")]
    levels.append(("the good controller", np.mean([r["reference_return"] for r in runs]), "bottom"))
    fig, axes = plt.subplots(2, -(-len(methods) // 2), figsize=(5.4, 4.4), sharey=True)
    for ax, method in zip(axes.flat, methods):
        colour = PIXELS.get(method, GREY)
        for seed in sorted({r["seed"] for r in runs if r["method"] == method}):
            mine = [r for r in curves if (r["method"], r["seed"]) == (method, seed)]
            (last,) = [r["eval_return_mean"] for r in runs if (r["method"], r["seed"]) == (method, seed)]
            ax.plot([r["update"] for r in mine], [r["eval/return"] for r in mine], color=colour, lw=0.9, alpha=0.7)
            ax.plot([1.07 * mine[-1]["update"]], [last], "D", ms=3.5, color=colour, alpha=0.7)
        for name, level, side in levels:
            ax.axhline(level, color=GREY, lw=0.8, ls=":")
            if ax is axes.flat[0]:
                corner = {"xycoords": ("axes fraction", "data"), "va": side, "ha": "right", "fontsize": 8}
                ax.annotate(name, (0.99, level), **corner)
        ax.set_title(method.removesuffix("-pixels"), fontsize=9)
        ax.set_xticks([0, 3000, 6000])
    for ax in axes.flat[len(methods) :]:
        ax.set_visible(False)
    fig.supxlabel("update after cloning", fontsize=9)
    fig.supylabel("return", fontsize=9)
    fig.savefig(f"{args.out}/atari.png")


def failures(args):
    """The paper's form, seed by seed: box against ellipsoid of ten critics on the same data."""
    rows = labelled(load(CSVS / "networks.csv"))
    cells = [c for c in cells_of(rows) if c[0] == "LunarLander-v3" and len(by_seed(rows, c, "Ell_0.9-N")) == 5]
    fig, ax = plt.subplots(figsize=(5.4, 0.8 + 0.33 * len(cells)))
    for i, cell in enumerate(cells):
        box, ellipsoid = by_seed(rows, cell, "SAC-N"), by_seed(rows, cell, "Ell_0.9-N")
        for seed in box.keys() & ellipsoid.keys():
            ax.plot([box[seed], ellipsoid[seed]], [i - 0.17, i + 0.17], color=GREY, lw=0.8, zorder=1)
        for shift, scores, kind in ((-0.17, box, "box"), (0.17, ellipsoid, "ellipsoid")):
            colour, label = SETS[kind]
            ax.plot(list(scores.values()), [i + shift] * len(scores), "o", color=colour, ms=4, label=label)
    names = [cell[1] + (", risk-averse" if cell[2] == 0.9 else "") for cell in cells]
    ax.set_yticks(range(len(cells)), names, fontsize=8)
    ax.invert_yaxis()
    ax.axvline(100, color=GREY, lw=0.8, ls=":")
    ax.axvline(0, color=GREY, lw=0.8, ls=":")
    ax.set_xlabel("normalised return")
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles[:2], labels[:2], fontsize=8, loc="outside upper center", ncols=2)
    fig.savefig(f"{args.out}/failures.png")


def calibration(args):
    """RiverSwim: how often the ellipsoid holds the truth, and bounds it from below, against upsilon; 90 % intervals."""
    learned = [r for r in load(CSVS / "tables.csv") if r["study"] == "calibration"]
    learned = [r | {"targets": "own" if r["method"].endswith("-own") else "shared"} for r in learned]
    fixed = load(CSVS / "calibration.csv")
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
                    half = np.array([half_width(x) for x in y])
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


def main_result(args):
    """The main table: the score in the cell, coloured by the points behind the row's best. Five inches wide."""
    labels, methods, scores = main_scores(labelled(load(CSVS / "networks.csv")))
    behind = np.nanmax(scores, axis=1, keepdims=True) - scores
    fig, ax = plt.subplots(figsize=(5.4, 0.9 + 0.23 * len(labels)), dpi=200)
    colours = plt.get_cmap("YlOrRd").with_extremes(bad="white")
    ax.imshow(np.ma.masked_invalid(behind), cmap=colours, vmin=0, vmax=80, aspect="auto")
    for (i, j), score in np.ndenumerate(scores):
        if np.isfinite(score):
            style = {"color": "white" if behind[i, j] > 50 else "black", "ha": "center", "va": "center"}
            best = "bold" if behind[i, j] < 0.5 else "normal"
            ax.text(j, i, f"{score:.0f}".replace("-", "−"), fontsize=8, fontweight=best, **style)
    names = {"Ell-Epi*-own": "Epinet, own\n(default)", "Ell_0.9-N-own": "ten critics,\nown", "BC": "cloning"}
    names |= {"Ell_0.9-N": "ellipsoid of\nten critics", "SAC-N": "box of\nten critics", "Ell-Epi*": "Epinet"}
    names |= {"BC-top": "better half\ncloned", "BC-top10": "best tenth\ncloned", "CQL-untuned": "CQL,\nuntuned"}
    ax.set_xticks(
        range(len(methods)), [names.get(m, m) for m in methods], rotation=55, ha="left", rotation_mode="anchor"
    )
    for text, mine in (("ours", MAIN[:2]), ("the paper's form", MAIN[2:5]), ("rivals", MAIN[5:])):
        where = [j for j, method in enumerate(methods) if method in mine]
        ax.text(np.mean(where), len(labels) - 0.4, text, fontsize=7, ha="center", va="top")
    ax.set_yticks(range(len(labels)), labels)
    ax.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0, labelsize=7)
    ax.set_xticks(np.arange(len(methods)) - 0.5, minor=True)
    ax.set_yticks(np.arange(len(labels)) - 0.5, minor=True)
    ax.grid(which="minor", color="white", lw=1.5)
    ax.tick_params(which="minor", length=0)
    ax.spines[:].set_visible(False)
    fig.savefig(f"{args.out}/main_result.png")


def profile(args):
    """Share of the runs that score at least so much, over the kinds of data on which all the methods have five."""
    rows = main_rows(labelled(load(CSVS / "networks.csv")))
    scores = {m: {cell: by_seed(rows, cell, m) for cell in cells_of(rows)} for m in PROFILE}
    cells = [cell for cell in cells_of(rows) if all(len(scores[m][cell]) == 5 for m in PROFILE)]
    fig, ax = plt.subplots(figsize=(5.4, 2.8))
    grid = np.arange(-50, 111)
    for method, (colour, label) in PROFILE.items():
        every = np.array([[*scores[method][cell].values()] for cell in cells])
        ax.plot(grid, [(every >= x).mean() for x in grid], color=colour, lw=1.4, label=label)
    ax.set(xlabel=f"normalised return, {len(cells)} kinds of data", ylabel="share of runs at or above", ylim=(0, 1.02))
    ax.legend(fontsize=7, loc="lower left")
    fig.savefig(f"{args.out}/profile.png")


def alternating_episode(args):
    """A LunarLander episode in which two policies take turns: its path, and its altitude, coloured by who acts."""
    os.environ["MINARI_DATASETS_PATH"] = f"{args.runs}/minari"
    os.makedirs(f"{args.runs}/minari", exist_ok=True)
    dataset_id = "ersac/lunarlander/tau50-early50-switch05-3k-v0"
    flags = "--env-id LunarLander-v3 --early-fraction 0.5 --switch-prob 0.05 --dataset-size 3000"
    subprocess.run([sys.executable, str(ROOT / "gen_expectile_data.py"), *flags.split()], check=True)
    episodes = list(minari.load_dataset(dataset_id).iterate_episodes())
    landed = [e for e in episodes if e.terminations[-1] and e.rewards[-1] > 0]
    episode = max(landed, key=lambda e: np.diff(e.infos["early"]).sum())  # the one with the most turns
    early = episode.infos["early"][: len(episode.actions)]  # [T]
    x, y = episode.observations[:-1, 0], episode.observations[:-1, 1]
    fig, (left, right) = plt.subplots(1, 2, figsize=(7.5, 2.8), sharey=True)
    for acts, colour, label in ((False, BLUE, "good policy acts"), (True, ORANGE, "early policy acts")):
        mine = np.where(early == acts, y, np.nan)
        left.plot(np.where(early == acts, x, np.nan), mine, ".-", ms=3, lw=1.4, color=colour)
        right.plot(np.arange(len(y)), mine, ".-", ms=3, lw=1.4, color=colour, label=label)
    left.plot(0, 0, "^", color="black", ms=6)
    left.set(xlabel="horizontal position (▲ the pad)", ylabel="altitude")
    right.set(xlabel=f"step; return {episode.rewards.sum():.0f}")
    right.legend(fontsize=8)
    fig.savefig(f"{args.out}/alternating_episode.png")


FIGURES = (sets, epinet, idea, learning, failures, atari, calibration, hedging)
FIGURES += (main_result, profile, alternating_episode)
if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    names = [figure.__name__ for figure in FIGURES]
    if args.only not in (None, *names):
        sys.exit(f"--only {args.only}: there is no such figure; choose one of {', '.join(names)}.")
    for figure in FIGURES:
        if args.only in (None, figure.__name__):
            figure(args)
            print(f"{figure.__name__} done")
