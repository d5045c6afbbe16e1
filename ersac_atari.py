# docs: docs/ersac_atari.md
"""ERSAC on pixels: the Atari appendix of "Epistemic Robust Offline Reinforcement Learning".

All methods use one convolutional encoder and one training loop and differ only in critic and policy
objectives: SAC-N, ERSAC-CH-N, ERSAC-Ell-N (N heads), ERSAC-Ell-Epi* (an Epinet head), and the
baselines CQL, IQL and BRAC-BCQ. One run:

    python ersac_atari.py --env-id Breakout --algo ersac-ell-epi-star
"""

import copy
import hashlib
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
import time
from dataclasses import asdict, dataclass, replace
from typing import Literal

import ale_py
import gymnasium as gym
import h5py
import minari
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from minari.storage import get_dataset_path
from PIL import Image
from scipy.stats import chi2
from tqdm import tqdm

GAMES = ("Breakout", "Pong", "Qbert", "Seaquest", "Hero")  # the paper's five
METHODS = {
    "sac-n": "SAC-N",
    "ersac-ch-n": "ERSAC-CH-N",
    "ersac-ell-n": "ERSAC-Ell-N",
    "ersac-ell-epi-star": "ERSAC-Ell-Epi*",
    "cql": "CQL",
    "iql": "IQL",
    "brac-bcq": "BRAC-BCQ",
}


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__).removesuffix(".py")
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

    algo: Literal["sac-n", "ersac-ch-n", "ersac-ell-n", "ersac-ell-epi-star", "cql", "iql", "brac-bcq"] = (
        "ersac-ell-epi-star"
    )
    """the columns of the paper's Atari table"""
    upsilon: float = 0.9
    """share of the heads (ersac-ell-n) or probability (ersac-ell-epi-star, below 1) in the ellipsoid"""
    num_critics: int = 100
    """N, the critic heads of sac-n, ersac-ch-n and ersac-ell-n; the baselines have two"""
    index_dim: int = 16
    """d_z, the dimension of the Epinet's index z (ersac-ell-epi-star)"""
    prior_scale: float = 0.03
    """size of the frozen prior of heads or Epinet; the baselines have none"""
    noise_scale: float = 0.001
    """size of the noise that a transition adds to its target along its direction c (Epinet)"""
    cql_weight: float = 1.0
    """weight of CQL's penalty"""
    iql_expectile: float = 0.7
    """expectile of IQL's values: above 0.5 leans to good outcomes (--expectile-tau: the reverse)"""
    iql_beta: float = 3.0
    """inverse temperature of IQL's advantage weights"""
    bcq_threshold: float = 0.3
    """BCQ's filter: least share of the likeliest action's probability that is allowed (brac-bcq)"""
    brac_weight: float = 0.1
    """weight of BRAC's KL penalty (brac-bcq)"""

    clone_updates: int = 8000
    """updates that clone the data's actions into the actor before all else; 0 is a random start"""
    critic_warmup: int = 1000
    """updates of the critic alone, against the actor as it starts"""
    bc_coef: float = 0.3
    """weight of the cloning loss -log pi(a|s) beside the actor's own; 0 is the paper's form"""
    total_updates: int = 100_000
    """updates of critic and actor"""
    batch_size: int = 32
    """transitions in a minibatch"""
    hidden_dim: int = 512
    """width of the hidden layers of critic and actor"""
    gamma: float = 0.99
    """discount factor in [0, 1)"""
    n_step: int = 10
    """n of the n-step return; 1 is the paper's form"""
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

    eval_interval: int = 2000
    """updates between two rows of metrics.csv, each with an evaluation and a checkpoint"""
    eval_episodes: int = 100
    """episodes of the final evaluation; a fiftieth of them in between"""
    eval_epsilon: float = 0.0
    """probability of a random action in evaluation, for games in which no-ops change nothing (Pong)"""
    resume: str | None = None
    """run folder to continue; only --eval-episodes, --capture-video, --total-updates may change"""


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


# ===== The data: frames once each, stacked when a batch is drawn; the environment to evaluate in
def open_dataset(dataset_id):
    """A Minari data set, downloaded if it is not on this machine."""
    if not re.search(r"-v\d+$", dataset_id):
        sys.exit(f"--dataset-id {dataset_id}: Minari's ids end in a version, as in some/name-v0.")
    here = get_dataset_path(dataset_id).exists()
    try:
        return minari.load_dataset(dataset_id, download=True)
    except Exception as error:
        why = " ".join(str(error).split())[:150] or type(error).__name__
        if here:
            sys.exit(f"{dataset_id}: damaged ({why}); `minari delete {dataset_id}` and try again.")
        sys.exit(f"{dataset_id}: not on this machine, and no download over the network ({why}).")


