"""ersac_atari.py: the loop against plain code, frames and stacks bit for bit, baselines by hand, scripts end to end."""

import csv
import functools
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import warnings
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ale_py
import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tyro
import yaml
from minari.data_collector import EpisodeBuffer
from scipy import stats

import ersac_atari
from ersac_atari import (
    METHODS,
    EnsembleHeads,
    EpinetHeads,
    PixelActor,
    PixelNetwork,
    bcq_filter,
    brac_kl,
    cql_penalty,
    decode,
    expectile_loss,
    load_frames,
    make_atari_env,
    n_step,
    play,
    stack,
    worst_case_box,
    worst_case_ellipsoid,
    worst_case_gaussian,
    worst_case_hull,
)

DATA = ("--dataset-id", "test/pong-v0")
SHORT = ("--total-updates", 6, "--eval-interval", 3, "--eval-episodes", 2)
T = 24  # steps of an episode
SMALL = (*SHORT, "--hidden-dim", 16, "--batch-size", 4, "--num-critics", 5, "--index-dim", 3)
SMALL += ("--clone-updates", 3, "--critic-warmup", 1)
WALK = ("--dataset-id", "test/walk-v0", *SMALL)


def pong(steps=T):
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    return gym.make("ALE/Pong-v5", repeat_action_probability=0.0, frameskip=4, max_episode_steps=steps)


def pong_episodes(count, seed):
    """Episodes of T random steps, cut by the time limit; the last one is declared a termination."""
    env, rng, buffers = pong(), np.random.default_rng(seed), []
    for i in range(count):
        obs, _ = env.reset(seed=i)
        frames, actions, rewards = [obs], rng.integers(6, size=T), []
        for action in actions:
            obs, reward, *_ = env.step(action)
            frames.append(obs)
            rewards.append(reward)
        rewards[20] = 3.0  # to be clipped for learning
        end, last = np.arange(T) == T - 1, i == count - 1
        ends = {"terminations": end & last, "truncations": end & (not last)}
        columns = {"observations": np.array(frames), "actions": actions, "rewards": np.array(rewards)}
        buffers.append(EpisodeBuffer(id=i, **columns, **ends))
    return env, buffers


def store(name, buffers, env, **extra):
    with warnings.catch_warnings(action="ignore"):
        return minari.create_dataset_from_buffers(name, buffers, env=env, jpeg_encoding=False, **extra)


@pytest.fixture(scope="module")
def games(datasets):
    """test/pong-v0: three episodes of T steps, with reference scores; the two others must be refused."""
    if "test/pong-v0" not in minari.list_local_datasets():  # another module may have made them
        env, buffers = pong_episodes(3, 0)
        dataset = store("test/pong-v0", buffers, env, ref_min_score=-21.0, ref_max_score=1.0)
        load_frames(dataset, None)  # now, so that no run shows that it decodes
        broken = replace(buffers[0], rewards=np.full(T, np.nan))
        store("test/pong-nan-v0", [broken], env)
        store("test/pong-ragged-v0", [replace(buffer, id=0) for buffer in buffers[:2]], env)
    return datasets


# ----- a game of 84x84 grey noise with a bright block in it, so that frames need no decoding
class Walk(gym.Env):
    """Nine places in a row, the block shows where one is. Action 0 waits, 1 goes left, 2 right, 3 jumps by up to two
    places either way. The middle ends an episode with 3, the ends of the row with -2; a step costs 0.25, a jump 0.5."""

    observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gym.spaces.Discrete(4)
    stepped = lambda env: None  # noqa: E731, called at every step

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.choice([1, 2, 3, 5, 6, 7]))
        return self.observe(), {}

    def observe(self):
        frame = self.np_random.integers(0, 40, (84, 84), dtype=np.uint8)
        frame[20:60, 9 * self.place : 9 * self.place + 9] += 200
        return frame

    def step(self, action):
        self.stepped()
        jump = int(self.np_random.integers(-2, 3))
        self.place = int(np.clip(self.place + (0, -1, 1, jump)[action], 0, 8))
        reward = -0.5 if action == 3 else -0.25
        if self.place in (0, 4, 8):
            reward += 3.0 if self.place == 4 else -2.0
        return self.observe(), reward, self.place in (0, 4, 8), False, {}


if "test/Walk-v0" not in gym.registry:
    gym.register("test/Walk-v0", "test_atari:Walk", max_episode_steps=6)
    gym.register("test/WalkForever-v0", "test_atari:Walk")


def walk_episodes(steps, seed):
    """Random play, exactly `steps` transitions: terminations, truncations after six steps, the last episode is cut."""
    env, rng, buffers = gym.make("test/Walk-v0"), np.random.default_rng(seed), []
    while steps > 0:
        obs, done = env.reset(seed=int(rng.integers(2**31)))[0], False
        columns = {name: [] for name in ("observations", "actions", "rewards", "terminations", "truncations")}
        columns["observations"].append(obs)
        while not done and steps > 0:
            action = int(rng.integers(4))
            obs, reward, terminated, truncated, _ = env.step(action)
            steps, done = steps - 1, terminated or truncated
            for name, value in zip(columns, (obs, action, reward, terminated, truncated or (steps == 0 and not done))):
                columns[name].append(value)
        buffers.append(EpisodeBuffer(id=len(buffers), **{name: np.array(x) for name, x in columns.items()}))
    return buffers


@pytest.fixture(scope="module")
def walks(datasets):
    """test/walk-v0 for the oracle, test/walk-large-v0 to learn from, test/walk-long-v0 with more frames than are used
    for their mean; they are evaluated in episodes of up to 40 steps. test/walk-forever-v0 has no time limit."""
    if "test/walk-v0" not in minari.list_local_datasets():
        env, longer = gym.make("test/Walk-v0"), gym.make("test/Walk-v0", max_episode_steps=40)
        extra = {"eval_env": longer, "ref_min_score": -7.0, "ref_max_score": 1.5}
        store("test/walk-v0", walk_episodes(72, 0), env, **extra)
        store("test/walk-large-v0", walk_episodes(800, 1), env, **extra)
        store("test/walk-forever-v0", walk_episodes(5, 2), gym.make("test/WalkForever-v0"))
        frames = np.random.default_rng(0).integers(0, 256, (5200, 84, 84), dtype=np.uint8)
        columns = {"actions": np.arange(5199) % 4, "rewards": np.ones(5199), "terminations": np.arange(5199) == 5198}
        long = EpisodeBuffer(id=0, observations=frames, truncations=np.zeros(5199, bool), **columns)
        store("test/walk-long-v0", [long], env, eval_env=longer)
    return datasets


# ----- the oracle: all seven methods once more, in float64, from the first checkpoint and the raw episodes
FROZEN = ("mean", "std", "heads.prior")
ENSEMBLES = ("sac-n", "ersac-ch-n", "ersac-ell-n")
FLAGS = {  # all away from their defaults, and such that each of them matters
    "dataset_id": "test/walk-v0",
    "seed": 5,
    "upsilon": 0.6,
    "num_critics": 7,
    "index_dim": 3,
    "prior_scale": 0.6,
    "noise_scale": 0.4,
    "cql_weight": 0.7,
    "iql_expectile": 0.8,
    "iql_beta": 1.5,
    "bcq_threshold": 0.7,
    "brac_weight": 0.6,
    "clone_updates": 2,
    "critic_warmup": 1,
    "bc_coef": 0.4,
    "total_updates": 3,
    "batch_size": 6,
    "hidden_dim": 8,
    "gamma": 0.8,
    "n_step": 3,
    "q_lr": 3e-3,
    "policy_lr": 2e-3,
    "anneal_lr": True,
    "polyak": 0.3,
    "alpha": 0.5,
    "eval_interval": 2,
    "eval_episodes": 3,
    "eval_epsilon": 0.2,
}


def command_line(flags):
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
        else:
            words += [f"--{name.replace('_', '-')}", value]
    return words


@functools.cache
def raw_episodes(dataset_id):
    return list(minari.load_dataset(dataset_id).iterate_episodes())


