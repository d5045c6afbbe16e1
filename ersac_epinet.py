# docs: docs/ersac_epinet.md
"""ERSAC with one Epinet: Algorithm 4 of "Epistemic Robust Offline Reinforcement Learning".

One critic network carries a mean and, through an epistemic index z, its own uncertainty; the
ellipsoid over Q-vectors comes from them without an ensemble. The actor learns offline from the
worst case in that set; with own targets each z bootstraps from itself; in the paper all share the worst case:

    python ersac_epinet.py --env-id LunarLander-v3 --upsilon 0.9
"""

import copy
import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Literal

import gymnasium as gym
import minari
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from minari.storage import get_dataset_path
from scipy.stats import chi2
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__).removesuffix(".py")
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of networks, minibatches and evaluation"""
    torch_deterministic: bool = True
    """ask torch for deterministic algorithms"""
    cuda: bool = True
    """use a GPU if there is one; on a CPU one thread is used"""
    compile: bool = False
    """compile the networks: a slow start, and little gain on a CPU"""
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

    env_id: str = "LunarLander-v3"
    """environment of the default data set"""
    dataset_id: str | None = None
    """any Minari data set with vector observations and discrete actions, in place of the default"""
    dataset_size: int = 100_000
    """transitions of the default data set"""
    dataset_seed: int = 1
    """which draw of the default data set: other episodes of the same policy"""
    expectile_tau: float = 0.5
    """risk level of the data's policy: 0.1 seeks risk, 0.9 avoids it (IQL: the reverse)"""
    early_fraction: float = 0.0
    """share of the data from a policy stopped early in training (LunarLander, tau 0.5)"""
    return_scale: float | None = 10.0
    """scale rewards so that the data's discounted returns have this root mean square, or None"""
    normalize_obs: bool = True
    """shift and scale observations by the data's mean and standard deviation"""

    targets: Literal["own", "shared"] = "own"
    """own: every index z bootstraps from itself; shared: the paper's one robust target for all"""
    method: Literal["ell-epi-star", "ell-epi"] = "ell-epi-star"
    """ell-epi-star: the set in closed form; ell-epi: the set through sampled indices"""
    uncertainty_set: Literal["ellipsoid", "box"] = "ellipsoid"
    """shape of the set; the box is the ellipsoid's bounding box (ell-epi-star only)"""
    upsilon: float = 0.9
    """probability (ell-epi-star, below 1) or share of the samples (ell-epi) that the set covers"""
    index_dim: int = 16
    """d_z, the dimension of the index z"""
    num_index_samples: int = 100
    """N, the number of sampled z per update (ell-epi only)"""
    head_input: Literal["obs", "features"] = "obs"
    """what the stochastic heads read: the observation, or (the paper) the features of the mean"""
    input_scale: float = 3.0
    """factor on the observation before the heads (obs only): how fast the prior varies, and its size"""
    prior_scale: float = 3.0
    """factor on the frozen prior head, which is the uncertainty where there are no data"""
    noise_scale: float = 0.1
    """scale of the fixed noise <c, z> of a transition's target: a std of noise_scale / sqrt(visits)"""
    lambda_mu: float = 0.0
    """weight decay of the base network"""
    lambda_sigma: float = 0.0
    """weight decay of the learnable stochastic head"""
    layer_norm: bool = True
    """layer normalisation in the critic, which keeps values of unseen actions from running away"""

    total_updates: int = 10_000
    """updates of critic, actor and entropy coefficient"""
    batch_size: int = 256
    """transitions in a minibatch"""
    hidden_dim: int = 128
    """width of the two hidden layers"""
    gamma: float = 0.99
    """discount factor in [0, 1)"""
    q_lr: float = 5e-4
    """Adam step size of the critic"""
    policy_lr: float = 5e-4
    """Adam step size of the actor and of the entropy coefficient"""
    anneal_lr: bool = True
    """let all step sizes fall linearly to 0, so that the last policy is a settled one"""
    polyak: float = 0.05
    """rate at which the target critic follows the critic"""
    alpha: float = 0.003
    """entropy coefficient, or its first value with --autotune"""
    autotune: bool = False
    """learn the entropy coefficient so that the policy's entropy meets the target"""
    target_entropy: float = 0.3
    """target of --autotune as a share of log |A|"""

    eval_interval: int = 1000
    """updates between two rows of metrics.csv, each with an evaluation and a checkpoint"""
    eval_episodes: int = 100
    """episodes of the final evaluation; a tenth of them in between"""
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


