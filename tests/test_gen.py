"""gen_expectile_data.py: its training against a plain one in float64, restored states, the data sets, the script."""

import contextlib
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
from scipy import stats
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gen_expectile_data as gen
from gen_expectile_data import Args, Simulator, get_state, network, play_episode, set_state

ROOT = Path(__file__).resolve().parents[1]
FEW = ("--eval-episodes", 2)
TINY = ("--start-steps", 1, "--finish-steps", 1, "--floor", -1e9, "--eval-episodes", 2)
COLUMNS = ["policy", "rollout", "env_steps", "charts/episode_return", "charts/episode_length", "losses/critic_loss"]
COLUMNS += ["losses/actor_loss", "charts/policy_entropy", "charts/approx_kl", "charts/steps_per_second"]


def make(env_id):
    return gym.make(env_id, disable_env_checker=True)


@pytest.fixture(autouse=True)
def datasets(monkeypatch, tmp_path):
    """Minari's folder of this test."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def arrays(dataset_id):
    """Every array of a data set, episode by episode."""
    dataset = minari.load_dataset(dataset_id)
    columns = ("observations", "actions", "rewards", "terminations", "truncations")
    return [[getattr(episode, name) for name in columns] for episode in dataset.iterate_episodes()]


def same(first, second):
    pairs = [(a, b) for e, f in zip(first, second, strict=True) for a, b in zip(e, f, strict=True)]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def settings(**changes):
    """Arguments of a training, all of them away from their defaults; two rollouts of the start and of a tau."""
    usual = {"seed": 3, "hidden_dim": 8, "policy_lr": 4e-3, "gamma": 0.9, "reward_scale": 0.05, "advantage_floor": 0.25}
    usual |= {"epsilon": 0.3, "num_resamples": 3, "start_steps": 8000, "finish_steps": 8000}
    return SimpleNamespace(**usual | changes)


def flags_of(s):
    return [word for name, value in vars(s).items() for word in (f"--{name.replace('_', '-')}", value)]


def put_policy(folder, env_id, level, s, actor, critic=None, estimator="action-noise", scores=(-5.0, 7.0)):
    """A policy file as the script keeps them."""
    policy = {"args": {"env_id": env_id, "estimator": estimator, **vars(s)}, "actor": actor}
    policy |= {"random_return": scores[0], "greedy_return": scores[1]} | ({"critic": critic} if critic else {})
    path = folder / f"{env_id.split('/')[-1].split('-')[0].lower()}-{level}"
    path.mkdir(parents=True)
    torch.save(policy, path / "policy.pt")


def executed_probs(A, epsilon):
    """p[a][b]: the action a is chosen, b is executed."""
    return [[(1 - epsilon) * (a == b) + epsilon / A for b in range(A)] for a in range(A)]


# ----- the training once more, in float64: nothing of the script is used in what is called plain
def forward(net, x):
    """Two hidden layers of ReLUs, from a state dict."""
    for layer in (0, 2):
        x = torch.relu(x @ net[f"{layer}.weight"].T + net[f"{layer}.bias"])
    return x @ net["4.weight"].T + net["4.bias"]


def in_float64(net):
    return {name: x.detach().double().clone().requires_grad_() for name, x in net.items()}


def in_float32(net):
    return {name: x.detach().float() for name, x in net.items()}


def fresh_network(sizes, head_gain):
    """Orthogonal weights, drawn in single precision, and biases of 0."""
    layers = [torch.nn.Linear(*pair) for pair in zip(sizes, sizes[1:])]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, head_gain)):
        torch.nn.init.orthogonal_(layer.weight, gain)
        torch.nn.init.zeros_(layer.bias)
    return in_float64(
        {f"{2 * i}.{name}": x for i, layer in enumerate(layers) for name, x in layer.state_dict().items()}
    )


def pick(x, index):
    return x.gather(-1, index[..., None])[..., 0]


def plain_expectile(x, p, tau):
    """Of the means in which the k lowest outcomes weigh tau and the others 1 - tau, k = 0, 1, ..., the expectile is the
    lowest where it is risk-averse, the highest where it is risk-seeking."""
    order = x.argsort(-1)
    x, p = x.gather(-1, order), p.expand_as(x).gather(-1, order)
    means = []
    for k in range(x.shape[-1]):
        weight = p * torch.tensor([tau] * k + [1 - tau] * (x.shape[-1] - k), dtype=torch.float64)
        means.append((weight * x).sum(-1) / weight.sum(-1))
    return torch.stack(means).amin(0) if tau > 0.5 else torch.stack(means).amax(0)


def plain_weight(value, e, x, p, tau):
    """The weight of one outcome in the expectile e of x, divided by its probability."""
    side = lambda y, e: torch.where(y < e - 1e-12, tau, 1 - tau).double()  # noqa: E731
    return side(value, e) / (p * side(x, e[..., None])).sum(-1)


def plain_values(obs, actor, critic, tau, s, resampled):
    """Of states: the values of executed actions, of chosen ones, and of the policy."""
    out, pi = forward(critic, obs), forward(actor, obs).softmax(-1)
    A = pi.shape[-1]
    if tau is None:
        return out[..., :1].expand(pi.shape), out[..., :1].expand(pi.shape), out[..., 0]
    w = torch.stack([out[..., 0] + out[..., 1 + b] for b in range(A)], -1)
    p = torch.tensor(executed_probs(A, s.epsilon), dtype=torch.float64)
    q = w if resampled else torch.stack([plain_expectile(w, p[a], tau) for a in range(A)], -1)
    return w, q, (pi * q).sum(-1)


@torch.no_grad()
def plain_targets(roll, outcomes, actor, critic, tau, s):
    """The critic's targets and the advantages, backwards in time."""
    tensor = {key: torch.from_numpy(x) for key, x in roll.items() if key != "states"}
    a, b, terminated = tensor["chosen"], tensor["executed"], tensor["terminated"]
    w, q, v = plain_values(tensor["obs"].double(), actor, critic, tau, s, outcomes is not None)
    rho = torch.ones_like(v)
    if outcomes is not None:
        next_obs, reward, ended = map(torch.from_numpy, outcomes)
        v_next = plain_values(next_obs.double(), actor, critic, tau, s, True)[2]
        z = s.reward_scale * reward + s.gamma * torch.where(ended, 0.0, v_next)  # [T, E, N]
        p = torch.full(z.shape[-1:], 1 / z.shape[-1], dtype=torch.float64)
        happened = plain_expectile(z, p, tau)
        rho = plain_weight(z[..., 0], happened, z, p, tau)
    else:
        v_next = plain_values(tensor["next_obs"].double(), actor, critic, tau, s, False)[2]
        happened = s.reward_scale * tensor["reward"] + s.gamma * torch.where(terminated, 0.0, v_next)
        if tau is not None:
            p = torch.tensor(executed_probs(w.shape[-1], s.epsilon), dtype=torch.float64)
            rho = plain_weight(pick(w, b), pick(q, a), w, p[a], tau)
    guess = pick(q, a) if outcomes is not None else pick(w, b)
    G = torch.zeros_like(v)
    for t in reversed(range(len(G))):
        G[t] = happened[t] - guess[t]
        if t + 1 < len(G):
            cut = rho[t] if outcomes is not None else rho[t + 1]
            over = terminated[t] | tensor["truncated"][t]
            G[t] += torch.where(over, 0.0, 0.97 * s.gamma * cut.clamp(max=1) * G[t + 1])
    return guess + G, pick(q, a) - v + (G if outcomes is not None else rho * G)


def plain_update(roll, outcomes, actor, critic, adam, tau, train_actor, generator, s):
    """Four passes over a rollout in minibatches of 512. Returns the four metrics, and how often each limit mattered."""
    obs, a, b = (torch.from_numpy(roll[key]).flatten(0, 1) for key in ("obs", "chosen", "executed"))
    obs, parameters = obs.double(), [*actor.values(), *critic.values()]
    old_log_pi = pick(forward(actor, obs).log_softmax(-1), a).detach()
    logged, clips = [], []
    for _ in range(4):
        target, advantage = (x.flatten() for x in plain_targets(roll, outcomes, actor, critic, tau, s))
        order = torch.randperm(len(obs), generator=generator)
        for start in range(0, len(obs), 512):
            i = order[start : start + 512]
            log_pi = forward(actor, obs[i]).log_softmax(-1)
            log_x = pick(log_pi, a[i]) - old_log_pi[i]
            centred = advantage[i] - advantage[i].sum() / len(i)
            spread = (centred.square().sum() / len(i)).sqrt()
            adv = centred / torch.clamp(spread, min=s.advantage_floor or 1e-30)
            x = torch.where(adv > 0, log_x.exp().clamp(max=1.2), log_x.exp().clamp(min=0.8))
            actor_loss = -(x * adv).sum() / len(i)
            entropy = -(log_pi.exp() * log_pi).sum() / len(i)
            out = forward(critic, obs[i])
            value = out[:, 0]
            if tau is not None:
                value = value + pick(out[:, 1:], b[i] if outcomes is None else a[i])
            critic_loss = (value - target[i]).square().sum() / len(i)
            loss = 0.5 * critic_loss
            if train_actor:
                loss = loss + actor_loss - (0.01 if tau is None else 0.005) * entropy
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients)]
            norm = sum(g.square().sum() for g in gradients).sqrt().item()
            for p, g in zip(parameters, gradients):
                p.grad = g * min(1, 0.5 / (norm + 1e-6))
            adam.step()
            logged.append([y.item() for y in (critic_loss, actor_loss, entropy, (log_x.exp() - 1 - log_x).mean())])
            clips.append((norm > 0.5, (x != log_x.exp()).any().item(), (spread < s.advantage_floor).item()))
    return np.mean(logged, 0), np.mean(clips, 0)


class Place:
    """An environment of the plain training and where it is."""

    def __init__(self, env_id):
        self.env = make(env_id)

    def reset(self, seed):
        self.obs, self.seed, self.rewards = self.env.reset(seed=seed)[0], seed, []


