# docs: docs/ersac_tabular.md
"""ERSAC on tables: Algorithms 1 to 3 of "Epistemic Robust Offline Reinforcement Learning".

N Q-tables learn offline from a risk-sensitive policy's data; every state gets an uncertainty set over
its Q-vector (box = SAC-N, convex hull, ellipsoid); critics and actor learn from the worst case in it:

    python ersac_tabular.py --env-id RiverSwim --uncertainty-set ellipsoid --upsilon 0.9
"""

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
from bisect import bisect
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
import torch
import tyro
from scipy.optimize import nnls
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__).removesuffix(".py")
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of the data set, the initial tables and the bootstrap"""
    output_dir: str = "runs"
    """folder that receives the run folder"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "ersac"
    """W&B project"""
    wandb_entity: str | None = None
    """W&B user or team; None is your default one"""

    env_id: Literal["MachineReplacement", "RiverSwim"] = "RiverSwim"
    """the Markov decision process"""
    dataset_size: int = 10
    """transitions per state; the paper has 10, 100 and 1000"""
    expectile_tau: float = 0.5
    """risk level of the behaviour policy: 0.1 seeks risk, 0.9 avoids it (IQL: the reverse)"""
    epsilon: float = 0.1
    """probability that the behaviour policy takes a uniformly random action"""
    reset_prob: float = 0.1
    """probability of a reset to a random state after each collected transition"""

    targets: Literal["shared", "own"] = "shared"
    """shared: the paper's one robust target for all critics; own: every critic bootstraps from itself"""
    uncertainty_set: Literal["box", "hull", "ellipsoid"] = "ellipsoid"
    """set over the critics' Q-vectors: box (shared targets: SAC-N), hull (CH-N), ellipsoid (Ell-N)"""
    upsilon: float = 0.9
    """share of the critics that the ellipsoid covers, in (0, 1]; box and hull do not use it"""
    num_critics: int = 100
    """N, the number of Q-tables"""
    bootstrap: bool = True
    """each critic learns from its own resample; without, only the initial tables differ"""
    prior: tuple[float, float] | None = None
    """range of the initial tables; None is what can be attained, [r_min, r_max] / (1 - gamma)"""

    total_updates: int = 6000
    """updates; each one sweeps the whole data set, for all critics and the actor"""
    gamma: float = 0.9
    """discount factor in [0, 1)"""
    alpha: float = 0.01
    """entropy coefficient"""
    q_lr: float = 0.01
    """critic step size per transition; n visits compound to 1 - (1 - q_lr)^n"""
    policy_lr: float = 0.01
    """Adam step size of the actor"""
    polyak: float = 0.02
    """rate at which the target tables follow; the paper's 0.005 needs four times the updates"""

    eval_interval: int = 100
    """updates between two rows of metrics.csv, each with an exact evaluation and a checkpoint"""
    eval_episodes: int = 1000
    """episodes of the final Monte-Carlo evaluation, a check on the exact one"""
    resume: str | None = None
    """run folder to continue; only --eval-episodes and --total-updates may change"""


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


# ===== The data: two Markov decision processes, a risk-sensitive behaviour policy, what it collects
def machine_replacement():
    """10 levels of wear. Action 0 runs the machine, 1 replaces it. P and R, both [S, A, S]."""
    P = np.zeros((10, 2, 10))
    R = np.zeros((10, 2, 10))
    for s in range(10):
        P[s, 0, s] = 0.5
        R[s, 0, s] = -5.0 * (s + 1)  # wear costs 5 per level while the machine stays on it
        P[s, 0, min(s + 1, 9)] += 0.4
        if s > 0:
            P[s, 0, s - 1] = 0.1
    P[0, 0] /= P[0, 0].sum()  # nothing below the first state: 5/9 and 4/9
    P[:, 1, 0] = 1.0
    R[:, 1, 0] = -100.0
    return P, R