def plain_transitions(dataset_id, gamma, n):
    """The transitions of a data set, stacks and n-step sums from the raw episodes."""
    rows = []
    for episode in raw_episodes(dataset_id):
        length = len(episode.actions)
        for t in range(length):
            end = min(t + n, length)
            stacks = [np.stack([episode.observations[max(k, 0)] for k in range(x - 3, x + 1)]) for x in (t, end)]
            reward = sum(gamma ** (k - t) * min(max(episode.rewards[k], -1.0), 1.0) for k in range(t, end))
            row = SimpleNamespace(s=stacks[0], s_next=stacks[1], a=int(episode.actions[t]), r=float(reward))
            row.ended, row.t, row.steps = bool(episode.terminations[end - 1]), t, end - t
            row.bootstrap = 0.0 if row.ended else gamma**row.steps
            row.clipped = max(abs(episode.rewards[t:end])) > 1
            later = [gamma ** (k - t) * min(max(episode.rewards[k], -1.0), 1.0) for k in range(t, length)]
            row.followed = sum(later) if episode.terminations[-1] else None
            rows.append(row)
    return rows


def convolve(w, stacks):
    """What critic and actor read. [B, 3136]"""
    x = (torch.tensor(np.stack(stacks)).to(w["mean"].dtype) - w["mean"]) / w["std"]
    for layer, stride in (("0", 4), ("2", 2), ("4", 1)):
        x = F.conv2d(x, w[f"cnn.{layer}.weight"], w[f"cnn.{layer}.bias"], stride=stride).clamp(min=0)
    return x.reshape(len(x), -1)


