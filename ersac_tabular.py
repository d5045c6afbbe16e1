# docs: docs/ersac_tabular.md
"""ERSAC on tables: Algorithms 1 to 3 of "Epistemic Robust Offline Reinforcement Learning" without neural networks.

N Q-tables learn offline from a risk-sensitive behaviour policy's data; every state gets an uncertainty set over its
Q-vector (box = SAC-N, convex hull, ellipsoid); critics and actor learn from the worst case in that set. One run:

    python ersac_tabular.py --env-id RiverSwim --uncertainty-set ellipsoid --upsilon 0.9 --expectile-tau 0.1
"""

import csv
import io
import json
import math
import os
import signal
import sys
import time
from bisect import bisect
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from scipy.optimize import nnls
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = "ersac_tabular"
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of the data set, the initial tables and the bootstrap; the first one if --num-seeds > 1"""
    num_seeds: int = 1
    """train this many seeds (seed, seed + 1, ...) side by side as one batched computation, one run folder each"""
    output_dir: str = "runs"
    """folder that receives the run folders"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "ersac"
    """W&B project"""
    wandb_entity: str | None = None
    """W&B user or team; None is your default one"""

    env_id: Literal["MachineReplacement", "RiverSwim"] = "RiverSwim"
    """the Markov decision process"""
    dataset_size: int = 10
    """transitions per state: the data set holds dataset_size * |S| transitions (the paper: 10, 100, 1000)"""
    expectile_tau: float = 0.5
    """risk level of the behaviour policy in (0, 1): 0.1 seeks risk, 0.5 is neutral, 0.9 avoids it"""
    epsilon: float = 0.1
    """probability that the behaviour policy takes a uniformly random action"""
    reset_prob: float = 0.1
    """probability, after each transition of the data collection, of a jump to a uniformly random state"""

    uncertainty_set: Literal["box", "hull", "ellipsoid"] = "ellipsoid"
    """set over the N critics' Q-vectors: box (this is SAC-N), convex hull (CH-N) or ellipsoid (Ell-N)"""
    upsilon: float = 0.9
    """share of the critics that the ellipsoid covers, in (0, 1]; box and hull do not use it"""
    num_critics: int = 100
    """N, the number of Q-tables"""
    bootstrap: bool = True
    """each critic learns from its own bootstrap resample; without, only the initial tables tell the critics apart"""
    prior: tuple[float, float] | None = None
    """the initial tables are uniform on this range; None covers the attainable values [r_min, r_max] / (1 - gamma)"""

    total_updates: int = 6000
    """updates; each one sweeps the whole data set, for all critics and the actor"""
    gamma: float = 0.9
    """discount factor in [0, 1)"""
    alpha: float = 0.01
    """entropy coefficient"""
    q_lr: float = 0.01
    """critic step size for a single transition"""
    policy_lr: float = 0.01
    """Adam step size of the actor"""
    polyak: float = 0.02
    """rate at which the target tables follow the tables; the paper's 0.005 needs four times the updates to converge"""

    eval_interval: int = 100
    """updates between two rows of metrics.csv, each with an exact evaluation"""
    eval_episodes: int = 1000
    """episodes of the final Monte-Carlo evaluation, a check on the exact one"""
    checkpoint_interval: int = 1000
    """updates between two checkpoints"""
    resume: str | None = None
    """run folder to continue; all other arguments come from there"""
    eval_only: bool = False
    """with --resume: evaluate the checkpoint's policy, print the result, write nothing"""


# ===== The data: two Markov decision processes, a risk-sensitive behaviour policy for them, and what it leaves behind
def machine_replacement():
    """10 levels of wear. Action 0 runs the machine, action 1 replaces it for 100. Returns P and R, both [S, A, S]."""
    P, R = np.zeros((10, 2, 10)), np.zeros((10, 2, 10))
    for s in range(10):
        P[s, 0, s], R[s, 0, s] = 0.5, -5.0 * (s + 1)  # wear costs 5 per level while the machine stays on it
        P[s, 0, min(s + 1, 9)] += 0.4
        P[s, 0, max(s - 1, 0)] += 0.1 * (s > 0)
    P[0, 0] /= P[0, 0].sum()  # nothing below the first state: 5/9 and 4/9
    P[:, 1, 0], R[:, 1, 0] = 1.0, -100.0
    return P, R


