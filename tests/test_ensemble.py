"""ersac_ensemble.py: the loop against a plain one, the SAC-N proposition, the envelope theorem, the stacked critics,
and the script end to end."""

import csv
import functools
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import conftest
import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import plain_data
from minari.data_collector import EpisodeBuffer

import ersac_ensemble
import ersac_tabular
from ersac_ensemble import (
    Actor,
    EnsembleCritic,
    actor_loss,
    critic_loss,
    dataset_name,
    ensemble_similarity,
    load_transitions,
    make_eval_env,
    robust_target,
    worst_case_box,
    worst_case_ellipsoid,
    worst_case_hull,
)

ROOT = Path(__file__).resolve().parents[1]
SETS = {"box": worst_case_box, "hull": worst_case_hull, "ellipsoid": lambda q, pi: worst_case_ellipsoid(q, pi, 0.9)}
DATA = ("--dataset-id", "test/cartpole-v0")
SHORT = ("--total-updates", 24, "--eval-interval", 12, "--eval-episodes", 3)
SMALL = (*DATA, *SHORT, "--num-critics", 4, "--hidden-dim", 16, "--batch-size", 32)


# ----- the training loop against a plain one: no code of the script, float64, loops over critics and transitions
BASE = {
    "dataset_id": "test/chain-v0",
    "seed": 5,
    "targets": "shared",
    "uncertainty_set": "box",
    "upsilon": 0.8,
    "num_critics": 7,
    "hidden_dim": 8,
    "batch_size": 16,
    "total_updates": 3,
    "gamma": 0.93,
    "alpha": 0.4,
    "polyak": 0.15,
    "q_lr": 3e-3,
    "policy_lr": 2e-3,
    "return_scale": 3.0,
    "target_entropy": 0.7,
    "eval_interval": 2,
    "eval_episodes": 25,
    "edac_eta": 0.0,
    "bootstrap": False,
    "prior_scale": 0.0,
    "input_scale": 1.0,
    "autotune": False,
    "layer_norm": True,
    "normalize_obs": True,
    "anneal_lr": True,
}
ALL = {"edac_eta": 0.7, "bootstrap": True, "autotune": True, "input_scale": 1.6}
OWN = {"targets": "own", "prior_scale": 1.5, "input_scale": 1.6}
VARIANTS = {  # name: what differs from BASE, and the method's name
    "box": ({}, "SAC-N"),
    "hull": ({"uncertainty_set": "hull"}, "ERSAC-CH-N"),
    "ellipsoid of 6 in 7": ({"uncertainty_set": "ellipsoid"}, "ERSAC-Ell-N"),
    "ellipsoid of 3 in 7": ({"uncertainty_set": "ellipsoid", "upsilon": 0.3}, "ERSAC-Ell-N"),
    "EDAC": ({"edac_eta": 0.7}, "EDAC"),
    "bootstrap": ({"uncertainty_set": "hull", "bootstrap": True}, "ERSAC-CH-N"),
    "prior": ({"uncertainty_set": "ellipsoid", "prior_scale": 1.5}, "ERSAC-Ell-N"),
    "autotune": ({"uncertainty_set": "ellipsoid", "autotune": True}, "ERSAC-Ell-N"),
    "no layer norm": ({"uncertainty_set": "hull", "layer_norm": False}, "ERSAC-CH-N"),
    "raw data": ({"normalize_obs": False, "return_scale": None}, "SAC-N"),
    "constant step sizes": ({"uncertainty_set": "ellipsoid", "anneal_lr": False}, "ERSAC-Ell-N"),
    "all at once": (ALL, "EDAC"),
    "box with a prior": ({"prior_scale": 0.5}, "ERSAC-Box-N"),
    "own targets, box": (OWN, "ERSAC-Box-N-own"),
    "own targets, hull": (OWN | {"uncertainty_set": "hull", "bootstrap": True}, "ERSAC-CH-N-own"),
    "own targets, ellipsoid": (OWN | {"uncertainty_set": "ellipsoid", "autotune": True}, "ERSAC-Ell-N-own"),
    "own targets, no prior": ({"targets": "own", "uncertainty_set": "ellipsoid"}, "ERSAC-Ell-N-own"),
}


def command(settings):
    """Settings as flags: {"layer_norm": False, "alpha": 0.4} -> --no-layer-norm --alpha 0.4"""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", value]
    return words


def double(state):
    """A state dict in float64, apart from the original."""
    return {name: value.double().clone() for name, value in state.items()}


def plain_critic(state, n, obs, layer_norm):
    """Critic n of a stack: two hidden layers, written with matrix products. [B, A]"""
    h = obs
    for layer in range(3):
        h = h @ state[f"weights.{layer}"][n] + state[f"biases.{layer}"][n]
        if layer < 2 and layer_norm:
            h = h - h.mean(-1, keepdim=True)
            h = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        if layer < 2:
            h = torch.relu(h)
    return h


def plain_policy(state, obs):
    """The actor's probabilities. [B, A]"""
    h = obs
    for layer in (0, 2, 4):
        h = h @ state[f"net.{layer}.weight"].T + state[f"net.{layer}.bias"]
        if layer < 4:
            h = torch.relu(h)
    return torch.softmax(h, -1)


def plain_radius(q, upsilon):
    """Order statistic of the Mahalanobis distances of one state's Q-vectors, q [N, A], from their mean."""
    mu = q.mean(0)
    inverse = np.linalg.inv(sum(np.outer(x - mu, x - mu) for x in q) / len(q))
    distances = sorted((x - mu) @ inverse @ (x - mu) for x in q)
    return math.sqrt(distances[math.ceil(upsilon * len(q)) - 1])


def plain_worst_case(kind, q, pi, upsilon):
    """q* of one state with numpy: q [N, A], pi [A]."""
    if kind == "box":
        return np.array([min(values) for values in q.T])
    if kind == "hull":
        return min(q, key=lambda x: pi @ x)
    mu = q.mean(0)
    sigma = sum(np.outer(x - mu, x - mu) for x in q) / len(q)
    return mu - plain_radius(q, upsilon) * sigma @ pi / math.sqrt(pi @ sigma @ pi)


