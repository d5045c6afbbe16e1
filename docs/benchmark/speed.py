"""Speed of the training scripts, ours and others', in turn in one run, on one thread.

    OMP_NUM_THREADS=1 python docs/benchmark/speed.py --what networks    speed.csv
    OMP_NUM_THREADS=1 python docs/benchmark/speed.py --what growth      speed_growth.csv
    OMP_NUM_THREADS=1 python docs/benchmark/speed.py --what images      speed_atari.csv
    OMP_NUM_THREADS=1 python docs/benchmark/speed.py --what profile     speed_profile.csv

Networks: milliseconds per update at batch 256, 128x128, 8 inputs, 4 actions. The plain baseline is what one writes
first: a Python loop over nn.Module critics with an optimiser each. d3rlpy is timed if it is there
(requirements-speed.txt). The floor is the matrix products of an update and nothing else. Growth: the same against
critics, minibatch and actions. Images: updates per second of the seven algorithms at batch 32 and 256, and 100 heads
against one. Ours is the script itself, started as a user would on noise, because speed does not depend on what is
learned, by the processor time of the updates alone. Medians over rounds.
"""

import contextlib
import copy
import csv
import io
import os
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
    what: Literal["networks", "growth", "images", "profile"] = "networks"
    """contenders side by side, growth with critics, minibatch and actions, ersac_atari.py on images, or where the time
    of an update goes"""
    rounds: int = 5
    """every contender is timed this often, in turn"""
    updates: int = 30
    """updates per round, after as many for warming up; cheap contenders do ten times as many"""
    transitions: int = 3072
    """images: transitions per round: 96 updates of 32, or 12 of 256"""
    out: str | None = None
    """CSV to write; None is speed.csv, speed_growth.csv, speed_atari.csv or speed_profile.csv in docs/benchmark"""


def store_noise(obs, num_actions, env=None):
    """One episode of noise, speed/noise-v0, whose environment ends after five steps; it may have none."""
    rng = np.random.default_rng(0)
    T = len(obs) - 1
    episode = {"observations": obs, "actions": rng.integers(num_actions, size=T), "rewards": rng.normal(size=T)}
    episode |= {"terminations": np.arange(T) == T - 1, "truncations": np.zeros(T, bool)}
    with warnings.catch_warnings(action="ignore"):
        spaces = dict(env=env)
        if env is None:
            spaces = dict(observation_space=gym.spaces.Box(-np.inf, np.inf, obs.shape[1:], np.float32))
            spaces["action_space"] = gym.spaces.Discrete(num_actions)
        minari.create_dataset_from_buffers("speed/noise-v0", [EpisodeBuffer(id=0, **episode)], **spaces)


def store_frames():
    """The same for images, in Pong's environment."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", repeat_action_probability=0.0, frameskip=4, max_episode_steps=5)
    store_noise(np.random.default_rng(1).integers(256, size=(301, 210, 160, 3), dtype=np.uint8), 6, env)


# the scripts measure updates per second by time.time; here it counts processor time
CLOCK = "import sys, time, runpy; time.time = time.process_time; sys.argv = sys.argv[1:]"
CLOCK += "; runpy.run_path(sys.argv[0], run_name='__main__')"


def milliseconds(script, updates, *flags):
    """Run a script for twice as many updates: processor time per update of the second half, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CLOCK, ROOT / script, "--dataset-id", "speed/noise-v0", "--no-cuda"]
        command += ["--output-dir", folder, "--eval-interval", updates, "--eval-episodes", 1, *flags]
        command += ["--total-updates", 2 * updates]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(list(map(str, command)), check=True, capture_output=True, env=environment)
        (path,) = Path(folder).glob("*/metrics.csv")
        first, second = csv.DictReader(path.read_text().splitlines())
        return 1000 / float(second["charts/updates_per_second"])


def ours(script, *flags, more=1):
    """Milliseconds per update of one of our scripts."""

    def measure(args):
        return milliseconds(script, more * args.updates, "--batch-size", B, *flags)  # the last one counts

    return measure


