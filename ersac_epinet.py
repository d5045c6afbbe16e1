# docs: docs/ersac_epinet.md
"""ERSAC with an Epinet: Algorithm 4 of "Epistemic Robust Offline Reinforcement Learning".

One network stands for an ensemble: an index z ~ N(0, I) picks a Q-function, and their spread is
what the data leave open. At each state an ellipsoid holds the likely Q-vectors; the actor learns
against the worst of them. By default every z bootstraps from itself, which is ours; with --targets
shared all z learn from one worst-case target (the docs have the paper's full settings). The method
ell-epi-star is Algorithm 4; ell-epi puts the sets of Algorithms 2 and 3 over sampled z.

    python ersac_epinet.py --env-id LunarLander-v3 --upsilon 0.9
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
from scipy.stats import chi2
from tqdm import tqdm

DATA_FLAGS = ("env_id", "dataset_size", "dataset_seed", "expectile_tau")  # name the default data
RETURN_SCALE = 10.0  # rewards are scaled so that the data's returns have this root mean square
INPUT_SCALE = 3.0  # factor on the observation that the heads read: how fast the prior varies


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
    """own: every index z bootstraps from itself; shared: the paper's one robust target for all"""
    method: Literal["ell-epi-star", "ell-epi"] = "ell-epi-star"
    """ell-epi-star: heads linear in z, set in closed form; ell-epi: nonlinear heads, sampled z"""
    uncertainty_set: Literal["ellipsoid", "hull", "box"] = "ellipsoid"
    """shape of the set; with ell-epi-star the box is the ellipsoid's bounding box, and no hull"""
    upsilon: float = 0.9
    """probability (ell-epi-star, below 1) or share of the samples (ell-epi) that the set covers"""
    index_dim: int = 16
    """d_z, the dimension of the index z; below |A| the closed form's set holds more than upsilon"""
    num_index_samples: int = 30
    """N, the number of sampled z per update (ell-epi only)"""
    head_input: Literal["obs", "features"] = "obs"
    """what the stochastic heads read: the observation, or (the paper) the features psi"""
    prior_scale: float = 3.0
    """factor on the frozen prior head, which is the uncertainty where there are no data"""
    noise_scale: float = 0.1
    """scale of the fixed noise <c, z> on a transition's target; not the heads' sigma_bar below"""
    lambda_mu: float = 0.0
    """weight decay of the features and the mean"""
    lambda_sigma: float = 0.0
    """weight decay of the learnable stochastic head"""

    total_updates: int = 10_000
    """updates of critic and actor"""
    batch_size: int = 256
    """transitions in a minibatch"""
    hidden_dim: int = 128
    """width of the hidden layers"""
    gamma: float = 0.99
    """discount factor"""
    q_lr: float = 5e-4
    """Adam step size of the critic, falling linearly to 0"""
    policy_lr: float = 5e-4
    """Adam step size of the actor, falling linearly to 0"""
    polyak: float = 0.05
    """rate at which the target critic follows the critic"""
    alpha: float = 0.003
    """entropy coefficient, for the scaled rewards"""


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


# ===== Critic: one network with a mean and a stochastic head
def mlp(*sizes):
    """Linear layers of these sizes with ReLU in between."""
    layers = []
    for fan_in, fan_out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class GeneralHead(nn.Module):
    """sigma(x, ., z) = <g(h), z>, where the hidden units h read [x, z], so that it is nonlinear in z.
    forward(x [B, X], z [N, d_z]) -> [N, B, A]"""

    def __init__(self, sizes, index_dim, num_actions, width):
        super().__init__()
        self.from_x = mlp(*sizes)  # computed B times, not N B times
        self.hidden = nn.Linear(sizes[-1] + index_dim, width)
        self.g = nn.Linear(width, num_actions * index_dim)

    def forward(self, x, z):
        x = F.relu(self.from_x(x))  # [B, X]; the features psi as they are
        w_x, w_z = self.hidden.weight.split([x.shape[1], z.shape[1]], 1)
        h = F.relu(F.linear(x, w_x, self.hidden.bias) + (z @ w_z.T)[:, None])  # of [x, z], [N, B, W]
        # <G h + b, z> = <h, G' z> + <b, z>, which is d_z times cheaper than g(h)
        G = self.g.weight.unflatten(0, (-1, z.shape[1]))  # [A, d_z, W]
        b = self.g.bias.unflatten(0, (-1, z.shape[1]))  # [A, d_z]
        return h @ torch.einsum("adw,nd->nwa", G, z) + (z @ b.T)[:, None]


