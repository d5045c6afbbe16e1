# docs: docs/gen_expectile_data.md
"""Offline data from policies that seek or avoid risk: "Offline Data Generation via Dynamic Expectile Risk Policies".

An actor-critic whose target is the tau-expectile over what may follow an action trains the policy; running it with
epsilon-random actions collects exactly dataset_size transitions, stored as a Minari data set. A risk-averse one:

    python gen_expectile_data.py --env-id LunarLander-v3 --expectile-tau 0.9 --dataset-size 10000
"""

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
from unittest import mock

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
    """folder of trained policies: one found there is used, one missing is trained and put there; None: docs/policies"""
    retrain: bool = False
    """train the policies anew and keep them in the run folder; those in policy_dir stay as they are"""
    estimator: Literal["action-noise", "resample"] = "action-noise"
    """the expectile's outcomes: all executed actions, known exactly, or next states resampled from a restored state"""
    num_resamples: int = 10
    """N_s, the next states drawn from the same (s, a) by the resample estimator"""
    start_steps: int | None = None
    """environment steps of the neutral start that all taus share; None is 100k for CartPole, 400k elsewhere"""
    finish_steps: int | None = None
    """environment steps with the expectile critic, for each tau; None is 160k for CartPole, 300k elsewhere"""
    floor: float | None = None
    """greedy return that a policy must reach; None is Gymnasium's threshold (LunarLander's neutral policies: 220)"""
    hidden_dim: int = 128
    """width of the two hidden layers of actor and critic"""
    policy_lr: float = 1e-3
    """Adam step size of the neutral start, annealed to 0; half of it in the expectile training"""
    gamma: float | None = None
    """discount factor in [0, 1); None is 0.9 for the tabular MDPs and 0.995 elsewhere"""
    advantage_floor: float | None = None
    """advantages are divided by their standard deviation, at least by this; None is 0.1 for CartPole, 0 elsewhere"""
    reward_scale: float | None = None
    """rewards are multiplied by this in training, never in the data; None is 0.005 for CartPole, 0.05 elsewhere"""

    eval_episodes: int = 100
    """greedy episodes that measure a policy, and random ones that measure the random policy"""
    checkpoint_interval: int = 10
    """rollouts between two checkpoints of the training"""
    resume: str | None = None
    """run folder to continue; all other arguments come from there"""


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
    if (name := f"ersac/{env_id}-v0") not in gym.registry:
        gym.register(name, "gen_expectile_data:TabularMDP", max_episode_steps=200, kwargs={"env_id": env_id})


def behaviour_env(env_id):
    """The environment of the data; the states of a table become one-hot vectors, so that networks can read them."""
    if env_id in ("MachineReplacement", "RiverSwim"):
        return gym.wrappers.FlattenObservation(gym.make(f"ersac/{env_id}-v0", disable_env_checker=True))
    return gym.make(env_id, disable_env_checker=True)


class Simulator:
    """An environment in training. A seed and the actions since lead to where it is: so a checkpoint can restore it."""

    def __init__(self, env_id):
        self.env = behaviour_env(env_id)

    def reset(self, seed, actions=()):
        self.seed, self.actions, self.episode_return = seed, [], 0.0
        self.obs, _ = self.env.reset(seed=seed)
        for action in actions:
            self.step(action)

    def step(self, action):
        self.obs, reward, terminated, truncated, _ = self.env.step(action)
        self.actions.append(action)
        self.episode_return += float(reward)
        return self.obs, reward, terminated, truncated


def get_state(env):
    """All that set_state needs to bring another copy of the environment here; None where that would be unfaithful."""
    e = env.unwrapped
    if hasattr(e, "lander"):  # Box2D hides the impulses of a contact and a body's sleep timer: only flight is restored
        bodies = [((*b.position,), b.angle, (*b.linearVelocity,), b.angularVelocity) for b in (e.lander, *e.legs)]
        return None if any(leg.ground_contact for leg in e.legs) else (bodies, e.prev_shaping)
    if type(e).__name__ == "TabularMDP" or type(e).__module__.startswith("gymnasium.envs.classic_control"):
        return np.array(e.state)


