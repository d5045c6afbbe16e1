"""The tabular experiments as one resumable command: every cell and seed of a grid is one run of ersac_tabular.py.

    python docs/benchmark/tabular.py --grid paper
    python docs/benchmark/tabular.py --grid targets --envs RiverSwim --sizes 10

A finished run is a row of docs/benchmark/tabular_GRID.csv, written at once and skipped the next time. Every worker
process makes many runs, so that the imports are paid for once. A run that fails is reported, the others go on.
"""

import contextlib
import csv
import io
import itertools
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "benchmark")]
from calibration import rates  # noqa: E402

from ersac_tabular import machine_replacement, policy_value, riverswim  # noqa: E402

ENVS, SIZES, TAUS = ("MachineReplacement", "RiverSwim"), (10, 100, 1000), (0.1, 0.5, 0.9)
SETS = (("box", 0.9), ("hull", 0.9), ("ellipsoid", 1.0), ("ellipsoid", 0.9))  # box and hull ignore upsilon
SETTING = ("env_id", "dataset_size", "expectile_tau", "uncertainty_set", "upsilon", "bootstrap", "reset_prob")
SETTING += ("total_updates", "seed")
RESULT = ("normalized_return", "normalized_return_stochastic", "normalized_return_state1")
RESULT += ("normalized_return_stochastic_state1", "behaviour_normalized_return", "support_optimum", "policy_entropy")
RESULT += ("lower_bound_rate", "coverage_rate", "eval_return_mean", "monte_carlo_return", "updates_per_second")
COLUMNS = ("arguments", *SETTING, *RESULT, "commit")


@dataclass
class Args:
    grid: Literal["paper", "no-bootstrap", "upsilon", "critics", "targets", "calibration", "tuning"] = "paper"
    """paper: the paper's table; no-bootstrap: the same data for every critic, trained to convergence; upsilon: smaller
    shares of critics in the ellipsoid; critics: fewer of them; targets: one target for all critics or each its own, by
    bootstrap and initial tables; calibration: how often the set holds the truth, against upsilon, with both kinds of
    targets; tuning: what was tried before the settings were fixed"""
    envs: list[str] = field(default_factory=lambda: list(ENVS))
    """MDPs, if not all of the grid"""
    sizes: list[int] = field(default_factory=lambda: list(SIZES))
    """transitions per state, if not all of the grid"""
    workers: int = 2
    """processes at a time, one thread each"""
    num_seeds: int = 10
    """seeds per cell, counted from 100 (from 0 for tuning)"""
    out: str | None = None
    """CSV to append to; None is docs/benchmark/tabular_GRID.csv"""


def cells(grid):
    """The arguments of every cell of a grid that differ from the script's defaults."""
    paper = [
        dict(env_id=env, dataset_size=size, expectile_tau=tau, uncertainty_set=kind, upsilon=upsilon)
        for env, size, tau, (kind, upsilon) in itertools.product(ENVS, SIZES, TAUS, SETS)
    ]
    little = [cell for cell in paper if cell["dataset_size"] == 10]
    # larger steps reach the same fixed point sooner; initial tables below anything attainable
    fast = dict(bootstrap=False, q_lr=0.1, polyak=0.05, total_updates=3000)
    below = {"MachineReplacement": (-1010.0, -1000.0), "RiverSwim": (-10.0, 0.0)}
    if grid == "paper":
        return paper
    if grid == "no-bootstrap":
        pessimistic = [cell | fast | dict(prior=below[cell["env_id"]]) for cell in little]
        return pessimistic + [cell | fast for cell in little if cell["env_id"] == "RiverSwim"]
    if grid == "targets":
        found = []
        for cell, targets in itertools.product(paper, ("shared", "own")):
            if cell["dataset_size"] < 1000:
                for data, prior in itertools.product(({}, fast), ({}, dict(prior=below[cell["env_id"]]))):
                    found.append(cell | dict(targets=targets) | data | prior)
        return found
    if grid == "calibration":
        coarse = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
        curves = [(100, 0.5, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0))]
        curves += [(10, 0.5, coarse), (1000, 0.5, coarse), (100, 0.1, coarse), (100, 0.9, coarse)]
        found = []
        for size, tau, upsilons in curves:
            for targets, upsilon in itertools.product(("shared", "own"), upsilons):
                cell = dict(env_id="RiverSwim", dataset_size=size, expectile_tau=tau, targets=targets)
                found.append(cell | dict(uncertainty_set="ellipsoid", upsilon=upsilon))
        return found
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
    uniform = np.full_like(pi, 1 / P.shape[1])
    optimal = np.eye(P.shape[1])[q_best.argmax(-1)]
    value, low, high = (policy_value(P, R, policy, gamma).mean() for policy in (pi, uniform, optimal))
    return 100 * (value - low) / (high - low)


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


