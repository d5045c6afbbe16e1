"""Run folders of ersac_atari.py, finished or stopped, to two CSVs: a row per run, and the learning curves.

    python docs/benchmark/collect_atari.py --runs runs --out docs/benchmark/atari_pong.csv

The curves go to the same name with _curves before .csv. The column flags holds arguments that are not the defaults.
"""

import csv
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import ersac_atari  # noqa: E402

OWN = {"exp_name", "seed", "output_dir", "env_id", "dataset_id", "algo", "resume", "cache_dir", "track"}
RESULTS = ("updates_per_second", "eval_episodes", "eval_return_mean", "eval_return_std", "eval_distinct_returns")
RESULTS += ("random_return", "reference_return", "normalized_return", "policy_entropy")


@dataclass
class Args:
    runs: str = "runs"
    """folder with run folders"""
    out: str = str(ROOT / "docs" / "benchmark" / "atari_pong.csv")
    """CSV with a row per run"""


def write(path, rows):
    with open(f"{path}.tmp", "w", newline="") as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    os.replace(f"{path}.tmp", path)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    table, curves, usual = [], [], asdict(ersac_atari.Args())
    for folder in sorted(Path(args.runs).glob("*__*"), key=lambda path: path.name.split("__")[-1]):
        given = json.loads((folder / "args.json").read_text())
        if given.get("dataset_id") is None or "algo" not in given or not (folder / "metrics.csv").exists():
            continue  # another script's, a download's, or stopped before its first evaluation
        with open(folder / "metrics.csv", newline="") as f:
            rows = list(csv.DictReader(f))
        own = {k: v for k, v in given.items() if k in usual and k not in OWN and v != usual[k]}
        run = {"algo": given["algo"], "dataset_id": given["dataset_id"], "seed": given["seed"]}
        run["flags"] = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in sorted(own.items()))
        run["lacking"] = " ".join(k.replace("_", "-") for k in usual if k not in given)  # a run of an older script
        done = (folder / "result.json").exists()
        result = json.loads((folder / "result.json").read_text()) if done else {}
        best = max(float(row["eval/return"]) for row in rows)
        state = {
            "finished": done,
            "updates": rows[-1]["update"],
            "first_return": rows[0]["eval/return"],
            "best_return": best,
        }
        table.append(run | state | {k: result.get(k, "") for k in RESULTS})
        for row in rows:
            curves.append(run | {k: row.get(k, "") for k in ("update", "eval/return", "charts/policy_entropy")})
            curves[-1] |= {k: row.get(k, "") for k in ("charts/q_data_actions", "charts/q_gap", "charts/agreement")}
    if not table:
        sys.exit(f"--runs {args.runs}: no run of ersac_atari.py with a --dataset-id is there.")
    write(args.out, table)
    write(args.out.removesuffix(".csv") + "_curves.csv", curves)