def set_state(env, state):
    """Go to a state that get_state returned. LunarLander: from an episode with the same seed, for the same ground."""
    e = env.unwrapped
    if not hasattr(e, "lander"):
        e.state, e.steps_beyond_terminated = state.copy() if state.ndim else int(state), None  # CartPole counts those
        return
    e.game_over, e.prev_shaping = False, state[1]
    for body, (position, angle, velocity, spin) in zip((e.lander, *e.legs), state[0]):
        body.transform, body.linearVelocity, body.angularVelocity = (position, angle), velocity, spin
        body.awake, body.ground_contact = True, False


# ===== Actor and critic
def network(obs_dim, out_dim, hidden_dim, head_gain):
    """Two hidden layers. An actor has A outputs, its logits; a critic has 1 + A, see action_values."""
    layers = [nn.Linear(obs_dim, hidden_dim), nn.Linear(hidden_dim, hidden_dim), nn.Linear(hidden_dim, out_dim)]
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), head_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def action_values(critic, obs, tau):
    """A common value plus each action's own difference, 0 at first: an action that is rarely seen neither lags behind
    nor stands out by chance, which an expectile would take for risk. The neutral start (tau None) has one value."""
    out = critic(obs)  # [..., 1 + A]
    return out[..., :1] if tau is None else out[..., :1] + out[..., 1:]  # [..., 1 or A]


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


def risk_weights(values, probs, tau):
    """The expectile e of values along the last axis, and rho: e = sum(probs rho values), sum(probs rho) = 1. Where e is
    risk-averse, a bad outcome has rho > 1 and counts for more than its probability."""
    e = expectile(values, probs, tau)
    rho = np.where(values < e[..., None], tau, 1 - tau)
    return e, rho / (probs * rho).sum(-1, keepdims=True)


def traces(delta, decay, done):
    """G_t = delta_t + decay_t G_t+1, without the second term at the end of an episode or of the rollout. All [T, E]"""
    G = delta.copy()
    for t in reversed(range(len(G) - 1)):
        G[t] += decay[t] * ~done[t] * G[t + 1]
    return G


@torch.no_grad()
def targets(roll, outcomes, actor, critic, tau, args):
    """The critic's target and the actor's advantage, [T, E] each. For the neutral start this is GAE: w = q = v."""

    def values(obs):  # [..., D] -> w [..., A], q [..., A], rho [..., A, A], v [...]
        obs = torch.from_numpy(obs).float()
        w, pi = action_values(critic, obs, tau).double().numpy(), actor(obs).double().softmax(-1).numpy()
        p = (1 - args.epsilon) * np.eye(w.shape[-1]) + args.epsilon / w.shape[-1]  # p[a, b]: a is chosen, b executed
        q, rho = (w, None) if outcomes else risk_weights(w[..., None, :], p, tau or 0.5)
        return w, q, rho, (pi * q).sum(-1)

    w, q, rho, v = values(roll["obs"])
    t, i = np.indices(v.shape)  # step and environment
    a, b = (roll[key].clip(max=w.shape[-1] - 1) for key in ("chosen", "executed"))  # the neutral start has one column
    done, decay = roll["terminated"] | roll["truncated"], 0.97 * args.gamma
    # what may come next, [T, E] or [T, E, N_s]; bootstrapping stops at terminations, never at truncations
    next_obs, reward, terminated = outcomes or (roll["next_obs"], roll["reward"], roll["terminated"])
    outcome = args.reward_scale * reward + args.gamma * ~terminated * values(next_obs)[-1]
    if outcomes:  # resample: the critic scores chosen actions, by the expectile over the outcomes
        y, rho = risk_weights(outcome, 1 / outcome.shape[-1], tau)  # the first outcome is the one that happened
        G = traces(y - q[t, i, a], decay * np.minimum(rho[..., 0], 1), done)
        return q[t, i, a] + G, q[t, i, a] - v + G
    rho = rho[t, i, a, b]  # action-noise: the critic scores executed actions by their mean, the expectile is over them
    G = traces(outcome - w[t, i, b], decay * np.minimum(np.roll(rho, -1, 0), 1), done)  # rho of the next step
    return w[t, i, b] + G, q[t, i, a] - v + rho * G