def run(name, seed, commit):
    """One run of ersac_tabular.py in this process, as a row for the CSV; or what went wrong, as a string."""
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["ersac_tabular.py", "--targets", "shared", *name.split()]  # what comes later counts
        sys.argv += ["--seed", str(seed), "--eval-interval", "1000", "--output-dir", folder]
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                runpy.run_path(str(ROOT / "ersac_tabular.py"), run_name="__main__")
        except SystemExit as stop:
            return f"{name} --seed {seed}: {stop.code} {said.getvalue().strip()[-500:]}"
        except Exception as error:
            return f"{name} --seed {seed}: {type(error).__name__}: {error}"
        (path,) = Path(folder).glob("*/result.json")
        result = json.loads(path.read_text())
        used = json.loads((path.parent / "args.json").read_text())
        tables = torch.load(path.parent / "checkpoint.pt", weights_only=True)
    visits = tables["visits"].numpy()
    result["support_optimum"] = support_optimum(used["env_id"], visits, used["gamma"], used["prior"][0])
    result = result | rates(used, tables)
    row = {"arguments": name} | {k: used[k] for k in SETTING} | {k: result[k] for k in RESULT} | {"commit": commit}
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()}


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    path = Path(args.out or ROOT / "docs" / "benchmark" / f"tabular_{args.grid.replace('-', '_')}.csv")
    first = 0 if args.grid == "tuning" else 100
    chosen = [cell for cell in cells(args.grid) if cell["env_id"] in args.envs and cell["dataset_size"] in args.sizes]
    if not chosen:
        sys.exit(f"--envs {' '.join(args.envs)} --sizes {' '.join(map(str, args.sizes))}: the grid has no such cell.")
    names = [flags(cell) for cell in chosen]
    text = path.read_text() if path.exists() else ""
    rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))  # without a line that a kill cut in half
    have = {(row["arguments"], int(row["seed"])) for row in rows}
    # seed by seed: a grid that is stopped has whole seeds
    tasks = [(name, seed) for seed in range(first, first + args.num_seeds) for name in names]
    todo = [task for task in tasks if task not in have]
    if not todo:
        print(f"{path}: all {len(tasks)} runs are there")
        sys.exit()
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    commit = described.stdout.strip()
    with open(f"{path}.tmp", "w", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(f"{path}.tmp", path)
    os.environ["OMP_NUM_THREADS"] = "1"
    started = time.time()
    failed = 0
    bar = tqdm(total=len(tasks), initial=len(tasks) - len(todo), desc=f"{args.grid} grid", unit="run")
    pool = ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn"))
    try:
        for future in as_completed([pool.submit(run, name, seed, commit) for name, seed in todo]):
            row = future.result()
            if isinstance(row, str):
                failed += 1
                tqdm.write(row, file=sys.stderr)
                continue
            with open(path, "a", newline="") as f:
                csv.DictWriter(f, COLUMNS, lineterminator="\n").writerow(row)
            bar.update()
    finally:
        pool.shutdown(cancel_futures=True)
    bar.close()
    print(f"{len(todo) - failed} runs in {time.time() - started:.0f} s -> {path}")
    if failed:
        sys.exit(f"{failed} runs failed; the same command tries them again.")