def riverswim():
    """20 states along a river. Action 0 drifts left, 1 swims right. P and R, both [S, A, S]."""
    P = np.zeros((20, 2, 20))
    R = np.zeros((20, 2, 20))
    for s in range(20):
        P[s, 0, max(s - 1, 0)] = 1.0
        R[s, 0, max(s - 1, 0)] = 5.0
        P[s, 1, max(s - 1, 0)] += 0.137028976772708
        P[s, 1, s] += 0.284628388822161
        P[s, 1, min(s + 1, 19)] += 0.578342634405131
    R[19, 1, 19] = 86.2971023227292
    return P, R


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


def expectile_value_iteration(P, R, tau, gamma):
    """Q(s, a) = expectile over s' ~ P(.|s, a) of r + gamma max_a' Q(s', a'), solved. [S, A]"""
    q = np.zeros(P.shape[:2])
    while True:
        q_next = expectile(R + gamma * q.max(-1), P, tau)  # [S, A, S] -> [S, A]
        if np.abs(q_next - q).max() <= 1e-12 * (1 + np.abs(q_next).max()):
            return q_next
        q = q_next


def collect(P, behaviour, size, epsilon, reset_prob, rng):
    """Follow the policy with epsilon-random actions; how often each (s, a, s') occurred. [S, A, S]"""
    S, A, _ = P.shape
    visits = np.zeros((S, A, S))
    cumulative = P.cumsum(-1).tolist()
    s = int(rng.integers(S))
    u_action = rng.random(size)
    u_next = rng.random(size)
    u_reset = rng.random(size)
    a_random = rng.integers(A, size=size)
    s_random = rng.integers(S, size=size)
    for i in range(size):
        a = int(a_random[i] if u_action[i] < epsilon else behaviour[s])
        s_next = min(bisect(cumulative[s][a], u_next[i]), S - 1)  # the last sum may be just below 1
        visits[s, a, s_next] += 1
        s = int(s_random[i]) if u_reset[i] < reset_prob else s_next  # a jump is no transition
    return visits


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


def inside(x, q, uncertainty_set, upsilon, tolerance=0.0):
    """Whether the points x [B, A] lie in the sets built from q [N, B, A], up to a tolerance. Bool [B]"""
    if uncertainty_set == "box":
        return ((q.amin(0) - tolerance <= x) & (x <= q.amax(0) + tolerance)).all(-1)
    if uncertainty_set == "ellipsoid":
        mu, d = center(q)
        nearest = mu.clamp(x - tolerance, x + tolerance)  # x moved towards mu, by the tolerance
        return mahalanobis((nearest - mu)[..., None], d)[:, 0] <= ellipsoid_radius(d, upsilon).square()
    # x is in the hull iff w >= 0, sum(w) = 1 and sum_n w_n (q_n - x) = 0 has a solution
    scale = (q - x).abs().amax((0, 2)).clamp(min=1e-300)  # [B]
    d = (q - x) / scale[:, None]  # [N, B, A]
    system = torch.cat([d, torch.ones_like(d[..., :1])], -1)  # [N, B, A + 1]
    system = system.permute(1, 2, 0).numpy()  # [B, A + 1, N]
    goal = np.eye(system.shape[1])[-1]
    error = torch.tensor([nnls(system[b], goal)[1] for b in range(len(system))])  # [B]
    return error < 1e-9 + tolerance / scale


# ===== Target and losses
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


# ===== Evaluation: exact, and by sampling
def policy_value(P, R, pi, gamma, bonus=0.0):
    """V = r_pi + bonus + gamma P_pi V of the policy pi [S, A], solved; bonus is alpha H. [S]"""
    P_pi = np.einsum("sa,sat->st", pi, P)
    r_pi = np.einsum("sa,sat,sat->s", pi, P, R) + bonus
    return np.linalg.solve(np.eye(len(P)) - gamma * P_pi, r_pi)


def greedy(pi):
    """The policy that takes the likeliest action; ties, as without data, are split evenly."""
    best = pi == pi.max(-1, keepdims=True)
    return best / best.sum(-1, keepdims=True)


