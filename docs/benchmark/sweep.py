"""A grid of runs, environments x data sizes x taus x methods x seeds, several processes at a time, resumable.

    python docs/benchmark/sweep.py --envs LunarLander-v3 --sizes 100000 --methods Ell_0.9-N SAC-N BC --seeds 100 101 102

A finished run is one row of the CSV, written at once and skipped the next time; a run that a kill interrupted is made
anew. What it logged on the way goes to a second CSV, whose name ends in _curves. --flags="--autotune" passes further
arguments to the training scripts (not to cloning), part of a row's name. --datasets takes Minari ids in place of
environments, sizes and taus, such as that of mix.py.
"""

import csv
import io
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
sys.path.insert(0, str(ROOT))
from ersac_ensemble import dataset_name  # noqa: E402

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
COLUMNS += ("updates", "updates_per_second", "seconds", "training_entropy")
KEY = ("method", "dataset_id", "seed", "flags")  # what names a run
CURVES = ("update", "eval/return", "charts/policy_entropy", "charts/q_minus_return", "charts/std_data_actions")


@dataclass
class Args:
    envs: list[str] = field(default_factory=lambda: ["LunarLander-v3"])
    """environments"""
    sizes: list[int] = field(default_factory=lambda: [100_000])
    """transitions in the data set"""
    taus: list[float] = field(default_factory=lambda: [0.5])
    """risk levels of the behaviour policy"""
    datasets: list[str] = field(default_factory=list)
    """Minari data sets, instead of environments, sizes and taus"""
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


def run(method, dataset_id, seed, flags, env, size, tau):
    """One run: its row of the CSV and what it logged. Without an environment the data set is named instead."""
    script, *words = METHODS[method].split()
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / script), *words, "--seed", str(seed), "--output-dir", folder]
        ours = ["--env-id", env, "--dataset-size", str(size), "--expectile-tau", str(tau)]
        command += [*(ours if env else ["--dataset-id", dataset_id]), *shlex.split(flags)]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        (path,) = Path(folder).glob("*/result.json")
        row = json.loads(path.read_text())
        metrics = []
        if (path.parent / "metrics.csv").exists():
            with open(path.parent / "metrics.csv", newline="") as f:
                metrics = list(csv.DictReader(f))
    row |= {"method": method, "dataset_size": size, "expectile_tau": tau, "flags": flags}
    row |= {"seconds": time.time() - started, "best_return": None, "training_entropy": None}
    if metrics:
        row["best_return"] = max(float(r["eval/return"]) for r in metrics)
        row["training_entropy"] = sum(float(r["charts/policy_entropy"]) for r in metrics) / len(metrics)
    return {name: round(row[name], 4) if isinstance(row[name], float) else row[name] for name in COLUMNS}, metrics


def append(path, columns, rows):
    """Add rows, below a header if the file is new, in one write: another sweep may add to it too."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    if not path.exists():
        writer.writeheader()
    writer.writerows(rows)
    with open(path, "a", newline="") as f:
        f.write(text.getvalue())


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    unknown = set(args.methods) - set(METHODS)
    if unknown:
        sys.exit(f"--methods {' '.join(sorted(unknown))}: choose from {', '.join(METHODS)}.")
    path, rows, text = Path(args.out), [], ""
    if path.exists():
        text = path.read_text()
        rows = list(csv.DictReader(text.splitlines()))
        rows = rows if text.endswith("\n") else rows[:-1]  # a kill has left half a line
    if not text.endswith("\n") or text.splitlines()[0] != ",".join(COLUMNS):  # new, cut or older
        with open(f"{path}.tmp", "w", newline="") as f:
            writer = csv.DictWriter(f, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(f"{path}.tmp", path)
    have = {tuple(row[k] for k in KEY) for row in rows}
    ours = [(dataset_name(e, t, n), e, n, t) for e, n, t in itertools.product(args.envs, args.sizes, args.taus)]
    data = [(name, None, "", "") for name in args.datasets] or ours
    grid = itertools.product(args.seeds, data, args.methods)
    cells = [(m, name, s, args.flags if m != "BC" else "", *rest) for s, (name, *rest), m in grid]
    todo = [cell for cell in cells if (*cell[:2], str(cell[2]), cell[3]) not in have]
    with ThreadPoolExecutor(args.workers) as pool:
        bar = tqdm(total=len(cells), initial=len(cells) - len(todo), desc=path.stem, unit="run")
        for future in as_completed([pool.submit(run, *cell) for cell in todo]):
            row, metrics = future.result()
            log = [{k: row[k] for k in KEY} | {k: f"{float(m[k]):.5g}" for k in CURVES if k in m} for m in metrics]
            append(path.with_name(f"{path.stem}_curves.csv"), (*KEY, *CURVES), log)
            append(path, COLUMNS, [row])
            bar.update()
            bar.set_postfix_str(f"{row['method']} seed {row['seed']}: {row['normalized_return']}")
    bar.close()
