"""Runs of a grid, several processes at a time, resumable: a finished run is a row of a CSV.

    python docs/benchmark/sweep.py --datasets ersac/lunarlander/tau{50,90}-{1k,10k}-s{seed}-v0 --methods SAC-N BC
    python docs/benchmark/sweep.py --study paper --envs RiverSwim

Data sets x methods x seeds, or a study of the tables. {seed} in an id stands for the seed: seed s learns from data set
s, so that differences are paired. Missing data of gen_expectile_data.py are made first; environment, size and shares
are read from their ids. A row is written at once and skipped the next time; what the run logged goes to a second CSV,
whose name ends in _curves. A run that fails is reported, and the others go on.
"""

import csv
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import gymnasium as gym
import tyro
from minari.storage import get_dataset_path
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "benchmark")]
from calibration import rates, table_cells  # noqa: E402

# every flag of a method is spelled out, so that a row means the same when a default changes
NET = "--hidden-dim 128 --gamma 0.99 --eval-interval 1000 --eval-episodes 100"
N = f"ersac_ensemble.py {NET} --num-critics 10 --batch-size 128 --alpha 0.003"
PAPER_N = f"{N} --targets shared --prior-scale 0 --input-scale 1 --polyak 0.02"
PAPER_N += " --q-lr 5e-4 --policy-lr 5e-4 --total-updates 20000"
OWN_N = f"{N} --targets own --prior-scale 10 --input-scale 3 --polyak 0.05"
OWN_N += " --q-lr 1e-3 --policy-lr 1e-3 --total-updates 10000"
EPI = f"ersac_epinet.py {NET} --index-dim 16 --batch-size 256 --polyak 0.05 --alpha 0.003"
EPI += " --q-lr 5e-4 --policy-lr 5e-4 --upsilon 0.9"
PAPER_EPI = f"{EPI} --targets shared --head-input features --prior-scale 0.3 --noise-scale 0.01"
PAPER_EPI += " --total-updates 20000"
OWN_EPI = f"{EPI} --targets own --head-input obs --prior-scale 3 --noise-scale 0.1"
OWN_EPI += " --total-updates 10000"
SAMPLED = "--method ell-epi --num-index-samples 30 --uncertainty-set"
CLOSED = "--method ell-epi-star --uncertainty-set"
CLONE = "docs/benchmark/clone.py --total-updates 8000 --batch-size 256 --lr 1e-3 --hidden-dim 128"
D3 = "docs/benchmark/d3.py --total-updates 10000 --batch-size 256 --hidden-dim 128"
PIXELS = "ersac_atari.py --clone-updates 4000 --critic-warmup 1000 --total-updates 6000 --n-step 10"
PIXELS += " --bc-coef 0.3 --batch-size 32 --hidden-dim 512 --gamma 0.99 --q-lr 3e-4 --policy-lr 3e-4"
PIXELS += " --polyak 0.01 --alpha 0.0003 --prior-scale 0.03 --eval-episodes 20 --eval-epsilon 0.01"
PIXELS += " --eval-interval 1000 --method"
PIXEL_CLONE = "docs/benchmark/clone.py --total-updates 8000 --batch-size 32 --lr 3e-4"
PIXEL_CLONE += " --hidden-dim 512 --eval-episodes 20 --eval-epsilon 0.01"
METHODS = {
    "SAC-N": f"{PAPER_N} --uncertainty-set box",
    "CH-N": f"{PAPER_N} --uncertainty-set hull",
    "Ell-N": f"{PAPER_N} --uncertainty-set ellipsoid --upsilon 1.0",
    "Ell_0.9-N": f"{PAPER_N} --uncertainty-set ellipsoid --upsilon 0.9",
    "EDAC": f"{PAPER_N} --uncertainty-set box --edac-eta 1.0",
    "Box-N-own": f"{OWN_N} --uncertainty-set box",
    "CH-N-own": f"{OWN_N} --uncertainty-set hull",
    "Ell_0.9-N-own": f"{OWN_N} --uncertainty-set ellipsoid --upsilon 0.9",
    "Ell-Epi": f"{PAPER_EPI} --lambda-sigma 1e-3 {SAMPLED} ellipsoid",
    "CH-Epi": f"{PAPER_EPI} --lambda-sigma 1e-3 {SAMPLED} hull",
    "Box-Epi": f"{PAPER_EPI} --lambda-sigma 1e-3 {SAMPLED} box",
    "Ell-Epi-own": f"{OWN_EPI} {SAMPLED} ellipsoid",
    "CH-Epi-own": f"{OWN_EPI} {SAMPLED} hull",
    "Box-Epi-own": f"{OWN_EPI} {SAMPLED} box",
    "Ell-Epi*": f"{PAPER_EPI} {CLOSED} ellipsoid",
    "Ell-Epi*-own": f"{OWN_EPI} {CLOSED} ellipsoid",
    "Box-Epi*": f"{PAPER_EPI} {CLOSED} box",
    "Box-Epi*-own": f"{OWN_EPI} {CLOSED} box",
    "BC": CLONE,
    "BC-top": f"{CLONE} --top 0.5",
    "BC-top10": f"{CLONE} --top 0.1",
    "BC-sampled": f"{CLONE} --sample-actions",
    "BC-weighted": f"{CLONE} --return-temperature 0.5",
    "CQL-untuned": f"{D3} --algo cql --alpha 1.0 --target-interval 1000 --polyak 1.0 --lr 3e-4",
    "CQL": f"{D3} --algo cql --alpha 0.1 --target-interval 1 --polyak 0.02 --lr 3e-4",
    "BCQ": f"{D3} --algo bcq --threshold 0.3 --target-interval 1 --polyak 0.02 --lr 3e-4",
    "DDQN": f"{D3} --algo ddqn --target-interval 1 --polyak 0.02 --lr 3e-4",
    "SAC-N-pixels": f"{PIXELS} sac-n --num-critics 100",
    "Ell-N-pixels": f"{PIXELS} ell-n --num-critics 100 --upsilon 1.0",
    "Ell_0.9-N-pixels": f"{PIXELS} ell-n --num-critics 100 --upsilon 0.9",
    "Ell-Epi*-pixels": f"{PIXELS} ell-epi-star --upsilon 0.9 --index-dim 16 --noise-scale 0.001",
    "CQL-pixels": f"{PIXELS} cql",
    "IQL-pixels": f"{PIXELS} iql",
    "BRAC-BCQ-pixels": f"{PIXELS} brac-bcq",
    "BC-pixels": PIXEL_CLONE,
    "BC-sampled-pixels": f"{PIXEL_CLONE} --sample-actions",
    "BC-top10-pixels": f"{PIXEL_CLONE} --top 0.1",
}
# what names a run, by the kind of the CSV, and all columns
KEYS = {
    "networks": ("method", "dataset_id", "seed", "flags"),
    "tables": ("study", "arguments", "seed"),
    "calibration": ("dataset_size", "expectile_tau", "targets", "seed"),
}
COLUMNS = {
    "networks": """
        method dataset_id seed flags env_id dataset_size expectile_tau early_fraction switch_prob
        normalized_return best_return eval_return_mean eval_return_std random_return
        reference_return policy_entropy training_entropy q_star_minus_return std_data_actions
        std_other_actions updates updates_per_second seconds commit arguments eval_returns""".split(),
    "tables": """
        study arguments seed method env_id dataset_size expectile_tau uncertainty_set upsilon
        bootstrap reset_prob total_updates normalized_return normalized_return_state1
        behaviour_normalized_return support_optimum lower_bound_rate coverage_rate policy_entropy
        eval_return_mean updates_per_second commit""".split(),
    "calibration": """
        dataset_size expectile_tau targets upsilon seed coverage_rate lower_bound_rate
        coverage_rate_seen lower_bound_rate_seen share_seen commit""".split(),
}
CURVES = [*KEYS["networks"], "update", "eval/return", "charts/policy_entropy", "charts/q_minus_return"]
CURVES += ["charts/q_star_minus_return", "charts/q_gap", "charts/std_data_actions", "charts/std_other_actions"]
STUDIES = Literal["paper", "no-bootstrap", "upsilon", "critics", "targets", "calibration", "tuning", "fixed-policy"]


