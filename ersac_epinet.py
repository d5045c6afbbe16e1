# docs: docs/ersac_epinet.md
"""ERSAC with one Epinet: Algorithm 4 of "Epistemic Robust Offline Reinforcement Learning", closed form and sampled.

One critic network carries a mean and, through an epistemic index z, its own uncertainty; the ellipsoid over Q-vectors
comes from them without an ensemble. Critic and actor learn offline from the worst case in that set. One run:

    python ersac_epinet.py --env-id LunarLander-v3 --upsilon 0.9
"""

import copy
import csv
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import gymnasium as gym
import minari
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from scipy.stats import chi2
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = "ersac_epinet"
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

    env_id: str = "LunarLander-v3"
    """environment whose default data set is used, unless --dataset-id names another one"""
    dataset_id: str | None = None
    """any Minari data set with vector observations and discrete actions; None is ersac/{env}/tau{NN}-{size}-v0"""
    dataset_size: int = 100_000
    """transitions of the default data set"""
    expectile_tau: float = 0.5
    """risk level of the default data set's behaviour policy: 0.1 seeks risk, 0.5 is neutral, 0.9 avoids it"""
    return_scale: float | None = 10.0
    """rewards are scaled so that the data's discounted returns have this root mean square; None leaves them alone"""
    normalize_obs: bool = True
    """shift and scale observations by the data's mean and standard deviation"""

    method: Literal["ell-epi-star", "ell-epi"] = "ell-epi-star"
    """ell-epi-star: mean and covariance in closed form, no sampling; ell-epi: the ellipsoid through sampled indices"""
    upsilon: float = 0.9
    """probability (ell-epi-star, below 1) or share of the samples (ell-epi, up to 1) that the ellipsoid covers"""
    index_dim: int = 16
    """d_z, the dimension of the index z; below the number of actions the covariance is singular, which works"""
    num_index_samples: int = 100
    """N, the indices drawn for the sampled set and loss of ell-epi"""
    head: Literal["linear", "mlp"] = "linear"
    """stochastic head: linear in z (the paper's assumption), or an MLP that also takes z as input (ell-epi only)"""
    prior_scale: float = 0.3
    """size of the frozen prior head, the uncertainty where there are no data"""
    noise_scale: float = 0.01
    """size of the noise that every transition adds to its target along its own direction c (not the head sigma_bar)"""
    lambda_mu: float = 0.0
    """weight decay of the base network"""
    lambda_sigma: float = 0.0
    """weight decay of the learnable stochastic head"""
    layer_norm: bool = True
    """layer normalisation in the critic, which keeps values of unseen actions from running away"""

    total_updates: int = 20_000
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
    """updates between two rows of metrics.csv, each with an evaluation"""
    eval_episodes: int = 100
    """episodes of the final evaluation; a tenth of them in between"""
    checkpoint_interval: int = 1000
    """updates between two checkpoints"""
    resume: str | None = None
    """run folder to continue; all other arguments come from there"""
    eval_only: bool = False
    """with --resume: evaluate the checkpoint's policy, print the result, write nothing"""


# ===== The data: a Minari data set as tensors, and the environment to evaluate in
def dataset_name(env_id, expectile_tau, dataset_size):
    """Name of our own data sets, such as ersac/lunarlander/tau90-10k-v0. Minari allows no dots."""
    env = re.sub(r"-v\d+$", "", env_id.split("/")[-1]).lower()
    tau = f"{100 * expectile_tau:.7g}".zfill(2).replace(".", "p")  # 0.05 -> 05, 0.125 -> 12p5
    size = f"{dataset_size // 1000}k" if dataset_size % 1000 == 0 else dataset_size
    return f"ersac/{env}/tau{tau}-{size}-v0"


def find_dataset(args):
    """The data set to learn from. A missing one of ours is made by gen_expectile_data.py, any other is downloaded."""
    dataset_id = args.dataset_id or dataset_name(args.env_id, args.expectile_tau, args.dataset_size)
    if dataset_id not in minari.list_local_datasets():
        if args.dataset_id:
            print(f"{dataset_id} is not on this machine; downloading it.")
            try:
                minari.download_dataset(dataset_id)
            except Exception as error:
                sys.exit(f"--dataset-id {dataset_id}: not here, and no download ({error}); see `minari list remote`.")
        else:
            print(f"{dataset_id} is not on this machine; gen_expectile_data.py makes it.")
            script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gen_expectile_data.py")
            command = [sys.executable, script, "--env-id", args.env_id, "--expectile-tau", str(args.expectile_tau)]
            if subprocess.run([*command, "--dataset-size", str(args.dataset_size)]).returncode:
                sys.exit(f"{dataset_id} could not be made; the lines above say why.")
    try:
        return minari.load_dataset(dataset_id)
    except Exception as error:
        sys.exit(f"{dataset_id}: cannot be read ({error}); delete it with `minari delete {dataset_id}` and try again.")


