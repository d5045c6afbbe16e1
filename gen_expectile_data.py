# docs: docs/gen_expectile_data.md
"""Offline data from policies that seek or avoid risk: Algorithm 5, dynamic expectile risk policies.

The critic values an action by the tau-expectile of what may follow; the policy then collects data
with epsilon-random actions. Where the paper's box takes a TD and a gradient step per transition,
the training here is PPO with traces, from a risk-neutral start. Trained ones are in docs/policies:

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
from pathlib import Path
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
METRICS = ("env_steps", "charts/episode_return", "losses/critic_loss", "losses/actor_loss", "charts/policy_entropy")
# the arguments that make a policy what it is
TRAINING = ("seed", "estimator", "num_resamples", *CARTPOLE, "policy_lr", "gamma", "epsilon")


# ===== Actor and critic
def network(obs_dim, out_dim, head_gain, hidden_dim=128):
    """Two hidden layers. An actor has A outputs, its logits; a critic 1 + A, see action_values."""
    layers = [nn.Linear(obs_dim, hidden_dim), nn.Linear(hidden_dim, hidden_dim), nn.Linear(hidden_dim, out_dim)]
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), head_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def action_values(critic, obs, tau):
    """A common value plus each action's own difference, 0 at first: what chance makes of rare actions
    would look like risk. The neutral start (tau None) has the common value alone. [..., A]"""
    out = critic(obs)  # [..., 1 + A]
    common, difference = out[..., :1], out[..., 1:]
    return common.expand_as(difference) if tau is None else common + difference


# ===== The expectile target
def expectile(values, probs, tau, axis=-1):
    """The e with tau E[(e - X)+] = (1 - tau) E[(X - e)+]; 0.9 is risk-averse (IQL: 1 - tau)."""
    values, probs = np.broadcast_arrays(np.asarray(values, float), np.asarray(probs, float))
    low = values.min(axis, keepdims=True)
    high = values.max(axis, keepdims=True)
    for _ in range(64):  # bisection down to machine precision
        e = 0.5 * (low + high)
        weight = np.where(values < e, tau, 1 - tau)
        gain = (probs * (values - e) * weight).sum(axis, keepdims=True)  # 0 at the expectile
        low = np.where(gain > 0, e, low)
        high = np.where(gain > 0, high, e)
    return (0.5 * (low + high)).squeeze(axis)


def risk_weights(values, probs, tau):
    """The expectile e along the last axis, and rho: e = sum(probs rho values), sum(probs rho) = 1;
    where e is risk-averse, a bad outcome has rho > 1 and counts for more than its probability."""
    e = expectile(values, probs, tau)
    rho = np.where(values < e[..., None], tau, 1 - tau)
    return e, rho / (probs * rho).sum(-1, keepdims=True)


def resample(env, roll, states, num_resamples, epsilon, rng):
    """N_s outcomes for every (s, a) of a rollout, [T, E, N_s, ...]: first the one that happened, then
    others from the same state and action, with new noise and the environment's own randomness."""
    names = ("next_obs", "reward", "terminated")
    outcomes = [np.repeat(roll[name][:, :, None], num_resamples, 2) for name in names]
    env.reset()
    simulator = env.unwrapped
    simulator.np_random = rng
    for e, t, n in np.ndindex(*roll["reward"].T.shape, num_resamples - 1):
        simulator.state = states[t][e].copy()
        simulator.steps_beyond_terminated = None  # CartPole counts those
        b = int(roll["chosen"][t, e])
        if rng.random() < epsilon:
            b = int(rng.integers(env.action_space.n))
        for outcome, value in zip(outcomes, simulator.step(b)):
            outcome[t, e, n + 1] = value
    return outcomes