@dataclass
class Args:
    datasets: list[str] = field(default_factory=lambda: ["ersac/lunarlander/tau50-100k-s{seed}-v0"])
    """Minari data sets; {seed} stands for the seed"""
    methods: list[str] = field(default_factory=lambda: ["Ell-Epi*-own", "Ell_0.9-N-own", "BC"])
    """methods, by the names of METHODS"""
    flags: str = ""
    """further arguments of all runs, as --flags="--alpha 0.1"; part of a row's name"""
    study: STUDIES | None = None
    """tables instead of networks; table_cells in calibration.py says what each study is for"""
    envs: list[str] = field(default_factory=lambda: ["MachineReplacement", "RiverSwim"])
    """tables: the environments, if not all of the study"""
    sizes: list[int] = field(default_factory=lambda: [10, 100, 1000])
    """tables: transitions per state, if not all of the study"""
    seeds: list[int] = field(default_factory=list)
    """by default 100 to 104, in tables 100 to 109; 0 to 9 are for tuning"""
    track: bool = False
    """also log the runs to Weights & Biases"""
    workers: int = 2
    """processes at a time, one thread each"""
    out: str | None = None
    """CSV to append to; by default networks, pixels, tables or calibration.csv in docs/benchmark"""


def described(dataset_id):
    """What the id of a data set of gen_expectile_data.py tells, as its flags; others tell nothing."""
    pattern = r"ersac/([\w-]+)/tau(\w+?)(?:-early(\w+))?(?:-switch(\w+))?(?:-eps(\w+))?-(\d+)(k?)"
    found = re.fullmatch(pattern + r"(?:-s(\d+))?-v0", dataset_id)
    if not found:
        return {}
    env, *shares, size, thousand, draw = found.groups()
    envs = {name.lower(): name for name in gym.registry}
    envs |= {"lunarlander": "LunarLander-v3", "cartpole": "CartPole-v1"}
    flags = {"env_id": envs.get(env, env)}
    for name, share in zip(("expectile_tau", "early_fraction", "switch_prob", "epsilon"), shares):
        if share or name != "epsilon":
            flags[name] = float((share or "0").replace("p", ".")) / 100  # 12p5: 0.125
    flags["dataset_size"] = int(size) * (1000 if thousand else 1)
    flags["dataset_seed"] = int(draw or 1)
    return flags