def decode(frame):
    """A raw frame, grey and 84x84 by area averaging, in data and evaluation. [84, 84] uint8"""
    return np.asarray(Image.fromarray(frame).convert("L").resize((84, 84), Image.Resampling.BOX))


def check_spaces(dataset):
    name = dataset.spec.dataset_id
    actions = dataset.spec.action_space
    space = dataset.spec.observation_space
    if not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        sys.exit(f"{name} has {actions} actions; this script needs discrete actions from 0 on.")
    image = isinstance(space, gym.spaces.Box) and space.dtype == np.uint8
    if not image or space.shape[2:] not in ((3,), ()):  # colours, or none
        sys.exit(f"{name} has {space} observations; this script needs uint8 images.")
    if dataset.spec.env_spec is None:
        sys.exit(f"{name} names no environment, so no policy could be evaluated.")


def stored_episodes(dataset):
    """Frames, actions, rewards and terminations of every episode. Minari would decode an episode
    whole, up to 2.7 GB of pixels; of an HDF5 file we read a frame at a time."""
    path = os.path.join(dataset.storage.data_path, "main_data.hdf5")
    if not os.path.exists(path):  # Arrow or Parquet
        for episode in dataset.iterate_episodes():
            yield episode.observations, episode.actions, episode.rewards, episode.terminations
        return
    with h5py.File(path) as file:
        for i in dataset.episode_indices:
            episode = file[f"episode_{i}"]
            columns = [episode[name][:] for name in ("actions", "rewards", "terminations")]
            yield episode["observations"], *columns


def decode_episodes(dataset, folder):
    """Write frames.npy, all frames once, [T + 1 per episode, 84, 84], and columns.npz: for every
    transition the numbers of its frame and of its episode's first one, action, reward, terminated."""
    name = dataset.spec.dataset_id
    shape = (int(dataset.total_steps + dataset.total_episodes), 84, 84)
    at = 0
    columns = []
    with open(os.path.join(folder, "frames.npy"), "wb") as f:
        header = {"shape": shape, "fortran_order": False, "descr": "|u1"}
        np.lib.format.write_array_header_1_0(f, header)
        episodes = tqdm(stored_episodes(dataset), "decoding", len(dataset), unit="episode")
        for raw, action, reward, terminated in episodes:
            T = len(reward)
            if not len(raw) - 1 == len(action) == T:
                sys.exit(f"{name}: an episode needs T + 1 observations, T of all else.")
            if not np.isfinite(reward).all():
                sys.exit(f"{name} holds rewards that are not finite.")
            for frame in raw:
                if frame.ndim == 1:  # a JPEG file
                    frame = np.asarray(Image.open(io.BytesIO(frame)))
                f.write(decode(frame).tobytes())
            frame_numbers = (at + np.arange(T), np.full(T, at))
            columns.append((*frame_numbers, np.int64(action), np.float32(reward), np.float32(terminated)))
            at += T + 1
    np.savez(os.path.join(folder, "columns.npz"), *map(np.concatenate, zip(*columns)))


def load_frames(dataset, cache_dir):
    """Frames, memory-mapped, and columns of decode_episodes. Decoded once, then kept on disk."""
    check_spaces(dataset)
    name = dataset.spec.dataset_id
    source = str(dataset.storage.data_path)
    files = sorted((x.name, x.stat().st_size, x.stat().st_mtime_ns) for x in os.scandir(source))
    key = hashlib.sha1(repr((name, files)).encode()).hexdigest()[:16]  # new when the data change
    parent = cache_dir or os.path.dirname(source)
    cache = os.path.join(parent, f"frames84-{key}")
    temporary = f"{cache}.{os.getpid()}.tmp"
    if not os.path.isdir(cache):
        try:
            os.makedirs(temporary)
            decode_episodes(dataset, temporary)
            os.rename(temporary, cache)
        except Exception as error:
            if not os.path.isdir(cache):  # it is there if another run was faster
                what = f"{name} cannot be decoded into {parent} ({error}); choose another --cache-dir,"
                sys.exit(f"{what} or `minari delete {name}` and try again.")
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    frames = np.load(os.path.join(cache, "frames.npy"), mmap_mode="r")
    columns = np.load(os.path.join(cache, "columns.npz"))
    return frames, *(torch.as_tensor(columns[f"arr_{i}"]) for i in range(5))


def stack(frames, number, first):
    """Frame `number` and the three before it; an episode's first one repeats. [B, 4, 84, 84]"""
    numbers = number[:, None] + torch.arange(-3, 1)  # [B, 4]
    return torch.from_numpy(frames[torch.maximum(numbers, first[:, None]).numpy()])