def riverswim():
    """20 states along a river. Action 0 drifts left for 5, action 1 swims right to a prize. Returns P and R."""
    left, stay, right = 0.137028976772708, 0.284628388822161, 0.578342634405131
    P, R = np.zeros((20, 2, 20)), np.zeros((20, 2, 20))
    for s in range(20):
        P[s, 0, max(s - 1, 0)], R[s, 0, max(s - 1, 0)] = 1.0, 5.0
        P[s, 1, max(s - 1, 0)] += left
        P[s, 1, s] += stay
        P[s, 1, min(s + 1, 19)] += right
    R[19, 1, 19] = 86.2971023227292
    return P, R


def expectile(values, probs, tau, axis=-1):
    """The e with tau E[(e - X)+] = (1 - tau) E[(X - e)+]: tau weighs outcomes below e, so tau = 0.9 is risk-averse."""
    values, probs = np.broadcast_arrays(np.asarray(values, float), np.asarray(probs, float))
    low, high = values.min(axis, keepdims=True), values.max(axis, keepdims=True)
    for _ in range(64):  # bisection down to machine precision
        e = 0.5 * (low + high)
        gain = (probs * (values - e) * np.where(values < e, tau, 1 - tau)).sum(axis, keepdims=True)  # falls with e
        low, high = np.where(gain > 0, e, low), np.where(gain > 0, high, e)
    return (0.5 * (low + high)).squeeze(axis)


def expectile_value_iteration(P, R, tau, gamma):
    """Dynamic expectile risk: Q(s, a) = expectile over s' ~ P(.|s, a) of r + gamma max_a' Q(s', a'), solved. [S, A]"""
    q = np.zeros(P.shape[:2])
    while True:
        q_next = expectile(R + gamma * q.max(-1), P, tau)  # [S, A, S] -> [S, A]
        if np.abs(q_next - q).max() <= 1e-12 * (1 + np.abs(q_next).max()):
            return q_next
        q = q_next


def collect(P, behaviour, size, epsilon, reset_prob, rng):
    """Follow the behaviour policy with epsilon-random actions; how often each (s, a, s') occurred, [S, A, S]."""
    S, A, _ = P.shape
    visits = np.zeros((S, A, S))
    cumulative, behaviour = P.cumsum(-1).tolist(), behaviour.tolist()
    s = int(rng.integers(S))
    for u_action, u_next, u_reset, a_random, s_random in zip(
        rng.random(size), rng.random(size), rng.random(size), rng.integers(A, size=size), rng.integers(S, size=size)
    ):
        a = a_random if u_action < epsilon else behaviour[s]
        s_next = min(bisect(cumulative[s][a], u_next), S - 1)  # rounding may leave the last sum just below 1
        visits[s, a, s_next] += 1
        s = int(s_random) if u_reset < reset_prob else s_next  # the stored transition is the true one all the same
    return visits


class TabularMDP(gym.Env):
    """Either MDP as a Gymnasium environment. Episodes start in a uniformly random state and never terminate."""

    def __init__(self, env_id):
        self.P, self.R = {"MachineReplacement": machine_replacement, "RiverSwim": riverswim}[env_id]()
        self.observation_space = gym.spaces.Discrete(self.P.shape[0])
        self.action_space = gym.spaces.Discrete(self.P.shape[1])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(self.P.shape[0]))
        return self.state, {}

    def step(self, action):
        s, self.state = self.state, int(self.np_random.choice(self.P.shape[0], p=self.P[self.state, action]))
        return self.state, float(self.R[s, action, self.state]), False, False, {}


for env_id in ("MachineReplacement", "RiverSwim"):
    if f"ersac/{env_id}-v0" not in gym.registry:
        gym.register(f"ersac/{env_id}-v0", "ersac_tabular:TabularMDP", max_episode_steps=200, kwargs={"env_id": env_id})


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