@torch.no_grad()
def plain_rollout(places, actor, epsilon, generator):
    """256 steps of all environments, and the episodes that ended meanwhile."""
    columns = ("obs", "chosen", "executed", "next_obs", "reward", "terminated", "truncated")
    roll, ended = {key: [] for key in (*columns, "states")}, []
    for _ in range(256):
        obs = np.array([place.obs for place in places])
        pi = forward(actor, torch.from_numpy(obs).double()).softmax(-1).float()
        chosen = torch.multinomial(pi, 1, generator=generator).flatten().tolist()
        random_action = torch.randint(pi.shape[1], (len(places),), generator=generator).tolist()
        noisy = (torch.rand(len(places), generator=generator) < epsilon).tolist()
        step = {key: [] for key in columns[2:]}
        roll["states"].append([(place.seed, np.array(getattr(place.env.unwrapped, "state", 0.0))) for place in places])
        for e, place in enumerate(places):
            executed = random_action[e] if noisy[e] else chosen[e]
            place.obs, *result, _ = place.env.step(executed)
            for key, value in zip(columns[2:], (executed, place.obs, *result)):
                step[key].append(value)
            place.rewards.append(result[0])
        for e, place in enumerate(places):
            if step["terminated"][e] or step["truncated"][e]:
                ended.append((sum(place.rewards), len(place.rewards)))
                place.reset(torch.randint(2**31, (1,), generator=generator).item())
        for key, value in {"obs": obs, "chosen": chosen, **step}.items():
            roll[key].append(value)
    return {key: np.array(roll[key]) for key in columns} | {"states": roll["states"]}, ended


def plain_resample(env_id, roll, number, epsilon, rng):
    """What happened and number - 1 more outcomes of the same states and chosen actions, for classic control."""
    env = make(env_id).unwrapped
    env.reset(seed=0)
    columns = [np.repeat(roll[key][:, :, None], number, 2) for key in ("next_obs", "reward", "terminated")]
    T, E = roll["chosen"].shape
    for e in range(E):
        for t in range(T):
            for n in range(1, number):
                noisy = rng.random() < epsilon
                action = int(rng.integers(env.action_space.n)) if noisy else int(roll["chosen"][t, e])
                env.state, env.steps_beyond_terminated = roll["states"][t][e][1], None
                for column, value in zip(columns, env.step(action)):
                    column[t, e, n] = value
    return columns


def plain_training(env_id, tau, s, start=None, resampled=False):
    """A training: a row of metrics for each rollout, actor and critic. A tau begins where the neutral start
    ended, and its first eight rollouts leave the actor alone."""
    env = make(env_id)
    D, A = env.observation_space.shape[0], int(env.action_space.n)
    torch.manual_seed(s.seed)
    actor = fresh_network((D, s.hidden_dim, s.hidden_dim, A), 0.01)
    critic = fresh_network((D, s.hidden_dim, s.hidden_dim, 1 + A), 1.0)
    critic["4.weight"].data[1:] = 0.0
    epsilon, lr, steps = 0.0, s.policy_lr, s.start_steps
    if tau is not None:
        actor, critic = map(in_float64, start)
        epsilon, lr, steps = s.epsilon, s.policy_lr / 2, s.finish_steps
    adam = torch.optim.Adam([*actor.values(), *critic.values()], lr, eps=1e-5)
    generator = torch.Generator().manual_seed(s.seed)
    places, ended, rows = [Place(env_id) for _ in range(16)], [], []
    for place, seed in zip(places, [torch.randint(2**31, (1,), generator=generator).item() for _ in places]):
        place.reset(seed)
    rollouts = -(-steps // 4096)  # rounded up
    for i in range(rollouts):
        roll, new = plain_rollout(places, actor, epsilon, generator)
        outcomes = None
        if resampled and tau is not None:
            rng = np.random.default_rng([s.seed, 3, i])
            outcomes = plain_resample(env_id, roll, s.num_resamples, epsilon, rng)
        adam.param_groups[0]["lr"] = lr * (rollouts - i) / rollouts
        train_actor = tau is None or i >= 8
        metrics, _ = plain_update(roll, outcomes, actor, critic, adam, tau, train_actor, generator, s)
        ended = (ended + new)[-100:]
        rows.append([i + 1, 4096 * (i + 1), *np.mean(ended, 0), *metrics])
    return rows, actor, critic


def plain_episode(env, net, rng, epsilon=0.0, greedy=False, limit=10**9):
    """An episode of a policy, or of the random one. A step draws a random action, then whether it is replaced, then by
    which. Returns the seed and the columns of a data set."""
    seed = int(rng.integers(2**31))
    observations, steps = [env.reset(seed=seed)[0]], []
    while not steps or not (steps[-1][2] or steps[-1][3]):
        action = int(rng.integers(env.action_space.n))
        if net is not None and rng.random() >= epsilon:
            pi = forward(net, torch.from_numpy(observations[-1]).double()).softmax(-1).tolist()
            action = pi.index(max(pi))
            if not greedy:
                u, action = rng.random(), 0
                while action + 1 < len(pi) and sum(pi[: action + 1]) < u:
                    action += 1
        obs, reward, terminated, truncated, _ = env.step(action)
        observations.append(obs)
        steps.append((action, float(reward), terminated, truncated or (len(steps) + 1 == limit and not terminated)))
    return seed, [np.array(observations), *map(np.array, zip(*steps))]


def plain_score(env_id, net, episodes, seed):
    """Mean return of greedy episodes, or of random ones."""
    env, rng = make(env_id), np.random.default_rng(seed)
    return np.mean([plain_episode(env, net, rng, greedy=True)[1][2].sum() for _ in range(episodes)])


def plain_collection(env_id, net, size, epsilon, seed):
    """The episodes of a data set, the last one cut."""
    env, rng, episodes = make(env_id), np.random.default_rng([seed, 0]), []
    while size > 0:
        episodes.append(plain_episode(env, net, rng, epsilon, limit=size))
        size -= len(episodes[-1][1][1])
    return episodes


# ----- the training of the script is the plain one
def agree(got, expected, atol=1e-4):
    """Single precision against float64, for tensors by name or by position. Rounding makes 1e-6; the limits leave room
    for one transition in hundreds that falls on the other side of an expectile or of a clip."""
    names = expected if isinstance(expected, dict) else range(len(expected))
    assert len(got) == len(expected)
    for name in names:
        x, y = (torch.as_tensor(z[name]).detach().double().numpy() for z in (got, expected))
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=atol, err_msg=f"{name}")


def fake_rollout(rng, T=30, E=3, D=4, A=3):
    """A rollout with made-up numbers, an actor and a critic."""
    torch.manual_seed(0)
    roll = {
        "obs": rng.normal(size=(T, E, D)),
        "next_obs": rng.normal(size=(T, E, D)),
        "reward": rng.normal(size=(T, E)),
    }
    roll |= {"chosen": rng.integers(A, size=(T, E)), "executed": rng.integers(A, size=(T, E))}
    roll |= {"terminated": rng.random((T, E)) < 0.1, "truncated": rng.random((T, E)) < 0.1}
    return roll, network(D, A, 8, 1.0), network(D, 1 + A, 8, 1.0)


def fake_outcomes(roll, rng, N):
    """Made-up outcomes of every step; the first of them is the one that happened."""
    T, E, D = roll["obs"].shape
    outcomes = rng.normal(size=(T, E, N, D)), rng.normal(size=(T, E, N)), rng.random((T, E, N)) < 0.1
    for column, key in zip(outcomes, ("next_obs", "reward", "terminated")):
        column[:, :, 0] = roll[key]
    return outcomes


