# docs: docs/gen_expectile_data.md
"""Offline data from policies that seek or avoid risk: Algorithm 5, dynamic expectile risk policies.

An actor-critic whose target is the tau-expectile over what may follow an action trains the policy;
running it with epsilon-random actions collects exactly dataset_size transitions, stored as a Minari
data set. A risk-averse one:

    python gen_expectile_data.py --env-id LunarLander-v3 --expectile-tau 0.9 --dataset-size 10000
"""

import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, replace
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
    exp_name: str = os.path.basename(__file__).removesuffix(".py")
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of the training"""
    output_dir: str = "runs"
    """folder that receives the run folder"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "ersac"
    """W&B project"""
    wandb_entity: str | None = None
    """W&B user or team; None is your default one"""

    env_id: str = "LunarLander-v3"
    """Gymnasium environment with a vector of observations and discrete actions"""
    dataset_size: int = 100_000
    """transitions in the data set"""
    dataset_seed: int = 1
    """seed of the collected episodes: another draw of the data from the same policy"""
    expectile_tau: float = 0.5
    """risk level of the behaviour policy: 0.1 seeks risk, 0.9 avoids it (IQL: the reverse)"""
    epsilon: float = 0.1
    """probability that the executed action is a random one, in expectile training and collection"""
    early_fraction: float = 0.0
    """share of the transitions from a policy stopped early in training (LunarLander, tau 0.5)"""
    switch_prob: float = 0.0
    """probability per step that who acts is drawn again, so that both act in one episode; 0: never"""
    overwrite: bool = False
    """replace a data set that exists; otherwise it is reported and left alone"""

    policy_dir: str | None = None
    """folder of trained policies; None: docs/policies, and for new ones a cache in Minari's folder"""
    retrain: bool = False
    """train the policies anew and keep them in the run folder; those in policy_dir stay"""
    estimator: Literal["action-noise", "resample"] = "action-noise"
    """the expectile's outcomes: executed actions, known exactly, or resampled next states"""
    num_resamples: int = 10
    """N_s, the next states drawn from the same (s, a) by the resample estimator"""
    start_steps: int | None = None
    """environment steps of the neutral start of all taus; None is 100k for CartPole, else 400k"""
    finish_steps: int | None = None
    """environment steps with the expectile critic, per tau; None is 160k for CartPole, else 300k"""
    floor: float | None = None
    """greedy return that a policy must reach; None: Gymnasium's threshold (neutral lander: 220)"""
    hidden_dim: int = 128
    """width of the two hidden layers of actor and critic"""
    policy_lr: float = 1e-3
    """Adam step size of the neutral start, annealed to 0; half of it in the expectile training"""
    gamma: float = 0.995
    """discount factor in [0, 1)"""
    advantage_floor: float | None = None
    """least divisor of the advantages (usually their spread); None is 0.1 for CartPole, else 0"""
    reward_scale: float | None = None
    """factor on the rewards in training, not in the data; None is 0.005 for CartPole, else 0.05"""

    eval_episodes: int = 100
    """greedy episodes that measure a policy, and random ones that measure the random policy"""
    resume: str | None = None
    """run folder to continue; only --eval-episodes may change"""


# ===== Files, checkpoints, tracking
def write_file(folder, name, content):
    """Write bytes under a temporary name and rename: no reader ever sees half a file."""
    path = os.path.join(folder, name)
    try:
        os.makedirs(folder, exist_ok=True)
        with open(path + ".tmp", "wb") as f:
            f.write(content)
        os.replace(path + ".tmp", path)
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}; make room and --resume, or choose another --output-dir.")


def write_metrics(folder, rows):
    """metrics.csv: a header and a line per row."""
    lines = [rows[0].keys()] + [row.values() for row in rows]
    text = "\n".join(",".join(map(str, line)) for line in lines) + "\n"
    write_file(folder, "metrics.csv", text.encode())


def load_checkpoint(args, script):
    """The checkpoint of --resume, and the arguments of its run, of which only a few may change."""
    path = os.path.join(args.resume, "checkpoint.pt")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # runs no foreign code
        stored = dict(checkpoint["args"])
        fits = checkpoint["script"] == script and stored.keys() == asdict(args).keys()
    except Exception:
        fits = False
    if not fits:
        why = f"was not written by {script} but by another version or script"
        sys.exit(f"{path} is missing, is damaged, or {why}; start a new run.")
    for word in sys.argv[1:]:
        flag = word.split("=")[0].replace("_", "-")
        if flag in ("--eval-episodes", "--capture-video", "--total-updates", "--resume"):
            stored.pop(flag[2:].replace("-", "_"), None)
        elif flag.startswith("--"):
            sys.exit(f"{flag} cannot change in a run that has begun; drop it, or start a new run.")
    return checkpoint, replace(args, **stored)


