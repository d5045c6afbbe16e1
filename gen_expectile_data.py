# docs: docs/gen_expectile_data.md
"""Offline data from policies that seek or avoid risk: Algorithm 5, dynamic expectile risk policies.

The critic values an action by the tau-expectile of what may follow it; the loop that trains actor
and critic on such targets is PPO with traces, from a risk-neutral start. The policy then collects
exactly dataset_size transitions with epsilon-random actions. For LunarLander and CartPole trained
policies are in docs/policies, so that a risk-averse data set takes seconds:

    python gen_expectile_data.py --env-id LunarLander-v3 --expectile-tau 0.9 --dataset-size 10000
"""

import math
import os
import re
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
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
    """folder that receives the run folder of --retrain"""
    env_id: str = "LunarLander-v3"
    """Gymnasium environment with a vector of observations and discrete actions"""
    dataset_id: str | None = None
    """name to store the data under; needed if a policy is not trained with the defaults"""
    dataset_size: int = 100_000
    """transitions in the data set"""
    dataset_seed: int = 1
    """seed of the collected episodes: another draw of the data from the same policy"""
    expectile_tau: float = 0.5
    """risk level of the behaviour policy: 0.1 seeks risk, 0.9 avoids it"""
    epsilon: float = 0.1
    """probability that the executed action is a random one, in expectile training and collection"""
    early_fraction: float = 0.0
    """share of the transitions from a policy stopped early in training (LunarLander, tau 0.5)"""
    switch_prob: float = 0.0
    """probability per step that who acts is drawn again; 0: each policy plays whole episodes"""
    overwrite: bool = False
    """replace a data set that exists; otherwise it is left alone"""

    policy_dir: str = os.path.join(os.path.dirname(os.path.abspath(__file__)), "docs", "policies")
    """folder of trained policies; new ones are kept there, too"""
    retrain: bool = False
    """train the policies anew and keep them in a run folder; those in policy_dir stay"""
    estimator: Literal["action-noise", "resample"] = "action-noise"
    """the expectile's outcomes: executed actions, known exactly, or resampled next states"""
    num_resamples: int = 10
    """N_s, the next states drawn from the same (s, a) by the resample estimator"""
    start_steps: int = 400_000
    """environment steps of the neutral start of all taus"""
    finish_steps: int = 300_000
    """environment steps with the expectile critic, per tau"""
    reward_scale: float = 0.05
    """factor on the rewards in training, not in the data"""
    advantage_floor: float = 0.0
    """least divisor of the advantages, which is usually their spread"""
    policy_lr: float = 1e-3
    """Adam step size of the neutral start, annealed to 0; half of it in the expectile training"""
    gamma: float = 0.995
    """discount factor"""
    floor: float | None = None
    """greedy return that a policy must reach; None: Gymnasium's threshold, else random play's"""
    eval_episodes: int = 100
    """greedy episodes that measure a policy, and random ones that measure the random policy"""


# CartPole has other defaults
CARTPOLE = {"start_steps": 100_000, "finish_steps": 160_000, "reward_scale": 0.005, "advantage_floor": 0.1}
# the arguments that make a policy what it is
TRAINING = ("seed", "estimator", "num_resamples", *CARTPOLE, "policy_lr", "gamma", "epsilon")


# ===== States of the simulator, for the resample estimator
def get_state(env):
    """What set_state needs to bring a copy of the environment here; None where that is unfaithful."""
    e = env.unwrapped
    if type(e).__module__.startswith("gymnasium.envs.classic_control"):
        return np.array(e.state)
    # Box2D hides the impulses of a contact: a lander can be restored in flight only
    if not hasattr(e, "lander") or any(leg.ground_contact for leg in e.legs):
        return None
    bodies = [(tuple(body.position), body.angle) for body in (e.lander, *e.legs)]
    speeds = [(tuple(body.linearVelocity), body.angularVelocity) for body in (e.lander, *e.legs)]
    return bodies, speeds, e.prev_shaping