def dense(w, name, x):
    """A layer of weights, normalised, without what is negative. [B, H]"""
    x = linear(w, f"{name}.0", x)
    x = x - x.mean(-1, keepdim=True)
    x = x / ((x**2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return (x * w[f"{name}.1.weight"] + w[f"{name}.1.bias"]).clamp(min=0)


def encode(w, stacks):
    """The features of a critic with weights w. [B, H]"""
    return dense(w, "dense", convolve(w, stacks))


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def weights(part):
    return {k: v.double().clone().requires_grad_(not k.startswith(FROZEN)) for k, v in part.items()}


def learned(w):
    return [v for v in w.values() if v.requires_grad]


class Oracle:
    def __init__(self, state, algo, flags):
        self.algo, self.flags = algo, SimpleNamespace(**flags)
        self.critic, self.target, self.actor = (weights(state[x]) for x in ("critic", "target", "actor"))
        self.q_adam = torch.optim.Adam(learned(self.critic))
        self.policy_adam = torch.optim.Adam(learned(self.actor))
        self.clipped = 0

    def outputs(self, w, psi):
        """What the heads make of the features: q [N, B, A], or mean [B, A] and spread [B, A, d_z]."""
        prior_scale = self.flags.prior_scale
        if self.algo == "ersac-ell-epi-star":
            parts = []
            for name in ("learnable", "prior"):
                hidden = linear(w, f"heads.{name}.0", psi.detach()).clamp(min=0)
                parts.append(linear(w, f"heads.{name}.2", hidden).reshape(len(psi), 4, self.flags.index_dim))
            return linear(w, "heads.mean", psi), parts[0] + prior_scale * parts[1]
        own, prior = linear(w, "heads.learnable", psi), linear(w, "heads.prior", psi.detach())
        every = own + (prior_scale * prior if self.algo in ENSEMBLES else 0)
        return torch.stack([every[:, k : k + 4] for k in range(0, every.shape[1], 4)])

    def policy(self, w, x):
        """pi, log pi and BRAC-BCQ's log b, from x, the convolutions of network w. Where pi = 0, log pi is finite and
        means nothing. [B, A] each"""
        logits = linear(self.actor, "net.3", dense(self.actor, "net", x))
        allowed, log_b = torch.ones_like(logits), None
        if self.algo == "brac-bcq":
            log_b = linear(w, "behaviour", dense(w, "dense", x)).detach().log_softmax(-1)
            b = log_b.exp()
            allowed = (b > self.flags.bcq_threshold * b.max(-1, keepdim=True).values).double()
        log_pi = logits - (allowed * logits.exp()).sum(-1, keepdim=True).log()
        return allowed * log_pi.exp(), log_pi, log_b

    def worst(self, output, pi):
        """The worst case of one state after the other, without gradient. [B, A]"""
        rows = []
        for i, p in enumerate(pi.detach().numpy()):
            if self.algo == "ersac-ell-epi-star":
                mu, spread = output[0][i].detach().numpy(), output[1][i].detach().numpy()
                sigma = spread @ spread.T
                radius = math.sqrt(stats.chi2.ppf(self.flags.upsilon, 4))
                rows.append(mu - radius * sigma @ p / math.sqrt(p @ sigma @ p))
                continue
            q = output[:, i].detach().numpy()  # [N, A]
            if self.algo == "ersac-ch-n":
                rows.append(min(q, key=lambda values: values @ p))
            elif self.algo == "ersac-ell-n":
                mu, sigma = q.mean(0), np.cov(q.T, bias=True)
                distances = sorted((x - mu) @ np.linalg.inv(sigma) @ (x - mu) for x in q)
                radius = math.sqrt(distances[math.ceil(self.flags.upsilon * len(q)) - 1])
                rows.append(mu - radius * sigma @ p / math.sqrt(p @ sigma @ p))
            else:
                rows.append(q.min(0))
        return torch.tensor(np.stack(rows))

    def value(self, pi, log_pi, log_b, q_star):
        """What a policy is worth: <pi, q*> + alpha H(pi), for BRAC-BCQ less the divergence from b. [B]"""
        worth = (pi * q_star).sum(-1) - self.flags.alpha * (pi * log_pi).sum(-1)
        if self.algo == "brac-bcq":
            worth = worth - self.flags.brac_weight * (pi * (log_pi - log_b)).sum(-1)
        return worth

    def step(self, adam, lr, loss):
        adam.param_groups[0]["lr"] = lr
        adam.zero_grad()
        loss.backward()
        adam.step()

    def clone(self, batches):
        convolutions = [value for key, value in self.critic.items() if key.startswith("cnn")]
        adam = torch.optim.Adam([*learned(self.actor), *convolutions])
        for k, batch in enumerate(batches):
            hidden = dense(self.actor, "net", convolve(self.critic, [x.s for x in batch]))
            log_pi = linear(self.actor, "net.3", hidden).log_softmax(-1)
            loss = -sum(log_pi[i, x.a] for i, x in enumerate(batch)) / len(batch)
            self.step(adam, self.flags.policy_lr * (len(batches) - k) / len(batches), loss)
        for key, value in self.critic.items():
            self.target[key].data = value.data.clone()

    def update(self, number, batch, directions):
        flags, algo, B = self.flags, self.algo, len(batch)
        s, s_next = [x.s for x in batch], [x.s_next for x in batch]
        star = algo == "ersac-ell-epi-star"
        left = (flags.total_updates - number + 1) / flags.total_updates if flags.anneal_lr else 1.0

        # targets
        with torch.no_grad():
            if algo == "iql":
                follow = linear(self.critic, "value", encode(self.critic, s_next))[:, 0]
                both = self.outputs(self.target, encode(self.target, s))
                q_old = torch.stack([min(both[0, i, x.a], both[1, i, x.a]) for i, x in enumerate(batch)])
            else:
                pi, log_pi, log_b = self.policy(self.target, convolve(self.target, s_next))
                q_star = self.worst(self.outputs(self.target, encode(self.target, s_next)), pi)
                follow = self.value(pi, log_pi, log_b, q_star)
            y = [x.r + x.bootstrap * follow[i] for i, x in enumerate(batch)]

        # critic
        seen = convolve(self.critic, s)
        psi = dense(self.critic, "dense", seen)
        output = self.outputs(self.critic, psi)
        losses, extra = [], torch.zeros(())
        for i, x in enumerate(batch):
            if star:
                noise = flags.noise_scale * directions[i]
                losses.append((output[0][i, x.a] - y[i]) ** 2 + ((output[1][i, x.a] - noise) ** 2).sum())
                continue
            for q in output:
                losses.append((q[i, x.a] - y[i]) ** 2)
                if algo == "cql":
                    extra = extra + flags.cql_weight / B * (q[i].exp().sum().log() - q[i, x.a])
        if algo == "iql":
            errors = q_old - linear(self.critic, "value", psi)[:, 0]
            for error in errors:
                extra = extra + (flags.iql_expectile if error > 0 else 1 - flags.iql_expectile) * error**2 / B
        if algo == "brac-bcq":
            logits = linear(self.critic, "behaviour", psi)
            for i, x in enumerate(batch):
                extra = extra - logits.log_softmax(-1)[i, x.a] / B
            extra = extra + 0.01 * (logits**2).mean()
        self.step(self.q_adam, flags.q_lr * left, sum(losses) / B + extra)

        # actor: the convolutions from before the critic's step, all else from after it
        pi, log_pi, log_b = self.policy(self.critic, seen.detach())
        with torch.no_grad():
            psi = dense(self.critic, "dense", seen)
            output, v = self.outputs(self.critic, psi), linear(self.critic, "value", psi)[:, 0]
            q_star = self.worst(output, pi)
        loss = -self.value(pi, log_pi, log_b, q_star).mean()
        for i, x in enumerate(batch):
            if star or algo in ENSEMBLES:
                loss = loss - flags.bc_coef * log_pi[i, x.a] / B
        if algo == "iql":
            likely = [min(math.exp(flags.iql_beta * (q_old[i] - v[i])), 100.0) for i in range(B)]
            loss = -sum(likely[i] * log_pi[i, x.a] for i, x in enumerate(batch)) / B
            self.clipped += likely.count(100.0)
        if number > flags.critic_warmup:
            self.step(self.policy_adam, flags.policy_lr * left, loss)

        # target critic
        for key, value in self.target.items():
            value.data += flags.polyak * (self.critic[key].data - value.data)

        # metrics
        mu = output[0] if star else sum(output) / len(output)
        std = (output[1] ** 2).sum(-1).sqrt() if star else (sum((q - mu) ** 2 for q in output) / len(output)).sqrt()
        data = [(i, x.a) for i, x in enumerate(batch)]
        known = [(i, x) for i, x in enumerate(batch) if x.followed is not None]
        others = [(i, k) for i, x in enumerate(batch) for k in range(4) if k != x.a]
        mean = lambda values: sum(x.item() if torch.is_tensor(x) else x for x in values) / len(values)  # noqa: E731
        return {
            "update": number,
            "losses/critic_loss": mean(losses),
            "losses/extra": extra.item(),
            "losses/actor_loss": loss.item(),
            "charts/policy_entropy": -mean((pi * log_pi).sum(-1)),
            "charts/q_data_actions": mean([mu[k] for k in data]),
            "charts/q_minus_return": mean([mu[i, x.a] - x.followed for i, x in known]) if known else math.nan,
            "charts/q_star_minus_return": mean([q_star[i, x.a] - x.followed for i, x in known]) if known else math.nan,
            "charts/q_robust": mean((pi * q_star).sum(-1)),
            "charts/q_gap": mean((pi * (mu - q_star)).sum(-1)),
            "charts/agreement": mean([pi[i].argmax() == x.a for i, x in enumerate(batch)]),
            "charts/std_data_actions": mean([std[k] for k in data]),
            "charts/std_other_actions": mean([std[k] for k in others]),
        }

    def returns(self, episodes, first_seed, epsilon):
        """Greedy play, an episode after the other: up to 30 no-ops, then the likeliest action, or a random one."""
        totals = []
        for seed in range(first_seed, first_seed + episodes):
            env, rng = gym.make("test/Walk-v0", max_episode_steps=40), np.random.default_rng(seed)
            no_ops, total = rng.integers(31), 0.0
            seen = [env.reset(seed=seed)[0]] * 4
            for t in itertools.count():
                action = rng.integers(4) if rng.random() < epsilon else None
                if t < no_ops:
                    action = 0
                elif action is None:
                    with torch.no_grad():
                        x = convolve(self.critic, [np.stack(seen[-4:])])
                        action = self.policy(self.critic, x)[0][0].argmax().item()
                obs, reward, terminated, truncated, _ = env.step(action)
                seen.append(obs)
                total += reward
                if terminated or truncated:
                    break
            totals.append(total)
        return totals


def close(ours, theirs, start, share, what):
    """Tensor by tensor: the way from the start is the same up to a share of its length; what rests, rests exactly."""
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        way, off = (ours[key].detach() - start[key]).norm(), (ours[key].detach() - value).norm()
        assert off <= share * way, (what, key, off.item(), way.item())


def read_rows(folder):
    with open(folder / "metrics.csv") as f:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(f)]


# a seed with which no gradient is so near to 0 that rounding decides Adam's first steps
VARIANTS = [(algo, {"n_step": n, "seed": 7}) for algo in METHODS for n in (1, 3)]
VARIANTS += [
    ("iql", {"iql_beta": 40.0, "seed": 7}),  # some weights are above 100
    ("sac-n", {"clone_updates": 0, "critic_warmup": 0, "anneal_lr": False}),
    ("ersac-ell-epi-star", {"clone_updates": 3, "critic_warmup": 2, "anneal_lr": False}),
]


@pytest.mark.parametrize("algo, changes", VARIANTS, ids=[f"{algo}-{changes}" for algo, changes in VARIANTS])
def test_three_updates_in_plain_code(run, load, walks, algo, changes):
    flags = FLAGS | changes
    done = run("ersac_atari", *command_line(flags), "--algo", algo)
    assert done.code == 0, done.err
    first, last = done.states[0], done.states[-1]
    assert first["update"] == 0 and last["update"] == 3

    # the start: frames scaled by all frames of the data, N heads or two, the target critic a copy, priors of their own
    frames = np.concatenate([episode.observations for episode in raw_episodes("test/walk-v0")]).astype(np.float64)
    for part in ("critic", "target"):
        assert np.allclose(first[part]["mean"], frames.mean(0), rtol=1e-5)
        assert first[part]["std"].item() == pytest.approx(np.sqrt(np.mean((frames - frames.mean(0)) ** 2)), rel=1e-5)
    if algo != "ersac-ell-epi-star":
        assert len(first["critic"]["heads.learnable.bias"]) == 4 * (flags["num_critics"] if algo in ENSEMBLES else 2)
    assert all(torch.equal(value, first["target"][key]) for key, value in first["critic"].items())
    assert not torch.equal(first["critic"]["dense.0.weight"], first["actor"]["net.0.weight"])
    for key, value in first["critic"].items():
        assert "prior" not in key or not torch.equal(value, first["critic"][key.replace("prior", "learnable")])

    # the draws: minibatches from a generator of their own, directions first of all from the global one
    seed, B = flags["seed"], flags["batch_size"]
    data = plain_transitions("test/walk-v0", flags["gamma"], flags["n_step"])
    generator, clones = torch.Generator().manual_seed(seed), flags["clone_updates"]
    drawn = [torch.randint(len(data), (B,), generator=generator) for _ in range(clones + 3)]
    batches = [[data[i] for i in index] for index in drawn]
    c = torch.randn(len(data), flags["index_dim"], generator=torch.Generator().manual_seed(seed)).double()
    c = c / c.norm(dim=-1, keepdim=True)
    used = [x for batch in batches[clones:] for x in batch]
    assert {x.ended for x in used} == {x.clipped for x in used} == {False, True}
    assert {0, 1, 2, 3} <= {min(x.t, 3) for x in used} and len({x.steps for x in used}) == flags["n_step"]
    assert any(x.steps < flags["n_step"] and not x.ended for x in used) or flags["n_step"] == 1  # a cut episode

    # the updates, and an evaluation for every row
    oracle, rows = Oracle(first, algo, flags), []
    oracle.clone(batches[:clones])
    for k in (1, 2, 3):
        rows.append(oracle.update(k, batches[clones + k - 1], c[drawn[clones + k - 1]]))
        scores = oracle.returns(1, 10**6 * (seed + 1), flags["eval_epsilon"])
        rows[-1] |= {"eval/return": scores[0], "eval/distinct_returns": 1}
    for part in ("critic", "target", "actor"):
        close(getattr(oracle, part), last[part], first[part], 0.05, part)
    for name, adam in (("q_optimizer", oracle.q_adam), ("policy_optimizer", oracle.policy_adam)):
        ours, theirs = adam.state_dict()["state"], last[name]["state"]
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            x, y = ({i: state[moment] for i, state in states.items()} for states in (ours, theirs))
            close(x, y, dict.fromkeys(x, 0.0), 0.01 if moment != "step" else 0, (name, moment))
    if changes.get("iql_beta") == 40:
        assert 0 < oracle.clipped < 3 * B

    # metrics.csv, result.json, args.json, what is printed
    theirs = read_rows(done.folders[0])
    assert [row.pop("charts/updates_per_second") > 0 for row in theirs] == [True, True]
    for ours, row in zip(rows[1:], theirs):  # every second update, and the last one
        assert row == pytest.approx(ours, rel=1e-3, abs=1e-6)
    folder = load(done.folders[0])
    scores = np.array(oracle.returns(3, 10**6 * (seed + 1) + 10**5, flags["eval_epsilon"]))
    with torch.no_grad():
        pi, log_pi, _ = oracle.policy(oracle.critic, convolve(oracle.critic, [x.s for x in data]))
    label = f"Ell_{flags['upsilon']:g}-N" if algo == "ersac-ell-n" else METHODS[algo].removeprefix("ERSAC-")
    words = {
        "script": "ersac_atari.py",
        "method": METHODS[algo],
        "label": label,
        "env_id": "test/Walk-v0",
        "dataset_id": "test/walk-v0",
    }
    assert {name: folder.result.pop(name) for name in words} == words
    expected = {
        "seed": seed,
        "updates": 3,
        "eval_episodes": 3,
        "eval_return_mean": scores.mean(),
        "eval_return_std": np.sqrt(np.mean((scores - scores.mean()) ** 2)),
        "eval_distinct_returns": len(set(scores)),
        "random_return": -7.0,
        "reference_return": 1.5,
        "normalized_return": 100 * (scores.mean() + 7.0) / 8.5,
        "policy_entropy": -(pi * log_pi).sum(-1).mean().item(),
    }
    assert folder.result.pop("updates_per_second") > 0
    assert folder.result.pop("eval_returns") == pytest.approx(scores.tolist())
    assert folder.result == pytest.approx(expected, rel=1e-3)
    assert {name: folder.args[name] for name in flags} == flags and folder.args["algo"] == algo
    assert done.folders[0].name.split("__")[:3] == ["Walk-v0", "ersac_atari", str(seed)]
    assert f"ersac_atari.py, {label} on test/walk-v0: return {scores.mean():.1f} over 3 episodes\n" in done.out
    scale = "(0 is a return of -7.0, 100 is 1.5: the data set's reference scores)"
    assert f"\nnormalized return {expected['normalized_return']:.1f} {scale}\n" in done.out


def test_learning_to_walk_from_random_play(run, load, walks):
    """80 small updates suffice to walk to the middle from either side; an actor that climbs down walks away from it."""
    flags = FLAGS | {"dataset_id": "test/walk-large-v0", "seed": 2, "upsilon": 0.9, "prior_scale": 0.03}
    flags |= {"noise_scale": 0.001, "clone_updates": 0, "critic_warmup": 0, "bc_coef": 0.0, "total_updates": 80}
    flags |= {"batch_size": 8, "hidden_dim": 32, "n_step": 4, "q_lr": 2e-3, "policy_lr": 2e-3, "polyak": 0.2}
    flags |= {"alpha": 0.02, "eval_interval": 100, "eval_episodes": 20, "eval_epsilon": 0.0}
    done = run("ersac_atari", *command_line(flags), "--algo", "ersac-ell-epi-star")
    assert done.code == 0, done.err
    result, (row,) = load(done.folders[0]).result, read_rows(done.folders[0])
    best = []
    for seed in range(3_100_000, 3_100_020):
        no_ops, env = np.random.default_rng(seed).integers(31), gym.make("test/Walk-v0").unwrapped
        env.reset(seed=seed)
        best.append(3 - 0.25 * (no_ops + abs(env.place - 4)))
    assert result["eval_return_mean"] > np.mean(best) - 0.7
    # the last policy on other episodes than in between, of which there is one
    oracle = Oracle(done.states[-1], "ersac-ell-epi-star", flags)
    between, final = oracle.returns(1, 3_000_000, 0.0), oracle.returns(20, 3_100_000, 0.0)
    assert row["eval/return"] == np.mean(between) and row["eval/distinct_returns"] == len(set(between))
    assert result["eval_returns"] == pytest.approx(final)
    assert result["eval_return_mean"] == pytest.approx(np.mean(final))
    assert result["eval_return_std"] == pytest.approx(np.std(final))
    assert result["eval_distinct_returns"] == len(set(final)) > 3


def test_with_many_frames_some_suffice_for_scale_and_entropy(run, load, walks):
    flags = ("--total-updates", 1, "--batch-size", 2, "--hidden-dim", 4, "--clone-updates", 0, "--eval-episodes", 1)
    done = run("ersac_atari", "--dataset-id", "test/walk-long-v0", *flags, "--algo", "sac-n")
    assert done.code == 0, done.err
    episode, last = minari.load_dataset("test/walk-long-v0")[0], done.states[-1]
    some = episode.observations[::2].astype(np.float32)  # at most 5000 of 5200
    assert np.allclose(last["critic"]["mean"], some.mean(0), rtol=1e-5)
    assert last["critic"]["std"].item() == pytest.approx(np.sqrt(np.mean((some - some.mean(0)) ** 2)), rel=1e-5)
    some = [episode.observations[[max(k, 0) for k in range(t - 3, t + 1)]] for t in range(0, 5199, 6)]  # at most 1000
    hidden = dense(last["actor"], "net", convolve(last["critic"], some))
    log_pi = linear(last["actor"], "net.3", hidden).log_softmax(-1)
    result = load(done.folders[0]).result
    assert result["policy_entropy"] == pytest.approx(-(log_pi.exp() * log_pi).sum(-1).mean().item(), rel=1e-5)
    # no reference scores: no scale
    assert [result[x] for x in ("random_return", "reference_return", "normalized_return")] == [None] * 3
    assert "return" in done.out and "normalized" not in done.out


def test_a_fiftieth_of_the_episodes_is_played_in_between(run, load, walks, monkeypatch):
    seeds, reset = [], Walk.reset

    def watch(env, *, seed=None, options=None):
        seeds.append(seed)
        return reset(env, seed=seed, options=options)

    monkeypatch.setattr(Walk, "reset", watch)
    done = run("ersac_atari", *WALK, "--total-updates", 1, "--eval-episodes", 150)
    assert done.code == 0, done.err
    between, final = [2_000_000 + i for i in range(3)], [2_100_000 + i for i in range(150)]
    assert seeds == between + final
    result, (row,) = load(done.folders[0]).result, read_rows(done.folders[0])
    returns = result["eval_returns"]
    assert result["eval_episodes"] == len(returns) == 150 and len(set(returns)) > 10
    assert result["eval_return_mean"] == pytest.approx(np.mean(returns))
    assert row["eval/return"] != returns[0] and 1 <= row["eval/distinct_returns"] <= 3


def interrupt(monkeypatch, draw):
    """Ctrl-C while the run draws its minibatch of this number."""
    original, calls = torch.randint, []

    def randint(*arguments, **options):
        calls.append(1)
        if len(calls) == draw:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments, **options)

    monkeypatch.setattr(torch, "randint", randint)


