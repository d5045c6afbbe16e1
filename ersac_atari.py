# docs: docs/ersac_atari.md
"""ERSAC on pixels: the Atari appendix of "Epistemic Robust Offline Reinforcement Learning", with its baselines.

All methods use one convolutional encoder and one training loop and differ only in critic and policy objectives:
SAC-N, ERSAC-CH-N, ERSAC-Ell-N (N heads), ERSAC-Ell-Epi* (an Epinet head), CQL, IQL and BRAC-BCQ. One run:

    python ersac_atari.py --env-id Breakout --algo ersac-ell-epi-star
"""

import copy
import csv
import hashlib
import io
import json
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import ale_py
import gymnasium as gym
import minari
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from PIL import Image
from scipy.stats import chi2
from tqdm import tqdm

GAMES = ("Breakout", "Pong", "Qbert", "Seaquest", "Hero")  # the paper's five
METHODS = {"sac-n": "SAC-N", "ersac-ch-n": "ERSAC-CH-N", "ersac-ell-n": "ERSAC-Ell-N"}
METHODS |= {"ersac-ell-epi-star": "ERSAC-Ell-Epi*", "cql": "CQL", "iql": "IQL", "brac-bcq": "BRAC-BCQ"}


@dataclass
class Args:
    exp_name: str = "ersac_atari"
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of networks, minibatches and evaluation"""
    torch_deterministic: bool = True
    """ask torch for deterministic algorithms"""
    cuda: bool = True
    """use a GPU if there is one"""
    output_dir: str = "runs"
    """folder that receives the run folder"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "ersac"
    """W&B project"""
    wandb_entity: str | None = None
    """W&B user or team; None is your default one"""
    capture_video: bool = False
    """record the first episode of the final evaluation"""

    env_id: str = "Breakout"
    """game whose data set atari/{game}/expert-v0 is used: Breakout, Pong, Qbert, Seaquest or Hero"""
    dataset_id: str | None = None
    """any other Minari data set with image observations and discrete actions"""
    cache_dir: str | None = None
    """folder for the decoded frames; None is the data set's own folder"""

    algo: Literal[*METHODS] = "ersac-ell-epi-star"
    """the columns of the paper's Atari table"""
    upsilon: float = 0.9
    """share of the heads (ersac-ell-n, up to 1) or probability (ersac-ell-epi-star, below 1) in the ellipsoid"""
    num_critics: int = 100
    """N, the critic heads of sac-n, ersac-ch-n and ersac-ell-n; the baselines have two"""
    index_dim: int = 16
    """d_z, the dimension of the Epinet's index z (ersac-ell-epi-star)"""
    prior_scale: float = 0.03
    """size of the frozen prior of heads or Epinet, the uncertainty where there are no data; the baselines have none"""
    noise_scale: float = 0.001
    """size of the noise that every transition adds to its target along its direction c (ersac-ell-epi-star)"""
    cql_weight: float = 1.0
    """weight of CQL's penalty"""
    iql_expectile: float = 0.7
    """expectile of IQL's value regression, in (0, 1)"""
    iql_beta: float = 3.0
    """inverse temperature of IQL's advantage weights"""
    bcq_threshold: float = 0.3
    """BCQ's filter: actions below this share of the likeliest action's probability are not allowed (brac-bcq)"""
    brac_weight: float = 0.1
    """weight of BRAC's KL penalty (brac-bcq)"""

    clone_updates: int = 8000
    """updates that clone the data's actions into the actor before all else; 0 is a random start"""
    critic_warmup: int = 1000
    """updates of the critic alone, against the actor as it starts"""
    bc_coef: float = 0.3
    """weight of the cloning loss -log pi(a|s) beside the actor's own; 0 is the paper's form; the baselines have none"""
    total_updates: int = 100_000
    """updates of critic and actor"""
    batch_size: int = 32
    """transitions in a minibatch"""
    hidden_dim: int = 512
    """width of the last layer of both encoders"""
    gamma: float = 0.99
    """discount factor in [0, 1)"""
    n_step: int = 10
    """rewards of the data that a target sums before it asks the critic; 1 is the paper's form"""
    q_lr: float = 3e-4
    """Adam step size of encoder and critic"""
    policy_lr: float = 3e-4
    """Adam step size of the actor"""
    anneal_lr: bool = True
    """let all step sizes fall linearly to 0, so that the last policy is a settled one"""
    polyak: float = 0.01
    """rate at which the target critic follows the critic"""
    alpha: float = 0.0003
    """entropy coefficient of target and actor; IQL has none"""

    eval_interval: int = 10_000
    """updates between two rows of metrics.csv, each with an evaluation"""
    eval_episodes: int = 100
    """episodes of the final evaluation; a tenth of them in between"""
    eval_epsilon: float = 0.0
    """probability of a random action in evaluation; 0.01 makes episodes differ where no-ops do not, as in Pong"""
    checkpoint_interval: int = 5000
    """updates between two checkpoints"""
    resume: str | None = None
    """run folder to continue; all other arguments come from there"""
    eval_only: bool = False
    """with --resume: evaluate the checkpoint's policy, print the result, write nothing"""