class PlainAdam:
    """Adam as published, on tensors that are changed in place."""

    def __init__(self, parameters):
        self.parameters, self.steps = list(parameters), 0
        self.mean = [torch.zeros_like(p) for p in self.parameters]
        self.square = [torch.zeros_like(p) for p in self.parameters]

    def step(self, loss, lr):
        self.steps += 1
        gradients = torch.autograd.grad(loss, self.parameters)
        for p, g, m, v in zip(self.parameters, gradients, self.mean, self.square):
            m.copy_(0.9 * m + 0.1 * g)
            v.copy_(0.999 * v + 0.001 * g * g)
            m_hat, v_hat = m / (1 - 0.9**self.steps), v / (1 - 0.999**self.steps)
            p.data -= lr * m_hat / (v_hat.sqrt() + 1e-8)


def start(x, first):
    """What every plain loop starts from: the first checkpoint, the data, the optimizers, the minibatches' generator."""
    plain = SimpleNamespace(data=plain_data(x.dataset_id, x.gamma, x.return_scale, x.normalize_obs))
    plain.critic, plain.target, plain.actor = (double(first[name]) for name in ("critic", "target", "actor"))
    plain.log_alpha = torch.tensor(math.log(x.alpha), dtype=torch.float64)
    for tensor in (*plain.critic.values(), *plain.actor.values(), plain.log_alpha):
        tensor.requires_grad_()
    plain.q_adam, plain.pi_adam = PlainAdam(plain.critic.values()), PlainAdam(plain.actor.values())
    plain.alpha_adam = PlainAdam([plain.log_alpha])
    plain.generator = torch.Generator().manual_seed(x.seed)
    return plain


def minibatch(x, plain):
    """The next minibatch: positions in the data, s, a, r, s_next, terminated."""
    index = torch.randint(len(plain.data.s), (x.batch_size,), generator=plain.generator)
    data = plain.data
    return index, data.s[index], data.a[index], data.r[index], data.s_next[index], data.terminated[index]


def follow(x, plain):
    """Targets follow the critics."""
    for name, value in plain.critic.items():
        plain.target[name] = (1 - x.polyak) * plain.target[name] + x.polyak * value.detach()


def drawn_from_the_seed(x, first, size):
    """Bootstrap weights [N, |D|], and the prior if the checkpoint lacks it: drawn in the script's order, which is
    bootstrap weights, critics, prior."""
    torch.manual_seed(x.seed)
    weights = torch.ones(x.num_critics, size)
    weights = torch.poisson(weights) if x.bootstrap else weights
    for _ in ("critic", "prior"):
        network = {}
        for name, value in first["critic"].items():
            bound = 1 / math.sqrt(first["critic"][name.replace("biases", "weights")].shape[1])
            network[name] = torch.empty(value.shape).uniform_(-bound, bound)
    return weights.double(), double(first.get("prior") or network)


def plain_training(x, first):
    """Algorithms 1 to 3 and EDAC from the first checkpoint on. What is logged is kept for every update."""
    plain = start(x, first)
    weights, prior = drawn_from_the_seed(x, first, len(plain.data.s))
    N, B, A = x.num_critics, x.batch_size, int(plain.data.a.max()) + 1
    plain.rows, plain.actors = [], []

    def q_values(network, obs):
        obs = x.input_scale * obs
        q = [plain_critic(network, n, obs, x.layer_norm) for n in range(N)]
        q = [q[n] + x.prior_scale * plain_critic(prior, n, obs, x.layer_norm) for n in range(N)]
        return torch.stack(q)  # [N, B, A]

    def worst_case(q, pi):
        q, pi = q.detach().numpy(), pi.detach().numpy()
        return np.stack([plain_worst_case(x.uncertainty_set, q[:, b], pi[b], x.upsilon) for b in range(B)])  # [B, A]

    for update in range(1, x.total_updates + 1):
        index, s, a, r, s_next, terminated = minibatch(x, plain)
        alpha = math.exp(plain.log_alpha.item())
        left = (x.total_updates - update + 1) / x.total_updates if x.anneal_lr else 1.0
        # robust target, one for all critics, or each critic's own
        pi_next = plain_policy(plain.actor, s_next).detach()
        q_next = q_values(plain.target, s_next).detach().numpy()  # [N, B, A]
        if x.targets == "shared":
            q_next = [worst_case(torch.tensor(q_next), pi_next)] * N
        y = np.zeros((N, B))
        for n, b in itertools.product(range(N), range(B)):
            value = sum(p * (q - alpha * math.log(p)) for p, q in zip(pi_next[b].tolist(), q_next[n][b]))
            y[n, b] = r[b].item() + (0.0 if terminated[b] else x.gamma * value)
        # critics
        q = q_values(plain.critic, s)
        errors = torch.stack([torch.stack([q[n, b, a[b]] - y[n, b] for b in range(B)]) for n in range(N)])  # [N, B]
        loss = sum((weights[n, index] * errors[n] ** 2).mean() for n in range(N))
        for i, j in itertools.combinations(range(N), 2):
            u, v = (q[k] - q[k].gather(1, a[:, None]) for k in (i, j))
            cosine = (u * v).sum(-1) / ((u * u).sum(-1) * (v * v).sum(-1)).sqrt()
            loss = loss + N * x.edac_eta * cosine.mean()
        plain.q_adam.step(loss, left * x.q_lr)
        # actor, against the critics after their step
        pi = plain_policy(plain.actor, s)
        q = q_values(plain.critic, s).detach()
        q_star = worst_case(q, pi)
        h = -(pi * pi.log()).sum(-1)
        loss = -((pi * torch.tensor(q_star)).sum(-1) + alpha * h).mean()
        plain.pi_adam.step(loss, left * x.policy_lr)
        if x.autotune:  # alpha falls while the policy is more random than asked
            excess = h.mean().item() - x.target_entropy * math.log(A)
            plain.alpha_adam.step(plain.log_alpha.exp() * excess, left * x.policy_lr)
        follow(x, plain)
        # what is logged, as the docs page has it: means over the minibatch
        mu, std, pi, returns = q.mean(0), q.std(0, correction=0), pi.detach(), plain.data.returns[index]
        ours = [(b, k) for b in range(B) for k in range(A) if k == a[b]]
        other = [(b, k) for b in range(B) for k in range(A) if k != a[b]]
        ended = [(b, k) for b, k in ours if not returns[b].isnan()]
        robust = np.mean([pi[b].numpy() @ q_star[b] for b in range(B)])
        row = {
            "update": update,
            "losses/critic_loss": (errors.detach() ** 2).mean(),
            "losses/actor_loss": loss.detach(),
            "charts/alpha": alpha,
            "charts/policy_entropy": h.detach().mean(),
            "charts/q_robust": robust,
            "charts/q_gap": np.mean([(pi[b] @ mu[b]).item() for b in range(B)]) - robust,
            "charts/q_data_actions": np.mean([mu[i] for i in ours]),
            "charts/q_minus_return": np.mean([mu[i] - returns[i[0]] for i in ended]),
            "charts/q_star_minus_return": np.mean([q_star[i] - returns[i[0]].item() for i in ended]),
            "charts/std_data_actions": np.mean([std[i] for i in ours]),
            "charts/std_other_actions": np.mean([std[i] for i in other]),
            "charts/radius": np.mean([plain_radius(q[:, b].numpy(), x.upsilon) for b in range(B)]),
        }
        plain.rows.append({name: float(value) for name, value in row.items()})
        plain.actors.append({name: value.detach().clone() for name, value in plain.actor.items()})
    return plain


