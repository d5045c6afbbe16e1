# docs: docs/gen_expectile_data.md
"""Offline data from behaviour policies that seek, ignore or avoid risk ("Offline Data Generation via Dynamic Expectile
Risk Policies" of "Epistemic Robust Offline Reinforcement Learning"), stored as Minari data sets.

An actor-critic whose critic takes the tau-expectile over what may follow an action trains the policy; an epsilon-greedy
run of it collects exactly dataset_size transitions. The risk-averse 10k data set of LunarLander:

    python gen_expectile_data.py --env-id LunarLander-v3 --expectile-tau 0.9 --dataset-size 10000
"""

import contextlib
import csv
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import gymnasium as gym
import minari
import numpy as np
import torch
import tyro
from minari.data_collector import EpisodeBuffer
from minari.storage import get_dataset_path
from torch import nn
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = "gen_expectile_data"
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of the training and of the collected episodes"""
    output_dir: str = "runs"
    """folder that receives the run folder"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "ersac"
    """W&B project"""
    wandb_entity: str | None = None
    """W&B user or team; None is your default one"""

    env_id: str = "LunarLander-v3"
    """Gymnasium environment with a vector of observations and discrete actions, or MachineReplacement or RiverSwim"""
    dataset_size: int = 100_000
    """transitions in the data set"""
    expectile_tau: float = 0.5
    """risk level of the behaviour policy in (0, 1): 0.1 seeks risk, 0.5 is neutral, 0.9 avoids it"""
    epsilon: float = 0.1
    """probability that the executed action is a uniformly random one, in the expectile training and the collection"""
    random_fraction: float = 0.0
    """share of the transitions that come from whole episodes of a random policy; such a data set has its own name"""
    grid: bool = False
    """make all nine data sets of the environment: taus 0.1, 0.5, 0.9 and sizes 1k, 10k, 100k"""
    overwrite: bool = False
    """replace a data set that exists; otherwise it is reported and left alone"""

    policy_dir: str | None = None
    """folder of trained policies: one found there is used, one missing is trained and put there; None is docs/policies"""
    retrain: bool = False
    """train the policies anew; those in policy_dir stay as they are, the new ones are kept in the run folder"""
    estimator: Literal["action-noise", "resample"] = "action-noise"
    """the expectile's outcomes: all executed actions, known exactly, or next states resampled from a restored state"""
    num_resamples: int = 10
    """N_s, the next states drawn from the same (s, a) by the resample estimator"""
    start_steps: int | None = None
    """environment steps of the neutral start that every tau shares; None is 100k for CartPole, 400k elsewhere"""
    finish_steps: int | None = None
    """environment steps with the expectile critic, for each tau; None is 60k for CartPole, 300k elsewhere"""
    floor: float | None = None
    """greedy return that a policy must reach; None is 475 for CartPole, 220 for LunarLander, elsewhere the
    environment's own threshold or, without one, the random policy's return"""
    max_rounds: int = 3
    """rounds of start_steps or finish_steps after which a policy below the floor is given up"""
    num_envs: int = 16
    """environments that a rollout steps side by side"""
    num_steps: int = 256
    """steps of each environment in a rollout"""
    hidden_dim: int = 128
    """width of the two hidden layers of actor and critic"""
    gamma: float | None = None
    """discount factor in [0, 1); None is 0.9 for the tabular MDPs and 0.995 elsewhere"""
    gae_lambda: float = 0.97
    """decay of the traces"""
    start_lr: float = 1e-3
    """Adam step size of the neutral start, annealed to 0"""
    finish_lr: float = 5e-4
    """Adam step size of the expectile training, annealed to 0"""
    start_entropy: float = 0.01
    """entropy coefficient of the neutral start"""
    finish_entropy: float = 0.005
    """entropy coefficient of the expectile training"""
    critic_rollouts: int = 8
    """first rollouts of the expectile training that train the new critic only"""
    update_epochs: int = 4
    """passes over each rollout"""
    minibatch_size: int = 512
    """transitions in a gradient step"""
    clip: float = 0.2
    """PPO's bound on the change of an action's probability"""
    reward_scale: float = 0.05
    """rewards are multiplied by this in training, never in the data"""

    eval_episodes: int = 100
    """greedy episodes that measure a policy; random ones that measure the random policy"""
    checkpoint_interval: int = 10
    """rollouts between two checkpoints"""
    resume: str | None = None
    """run folder to continue; all other arguments come from there"""


# the arguments that shape a policy; with the seed, all that its training depends on
TRAINING = (
    "env_id epsilon estimator num_resamples start_steps finish_steps num_envs num_steps hidden_dim gamma gae_lambda"
)
TRAINING += (
    " start_lr finish_lr start_entropy finish_entropy critic_rollouts update_epochs minibatch_size clip reward_scale"
)


