"""LunarLander data in which most episodes hover until the time limit: a policy stopped in the middle of its training.

    python docs/benchmark/hover.py --seeds 0 1

Stores ersac/lunarlander/hovering-10k-sSEED-v0, one draw per seed, for sweep.py --datasets. Such data are unlike those
of gen_expectile_data.py: few terminations, no landing to copy. 0 and 100 are the returns of our other data sets.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import minari
import numpy as np
import torch
import tyro
from minari.storage import get_dataset_path

ROOT = Path(__file__).resolve().parents[2]
UNFINISHED = "--finish-steps 4096 --floor -10000 --dataset-size 10000"


@dataclass
class Args:
    seeds: list[int] = field(default_factory=lambda: [1])
    """--dataset-seed of each draw"""
    start_steps: int = 120_000
    """steps of training after which the policy is stopped"""


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    expert = torch.load(ROOT / "docs/policies/lunarlander-tau50/policy.pt", weights_only=True)
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            dataset_id = f"ersac/lunarlander/hovering-10k-s{seed}-v0"
            if get_dataset_path(dataset_id).exists():
                print(f"{dataset_id} exists and is left alone.")
                continue
            command = [sys.executable, str(ROOT / "gen_expectile_data.py"), *UNFINISHED.split()]
            command += ["--start-steps", str(args.start_steps)]
            command += ["--dataset-seed", str(seed), "--policy-dir", f"{folder}/policies", "--output-dir", folder]
            subprocess.run(command, env=os.environ | {"MINARI_DATASETS_PATH": folder}, check=True)
            (made,) = [path for path in Path(folder).glob("ersac/lunarlander/*") if path.is_dir()]
            episodes = minari.MinariDataset(made / "data")
            get_dataset_path(dataset_id).parent.mkdir(parents=True, exist_ok=True)
            dataset = minari.combine_datasets([episodes], dataset_id)
            scores = {"ref_min_score": expert["random_return"], "ref_max_score": expert["greedy_return"]}
            dataset.storage.update_metadata(scores)
            made.rename(Path(folder) / f"done-{seed}")
            returns = [episode.rewards.sum() for episode in dataset.iterate_episodes()]
            cut = sum(bool(episode.truncations[-1]) for episode in dataset.iterate_episodes())
            print(f"{dataset_id}: {len(returns)} episodes, {cut} truncated, mean return {np.mean(returns):.1f}")