def start_tracking(args, run_name, dataset_id, label, script):
    """A W&B run, continued by a resumed run. If W&B is unavailable, training goes on without it."""
    if not args.track:
        return None
    here = shlex.quote(os.path.dirname(os.path.abspath(__file__)))
    commit = subprocess.getoutput(f"git -C {here} describe --always --dirty 2> /dev/null")
    resolved = {"dataset_id": dataset_id, "label": label, "script": script, "commit": commit}
    group = f"{dataset_id} {label} {script}"
    place = dict(project=args.wandb_project_name, entity=args.wandb_entity, group=group)
    run = dict(name=run_name, id=run_name, resume="allow", tags=[label, script], save_code=True)
    try:
        import wandb

        return wandb.init(**place, **run, config=asdict(args) | resolved, reinit="create_new")
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        print(f"W&B is not available ({why}); the run goes on without it.", file=sys.stderr)


# ===== The environments: whatever Gymnasium has with a vector of observations and discrete actions
class Simulator:
    """An environment in training. A seed and the actions since lead to where it is, so that a
    checkpoint can restore it."""

    def __init__(self, env_id):
        self.env = gym.make(env_id, disable_env_checker=True)

    def reset(self, seed, actions=()):
        self.seed = seed
        self.actions = []
        self.episode_return = 0.0
        self.obs, _ = self.env.reset(seed=seed)
        for action in actions:
            self.step(action)

    def step(self, action):
        self.obs, reward, terminated, truncated, _ = self.env.step(action)
        self.actions.append(action)
        self.episode_return += float(reward)
        return self.obs, reward, terminated, truncated


def get_state(env):
    """What set_state needs to bring a copy of the environment here; None where that is unfaithful."""
    e = env.unwrapped
    if hasattr(e, "lander"):  # Box2D hides the impulses of a contact: only flight can be restored
        if any(leg.ground_contact for leg in e.legs):
            return None
        bodies = []
        for body in (e.lander, *e.legs):
            position = tuple(body.position)
            velocity = tuple(body.linearVelocity)
            bodies.append((position, body.angle, velocity, body.angularVelocity))
        return bodies, e.prev_shaping
    if type(e).__module__.startswith("gymnasium.envs.classic_control"):
        return np.array(e.state)
    return None


def set_state(env, state):
    """Go to a state of get_state. LunarLander: from an episode of the same seed, for its ground."""
    e = env.unwrapped
    if not hasattr(e, "lander"):
        e.state = state.copy()
        e.steps_beyond_terminated = None  # CartPole counts those
        return
    bodies, e.prev_shaping = state
    e.game_over = False
    for body, (position, angle, velocity, spin) in zip((e.lander, *e.legs), bodies):
        body.transform = (position, angle)
        body.linearVelocity = velocity
        body.angularVelocity = spin
        body.awake = True
        body.ground_contact = False


# ===== Actor and critic
def network(obs_dim, out_dim, hidden_dim, head_gain):
    """Two hidden layers. An actor has A outputs, its logits; a critic 1 + A, see action_values."""
    layers = [
        nn.Linear(obs_dim, hidden_dim),
        nn.Linear(hidden_dim, hidden_dim),
        nn.Linear(hidden_dim, out_dim),
    ]
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), head_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def action_values(critic, obs, tau):
    """A common value plus each action's own difference, 0 at first: an action that is rarely seen
    neither lags behind nor stands out by chance, which an expectile would take for risk. The neutral
    start (tau None) has one value for all actions. [..., 1 or A]"""
    out = critic(obs)  # [..., 1 + A]
    if tau is None:
        return out[..., :1]
    return out[..., :1] + out[..., 1:]


# ===== The expectile target
def expectile(values, probs, tau, axis=-1):
    """The e with tau E[(e - X)+] = (1 - tau) E[(X - e)+]; tau = 0.9 is risk-averse (0.1 in IQL)."""
    values, probs = np.broadcast_arrays(np.asarray(values, float), np.asarray(probs, float))
    low = values.min(axis, keepdims=True)
    high = values.max(axis, keepdims=True)
    for _ in range(64):  # bisection down to machine precision
        e = 0.5 * (low + high)
        weight = np.where(values < e, tau, 1 - tau)
        gain = (probs * (values - e) * weight).sum(axis, keepdims=True)  # falls with e, to 0 at the expectile
        low = np.where(gain > 0, e, low)
        high = np.where(gain > 0, high, e)
    return (0.5 * (low + high)).squeeze(axis)