def inside(x, q, uncertainty_set, upsilon):
    """Whether the points x [B, A] lie in the sets built from q [N, B, A]. Bool [B]"""
    if uncertainty_set == "box":
        return ((q.amin(0) <= x) & (x <= q.amax(0))).all(-1)
    if uncertainty_set == "ellipsoid":
        mu, d = center(q)
        return mahalanobis((x - mu)[..., None], d)[:, 0] <= ellipsoid_radius(d, upsilon).square()
    d = (q - x) / (q - x).abs().amax((0, 2))[:, None].clamp(min=1e-300)  # in the hull iff weights >= 0 average d to 0
    system = torch.cat([d, torch.ones_like(d[..., :1])], -1).permute(1, 2, 0).numpy()  # [B, A + 1, N]
    goal = np.eye(system.shape[1])[-1]
    return torch.tensor([nnls(system[b], goal)[1] < 1e-9 for b in range(len(system))])


# ===== Actor, target and losses
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
def policy_value(P, R, pi, gamma, bonus=0.0):
    """V of the policies pi [K, S, A] by the linear system V = r_pi + bonus + gamma P_pi V; bonus is alpha H. [K, S]"""
    P_pi = np.einsum("ksa,sat->kst", pi, P)
    r_pi = np.einsum("ksa,sat,sat->ks", pi, P, R) + bonus
    return np.linalg.solve(np.eye(P.shape[0]) - gamma * P_pi, r_pi[..., None])[..., 0]


def greedy(pi):
    """The policy that takes the likeliest action; ties, as in states without data, are split evenly."""
    best = pi == pi.max(-1, keepdims=True)
    return best / best.sum(-1, keepdims=True)


def normalized_returns(P, R, pi, gamma, v_random, v_optimal):
    """100 (V - V_random) / (V_optimal - V_random), exact, of pi [K, S, A] and greedy(pi), uniform start and state 1."""
    scores = {}
    for kind, policy in (("", greedy(pi)), ("_stochastic", pi)):
        v = policy_value(P, R, policy, gamma)  # [K, S]
        for start, states in (("", slice(None)), ("_state1", slice(1))):
            low, high = v_random[states].mean(), v_optimal[states].mean()
            scores[f"normalized_return{kind}{start}"] = 100 * (v[:, states].mean(-1) - low) / (high - low)
    return scores