# ===== The environments: two tables and whatever Gymnasium has with a vector of observations and discrete actions
def machine_replacement():
    """10 levels of wear. Action 0 runs the machine, action 1 replaces it for 100. Returns P and R, both [S, A, S]."""
    P, R = np.zeros((10, 2, 10)), np.zeros((10, 2, 10))
    for s in range(10):
        P[s, 0, s], R[s, 0, s] = 0.5, -5.0 * (s + 1)  # wear costs 5 per level while the machine stays on it
        P[s, 0, min(s + 1, 9)] += 0.4
        P[s, 0, max(s - 1, 0)] += 0.1 * (s > 0)
    P[0, 0] /= P[0, 0].sum()  # nothing below the first state: 5/9 and 4/9
    P[:, 1, 0], R[:, 1, 0] = 1.0, -100.0
    return P, R


def riverswim():
    """20 states along a river. Action 0 drifts left for 5, action 1 swims right to a prize. Returns P and R."""
    left, stay, right = 0.137028976772708, 0.284628388822161, 0.578342634405131
    P, R = np.zeros((20, 2, 20)), np.zeros((20, 2, 20))
    for s in range(20):
        P[s, 0, max(s - 1, 0)], R[s, 0, max(s - 1, 0)] = 1.0, 5.0
        P[s, 1, max(s - 1, 0)] += left
        P[s, 1, s] += stay
        P[s, 1, min(s + 1, 19)] += right
    R[19, 1, 19] = 86.2971023227292
    return P, R


class TabularMDP(gym.Env):
    """Either MDP as a Gymnasium environment. Episodes start in a uniformly random state and never terminate."""

    def __init__(self, env_id):
        self.P, self.R = {"MachineReplacement": machine_replacement, "RiverSwim": riverswim}[env_id]()
        self.observation_space = gym.spaces.Discrete(self.P.shape[0])
        self.action_space = gym.spaces.Discrete(self.P.shape[1])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(self.P.shape[0]))
        return self.state, {}

    def step(self, action):
        s, self.state = self.state, int(self.np_random.choice(self.P.shape[0], p=self.P[self.state, action]))
        return self.state, float(self.R[s, action, self.state]), False, False, {}


for env_id in ("MachineReplacement", "RiverSwim"):
    if f"ersac/{env_id}-v0" not in gym.registry:
        entry_point = "gen_expectile_data:TabularMDP"
        gym.register(f"ersac/{env_id}-v0", entry_point, max_episode_steps=200, kwargs={"env_id": env_id})


def behaviour_env(env_id):
    """The environment of the data; a table's states become one-hot vectors, so that networks can read them."""
    if env_id in ("MachineReplacement", "RiverSwim"):
        return gym.wrappers.FlattenObservation(gym.make(f"ersac/{env_id}-v0", disable_env_checker=True))
    return gym.make(env_id, disable_env_checker=True)


def get_state(env):
    """What set_state needs to bring a twin of the environment here; None where that cannot be done faithfully."""
    e = env.unwrapped
    if hasattr(e, "lander"):  # Box2D hides a contact's impulses and a body's sleep timer: only flight can be restored
        bodies = [(*b.position, b.angle, *b.linearVelocity, b.angularVelocity) for b in (e.lander, *e.legs)]
        return None if any(leg.ground_contact for leg in e.legs) else (bodies, e.prev_shaping)
    classic = type(e).__module__.startswith("gymnasium.envs.classic_control") or isinstance(e, TabularMDP)
    return np.array(e.state, dtype=float) if classic and getattr(e, "state", None) is not None else None


def set_state(env, state):
    """Put the environment into a state that get_state took from its twin, one that was reset with the same seed."""
    e = env.unwrapped
    if hasattr(e, "lander"):
        e.game_over, e.prev_shaping = False, state[1]
        for body, (x, y, angle, vx, vy, spin) in zip((e.lander, *e.legs), state[0]):
            body.transform, body.linearVelocity, body.angularVelocity, body.awake = (
                ((x, y), angle),
                (vx, vy),
                spin,
                True,
            )
        for leg in e.legs:
            leg.ground_contact = False
        return
    e.state = int(state) if isinstance(e, TabularMDP) else state.copy()
    e.steps_beyond_terminated = None  # CartPole's own flag


class Simulator:
    """An environment in training. Its state is a seed and the actions since: a checkpoint replays them, in any
    environment. Its twin, if there is one, is where next states are drawn from a restored state."""

    def __init__(self, env_id, with_twin):
        self.env, self.twin = behaviour_env(env_id), behaviour_env(env_id) if with_twin else None

    def reset(self, seed, actions=()):
        self.seed, self.actions, self.episode_return = seed, [], 0.0
        self.obs, _ = self.env.reset(seed=seed)
        if self.twin:
            self.twin.reset(seed=seed)
        for action in actions:
            self.step(action)

    def step(self, action):
        self.obs, reward, terminated, truncated, _ = self.env.step(action)
        self.actions.append(action)
        self.episode_return += reward
        return self.obs, reward, terminated, truncated

    def resample(self, state, actions, rng):
        """An outcome (s', r, terminated) for each of the executed actions, all from the same state."""
        self.twin.unwrapped.np_random, outcomes = rng, []
        for action in actions:
            set_state(self.twin, state)
            obs, reward, terminated, _, _ = self.twin.unwrapped.step(action)
            outcomes.append((np.array(obs, dtype=np.float32), reward, terminated))
        return outcomes


