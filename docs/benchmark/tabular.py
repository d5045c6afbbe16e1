"""The tabular experiments as one resumable command: every cell of a grid is one batched run of ersac_tabular.py.

    python docs/benchmark/tabular.py --grid paper

A finished cell is appended to docs/benchmark/tabular_GRID.csv at once, one row a seed, and skipped the next time.
"""

import csv
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from ersac_tabular import machine_replacement, policy_value, riverswim  # noqa: E402

ENVS, SIZES, TAUS = ("MachineReplacement", "RiverSwim"), (10, 100, 1000), (0.1, 0.5, 0.9)
SETS = (("box", 0.9), ("hull", 0.9), ("ellipsoid", 1.0), ("ellipsoid", 0.9))  # box and hull ignore upsilon
SETTING = ("env_id", "dataset_size", "expectile_tau", "uncertainty_set", "upsilon", "bootstrap", "reset_prob")
SETTING += ("total_updates", "seed")
RESULT = ("normalized_return", "normalized_return_stochastic", "normalized_return_state1")
RESULT += ("normalized_return_stochastic_state1", "behaviour_normalized_return", "support_optimum", "policy_entropy")
RESULT += ("lower_bound_rate", "coverage_rate", "eval_return_mean", "monte_carlo_return", "updates_per_second")


@dataclass
class Args:
    grid: Literal["paper", "no-bootstrap", "upsilon", "critics", "tuning"] = "paper"
    """paper: the paper's table; no-bootstrap: the same data for every critic, trained to convergence; upsilon: smaller
    shares of critics in the ellipsoid; critics: fewer of them; tuning: what was tried before the settings were fixed"""
    workers: int = 2
    """processes at a time, one thread each"""
    num_seeds: int = 10
    """seeds a cell, counted from 100 (from 0 for tuning)"""
    out: str | None = None
    """CSV to append to; None is docs/benchmark/tabular_GRID.csv"""


def cells(grid):
    """The arguments of every cell of a grid that differ from the script's defaults."""
    paper = [
        dict(env_id=env, dataset_size=size, expectile_tau=tau, uncertainty_set=kind, upsilon=upsilon)
        for env, size, tau, (kind, upsilon) in itertools.product(ENVS, SIZES, TAUS, SETS)
    ]
    little = [cell for cell in paper if cell["dataset_size"] == 10]
    if grid == "paper":
        return paper
    if grid == "no-bootstrap":  # larger steps reach the same fixed point sooner
        fast = dict(bootstrap=False, q_lr=0.1, polyak=0.05, total_updates=3000)
        below = {"MachineReplacement": (-1010.0, -1000.0), "RiverSwim": (-10.0, 0.0)}  # worse than anything attainable
        pessimistic = [cell | fast | dict(prior=below[cell["env_id"]]) for cell in little]
        return pessimistic + [cell | fast for cell in little if cell["env_id"] == "RiverSwim"]
    if grid == "upsilon":  # 0.9 and 1.0 are in the paper's grid
        ellipsoids = [cell for cell in little if cell["uncertainty_set"] == "ellipsoid" and cell["upsilon"] == 1.0]
        return [cell | dict(upsilon=u) for cell in ellipsoids for u in (0.1, 0.3, 0.5, 0.7)]
    if grid == "critics":  # 100 are in the paper's grid
        return [cell | dict(num_critics=n) for cell in little for n in (3, 10, 30)]
    changes = [dict(total_updates=n) for n in (1000, 2000, 6000)] + [dict(reset_prob=p) for p in (0.0, 0.5)]
    changes = [change | dict(polyak=0.005) for change in (*changes, dict(prior=(0.0, 10.0)))]
    return [cell | change for change in changes for cell in little]


def support_optimum(env_id, visits, gamma, v_low):
    """Normalised return of the best policy of the empirical MDP that takes only actions seen in the data."""
    P, R = {"MachineReplacement": machine_replacement, "RiverSwim": riverswim}[env_id]()
    counts = visits.sum(-1)  # [S, A]
    P_hat = visits / np.maximum(counts, 1)[..., None]
    v = np.zeros(len(P))
    for _ in range(2000):
        q = np.where(counts > 0, (P_hat * (R + gamma * v)).sum(-1), -np.inf)  # [S, A]
        v = np.where((counts > 0).any(-1), q.max(-1), v_low)
    seen = np.where(np.isfinite(q), q == q.max(-1, keepdims=True), False)
    pi = np.where(seen.any(-1, keepdims=True), seen / np.maximum(seen.sum(-1, keepdims=True), 1), 1 / P.shape[1])
    best = np.zeros(len(P))
    for _ in range(2000):
        q_best = (P * (R + gamma * best)).sum(-1)
        best = q_best.max(-1)
    policies = np.stack([pi, np.full_like(pi, 1 / P.shape[1]), np.eye(P.shape[1])[q_best.argmax(-1)]])
    value, random, optimal = policy_value(P, R, policies, gamma).mean(-1)
    return 100 * (value - random) / (optimal - random)


def flags(cell):
    """A cell as command-line arguments, which also are its name in the CSV."""
    words = []
    for name, value in cell.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{name}" if value else f"--no-{name}"]
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return " ".join(words)


def run(name, args):
    """One batched run of ersac_tabular.py, as rows for the CSV."""
    seed = 0 if args.grid == "tuning" else 100
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "ersac_tabular.py"), *name.split(), "--eval-interval=1000"]
        command += [f"--output-dir={folder}", f"--num-seeds={args.num_seeds}", f"--seed={seed}"]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        rows = []
        for path in sorted(Path(folder).glob("*/result.json")):
            result, used = json.loads(path.read_text()), json.loads((path.parent / "args.json").read_text())
            visits = torch.load(path.parent / "checkpoint.pt", weights_only=True)["visits"].numpy()
            result["support_optimum"] = support_optimum(used["env_id"], visits, used["gamma"], used["prior"][0])
            row = {k: used[k] for k in SETTING} | {k: result[k] for k in RESULT}
            rows.append({"arguments": name} | {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()})
        return rows


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    path = Path(args.out or ROOT / "docs" / "benchmark" / f"tabular_{args.grid.replace('-', '_')}.csv")
    names = [flags(cell) for cell in cells(args.grid)]
    rows = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
    count = Counter(row["arguments"] for row in rows)
    if any(n > args.num_seeds for n in count.values()):
        sys.exit(f"{path} holds cells of more than {args.num_seeds} seeds; choose another --out.")
    rows = [row for row in rows if count[row["arguments"]] == args.num_seeds]  # a kill may leave half a cell
    with open(f"{path}.tmp", "w", newline="") as f:
        writer = csv.DictWriter(f, ["arguments", *SETTING, *RESULT])
        writer.writeheader()
        writer.writerows(rows)
    os.replace(f"{path}.tmp", path)
    todo = [name for name in names if count[name] != args.num_seeds]
    started = time.time()
    with ThreadPoolExecutor(args.workers) as pool, open(path, "a", newline="") as f:
        bar = tqdm(total=len(names), initial=len(names) - len(todo), desc=f"{args.grid} grid", unit="cell")
        for future in as_completed([pool.submit(run, name, args) for name in todo]):
            csv.DictWriter(f, ["arguments", *SETTING, *RESULT]).writerows(future.result())
            f.flush()
            bar.update()
    bar.close()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = f"{time.time() - started:.0f} s, {usage.ru_utime + usage.ru_stime:.0f} s of processor time"
    print(f"{len(todo)} cells of {args.num_seeds} seeds in {spent} -> {path}")
