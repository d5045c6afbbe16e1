"""Milliseconds an update, ours and others', in turn in one run: one thread, batch 256, 128x128, 8 inputs, 4 actions.

    OMP_NUM_THREADS=1 python docs/benchmark/speed.py

Ours is the script itself, started as a user would. The plain baseline is what one writes first: a Python loop over
nn.Module critics with an optimiser each. d3rlpy is timed if it is there (requirements-speed.txt). Medians over rounds.
All times are processor times, so that other programs on the machine hardly count.
"""

import copy
import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
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
    """updates a round, after as many for warming up; cheap contenders do ten times as many"""
    out: str = str(ROOT / "docs" / "benchmark" / "speed.csv")
    """CSV with a row for every contender"""


def store_random_data(folder):
    """Noise with LunarLander's shapes, for speed does not depend on what is learned; its environment ends at once."""
    rng, os.environ["MINARI_DATASETS_PATH"] = np.random.default_rng(0), folder
    T = 5000
    episode = {"observations": rng.normal(size=(T + 1, D)).astype(np.float32), "actions": rng.integers(A, size=T)}
    episode |= {"rewards": rng.normal(size=T), "terminations": np.arange(T) == T - 1, "truncations": np.zeros(T, bool)}
    with warnings.catch_warnings(action="ignore"):
        buffers = [EpisodeBuffer(id=0, **episode)]
        env = gym.make("LunarLander-v3", max_episode_steps=5)
        minari.create_dataset_from_buffers("speed/noise-v0", buffers, env=env)


def ours(script, *flags, more=1):
    """One run of a script with 2 n updates and one with n: the difference of their processor times, start excluded."""

    def seconds(updates):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(ROOT / script), "--dataset-id", "speed/noise-v0", "--output-dir", folder]
            command += ["--total-updates", updates, "--eval-interval", 10**6, "--checkpoint-interval", 10**6]
            command += ["--eval-episodes", 1, "--batch-size", B, *flags]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run(list(map(str, command)), check=True, capture_output=True, env=environment)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def measure(args):
        n = more * args.updates
        return 1000 * (seconds(2 * n) - seconds(n)) / n

    return measure


def plain_loop(N):
    """SAC-N as a loop: N nn.Module critics, N targets, N Adams; the actor loss runs through the critics' graph."""

    def measure(args):
        def network():
            return nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, H), nn.ReLU(), nn.Linear(H, A))

        actor, critics = network(), nn.ModuleList(network() for _ in range(N))
        targets = copy.deepcopy(critics)
        optimizers = [torch.optim.Adam(critic.parameters(), 3e-4) for critic in critics]
        actor_optimizer = torch.optim.Adam(actor.parameters(), 3e-4)
        data = torch.randn(5000, D), torch.randint(A, (5000,)), torch.randn(5000), torch.randn(5000, D)
        for update in range(2 * args.updates):
            if update == args.updates:
                started = time.process_time()
            s, a, r, s_next = (x[torch.randint(5000, (B,))] if x is data[0] else x[:B] for x in data)
            with torch.no_grad():
                log_pi = actor(s_next).log_softmax(-1)
                q = torch.stack([target(s_next) for target in targets]).min(0).values
                y = r + 0.99 * (log_pi.exp() * (q - 0.01 * log_pi)).sum(-1)
            for critic, optimizer in zip(critics, optimizers):
                loss = (critic(s).gather(1, a[:, None])[:, 0] - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            log_pi = actor(s).log_softmax(-1)
            q = torch.stack([critic(s) for critic in critics]).min(0).values
            loss = -(log_pi.exp() * (q - 0.01 * log_pi)).sum(-1).mean()
            actor_optimizer.zero_grad()
            loss.backward()
            actor_optimizer.step()
            with torch.no_grad():
                for critic, target in zip(critics, targets):
                    for p, p_target in zip(critic.parameters(), target.parameters()):
                        p_target.lerp_(p, 0.005)
        return 1000 * (time.process_time() - started) / args.updates

    return measure


def d3rlpy_sac(N):
    """d3rlpy's DiscreteSAC with N critics on the same batch."""

    def measure(args):
        import d3rlpy
        from d3rlpy.dataset import TransitionMiniBatch
        from d3rlpy.models.encoders import VectorEncoderFactory

        encoder = VectorEncoderFactory([H, H])
        config = d3rlpy.algos.DiscreteSACConfig(
            batch_size=B, n_critics=N, actor_encoder_factory=encoder, critic_encoder_factory=encoder
        )
        algorithm = config.create(device="cpu:0")
        rng = np.random.default_rng(0)
        T = 5000
        dataset = d3rlpy.dataset.MDPDataset(
            rng.normal(size=(T, D)).astype(np.float32),
            rng.integers(A, size=(T, 1)),
            rng.normal(size=(T, 1)).astype(np.float32),
            (np.arange(T) % 500 == 499).astype(np.float32),
            action_space=d3rlpy.ActionSpace.DISCRETE,
        )
        algorithm.build_with_dataset(dataset)
        batches = [dataset.sample_transition_batch(B) for _ in range(10)]
        assert isinstance(batches[0], TransitionMiniBatch)
        for update in range(2 * args.updates):
            if update == args.updates:
                started = time.process_time()
            algorithm.update(batches[update % 10])
        return 1000 * (time.process_time() - started) / args.updates

    return measure


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    contenders = {}
    for N, more in ((100, 1), (10, 10)):
        size = ("--num-critics", N)
        contenders["plain loop", N] = plain_loop(N)
        contenders["d3rlpy DiscreteSAC", N] = d3rlpy_sac(N)
        for kind in ("box", "hull", "ellipsoid"):
            flags = (*size, "--no-layer-norm", "--uncertainty-set", kind)
            contenders[f"ersac_ensemble.py {kind}", N] = ours("ersac_ensemble.py", *flags, more=more)
        contenders["ersac_ensemble.py ellipsoid, layer norm", N] = ours("ersac_ensemble.py", *size, more=more)
        sampled = ("--method", "ell-epi", "--num-index-samples", N, "--no-layer-norm")
        contenders["ersac_epinet.py ell-epi, N indices", N] = ours("ersac_epinet.py", *sampled, more=10)
    contenders["ersac_epinet.py ell-epi-star", 1] = ours("ersac_epinet.py", "--no-layer-norm", more=10)
    contenders["ersac_epinet.py ell-epi-star, layer norm", 1] = ours("ersac_epinet.py", more=10)
    try:
        import d3rlpy  # noqa: F401
    except ImportError:
        print("d3rlpy is not installed (docs/benchmark/requirements-speed.txt): left out")
        contenders = {key: measure for key, measure in contenders.items() if "d3rlpy" not in key[0]}
    with tempfile.TemporaryDirectory() as folder:
        store_random_data(folder)
        times = {key: [] for key in contenders}
        for turn in range(args.rounds):
            for key, measure in contenders.items():
                times[key].append(measure(args))
                print(f"round {turn + 1}: {key[0]}, N = {key[1]}: {times[key][-1]:.1f} ms", flush=True)
    with open(args.out, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["contender", "num_critics", "ms_per_update", "ratio_to_box", "rounds"])
        for (name, N), values in times.items():
            box = np.median(times["ersac_ensemble.py box", 100 if N == 1 else N])  # the Epinet against N = 100
            writer.writerow([name, N, f"{np.median(values):.2f}", f"{np.median(values) / box:.4f}", args.rounds])
    print(Path(args.out).read_text())