def n_step(first, reward, terminated, gamma, n):
    """Discounted reward of n steps, fewer at an episode's end; discount after them; their number;
    did they end the episode? [|D|] each"""
    t = torch.arange(len(reward))
    total = torch.zeros(len(reward))
    steps = torch.zeros(len(reward), dtype=torch.long)
    for k in range(n):
        later = (t + k).clamp(max=len(reward) - 1)
        inside = (t + k == later) & (first[later] == first)
        total += torch.where(inside, gamma**k * reward[later], 0.0)
        steps += inside
    return total, gamma**steps, steps, terminated[t + steps - 1]


def returns_to_go(first, reward, terminated, gamma):
    """The discounted return that followed; NaN, unknown, if the episode was cut before its end. [|D|]"""
    last = [*(first[1:] != first[:-1]).tolist(), True]  # transitions that are their episode's last
    following = 0.0
    returns = []
    for r, ended, is_last in zip(reward.tolist()[::-1], terminated.tolist()[::-1], last[::-1]):
        if is_last:
            following = 0.0 if ended else math.nan
        following = r + gamma * following
        returns.append(following)
    return torch.tensor(returns[::-1])


def make_atari_env(dataset, video_folder=None):
    """The environment that the data set recovers, its frames decoded and stacked like the data."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    mode = {"render_mode": "rgb_array"} if video_folder else {}
    env = dataset.recover_environment(eval_env=True, **mode)
    if env.spec.max_episode_steps is None:  # Breakout without a ball would last for ever; as in ALE
        env = gym.wrappers.TimeLimit(env, 27_000)
    if video_folder:
        env = gym.wrappers.RecordVideo(env, video_folder, lambda episode: episode == 0)
    env = gym.wrappers.TransformObservation(env, decode, gym.spaces.Box(0, 255, (84, 84), np.uint8))
    return gym.wrappers.FrameStackObservation(env, 4)


# ===== Critic: the encoder of all methods, and the heads that read it
class EnsembleHeads(nn.Module):
    """N linear critics, each with its frozen prior. forward(psi [B, H]) -> q [N, B, A]"""

    def __init__(self, hidden_dim, num_actions, num_critics, prior_scale):
        super().__init__()
        self.shape = (num_critics, num_actions)
        self.prior_scale = prior_scale
        self.learnable = nn.Linear(hidden_dim, num_critics * num_actions)
        self.prior = nn.Linear(hidden_dim, num_critics * num_actions).requires_grad_(False)

    def forward(self, psi):
        q = self.learnable(psi) + self.prior_scale * self.prior(psi.detach())  # [B, N A]
        return q.unflatten(-1, self.shape).transpose(0, 1)  # [N, B, A]


class EpinetHeads(nn.Module):
    """Mean and stochastic head, linear in the index z; only the mean's gradient reaches the encoder.
    forward(psi [B, H]) -> mu [B, A], sigma_bar [B, A, d_z]"""

    def __init__(self, hidden_dim, num_actions, index_dim, prior_scale):
        super().__init__()
        self.shape = (num_actions, index_dim)
        self.prior_scale = prior_scale
        outputs = num_actions * index_dim
        self.mean = nn.Linear(hidden_dim, num_actions)
        self.learnable = nn.Sequential(nn.Linear(hidden_dim, 50), nn.ReLU(), nn.Linear(50, outputs))
        self.prior = nn.Sequential(nn.Linear(hidden_dim, 50), nn.ReLU(), nn.Linear(50, outputs))
        self.prior.requires_grad_(False)

    def forward(self, psi):
        sigma_bar = self.learnable(psi.detach()) + self.prior_scale * self.prior(psi.detach())
        return self.mean(psi), sigma_bar.unflatten(-1, self.shape)


class PixelNetwork(nn.Module):
    """The Nature CNN (Mnih et al., 2015), its features normalised, and the heads that read them; value is
    IQL's V(s), behaviour BRAC-BCQ's cloned policy. The actor reads the convolutions, too.
    forward(obs [B, 4, 84, 84]) -> what the heads return"""

    def __init__(self, heads, hidden_dim, num_actions, mean, std):
        super().__init__()
        self.mean = nn.Buffer(mean)  # of the data's frames: what moves is left
        self.std = nn.Buffer(std)
        layers = [nn.Conv2d(4, 32, 8, stride=4), nn.ReLU()]  # [B, 32, 20, 20]
        layers += [nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()]  # [B, 64, 9, 9]
        layers += [nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()]  # [B, 3136]
        self.cnn = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.dense = nn.Sequential(nn.Linear(3136, hidden_dim), nn.LayerNorm(hidden_dim), nn.ReLU())
        self.heads = heads
        self.value = nn.Linear(hidden_dim, 1)
        self.behaviour = nn.Linear(hidden_dim, num_actions)

    def convolve(self, obs):
        """obs [B, 4, 84, 84] uint8 -> x [B, 3136]"""
        x = (obs - self.mean) / self.std
        return self.cnn(x.contiguous(memory_format=torch.channels_last))

    def forward(self, obs):
        return self.heads(self.dense(self.convolve(obs)))


class PixelActor(nn.Module):
    """The policy, on the critic's convolutions. forward(x [B, 3136]) -> logits [B, A]"""

    def __init__(self, hidden_dim, num_actions):
        super().__init__()
        hidden = [nn.Linear(3136, hidden_dim), nn.LayerNorm(hidden_dim), nn.ReLU()]
        self.net = nn.Sequential(*hidden, nn.Linear(hidden_dim, num_actions))

    def forward(self, x):
        return self.net(x)