def risk_weights(values, probs, tau):
    """The expectile e along the last axis, and rho with e = sum(probs rho values), sum(probs rho) = 1:
    where e is risk-averse, a bad outcome has rho > 1 and counts for more than its probability."""
    e = expectile(values, probs, tau)
    rho = np.where(values < e[..., None], tau, 1 - tau)
    return e, rho / (probs * rho).sum(-1, keepdims=True)


def traces(delta, decay, done):
    """G_t = delta_t + decay_t G_t+1, cut at the end of an episode and of the rollout. All [T, E]"""
    G = delta.copy()
    for t in reversed(range(len(G) - 1)):
        G[t] += np.where(done[t], 0.0, decay[t] * G[t + 1])
    return G


@torch.no_grad()
def targets(roll, outcomes, actor, critic, tau, args):
    """The critic's target and the actor's advantage, [T, E] each. For the neutral start (tau None)
    this is generalised advantage estimation."""

    def values(obs):  # [..., D] -> w [..., A], q [..., A], rho [..., A, A], v [...]
        obs = torch.from_numpy(obs).float()
        w = action_values(critic, obs, tau).double().numpy()
        pi = actor(obs).double().softmax(-1).numpy()
        A = w.shape[-1]
        q = w
        rho = None
        if outcomes is None:  # p[a, b]: a is chosen, b executed
            p = (1 - args.epsilon) * np.eye(A) + args.epsilon / A
            q, rho = risk_weights(w[..., None, :], p, tau or 0.5)
        return w, q, rho, (pi * q).sum(-1)

    w, q, rho, v = values(roll["obs"])
    t, i = np.indices(v.shape)  # step and environment
    a = roll["chosen"].clip(max=w.shape[-1] - 1)  # the neutral start has one column for all actions
    b = roll["executed"].clip(max=w.shape[-1] - 1)
    done = roll["terminated"] | roll["truncated"]
    decay = 0.97 * args.gamma
    next_obs, reward, terminated = roll["next_obs"], roll["reward"], roll["terminated"]  # [T, E, ...]
    if outcomes:
        next_obs, reward, terminated = outcomes  # [T, E, N_s, ...]
    v_next = values(next_obs)[-1]
    # bootstrapping stops at terminations, never at truncations
    outcome = args.reward_scale * reward + np.where(terminated, 0.0, args.gamma * v_next)
    if outcomes:  # resample: the critic scores chosen actions, by the expectile over the outcomes
        y, rho = risk_weights(outcome, 1 / outcome.shape[-1], tau)
        happened = np.minimum(rho[..., 0], 1)  # the first outcome is the one that happened
        G = traces(y - q[t, i, a], decay * happened, done)
        return q[t, i, a] + G, q[t, i, a] - v + G
    # action-noise: the critic scores executed actions by their mean, the expectile is over them
    rho = rho[t, i, a, b]
    following = np.minimum(np.roll(rho, -1, 0), 1)  # rho of the next step
    G = traces(outcome - w[t, i, b], decay * following, done)
    return w[t, i, b] + G, q[t, i, a] - v + rho * G


# ===== Policy training
@torch.no_grad()
def rollout(sims, actor, epsilon, generator, keep_states):
    """256 steps of all simulators. The actor chooses; with probability epsilon a random action is
    executed. Arrays [T, E, ...], and (return, length) of the episodes that ended."""
    columns = ("obs", "chosen", "executed", "next_obs", "reward", "terminated", "truncated")
    roll = {name: [] for name in columns}
    states = []
    finished = []
    for _ in range(256):
        obs = np.stack([sim.obs for sim in sims])  # [E, D]
        pi = actor(torch.from_numpy(obs).float()).softmax(-1)  # [E, A]
        chosen = torch.multinomial(pi, 1, generator=generator)[:, 0]  # [E]
        random = torch.randint(pi.shape[-1], chosen.shape, generator=generator)
        noisy = torch.rand(chosen.shape, generator=generator) < epsilon
        executed = torch.where(noisy, random, chosen)
        if keep_states:
            states.append([(sim.seed, get_state(sim.env)) for sim in sims])
        results = [sim.step(b) for sim, b in zip(sims, executed.tolist())]
        step = (obs, chosen.numpy(), executed.numpy(), *map(np.array, zip(*results)))
        for name, value in zip(columns, step):
            roll[name].append(value)
        for sim, (_, _, terminated, truncated) in zip(sims, results):
            if terminated or truncated:
                finished.append((sim.episode_return, len(sim.actions)))
                sim.reset(torch.randint(2**31, (1,), generator=generator).item())
    roll = {name: np.stack(values) for name, values in roll.items()}
    roll["states"] = states
    return roll, finished