# ===== Actor and critic
def network(obs_dim, out_dim, hidden_dim, head_gain):
    """Two hidden layers. The actor's outputs are logits; the critic's are values of executed actions, or one value."""
    layers = [nn.Linear(obs_dim, hidden_dim), nn.Linear(hidden_dim, hidden_dim), nn.Linear(hidden_dim, out_dim)]
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), head_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


# ===== The expectile target
def expectile(values, probs, tau, axis=-1):
    """The e with tau E[(e - X)+] = (1 - tau) E[(X - e)+]: tau weighs outcomes below e, so tau = 0.9 is risk-averse."""
    values, probs = np.broadcast_arrays(np.asarray(values, float), np.asarray(probs, float))
    low, high = values.min(axis, keepdims=True), values.max(axis, keepdims=True)
    for _ in range(64):  # bisection down to machine precision
        e = 0.5 * (low + high)
        gain = (probs * (values - e) * np.where(values < e, tau, 1 - tau)).sum(axis, keepdims=True)  # falls with e
        low, high = np.where(gain > 0, e, low), np.where(gain > 0, high, e)
    return (0.5 * (low + high)).squeeze(axis)


def expectile_value_iteration(P, R, tau, gamma):
    """Dynamic expectile risk: Q(s, a) = expectile over s' ~ P(.|s, a) of r + gamma max_a' Q(s', a'), solved. [S, A]"""
    q = np.zeros(P.shape[:2])
    while True:
        q_next = expectile(R + gamma * q.max(-1), P, tau)  # [S, A, S] -> [S, A]
        if np.abs(q_next - q).max() <= 1e-12 * (1 + np.abs(q_next).max()):
            return q_next
        q = q_next


def action_noise_expectile(w, tau, epsilon):
    """Values w [..., A] of executed actions b become values q [..., A] of chosen actions a: the exact tau-expectile over
    b ~ (1 - epsilon) [b = a] + epsilon / A. Also rho [..., A, A]: how much more, or less, than its probability each b
    weighs in it, so that q[a] = sum_b p(b|a) rho[a, b] w[b]."""
    A = w.shape[-1]
    p = (1 - epsilon) * np.eye(A) + epsilon / A  # [A, A]
    q = expectile(w[..., None, :], p, tau)  # [..., A]
    rho = np.where(w[..., None, :] < q[..., None], tau, 1 - tau)  # [..., A, A]
    return q, rho / (p * rho).sum(-1, keepdims=True)


def resample_expectile(z, tau):
    """Values z [..., N_s] of resampled outcomes become their tau-expectile y [...]. Also rho [...], the weight of the
    first outcome, the one that the rollout went on with."""
    y = expectile(z, 1 / z.shape[-1], tau)  # [...]
    rho = np.where(z < y[..., None], tau, 1 - tau)  # [..., N_s]
    return y, rho[..., 0] / rho.mean(-1)


def traces(delta, decay, done):
    """G_t = delta_t + decay_t G_t+1 within an episode, along the first axis. All [T, E]."""
    G = np.zeros_like(delta)
    for t in reversed(range(len(delta))):
        G[t] = delta[t] + (decay[t] * (1 - done[t]) * G[t + 1] if t + 1 < len(delta) else 0)
    return G


@torch.no_grad()
def targets(roll, actor, critic, tau, epsilon, gamma, lam):
    """The critic's regression target and the actor's advantage for a rollout, [T, E] each, float64.

    With the neutral start's critic (one value a state) this is generalised advantage estimation."""

    def values(obs):  # [..., D] -> w [..., A or 1], q, rho, v [...]
        pi, w = actor(obs).softmax(-1).double().numpy(), critic(obs).double().numpy()
        q, rho = (w, None) if "outcomes" in roll else action_noise_expectile(w, tau, epsilon if w.shape[-1] > 1 else 0)
        return w, q, rho, (pi * q).sum(-1)

    w, q, rho, v = values(roll["obs"])  # [T, E, A or 1], the same, [T, E, A, A], [T, E]
    at = np.indices(v.shape)
    a, b = (roll[name].clip(max=w.shape[-1] - 1) for name in ("chosen", "executed"))  # [T, E]
    if "outcomes" in roll:  # resample: the target is the expectile over N_s outcomes, for the chosen action
        z = roll["outcomes_reward"] + gamma * ~roll["outcomes_terminated"] * values(roll["outcomes"])[-1]  # [T, E, N_s]
        y, rho = resample_expectile(z, tau)
        G = traces(y - q[*at, a], gamma * lam * np.minimum(rho, 1), roll["done"])
        return q[*at, a] + G, q[*at, a] - v + G
    v_next = values(roll["next_obs"])[-1] * ~roll["terminated"]  # a truncated episode bootstraps, a terminated one not
    rho = rho[*at, a, b]  # [T, E]
    decay = gamma * lam * np.minimum(np.roll(rho, -1, 0), 1)  # what follows a risky-looking turn counts for less
    G = traces(roll["reward"] + gamma * v_next - w[*at, b], decay, roll["done"])
    return w[*at, b] + G, q[*at, a] - v + rho * G


