"""Speed of the training scripts, ours and others', in turn in one run, on one thread: makes speed.csv.

    python docs/benchmark/speed.py

Milliseconds of processor time per update at batch 256, 128x128, 8 inputs, 4 actions; medians over rounds. The plain
baseline is what one writes first: a Python loop over nn.Module critics with an optimiser each. d3rlpy needs
requirements-speed.txt. Ours is the script itself on noise, because speed does not depend on what is learned.
"""

import copy
import csv
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import minari
import numpy as np
import torch
import torch.nn as nn
import tyro
from minari.data_collector import EpisodeBuffer

ROOT = Path(__file__).resolve().parents[2]
B, H, D, A = 256, 128, 8, 4


@dataclass
class Args:
    rounds: int = 5
    """every contender is timed this often, in turn"""
    updates: int = 30
    """updates per round, after as many for warming up; cheap contenders do ten times as many"""
    out: str = str(ROOT / "docs" / "benchmark" / "speed.csv")
    """CSV to write"""


def store_noise(obs, num_actions, env):
    """One episode of noise, speed/noise-v0, whose environment ends after five steps."""
    rng = np.random.default_rng(0)
    T = len(obs) - 1
    episode = {"observations": obs, "actions": rng.integers(num_actions, size=T), "rewards": rng.normal(size=T)}
    episode |= {"terminations": np.arange(T) == T - 1, "truncations": np.zeros(T, bool)}
    with warnings.catch_warnings(action="ignore"):
        minari.create_dataset_from_buffers("speed/noise-v0", [EpisodeBuffer(id=0, **episode)], env=env)


# the scripts measure updates per second by time.time; here it counts processor time
CLOCK = "import sys, time, runpy; time.time = time.process_time; sys.argv = sys.argv[1:]"
CLOCK += "; runpy.run_path(sys.argv[0], run_name='__main__')"


