"""A grid of runs, data sets x methods x seeds, several processes at a time, resumable.

    python docs/benchmark/sweep.py --sizes 10000 --methods "Ell-Epi*-own" SAC-N BC --seeds 100 101 102

Seed s learns from data set s, whatever the method, so that differences are paired and intervals contain the data;
--one-dataset gives all seeds the same one. A finished run is one row of the CSV, written at once and skipped the next
time; what it logged on the way goes to a second CSV, whose name ends in _curves. A run that fails is reported, the
others go on, and the sweep exits with 1. --flags="--autotune" passes further arguments to the training scripts (to the
baselines only --track); they are part of a row's name. --datasets takes Minari ids in place of environments, sizes and
taus; {seed} in an id stands for the seed.
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

# every flag of a method is spelled out, so that a row means the same when a default changes
PAPER_N = "ersac_ensemble.py --targets shared --prior-scale 0 --input-scale 1 --polyak 0.02"
PAPER_N += " --q-lr 5e-4 --policy-lr 5e-4 --total-updates 20000"
OWN_N = "ersac_ensemble.py --targets own --prior-scale 10 --input-scale 3 --polyak 0.05"
OWN_N += " --q-lr 1e-3 --policy-lr 1e-3 --total-updates 10000"
PAPER_EPI = "ersac_epinet.py --targets shared --head-input features --prior-scale 0.3 --noise-scale 0.01"
PAPER_EPI += " --q-lr 5e-4 --policy-lr 5e-4 --total-updates 20000"
OWN_EPI = "ersac_epinet.py --targets own --head-input obs --input-scale 3 --prior-scale 3 --noise-scale 0.1"
OWN_EPI += " --q-lr 5e-4 --policy-lr 5e-4 --total-updates 10000"
PIXELS = "ersac_atari.py --clone-updates 4000 --critic-warmup 1000 --total-updates 6000 --n-step 10 --bc-coef 0.3"
PIXELS += " --eval-episodes 20 --eval-epsilon 0.01 --eval-interval 1000"
METHODS = {
    "SAC-N": f"{PAPER_N} --uncertainty-set box",
    "CH-N": f"{PAPER_N} --uncertainty-set hull",
    "Ell-N": f"{PAPER_N} --uncertainty-set ellipsoid --upsilon 1.0",
    "Ell_0.9-N": f"{PAPER_N} --uncertainty-set ellipsoid --upsilon 0.9",
    "EDAC": f"{PAPER_N} --uncertainty-set box --edac-eta 1.0",
    "Box-N-own": f"{OWN_N} --uncertainty-set box",
    "CH-N-own": f"{OWN_N} --uncertainty-set hull",
    "Ell_0.9-N-own": f"{OWN_N} --uncertainty-set ellipsoid --upsilon 0.9",
    "Ell-Epi": f"{PAPER_EPI} --method ell-epi --uncertainty-set ellipsoid --upsilon 0.9",
    "Ell-Epi*": f"{PAPER_EPI} --method ell-epi-star --uncertainty-set ellipsoid --upsilon 0.9",
    "Ell-Epi-own": f"{OWN_EPI} --method ell-epi --uncertainty-set ellipsoid --upsilon 0.9",
    "Ell-Epi*-own": f"{OWN_EPI} --method ell-epi-star --uncertainty-set ellipsoid --upsilon 0.9",
    "Box-Epi*-own": f"{OWN_EPI} --method ell-epi-star --uncertainty-set box --upsilon 0.9",
    "BC": "docs/benchmark/clone.py",
    "BC-top": "docs/benchmark/clone.py --top 0.5",
    "BC-top10": "docs/benchmark/clone.py --top 0.1",
    "BC-sampled": "docs/benchmark/clone.py --sample-actions",
    "CQL": "docs/benchmark/cql.py",
    "SAC-N-pixels": f"{PIXELS} --algo sac-n",
    "Ell-Epi*-pixels": f"{PIXELS} --algo ersac-ell-epi-star --upsilon 0.9",
    "IQL-pixels": f"{PIXELS} --algo iql",
    "CQL-pixels": f"{PIXELS} --algo cql",
    "BC-pixels": "docs/benchmark/clone.py --batch-size 32 --lr 3e-4 --eval-episodes 20 --eval-epsilon 0.01",
}
BASELINES = ("BC", "BC-top", "BC-top10", "BC-sampled", "CQL", "BC-pixels")
KEY = ("method", "dataset_id", "seed", "flags")  # what names a run
COLUMNS = (
    *KEY,
    "env_id",
    "dataset_size",
    "expectile_tau",
    "early_fraction",
    "normalized_return",
    "best_return",
    "eval_return_mean",
    "eval_return_std",
    "random_return",
    "reference_return",
    "policy_entropy",
    "training_entropy",
    "q_star_minus_return",
    "std_data_actions",
    "std_other_actions",
    "updates",
    "updates_per_second",
    "seconds",
    "commit",
    "arguments",
    "eval_returns",
)
CURVES = (
    "update",
    "eval/return",
    "charts/policy_entropy",
    "charts/q_minus_return",
    "charts/q_star_minus_return",
    "charts/q_gap",
    "charts/std_data_actions",
    "charts/std_other_actions",
)


@dataclass
class Args:
    envs: list[str] = field(default_factory=lambda: ["LunarLander-v3"])
    """environments"""
    sizes: list[int] = field(default_factory=lambda: [100_000])
    """transitions in the data set"""
    taus: list[float] = field(default_factory=lambda: [0.5])
    """risk levels of the behaviour policy"""
    early_fraction: float = 0.0
    """share of the data from a policy stopped early in its training"""
    datasets: list[str] = field(default_factory=list)
    """Minari data sets, instead of environments, sizes and taus"""
    methods: list[str] = field(default_factory=lambda: ["Ell-Epi*-own", "Ell_0.9-N-own", "BC"])
    """methods, by the names of METHODS"""
    seeds: list[int] = field(default_factory=lambda: [100, 101, 102, 103, 104])
    """seeds; 0 to 9 are for tuning, results are reported on 100 and up"""
    one_dataset: bool = False
    """all seeds learn from the same data set, that of --dataset-seed 1"""
    flags: str = ""
    """further arguments for the training scripts, as --flags="--hidden-dim 64" (with the equals sign)"""
    workers: int = 2
    """processes at a time, one thread each"""
    out: str = str(ROOT / "docs" / "benchmark" / "grid.csv")
    """CSV to append to"""


@dataclass
class Cell:
    """One run of the grid."""

    method: str
    dataset_id: str
    seed: int
    flags: str
    data: dict  # the arguments that name the data set

    def key(self):
        return (self.method, self.dataset_id, str(self.seed), self.flags)


def grid(args):
    """All cells, seed by seed: a sweep that is stopped has whole seeds."""
    cells = []
    for seed in args.seeds:
        sets = [{"dataset_id": name.replace("{seed}", str(seed))} for name in args.datasets]
        if not sets:
            for env_id, size, tau in itertools.product(args.envs, args.sizes, args.taus):
                ours = {"env_id": env_id, "expectile_tau": tau, "dataset_size": size}
                ours["early_fraction"] = args.early_fraction
                ours["dataset_seed"] = 1 if args.one_dataset else seed
                sets.append(ours)
        for data, method in itertools.product(sets, args.methods):
            dataset_id = data.get("dataset_id") or dataset_name(**data)
            flags = args.flags
            if method in BASELINES:  # they know --track, and none of the others
                flags = "--track" if "--track" in flags.split() else ""
            cells.append(Cell(method, dataset_id, seed, flags, data))
    return cells


def run(cell, commit):
    """One run: its row of the CSV and what it logged."""
    script, *words = METHODS[cell.method].split()
    words += ["--seed", str(cell.seed)]
    for name, value in cell.data.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    words += shlex.split(cell.flags)
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / script), *words, "--output-dir", folder]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{script} {' '.join(words)} failed: {done.stderr.strip()[-500:]}")
        (path,) = Path(folder).glob("*/result.json")
        result = json.loads(path.read_text())
        arguments = json.loads((path.parent / "args.json").read_text())
        metrics = []
        if (path.parent / "metrics.csv").exists():
            metrics = list(csv.DictReader((path.parent / "metrics.csv").read_text().splitlines()))
    for name in ("output_dir", "resume"):
        arguments.pop(name, None)
    row = {name: result.get(name) for name in COLUMNS}
    row["method"] = cell.method
    row["dataset_id"] = cell.dataset_id
    row["seed"] = cell.seed
    row["flags"] = cell.flags
    for name in ("dataset_size", "expectile_tau", "early_fraction"):
        row[name] = cell.data.get(name)
    row["seconds"] = time.time() - started
    row["commit"] = commit
    row["arguments"] = json.dumps(arguments)
    row["eval_returns"] = " ".join(f"{x:.1f}" for x in result["eval_returns"])
    if metrics:
        row["best_return"] = max(float(m["eval/return"]) for m in metrics)
        row["training_entropy"] = sum(float(m["charts/policy_entropy"]) for m in metrics) / len(metrics)
        for name in ("q_star_minus_return", "std_data_actions", "std_other_actions"):
            row[name] = float(metrics[-1].get(f"charts/{name}", "nan"))
    for name, value in row.items():
        if isinstance(value, float):
            row[name] = round(value, 4)
    return row, metrics


def append(path, columns, rows):
    """Add rows, below a header if the file is new, in one write: another sweep may add to it too."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    if not path.exists():
        writer.writeheader()
    writer.writerows(rows)
    with open(path, "a", newline="") as f:
        f.write(text.getvalue())