def critic_loss(q, action, target):
    """Squared errors of all critics against one target [B] or their own [N, B]; the caller
    averages over B and sums over N. [N, B]"""
    return (q[:, torch.arange(len(action), device=q.device), action] - target).square()


def epinet_loss(mu, sigma_bar, action, target, c, noise_scale, spread=0.0):
    """E_z (q(s, a, z) - y - <spread + noise_scale c, z>)^2 for z ~ N(0, I), in closed form:
    (mu_a - y)^2 + |sigma_bar_a - spread - noise_scale c|^2, [B]"""
    batch = torch.arange(len(action), device=mu.device)
    error = mu[batch, action] - target  # [B]
    deviation = sigma_bar[batch, action] - spread - noise_scale * c  # [B, d_z]
    return error.square() + deviation.square().sum(-1)


# ===== The uncertainty set: q holds N sampled Q-vectors per state, [N, B, A]; pi is [B, A]
def worst_case_box(q, pi):
    """Box: every action at its lowest sample; with shared targets SAC-N (Proposition 3.1). [B, A]"""
    return q.amin(0)


def worst_case_hull(q, pi):
    """Hull: a linear function is lowest at a vertex, the sample with the lowest <pi, q_i>. [B, A]"""
    worst = torch.einsum("nba,ba->nb", q, pi).argmin(0)  # [B]
    return q[worst, torch.arange(q.shape[1], device=q.device)]


def center(q):
    """Mean of the samples, [B, A], and their deviations from it, [B, A, N]; in double precision."""
    d = (q - q[0]).double().permute(1, 2, 0).contiguous()  # equal samples: exactly 0
    shift = d.mean(-1, keepdim=True)  # [B, A, 1]
    return q[0] + shift[..., 0], d - shift


def mahalanobis(x, d):
    """Squared distances x' Sigma^-1 x of points x [B, A, M]; Sigma = d d' / N for d [B, A, N]. [B, M]"""
    x = x.double()
    d = d.double()
    sigma = d @ d.mT / d.shape[-1]  # [B, A, A]
    scale = sigma.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]  # trace(Sigma) / A, [B, 1, 1]
    eye = torch.eye(d.shape[1], dtype=d.dtype, device=d.device)
    ridge = 1e-12 * scale + torch.finfo(d.dtype).tiny  # for a singular Sigma: N <= A, or no spread
    cholesky, _ = torch.linalg.cholesky_ex(sigma + ridge * eye)
    whiten = torch.linalg.solve_triangular(cholesky, eye.expand_as(sigma), upper=False)  # [B, A, A]
    return (whiten @ x).square().sum(1)  # [B, M]


def ellipsoid_radius(d, upsilon):
    """The smallest radius that holds a share upsilon of the samples, deviations d [B, A, N]. [B]"""
    N = d.shape[-1]
    k = min(max(math.ceil(upsilon * N - 1e-9), 1), N)  # 0.28 * 25 is a little above 7
    return mahalanobis(d, d).kthvalue(k, dim=-1).values.sqrt()


def worst_case_ellipsoid(q, pi, upsilon):
    """Ellipsoid: q* = mu - radius Sigma pi / sqrt(pi' Sigma pi); v_n = <pi, q_n - mu>. [B, A]"""
    mu, d = center(q)  # [B, A], [B, A, N]
    v = pi[:, None].double() @ d  # [B, 1, N]
    norm = v.square().mean(-1).sqrt()  # sqrt(pi' Sigma pi), [B, 1]; where it is 0, q* = mu
    sigma_pi = (d @ v.mT)[..., 0] / q.shape[0]  # [B, A]
    radius = ellipsoid_radius(d, upsilon)[:, None]  # [B, 1]
    return (mu - radius * sigma_pi / norm.clamp(min=torch.finfo(d.dtype).tiny)).to(q.dtype)


def worst_case_gaussian(mu, sigma_bar, pi, radius):
    """The worst case in the ellipsoid of q ~ N(mu, sigma_bar sigma_bar'): with v = sigma_bar' pi,
    q* = mu - radius sigma_bar v / |v|, where radius = sqrt(chi2.ppf(upsilon, A)). [B, A]"""
    v = torch.einsum("bad,ba->bd", sigma_bar, pi).double()  # [B, d_z]
    norm = v.norm(dim=-1, keepdim=True)  # sqrt(pi' Sigma pi), [B, 1]; where it is 0, q* = mu
    v = v / norm.clamp(min=torch.finfo(v.dtype).tiny)
    return mu - radius * torch.einsum("bad,bd->ba", sigma_bar, v.to(mu.dtype))


