# docs: docs/ersac_ensemble.md
"""ERSAC with N critics: Algorithms 1 to 3 of "Epistemic Robust Offline Reinforcement Learning".

N critics learn from the same data, and how far they differ is what the data leave open. A set around
their Q-vectors (box, convex hull or ellipsoid) holds the likely ones; the actor learns against the
worst of them. By default every critic bootstraps from itself, which is ours; in the paper's form
(--targets shared --prior-scale 0 --input-scale 1, SAC-N with the box) all share one target. Run:

    python ersac_ensemble.py --env-id LunarLander-v3 --uncertainty-set ellipsoid --upsilon 0.9
"""

import copy
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Literal

import gymnasium as gym
import minari
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from minari.storage import get_dataset_path
from scipy.signal import lfilter
from tqdm import tqdm

DATA_FLAGS = ("env_id", "dataset_size", "dataset_seed", "expectile_tau")  # name the default data
RETURN_SCALE = 10.0  # rewards are scaled so that the data's returns have this root mean square


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__).removesuffix(".py")
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of networks, minibatches and evaluation"""
    cuda: bool = True
    """use a GPU if there is one"""
    output_dir: str = "runs"
    """folder that receives the run folder"""
    resume: str | None = None
    """run folder of a killed run that is to go on; takes no other argument"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "ersac"
    """W&B project"""
    wandb_entity: str | None = None
    """W&B user or team"""
    capture_video: bool = False
    """film some episodes of the final evaluation"""
    eval_interval: int = 1000
    """updates between two rows of metrics.csv, each with an evaluation and a checkpoint"""
    eval_episodes: int = 100
    """episodes of the final evaluation; a tenth of them in between"""

    env_id: str = "LunarLander-v3"
    """environment of the default data set"""
    dataset_size: int = 100_000
    """transitions of the default data set"""
    dataset_seed: int = 1
    """which draw of the default data set: other episodes of the same policy"""
    expectile_tau: float = 0.5
    """risk level of the default data's policy: 0.1 seeks risk, 0.9 avoids it"""
    dataset_id: str | None = None
    """any other Minari data set with vector observations and discrete actions"""

    targets: Literal["own", "shared"] = "own"
    """own: every critic bootstraps from itself; shared: the paper's one robust target for all"""
    uncertainty_set: Literal["box", "hull", "ellipsoid"] = "ellipsoid"
    """set over the critics' Q-vectors: box (shared targets: SAC-N), hull (CH-N), ellipsoid (Ell-N)"""
    upsilon: float = 0.9
    """share of the critics that the ellipsoid covers"""
    num_critics: int = 10
    """N, the number of critics"""
    edac_eta: float = 0.0
    """weight of EDAC's ensemble similarity"""
    prior_scale: float = 10.0
    """factor on the frozen random network added to each critic; 0 (the paper's form) is no prior"""
    input_scale: float = 3.0
    """factor on the observation that critics and priors read; 1 is the paper's form"""

    total_updates: int = 10_000
    """updates of critics and actor"""
    batch_size: int = 128
    """transitions in a minibatch"""
    hidden_dim: int = 128
    """width of the hidden layers"""
    gamma: float = 0.99
    """discount factor"""
    q_lr: float = 1e-3
    """Adam step size of the critics, falling linearly to 0"""
    policy_lr: float = 1e-3
    """Adam step size of actor and temperature, falling linearly to 0"""
    polyak: float = 0.05
    """rate at which the target critics follow the critics"""
    alpha: float = 0.003
    """entropy coefficient (temperature) for the scaled rewards, with --autotune its first value"""
    autotune: bool = False
    """learn the temperature so that the policy's entropy meets the target (Section 2.2)"""
    target_entropy: float = 0.3
    """target of --autotune as a share of log |A|"""


