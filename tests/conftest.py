"""What the tests share: scripts run inside the test process, small environments and data sets, and the parts that the
plain loops have in common. A plain loop is a script's algorithm written again in float64, without the script's code."""

import csv
import json
import math
import os
import runpy
import sys
import warnings
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
from minari.data_collector import EpisodeBuffer
from scipy.special import gammaincinv

ROOT = Path(__file__).resolve().parents[1]
torch.set_num_threads(1)  # two files at a time: more threads would wait for one another


# ===== Running a script and reading what it leaves
@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run("ersac_tabular", "--seed", 3) -> exit code, output, new run folders (in a temporary folder), global names.
    A Ctrl-C inside counts as a kill: code 130."""

    def call(script, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
        before = set(tmp_path.glob("runs/*"))
        code, names = 0, {}
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


def read_rows(folder):
    """metrics.csv as numbers."""
    with open(folder / "metrics.csv", newline="") as f:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(f)]


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


def same(x, y):
    """Equal to the last bit, timing and names aside."""
    if isinstance(x, dict):
        aside = ("updates_per_second", "charts/updates_per_second", "args", "exp_name")
        return x.keys() == y.keys() and all(same(x[k], y[k]) for k in x if k not in aside)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y or x != x and y != y


def command_line(flags):
    """{"q_lr": 0.1, "bootstrap": False, "prior": (0, 1)} as --q-lr 0.1 --no-bootstrap --prior 0 1."""
    words = []
    for name, value in flags.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", *(value if isinstance(value, tuple) else [value])]
    return words


# ===== Environments and data sets
class Chain(gym.Env):
    """Eight places in a row, for the oracles: four actions, both kinds of ending, rewards far from unit size. Action 0
    goes left, 1 right, 2 waits, 3 jumps up to three places either way. The right end ends an episode with 30, the left
    one with -20, ten steps truncate it. Of the five observations one is noise and one is constant."""

    observation_space = gym.spaces.Box(-10, 10, (5,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

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


class Walk(gym.Env):
    """The same for pixels, in 84x84 grey noise that needs no decoding; a bright block shows where one is. Nine places:
    action 0 waits, 1 goes left, 2 right, 3 jumps by up to two places either way. The middle ends an episode with 3,
    the ends of the row with -2; a step costs 0.25, a jump 0.5."""

    observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.choice([1, 2, 3, 5, 6, 7]))
        return self.observe(), {}

    def observe(self):
        frame = self.np_random.integers(0, 40, (84, 84), dtype=np.uint8)
        frame[20:60, 9 * self.place : 9 * self.place + 9] += 200
        return frame

    def step(self, action):
        jump = int(self.np_random.integers(-2, 3))
        self.place = int(np.clip(self.place + (0, -1, 1, jump)[action], 0, 8))
        reward = -0.5 if action == 3 else -0.25
        if self.place in (0, 4, 8):
            reward += 3.0 if self.place == 4 else -2.0
        return self.observe(), reward, self.place in (0, 4, 8), False, {}


class Grid(gym.Env):
    """Observed as a dictionary of a small image and a direction. Walk to the right end in 12 steps."""

    image = gym.spaces.Box(0, 255, (3, 3, 2), np.uint8)
    observation_space = gym.spaces.Dict(image=image, direction=gym.spaces.Discrete(4))
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(4))
        return self.observe(), {}

    def observe(self):
        return {"image": np.full((3, 3, 2), 10 * self.place, np.uint8), "direction": self.place % 4}

    def step(self, action):
        self.place = int(np.clip(self.place + action - 1, 0, 9))
        return self.observe(), float(self.place == 9), self.place == 9, False, {}


if "test/Chain-v0" not in gym.registry:
    gym.register("test/Chain-v0", "conftest:Chain", max_episode_steps=10)
    gym.register("test/Walk-v0", "conftest:Walk", max_episode_steps=6)
    gym.register("test/Grid-v0", "conftest:Grid", max_episode_steps=12)
    gym.register("test/Forever-v0", "conftest:Chain")
    gym.register("test/WalkForever-v0", "conftest:Walk")


def play(env, steps, seed):
    """Random play, exactly `steps` transitions: the last episode may be cut. One EpisodeBuffer an episode."""
    rng, buffers = np.random.default_rng(seed), []
    while steps > 0:
        observations, taken = [env.reset(seed=int(rng.integers(2**31)))[0]], []
        done = False
        while not done and steps > 0:
            action = int(rng.integers(env.action_space.n))
            obs, reward, terminated, truncated, _ = env.step(action)
            steps -= 1
            done = terminated or truncated
            observations.append(obs)
            taken.append((action, reward, terminated, truncated or (steps == 0 and not done)))
        if isinstance(obs, dict):
            observations = {key: [x[key] for x in observations] for key in obs}
        buffers.append(episode(observations, *zip(*taken), number=len(buffers)))
    return buffers


def episode(observations, actions, rewards, terminations, truncations, number=0):
    """One episode's columns as Minari wants them."""
    if isinstance(observations, dict):
        observations = {key: np.array(values) for key, values in observations.items()}
    elif not isinstance(observations[0], str):
        observations = np.array(observations)
    columns = dict(actions=np.array(actions), rewards=np.array(rewards, float))
    columns |= dict(terminations=np.array(terminations), truncations=np.array(truncations))
    return EpisodeBuffer(id=number, observations=observations, **columns)