def play(actor, data, env, episodes, seed):
    """Undiscounted returns of the greedy policy, one episode a seed."""
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        total, done = 0.0, False
        while not done:
            pi = plain_policy(actor, (torch.tensor(obs, dtype=torch.float64) - data.mean) / data.std)
            obs, reward, terminated, truncated, _ = env.step(int(pi.argmax()))
            total, done = total + reward, terminated or truncated
        returns.append(total)
    return np.array(returns)


def assert_close(ours, plain, what):
    """float32 against float64, entries that are small beside the tensor's largest one included."""
    atol = max(2e-5 * plain.detach().abs().max().item(), 1e-12)
    torch.testing.assert_close(ours.double(), plain.detach(), rtol=1e-3, atol=atol, msg=lambda text: f"{what}: {text}")


def assert_same_training(last, plain, autotune):
    """All parameters, and the optimizers' moments, which also show a gradient's size."""
    for part in ("critic", "target", "actor"):
        for name, value in getattr(plain, part).items():
            assert_close(last[part][name], value, f"{part} {name}")
    assert_close(last["log_alpha"], plain.log_alpha, "log_alpha")
    adams = {"q_optimizer": [plain.q_adam], "policy_optimizer": [plain.pi_adam] + autotune * [plain.alpha_adam]}
    for name, parts in adams.items():
        moments = [(m, v) for adam in parts for m, v in zip(adam.mean, adam.square)]
        stored = last[name]["state"]
        assert len(stored) == len(moments)
        for i, (m, v) in enumerate(moments):
            assert_close(stored[i]["exp_avg"], m, f"{name}, mean of the gradients {i}")
            assert_close(stored[i]["exp_avg_sq"], v, f"{name}, their squares {i}")


def rows_of(folder):
    """metrics.csv as numbers."""
    with open(folder / "metrics.csv", newline="") as f:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(f)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_updates_and_all_that_is_logged_equal_a_plain_loop(run, load, datasets, variant):
    changes, method = VARIANTS[variant]
    settings = BASE | changes
    x = SimpleNamespace(**settings)
    done = run("ersac_ensemble", *command(settings))
    assert done.code == 0, done.err
    first, last = done.states[0], done.states[-1]
    assert first["update"] == 0 and last["update"] == 3
    for name, value in first["critic"].items():
        assert torch.equal(value, first["target"][name])  # the targets start as the critics
    if x.prior_scale and "prior" in first:
        for name, value in first["prior"].items():
            assert torch.equal(value, last["prior"][name]) and not torch.equal(value, first["critic"][name])
    plain = plain_training(x, first)
    assert_same_training(last, plain, x.autotune)
    assert torch.equal(last["generator"], plain.generator.get_state())
    assert_close(last["obs_mean"], plain.data.mean.double(), "mean")
    assert_close(last["obs_std"], plain.data.std.double(), "std")
    assert last["reward_scale"] == pytest.approx(plain.data.scale, rel=1e-5)

    env, seed = gym.make("test/Chain-v0"), 10**6 * (x.seed + 1)
    rows = rows_of(done.folders[0])
    assert [row["update"] for row in rows] == [2, 3]
    for row in rows:
        expected = plain.rows[int(row["update"]) - 1]
        expected["eval/return"] = play(plain.actors[int(row["update"]) - 1], plain.data, env, 2, seed).mean()
        assert row.pop("charts/updates_per_second") > 0
        assert row == pytest.approx(expected, rel=2e-4, abs=2e-5)

    result, returns = load(done.folders[0]).result, play(plain.actor, plain.data, env, 25, seed + 10**5)
    pi = plain_policy(plain.actor, plain.data.s)
    label = method.replace("ERSAC-Ell", f"Ell_{x.upsilon}").removeprefix("ERSAC-")
    expected = {
        "script": "ersac_ensemble.py",
        "method": method,
        "label": label,
        "env_id": "test/Chain-v0",
        "dataset_id": "test/chain-v0",
        "seed": 5,
        "updates": 3,
        "eval_episodes": 25,
        "eval_return_mean": returns.mean(),
        "eval_return_std": returns.std(),
        "random_return": -14.0,
        "reference_return": 25.0,
        "normalized_return": 100 * (returns.mean() + 14) / 39,
        "policy_entropy": -(pi * pi.log()).sum(-1).mean().item(),
    }
    for name, value in expected.items():
        assert result[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5)), name
    assert f"ersac_ensemble.py, {label} on test/chain-v0: return {returns.mean():.1f} over 25 episodes\n" in done.out
    assert "(0 is a return of -14.0, 100 is 25.0: the data set's reference scores)" in done.out