# ===== The data: a Minari data set as tensors, and the environment to evaluate in
def open_dataset(args):
    """The data set of --dataset-id, downloaded if missing, or the default one, made if missing."""
    name = args.dataset_id
    if name is None:
        short = {"LunarLander-v3": "lunarlander", "CartPole-v1": "cartpole"}
        env = short.get(args.env_id, args.env_id.lower())
        tau = f"{100 * args.expectile_tau:.7g}".zfill(2).replace(".", "p")  # 0.05: 05, 0.125: 12p5
        size = re.sub("000$", "k", str(args.dataset_size))  # 10000: 10k
        draw = "" if args.dataset_seed == 1 else f"-s{args.dataset_seed}"
        name = f"ersac/{env}/tau{tau}-{size}{draw}-v0"
    here = name.split("/", 3)[-1] if "://" in name else name  # hf://user/name
    try:
        if not get_dataset_path(here).exists() and args.dataset_id is None:
            print(f"{name} is not on this machine; gen_expectile_data.py makes it.", flush=True)
            gen = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gen_expectile_data.py")
            flags = [f"--{flag}={getattr(args, flag)}" for flag in (*DATA_FLAGS, "output_dir")]
            if subprocess.run([sys.executable, gen, *flags]).returncode:
                sys.exit(1)  # it has said why
        elif not get_dataset_path(here).exists():
            print(f"{name} is not on this machine; Minari looks for it online.", flush=True)
            minari.download_dataset(name)
        dataset = minari.load_dataset(here)
        next(iter(dataset.iterate_episodes()), None)  # can it be read?
        return dataset
    except Exception as error:
        why = " ".join(str(error).split())[:150]
        sys.exit(f"{name} cannot be had ({why}); names of ersac/ are made by gen_expectile_data.py.")


def load_transitions(dataset, gamma):
    """obs, action, reward, next_obs, terminated as tensors, and the discounted return that followed
    (NaN, unknown, if the episode was cut before its end)."""
    name, space, actions = dataset.id, dataset.observation_space, dataset.action_space
    if not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        sys.exit(f"{name} has {actions} actions; this script needs discrete actions from 0 on.")
    if not space.is_np_flattenable or not 0 < gym.spaces.flatdim(space) < 5000:
        sys.exit(f"{name} has {space} observations, not vectors (ersac_atari.py reads images).")
    columns = []
    for episode in dataset.iterate_episodes():
        a, r, ended = episode.actions, episode.rewards.astype(float), episode.terminations  # [T]
        steps = gym.vector.utils.iterate(gym.vector.utils.batch_space(space), episode.observations)
        obs = np.array([gym.spaces.flatten(space, x) for x in steps], np.float32)  # [T + 1, D]
        valid = np.isfinite(obs).all() and np.isfinite(r).all() and np.isin(a, range(actions.n)).all()
        valid = valid and obs.shape[1] == gym.spaces.flatdim(space) and a.ndim == r.ndim == ended.ndim == 1
        if not valid or not len(obs) - 1 == len(a) == len(r) == len(ended):
            sys.exit(f"{name}: T + 1 finite observations, T finite rewards, T {actions} actions needed.")
        returns = lfilter([1.0], [1.0, -gamma], r[::-1])[::-1]  # R_t = r_t + gamma R_t+1
        columns.append((obs[:-1], a, r, obs[1:], ended, returns if ended[-1] else np.nan * r))
    if not columns:
        sys.exit(f"{name} holds no episode.")
    obs, action, *others = [torch.as_tensor(np.concatenate(column)) for column in zip(*columns)]
    return obs, action.long(), *(x.float() for x in others)


def make_eval_env(dataset, **kwargs):
    """The data set's environment for evaluation, observed as vectors; None if there is none."""
    try:
        env = dataset.recover_environment(eval_env=True, **kwargs)
    except Exception as error:
        print(f"no environment, so the policy is not evaluated ({error})")
        return None
    space, flat = dataset.observation_space, gym.spaces.flatdim
    if flat(space) != flat(env.observation_space) or env.action_space != dataset.action_space:
        sys.exit(f"{dataset.id}: its spaces are not those of its environment {env.spec.id}.")
    env = gym.wrappers.TimeLimit(env, 10_000)  # for environments that have none of their own
    return gym.wrappers.TransformObservation(env, lambda x: gym.spaces.flatten(space, x), None)


