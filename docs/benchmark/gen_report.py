"""What risk does to the behaviour policies: three training seeds, three taus, in CartPole and LunarLander.

    python docs/benchmark/gen_report.py

trains what is missing, measures every policy over 100 greedy episodes and 100 with the noise of the collection, adds
rows to gen_policies.csv and gen_visitation.csv (gen_*_eps30.csv: more noise), and draws the figure gen_visitation.png;
--report-only just draws. report.py makes the tables.
"""

import csv
import itertools
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
from gen_expectile_data import network, play_episode  # noqa: E402

SEEDS = (1, 2, 3)
STUDIES = [("LunarLander-v3", 0.1, (0.1, 0.5, 0.9)), ("CartPole-v1", 0.1, (0.1, 0.5, 0.9))]
STUDIES += [("CartPole-v1", 0.3, (0.1, 0.5))]
# what is counted as a visit: (name, column, lowest, highest) of two observations, 12 x 12 cells; LunarLander: in flight
CELLS = {
    "LunarLander-v3": (("height", 1, -0.2, 1.6), ("vertical speed", 3, -1.0, 0.4)),
    "CartPole-v1": (("angle", 2, -0.12, 0.12), ("angular velocity", 3, -1.2, 1.2)),
}


def read(name, epsilon=0.1):
    """The path of a CSV and its rows."""
    path = HERE / (f"gen_{name}.csv" if epsilon == 0.1 else f"gen_{name}_eps{int(100 * epsilon)}.csv")
    return path, list(csv.DictReader(path.open()))


def add(name, rows, epsilon):
    """To a committed CSV: columns that are not measured any more stay empty."""
    path, known = read(name, epsilon)
    with path.open("a", newline="") as f:
        csv.DictWriter(f, known[0]).writerows(rows)


def train(env_id, seed, tau, epsilon):
    """The policy of one command of the script, trained unless it is there."""
    home = ROOT / f"runs/gen_report/{env_id}-seed{seed}-eps{epsilon}"
    flags = f"--env-id {env_id} --expectile-tau {tau} --seed {seed} --epsilon {epsilon} --policy-dir {home}"
    flags += " --dataset-id gen/report-v0 --dataset-size 9 --overwrite"  # nobody needs these data
    subprocess.run([sys.executable, str(ROOT / "gen_expectile_data.py"), *flags.split()], check=True)
    return home / f"{env_id.split('-')[0].lower()}-tau{int(100 * tau)}" / "policy.pt"


def measure(env_id, seed, tau, path, epsilon):
    """A row of gen_policies.csv and the rows of gen_visitation.csv for one policy."""
    env = gym.make(env_id)
    actor = network(env.observation_space.shape[0], int(env.action_space.n), 0.01)
    actor.load_state_dict(torch.load(path, weights_only=True)["actor"])
    rng = np.random.default_rng([seed, 2026])
    greedy = [play_episode(env, actor, rng, greedy=True)["rewards"].sum() for _ in range(100)]
    noisy = [play_episode(env, actor, rng, epsilon=epsilon) for _ in range(100)]
    obs = [episode["observations"][:-1] for episode in noisy]
    row = {"env_id": env_id, "seed": seed, "tau": tau, "greedy_return": round(np.mean(greedy), 4)}
    row["noisy_return"] = round(np.mean([episode["rewards"].sum() for episode in noisy]), 4)
    if env_id == "LunarLander-v3":
        row["failures"] = sum(episode["rewards"][-1] == -100 for episode in noisy)  # a crash, or out of sight
        obs = [x[(x[:, 6] == 0) & (x[:, 7] == 0)] for x in obs]
    else:
        row["failures"] = sum(episode["terminations"][-1] for episode in noisy)
        row["abs_angle"] = round(float(np.abs(np.concatenate(obs)[:, 2]).mean()), 4)
    columns, low, high = np.array([cell[1:] for cell in CELLS[env_id]]).T
    cells = []
    for half in (0, 1):  # two halves: the distance between them is what chance alone makes
        x = np.concatenate(obs[half::2])[:, columns.astype(int)]
        index = ((x - low) / (high - low) * 12).astype(int).clip(0, 11)
        for (i, j), n in zip(*np.unique(index, axis=0, return_counts=True)):
            cells.append({"env_id": env_id, "seed": seed, "tau": tau, "half": half, "i": i, "j": j, "visits": n})
    return row, cells


