"""What the tests share: scripts run inside the test process, what a run folder holds, and small data sets."""

import csv
import json
import math
import os
import runpy
import signal
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
from minari.data_collector import EpisodeBuffer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run("ersac_tabular", "--seed", 3) -> exit code, output, new run folders (in a temporary folder). A Ctrl-C inside
    counts as a kill: code 130."""

    def call(script, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
        before = set(tmp_path.glob("runs/*"))
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        threads, code, names = torch.get_num_threads(), 0, {}
        torch.set_num_threads(1)
        capsys.readouterr()
        try:
            names = runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
            if isinstance(code, str):  # sys.exit("message") prints it and exits with 1
                print(code, file=sys.stderr)
                code = 1
        except KeyboardInterrupt:
            code = 130
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(False)
        out, err = capsys.readouterr()
        folders = sorted(set(tmp_path.glob("runs/*")) - before)
        return SimpleNamespace(code=code or 0, out=out, err=err, folders=folders, names=names)

    return call


@pytest.fixture
def first_state(run, load):
    """The state in which a run begins: that of one update whose steps have no length."""

    def get(script, *arguments):
        still = ("--total-updates", 1, "--eval-interval", 1, "--q-lr", 0, "--policy-lr", 0, "--polyak", 0)
        done = run(script, *arguments, *still, "--exp-name", "still")
        assert done.code == 0, done.err
        return load(done.folders[0]).checkpoint

    return get


def untimed(text):
    """Lines of metrics.csv without the column that holds the speed."""
    rows = list(csv.reader(text.splitlines()))
    timing = rows[0].index("charts/updates_per_second") if rows else 0
    return [",".join(row[:timing] + row[timing + 1 :]) for row in rows]


@pytest.fixture
def load():
    """What a run folder holds: result, arguments, checkpoint and the metrics as text without the timing column."""

    def read(folder):
        return SimpleNamespace(
            result=json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else None,
            args=json.loads((folder / "args.json").read_text()),
            checkpoint=torch.load(folder / "checkpoint.pt", weights_only=True),
            metrics=untimed((folder / "metrics.csv").read_text()) if (folder / "metrics.csv").exists() else [],
        )

    return read


def cartpole_episodes(steps, seed):
    """CartPole under a simple balancing rule with 20 % random actions, exactly `steps` transitions."""
    env, rng, episodes = gym.make("CartPole-v1"), np.random.default_rng(seed), []
    while steps > 0:
        obs, _ = env.reset(seed=int(rng.integers(2**31)))
        episode = {name: [] for name in ("observations", "actions", "rewards", "terminations", "truncations")}
        episode["observations"].append(obs)
        done = False
        while not done and steps > 0:
            action = int(rng.integers(2)) if rng.random() < 0.2 else int(obs[2] + obs[3] > 0)
            obs, reward, terminated, truncated, _ = env.step(action)
            steps, done = steps - 1, terminated or truncated
            for name, value in zip(episode, (obs, action, reward, terminated, truncated or (steps == 0 and not done))):
                episode[name].append(value)
        episodes.append(episode)
    return env, episodes


def lander_episodes(count):
    """LunarLander under random actions: four actions, every episode ends in a crash."""
    env, rng, episodes = gym.make("LunarLander-v3"), np.random.default_rng(0), []
    for seed in range(count):
        obs, done = env.reset(seed=seed)[0], False
        episode = {name: [] for name in ("observations", "actions", "rewards", "terminations", "truncations")}
        episode["observations"].append(obs)
        while not done:
            action = int(rng.integers(4))
            obs, reward, done, truncated, _ = env.step(action)
            for name, value in zip(episode, (obs, action, reward, done, truncated)):
                episode[name].append(value)
        episodes.append(episode)
    return episodes


def plain_data(dataset_id, gamma):
    """A data set as the network scripts read it, written anew in float64 with a loop over transitions: s, a, r, s_next,
    terminated, returns (NaN where the episode was cut), and the numbers that scaled them: mean, std, scale."""
    columns = {name: [] for name in ("s", "a", "r", "s_next", "terminated", "returns")}
    for episode in minari.load_dataset(dataset_id).iterate_episodes():
        T = len(episode.actions)
        for t in range(T):
            columns["s"].append(episode.observations[t])
            columns["a"].append(episode.actions[t])
            columns["r"].append(episode.rewards[t])
            columns["s_next"].append(episode.observations[t + 1])
            columns["terminated"].append(episode.terminations[t])
            follow = sum(gamma ** (k - t) * episode.rewards[k] for k in range(t, T))
            columns["returns"].append(follow if episode.terminations[T - 1] else math.nan)
    data = SimpleNamespace(**{name: torch.tensor(np.array(x, np.float64)) for name, x in columns.items()})
    data.a = data.a.long()
    data.mean = data.s.mean(0)
    data.std = ((data.s - data.mean) ** 2).mean(0).sqrt().clamp(min=1e-3)
    seen = [x for x in data.returns.tolist() if not math.isnan(x)]
    if not seen:  # no episode ended: as if each reward went on for ever
        seen = [x / (1 - gamma) for x in data.r.tolist()]
    data.scale = 10.0 / math.sqrt(sum(x * x for x in seen) / len(seen))
    data.s, data.s_next = (data.s - data.mean) / data.std, (data.s_next - data.mean) / data.std
    data.r, data.returns = data.r * data.scale, data.returns * data.scale
    return data


class Chain(gym.Env):
    """Eight places in a row, for the oracles: four actions, both kinds of ending, rewards far from unit size. Action 0
    goes left, 1 right, 2 waits, 3 jumps up to three places either way. The right end ends an episode with 30, the left
    one with -20, ten steps truncate it. Of the five observations one is noise and one is constant."""

    observation_space = gym.spaces.Box(-10, 10, (5,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(1, 7))
        return self.observe(), {}

    def observe(self):
        x = self.place / 7
        return np.array([x, 3 * x * x, self.np_random.normal(), 0.5, 2.0 * (self.place > 3)], np.float32)

    def step(self, action):
        jump = int(self.np_random.integers(-3, 4))
        self.place = int(np.clip(self.place + (-1, 1, 0, jump)[action], 0, 7))
        reward = -4.0 if action == 3 else -1.0
        if self.place in (0, 7):
            reward += 30.0 if self.place == 7 else -20.0
        return self.observe(), reward, self.place in (0, 7), False, {}


if "test/Chain-v0" not in gym.registry:
    gym.register("test/Chain-v0", "conftest:Chain", max_episode_steps=10)


def chain_episodes(steps, seed):
    """Random play on the chain, exactly `steps` transitions: terminations, truncations, the last episode is cut."""
    env, rng, episodes = gym.make("test/Chain-v0"), np.random.default_rng(seed), []
    while steps > 0:
        obs, done = env.reset(seed=int(rng.integers(2**31)))[0], False
        episode = {name: [] for name in ("observations", "actions", "rewards", "terminations", "truncations")}
        episode["observations"].append(obs)
        while not done and steps > 0:
            action = int(rng.integers(4))
            obs, reward, terminated, truncated, _ = env.step(action)
            steps -= 1
            done = terminated or truncated
            for name, value in zip(episode, (obs, action, reward, terminated, truncated or (steps == 0 and not done))):
                episode[name].append(value)
        episodes.append(episode)
    return episodes


@pytest.fixture(scope="session")
def datasets(tmp_path_factory):
    """A folder of small Minari data sets: test/cartpole-v0, two of the chain (small for the oracles, large enough to
    learn from), and some that the scripts must refuse."""
    folder = tmp_path_factory.mktemp("minari")
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    env, episodes = cartpole_episodes(3000, 0)

    def store(name, episodes, env, ids=None, **spaces):
        ids = ids or range(len(episodes))
        array = lambda x: x if isinstance(x[0], str) else np.array(x)  # noqa: E731
        buffers = [EpisodeBuffer(id=i, **{k: array(v) for k, v in e.items()}) for i, e in zip(ids, episodes)]
        with warnings.catch_warnings(action="ignore"):
            minari.create_dataset_from_buffers(name, buffers, env=env, **spaces)

    store("test/cartpole-v0", episodes, env, ref_min_score=20.0, ref_max_score=500.0)
    store("ersac/cartpole/tau50-3k-v0", episodes, env, ref_min_score=20.0, ref_max_score=500.0)
    store("test/lander-v0", lander_episodes(8), gym.make("LunarLander-v3"), ref_min_score=-200.0, ref_max_score=260.0)
    chain = gym.make("test/Chain-v0")
    store("test/chain-v0", chain_episodes(203, 0), chain, ref_min_score=-14.0, ref_max_score=25.0)
    # what a data set declares and its transitions do not show: an action nobody took, short evaluations, a score of 0
    three = [dict(e, actions=np.minimum(e["actions"], 2)) for e in chain_episodes(203, 0)]
    short = gym.make("test/Chain-v0", max_episode_steps=1)
    store("test/declared-v0", three, chain, eval_env=short, ref_min_score=0.0, ref_max_score=25.0)
    cut = [dict(e, terminations=[False] * len(e["actions"])) for e in chain_episodes(60, 2)]
    cut = [dict(e, truncations=[False] * (len(e["actions"]) - 1) + [True]) for e in cut]
    store("test/chain-cut-v0", cut, chain)
    for seed in (3, 14):
        store(f"test/draw-s{seed}-v0", chain_episodes(60, seed), chain)
    store("test/chain-large-v0", chain_episodes(3000, 1), chain, ref_min_score=-14.0, ref_max_score=25.0)
    broken = [dict(e, rewards=[float("nan")] * len(e["rewards"])) for e in episodes[:2]]
    store("test/nan-v0", broken, env)
    store("test/ragged-v0", episodes[:2], env, ids=[0, 0])  # merged into one: two observations more than actions
    pendulum = gym.make("Pendulum-v1")
    moves = [dict(e, observations=np.zeros((len(e["actions"]) + 1, 3), np.float32)) for e in episodes[:2]]
    moves = [dict(e, actions=np.zeros((len(e["actions"]), 1), np.float32)) for e in moves]
    store("test/pendulum-v0", moves, pendulum)
    text = [dict(e, observations=["abc"] * (len(e["actions"]) + 1)) for e in episodes[:2]]
    spaces = {"observation_space": gym.spaces.Text(5), "action_space": gym.spaces.Discrete(2)}
    store("test/text-v0", text, None, **spaces)
    pictures = [dict(e, observations=np.zeros((len(e["actions"]) + 1, 84, 84), np.uint8)) for e in episodes[:1]]
    spaces["observation_space"] = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    store("test/pictures-v0", pictures, None, **spaces)
    lake = gym.make("FrozenLake-v1")
    cells = [dict(e, observations=np.zeros(len(e["actions"]) + 1, np.int64)) for e in episodes[:2]]
    store("test/lake-v0", cells, lake)
    yield folder
    if before is None:
        os.environ.pop("MINARI_DATASETS_PATH")
    else:
        os.environ["MINARI_DATASETS_PATH"] = before