# ===== Critic: N networks as one stack of weights
class EnsembleCritic(nn.Module):
    """N independent critics with two hidden layers. forward(obs [B, D]) -> q [N, B, A]"""

    def __init__(self, obs_dim, num_actions, num_critics, hidden_dim):
        super().__init__()
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        sizes = [(obs_dim, hidden_dim), (hidden_dim, hidden_dim), (hidden_dim, num_actions)]
        for fan_in, fan_out in sizes:  # each critic starts as its own nn.Linear would
            bound = 1 / math.sqrt(fan_in)
            self.weights.append(torch.empty(num_critics, fan_in, fan_out).uniform_(-bound, bound))
        for fan_in, fan_out in sizes:
            bound = 1 / math.sqrt(fan_in)
            self.biases.append(torch.empty(num_critics, 1, fan_out).uniform_(-bound, bound))

    def forward(self, obs):
        w1, w2, w3 = self.weights  # [N, fan_in, fan_out]
        b1, b2, b3 = self.biases  # [N, 1, fan_out]
        h = torch.baddbmm(b1, obs.expand(len(w1), -1, -1), w1)  # [N, B, H]
        h = F.relu(F.layer_norm(h, h.shape[-1:]))  # keeps values of unseen actions from running away
        h = torch.baddbmm(b2, h, w2)  # [N, B, H]
        h = F.relu(F.layer_norm(h, h.shape[-1:]))
        w3 = w3.mT.contiguous().mT  # stored transposed: faster for few actions
        return torch.baddbmm(b3, h, w3)  # [N, B, A]


# ===== The uncertainty set: q holds N sampled Q-vectors per state, [N, B, A]; pi is [B, A]
def worst_case_box(q, pi):
    """Box: every action at its lowest sample; SAC-N if targets are shared (Prop. 3.1). [B, A]"""
    return q.amin(0)


def worst_case_hull(q, pi):
    """Hull: a linear function is lowest at a vertex, the q_i with the lowest <pi, q_i>. [B, A]"""
    worst = torch.einsum("nba,ba->nb", q, pi).argmin(0)  # [B]
    return q[worst, torch.arange(q.shape[1], device=q.device)]


def worst_case_ellipsoid(q, pi, upsilon):
    """Algorithm 3: q* = mu - radius Sigma pi / sqrt(pi' Sigma pi), in double precision. [B, A]"""
    N, _, A = q.shape
    samples = q.double().permute(1, 2, 0)  # [B, A, N]
    mu = samples.mean(-1, keepdim=True)  # [B, A, 1]
    d = samples - mu  # [B, A, N]
    sigma = d @ d.mT / N  # [B, A, A]
    scale = sigma.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]  # trace(Sigma) / A, [B, 1, 1]
    tiny = torch.finfo(d.dtype).tiny
    ridge = (1e-12 * scale + tiny) * torch.eye(A, device=d.device)  # for N <= A, or no spread
    distance = (d * torch.linalg.solve(sigma + ridge, d)).sum(1)  # squared Mahalanobis, [B, N]
    k = min(max(math.ceil(upsilon * N - 1e-9), 1), N)  # ceil; 0.28 * 25 is above 7 in floats
    radius = distance.kthvalue(k, dim=-1).values.sqrt()  # [B]
    sigma_pi = sigma @ pi.double()[..., None]  # [B, A, 1]
    norm = (pi.double()[:, None] @ sigma_pi).clamp(min=tiny).sqrt()  # sqrt(pi' Sigma pi), [B, 1, 1]
    return (mu - radius[:, None, None] * sigma_pi / norm)[..., 0].to(q.dtype)


# ===== Actor, target and losses
class Actor(nn.Sequential):
    """Policy network. forward(obs [B, D]) -> logits [B, A]"""

    def __init__(self, obs_dim, num_actions, hidden_dim):
        hidden = [nn.Linear(obs_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim), nn.ReLU()]
        super().__init__(*hidden, nn.Linear(hidden_dim, num_actions))