def load_transitions(dataset, gamma):
    """obs, action, reward, next_obs, terminated as tensors, and the discounted return that followed (NaN if the episode
    was cut before its end, so that nobody knows)."""
    name, space = dataset.spec.dataset_id, dataset.spec.observation_space
    if not isinstance(dataset.spec.action_space, gym.spaces.Discrete):
        sys.exit(f"{name} has {dataset.spec.action_space} actions; this script needs a data set with discrete actions.")
    if dataset.spec.action_space.start != 0 or dataset.spec.env_spec is None:
        sys.exit(f"{name} counts its actions from another number than 0, or names no environment to evaluate in.")
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        sys.exit(f"{name} has {space} observations; this script needs vectors (ersac_atari.py takes images).")
    try:
        episodes, columns = list(dataset.iterate_episodes()), []
    except Exception as error:
        sys.exit(f"{name}: cannot be read ({error}); delete it with `minari delete {name}` and try again.")
    for episode in episodes:
        follow, returns = 0.0 if episode.terminations[-1] else math.nan, []
        for reward in episode.rewards[::-1]:
            follow = reward + gamma * follow
            returns.append(follow)
        obs = np.asarray(episode.observations, np.float32)
        if not len(obs) - 1 == len(episode.actions) == len(episode.rewards):
            sys.exit(f"{name}: episode {episode.id} lacks an observation or an action; it needs T + 1 and T of them.")
        columns.append((obs[:-1], episode.actions, episode.rewards, obs[1:], episode.terminations, returns[::-1]))
    obs, action, reward, next_obs, terminated, returns = (torch.as_tensor(np.concatenate(x)) for x in zip(*columns))
    if not (obs.isfinite().all() and next_obs.isfinite().all() and reward.isfinite().all()):
        sys.exit(f"{name} holds observations or rewards that are not finite; repair the data set or choose another.")
    return obs, action.long(), reward.float(), next_obs, terminated.float(), returns.float()


def make_eval_env(dataset, env_id, video_folder=None):
    """One plain environment: that of our data set's --env-id, or the one that a foreign data set recovers."""
    mode = {"render_mode": "rgb_array"} if video_folder else {}
    env = gym.make(env_id, **mode) if env_id else dataset.recover_environment(eval_env=True, **mode)
    if env.spec.max_episode_steps is None:  # a policy that never ends an episode must not hang the evaluation
        env = gym.wrappers.TimeLimit(env, 10_000)
    return gym.wrappers.RecordVideo(env, video_folder, lambda episode: episode == 0) if video_folder else env


# ===== Critic: one network with a mean and a stochastic head
class EpinetCritic(nn.Module):
    """q(s, a, z) = mu(s, a) + <sigma_L(psi, a) + prior_scale sigma_P(psi, a), z>, no gradient from sigma into psi(s).
    forward(obs [B, D]) -> mu [B, A], sigma_bar [B, A, d_z]; sample(obs, z [N, d_z]) -> [N, B, A]"""

    def __init__(self, obs_dim, num_actions, index_dim, hidden_dim, prior_scale=0.3, layer_norm=True, head="linear"):
        super().__init__()
        norm = (lambda: nn.LayerNorm(hidden_dim)) if layer_norm else nn.Identity
        self.base = nn.Sequential(
            *(nn.Linear(obs_dim, hidden_dim), norm(), nn.ReLU()),
            *(nn.Linear(hidden_dim, hidden_dim), norm(), nn.ReLU()),
        )
        self.mean = nn.Linear(hidden_dim, num_actions)
        self.shape, self.prior_scale, self.head = (num_actions, index_dim), prior_scale, head
        inputs = hidden_dim + (index_dim if head == "mlp" else 0)
        self.learnable, self.prior = (
            nn.Sequential(nn.Linear(inputs, 50), nn.ReLU(), nn.Linear(50, num_actions * index_dim)) for _ in range(2)
        )
        self.prior.requires_grad_(False)

    def stochastic(self, features):
        """sigma_L + prior_scale sigma_P, [..., A, d_z]"""
        return (self.learnable(features) + self.prior_scale * self.prior(features)).unflatten(-1, self.shape)

    def forward(self, obs):
        psi = self.base(obs)  # [B, H]
        return self.mean(psi), self.stochastic(psi.detach())  # [B, A], [B, A, d_z]

    def sample(self, obs, z):
        psi = self.base(obs)
        if self.head == "linear":
            return self.mean(psi) + torch.einsum("bad,nd->nba", self.stochastic(psi.detach()), z)  # [N, B, A]
        inputs = torch.cat([psi.detach().expand(len(z), -1, -1), z[:, None].expand(-1, len(psi), -1)], -1)
        return self.mean(psi) + torch.einsum("nbad,nd->nba", self.stochastic(inputs), z)