# ===== The data: frames once each, stacked when a batch is drawn, and the environment to evaluate in
def find_atari_dataset(args):
    """The data set to learn from, downloaded if it is not here."""
    dataset_id = args.dataset_id or f"atari/{args.env_id.lower()}/expert-v0"
    if dataset_id not in minari.list_local_datasets():
        try:
            minari.download_dataset(dataset_id)
        except Exception as error:
            why = " ".join(str(error).split())[:150] or type(error).__name__
            sys.exit(f"{dataset_id}: `minari download` failed ({why}); copy it, or use docs/benchmark/record_atari.py.")
    try:
        return minari.load_dataset(dataset_id)
    except Exception as error:
        sys.exit(f"{dataset_id}: cannot be read ({error}); delete it with `minari delete {dataset_id}` and try again.")


def decode(frame):
    """A raw frame, grey and 84x84 by area averaging; data and evaluation both come through here. [84, 84] uint8"""
    return np.asarray(Image.fromarray(frame).convert("L").resize((84, 84), Image.Resampling.BOX))


def load_frames(dataset, cache_dir):
    """All frames once, [T + 1 an episode, 84, 84], memory-mapped; for every transition the numbers of its frame and of
    its episode's first one, action, reward, terminated. Decoded an episode at a time, then kept on disk."""
    name, space, actions = dataset.spec.dataset_id, dataset.spec.observation_space, dataset.spec.action_space
    if not isinstance(actions, gym.spaces.Discrete):
        sys.exit(f"{name} has {actions} actions; this script needs a data set with discrete actions.")
    if actions.start != 0 or dataset.spec.env_spec is None:
        sys.exit(f"{name} counts its actions from another number than 0, or names no environment to evaluate in.")
    if not isinstance(space, gym.spaces.Box) or space.dtype != np.uint8 or space.shape[2:] not in ((3,), ()):
        sys.exit(f"{name} has {space} observations; this script needs uint8 images (ersac_ensemble.py takes vectors).")
    source = str(dataset.storage.data_path)
    files = sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in os.scandir(source))
    key = hashlib.sha1(repr((name, files)).encode()).hexdigest()[:16]  # another one when the data set changes
    parent = cache_dir or os.path.dirname(source)
    cache = os.path.join(parent, f"frames84-{key}")
    if not os.path.isdir(cache):
        try:
            os.makedirs(temporary := f"{cache}.{os.getpid()}.tmp")
            shape, at, columns = (int(dataset.total_steps + dataset.total_episodes), 84, 84), 0, []
            frames = np.lib.format.open_memmap(os.path.join(temporary, "frames.npy"), "w+", np.uint8, shape)
            for episode in tqdm(dataset.iterate_episodes(), "decoding", int(dataset.total_episodes), unit="episode"):
                reward, ends, T = np.float32(episode.rewards), np.float32(episode.terminations), len(episode.rewards)
                if not len(episode.observations) - 1 == len(episode.actions) == T:
                    sys.exit(f"{name}: episode {episode.id} needs T + 1 observations and T of everything else.")
                if not np.isfinite(reward).all():
                    sys.exit(f"{name} holds rewards that are not finite; repair the data set or choose another.")
                for t in range(T + 1):  # Minari: T + 1 observations, T of everything else
                    frames[at + t] = decode(episode.observations[t])
                columns.append((at + np.arange(T), np.full(T, at), np.int64(episode.actions), reward, ends))
                at += T + 1
            np.savez(os.path.join(temporary, "columns.npz"), *map(np.concatenate, zip(*columns)))
            frames.flush()
            os.rename(temporary, cache)
        except Exception as error:
            if isinstance(error, OSError) and error.strerror and not os.path.isdir(cache):  # else another was faster
                sys.exit(f"{parent}: cannot keep decoded frames there ({error.strerror}); choose another --cache-dir.")
            if not os.path.isdir(cache):
                sys.exit(f"{name}: cannot be read ({error}); delete it with `minari delete {name}` and try again.")
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    frames, columns = (np.load(os.path.join(cache, x), mmap_mode="r") for x in ("frames.npy", "columns.npz"))
    return frames, *(torch.as_tensor(columns[f"arr_{i}"]) for i in range(5))


def stack(frames, number, first):
    """Frame `number` and the three before it; before an episode's start its first one repeats. [B, 4, 84, 84] uint8"""
    numbers = number[:, None] + torch.arange(-3, 1)  # [B, 4]
    return torch.from_numpy(frames[torch.maximum(numbers, first[:, None]).numpy()])