def set_state(env, state):
    """Go to a state of get_state. LunarLander: from an episode of the same seed, for its ground."""
    e = env.unwrapped
    if not hasattr(e, "lander"):
        e.state = state.copy()
        e.steps_beyond_terminated = None  # CartPole counts those
        return
    *bodies, e.prev_shaping = state
    e.game_over = False
    for body, place, (velocity, spin) in zip((e.lander, *e.legs), *bodies):
        body.transform = place
        body.linearVelocity = velocity
        body.angularVelocity = spin
        body.awake = True
        body.ground_contact = False


# ===== Actor and critic
def network(obs_dim, out_dim, head_gain, hidden_dim=128):
    """Two hidden layers. An actor has A outputs, its logits; a critic 1 + A, see action_values."""
    first, second = nn.Linear(obs_dim, hidden_dim), nn.Linear(hidden_dim, hidden_dim)
    last = nn.Linear(hidden_dim, out_dim)
    for layer, gain in ((first, math.sqrt(2)), (second, math.sqrt(2)), (last, head_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


def action_values(critic, obs, tau):
    """A common value plus each action's own difference, 0 at first: an action that is rarely seen
    neither lags behind nor stands out by chance, which an expectile would take for risk. The neutral
    start (tau None) has one value for all actions. [..., 1 or A]"""
    out = critic(obs)  # [..., 1 + A]
    return out[..., :1] if tau is None else out[..., :1] + out[..., 1:]


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
def targets_and_advantages(roll, outcomes, actor, critic, tau, args):
    """What critic and actor learn from, [T, E] each. For the neutral start (tau None) this is
    generalised advantage estimation."""

    def values(obs):  # [..., D] -> w [..., A], q [..., A], rho [..., A, A], v [...]
        obs = torch.from_numpy(obs).float()
        w = action_values(critic, obs, tau).double().numpy()
        pi = actor(obs).double().softmax(-1).numpy()
        A = w.shape[-1]
        q, rho = w, None
        if outcomes is None:  # p[a, b]: a is chosen, b executed
            p = (1 - args.epsilon) * np.eye(A) + args.epsilon / A
            q, rho = risk_weights(w[..., None, :], p, tau or 0.5)
        return w, q, rho, (pi * q).sum(-1)

    w, q, rho, v = values(roll["obs"])
    t, i = np.indices(v.shape)  # step and environment
    a = roll["chosen"].clip(max=w.shape[-1] - 1)  # the neutral start has one column for all actions
    b = roll["executed"].clip(max=w.shape[-1] - 1)
    done = roll["terminated"] | roll["truncated"]
    # what happened, [T, E], or the resampled outcomes, [T, E, N_s]
    next_obs, reward, terminated = outcomes or (roll["next_obs"], roll["reward"], roll["terminated"])
    v_next = values(next_obs)[-1]
    # bootstrapping stops at terminations, never at truncations
    z = args.reward_scale * reward + np.where(terminated, 0.0, args.gamma * v_next)
    decay = 0.97 * args.gamma
    if outcomes:  # resample: the critic scores chosen actions, by the expectile over the outcomes
        y, rho = risk_weights(z, 1 / z.shape[-1], tau)
        happened = np.minimum(rho[..., 0], 1)  # the first outcome is the one that happened
        G = traces(y - q[t, i, a], decay * happened, done)
        return q[t, i, a] + G, q[t, i, a] - v + G
    # action-noise: the critic scores executed actions by their mean, the expectile is over them
    rho = rho[t, i, a, b]
    following = np.minimum(np.roll(rho, -1, 0), 1)  # rho of the next step
    G = traces(z - w[t, i, b], decay * following, done)
    return w[t, i, b] + G, q[t, i, a] - v + rho * G


# ===== Policy training
def rollouts(env_id, actor, epsilon, generator, keep_states):
    """Without end: 256 steps of 16 environments as arrays [T, E, ...]. The actor chooses; with
    probability epsilon a random action is executed. Also (return, length) of ended episodes."""
    disabled = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}
    envs = gym.make_vec(env_id, 16, "sync", disabled, disable_env_checker=True)
    seeds = torch.randint(2**31, (16,), generator=generator).numpy()
    obs, _ = envs.reset(seed=seeds.tolist())  # [E, D]
    returns, lengths = np.zeros(16), np.zeros(16)
    names = ("obs", "chosen", "executed", "next_obs", "reward", "terminated", "truncated", "seeds")
    while True:
        steps, states, finished = [], [], []
        for _ in range(256):
            pi = actor(torch.from_numpy(obs).float()).detach().softmax(-1)  # [E, A]
            chosen = torch.multinomial(pi, 1, generator=generator)[:, 0]  # [E]
            random = torch.randint(pi.shape[-1], chosen.shape, generator=generator)
            noisy = torch.rand(chosen.shape, generator=generator) < epsilon
            executed = torch.where(noisy, random, chosen).numpy()
            if keep_states:
                states.append([get_state(env) for env in envs.envs])
            *result, _ = envs.step(executed)
            steps.append((obs, chosen.numpy(), executed, *result, seeds.copy()))
            obs, reward, terminated, truncated = result
            returns, lengths = returns + reward, lengths + 1
            done = terminated | truncated
            if done.any():
                finished += zip(returns[done], lengths[done])
                returns[done] = lengths[done] = 0
                seeds[done] = torch.randint(2**31, (done.sum(),), generator=generator)
                obs, _ = envs.reset(seed=seeds.tolist(), options={"reset_mask": done})
        roll = {name: np.stack(values) for name, values in zip(names, zip(*steps))}
        yield roll | {"states": states}, finished


def resample(env, roll, num_resamples, epsilon, rng):
    """N_s outcomes for every (s, a) of a rollout, [T, E, N_s, ...]: the one that happened, and others
    drawn with the noise and the environment's own randomness. Where the state cannot be restored,
    the first stands for all."""
    columns = (roll["next_obs"], roll["reward"], roll["terminated"])
    next_obs, reward, terminated = (np.repeat(x[:, :, None], num_resamples, 2) for x in columns)
    for e, t in np.ndindex(roll["reward"].T.shape):
        seed, state = roll["seeds"][t, e], roll["states"][t][e]
        if t == 0 or seed != roll["seeds"][t - 1, e]:
            env.reset(seed=int(seed))
            env.unwrapped.np_random = rng
        for n in range(1, num_resamples if state is not None else 1):
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
    old_log_pi = actor(obs).detach().log_softmax(-1).gather(-1, chosen)[:, 0]  # [B]
    sums = []
    for _ in range(4):
        both = targets_and_advantages(roll, outcomes, actor, critic, tau, args)
        y, advantage = (torch.from_numpy(x).float().flatten() for x in both)  # [B]
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
            loss = 0.5 * critic_loss + train_actor * (actor_loss - entropy_coef * policy_entropy)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            optimizer.step()
            kl = (ratio - 1 - log_ratio).mean()
            sums.append([x.item() for x in (critic_loss, actor_loss, policy_entropy, kl)])
    names = ("losses/critic_loss", "losses/actor_loss", "charts/policy_entropy", "charts/approx_kl")
    return dict(zip(names, np.mean(sums, 0).tolist()))


def train(tau, start, env, folder, args):
    """Algorithm 5 up to the collection: the neutral start (tau None), or from it on the policy of a
    tau. metrics.csv goes into the folder, and the policy unless it is below the floor."""
    name = os.path.basename(folder)
    steps = args.start_steps if tau is None else args.finish_steps
    print(f"{name}: {steps:,} environment steps, about a minute per 200,000; into {folder}", flush=True)
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(args.seed)
    D, A = env.observation_space.shape[0], int(env.action_space.n)
    actor, critic = network(D, A, 0.01), network(D, 1 + A, 1.0)
    critic[-1].weight.data[1:] = 0.0
    epsilon, lr = 0.0, args.policy_lr
    if tau is not None:
        epsilon, lr = args.epsilon, 0.5 * args.policy_lr
        actor.load_state_dict(start["actor"])
        critic.load_state_dict(start["critic"])
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr, eps=1e-5)
    generator = torch.Generator().manual_seed(args.seed)
    resampling = tau is not None and args.estimator == "resample"
    sampled = rollouts(args.env_id, actor, epsilon, generator, resampling)
    outcomes = None
    rows = []
    recent = []  # (return, length) of the last 100 episodes
    num_rollouts = math.ceil(steps / (256 * 16))
    bar = tqdm(range(num_rollouts), name, unit="rollout", mininterval=1)
    for i in bar:
        # sample transitions by executing the current policy, and the N_s outcomes if asked for
        started = time.time()
        roll, finished = next(sampled)
        if resampling:
            rng = np.random.default_rng([args.seed, 3, i])
            outcomes = resample(env, roll, args.num_resamples, epsilon, rng)

        # compute the expectile targets, update value function and policy
        optimizer.param_groups[0]["lr"] = lr * (1 - i / num_rollouts)
        train_actor = tau is None or i >= 8  # a new tau trains its critic first
        losses = update(roll, outcomes, actor, critic, optimizer, tau, train_actor, generator, args)

        # log
        recent = (recent + finished)[-100:]
        episode_return, length = np.mean(recent, 0) if recent else (math.nan, math.nan)
        row = {
            "env_steps": (i + 1) * 256 * 16,
            "charts/episode_return": episode_return,
            "charts/episode_length": length,
            **losses,
            "charts/steps_per_second": 256 * 16 / (time.time() - started),
        }
        rows.append(list(row.values()))
        np.savetxt(f"{folder}/metrics.csv", rows, "%.10g", ",", header=",".join(row), comments="")
        bar.set_postfix_str(f"return={episode_return:.1f}, length={length:.0f}", refresh=False)

    low = episode_returns(env, None, args.eval_episodes, [args.seed, 1]).mean().item()
    score = episode_returns(env, actor, args.eval_episodes, [args.seed, 4, i]).mean().item()
    floors = (args.floor, env.spec.reward_threshold, low)
    floor = next(x for x in floors if x is not None)
    print(f"{name}: greedy return {score:.1f}, the floor is {floor:g}")
    if score < floor:
        why = "below the floor, not kept; a lower --floor, another --seed or more steps may help"
        sys.exit(f"{name}: {why}, or data of your own (docs/gen_expectile_data.md).")
    policy = {
        "args": {name: getattr(args, name) for name in TRAINING},
        "actor": actor.state_dict(),
        "critic": critic.state_dict(),
        "random_return": low,
        "greedy_return": score,
    }
    torch.save(policy, f"{folder}/policy.tmp")
    os.replace(f"{folder}/policy.tmp", f"{folder}/policy.pt")
    return policy