def entropy(pi, log_pi):
    """H(pi) = -<pi, log pi>, with 0 log 0 = 0. [B]"""
    return -(pi * log_pi.clamp(min=torch.finfo(pi.dtype).min)).sum(-1)


def robust_target(reward, terminated, pi, log_pi, q_star, alpha, gamma):
    """y = r + gamma (1 - terminated)(<pi, q*> + alpha H(pi)), pi and q* at the next state, [B].
    With q [N, B, A] in place of q* every sample bootstraps from itself, [N, B]."""
    v = (pi * q_star).sum(-1) + alpha * entropy(pi, log_pi)
    return reward + gamma * (1 - terminated) * v


def critic_loss(q, action, target):
    """Squared errors of all critics against one target [B] or their own [N, B]; the caller
    averages over B and sums over N. [N, B]"""
    return (q[:, torch.arange(len(action), device=q.device), action] - target).square()


def ensemble_similarity(q, action):
    """EDAC's term for discrete actions: cosines between critics of their differences to the data's
    action, summed over pairs i < j, [B], as (|sum u_i|^2 - sum |u_i|^2) / 2 of the unit vectors u_i."""
    delta = q - q.gather(-1, action.expand(len(q), -1)[..., None])  # Q_i(s, .) - Q_i(s, a), [N, B, A]
    norm = delta.square().sum(-1, keepdim=True)  # [N, B, 1]
    unit = torch.where(norm > 0, delta * torch.where(norm > 0, norm, 1).rsqrt(), 0)  # or zero
    return 0.5 * (unit.sum(0).square().sum(-1) - unit.square().sum((0, -1)))


def actor_loss(pi, log_pi, q_star, alpha):
    """-(<pi, q*> + alpha H(pi)); q* held fixed: the exact gradient, by the envelope theorem. [B]"""
    return -((pi * q_star.detach()).sum(-1) + alpha * entropy(pi, log_pi))