@torch.no_grad()
def targets_and_advantages(roll, outcomes, actor, critic, tau, args):
    """What critic and actor learn from, [T, E] each. For the neutral start (tau None) this is
    generalised advantage estimation."""

    def values(obs):  # [..., D] -> w [..., A], q [..., A], rho [..., A, A], v [...]
        obs = torch.from_numpy(obs).float()
        w = action_values(critic, obs, tau).double().numpy()
        pi = actor(obs).double().softmax(-1).numpy()
        A = pi.shape[-1]
        q, rho = w, np.ones((*w.shape, A))
        if outcomes is None and tau is not None:  # p[a, b]: a is chosen, b executed
            p = (1 - args.epsilon) * np.eye(A) + args.epsilon / A
            q, rho = risk_weights(w[..., None, :], p, tau)
        return w, q, rho, (pi * q).sum(-1)

    w, q, rho, v = values(roll["obs"])
    step, env = np.indices(v.shape)
    a, b = roll["chosen"], roll["executed"]
    q = q[step, env, a]
    # what happened, [T, E], or the resampled outcomes, [T, E, N_s]
    next_obs, reward, terminated = outcomes or (roll["next_obs"], roll["reward"], roll["terminated"])
    # bootstrapping stops at terminations, never at truncations
    y = args.reward_scale * reward + np.where(terminated, 0.0, args.gamma * values(next_obs)[-1])
    if outcomes:  # resample: the critic scores chosen actions, by the expectile over the outcomes
        y, rho = risk_weights(y, 1 / y.shape[-1], tau)
        scored = q
        weight = 1.0
        cut = rho[..., 0]  # the first outcome is the one that happened
    else:  # action-noise: executed actions are scored by their mean, the expectile is over them
        scored = w[step, env, b]
        weight = rho[step, env, a, b]
        cut = np.roll(weight, -1, 0)  # of the next step
    # traces G_t = delta_t + decay_t G_t+1, cut at the end of an episode and of the rollout
    G = y - scored  # delta
    decay = 0.97 * args.gamma * np.minimum(cut, 1)
    decay[roll["terminated"] | roll["truncated"]] = 0.0
    for t in reversed(range(len(G) - 1)):
        G[t] += decay[t] * G[t + 1]
    return scored + G, q - v + weight * G