# ===== Collection
def dataset_name(args):
    """Name of our own data sets, such as ersac/lunarlander/tau90-10k-v0. Minari allows no dots."""
    env = {"LunarLander-v3": "lunarlander", "CartPole-v1": "cartpole"}
    name = f"ersac/{env.get(args.env_id, args.env_id.lower())}/"
    shares = {"tau": "expectile_tau", "-early": "early_fraction", "-switch": "switch_prob", "-eps": "epsilon"}
    for word, flag in shares.items():
        share = getattr(args, flag)
        if word == "tau" or share != getattr(Args, flag):
            name += word + f"{100 * share:.7g}".zfill(2).replace(".", "p")  # 0.05: 05, 0.125: 12p5
    size = re.sub("000$", "k", str(args.dataset_size))  # 10000: 10k
    draw = "" if args.dataset_seed == 1 else f"-s{args.dataset_seed}"
    return f"{name}-{size}{draw}-v0"


def take_turns(early_fraction, switch_prob, rng):
    """Step by step, does the early policy act? Drawn with its share, again with switch_prob."""
    while True:
        early = rng.random() < early_fraction
        yield early
        while rng.random() >= switch_prob:
            yield early


@torch.no_grad()
def play_episode(env, actor, rng, epsilon=0.0, greedy=False, limit=None, early=None, turns=None):
    """An episode of the actor, or of the random policy if it is None; where turns says so the early
    actor acts. The stored action is the executed one. Cut off after limit steps, it is truncated."""
    seed = int(rng.integers(2**31))
    observations = [env.reset(seed=seed)[0]]
    steps, by_early = [], []
    done = False
    while not done:
        by_early.append(turns is not None and next(turns))
        acting = early if by_early[-1] else actor
        action = int(rng.integers(env.action_space.n))
        if acting is not None and rng.random() >= epsilon:
            logits = acting(torch.from_numpy(observations[-1]).float())  # [A]
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
    names = ("actions", "rewards", "terminations", "truncations")
    episode = dict(zip(names, map(np.array, zip(*steps))))  # [T]
    episode["infos"] = {"early": np.array(by_early)} if turns is not None else None
    return episode | {"seed": seed, "observations": np.array(observations)}  # [T + 1, D]