def resample(env, roll, num_resamples, epsilon, rng):
    """N_s outcomes for every (s, a) of a rollout, [T, E, N_s, ...]: the one that happened, and others
    drawn with the noise and the environment's own randomness. Where the state cannot be restored,
    the first stands for all."""
    columns = (roll["next_obs"], roll["reward"], roll["terminated"])
    next_obs, reward, terminated = (np.repeat(x[:, :, None], num_resamples, 2) for x in columns)
    for e, t in np.ndindex(roll["reward"].T.shape):
        seed, state = roll["states"][t][e]
        if t == 0 or seed != roll["states"][t - 1][e][0]:
            env.reset(seed=seed)
            env.unwrapped.np_random = rng
        if state is None:
            continue
        for n in range(1, num_resamples):
            set_state(env, state)
            b = int(roll["chosen"][t, e])
            if rng.random() < epsilon:
                b = int(rng.integers(env.action_space.n))
            next_obs[t, e, n], reward[t, e, n], terminated[t, e, n], *_ = env.unwrapped.step(b)
    return next_obs, reward, terminated


def update(roll, outcomes, actor, critic, optimizer, tau, train_actor, generator, args):
    """Four passes over a rollout: least squares for the critic, PPO's clipped steps for the actor.
    Every pass has new targets: risk cuts the traces short, so the critic needs the sweeps."""
    obs = torch.from_numpy(roll["obs"]).flatten(0, 1).float()  # [B, D]
    chosen = torch.from_numpy(roll["chosen"]).flatten()[:, None]  # [B, 1]
    executed = torch.from_numpy(roll["executed"]).flatten()[:, None]
    scored = chosen if outcomes else executed  # what the critic gives a value to
    if tau is None:
        scored = torch.zeros_like(chosen)
    entropy_coef = 0.01 if tau is None else 0.005
    actor_weight = 1.0 if train_actor else 0.0
    sums = []
    with torch.no_grad():
        old_log_pi = actor(obs).log_softmax(-1).gather(-1, chosen)[:, 0]  # [B]
    for _ in range(4):
        y, advantage = targets(roll, outcomes, actor, critic, tau, args)
        y = torch.from_numpy(y).float().flatten()  # [B]
        advantage = torch.from_numpy(advantage).float().flatten()
        for i in torch.randperm(len(obs), generator=generator).split(512):
            log_pi = actor(obs[i]).log_softmax(-1)  # [M, A]
            log_ratio = log_pi.gather(-1, chosen[i])[:, 0] - old_log_pi[i]  # [M]
            ratio = log_ratio.exp()
            std = advantage[i].std(correction=0)
            scale = std.clamp(min=args.advantage_floor) if args.advantage_floor else std + 1e-8
            adv = (advantage[i] - advantage[i].mean()) / scale  # [M]
            actor_loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            policy_entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
            value = action_values(critic, obs[i], tau).gather(-1, scored[i])[:, 0]  # [M]
            critic_loss = (value - y[i]).square().mean()
            loss = 0.5 * critic_loss + actor_weight * (actor_loss - entropy_coef * policy_entropy)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            optimizer.step()
            kl = (ratio - 1 - log_ratio).mean()
            sums.append([x.item() for x in (critic_loss, actor_loss, policy_entropy, kl)])
    names = ("losses/critic_loss", "losses/actor_loss", "charts/policy_entropy", "charts/approx_kl")
    return dict(zip(names, np.mean(sums, 0).tolist()))


# ===== Collection
def dataset_name(env_id, expectile_tau, dataset_size, early_fraction=0.0, dataset_seed=1):
    """Name of our own data sets, such as ersac/lunarlander/tau90-10k-v0. Minari allows no dots."""

    def percent(share):
        return f"{100 * share:.7g}".zfill(2).replace(".", "p")  # 0.05 -> 05, 0.125 -> 12p5

    env = re.sub(r"-v\d+$", "", env_id.split("/")[-1]).lower()
    name = f"ersac/{env}/tau{percent(expectile_tau)}"
    if early_fraction > 0:
        name += f"-early{percent(early_fraction)}"
    name += f"-{dataset_size // 1000}k" if dataset_size % 1000 == 0 else f"-{dataset_size}"
    if dataset_seed != 1:
        name += f"-s{dataset_seed}"
    return f"{name}-v0"


def take_turns(neutral, early, early_fraction, switch_prob, rng):
    """Who acts, step by step: the early policy with its share, drawn again with switch_prob."""
    while True:
        actor = early if rng.random() < early_fraction else neutral
        yield actor
        while rng.random() >= switch_prob:
            yield actor


