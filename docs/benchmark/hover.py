"""LunarLander data in which most episodes hover until the time limit: a policy stopped in the middle of its training.

    python docs/benchmark/hover.py --seeds 0 1

Stores ersac/lunarlander/hovering-10k-sSEED-v0, one draw per seed, for sweep.py --datasets. Such data are unlike those
of gen_expectile_data.py: few terminations, no landing to copy. 0 and 100 are the returns of our other data sets.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import minari
import torch
import tyro
from minari.storage import get_dataset_path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Args:
    seeds: list[int] = field(default_factory=lambda: [1])
    """--dataset-seed of each draw"""
    start_steps: int = 120_000
    """steps of training after which the policy is stopped"""


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    expert = torch.load(ROOT / "docs/policies/lunarlander-tau50/policy.pt", weights_only=True)
    scores = {"ref_min_score": expert["random_return"], "ref_max_score": expert["greedy_return"]}
    flags = f"--start-steps {args.start_steps} --finish-steps 4096 --floor -10000 --dataset-size 10000"
    with tempfile.TemporaryDirectory() as policies:  # trained once for all seeds
        for seed in args.seeds:
            name = f"ersac/lunarlander/hovering-10k-s{seed}-v0"
            if get_dataset_path(name).exists():
                print(f"{name} exists and is left alone.")
                continue
            command = [sys.executable, str(ROOT / "gen_expectile_data.py"), *flags.split(), "--policy-dir", policies]
            subprocess.run([*command, "--dataset-id", name, "--dataset-seed", str(seed)], check=True)
            minari.load_dataset(name).storage.update_metadata(scores)