def test_speed_is_that_of_the_updates(run, load, walks, monkeypatch):
    """A clock that a step of Adam moves by a quarter of a second and a step of the game by a hundred."""
    clock, adam = SimpleNamespace(now=1e9), torch.optim.Adam.step

    def tick(*arguments, **options):
        clock.now += 0.25
        return adam(*arguments, **options)

    monkeypatch.setattr(time, "time", lambda: clock.now)
    monkeypatch.setattr(torch.optim.Adam, "step", tick)
    monkeypatch.setattr(Walk, "stepped", lambda env: setattr(clock, "now", clock.now + 100))
    done = run("ersac_atari", *WALK)
    assert done.code == 0, done.err
    # in between: three updates, the first of them of the critic alone, then three of both
    assert [row["charts/updates_per_second"] for row in read_rows(done.folders[0])] == [3 / 1.25, 3 / 1.5]
    # in all: their mean; neither cloning nor evaluations count
    assert load(done.folders[0]).result["updates_per_second"] == pytest.approx((3 / 1.25 + 3 / 1.5) / 2)
    # nor does the time until an interrupted run was resumed, nor what it had done since its checkpoint
    with monkeypatch.context() as patch:
        interrupt(patch, 3 + 5)
        part = run("ersac_atari", *WALK, "--exp-name", "part")
    clock.now = 2e9
    again = run("ersac_atari", "--resume", part.folders[0])
    assert part.code == 130 and again.code == 0, again.err
    assert [row["charts/updates_per_second"] for row in read_rows(part.folders[0])] == [3 / 1.25, 3 / 1.5]
    assert load(part.folders[0]).result["updates_per_second"] == pytest.approx((3 / 1.25 + 3 / 1.5) / 2)