def episode_returns(env, actor, episodes, seed):
    """Undiscounted returns of greedy episodes, or of random ones if the actor is None. [episodes]"""
    rng = np.random.default_rng(seed)
    played = [play_episode(env, actor, rng, greedy=True) for _ in range(episodes)]
    return np.array([episode["rewards"].sum() for episode in played])


def collect_episodes(env, actor, size, args, early=None):
    """Episodes with size transitions in all; a smaller data set is the beginning of a larger one.
    With an early actor the two take turns inside the episodes."""
    rng = np.random.default_rng([args.dataset_seed, 0])
    episodes = []
    bar = tqdm(total=size, desc="collection", unit="step", mininterval=1)
    while bar.n < size:
        turns = take_turns(args.early_fraction, args.switch_prob, rng) if early else None
        limit = size - bar.n
        episodes.append(play_episode(env, actor, rng, args.epsilon, False, limit, early, turns))
        bar.update(len(episodes[-1]["actions"]))
    return episodes


def store_dataset(dataset_id, episodes, env, **metadata):
    """Build the Minari data set in a hidden folder and rename it: nobody meets half a one."""
    buffers = [EpisodeBuffer(id=i, **episode) for i, episode in enumerate(episodes)]
    path = get_dataset_path(dataset_id)
    with tempfile.TemporaryDirectory(prefix=".ersac-", dir=get_dataset_path()) as hidden:
        size = sum(20_000 + 2 * episode["observations"].nbytes for episode in episodes)
        with open(f"{hidden}/room", "wb") as f:  # is there room? HDF5 crashes where a disk is full
            f.write(bytes(size))
        os.remove(f"{hidden}/room")
        with mock.patch.dict(os.environ, MINARI_DATASETS_PATH=hidden):
            with warnings.catch_warnings(action="ignore"):
                minari.create_dataset_from_buffers(dataset_id, buffers, env=env, **metadata)
        os.makedirs(path.parent, exist_ok=True)
        if path.exists():
            os.rename(path, f"{hidden}/replaced")
        os.rename(f"{hidden}/{dataset_id}", path)


