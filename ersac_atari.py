# docs: docs/ersac_atari.md
"""ERSAC on images: the Atari appendix of "Epistemic Robust Offline Reinforcement Learning".

Seven methods share encoder, data and loop: SAC-N, CH-N and Ell-N take the worst case over N critic
heads, Ell-Epi* over an Epinet's ellipsoid; CQL, IQL and BRAC-BCQ are baselines. All heads learn
from the paper's one worst-case target. By default the actor starts as a clone of the data and keeps
near them, and targets span ten steps; that is ours, the paper's form is --clone-updates 0
--critic-warmup 0 --bc-coef 0 --n-step 1. Pong without a download, in eight minutes:

    python docs/benchmark/record_atari.py --switch-prob 0.02 --random-share 0.1
    python ersac_atari.py --dataset-id ersac/pong/alternating-v0 --eval-epsilon 0.01 \\
        --clone-updates 4000 --total-updates 6000
"""

import copy
import io
import json
import math
import os
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
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
from scipy.signal import lfilter
from scipy.stats import chi2
from tqdm import tqdm

# the baselines: weights as published; BRAC (Wu et al., 2019) tunes its own for every task
CQL_WEIGHT = 1.0  # of the penalty (Kumar et al., 2020: Atari, with 10 % of the replay data)
IQL_EXPECTILE = 0.7  # above 0.5 V leans to good outcomes (Kostrikov et al., 2021)
IQL_BETA = 3.0  # inverse temperature of the weights of the data's actions
BCQ_THRESHOLD = 0.3  # b(a|s) / max b(.|s) from which on a may be taken (Fujimoto et al., 2019)
BRAC_WEIGHT = 0.1  # of the divergence KL(pi || b) from the cloned behaviour policy b


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
    eval_interval: int = 2000
    """updates between two rows of metrics.csv, each with an evaluation and a checkpoint"""
    eval_episodes: int = 20
    """episodes of the final evaluation; a quarter of them in between"""
    eval_epsilon: float = 0.0
    """probability of a random action in evaluation, for games that no-ops do not change (Pong)"""

    dataset_id: str = "atari/breakout/expert-v0"
    """any Minari data set with uint8 images and discrete actions"""

    method: Literal["sac-n", "ch-n", "ell-n", "ell-epi-star", "cql", "iql", "brac-bcq"] = "ell-epi-star"
    """the columns of the paper's Atari table"""
    upsilon: float = 0.9
    """share of the heads (ell-n) or probability (ell-epi-star, below 1) in the ellipsoid"""
    num_critics: int = 100
    """N, the critic heads of sac-n, ch-n and ell-n; the baselines have two"""
    index_dim: int = 16
    """d_z, the dimension of the Epinet's index z (ell-epi-star)"""
    prior_scale: float = 0.03
    """factor on the frozen prior of heads or Epinet; the baselines have none"""
    noise_scale: float = 0.001
    """scale of the fixed noise <c, z> on a transition's target (ell-epi-star)"""

    clone_updates: int = 8000
    """updates that clone the data's actions into the actor before all else; 0 is a random start"""
    critic_warmup: int = 1000
    """updates of the critic alone, against the actor as it starts"""
    bc_coef: float = 0.3
    """weight of the cloning loss -log pi(a|s) beside the actor's own; the baselines have none"""
    n_step: int = 10
    """n of the n-step return; 1 is the paper's form"""
    total_updates: int = 100_000
    """updates of critic and actor"""
    batch_size: int = 32
    """transitions in a minibatch"""
    hidden_dim: int = 512
    """width of the hidden layers of critic and actor"""
    gamma: float = 0.99
    """discount factor"""
    q_lr: float = 3e-4
    """Adam step size of encoder and critic, falling linearly to 0"""
    policy_lr: float = 3e-4
    """Adam step size of the actor and of cloning, falling linearly to 0"""
    polyak: float = 0.01
    """rate at which the target critic follows the critic"""
    alpha: float = 0.0003
    """entropy coefficient; IQL has none"""


# ===== The data: frames decoded once, stacked when a batch is drawn; the environment to evaluate in
def open_pixels(name):
    """The data set of this name, downloaded if it is not on this machine."""
    here = name.split("/", 3)[-1] if "://" in name else name  # hf://user/name
    try:
        if not get_dataset_path(here).exists():
            print(f"{name} is not on this machine; Minari looks for it online.", flush=True)
            minari.download_dataset(name)
        return minari.load_dataset(here)
    except Exception as error:
        why = " ".join(str(error).split())[:150]
        sys.exit(f"{name} cannot be had ({why}); record_atari.py makes sets of Pong.")