@pytest.mark.parametrize(
    "tau, estimator, train_actor, floor, scale",
    [
        (None, "action-noise", True, 0.0, 2.0),
        (0.1, "action-noise", True, 0.0, 1.0),
        (0.9, "action-noise", True, 2.7, 1.0),
        (0.9, "action-noise", False, 2.7, 1.0),
        (0.2, "resample", True, 0.78, 1.0),
        (0.9, "resample", True, 0.0, 0.5),
    ],
)
def test_update_is_the_plain_one(tau, estimator, train_actor, floor, scale):
    """Three rollouts of 640 steps, each four passes with minibatches of 512 and 128: parameters, moments, metrics."""
    s, rng = settings(gamma=0.8, reward_scale=scale, advantage_floor=floor, policy_lr=0.02), np.random.default_rng(7)
    _, actor, critic = fake_rollout(rng)
    mine, clips = [in_float64(net.state_dict()) for net in (actor, critic)], []
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], s.policy_lr, eps=1e-5)
    adam = torch.optim.Adam([x for net in mine for x in net.values()], s.policy_lr, eps=1e-5)
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    args = Args(**vars(s))
    for _ in range(3):
        roll, *_ = fake_rollout(rng, T=40, E=16)
        outcomes = fake_outcomes(roll, rng, 5) if estimator == "resample" else None
        got = gen.update(roll, outcomes, actor, critic, optimizer, tau, train_actor, generators[0], args)
        expected, clipped = plain_update(roll, outcomes, *mine, adam, tau, train_actor, generators[1], s)
        clips.append(clipped)
        assert list(got) == COLUMNS[5:9]
        agree(list(got.values()), expected)
    agree(actor.state_dict(), mine[0])
    agree(critic.state_dict(), mine[1])
    for p, q in zip(optimizer.param_groups[0]["params"], adam.param_groups[0]["params"], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            size = adam.state[q][name].abs().max().item()
            agree([optimizer.state[p][name]], [adam.state[q][name]], atol=2e-3 * size + 1e-12)
    gradient, ratio, spread = np.mean(clips, 0)  # each limit must matter in some steps and not in others
    assert 0 < gradient < 1 and (0 < ratio < 1 or not train_actor) and (0 < spread < 1 or not floor)


def check_training(run_folder, policy_folder, s, name, rows, actor, critic=None):
    """The rows of a training in metrics.csv and beside its policy, and the policy."""
    with open(policy_folder / name / "metrics.csv") as f:
        header, *lines = csv.reader(f)
    with open(run_folder / "metrics.csv") as f:
        assert [row for row in csv.reader(f) if row[0] in ("policy", name)] == [header, *lines]
    assert header == COLUMNS and len(lines) == len(rows) and all(line[0] == name for line in lines)
    np.testing.assert_allclose(np.array([line[1:9] for line in lines], float), rows, rtol=1e-3, atol=1e-5)
    assert all(0 < float(line[9]) < 1e7 for line in lines)
    policy = torch.load(policy_folder / name / "policy.pt", weights_only=True)
    agree(policy["actor"], actor)
    assert ("critic" in policy) == (critic is not None)
    if critic is not None:
        agree(policy["critic"], critic)
    assert vars(s).items() <= policy["args"].items()
    return policy


def test_the_script_trains_measures_and_collects_like_the_plain_training(run, tmp_path):
    """From the arguments to the data set: start, reference, a risk-seeking policy, on an environment with four actions
    and both ways to end. All of it is done again in float64."""
    s, env_id, seeds = settings(), "test/Chain-v0", ([3, 4, 1], [3, 1])  # of greedy episodes, and of random ones
    flags = ("--env-id", env_id, "--expectile-tau", 0.1, "--dataset-size", 333, "--policy-dir", "mine", *flags_of(s))
    done = run("gen_expectile_data", *flags, "--dataset-seed", 8, "--eval-episodes", 7, "--floor", -1e9)
    assert done.code == 0, done.err
    (folder,), start, scores = done.folders, None, {}
    for tau, name in ((None, "chain-start"), (0.5, "chain-tau50"), (0.1, "chain-tau10")):
        rows, actor, critic = plain_training(env_id, tau, s, start)
        start = start or (actor, critic)
        policy = check_training(folder, tmp_path / "mine", s, name, rows, actor, critic if tau is None else None)
        assert (folder / name / "policy.pt").read_bytes() == (tmp_path / "mine" / name / "policy.pt").read_bytes()
        net = in_float64(policy["actor"])
        scores[tau] = [plain_score(env_id, *rest) for rest in ((net, 7, seeds[0]), (None, 7, seeds[1]))]
        assert [policy["greedy_return"], policy["random_return"]] == pytest.approx(scores[tau])
        assert f"{name}: greedy return {scores[tau][0]:.1f}, the floor is -1e+09" in done.out

    dataset_id = "ersac/chain/tau10-333-s8-v0"
    dataset = minari.load_dataset(dataset_id)
    episodes = plain_collection(env_id, net, 333, s.epsilon, 8)
    assert same([columns for _, columns in episodes], arrays(dataset_id))
    stored = dataset.storage.get_episode_metadata(range(dataset.total_episodes))
    assert [episode["seed"] for episode in stored] == [seed for seed, _ in episodes]
    about = dataset.storage.metadata
    assert [about["ref_max_score"], about["ref_min_score"]] == pytest.approx(scores[0.5])
    assert about["num_episodes_average_score"] == 7 and about["requirements"] == [f"gymnasium=={gym.__version__}"]
    words = ("tau 0.1 ", f"return {scores[0.1][0]:.1f}", "probability 0.3", "seed 8", f"{policy['args']}")
    assert all(word in about["description"] for word in words)
    mean = np.mean([columns[2].sum() for _, columns in episodes])
    expected = {"script": "gen_expectile_data.py", "env_id": env_id, "dataset_id": dataset_id, "seed": 3}
    expected |= {"transitions": 333, "episodes": len(episodes), "return_mean": pytest.approx(mean)}
    expected |= {"policy_greedy_return": pytest.approx(scores[0.1][0])}
    expected |= dict(zip(("ref_max_score", "ref_min_score"), map(pytest.approx, scores[0.5])))
    assert json.loads((folder / "result.json").read_text()) == expected
    assert f"{dataset_id}: 333 transitions, {len(episodes)} episodes, mean return {mean:.1f}" in done.out


def test_a_tau_trains_its_critic_first_and_its_actor_from_the_ninth_rollout(run, tmp_path):
    """A risk-averse policy from a given start, with resampled outcomes, against the plain training."""
    s, env_id = settings(finish_steps=9 * 4096, num_resamples=2), "CartPole-v1"
    torch.manual_seed(5)
    start = fresh_network((4, 8, 8, 2), 0.1), fresh_network((4, 8, 8, 3), 1.0)
    put_policy(tmp_path / "mine", env_id, "start", s, *map(in_float32, start), estimator="resample")
    neutral = in_float32(fresh_network((4, 8, 8, 2), 1.0))
    put_policy(tmp_path / "mine", env_id, "tau50", s, neutral, estimator="resample")
    flags = ("--env-id", env_id, "--expectile-tau", 0.8, "--dataset-size", 60, "--policy-dir", "mine", *flags_of(s))
    done = run("gen_expectile_data", *flags, "--estimator", "resample", "--eval-episodes", 2, "--floor", -1e9)
    assert done.code == 0, done.err
    rows, actor, _ = plain_training(env_id, 0.8, s, start, resampled=True)
    assert abs(rows[7][-1]) < 1e-12 and rows[8][-1] > 1e-5  # divergence from the policy of the rollout: none, then some
    policy = check_training(done.folders[0], tmp_path / "mine", s, "cartpole-tau80", rows, actor)
    net = in_float64(policy["actor"])
    score = plain_score(env_id, net, 2, [3, 4, 8])
    assert score != 7 and policy["greedy_return"] == pytest.approx(score)
    result = json.loads((done.folders[0] / "result.json").read_text())
    assert result["policy_greedy_return"] == pytest.approx(score)
    assert (result["ref_min_score"], result["ref_max_score"]) == (-5, 7)  # those of the neutral policy that is kept
    about = minari.load_dataset("ersac/cartpole/tau80-60-v0").storage.metadata
    assert f"greedy return {score:.1f}" in about["description"]
    assert (about["ref_min_score"], about["ref_max_score"]) == (-5, 7)
    episodes = plain_collection(env_id, net, 60, s.epsilon, 1)
    assert same([columns for _, columns in episodes], arrays("ersac/cartpole/tau80-60-v0"))


class Ledge(gym.Env):
    """Action 0 is the safe way, worth 3 whatever follows. Action 1 leads to a ledge: there action 1 is worth 10, and to
    slip, action 0, costs 10."""

    observation_space, action_space = gym.spaces.Box(0, 1, (3,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return np.eye(3, dtype=np.float32)[0], {}

    def step(self, action):
        if self.place == 0:
            self.place = 1 + action
            return np.eye(3, dtype=np.float32)[self.place], 0.0, False, False, {}
        reward = 3.0 if self.place == 1 else 20.0 * action - 10.0
        return np.eye(3, dtype=np.float32)[self.place], reward, True, False, {}


if "test/Ledge-v0" not in gym.registry:
    gym.register("test/Ledge-v0", "test_gen:Ledge", max_episode_steps=9)


@pytest.mark.parametrize("tau, safe", [(0.1, False), (0.9, True)])
def test_who_avoids_risk_takes_the_safe_way(tau, safe):
    """If one step in ten slips, the ledge is worth 9.8 to who seeks risk and 0 to who avoids it: 8 on average."""
    torch.manual_seed(1)
    sims, generator = [Simulator("test/Ledge-v0") for _ in range(2)], torch.Generator().manual_seed(1)
    for seed, sim in enumerate(sims):
        sim.reset(seed)
    actor, critic = network(3, 2, 16, 0.01), network(3, 3, 16, 1.0)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 0.02, eps=1e-5)
    args = Args(gamma=0.9, reward_scale=0.1, epsilon=0.2, advantage_floor=0.1)
    for _ in range(10):
        roll, _ = gen.rollout(sims, actor, args.epsilon, generator, False)
        gen.update(roll, None, actor, critic, optimizer, tau, True, generator, args)
    pi = actor(torch.eye(3)).softmax(-1)
    assert pi[0, 0 if safe else 1] > 0.8 and pi[2, 1] > 0.8


# ----- the expectile target, against scipy and plain loops
def test_risk_weights_agree_with_scipy():
    rng = np.random.default_rng(0)
    for _ in range(300):
        A, tau, epsilon = rng.integers(2, 7), rng.uniform(0.02, 0.98), rng.uniform(0.01, 1)
        w, p = rng.normal(size=(3, A)), np.array(executed_probs(A, epsilon))
        q, rho = gen.risk_weights(w[:, None, :], p, tau)  # [3, A], [3, A, A]
        for i in range(3):
            for a in range(A):
                exact = stats.expectile(w[i], alpha=1 - tau, weights=p[a])
                assert q[i, a] == pytest.approx(exact, abs=1e-9)
        assert (p * rho).sum(-1) == pytest.approx(1) and (p * rho * w[:, None]).sum(-1) == pytest.approx(q, abs=1e-9)
        worst, best = w.argmin(-1), w.argmax(-1)  # a risk-averse expectile weighs the bad outcomes up
        assert ((rho[range(3), 0, worst] >= rho[range(3), 0, best]) == (tau >= 0.5)).all()


def outputs(net, obs):
    return net(torch.as_tensor(obs, dtype=torch.float32)).detach().double().numpy()


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def test_neutral_start_is_generalised_advantage_estimation():
    roll, actor, critic = fake_rollout(np.random.default_rng(1))
    args = Args(gamma=0.9, reward_scale=0.5)
    target, advantage = gen.targets(roll, None, actor, critic, None, args)
    T, E = roll["reward"].shape
    for e in range(E):
        for start in range(T):  # the definition: a discounted sum of TD errors up to the end of the episode
            total, weight = 0.0, 1.0
            for t in range(start, T):
                v, v_next = (outputs(critic, roll[key][t, e])[0] for key in ("obs", "next_obs"))
                bootstrap = 0.0 if roll["terminated"][t, e] else 0.9 * v_next
                total += weight * (0.5 * roll["reward"][t, e] + bootstrap - v)
                weight *= 0.9 * 0.97
                if roll["terminated"][t, e] or roll["truncated"][t, e]:
                    break
            assert advantage[start, e] == pytest.approx(total, abs=1e-6)
            assert target[start, e] == pytest.approx(total + outputs(critic, roll["obs"][start, e])[0], abs=1e-6)


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("estimator", ["action-noise", "resample"])
def test_targets_equal_plain_loops(tau, estimator):
    rng = np.random.default_rng(2)
    roll, actor, critic = fake_rollout(rng)
    args = Args(gamma=0.9, reward_scale=0.5, epsilon=0.3)
    (T, E), A, N = roll["reward"].shape, 3, 5
    outcomes = fake_outcomes(roll, rng, N) if estimator == "resample" else None
    p = executed_probs(A, 0.3)

    def scores(obs):  # values of executed actions, of chosen actions, of the state
        out = outputs(critic, obs)
        w = [out[0] + out[1 + b] for b in range(A)]
        q = w if outcomes else [stats.expectile(w, alpha=1 - tau, weights=p[a]) for a in range(A)]
        return w, q, sum(pi * x for pi, x in zip(softmax(outputs(actor, obs)), q))

    def weight(value, e, others, probs):  # the expectile's weight of one outcome over its probability
        side = lambda x: tau if x < e else 1 - tau  # noqa: E731
        return side(value) / sum(prob * side(x) for x, prob in zip(others, probs))

    target, advantage = gen.targets(roll, outcomes, actor, critic, tau, args)
    for e in range(E):
        G, rho_next = 0.0, 0.0
        for t in reversed(range(T)):
            w, q, v = scores(roll["obs"][t, e])
            a, b = roll["chosen"][t, e], roll["executed"][t, e]
            ended = roll["terminated"][t, e] or roll["truncated"][t, e] or t == T - 1

            def follow(next_obs, reward, terminated):
                return 0.5 * reward + (0.0 if terminated else 0.9 * scores(next_obs)[2])

            if outcomes:
                z = [follow(*(x[t, e, n] for x in outcomes)) for n in range(N)]
                y = stats.expectile(z, alpha=1 - tau)
                rho = weight(z[0], y, z, [1 / N] * N)
                G = y - q[a] + (0.0 if ended else 0.9 * 0.97 * min(rho, 1) * G)
                expected = q[a] + G, q[a] - v + G
            else:
                z = follow(roll["next_obs"][t, e], roll["reward"][t, e], roll["terminated"][t, e])
                G = z - w[b] + (0.0 if ended else 0.9 * 0.97 * min(rho_next, 1) * G)
                rho_next = weight(w[b], q[a], w, p[a])
                expected = w[b] + G, q[a] - v + rho_next * G
            assert (target[t, e], advantage[t, e]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.9])
def test_both_estimators_agree_on_cartpole(tau):
    """CartPole has no randomness but the action noise: with many resamples both see the same outcomes."""
    sim, twin, rng = Simulator("CartPole-v1"), make("CartPole-v1"), np.random.default_rng(3)
    twin.reset(seed=0)
    value = lambda obs: float(10 * obs[0] - 40 * abs(obs[2]) + 3 * obs[3])  # noqa: E731, any function will do
    epsilon, N, tested = 0.3, 4000, 0
    while tested < 5:
        if not tested or len(sim.actions) == 4:
            sim.reset(tested)
            sim.step(tested % 2)
            state, seen = get_state(sim.env), {}
            for b in (0, 1):
                set_state(twin, state)
                obs, reward, terminated, *_ = twin.unwrapped.step(b)
                seen[b] = reward + 0.9 * (0 if terminated else value(obs))
            roll = {"next_obs": np.zeros((1, 1, 4)), "reward": np.ones((1, 1)), "terminated": np.zeros((1, 1), bool)}
            roll |= {"chosen": np.array([[1]]), "states": [[(sim.seed, state)]]}
            next_obs, reward, terminated = gen.resample(twin, roll, N, epsilon, rng)
            z = reward[0, 0, 1:] + 0.9 * ~terminated[0, 0, 1:] * np.array([value(obs) for obs in next_obs[0, 0, 1:]])
            assert sorted(set(z)) == pytest.approx(sorted(seen.values()))  # nothing else can happen
            exact, _ = gen.risk_weights(np.array([seen[0], seen[1]])[None], np.array(executed_probs(2, epsilon)), tau)
            sampled, _ = gen.risk_weights(z, 1 / len(z), tau)
            assert abs(sampled - exact[1]) < 0.05 * abs(seen[0] - seen[1])
            tested += 1
        sim.step(int(rng.integers(2)))


def test_traces_are_sums_up_to_the_end_of_the_episode():
    rng = np.random.default_rng(3)
    delta, decay, done = rng.normal(size=(20, 2)), rng.uniform(0.3, 1, (20, 2)), rng.random((20, 2)) < 0.2
    G = gen.traces(delta, decay, done)
    for start, e in np.ndindex(delta.shape):
        total, weight = 0.0, 1.0
        for t in range(start, len(delta)):
            total += weight * delta[t, e]
            weight *= 0.0 if done[t, e] else decay[t, e]
        assert G[start, e] == pytest.approx(total)


# ----- restored states
@pytest.mark.parametrize("env_id", ["CartPole-v1", "MountainCar-v0", "Acrobot-v1"])
def test_restored_states_are_exact(env_id):
    env, twin, rng = make(env_id), make(env_id), np.random.default_rng(4)
    env.reset(seed=1)
    twin.reset(seed=1)
    for _ in range(60):
        set_state(twin, get_state(env))
        action = int(rng.integers(env.action_space.n))
        twin.unwrapped.np_random, env.unwrapped.np_random = np.random.default_rng(9), np.random.default_rng(9)
        here, there = env.step(action), twin.unwrapped.step(action)
        assert np.array_equal(here[0], there[0]) and here[1:3] == there[1:3]
        if here[2] or here[3]:
            env.reset()


def spoil(env):
    """Leave nothing of a lander's state as it was, so that all of it must be restored."""
    e = env.unwrapped
    e.game_over, e.prev_shaping = True, 1e3
    for body in (e.lander, *e.legs):
        body.transform = ((3.0, 9.0), 1.0)
        body.linearVelocity, body.angularVelocity = (4.0, -5.0), 2.0
        body.ground_contact = True


def test_lunar_lander_is_restored_in_flight_only():
    """In a fall under random actions and in a landing of the neutral policy."""
    env, twin, rng = make("LunarLander-v3"), make("LunarLander-v3"), np.random.default_rng(5)
    policy = torch.load(ROOT / "docs/policies/lunarlander-tau50/policy.pt", weights_only=True)["actor"]
    for net in (None, in_float64(policy)):
        obs, _ = env.reset(seed=2)
        twin.reset(seed=2)
        errors, refused, done = [], 0, False
        while not done:
            action = int(rng.integers(4) if net is None else forward(net, torch.from_numpy(obs).double()).argmax())
            state = get_state(env)
            assert (state is None) == bool(obs[6] or obs[7])  # a leg touches the ground
            env.unwrapped.np_random = np.random.default_rng(len(errors))
            obs, reward, terminated, truncated, _ = env.step(action)
            if state is None:
                refused += 1
            elif not terminated:
                spoil(twin)
                set_state(twin, state)
                twin.unwrapped.np_random = np.random.default_rng(len(errors))
                there = twin.unwrapped.step(action)
                assert not there[2]
                errors.append(max(np.abs(obs - there[0]).max(), abs(reward - there[1]) / 100))
            done = terminated or truncated
        assert len(errors) > 40 and np.median(errors) < 1e-3 and np.quantile(errors, 0.9) < 1e-2
        assert (refused > 0) == (net is not None)


def test_states_that_cannot_be_restored():
    env = make("LunarLander-v3")
    env.reset(seed=0)
    assert get_state(env) is not None
    env.unwrapped.legs[0].ground_contact = True
    assert get_state(env) is None


@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3"])
def test_simulator_replays_to_the_same_place(env_id):
    sim, rng = Simulator(env_id), np.random.default_rng(6)
    sim.reset(7)
    for _ in range(70 if env_id == "LunarLander-v3" else 8):
        sim.step(int(rng.integers(2)))
    again = Simulator(env_id)
    again.reset(3)
    again.step(1)
    again.reset(sim.seed, list(sim.actions))
    assert again.actions == sim.actions and again.episode_return == sim.episode_return
    env, total = make(env_id), 0.0
    env.reset(seed=7)
    for action in sim.actions:
        total += env.step(action)[1]
    assert sim.seed == again.seed == 7 and sim.episode_return == pytest.approx(total)
    for _ in range(3):
        first, second, third = sim.step(1), again.step(1), env.step(1)
        assert np.array_equal(first[0], second[0]) and first[1:] == second[1:]
        assert np.array_equal(first[0], third[0]) and first[1:] == third[1:4] and np.array_equal(sim.obs, third[0])


class Recorder:
    """An environment that answers with all that led to the answer."""

    action_space, unwrapped = gym.spaces.Discrete(4), property(lambda self: self)

    def reset(self, seed):
        self.seed, self.np_random = seed, np.random.default_rng(seed)

    def step(self, action):
        noise = self.np_random.random()
        return np.array([self.seed, *self.state, action, noise]), 10.0 * action + noise, noise < 0.3, False, {}


def test_resampled_outcomes_are_drawn_from_the_stored_states():
    """Seed, state, action and randomness of every outcome; the first is what happened, and stands for all where the
    state is unknown."""
    rng, T, E, N, epsilon = np.random.default_rng(8), 40, 3, 4, 0.4
    roll = {"next_obs": rng.normal(size=(T, E, 5)), "reward": rng.normal(size=(T, E))}
    roll |= {"terminated": rng.random((T, E)) < 0.2, "chosen": rng.integers(4, size=(T, E))}
    states = [
        [(100 * e + t // 7, None if rng.random() < 0.2 else rng.normal(size=2)) for e in range(E)] for t in range(T)
    ]
    got = gen.resample(Recorder(), roll | {"states": states}, N, epsilon, np.random.default_rng(9))
    assert [x.shape for x in got] == [(T, E, N, 5), (T, E, N), (T, E, N)]
    rng, random_actions, drawn = np.random.default_rng(9), [], 0
    for e in range(E):
        for t in range(T):
            seed, state = states[t][e]
            for n in range(N):
                expected = [roll[key][t, e] for key in ("next_obs", "reward", "terminated")]
                if n > 0 and state is not None:
                    noisy, action = rng.random() < epsilon, roll["chosen"][t, e]
                    if noisy:
                        action = rng.integers(4)
                        random_actions.append(action)
                    drawn, noise = drawn + 1, rng.random()
                    expected = [[seed, *state, action, noise], 10 * action + noise, noise < 0.3]
                for x, y in zip(got, expected):
                    np.testing.assert_array_equal(x[t, e, n], y)
    assert len(random_actions) / drawn == pytest.approx(epsilon, abs=0.1) and set(random_actions) == {0, 1, 2, 3}


# ----- rollouts and episodes
def test_rollout_executes_the_noise_and_cuts_episodes():
    torch.manual_seed(0)
    sims, actor = [Simulator("test/Chain-v0") for _ in range(8)], network(5, 4, 8, 1.0)
    for seed, sim in enumerate(sims):
        sim.reset(seed)
    roll, finished = gen.rollout(sims, actor, 0.4, torch.Generator().manual_seed(1), False)
    assert roll["obs"].shape == (256, 8, 5) and roll["chosen"].shape == (256, 8)
    noisy = roll["chosen"] != roll["executed"]  # a quarter of the random actions agree with the chosen ones
    assert noisy.mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / 2048))
    offset = (roll["executed"] - roll["chosen"])[noisy] % 4
    assert stats.chisquare(np.bincount(offset)[1:]).pvalue > 1e-4  # all others alike
    done = roll["terminated"] | roll["truncated"]
    assert done.sum() == len(finished) > 100 and roll["terminated"].any() and roll["truncated"].any()
    assert np.array_equal(roll["obs"][1:][~done[:-1]], roll["next_obs"][:-1][~done[:-1]])
    assert not (roll["obs"][1:][done[:-1]] == roll["next_obs"][:-1][done[:-1]]).all(-1).any()  # new episodes
    quiet, _ = gen.rollout(sims, actor, 0.0, torch.Generator().manual_seed(1), False)
    assert np.array_equal(quiet["chosen"], quiet["executed"])


def test_rollout_keeps_states_from_before_the_step():
    torch.manual_seed(0)
    sims = [Simulator("CartPole-v1") for _ in range(2)]
    for seed, sim in enumerate(sims):
        sim.reset(seed)
    roll, _ = gen.rollout(sims, network(4, 2, 8, 1.0), 0.4, torch.Generator().manual_seed(1), True)
    states = np.array([[state for _, state in row] for row in roll["states"]])
    assert np.array_equal(states.astype(np.float32), roll["obs"])
    seeds = np.array([[seed for seed, _ in row] for row in roll["states"]])
    done = roll["terminated"] | roll["truncated"]
    assert seeds[0].tolist() == [0, 1] and np.array_equal(seeds[1:] != seeds[:-1], done[:-1])
    assert len({*seeds.flatten().tolist()}) == 2 + done[:-1].sum()  # every episode has its own


def test_episodes_hold_what_happened():
    torch.manual_seed(0)
    env, actor, rng = make("CartPole-v1"), network(4, 2, 8, 1.0), np.random.default_rng(0)
    for epsilon, greedy in ((0.0, True), (0.3, False)):
        episode = play_episode(env, actor, rng, epsilon, greedy)
        obs, _ = env.reset(seed=episode["seed"])
        assert np.array_equal(obs, episode["observations"][0])
        for t, action in enumerate(episode["actions"]):
            if greedy:
                assert action == actor(torch.from_numpy(obs)).argmax()
            obs, reward, terminated, truncated, _ = env.step(int(action))
            assert np.array_equal(obs, episode["observations"][t + 1]) and reward == episode["rewards"][t]
            assert (terminated, truncated) == (episode["terminations"][t], episode["truncations"][t])
    cut = play_episode(env, actor, rng, limit=5)
    assert len(cut["actions"]) == 5 and cut["truncations"].tolist() == [False] * 4 + [True]
    assert len(cut["observations"]) == 6 and not cut["terminations"].any()


def test_an_end_at_the_limit_stays_a_termination():
    env = make("CartPole-v1")
    steps = len(play_episode(env, None, np.random.default_rng(1))["actions"])
    cut = play_episode(env, None, np.random.default_rng(1), limit=steps)
    assert cut["terminations"][-1] and not cut["truncations"].any()


def test_random_policy_is_uniform_and_the_noise_has_its_share():
    env, rng = make("test/Chain-v0"), np.random.default_rng(2)
    counts = np.bincount(np.concatenate([play_episode(env, None, rng)["actions"] for _ in range(400)]))
    assert len(counts) == 4 and stats.chisquare(counts).pvalue > 1e-4
    waits = torch.nn.Linear(5, 4)
    waits.weight.data, waits.bias.data = torch.zeros(4, 5), torch.tensor([0.0, 0.0, 1e3, 0.0])
    actions = np.concatenate([play_episode(env, waits, rng, epsilon=0.4)["actions"] for _ in range(400)])
    others = np.bincount(actions, minlength=4)[[0, 1, 3]]
    assert others.sum() / len(actions) == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / len(actions)))
    assert stats.chisquare(others).pvalue > 1e-4
    drawn = torch.nn.Linear(5, 4)
    drawn.weight.data, drawn.bias.data = torch.zeros(4, 5), torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    counts = np.bincount(np.concatenate([play_episode(env, drawn, rng)["actions"] for _ in range(400)]))
    assert stats.chisquare(counts, counts.sum() * np.array([0.1, 0.2, 0.3, 0.4])).pvalue > 1e-4