# ===== Policy training
@torch.no_grad()
def rollout(sims, actor, epsilon, generator, keep_states):
    """256 steps of all simulators. The actor chooses the action; with probability epsilon a random one is executed."""
    steps, states, finished = [], [], []
    for _ in range(256):
        obs = np.stack([sim.obs for sim in sims])  # [E, D]
        pi = actor(torch.from_numpy(obs).float()).softmax(-1)  # [E, A]
        chosen = torch.multinomial(pi, 1, generator=generator)[:, 0]  # [E]
        random = torch.randint(pi.shape[-1], chosen.shape, generator=generator)
        executed = torch.where(torch.rand(chosen.shape, generator=generator) < epsilon, random, chosen)
        states.append([keep_states and (sim.seed, get_state(sim.env)) for sim in sims])
        results = [sim.step(b) for sim, b in zip(sims, executed.tolist())]
        steps.append((obs, chosen.numpy(), executed.numpy(), *map(np.array, zip(*results))))
        for sim, (_, _, terminated, truncated) in zip(sims, results):
            if terminated or truncated:
                finished.append((sim.episode_return, len(sim.actions)))
                sim.reset(torch.randint(2**31, (1,), generator=generator).item())
    columns = ("obs", "chosen", "executed", "next_obs", "reward", "terminated", "truncated")
    return dict(zip(columns, map(np.stack, zip(*steps)))) | {"states": states}, finished  # arrays [T, E, ...]


def resample(env, roll, num_resamples, epsilon, rng):
    """N_s outcomes for every (s, a) of a rollout, [T, E, N_s, ...]: the one that happened, and others drawn with the
    noise and the environment's own randomness. Where the state cannot be restored, the first stands for all."""
    columns = (roll["next_obs"], roll["reward"], roll["terminated"])
    next_obs, reward, terminated = (np.repeat(x[:, :, None], num_resamples, 2) for x in columns)
    for e, t in np.ndindex(roll["reward"].T.shape):
        seed, state = roll["states"][t][e]
        if t == 0 or seed != roll["states"][t - 1][e][0]:
            env.reset(seed=seed)
            env.unwrapped.np_random = rng
        for n in range(1, num_resamples if state is not None else 0):
            set_state(env, state)
            b = int(rng.integers(env.action_space.n) if rng.random() < epsilon else roll["chosen"][t, e])
            next_obs[t, e, n], reward[t, e, n], terminated[t, e, n], *_ = env.unwrapped.step(b)
    return next_obs, reward, terminated


def update(roll, outcomes, actor, critic, optimizer, tau, train_actor, generator, args):
    """Four passes over a rollout: least squares for the critic, PPO's clipped steps for the actor. Returns metrics."""
    obs, chosen, executed = (torch.from_numpy(roll[key]).flatten(0, 1) for key in ("obs", "chosen", "executed"))
    obs, scored = obs.float(), (chosen if outcomes else executed)[:, None] * (tau is not None)  # [B, D], [B, 1]
    entropy_coef, sums = 0.01 if tau is None else 0.005, []
    with torch.no_grad():
        old_log_pi = actor(obs).log_softmax(-1).gather(-1, chosen[:, None])[:, 0]  # [B]
    for _ in range(4):  # new targets for each pass: risk cuts the traces short, so the critic needs the sweeps
        both = targets(roll, outcomes, actor, critic, tau, args)
        target, advantage = (torch.from_numpy(x).float().flatten() for x in both)  # [B]
        for i in torch.randperm(len(obs), generator=generator).split(512):
            log_pi = actor(obs[i]).log_softmax(-1)  # [M, A]
            log_ratio = log_pi.gather(-1, chosen[i, None])[:, 0] - old_log_pi[i]  # [M]
            ratio, std = log_ratio.exp(), advantage[i].std(correction=0)
            scale = std.clamp(min=args.advantage_floor) if args.advantage_floor else std + 1e-8  # do not magnify noise
            adv = (advantage[i] - advantage[i].mean()) / scale  # [M]
            actor_loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            policy_entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
            critic_loss = (action_values(critic, obs[i], tau).gather(-1, scored[i])[:, 0] - target[i]).square().mean()
            optimizer.zero_grad()
            (0.5 * critic_loss + train_actor * (actor_loss - entropy_coef * policy_entropy)).backward()
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            optimizer.step()
            sums.append([x.item() for x in (critic_loss, actor_loss, policy_entropy, (ratio - 1 - log_ratio).mean())])
    columns = ("losses/critic_loss", "losses/actor_loss", "charts/policy_entropy", "charts/approx_kl")
    return dict(zip(columns, np.mean(sums, 0).tolist()))