def normalized_returns(P, R, pi, gamma, v_random, v_optimal):
    """100 (V - V_random) / (V_optimal - V_random): greedy(pi) and pi, uniform start and state 1 (index 0)."""
    scores = {}
    for kind, policy in (("", greedy(pi)), ("_stochastic", pi)):
        gain = policy_value(P, R, policy, gamma) - v_random  # [S]
        scale = v_optimal - v_random
        scores[f"normalized_return{kind}"] = 100 * gain.mean() / scale.mean()
        scores[f"normalized_return{kind}_state1"] = 100 * gain[0] / scale[0]
    return scores


def monte_carlo(P, R, pi, gamma, episodes, rng):
    """Discounted returns of episodes from uniform starts, as in the paper. [episodes]"""
    s = rng.integers(len(P), size=episodes)
    returns = np.zeros(episodes)
    for t in range(round(20 / (1 - gamma))):  # gamma^t has fallen to e^-20
        a = (pi[s].cumsum(-1) < rng.random((episodes, 1))).sum(-1).clip(max=P.shape[1] - 1)
        s_next = (P[s, a].cumsum(-1) < rng.random((episodes, 1))).sum(-1).clip(max=P.shape[0] - 1)
        returns += gamma**t * R[s, a, s_next]
        s = s_next
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

    # ----- check the arguments
    if min(args.total_updates, args.eval_interval, args.eval_episodes) < 1:
        sys.exit("--total-updates, --eval-interval, --eval-episodes: each at least 1.")
    if not 0 < args.upsilon <= 1:
        sys.exit(f"--upsilon {args.upsilon}: it must be above 0 and at most 1.")
    if not 0 < args.expectile_tau < 1:
        sys.exit(f"--expectile-tau {args.expectile_tau}: it must be above 0 and below 1.")
    if not 0 <= args.gamma < 1:
        sys.exit(f"--gamma {args.gamma}: it must be at least 0 and below 1.")
    if checkpoint and args.total_updates < checkpoint["update"]:
        sys.exit(f"--total-updates {args.total_updates}: the run has done {checkpoint['update']}.")

    # ----- data: a random stream each, so that all sets get the same data and tables
    torch.set_num_threads(1)  # the tables are too small to share
    P, R = riverswim() if args.env_id == "RiverSwim" else machine_replacement()
    S, A, _ = P.shape
    N = args.num_critics
    behaviour = expectile_value_iteration(P, R, args.expectile_tau, args.gamma).argmax(-1)  # [S]
    size = args.dataset_size * S
    rng = np.random.default_rng([args.seed, 0])
    visits = collect(P, behaviour, size, args.epsilon, args.reset_prob, rng)  # [S, A, S]
    resamples = np.tile(visits, (N, 1, 1, 1))  # [N, S, A, S]: how often critic i sees (s, a, s')
    if args.bootstrap:  # |D| draws with replacement for each critic
        rng = np.random.default_rng([args.seed, 1])
        resamples = rng.multinomial(size, visits.ravel() / size, N).reshape(N, S, A, S)
    resamples = torch.tensor(resamples).double()
    n = resamples.sum(-1)  # [N, S, A]: how often critic i sees (s, a)
    p_hat = resamples / n.clamp(min=1)[..., None]  # [N, S, A, S]: critic i's estimate of P(s'|s, a)
    critic_step = 1 - (1 - args.q_lr) ** n  # n steps towards the mean target
    visits = torch.tensor(visits)
    seen = visits.sum(-1) > 0  # [S, A]
    state_weight = visits.sum((-1, -2)) / size  # [S]: a state's share of the data
    reward = torch.tensor(R)  # [S, A, S]

    # ----- critics, target critics, actor
    if args.prior is None:
        args.prior = (float(R.min()) / (1 - args.gamma), float(R.max()) / (1 - args.gamma))
    q = torch.tensor(np.random.default_rng([args.seed, 2]).uniform(*args.prior, (N, S, A)))
    q_target = q.clone()
    logits = torch.zeros(S, A, dtype=torch.float64, requires_grad=True)
    # a nearly deterministic softmax has tiny gradients: a larger eps would hold it there
    optimizer = torch.optim.Adam([logits], lr=args.policy_lr, eps=1e-30)

    def worst_case(q, pi):
        """q* of the chosen set. [S, A]"""
        if args.uncertainty_set == "box":
            return worst_case_box(q, pi)
        if args.uncertainty_set == "hull":
            return worst_case_hull(q, pi)
        return worst_case_ellipsoid(q, pi, args.upsilon)

    # returns are measured against random and optimal play
    optimal = expectile_value_iteration(P, R, 0.5, args.gamma).argmax(-1)
    v_random = policy_value(P, R, np.full((S, A), 1 / A), args.gamma)  # [S]
    v_optimal = policy_value(P, R, np.eye(A)[optimal], args.gamma)
    behaviour_gain = (policy_value(P, R, np.eye(A)[behaviour], args.gamma) - v_random).mean()

    # ----- run folder: new, or as the checkpoint left it
    names = {"box": "SAC-N", "hull": "ERSAC-CH-N", "ellipsoid": "ERSAC-Ell-N"}
    method = names[args.uncertainty_set]
    if args.targets == "own":  # SAC-N has one target for all critics; the box with own targets is another method
        method = "ERSAC-Box-N-own" if args.uncertainty_set == "box" else f"{method}-own"
    label = method.removeprefix("ERSAC-")  # as the docs write it
    if args.uncertainty_set == "ellipsoid" and args.upsilon < 1:
        label = label.replace("Ell-N", f"Ell_{args.upsilon:g}-N")

    def save(update):
        state = {
            "q": q,
            "q_target": q_target,
            "logits": logits.detach(),
            "optimizer": optimizer.state_dict(),
            "update": update,
            "rows": rows,
            "run_name": run_name,
            "visits": visits,
            "script": script,
            "args": asdict(replace(args, resume=None)),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_file(folder, "checkpoint.pt", buffer.getvalue())

    start = 0
    rows = []
    if checkpoint:
        folder = os.path.normpath(args.resume)
        q = checkpoint["q"]
        q_target = checkpoint["q_target"]
        logits.data.copy_(checkpoint["logits"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["update"]
        rows = checkpoint["rows"]
        run_name = checkpoint["run_name"]
    else:
        run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(1000 * time.time())}"
        folder = os.path.join(args.output_dir, run_name)
        if os.path.exists(folder):
            sys.exit(f"{folder} exists; choose another --exp-name.")
        write_file(folder, "args.json", json.dumps(asdict(args), indent=2).encode())
        save(0)

    data = f"{args.env_id} tau {args.expectile_tau:g} x {args.dataset_size}"
    track = start_tracking(args, run_name, data, label, script)
    for row in rows:
        if track and row["update"] >= track.step:  # what a killed run had not yet sent
            track.log(row, step=row["update"])

    # ----- training
    tick, tick_update = time.time(), start
    updates = range(start + 1, args.total_updates + 1)
    bar = tqdm(updates, method, args.total_updates, initial=start, unit="update", mininterval=1)
    for update in bar:
        log_pi = logits.log_softmax(-1)  # [S, A]
        pi = log_pi.exp()
        with torch.no_grad():
            # compute target of every (s, a, s'): worst case over the target critics' set, or each its own
            if args.targets == "shared":
                q_next = worst_case(q_target, pi)  # q*, [S, A]
            else:
                q_next = q_target[:, None, None]  # [N, 1, 1, S, A]: v(s') meets reward [S, A, S']
            y = robust_target(reward, 0.0, pi, log_pi, q_next, args.alpha, args.gamma)  # [(N,) S, A, S]

            # critic update: every critic steps towards the mean target of its own transitions
            td_error = (p_hat * y).sum(-1) - q  # [N, S, A]
            q += critic_step * td_error

            # worst-case value vectors of the updated critics
            q_star = worst_case(q, pi)  # [S, A]

        # actor update, a mean over the states of the data
        pi_loss = (actor_loss(pi, log_pi, q_star, args.alpha) * state_weight).sum()
        optimizer.zero_grad()
        pi_loss.backward()
        optimizer.step()

        # update target tables
        q_target.lerp_(q, args.polyak)

        if not pi_loss.isfinite():
            sys.exit(f"update {update}: loss not finite; try a smaller --prior or --policy-lr.")

        # log, evaluate, checkpoint
        if update % args.eval_interval == 0 or update == args.total_updates:
            with torch.no_grad():
                mu, d = center(q)  # [S, A], [S, A, N]
                std = d.square().mean(-1).sqrt()  # [S, A]
                row = {
                    "losses/critic_loss": td_error[n > 0].square().mean(),
                    "losses/actor_loss": pi_loss,
                    "charts/policy_entropy": (entropy(pi, log_pi) * state_weight).sum(),
                    "charts/q_robust": ((pi * q_star).sum(-1) * state_weight).sum(),
                    "charts/q_gap": ((pi * (mu - q_star)).sum(-1) * state_weight).sum(),
                    "charts/std_data_actions": std[seen].mean(),
                    "charts/std_other_actions": std[~seen].mean(),
                    "charts/radius": ellipsoid_radius(d, args.upsilon).mean(),
                }
                policy = logits.softmax(-1).numpy()
            row = {"update": update} | {name: value.item() for name, value in row.items()}
            row["charts/updates_per_second"] = (update - tick_update) / (time.time() - tick)
            scores = normalized_returns(P, R, policy, args.gamma, v_random, v_optimal)
            row |= {f"eval/{name}": score.item() for name, score in scores.items()}
            rows.append(row)
            write_metrics(folder, rows)
            save(update)
            if track:
                track.log(row, step=update)
            bar.set_postfix_str(f"normalized_return={scores['normalized_return']:.1f}")
            tick, tick_update = time.time(), update
    bar.close()

    # ----- final evaluation: the last policy, exact and by sampling
    with torch.no_grad():
        log_pi = logits.log_softmax(-1)
        pi = log_pi.exp()
        h = entropy(pi, log_pi)  # [S]
        robust_v = (pi * worst_case(q, pi)).sum(-1) + args.alpha * h  # [S]
    policy = pi.numpy()
    scores = normalized_returns(P, R, policy, args.gamma, v_random, v_optimal)
    v_greedy = policy_value(P, R, greedy(policy), args.gamma)  # [S]
    rng = np.random.default_rng([args.seed, 3])
    episodes = monte_carlo(P, R, greedy(policy), args.gamma, args.eval_episodes, rng)

    # is the robust value a lower bound of the policy's true soft value, does the set hold its Q-vector?
    soft_v = policy_value(P, R, policy, args.gamma, args.alpha * h.numpy())  # [S]
    soft_q = torch.tensor((P * (R + args.gamma * soft_v)).sum(-1))  # [S, A]
    near = 0.01  # tolerance for rounding and incomplete convergence
    covered = inside(soft_q, q, args.uncertainty_set, args.upsilon, near)  # [S]
    result = {
        "script": script,
        "method": method,
        "label": label,
        "env_id": args.env_id,
        "dataset_id": None,
        "seed": args.seed,
        "updates": args.total_updates,
        "updates_per_second": np.mean([row["charts/updates_per_second"] for row in rows]),
        "eval_episodes": args.eval_episodes,
        "eval_return_mean": v_greedy.mean(),  # exact; the other two are sampled
        "eval_return_std": episodes.std(),
        "eval_returns": episodes.tolist(),
        "monte_carlo_return": episodes.mean(),
        "random_return": v_random.mean(),
        "reference_return": v_optimal.mean(),
        **scores,
        "behaviour_normalized_return": 100 * behaviour_gain / (v_optimal - v_random).mean(),
        "policy_entropy": (h * state_weight).sum().item(),
        "lower_bound_rate": (robust_v.numpy() <= soft_v + near).mean(),
        "coverage_rate": covered.double().mean().item(),
    }
    write_file(folder, "result.json", json.dumps(result, indent=2).encode())
    if track:
        track.summary.update(result)
        track.finish()
    score = scores["normalized_return"]
    print(f"{script}, {label} on {args.env_id}: normalized return {score:.1f} (0 random, 100 optimal)")
    print(f"run folder: {folder}")