# ===== Evaluation
@torch.no_grad()
def evaluate(actor, env, episodes, seed, mean, std):
    """Undiscounted returns of the greedy policy, [episodes]."""
    returns = np.zeros(episodes)
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        terminated = truncated = False
        while not (terminated or truncated):
            obs = (torch.as_tensor(obs, dtype=torch.float32, device=mean.device) - mean) / std
            obs, reward, terminated, truncated, _ = env.step(int(actor(obs).argmax()))
            returns[episode] += reward
    return returns


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    folder = args.resume
    if folder is not None:  # a killed run goes on with its own arguments
        if args != Args(resume=folder):
            sys.exit("--resume takes no other argument: the run goes on with its own.")
        folder = os.path.normpath(folder)
        try:
            args = Args(**json.load(open(f"{folder}/args.json")))
        except (OSError, ValueError, TypeError) as error:
            sys.exit(f"--resume {folder}: not a run folder of this script ({error}).")

    # ----- check the arguments: no number is negative, no count is 0
    highest = {"q_lr": 1, "policy_lr": 1, "polyak": 1, "upsilon": 1, "expectile_tau": 1, "gamma": 0.999}
    highest["target_entropy"] = 1
    highest.update(dict.fromkeys(("batch_size", "hidden_dim", "num_critics"), 10_000))
    for name, value in asdict(args).items():
        low = 1 if type(value) is int and "seed" not in name else 0
        high = highest.get(name, 10**9)
        if type(value) in (int, float) and not low <= value <= high:
            sys.exit(f"--{name.replace('_', '-')} {value}: it must lie in [{low}, {high}].")
    sac_n = (args.uncertainty_set, args.targets, args.prior_scale) == ("box", "shared", 0)
    if args.edac_eta > 0 and not sac_n:
        sys.exit("--edac-eta: EDAC has the set box, shared targets and no prior (--prior-scale 0).")
    if args.dataset_id is None and args.env_id not in gym.registry:
        sys.exit(f"--env-id {args.env_id}: Gymnasium knows no such environment.")
    for name in DATA_FLAGS:
        if args.dataset_id is not None and getattr(args, name) != getattr(Args, name):
            sys.exit(f"--{name.replace('_', '-')} is for the default data set, not for --dataset-id.")

    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # the networks are too small to share
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)  # minibatches and indices

    # ----- data, normalised by their own statistics
    dataset = open_dataset(args)
    tensors = load_transitions(dataset, args.gamma)
    obs, action, reward, next_obs, terminated, returns = (x.to(device) for x in tensors)
    film = {"render_mode": "rgb_array"} if args.capture_video else {}
    env = make_eval_env(dataset, **film)
    D, A = obs.shape[1], int(dataset.action_space.n)
    obs_mean, obs_std = obs.mean(0), obs.std(0, correction=0).clamp(min=1e-3)
    obs, next_obs = (obs - obs_mean) / obs_std, (next_obs - obs_mean) / obs_std
    known = returns[returns.isfinite()]
    if len(known) == 0:  # no episode ended: assume that each reward repeats forever
        known = reward / (1 - args.gamma)
    scale = RETURN_SCALE / max(known.square().mean().sqrt().item(), 1e-8)
    reward, returns = reward * scale, returns * scale

    # ----- networks: critics and their frozen priors, target critics, actor, temperature
    critic = EnsembleCritic(D, A, args.num_critics, args.hidden_dim).to(device)
    target_critic = copy.deepcopy(critic).requires_grad_(False)
    prior_q = prior_q_next = 0.0
    if args.prior_scale > 0:  # a prior never changes: computed once on all data, in blocks
        prior = EnsembleCritic(D, A, args.num_critics, args.hidden_dim).to(device).requires_grad_(False)
        blocks = [prior(args.input_scale * x).transpose(0, 1) for x in obs.split(1000)]
        all_prior_q = args.prior_scale * torch.cat(blocks)  # [|D|, N, A]
        blocks = [prior(args.input_scale * x).transpose(0, 1) for x in next_obs.split(1000)]
        all_prior_q_next = args.prior_scale * torch.cat(blocks)  # [|D|, N, A]
    actor = Actor(D, A, args.hidden_dim).to(device)
    log_alpha = torch.tensor(math.log(max(args.alpha, 1e-30)), device=device, requires_grad=args.autotune)
    q_optimizer = torch.optim.Adam(critic.parameters(), args.q_lr, fused=True)
    policy_optimizer = torch.optim.Adam([*actor.parameters(), log_alpha], args.policy_lr, fused=True)

    def worst_case(q, pi):
        """q* of the chosen set. [B, A]"""
        if args.uncertainty_set == "box":
            return worst_case_box(q, pi)
        if args.uncertainty_set == "hull":
            return worst_case_hull(q, pi)
        return worst_case_ellipsoid(q, pi, args.upsilon)

    # ----- run folder: new, or as a killed run left it
    ell = "Ell-N" if args.upsilon == 1 else f"Ell_{args.upsilon:g}-N"
    box = "SAC-N" if sac_n else "Box-N"
    method = {"box": box, "hull": "CH-N", "ellipsoid": ell}[args.uncertainty_set]
    if args.edac_eta > 0:
        method = "EDAC"
    if args.targets == "own":
        method += "-own"
    if folder is None:
        name = args.env_id if args.dataset_id is None else dataset.id
        name = f"{os.path.basename(name)}__{os.path.basename(args.exp_name)}__{args.seed}"
        folder = os.path.join(args.output_dir, f"{name}__{int(1000 * time.time())}")
        try:
            os.makedirs(folder)
            json.dump(asdict(args), open(f"{folder}/args.json", "w"), indent=2)
        except OSError as error:
            sys.exit(f"--output-dir {args.output_dir}: {error.strerror}.")
    print(f"{method} on {dataset.id}, {device}; after a kill: --resume {folder}", flush=True)
    last_update, rows = 0, []
    parts = dict(critic=critic, target=target_critic, actor=actor)
    parts.update(q_optimizer=q_optimizer, policy_optimizer=policy_optimizer)
    if os.path.exists(f"{folder}/checkpoint.pt"):
        try:
            checkpoint = torch.load(f"{folder}/checkpoint.pt", map_location="cpu", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(checkpoint[name])
        except Exception as error:
            sys.exit(f"--resume: {folder}/checkpoint.pt is damaged ({type(error).__name__}).")
        log_alpha.data.copy_(checkpoint["log_alpha"])
        generator.set_state(checkpoint["generator"])
        last_update, rows = checkpoint["update"], checkpoint["rows"]
    if args.track:
        import wandb

        run = os.path.basename(folder)
        group = f"{re.sub('-s[0-9]+(?=-v)', '', dataset.id)} {method}"  # averages over seeds
        where = {"project": args.wandb_project_name, "entity": args.wandb_entity, "group": group}
        config = asdict(args) | {"dataset_id": dataset.id}
        wandb.init(**where, name=run, id=run, resume="allow", config=config, save_code=True)

    # ----- training: Algorithm 1 with the sets of 2 and 3
    last_time = time.time()
    bar = tqdm(range(last_update + 1, args.total_updates + 1), method, unit="update")
    for update in bar:
        left = 1 - (update - 1) / args.total_updates  # step sizes fall to 0: a settled last policy
        q_optimizer.param_groups[0]["lr"] = args.q_lr * left
        policy_optimizer.param_groups[0]["lr"] = args.policy_lr * left

        # sample a minibatch
        batch = torch.randint(len(obs), (args.batch_size,), generator=generator).to(device)
        s, a, r = obs[batch], action[batch], reward[batch]  # [B, D], [B], [B]
        s_next, ended = next_obs[batch], terminated[batch]  # [B, D], [B]; a truncation is no end
        if args.prior_scale > 0:
            prior_q = all_prior_q[batch].transpose(0, 1)  # [N, B, A]
            prior_q_next = all_prior_q_next[batch].transpose(0, 1)  # [N, B, A]
        alpha = log_alpha.detach().exp()

        # compute target: every critic its own, or the worst case over the target critics' set
        with torch.no_grad():
            log_pi = actor(s_next).log_softmax(-1)  # [B, A]
            pi = log_pi.exp()
            q_next = target_critic(args.input_scale * s_next) + prior_q_next  # [N, B, A]
            if args.targets == "shared":
                q_next = worst_case(q_next, pi)  # q*, [B, A]
            y = robust_target(r, ended, pi, log_pi, q_next, alpha, args.gamma)  # [B], or [N, B]

        # critic update: mean over the batch, sum over the critics
        q = critic(args.input_scale * s) + prior_q  # [N, B, A]
        q_losses = critic_loss(q, a, y)  # [N, B]
        q_loss = q_losses.mean(1).sum()
        if args.edac_eta > 0:
            q_loss = q_loss + args.num_critics * args.edac_eta * ensemble_similarity(q, a).mean()
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()

        # actor update against the worst case of the updated critics, and the temperature
        log_pi = actor(s).log_softmax(-1)  # [B, A]
        pi = log_pi.exp()
        with torch.no_grad():
            q = critic(args.input_scale * s) + prior_q  # [N, B, A]
            q_star = worst_case(q, pi)  # [B, A]
        pi_loss = actor_loss(pi, log_pi, q_star, alpha).mean()
        h = entropy(pi, log_pi).detach().mean()
        policy_optimizer.zero_grad()
        pi_loss.backward()
        if args.autotune:
            (log_alpha.exp() * (h - args.target_entropy * math.log(A))).backward()
        policy_optimizer.step()

        # update target critics
        for p_target, p in zip(target_critic.parameters(), critic.parameters()):
            p_target.lerp_(p.detach(), args.polyak)

        # log, evaluate, checkpoint
        if update % args.eval_interval == 0 or update == args.total_updates:
            with torch.no_grad():
                mu = q.mean(0)  # [B, A]
                std = q.std(0, correction=0)  # [B, A]
                taken = F.one_hot(a, A).bool()  # [B, A]
                row = {
                    "losses/critic_loss": q_losses.mean(),
                    "losses/actor_loss": pi_loss,
                    "charts/alpha": alpha,
                    "charts/policy_entropy": h,
                    "charts/q_gap": (pi * (mu - q_star)).sum(-1).mean(),
                    "charts/q_minus_return": (mu[taken] - returns[batch]).nanmean(),  # where known
                    "charts/q_star_minus_return": (q_star[taken] - returns[batch]).nanmean(),
                    "charts/std_data_actions": std[taken].mean(),
                    "charts/std_other_actions": std[~taken].mean(),
                }
            row = {"update": update} | {name: value.item() for name, value in row.items()}
            row["charts/updates_per_second"] = (update - last_update) / (time.time() - last_time)
            if not math.isfinite(row["losses/critic_loss"] + row["losses/actor_loss"]):
                sys.exit(f"update {update}: the loss is not finite; try a smaller --q-lr.")
            episodes = math.ceil(args.eval_episodes / 10) if env else 0
            scores = evaluate(actor, env, episodes, 10**6 * (args.seed + 1), obs_mean, obs_std)
            row["eval/return"] = scores.mean().item() if env else math.nan
            rows.append(row)
            table = [list(row.values()) for row in rows]
            np.savetxt(f"{folder}/metrics.csv", table, "%.10g", ",", header=",".join(row), comments="")
            if args.track:
                wandb.log(row, step=update)
            checkpoint = {name: part.state_dict() for name, part in parts.items()}
            checkpoint["log_alpha"] = log_alpha.detach()
            checkpoint.update(generator=generator.get_state(), update=update, rows=rows)
            checkpoint.update(obs_mean=obs_mean, obs_std=obs_std)
            torch.save(checkpoint, f"{folder}/checkpoint.tmp")
            os.replace(f"{folder}/checkpoint.tmp", f"{folder}/checkpoint.pt")  # never half a file
            last_update, last_time = update, time.time()  # evaluations do not count
            bar.set_postfix_str(f"critic={q_losses.mean():.3g}, return={row['eval/return']:.1f}")

    # ----- final evaluation: the last policy, greedy, on fresh episodes
    if env and args.capture_video:
        env = gym.wrappers.RecordVideo(env, f"{folder}/video")
    first_seed = 10**6 * (args.seed + 1) + 10**5  # apart from those on the way
    scores = evaluate(actor, env, args.eval_episodes if env else 0, first_seed, obs_mean, obs_std)
    if env:
        env.close()
    log_pi = actor(obs[:10_000]).log_softmax(-1)  # [10000, A]
    ref_min, ref_max = (dataset.storage.metadata.get(f"ref_{x}_score") for x in ("min", "max"))
    normalized = None
    if env and None not in (ref_min, ref_max) and ref_min < ref_max < math.inf:
        normalized = 100 * (scores.mean() - ref_min) / (ref_max - ref_min)
    result = {
        "script": os.path.basename(__file__),
        "method": method,
        "env_id": env.spec.id if env else None,
        "dataset_id": dataset.id,
        "seed": args.seed,
        "updates": args.total_updates,
        "updates_per_second": np.mean([row["charts/updates_per_second"] for row in rows]),
        "eval_episodes": len(scores),
        "eval_return_mean": scores.mean() if env else None,
        "eval_return_std": scores.std() if env else None,
        "eval_returns": scores.tolist(),
        "random_return": ref_min,
        "reference_return": ref_max,
        "normalized_return": normalized,
        "policy_entropy": entropy(log_pi.exp(), log_pi).mean().item(),
    }
    json.dump(result, open(f"{folder}/result.json", "w"), indent=2)
    if args.track:
        wandb.run.summary.update(result)
    score = f"return {scores.mean():.1f} over {len(scores)} episodes" if env else "not evaluated"
    print(f"{method} on {dataset.id}: {score}")
    if normalized is not None:
        scale = f"(0: {ref_min:.1f}, random play; 100: {ref_max:.1f}, reference)"
        print(f"normalized return {normalized:.1f} {scale}")
    print(f"run folder: {folder}")