# ===== Collection
def dataset_name(env_id, expectile_tau, dataset_size):
    """Name of our own data sets, such as ersac/lunarlander/tau90-10k-v0. Minari allows no dots."""
    env = re.sub(r"-v\d+$", "", env_id.split("/")[-1]).lower()
    tau = f"{100 * expectile_tau:.7g}".zfill(2).replace(".", "p")  # 0.05 -> 05, 0.125 -> 12p5
    size = f"{dataset_size // 1000}k" if dataset_size % 1000 == 0 else dataset_size
    return f"ersac/{env}/tau{tau}-{size}-v0"


@torch.no_grad()
def play_episode(env, actor, rng, epsilon=0.0, greedy=False, limit=None):
    """An episode of the actor, or of the random policy if it is None. The stored action is the executed one. An episode
    cut off after limit steps counts as truncated."""
    seed = int(rng.integers(2**31))
    observations, steps, done = [env.reset(seed=seed)[0]], [], False
    while not done:
        action = int(rng.integers(env.action_space.n))
        if actor is not None and rng.random() >= epsilon:
            pi = actor(torch.from_numpy(observations[-1]).float()).double().softmax(-1).numpy()  # [A]
            action = int(pi.argmax() if greedy else min(np.searchsorted(pi.cumsum(), rng.random()), len(pi) - 1))
        obs, reward, terminated, truncated, _ = env.step(action)
        truncated = truncated or (len(steps) + 1 == limit and not terminated)
        observations.append(obs)
        steps.append((action, float(reward), bool(terminated), bool(truncated)))
        done = terminated or truncated
    columns = dict(zip(("actions", "rewards", "terminations", "truncations"), map(np.array, zip(*steps))))
    return {"seed": seed, "observations": np.array(observations)} | columns  # [T + 1, D] and [T] each


def episode_returns(env, actor, episodes, seed):
    """Undiscounted returns of greedy episodes, or of random ones if the actor is None. [episodes]"""
    rng = np.random.default_rng(seed)
    return np.array([play_episode(env, actor, rng, greedy=True)["rewards"].sum() for _ in range(episodes)])


def collect_episodes(env, actor, args, size):
    """Episodes with exactly size transitions in all; a smaller data set is the beginning of a larger one."""
    rng, episodes, total, random_total = np.random.default_rng([args.seed, 0]), [], 0, 0
    with tqdm(total=size, desc="collection", unit="step", mininterval=1) as bar:
        while total < size:
            policy = None if random_total < args.random_fraction * (total + 1) else actor
            episodes.append(play_episode(env, policy, rng, args.epsilon, limit=size - total))
            steps = len(episodes[-1]["actions"])
            total, random_total = total + steps, random_total + (steps if policy is None else 0)
            bar.update(steps)
            bar.set_postfix_str(f"return={np.mean([e['rewards'].sum() for e in episodes]):.1f}", refresh=False)
    return episodes


def store_dataset(dataset_id, episodes, env, overwrite, **metadata):
    """Build the Minari data set in a hidden folder and rename it: a killed run never leaves half a data set."""
    root, path = get_dataset_path(), get_dataset_path(dataset_id)
    for leftover in root.glob(".ersac-*"):
        if time.time() - leftover.stat().st_mtime > 3600:
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".ersac-", dir=root) as hidden, warnings.catch_warnings(action="ignore"):
        buffers = [EpisodeBuffer(id=i, **episode) for i, episode in enumerate(episodes)]
        with mock.patch.dict(os.environ, MINARI_DATASETS_PATH=hidden):
            minari.create_dataset_from_buffers(dataset_id, buffers, env=env, **metadata)
        os.makedirs(path.parent, exist_ok=True)
        if overwrite and path.exists():
            os.rename(path, os.path.join(hidden, "replaced"))
        if not path.exists():  # it does if another run made it meanwhile
            os.rename(os.path.join(hidden, dataset_id), path)