def epinet_loss(mu, sigma_bar, action, target, c, noise_scale):
    """E_z (q(s, a, z) - y - noise_scale <c, z>)^2 for z ~ N(0, I), in closed form:
    (mu_a - y)^2 + |sigma_bar_a - noise_scale c|^2, [B]"""
    rows = torch.arange(len(action), device=mu.device)
    return (mu[rows, action] - target).square() + (sigma_bar[rows, action] - noise_scale * c).square().sum(-1)


# ===== The uncertainty set: q holds N sampled action values per state, [N, B, A]; pi is the policy, [B, A]
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


# ===== Actor, target and losses
class Actor(nn.Module):
    """Policy network. forward(obs [B, D]) -> logits [B, A]"""

    def __init__(self, obs_dim, num_actions, hidden_dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs_dim, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, num_actions),
        )

    def forward(self, obs):
        return self.net(obs)


def entropy(pi, log_pi):
    """H(pi) = -<pi, log pi>, with 0 log 0 = 0. [B]"""
    return -(pi * log_pi.clamp(min=torch.finfo(pi.dtype).min)).sum(-1)


def robust_target(reward, terminated, pi, log_pi, q_star, alpha, gamma):
    """y = r + gamma (1 - terminated)(<pi, q*> + alpha H(pi)), pi and q* at the next state (robust target). [B]"""
    return reward + gamma * (1 - terminated) * ((pi * q_star).sum(-1) + alpha * entropy(pi, log_pi))


def actor_loss(pi, log_pi, q_star, alpha):
    """-(<pi, q*> + alpha H(pi)); q* held fixed, which is the exact gradient by the envelope theorem. [B]"""
    return -((pi * q_star.detach()).sum(-1) + alpha * entropy(pi, log_pi))