# ===== Policy training
@torch.no_grad()
def rollout(sims, actor, args, epsilon, generator, index):
    """num_steps of every simulator. The actor chooses; with probability epsilon a random action is executed instead."""
    T, E, N = args.num_steps, len(sims), args.num_resamples
    D, A = actor[0].in_features, actor[-1].out_features
    roll = {name: np.zeros((T, E, D), np.float32) for name in ("obs", "next_obs")}
    roll |= {name: np.zeros((T, E), int) for name in ("chosen", "executed")}
    roll |= {name: np.zeros((T, E), bool) for name in ("terminated", "done")} | {"reward": np.zeros((T, E))}
    if resampling := sims[0].twin is not None and epsilon > 0:
        roll |= {"outcomes": np.zeros((T, E, N, D), np.float32), "outcomes_reward": np.zeros((T, E, N))}
        roll |= {"outcomes_terminated": np.zeros((T, E, N), bool)}
        rngs = [np.random.default_rng([args.seed, index, e]) for e in range(E)]
    finished = []
    for t in range(T):
        obs = np.stack([sim.obs for sim in sims]).astype(np.float32)  # [E, D]
        pi = actor(torch.from_numpy(obs)).softmax(-1)  # [E, A]
        chosen = torch.multinomial(pi, 1, generator=generator)[:, 0]  # [E]
        random = torch.randint(A, (E,), generator=generator)
        executed = torch.where(torch.rand(E, generator=generator) < epsilon, random, chosen)
        roll["obs"][t], roll["chosen"][t], roll["executed"][t] = obs, chosen.numpy(), executed.numpy()
        for e, (sim, a, b) in enumerate(zip(sims, chosen.tolist(), executed.tolist())):
            state = get_state(sim.env) if resampling else None
            next_obs, reward, terminated, truncated = sim.step(b)
            roll["next_obs"][t, e], roll["reward"][t, e] = next_obs, reward * args.reward_scale
            roll["terminated"][t, e], roll["done"][t, e] = terminated, terminated or truncated
            if resampling:  # where the state cannot be restored, the outcome that happened stands for all
                outcomes = [(next_obs, reward, terminated)] * (N if state is None else 1)
                if state is not None:
                    noisy = np.where(rngs[e].random(N - 1) < epsilon, rngs[e].integers(A, size=N - 1), a)
                    outcomes += sim.resample(state, noisy.tolist(), rngs[e])
                for name, column in zip(("outcomes", "outcomes_reward", "outcomes_terminated"), zip(*outcomes)):
                    roll[name][t, e] = column
            if terminated or truncated:
                finished.append((sim.episode_return, len(sim.actions)))
                sim.reset(torch.randint(2**31, (1,), generator=generator).item())
    if resampling:
        roll["outcomes_reward"] *= args.reward_scale
    return roll | {
        name: torch.from_numpy(roll[name]) for name in ("obs", "next_obs", "outcomes") if name in roll
    }, finished


def update(roll, actor, critic, optimizer, args, entropy_coef, train_actor, target, advantage, generator):
    """PPO's clipped steps for the actor and least squares for the critic, from one rollout. Returns mean metrics."""
    obs, target = roll["obs"].flatten(0, 1), torch.from_numpy(target).float().flatten()  # [T E, D], [T E]
    advantage, chosen = torch.from_numpy(advantage).float().flatten(), torch.from_numpy(roll["chosen"]).flatten()
    scored = chosen if "outcomes" in roll else torch.from_numpy(roll["executed"]).flatten()
    with torch.no_grad():
        old_log_pi = actor(obs).log_softmax(-1).gather(-1, chosen[:, None])[:, 0]  # [T E]
    sums, steps = np.zeros(4), 0
    for _ in range(args.update_epochs):
        for i in torch.randperm(len(obs), generator=generator).split(args.minibatch_size):
            log_pi = actor(obs[i]).log_softmax(-1)  # [M, A]
            log_ratio = log_pi.gather(-1, chosen[i, None])[:, 0] - old_log_pi[i]  # [M]
            ratio, adv = log_ratio.exp(), advantage[i]
            adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
            policy_loss = -torch.min(ratio * adv, ratio.clamp(1 - args.clip, 1 + args.clip) * adv).mean()
            policy_entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
            w = critic(obs[i])  # [M, A or 1]
            value_loss = (w.gather(-1, scored[i, None].clamp(max=w.shape[-1] - 1))[:, 0] - target[i]).square().mean()
            loss = 0.5 * value_loss + train_actor * (policy_loss - entropy_coef * policy_entropy)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()
            kl = (ratio - 1 - log_ratio).mean()
            sums += [x.item() for x in (value_loss, policy_loss, policy_entropy, kl)]
            steps += 1
    names = ("losses/critic_loss", "losses/actor_loss", "charts/policy_entropy", "charts/approx_kl")
    return dict(zip(names, sums / steps))