class EpinetCritic(nn.Module):
    """q(s, a, z) = mu(s, a) + sigma_L(x, a, z) + prior_scale sigma_P(x, a, z), sigma_P frozen. The
    heads read x: the scaled observation, or (the paper) the features psi, without gradient to them.
    Linear heads (Assumption 5.1) are <sigma_bar(x, a), z>, and forward(obs [B, D]) -> mu [B, A],
    sigma_bar [B, A, d_z]. All heads have sample(obs, z [N, d_z]) -> [N, B, A]"""

    def __init__(self, obs_dim, num_actions, index_dim, hidden_dim, prior_scale=3.0, head_input="obs", linear=True):
        super().__init__()
        self.shape = (num_actions, index_dim)
        self.prior_scale = prior_scale
        self.head_input = head_input
        self.linear = linear
        layers = []
        for fan_in in (obs_dim, hidden_dim):  # layer norm: values of unseen actions do not run away
            layers += [nn.Linear(fan_in, hidden_dim), nn.LayerNorm(hidden_dim), nn.ReLU()]
        self.psi = nn.Sequential(*layers)
        self.mu = nn.Linear(hidden_dim, num_actions)
        if linear:
            sizes = [obs_dim, 2 * hidden_dim, 2 * hidden_dim] if head_input == "obs" else [hidden_dim, 50]
            self.sigma_L = mlp(*sizes, num_actions * index_dim)
            self.sigma_P = mlp(*sizes, num_actions * index_dim)
        else:
            sizes = [obs_dim, 2 * hidden_dim] if head_input == "obs" else [hidden_dim]
            width, narrow = (128, 50) if head_input == "obs" else (50, 10)  # so that sigma_L can undo sigma_P
            self.sigma_L = GeneralHead(sizes, index_dim, num_actions, width)
            self.sigma_P = GeneralHead(sizes, index_dim, num_actions, narrow)
        self.sigma_P.requires_grad_(False)
        if head_input == "obs":  # He initialisation: |sigma_P| is about the rms of x, for every d_z
            layers = [layer for layer in self.sigma_P.modules() if isinstance(layer, nn.Linear)]
            for layer in layers:
                nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.in_features))
                nn.init.normal_(layer.bias, std=0.3)
            layers[-1].weight.mul_(math.sqrt(1 / (2 * index_dim)))
            layers[-1].bias.zero_()

    def read(self, obs):
        """The features psi [B, H] of the mean, and x [B, X], which the heads read."""
        psi = self.psi(obs)
        x = INPUT_SCALE * obs if self.head_input == "obs" else psi.detach()
        return psi, x

    def forward(self, obs, sigma_p=None):
        """sigma_p [B, A d_z]: the prior head at these observations, if it is known already"""
        psi, x = self.read(obs)
        if sigma_p is None:
            sigma_p = self.sigma_P(x)
        sigma_bar = self.sigma_L(x) + self.prior_scale * sigma_p  # [B, A d_z]
        return self.mu(psi), sigma_bar.unflatten(-1, self.shape)

    def sample(self, obs, z):
        if self.linear:
            mu, sigma_bar = self(obs)
            return mu + torch.einsum("bad,nd->nba", sigma_bar, z)
        psi, x = self.read(obs)
        return self.mu(psi) + self.sigma_L(x, z) + self.prior_scale * self.sigma_P(x, z)


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


def worst_case_gaussian(mu, sigma_bar, pi, radius):
    """The worst case in the ellipsoid of q ~ N(mu, sigma_bar sigma_bar'): with v = sigma_bar' pi,
    q* = mu - radius sigma_bar v / |v|, where radius = sqrt(chi2.ppf(upsilon, A)). [B, A]"""
    v = torch.einsum("bad,ba->bd", sigma_bar, pi).double()  # [B, d_z]
    norm = v.norm(dim=-1, keepdim=True)  # sqrt(pi' Sigma pi), [B, 1], in double; 0: q* = mu
    v = v / norm.clamp(min=torch.finfo(v.dtype).tiny)
    return mu - radius * torch.einsum("bad,bd->ba", sigma_bar, v.to(mu.dtype))


def worst_case_gaussian_box(mu, sigma_bar, pi, radius):
    """The ellipsoid's bounding box: every action as low as it gets, whatever the policy. [B, A]"""
    return mu - radius * sigma_bar.norm(dim=-1)


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


def propagated_spread(terminated, pi, sigma_bar, gamma):
    """How the next state's spread enters an index's own target, y(z) = y + <spread, z>. [B, d_z]"""
    return gamma * (1 - terminated)[:, None] * torch.einsum("ba,bad->bd", pi, sigma_bar)