def store(name, buffers, env=None, **extra):
    with warnings.catch_warnings(action="ignore"):
        return minari.create_dataset_from_buffers(name, buffers, env=env, **{"jpeg_encoding": False} | extra)


@pytest.fixture(scope="session")
def datasets(tmp_path_factory):
    """A folder of small Minari data sets, vectors and pixels."""
    folder = tmp_path_factory.mktemp("minari")
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    cart, chain = gym.make("CartPole-v1"), gym.make("test/Chain-v0")
    for name in ("test/cartpole-v0", "ersac/cartpole/tau50-3k-v0"):
        store(name, play(cart, 600, 0), cart, ref_min_score=20.0, ref_max_score=500.0)
    # the chain: small for the oracles, large enough to learn from
    scores = {"ref_min_score": -14.0, "ref_max_score": 25.0}
    store("test/chain-v0", play(chain, 203, 0), chain, **scores)
    store("test/chain-large-v0", play(chain, 3000, 1), chain, **scores)
    # what a data set declares and its transitions do not show: an action nobody took, short evaluations, a score of 0
    three = [replace(buffer, actions=np.minimum(buffer.actions, 2)) for buffer in play(chain, 203, 0)]
    short = gym.make("test/Chain-v0", max_episode_steps=1)
    store("test/declared-v0", three, chain, eval_env=short, ref_min_score=0.0, ref_max_score=25.0)
    # no episode ended
    cut = []
    for buffer in play(chain, 60, 2):
        last = np.arange(len(buffer.actions)) == len(buffer.actions) - 1
        cut.append(replace(buffer, terminations=last & False, truncations=last))
    store("test/chain-cut-v0", cut, chain, eval_env=gym.make("test/Chain-v0", max_episode_steps=4))
    # pixels: small for the oracles, large enough to learn from, without a time limit, without an environment
    walk, longer = gym.make("test/Walk-v0"), gym.make("test/Walk-v0", max_episode_steps=40)
    extra = {"eval_env": longer, "ref_min_score": -7.0, "ref_max_score": 1.5}
    store("test/walk-v0", play(walk, 72, 0), walk, **extra)
    store("test/walk-large-v0", play(walk, 800, 1), walk, **extra)
    store("test/walk-forever-v0", play(walk, 5, 2), gym.make("test/WalkForever-v0"))
    spaces = {"observation_space": walk.observation_space, "action_space": walk.action_space}
    store("test/walk-logs-v0", play(walk, 9, 3), **spaces)
    yield folder
    if before is None:
        os.environ.pop("MINARI_DATASETS_PATH")
    else:
        os.environ["MINARI_DATASETS_PATH"] = before


# ===== The plain loops' common parts
def mean(values):
    values = [float(value) for value in values]
    return sum(values) / len(values) if values else math.nan


def plain_data(dataset_id, gamma):
    """A data set as the scripts for vectors read it, with a loop over transitions: s, a, r, s_next, terminated, returns
    (NaN where the episode was cut), and the numbers that scaled them: mean, std, scale."""
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


def double(state):
    """A state dict in float64, apart from the original."""
    return {name: value.detach().double().clone() for name, value in state.items()}


def dense(net, name, x):
    return x @ net[f"{name}.weight"].T + net[f"{name}.bias"]


def normalise(h):
    """Layer norm without weights."""
    h = h - h.mean(-1, keepdim=True)
    return h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def plain_policy(actor, s):
    """pi and log pi of an actor of three layers, [B, A]."""
    w1, b1, w2, b2, w3, b3 = actor.values()
    h = torch.relu(torch.relu(s @ w1.T + b1) @ w2.T + b2)
    logits = h @ w3.T + b3
    log_pi = logits - logits.exp().sum(-1, keepdim=True).log()
    return log_pi.exp(), log_pi


def plain_worst_case(kind, q, pi, upsilon):
    """q* of one state with numpy: samples q [N, A], pi [A]. The ellipsoid's squared radius is the ceil(upsilon N)-th
    smallest Mahalanobis distance."""
    if kind == "box":
        return q.min(0)
    if kind == "hull":
        return min(q, key=lambda x: pi @ x)
    assert kind == "ellipsoid", f"plain_worst_case in conftest.py has no set {kind}: write it there, without the script"
    mu = q.mean(0)
    sigma = sum(np.outer(x - mu, x - mu) for x in q) / len(q)
    inverse = np.linalg.inv(sigma + 1e-12 * np.trace(sigma) / len(mu) * np.eye(len(mu)))  # for collapsed directions
    distances = sorted((x - mu) @ inverse @ (x - mu) for x in q)
    square = distances[math.ceil(Fraction(str(upsilon)) * len(q)) - 1]  # 0.28 * 25 is 7, not a little more
    return mu - math.sqrt(square) * sigma @ pi / math.sqrt(pi @ sigma @ pi)