def load_policy(folder, training):
    """The policy in this folder, which must have been trained with these arguments."""
    path = f"{folder}/policy.pt"
    try:
        policy = torch.load(path, weights_only=True)
        other = [name for name in training if policy["args"][name] != training[name]]
    except Exception as error:
        sys.exit(f"{path}: no policy can be read there ({type(error).__name__}).")
    if other:
        sys.exit(f"{path}: trained with another {' and '.join(other)}; use --retrain.")
    return policy


def main(args, defaults):
    # ----- check the arguments: no number is negative, no count is 0
    ranges = {"expectile_tau": (0.001, 0.999), "gamma": (0, 0.9999), "floor": (-(10**9), 10**9)}
    ranges = ranges | dict.fromkeys(("epsilon", "early_fraction", "switch_prob", "policy_lr"), (0, 1))
    for name, value in asdict(args).items():
        least = 1 if type(value) is int and "seed" not in name else 0
        low, high = ranges.get(name, (least, 10**9))
        if type(value) in (int, float) and not low <= value <= high:
            sys.exit(f"--{name.replace('_', '-')} {value}: it must lie in [{low}, {high}].")
    if args.switch_prob > 0 and not 0 < args.early_fraction < 1:
        sys.exit("--switch-prob: it takes two to take turns; --early-fraction must be between 0 and 1.")
    env = gym.make(args.env_id, disable_env_checker=True)
    env.reset(seed=0)
    space, actions = env.observation_space, env.action_space
    vectors = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
    if not vectors or not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        sys.exit(f"--env-id {args.env_id}: vectors and Discrete actions from 0 on, not {space}, {actions}.")
    if args.estimator == "resample" and get_state(env) is None:
        sys.exit(f"--estimator resample: states of {args.env_id} cannot be restored; use action-noise.")
    training = {name: getattr(args, name) for name in TRAINING}
    for name in TRAINING:
        if name != "epsilon" and training[name] != getattr(defaults, name) and args.dataset_id is None:
            flag = f"--{name.replace('_', '-')} {training[name]}"
            sys.exit(f"{flag} makes other policies: give their data a --dataset-id of their own.")
    dataset_id = dataset_name(args) if args.dataset_id is None else args.dataset_id
    if not re.fullmatch(r"\w[-\w/]*-v\d+", dataset_id):
        sys.exit(f"{dataset_id}: no name for a data set; choose a --dataset-id such as my/data-v0.")
    if get_dataset_path(dataset_id).exists() and not args.overwrite:
        print(f"{dataset_id} exists and is left alone; --overwrite replaces it.")
        return
    tempfile.TemporaryFile(dir=get_dataset_path()).close()  # can it be written?

    # ----- policies: the neutral start of all taus, the reference, the behaviour policy
    torch.set_num_threads(1)  # the networks are too small to share
    env_name, level = re.match("ersac/(.*)/(tau[^-]*)-", dataset_name(args)).groups()
    levels = {None: "start", 0.5: "tau50", args.expectile_tau: level}
    early = None
    if args.early_fraction > 0:
        early = load_policy(os.path.join(args.policy_dir, "early", f"{env_name}-{level}"), {})
    home = args.policy_dir
    if args.retrain:
        run = f"{os.path.basename(args.env_id)}__{os.path.basename(args.exp_name)}__{args.seed}"
        home = os.path.join(args.output_dir, f"{run}__{int(1000 * time.time())}")
    policies = {}
    for tau, level in levels.items():
        folder = os.path.join(home, f"{env_name}-{level}")
        if os.path.exists(f"{folder}/policy.pt"):
            policies[tau] = load_policy(folder, training)
        else:
            policies[tau] = train(tau, policies.get(None), env, folder, args)

    # ----- collection by the behaviour policy, and in a mixture by the one that was stopped early
    policy, reference = policies[args.expectile_tau], policies[0.5]
    D, A = space.shape[0], int(actions.n)
    actor, early_actor = network(D, A, 0.01), network(D, A, 0.01)
    actor.load_state_dict(policy["actor"])
    early_actor.load_state_dict((early or policy)["actor"])
    if args.switch_prob > 0:
        episodes = collect_episodes(env, actor, args.dataset_size, args, early_actor)
    else:
        share = round(args.early_fraction * args.dataset_size)
        episodes = collect_episodes(env, actor, args.dataset_size - share, args)
        episodes += collect_episodes(env, early_actor, share, args)
    scores = {"ref_min_score": reference["random_return"], "ref_max_score": reference["greedy_return"]}
    about = f"gen_expectile_data.py {' '.join(sys.argv[1:])}; its policy: {policy['args']}"
    store_dataset(dataset_id, episodes, env, description=about, **scores)
    mean = np.mean([episode["rewards"].sum() for episode in episodes])
    count = f"{args.dataset_size} transitions, {len(episodes)} episodes"
    print(f"{dataset_id}: {count}, mean return {mean:.1f}")


if __name__ == "__main__":
    cartpole = re.search("--env.id[ =]CartPole", " ".join(sys.argv))
    defaults = Args(**CARTPOLE) if cartpole else Args()
    try:
        main(tyro.cli(Args, default=defaults, description=__doc__), defaults)
    except KeyboardInterrupt:
        print("\nStopped; no data set was stored.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:  # a full disk, say
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        sys.exit(f"{why} (line {error.__traceback__.tb_next.tb_lineno}); no data set was stored.")