def monte_carlo(P, R, pi, gamma, episodes, rng):
    """Evaluation by sampling, as in the paper: discounted returns of episodes from uniform starts, [episodes]."""
    s, returns = rng.integers(P.shape[0], size=episodes), np.zeros(episodes)
    for t in range(round(20 / (1 - gamma))):  # gamma^t has fallen to e^-20
        a = (pi[s].cumsum(-1) < rng.random((episodes, 1))).sum(-1).clip(max=P.shape[1] - 1)
        s_next = (P[s, a].cumsum(-1) < rng.random((episodes, 1))).sum(-1).clip(max=P.shape[0] - 1)
        returns += gamma**t * R[s, a, s_next]
        s = s_next
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
    checkpoint = load_checkpoint(args.resume, "ersac_tabular.py") if args.resume else None
    if checkpoint:
        args = resumed_args(args, checkpoint["args"])
    for names, ok, rule in (
        ("num_seeds dataset_size num_critics total_updates", lambda x: x >= 1, "at least 1"),
        ("eval_interval eval_episodes checkpoint_interval", lambda x: x >= 1, "at least 1"),
        ("seed alpha", lambda x: 0 <= x < math.inf, "finite and at least 0"),
        ("policy_lr", lambda x: 0 < x < math.inf, "finite and above 0"),
        ("upsilon q_lr polyak", lambda x: 0 < x <= 1, "above 0 and at most 1"),
        ("expectile_tau", lambda x: 0 < x < 1, "above 0 and below 1; 0.5 is risk-neutral"),
        ("epsilon reset_prob", lambda x: 0 <= x <= 1, "a probability"),
        ("gamma", lambda x: 0 <= x < 1, "at least 0 and below 1"),
        ("prior", lambda x: x is None or -1e99 < x[0] <= x[1] < 1e99, "two finite numbers, the lower one first"),
        ("eval_only", lambda x: args.resume or not x, "used with --resume RUN_FOLDER"),
    ):
        for name in names.split():
            if not ok(getattr(args, name)):
                sys.exit(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be {rule}.")
    P, R = {"MachineReplacement": machine_replacement, "RiverSwim": riverswim}[args.env_id]()
    args.prior = args.prior or (float(R.min()) / (1 - args.gamma), float(R.max()) / (1 - args.gamma))
    method = {"box": "SAC-N", "hull": "ERSAC-CH-N", "ellipsoid": "ERSAC-Ell-N"}[args.uncertainty_set]
    seeds = range(args.seed, args.seed + args.num_seeds)
    K, N, (S, A, _) = args.num_seeds, args.num_critics, P.shape
    torch.set_num_threads(1)  # the tables are too small to share

    # Behaviour policy and data set. Each seed has a stream of random numbers for each purpose: the same data, resamples
    # and initial tables whatever the uncertainty set, alone or among the K seeds of --num-seeds.
    behaviour = expectile_value_iteration(P, R, args.expectile_tau, args.gamma).argmax(-1)  # [S]
    size = args.dataset_size * S
    streams = [np.random.default_rng([seed, 0]) for seed in seeds]
    visits = [collect(P, behaviour, size, args.epsilon, args.reset_prob, rng) for rng in streams]  # K times [S, A, S]
    if args.bootstrap:  # |D| draws with replacement for each critic, counted per (s, a, s')
        streams = [np.random.default_rng([seed, 1]) for seed in seeds]
        resamples = [rng.multinomial(size, v.ravel() / size, N) for rng, v in zip(streams, visits)]
    else:
        resamples = [np.tile(v.ravel(), (N, 1)) for v in visits]
    resamples = np.stack(resamples, 1).reshape(N, K, S, A, S)
    M = int((P > 0).sum(-1).max())  # few states can follow (s, a): M candidates m instead of all S
    successor = np.sort(np.argsort(-P, axis=-1, kind="stable")[..., :M])  # [S, A, M]
    count = torch.tensor(np.take_along_axis(resamples, successor[None, None], -1)).double()  # [N, K, S, A, M]
    count = count.permute(4, 0, 1, 2, 3).contiguous()  # [M, N, K, S, A]: how often critic i has seen (s, a, m)
    n = count.sum(0)  # [N, K, S, A]: how often critic i has seen (s, a)
    critic_weight = count / n.clamp(min=1)  # [M, N, K, S, A]: what each successor weighs in the mean target
    critic_step = 1 - (1 - args.q_lr) ** n  # n steps of size q_lr in one; 0 where there is no data
    reward = torch.tensor(np.take_along_axis(R, successor, -1)).permute(2, 0, 1)  # [M, S, A]
    successor = torch.tensor(successor).permute(2, 0, 1)  # [M, S, A]
    visits = torch.tensor(np.stack(visits))  # [K, S, A, S]
    seen = visits.sum(-1) > 0  # [K, S, A]
    state_weight = visits.sum((-1, -2)) / size  # [K, S]: how likely a state is to be drawn from the data

    # critics, target critics, actor
    q = np.stack([np.random.default_rng([seed, 2]).uniform(*args.prior, (N, S, A)) for seed in seeds], 1)
    q = torch.tensor(q)  # [N, K, S, A]
    q_target = q.clone()
    logits = torch.zeros(K, S, A, dtype=torch.float64, requires_grad=True)
    # a nearly deterministic softmax has tiny gradients; with eps above them Adam could never change the actor's mind
    optimizer = torch.optim.Adam([logits], lr=args.policy_lr, eps=1e-30)
    ellipsoid = partial(worst_case_ellipsoid, upsilon=args.upsilon)
    worst_case = {"box": worst_case_box, "hull": worst_case_hull, "ellipsoid": ellipsoid}[args.uncertainty_set]

    # returns are measured against random and optimal play
    optimal = expectile_value_iteration(P, R, 0.5, args.gamma).argmax(-1)
    baselines = np.stack([np.full((S, A), 1 / A), np.eye(A)[optimal], np.eye(A)[behaviour]])
    v_random, v_optimal, v_behaviour = policy_value(P, R, baselines, args.gamma)  # [S] each

    # run folders, one a seed, new or as the checkpoint left them
    now, start_update, rows = int(time.time()), 0, [[] for _ in seeds]
    folders = [os.path.join(args.output_dir, f"{args.env_id}__{args.exp_name}__{seed}__{now}") for seed in seeds]
    if checkpoint:
        folders, start_update, rows = [os.path.normpath(args.resume)], checkpoint["update"], [checkpoint["rows"]]
        q, q_target = (checkpoint[name].view(N, 1, S, A).clone() for name in ("q", "q_target"))
        logits.data.copy_(checkpoint["logits"])
        optimizer.state[logits] = checkpoint["adam"]
    for folder, seed, history in zip(folders, seeds, rows):
        open_run_folder(folder, replace(args, seed=seed, num_seeds=1), history)
    args.track = args.track and not args.eval_only
    run_names = [checkpoint["run_name"]] if checkpoint else [os.path.basename(folder) for folder in folders]
    tracks = [start_tracking(args, name, f"{args.env_id} {method}") for name in run_names]

    def save_checkpoints(update):
        """One a seed: each run folder can be resumed by itself, and goes on with the same numbers."""
        for k, folder in enumerate(folders):
            state = {"script": "ersac_tabular.py", "update": update, "rows": rows[k], "visits": visits[k].clone()}
            state["args"] = asdict(replace(args, seed=seeds[k], num_seeds=1, resume=None))
            state |= {"run_name": run_names[k], "seconds": time.time() - started}
            state |= {"q": q[:, k].clone(), "q_target": q_target[:, k].clone(), "logits": logits[k].detach().clone()}
            adam = optimizer.state[logits].items()
            state["adam"] = {name: x if name == "step" else x[k : k + 1].clone() for name, x in adam}
            torch.save(state, buffer := io.BytesIO())
            write_file(folder, "checkpoint.pt", buffer.getvalue())

    started = time.time() - (checkpoint["seconds"] if checkpoint else 0)
    if not checkpoint:
        save_checkpoints(0)
    stop = []
    signal.signal(signal.SIGINT, lambda *_: stop.append("Ctrl-C"))  # taken between two updates
    updates = range(start_update + 1, 0 if args.eval_only else args.total_updates + 1)
    bar = tqdm(updates, initial=start_update, total=args.total_updates, desc=method, unit="update", mininterval=1)
    for update in bar:
        # compute target: worst case over the target critics' set, for every (s, a, s') that can occur
        log_pi = logits.log_softmax(-1).view(K * S, A)
        pi = log_pi.exp()  # [K S, A]
        with torch.no_grad():
            q_star = worst_case(q_target.view(N, K * S, A), pi)  # [K S, A]
            at_successor = [x.view(K, S, A)[:, successor] for x in (pi, log_pi, q_star)]  # [K, M, S, A, A]
            y = robust_target(reward, 0.0, *at_successor, args.alpha, args.gamma)  # [K, M, S, A]

            # critic update: every critic steps towards the mean target of the transitions it has seen
            td_error = (critic_weight * y.transpose(0, 1)[:, None]).sum(0) - q  # [N, K, S, A]
            q += critic_step * td_error

            # worst-case value vectors of the updated critics
            q_star = worst_case(q.view(N, K * S, A), pi)  # [K S, A]

        # actor update, a mean over the states of the data
        loss = (actor_loss(pi, log_pi, q_star, args.alpha).view(K, S) * state_weight).sum(-1)  # [K]
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()

        # update target tables
        q_target.lerp_(q, args.polyak)

        if not loss.sum().isfinite():
            sys.exit(f"update {update}: the actor's loss is not finite; try a smaller --prior, --alpha or --policy-lr.")
        last = update == args.total_updates
        if update % args.eval_interval == 0 or last:
            with torch.no_grad():
                mu, d = center(q.view(N, K * S, A))
                std = d.square().mean(-1).sqrt().view(K, S, A)
                metrics = {
                    "losses/critic_loss": (td_error.square() * (n > 0)).sum((0, 2, 3)) / (n > 0).sum((0, 2, 3)),
                    "losses/actor_loss": loss,
                    "charts/policy_entropy": (entropy(pi, log_pi).view(K, S) * state_weight).sum(-1),
                    "charts/q_robust": ((pi * q_star).sum(-1).view(K, S) * state_weight).sum(-1),
                    "charts/q_gap": ((pi * (mu - q_star)).sum(-1).view(K, S) * state_weight).sum(-1),
                    "charts/std_data_actions": (std * seen).sum((1, 2)) / seen.sum((1, 2)),
                    "charts/std_other_actions": (std * ~seen).sum((1, 2)) / (~seen).sum((1, 2)),
                    "charts/radius": ellipsoid_radius(d, args.upsilon).view(K, S).mean(-1),
                }
                scores = normalized_returns(P, R, logits.softmax(-1).numpy(), args.gamma, v_random, v_optimal)
            metrics |= {f"eval/{name}": score for name, score in scores.items()}
            speed = update / (time.time() - started)
            for folder, history, track, k in zip(folders, rows, tracks, range(K)):
                history.append({"update": update} | {name: values[k].item() for name, values in metrics.items()})
                history[-1]["charts/updates_per_second"] = speed
                append_rows(folder, history[-1:])
                if track:
                    track.log(history[-1], step=update)
            critic, score = metrics["losses/critic_loss"].mean(), scores["normalized_return"].mean()
            bar.set_postfix_str(f"critic={critic:.3g}, actor={loss.mean():.4g}, normalized_return={score:.1f}")
        if update % args.checkpoint_interval == 0 or last or stop:
            save_checkpoints(update)
            if stop and not last:
                bar.close()
                print("Stopped. To go on:", *(f"python ersac_tabular.py --resume {f}" for f in folders), sep="\n")
                sys.exit(130)
    bar.close()
    speed = args.total_updates / (time.time() - started)

    # Final evaluation of the last policy, exact and by Monte Carlo; and of the set: is the robust value a lower bound
    # of this policy's true soft value, does the set hold its true soft Q-vector?
    with torch.no_grad():
        log_pi = logits.log_softmax(-1).view(K * S, A)
        pi = log_pi.exp()
        h = entropy(pi, log_pi).view(K, S)
        robust_v = (pi * worst_case(q.view(N, K * S, A), pi)).sum(-1).view(K, S) + args.alpha * h
    policy = pi.view(K, S, A).numpy()
    scores = normalized_returns(P, R, policy, args.gamma, v_random, v_optimal)
    soft_v = policy_value(P, R, policy, args.gamma, args.alpha * h.numpy())  # [K, S]
    soft_q = torch.tensor((P * R).sum(-1) + args.gamma * np.einsum("sat,kt->ksa", P, soft_v))  # [K, S, A]
    covered = inside(soft_q.view(K * S, A), q.view(N, K * S, A), args.uncertainty_set, args.upsilon).view(K, S)
    for k, (seed, folder, track) in enumerate(zip(seeds, folders, tracks)):
        pi_k = greedy(policy[k])
        episodes = monte_carlo(P, R, pi_k, args.gamma, args.eval_episodes, np.random.default_rng([seed, 3]))
        exact = policy_value(P, R, pi_k[None], args.gamma)[0]  # [S]
        result = {"script": "ersac_tabular.py", "method": method, "env_id": args.env_id, "seed": seed}
        result |= {"dataset_id": None, "updates": args.total_updates, "updates_per_second": speed}
        result |= {"eval_return_mean": exact.mean(), "monte_carlo_return": episodes.mean()}
        result |= {"eval_return_std": episodes.std(), "eval_episodes": args.eval_episodes}
        result |= {"random_return": v_random.mean(), "reference_return": v_optimal.mean()}
        result |= {name: score[k] for name, score in scores.items()}
        result |= {"behaviour_normalized_return": 100 * (v_behaviour - v_random).mean() / (v_optimal - v_random).mean()}
        result |= {"policy_entropy": (h[k] * state_weight[k]).sum().item()}
        result |= {"lower_bound_rate": (robust_v[k].numpy() <= soft_v[k] + 1e-9).mean()}
        result |= {"coverage_rate": covered[k].double().mean().item()}
        if not args.eval_only:
            write_file(folder, "result.json", json.dumps(result, indent=2).encode())
        if track:
            track.summary.update(result)
            track.finish()
        print(f"seed {seed}: normalized return {result['normalized_return']:.1f} (0 random, 100 optimal) -> {folder}")
    if K > 1:
        score = scores["normalized_return"]
        print(f"{method}, {args.env_id}, {K} seeds: {score.mean():.1f} with standard deviation {score.std(ddof=1):.1f}")
