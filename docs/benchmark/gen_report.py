"""What risk does to the behaviour policies: three training seeds, three taus, in CartPole and LunarLander.

    python docs/benchmark/gen_report.py

trains what is missing (`--policy-dir` keeps it), measures every policy greedily and with the noise of the collection,
and writes gen_policies.csv, gen_visitation.csv and gen_runs.csv beside this file and docs/figures/gen_visitation.png;
report.py then writes the tables of docs/gen_expectile_data.md. Rows that are there already are kept; --report-only just
redraws. More noise:

    python docs/benchmark/gen_report.py --env-id CartPole-v1 --epsilon 0.3 --taus 0.5 0.1 --policy-dir runs/eps30
"""

import csv
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from gen_expectile_data import network, play_episode  # noqa: E402

ENVS, SEEDS, TAUS = ("CartPole-v1", "LunarLander-v3"), (1, 2, 3), (0.5, 0.1, 0.9)
ACTIONS = {"CartPole-v1": ("left", "right"), "LunarLander-v3": ("none", "left", "main", "right")}
# what is counted as a visit: (column, lowest, highest) of two observations, 12 x 12 cells; LunarLander: in flight only
CELLS = {"CartPole-v1": ((2, -0.12, 0.12), (3, -1.2, 1.2)), "LunarLander-v3": ((1, -0.2, 1.6), (3, -1.0, 0.4))}
AXES = {"CartPole-v1": ("angle", "angular velocity"), "LunarLander-v3": ("height", "vertical speed")}


@dataclass
class Args:
    policy_dir: str = "runs/gen_report"
    """folder for the trained policies, one folder per environment and seed; what is there is not trained again"""
    episodes: int = 100
    """episodes of each measurement"""
    env_id: str | None = None
    """only this environment; None is both"""
    taus: tuple[float, ...] = TAUS
    """risk levels"""
    epsilon: float = 0.1
    """noise of training and measurement; another than 0.1 has its own CSVs, gen_*_eps30.csv for 0.3"""
    report_only: bool = False
    """no training, no measurement: the picture from the CSVs"""


def table_file(name, epsilon):
    return HERE / (f"gen_{name}.csv" if epsilon == 0.1 else f"gen_{name}_eps{int(100 * epsilon)}.csv")


def read(name, epsilon=0.1):
    path = table_file(name, epsilon)
    return list(csv.DictReader(path.open())) if path.exists() else []


def add(name, rows, epsilon):
    with table_file(name, epsilon).open("a", newline="") as f:
        writer = csv.DictWriter(f, rows[0])
        if f.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def train(env_id, seed, tau, folder, epsilon):
    """One command of the script; its wall time, processor time and output go into gen_runs.csv."""
    policy = folder / f"{env_id.split('-')[0].lower()}-tau{int(100 * tau)}" / "policy.pt"
    if policy.exists():
        return policy
    flags = ["--env-id", env_id, "--expectile-tau", str(tau), "--seed", str(seed), "--dataset-size", "1000"]
    flags += ["--epsilon", str(epsilon)]
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, str(ROOT / "gen_expectile_data.py"), *flags, "--policy-dir", str(folder.resolve())]
        before, started = os.times(), time.time()
        environment = os.environ | {"MINARI_DATASETS_PATH": scratch}
        done = subprocess.run([*command, "--output-dir", scratch], env=environment, capture_output=True, text=True)
        after = os.times()
    if done.returncode:
        sys.exit(f"{env_id}, seed {seed}, tau {tau}: {done.stderr.strip().splitlines()[-1]}")
    row = {"env_id": env_id, "seed": seed, "tau": tau, "wall_seconds": round(time.time() - started, 1)}
    row["cpu_seconds"] = round(
        after.children_user + after.children_system - before.children_user - before.children_system, 1
    )
    rounds = re.findall(r"greedy return (\S+), the floor", done.stdout)
    add("runs", [row | {"greedy_returns_at_the_end_of_each_round": " ".join(rounds)}], epsilon)
    return policy