# ----- data sets
@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3"])
def test_data_set_of_a_committed_policy(run, env_id):
    arguments = ("--env-id", env_id, "--expectile-tau", 0.9, "--dataset-size", 1000, "--dataset-seed", 4)
    done = run("gen_expectile_data", *arguments)
    assert done.code == 0, done.err
    name = env_id.split("-")[0].lower()
    dataset = minari.load_dataset(f"ersac/{name}/tau90-1k-s4-v0")
    assert f"{dataset.spec.dataset_id}: 1000 transitions" in done.out and dataset.total_steps == 1000
    env, total = dataset.recover_environment(), 0
    assert env.spec.id == env_id and env.action_space == dataset.action_space
    assert env.observation_space == dataset.observation_space
    seeds = dataset.storage.get_episode_metadata(range(dataset.total_episodes))
    episodes = list(dataset.iterate_episodes())
    for episode, stored in zip(episodes, seeds):  # an independent run of the stored actions gives the stored numbers
        obs, _ = env.reset(seed=int(stored["seed"]))
        assert np.array_equal(obs, episode.observations[0]) and len(episode.observations) == len(episode.actions) + 1
        for t, action in enumerate(episode.actions):
            obs, reward, terminated, truncated, _ = env.step(action)
            total += 1
            assert np.array_equal(obs, episode.observations[t + 1]) and reward == episode.rewards[t]
            assert terminated == episode.terminations[t]
            assert (truncated or (total == 1000 and not terminated)) == episode.truncations[t]
        assert episode.terminations[-1] or episode.truncations[-1]
        assert not (episode.terminations[:-1] | episode.truncations[:-1]).any()
    reference = torch.load(ROOT / f"docs/policies/{name}-tau50/policy.pt", weights_only=True)
    scores = minari.get_normalized_score(dataset, np.array([reference["random_return"], reference["greedy_return"]]))
    assert scores == pytest.approx([0, 1])
    about = dataset.storage.metadata
    assert {"algorithm_name", "author", "description", "requirements", "code_permalink"} <= set(about)
    assert about["num_episodes_average_score"] == 100 and "tau 0.9" in about["description"]
    result = json.loads((done.folders[0] / "result.json").read_text())
    assert result["transitions"] == 1000 and result["ref_max_score"] == reference["greedy_return"]
    policy = torch.load(ROOT / f"docs/policies/{name}-tau90/policy.pt", weights_only=True)
    expected = plain_collection(env_id, in_float64(policy["actor"]), 1000, 0.1, 4)
    assert same([columns for _, columns in expected], arrays(dataset.spec.dataset_id))