def network_cells(args):
    """(key, command) of every run, seed by seed: a sweep that is stopped has whole seeds."""
    cells = []
    for seed, name, method in itertools.product(args.seeds, args.datasets, args.methods):
        dataset_id = name.replace("{seed}", str(seed))
        command = [*METHODS[method].split(), "--dataset-id", dataset_id, "--seed", str(seed)]
        cells.append(((method, dataset_id, str(seed), args.flags), command + shlex.split(args.flags)))
    return cells


def study_cells(args):
    """The same for the tables."""
    cells = []
    for seed, cell in itertools.product(args.seeds, table_cells(args.study)):
        if cell.get("env_id", "RiverSwim") not in args.envs or cell["dataset_size"] not in args.sizes:
            continue
        words = []
        for name, value in cell.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
        key = (args.study, " ".join(words), str(seed))
        command = ["ersac_tabular.py", "--targets", "shared", *words, "--eval-interval", "1000"]
        if args.study == "fixed-policy":
            key = (*map(str, cell.values()), str(seed))
            command = ["docs/benchmark/calibration.py", *words]
        cells.append((key, [*command, "--seed", str(seed)]))
    return cells


def run(kind, key, command, commit):
    """One run: its rows of the CSV and those of its curves."""
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, str(ROOT / command[0]), *command[1:], "--output-dir", folder]
        # freed memory is kept: asking the system for it again is a third of an update on samples
        keep = {"MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_MMAP_THRESHOLD_": "2000000000"}
        env = os.environ | {"OMP_NUM_THREADS": "1"} | keep
        done = subprocess.run(words, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        (path,) = Path(folder).glob("*/result.json")
        result = json.loads(path.read_text())
        arguments = json.loads((path.parent / "args.json").read_text())
        metrics = []
        if (path.parent / "metrics.csv").exists():
            metrics = list(csv.DictReader(open(path.parent / "metrics.csv")))
        if kind == "tables":
            result |= rates(arguments, path.parent / "checkpoint.pt")
    named = dict(zip(KEYS[kind], key)) | {"commit": commit, "seconds": time.time() - started}
    if kind == "calibration":
        return [row | named for row in result["rows"]], []
    if kind == "tables":
        return [arguments | result | named], []
    row = result | described(named["dataset_id"]) | named
    row["env_id"] = result["env_id"]
    row["arguments"] = json.dumps({k: v for k, v in arguments.items() if k not in ("output_dir", "resume")})
    row["eval_returns"] = " ".join(f"{x:.1f}" for x in result["eval_returns"])
    if metrics:
        row["best_return"] = max(float(m["eval/return"]) for m in metrics)
        row["training_entropy"] = sum(float(m["charts/policy_entropy"]) for m in metrics) / len(metrics)
        for name in ("q_star_minus_return", "std_data_actions", "std_other_actions"):
            row[name] = float(metrics[-1].get(f"charts/{name}", "nan"))
    curves = [{k: f"{float(v):.5g}" for k, v in m.items() if k in CURVES} | named for m in metrics]
    return [row], curves


def append(path, columns, rows):
    """Add rows, below a header if the file is new, in one write: another sweep may add to it too."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    if not path.exists():
        writer.writeheader()
    for row in rows:
        writer.writerow({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()})
    with open(path, "a", newline="") as f:
        f.write(text.getvalue())


def finished(path, kind):
    """Keys of the runs that are in the CSV. A line that a kill has cut in half is dropped."""
    if not path.exists():
        return set()
    text = path.read_text()
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.with_suffix(".tmp").write_text(text)
        os.replace(path.with_suffix(".tmp"), path)
    rows = csv.DictReader(text.splitlines())
    if list(rows.fieldnames) != COLUMNS[kind]:
        sys.exit(f"{path} has other columns than this sweep writes; choose another --out.")
    return {tuple(row[name] for name in KEYS[kind]) for row in rows}


def make_data(dataset_id):
    """Run gen_expectile_data.py if the data set is one of its own and is not on this machine."""
    flags = described(dataset_id)
    if flags and not get_dataset_path(dataset_id).exists():
        print(f"making {dataset_id}", flush=True)
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        if subprocess.run([sys.executable, str(ROOT / "gen_expectile_data.py"), *words]).returncode:
            sys.exit(f"{dataset_id} could not be made; the lines above say why.")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    unknown = set(args.methods) - set(METHODS)
    if unknown:
        sys.exit(f"--methods {' '.join(sorted(unknown))}: choose from {', '.join(METHODS)}.")
    if not args.seeds:
        args.seeds = list(range(100, 110 if args.study else 105))
    cells = study_cells(args) if args.study else network_cells(args)
    if not cells:
        sys.exit("--study has no such cell; choose other --envs or --sizes.")
    kind = {None: "networks", "fixed-policy": "calibration"}.get(args.study, "tables")
    images = kind == "networks" and all(method.endswith("-pixels") for method in args.methods)
    path = Path(args.out or ROOT / "docs" / "benchmark" / f"{'pixels' if images else kind}.csv")
    have = finished(path, kind)
    todo = [cell for cell in cells if cell[0] not in have]
    print(f"{len(cells) - len(todo)} of {len(cells)} runs are in {path} already", flush=True)
    if kind == "networks":
        for dataset_id in dict.fromkeys(key[1] for key, _ in todo):
            make_data(dataset_id)
    words = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    failed = 0
    bar = tqdm(total=len(cells), initial=len(cells) - len(todo), desc=path.stem, unit="run")
    with ThreadPoolExecutor(args.workers) as pool:
        track = ["--track"] if args.track else []
        for future in as_completed([pool.submit(run, kind, key, words + track, commit) for key, words in todo]):
            try:
                rows, curves = future.result()
            except Exception as error:
                failed += 1
                tqdm.write(str(error), file=sys.stderr)
                continue
            if curves:
                append(path.with_name(f"{path.stem}_curves.csv"), CURVES, curves)
            append(path, COLUMNS[kind], rows)
            bar.update()
            bar.set_postfix_str(f"{rows[0].get('method', '')} {rows[0].get('normalized_return', '')}")
    bar.close()
    if failed:
        sys.exit(f"{failed} runs failed; the same command tries them again.")
