"""docs/figures/atari_pong.png from docs/benchmark/atari_pong_curves.csv: greedy return while learning.

python docs/benchmark/figures_atari.py
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

DOCS = Path(__file__).resolve().parents[1]


@dataclass
class Args:
    csvs: str = str(DOCS / "benchmark")
    """folder with the CSVs"""
    out: str = str(DOCS / "figures" / "atari_pong.png")
    """picture to write"""


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    with open(Path(args.csvs) / "atari_pong_curves.csv", newline="") as f:
        rows = [row for row in csv.DictReader(f) if int(row["seed"]) >= 100 and not row["lacking"]]
    with open(Path(args.csvs) / "atari_pong.csv", newline="") as f:
        scores = [row for row in csv.DictReader(f) if row["reference_return"] and not row["lacking"]]
    figure, axes = plt.subplots(figsize=(6, 3.4))
    for run in dict.fromkeys((row["algo"], row["seed"]) for row in rows):
        curve = [row for row in rows if (row["algo"], row["seed"]) == run]
        axes.plot(
            [int(r["update"]) for r in curve], [float(r["eval/return"]) for r in curve], "o-", label=" ".join(run)
        )
    low, high = float(scores[-1]["random_return"]), float(scores[-1]["reference_return"])
    for level, name in ((low, "random play"), (high, "recorded policy"), (low + 0.8 * (high - low), "80 % of the way")):
        axes.axhline(level, color="grey", linewidth=0.8, linestyle=":")
        axes.annotate(name, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7)
    axes.set(xlabel="updates after cloning", ylabel="return, two episodes", title="Pong, 60k recorded steps")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(args.out, dpi=120)