def n_step(first, reward, terminated, gamma, n):
    """Discounted reward of n steps, fewer at an episode's end; discount after them; number; did they end it? [|D|]"""
    t, total, steps = torch.arange(len(reward)), torch.zeros(len(reward)), torch.zeros(len(reward), dtype=torch.long)
    for k in range(n):
        later = (t + k).clamp(max=len(reward) - 1)
        inside = (t + k == later) & (first[later] == first)
        total += torch.where(inside, gamma**k * reward[later], 0.0)
        steps += inside
    return total, gamma**steps, steps, terminated[t + steps - 1]


def make_atari_env(dataset, video_folder=None):
    """The environment that the data set recovers, its observations decoded and stacked like the data."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    env = dataset.recover_environment(eval_env=True, **({"render_mode": "rgb_array"} if video_folder else {}))
    if env.spec.max_episode_steps is None:  # as in ALE, where Breakout without a ball would last for ever
        env = gym.wrappers.TimeLimit(env, 27_000)
    if video_folder:
        env = gym.wrappers.RecordVideo(env, video_folder, lambda episode: episode == 0)
    env = gym.wrappers.TransformObservation(env, decode, gym.spaces.Box(0, 255, (84, 84), np.uint8))
    return gym.wrappers.FrameStackObservation(env, 4)


# ===== Critic: the encoder of all methods, and the heads that read it
class EnsembleHeads(nn.Module):
    """N linear critics on the features, each with its frozen prior. forward(psi [B, H]) -> q [N, B, A]"""

    def __init__(self, hidden_dim, num_actions, num_critics, prior_scale):
        super().__init__()
        self.shape, self.prior_scale = (num_critics, num_actions), prior_scale
        self.learnable, self.prior = (nn.Linear(hidden_dim, num_critics * num_actions) for _ in range(2))
        self.prior.requires_grad_(False)

    def forward(self, psi):
        q = self.learnable(psi) + self.prior_scale * self.prior(psi.detach())  # [B, N A]
        return q.unflatten(-1, self.shape).transpose(0, 1)  # [N, B, A]


class EpinetHeads(nn.Module):
    """Mean and stochastic head, linear in the index z, no gradient from the latter into the features.
    forward(psi [B, H]) -> mu [B, A], sigma_bar [B, A, d_z]"""

    def __init__(self, hidden_dim, num_actions, index_dim, prior_scale):
        super().__init__()
        self.shape, self.prior_scale, n = (num_actions, index_dim), prior_scale, num_actions * index_dim
        self.mean = nn.Linear(hidden_dim, num_actions)
        self.learnable, self.prior = (
            nn.Sequential(nn.Linear(hidden_dim, 50), nn.ReLU(), nn.Linear(50, n)) for _ in range(2)
        )
        self.prior.requires_grad_(False)

    def forward(self, psi):
        sigma = self.learnable(psi.detach()) + self.prior_scale * self.prior(psi.detach())  # [B, A d_z]
        return self.mean(psi), sigma.unflatten(-1, self.shape)


class PixelNetwork(nn.Module):
    """The Nature CNN (Mnih et al., 2015), its features normalised, and the heads that read them, for critic and actor;
    value is IQL's V(s), behaviour BRAC-BCQ's cloned policy. forward(obs) -> what the heads return"""

    def __init__(self, heads, hidden_dim, num_actions, mean, std):
        super().__init__()
        self.mean, self.std = nn.Buffer(mean), nn.Buffer(std)  # of the data's frames: what moves is left
        self.cnn = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, stride=4), nn.ReLU()),  # [B, 32, 20, 20]
            *(nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),  # [B, 64, 9, 9]
            *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()),  # [B, 3136]
            *(nn.Linear(3136, hidden_dim), nn.LayerNorm(hidden_dim), nn.ReLU()),  # [B, H]
        ).to(memory_format=torch.channels_last)
        self.heads, self.value, self.behaviour = heads, nn.Linear(hidden_dim, 1), nn.Linear(hidden_dim, num_actions)

    def encoder(self, obs):
        """obs [B, 4, 84, 84] uint8 -> psi [B, H]"""
        return self.cnn(((obs - self.mean) / self.std).contiguous(memory_format=torch.channels_last))

    def forward(self, obs):
        return self.heads(self.encoder(obs))


def critic_loss(q, action, target):
    """Squared errors of all samples against the one target, [N, B]. The caller takes the mean over B, sums over N."""
    return (q[:, torch.arange(len(action), device=q.device), action] - target).square()


def epinet_loss(mu, sigma_bar, action, target, c, noise_scale):
    """E_z (q(s, a, z) - y - noise_scale <c, z>)^2 for z ~ N(0, I), in closed form:
    (mu_a - y)^2 + |sigma_bar_a - noise_scale c|^2, [B]"""
    rows = torch.arange(len(action), device=mu.device)
    return (mu[rows, action] - target).square() + (sigma_bar[rows, action] - noise_scale * c).square().sum(-1)


# ===== The uncertainty set: q holds N sampled action values per state, [N, B, A]; pi is the policy, [B, A]
def worst_case_box(q, pi):
    """Box set: every action at its lowest sample, whatever the policy. With it, ERSAC is SAC-N (Proposition 3.1)."""
    return q.amin(0)  # [B, A]


def worst_case_hull(q, pi):
    """Convex hull: a linear function is lowest at a vertex, so q* is the sample with the lowest <pi, q_i>."""
    worst = torch.einsum("nba,ba->nb", q, pi).argmin(0)  # [B]
    return q[worst, torch.arange(q.shape[1], device=q.device)]  # [B, A]


def center(q):
    """Mean of the samples, [B, A], and their deviations from it, samples last, [B, A, N]; in double precision."""
    d = (q - q[0]).double().permute(1, 2, 0).contiguous()  # from sample 0: identical critics deviate by exactly 0
    shift = d.mean(-1, keepdim=True)  # [B, A, 1]
    return q[0] + shift[..., 0], d - shift


def mahalanobis(x, d):
    """Squared distances x' Sigma^-1 x of the points x [B, A, M], where Sigma = d d' / N for deviations d [B, A, N]."""
    x, d = x.double(), d.double()
    sigma = d @ d.mT / d.shape[-1]  # [B, A, A]
    scale = sigma.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]  # trace(Sigma) / A, [B, 1, 1]
    eye = torch.eye(d.shape[1], dtype=d.dtype, device=d.device)
    ridge = 1e-12 * scale + torch.finfo(d.dtype).tiny  # without spread the samples' deviations are 0 and add nothing
    cholesky, _ = torch.linalg.cholesky_ex(sigma + ridge * eye)
    whiten = torch.linalg.solve_triangular(cholesky, eye.expand_as(sigma), upper=False)  # [B, A, A]
    return (whiten @ x).square().sum(1)  # [B, M]


def ellipsoid_radius(d, upsilon):
    """The smallest radius whose ellipsoid holds a share upsilon of the samples with deviations d [B, A, N]. [B]"""
    N = d.shape[-1]
    k = min(max(math.ceil(upsilon * N - 1e-9), 1), N)  # 0.1 * 30 is 3.0000000000000004
    return mahalanobis(d, d).kthvalue(k, dim=-1).values.sqrt()


def worst_case_ellipsoid(q, pi, upsilon):
    """Ellipsoid: q* = mu - radius Sigma pi / sqrt(pi' Sigma pi), with v_n = <pi, q_n - mu> and no matrix Sigma."""
    mu, d = center(q)  # [B, A], [B, A, N]
    v = pi[:, None].double() @ d  # [B, 1, N]
    norm = v.square().mean(-1).sqrt()  # sqrt(pi' Sigma pi), [B, 1]; where it is 0, q* = mu
    sigma_pi = (d @ v.mT)[..., 0] / q.shape[0]  # [B, A]
    shift = ellipsoid_radius(d, upsilon)[:, None] * sigma_pi / norm.clamp(min=torch.finfo(d.dtype).tiny)
    return (mu - shift).to(q.dtype)  # [B, A]


def worst_case_gaussian(mu, sigma_bar, pi, radius):
    """The same for q ~ N(mu, sigma_bar sigma_bar'): with v = sigma_bar' pi, q* = mu - radius sigma_bar v / |v|.
    radius = sqrt(chi2.ppf(upsilon, A)), infinite for upsilon = 1. [B, A]"""
    v = torch.einsum("bad,ba->bd", sigma_bar, pi).double()  # [B, d_z]
    v = v / v.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)  # |v| = sqrt(pi' Sigma pi); if 0, q* = mu
    return mu - radius * torch.einsum("bad,bd->ba", sigma_bar, v.to(mu.dtype))