# ===== Collection
@torch.no_grad()
def play_episode(env, actor, rng, epsilon=0.0, greedy=False, limit=None):
    """One episode of the actor with epsilon-random actions; of the random policy if actor is None. The action that is
    stored is the executed one. An episode cut off after limit steps counts as truncated."""
    episode = {"seed": int(rng.integers(2**31)), "actions": [], "rewards": [], "terminations": [], "truncations": []}
    obs, _ = env.reset(seed=episode["seed"])
    episode["observations"], done = [obs], False
    while not done:
        if actor is None or rng.random() < epsilon:
            action = int(rng.integers(env.action_space.n))
        else:
            pi = actor(torch.from_numpy(obs).float()).double().softmax(-1).numpy()  # [A]
            action = int(pi.argmax() if greedy else min(np.searchsorted(pi.cumsum(), rng.random()), len(pi) - 1))
        obs, reward, terminated, truncated, _ = env.step(action)
        truncated = bool(truncated or (len(episode["actions"]) + 1 == limit and not terminated))
        stored = {"observations": obs, "actions": action, "rewards": float(reward)}
        for name, value in (stored | {"terminations": bool(terminated), "truncations": truncated}).items():
            episode[name].append(value)
        done = terminated or truncated
    return episode


def episode_returns(env, actor, episodes, seed):
    """Undiscounted returns of greedy episodes, or of random ones if actor is None. [episodes]"""
    rng = np.random.default_rng(seed)
    return np.array([sum(play_episode(env, actor, rng, greedy=True)["rewards"]) for _ in range(episodes)])


def collect_episodes(env, actor, args, size):
    """Episodes with exactly size transitions; the first ones are the same for every size."""
    rng, episodes, total, random_total = np.random.default_rng([args.seed, 1]), [], 0, 0
    with tqdm(total=size, desc="collection", unit="step", mininterval=1) as bar:
        while total < size:
            random_turn = random_total < args.random_fraction * (total + 1)
            policy = None if random_turn else actor
            episodes.append(play_episode(env, policy, rng, args.epsilon, limit=size - total))
            steps = len(episodes[-1]["actions"])
            total, random_total = total + steps, random_total + random_turn * steps
            bar.update(steps)
            bar.set_postfix_str(f"return={np.mean([sum(e['rewards']) for e in episodes]):.1f}")
    return episodes


def store_dataset(dataset_id, episodes, env, overwrite, **metadata):
    """Build the Minari data set in a hidden folder, then rename it: no one ever sees half a data set."""
    root, path = get_dataset_path(), get_dataset_path(dataset_id)
    for leftover in root.glob(".ersac-*"):  # of a killed run
        if time.time() - leftover.stat().st_mtime > 3600:
            shutil.rmtree(leftover, ignore_errors=True)
    hidden, before = tempfile.mkdtemp(prefix=".ersac-", dir=root), os.environ.get("MINARI_DATASETS_PATH")
    try:
        os.environ["MINARI_DATASETS_PATH"] = hidden
        buffers = [
            EpisodeBuffer(id=i, **{k: v if k == "seed" else np.array(v) for k, v in episode.items()})
            for i, episode in enumerate(episodes)
        ]
        with warnings.catch_warnings(
            action="ignore"
        ):  # Minari asks for an e-mail address and an evaluation environment
            minari.create_dataset_from_buffers(dataset_id, buffers, env=env, **metadata)
        os.environ["MINARI_DATASETS_PATH"] = str(root)
        with contextlib.suppress(ValueError):  # there already
            minari.namespace.create_namespace(os.path.dirname(dataset_id))
        if overwrite and path.exists():
            os.rename(path, os.path.join(hidden, "old"))
        with contextlib.suppress(OSError) if path.exists() else contextlib.nullcontext():  # another run was faster
            os.rename(os.path.join(hidden, dataset_id), path)
    finally:
        os.environ.pop("MINARI_DATASETS_PATH")
        os.environ |= {"MINARI_DATASETS_PATH": before} if before else {}
        shutil.rmtree(hidden, ignore_errors=True)