# ===== Target and losses of SAC-N and ERSAC
def entropy(pi, log_pi):
    """H(pi) = -<pi, log pi>, with 0 log 0 = 0. [B]"""
    return -(pi * log_pi.clamp(min=torch.finfo(pi.dtype).min)).sum(-1)


def robust_target(reward, terminated, pi, log_pi, q_star, alpha, gamma):
    """y = r + gamma (1 - terminated)(<pi, q*> + alpha H(pi)), pi and q* at the next state, [B]. With
    q [N, B, A] in place of q* every sample bootstraps from itself, [N, B]."""
    v = (pi * q_star).sum(-1) + alpha * entropy(pi, log_pi)
    return reward + gamma * (1 - terminated) * v


def actor_loss(pi, log_pi, q_star, alpha):
    """-(<pi, q*> + alpha H(pi)); q* held fixed: the exact gradient, by the envelope theorem. [B]"""
    return -((pi * q_star.detach()).sum(-1) + alpha * entropy(pi, log_pi))


# ===== CQL: Kumar et al., Conservative Q-Learning for Offline RL, 2020
def cql_penalty(q, action):
    """CQL(H): log sum_a' exp Q(s, a') - Q(s, a) lowers actions that the data do not take. [N, B]"""
    return q.logsumexp(-1) - q[:, torch.arange(len(action), device=q.device), action]


# ===== IQL: Kostrikov et al., Offline RL with Implicit Q-Learning, 2021; weights up to 100
def expectile_loss(error, tau):
    """|tau - 1(error < 0)| error^2, error = Q(s, a) - V(s): V leans to the better actions. [B]"""
    return torch.where(error < 0, 1 - tau, tau) * error.square()


# ===== BRAC-BCQ: discrete BCQ (Fujimoto et al., 2019) with BRAC's KL penalty (Wu et al., 2019)
def bcq_filter(log_b, threshold):
    """Actions with b(a|s) / max_a' b(a'|s) above the threshold, and the likeliest. [B, A] bool"""
    ratio = (log_b - log_b.amax(-1, keepdim=True)).exp()
    return (ratio > threshold) | (ratio == 1)


def brac_kl(pi, log_pi, log_b):
    """KL(pi || b) = <pi, log pi - log b>. [B]"""
    return -entropy(pi, log_pi) - (pi * log_b).sum(-1)