# ===== Target and losses of SAC-N and ERSAC
def entropy(pi, log_pi):
    """H(pi) = -<pi, log pi>, with 0 log 0 = 0. [B]"""
    return -(pi * log_pi.clamp(min=torch.finfo(pi.dtype).min)).sum(-1)


def robust_target(reward, terminated, pi, log_pi, q_star, alpha, gamma):
    """y = r + gamma (1 - terminated)(<pi, q*> + alpha H(pi)), pi and q* at the next state (robust target). [B]"""
    return reward + gamma * (1 - terminated) * ((pi * q_star).sum(-1) + alpha * entropy(pi, log_pi))


def actor_loss(pi, log_pi, q_star, alpha):
    """-(<pi, q*> + alpha H(pi)); q* held fixed, which is the exact gradient by the envelope theorem. [B]"""
    return -((pi * q_star.detach()).sum(-1) + alpha * entropy(pi, log_pi))


# ===== CQL: Kumar et al., Conservative Q-Learning for Offline RL, 2020. Critic objective: + cql_weight (1) x penalty
def cql_penalty(q, action):
    """CQL(H): log sum_a' exp Q(s, a') - Q(s, a), which lowers values of actions that the data do not take. [N, B]"""
    return q.logsumexp(-1) - q[:, torch.arange(len(action), device=q.device), action]