def epinet_loss(mu, sigma_bar, action, target, c, noise_scale, spread=0.0):
    """E_z (q(s, a, z) - y - <spread + noise_scale c, z>)^2 for z ~ N(0, I), in closed form:
    (mu_a - y)^2 + |sigma_bar_a - spread - noise_scale c|^2, [B]"""
    batch = torch.arange(len(action), device=mu.device)
    error = mu[batch, action] - target  # [B]
    deviation = sigma_bar[batch, action] - spread - noise_scale * c  # [B, d_z]
    return error.square() + deviation.square().sum(-1)


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
    highest.update(dict.fromkeys(("batch_size", "hidden_dim", "index_dim", "num_index_samples"), 10_000))
    for name, value in asdict(args).items():
        low = 1 if type(value) is int and "seed" not in name else 0
        high = highest.get(name, 10**9)
        if type(value) in (int, float) and not low <= value <= high:
            sys.exit(f"--{name.replace('_', '-')} {value}: it must lie in [{low}, {high}].")
    star = args.method == "ell-epi-star"
    if star and args.upsilon == 1:
        sys.exit("--upsilon 1: the closed form's set would be infinite; choose a value below 1.")
    if star and args.uncertainty_set == "hull":
        sys.exit("--uncertainty-set hull: it is a set over samples; use --method ell-epi.")
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
    # a transition's noise <c, z>: every z sees its own version of the data, like a resample; after
    # n visits the heads keep noise_scale |mean(c)| of it, about noise_scale / sqrt(n)
    c = F.normalize(torch.randn(len(obs), args.index_dim), dim=-1).to(device)  # [|D|, d_z]

    # ----- networks: critic, target critic, actor
    sizes = (D, A, args.index_dim, args.hidden_dim)
    critic = EpinetCritic(*sizes, args.prior_scale, args.head_input, star).to(device)
    target_critic = copy.deepcopy(critic).requires_grad_(False)
    actor = Actor(D, A, args.hidden_dim).to(device)
    theta_mu = {"params": [*critic.psi.parameters(), *critic.mu.parameters()]}
    theta_mu["weight_decay"] = 2 * args.lambda_mu  # the gradient of lambda |theta|^2
    theta_sigma = {"params": critic.sigma_L.parameters(), "weight_decay": 2 * args.lambda_sigma}
    q_optimizer = torch.optim.Adam([theta_mu, theta_sigma], args.q_lr, fused=True)
    policy_optimizer = torch.optim.Adam(actor.parameters(), args.policy_lr, fused=True)
    radius = math.sqrt(chi2.ppf(args.upsilon, A))  # rho in Algorithm 4

    def worst_case(network, obs, pi, z, sigma_p):
        """q* of the chosen set; z: samples only, sigma_p: if stored. [B, A]"""
        if star:
            mu, sigma_bar = network(obs, sigma_p)  # [B, A], [B, A, d_z]
            if args.uncertainty_set == "box":
                return worst_case_gaussian_box(mu, sigma_bar, pi, radius)
            return worst_case_gaussian(mu, sigma_bar, pi, radius)
        q = network.sample(obs, z)  # [N, B, A]
        if args.uncertainty_set == "box":
            return worst_case_box(q, pi)
        if args.uncertainty_set == "hull":
            return worst_case_hull(q, pi)
        return worst_case_ellipsoid(q, pi, args.upsilon)

    # ----- run folder: new, or as a killed run left it
    method = {"ellipsoid": "Ell-Epi", "hull": "CH-Epi", "box": "Box-Epi"}[args.uncertainty_set]
    method += "*" if star else ""
    method += "-own" if args.targets == "own" else ""
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
        generator.set_state(checkpoint["generator"])
        last_update, rows = checkpoint["update"], checkpoint["rows"]
    if args.track:
        import wandb

        run = os.path.basename(folder)
        group = f"{re.sub('-s[0-9]+(?=-v)', '', dataset.id)} {method}"  # averages over seeds
        where = {"project": args.wandb_project_name, "entity": args.wandb_entity, "group": group}
        config = asdict(args) | {"dataset_id": dataset.id}
        wandb.init(**where, name=run, id=run, resume="allow", config=config, save_code=True)

    # frozen, linear in z and read from the observation: the prior head is computed once on all data
    sigma_p = sigma_p_next = z = None
    stored = star and args.head_input == "obs"
    if stored:
        all_sigma_p = torch.cat([critic.sigma_P(INPUT_SCALE * x) for x in obs.split(1000)])  # [|D|, A d_z]
        all_sigma_p_next = torch.cat([critic.sigma_P(INPUT_SCALE * x) for x in next_obs.split(1000)])

    # ----- training: Algorithm 4, and for general heads Section 5
    last_time = time.time()
    bar = tqdm(range(last_update + 1, args.total_updates + 1), method, unit="update")
    for update in bar:
        left = 1 - (update - 1) / args.total_updates  # step sizes fall to 0: a settled last policy
        for group in q_optimizer.param_groups:
            group["lr"] = args.q_lr * left
        policy_optimizer.param_groups[0]["lr"] = args.policy_lr * left

        # sample a minibatch
        batch = torch.randint(len(obs), (args.batch_size,), generator=generator).to(device)
        s, a, r = obs[batch], action[batch], reward[batch]  # [B, D], [B], [B]
        s_next, ended = next_obs[batch], terminated[batch]  # [B, D], [B]; a truncation is no end
        if stored:
            sigma_p, sigma_p_next = all_sigma_p[batch], all_sigma_p_next[batch]  # [B, A d_z]
        if not star:  # the same z in target, loss and actor
            z = torch.randn(args.num_index_samples, args.index_dim, generator=generator).to(device)

        # compute target: every index its own, or the worst case over the target critic's set
        with torch.no_grad():
            log_pi = actor(s_next).log_softmax(-1)  # [B, A]
            pi = log_pi.exp()
            spread = 0.0  # what else of a target depends on z: only linear heads' own targets
            if args.targets == "shared":
                q_next = worst_case(target_critic, s_next, pi, z, sigma_p_next)  # q*, [B, A]
            elif star:
                q_next, sigma_next = target_critic(s_next, sigma_p_next)  # mu [B, A], [B, A, d_z]
                spread = propagated_spread(ended, pi, sigma_next, args.gamma)
            else:
                q_next = target_critic.sample(s_next, z)  # [N, B, A]
            y = robust_target(r, ended, pi, log_pi, q_next, args.alpha, args.gamma)  # [B], or [N, B]

        # critic update: the expectation over z in closed form, or over the samples
        if star:
            mu, sigma_bar = critic(s, sigma_p)  # [B, A], [B, A, d_z]
            q_loss = epinet_loss(mu, sigma_bar, a, y, c[batch], args.noise_scale, spread).mean()
        else:
            q = critic.sample(s, z)[:, torch.arange(len(a), device=device), a]  # [N, B]
            q_loss = (q - y - args.noise_scale * (z @ c[batch].T)).square().mean()  # z @ c': <c, z>
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()

        # actor update against the worst case of the updated critic
        log_pi = actor(s).log_softmax(-1)  # [B, A]
        pi = log_pi.exp()
        with torch.no_grad():
            q_star = worst_case(critic, s, pi, z, sigma_p)  # [B, A]
        pi_loss = actor_loss(pi, log_pi, q_star, args.alpha).mean()
        policy_optimizer.zero_grad()
        pi_loss.backward()
        policy_optimizer.step()

        # update target critic
        for p_target, p in zip(target_critic.parameters(), critic.parameters()):
            p_target.lerp_(p.detach(), args.polyak)

        # log, evaluate, checkpoint
        if update % args.eval_interval == 0 or update == args.total_updates:
            with torch.no_grad():
                if star:
                    mu, sigma_bar = critic(s, sigma_p)  # [B, A], [B, A, d_z]
                    std = sigma_bar.norm(dim=-1)  # over z, [B, A]
                else:
                    q = critic.sample(s, z)  # [N, B, A]
                    mu, std = q.mean(0), q.std(0, correction=0)  # [B, A]
                taken = F.one_hot(a, A).bool()  # [B, A]
                row = {
                    "losses/critic_loss": q_loss,
                    "losses/actor_loss": pi_loss,
                    "charts/policy_entropy": entropy(pi, log_pi).mean(),
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
            checkpoint.update(generator=generator.get_state(), update=update, rows=rows)
            checkpoint.update(obs_mean=obs_mean, obs_std=obs_std)
            torch.save(checkpoint, f"{folder}/checkpoint.tmp")
            os.replace(f"{folder}/checkpoint.tmp", f"{folder}/checkpoint.pt")  # never half a file
            last_update, last_time = update, time.time()  # evaluations do not count
            bar.set_postfix_str(f"critic={q_loss:.3g}, return={row['eval/return']:.1f}")

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
        ends = f"(0: {ref_min:.1f}, random play; 100: {ref_max:.1f}, reference)"
        print(f"normalized return {normalized:.1f} {ends}")
    print(f"run folder: {folder}")