# ===== The data: a Minari data set as tensors, and the environment to evaluate in
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


def find_dataset(args):
    """A missing data set of ours is made by gen_expectile_data.py, any other is downloaded."""
    wanted = ("env_id", "expectile_tau", "dataset_size", "early_fraction", "dataset_seed")
    wanted = {name: getattr(args, name) for name in wanted}
    dataset_id = args.dataset_id or dataset_name(**wanted)
    if not args.dataset_id and not get_dataset_path(dataset_id).exists():
        print(f"{dataset_id} is not on this machine; gen_expectile_data.py makes it.", flush=True)
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gen_expectile_data.py")
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in wanted.items()]
        if subprocess.run([sys.executable, script, *flags]).returncode != 0:
            sys.exit(f"{dataset_id} could not be made; the lines above say why.")
    return open_dataset(dataset_id)


def vector_space(dataset):
    """What of an observation Gymnasium flattens to a vector: all but text."""
    name = dataset.spec.dataset_id
    space = dataset.spec.observation_space
    if isinstance(space, gym.spaces.Dict):
        parts = {key: part for key, part in space.items() if not isinstance(part, gym.spaces.Text)}
        space = gym.spaces.Dict(parts)
    text = isinstance(space, gym.spaces.Text)
    if text or not space.is_np_flattenable or not 0 < gym.spaces.flatdim(space) < 5000:
        sys.exit(f"{name} has {space} observations, not vectors (ersac_atari.py reads images).")
    return space


def load_transitions(dataset, gamma):
    """obs, action, reward, next_obs, terminated as tensors, and the discounted return that followed
    (NaN, unknown, if the episode was cut before its end)."""
    name = dataset.spec.dataset_id
    actions = dataset.spec.action_space
    if not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        sys.exit(f"{name} has {actions} actions; this script needs discrete actions from 0 on.")
    space = vector_space(dataset)
    if space != dataset.spec.observation_space:
        print(f"{name}: the text in its observations is left out.")
    batch = gym.vector.utils.batch_space(space)
    columns = []
    try:
        for episode in dataset.iterate_episodes():
            return_to_go = 0.0 if episode.terminations[-1] else math.nan
            returns = []
            for reward in episode.rewards[::-1]:
                return_to_go = reward + gamma * return_to_go
                returns.append(return_to_go)
            steps = gym.vector.utils.iterate(batch, episode.observations)
            obs = np.array([gym.spaces.flatten(space, x) for x in steps], np.float32)  # [T + 1, D]
            column = (obs[:-1], episode.actions, episode.rewards, obs[1:], episode.terminations)
            columns.append((*column, returns[::-1]))
        tensors = [torch.as_tensor(np.concatenate(x)) for x in zip(*columns)]
        obs, action, reward, next_obs, terminated, returns = tensors
    except Exception as error:
        sys.exit(f"{name}: cannot be read ({error}); `minari delete {name}`, try again.")
    if not len(obs) == len(action) == len(reward):
        sys.exit(f"{name}: an episode needs T + 1 observations, T actions and T rewards.")
    if not (obs.isfinite().all() and next_obs.isfinite().all() and reward.isfinite().all()):
        sys.exit(f"{name} holds observations or rewards that are not finite.")
    return obs, action.long(), reward.float(), next_obs, terminated.float(), returns.float()


def make_eval_env(dataset, video_folder=None):
    """The data set's environment for evaluation, observed as vectors; None if there is none."""
    space = vector_space(dataset)

    def flatten(obs):
        return gym.spaces.flatten(space, obs)

    mode = {"render_mode": "rgb_array"} if video_folder else {}
    try:
        env = dataset.recover_environment(eval_env=True, **mode)
    except Exception as error:
        name = dataset.spec.dataset_id
        print(f"{name}: no environment, so the policy is not evaluated ({error}).")
        return None
    if env.spec.max_episode_steps is None:  # a policy that never ends an episode must not hang us
        env = gym.wrappers.TimeLimit(env, 10_000)
    if video_folder:
        env = gym.wrappers.RecordVideo(env, video_folder, lambda episode: episode == 0)
    return gym.wrappers.TransformObservation(env, flatten, gym.spaces.flatten_space(space))


