"""A grid of runs, environments x data sizes x taus x methods x seeds, several processes at a time, resumable.

    python docs/benchmark/sweep.py --envs LunarLander-v3 --sizes 100000 --methods Ell_0.9-N SAC-N BC --seeds 100 101 102

A finished run is one row of the CSV, written at once and skipped the next time; a run that a kill interrupted is made
anew. --flags="--autotune" passes further arguments to the training scripts (not to cloning), part of a row's name.
"""

import csv
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
METHODS = {
    "SAC-N": "ersac_ensemble.py --uncertainty-set box",
    "CH-N": "ersac_ensemble.py --uncertainty-set hull",
    "Ell-N": "ersac_ensemble.py --uncertainty-set ellipsoid --upsilon 1.0",
    "Ell_0.9-N": "ersac_ensemble.py --uncertainty-set ellipsoid --upsilon 0.9",
    "EDAC": "ersac_ensemble.py --uncertainty-set box --edac-eta 1.0",
    "Ell-Epi": "ersac_epinet.py --method ell-epi",
    "Ell-Epi*": "ersac_epinet.py --method ell-epi-star",
    "BC": "docs/benchmark/clone.py",
}
COLUMNS = ("method", "env_id", "dataset_size", "expectile_tau", "seed", "flags", "dataset_id", "normalized_return")
COLUMNS += ("best_return", "eval_return_mean", "eval_return_std", "random_return", "reference_return", "policy_entropy")
COLUMNS += ("updates", "updates_per_second", "seconds")


@dataclass
class Args:
    envs: list[str] = field(default_factory=lambda: ["LunarLander-v3"])
    """environments"""
    sizes: list[int] = field(default_factory=lambda: [100_000])
    """transitions in the data set"""
    taus: list[float] = field(default_factory=lambda: [0.5])
    """risk levels of the behaviour policy"""
    methods: list[str] = field(default_factory=lambda: ["SAC-N", "CH-N", "Ell_0.9-N", "BC"])
    """methods, by the names of METHODS"""
    seeds: list[int] = field(default_factory=lambda: [100, 101, 102, 103, 104])
    """seeds; 0 to 9 are for tuning, results are reported on 100 and up"""
    flags: str = ""
    """further arguments for the training scripts, as --flags="--hidden-dim 64" (with the equals sign)"""
    workers: int = 2
    """processes at a time, one thread each"""
    out: str = str(ROOT / "docs" / "benchmark" / "gym.csv")
    """CSV to append to"""


def run(method, env, size, tau, seed, flags):
    """One run, as a row of the CSV."""
    script, *words = METHODS[method].split()
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / script), *words, "--env-id", env, "--dataset-size", str(size)]
        command += ["--expectile-tau", str(tau), "--seed", str(seed), "--output-dir", folder]
        command += shlex.split(flags) if method != "BC" else []
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        (path,) = Path(folder).glob("*/result.json")
        row = json.loads(path.read_text())
        evaluations = []
        if (path.parent / "metrics.csv").exists():
            with open(path.parent / "metrics.csv", newline="") as f:
                evaluations = [float(r["eval/return"]) for r in csv.DictReader(f)]
    row |= {"method": method, "dataset_size": size, "expectile_tau": tau, "flags": flags if method != "BC" else ""}
    row |= {"seconds": time.time() - started, "best_return": max(evaluations) if evaluations else None}
    return {name: round(row[name], 4) if isinstance(row[name], float) else row[name] for name in COLUMNS}


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    unknown = set(args.methods) - set(METHODS)
    if unknown:
        sys.exit(f"--methods {' '.join(sorted(unknown))}: choose from {', '.join(METHODS)}.")
    path, rows, text = Path(args.out), [], ""
    if path.exists():
        text = path.read_text()
        rows = [row for row in csv.DictReader(text.splitlines()) if row["seconds"]]
    if not text.endswith("\n"):  # a new file, or a kill has left half a line; else other sweeps may be writing here
        with open(f"{path}.tmp", "w", newline="") as f:
            writer = csv.DictWriter(f, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(f"{path}.tmp", path)
    name = ("method", "env_id", "dataset_size", "expectile_tau", "seed", "flags")
    have = {tuple(row[k] for k in name) for row in rows}
    grid = itertools.product(args.seeds, args.envs, args.sizes, args.taus, args.methods)
    cells = [(m, e, n, t, s, args.flags if m != "BC" else "") for s, e, n, t, m in grid]
    todo = [cell for cell in cells if tuple(map(str, cell)) not in have]
    with ThreadPoolExecutor(args.workers) as pool, open(path, "a", newline="") as f:
        bar = tqdm(total=len(cells), initial=len(cells) - len(todo), desc=path.stem, unit="run")
        for future in as_completed([pool.submit(run, *cell) for cell in todo]):
            row = future.result()
            csv.DictWriter(f, COLUMNS).writerow(row)
            f.flush()
            bar.update()
            bar.set_postfix_str(f"{row['method']} seed {row['seed']}: {row['normalized_return']}")
    bar.close()