def floor(N, block=10):
    """The matrix products of an update of N critics, in the blocks that ersac_ensemble.py takes: forward for target and
    actor, forward and backward for the loss."""

    def measure(args):
        x = torch.randn(block, B, D)
        h = torch.randn(block, B, H)
        q = torch.randn(block, B, A)
        w1, w2 = torch.randn(block, D, H), torch.randn(block, H, H)
        w3 = torch.randn(block, A, H).mT  # stored so that its thin product is fast

        def forward():
            torch.bmm(x, w1)
            torch.bmm(h, w2)
            torch.bmm(h, w3)

        def backward():
            torch.bmm(h.mT, q)  # the weights' gradients
            torch.bmm(h.mT, h)
            torch.bmm(x.mT, h)
            torch.bmm(q, w3.mT)  # the hidden layers' gradients
            torch.bmm(h, w2.mT)

        for update in range(2 * args.updates):
            if update == args.updates:
                started = time.process_time()
            for _ in range(N // block):
                forward()
                forward()
                forward()
                backward()
        return 1000 * (time.process_time() - started) / args.updates

    return measure


def plain_loop(N, layer_norm=False):
    """SAC-N as a loop: N nn.Module critics, N targets, N Adams; the actor loss runs through the critics' graph."""

    def measure(args):
        def network(norm):
            hidden = [nn.Linear(D, H), norm(H), nn.ReLU(), nn.Linear(H, H), norm(H), nn.ReLU()]
            return nn.Sequential(*hidden, nn.Linear(H, A))

        norm = nn.LayerNorm if layer_norm else nn.Identity
        actor = network(nn.Identity)
        critics = nn.ModuleList(network(norm) for _ in range(N))
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


def d3rlpy_sac(N, layer_norm=False):
    """d3rlpy's DiscreteSAC with N critics on the same batch."""

    def measure(args):
        import d3rlpy
        from d3rlpy.dataset import TransitionMiniBatch
        from d3rlpy.models.encoders import VectorEncoderFactory

        config = d3rlpy.algos.DiscreteSACConfig(
            batch_size=B,
            n_critics=N,
            actor_encoder_factory=VectorEncoderFactory([H, H]),
            critic_encoder_factory=VectorEncoderFactory([H, H], use_layer_norm=layer_norm),
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


OWN = ("--targets", "own", "--head-input", "obs", "--input-scale", 3, "--prior-scale", 3)
PAPER = ("--targets", "shared", "--head-input", "features", "--prior-scale", 0.3)


def networks(args):
    """Milliseconds per update, a row for every contender: ours, the plain loop, d3rlpy, the floor."""
    contenders = {}
    for N, more in ((100, 1), (10, 10)):
        paper = ("--num-critics", N, "--targets", "shared", "--prior-scale", 0, "--input-scale", 1)
        own = ("--num-critics", N, "--targets", "own", "--prior-scale", 10, "--input-scale", 3)
        contenders["matrix products alone", N] = floor(N)
        contenders["plain loop", N] = plain_loop(N)
        contenders["d3rlpy DiscreteSAC", N] = d3rlpy_sac(N)
        contenders["plain loop, layer norm", N] = plain_loop(N, layer_norm=True)
        contenders["d3rlpy DiscreteSAC, layer norm", N] = d3rlpy_sac(N, layer_norm=True)
        for kind in ("box", "hull", "ellipsoid"):
            flags = (*paper, "--no-layer-norm", "--uncertainty-set", kind)
            contenders[f"ersac_ensemble.py {kind}", N] = ours("ersac_ensemble.py", *flags, more=more)
        for kind in ("box", "ellipsoid"):
            flags = (*paper, "--uncertainty-set", kind)
            contenders[f"ersac_ensemble.py {kind}, layer norm", N] = ours("ersac_ensemble.py", *flags, more=more)
        flags = (*own, "--uncertainty-set", "ellipsoid")
        contenders["ersac_ensemble.py ellipsoid, own, layer norm", N] = ours("ersac_ensemble.py", *flags, more=more)
        sampled = ("--method", "ell-epi", "--num-index-samples", N)
        contenders["ersac_epinet.py ell-epi, N indices", N] = ours("ersac_epinet.py", *PAPER, *sampled, more=10)
        contenders["ersac_epinet.py ell-epi, own, N indices", N] = ours("ersac_epinet.py", *OWN, *sampled, more=10)
    contenders["ersac_epinet.py ell-epi-star", 1] = ours("ersac_epinet.py", *PAPER, "--no-layer-norm", more=20)
    contenders["ersac_epinet.py ell-epi-star, layer norm", 1] = ours("ersac_epinet.py", *PAPER, more=20)
    contenders["ersac_epinet.py ell-epi-star, own, layer norm", 1] = ours("ersac_epinet.py", *OWN, more=20)
    paper = ("--num-critics", 100, "--targets", "shared", "--prior-scale", 0, "--input-scale", 1, "--compile")
    contenders["ersac_ensemble.py box, layer norm, compiled", 100] = ours(
        "ersac_ensemble.py", *paper, "--uncertainty-set", "box"
    )
    contenders["ersac_epinet.py ell-epi-star, own, layer norm, compiled", 1] = ours(
        "ersac_epinet.py", *OWN, "--compile", more=20
    )
    flags = (*OWN, "--uncertainty-set", "box")
    contenders["ersac_epinet.py box, own, layer norm", 1] = ours("ersac_epinet.py", *flags, more=20)
    try:
        import d3rlpy  # noqa: F401
    except ImportError:
        print("d3rlpy is not installed (docs/benchmark/requirements-speed.txt): left out")
        contenders = {key: measure for key, measure in contenders.items() if "d3rlpy" not in key[0]}
    obs = np.random.default_rng(1).normal(size=(5001, D)).astype(np.float32)
    store_noise(obs, A, gym.make("LunarLander-v3", max_episode_steps=5))
    times = {key: [] for key in contenders}
    for turn in range(args.rounds):
        for key, measure in contenders.items():
            times[key].append(measure(args))
            print(f"round {turn + 1}: {key[0]}, N = {key[1]}: {times[key][-1]:.1f} ms", flush=True)
    rows = [["contender", "num_critics", "ms_per_update", "ratio_to_box", "lowest", "highest", "rounds"]]
    for (name, N), values in times.items():
        box = np.median(times["ersac_ensemble.py box", 100 if N == 1 else N])  # the Epinet against N = 100
        ratio = np.median(values) / box
        scatter = (f"{min(values):.2f}", f"{max(values):.2f}")
        rows.append([name, N, f"{np.median(values):.2f}", f"{ratio:.4f}", *scatter, args.rounds])
    return rows


def growth(args):
    """Milliseconds per update against critics, minibatch and actions, one of them changed at a time."""
    paper_n = ("--targets", "shared", "--prior-scale", 0, "--input-scale", 1, "--uncertainty-set", "ellipsoid")
    commands = {
        "ensemble": ("ersac_ensemble.py", *paper_n, "--num-critics"),
        "Ell-Epi*": ("ersac_epinet.py", *PAPER, "--index-dim"),
        "Ell-Epi*-own": ("ersac_epinet.py", *OWN, "--index-dim"),
    }
    usual = {"ensemble": 10, "Ell-Epi*": 16, "Ell-Epi*-own": 16}
    cells = []
    for name in commands:
        cells += [(name, "N", n, n, B, A) for n in (3, 10, 30, 100)]  # critics, or dimensions of the index
        cells += [(name, "batch", b, usual[name], b, A) for b in (64, 256, 1024)]
        cells += [(name, "actions", a, usual[name], B, a) for a in (2, 4, 18)]
    times = {cell: [] for cell in cells}
    for turn in range(args.rounds):
        for cell in cells:
            name, _, _, n, batch, actions = cell
            obs = np.random.default_rng(1).normal(size=(5001, D)).astype(np.float32)
            with tempfile.TemporaryDirectory() as folder:
                os.environ["MINARI_DATASETS_PATH"] = folder
                store_noise(obs, actions)
                more = max(1, 1000 // (n if name == "ensemble" else 10) // (batch // 64))
                times[cell].append(ours(*commands[name], n, "--batch-size", batch, more=more)(args))
            print(f"round {turn + 1}: {cell}: {times[cell][-1]:.1f} ms", flush=True)
    rows = [["method", "varied", "value", "ms_per_update"]]
    return rows + [[*cell[:3], f"{np.median(values):.3f}"] for cell, values in times.items()]


def images(args):
    """Updates per second of ersac_atari.py, a row for every algorithm, batch size and number of heads."""
    store_frames()
    heads_of = dict.fromkeys(("sac-n", "ersac-ch-n", "ersac-ell-n"), 100) | {"ersac-ell-epi-star": 1}
    heads_of |= dict.fromkeys(("cql", "iql", "brac-bcq"), 2)
    cells = [(algo, batch, heads) for batch in (32, 256) for algo, heads in heads_of.items()]
    cells += [(algo, 32, 1) for algo, heads in heads_of.items() if heads == 100]
    cells.sort(key=lambda cell: (cell[1], cell[0]))  # what is compared is timed soon after each other
    speeds = {cell: [] for cell in cells}

    flags = ("--clone-updates", 0, "--critic-warmup", 0)
    for turn in range(args.rounds):
        for cell in cells:
            algo, batch, heads = cell
            words = ("--algo", algo, "--batch-size", batch, "--num-critics", heads, *flags)
            speeds[cell].append(1000 / milliseconds("ersac_atari.py", args.transitions // batch, *words))
            print(
                f"round {turn + 1}: {algo}, batch {batch}, heads {heads}: {speeds[cell][-1]:.2f} per second", flush=True
            )
    rows = [["algo", "batch_size", "heads", "updates_per_second", "scatter_percent"]]
    for cell, measured in speeds.items():
        median = float(np.median(measured))
        scatter = 100 * float(np.std(measured)) / median  # of single measurements; the median's is smaller
        rows.append([*cell, round(median, 3), round(scatter, 1)])
    return rows


KINDS = {  # of operations, by the beginning of torch's name
    "matrix products and convolutions": ("mm", "bmm", "addmm", "baddbmm", "mkldnn_convolution", "convolution"),
    "layer norm": ("native_layer_norm",),
    "ReLU": ("relu", "clamp_min", "threshold"),
    "Adam": ("_fused_adam",),
    "Polyak averaging": ("lerp",),
    "Cholesky factor and quantile": ("linalg", "triangular", "kthvalue"),
}


def operations(script, updates, *flags):
    """Milliseconds that a whole run spends in every kind of operation."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("--dataset-id", "speed/noise-v0", "--no-cuda", "--output-dir", folder, "--eval-interval", 10**6)
        words += ("--eval-episodes", 1, *flags, "--total-updates", updates)
        sys.argv = [script, *map(str, words)]
        silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as measured, silent[0], silent[1]:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    times = dict.fromkeys([*KINDS, "all other operations"], 0.0)
    for event in measured.key_averages():
        if event.key.startswith("aten::"):
            name = event.key.removeprefix("aten::")
            kinds = [kind for kind, beginnings in KINDS.items() if name.startswith(beginnings)]
            times[kinds[0] if kinds else "all other operations"] += event.self_cpu_time_total / 1000
    return times


def profile(args):
    """Where the time of an update goes, by torch.profiler: a row for every script and kind of operation. The
    difference of a long and a short run, so that the start does not count."""
    paper = ("--targets", "shared", "--prior-scale", 0, "--input-scale", 1)
    own = ("--targets", "own", "--prior-scale", 10, "--input-scale", 3)
    runs = {
        "SAC-N, N = 100": ("ersac_ensemble.py", 1, *paper, "--num-critics", 100, "--uncertainty-set", "box"),
        "Ell_0.9-N-own, N = 10": ("ersac_ensemble.py", 5, *own, "--num-critics", 10),
        "Ell-Epi*": ("ersac_epinet.py", 20, *PAPER),
        "Ell-Epi*-own": ("ersac_epinet.py", 20, *OWN),
        "Ell-Epi* on pixels": ("ersac_atari.py", 1, "--clone-updates", 0, "--critic-warmup", 0),
    }
    rows = [["run", "kind", "ms_per_update", "share"]]
    for name, (script, more, *flags) in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["MINARI_DATASETS_PATH"] = folder
            if script == "ersac_atari.py":
                store_frames()
                flags += ["--batch-size", 32]
            else:
                obs = np.random.default_rng(1).normal(size=(5001, D)).astype(np.float32)
                store_noise(obs, A, gym.make("LunarLander-v3", max_episode_steps=5))
                flags += ["--batch-size", B]
            n = more * args.updates
            operations(script, n, *flags)  # the first run warms up
            short = operations(script, n, *flags)
            long = operations(script, 3 * n, *flags)
        times = {kind: (long[kind] - short[kind]) / (2 * n) for kind in short}
        for kind, ms in times.items():
            rows.append([name, kind, f"{ms:.3f}", f"{ms / sum(times.values()):.3f}"])
            print(*rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    measure = {"networks": networks, "growth": growth, "images": images, "profile": profile}[args.what]
    suffix = {"networks": "", "growth": "_growth", "images": "_atari", "profile": "_profile"}[args.what]
    name = f"speed{suffix}.csv"
    out = Path(args.out or ROOT / "docs" / "benchmark" / name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        rows = measure(args)
    with open(f"{out}.tmp", "w", newline="") as f:
        csv.writer(f, lineterminator="\n").writerows(rows)
    os.replace(f"{out}.tmp", out)
    print(out.read_text())
