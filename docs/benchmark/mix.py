"""Data of mixed quality, where cloning is weak: half the neutral policy's, half those of a policy stopped early.

    python docs/benchmark/mix.py --dataset-size 100000

makes ersac/lunarlander/tau50-early50-100k-v0. Both halves are made by gen_expectile_data.py, the second with a start of
60k steps instead of 400k; that policy is in docs/policies/early. The reference scores are those of all other data sets.
"""

import os
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import minari
import tyro
from minari.data_collector import EpisodeBuffer

ROOT = Path(__file__).resolve().parents[2]
EARLY = ("--start-steps", "60000", "--finish-steps", "4096", "--floor", "-10000")
EARLY += ("--policy-dir", str(ROOT / "docs" / "policies" / "early"))


@dataclass
class Args:
    dataset_size: int = 100_000
    """transitions; half of them from either policy"""


def episodes(folder, dataset_id, *flags):
    """Make one half in a Minari folder of its own and read it. Returns its episodes and metadata."""
    command = [sys.executable, str(ROOT / "gen_expectile_data.py"), "--env-id", "LunarLander-v3", *flags]
    command += ["--output-dir", folder]
    environment = os.environ | {"MINARI_DATASETS_PATH": folder, "OMP_NUM_THREADS": "1"}
    if subprocess.run(command, env=environment).returncode:
        sys.exit("gen_expectile_data.py could not make one half; the lines above say why.")
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = folder
    dataset = minari.load_dataset(dataset_id)
    read = list(dataset.iterate_episodes()), dataset.storage.metadata
    del os.environ["MINARI_DATASETS_PATH"]
    os.environ.update({"MINARI_DATASETS_PATH": before} if before else {})
    return read


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.dataset_size % 2000 or args.dataset_size <= 0:
        sys.exit(f"--dataset-size {args.dataset_size}: it must be a multiple of 2000.")
    half, name = args.dataset_size // 2, f"ersac/lunarlander/tau50-early50-{args.dataset_size // 1000}k-v0"
    if name in minari.list_local_datasets():
        sys.exit(f"{name} exists and is left alone.")
    both = []
    for flags in ((), EARLY):
        with tempfile.TemporaryDirectory() as folder:
            source = f"ersac/lunarlander/tau50-{half // 1000}k-v0"
            found, metadata = episodes(folder, source, "--dataset-size", str(half), *flags)
            both.append((found, metadata))
    buffers = [
        EpisodeBuffer(i, None, None, e.observations, e.actions, e.rewards, e.terminations, e.truncations)
        for i, e in enumerate(both[0][0] + both[1][0])
    ]
    scores = {key: both[0][1][key] for key in ("ref_min_score", "ref_max_score", "num_episodes_average_score")}
    with warnings.catch_warnings(action="ignore"):
        env = gym.make("LunarLander-v3")
        minari.create_dataset_from_buffers(name, buffers, env=env, algorithm_name="neutral and early policy", **scores)
    means = [sum(e.rewards.sum() for e in found) / len(found) for found, _ in both]
    print(f"{name}: mean returns of the halves {means[0]:.1f} and {means[1]:.1f}")