# ===== Critic: one network with a mean and a stochastic head
class EpinetCritic(nn.Module):
    """q(s, a, z) = mu(s, a) + <sigma_L(x, a) + prior_scale sigma_P(x, a), z>, sigma_P frozen. The heads
    read x, the scaled observation or (the paper) the features of mu, into which they send no gradient.
    forward(obs [B, D]) -> mu [B, A], sigma_bar [B, A, d_z]; sample(obs, z [N, d_z]) -> [N, B, A]"""

    def __init__(
        self,
        obs_dim,
        num_actions,
        index_dim,
        hidden_dim,
        prior_scale=0.3,
        layer_norm=True,
        head_input="features",
        input_scale=3.0,
    ):
        super().__init__()
        self.shape = (num_actions, index_dim)
        self.prior_scale = prior_scale
        self.head_input = head_input
        self.input_scale = input_scale
        norm = nn.LayerNorm if layer_norm else nn.Identity
        layers = [nn.Linear(obs_dim, hidden_dim), norm(hidden_dim), nn.ReLU()]
        layers += [nn.Linear(hidden_dim, hidden_dim), norm(hidden_dim), nn.ReLU()]
        self.base = nn.Sequential(*layers)
        self.mean = nn.Linear(hidden_dim, num_actions)
        sizes = [hidden_dim, 50] if head_input == "features" else [obs_dim, 2 * hidden_dim, 2 * hidden_dim]
        self.learnable = self.make_head(sizes)
        self.prior = self.make_head(sizes).requires_grad_(False)
        if head_input == "obs":  # He initialisation: |sigma_P| is about the size of x
            for layer in self.prior[::2]:
                nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.in_features))
                nn.init.normal_(layer.bias, std=0.3)
            self.prior[-1].weight.mul_(math.sqrt(1 / (2 * index_dim)))  # the same size for every d_z
            self.prior[-1].bias.zero_()

    def make_head(self, sizes):
        layers = []
        for fan_in, fan_out in zip(sizes, sizes[1:]):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], math.prod(self.shape)))

    def forward(self, obs, prior=None):
        """prior: sigma_P of these observations, unscaled, if computed before"""
        psi = self.base(obs)  # [B, H]
        x = self.input_scale * obs if self.head_input == "obs" else psi.detach()  # [B, X]
        if prior is None:
            prior = self.prior(x)  # [B, A d_z]
        sigma_bar = self.learnable(x) + self.prior_scale * prior  # [B, A d_z]
        return self.mean(psi), sigma_bar.unflatten(-1, self.shape)  # [B, A], [B, A, d_z]

    def sample(self, obs, z, prior=None):
        mu, sigma_bar = self(obs, prior)  # [B, A], [B, A, d_z]
        return mu + torch.einsum("bad,nd->nba", sigma_bar, z)  # [N, B, A]


def epinet_loss(mu, sigma_bar, action, target, c, noise_scale, spread=0.0):
    """E_z (q(s, a, z) - y - <spread + noise_scale c, z>)^2 for z ~ N(0, I), in closed form:
    (mu_a - y)^2 + |sigma_bar_a - spread - noise_scale c|^2, [B]"""
    batch = torch.arange(len(action), device=mu.device)
    error = mu[batch, action] - target  # [B]
    deviation = sigma_bar[batch, action] - spread - noise_scale * c  # [B, d_z]
    return error.square() + deviation.square().sum(-1)


# ===== The uncertainty set: q holds N sampled Q-vectors per state, [N, B, A]; pi is [B, A]
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


def worst_case_gaussian_box(mu, sigma_bar, pi, radius):
    """The bounding box of that ellipsoid: every action as low as it gets, whatever the policy. [B, A]"""
    return mu - radius * sigma_bar.norm(dim=-1)


# ===== Actor, target and losses
class Actor(nn.Module):
    """Policy network. forward(obs [B, D]) -> logits [B, A]"""

    def __init__(self, obs_dim, num_actions, hidden_dim):
        super().__init__()
        hidden = [nn.Linear(obs_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim), nn.ReLU()]
        self.net = nn.Sequential(*hidden, nn.Linear(hidden_dim, num_actions))

    def forward(self, obs):
        return self.net(obs)