def measure(env_id, seed, tau, path, episodes, epsilon):
    """A row of gen_policies.csv and the rows of gen_visitation.csv for one policy."""
    env = gym.make(env_id)
    actor = network(env.observation_space.shape[0], int(env.action_space.n), 128, 0.01)
    actor.load_state_dict(torch.load(path, weights_only=True)["actor"])
    rng = np.random.default_rng([seed, 2026])
    greedy = [play_episode(env, actor, rng, greedy=True) for _ in range(episodes)]
    noisy = [play_episode(env, actor, rng, epsilon=epsilon) for _ in range(episodes)]
    row = {"env_id": env_id, "seed": seed, "tau": tau}
    for name, group in (("greedy", greedy), ("noisy", noisy)):
        returns = np.array([episode["rewards"].sum() for episode in group])
        row |= {f"{name}_return": returns.mean(), f"{name}_std": returns.std(ddof=1)}
        row |= {f"{name}_p10": np.quantile(returns, 0.1), f"{name}_length": np.mean([len(e["actions"]) for e in group])}
    actions = np.concatenate([episode["actions"] for episode in noisy])
    row |= {f"action{a}": np.mean(actions == a) if a < env.action_space.n else "" for a in range(4)}
    obs = [episode["observations"][:-1] for episode in noisy]
    failures = [episode["terminations"][-1] for episode in noisy]
    if env_id == "LunarLander-v3":
        failures = [episode["rewards"][-1] == -100 for episode in noisy]  # a crash, or out of sight
        obs = [x[(x[:, 6] == 0) & (x[:, 7] == 0)] for x in obs]
        row |= {
            "air_steps": np.mean([len(x) for x in obs]),
            "descent": np.concatenate(obs)[:, 3].mean(),
            "abs_angle": "",
        }
    else:
        row |= {"air_steps": "", "descent": "", "abs_angle": np.abs(np.concatenate(obs)[:, 2]).mean()}
    row["failures"] = int(sum(failures))
    cells = []
    for half in (0, 1):  # two halves: the distance between them is what chance alone makes
        counts = np.zeros((12, 12))
        for x in obs[half::2]:
            index = []
            for column, low, high in CELLS[env_id]:
                index.append(((x[:, column] - low) / (high - low) * 12).astype(int).clip(0, 11))
            np.add.at(counts, tuple(index), 1)
        cells += [
            {"env_id": env_id, "seed": seed, "tau": tau, "half": half, "i": i, "j": j, "visits": int(counts[i, j])}
            for i, j in zip(*np.nonzero(counts))
        ]
    return {k: round(float(v), 4) if isinstance(v, float | np.floating) else v for k, v in row.items()}, cells


def visitation(epsilon=0.1):
    """Visits by (environment, seed, tau) and half, as probabilities [12, 12]."""
    tables = {}
    for row in read("visitation", epsilon):
        key = row["env_id"], int(row["seed"]), float(row["tau"])
        table = tables.setdefault(key, np.zeros((2, 12, 12)))
        table[int(row["half"]), int(row["i"]), int(row["j"])] = int(row["visits"])
    # CartPole has a mirror: leaning to the left and leaning to the right are the same thing
    return {key: t + t[:, ::-1, ::-1] if key[0] == "CartPole-v1" else t for key, t in tables.items()}


def distance(a, b):
    """Total variation: half the sum of the absolute differences, 0 for the same and 1 for disjoint visits."""
    return 0.5 * np.abs(a / a.sum() - b / b.sum()).sum()


def distances(env_id, tables):
    """Rows (what, number of pairs, mean, lowest, highest)."""
    whole = {key[1:]: table.sum(0) for key, table in tables.items() if key[0] == env_id}
    taus = sorted({tau for _, tau in whole})
    seeds = sorted({seed for seed, _ in whole if all((seed, tau) in whole for tau in taus)})  # complete ones
    groups = {"two halves of the episodes of one policy": []}
    groups["two halves of the episodes of one policy"] = [distance(*t) for key, t in tables.items() if key[0] == env_id]
    for tau in taus:
        pairs = itertools.combinations(seeds, 2)
        groups[f"two training seeds, both tau = {tau}"] = [distance(whole[s, tau], whole[r, tau]) for s, r in pairs]
    for first, second in itertools.combinations(taus, 2):
        groups[f"tau = {first} and {second}, the same seed"] = [
            distance(whole[s, first], whole[s, second]) for s in seeds
        ]
        others = [(s, r) for s in seeds for r in seeds if s != r]
        groups[f"tau = {first} and {second}, two seeds"] = [
            distance(whole[s, first], whole[r, second]) for s, r in others
        ]
    return [(what, len(x), np.mean(x), min(x), max(x)) for what, x in groups.items() if x]


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def tables_of(env_id, rows, tables):
    """The three tables of one environment, as Markdown."""
    rows = sorted((r for r in rows if r["env_id"] == env_id), key=lambda r: (float(r["tau"]), int(r["seed"])))
    special = ("steps in flight", "speed", "speed at height") if env_id == "LunarLander-v3" else ("mean \\|angle\\|",)
    columns = ("air_steps", "descent") if env_id == "LunarLander-v3" else ("abs_angle",)
    header = ("tau", "seed", "greedy return", "return", "10th percentile", "steps", "failures", *special)
    body = []
    for r in rows:
        number = lambda name, digits=1, r=r: f"{float(r[name]):.{digits}f}"  # noqa: E731
        shown = [number(c, 0 if c == "air_steps" else 3) for c in columns]
        if env_id == "LunarLander-v3":  # at heights from 0.7 to 1.3, by the cells' centres
            visits = tables[env_id, int(r["seed"]), float(r["tau"])].sum(0)[6:10].sum(0)
            shown.append(f"{visits @ (-1 + (np.arange(12) + 0.5) * 1.4 / 12) / visits.sum():.3f}")
        scores = [number("greedy_return"), number("noisy_return"), number("noisy_p10"), number("noisy_length", 0)]
        mix = [f"{100 * float(r[f'action{a}']):.0f} %" for a in range(len(ACTIONS[env_id]))]
        body.append([r["tau"], r["seed"], *scores, r["failures"], *shown, *mix])
    policies = table((*header, *ACTIONS[env_id]), body)
    far = table(
        ("visitation of", "pairs", "mean distance", "lowest", "highest"),
        [(what, n, *(f"{x:.3f}" for x in numbers)) for what, n, *numbers in distances(env_id, tables)],
    )
    return policies, far