def finished(path):
    """Keys of the runs that are in the CSV. A line that a kill has cut in half is dropped."""
    if not path.exists():
        return set()
    text = path.read_text()
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.with_suffix(".tmp").write_text(text)
        os.replace(path.with_suffix(".tmp"), path)
    rows = csv.DictReader(text.splitlines())
    if tuple(rows.fieldnames) != COLUMNS:
        sys.exit(f"{path} has other columns than this sweep writes; choose another --out.")
    return {tuple(row[name] for name in KEY) for row in rows}


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    unknown = set(args.methods) - set(METHODS)
    if unknown:
        sys.exit(f"--methods {' '.join(sorted(unknown))}: choose from {', '.join(METHODS)}.")
    path = Path(args.out)
    have = finished(path)
    cells = grid(args)
    todo = [cell for cell in cells if cell.key() not in have]
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    commit = described.stdout.strip()
    failed = 0
    bar = tqdm(total=len(cells), initial=len(cells) - len(todo), desc=path.stem, unit="run")
    with ThreadPoolExecutor(args.workers) as pool:
        for future in as_completed([pool.submit(run, cell, commit) for cell in todo]):
            try:
                row, metrics = future.result()
            except Exception as error:
                failed += 1
                tqdm.write(str(error), file=sys.stderr)
                continue
            curves = []
            for logged in metrics:
                values = {name: f"{float(logged[name]):.5g}" for name in CURVES if name in logged}
                curves.append({name: row[name] for name in KEY} | values)
            append(path.with_name(f"{path.stem}_curves.csv"), (*KEY, *CURVES), curves)
            append(path, COLUMNS, [row])
            bar.update()
            bar.set_postfix_str(f"{row['method']} seed {row['seed']}: {row['normalized_return']}")
    bar.close()
    if failed:
        sys.exit(f"{failed} runs failed; the same command tries them again.")