def visitation(epsilon=0.1):
    """Visits by (environment, seed, tau) and half, as numbers [2, 12, 12]."""
    tables = {}
    for row in read("visitation", epsilon)[1]:
        key = row["env_id"], int(row["seed"]), float(row["tau"])
        table = tables.setdefault(key, np.zeros((2, 12, 12)))
        table[int(row["half"]), int(row["i"]), int(row["j"])] = int(row["visits"])
    # CartPole has a mirror: leaning to the left and leaning to the right are the same thing
    return {key: t + t[:, ::-1, ::-1] if key[0] == "CartPole-v1" else t for key, t in tables.items()}


def distance(a, b):  # total variation
    return 0.5 * np.abs(a / a.sum() - b / b.sum()).sum()


def markdown(header, lines):
    lines = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def all_tables():
    """The tables of docs/gen_expectile_data.md by name, from the CSVs; report.py writes them into the page."""
    lines, far = [], []
    for env_id, epsilon, taus in STUDIES:
        visits = {key[1:]: table for key, table in visitation(epsilon).items() if key[0] == env_id}
        whole = {key: table.sum(0) for key, table in visits.items()}
        for tau in taus:
            group = [r for r in read("policies", epsilon)[1] if (r["env_id"], float(r["tau"])) == (env_id, tau)]
            group.sort(key=lambda r: int(r["seed"]))
            names = ("greedy_return", "noisy_return", "failures")
            cells = [", ".join(f"{float(r[name]):.0f}" for r in group) for name in names]
            manner = [f"{float(r['abs_angle'] or 0):.3f}" for r in group]
            if env_id == "LunarLander-v3":  # mean speed at heights from 0.7 to 1.3, by the cells' centres
                speeds = -1 + (np.arange(12) + 0.5) * 1.4 / 12
                high = [whole[seed, tau][6:10].sum(0) for seed in SEEDS]
                manner = [f"{x @ speeds / x.sum():.2f}" for x in high]
            lines.append([env_id, epsilon, tau, *cells, ", ".join(manner)])
        groups = [[distance(*halves) for halves in visits.values()]]
        pairs = itertools.combinations(SEEDS, 2)
        groups.append([distance(whole[s, tau], whole[r, tau]) for s, r in pairs for tau in taus])
        for a, b in ((0.1, 0.5), (0.1, 0.9), (0.5, 0.9)):
            groups.append([distance(whole[s, a], whole[s, b]) for s in SEEDS if b in taus])
        text = [f"{np.mean(x):.2f} ({min(x):.2f} to {max(x):.2f})" if x else "" for x in groups]
        far.append([env_id, epsilon, *text])
    header = ("environment", "ε", "τ", "greedy return", "return", "failures", "speed at height, mean \\|angle\\|")
    pairs = ("τ 0.1 and 0.5", "τ 0.1 and 0.9", "τ 0.5 and 0.9")
    return {
        "gen_policies": markdown(header, lines),
        "gen_distances": markdown(("environment", "ε", "two halves of one policy", "two seeds of one τ", *pairs), far),
    }


def picture(tables):
    """Visits of each tau, averaged over the seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(7, 4.4), layout="constrained")
    for row, (env_id, _, taus) in zip(axes, STUDIES):
        (x_name, _, *x_range), (y_name, _, *y_range) = CELLS[env_id]
        visits = [np.mean([t.sum(0) / t.sum() for k, t in tables.items() if k[::2] == (env_id, x)], 0) for x in taus]
        for axis, tau, mean in zip(row, taus, visits):
            axis.imshow(mean.T, vmin=0, vmax=np.max(visits), origin="lower", aspect="auto", extent=(*x_range, *y_range))
            axis.set_title(f"{env_id.split('-')[0]}, τ = {tau}", fontsize=9)
            axis.set_xlabel(x_name, fontsize=8)
        row[0].set_ylabel(y_name, fontsize=8)
    figure.savefig(ROOT / "docs/figures/gen_visitation.png", dpi=160, metadata={"Software": None})


if __name__ == "__main__":
    torch.set_num_threads(1)
    for env_id, epsilon, taus in STUDIES if "--report-only" not in sys.argv else ():
        done = {(r["env_id"], int(r["seed"]), float(r["tau"])) for r in read("policies", epsilon)[1]}
        for seed, tau in itertools.product(SEEDS, taus):
            if (env_id, seed, tau) not in done:
                row, cells = measure(env_id, seed, tau, train(env_id, seed, tau, epsilon), epsilon)
                add("visitation", cells, epsilon)
                add("policies", [row], epsilon)
    picture(visitation())