# ===== IQL: Kostrikov et al., Offline RL with Implicit Q-Learning, 2021. Expectile 0.7, beta 3, weights up to 100
def expectile_loss(error, tau):
    """|tau - 1(error < 0)| error^2 for error = Q(s, a) - V(s): V leans to the better actions of the data. [B]"""
    return torch.where(error < 0, 1 - tau, tau) * error.square()


# ===== BRAC-BCQ: discrete BCQ (Fujimoto et al., 2019; threshold 0.3, logits' penalty 0.01), BRAC's KL (Wu et al., 2019)
def bcq_filter(log_b, threshold):
    """Allowed actions: b(a|s) / max_a' b(a'|s) above the threshold; the likeliest one always is. [B, A] bool"""
    ratio = (log_b - log_b.amax(-1, keepdim=True)).exp()
    return (ratio > threshold) | (ratio == 1)


def brac_kl(pi, log_pi, log_b):
    """KL(pi || b) = <pi, log pi - log b>. [B]"""
    return -entropy(pi, log_pi) - (pi * log_b).sum(-1)


# ===== Evaluation, logging, checkpoints
@torch.no_grad()
def play(policy, envs, episodes, seed, device, epsilon=0.0):
    """Undiscounted, unclipped returns of the greedy policy, after 0 to 30 no-ops, len(envs) side by side; a random
    action with probability epsilon, where no-ops alone do not make the episodes differ. [episodes]"""
    returns = np.zeros(episodes)
    for start in range(0, episodes, len(envs)):
        now = {start + i: env for i, env in enumerate(envs) if start + i < episodes}  # episodes that go on
        obs = {e: env.reset(seed=seed + e)[0] for e, env in now.items()}
        rng = {e: np.random.default_rng(seed + e) for e in now}
        wait = {e: rng[e].integers(31) for e in now}
        while now:
            greedy = policy(torch.as_tensor(np.stack([obs[e] for e in now]), device=device))[0].argmax(-1).tolist()
            for (e, env), action in zip(list(now.items()), greedy):
                action = rng[e].integers(env.action_space.n) if rng[e].random() < epsilon else action
                obs[e], reward, terminated, truncated, _ = env.step(action if wait[e] <= 0 else 0)
                returns[e], wait[e] = returns[e] + reward, wait[e] - 1
                if terminated or truncated:
                    del now[e]
    return returns


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