def decode(frame):
    """A raw frame as the networks see it: grey, 84x84 by area averaging. [84, 84] uint8"""
    if frame.ndim == 1:  # a JPEG file, as Minari stores images
        frame = np.asarray(Image.open(io.BytesIO(frame)))
    return np.asarray(Image.fromarray(frame).convert("L").resize((84, 84), Image.Resampling.BOX))


def raw_episodes(dataset):
    """Columns of every episode, by name. Minari would decode an episode whole, up to 2.7 GB of frames;
    HDF5 gives them one at a time."""
    path = dataset.storage.data_path / "main_data.hdf5"
    if not path.exists():  # Arrow
        yield from map(vars, dataset.iterate_episodes())
        return
    with h5py.File(path) as file:
        for i in dataset.episode_indices:
            yield file[f"episode_{i}"]


def load_steps(dataset, gamma, n):
    """Of each transition: the numbers of its frame and of its episode's first one, the action, the
    steps to s_next (n, or fewer at the end), their reward, do they end the episode, and the return
    that followed (NaN, unknown, if the episode was cut). [|D|] each"""
    name, space, actions = dataset.id, dataset.observation_space, dataset.action_space
    if not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        sys.exit(f"{name} has {actions} actions; this script needs discrete actions from 0 on.")
    if space.dtype != np.uint8 or len(space.shape) < 2 or space.shape[2:] not in ((), (3,)):
        sys.exit(f"{name} has {space} observations; this script needs uint8 images.")
    columns, first = [], 0
    for episode in raw_episodes(dataset):
        a, r, ended = (episode[x][:] for x in ("actions", "rewards", "terminations"))  # [T]
        T = len(a)
        valid = np.isfinite(r).all() and np.isin(a, range(actions.n)).all() and a.ndim == r.ndim == 1
        if not valid or not len(episode["observations"]) - 1 == T == len(r) == len(ended):
            sys.exit(f"{name}: T + 1 frames, T finite rewards, T {actions} actions needed.")
        r = np.append(r.clip(-1.0, 1.0), 0.0)  # clipped for learning only, [T + 1]
        R = lfilter([1.0], [1.0, -gamma], r[::-1])[::-1]  # R_t = r_t + gamma R_t+1, [T + 1]
        t = np.arange(T)
        after = np.minimum(t + n, T)
        reward = R[t] - gamma ** (after - t) * R[after]
        returns = R[t] if ended[-1] else np.full(T, np.nan)
        columns.append((first + t, 0 * t + first, a, after - t, reward, ended[after - 1], returns))
        first += T + 1
    if not columns:
        sys.exit(f"{name} holds no episode.")
    number, first, action, steps, *others = (torch.as_tensor(np.concatenate(x)) for x in zip(*columns))
    return number, first, action.long(), steps, *(x.float() for x in others)


def load_frames(dataset):
    """All frames, decoded once into a memory-mapped file. [T + 1 of every episode, 84, 84] uint8"""
    count = int(dataset.total_steps + dataset.total_episodes)
    folder = dataset.storage.data_path.parent
    if not os.path.exists(f"{folder}/frames84-{count}"):
        with tempfile.TemporaryDirectory(dir=folder) as temporary:  # never half a file
            with open(f"{temporary}/frames", "wb") as file:
                for episode in tqdm(raw_episodes(dataset), "decoding", len(dataset)):
                    for frame in episode["observations"]:
                        file.write(decode(frame).tobytes())
            os.replace(f"{temporary}/frames", f"{folder}/frames84-{count}")
    return np.memmap(f"{folder}/frames84-{count}", np.uint8, "r", shape=(count, 84, 84))


def stack(frames, number, first):
    """Frame `number` and the three before it; an episode's first one repeats. [B, 4, 84, 84]"""
    numbers = number[:, None] + torch.arange(-3, 1)  # [B, 4]
    return torch.from_numpy(frames[torch.maximum(numbers, first[:, None]).numpy()])