def plain_gaussian(kind, mu, sigma_bar, pi, upsilon):
    """The same for q ~ N(mu, sigma_bar sigma_bar'), ellipsoid or its bounding box: mu [A], sigma_bar [A, d_z]."""
    sigma = sigma_bar @ sigma_bar.T
    square = 2 * gammaincinv(len(mu) / 2, upsilon)  # the chi-squared distribution's quantile
    if kind == "box":  # as far down as the ellipsoid reaches in each action
        return mu - np.sqrt(square * np.diag(sigma))
    return mu - math.sqrt(square) * sigma @ pi / math.sqrt(pi @ sigma @ pi)


def descend(adam, loss, lr):
    """One step of Adam with this step size."""
    adam.param_groups[0]["lr"] = lr
    adam.zero_grad()
    loss.backward()
    adam.step()


def plain_row(pi, log_pi, mu, std, q_star, a, returns):
    """What is logged of a minibatch beside its losses, entry by entry."""
    pi, log_pi, mu, std = (x.detach() for x in (pi, log_pi, mu, std))  # [B, A]
    states = range(len(pi))
    taken = [(b, int(a[b])) for b in states]
    others = [(b, k) for b, k in np.ndindex(*pi.shape) if k != a[b]]
    ended = [(b, k) for b, k in taken if not math.isnan(returns[b])]
    return {
        "charts/policy_entropy": -mean(pi[b] @ log_pi[b] for b in states),
        "charts/q_gap": mean(pi[b] @ (mu[b] - q_star[b]) for b in states),
        "charts/q_minus_return": mean(mu[b, k] - returns[b] for b, k in ended),
        "charts/q_star_minus_return": mean(q_star[b, k] - returns[b] for b, k in ended),
        "charts/std_data_actions": mean(std[i] for i in taken),
        "charts/std_other_actions": mean(std[i] for i in others),
    }


def plain_returns(act, env, episodes, seed):
    """Undiscounted returns of act(obs), one episode a seed."""
    returns = []
    for number in range(episodes):
        obs, _ = env.reset(seed=seed + number)
        total, done = 0.0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            total += reward
            done = terminated or truncated
        returns.append(total)
    return np.array(returns)


def assert_close(ours, plain, what, rtol=1e-3, share=2e-5):
    """float32 against float64, entries that are small beside the tensor's largest one included."""
    ours, plain = (torch.as_tensor(x).detach().double() for x in (ours, plain))
    atol = max(share * plain.nan_to_num().abs().max().item(), 1e-12)
    torch.testing.assert_close(ours, plain, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{what}: {text}")


def check_learned(last, networks, optimizers):
    """A run's last checkpoint against networks and Adams of a plain loop. Adam's first steps are as long as the step
    size whatever the size of the gradient: its moments know the size, and where a gradient is no more than rounding
    (1e-5 of the largest one) single and double precision may step apart."""
    sure = {}
    for name, adam in optimizers.items():
        moments = adam.state_dict()["state"]
        assert last[name]["state"].keys() == moments.keys(), name
        for i, moment in moments.items():
            for part in ("exp_avg", "exp_avg_sq", "step"):
                assert_close(last[name]["state"][i][part], moment[part], f"{name} {i} {part}", share=1e-4)
            size = moment["exp_avg_sq"].sqrt()
            where = (size == 0) | (size > 1e-5 * size.max())
            assert where.double().mean() > 0.98
            sure[id(adam.param_groups[0]["params"][i])] = where
    for part, network in networks.items():
        assert last[part].keys() == network.keys()
        for name, value in network.items():
            source = networks["critic"][name] if part == "target" else value
            where = sure.get(id(source), slice(None))
            assert_close(last[part][name][where], value[where], f"{part} {name}")


def check_result(folder, returns, low, high, out, **expected):
    """result.json and the last lines, from the returns of the final evaluation and the reference scores."""
    result = json.loads((folder / "result.json").read_text())
    method, dataset_id = expected["method"], expected["dataset_id"]
    normalized = None if low is None else 100 * (returns.mean() - low) / (high - low)
    expected |= {"eval_episodes": len(returns), "eval_return_mean": returns.mean(), "eval_return_std": returns.std()}
    expected |= {"random_return": low, "reference_return": high, "normalized_return": normalized}
    assert result.pop("eval_returns") == pytest.approx(returns.tolist())
    assert result.pop("updates_per_second") > 0.1
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name] == (pytest.approx(value, rel=2e-4) if isinstance(value, float) else value), name
    assert f"{method} on {dataset_id}: return {returns.mean():.1f} over {len(returns)} episodes\n" in out
    if normalized is not None:
        assert f"normalized return {normalized:.1f} (0: {low:.1f}, random play; 100: {high:.1f}, reference)" in out