def open_run_folder(folder, args, rows):
    """Make the run folder, or cut the metrics of the one to resume back to the checkpoint's rows."""
    try:
        os.makedirs(folder, exist_ok=bool(args.resume))
        if not args.eval_only:
            write_file(folder, "args.json", json.dumps(asdict(replace(args, resume=None)), indent=2).encode())
            write_file(folder, "metrics.csv", b"")
            append_rows(folder, rows)
    except FileExistsError:
        sys.exit(f"{folder} exists: a run of this name started in this second; choose another --exp-name.")
    except OSError as error:
        sys.exit(f"{folder}: cannot write there ({error.strerror}); choose another --output-dir.")


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
    checkpoint = load_checkpoint(args.resume, "ersac_atari.py") if args.resume else None
    if checkpoint:
        args = resumed_args(args, checkpoint["args"])
    algo, star, method = args.algo, args.algo == "ersac-ell-epi-star", METHODS[args.algo]
    for names, ok, rule in (
        ("num_critics index_dim total_updates batch_size hidden_dim n_step", lambda x: x >= 1, "at least 1"),
        ("eval_interval eval_episodes checkpoint_interval", lambda x: x >= 1, "at least 1"),
        ("seed clone_updates critic_warmup", lambda x: x >= 0, "at least 0"),
        ("alpha prior_scale noise_scale bc_coef", lambda x: 0 <= x < math.inf, "finite and at least 0"),
        ("cql_weight iql_beta brac_weight", lambda x: 0 <= x < math.inf, "finite and at least 0"),
        ("q_lr policy_lr", lambda x: 0 < x < math.inf, "finite and above 0"),
        ("upsilon polyak", lambda x: 0 < x <= 1, "above 0 and at most 1"),
        ("upsilon", lambda x: x < 1 or not star, "below 1 here: a Gaussian is only covered by an infinite set"),
        ("iql_expectile", lambda x: 0 < x < 1, "above 0 and below 1; 0.5 is the mean"),
        ("eval_epsilon", lambda x: 0 <= x <= 1, "at least 0 and at most 1"),
        ("gamma bcq_threshold", lambda x: 0 <= x < 1, "at least 0 and below 1"),
        ("env_id", lambda x: args.dataset_id or x in GAMES, f"one of {', '.join(GAMES)}, or give a --dataset-id"),
        ("eval_only", lambda x: args.resume or not x, "used with --resume RUN_FOLDER"),
    ):
        for name in names.split():
            if not ok(getattr(args, name)):
                sys.exit(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be {rule}.")
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(args.torch_deterministic, warn_only=True)
    generator = torch.Generator().manual_seed(args.seed)  # minibatches

    # data: frames stay on disk and in the page cache, a batch is moved to the device as bytes
    dataset = find_atari_dataset(args)
    frames, frame, first, action, reward, terminated = load_frames(dataset, args.cache_dir)
    reward = reward.clamp(-1, 1)  # for learning only
    reward, discount, steps, terminated = n_step(first, reward, terminated, args.gamma, args.n_step)
    size, A, env_id = len(action), int(dataset.spec.action_space.n), dataset.spec.env_spec.id
    some = torch.tensor(frames[:: len(frames) // 5000 + 1]).float()  # [<= 5000, 84, 84]
    fingerprint = [size, action.sum().item(), reward.sum().item(), some.sum().item()]  # to notice changes on --resume
    low, high = (dataset.storage.metadata.get(f"ref_{x}_score") for x in ("min", "max"))
    c = F.normalize(torch.randn(size, args.index_dim), dim=-1).to(device)  # each transition's direction, [|D|, d_z]

    # critic, target critic, actor with an encoder of its own
    H, ours = args.hidden_dim, star or algo in ("sac-n", "ersac-ch-n", "ersac-ell-n")
    ensemble = (args.num_critics, args.prior_scale) if ours else (2, 0.0)  # the baselines' clipped double Q
    heads = EpinetHeads(H, A, args.index_dim, args.prior_scale) if star else EnsembleHeads(H, A, *ensemble)
    mean, std = some.mean(0), (some - some.mean(0)).square().mean().sqrt().clamp(min=1.0)
    critic = PixelNetwork(heads, H, A, mean, std).to(device)
    target = copy.deepcopy(critic).requires_grad_(False)
    actor = PixelNetwork(nn.Linear(H, A), H, A, mean, std).to(device)
    q_optimizer = torch.optim.Adam([p for p in critic.parameters() if p.requires_grad], lr=args.q_lr, fused=True)
    policy_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr, fused=True)
    worst_case = {
        "ersac-ch-n": worst_case_hull,
        "ersac-ell-n": lambda q, pi: worst_case_ellipsoid(q, pi, args.upsilon),
        "ersac-ell-epi-star": lambda output, pi: worst_case_gaussian(*output, pi, math.sqrt(chi2.ppf(args.upsilon, A))),
    }.get(algo, worst_case_box)  # SAC-N, and the lower of the baselines' two critics

    def log_policy(obs):
        """log pi, and for BRAC-BCQ log b, by which BCQ's filter rules actions out. [B, A], [B, A]"""
        logits, log_b = actor(obs), None
        if algo == "brac-bcq":
            log_b = critic.behaviour(critic.encoder(obs)).detach().log_softmax(-1)
            logits = logits.masked_fill(~bcq_filter(log_b, args.bcq_threshold), -1e9)
        return logits.log_softmax(-1), log_b

    # run folder, new or as the checkpoint left it
    now, start_update, rows = int(time.time()), 0, []
    folder = os.path.join(args.output_dir, f"{env_id.split('/')[-1]}__{args.exp_name}__{args.seed}__{now}")
    if checkpoint:
        folder, start_update, rows = os.path.normpath(args.resume), checkpoint["update"], checkpoint["rows"]
        if fingerprint != checkpoint["data"]:
            sys.exit(f"--resume {folder}: {dataset.spec.dataset_id} has changed since; start a new run.")
        for name, part in (("critic", critic), ("target", target), ("actor", actor)):
            part.load_state_dict(checkpoint[name])
        q_optimizer.load_state_dict(checkpoint["q_optimizer"])
        policy_optimizer.load_state_dict(checkpoint["policy_optimizer"])
        generator.set_state(checkpoint["generator"])
    envs = [make_atari_env(dataset) for _ in range(min(args.eval_episodes, 10))]
    run_name = checkpoint["run_name"] if checkpoint else os.path.basename(folder)
    open_run_folder(folder, args, rows)
    args.track = args.track and not args.eval_only
    track = start_tracking(args, run_name, f"{env_id} {method}")

    def save_checkpoint(update):
        state = {"script": "ersac_atari.py", "run_name": run_name, "data": fingerprint, "update": update, "rows": rows}
        state |= {"args": asdict(replace(args, resume=None)), "cloned": cloned}
        state |= {"critic": critic.state_dict(), "target": target.state_dict(), "actor": actor.state_dict()}
        state |= {"q_optimizer": q_optimizer.state_dict(), "policy_optimizer": policy_optimizer.state_dict()}
        state |= {"generator": generator.get_state(), "seconds": time.time() - started}
        torch.save(state, buffer := io.BytesIO())
        write_file(folder, "checkpoint.pt", buffer.getvalue())

    started = time.time() - (checkpoint["seconds"] if checkpoint else 0)
    cloned = checkpoint["cloned"] if checkpoint else args.clone_updates == 0
    if not checkpoint:
        save_checkpoint(0)
    stop = []
    signal.signal(signal.SIGINT, lambda *_: stop.append("Ctrl-C"))  # taken between two updates
    if not (cloned or args.eval_only):  # clone the data: the critic then judges a policy that the data know
        for step in tqdm(range(args.clone_updates), "cloning", unit="update", mininterval=1):
            policy_optimizer.param_groups[0]["lr"] = args.policy_lr * (1 - step / args.clone_updates)
            index = torch.randint(size, (args.batch_size,), generator=generator)
            logits = actor(stack(frames, frame[index], first[index]).to(device))  # [B, A]
            policy_optimizer.zero_grad()
            F.cross_entropy(logits, action[index].to(device)).backward()
            policy_optimizer.step()
            if stop:  # a resumed run clones from the beginning
                print(f"Stopped. To go on:\npython ersac_atari.py --resume {folder}")
                sys.exit(130)
        policy_optimizer, cloned = torch.optim.Adam(actor.parameters(), lr=args.policy_lr, fused=True), True
        save_checkpoint(0)
    tick, tick_update = time.time(), start_update
    updates = range(start_update + 1, 0 if args.eval_only else args.total_updates + 1)
    bar = tqdm(updates, initial=start_update, total=args.total_updates, desc=method, unit="update", mininterval=1)
    for update in bar:
        if args.anneal_lr:
            for optimizer, lr in ((q_optimizer, args.q_lr), (policy_optimizer, args.policy_lr)):
                optimizer.param_groups[0]["lr"] = lr * (1 - (update - 1) / args.total_updates)
        index = torch.randint(size, (args.batch_size,), generator=generator)
        s, s_next = (stack(frames, x[index], first[index]).to(device) for x in (frame, frame + steps))  # [B, 4, 84, 84]
        a, r, ended, gamma_n = (x[index].to(device) for x in (action, reward, terminated, discount))  # [B]
        extra = torch.zeros((), device=device)  # what a baseline adds to the critic's loss

        # compute target
        with torch.no_grad():
            if algo == "iql":  # no action but the data's is ever asked for
                y = r + gamma_n * (1 - ended) * critic.value(critic.encoder(s_next))[:, 0]  # [B]
                q_old = worst_case_box(target(s), None).gather(1, a[:, None])[:, 0]  # Q(s, a) of the targets, [B]
            else:
                log_pi, log_b = log_policy(s_next)  # [B, A]
                q_star = worst_case(target(s_next), log_pi.exp())  # [B, A]
                y = robust_target(r, ended, log_pi.exp(), log_pi, q_star, args.alpha, gamma_n)  # [B]
            if algo == "brac-bcq":
                y = y - gamma_n * (1 - ended) * args.brac_weight * brac_kl(log_pi.exp(), log_pi, log_b)

        # critic update: mean over the batch, sum over the heads
        psi = critic.encoder(s)  # [B, H]
        output = critic.heads(psi)  # [N, B, A], or mu [B, A] and sigma_bar [B, A, d_z]
        if star:
            losses = epinet_loss(*output, a, y, c[index], args.noise_scale)  # [B]
        else:
            losses = critic_loss(output, a, y)  # [N, B]
        if algo == "cql":
            extra = args.cql_weight * cql_penalty(output, a).mean(-1).sum()
        if algo == "iql":
            extra = expectile_loss(q_old - critic.value(psi)[:, 0], args.iql_expectile).mean()
        if algo == "brac-bcq":
            logits = critic.behaviour(psi)  # cloned with a small penalty on the logits, [B, A]
            extra = F.cross_entropy(logits, a) + 0.01 * logits.square().mean()
        q_loss = losses.mean(-1).sum() + extra
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()

        # actor update against the updated critic, once the critic has seen the cloned actor
        log_pi, log_b = log_policy(s)  # [B, A]
        pi = log_pi.exp()
        with torch.no_grad():
            psi = critic.encoder(s)  # [B, H]
            output, v = critic.heads(psi), critic.value(psi)[:, 0]
            q_star = worst_case(output, pi)  # [B, A]
        pi_loss = actor_loss(pi, log_pi, q_star, args.alpha).mean()
        if ours:  # the baselines have regularisers of their own
            pi_loss = pi_loss + args.bc_coef * F.nll_loss(log_pi, a)
        if algo == "iql":  # clone the data's actions, those better than V(s) more
            weights = (args.iql_beta * (q_old - v)).exp().clamp(max=100)  # [B]
            pi_loss = -(weights * log_pi.gather(1, a[:, None])[:, 0]).mean()
        if algo == "brac-bcq":
            pi_loss = pi_loss + args.brac_weight * brac_kl(pi, log_pi, log_b).mean()
        if update > args.critic_warmup:
            policy_optimizer.zero_grad()
            pi_loss.backward()
            policy_optimizer.step()

        # update target critic
        with torch.no_grad():  # else the targets would drag a growing graph behind them
            torch._foreach_lerp_(list(target.parameters()), list(critic.parameters()), args.polyak)

        if not (q_loss + pi_loss).isfinite():
            name = "actor" if q_loss.isfinite() else "critic"
            sys.exit(f"update {update}: {name} loss not finite; try a smaller --q-lr or --policy-lr.")
        last = update == args.total_updates
        if update % args.eval_interval == 0 or last:
            with torch.no_grad():
                mu = output[0] if star else output.mean(0)  # [B, A]
                std = output[1].norm(dim=-1) if star else output.std(0, correction=0)  # [B, A]
                taken, agreement = F.one_hot(a, A).bool(), (pi.argmax(-1) == a).float().mean()  # [B, A], []
                row = {"losses/critic_loss": losses.mean(), "losses/extra": extra, "losses/actor_loss": pi_loss}
                row |= {"charts/policy_entropy": entropy(pi, log_pi).mean(), "charts/q_data_actions": mu[taken].mean()}
                row |= {"charts/q_robust": (pi * q_star).sum(-1).mean(), "charts/agreement": agreement}
                row |= {"charts/q_gap": (pi * (mu - q_star)).sum(-1).mean()}
                row |= {"charts/std_data_actions": std[taken].mean(), "charts/std_other_actions": std[~taken].mean()}
            rows.append({"update": update} | {name: value.item() for name, value in row.items()})
            rows[-1]["charts/updates_per_second"] = (update - tick_update) / (time.time() - tick)
            episodes, first_seed = max(args.eval_episodes // 10, 1), 10**6 * (args.seed + 1)
            scores = play(log_policy, envs, episodes, first_seed, device, args.eval_epsilon)
            rows[-1] |= {"eval/return": scores.mean().item(), "eval/distinct_returns": len(np.unique(scores))}
            append_rows(folder, rows[-1:])
            tick, tick_update = time.time(), update
            if track:
                track.log(rows[-1], step=update)
            bar.set_postfix_str(f"critic={losses.mean():.3g}, actor={pi_loss:.4g}, return={scores.mean():.1f}")
        if update % args.checkpoint_interval == 0 or last or stop:
            save_checkpoint(update)
            if stop and not last:
                bar.close()
                print(f"Stopped. To go on:\npython ersac_atari.py --resume {folder}")
                sys.exit(130)
    bar.close()
    speed = args.total_updates / (time.time() - started)

    # final evaluation of the last policy on fresh episodes
    if args.capture_video and not args.eval_only:
        envs[0] = make_atari_env(dataset, os.path.join(folder, "video"))
    first_seed = 10**6 * (args.seed + 1) + 10**5
    scores = play(log_policy, envs, args.eval_episodes, first_seed, device, args.eval_epsilon)
    for env in envs:
        env.close()
    with torch.no_grad():
        log_pi, _ = log_policy(stack(frames, frame[:: size // 1000 + 1], first[:: size // 1000 + 1]).to(device))
    result = {"script": "ersac_atari.py", "method": method, "env_id": env_id, "seed": args.seed}
    result |= {"dataset_id": dataset.spec.dataset_id, "updates": args.total_updates, "updates_per_second": speed}
    result |= {"eval_episodes": args.eval_episodes, "eval_return_mean": scores.mean(), "eval_return_std": scores.std()}
    result |= {"eval_distinct_returns": len(np.unique(scores)), "random_return": low, "reference_return": high}
    known_scale = low is not None and high is not None
    result["normalized_return"] = 100 * (scores.mean() - low) / (high - low) if known_scale else None
    result["policy_entropy"] = entropy(log_pi.exp(), log_pi).mean().item()
    if not args.eval_only:
        write_file(folder, "result.json", json.dumps(result, indent=2).encode())
    if track:
        track.summary.update(result)
        track.finish()
    shown = f"normalized {result['normalized_return']:.1f}" if known_scale else "no reference scores"
    print(f"{method} on {result['dataset_id']}: return {scores.mean():.1f}, {args.eval_episodes} episodes, {shown}")
    print(f"run folder: {folder}")