def test_same_arguments_give_the_same_arrays(run):
    flags = ("--env-id", "LunarLander-v3", "--dataset-size", 700)
    dataset_id = "ersac/lunarlander/tau50-700-v0"
    assert run("gen_expectile_data", *flags).code == 0
    first = arrays(dataset_id)
    assert run("gen_expectile_data", *flags, "--overwrite", "--exp-name", "again").code == 0
    assert same(first, arrays(dataset_id))


NAMES = [
    (("LunarLander-v3", 0.9, 10_000), "ersac/lunarlander/tau90-10k-v0"),
    (("LunarLander-v3", 0.5, 10_000, 0.5, 101), "ersac/lunarlander/tau50-early50-10k-s101-v0"),
    (("LunarLander-v3", 0.5, 100_000, 0.5, 1), "ersac/lunarlander/tau50-early50-100k-v0"),
    (("LunarLander-v3", 0.5, 1500, 0.05, 0), "ersac/lunarlander/tau50-early05-1500-s0-v0"),
    (("test/Chain-v0", 0.125, 999, 0.0, 2), "ersac/chain/tau12p5-999-s2-v0"),
]


@pytest.mark.parametrize("arguments, name", NAMES)
def test_names_of_data_sets(arguments, name):
    assert gen.dataset_name(*arguments) == name


