"""Updates per second of ersac_atari.py: seven algorithms at batch 32 and 256, and 100 heads against one.

    OMP_NUM_THREADS=1 python docs/benchmark/speed_atari.py

Every cell is the script itself, started as a user would on frames of noise, because speed does not depend on what is
learned: a short and a long run, the difference of their processor times. So neither the start nor other programs count.
"""

import csv
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import ale_py
import gymnasium as gym
import minari
import numpy as np
import tyro
from minari.data_collector import EpisodeBuffer
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
ALGOS = ("sac-n", "ersac-ch-n", "ersac-ell-n", "ersac-ell-epi-star", "cql", "iql", "brac-bcq")


@dataclass
class Args:
    rounds: int = 1
    """every cell is timed this often, in turn; medians count"""
    transitions: int = 3072
    """transitions by which the long run is longer: 96 updates of 32, or 12 of 256"""
    out: str = str(ROOT / "docs" / "benchmark" / "speed_atari.csv")
    """CSV with a row for every cell"""


def store_noise(folder):
    """A data set of noise with Pong's shapes, whose environment ends after five steps."""
    rng, os.environ["MINARI_DATASETS_PATH"], T = np.random.default_rng(0), folder, 300
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", repeat_action_probability=0.0, frameskip=4, max_episode_steps=5)
    episode = {"observations": rng.integers(256, size=(T + 1, 210, 160, 3), dtype=np.uint8)}
    episode |= {"actions": rng.integers(6, size=T), "rewards": rng.normal(size=T)}
    episode |= {"terminations": np.arange(T) == T - 1, "truncations": np.zeros(T, bool)}
    with warnings.catch_warnings(action="ignore"):
        minari.create_dataset_from_buffers("speed/noise-v0", [EpisodeBuffer(id=0, **episode)], env=env)


def processor_time(algo, batch, heads, updates):
    """Seconds that one run of the script takes, from start to end, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "ersac_atari.py"), "--dataset-id", "speed/noise-v0", "--no-cuda"]
        command += ["--output-dir", folder, "--algo", algo, "--batch-size", batch, "--num-critics", heads]
        command += ["--clone-updates", 0, "--critic-warmup", 0, "--total-updates", updates, "--eval-episodes", 1]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(list(map(str, command)), check=True, capture_output=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(algo, batch, heads, transitions):
    """Updates per second of processor time."""
    more = transitions // batch
    return more / (processor_time(algo, batch, heads, 4 + more) - processor_time(algo, batch, heads, 4))


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    cells = [(algo, batch, 100) for batch in (32, 256) for algo in ALGOS]
    cells += [(algo, 256, 1) for algo in ALGOS[:3]]
    speeds = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as folder:
        store_noise(folder)
        processor_time("iql", 4, 1, 1)  # decodes the frames
        for cell in tqdm(cells * args.rounds):
            speeds[cell].append(measure(*cell, args.transitions))
    with open(args.out + ".tmp", "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["algo", "batch_size", "heads", "updates_per_second"])
        for (algo, batch, heads), measured in speeds.items():
            heads = heads if algo in ALGOS[:3] else 1 if algo == "ersac-ell-epi-star" else 2
            writer.writerow([algo, batch, heads, round(float(np.median(measured)), 3)])
    os.replace(args.out + ".tmp", args.out)