# ----- Proposition 3.1 on the loop: with the box set the script is SAC-N
def sac_n_training(x, first):
    """SAC-N as published, for discrete actions: every critic has its own loss and optimizer, its target takes one next
    action a' ~ pi, and the expectation over a' is written out as a sum."""
    plain = start(x, first)
    N, B, A = x.num_critics, x.batch_size, 4
    rows = torch.arange(B)
    for update in range(x.total_updates):
        left = 1 - update / x.total_updates
        _, s, a, r, s_next, terminated = minibatch(x, plain)
        alpha = plain.log_alpha.exp().item()
        pi_next = plain_policy(plain.actor, s_next).detach()
        lowest = torch.stack([plain_critic(plain.target, n, s_next, True) for n in range(N)]).min(0).values
        losses = []
        for n in range(N):
            q, loss = plain_critic(plain.critic, n, s, True)[rows, a], 0.0
            for a_next in range(A):
                p = pi_next[:, a_next]
                y = r + x.gamma * (1 - terminated) * (lowest[:, a_next] - alpha * p.log())
                loss = loss + (p * (q - y) ** 2).mean()
            losses.append(loss)
        plain.q_adam.step(sum(losses), left * x.q_lr)  # no critic's loss depends on another critic
        lowest = torch.stack([plain_critic(plain.critic, n, s, True) for n in range(N)]).min(0).values.detach()
        pi = plain_policy(plain.actor, s)
        loss = sum((pi[:, k] * (alpha * pi[:, k].log() - lowest[:, k])).mean() for k in range(A))
        plain.pi_adam.step(loss, left * x.policy_lr)
        log_pi = pi.detach().log()
        excess = -sum((log_pi[:, k].exp() * log_pi[:, k]).mean() for k in range(A)) - x.target_entropy * math.log(A)
        plain.alpha_adam.step(plain.log_alpha.exp() * excess, left * x.policy_lr)
        follow(x, plain)
    return plain


def test_with_the_box_five_updates_of_the_script_are_those_of_sac_n(run, datasets):
    settings = BASE | {"total_updates": 5, "seed": 8, "autotune": True}
    done = run("ersac_ensemble", *command(settings))
    assert done.code == 0, done.err
    plain = sac_n_training(SimpleNamespace(**settings), done.states[0])
    assert_same_training(done.states[-1], plain, autotune=True)


# ----- learning
@pytest.mark.parametrize("targets, prior", [("shared", 0), ("own", 3)])
@pytest.mark.parametrize("kind", SETS)
def test_learns_to_walk_right_from_random_play(run, load, datasets, kind, targets, prior):
    """Random play on the chain earns -14. Walking right from the middle earns 30 less a few steps."""
    flags = f"--targets {targets} --prior-scale {prior} --input-scale 1 --uncertainty-set {kind} --num-critics 5 "
    flags += "--hidden-dim 32 --batch-size 64 --total-updates 200 --gamma 0.9 --q-lr 3e-3 --policy-lr 3e-3"
    done = run("ersac_ensemble", "--dataset-id", "test/chain-large-v0", *flags.split(), "--eval-episodes", 50)
    assert done.code == 0, done.err
    result = load(done.folders[0]).result
    assert result["eval_return_mean"] > 24 and result["normalized_return"] > 95


# ----- what the chain's data set cannot show
@pytest.fixture(scope="module")
def endless(datasets):
    """A data set in which no episode ended, without reference scores, to be evaluated in episodes of four steps."""
    episodes = [e for e in minari.load_dataset("test/chain-v0").iterate_episodes() if not e.terminations[-1]]
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    buffers = [EpisodeBuffer(id=i, **{name: getattr(e, name) for name in names}) for i, e in enumerate(episodes)]
    envs = {"env": gym.make("test/Chain-v0"), "eval_env": gym.make("test/Chain-v0", max_episode_steps=4)}
    with warnings.catch_warnings(action="ignore"):
        minari.create_dataset_from_buffers("test/endless-v0", buffers, **envs)
    yield "test/endless-v0"
    minari.delete_dataset("test/endless-v0")


def test_data_without_an_end_and_without_reference_scores(run, load, endless):
    """Rewards are taken to go on for ever, evaluation is in the environment that the data set names for it."""
    settings = BASE | {"dataset_id": endless, "eval_episodes": 9}
    done = run("ersac_ensemble", *command(settings))
    assert done.code == 0, done.err
    data, last = plain_data(endless, 0.93, None), done.states[-1]
    size = math.sqrt(np.mean([(r / (1 - 0.93)) ** 2 for r in data.r.tolist()]))
    assert last["reward_scale"] == pytest.approx(3.0 / size, rel=1e-5)
    result, env = load(done.folders[0]).result, gym.make("test/Chain-v0", max_episode_steps=4)
    returns = play(double(last["actor"]), data, env, 9, 6 * 10**6 + 10**5)
    assert result["eval_return_mean"] == pytest.approx(returns.mean())
    assert result["normalized_return"] is result["random_return"] is result["reference_return"] is None
    row = rows_of(done.folders[0])[-1]  # fewer than ten episodes: one of them in between
    assert row["eval/return"] == play(double(last["actor"]), data, env, 1, 6 * 10**6).mean()
    assert math.isnan(row["charts/q_minus_return"])


def test_what_the_data_set_declares_counts(run, load, datasets, monkeypatch):
    """An action that no transition took, an evaluation environment of its own, a reference score of 0."""
    step, steps = conftest.Chain.step, []
    monkeypatch.setattr(conftest.Chain, "step", lambda env, action: (steps.append(action), step(env, action))[1])
    done = run("ersac_ensemble", *command(BASE | {"dataset_id": "test/declared-v0"}))
    assert done.code == 0, done.err
    result = load(done.folders[0]).result
    assert done.states[-1]["actor"]["net.4.weight"].shape[0] == 4
    assert len(steps) == 2 + 2 + 25  # two evaluations in between and the last one, an episode is one step
    assert result["normalized_return"] == pytest.approx(100 * result["eval_return_mean"] / 25)


class Named:
    """A data set that names an environment."""

    def __init__(self, env_id):
        self.env_id = env_id
        space = conftest.Chain.observation_space
        self.spec = SimpleNamespace(dataset_id="test/named-v0", observation_space=space)

    def recover_environment(self, eval_env):
        return gym.make(self.env_id)


