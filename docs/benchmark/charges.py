"""What each set charges, <pi, mu - q*> in standard deviations of <pi, q>, for critics drawn from a Gaussian.

    python docs/benchmark/charges.py

Answers which set is the most pessimistic: it depends on the policy, on the number of actions and of critics, and on how
much the critics' errors at two actions go together (their correlation). Writes charges.csv in seconds.
"""

import csv
import itertools
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from ersac_ensemble import worst_case_box, worst_case_ellipsoid, worst_case_hull  # noqa: E402


@dataclass
class Args:
    states: int = 4000
    """independent draws of N critics, over which the charge is averaged"""
    out: str = str(ROOT / "docs" / "benchmark" / "charges.csv")
    """CSV with a row for each case"""


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    sets = {"box": worst_case_box, "hull": worst_case_hull}
    sets |= {f"ellipsoid, υ = {u}": partial(worst_case_ellipsoid, upsilon=u) for u in (1, 0.9, 0.5)}
    torch.manual_seed(0)
    rows = [["actions", "policy", "ρ", "N", *sets]]
    for A, rho, policy, N in itertools.product((2, 4, 18), (0.0, 0.9), ("deterministic", "uniform"), (10, 100)):
        shared, own = torch.randn(N, args.states, 1).double(), torch.randn(N, args.states, A).double()
        q = rho**0.5 * shared + (1 - rho) ** 0.5 * own  # [N, B, A], correlation rho between actions
        pi = torch.eye(A).double()[0] if policy == "deterministic" else torch.full((A,), 1 / A).double()
        pi = pi.expand(args.states, A)
        std = (rho + (1 - rho) * (pi[0] ** 2).sum()).sqrt()  # of <pi, q>
        charges = [(pi * (q.mean(0) - worst_case(q, pi))).sum(-1).mean() / std for worst_case in sets.values()]
        rows.append([A, policy, rho, N, *(f"{charge:.1f}" for charge in charges)])
    with open(args.out, "w", newline="") as f:
        csv.writer(f, lineterminator="\n").writerows(rows)