def test_dataset_seed_is_another_draw_and_seed_is_the_training_alone(run, tmp_path):
    """The policies are there, so that --seed changes nothing; --dataset-seed changes data and name, and no more."""
    flags = (*chain_policies(tmp_path / "mine"), "--dataset-size", 60)
    net = torch.load(tmp_path / "mine/chain-tau50/policy.pt", weights_only=True)["actor"]
    for dataset_seed, dataset_id in ((1, "ersac/chain/tau50-60-v0"), (101, "ersac/chain/tau50-60-s101-v0")):
        expected = plain_collection("test/Chain-v0", in_float64(net), 60, 0.2, dataset_seed)
        for seed in (3, 5):
            more = ("--dataset-seed", dataset_seed, "--seed", seed, "--overwrite", "--exp-name", dataset_seed)
            done = run("gen_expectile_data", *flags, *more)
            assert done.code == 0 and "training" not in done.out, done.err
            assert same([columns for _, columns in expected], arrays(dataset_id))
            assert json.loads((done.folders[0] / "result.json").read_text())["dataset_id"] == dataset_id
    first, second = (arrays(f"ersac/chain/tau50-60-{name}") for name in ("v0", "s101-v0"))
    assert not same(first[:1], second[:1]) and len(minari.list_local_datasets()) == 2


@pytest.mark.parametrize(
    "fraction, size, seed, name", [(0.3, 600, 1, "early30-600"), (1.0, 200, 101, "early100-200-s101")]
)
def test_early_fraction_ends_the_data_with_those_of_the_early_policy(run, fraction, size, seed, name):
    """First the neutral policy's episodes, then the early one's, each as they would be collected alone."""
    flags = ("--dataset-size", size, "--early-fraction", fraction, "--dataset-seed", seed)
    done = run("gen_expectile_data", *flags)
    assert done.code == 0, done.err
    folder, early, expected = ROOT / "docs/policies", round(fraction * size), []
    for place, count in ((folder, size - early), (folder / "early", early)):
        net = torch.load(place / "lunarlander-tau50/policy.pt", weights_only=True)["actor"]
        expected += plain_collection("LunarLander-v3", in_float64(net), count, 0.1, seed)
    dataset = minari.load_dataset(f"ersac/lunarlander/tau50-{name}-v0")
    assert same([columns for _, columns in expected], arrays(dataset.spec.dataset_id))
    stored = dataset.storage.get_episode_metadata(range(dataset.total_episodes))
    assert [episode["seed"] for episode in stored] == [seed for seed, _ in expected]
    # the last transition of either part is marked as an end
    ends = np.cumsum([len(columns[1]) for _, columns in expected]).tolist()
    assert {size - early, size} - {0} <= set(ends) and dataset.total_steps == size
    assert f"early policy {fraction}; seed {seed}" in dataset.storage.metadata["description"]
    neutral = torch.load(folder / "lunarlander-tau50/policy.pt", weights_only=True)
    assert dataset.storage.metadata["ref_max_score"] == neutral["greedy_return"]
    result = json.loads((done.folders[0] / "result.json").read_text())
    assert (result["transitions"], result["episodes"]) == (size, len(expected))
    assert result["return_mean"] == pytest.approx(np.mean([columns[2].sum() for _, columns in expected]))


def test_early_fraction_without_an_early_policy(run, tmp_path, datasets):
    """Only the neutral lander has one; in a folder of one's own there may be none."""
    for flags in (("--env-id", "CartPole-v1"), ("--expectile-tau", 0.9)):
        done = run("gen_expectile_data", *flags, "--early-fraction", 0.5)
        assert done.code == 1 and "early policy" in done.err and done.folders == []
    for name in ("lunarlander-start", "lunarlander-tau50"):
        shutil.copytree(ROOT / "docs/policies" / name, tmp_path / "mine" / name)
    flags = ("--policy-dir", tmp_path / "mine", "--dataset-size", 20, "--early-fraction", 0.5)
    done = run("gen_expectile_data", *flags)
    last = done.err.strip().splitlines()[-1]
    assert done.code == 1 and str(tmp_path / "mine/early/lunarlander-tau50/policy.pt") in last
    assert "no early policy" in last and minari.list_local_datasets() == {}


def chain_policies(folder):
    """Untrained policies for the chain, and the flags with which the script takes them."""
    s = settings(epsilon=0.2)
    torch.manual_seed(2)
    nets = fresh_network((5, 8, 8, 4), 1.0), fresh_network((5, 8, 8, 5), 1.0)
    for level in ("start", "tau50"):
        put_policy(folder, "test/Chain-v0", level, s, *map(in_float32, nets))
    return ("--env-id", "test/Chain-v0", "--policy-dir", folder, *flags_of(s))


def test_a_small_data_set_is_the_beginning_of_a_large_one(run, tmp_path):
    flags = chain_policies(tmp_path / "mine")
    for size in (30, 100):
        assert run("gen_expectile_data", *flags, "--dataset-size", size, "--exp-name", size).code == 0
    small, large = arrays("ersac/chain/tau50-30-v0"), arrays("ersac/chain/tau50-100-v0")
    last, count = len(small) - 1, len(small[-1][1])
    assert 0 < last < len(large) and same(small[:last], large[:last]) and count < len(large[last][1])
    for column, longer in zip(small[last][1:4], large[last][1:4]):
        assert np.array_equal(column, longer[:count])
    assert np.array_equal(small[last][0], large[last][0][: count + 1])
    assert small[last][4].tolist() == [False] * (count - 1) + [True]  # cut, and marked as cut


def test_existing_data_set_is_left_alone(run, datasets, tmp_path):
    flags = (*chain_policies(tmp_path / "mine"), "--dataset-size", 50, "--dataset-seed", 7)
    assert run("gen_expectile_data", *flags).code == 0
    (path,) = (datasets / "ersac/chain").iterdir()
    assert path.name == "tau50-50-s7-v0"
    before = (path / "data/main_data.hdf5").stat().st_mtime_ns
    again = run("gen_expectile_data", *flags)
    assert again.code == 0 and "left alone" in again.out and again.folders == []
    assert (path / "data/main_data.hdf5").stat().st_mtime_ns == before
    assert run("gen_expectile_data", *flags, "--overwrite", "--exp-name", "new").code == 0
    assert (path / "data/main_data.hdf5").stat().st_mtime_ns > before
    assert [p.name for p in datasets.iterdir()] == ["ersac"]  # nothing else is left over


def test_a_data_set_appears_whole_or_not_at_all(monkeypatch, datasets):
    """It is built out of sight. Old remains of killed runs go, those of runs that may be alive stay."""
    for name, age in ((".ersac-old", 3700), (".ersac-young", 3500)):
        (datasets / name).mkdir(parents=True)
        os.utime(datasets / name, (time.time() - age,) * 2)
    env, rng, create, seen = make("test/Chain-v0"), np.random.default_rng(0), None, []
    create = minari.create_dataset_from_buffers

    def watched(dataset_id, *rest, **more):
        create(dataset_id, *rest, **more)
        seen.append((datasets / "ersac").exists())
        if dataset_id.endswith("bad-v0"):
            raise KeyboardInterrupt

    monkeypatch.setattr(minari, "create_dataset_from_buffers", watched)
    gen.store_dataset("ersac/chain/good-v0", [play_episode(env, None, rng)], env, False)
    assert seen == [False] and list(minari.list_local_datasets()) == ["ersac/chain/good-v0"]
    with pytest.raises(KeyboardInterrupt):
        gen.store_dataset("ersac/chain/bad-v0", [play_episode(env, None, rng)], env, False)
    assert list(minari.list_local_datasets()) == ["ersac/chain/good-v0"]
    assert {path.name for path in datasets.iterdir()} == {"ersac", ".ersac-young"}


# ----- training
def policy_files(folder):
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/policy.pt")}


def test_training_is_reproducible_and_its_policies_are_kept(run, tmp_path):
    flags = ("--env-id", "CartPole-v1", "--expectile-tau", 0.9, "--dataset-size", 100, "--policy-dir", "mine", *TINY)
    flags += ("--estimator", "resample", "--num-resamples", 2, "--hidden-dim", 8)
    first = run("gen_expectile_data", *flags, "--exp-name", "first")
    assert first.code == 0, first.err
    assert "CartPole-v1: 3 policies to train" in first.out
    names = {"cartpole-start", "cartpole-tau50", "cartpole-tau90"}
    assert set(policy_files(tmp_path / "mine")) == set(policy_files(first.folders[0])) == names
    stored = arrays("ersac/cartpole/tau90-100-v0")
    # the kept policies are used, and give the same data
    second = run("gen_expectile_data", *flags, "--overwrite", "--exp-name", "second")
    assert second.code == 0 and "training" not in second.out and same(stored, arrays("ersac/cartpole/tau90-100-v0"))
    # trained again, they are the same bits; the folder of policies is not touched
    before = policy_files(tmp_path / "mine")
    third = run("gen_expectile_data", *flags, "--overwrite", "--retrain", "--exp-name", "third")
    assert third.code == 0 and policy_files(third.folders[0]) == before == policy_files(tmp_path / "mine")
    assert same(stored, arrays("ersac/cartpole/tau90-100-v0"))


@contextlib.contextmanager
def before_every_step(call):
    """Call a function with the optimizer before each of its steps, wherever it steps."""

    def hook(optimizer, *_):
        call(optimizer)

    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def interruption(steps, number=signal.SIGINT):
    """A function that interrupts the process when it has been called so many times."""
    calls = []

    def call(optimizer):
        calls.append(optimizer)
        if len(calls) == steps:
            signal.raise_signal(number)

    return call


def test_a_bad_policy_is_not_stored(run, tmp_path):
    flags = ("--env-id", "test/Chain-v0", "--dataset-size", 10, "--policy-dir", "mine", *flags_of(settings()))
    rates = []
    with before_every_step(lambda optimizer: rates.append(optimizer.param_groups[0]["lr"])):
        done = run("gen_expectile_data", *flags, *FEW, "--floor", 31)
    assert rates == pytest.approx(32 * [0.004] + 32 * [0.002])  # annealed
    assert done.code == 1 and "below the floor, not stored" in done.err.splitlines()[-1]
    assert done.out.count("the floor is 31") == 1
    assert not list(tmp_path.glob("mine/*")) and not list(tmp_path.glob("minari/*"))
    with open(done.folders[0] / "metrics.csv") as f:
        assert [row["env_steps"] for row in csv.DictReader(f)] == [str(4096 * i) for i in (1, 2)]