def test_an_environment_without_a_time_limit_gets_one():
    if "test/Forever-v0" not in gym.registry:
        gym.register("test/Forever-v0", "conftest:Chain")
    env, steps, done = make_eval_env(Named("test/Forever-v0")), 0, False
    env.reset(seed=0)
    while not done:
        _, _, terminated, done, _ = env.step(2)  # action 2 waits for ever
        assert not terminated
        steps += 1
    assert steps == 10_000
    env = make_eval_env(Named("test/Chain-v0"))
    assert env.spec.max_episode_steps == 10


def test_speed_excludes_evaluation(run, load, datasets, monkeypatch):
    """With a clock that a minibatch moves by a quarter of a second and the start of an episode by a thousand."""
    now, randint, reset = [1e9], torch.randint, conftest.Chain.reset

    def slow(call, seconds):
        @functools.wraps(call)
        def wrapped(*arguments, **options):
            now[0] += seconds
            return call(*arguments, **options)

        return wrapped

    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "randint", slow(randint, 0.25))
    monkeypatch.setattr(conftest.Chain, "reset", slow(reset, 1000.0))
    done = run("ersac_ensemble", *command(BASE | {"total_updates": 6, "eval_interval": 3, "eval_episodes": 10}))
    assert done.code == 0, done.err
    assert [row["charts/updates_per_second"] for row in rows_of(done.folders[0])] == [4.0, 4.0]
    assert load(done.folders[0]).result["updates_per_second"] == 4.0