# ===== Logging, checkpoints
def write_file(folder, name, content):
    """Write bytes under a temporary name, sync, rename: no reader ever sees half a file."""
    path = os.path.join(folder, name)
    with open(path + ".tmp", "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)


def append_rows(folder, rows):
    """Add rows to metrics.csv, below a header if the file is new."""
    with open(os.path.join(folder, "metrics.csv"), "a", newline="") as f:
        writer = csv.DictWriter(f, rows[0] if rows else [])
        if rows and f.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def load_checkpoint(folder, script):
    """The checkpoint of a run folder, or one line on why there is none. weights_only: a stranger's code never runs."""
    path = os.path.join(folder, "checkpoint.pt")
    if not os.path.isfile(path):
        sys.exit(f"--resume {folder}: there is no checkpoint.pt; give the run folder of an interrupted run.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        sys.exit(f"--resume {folder}: checkpoint.pt is damaged ({type(error).__name__}); start the run again.")
    if not isinstance(checkpoint, dict) or checkpoint.get("script") != script:
        sys.exit(f"--resume {folder}: checkpoint.pt was not written by {script}; resume it with the script that did.")
    return checkpoint


def resumed_args(args, stored):
    """The arguments of the run to resume; whatever else is on the command line must agree with them."""
    for field in fields(args):
        given, had = getattr(args, field.name), stored[field.name]
        if field.name not in ("resume", "eval_only") and given not in (field.default, had):
            flag = field.name.replace("_", "-")
            sys.exit(f"--{flag} {given} contradicts the run to resume, which has {had}; leave it out.")
    return replace(args, **{k: v for k, v in stored.items() if k not in ("resume", "eval_only")})


def start_tracking(args, run_name, group):
    """A W&B run with the run folder's name as its id, so that a resumed run continues it. No W&B never stops a run."""
    if args.track:
        try:
            import wandb

            names = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=run_name, id=run_name)
            return wandb.init(**names, group=group, config=asdict(args), resume="allow", reinit="create_new")
        except Exception as error:
            print(f"W&B is not available ({str(error).strip()[:200]}); the run goes on without it.", file=sys.stderr)


def names(env_id, tau, size=0, random_fraction=0.0):
    """File name of a policy (tau None: the neutral start), id of a data set. Minari allows no dots in its names."""
    number = lambda x: f"{100 * x:.7g}".zfill(2).replace(".", "p")  # 0.05 -> 05, 0.125 -> 12p5
    env_name, level = re.sub(r"-v\d+$", "", env_id.split("/")[-1]).lower(), f"tau{number(tau)}" if tau else "start"
    mixture = f"-random{number(random_fraction)}" if random_fraction else ""
    size = f"{size // 1000}k" if size % 1000 == 0 else size
    return f"{env_name}-{level}", f"ersac/{env_name}/{level}{mixture}-{size}-v0"


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    checkpoint = load_checkpoint(args.resume, "gen_expectile_data.py") if args.resume else None
    if checkpoint:
        args = resumed_args(args, checkpoint["args"])
    for flags, ok, rule in (
        ("dataset_size max_rounds num_envs num_steps hidden_dim", lambda x: x >= 1, "at least 1"),
        ("update_epochs minibatch_size eval_episodes checkpoint_interval", lambda x: x >= 1, "at least 1"),
        ("start_steps finish_steps", lambda x: x is None or x >= 1, "at least 1"),
        ("num_resamples", lambda x: x >= 2, "at least 2"),
        ("seed critic_rollouts start_entropy finish_entropy", lambda x: 0 <= x < math.inf, "finite and at least 0"),
        ("start_lr finish_lr reward_scale", lambda x: 0 < x < math.inf, "finite and above 0"),
        ("floor", lambda x: x is None or math.isfinite(x), "finite"),
        ("expectile_tau", lambda x: 0 < x < 1, "above 0 and below 1; 0.5 is risk-neutral"),
        ("epsilon random_fraction gae_lambda", lambda x: 0 <= x <= 1, "at least 0 and at most 1"),
        ("clip", lambda x: 0 < x < 1, "above 0 and below 1"),
        ("gamma", lambda x: x is None or 0 <= x < 1, "at least 0 and below 1"),
    ):
        for name in flags.split():
            if not ok(getattr(args, name)):
                sys.exit(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be {rule}.")
    try:
        env = behaviour_env(args.env_id)
    except Exception as error:
        sys.exit(f"--env-id {args.env_id}: {str(error).strip().splitlines()[0].rstrip('.')}.")
    if not isinstance(env.action_space, gym.spaces.Discrete) or env.action_space.start != 0:
        sys.exit(f"--env-id {args.env_id}: its actions are {env.action_space}; only Discrete ones work here.")
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        sys.exit(f"--env-id {args.env_id}: its observations are {env.observation_space}; only a vector works here.")
    env.reset(seed=0)
    tabular, cartpole = args.env_id in ("MachineReplacement", "RiverSwim"), args.env_id.startswith("CartPole")
    if args.estimator == "resample" and get_state(env) is None:
        sys.exit(f"--estimator resample: the state of {args.env_id} cannot be restored; use --estimator action-noise.")
    usual = {"gamma": 0.9 if tabular else 0.995, "start_steps": 100_000 if cartpole else 400_000}
    usual |= {"finish_steps": 60_000 if cartpole else 300_000}
    args = replace(args, **{name: value for name, value in usual.items() if getattr(args, name) is None})
    D, A = env.observation_space.shape[0], int(env.action_space.n)
    torch.set_num_threads(1)  # the networks are too small to share

    # what is asked for, and what exists
    levels, sizes = (
        ((0.1, 0.5, 0.9), (1000, 10_000, 100_000)) if args.grid else ((args.expectile_tau,), (args.dataset_size,))
    )
    try:
        tempfile.TemporaryFile(dir=get_dataset_path()).close()
    except OSError as error:
        sys.exit(f"Minari's folder {error.filename}: cannot write there ({error.strerror}); set MINARI_DATASETS_PATH.")
    jobs = []
    for tau, size in [(tau, size) for tau in levels for size in sizes]:
        dataset_id = names(args.env_id, tau, size, args.random_fraction)[1]
        if get_dataset_path(dataset_id).exists() and not args.overwrite:
            print(f"{dataset_id} exists and is left alone; --overwrite replaces it.")
        else:
            jobs.append((tau, size, dataset_id))
    if not jobs:
        sys.exit(0)

    # policies: the asked ones and the neutral reference, found or to be trained
    policies, plan = checkpoint["policies"] if checkpoint else {}, []
    needed = sorted({tau for tau, _, _ in jobs} | {0.5}, key=lambda tau: abs(tau - 0.5))
    policy_dir = args.policy_dir or os.path.join(os.path.dirname(os.path.abspath(__file__)), "docs", "policies")
    if tabular:  # exact: no training, no files
        P, R = (machine_replacement if args.env_id == "MachineReplacement" else riverswim)()
        if args.estimator == "resample":
            P = np.random.default_rng([args.seed, 0]).multinomial(args.num_resamples, P) / args.num_resamples
        for tau in needed:
            best = expectile_value_iteration(P, R, tau, args.gamma).argmax(-1)  # [S]
            policies[names(args.env_id, tau)[0]] = {"actor": {"0.weight": 1e3 * torch.eye(A)[best].T}}  # [A, S]
    for tau in [] if tabular else [None, *needed]:
        name = names(args.env_id, tau)[0]
        path = os.path.join(policy_dir, f"{name}.pt")
        if name in policies:  # trained before the run was interrupted
            continue
        if args.retrain or not os.path.exists(path):
            plan.append(tau)
            continue
        try:
            policies[name] = torch.load(path, weights_only=True)
            stored = policies[name]["args"]
        except Exception as error:
            sys.exit(f"{path}: damaged ({type(error).__name__}); delete it to train the policy again, or --retrain.")
        for field in TRAINING.split():
            if stored[field] != getattr(args, field):
                flag = f"--{field.replace('_', '-')} {stored[field]}"
                sys.exit(f"{path}: trained with {flag}; leave that argument out, or train a new policy with --retrain.")
    if plan == [None]:
        plan = []

    # run folder, new or as the checkpoint left it
    folder = os.path.join(
        args.output_dir, f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{int(time.time())}"
    )
    folder, rows = (os.path.normpath(args.resume), checkpoint["rows"]) if checkpoint else (folder, [])
    try:
        os.makedirs(folder, exist_ok=bool(checkpoint))
        write_file(folder, "args.json", json.dumps(asdict(replace(args, resume=None)), indent=2).encode())
        write_file(folder, "metrics.csv", b"")  # rows after the checkpoint are made again
        append_rows(folder, rows)
        if plan and not args.retrain:
            os.makedirs(policy_dir, exist_ok=True)
            tempfile.TemporaryFile(dir=policy_dir).close()
    except FileExistsError:
        sys.exit(f"{folder} exists: a run of this name started in this second; choose another --exp-name.")
    except OSError as error:
        sys.exit(
            f"{error.filename}: cannot write there ({error.strerror}); choose another --output-dir or --policy-dir."
        )
    track = start_tracking(args, os.path.basename(folder), f"{args.env_id} behaviour")

    def save_checkpoint(current=None):
        state = {"script": "gen_expectile_data.py", "args": asdict(replace(args, resume=None)), "rows": rows}
        torch.save(state | {"policies": policies, "current": current}, buffer := io.BytesIO())
        write_file(folder, "checkpoint.pt", buffer.getvalue())

    current = checkpoint and checkpoint["current"]
    if not checkpoint:
        save_checkpoint()
    stop = []
    signal.signal(signal.SIGINT, lambda *_: stop.append("Ctrl-C"))  # taken between two rollouts
    random_return = episode_returns(env, None, args.eval_episodes, [args.seed, 2]).mean().item()
    floor = {"CartPole-v1": 475.0, "LunarLander-v3": 220.0}.get(args.env_id, env.spec.reward_threshold)
    floor = next(x for x in (args.floor, floor, random_return) if x is not None)

    for tau in plan:
        name = names(args.env_id, tau)[0]
        neutral = tau is None
        print(
            f"{name}: "
            + ("training the neutral start that every tau shares" if neutral else f"expectile training, tau {tau}")
        )
        torch.manual_seed(args.seed)
        actor = network(D, A, args.hidden_dim, 0.01)
        critic = network(D, 1 if neutral else A, args.hidden_dim, 1.0)  # the start's scores states, not actions
        if not neutral:
            actor.load_state_dict(policies[names(args.env_id, None)[0]]["actor"])
        lr, coef, steps = (
            (args.start_lr, args.start_entropy, args.start_steps)
            if neutral
            else (args.finish_lr, args.finish_entropy, args.finish_steps)
        )
        optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr, eps=1e-5)
        generator = torch.Generator().manual_seed(args.seed)
        sims = [Simulator(args.env_id, args.estimator == "resample" and not neutral) for _ in range(args.num_envs)]
        first, recent = 0, []
        if current and current["name"] == name:
            first, recent = current["rollout"], current["recent"]
            for part, stored in ((actor, "actor"), (critic, "critic"), (optimizer, "optimizer")):
                part.load_state_dict(current[stored])
            generator.set_state(current["generator"])
            for sim, (seed, actions) in zip(sims, current["episodes"]):
                sim.reset(seed, actions)
        else:
            for sim in sims:
                sim.reset(torch.randint(2**31, (1,), generator=generator).item())
        per_round = math.ceil(steps / (args.num_envs * args.num_steps))
        epsilon, level = (0.0, 0.5) if neutral else (args.epsilon, tau)
        bar = tqdm(range(first, per_round * args.max_rounds), initial=first, total=per_round, desc=name, unit="rollout")
        for i in bar:
            started = time.time()
            optimizer.param_groups[0]["lr"] = lr * (1 - i % per_round / per_round)
            roll, finished = rollout(sims, actor, args, epsilon, generator, i)
            target, advantage = targets(roll, actor, critic, level, epsilon, args.gamma, args.gae_lambda)
            train_actor = neutral or i >= args.critic_rollouts
            metrics = update(roll, actor, critic, optimizer, args, coef, train_actor, target, advantage, generator)
            recent = (recent + finished)[-100:]
            row = {"policy": name, "rollout": i + 1, "env_steps": (i + 1) * args.num_envs * args.num_steps}
            row |= dict(
                zip(
                    ("charts/episode_return", "charts/episode_length"),
                    np.mean(recent, 0).tolist() if recent else (math.nan,) * 2,
                )
            )
            row |= metrics | {"charts/steps_per_second": args.num_envs * args.num_steps / (time.time() - started)}
            rows.append(row)
            append_rows(folder, rows[-1:])
            if track:
                track.log(row)
            bar.set_postfix_str(f"return={row['charts/episode_return']:.1f}, length={row['charts/episode_length']:.0f}")
            if (i + 1) % args.checkpoint_interval == 0 or stop:
                current = {"name": name, "rollout": i + 1, "recent": recent, "generator": generator.get_state()}
                current |= {"actor": actor.state_dict(), "critic": critic.state_dict()}
                current |= {"optimizer": optimizer.state_dict(), "episodes": [(s.seed, s.actions) for s in sims]}
                save_checkpoint(current)
                if stop:
                    bar.close()
                    print(f"Stopped. To go on: python gen_expectile_data.py --resume {folder}")
                    sys.exit(130)
            if (i + 1) % per_round == 0:
                greedy_returns = episode_returns(env, actor, args.eval_episodes, [args.seed, 3, i])
                score = greedy_returns.mean().item()
                if score >= floor:
                    break
                tqdm.write(
                    f"{name}: greedy return {score:.1f} is below the floor {floor:g}; training goes on.",
                    file=sys.stderr,
                )
        else:
            bar.close()
            sys.exit(
                f"{name}: greedy return {score:.1f} after {args.max_rounds} rounds, below the floor {floor:g}; nothing is stored. Try another --seed, more --finish-steps or a lower --floor."
            )
        bar.close()
        print(f"{name}: greedy return {score:.1f} over {args.eval_episodes} episodes")
        policies[name] = {"args": {"seed": args.seed} | {field: getattr(args, field) for field in TRAINING.split()}}
        policies[name] |= {
            "name": name,
            "actor": actor.state_dict(),
            "env_steps": row["env_steps"],
            "greedy_return": score,
        }
        policies[name] |= {
            "greedy_return_std": greedy_returns.std().item(),
            "eval_episodes": args.eval_episodes,
            "random_return": random_return,
        }
        torch.save(policies[name], buffer := io.BytesIO())
        own = [row for row in rows if row["policy"] == name]
        log = io.StringIO()
        writer = csv.DictWriter(log, own[0])
        writer.writeheader()
        writer.writerows(own)
        for place in (folder,) if args.retrain else (folder, policy_dir):
            write_file(place, f"{name}.pt", buffer.getvalue())
            write_file(place, f"{name}.csv", log.getvalue().encode())
        save_checkpoint()

    # collection
    results = []
    reference = policies[names(args.env_id, 0.5)[0]]

    def load_actor(policy):
        actor = nn.Sequential(nn.Linear(D, A, bias=False)) if tabular else network(D, A, args.hidden_dim, 0.01)
        actor.load_state_dict(policy["actor"])
        return actor

    if tabular:
        reference |= {"random_return": random_return}
        reference |= {
            "greedy_return": episode_returns(env, load_actor(reference), args.eval_episodes, [args.seed, 3])
            .mean()
            .item()
        }
    for tau, size, dataset_id in jobs:
        started = time.time()
        policy = policies[names(args.env_id, tau)[0]]
        episodes = collect_episodes(env, load_actor(policy), args, size)
        store_dataset(
            dataset_id,
            episodes,
            env,
            args.overwrite,
            algorithm_name="x",
            author="ERSAC",
            description="d",
            ref_min_score=reference["random_return"],
            ref_max_score=reference["greedy_return"],
            requirements=[],
        )
        print(dataset_id, len(episodes), np.mean([sum(e["rewards"]) for e in episodes]), time.time() - started)