def entropy(pi, log_pi):
    """H(pi) = -<pi, log pi>, with 0 log 0 = 0. [B]"""
    return -(pi * log_pi.clamp(min=torch.finfo(pi.dtype).min)).sum(-1)


def robust_target(reward, terminated, pi, log_pi, q_star, alpha, gamma):
    """y = r + gamma (1 - terminated)(<pi, q*> + alpha H(pi)), pi and q* at the next state, [B]. With
    q [N, B, A] in place of q* every sample bootstraps from itself, [N, B]."""
    v = (pi * q_star).sum(-1) + alpha * entropy(pi, log_pi)
    return reward + gamma * (1 - terminated) * v


def propagated_spread(terminated, pi, sigma_bar, gamma):
    """What the next state's spread adds to an index's own target: y(z) = y + <spread, z>. [B, d_z]"""
    return gamma * (1 - terminated)[:, None] * torch.einsum("ba,bad->bd", pi, sigma_bar)


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
        done = False
        while not done:
            obs = (torch.as_tensor(obs, dtype=torch.float32, device=mean.device) - mean) / std
            obs, reward, terminated, truncated, _ = env.step(int(actor(obs).argmax()))
            returns[episode] += reward
            done = terminated or truncated
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
    # a W&B sweep writes --layer-norm=False, tyro reads --no-layer-norm
    words = [re.sub("^--(.*)=False$", r"--no-\1", word) for word in sys.argv[1:]]
    args = tyro.cli(Args, args=[word.removesuffix("=True") for word in words], description=__doc__)
    checkpoint = None
    if args.resume:
        checkpoint, args = load_checkpoint(args, script)
    star = args.method == "ell-epi-star"

    # ----- check the arguments
    if min(args.total_updates, args.eval_interval, args.eval_episodes) < 1:
        sys.exit("--total-updates, --eval-interval, --eval-episodes: each at least 1.")
    if not 0 < args.upsilon <= 1:
        sys.exit(f"--upsilon {args.upsilon}: it must be above 0 and at most 1.")
    if star and args.upsilon == 1:
        sys.exit("--upsilon 1: the closed form's set would be infinite; choose a value below 1.")
    if args.uncertainty_set == "box" and not star:
        sys.exit("--uncertainty-set box: it has a closed form only; use --method ell-epi-star.")
    if not 0 <= args.gamma < 1:
        sys.exit(f"--gamma {args.gamma}: it must be at least 0 and below 1.")
    if args.autotune and args.alpha <= 0:
        sys.exit(f"--alpha {args.alpha}: with --autotune it must be above 0.")
    if not args.dataset_id and args.env_id not in gym.registry:
        sys.exit(f"--env-id {args.env_id}: Gymnasium knows no such environment.")
    if checkpoint and args.total_updates < checkpoint["update"]:
        sys.exit(f"--total-updates {args.total_updates}: the run has done {checkpoint['update']}.")
    if checkpoint and args.anneal_lr and args.total_updates > checkpoint["args"]["total_updates"]:
        left = 1 - checkpoint["update"] / args.total_updates
        print(f"Extended: the step sizes start again at {left:.0%} of their first values and fall to 0.")

    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # the networks are too small to share
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(args.torch_deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time; nothing here reads it
    generator = torch.Generator().manual_seed(args.seed)  # minibatches and indices

    # ----- data, normalised by their own statistics
    dataset = find_dataset(args)
    tensors = load_transitions(dataset, args.gamma)
    fingerprint = [len(tensors[0]), *(x.double().sum().item() for x in tensors[:5])]  # of the data
    obs, action, reward, next_obs, terminated, returns = (x.to(device) for x in tensors)
    D = obs.shape[1]
    A = int(dataset.spec.action_space.n)
    dataset_id = dataset.spec.dataset_id
    if args.dataset_id:
        args.env_id = dataset.spec.env_spec.id if dataset.spec.env_spec else None
    obs_mean = torch.zeros_like(obs[0])
    obs_std = torch.ones_like(obs[0])
    if args.normalize_obs:
        obs_mean = obs.mean(0)
        obs_std = obs.std(0, correction=0).clamp(min=1e-3)
    obs = (obs - obs_mean) / obs_std
    next_obs = (next_obs - obs_mean) / obs_std
    reward_scale = 1.0
    if args.return_scale:
        seen = returns[returns.isfinite()]
        if len(seen) == 0:  # no episode ended: assume that each reward repeats forever
            seen = reward / (1 - args.gamma)
        reward_scale = args.return_scale / max(seen.square().mean().sqrt().item(), 1e-8)
    reward = reward * reward_scale
    returns = returns * reward_scale
    # a fixed direction per transition, drawn right after the seed: a resumed run draws the same
    c = F.normalize(torch.randn(len(obs), args.index_dim), dim=-1).to(device)  # [|D|, d_z]

    # ----- networks: critic, target critic, actor, entropy coefficient
    shape = (D, A, args.index_dim, args.hidden_dim)
    heads = (args.head_input, args.input_scale)
    critic = EpinetCritic(*shape, args.prior_scale, args.layer_norm, *heads).to(device)
    target_critic = copy.deepcopy(critic).requires_grad_(False)
    actor = Actor(D, A, args.hidden_dim).to(device)
    log_alpha = torch.tensor(math.log(max(args.alpha, 1e-30)), device=device)
    log_alpha.requires_grad_(args.autotune)
    mean = [*critic.base.parameters(), *critic.mean.parameters()]
    base = {"params": mean, "weight_decay": 2 * args.lambda_mu}  # the gradient of lambda |theta|^2
    head = {"params": [*critic.learnable.parameters()], "weight_decay": 2 * args.lambda_sigma}
    q_optimizer = torch.optim.Adam([base, head], args.q_lr, fused=True)
    learned = [*actor.parameters(), log_alpha]
    policy_optimizer = torch.optim.Adam(learned, args.policy_lr, fused=True)
    radius = math.sqrt(chi2.ppf(args.upsilon, A)) if star else None

    def worst_case(network, obs, pi, z, prior):
        """q* of the chosen set. [B, A]"""
        if not star:
            return worst_case_ellipsoid(network.sample(obs, z, prior), pi, args.upsilon)
        mu, sigma_bar = network(obs, prior)  # [B, A], [B, A, d_z]
        if args.uncertainty_set == "box":
            return worst_case_gaussian_box(mu, sigma_bar, pi, radius)
        return worst_case_gaussian(mu, sigma_bar, pi, radius)

    if args.compile:
        critic.compile()
        target_critic.compile()
        actor.compile()

    # ----- run folder: new, or as the checkpoint left it
    method = "ERSAC-Box-Epi*" if args.uncertainty_set == "box" else "ERSAC-Ell-Epi*"
    if not star:
        method = "ERSAC-Ell-Epi"
    if args.targets == "own":
        method += "-own"
    label = method.removeprefix("ERSAC-")  # as the docs write it
    parts = {
        "critic": critic,
        "target": target_critic,
        "actor": actor,
        "q_optimizer": q_optimizer,
        "policy_optimizer": policy_optimizer,
    }

    def save(update):
        state = {name: part.state_dict() for name, part in parts.items()} | {
            "log_alpha": log_alpha.detach(),
            "generator": generator.get_state(),
            "update": update,
            "rows": rows,
            "run_name": run_name,
            "script": script,
            "args": asdict(replace(args, resume=None)),
            "obs_mean": obs_mean,
            "obs_std": obs_std,
            "num_actions": A,
            "reward_scale": reward_scale,
            "data": fingerprint,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_file(folder, "checkpoint.pt", buffer.getvalue())

    start = 0
    rows = []
    if checkpoint:
        folder = os.path.normpath(args.resume)
        if fingerprint != checkpoint["data"]:
            sys.exit(f"{folder}: {dataset_id} has changed since; start a new run.")
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        log_alpha.data.copy_(checkpoint["log_alpha"])
        generator.set_state(checkpoint["generator"])
        start = checkpoint["update"]
        rows = checkpoint["rows"]
        run_name = checkpoint["run_name"]
    else:
        name = (args.env_id or dataset_id).split("/")[-1]
        run_name = f"{name}__{args.exp_name}__{args.seed}__{int(1000 * time.time())}"
        folder = os.path.join(args.output_dir, run_name)
        if os.path.exists(folder):
            sys.exit(f"{folder} exists; choose another --exp-name.")
        write_file(folder, "args.json", json.dumps(asdict(args), indent=2).encode())
        save(0)

    track = start_tracking(args, run_name, dataset_id, label, script)
    for row in rows:
        if track and row["update"] >= track.step:  # what a killed run had not yet sent
            track.log(row, step=row["update"])
    env = make_eval_env(dataset)

    # with --head-input obs the prior is a fixed function of the state: evaluated once on all data
    prior = prior_next = None
    if args.head_input == "obs":
        all_prior = torch.cat([critic.prior(args.input_scale * x) for x in obs.split(1000)])
        all_prior_next = torch.cat([critic.prior(args.input_scale * x) for x in next_obs.split(1000)])

    # ----- training
    tick, tick_update = time.time(), start
    updates = range(start + 1, args.total_updates + 1)
    bar = tqdm(updates, method, args.total_updates, initial=start, unit="update", mininterval=1)
    for update in bar:
        if args.anneal_lr:
            left = 1 - (update - 1) / args.total_updates
            for group in q_optimizer.param_groups:
                group["lr"] = args.q_lr * left
            policy_optimizer.param_groups[0]["lr"] = args.policy_lr * left
        batch = torch.randint(len(obs), (args.batch_size,), generator=generator).to(device)
        s, a, r = obs[batch], action[batch], reward[batch]  # [B, D], [B], [B]
        s_next, ended = next_obs[batch], terminated[batch]  # [B, D], [B]; truncated steps do not end
        alpha = log_alpha.detach().exp()
        if args.head_input == "obs":
            prior, prior_next = all_prior[batch], all_prior_next[batch]  # [B, A d_z]
        z = None
        if not star:  # the same z in target, loss and actor
            z = torch.randn(args.num_index_samples, args.index_dim, generator=generator).to(device)

        # compute target: every index its own, or the worst case over the target critic's set
        with torch.no_grad():
            log_pi = actor(s_next).log_softmax(-1)  # [B, A]
            pi = log_pi.exp()
            spread = 0.0
            if args.targets == "shared":
                q_next = worst_case(target_critic, s_next, pi, z, prior_next)  # q*, [B, A]
            elif star:
                q_next, sigma_bar = target_critic(s_next, prior_next)  # mu, [B, A], and [B, A, d_z]
                spread = propagated_spread(ended, pi, sigma_bar, args.gamma)  # [B, d_z]
            else:
                q_next = target_critic.sample(s_next, z, prior_next)  # [N, B, A]
            y = robust_target(r, ended, pi, log_pi, q_next, alpha, args.gamma)  # [B], or [N, B]

        # critic update: the expectation over z in closed form, or over the samples
        if star:
            mu, sigma_bar = critic(s, prior)  # [B, A], [B, A, d_z]
            q_loss = epinet_loss(mu, sigma_bar, a, y, c[batch], args.noise_scale, spread).mean()
        else:
            q = critic.sample(s, z, prior)[:, torch.arange(len(a), device=device), a]  # [N, B]
            noise = args.noise_scale * (z @ c[batch].T)  # noise_scale <c, z>, [N, B]
            q_loss = (q - y - noise).square().mean()
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()

        # actor update against the worst case of the updated critic, and entropy coefficient
        log_pi = actor(s).log_softmax(-1)  # [B, A]
        pi = log_pi.exp()
        with torch.no_grad():
            q_star = worst_case(critic, s, pi, z, prior)  # [B, A]
        pi_loss = actor_loss(pi, log_pi, q_star, alpha).mean()
        h = entropy(pi, log_pi).detach().mean()
        policy_optimizer.zero_grad()
        pi_loss.backward()
        if args.autotune:
            (log_alpha.exp() * (h - args.target_entropy * math.log(A))).backward()
        policy_optimizer.step()

        # update target critic
        with torch.no_grad():  # otherwise autograd would record every update
            for p_target, p in zip(target_critic.parameters(), critic.parameters()):
                p_target.lerp_(p, args.polyak)

        if not (q_loss + pi_loss).isfinite():
            sys.exit(f"update {update}: loss not finite; try a smaller --q-lr or --return-scale.")

        # log, evaluate, checkpoint
        if update % args.eval_interval == 0 or update == args.total_updates:
            with torch.no_grad():
                same = torch.Generator().manual_seed(0)  # the same indices in every row
                probe = torch.randn(1000, args.index_dim, generator=same).to(device)
                q = critic.sample(s, probe)  # [1000, B, A]
                mu = critic(s)[0] if star else q.mean(0)  # [B, A]
                taken = F.one_hot(a, A).bool()  # [B, A]
                row = {
                    "losses/critic_loss": q_loss,
                    "losses/actor_loss": pi_loss,
                    "charts/alpha": alpha,
                    "charts/policy_entropy": h,
                    "charts/q_robust": (pi * q_star).sum(-1).mean(),
                    "charts/q_gap": (pi * (mu - q_star)).sum(-1).mean(),
                    "charts/q_data_actions": mu[taken].mean(),
                    "charts/q_minus_return": (mu[taken] - returns[batch]).nanmean(),  # where known
                    "charts/q_star_minus_return": (q_star[taken] - returns[batch]).nanmean(),
                    "charts/std_data_actions": q.std(0)[taken].mean(),
                    "charts/std_other_actions": q.std(0)[~taken].mean(),
                }
            row = {"update": update} | {name: value.item() for name, value in row.items()}
            row["charts/updates_per_second"] = (update - tick_update) / (time.time() - tick)
            row["eval/return"] = math.nan
            if env:
                few = max(args.eval_episodes // 10, 1)
                scores = evaluate(actor, env, few, 10**6 * (args.seed + 1), obs_mean, obs_std)
                row["eval/return"] = scores.mean().item()
            rows.append(row)
            write_metrics(folder, rows)
            save(update)
            if track:
                track.log(row, step=update)
            bar.set_postfix_str(f"critic={q_loss:.3g}, return={row['eval/return']:.1f}")
            tick, tick_update = time.time(), update
    bar.close()

    # ----- final evaluation: the last policy, on fresh episodes
    scores = np.zeros(0)
    if env and args.capture_video:
        env = make_eval_env(dataset, os.path.join(folder, "video"))
    if env:
        first_seed = 10**6 * (args.seed + 1) + 10**5
        scores = evaluate(actor, env, args.eval_episodes, first_seed, obs_mean, obs_std)
        env.close()
    with torch.no_grad():
        log_pi = actor(obs[:10_000]).log_softmax(-1)
    low = dataset.storage.metadata.get("ref_min_score")
    high = dataset.storage.metadata.get("ref_max_score")
    normalized = None
    if env and low is not None and high is not None:
        normalized = 100 * (scores.mean() - low) / (high - low)
    result = {
        "script": script,
        "method": method,
        "label": label,
        "env_id": args.env_id,
        "dataset_id": dataset_id,
        "seed": args.seed,
        "updates": args.total_updates,
        "updates_per_second": np.mean([row["charts/updates_per_second"] for row in rows]),
        "eval_episodes": len(scores),
        "eval_return_mean": scores.mean() if env else None,
        "eval_return_std": scores.std() if env else None,
        "eval_returns": scores.tolist(),
        "random_return": low,
        "reference_return": high,
        "normalized_return": normalized,
        "policy_entropy": entropy(log_pi.exp(), log_pi).mean().item(),
    }
    write_file(folder, "result.json", json.dumps(result, indent=2).encode())
    if track:
        track.summary.update(result)
        if env and args.capture_video:
            import wandb

            film = os.path.join(folder, "video", "rl-video-episode-0.mp4")
            track.log({"video": wandb.Video(film, format="mp4")})
        track.finish()
    played = f"return {scores.mean():.1f} over {len(scores)} episodes" if env else "not evaluated"
    print(f"{script}, {label} on {dataset_id}: {played}")
    if normalized is not None:
        scale = f"0 is a return of {low:.1f}, 100 is {high:.1f}: the data set's reference scores"
        print(f"normalized return {normalized:.1f} ({scale})")
    gap = rows[-1]["charts/q_star_minus_return"]
    if args.return_scale and gap > 1.5 * args.return_scale:  # above every good run of our grid
        print(f"warning: even the worst case is far above the returns (q_star_minus_return {gap:.1f}):")
        print("the critic is optimistic on its own data, and the policy is likely to be poor.")
    print(f"run folder: {folder}")