def problem(seed=0, N=6, B=40, D=3, A=4):
    """Random linear critics, target critics and policy, and a batch, all in float64."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    batch = draw(B, D), torch.randint(A, (B,), generator=g), draw(B), draw(B, D), (draw(B) > 1).double()
    return draw(N, D, A), draw(N, D, A), draw(D, A), batch


# ----- Proposition 3.1: with the box set, ERSAC is SAC-N
def sac_n_losses(theta, theta_target, phi, batch, alpha, gamma):
    """SAC-N as published: y(r, s', a') for every next action a', squared errors averaged over a' ~ pi, in loops."""
    s, a, r, s_next, done = batch
    pi = torch.softmax(s_next @ phi, -1)
    losses = []
    for w in theta:
        error = 0.0
        for a_next in range(phi.shape[1]):
            lowest = torch.stack([(s_next @ w_target)[:, a_next] for w_target in theta_target]).min(0).values
            y = r + gamma * (1 - done) * (lowest - alpha * pi[:, a_next].log())
            error = error + pi[:, a_next] * ((s @ w)[torch.arange(len(a)), a] - y) ** 2
        losses.append(error.mean())
    return torch.stack(losses)  # [N]


def test_box_critic_gradient_is_that_of_sac_n_and_the_losses_differ_by_the_proofs_constant():
    theta, theta_target, phi, batch = problem()
    s, a, r, s_next, done = batch
    alpha, gamma, N = 0.3, 0.9, len(theta)
    theta.requires_grad_()
    theirs = sac_n_losses(theta, theta_target, phi, batch, alpha, gamma).mean()  # (1 / N) sum_i L_Q(theta_i)
    (theirs_gradient,) = torch.autograd.grad(theirs, theta)
    log_pi = (s_next @ phi).log_softmax(-1)
    q_star = worst_case_box(torch.einsum("bd,nda->nba", s_next, theta_target), log_pi.exp())
    y = robust_target(r, done, log_pi.exp(), log_pi, q_star, alpha, gamma)
    ours = critic_loss(torch.einsum("bd,nda->nba", s, theta), a, y).mean(1).sum()
    (ours_gradient,) = torch.autograd.grad(ours, theta)
    torch.testing.assert_close(ours_gradient / N, theirs_gradient)
    # C: the variance of the sampled target over a' ~ pi, which no critic can change
    sampled = r[:, None] + gamma * (1 - done)[:, None] * (q_star - alpha * log_pi)  # y(r, s', a'), [B, A]
    mean = (log_pi.exp() * sampled).sum(-1, keepdim=True)
    constant = (log_pi.exp() * (sampled - mean) ** 2).sum(-1).mean()
    torch.testing.assert_close(theirs - ours / N, constant)
    assert constant > 0.01


def test_sac_n_with_sampled_next_actions_agrees_within_monte_carlo_error():
    theta, theta_target, phi, (s, a, r, s_next, done) = problem(1, B=8)
    alpha, gamma = 0.3, 0.9
    log_pi = (s_next @ phi).log_softmax(-1)
    lowest = torch.einsum("bd,nda->nba", s_next, theta_target).min(0).values
    draws = torch.multinomial(log_pi.exp(), 200_000, True, generator=torch.Generator().manual_seed(0))  # [B, draws]
    y = r[:, None] + gamma * (1 - done)[:, None] * (lowest - alpha * log_pi).gather(1, draws)
    q = torch.einsum("bd,nda->nba", s, theta)[:, torch.arange(8), a]  # [N, B]
    slope = 2 * (q[..., None] - y)  # d loss / d q, one sample each, [N, B, draws]
    exact = 2 * (q - robust_target(r, done, log_pi.exp(), log_pi, lowest, alpha, gamma))
    error = (slope.mean(-1) - exact).abs() / (slope.std(-1) / math.sqrt(200_000)).clamp(min=1e-12)
    assert error[:, done == 0].max() < 5 and (slope.mean(-1) - exact).abs().max() < 0.05


def test_box_actor_objective_and_gradient_are_those_of_sac_n():
    theta, _, phi, (s, *_) = problem(2)
    phi.requires_grad_()
    pi = torch.softmax(s @ phi, -1)
    lowest = torch.stack([s @ w for w in theta]).min(0).values
    theirs = (pi * (lowest - 0.3 * pi.log())).sum(-1).mean()  # J_pi, an expectation over a ~ pi
    log_pi = (s @ phi).log_softmax(-1)
    q = torch.einsum("bd,nda->nba", s, theta)
    ours = actor_loss(log_pi.exp(), log_pi, worst_case_box(q, log_pi.exp()), 0.3).mean()
    torch.testing.assert_close(-ours, theirs)
    torch.testing.assert_close(-torch.autograd.grad(ours, phi)[0], torch.autograd.grad(theirs, phi)[0])


# ----- the envelope theorem
@pytest.mark.parametrize("kind", SETS)
def test_holding_q_star_fixed_gives_the_exact_gradient(kind):
    theta, _, phi, (s, *_) = problem(3, N=9)
    q = torch.einsum("bd,nda->nba", s, theta)
    phi.requires_grad_()

    def objective(phi, fixed=None):
        log_pi = (s @ phi).log_softmax(-1)
        q_star = SETS[kind](q, log_pi.exp()) if fixed is None else fixed
        return ((log_pi.exp() * q_star).sum(-1) - 0.3 * (log_pi.exp() * log_pi).sum(-1)).mean()

    log_pi = (s @ phi).log_softmax(-1)
    with torch.no_grad():
        q_star = SETS[kind](q, log_pi.exp())
    (ours,) = torch.autograd.grad(-actor_loss(log_pi.exp(), log_pi, q_star, 0.3).mean(), phi)
    (full,) = torch.autograd.grad(objective(phi), phi)  # through the inner minimum
    torch.testing.assert_close(ours, full, rtol=1e-8, atol=1e-10)
    for i, j in itertools.product(range(phi.shape[0]), range(phi.shape[1])):
        step = torch.zeros_like(phi)
        step[i, j] = 1e-6
        with torch.no_grad():
            slope = (objective(phi + step) - objective(phi - step)) / 2e-6
        assert slope.item() == pytest.approx(ours[i, j].item(), abs=1e-6)


# ----- across scripts: one-hot states and linear critics are tables
@pytest.mark.parametrize("kind", SETS)
def test_one_update_equals_the_gradient_step_on_tables(kind):
    N, S, A, lr, alpha, gamma = 5, 6, 3, 0.1, 0.05, 0.9
    g = torch.Generator().manual_seed(4)
    q = torch.randn(N, S, A, generator=g, dtype=torch.float64)
    logits = torch.randn(S, A, generator=g, dtype=torch.float64)
    s, a, s_next = (torch.randint(n, (200,), generator=g) for n in (S, A, S))
    r = torch.randn(200, generator=g, dtype=torch.float64)
    # ersac_ensemble.py with one-hot observations and a weight matrix for each critic
    weight, phi = q.clone().requires_grad_(), logits.clone().requires_grad_()
    eye = torch.eye(S, dtype=torch.float64)
    log_pi = (eye[s_next] @ phi).log_softmax(-1).detach()
    q_star = SETS[kind](torch.einsum("bs,nsa->nba", eye[s_next], q), log_pi.exp())
    y = robust_target(r, torch.zeros(200), log_pi.exp(), log_pi, q_star, alpha, gamma)
    critic_loss(torch.einsum("bs,nsa->nba", eye[s], weight), a, y).mean(1).sum().backward()
    new_weight = weight.detach() - lr * weight.grad
    log_pi = (eye[s] @ phi).log_softmax(-1)
    q_star = SETS[kind](torch.einsum("bs,nsa->nba", eye[s], new_weight), log_pi.exp().detach())
    actor_loss(log_pi.exp(), log_pi, q_star, alpha).mean().backward()
    # ersac_tabular.py's functions on the tables: targets once per state, then counts
    worst = getattr(ersac_tabular, f"worst_case_{kind}")
    extra = (0.9,) if kind == "ellipsoid" else ()
    table_log_pi = logits.log_softmax(-1)
    table_star = worst(q, table_log_pi.exp(), *extra)
    table = q.clone()
    for state, act in itertools.product(range(S), range(A)):
        rows = ((s == state) & (a == act)).nonzero()[:, 0]
        if len(rows):
            nxt = s_next[rows]
            at_next = table_log_pi[nxt].exp(), table_log_pi[nxt], table_star[nxt]
            mean = ersac_tabular.robust_target(r[rows], 0.0, *at_next, alpha, gamma).mean()
            table[:, state, act] += lr * 2 * len(rows) / 200 * (mean - q[:, state, act])
    torch.testing.assert_close(new_weight, table)
    table_logits = logits.clone().requires_grad_()
    table_log_pi = table_logits.log_softmax(-1)
    star = worst(table, table_log_pi.exp().detach(), *extra)
    share = torch.bincount(s, minlength=S) / 200
    (ersac_tabular.actor_loss(table_log_pi.exp(), table_log_pi, star, alpha) * share).sum().backward()
    torch.testing.assert_close(phi.grad, table_logits.grad)


# ----- the stacked critics
def test_critics_start_like_independent_linear_layers():
    torch.manual_seed(0)
    critic = EnsembleCritic(8, 4, 300, 32)
    for weight, bias, fan_in in zip(critic.weights, critic.biases, (8, 32, 32)):
        layers = [torch.nn.Linear(fan_in, weight.shape[-1]) for _ in range(300)]
        for ours, theirs in ((weight, [l.weight for l in layers]), (bias, [l.bias for l in layers])):
            theirs = torch.stack([t.detach() for t in theirs])
            assert ours.abs().max() <= 1 / math.sqrt(fan_in) and ours.numel() == theirs.numel()
            assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.03)
            per_critic = ours.detach().flatten(1).std(1), theirs.flatten(1).std(1)
            assert per_critic[0].mean().item() == pytest.approx(per_critic[1].mean().item(), rel=0.05)


@pytest.mark.parametrize("layer_norm", [True, False])
def test_stack_equals_a_loop_over_critics_whatever_the_blocks(layer_norm):
    torch.manual_seed(1)
    critic = EnsembleCritic(5, 3, 7, 16, layer_norm).double()
    obs = torch.randn(11, 5, dtype=torch.float64)
    plain = []
    for n in range(7):
        h = obs
        for layer, (w, b) in enumerate(zip(critic.weights, critic.biases)):
            h = F.linear(h, w[n].T, b[n, 0])
            if layer < 2:
                h = F.relu(F.layer_norm(h, (16,)) if layer_norm else h)
        plain.append(h)
    plain = torch.stack(plain)
    weight = torch.randn_like(plain)
    expected = torch.autograd.grad((plain * weight).sum(), critic.parameters())
    for block in (1, 2, 3, 7, 10):
        critic.block = block
        out = critic(obs)
        torch.testing.assert_close(out, plain)
        for ours, theirs in zip(torch.autograd.grad((out * weight).sum(), critic.parameters()), expected):
            torch.testing.assert_close(ours, theirs)


# ----- losses
def test_critic_loss_against_loops():
    q, action, target = torch.randn(3, 5, 4), torch.tensor([0, 3, 1, 2, 2]), torch.randn(5)
    loss = critic_loss(q, action, target)
    assert loss.shape == (3, 5)
    for n, b in itertools.product(range(3), range(5)):
        assert loss[n, b].item() == pytest.approx((q[n, b, action[b]] - target[b]).item() ** 2, rel=1e-5)


def test_ensemble_similarity_against_all_pairs():
    g = torch.Generator().manual_seed(5)
    q = torch.randn(6, 9, 4, generator=g, dtype=torch.float64)
    q[2, 3] = 1.5  # a critic that sees no difference between actions contributes nothing
    q.requires_grad_()
    action = torch.randint(4, (9,), generator=g)
    total = torch.zeros(9, dtype=torch.float64)
    for b in range(9):
        for i in range(6):
            for j in range(i + 1, 6):
                x, y = (q[k, b] - q[k, b, action[b]] for k in (i, j))
                if x.norm() > 0 and y.norm() > 0:
                    total[b] = total[b] + x @ y / x.norm() / y.norm()
    ours = ensemble_similarity(q, action)
    torch.testing.assert_close(ours, total)
    (gradient,) = torch.autograd.grad(ours.sum(), q)
    (expected,) = torch.autograd.grad(total.sum(), q)
    torch.testing.assert_close(gradient, expected)
    assert gradient.isfinite().all()
    assert ensemble_similarity(torch.ones(3, 2, 4), torch.tensor([0, 1])).tolist() == [0.0, 0.0]


# ----- data
def test_dataset_names():
    assert dataset_name("LunarLander-v3", 0.9, 10_000) == "ersac/lunarlander/tau90-10k-v0"
    assert dataset_name("CartPole-v1", 0.05, 1234) == "ersac/cartpole/tau05-1234-v0"
    assert dataset_name("ersac/RiverSwim-v0", 0.125, 1000) == "ersac/riverswim/tau12p5-1k-v0"


def test_transitions_keep_terminations_truncations_and_returns_apart(datasets):
    dataset = minari.load_dataset("test/cartpole-v0")
    obs, action, reward, next_obs, terminated, returns = load_transitions(dataset, 0.9)
    assert len(obs) == len(action) == len(reward) == len(next_obs) == len(terminated) == len(returns) == 3000
    start = 0
    for episode in dataset.iterate_episodes():
        T = len(episode.rewards)
        part = slice(start, start + T)
        assert np.array_equal(obs[part], episode.observations[:-1].astype(np.float32))
        assert np.array_equal(next_obs[part], episode.observations[1:].astype(np.float32))
        assert np.array_equal(action[part], episode.actions) and np.array_equal(terminated[part], episode.terminations)
        if episode.terminations[-1]:
            expected = [sum(0.9**k * r for k, r in enumerate(episode.rewards[t:])) for t in range(T)]
            assert returns[part].numpy() == pytest.approx(expected, rel=1e-5)
        else:
            assert returns[part].isnan().all() and terminated[part].sum() == 0
        start += T
    assert terminated.sum() > 5 and returns.isnan().any()


def test_missing_data_set_of_ours_is_made(datasets, monkeypatch, capsys):
    commands = []

    def generate(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(ersac_ensemble.subprocess, "run", generate)
    with pytest.raises(SystemExit) as stop:
        ersac_ensemble.find_dataset(ersac_ensemble.Args(env_id="CartPole-v1", expectile_tau=0.9, dataset_size=1000))
    assert "ersac/cartpole/tau90-1k-v0 could not be made" in str(stop.value)
    words = " ".join(commands[0])
    assert "gen_expectile_data.py --env-id=CartPole-v1 --expectile-tau=0.9 --dataset-size=1000" in words
    assert words.endswith("--early-fraction=0.0 --dataset-seed=1")
    args = ersac_ensemble.Args(env_id="CartPole-v1", dataset_size=3000)
    assert ersac_ensemble.find_dataset(args).spec.dataset_id == "ersac/cartpole/tau50-3k-v0" and len(commands) == 1


# ----- the script
def interrupted(run, monkeypatch, update, *arguments):
    """A run with Ctrl-C during that update."""
    randint, calls = torch.randint, []

    def draw(*shape, **options):
        calls.append(shape)
        if len(calls) == update:
            signal.raise_signal(signal.SIGINT)
        return randint(*shape, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "randint", draw)
        done = run("ersac_ensemble", *arguments)
    assert done.code == 130 and "--resume" in done.out and len(calls) == update
    return done


@pytest.mark.parametrize(
    "flags",
    [
        "--uncertainty-set hull --bootstrap",
        "--uncertainty-set ellipsoid --autotune",
        "--uncertainty-set box --edac-eta 1 --targets shared --prior-scale 0",
        "--no-normalize-obs --return-scale None --no-layer-norm --no-anneal-lr",
    ],
)
def test_interrupted_run_resumes_to_the_same_bits(run, load, datasets, monkeypatch, flags):
    flags = (*SMALL, *flags.split())
    done = run("ersac_ensemble", *flags)
    assert done.code == 0, done.err
    whole = load(done.folders[0])
    assert [line.split(",")[0] for line in whole.metrics] == ["update", "12", "24"]
    (folder,) = interrupted(run, monkeypatch, 15, *flags, "--exp-name", "stopped").folders
    part = load(folder)
    assert part.result is None and part.checkpoint["update"] == 12 and part.metrics == whole.metrics[:2]
    rest = run("ersac_ensemble", "--resume", folder)
    assert rest.code == 0, rest.err
    again = load(folder)
    assert again.metrics == whole.metrics
    for name in ("critic", "target", "actor"):
        for key, value in whole.checkpoint[name].items():
            assert torch.equal(value, again.checkpoint[name][key]), (name, key)
    for name in ("log_alpha", "generator"):
        assert torch.equal(whole.checkpoint[name], again.checkpoint[name])
    for result in (whole.result, again.result):
        assert result.pop("updates_per_second") > 0
    assert whole.result == again.result


def test_same_seed_same_numbers_other_seed_other_numbers(run, load, datasets):
    first, second, third = (
        load(run("ersac_ensemble", *SMALL, "--seed", seed, "--exp-name", name).folders[0])
        for seed, name in ((3, "a"), (3, "b"), (4, "c"))
    )
    assert first.metrics == second.metrics and first.metrics != third.metrics


def test_environment_with_its_default_data_set(run, load, datasets):
    flags = ("--env-id", "CartPole-v1", "--dataset-size", 3000, *SHORT, "--num-critics", 2, "--hidden-dim", 8)
    done = run("ersac_ensemble", *flags)
    assert done.code == 0, done.err
    (folder,) = done.folders
    result = load(folder).result
    assert folder.name.startswith("CartPole-v1__ersac_ensemble__1__")
    assert result["env_id"] == "CartPole-v1" and result["dataset_id"] == "ersac/cartpole/tau50-3k-v0"
    data = plain_data("ersac/cartpole/tau50-3k-v0", 0.99)
    returns = play(double(done.states[-1]["actor"]), data, gym.make("CartPole-v1"), 3, 2 * 10**6 + 10**5)
    assert result["eval_return_mean"] == returns.mean()


def test_the_docs_page_explains_every_column(run, datasets):
    page = (ROOT / "docs" / "ersac_ensemble.md").read_text()
    explained = re.findall(r"^\| `(\w+/\w+)` \|", page, re.MULTILINE)
    (folder,) = run("ersac_ensemble", *SMALL).folders
    assert sorted(explained) == sorted(set(rows_of(folder)[0]) - {"update"})


def test_wandb_gets_what_the_run_folder_gets(run, load, datasets, monkeypatch):
    got = SimpleNamespace(rows=[], summary={}, options=None, finished=0)

    def init(**options):
        got.options = options
        log = lambda row, step: got.rows.append(row | {"update": step})  # noqa: E731
        finish = lambda: setattr(got, "finished", got.finished + 1)  # noqa: E731
        return SimpleNamespace(log=log, summary=got.summary, finish=finish, step=0)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    flags = ("--track", "--wandb-project-name", "project", "--wandb-entity", "team")
    done = run("ersac_ensemble", *SMALL, *flags)
    assert done.code == 0, done.err
    (folder,) = done.folders
    assert got.options["id"] == got.options["name"] == folder.name and got.options["config"]["hidden_dim"] == 16
    assert got.options["project"] == "project" and got.options["entity"] == "team"
    assert got.rows == rows_of(folder) and len(got.rows) == 2 and got.finished == 1
    assert got.summary == load(folder).result


BAD = [
    ("--upsilon 0", "upsilon"),
    ("--upsilon 1.5", "upsilon"),
    ("--gamma 1", "gamma"),
    ("--alpha 0 --autotune", "alpha"),
    ("--edac-eta 1", "box"),
    ("--edac-eta 1 --uncertainty-set box --targets own", "shared targets"),
    ("--edac-eta 1 --uncertainty-set box --prior-scale 1", "no prior"),
    ("--total-updates 0", "total-updates"),
    ("--uncertainty-set ball", "uncertainty-set"),
    ("--resume nowhere", "nowhere"),
    ("--dataset-id test/pendulum-v0", "discrete actions"),
    ("--dataset-id test/text-v0", "not vectors"),
    ("--dataset-id test/pictures-v0", "ersac_atari.py"),
    ("--dataset-id cartpole", "end in a version"),
    ("--dataset-id test/nan-v0", "not finite"),
    ("--dataset-id test/ragged-v0", "T + 1"),
    ("--output-dir /proc/nowhere", "output-dir"),
]


@pytest.mark.parametrize("arguments, named", BAD)
def test_bad_input_ends_in_one_clear_line(run, datasets, tmp_path, arguments, named):
    data = () if "dataset-id" in arguments else DATA
    done = run("ersac_ensemble", *data, *SHORT, *arguments.split())
    assert done.code in (1, 2) and named in done.err and "Traceback" not in done.err, done.err
    if done.code == 1:
        assert len(done.err.strip().splitlines()) == 1
    assert list(tmp_path.glob("runs/**/*.json")) == []


def test_unknown_environment_and_foreign_id(run, datasets, monkeypatch):
    def offline(name, **_):
        raise ConnectionError("no network")

    monkeypatch.setattr("minari.storage.hosting.download_dataset", offline)
    done = run("ersac_ensemble", "--env-id", "Nowhere-v0")
    assert done.code == 1 and "--env-id Nowhere-v0" in done.err
    done = run("ersac_ensemble", "--dataset-id", "nobody/nothing-v0")
    assert done.code == 1 and "nobody/nothing-v0" in done.err and len(done.err.strip().splitlines()) == 1


def test_checkpoint_acts_in_five_lines(run, load, datasets):
    """The snippet of docs/ersac_ensemble.md."""
    (folder,) = run("ersac_ensemble", *SMALL, "--hidden-dim", 16).folders
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    actor = Actor(len(checkpoint["obs_mean"]), checkpoint["num_actions"], checkpoint["args"]["hidden_dim"])
    actor.load_state_dict(checkpoint["actor"])
    obs, _ = gym.make("CartPole-v1").reset(seed=0)
    action = actor((torch.tensor(obs) - checkpoint["obs_mean"]) / checkpoint["obs_std"]).argmax().item()
    assert action in (0, 1)


def test_video_of_the_final_evaluation(run, datasets):
    done = run("ersac_ensemble", *SMALL, "--capture-video")
    assert done.code == 0, done.err
    (video,) = (done.folders[0] / "video").glob("*.mp4")
    assert video.stat().st_size > 1000


def test_runs_as_a_real_process(datasets, tmp_path):
    command = [sys.executable, str(ROOT / "ersac_ensemble.py"), *map(str, SMALL), "--output-dir", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MINARI_DATASETS_PATH": str(datasets)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert result["method"] == "ERSAC-Ell-N-own" and str(folder) in done.stdout
