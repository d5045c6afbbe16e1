"""With k online episodes to choose among the policies of a sweep, what do you get? From the stored returns of grid.csv.

    python docs/benchmark/budget.py

Offline nobody knows which of many trained policies is best. Two answers, for every cell of the grid, averaged over its
seeds; a seed's policies are those that the methods learned from that seed's data set.

- expected: k policies, drawn at random without replacement, are tried until their value is known, and the best one is
  kept (expected online performance, Kurenkov and Kolesnikov 2022). k counts policies.
- bandit: k episodes are played, each with the policy that UCB1 picks, and the policy with the highest mean is kept
  (as in unifloral, Jackson et al. 2025). k counts episodes; an episode is drawn from the 100 stored ones.

The value of what is kept is the mean of all its stored episodes, normalised.
"""

import csv
import os
from dataclasses import dataclass
from math import comb
from pathlib import Path

import numpy as np
import tyro

BENCHMARK = Path(__file__).resolve().parent
ONCE = ("EDAC", "Ell-Epi")  # run with a few seeds of one cell: there they would leave those seeds alone complete
COLUMNS = ["dataset", "rule", "k", "value", "policies", "seeds"]


@dataclass
class Args:
    grid: str = str(BENCHMARK / "grid.csv")
    """CSV of a sweep"""
    episodes: int = 100
    """largest number of online episodes"""
    simulations: int = 2000
    """bandit runs per seed and cell"""
    out: str = str(BENCHMARK / "budget.csv")
    """CSV to write"""


def expected_best(values, k):
    """Expected highest of k of the values, drawn without replacement."""
    ordered = np.sort(values)
    M = len(ordered)
    # the i-th smallest is the best of the drawn ones if the k - 1 others lie below it
    chances = [comb(i, k - 1) / comb(M, k) for i in range(M)]
    return float(ordered @ chances)


def bandit(returns, budget, simulations, rng):
    """Mean value of the policy that UCB1 holds for the best after 1, 2, ..., budget episodes. [budget]"""
    M = len(returns)  # returns: an array of episodes per policy, in [0, 1] up to outliers
    values = np.array([r.mean() for r in returns])
    pulls = np.zeros((simulations, M))
    sums = np.zeros((simulations, M))
    everyone = np.arange(simulations)
    kept = np.zeros(budget)
    for k in range(budget):
        mean = sums / np.maximum(pulls, 1)
        bonus = np.sqrt(2 * np.log(k + 1) / np.maximum(pulls, 1))
        untried = 1e6 + rng.random(pulls.shape)  # a policy that was never tried comes first, in random order
        chosen = np.where(pulls > 0, mean + bonus, untried).argmax(1)
        drawn = [rng.choice(r, simulations) for r in returns]
        sums[everyone, chosen] += np.stack(drawn, 1)[everyone, chosen]
        pulls[everyone, chosen] += 1
        best = np.where(pulls > 0, sums / np.maximum(pulls, 1), -np.inf).argmax(1)
        kept[k] = values[best].mean()
    return kept


def cells(rows):
    """Data sets of the grid without their seeds, and for each a list over seeds of the methods' normalised episodes."""
    found = {}
    for row in rows:
        name = row["dataset_id"].replace(f"-s{row['seed']}-", "-")
        low, high = float(row["random_return"]), float(row["reference_return"])
        episodes = (np.array(row["eval_returns"].split(), float) - low) / (high - low)
        found.setdefault(name, {}).setdefault(row["seed"], []).append(episodes)
    for name, seeds in found.items():
        most = max(map(len, seeds.values()))
        found[name] = [policies for policies in seeds.values() if len(policies) == most]  # complete seeds
    return found


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    with open(args.grid, newline="") as f:
        rows = [row for row in csv.DictReader(f) if not row["flags"] and row["method"] not in ONCE]
    lines = []
    for name, seeds in cells(rows).items():
        M = len(seeds[0])
        for k in range(1, M + 1):
            value = np.mean([expected_best([r.mean() for r in policies], k) for policies in seeds])
            lines.append([name, "expected", k, f"{100 * value:.2f}", M, len(seeds)])
        rng = np.random.default_rng(0)
        kept = np.mean([bandit(policies, args.episodes, args.simulations, rng) for policies in seeds], 0)
        lines += [[name, "bandit", k + 1, f"{100 * value:.2f}", M, len(seeds)] for k, value in enumerate(kept)]
    with open(f"{args.out}.tmp", "w", newline="") as f:
        csv.writer(f, lineterminator="\n").writerows([COLUMNS, *lines])
    os.replace(f"{args.out}.tmp", args.out)