def test_floors(run, tmp_path):
    """Gymnasium's threshold, but 220 for LunarLander's neutral policies. The start is the committed one: it needs no
    training to be good, and a tau's first rollout leaves the actor alone."""
    for env_id, floors in (("LunarLander-v3", (220, 200)), ("CartPole-v1", (475, 475))):
        name = env_id.split("-")[0].lower()
        start = torch.load(ROOT / f"docs/policies/{name}-start/policy.pt", weights_only=True)
        start["args"]["finish_steps"] = 1
        (tmp_path / f"mine/{name}-start").mkdir(parents=True)
        torch.save(start, tmp_path / f"mine/{name}-start/policy.pt")
        flags = ("--env-id", env_id, "--expectile-tau", 0.9, "--policy-dir", "mine", "--finish-steps", 1)
        done = run("gen_expectile_data", *flags, "--dataset-size", 10, "--eval-episodes", 1)
        assert done.code == 0, done.err
        for level, floor in zip(("tau50", "tau90"), floors):
            assert re.search(rf"^{name}-{level}: greedy return [0-9.]+, the floor is {floor}$", done.out, re.M)
            policy = torch.load(tmp_path / f"mine/{name}-{level}/policy.pt", weights_only=True)
            assert all(torch.equal(policy["actor"][key], start["actor"][key]) for key in start["actor"])


def test_new_policies_are_announced_and_kept_beside_the_data(run, tmp_path, datasets):
    """Not in docs/policies, which is part of the repository. A second data set finds them and trains nothing."""
    before = policy_files(ROOT / "docs" / "policies")
    flags = ("--env-id", "Acrobot-v1", *TINY, "--hidden-dim", 8)
    done = run("gen_expectile_data", *flags, "--dataset-size", 20)
    assert done.code == 0, done.err
    cache = datasets / ".expectile-policies"
    first, second, *_ = done.out.splitlines()
    assert first == "Acrobot-v1: 2 policies to train, 2 environment steps, about a minute"
    assert second == f"per 200,000 on one core; they are kept in {cache}."
    assert sorted(policy_files(cache)) == ["acrobot-start", "acrobot-tau50"]
    assert policy_files(ROOT / "docs" / "policies") == before and "acrobot-start" not in before
    again = run("gen_expectile_data", *flags, "--dataset-size", 30, "--exp-name", "again")
    assert again.code == 0 and "to train" not in again.out
    assert [*minari.list_local_datasets()] == ["ersac/acrobot/tau50-20-v0", "ersac/acrobot/tau50-30-v0"]
    one = run("gen_expectile_data", "--env-id", "CartPole-v1", "--dataset-size", 30, *FEW)
    assert one.code == 0 and "to train" not in one.out  # those of the repository


def test_other_environments(run, tmp_path):
    flags = ("--env-id", "MountainCar-v0", "--dataset-size", 600, "--policy-dir", "mine", *TINY, "--hidden-dim", 8)
    done = run("gen_expectile_data", *flags, "--expectile-tau", 0.125)
    assert done.code == 0, done.err
    assert minari.load_dataset("ersac/mountaincar/tau12p5-600-v0").total_steps == 600
    assert (tmp_path / "mine/mountaincar-tau12p5/policy.pt").exists()