# ===== Algorithm 5 up to the collection, in rollouts of 256 steps of 16 environments
def train(tau, start, env, folder, args):
    """Train a tau, or (None) the neutral start; policy.pt is kept if it reaches the floor."""
    name = os.path.basename(folder)
    num_rollouts = math.ceil((args.start_steps if tau is None else args.finish_steps) / 4096)
    print(f"{name}: {num_rollouts} rollouts of 4096 steps, about a minute per 50; into {folder}", flush=True)
    os.makedirs(folder, exist_ok=True)

    # initialise the policy and the value function
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    D, A = env.observation_space.shape[0], int(env.action_space.n)
    actor, critic = network(D, A, 0.01), network(D, 1 + A, 1.0)
    critic[-1].weight.data[1:] = 0.0  # see action_values
    epsilon, lr, entropy_coef = 0.0, args.policy_lr, 0.01
    if tau is not None:
        epsilon, lr, entropy_coef = args.epsilon, 0.5 * args.policy_lr, 0.005
        actor.load_state_dict(start["actor"])
        critic.load_state_dict(start["critic"])
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr, eps=1e-5)
    by_hand = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}
    envs = gym.make_vec(args.env_id, 16, "sync", by_hand, disable_env_checker=True)
    seeds = torch.randint(2**31, (16,), generator=generator).numpy()
    obs, _ = envs.reset(seed=seeds.tolist())  # [E, D]
    returns = np.zeros(16)
    recent, rows = [], []  # returns of training episodes, metrics
    resampling = tau is not None and args.estimator == "resample"
    columns = ("obs", "chosen", "executed", "next_obs", "reward", "terminated", "truncated")
    bar = tqdm(range(num_rollouts), name, unit="rollout", mininterval=1)
    for rollout in bar:
        # sample transitions by executing the policy, or with probability epsilon a random action
        steps, states = [], []
        for _ in range(256):
            pi = actor(torch.from_numpy(obs).float()).detach().softmax(-1)  # [E, A]
            chosen = torch.multinomial(pi, 1, generator=generator)[:, 0]  # [E]
            random = torch.randint(A, (16,), generator=generator)
            noisy = torch.rand(16, generator=generator) < epsilon
            executed = torch.where(noisy, random, chosen).numpy()
            if resampling:
                states.append([np.array(one.unwrapped.state) for one in envs.envs])
            *result, _ = envs.step(executed)
            steps.append((obs, chosen.numpy(), executed, *result))
            obs, reward, terminated, truncated = result
            returns += reward
            done = terminated | truncated
            if done.any():
                recent += returns[done].tolist()
                returns[done] = 0.0
                seeds[done] = torch.randint(2**31, (done.sum(),), generator=generator)
                obs, _ = envs.reset(seed=seeds.tolist(), options={"reset_mask": done})
        roll = {column: np.stack(values) for column, values in zip(columns, zip(*steps))}  # [T, E, ...]
        outcomes = None  # for the resample estimator: N_s next states of every (s, a)
        if resampling:
            rng = np.random.default_rng([args.seed, 3, rollout])
            outcomes = resample(env, roll, states, args.num_resamples, epsilon, rng)

        s = torch.from_numpy(roll["obs"]).flatten(0, 1).float()  # [B, D]
        a, b = (torch.from_numpy(roll[x]).reshape(-1, 1) for x in ("chosen", "executed"))  # [B, 1]
        scored = a if resampling else b  # what the critic gives a value to
        old_log_pi = actor(s).detach().log_softmax(-1).gather(-1, a)  # [B, 1]
        train_actor = tau is None or rollout >= 8  # a new tau trains its critic first
        optimizer.param_groups[0]["lr"] = lr * (1 - rollout / num_rollouts)
        losses = []
        for _ in range(4):
            # compute the expectile target, anew in every pass: risk cuts the traces short
            both = targets_and_advantages(roll, outcomes, actor, critic, tau, args)
            y, advantage = (torch.from_numpy(x).float().reshape(-1, 1) for x in both)  # [B, 1]
            for i in torch.randperm(len(s), generator=generator).split(512):
                # update the value function
                q = action_values(critic, s[i], tau).gather(-1, scored[i])  # [M, 1]
                critic_loss = (q - y[i]).square().mean()

                # update the policy: PPO's clipped steps
                log_pi = actor(s[i]).log_softmax(-1)  # [M, A]
                ratio = (log_pi.gather(-1, a[i]) - old_log_pi[i]).exp()  # [M, 1]
                spread = advantage[i].std(correction=0)
                spread = spread.clamp(min=args.advantage_floor) if args.advantage_floor else spread + 1e-8
                adv = (advantage[i] - advantage[i].mean()) / spread  # [M, 1]
                actor_loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
                entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
                loss = 0.5 * critic_loss + train_actor * (actor_loss - entropy_coef * entropy)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
                losses.append([critic_loss.item(), actor_loss.item(), entropy.item()])

        # log
        episode_return = np.mean(recent[-100:]) if recent else math.nan
        rows.append([4096 * (rollout + 1), episode_return, *np.mean(losses, 0)])
        np.savetxt(f"{folder}/metrics.csv", rows, "%.10g", ",", header=",".join(METRICS), comments="")
        bar.set_postfix_str(f"return={episode_return:.1f}", refresh=False)

    # keep the policy if it is good enough
    random_return = mean_return(env, None, args.eval_episodes, [args.seed, 1])
    score = mean_return(env, actor, args.eval_episodes, [args.seed, 4, rollout])
    floors = (args.floor, env.spec.reward_threshold, random_return)
    floor = next(x for x in floors if x is not None)
    print(f"{name}: greedy return {score:.1f}, the floor is {floor:g}")
    if score < floor:
        why = "below the floor, not kept; a lower --floor, another --seed or more steps may help"
        sys.exit(f"{name}: {why}, or data of your own (docs/your_own.md).")
    policy = {
        "args": {flag: getattr(args, flag) for flag in TRAINING},
        "actor": actor.state_dict(),
        "critic": critic.state_dict(),
        "random_return": random_return,
        "greedy_return": score,
    }
    torch.save(policy, f"{folder}/policy.tmp")
    os.replace(f"{folder}/policy.tmp", f"{folder}/policy.pt")


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