@torch.no_grad()
def play_episode(env, actor, rng, epsilon=0.0, greedy=False, limit=None, turns=None):
    """An episode of the actor, or of the random policy if it is None, or of whom turns names at each
    step. The stored action is the executed one. Cut off after limit steps, it counts as truncated."""
    seed = int(rng.integers(2**31))
    observations = [env.reset(seed=seed)[0]]
    steps = []
    done = False
    while not done:
        if turns is not None:
            actor = next(turns)
        action = int(rng.integers(env.action_space.n))
        if actor is not None and rng.random() >= epsilon:
            logits = actor(torch.from_numpy(observations[-1]).float())  # [A]
            pi = logits.double().softmax(-1).numpy()
            if greedy:
                action = int(pi.argmax())
            else:
                action = int(min(np.searchsorted(pi.cumsum(), rng.random()), len(pi) - 1))
        obs, reward, terminated, truncated, _ = env.step(action)
        truncated = truncated or (len(steps) + 1 == limit and not terminated)
        observations.append(obs)
        steps.append((action, float(reward), bool(terminated), bool(truncated)))
        done = terminated or truncated
    actions, rewards, terminations, truncations = map(np.array, zip(*steps))
    return {
        "seed": seed,
        "observations": np.array(observations),  # [T + 1, D], all others [T]
        "actions": actions,
        "rewards": rewards,
        "terminations": terminations,
        "truncations": truncations,
    }


def episode_returns(env, actor, episodes, seed):
    """Undiscounted returns of greedy episodes, or of random ones if the actor is None. [episodes]"""
    rng = np.random.default_rng(seed)
    played = [play_episode(env, actor, rng, greedy=True) for _ in range(episodes)]
    return np.array([episode["rewards"].sum() for episode in played])


def collect_episodes(env, actor, epsilon, size, seed, early=None, early_fraction=0.0, switch_prob=0.0):
    """Episodes with size transitions in all; a smaller data set is the beginning of a larger one.
    With an early policy the two take turns inside the episodes."""
    rng = np.random.default_rng([seed, 0])
    episodes = []
    total = 0
    with tqdm(total=size, desc="collection", unit="step", mininterval=1) as bar:
        while total < size:
            turns = None
            if early is not None:
                turns = take_turns(actor, early, early_fraction, switch_prob, rng)
            episodes.append(play_episode(env, actor, rng, epsilon, limit=size - total, turns=turns))
            total += len(episodes[-1]["actions"])
            bar.update(len(episodes[-1]["actions"]))
    return episodes


def store_dataset(dataset_id, episodes, env, overwrite, **metadata):
    """Build the Minari data set in a hidden folder and rename it: a kill never leaves half a one."""
    root = get_dataset_path()
    path = get_dataset_path(dataset_id)
    for leftover in root.glob(".ersac-*"):
        if time.time() - leftover.stat().st_mtime > 3600:
            shutil.rmtree(leftover, ignore_errors=True)
    buffers = [EpisodeBuffer(id=i, **episode) for i, episode in enumerate(episodes)]
    with tempfile.TemporaryDirectory(prefix=".ersac-", dir=root) as hidden:
        with mock.patch.dict(os.environ, MINARI_DATASETS_PATH=hidden):
            with warnings.catch_warnings(action="ignore"):
                minari.create_dataset_from_buffers(dataset_id, buffers, env=env, **metadata)
        os.makedirs(path.parent, exist_ok=True)
        if overwrite and path.exists():
            os.rename(path, os.path.join(hidden, "replaced"))
        if not path.exists():  # it does if another run made it meanwhile
            os.rename(os.path.join(hidden, dataset_id), path)