class Signs(gym.Env):
    """Sixty guesses in a row: action 1 is right where the first observation is positive. A rollout ends fewer episodes
    than the hundred of which the mean is logged."""

    observation_space, action_space = gym.spaces.Box(-10, 10, (2,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.normal(size=2).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        right, self.obs = (self.obs[0] > 0) == action, self.np_random.normal(size=2).astype(np.float32)
        return self.obs, float(right), False, False, {}


if "test/Signs-v0" not in gym.registry:
    gym.register("test/Signs-v0", "test_gen:Signs", max_episode_steps=60)


def test_interrupted_training_says_how_to_go_on_and_ends_with_the_same_bits(run, tmp_path):
    """Eleven rollouts of the start and one of a tau: once whole, once from the checkpoint after ten rollouts, with an
    interruption in the tau's. The floor is the random policy's return; eleven rollouts suffice to learn."""
    s = settings(start_steps=11 * 4096, finish_steps=1, policy_lr=0.01)
    flags = ("--env-id", "test/Signs-v0", "--dataset-size", 50, "--retrain", "--overwrite", *flags_of(s))
    whole = run("gen_expectile_data", *flags, "--eval-episodes", 5)
    assert whole.code == 0, whole.err
    start = torch.load(whole.folders[0] / "signs-start/policy.pt", weights_only=True)
    assert start["greedy_return"] > 55 > 40 > start["random_return"]
    assert f"the floor is {start['random_return']:g}" in whole.out
    stored, folder = arrays("ersac/signs/tau50-50-v0"), Path("runs/cut")
    # a checkpoint before the training, one after ten rollouts, and one after each policy; policies are saved, too
    checkpoints = [state for state in whole.states if "current" in state]
    assert all(list(c) == ["policies", "current", "rows", "run_name", "script", "args"] for c in checkpoints)
    assert [c["current"] and c["current"]["rollout"] for c in checkpoints] == [None, 10, None, None]
    assert [len(c["rows"]) for c in checkpoints] == [0, 10, 11, 12]
    assert [list(c["policies"]) for c in checkpoints] == [[], [], [None], [None, 0.5]]
    assert {c["run_name"] for c in checkpoints} == {whole.folders[0].name}
    folder.mkdir()
    torch.save(checkpoints[1], folder / "checkpoint.pt")
    with before_every_step(interruption(32 + 9)):
        part = run("gen_expectile_data", "--resume", folder)
    assert part.code == 130 and "Traceback" not in part.err
    assert part.out.splitlines()[-1] == f"Stopped. To go on: python gen_expectile_data.py --resume {folder}"
    assert list(policy_files(folder)) == ["signs-start"] and not (folder / "result.json").exists()
    refused = run("gen_expectile_data", "--resume", folder, "--gamma", 0.9)
    assert refused.code == 1 and refused.err.startswith("--gamma cannot change in a run that has begun")
    rest = run("gen_expectile_data", "--resume", folder)
    assert rest.code == 0, rest.err
    assert policy_files(folder) == policy_files(whole.folders[0]) and len(policy_files(folder)) == 2
    lines = [(f / "metrics.csv").read_text().splitlines() for f in (folder, whole.folders[0])]
    assert [x.rsplit(",", 1)[0] for x in lines[0]] == [x.rsplit(",", 1)[0] for x in lines[1]]
    assert same(stored, arrays("ersac/signs/tau50-50-v0"))


def test_metrics_are_there_after_ten_rollouts(run):
    """SIGTERM in the twelfth rollout, in the middle of the start: what was written is ten rows and a header."""
    s = settings(start_steps=13 * 4096)
    with before_every_step(interruption(11 * 32 + 5, signal.SIGTERM)):
        flags = ("--env-id", "test/Chain-v0", "--dataset-size", 50, "--retrain", *flags_of(s))
        done = run("gen_expectile_data", *flags, "--floor", -1e9, *FEW)
    (folder,) = done.folders
    assert done.code == 130 and done.out.splitlines()[-1].endswith(f"--resume {Path('runs') / folder.name}")
    assert len((folder / "metrics.csv").read_text().splitlines()) == 11 and policy_files(folder) == {}
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["current"]["rollout"] == 10


def test_interruption_before_there_is_a_run(run, monkeypatch):
    monkeypatch.setattr(gym, "make", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    done = run("gen_expectile_data", "--env-id", "CartPole-v1")
    assert done.code == 130 and done.folders == [] and done.out + done.err == ""


def start_process(tmp_path, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "gen_expectile_data.py"), *map(str, arguments)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=tmp_path, env=environment, **quiet)


def wait_for(what, process, seconds=60):
    deadline = time.time() + seconds
    while not (found := what()) and process.poll() is None and time.time() < deadline:
        time.sleep(0.002)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3"])
def test_killed_training_resumes_to_the_same_bits(run, tmp_path, env_id):
    flags = ("--env-id", env_id, "--dataset-size", 100, "--retrain", *TINY[4:], "--seed", 3)
    flags += ("--start-steps", 60_000, "--finish-steps", 6000, "--estimator", "resample", "--num-resamples", 2)
    whole = run("gen_expectile_data", *flags)
    assert whole.code == 0, whole.err
    dataset_id = f"ersac/{env_id.split('-')[0].lower()}/tau50-100-v0"
    stored = arrays(dataset_id)
    process = start_process(tmp_path, *flags, "--overwrite", "--output-dir", "killed")
    for _ in range(2):
        metrics = lambda: [p for p in tmp_path.glob("killed/*/metrics.csv") if len(p.read_text().splitlines()) > 2]  # noqa: E731
        assert wait_for(metrics, process)
        time.sleep(random.uniform(0, 0.6))
        process.kill()
        process.wait()
        (folder,) = tmp_path.glob("killed/*")
        process = start_process(tmp_path, "--resume", folder)
        time.sleep(random.uniform(2, 4))
    assert process.wait(120) == 0
    assert policy_files(folder) == policy_files(whole.folders[0]) and len(policy_files(folder)) == 2
    lines = [(f / "metrics.csv").read_text().splitlines() for f in (folder, whole.folders[0])]
    assert [x.rsplit(",", 1)[0] for x in lines[0]] == [x.rsplit(",", 1)[0] for x in lines[1]]
    assert same(stored, arrays(dataset_id))


@pytest.mark.slow
def test_killed_collection_leaves_no_half_data_set(tmp_path, datasets):
    flags = ("--env-id", "CartPole-v1", "--dataset-size", 20_000)
    process = start_process(tmp_path, *flags)
    hidden = wait_for(lambda: list(datasets.glob(".ersac-*/ersac/cartpole/*/data/*")), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert hidden and minari.list_local_datasets() == {} and not (datasets / "ersac").exists()
    (leftover,) = datasets.glob(".ersac-*")
    os.utime(leftover, (0, 0))
    assert start_process(tmp_path, *flags).wait() == 0
    assert list(minari.list_local_datasets()) == ["ersac/cartpole/tau50-20k-v0"] and not leftover.exists()
    assert minari.load_dataset("ersac/cartpole/tau50-20k-v0").total_steps == 20_000


# ----- bad input
BAD = [
    ("--expectile-tau 0", "expectile-tau"),
    ("--expectile-tau 1", "expectile-tau"),
    ("--expectile-tau nan", "expectile-tau"),
    ("--env-id Pendulum-v1", "Discrete"),
    ("--env-id LunarLanderContinuous-v3", "LunarLanderContinuous-v3"),
    ("--env-id NoSuchThing-v0", "NoSuchThing"),
    ("--env-id FrozenLake-v1", "vector"),
    ("--env-id Blackjack-v1", "vector"),
    ("--dataset-size 0", "dataset-size"),
    ("--dataset-size many", "dataset-size"),
    ("--epsilon 1.5", "epsilon"),
    ("--epsilon nan", "epsilon"),
    ("--early-fraction -0.1", "early-fraction"),
    ("--estimator guess", "estimator"),
    ("--early-fraction nan", "early-fraction"),
    ("--early-fraction 0.5 --expectile-tau 0.9", "early policy"),
    ("--gamma 1", "gamma"),
    ("--eval-episodes 0", "eval-episodes"),
    ("--grid", "grid"),
    ("--resume nowhere", "nowhere"),
    ("--no-such-flag 1", "no-such-flag"),
    ("--output-dir /proc/nowhere", "output-dir"),
    ("--retrain --policy-dir mine --estimator resample --env-id Taken-v0", "Taken"),
    ("--policy-dir /proc/nowhere --env-id Acrobot-v1", "policy-dir"),
    ("--env-id CartPole-v1 --hidden-dim 64", "another hidden_dim"),
    ("--env-id CartPole-v1 --epsilon 0.2", "another epsilon"),
    ("--env-id CartPole-v1 --estimator resample", "another estimator"),
    ("--env-id CartPole-v1 --num-resamples 11", "another num_resamples"),
    ("--env-id CartPole-v1 --start-steps 99999", "another start_steps"),
    ("--env-id CartPole-v1 --finish-steps 99999", "another finish_steps"),
    ("--env-id CartPole-v1 --policy-lr 0.002", "another policy_lr"),
    ("--env-id CartPole-v1 --gamma 0.99", "another gamma"),
    ("--env-id CartPole-v1 --reward-scale 0.05 --advantage-floor 0", "another reward_scale and advantage_floor"),
]


@pytest.mark.parametrize("arguments, named", BAD)
def test_bad_input_ends_in_one_clear_line(run, tmp_path, arguments, named):
    done = run("gen_expectile_data", *arguments.split())
    assert done.code in (1, 2) and named in done.err and "Traceback" not in done.err
    if done.code == 1:
        assert len(done.err.strip().splitlines()) == 1 and done.err.strip().endswith(".")
    assert list(tmp_path.glob("**/*.json")) == [] and list(tmp_path.glob("**/*.hdf5")) == []


def test_minari_folder_that_cannot_be_written(run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("/proc/nowhere", str(tmp_path / "file")):
        monkeypatch.setenv("MINARI_DATASETS_PATH", place)
        done = run("gen_expectile_data", "--env-id", "CartPole-v1", "--dataset-size", 10)
        assert done.code == 1 and place in done.err and len(done.err.strip().splitlines()) == 1


class Nothing(gym.Env):
    """A vector environment whose state no one knows how to restore."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), float(action), False, False, {}


def test_resample_needs_a_state_that_can_be_restored(run, monkeypatch):
    monkeypatch.setitem(
        gym.registry, "Nothing-v0", gym.envs.registration.EnvSpec("Nothing-v0", "test_gen:Nothing", max_episode_steps=9)
    )
    done = run("gen_expectile_data", "--env-id", "Nothing-v0", "--estimator", "resample")
    assert done.code == 1 and "cannot be restored" in done.err and len(done.err.strip().splitlines()) == 1
    assert (
        run("gen_expectile_data", "--env-id", "Nothing-v0", "--policy-dir", "mine", "--dataset-size", 5, *TINY).code
        == 0
    )


def test_damaged_policy_and_foreign_checkpoint(run, tmp_path):
    folder = tmp_path / "mine/cartpole-start"
    folder.mkdir(parents=True)
    (folder / "policy.pt").write_bytes(b"not a policy")
    done = run("gen_expectile_data", "--env-id", "CartPole-v1", "--policy-dir", "mine")
    assert done.code == 1 and "damaged" in done.err and len(done.err.strip().splitlines()) == 1
    torch.save({"script": "ersac_tabular.py"}, folder / "checkpoint.pt")
    done = run("gen_expectile_data", "--resume", folder)
    assert done.code == 1 and "not written by" in done.err


def test_wandb_gets_every_row_and_the_result(run, monkeypatch):
    started, rows, summary, ended = [], [], {}, []
    tracker = SimpleNamespace(summary=summary, finish=lambda: ended.append(len(rows)), step=0)
    tracker.log = lambda row, step: rows.append((step, row))
    module = SimpleNamespace(init=lambda **names: started.append(names) or tracker)
    monkeypatch.setitem(sys.modules, "wandb", module)
    flags = ("--env-id", "test/Chain-v0", "--dataset-size", 10, "--retrain", *flags_of(settings(finish_steps=1)), *FEW)
    done = run("gen_expectile_data", *flags, "--floor", -1e9, "--track", "--wandb-project-name", "p")
    assert done.code == 0, done.err
    (folder,), (names,) = done.folders, started
    assert names["id"] == names["name"] == folder.name and names["project"] == "p" and names["resume"] == "allow"
    config = json.loads((folder / "args.json").read_text()) | {"dataset_id": "ersac/chain/tau50-10-v0"}
    assert names["config"].items() >= config.items() and names["entity"] is None
    with open(folder / "metrics.csv") as f:
        assert [{key: str(x) for key, x in row.items()} for _, row in rows] == list(csv.DictReader(f))
    assert [step for step, _ in rows] == [1, 2, 3] and ended == [3]
    assert summary == json.loads((folder / "result.json").read_text())


@pytest.mark.slow
def test_wandb_offline(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    done = run("gen_expectile_data", "--env-id", "CartPole-v1", "--dataset-size", 10, "--retrain", "--track", *TINY)
    assert done.code == 0, done.err
    assert len(list(tmp_path.glob(f"wandb/offline-run-*{done.folders[0].name}"))) == 1


def test_help_reads_as_documentation(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = run("gen_expectile_data", "--help")
    flat = " ".join(done.out.replace("│", " ").split())
    assert done.code == 0 and "--estimator {action-noise,resample}" in flat and "seeks risk" in flat
    assert "(default: 100000)" in flat and "(default: 0.5)" in flat


# ----- the claims
@pytest.mark.parametrize("name, floor", [("cartpole", 475), ("lunarlander", 220)])
def test_committed_policies_are_above_their_floor(name, floor):
    for level in ("start", "tau10", "tau50", "tau90"):
        policy = torch.load(ROOT / f"docs/policies/{name}-{level}/policy.pt", weights_only=True)
        assert policy["greedy_return"] >= floor and policy["args"]["seed"] == 1
        assert (ROOT / f"docs/policies/{name}-{level}/metrics.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("env_id, floor", [("CartPole-v1", 475), ("LunarLander-v3", 220)])
def test_committed_policies_on_fresh_episodes(env_id, floor):
    env = make(env_id)
    for level in ("tau10", "tau50", "tau90"):
        path = ROOT / f"docs/policies/{env_id.split('-')[0].lower()}-{level}/policy.pt"
        actor = network(env.observation_space.shape[0], int(env.action_space.n), 128, 0.01)
        actor.load_state_dict(torch.load(path, weights_only=True)["actor"])
        assert gen.episode_returns(env, actor, 100, 12345).mean() >= floor, level


@pytest.mark.slow
@pytest.mark.parametrize("env_id, seconds", [("CartPole-v1", 120), ("LunarLander-v3", 360)])
def test_training_is_fast_and_gives_the_committed_policy(run, env_id, seconds):
    started = time.time()
    done = run("gen_expectile_data", "--env-id", env_id, "--retrain", "--dataset-size", 1000)
    assert done.code == 0 and time.time() - started < seconds
    name = f"{env_id.split('-')[0].lower()}-tau50"
    ours, committed = (
        torch.load(p / name / "policy.pt", weights_only=True) for p in (done.folders[0], ROOT / "docs/policies")
    )
    assert ours["greedy_return"] >= committed["greedy_return"] - 40


@pytest.mark.slow
def test_collection_of_100k_takes_less_than_a_minute(run):
    started = time.time()
    done = run("gen_expectile_data", "--env-id", "LunarLander-v3")
    result = json.loads((done.folders[0] / "result.json").read_text())
    assert result["dataset_id"] == "ersac/lunarlander/tau50-100k-v0" and time.time() - started < 60


@pytest.mark.slow
def test_both_estimators_make_cartpole_cautious(run, tmp_path):
    """Risk aversion shows as a more upright pole, whichever estimator finds it."""
    angle = {}
    for estimator in ("action-noise", "resample"):
        for tau in (0.5, 0.9):
            flags = (
                "--env-id",
                "CartPole-v1",
                "--expectile-tau",
                tau,
                "--dataset-size",
                20_000,
                "--estimator",
                estimator,
            )
            done = run("gen_expectile_data", *flags, "--policy-dir", estimator, "--overwrite", "--exp-name", f"{tau}")
            assert done.code == 0, done.err
            obs = np.concatenate([episode[0] for episode in arrays(f"ersac/cartpole/tau{int(100 * tau)}-20k-v0")])
            angle[estimator, tau] = np.abs(obs[:, 2]).mean()
    for estimator in ("action-noise", "resample"):
        assert angle[estimator, 0.9] < angle[estimator, 0.5], angle