# ===== Evaluation
@torch.no_grad()
def play(policy, envs, episodes, seed, device, epsilon=0.0):
    """Undiscounted, unclipped returns of the greedy policy, after 0 to 30 no-ops, len(envs) side by
    side; a random action with probability epsilon. [episodes]"""
    returns = np.zeros(episodes)
    for start in range(0, episodes, len(envs)):
        running = {start + i: env for i, env in enumerate(envs) if start + i < episodes}
        obs = {e: env.reset(seed=seed + e)[0] for e, env in running.items()}
        rng = {e: np.random.default_rng(seed + e) for e in running}
        wait = {e: rng[e].integers(31) for e in running}
        while running:
            batch = torch.as_tensor(np.stack([obs[e] for e in running]), device=device)
            greedy = policy(batch)[0].argmax(-1).tolist()
            for (e, env), action in zip(list(running.items()), greedy):
                if rng[e].random() < epsilon:
                    action = rng[e].integers(env.action_space.n)
                if wait[e] > 0:
                    action = 0
                obs[e], reward, terminated, truncated, _ = env.step(action)
                returns[e] += reward
                wait[e] -= 1
                if terminated or truncated:
                    del running[e]
    return returns


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
    algo = args.algo
    star = algo == "ersac-ell-epi-star"
    ours = star or algo in ("sac-n", "ersac-ch-n", "ersac-ell-n")

    # ----- check the arguments
    if min(args.total_updates, args.eval_interval, args.eval_episodes) < 1:
        sys.exit("--total-updates, --eval-interval, --eval-episodes: each at least 1.")
    if not 0 < args.upsilon <= 1:
        sys.exit(f"--upsilon {args.upsilon}: it must be above 0 and at most 1.")
    if star and args.upsilon == 1:
        sys.exit("--upsilon 1: the closed form's set would be infinite; choose a value below 1.")
    if not 0 <= args.gamma < 1:
        sys.exit(f"--gamma {args.gamma}: it must be at least 0 and below 1.")
    if not 0 < args.iql_expectile < 1:
        sys.exit(f"--iql-expectile {args.iql_expectile}: it must be above 0 and below 1.")
    if not args.dataset_id and args.env_id not in GAMES:
        games = ", ".join(GAMES)
        sys.exit(f"--env-id {args.env_id}: it must be one of {games}; or give a --dataset-id.")
    if checkpoint and args.total_updates < checkpoint["update"]:
        sys.exit(f"--total-updates {args.total_updates}: the run has done {checkpoint['update']}.")
    if checkpoint and args.anneal_lr and args.total_updates > checkpoint["args"]["total_updates"]:
        left = 1 - checkpoint["update"] / args.total_updates
        print(f"Extended: the step sizes start again at {left:.0%} of their first values and fall to 0.")

    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # the same numbers whatever the machine
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(args.torch_deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time; nothing here reads it
    generator = torch.Generator().manual_seed(args.seed)  # minibatches

    # ----- data: frames stay on disk and in the page cache, a batch is moved to the device as bytes
    dataset = open_dataset(args.dataset_id or f"atari/{args.env_id.lower()}/expert-v0")
    dataset_id = dataset.spec.dataset_id
    frames, frame, first, action, reward, terminated = load_frames(dataset, args.cache_dir)
    reward = reward.clamp(-1, 1)  # for learning only
    returns = returns_to_go(first, reward, terminated, args.gamma)
    reward, discount, steps, terminated = n_step(first, reward, terminated, args.gamma, args.n_step)
    size = len(action)
    A = int(dataset.spec.action_space.n)
    env_id = dataset.spec.env_spec.id
    some = torch.tensor(frames[:: len(frames) // 5000 + 1]).float()  # [<= 5000, 84, 84]
    fingerprint = [size, action.sum().item(), reward.sum().item(), some.sum().item()]  # of the data
    c = F.normalize(torch.randn(size, args.index_dim), dim=-1).to(device)  # [|D|, d_z]

    # ----- networks: critic, target critic, actor on the critic's convolutions
    if star:
        heads = EpinetHeads(args.hidden_dim, A, args.index_dim, args.prior_scale)
    elif ours:
        heads = EnsembleHeads(args.hidden_dim, A, args.num_critics, args.prior_scale)
    else:
        heads = EnsembleHeads(args.hidden_dim, A, 2, 0.0)  # the baselines' clipped double Q
    mean = some.mean(0)
    std = (some - mean).square().mean().sqrt().clamp(min=1.0)
    critic = PixelNetwork(heads, args.hidden_dim, A, mean, std).to(device)
    target_critic = copy.deepcopy(critic).requires_grad_(False)
    actor = PixelActor(args.hidden_dim, A).to(device)
    learned = [p for p in critic.parameters() if p.requires_grad]
    q_optimizer = torch.optim.Adam(learned, args.q_lr, fused=True)
    policy_optimizer = torch.optim.Adam(actor.parameters(), args.policy_lr, fused=True)
    radius = math.sqrt(chi2.ppf(args.upsilon, A)) if star else None

    def worst_case(output, pi):
        """q* from what the heads return; a baseline takes the lower of its two critics. [B, A]"""
        if star:
            mu, sigma_bar = output  # [B, A], [B, A, d_z]
            return worst_case_gaussian(mu, sigma_bar, pi, radius)
        if algo == "ersac-ch-n":
            return worst_case_hull(output, pi)
        if algo == "ersac-ell-n":
            return worst_case_ellipsoid(output, pi, args.upsilon)
        return worst_case_box(output, pi)

    def log_policy(x, network):
        """log pi, and for BRAC-BCQ log b, whose filter rules actions out, from x [B, 3136], the
        convolutions of critic or target critic. [B, A], [B, A]"""
        logits = actor(x)
        log_b = None
        if algo == "brac-bcq":
            log_b = network.behaviour(network.dense(x)).detach().log_softmax(-1)
            logits = logits.masked_fill(~bcq_filter(log_b, args.bcq_threshold), -1e9)
        return logits.log_softmax(-1), log_b

    def act(obs):
        """log pi of images, for the evaluation. [B, A]"""
        return log_policy(critic.convolve(obs), critic)

    # ----- run folder: new, or as the checkpoint left it
    method = METHODS[algo]
    label = method.removeprefix("ERSAC-")  # as the docs write it
    if algo == "ersac-ell-n" and args.upsilon < 1:
        label = f"Ell_{args.upsilon:g}-N"
    parts = {
        "critic": critic,
        "target": target_critic,
        "actor": actor,
        "q_optimizer": q_optimizer,
        "policy_optimizer": policy_optimizer,
    }

    def save(update):
        state = {name: part.state_dict() for name, part in parts.items()} | {
            "generator": generator.get_state(),
            "update": update,
            "rows": rows,
            "run_name": run_name,
            "cloned": cloned,
            "script": script,
            "args": asdict(replace(args, resume=None)),
            "data": fingerprint,
            "num_actions": A,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_file(folder, "checkpoint.pt", buffer.getvalue())

    start = 0
    rows = []
    cloned = args.clone_updates == 0
    if checkpoint:
        folder = os.path.normpath(args.resume)
        if fingerprint != checkpoint["data"]:
            sys.exit(f"{folder}: {dataset_id} has changed since; start a new run.")
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        generator.set_state(checkpoint["generator"])
        start = checkpoint["update"]
        rows = checkpoint["rows"]
        run_name = checkpoint["run_name"]
        cloned = checkpoint["cloned"]
    else:
        run_name = f"{env_id.split('/')[-1]}__{args.exp_name}__{args.seed}__{int(1000 * time.time())}"
        folder = os.path.join(args.output_dir, run_name)
        if os.path.exists(folder):
            sys.exit(f"{folder} exists; choose another --exp-name.")
        write_file(folder, "args.json", json.dumps(asdict(args), indent=2).encode())
        save(0)

    track = start_tracking(args, run_name, dataset_id, label, script)
    for row in rows:
        if track and row["update"] >= track.step:  # what a killed run had not yet sent
            track.log(row, step=row["update"])
    envs = [make_atari_env(dataset) for _ in range(min(args.eval_episodes, 10))]

    # ----- cloned start, convolutions included: the critic then judges a policy that the data know
    if not cloned:
        print("First the actor becomes a clone of the data; --clone-updates 0 leaves this out.", flush=True)
        both = [*actor.parameters(), *critic.cnn.parameters()]
        clone_optimizer = torch.optim.Adam(both, args.policy_lr, fused=True)
        for step in tqdm(range(args.clone_updates), "cloning", unit="update", mininterval=1):
            left = 1 - step / args.clone_updates
            clone_optimizer.param_groups[0]["lr"] = args.policy_lr * left
            batch = torch.randint(size, (args.batch_size,), generator=generator)
            s = stack(frames, frame[batch], first[batch]).to(device)  # [B, 4, 84, 84]
            clone_optimizer.zero_grad()
            F.cross_entropy(actor(critic.convolve(s)), action[batch].to(device)).backward()
            clone_optimizer.step()
        target_critic.load_state_dict(critic.state_dict())
        cloned = True
        save(0)

    # ----- training
    tick, tick_update = time.time(), start
    updates = range(start + 1, args.total_updates + 1)
    bar = tqdm(updates, method, args.total_updates, initial=start, unit="update", mininterval=1)
    for update in bar:
        if args.anneal_lr:
            left = 1 - (update - 1) / args.total_updates
            q_optimizer.param_groups[0]["lr"] = args.q_lr * left
            policy_optimizer.param_groups[0]["lr"] = args.policy_lr * left
        batch = torch.randint(size, (args.batch_size,), generator=generator)
        s = stack(frames, frame[batch], first[batch]).to(device)  # [B, 4, 84, 84]
        s_next = stack(frames, (frame + steps)[batch], first[batch]).to(device)
        a, r = action[batch].to(device), reward[batch].to(device)  # [B]
        ended, gamma_n = terminated[batch].to(device), discount[batch].to(device)  # [B]

        # compute target
        with torch.no_grad():
            if algo == "iql":  # no action but the data's is ever asked for
                psi_next = critic.dense(critic.convolve(s_next))  # [B, H]
                y = r + gamma_n * (1 - ended) * critic.value(psi_next)[:, 0]  # [B]
                q_low = worst_case_box(target_critic(s), None)  # [B, A]
                q_old = q_low.gather(1, a[:, None])[:, 0]  # Q(s, a), [B]
            else:
                x_next = target_critic.convolve(s_next)  # for policy and critic, [B, 3136]
                log_pi, log_b = log_policy(x_next, target_critic)  # [B, A]
                pi = log_pi.exp()
                output = target_critic.heads(target_critic.dense(x_next))
                q_star = worst_case(output, pi)  # [B, A]
                y = robust_target(r, ended, pi, log_pi, q_star, args.alpha, gamma_n)  # [B]
            if algo == "brac-bcq":
                y = y - gamma_n * (1 - ended) * args.brac_weight * brac_kl(pi, log_pi, log_b)

        # critic update: mean over the batch, sum over the heads; extra is what a baseline adds
        x = critic.convolve(s)  # [B, 3136]
        psi = critic.dense(x)  # [B, H]
        output = critic.heads(psi)  # [N, B, A], or mu [B, A] and sigma_bar [B, A, d_z]
        if star:
            mu, sigma_bar = output
            losses = epinet_loss(mu, sigma_bar, a, y, c[batch], args.noise_scale)  # [B]
        else:
            losses = critic_loss(output, a, y)  # [N, B]
        extra = torch.zeros((), device=device)
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

        # actor update against the updated critic, on the convolutions that both have just read
        x = x.detach()
        log_pi, log_b = log_policy(x, critic)  # [B, A]
        pi = log_pi.exp()
        with torch.no_grad():
            psi = critic.dense(x)  # [B, H]
            output = critic.heads(psi)
            v = critic.value(psi)[:, 0]  # [B]
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
        with torch.no_grad():  # otherwise autograd would record every update
            for p_target, p in zip(target_critic.parameters(), critic.parameters()):
                p_target.lerp_(p, args.polyak)

        if not (q_loss + pi_loss).isfinite():
            sys.exit(f"update {update}: loss not finite; try a smaller --q-lr or --policy-lr.")

        # log, evaluate, checkpoint
        if update % args.eval_interval == 0 or update == args.total_updates:
            with torch.no_grad():
                if star:
                    mu, sigma_bar = output
                    std = sigma_bar.norm(dim=-1)  # [B, A]
                else:
                    mu = output.mean(0)
                    std = output.std(0, correction=0)
                taken = F.one_hot(a, A).bool()  # [B, A]
                followed = returns[batch].to(device)  # [B]
                row = {
                    "losses/critic_loss": losses.mean(),
                    "losses/extra": extra,
                    "losses/actor_loss": pi_loss,
                    "charts/policy_entropy": entropy(pi, log_pi).mean(),
                    "charts/q_data_actions": mu[taken].mean(),
                    "charts/q_minus_return": (mu[taken] - followed).nanmean(),  # where known
                    "charts/q_star_minus_return": (q_star[taken] - followed).nanmean(),
                    "charts/q_robust": (pi * q_star).sum(-1).mean(),
                    "charts/agreement": (pi.argmax(-1) == a).float().mean(),
                    "charts/q_gap": (pi * (mu - q_star)).sum(-1).mean(),
                    "charts/std_data_actions": std[taken].mean(),
                    "charts/std_other_actions": std[~taken].mean(),
                }
            row = {"update": update} | {name: value.item() for name, value in row.items()}
            row["charts/updates_per_second"] = (update - tick_update) / (time.time() - tick)
            few = max(args.eval_episodes // 50, 1)
            scores = play(act, envs, few, 10**6 * (args.seed + 1), device, args.eval_epsilon)
            row["eval/return"] = scores.mean().item()
            row["eval/distinct_returns"] = len(np.unique(scores))
            rows.append(row)
            write_metrics(folder, rows)
            save(update)
            if track:
                track.log(row, step=update)
            bar.set_postfix_str(f"critic={losses.mean():.3g}, return={scores.mean():.1f}")
            tick, tick_update = time.time(), update
    bar.close()

    # ----- final evaluation: the last policy, on fresh episodes
    if args.capture_video:
        envs[0] = make_atari_env(dataset, os.path.join(folder, "video"))
    first_seed = 10**6 * (args.seed + 1) + 10**5
    scores = play(act, envs, args.eval_episodes, first_seed, device, args.eval_epsilon)
    for env in envs:
        env.close()
    with torch.no_grad():
        every = size // 1000 + 1
        log_pi, _ = act(stack(frames, frame[::every], first[::every]).to(device))
    low = dataset.storage.metadata.get("ref_min_score")
    high = dataset.storage.metadata.get("ref_max_score")
    normalized = None
    if low is not None and high is not None:
        normalized = 100 * (scores.mean() - low) / (high - low)
    result = {
        "script": script,
        "method": method,
        "label": label,
        "env_id": env_id,
        "dataset_id": dataset_id,
        "seed": args.seed,
        "updates": args.total_updates,
        "updates_per_second": np.mean([row["charts/updates_per_second"] for row in rows]),
        "eval_episodes": args.eval_episodes,
        "eval_return_mean": scores.mean(),
        "eval_return_std": scores.std(),
        "eval_returns": scores.tolist(),
        "eval_distinct_returns": len(np.unique(scores)),
        "random_return": low,
        "reference_return": high,
        "normalized_return": normalized,
        "policy_entropy": entropy(log_pi.exp(), log_pi).mean().item(),
    }
    write_file(folder, "result.json", json.dumps(result, indent=2).encode())
    if track:
        track.summary.update(result)
        if args.capture_video:
            import wandb

            film = os.path.join(folder, "video", "rl-video-episode-0.mp4")
            track.log({"video": wandb.Video(film, format="mp4")})
        track.finish()
    played = f"return {scores.mean():.1f} over {len(scores)} episodes"
    print(f"{script}, {label} on {dataset_id}: {played}")
    if normalized is not None:
        scale = f"0 is a return of {low:.1f}, 100 is {high:.1f}: the data set's reference scores"
        print(f"normalized return {normalized:.1f} ({scale})")
    print(f"run folder: {folder}")