def runs_table():
    rows = sorted(read("runs"), key=lambda r: (r["env_id"], int(r["seed"]), -abs(float(r["tau"]) - 0.5), r["tau"]))
    names = "env_id", "seed", "tau", "wall_seconds", "cpu_seconds", "greedy_returns_at_the_end_of_each_round"
    header = ("environment", "seed", "tau", "wall time (s)", "processor time (s)", "greedy return after each stage")
    return table(header, [[row[name] for name in names] for row in rows])


def picture(tables):
    """Visits of each tau, averaged over the seeds, and what tau = 0.1 and 0.9 change against 0.5."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 5, figsize=(9, 4.4), layout="constrained")
    for row, env_id in zip(axes, ENVS):
        mean = {
            tau: np.mean([t.sum(0) / t.sum() for key, t in tables.items() if (key[0], key[2]) == (env_id, tau)], 0)
            for tau in TAUS
        }
        (_, low_x, high_x), (_, low_y, high_y) = CELLS[env_id]
        panels = [(f"τ = {tau}", mean[tau]) for tau in sorted(TAUS)]
        panels += [(f"{tau} minus 0.5", mean[tau] - mean[0.5]) for tau in (0.1, 0.9)]
        top = max(panel.max() for _, panel in panels[:3])
        change = max(np.abs(panel).max() for _, panel in panels[3:])
        for axis, (title, panel) in zip(row, panels):
            extent = (low_x, high_x, low_y, high_y)
            limits = (
                dict(cmap="RdBu_r", vmin=-change, vmax=change)
                if "minus" in title
                else dict(cmap="viridis", vmin=0, vmax=top)
            )
            image = axis.imshow(panel.T, origin="lower", aspect="auto", extent=extent, **limits)
            if axis in (row[2], row[4]):
                bar = figure.colorbar(image, ax=axis)
                bar.set_label("difference of shares" if "minus" in title else "share of the time", fontsize=7)
                bar.ax.tick_params(labelsize=7)
            axis.set_title(f"{env_id.split('-')[0]}\n{title}", fontsize=8.5)
            axis.set_xlabel(AXES[env_id][0], fontsize=8)
            axis.tick_params(labelsize=7)
        row[0].set_ylabel(AXES[env_id][1], fontsize=8)
    (ROOT / "docs/figures").mkdir(exist_ok=True)
    figure.savefig(ROOT / "docs/figures/gen_visitation.png", dpi=160, metadata={"Software": None})


def all_tables():
    """The tables of docs/gen_expectile_data.md by name, from the CSVs; report.py writes them into the page."""
    parts = {"gen_runs": runs_table()}
    for env_id in ENVS:
        name = f"gen_{env_id.split('-')[0].lower()}"
        policies, distances = tables_of(env_id, read("policies"), visitation())
        parts[f"{name}_policies"] = policies
        parts[f"{name}_distances"] = distances
    policies, distances = tables_of("CartPole-v1", read("policies", 0.3), visitation(0.3))
    parts["gen_cartpole_noisy_policies"] = policies
    parts["gen_cartpole_noisy_distances"] = distances
    return parts


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    done = {(r["env_id"], int(r["seed"]), float(r["tau"])) for r in read("policies", args.epsilon)}
    envs = () if args.report_only else (args.env_id,) if args.env_id else ENVS
    for env_id, seed, tau in itertools.product(envs, SEEDS, args.taus):
        policy = train(env_id, seed, tau, Path(args.policy_dir) / f"{env_id}-seed{seed}", args.epsilon)
        if (env_id, seed, tau) not in done:
            row, cells = measure(env_id, seed, tau, policy, args.episodes, args.epsilon)
            add("visitation", cells, args.epsilon)
            add("policies", [row], args.epsilon)
            print(row, flush=True)
    picture(visitation())