def test_wandb_gets_every_row_and_the_result(run, load, walks, monkeypatch):
    calls, logged, summary, finished = [], [], {}, []
    tracker = SimpleNamespace(log=lambda row, step: logged.append((step, row)), summary=summary, step=0)
    tracker.finish = lambda: finished.append(True)
    fake = SimpleNamespace(init=lambda **names: calls.append(names) or tracker)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    done = run("ersac_atari", *WALK, "--track", "--wandb-project-name", "p", "--wandb-entity", "e", "--algo", "cql")
    assert done.code == 0, done.err
    (names,), rows = calls, read_rows(done.folders[0])
    assert [step for step, _ in logged] == [3, 6] and [row for _, row in logged] == rows
    assert summary == load(done.folders[0]).result and finished == [True]
    assert names["name"] == names["id"] == done.folders[0].name
    assert names["group"] == "test/walk-v0 CQL ersac_atari.py"
    resolved = load(done.folders[0]).args | {"dataset_id": "test/walk-v0", "label": "CQL"}
    assert (names["project"], names["entity"]) == ("p", "e") and names["config"].items() >= resolved.items()


# ----- frames
def test_decoding_is_luma_and_box_averaging(games):
    frame = minari.load_dataset("test/pong-v0")[0].observations[T]
    grey = frame @ np.array([0.299, 0.587, 0.114])  # ITU-R 601

    def inside(size):  # each of 84 output pixels averages the input pixels whose centres lie in it
        cells = np.ceil((np.arange(size) + 0.5) * 84 / size - 1e-9).astype(int) - 1  # on the border: to the first
        return (cells == np.arange(84)[:, None]) / np.bincount(cells)[:, None]

    ours = decode(frame)
    assert ours.shape == (84, 84) and ours.dtype == np.uint8 and len(np.unique(ours)) > 3
    assert np.abs(ours - inside(210) @ grey @ inside(160).T).max() < 2


def test_stacks_are_those_of_frame_stack_observation_in_the_recovered_environment(games, tmp_path):
    dataset = minari.load_dataset("test/pong-v0")
    frames, frame, first, action, *_ = load_frames(dataset, str(tmp_path))
    env, at = make_atari_env(dataset), 0
    assert isinstance(env, gym.wrappers.FrameStackObservation) and env.observation_space.shape == (4, 84, 84)
    for number, episode in enumerate(dataset.iterate_episodes()):
        obs, _ = env.reset(seed=number)
        now, after = (stack(frames, frame[at : at + T] + k, first[at : at + T]).numpy() for k in (0, 1))
        for t in range(T):
            assert np.array_equal(obs, now[t]), t
            obs, reward, _, truncated, _ = env.step(int(episode.actions[t]))
            assert np.array_equal(obs, after[t]), t
        assert truncated and at == T * number
        at += T


def test_a_game_without_a_time_limit_gets_ales(walks):
    forever, limited = (make_atari_env(minari.load_dataset(f"test/walk-{x}-v0")) for x in ("forever", "large"))
    assert forever.spec.max_episode_steps == 27_000 and limited.spec.max_episode_steps == 40


def test_stacks_never_cross_an_episodes_start(games, tmp_path):
    dataset = minari.load_dataset("test/pong-v0")
    frames, frame, first, *_ = load_frames(dataset, str(tmp_path))
    assert frames.shape == (3 * T + 3, 84, 84) and frames.dtype == np.uint8 and len(frame) == 3 * T
    expected = []
    for episode in dataset.iterate_episodes():
        seen = deque([episode.observations[0]] * 4, maxlen=4)
        for t in range(T):
            expected.append(np.stack([decode(x) for x in seen]))
            seen.append(episode.observations[t + 1])
    assert np.array_equal(stack(frames, frame, first).numpy(), np.stack(expected))


def test_transitions(games, tmp_path):
    dataset = minari.load_dataset("test/pong-v0")
    _, frame, first, action, reward, terminated = load_frames(dataset, str(tmp_path))
    assert np.array_equal(action, np.concatenate([e.actions for e in dataset.iterate_episodes()]))
    assert np.array_equal(reward, np.concatenate([e.rewards for e in dataset.iterate_episodes()]).astype(np.float32))
    assert reward.max() == 3 and terminated.nonzero()[:, 0].tolist() == [
        3 * T - 1
    ]  # raw here; truncations do not count


@pytest.mark.parametrize("n", [1, 3, 100])
def test_n_step_rewards_stay_within_their_episode(n):
    first = torch.tensor([0, 0, 0, 0, 5, 5, 8])  # episodes of 4, 2 and 1 steps
    reward = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    terminated = torch.tensor([0.0, 0, 0, 1, 0, 0, 1])  # the second one was cut
    total, discount, steps, ended = n_step(first, reward, terminated, 0.5, n)
    for start, end in ((0, 4), (4, 6), (6, 7)):
        for t in range(start, end):
            taken = list(range(t, min(t + n, end)))
            assert total[t].item() == pytest.approx(sum(0.5 ** (k - t) * reward[k].item() for k in taken))
            assert steps[t] == len(taken) and ended[t] == terminated[taken[-1]] and discount[t] == 0.5 ** len(taken)


def test_frames_are_decoded_once_and_again_when_the_data_change(games, tmp_path, monkeypatch):
    env, buffers = pong_episodes(2, 7)
    dataset, calls = store("test/growing-v0", buffers[:1], env), []
    original = ersac_atari.decode
    monkeypatch.setattr(ersac_atari, "decode", lambda x: calls.append(1) or original(x))
    frames = load_frames(dataset, str(tmp_path))[0]
    assert len(calls) == T + 1 and isinstance(frames, np.memmap) and not frames.flags.writeable
    assert len(load_frames(minari.load_dataset("test/growing-v0"), str(tmp_path))[2]) == T and len(calls) == T + 1
    dataset.update_dataset_from_buffer(buffers[1:])
    assert (
        len(load_frames(minari.load_dataset("test/growing-v0"), str(tmp_path))[2]) == 2 * T and len(calls) == 3 * T + 3
    )

    def fail(frame):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ersac_atari, "decode", fail)
    with pytest.raises(SystemExit, match="No space left"):
        load_frames(dataset, str(tmp_path / "full"))
    assert list((tmp_path / "full").iterdir()) == []  # nothing half-written


# ----- the baselines by hand
def test_cql_penalty_by_hand():
    q = torch.tensor([[[0.0, math.log(3.0)], [1.0, 1.0]], [[2.0, 2.0], [math.log(2.0), math.log(6.0)]]])  # [2, 2, 2]
    ours = cql_penalty(q, torch.tensor([0, 1]))
    # log(1 + 3) - 0; log(2e) - 1; log(2e^2) - 2; log(2 + 6) - log 6
    expected = [[math.log(4), math.log(2)], [math.log(2), math.log(4 / 3)]]
    assert ours.numpy() == pytest.approx(np.array(expected), rel=1e-6)


def test_expectile_loss_by_hand_and_against_scipy():
    assert expectile_loss(torch.tensor([2.0, -2.0, 0.5, 0.0]), 0.7).tolist() == pytest.approx([2.8, 1.2, 0.175, 0.0])
    x, v = np.random.default_rng(0).normal(size=200), torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(500):  # the minimiser is the expectile
        (slope,) = torch.autograd.grad(expectile_loss(torch.tensor(x) - v, 0.7).mean(), v)
        v.data -= 0.5 * slope
    assert v.item() == pytest.approx(stats.expectile(x, alpha=0.7), abs=1e-6)