# ===== Logging, checkpoints
def write_file(folder, name, content):
    """Write bytes under a temporary name, sync, rename: no reader ever sees half a file."""
    path = os.path.join(folder, name)
    try:
        with open(path + ".tmp", "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    except OSError as error:
        sys.exit(f"{path}: cannot be written ({error.strerror}); make room, then --resume the run if it had begun.")


def append_rows(folder, rows):
    """Add rows to metrics.csv, below a header if the file is new."""
    try:
        with open(os.path.join(folder, "metrics.csv"), "a", newline="") as f:
            writer = csv.DictWriter(f, rows[0] if rows else [])
            if rows and f.tell() == 0:
                writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        sys.exit(f"{folder}/metrics.csv: cannot be written ({error.strerror}); make room there, then --resume the run.")


def load_checkpoint(folder, script):
    """The checkpoint of a run folder, or one line on why there is none. weights_only: a stranger's code never runs."""
    path = os.path.join(folder, "checkpoint.pt")
    if not os.path.isfile(path):
        sys.exit(f"--resume {folder}: there is no checkpoint.pt; give the run folder of an interrupted run.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        sys.exit(f"--resume {folder}: checkpoint.pt is damaged ({type(error).__name__}); start the run again.")
    if not isinstance(checkpoint, dict) or checkpoint.get("script") != script or "args" not in checkpoint:
        sys.exit(f"--resume {folder}: checkpoint.pt was not written by {script}; resume it with the script that did.")
    return checkpoint


def resumed_args(args, stored):
    """The arguments of the run to resume; whatever else is on the command line must agree with them."""
    known = {field.name for field in fields(args)} - {"resume", "eval_only"}
    stored = replace(args, **{name: value for name, value in stored.items() if name in known})
    given = tyro.cli(type(args), default=stored)  # once more, so that a flag that repeats a default counts as given
    for name in known:
        value, had = getattr(given, name), getattr(stored, name)
        if value != had:
            sys.exit(f"--{name.replace('_', '-')} {value} contradicts the run to resume, which has {had}; drop it.")
    return given


def start_tracking(args, run_name, group):
    """A W&B run with the run folder's name as its id, so that a resumed run continues it. No W&B never stops a run."""
    if args.track:
        try:
            import wandb

            names = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=run_name, id=run_name)
            return wandb.init(**names, group=group, config=asdict(args), resume="allow", reinit="create_new")
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            print(f"W&B is not available ({why}); the run goes on without it.", file=sys.stderr)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    checkpoint = load_checkpoint(args.resume, "gen_expectile_data.py") if args.resume else None
    if checkpoint:
        args = resumed_args(args, checkpoint["args"])
    for flags, ok, rule in (
        ("dataset_size hidden_dim eval_episodes checkpoint_interval", lambda x: x >= 1, "at least 1"),
        ("start_steps finish_steps", lambda x: x is None or x >= 1, "at least 1"),
        ("num_resamples", lambda x: x >= 2, "at least 2"),
        ("seed", lambda x: 0 <= x < 2**32, "at least 0 and below 2^32"),
        ("policy_lr", lambda x: 0 < x < math.inf, "finite and above 0"),
        ("reward_scale advantage_floor", lambda x: x is None or 0 <= x < math.inf, "finite and at least 0"),
        ("floor", lambda x: x is None or math.isfinite(x), "finite"),
        ("expectile_tau", lambda x: 0 < x < 1, "above 0 and below 1; 0.5 is risk-neutral"),
        ("epsilon random_fraction", lambda x: 0 <= x <= 1, "at least 0 and at most 1"),
        ("gamma", lambda x: x is None or 0 <= x < 1, "at least 0 and below 1"),
    ):
        for name in flags.split():
            if not ok(getattr(args, name)):
                sys.exit(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be {rule}.")
    try:
        tempfile.TemporaryFile(dir=get_dataset_path()).close()
    except OSError as error:
        sys.exit(f"{error.filename}: Minari cannot write there ({error.strerror}); set MINARI_DATASETS_PATH.")
    try:
        env = behaviour_env(args.env_id)
        env.reset(seed=0)
    except Exception as error:
        sys.exit(f"--env-id {args.env_id}: {' '.join(str(error).split()).rstrip('.')}.")
    if not isinstance(env.action_space, gym.spaces.Discrete) or env.action_space.start != 0:
        sys.exit(f"--env-id {args.env_id}: its actions are {env.action_space}, but they must be Discrete.")
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        sys.exit(f"--env-id {args.env_id}: its observations are {env.observation_space}, but they must be a vector.")
    if args.estimator == "resample" and get_state(env) is None:
        sys.exit(f"--estimator resample: the state of {args.env_id} cannot be restored; use --estimator action-noise.")
    tabular, cartpole = args.env_id in ("MachineReplacement", "RiverSwim"), args.env_id.startswith("CartPole")
    usual = (100_000, 160_000, 0.005, 0.1) if cartpole else (400_000, 300_000, 0.05, 0.0)
    usual = dict(zip(("start_steps", "finish_steps", "reward_scale", "advantage_floor"), usual))
    usual["gamma"] = 0.9 if tabular else 0.995
    args = replace(args, **{key: value for key, value in usual.items() if getattr(args, key) is None})
    D, A = env.observation_space.shape[0], int(env.action_space.n)
    torch.set_num_threads(1)  # the networks are too small to share

    # the data sets that are asked for and do not exist
    jobs, names = [], {None: "start", 0.5: "tau50"}
    mixture = f"-random{100 * args.random_fraction:02.7g}-".replace(".", "p") if args.random_fraction else "-"
    for tau in (0.1, 0.5, 0.9) if args.grid else (args.expectile_tau,):
        for size in (1000, 10_000, 100_000) if args.grid else (args.dataset_size,):
            _, env_name, label = dataset_name(args.env_id, tau, size).split("/")
            dataset_id, names[tau] = f"ersac/{env_name}/{label.replace('-', mixture, 1)}", label.split("-")[0]
            if get_dataset_path(dataset_id).exists() and not args.overwrite:
                print(f"{dataset_id} exists and is left alone; --overwrite replaces it.")
            else:
                jobs.append((tau, size, dataset_id))
    if not jobs:
        sys.exit(0)

    # their policies, the neutral one for reference, the start of all (tau None): at hand, or to be trained
    state = checkpoint or {"policies": {}, "rows": [], "current": {}}
    policies, rows, current, plan = state["policies"], state["rows"], state["current"], []
    policy_dir = args.policy_dir or os.path.join(os.path.dirname(os.path.abspath(__file__)), "docs", "policies")
    shaping = "env_id epsilon estimator num_resamples start_steps finish_steps hidden_dim policy_lr gamma reward_scale"
    shaping = {key: getattr(args, key) for key in (shaping + " advantage_floor").split()}  # these and the seed
    for tau in [None, 0.5, *sorted({tau for tau, _, _ in jobs} - {0.5})][tabular:]:
        name = names[tau] = f"{env_name}-{names[tau]}"
        path = os.path.join(policy_dir, name, "policy.pt")
        if tau not in policies and (args.retrain or tabular or current.get("name") == name or not os.path.exists(path)):
            plan.append(tau)
        elif tau not in policies:
            try:
                policies[tau] = torch.load(path, weights_only=True)
                differing = [key for key in shaping if policies[tau]["args"][key] != shaping[key]]
            except Exception as error:
                sys.exit(f"{path}: damaged ({type(error).__name__}); delete it or use --retrain.")
            if differing:
                sys.exit(f"{path}: trained with another {' and '.join(differing)}; use --retrain.")

    # run folder, new or as the checkpoint left it
    run_name = f"{args.env_id.split('/')[-1]}__{args.exp_name}__{args.seed}__{int(time.time())}"
    folder = os.path.normpath(args.resume or os.path.join(args.output_dir, run_name))
    keep_in = [folder] if args.retrain or tabular or not plan else [folder, policy_dir]
    try:
        os.makedirs(folder, exist_ok=bool(checkpoint))
        os.makedirs(keep_in[-1], exist_ok=True)
        tempfile.TemporaryFile(dir=keep_in[-1]).close()
        write_file(folder, "args.json", json.dumps(asdict(replace(args, resume=None)), indent=2).encode())
        write_file(folder, "metrics.csv", b"")  # rows after the checkpoint are made again
        append_rows(folder, rows)
    except FileExistsError as error:
        sys.exit(f"{error.filename} exists; choose another --exp-name or --policy-dir.")
    except OSError as error:
        sys.exit(f"{error.filename}: cannot write there ({error.strerror}); set --output-dir or --policy-dir.")
    track = start_tracking(args, os.path.basename(folder), f"{args.env_id} behaviour")

    def save_checkpoint(current):
        state = {"script": "gen_expectile_data.py", "args": asdict(replace(args, resume=None)), "rows": rows}
        torch.save(state | {"policies": policies, "current": current}, buffer := io.BytesIO())
        write_file(folder, "checkpoint.pt", buffer.getvalue())

    save_checkpoint(current)
    stopped = f"Stopped. To go on from the last checkpoint: python gen_expectile_data.py --resume {folder}"
    signal.signal(signal.SIGINT, lambda *_: print(stopped) or sys.exit(130))
    random_return = episode_returns(env, None, args.eval_episodes, [args.seed, 1]).mean().item() if plan else 0.0
    for tau in plan:
        if tabular:  # nothing to train: the expectile's Bellman equation is solved, its best actions are the policy
            P, R = {"MachineReplacement": machine_replacement, "RiverSwim": riverswim}[args.env_id]()
            if args.estimator == "resample":
                P = np.random.default_rng([args.seed, 2]).multinomial(args.num_resamples, P) / args.num_resamples
            best = expectile_value_iteration(P, R, tau, args.gamma).argmax(-1)  # [S]
            actor = nn.Linear(D, A, bias=False)
            actor.weight.data = 1e3 * torch.eye(A)[best].T  # [A, S]
            score = episode_returns(env, actor, args.eval_episodes, [args.seed, 4]).mean().item()
            policies[tau] = {"args": shaping, "actor": actor.state_dict()}
            policies[tau] |= {"random_return": random_return, "greedy_return": score}
            continue
        name, resampling = names[tau], tau is not None and args.estimator == "resample"
        expected = 220 if args.env_id == "LunarLander-v3" and tau in (None, 0.5) else env.spec.reward_threshold
        floor = next(x for x in (args.floor, expected, random_return) if x is not None)
        print(f"{name}: " + (f"training with expectile {tau}" if tau else "training the neutral start of all taus"))
        torch.manual_seed(args.seed)
        actor, critic = network(D, A, args.hidden_dim, 0.01), network(D, 1 + A, args.hidden_dim, 1.0)
        critic[-1].weight.data[1:] = 0.0
        epsilon, lr, steps = 0.0, args.policy_lr, args.start_steps
        if tau:
            epsilon, lr, steps = args.epsilon, 0.5 * args.policy_lr, args.finish_steps
            actor.load_state_dict(policies[None]["actor"])
            critic.load_state_dict(policies[None]["critic"])
        optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr, eps=1e-5)
        generator, recent, first, score = torch.Generator().manual_seed(args.seed), [], 0, -math.inf
        sims, twin = [Simulator(args.env_id) for _ in range(16)], behaviour_env(args.env_id)
        places = [(torch.randint(2**31, (1,), generator=generator).item(), ()) for _ in sims]
        if current.get("name") == name:
            first, recent, places = (current[key] for key in ("rollout", "recent", "places"))
            generator.set_state(current["generator"])
            for part, state in zip((actor, critic, optimizer), current["parts"]):
                part.load_state_dict(state)
        for sim, place in zip(sims, places):
            sim.reset(*place)
        per_round = math.ceil(steps / (256 * len(sims)))
        bar = tqdm(range(first, 3 * per_round), name, per_round, unit="rollout", initial=first, mininterval=1)
        for i in bar:
            # sample transitions by executing the current policy; draw the N_s outcomes if they are asked for
            started, rng = time.time(), np.random.default_rng([args.seed, 3, i])
            roll, finished = rollout(sims, actor, epsilon, generator, resampling)
            outcomes = resample(twin, roll, args.num_resamples, epsilon, rng) if resampling else None

            # compute the expectile targets, update value function and policy; a new tau trains the value function first
            optimizer.param_groups[0]["lr"] = lr * (1 - i % per_round / per_round)
            metrics = update(roll, outcomes, actor, critic, optimizer, tau, not tau or i >= 8, generator, args)

            recent = (recent + finished)[-100:]
            episode_return, length = np.mean(recent, 0).tolist() if recent else (math.nan, math.nan)
            rows.append({"policy": name, "rollout": i + 1, "env_steps": (i + 1) * 256 * len(sims)})
            rows[-1] |= {"charts/episode_return": episode_return, "charts/episode_length": length} | metrics
            rows[-1]["charts/steps_per_second"] = 256 * len(sims) / (time.time() - started)
            append_rows(folder, rows[-1:])
            if track:
                track.log(rows[-1], step=len(rows))
            bar.set_postfix_str(f"return={episode_return:.1f}, length={length:.0f}", refresh=False)
            if (i + 1) % per_round == 0:  # a bad policy is never stored: train on, or give up with a word
                score = episode_returns(env, actor, args.eval_episodes, [args.seed, 4, i]).mean().item()
                tqdm.write(f"{name}: greedy return {score:.1f}, the floor is {floor:g}")
                if score >= floor:
                    break
            if (i + 1) % args.checkpoint_interval == 0:
                state = {"name": name, "rollout": i + 1, "recent": recent, "generator": generator.get_state()}
                state["parts"] = [part.state_dict() for part in (actor, critic, optimizer)]
                save_checkpoint(state | {"places": [(sim.seed, sim.actions) for sim in sims]})
        bar.close()
        if score < floor:
            sys.exit(f"{name}: below the floor {floor:g} after three rounds, so nothing is stored; try another --seed.")
        policies[tau] = {"args": {"seed": args.seed} | shaping, "actor": actor.state_dict()}
        policies[tau] |= {"random_return": random_return, "greedy_return": score}
        policies[tau] |= {} if tau else {"critic": critic.state_dict()}
        torch.save(policies[tau], buffer := io.BytesIO())
        for place in (os.path.join(place, name) for place in keep_in):
            os.makedirs(place, exist_ok=True)
            write_file(place, "metrics.csv", b"")
            append_rows(place, [row for row in rows if row["policy"] == name])
            write_file(place, "policy.pt", buffer.getvalue())
        save_checkpoint({})

    # collect the data sets with epsilon-random actions
    scores = {"ref_min_score": policies[0.5]["random_return"], "ref_max_score": policies[0.5]["greedy_return"]}
    result = {"script": "gen_expectile_data.py", "env_id": args.env_id, "seed": args.seed, "datasets": []} | scores
    metadata = scores | {"num_episodes_average_score": args.eval_episodes, "code_permalink": "gen_expectile_data.py"}
    metadata |= {"algorithm_name": "dynamic expectile actor-critic", "author": "the ERSAC reference implementation"}
    metadata["requirements"] = [f"gymnasium{'[box2d]' * ('box2d' in str(env.spec.entry_point))}=={gym.__version__}"]
    for tau, size, dataset_id in jobs:
        started, policy = time.time(), policies[tau]
        actor = nn.Linear(D, A, bias=False) if tabular else network(D, A, args.hidden_dim, 0.01)
        actor.load_state_dict(policy["actor"])
        episodes = collect_episodes(env, actor, args, size)
        description = f"Behaviour policy: dynamic expectiles, tau {tau} (0.1 seeks risk, 0.9 avoids it), greedy return "
        description += f"{policy['greedy_return']:.1f}, training {policy['args']}. Executed actions, random ones with "
        description += f"probability {args.epsilon}; share of a random policy {args.random_fraction}; seed {args.seed}."
        store_dataset(dataset_id, episodes, env, args.overwrite, description=description, **metadata)
        mean = np.mean([episode["rewards"].sum() for episode in episodes]).item()
        summary = {"dataset_id": dataset_id, "transitions": size, "episodes": len(episodes), "return_mean": mean}
        more = {"policy_greedy_return": policy["greedy_return"], "seconds": time.time() - started}
        result["datasets"].append(summary | more)
        print(f"{dataset_id}: {size} transitions, {len(episodes)} episodes, mean return {mean:.1f}")
    write_file(folder, "result.json", json.dumps(result, indent=2).encode())
    if track:
        track.summary.update(result)
        track.finish()