@torch.no_grad()
def play_episode(env, actor, rng, epsilon=0.0, greedy=False, limit=None, turns=None):
    """An episode of the actor, or of the random policy if it is None. Where it takes turns with an
    early actor, who acts is drawn at first and, with switch_prob, at every step."""
    early_actor, early_fraction, switch_prob = turns or (None, 0.0, 0.0)
    seed = int(rng.integers(2**31))
    observations = [env.reset(seed=seed)[0]]
    steps, early = [], []
    acting = actor
    done = False
    while not done:
        if turns and (not steps or rng.random() < switch_prob):
            acting = early_actor if rng.random() < early_fraction else actor
        action = int(rng.integers(env.action_space.n))
        if acting is not None and rng.random() >= epsilon:
            logits = acting(torch.from_numpy(observations[-1]).float())  # [A]
            pi = logits.double().softmax(-1).numpy()
            action = int(pi.argmax() if greedy else rng.choice(len(pi), p=pi))
        obs, reward, terminated, truncated, _ = env.step(action)
        truncated = truncated or (len(steps) + 1 == limit and not terminated)
        observations.append(obs)
        steps.append((action, float(reward), bool(terminated), bool(truncated)))
        early.append(acting is early_actor)
        done = terminated or truncated
    names = ("actions", "rewards", "terminations", "truncations")
    episode = dict(zip(names, map(np.array, zip(*steps))))  # [T]
    episode["observations"] = np.array(observations)  # [T + 1, D]
    episode["infos"] = {"early": np.array(early)} if turns else None
    return episode | {"seed": seed}


def mean_return(env, actor, episodes, seed):
    """Mean return of greedy episodes, or of random ones if the actor is None."""
    rng = np.random.default_rng(seed)
    played = [play_episode(env, actor, rng, greedy=True) for _ in range(episodes)]
    return float(np.mean([episode["rewards"].sum() for episode in played]))


def collect_episodes(env, actor, size, args, turns=None):
    """Episodes of size transitions in all; a smaller data set is the beginning of a larger one."""
    rng = np.random.default_rng([args.dataset_seed, 0])
    episodes = []
    bar = tqdm(total=size, desc="collection", unit="step", mininterval=1, disable=size == 0)
    while bar.n < size:
        episodes.append(play_episode(env, actor, rng, args.epsilon, False, size - bar.n, turns))
        bar.update(len(episodes[-1]["actions"]))
    return episodes