def make_atari_env(dataset, **kwargs):
    """The data set's environment, observed like the data: decoded, stacked; None if there is none."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    try:
        env = dataset.recover_environment(eval_env=True, **kwargs)
    except Exception as error:
        print(f"no environment, so the policy is not evaluated ({error})")
        return None
    if (env.observation_space, env.action_space) != (dataset.observation_space, dataset.action_space):
        sys.exit(f"{dataset.id}: its spaces are not those of its environment {env.spec.id}.")
    if env.spec.max_episode_steps is None:  # Breakout without a ball would last for ever; as in ALE
        env = gym.wrappers.TimeLimit(env, 27_000)
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
    """q(s, a, z) = mu + <sigma_L + prior_scale sigma_P, z>; only mu's gradient reaches the encoder.
    forward(psi [B, H]) -> mu [B, A], sigma_bar [B, A, d_z]"""

    def __init__(self, hidden_dim, num_actions, index_dim, prior_scale):
        super().__init__()
        self.shape = (num_actions, index_dim)
        self.prior_scale = prior_scale
        outputs = num_actions * index_dim
        self.mu = nn.Linear(hidden_dim, num_actions)
        self.sigma_L = nn.Sequential(nn.Linear(hidden_dim, 50), nn.ReLU(), nn.Linear(50, outputs))
        self.sigma_P = nn.Sequential(nn.Linear(hidden_dim, 50), nn.ReLU(), nn.Linear(50, outputs))
        self.sigma_P.requires_grad_(False)

    def forward(self, psi):
        sigma_bar = self.sigma_L(psi.detach()) + self.prior_scale * self.sigma_P(psi.detach())
        return self.mu(psi), sigma_bar.unflatten(-1, self.shape)


class PixelNetwork(nn.Module):
    """The Nature CNN (Mnih et al., 2015), its features psi normalised, and the heads that read psi;
    value is IQL's V(s), behaviour BRAC-BCQ's cloned policy b. The actor reads the convolutions, too.
    forward(obs [B, 4, 84, 84]) -> what the heads return"""

    def __init__(self, heads, hidden_dim, num_actions, mean, std):
        super().__init__()
        self.mean = nn.Buffer(mean)  # of the data's frames: what moves is left
        self.std = nn.Buffer(std)
        layers = [nn.Conv2d(4, 32, 8, stride=4), nn.ReLU()]  # [B, 32, 20, 20]
        layers += [nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()]  # [B, 64, 9, 9]
        layers += [nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()]  # [B, 3136]
        self.cnn = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.psi = nn.Sequential(nn.Linear(3136, hidden_dim), nn.LayerNorm(hidden_dim), nn.ReLU())
        self.heads = heads
        self.value = nn.Linear(hidden_dim, 1)
        self.behaviour = nn.Linear(hidden_dim, num_actions)

    def convolve(self, obs):
        """obs [B, 4, 84, 84] uint8 -> x [B, 3136]"""
        x = (obs - self.mean) / self.std
        return self.cnn(x.contiguous(memory_format=torch.channels_last))

    def forward(self, obs):
        return self.heads(self.psi(self.convolve(obs)))


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


# ===== Target and losses of SAC-N and ERSAC
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
def play(policy, env, episodes, seed, epsilon=0.0):
    """Undiscounted, unclipped returns of the greedy policy after 0 to 30 no-ops, which make the
    episodes differ; a random action with probability epsilon. [episodes]"""
    returns = np.zeros(episodes)
    for episode in range(episodes):
        rng = np.random.default_rng(seed + episode)
        no_ops = rng.integers(31)
        obs, _ = env.reset(seed=seed + episode)
        done = False
        while not done:
            action = policy(torch.as_tensor(obs)[None]).argmax().item()
            if rng.random() < epsilon:
                action = rng.integers(env.action_space.n)
            if no_ops > 0:
                action = 0
                no_ops -= 1
            obs, reward, terminated, truncated, _ = env.step(action)
            returns[episode] += reward
            done = terminated or truncated
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
    highest = {"q_lr": 1, "policy_lr": 1, "polyak": 1, "upsilon": 1, "eval_epsilon": 1, "gamma": 0.999}
    may_be_zero = ("seed", "clone_updates", "critic_warmup")
    highest.update(dict.fromkeys(("batch_size", "hidden_dim", "num_critics", "index_dim"), 10_000))
    for name, value in asdict(args).items():
        low = 1 if type(value) is int and name not in may_be_zero else 0
        high = highest.get(name, 10**9)
        if type(value) in (int, float) and not low <= value <= high:
            sys.exit(f"--{name.replace('_', '-')} {value}: it must lie in [{low}, {high}].")
    star = args.method == "ell-epi-star"
    baseline = args.method in ("cql", "iql", "brac-bcq")
    if star and args.upsilon == 1:
        sys.exit("--upsilon 1: the closed form's set would be infinite; choose a value below 1.")
    if args.critic_warmup >= args.total_updates:
        sys.exit("--critic-warmup: from --total-updates on, the actor would never learn.")

    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # the same numbers whatever the machine
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)  # minibatches

    # ----- data: frames stay on disk and in the page cache, a batch is moved to the device as bytes
    dataset = open_pixels(args.dataset_id)
    number, first, action, steps, *columns = load_steps(dataset, args.gamma, args.n_step)
    action, reward, terminated, returns = (x.to(device) for x in (action, *columns))  # [|D|]
    discount = (args.gamma**steps).to(device)  # [|D|]
    film = {"render_mode": "rgb_array"} if args.capture_video else {}
    env = make_atari_env(dataset, **film)
    frames = load_frames(dataset)
    A = int(dataset.action_space.n)
    some = torch.tensor(frames[:: len(frames) // 5000 + 1]).float()  # [<= 5000, 84, 84]
    mean = some.mean(0)
    std = (some - mean).square().mean().sqrt().clamp(min=1.0)
    c = F.normalize(torch.randn(len(action), args.index_dim), dim=-1).to(device)  # [|D|, d_z]

    # ----- networks: critic, target critic, actor on the critic's convolutions
    if star:
        heads = EpinetHeads(args.hidden_dim, A, args.index_dim, args.prior_scale)
    elif baseline:
        heads = EnsembleHeads(args.hidden_dim, A, 2, 0.0)  # clipped double Q
    else:
        heads = EnsembleHeads(args.hidden_dim, A, args.num_critics, args.prior_scale)
    critic = PixelNetwork(heads, args.hidden_dim, A, mean, std).to(device)
    target_critic = copy.deepcopy(critic).requires_grad_(False)
    hidden = [nn.Linear(3136, args.hidden_dim), nn.LayerNorm(args.hidden_dim), nn.ReLU()]
    actor = nn.Sequential(*hidden, nn.Linear(args.hidden_dim, A)).to(device)  # x -> logits [B, A]
    q_optimizer = torch.optim.Adam(critic.parameters(), args.q_lr, fused=True)
    both = [*actor.parameters(), *critic.cnn.parameters()]
    clone_optimizer = torch.optim.Adam(both, args.policy_lr, fused=True)
    policy_optimizer = torch.optim.Adam(actor.parameters(), args.policy_lr, fused=True)
    radius = math.sqrt(chi2.ppf(args.upsilon, A)) if star else None

    def worst_case(output, pi):
        """q* from what the heads return; a baseline takes the lower of its two critics. [B, A]"""
        if star:
            return worst_case_gaussian(*output, pi, radius)  # mu [B, A], sigma_bar [B, A, d_z]
        if args.method == "ch-n":
            return worst_case_hull(output, pi)
        if args.method == "ell-n":
            return worst_case_ellipsoid(output, pi, args.upsilon)
        return worst_case_box(output, pi)

    # BRAC's <pi, q> + alpha H(pi) - w KL(pi || b) is <pi, q + w log b> + (alpha + w) H(pi)
    alpha = args.alpha + BRAC_WEIGHT if args.method == "brac-bcq" else args.alpha

    def log_policy(x, network):
        """log pi [B, A] from x [B, 3136], the network's convolutions, in BRAC-BCQ without the actions
        that b hardly takes; and what BRAC adds to q, w log b [B, A], else 0."""
        logits = actor(x)
        if args.method != "brac-bcq":
            return logits.log_softmax(-1), 0.0
        log_b = network.behaviour(network.psi(x)).detach().log_softmax(-1)
        ratio = (log_b - log_b.amax(-1, keepdim=True)).exp()
        logits = logits.masked_fill(ratio <= BCQ_THRESHOLD, -1e9)
        return logits.log_softmax(-1), BRAC_WEIGHT * log_b

    def act(obs):
        """log pi of images, for the evaluation. [B, A]"""
        return log_policy(critic.convolve(obs.to(device)), critic)[0]

    # ----- run folder: new, or as a killed run left it
    ell = "Ell-N" if args.upsilon == 1 else f"Ell_{args.upsilon:g}-N"
    names = {"ell-n": ell, "ell-epi-star": "Ell-Epi*"}
    method = names.get(args.method, args.method.upper())  # SAC-N, CH-N, CQL, IQL, BRAC-BCQ
    if folder is None:
        name = f"{'-'.join(dataset.id.split('/'))}__{os.path.basename(args.exp_name)}__{args.seed}"
        folder = os.path.join(args.output_dir, f"{name}__{int(1000 * time.time())}")
        try:
            os.makedirs(folder)
            json.dump(asdict(args), open(f"{folder}/args.json", "w"), indent=2)
        except OSError as error:
            sys.exit(f"--output-dir {args.output_dir}: {error.strerror}.")
    print(f"{method} on {dataset.id}, {device}; after a kill: --resume {folder}", flush=True)
    last_update, rows = -args.clone_updates, []
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

    # ----- cloning (updates up to 0), then training
    last_time = time.time()
    bar = tqdm(range(last_update + 1, args.total_updates + 1), method, unit="update")
    for update in bar:
        # sample a minibatch; s_next is up to n steps later
        batch = torch.randint(len(action), (args.batch_size,), generator=generator)  # [B]
        s = stack(frames, number[batch], first[batch]).to(device)  # [B, 4, 84, 84]
        a, r, ended, gamma = action[batch], reward[batch], terminated[batch], discount[batch]  # [B]

        # cloned start, convolutions included: the critic then judges a policy that the data know
        if update <= 0:
            clone_optimizer.param_groups[0]["lr"] = args.policy_lr * (1 - update) / args.clone_updates
            clone_loss = F.cross_entropy(actor(critic.convolve(s)), a)
            clone_optimizer.zero_grad()
            clone_loss.backward()
            clone_optimizer.step()
            target_critic.cnn.load_state_dict(critic.cnn.state_dict())
            last_update, last_time = 0, time.time()  # cloning does not count
            continue

        left = 1 - (update - 1) / args.total_updates  # step sizes fall to 0: a settled last policy
        q_optimizer.param_groups[0]["lr"] = args.q_lr * left
        policy_optimizer.param_groups[0]["lr"] = args.policy_lr * left
        s_next = stack(frames, (number + steps)[batch], first[batch]).to(device)

        # compute target: V(s_next) for IQL, else the worst case over the target critic's set
        with torch.no_grad():
            if args.method == "iql":
                v_next = critic.value(critic.psi(critic.convolve(s_next)))[:, 0]  # [B]
                y = r + gamma * (1 - ended) * v_next  # no action but the data's is ever asked for
            else:
                x_next = target_critic.convolve(s_next)  # for policy and critic, [B, 3136]
                log_pi, w_log_b = log_policy(x_next, target_critic)  # [B, A]
                pi = log_pi.exp()
                q_star = worst_case(target_critic.heads(target_critic.psi(x_next)), pi)  # [B, A]
                y = robust_target(r, ended, pi, log_pi, q_star + w_log_b, alpha, gamma)  # [B]

        # critic update: mean over the batch, sum over the heads, and what a baseline learns besides
        x = critic.convolve(s)  # [B, 3136]
        psi = critic.psi(x)  # [B, H]
        output = critic.heads(psi)  # q [N, B, A], or mu [B, A] and sigma_bar [B, A, d_z]
        if star:
            q_losses = epinet_loss(*output, a, y, c[batch], args.noise_scale)  # [B]
        else:
            q_losses = critic_loss(output, a, y)  # [N, B]
        q_loss = q_losses.mean(-1).sum()
        besides = {}  # losses by name
        if args.method == "cql":
            q_a = output[:, torch.arange(len(a), device=device), a]  # Q_i(s, a), [N, B]
            penalty = output.logsumexp(-1) - q_a  # lowers actions that the data do not take, [N, B]
            besides["losses/cql_penalty"] = CQL_WEIGHT * penalty.mean(-1).sum()
        if args.method == "iql":
            with torch.no_grad():
                lower_q = target_critic(s).amin(0).gather(1, a[:, None])[:, 0]  # of Q(s, a), [B]
            error = lower_q - critic.value(psi)[:, 0]  # [B]
            weight = torch.where(error < 0, 1 - IQL_EXPECTILE, IQL_EXPECTILE)  # [B]
            besides["losses/value_loss"] = (weight * error.square()).mean()
        if args.method == "brac-bcq":
            logits = critic.behaviour(psi)  # cloned with a small penalty on the logits, [B, A]
            clone_loss = F.cross_entropy(logits, a)
            besides["losses/behaviour_loss"] = clone_loss + 0.01 * logits.square().mean()
        q_optimizer.zero_grad()
        (q_loss + sum(besides.values())).backward()
        q_optimizer.step()

        # actor update against the updated critic, on the convolutions that both have just read
        x = x.detach()
        log_pi, w_log_b = log_policy(x, critic)  # [B, A]
        pi = log_pi.exp()
        with torch.no_grad():
            psi = critic.psi(x)  # [B, H]
            output = critic.heads(psi)
            q_star = worst_case(output, pi)  # [B, A]
        if args.method == "iql":  # clone the data's actions, those better than V(s) more
            v = critic.value(psi)[:, 0].detach()  # [B]
            weight = (IQL_BETA * (lower_q - v)).exp().clamp(max=100)  # [B]
            pi_loss = -(weight * log_pi.gather(1, a[:, None])[:, 0]).mean()
        else:
            pi_loss = actor_loss(pi, log_pi, q_star + w_log_b, alpha).mean()
        if not baseline:  # which have regularisers of their own
            pi_loss = pi_loss + args.bc_coef * F.nll_loss(log_pi, a)
        if update > args.critic_warmup:
            policy_optimizer.zero_grad()
            pi_loss.backward()
            policy_optimizer.step()

        # update target critic
        with torch.no_grad():
            for p_target, p in zip(target_critic.parameters(), critic.parameters()):
                p_target.lerp_(p, args.polyak)

        # log, evaluate, checkpoint
        if update % args.eval_interval == 0 or update == args.total_updates:
            with torch.no_grad():
                if star:
                    mu, sigma_bar = output  # [B, A], [B, A, d_z]
                    std = sigma_bar.norm(dim=-1)  # over z, [B, A]
                else:
                    mu = output.mean(0)  # [B, A]
                    std = output.std(0, correction=0)  # [B, A]
                taken = F.one_hot(a, A).bool()  # [B, A]
                row = {
                    "losses/critic_loss": q_losses.mean(),
                    "losses/actor_loss": pi_loss,
                    "charts/policy_entropy": entropy(pi, log_pi).mean(),
                    "charts/q_gap": (pi * (mu - q_star)).sum(-1).mean(),
                    "charts/q_minus_return": (mu[taken] - returns[batch]).nanmean(),  # where known
                    "charts/q_star_minus_return": (q_star[taken] - returns[batch]).nanmean(),
                    "charts/std_data_actions": std[taken].mean(),
                    "charts/std_other_actions": std[~taken].mean(),
                }
            row = {name: value.item() for name, value in (row | besides).items()}
            row = {"update": update} | row
            row["charts/updates_per_second"] = (update - last_update) / (time.time() - last_time)
            if not math.isfinite(row["losses/critic_loss"] + row["losses/actor_loss"]):
                sys.exit(f"update {update}: the loss is not finite; try a smaller --q-lr.")
            episodes = math.ceil(args.eval_episodes / 4) if env else 0
            scores = play(act, env, episodes, 10**6 * (args.seed + 1), args.eval_epsilon)
            row["eval/return"] = scores.mean().item() if env else math.nan
            rows.append(row)
            table = [list(row.values()) for row in rows]
            np.savetxt(f"{folder}/metrics.csv", table, "%.10g", ",", header=",".join(row), comments="")
            if args.track:
                wandb.log(row, step=update)
            checkpoint = {name: part.state_dict() for name, part in parts.items()}
            checkpoint.update(generator=generator.get_state(), update=update, rows=rows)
            torch.save(checkpoint, f"{folder}/checkpoint.tmp")
            os.replace(f"{folder}/checkpoint.tmp", f"{folder}/checkpoint.pt")  # never half a file
            last_update, last_time = update, time.time()  # evaluations do not count
            bar.set_postfix_str(f"critic={q_losses.mean():.3g}, return={row['eval/return']:.1f}")

    # ----- final evaluation: the last policy, greedy, on fresh episodes
    if env and args.capture_video:
        env = gym.wrappers.RecordVideo(env, f"{folder}/video")
    first_seed = 10**6 * (args.seed + 1) + 10**5
    scores = play(act, env, args.eval_episodes if env else 0, first_seed, args.eval_epsilon)
    if env:
        env.close()
    with torch.no_grad():
        every = len(action) // 1000 + 1
        log_pi = act(stack(frames, number[::every], first[::every]))
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