if __name__ == "__main__":
    script = os.path.basename(__file__)
    folder = None

    def stop(*_):
        """Ctrl-C, or a cluster's SIGTERM: a kill that says how to go on."""
        if folder:
            print(f"\nStopped. To go on: python {script} --resume {folder}")
        sys.exit(130)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    # a W&B sweep writes --bootstrap=False, tyro reads --no-bootstrap
    words = [re.sub("^--(.*)=False$", r"--no-\1", word) for word in sys.argv[1:]]
    args = tyro.cli(Args, args=[word.removesuffix("=True") for word in words], description=__doc__)
    checkpoint = None
    if args.resume:
        checkpoint, args = load_checkpoint(args, script)

    # ----- check the arguments
    if min(args.dataset_size, args.eval_episodes) < 1:
        sys.exit("--dataset-size, --eval-episodes: each at least 1.")
    if not 0 < args.expectile_tau < 1:
        sys.exit(f"--expectile-tau {args.expectile_tau}: it must be above 0 and below 1.")
    if not 0 <= args.epsilon <= 1:
        sys.exit(f"--epsilon {args.epsilon}: it must be a probability.")
    if not 0 <= args.gamma < 1:
        sys.exit(f"--gamma {args.gamma}: it must be at least 0 and below 1.")
    if not 0 <= args.early_fraction <= 1:
        sys.exit(f"--early-fraction {args.early_fraction}: it must be a share between 0 and 1.")
    if not 0 <= args.switch_prob <= 1 or (args.switch_prob > 0 and not 0 < args.early_fraction < 1):
        sys.exit("--switch-prob: a probability, and above 0 only with --early-fraction between 0 and 1.")
    if args.early_fraction > 0 and (args.env_id, args.expectile_tau) != ("LunarLander-v3", 0.5):
        sys.exit("--early-fraction: only LunarLander-v3 with --expectile-tau 0.5 has an early policy.")
    try:
        tempfile.TemporaryFile(dir=get_dataset_path()).close()
        os.makedirs(args.policy_dir or get_dataset_path(), exist_ok=True)
    except OSError as error:
        where = f"{error.filename}: cannot write there ({error.strerror})"
        sys.exit(f"{where}; set MINARI_DATASETS_PATH, or another --policy-dir.")
    try:
        env = gym.make(args.env_id, disable_env_checker=True)
        env.reset(seed=0)
    except Exception as error:
        sys.exit(f"--env-id {args.env_id}: {' '.join(str(error).split()).rstrip('.')}.")
    actions = env.action_space
    if not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        sys.exit(f"--env-id {args.env_id}: its actions are {actions}, but they must be Discrete.")
    observations = env.observation_space
    if not isinstance(observations, gym.spaces.Box) or len(observations.shape) != 1:
        sys.exit(f"--env-id {args.env_id}: its observations are {observations}, not a vector.")
    if args.estimator == "resample" and get_state(env) is None:
        sys.exit(f"--estimator resample: states of {args.env_id} cannot be restored; use action-noise.")

    cartpole = args.env_id.startswith("CartPole")
    if args.start_steps is None:
        args.start_steps = 100_000 if cartpole else 400_000
    if args.finish_steps is None:
        args.finish_steps = 160_000 if cartpole else 300_000
    if args.reward_scale is None:
        args.reward_scale = 0.005 if cartpole else 0.05
    if args.advantage_floor is None:
        args.advantage_floor = 0.1 if cartpole else 0.0
    D = observations.shape[0]
    A = int(actions.n)
    torch.set_num_threads(1)  # the networks are too small to share

    # ----- the data set: is there anything to do?
    draw = (args.early_fraction, args.dataset_seed)
    dataset_id = dataset_name(args.env_id, args.expectile_tau, args.dataset_size, *draw)
    if args.switch_prob > 0:
        mixture, rest = re.fullmatch(r"(.*-early\w+)(-.*)", dataset_id).groups()
        dataset_id = f"{mixture}-switch{f'{100 * args.switch_prob:.7g}'.zfill(2).replace('.', 'p')}{rest}"
    if get_dataset_path(dataset_id).exists() and not args.overwrite:
        print(f"{dataset_id} exists and is left alone; --overwrite replaces it.")
        sys.exit(0)

    # ----- policies: those at hand
    env_name = dataset_id.split("/")[1]
    names = {None: f"{env_name}-start"}  # tau None: the neutral start, which all taus share
    for tau in (0.5, args.expectile_tau):  # 0.5 is the reference
        level = dataset_name(args.env_id, tau, 1000).split("/")[2]  # such as tau90-1k-v0
        names[tau] = f"{env_name}-{level.split('-')[0]}"
    committed = os.path.join(os.path.dirname(os.path.abspath(__file__)), "docs", "policies")
    cache = os.path.join(get_dataset_path(), ".expectile-policies")
    policy_dirs = [args.policy_dir] if args.policy_dir else [committed, cache]
    shaping = ("env_id", "epsilon", "estimator", "num_resamples", "start_steps", "finish_steps")
    shaping += ("hidden_dim", "policy_lr", "gamma", "reward_scale", "advantage_floor")
    shaping = {name: getattr(args, name) for name in shaping}  # these and the seed make a policy
    policies = checkpoint["policies"] if checkpoint else {}
    current = checkpoint["current"] if checkpoint else None  # a policy in training
    to_train = []
    for tau, name in names.items():
        paths = [os.path.join(folder, name, "policy.pt") for folder in policy_dirs]
        paths = [path for path in paths if os.path.exists(path)]
        in_training = current is not None and current["name"] == name
        if tau in policies:
            continue
        if args.retrain or in_training or not paths:
            to_train.append(tau)
            continue
        try:
            policies[tau] = torch.load(paths[0], weights_only=True)
            other = [key for key in shaping if policies[tau]["args"][key] != shaping[key]]
        except Exception as error:
            sys.exit(f"{paths[0]}: damaged ({type(error).__name__}); delete it or use --retrain.")
        if other:
            sys.exit(f"{paths[0]}: trained with another {' and '.join(other)}; use --retrain.")

    # ----- run folder: new, or as the checkpoint left it
    rows = []
    if checkpoint:
        folder = os.path.normpath(args.resume)
        rows = checkpoint["rows"]
        run_name = checkpoint["run_name"]
    else:
        run_name = f"{args.env_id.split('/')[-1]}__{args.exp_name}__{args.seed}__{int(1000 * time.time())}"
        folder = os.path.join(args.output_dir, run_name)
        if os.path.exists(folder):
            sys.exit(f"{folder} exists; choose another --exp-name.")
        write_file(folder, "args.json", json.dumps(asdict(args), indent=2).encode())
    keep_in = [folder]  # where a trained policy goes
    if not args.retrain:
        keep_in.append(policy_dirs[-1])
    track = start_tracking(args, run_name, dataset_id, "behaviour", script)
    for i, row in enumerate(rows):
        if track and i + 1 >= track.step:  # what a killed run had not yet sent
            track.log(row, step=i + 1)

    def save(current):
        state = {
            "policies": policies,
            "current": current,
            "rows": rows,
            "run_name": run_name,
            "script": script,
            "args": asdict(replace(args, resume=None)),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_file(folder, "checkpoint.pt", buffer.getvalue())

    save(current)

    # ----- policies: those to train
    random_return = 0.0
    if to_train:
        steps = sum(args.start_steps if tau is None else args.finish_steps for tau in to_train)
        print(f"{args.env_id}: {len(to_train)} policies to train, {steps:,} environment steps, about a minute")
        print(f"per 200,000 on one core; they are kept in {keep_in[-1]}.", flush=True)
        random_return = episode_returns(env, None, args.eval_episodes, [args.seed, 1]).mean().item()
    for tau in to_train:
        name = names[tau]
        floor = args.floor
        if floor is None:
            floor = env.spec.reward_threshold
            if args.env_id == "LunarLander-v3" and tau in (None, 0.5):
                floor = 220
        if floor is None:
            floor = random_return

        torch.manual_seed(args.seed)
        actor = network(D, A, args.hidden_dim, 0.01)
        critic = network(D, 1 + A, args.hidden_dim, 1.0)
        critic[-1].weight.data[1:] = 0.0
        epsilon = 0.0
        lr = args.policy_lr
        steps = args.start_steps
        if tau is not None:
            epsilon = args.epsilon
            lr = 0.5 * args.policy_lr
            steps = args.finish_steps
            actor.load_state_dict(policies[None]["actor"])
            critic.load_state_dict(policies[None]["critic"])
        optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr, eps=1e-5)
        generator = torch.Generator().manual_seed(args.seed)
        sims = [Simulator(args.env_id) for _ in range(16)]
        copy_env = gym.make(args.env_id, disable_env_checker=True)  # for the resample estimator
        first = 0
        recent = []  # (return, length) of the last 100 episodes
        if current is not None and current["name"] == name:
            first = current["rollout"]
            recent = current["recent"]
            generator.set_state(current["generator"])
            actor.load_state_dict(current["actor"])
            critic.load_state_dict(current["critic"])
            optimizer.load_state_dict(current["optimizer"])
            for sim, (seed, actions) in zip(sims, current["places"]):
                sim.reset(seed, actions)
        else:
            for sim in sims:
                sim.reset(torch.randint(2**31, (1,), generator=generator).item())

        rollouts = math.ceil(steps / (256 * len(sims)))
        left = range(first, rollouts)
        bar = tqdm(left, name, rollouts, initial=first, unit="rollout", mininterval=1)
        for i in bar:
            # sample transitions by executing the current policy, and the N_s outcomes if asked for
            started = time.time()
            resampling = tau is not None and args.estimator == "resample"
            roll, finished = rollout(sims, actor, epsilon, generator, resampling)
            outcomes = None
            if resampling:
                rng = np.random.default_rng([args.seed, 3, i])
                outcomes = resample(copy_env, roll, args.num_resamples, epsilon, rng)

            # compute the expectile targets, update value function and policy
            optimizer.param_groups[0]["lr"] = lr * (1 - i / rollouts)
            train_actor = tau is None or i >= 8  # a new tau trains its critic first
            metrics = update(roll, outcomes, actor, critic, optimizer, tau, train_actor, generator, args)

            recent = (recent + finished)[-100:]
            episode_return, length = np.mean(recent, 0).tolist() if recent else (math.nan, math.nan)
            row = {
                "policy": name,
                "rollout": i + 1,
                "env_steps": (i + 1) * 256 * len(sims),
                "charts/episode_return": episode_return,
                "charts/episode_length": length,
                **metrics,
                "charts/steps_per_second": 256 * len(sims) / (time.time() - started),
            }
            rows.append(row)
            if track:
                track.log(row, step=len(rows))
            bar.set_postfix_str(f"return={episode_return:.1f}, length={length:.0f}", refresh=False)
            if (i + 1) % 10 == 0:
                current = {
                    "name": name,
                    "rollout": i + 1,
                    "recent": recent,
                    "generator": generator.get_state(),
                    "actor": actor.state_dict(),
                    "critic": critic.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "places": [(sim.seed, sim.actions) for sim in sims],
                }
                write_metrics(folder, rows)
                save(current)
        bar.close()
        write_metrics(folder, rows)
        greedy = episode_returns(env, actor, args.eval_episodes, [args.seed, 4, rollouts - 1])
        score = greedy.mean().item()
        print(f"{name}: greedy return {score:.1f}, the floor is {floor:g}")
        if score < floor:  # a bad policy is never stored
            sys.exit(f"{name}: below the floor, not stored; try another --seed or more steps.")
        policies[tau] = {
            "args": {"seed": args.seed, **shaping},
            "actor": actor.state_dict(),
            "random_return": random_return,
            "greedy_return": score,
        }
        if tau is None:
            policies[tau]["critic"] = critic.state_dict()
        buffer = io.BytesIO()
        torch.save(policies[tau], buffer)
        for place in keep_in:
            write_metrics(os.path.join(place, name), [row for row in rows if row["policy"] == name])
            write_file(os.path.join(place, name), "policy.pt", buffer.getvalue())
        current = None
        save(current)

    # ----- collection: the behaviour policy, and for a mixture the policy that was stopped early
    policy = policies[args.expectile_tau]
    actor = network(D, A, args.hidden_dim, 0.01)
    actor.load_state_dict(policy["actor"])
    early_actor = network(D, A, args.hidden_dim, 0.01)
    if args.early_fraction > 0:
        path = os.path.join(policy_dirs[0], "early", names[0.5], "policy.pt")
        try:
            early_actor.load_state_dict(torch.load(path, weights_only=True)["actor"])
        except Exception as error:
            sys.exit(f"{path}: no early policy can be read there ({type(error).__name__}).")
    early = round(args.early_fraction * args.dataset_size)
    neutral = args.dataset_size - early
    collect = (args.epsilon, args.dataset_size, args.dataset_seed)
    episodes = []
    if args.switch_prob > 0:  # the two take turns inside the episodes
        turns = (early_actor, args.early_fraction, args.switch_prob)
        episodes = collect_episodes(env, actor, *collect, *turns)
    else:
        if neutral > 0:
            episodes += collect_episodes(env, actor, args.epsilon, neutral, args.dataset_seed)
        if early > 0:
            episodes += collect_episodes(env, early_actor, args.epsilon, early, args.dataset_seed)

    # ----- storing
    description = (
        f"Behaviour policy: dynamic expectiles, tau {args.expectile_tau} "
        f"(0.1 seeks risk, 0.9 avoids it), greedy return {policy['greedy_return']:.1f}, "
        f"training {policy['args']}. Executed actions, random ones with probability {args.epsilon}; "
        f"share of an early policy {args.early_fraction}, drawn again per step with probability "
        f"{args.switch_prob}; seed {args.dataset_seed}."
    )
    box2d = "[box2d]" if "box2d" in str(env.spec.entry_point) else ""
    store_dataset(
        dataset_id,
        episodes,
        env,
        args.overwrite,
        description=description,
        ref_min_score=policies[0.5]["random_return"],
        ref_max_score=policies[0.5]["greedy_return"],
        num_episodes_average_score=args.eval_episodes,
        algorithm_name="dynamic expectile actor-critic",
        author="the ERSAC reference implementation",
        code_permalink=script,
        requirements=[f"gymnasium{box2d}=={gym.__version__}"],
    )
    mean = np.mean([episode["rewards"].sum() for episode in episodes]).item()
    result = {
        "script": script,
        "env_id": args.env_id,
        "dataset_id": dataset_id,
        "seed": args.seed,
        "transitions": args.dataset_size,
        "episodes": len(episodes),
        "return_mean": mean,
        "policy_greedy_return": policy["greedy_return"],
        "ref_min_score": policies[0.5]["random_return"],
        "ref_max_score": policies[0.5]["greedy_return"],
    }
    write_file(folder, "result.json", json.dumps(result, indent=2).encode())
    if track:
        track.summary.update(result)
        track.finish()
    count = f"{args.dataset_size} transitions, {len(episodes)} episodes"
    print(f"{dataset_id}: {count}, mean return {mean:.1f}")