def store_dataset(dataset_id, episodes, env, **metadata):
    """Build the Minari data set in a hidden folder and rename it: nobody meets half a one."""
    buffers = [EpisodeBuffer(id=i, **episode) for i, episode in enumerate(episodes)]
    path = get_dataset_path(dataset_id)
    with tempfile.TemporaryDirectory(prefix=".ersac-", dir=get_dataset_path()) as hidden:
        room = Path(hidden, "room")  # HDF5 crashes where a disk is full
        room.write_bytes(bytes(sum(20_000 + 2 * episode["observations"].nbytes for episode in episodes)))
        room.unlink()
        with mock.patch.dict(os.environ, MINARI_DATASETS_PATH=hidden):
            minari.create_dataset_from_buffers(dataset_id, buffers, env=env, **metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.rename(path, f"{hidden}/replaced")
        os.rename(f"{hidden}/{dataset_id}", path)


def main(args, defaults):
    # ----- check the arguments: no number is negative, no count is 0
    ranges = {"expectile_tau": (0.001, 0.999), "gamma": (0, 0.9999), "floor": (-(10**9), 10**9)}
    ranges = ranges | dict.fromkeys(("epsilon", "early_fraction", "switch_prob", "policy_lr"), (0, 1))
    for name, value in asdict(args).items():
        flag = f"--{name.replace('_', '-')} {value}"
        low, high = ranges.get(name, (1 if type(value) is int and "seed" not in name else 0, 10**9))
        if type(value) in (int, float) and not low <= value <= high:
            sys.exit(f"{flag}: it must lie in [{low}, {high}].")
        other = name in TRAINING and name != "epsilon" and value != getattr(defaults, name)
        if other and args.dataset_id is None:
            sys.exit(f"{flag} makes other policies: give their data a --dataset-id of their own.")
    if args.switch_prob > 0 and not 0 < args.early_fraction < 1:
        sys.exit("--switch-prob: it takes two to take turns; --early-fraction must be between 0 and 1.")
    dataset_id = dataset_name(args) if args.dataset_id is None else args.dataset_id
    if not re.fullmatch(r"([-\w][-\w/]*[-\w]/)?[-\w]+-v\d+", dataset_id):
        sys.exit(f"{dataset_id}: no name for a data set; choose a --dataset-id such as my/data-v0.")
    path = get_dataset_path(dataset_id)
    if path.exists() and not (path / "data").exists():
        sys.exit(f"{dataset_id} is a folder of other data sets; choose another --dataset-id.")
    if path.exists() and not args.overwrite:
        print(f"{dataset_id} exists and is left alone; --overwrite replaces it.")
        sys.exit(0 if args.dataset_id is None else 1)  # a default name says what is in it
    tempfile.TemporaryFile(dir=get_dataset_path()).close()  # can it be written?
    env = gym.make(args.env_id, disable_env_checker=True)
    space, actions = env.observation_space, env.action_space
    vectors = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
    if not vectors or not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        sys.exit(f"--env-id {args.env_id}: vectors and Discrete actions from 0 on, not {space}, {actions}.")
    if args.estimator == "resample" and "classic_control" not in str(env.spec.entry_point):
        sys.exit(f"--estimator resample: states of {args.env_id} cannot be restored; use action-noise.")

    # ----- policies: the neutral start of all taus, the reference, the behaviour policy
    torch.set_num_threads(1)  # the networks are too small to share
    env_name, level = re.match("ersac/(.*)/(tau[^-]*)-", dataset_name(args)).groups()
    home = args.policy_dir
    if args.retrain:
        home = f"{args.output_dir}/{env_name}__gen_expectile_data__{args.seed}__{int(1000 * time.time())}"
    folders = {None: f"{home}/{env_name}-start", 0.5: f"{home}/{env_name}-tau50"}
    folders[args.expectile_tau] = f"{home}/{env_name}-{level}"
    if args.early_fraction > 0:  # first, as it may be missing
        folders = {"early": f"{args.policy_dir}/early/{env_name}-{level}"} | folders
    policies = {}
    for tau, folder in folders.items():
        path = f"{folder}/policy.pt"
        if tau != "early" and not os.path.exists(path):
            train(tau, policies.get(None), env, folder, args)
        try:
            policies[tau] = torch.load(path, weights_only=True)
            other = [name for name in TRAINING if policies[tau]["args"][name] != getattr(args, name)]
        except Exception as error:
            sys.exit(f"{path}: no policy can be read there ({type(error).__name__}).")
        if other and tau != "early":
            sys.exit(f"{path}: trained with another {' and '.join(other)}; use --retrain.")

    # ----- collection by the behaviour policy, and in a mixture by the one that was stopped early
    policy, reference = policies[args.expectile_tau], policies[0.5]
    actor, early_actor = (network(space.shape[0], int(actions.n), 0.01) for _ in range(2))
    actor.load_state_dict(policy["actor"])
    early_actor.load_state_dict(policies.get("early", policy)["actor"])
    if args.switch_prob > 0:
        turns = (early_actor, args.early_fraction, args.switch_prob)
        episodes = collect_episodes(env, actor, args.dataset_size, args, turns)
    else:
        share = round(args.early_fraction * args.dataset_size)
        episodes = collect_episodes(env, actor, args.dataset_size - share, args)
        episodes += collect_episodes(env, early_actor, share, args)
    scores = {"ref_min_score": reference["random_return"], "ref_max_score": reference["greedy_return"]}
    about = f"gen_expectile_data.py {' '.join(sys.argv[1:])}; its policy: {policy['args']}"
    store_dataset(dataset_id, episodes, env, description=about, **scores)
    mean = np.mean([episode["rewards"].sum() for episode in episodes])
    print(f"{dataset_id}: {args.dataset_size} transitions, {len(episodes)} episodes, mean return {mean:.1f}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="minari")  # about metadata that are not given
    cartpole = re.search("--env.id[ =]CartPole", " ".join(sys.argv))
    defaults = Args(**CARTPOLE) if cartpole else Args()
    try:
        main(tyro.cli(Args, default=defaults, description=__doc__), defaults)
    except (Exception, KeyboardInterrupt) as error:  # a full disk or a Ctrl-C, say
        why = " ".join(f"{type(error).__name__} {error}".split())[:300]
        sys.exit(f"{why} (line {error.__traceback__.tb_next.tb_lineno}); no data set was stored.")