# ===== Evaluation, logging, checkpoints
@torch.no_grad()
def evaluate(actor, env, episodes, seed, mean, std):
    """Undiscounted returns of the greedy policy, [episodes]."""
    returns, device = np.zeros(episodes), mean.device
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        done = False
        while not done:
            obs = (torch.as_tensor(obs, dtype=torch.float32, device=device) - mean) / std
            obs, reward, terminated, truncated, _ = env.step(int(actor(obs).argmax()))
            returns[episode] += reward
            done = terminated or truncated
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
    checkpoint = load_checkpoint(args.resume, "ersac_epinet.py") if args.resume else None
    if checkpoint:
        args = resumed_args(args, checkpoint["args"])
    star = args.method == "ell-epi-star"
    for names, ok, rule in (
        ("dataset_size index_dim num_index_samples total_updates", lambda x: x >= 1, "at least 1"),
        ("batch_size hidden_dim", lambda x: x >= 1, "at least 1"),
        ("eval_interval eval_episodes checkpoint_interval", lambda x: x >= 1, "at least 1"),
        ("seed alpha prior_scale", lambda x: 0 <= x < math.inf, "finite and at least 0"),
        ("noise_scale lambda_mu lambda_sigma", lambda x: 0 <= x < math.inf, "finite and at least 0"),
        ("q_lr policy_lr", lambda x: 0 < x < math.inf, "finite and above 0"),
        ("return_scale", lambda x: x is None or 0 < x < math.inf, "finite and above 0, or None"),
        ("upsilon polyak", lambda x: 0 < x <= 1, "above 0 and at most 1"),
        ("upsilon", lambda x: x < 1 or not star, "below 1 with ell-epi-star, or the set is infinite"),
        ("head", lambda x: x == "linear" or not star, "linear in z with ell-epi-star, for its closed form"),
        ("expectile_tau", lambda x: 0 < x < 1, "above 0 and below 1; 0.5 is risk-neutral"),
        ("gamma", lambda x: 0 <= x < 1, "at least 0 and below 1"),
        ("target_entropy", lambda x: 0 < x < 1, "above 0 and below 1, a share of log |A|"),
        ("alpha", lambda x: x > 0 or not args.autotune, "above 0 with --autotune"),
        ("env_id", lambda x: args.dataset_id or x in gym.registry, "an environment that Gymnasium knows"),
        ("eval_only", lambda x: args.resume or not x, "used with --resume RUN_FOLDER"),
    ):
        for name in names.split():
            if not ok(getattr(args, name)):
                sys.exit(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be {rule}.")
    method = "ERSAC-Ell-Epi*" if star else "ERSAC-Ell-Epi"
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(args.torch_deterministic, warn_only=True)
    generator = torch.Generator().manual_seed(args.seed)  # minibatches and indices

    # data, normalised by their own statistics, all on the device
    dataset = find_dataset(args)
    obs, action, reward, next_obs, terminated, returns = load_transitions(dataset, args.gamma)
    args.env_id = dataset.spec.env_spec.id if args.dataset_id else args.env_id
    obs_mean, obs_std = torch.zeros(obs.shape[1]), torch.ones(obs.shape[1])
    if args.normalize_obs:
        obs_mean, obs_std = obs.mean(0), obs.std(0, correction=0).clamp(min=1e-3)
    obs, next_obs = (obs - obs_mean) / obs_std, (next_obs - obs_mean) / obs_std  # [|D|, obs_dim]
    known = returns.isfinite()  # transitions whose return was seen to its end
    sizes = returns[known] if known.any() else reward / (1 - args.gamma)  # no episode ended: as if rewards went on
    rms = sizes.square().mean().sqrt().item()
    reward_scale = args.return_scale / max(rms, 1e-8) if args.return_scale else 1.0
    reward, returns = reward * reward_scale, returns * reward_scale
    data = [x.to(device) for x in (obs, action, reward, next_obs, terminated)]
    obs_mean, obs_std, size, A = obs_mean.to(device), obs_std.to(device), len(obs), int(dataset.spec.action_space.n)
    low, high = (dataset.storage.metadata.get(f"ref_{x}_score") for x in ("min", "max"))
    c = F.normalize(torch.randn(size, args.index_dim), dim=-1).to(device)  # each transition's own direction, [|D|, d_z]

    # critic, target critic, actor, entropy coefficient
    shape = (obs.shape[1], A, args.index_dim, args.hidden_dim, args.prior_scale, args.layer_norm, args.head)
    critic = EpinetCritic(*shape).to(device)
    target = copy.deepcopy(critic).requires_grad_(False)
    actor = Actor(obs.shape[1], A, args.hidden_dim).to(device)
    log_alpha = torch.tensor(math.log(max(args.alpha, 1e-30)), device=device, requires_grad=args.autotune)
    learned = [p for p in critic.parameters() if p.requires_grad]
    q_optimizer = torch.optim.Adam(learned, lr=args.q_lr, fused=True)
    policy_optimizer = torch.optim.Adam([*actor.parameters(), log_alpha], lr=args.policy_lr, fused=True)
    radius = math.sqrt(chi2.ppf(args.upsilon, A)) if star else None

    def worst_case(network, obs, pi, z):
        """q* of the closed-form ellipsoid, or of the one through the samples. [B, A]"""
        if star:
            return worst_case_gaussian(*network(obs), pi, radius)
        return worst_case_ellipsoid(network.sample(obs, z), pi, args.upsilon)

    # run folder, new or as the checkpoint left it
    now, start_update, rows = int(time.time()), 0, []
    folder = os.path.join(args.output_dir, f"{args.env_id.split('/')[-1]}__{args.exp_name}__{args.seed}__{now}")
    if checkpoint:
        folder, start_update, rows = os.path.normpath(args.resume), checkpoint["update"], checkpoint["rows"]
        if not torch.equal(obs_mean.cpu(), checkpoint["obs_mean"]) or reward_scale != checkpoint["reward_scale"]:
            sys.exit(f"--resume {folder}: {dataset.spec.dataset_id} has changed since; start a new run.")
        for name, part in (("critic", critic), ("target", target), ("actor", actor)):
            part.load_state_dict(checkpoint[name])
        q_optimizer.load_state_dict(checkpoint["q_optimizer"])
        policy_optimizer.load_state_dict(checkpoint["policy_optimizer"])
        log_alpha.data.copy_(checkpoint["log_alpha"])
        generator.set_state(checkpoint["generator"])
    run_name = checkpoint["run_name"] if checkpoint else os.path.basename(folder)
    open_run_folder(folder, args, rows)
    args.track = args.track and not args.eval_only
    track = start_tracking(args, run_name, f"{args.env_id} {method}")
    env = make_eval_env(dataset, None if args.dataset_id else args.env_id)

    def save_checkpoint(update):
        state = {"script": "ersac_epinet.py", "run_name": run_name, "update": update, "rows": rows}
        state |= {"args": asdict(replace(args, resume=None)), "seconds": time.time() - started}
        state |= {"critic": critic.state_dict(), "target": target.state_dict(), "actor": actor.state_dict()}
        state |= {"q_optimizer": q_optimizer.state_dict(), "policy_optimizer": policy_optimizer.state_dict()}
        state |= {"log_alpha": log_alpha.detach(), "generator": generator.get_state()}
        state |= {"obs_mean": obs_mean, "obs_std": obs_std, "reward_scale": reward_scale}
        torch.save(state, buffer := io.BytesIO())
        write_file(folder, "checkpoint.pt", buffer.getvalue())

    started = time.time() - (checkpoint["seconds"] if checkpoint else 0)
    if not checkpoint:
        save_checkpoint(0)
    stop, tick, tick_update = [], time.time(), start_update
    signal.signal(signal.SIGINT, lambda *_: stop.append("Ctrl-C"))  # taken between two updates
    updates = range(start_update + 1, 0 if args.eval_only else args.total_updates + 1)
    bar = tqdm(updates, initial=start_update, total=args.total_updates, desc=method, unit="update", mininterval=1)
    for update in bar:
        if args.anneal_lr:
            for optimizer, lr in ((q_optimizer, args.q_lr), (policy_optimizer, args.policy_lr)):
                optimizer.param_groups[0]["lr"] = lr * (1 - (update - 1) / args.total_updates)
        index = torch.randint(size, (args.batch_size,), generator=generator).to(device)
        s, a, r, s_next, ended = (x[index] for x in data)  # [B, D], [B], [B], [B, D], [B]; ended: terminations only
        z = None if star else torch.randn(args.num_index_samples, args.index_dim, generator=generator).to(device)
        alpha = log_alpha.detach().exp()

        # compute target: worst case over the target critic's set
        with torch.no_grad():
            log_pi = actor(s_next).log_softmax(-1)  # [B, A]
            q_star = worst_case(target, s_next, log_pi.exp(), z)  # [B, A]
            y = robust_target(r, ended, log_pi.exp(), log_pi, q_star, alpha, args.gamma)  # [B]

        # critic update: expectation over z in closed form, or over the samples; sigma_bar does not move the features
        if star:
            losses = epinet_loss(*critic(s), a, y, c[index], args.noise_scale)  # [B]
        else:
            noisy = y + args.noise_scale * (z @ c[index].T)  # y + noise_scale <c, z>, [N, B]
            losses = (critic.sample(s, z)[:, torch.arange(len(a)), a] - noisy).square().mean(0)  # [B]
        q_loss = losses.mean()
        for weight, parts in ((args.lambda_mu, (critic.base, critic.mean)), (args.lambda_sigma, (critic.learnable,))):
            if weight > 0:
                q_loss = q_loss + weight * sum(p.square().sum() for part in parts for p in part.parameters())
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()

        # actor update against the worst case of the updated critic, and entropy coefficient
        log_pi = actor(s).log_softmax(-1)  # [B, A]
        pi = log_pi.exp()
        with torch.no_grad():
            q_star = worst_case(critic, s, pi, z)  # [B, A]
        pi_loss = actor_loss(pi, log_pi, q_star, alpha).mean()
        h = entropy(pi, log_pi).detach()  # [B]
        alpha_loss = (log_alpha.exp() * (h - args.target_entropy * math.log(A))).mean() if args.autotune else 0.0
        policy_optimizer.zero_grad()
        (pi_loss + alpha_loss).backward()
        policy_optimizer.step()

        # update target critic
        with torch.no_grad():  # else the targets would drag a growing graph behind them
            torch._foreach_lerp_(list(target.parameters()), list(critic.parameters()), args.polyak)

        if not (q_loss + pi_loss).isfinite():
            name = "actor" if q_loss.isfinite() else "critic"
            sys.exit(f"update {update}: {name} loss not finite; try a smaller --q-lr, --policy-lr or --return-scale.")
        last = update == args.total_updates
        if update % args.eval_interval == 0 or last:
            with torch.no_grad():
                probe = torch.randn(1000, args.index_dim, generator=torch.Generator().manual_seed(0)).to(device)
                far = torch.randn(s.shape, generator=torch.Generator().manual_seed(0)).to(device) * 5  # off the data
                std, std_far = (critic.sample(x, probe).std(0) for x in (s, far))  # [B, A]
                mu, taken = critic(s)[0] if star else critic.sample(s, probe).mean(0), F.one_hot(a, A).bool()  # [B, A]
                followed = returns[index.cpu()].to(device)
                q_data, known = mu[taken], followed.isfinite()
                row = {
                    "losses/critic_loss": losses.mean(),
                    "losses/actor_loss": pi_loss,
                    "charts/alpha": alpha,
                    "charts/policy_entropy": h.mean(),
                    "charts/q_robust": (pi * q_star).sum(-1).mean(),
                    "charts/q_gap": (pi * (mu - q_star)).sum(-1).mean(),
                    "charts/q_data_actions": q_data.mean(),
                    "charts/q_minus_return": (q_data - followed)[known].mean(),
                    "charts/std_data_actions": std[taken].mean(),
                    "charts/std_other_actions": std[~taken].mean(),
                    "charts/std_far_states": std_far.mean(),
                }
            rows.append({"update": update} | {name: value.item() for name, value in row.items()})
            rows[-1]["charts/updates_per_second"] = (update - tick_update) / (time.time() - tick)
            scores = evaluate(actor, env, max(args.eval_episodes // 10, 1), 10**6 * (args.seed + 1), obs_mean, obs_std)
            rows[-1]["eval/return"] = scores.mean().item()
            append_rows(folder, rows[-1:])
            tick, tick_update = time.time(), update
            if track:
                track.log(rows[-1], step=update)
            bar.set_postfix_str(f"critic={losses.mean():.3g}, actor={pi_loss:.4g}, return={scores.mean():.1f}")
        if update % args.checkpoint_interval == 0 or last or stop:
            save_checkpoint(update)
            if stop and not last:
                bar.close()
                print(f"Stopped. To go on:\npython ersac_epinet.py --resume {folder}")
                sys.exit(130)
    bar.close()
    speed = args.total_updates / (time.time() - started)

    # final evaluation of the last policy on fresh episodes
    if args.capture_video and not args.eval_only:
        env = make_eval_env(dataset, None if args.dataset_id else args.env_id, os.path.join(folder, "video"))
    scores = evaluate(actor, env, args.eval_episodes, 10**6 * (args.seed + 1) + 10**5, obs_mean, obs_std)
    env.close()
    with torch.no_grad():
        log_pi = actor(data[0][:10_000]).log_softmax(-1)
    result = {"script": "ersac_epinet.py", "method": method, "env_id": args.env_id, "seed": args.seed}
    result |= {"dataset_id": dataset.spec.dataset_id, "updates": args.total_updates, "updates_per_second": speed}
    result |= {"eval_episodes": args.eval_episodes, "eval_return_mean": scores.mean(), "eval_return_std": scores.std()}
    result |= {"random_return": low, "reference_return": high}
    known_scale = low is not None and high is not None
    result["normalized_return"] = 100 * (scores.mean() - low) / (high - low) if known_scale else None
    result["policy_entropy"] = entropy(log_pi.exp(), log_pi).mean().item()
    if not args.eval_only:
        write_file(folder, "result.json", json.dumps(result, indent=2).encode())
    if track:
        track.summary.update(result)
        track.finish()
    print(f"{method} on {dataset.spec.dataset_id}: return {scores.mean():.1f} over {args.eval_episodes} episodes")
    if known_scale:
        print(f"normalized return {result['normalized_return']:.1f} (0 random, 100 the data's neutral policy)")
    print(f"run folder: {folder}")