def test_bcq_filter_by_hand():
    b = torch.tensor([[0.5, 0.3, 0.2], [0.7, 0.2, 0.1], [1.0, 0.0, 0.0], [0.25, 0.25, 0.5]])
    allowed = bcq_filter(b.log(), 0.3)
    # ratios: 1, 0.6, 0.4; 1, 0.29, 0.14; 1, 0, 0; 0.5, 0.5, 1
    assert allowed.tolist() == [[True] * 3, [True, False, False], [True, False, False], [True] * 3]
    assert bcq_filter(b.log(), 0.999).sum(-1).tolist() == [1, 1, 1, 1]


def test_brac_kl_against_scipy():
    pi, b = torch.tensor([[0.2, 0.8, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    expected = [stats.entropy(p, q) for p, q in zip(pi.numpy(), b.numpy())]
    assert brac_kl(pi, pi.log(), b.log()).numpy() == pytest.approx(expected, rel=1e-5)
    assert brac_kl(b, b.log(), b.log()).numpy() == pytest.approx([0, 0], abs=1e-6)


def test_filtered_actions_have_no_probability_and_no_gradient():
    actor, log_b = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4).mul(3).log_softmax(-1)
    allowed = bcq_filter(log_b, 0.3)
    log_pi = actor.masked_fill(~allowed, -1e9).log_softmax(-1)
    loss = (-(log_pi.exp() * torch.randn(5, 4)).sum(-1) + brac_kl(log_pi.exp(), log_pi, log_b)).mean()
    (gradient,) = torch.autograd.grad(loss, actor)
    assert (log_pi.exp()[~allowed] == 0).all() and (gradient[~allowed] == 0).all() and gradient.isfinite().all()
    assert not allowed.all() and torch.allclose(log_pi.exp().sum(-1), torch.ones(5))


# ----- the sets with all of Atari's 18 actions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_worst_cases_with_18_actions(dtype):
    rng, A, N = np.random.default_rng(0), 18, 100
    q = (rng.normal(size=(N, 4, A)) @ rng.normal(size=(A, A))).astype(np.float64)
    pi = rng.dirichlet(np.full(A, 0.3), size=4)
    pi[3] = np.eye(A)[5]  # a deterministic policy
    t = lambda x: torch.tensor(x, dtype=dtype)  # noqa: E731
    sigma = rng.normal(size=(4, A, 7))
    hull, ours = worst_case_hull(t(q), t(pi)), worst_case_ellipsoid(t(q), t(pi), 0.9)
    gauss, rel = worst_case_gaussian(t(q[0]), t(sigma), t(pi), 2.5), 1e-3 if dtype == torch.float32 else 1e-8
    for b in range(4):
        assert worst_case_box(t(q), t(pi))[b].numpy() == pytest.approx(q[:, b].min(0), rel=1e-6)
        assert hull[b].numpy() == pytest.approx(q[np.argmin(q[:, b] @ pi[b]), b], rel=1e-6)
        mu, cov = q[:, b].mean(0), np.cov(q[:, b].T, bias=True)
        distances = np.einsum("na,ac,nc->n", q[:, b] - mu, np.linalg.inv(cov), q[:, b] - mu)
        expected = mu - np.sqrt(np.sort(distances)[89]) * cov @ pi[b] / np.sqrt(pi[b] @ cov @ pi[b])
        assert ours[b].numpy() == pytest.approx(expected, rel=rel, abs=rel * np.abs(expected).max())
        cov = sigma[b] @ sigma[b].T
        expected = q[0, b] - 2.5 * cov @ pi[b] / np.sqrt(pi[b] @ cov @ pi[b])
        assert gauss[b].numpy() == pytest.approx(expected, rel=1e-4, abs=1e-4)


# ----- the networks
def test_encoder_is_the_nature_cnn_channels_last():
    mean, std = torch.full((84, 84), 90.0), torch.tensor(20.0)
    critic = PixelNetwork(EnsembleHeads(512, 6, 3, 0.1), 512, 6, mean, std)
    counts = [sum(p.numel() for p in layer.parameters()) for layer in (*critic.cnn, *critic.dense)]
    assert [n for n in counts if n] == [8224, 32832, 36928, 1606144, 1024]  # the last is the layer norm
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in critic.cnn.parameters() if p.dim() == 4)
    obs = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    assert critic.convolve(obs).shape == (2, 3136) and critic(obs).shape == (3, 2, 6)
    assert PixelActor(512, 6)(critic.convolve(obs)).shape == (2, 6)


def test_heads_against_loops_and_where_gradients_go():
    torch.manual_seed(0)
    psi = torch.randn(4, 16, requires_grad=True)
    heads = EnsembleHeads(16, 3, 5, 0.5)
    q = heads(psi)
    for n in range(5):
        rows = slice(3 * n, 3 * n + 3)  # head n is its own linear layer, with its own prior
        own, prior = (F.linear(psi, layer.weight[rows], layer.bias[rows]) for layer in (heads.learnable, heads.prior))
        assert torch.allclose(q[n], own + 0.5 * prior, atol=1e-6)
    without = EnsembleHeads(16, 3, 5, 0.0)
    without.load_state_dict(heads.state_dict())
    gradients = [torch.autograd.grad(h(psi).sum(), psi)[0] for h in (heads, without)]
    assert torch.equal(*gradients)  # the prior sends none into the features
    epinet = EpinetHeads(16, 3, 2, 0.5)
    mu, sigma = epinet(psi)
    assert mu.shape == (4, 3) and sigma.shape == (4, 3, 2) and not epinet.prior[0].weight.requires_grad
    assert torch.autograd.grad(sigma.sum(), psi, allow_unused=True)[0] is None


# ----- evaluation
class Corridor(gym.Env):
    """Counts the no-ops before the first other action; the reward is their number."""

    observation_space, action_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.waited, self.seeds = 0, [*getattr(self, "seeds", []), seed]
        return np.zeros((4, 84, 84), np.uint8), {}

    def step(self, action):
        self.waited += action == 0
        return np.zeros((4, 84, 84), np.uint8), float(self.waited) if action else 0.0, action != 0, False, {}


def test_evaluation_is_greedy_after_seeded_no_ops_and_the_same_side_by_side():
    env, many = Corridor(), [Corridor() for _ in range(7)]
    policy = lambda obs: (torch.tensor([[0.1, 0.2, 0.7]]).log().expand(len(obs), -1), None)  # noqa: E731
    returns = play(policy, [env], 200, 5, "cpu")
    assert env.seeds == list(range(5, 205)) and np.array_equal(returns, play(policy, many, 200, 5, "cpu"))
    assert sorted(seed for one in many for seed in one.seeds) == list(range(5, 205))
    assert set(returns) <= set(range(31)) and len(np.unique(returns)) > 25 and returns.min() == 0
    # random actions with probability epsilon: a third of them is one more no-op, seeded and the same side by side
    noisy = play(policy, [env], 200, 5, "cpu", epsilon=0.6)
    assert np.array_equal(noisy, play(policy, many, 200, 5, "cpu", epsilon=0.6)) and (noisy >= returns).all()
    assert abs((noisy > returns).mean() - 0.2) < 5 * (0.2 * 0.8 / 200) ** 0.5


# ----- the script
@pytest.mark.parametrize("algo", METHODS)
def test_algorithms_end_to_end_and_resumed_to_the_same_bits(run, load, walks, monkeypatch, algo):
    done = run("ersac_atari", *WALK, "--algo", algo)
    assert done.code == 0, done.err
    whole = load(done.folders[0])
    assert [line.split(",")[0] for line in whole.metrics] == ["update", "3", "6"]
    with monkeypatch.context() as patch:
        interrupt(patch, 3 + 5)  # three to clone
        part = run("ersac_atari", *WALK, "--algo", algo, "--exp-name", "part")
    assert part.code == 130 and "--resume" in part.out
    (folder,) = part.folders
    assert load(folder).checkpoint["update"] == 3 and load(folder).result is None  # the last row's checkpoint
    assert run("ersac_atari", "--resume", folder).code == 0
    again = load(folder)
    assert again.metrics == whole.metrics
    for name in ("critic", "target", "actor"):
        for key, value in whole.checkpoint[name].items():
            assert torch.equal(value, again.checkpoint[name][key]), (name, key)
    assert torch.equal(whole.checkpoint["generator"], again.checkpoint["generator"])
    untimed = lambda result: {k: v for k, v in result.items() if k != "updates_per_second"}  # noqa: E731
    assert untimed(again.result) == untimed(whole.result)


@pytest.mark.parametrize("draw, cloned", [(2, False), (3 + 2, True)])
def test_interrupted_before_its_first_row_a_run_clones_once(run, load, walks, monkeypatch, draw, cloned):
    """Within the cloning it clones from the beginning, after it not again."""
    whole = load(run("ersac_atari", *WALK).folders[0])
    with monkeypatch.context() as patch:
        interrupt(patch, draw)
        part = run("ersac_atari", *WALK, "--exp-name", "part")
    assert part.code == 130 and "--resume" in part.out
    assert part.states[-1]["update"] == 0 and part.states[-1]["cloned"] == cloned
    assert run("ersac_atari", "--resume", part.folders[0]).code == 0
    assert load(part.folders[0]).metrics == whole.metrics and whole.checkpoint["cloned"]


def test_ctrl_c_before_the_training_leaves_nothing(run, walks, monkeypatch):
    monkeypatch.setattr(minari, "load_dataset", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    done = run("ersac_atari", *WALK)
    assert done.code == 130 and done.folders == [] and done.out + done.err == ""


def test_a_finished_run_is_evaluated_again_or_extended(run, load, walks):
    (folder,) = run("ersac_atari", *WALK).folders
    first, content = load(folder), (folder / "checkpoint.pt").read_bytes()
    result = (folder / "result.json").read_bytes()
    same = run("ersac_atari", "--resume", folder)
    assert same.code == 0 and f"return {first.result['eval_return_mean']:.1f} over 2 episodes" in same.out
    assert (folder / "result.json").read_bytes() == result
    again = run("ersac_atari", "--resume", folder, "--eval-episodes", 5)
    assert again.code == 0 and (folder / "checkpoint.pt").read_bytes() == content, again.err
    returns = load(folder).result["eval_returns"]
    assert len(returns) == 5 and returns[:2] == first.result["eval_returns"] and load(folder).metrics == first.metrics
    assert run("ersac_atari", "--resume", folder, "--total-updates", 8).code == 0
    more = load(folder)
    assert more.checkpoint["update"] == 8 and more.metrics[:3] == first.metrics and len(more.metrics) == 4
    for words, named in (("--total-updates 7", "done 8"), ("--gamma 0.5", "--gamma"), ("--seed=1", "--seed")):
        done = run("ersac_atari", "--resume", folder, *words.split())
        assert done.code == 1 and named in done.err and len(done.err.strip().splitlines()) == 1


def test_checkpoints_are_written_around_cloning_and_with_every_row(run, walks):
    done = run("ersac_atari", *WALK)
    names = "critic target actor q_optimizer policy_optimizer generator update rows run_name cloned script args data"
    names += " num_actions"
    assert all(state.keys() == set(names.split()) for state in done.states)
    # before and after cloning, then with every row
    times = [(state["update"], state["cloned"]) for state in done.states]
    assert times == [(0, False), (0, True), (3, True), (6, True)]
    assert done.states[-1]["run_name"] == done.folders[0].name and len(done.states[-1]["rows"]) == 2


def test_a_game_of_ale_end_to_end(run, load, games):
    done = run("ersac_atari", *DATA, *SMALL)
    assert done.code == 0, done.err
    assert load(done.folders[0]).result["env_id"] == "ALE/Pong-v5" and done.folders[0].name.startswith("Pong-v5__")


def test_diverging_run_stops_in_one_line_and_keeps_its_checkpoint(run, walks):
    done = run("ersac_atari", *WALK, "--q-lr", 1e30)
    last = done.err.splitlines()[-1]
    assert done.code == 1 and "loss not finite" in last and "--q-lr" in last
    state = torch.load(done.folders[0] / "checkpoint.pt", weights_only=True)
    bad = int(last.split()[1].strip(":"))
    assert state["update"] < bad and all(v.isfinite().all() for v in state["actor"].values())


def test_changed_data_are_noticed_on_resume(run, walks):
    buffers = walk_episodes(20, 9)
    dataset = store("test/changing-v0", buffers[:1], gym.make("test/Walk-v0"))
    (folder,) = run("ersac_atari", "--dataset-id", "test/changing-v0", *SMALL).folders
    dataset.update_dataset_from_buffer(buffers[1:])
    done = run("ersac_atari", "--resume", folder)
    assert done.code == 1 and "has changed" in done.err.splitlines()[-1]


BAD = [
    ("--upsilon 1", "infinite"),
    ("--upsilon 0 --algo ersac-ell-n", "upsilon"),
    ("--algo edac", "algo"),
    ("--gamma 1", "gamma"),
    ("--total-updates 0", "total-updates"),
    ("--eval-episodes 0", "eval-episodes"),
    ("--iql-expectile 1", "iql-expectile"),
    ("--resume nowhere", "nowhere"),
    ("--env-id Tetris", "Breakout, Pong, Qbert, Seaquest, Hero"),
    ("--dataset-id test/pendulum-v0", "discrete actions"),
    ("--dataset-id test/cartpole-v0", "uint8 images"),
    ("--dataset-id test/lake-v0", "uint8 images"),
    ("--output-dir /proc/nowhere", "output-dir"),
    ("--cache-dir /proc/nowhere", "cache-dir"),
]


@pytest.mark.parametrize("arguments, named", BAD)
def test_bad_input_ends_in_one_clear_line(run, games, tmp_path, arguments, named):
    data = () if "-id" in arguments else DATA
    done = run("ersac_atari", *data, *SHORT, *arguments.split())
    assert done.code in (1, 2) and named in done.err and "Traceback" not in done.err, done.err
    assert done.code == 2 or len(done.err.strip().splitlines()) == 1
    assert list(tmp_path.glob("runs/**/*.json")) == []


@pytest.mark.parametrize("name, word", [("nan", "not finite"), ("ragged", "T + 1")])
def test_bad_episodes_are_refused_and_nothing_is_kept(run, games, tmp_path, name, word):
    done = run("ersac_atari", "--dataset-id", f"test/pong-{name}-v0", *SHORT, "--cache-dir", tmp_path / "cache")
    assert done.code == 1 and word in done.err.splitlines()[-1]
    assert list((tmp_path / "cache").iterdir()) == [] and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("game", ersac_atari.GAMES)
def test_missing_download_says_what_to_do(run, games, monkeypatch, game):
    asked = []

    def offline(dataset_id, **_):
        asked.append(dataset_id)
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("minari.storage.hosting.download_dataset", offline)
    done = run("ersac_atari", "--env-id", game)
    assert asked == [f"atari/{game.lower()}/expert-v0"] and done.code == 1
    assert len(done.err.strip().splitlines()) == 1
    assert f"{asked[0]}: not on this machine, and no download over the network (no route to host)" in done.err


def test_damaged_data_sets_are_refused(run, monkeypatch, tmp_path):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    (tmp_path / "test" / "empty-v0" / "data").mkdir(parents=True)
    done = run("ersac_atari", "--dataset-id", "test/empty-v0", *SMALL)
    assert done.code == 1 and len(done.err.strip().splitlines()) == 1 and "test/empty-v0: damaged (" in done.err


def test_foreign_and_damaged_checkpoints_are_refused(run, walks, tmp_path):
    (folder,) = run("ersac_atari", *WALK, "--total-updates", 1).folders
    done = run("ersac_atari", "--resume", folder, "--gamma", 0.5)
    assert done.code == 1 and "--gamma cannot change in a run that has begun" in done.err
    content = (folder / "checkpoint.pt").read_bytes()
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    checkpoint["args"]["no_longer_a_flag"] = 3
    torch.save(checkpoint, folder / "checkpoint.pt")
    assert "another version" in run("ersac_atari", "--resume", folder).err
    (folder / "checkpoint.pt").write_bytes(content[: len(content) // 2])
    assert "damaged" in run("ersac_atari", "--resume", folder).err
    torch.save({"script": "ersac_ensemble.py"}, folder / "checkpoint.pt")
    assert "was not written by ersac_atari.py" in run("ersac_atari", "--resume", folder).err


def test_video_of_the_final_evaluation_and_a_checkpoint_that_acts(run, games):
    done = run("ersac_atari", *DATA, *SMALL, "--capture-video", "--total-updates", 1)
    assert done.code == 0, done.err
    (video,) = (done.folders[0] / "video").glob("*.mp4")
    assert video.stat().st_size > 1000
    # the snippet of docs/ersac_atari.md
    checkpoint = torch.load(done.folders[0] / "checkpoint.pt", weights_only=True)
    A, width = checkpoint["num_actions"], checkpoint["args"]["hidden_dim"]
    mean, std = checkpoint["critic"]["mean"], checkpoint["critic"]["std"]
    critic = PixelNetwork(torch.nn.Identity(), width, A, mean, std)
    critic.load_state_dict(checkpoint["critic"], strict=False)  # without its heads
    actor = PixelActor(width, A)
    actor.load_state_dict(checkpoint["actor"])
    obs, _ = make_atari_env(minari.load_dataset("test/pong-v0")).reset(seed=0)
    assert actor(critic.convolve(torch.tensor(obs)[None])).shape == (1, 6)


# ----- cloning of images, the bar in the tables
@pytest.mark.parametrize("top", [1.0, 0.3])
def test_cloning_of_images_in_plain_code(run, walks, top):
    """Three updates against a loop, on all episodes and on those with the best returns."""
    flags = ("--dataset-id", "test/walk-v0", "--seed", 4, "--hidden-dim", 8, "--batch-size", 5, "--total-updates", 3)
    done = run("docs/benchmark/clone", *flags, "--lr", 0.01, "--eval-episodes", 2, "--top", top)
    assert done.code == 0, done.err
    result = json.loads((done.folders[0] / "result.json").read_text())
    assert result["method"] == ("BC" if top == 1 else "BC-top30") and len(result["eval_returns"]) == 2

    episodes = raw_episodes("test/walk-v0")
    bar = np.quantile([episode.rewards.sum() for episode in episodes], 1 - top)
    kept, number = [], 0
    for episode in episodes:
        for _ in episode.actions:
            kept += [number] if episode.rewards.sum() >= bar else []
            number += 1
    assert len(kept) == number if top == 1 else 0 < len(kept) < number
    transitions = plain_transitions("test/walk-v0", 0.9, 1)
    frames = np.concatenate([episode.observations for episode in episodes]).astype(float)
    torch.manual_seed(4)
    mean = torch.tensor(frames.mean(0)).float()
    std = torch.tensor(np.sqrt(((frames - frames.mean(0)) ** 2).mean())).float()
    network = PixelNetwork(torch.nn.Linear(8, 4), 8, 4, mean, std)
    w = weights(network.state_dict())
    learned_ = [w[k] for k, _ in network.named_parameters()]
    adam = torch.optim.Adam(learned_)
    generator = torch.Generator().manual_seed(4)
    for update in range(3):
        batch = [transitions[kept[i]] for i in torch.randint(len(kept), (5,), generator=generator)]
        logits = linear(w, "heads", encode(w, [x.s for x in batch]))
        loss = -sum(logits.log_softmax(-1)[i, x.a] for i, x in enumerate(batch)) / 5
        adam.param_groups[0]["lr"] = 0.01 * (3 - update) / 3
        adam.zero_grad()
        loss.backward()
        adam.step()
    every = range(0, number, number // 1000 + 1)
    log_pi = linear(w, "heads", encode(w, [transitions[i].s for i in every])).log_softmax(-1)
    entropy_ = -(log_pi.exp() * log_pi).sum(-1).mean().item()
    assert result["policy_entropy"] == pytest.approx(entropy_, rel=1e-4)


# ----- the recorder
def test_recorder_makes_a_lossless_data_set_with_reference_scores(run, games, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", os.environ["MINARI_DATASETS_PATH"])  # the script changes it
    flags = ("--steps", 60, "--max-episode-steps", 40, "--reference-episodes", 2, "--random-share", 0.5)
    done = run("docs/benchmark/record_atari", "--dataset-id", "test/recorded-v0", *flags)
    assert done.code == 0 and "80 steps, 2 episodes, 2 of them scripted" in done.out, done.err
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(games))
    dataset = minari.load_dataset("test/recorded-v0")
    assert dataset.total_steps == 80 and dataset.total_episodes == 2
    env = dataset.recover_environment()
    assert env.spec.kwargs["repeat_action_probability"] == 0 and env.spec.kwargs["frameskip"] == 4
    for episode in dataset.iterate_episodes():
        obs, _ = env.reset()
        assert np.array_equal(obs, episode.observations[0]) and len(episode.observations) == 41
        for t, action in enumerate(episode.actions):
            obs, reward, *_ = env.step(int(action))
            assert np.array_equal(obs, episode.observations[t + 1]) and reward == episode.rewards[t]
        assert episode.truncations[-1] and not episode.terminations.any()
    assert [p.name for p in games.iterdir() if p.name.startswith(".recording")] == []
    again = run("docs/benchmark/record_atari", "--dataset-id", "test/recorded-v0", *flags)
    assert again.code == 1 and "--overwrite" in again.err and len(again.err.strip().splitlines()) == 1
    bad = run("docs/benchmark/record_atari", "--random-share", 1.5)
    assert bad.code == 1 and "--random-share" in bad.err


@pytest.mark.slow
def test_a_million_frames_stay_below_eight_gigabytes(tmp_path):
    """A file of a million frames, drawn from until every page was touched: the process stays near the file's size."""
    import resource

    frames = np.lib.format.open_memmap(tmp_path / "frames.npy", "w+", np.uint8, (10**6, 84, 84))
    frames.flush()
    frames, g = np.load(tmp_path / "frames.npy", mmap_mode="r"), torch.Generator().manual_seed(0)
    first = torch.zeros(1000, dtype=torch.long)
    for start in range(0, 10**6, 1000):
        stack(frames, torch.arange(start, start + 1000), first)
        stack(frames, torch.randint(10**6, (32,), generator=g), first[:32])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 8 * 2**30


# ----- the paper's grid for a GPU, with its budget cut down
DOCS = Path(__file__).resolve().parents[1] / "docs"


def forms_of_the_grid():
    """The commands of the page, in the paper's form and with the script's defaults, and those of the W&B sweep."""
    text = (DOCS / "ersac_atari.md").read_text().replace("\\\n", " ")
    paper, defaults = re.findall(r"python ersac_atari.py --env-id \$game --algo \$algo ([^\n`]*)", text)
    plan = yaml.safe_load((DOCS / "benchmark" / "sweep_atari.yaml").read_text())
    assert plan["program"] == "ersac_atari.py" and plan["command"][-2:] == ["--track", "${args}"]
    chosen = plan["parameters"]
    assert set(chosen.pop("env_id")["values"]) == set(ersac_atari.GAMES)
    assert set(chosen.pop("algo")["values"]) == set(METHODS) and chosen.pop("seed")["values"] == [100, 101, 102]
    sweep = [f"--{name}={choice['value']}" for name, choice in chosen.items()]
    return {"paper": shlex.split(paper.replace("$seed", "100")), "sweep": sweep, "defaults": shlex.split(defaults)[2:]}


@pytest.mark.parametrize("form", ["paper", "sweep", "defaults"])
def test_the_grid_for_a_gpu_runs_with_its_budget_cut_down(run, walks, form):
    words = forms_of_the_grid()[form]
    assert tyro.cli(ersac_atari.Args, args=words).total_updates == 100_000
    fewer = ["--total-updates", 2, "--batch-size", 4, "--hidden-dim", 16, "--eval-interval", 2, "--eval-episodes", 1]
    if form == "defaults":
        fewer += ["--clone-updates", 2, "--critic-warmup", 1]
    for algo in METHODS:
        done = run("ersac_atari", "--algo", algo, *words, "--dataset-id", "test/walk-v0", *fewer)
        assert done.code == 0, done.err
        args = json.loads((done.folders[-1] / "args.json").read_text())
        chosen = (args["clone_updates"], args["critic_warmup"], args["bc_coef"], args["n_step"])
        assert chosen == ((2, 1, 0.3, 10) if form == "defaults" else (0, 0, 0, 1))