def ours(updates, script, *flags):
    """Run a script for twice as many updates: milliseconds of processor time per update of the second half."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CLOCK, ROOT / script, "--dataset-id", "speed/noise-v0", "--no-cuda"]
        command += ["--output-dir", folder, "--eval-interval", updates, "--eval-episodes", 1]
        command += ["--total-updates", 2 * updates, *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(list(map(str, command)), check=True, capture_output=True, env=environment)
        (path,) = Path(folder).glob("*/metrics.csv")
        first, second = csv.DictReader(path.read_text().splitlines())
        return 1000 / float(second["charts/updates_per_second"])


def timed(updates, step):
    """Milliseconds of processor time per call, after as many calls for warming up."""
    for update in range(2 * updates):
        if update == updates:
            started = time.process_time()
        step()
    return 1000 * (time.process_time() - started) / updates


def plain_loop(N, updates):
    """SAC-N as a loop: N nn.Module critics, N targets, N Adams; the actor loss runs through the critics' graph."""

    def network():
        return nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, H), nn.ReLU(), nn.Linear(H, A))

    actor = network()
    critics = nn.ModuleList(network() for _ in range(N))
    targets = copy.deepcopy(critics)
    optimizers = [torch.optim.Adam(critic.parameters(), 3e-4) for critic in critics]
    actor_optimizer = torch.optim.Adam(actor.parameters(), 3e-4)
    s, a, r, s_next = torch.randn(B, D), torch.randint(A, (B,)), torch.randn(B), torch.randn(B, D)

    def step():
        with torch.no_grad():
            log_pi = actor(s_next).log_softmax(-1)
            q = torch.stack([target(s_next) for target in targets]).amin(0)
            y = r + 0.99 * (log_pi.exp() * (q - 0.01 * log_pi)).sum(-1)
        for critic, optimizer in zip(critics, optimizers):
            loss = (critic(s).gather(1, a[:, None])[:, 0] - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        log_pi = actor(s).log_softmax(-1)
        q = torch.stack([critic(s) for critic in critics]).amin(0)
        loss = -(log_pi.exp() * (q - 0.01 * log_pi)).sum(-1).mean()
        actor_optimizer.zero_grad()
        loss.backward()
        actor_optimizer.step()
        with torch.no_grad():
            for p, p_target in zip(critics.parameters(), targets.parameters()):
                p_target.lerp_(p, 0.005)

    return timed(updates, step)


def d3rlpy_sac(N, updates):
    """d3rlpy's DiscreteSAC with N critics on the same batch."""
    import d3rlpy

    layers = d3rlpy.models.VectorEncoderFactory([H, H])
    config = d3rlpy.algos.DiscreteSACConfig(
        batch_size=B, n_critics=N, actor_encoder_factory=layers, critic_encoder_factory=layers
    )
    algorithm = config.create(device="cpu:0")
    rng = np.random.default_rng(0)
    dataset = d3rlpy.dataset.MDPDataset(
        rng.normal(size=(5000, D)).astype(np.float32),
        rng.integers(A, size=(5000, 1)),
        rng.normal(size=(5000, 1)).astype(np.float32),
        (np.arange(5000) % 500 == 499).astype(np.float32),
        action_space=d3rlpy.ActionSpace.DISCRETE,
    )
    algorithm.build_with_dataset(dataset)
    batch = dataset.sample_transition_batch(B)
    return timed(updates, partial(algorithm.update, batch))


def networks(args):
    """Contenders by name and N: functions that time them once."""
    obs = np.random.default_rng(1).normal(size=(5001, D)).astype(np.float32)
    store_noise(obs, A, gym.make("LunarLander-v3", max_episode_steps=5))
    own = ("--batch-size", B, "--targets", "own")
    shared = ("--batch-size", B, "--targets", "shared")
    paper_n = ("ersac_ensemble.py", *shared, "--prior-scale", 0, "--input-scale", 1)
    paper_epi = ("ersac_epinet.py", *shared, "--head-input", "features", "--prior-scale", 0.3)
    n = args.updates
    contenders = {}
    for N, more in ((100, n), (10, 10 * n)):
        contenders["plain loop", N] = partial(plain_loop, N, n)
        contenders["d3rlpy DiscreteSAC", N] = partial(d3rlpy_sac, N, n)
        critics = ("--num-critics", N)
        contenders["SAC-N", N] = partial(ours, more, *paper_n, "--uncertainty-set", "box", *critics)
        contenders["CH-N", N] = partial(ours, more, *paper_n, "--uncertainty-set", "hull", *critics)
        contenders["Ell_0.9-N", N] = partial(ours, more, *paper_n, *critics)
        contenders["Ell_0.9-N-own", N] = partial(ours, more, "ersac_ensemble.py", *own, *critics)
    for N in (100, 30, 10):  # the runs of sweep.py have 30
        samples = ("--method", "ell-epi", "--num-index-samples", N)
        contenders["Ell-Epi", N] = partial(ours, 5 * n, *paper_epi, *samples)
        contenders["Ell-Epi-own", N] = partial(ours, 5 * n, "ersac_epinet.py", *own, *samples)
    contenders["Ell-Epi*", ""] = partial(ours, 20 * n, *paper_epi)
    contenders["Ell-Epi*-own", ""] = partial(ours, 20 * n, "ersac_epinet.py", *own)
    contenders["Box-Epi*-own", ""] = partial(ours, 20 * n, "ersac_epinet.py", *own, "--uncertainty-set", "box")
    return contenders


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        contenders = networks(args)
        times = {key: [] for key in contenders}
        for turn in range(args.rounds):
            for key, measure in contenders.items():
                times[key].append(measure())
                print(f"round {turn + 1}: {key}: {times[key][-1]:.1f} ms", flush=True)
    rows = [["contender", "num_critics", "ms_per_update", "lowest", "highest", "rounds"]]
    for key, x in times.items():
        rows.append([*key, f"{np.median(x):.2f}", f"{min(x):.2f}", f"{max(x):.2f}", args.rounds])
    with open(args.out, "w", newline="") as f:
        csv.writer(f, lineterminator="\n").writerows(rows)
