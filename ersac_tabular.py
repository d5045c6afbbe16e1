# docs: docs/ersac_tabular.md
"""ERSAC on tables: Algorithms 1 to 3 of "Epistemic Robust Offline Reinforcement Learning".

N Q-tables learn from a risk-sensitive policy's data, each from its own resample of them. A set
around their Q-vectors (box, convex hull or ellipsoid) holds the likely ones; the actor learns
against the worst of them. By default all tables share one worst-case target, the paper's form; with
--targets own every table bootstraps from itself, which is ours. The paper's form in ten seconds:

    python ersac_tabular.py --env-id RiverSwim --uncertainty-set ellipsoid --upsilon 0.9
"""

import json
import math
import os
import sys
import time
from bisect import bisect
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__).removesuffix(".py")
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of the data, the initial tables and the resamples"""
    output_dir: str = "runs"
    """folder that receives the run folder"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "ersac"
    """W&B project"""
    wandb_entity: str | None = None
    """W&B user or team"""
    eval_interval: int = 100
    """updates between two rows of metrics.csv, each with an exact evaluation"""

    env_id: Literal["MachineReplacement", "RiverSwim"] = "RiverSwim"
    """the Markov decision process"""
    dataset_size: int = 10
    """transitions per state; the paper has 10, 100 and 1000"""
    expectile_tau: float = 0.5
    """risk level of the behaviour policy: 0.1 seeks risk, 0.9 avoids it"""
    epsilon: float = 0.1
    """probability that the behaviour policy takes a uniformly random action"""
    reset_prob: float = 0.1
    """probability of a jump to a random state after each collected transition"""

    targets: Literal["shared", "own"] = "shared"
    """shared: the paper's one robust target for all tables; own: every table bootstraps from itself, and
    the worst case is the actor's alone"""
    uncertainty_set: Literal["box", "hull", "ellipsoid"] = "ellipsoid"
    """set over the tables' Q-vectors: box (shared targets: SAC-N), hull (CH-N), ellipsoid (Ell-N)"""
    upsilon: float = 0.9
    """share of the tables that the ellipsoid covers"""
    num_critics: int = 100
    """N, the number of Q-tables"""
    bootstrap: bool = True
    """every table learns from its own resample; without, only the initial tables differ"""
    prior: tuple[float, float] | None = None
    """range of the initial tables; None is [r_min, r_max] / (1 - gamma), which bounds all values"""

    total_updates: int = 6000
    """updates; each sweeps the whole data set, for all tables and the actor"""
    gamma: float = 0.9
    """discount factor"""
    q_lr: float = 0.01
    """step size of the tables per transition; n visits compound to 1 - (1 - q_lr)^n"""
    policy_lr: float = 0.01
    """Adam step size of the actor"""
    polyak: float = 0.02
    """rate at which the target tables follow; the paper's 0.005 needs four times the updates"""
    alpha: float = 0.01
    """entropy coefficient"""


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
    """20 states along a river. Action 0 drifts left, 1 swims right; numbers as in the authors' code.
    P and R, both [S, A, S]."""
    P = np.zeros((20, 2, 20))
    R = np.zeros((20, 2, 20))
    for s in range(20):
        P[s, 0, max(s - 1, 0)] = 1.0
        R[s, 0, max(s - 1, 0)] = 5.0  # for every step left, not only on the bank
        P[s, 1, max(s - 1, 0)] += 0.137028976772708
        P[s, 1, s] += 0.284628388822161
        P[s, 1, min(s + 1, 19)] += 0.578342634405131
    R[19, 1, 19] = 86.2971023227292
    return P, R


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


def expectile_value_iteration(P, R, tau, gamma):
    """Algorithm 5's fixed point: Q(s, a) is the expectile over s' of r + gamma max_a' Q(s', a'). [S, A]"""
    q = np.zeros(P.shape[:2])
    while True:
        q_next = expectile(R + gamma * q.max(-1), P, tau)  # [S, A, S] -> [S, A]
        if np.abs(q_next - q).max() <= 1e-12 * (1 + np.abs(q_next).max()):
            return q_next
        q = q_next


def collect(P, behaviour, size, epsilon, reset_prob, rng):
    """Follow the policy with epsilon-random actions; counts of every (s, a, s_next). [S, A, S]"""
    S, A, _ = P.shape
    visits = np.zeros((S, A, S))
    cumulative = P.cumsum(-1).tolist()
    s = int(rng.integers(S))
    u_action, u_next, u_reset = rng.random((3, size))
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


# ===== Target and losses
def entropy(pi, log_pi):
    """H(pi) = -<pi, log pi>, with 0 log 0 = 0. [B]"""
    return -(pi * log_pi.clamp(min=torch.finfo(pi.dtype).min)).sum(-1)


def robust_target(reward, terminated, pi, log_pi, q_star, alpha, gamma):
    """y = r + gamma (1 - terminated)(<pi, q*> + alpha H(pi)), pi and q* at the next state, [B].
    With q [N, B, A] in place of q* every sample bootstraps from itself, [N, B]."""
    v = (pi * q_star).sum(-1) + alpha * entropy(pi, log_pi)
    return reward + gamma * (1 - terminated) * v


def actor_loss(pi, log_pi, q_star, alpha):
    """-(<pi, q*> + alpha H(pi)); q* held fixed: the exact gradient, by the envelope theorem. [B]"""
    return -((pi * q_star.detach()).sum(-1) + alpha * entropy(pi, log_pi))


# ===== Evaluation
def policy_value(P, R, pi, gamma):
    """V = r_pi + gamma P_pi V of the policy pi [S, A], solved. [S]"""
    P_pi = np.einsum("sa,sat->st", pi, P)
    r_pi = np.einsum("sa,sat,sat->s", pi, P, R)
    return np.linalg.solve(np.eye(len(P)) - gamma * P_pi, r_pi)


def greedy(pi):
    """The policy that takes the likeliest action; ties, as without data, are split evenly."""
    best = pi == pi.max(-1, keepdims=True)
    return best / best.sum(-1, keepdims=True)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)

    # ----- check the arguments: no number is negative, no count is 0
    lowest = {"expectile_tau": 0.001, "upsilon": 0.001}
    shares = ("epsilon", "reset_prob", "upsilon", "q_lr", "policy_lr", "polyak")
    highest = {"expectile_tau": 0.999, "gamma": 0.999, "dataset_size": 10**5, "num_critics": 10**4}
    highest = highest | dict.fromkeys(shares, 1)
    for name, value in asdict(args).items():
        low = lowest.get(name, 1 if type(value) is int and "seed" not in name else 0)
        high = highest.get(name, 10**9)
        if type(value) in (int, float) and not low <= value <= high:
            sys.exit(f"--{name.replace('_', '-')} {value}: it must lie in [{low}, {high}].")

    # ----- data: a random stream each, so that all sets get the same data and tables
    torch.set_num_threads(1)  # the tables are too small to share
    P, R = riverswim() if args.env_id == "RiverSwim" else machine_replacement()
    S, A, _ = P.shape
    N, size = args.num_critics, args.dataset_size * S
    behaviour = expectile_value_iteration(P, R, args.expectile_tau, args.gamma).argmax(-1)  # [S]
    rng = np.random.default_rng([args.seed, 0])
    visits = collect(P, behaviour, size, args.epsilon, args.reset_prob, rng)  # [S, A, S]
    resamples = np.tile(visits, (N, 1, 1, 1))  # [N, S, A, S]: how often table i sees (s, a, s_next)
    if args.bootstrap:  # |D| draws with replacement for every table
        rng = np.random.default_rng([args.seed, 1])
        resamples = rng.multinomial(size, visits.ravel() / size, N).reshape(N, S, A, S)
    resamples, visits = torch.tensor(resamples).double(), torch.tensor(visits)
    n = resamples.sum(-1)  # [N, S, A]: how often table i sees (s, a)
    p_hat = resamples / n.clamp(min=1)[..., None]  # [N, S, A, S]: table i's estimate of P
    critic_step = 1 - (1 - args.q_lr) ** n  # n steps towards one target; 0 without data
    seen = visits.sum(-1) > 0  # [S, A]
    state_weight = visits.sum((-1, -2)) / size  # [S]: a state's share of the data
    reward = torch.tensor(R)  # [S, A, S]

    # ----- critics, target critics, actor
    if args.prior is None:
        args.prior = (R.min().item() / (1 - args.gamma), R.max().item() / (1 - args.gamma))
    if not -(10**9) <= args.prior[0] <= args.prior[1] <= 10**9:
        sys.exit(f"--prior {args.prior}: two numbers, the lower end first.")
    q = torch.tensor(np.random.default_rng([args.seed, 2]).uniform(*args.prior, (N, S, A)))
    q_target = q.clone()
    logits = torch.zeros(S, A, dtype=torch.float64, requires_grad=True)
    # Adam divides by sqrt(v) + eps: with the tiny gradients of a nearly deterministic softmax a larger
    # eps would hold it there
    optimizer = torch.optim.Adam([logits], args.policy_lr, eps=1e-30)

    def worst_case(q, pi):
        """q* of the chosen set. [S, A]"""
        if args.uncertainty_set == "box":
            return worst_case_box(q, pi)
        if args.uncertainty_set == "hull":
            return worst_case_hull(q, pi)
        return worst_case_ellipsoid(q, pi, args.upsilon)

    # ----- returns are measured against random and optimal play
    optimal = expectile_value_iteration(P, R, 0.5, args.gamma).argmax(-1)  # [S]
    v_random = policy_value(P, R, np.full((S, A), 1 / A), args.gamma)  # [S]
    v_optimal = policy_value(P, R, np.eye(A)[optimal], args.gamma)  # [S]
    v_behaviour = policy_value(P, R, np.eye(A)[behaviour], args.gamma)  # [S]
    scale = v_optimal - v_random  # [S]

    # ----- run folder
    ell = "Ell-N" if args.upsilon == 1 else f"Ell_{args.upsilon:g}-N"
    box = "SAC-N" if args.targets == "shared" else "Box-N"
    method = {"box": box, "hull": "CH-N", "ellipsoid": ell}[args.uncertainty_set]
    if args.targets == "own":
        method += "-own"
    data = f"{args.env_id} tau {args.expectile_tau:g} x {args.dataset_size}"
    name = f"{args.env_id}__{os.path.basename(args.exp_name)}__{args.seed}"
    folder = os.path.join(args.output_dir, f"{name}__{int(1000 * time.time())}")
    try:
        os.makedirs(folder)
        json.dump(asdict(args), open(f"{folder}/args.json", "w"), indent=2)
    except OSError as error:
        sys.exit(f"--output-dir {args.output_dir}: {error.strerror}.")
    if args.track:
        import wandb

        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            group=f"{data} {method}",  # averages over seeds
            name=os.path.basename(folder),
            config=asdict(args),
            save_code=True,
        )

    # ----- training: Algorithm 1 with the sets of 2 and 3
    last_update, last_time, rows = 0, time.time(), []
    bar = tqdm(range(1, args.total_updates + 1), method, unit="update", mininterval=1)
    for update in bar:
        # compute target: the worst case over the target tables' set, or every table its own
        log_pi = logits.log_softmax(-1)  # [S, A]
        pi = log_pi.exp()
        with torch.no_grad():
            if args.targets == "shared":
                q_next = worst_case(q_target, pi)  # q*, [S, A]
            else:
                q_next = q_target.reshape(N, 1, 1, S, A)  # S is s_next; the same for every (s, a)
            # V(s_next) is [S] or [N, 1, 1, S] and meets the last axis of the reward [S, A, S]
            y = robust_target(reward, 0.0, pi, log_pi, q_next, args.alpha, args.gamma)

            # critic update: every table steps towards the mean target of its own transitions
            td_error = (p_hat * y).sum(-1) - q  # [N, S, A]
            q += critic_step * td_error

            # worst-case value vectors of the updated tables
            q_star = worst_case(q, pi)  # [S, A]

        # actor update, a mean over the states of the data
        pi_loss = (actor_loss(pi, log_pi, q_star, args.alpha) * state_weight).sum()
        optimizer.zero_grad()
        pi_loss.backward()
        optimizer.step()

        # update target tables
        q_target.lerp_(q, args.polyak)

        # log, evaluate
        if update % args.eval_interval == 0 or update == args.total_updates:
            with torch.no_grad():
                mu = q.mean(0)  # [S, A]
                std = q.std(0, correction=0)  # [S, A]
                row = {
                    "losses/critic_loss": td_error[n > 0].square().mean(),
                    "losses/actor_loss": pi_loss,
                    "charts/policy_entropy": (entropy(pi, log_pi) * state_weight).sum(),
                    "charts/q_robust": ((pi * q_star).sum(-1) * state_weight).sum(),
                    "charts/q_gap": ((pi * (mu - q_star)).sum(-1) * state_weight).sum(),
                    "charts/std_data_actions": std[seen].mean(),
                    "charts/std_other_actions": std[~seen].mean(),
                }
                policy = logits.softmax(-1).numpy()  # [S, A]
            row = {"update": update} | {name: value.item() for name, value in row.items()}
            row["charts/updates_per_second"] = (update - last_update) / (time.time() - last_time)
            v = policy_value(P, R, greedy(policy), args.gamma)  # [S]
            row["eval/normalized_return"] = 100 * (v - v_random).mean() / scale.mean()
            row["eval/normalized_return_state1"] = 100 * (v - v_random)[0] / scale[0]
            rows.append(row)
            table = [list(row.values()) for row in rows]
            np.savetxt(f"{folder}/metrics.csv", table, "%.10g", ",", header=",".join(row), comments="")
            if args.track:
                wandb.log(row, step=update)
            last_update, last_time = update, time.time()  # evaluations do not count
            bar.set_postfix_str(f"normalized_return={row['eval/normalized_return']:.1f}")

    # ----- the last policy, greedy: its exact return from every state, as evaluated above
    with torch.no_grad():
        log_pi = logits.log_softmax(-1)  # [S, A]
        h = (entropy(log_pi.exp(), log_pi) * state_weight).sum().item()
    tables = {"q": q, "q_target": q_target, "logits": logits.detach(), "visits": visits}
    torch.save(tables, f"{folder}/checkpoint.pt")
    result = {
        "script": os.path.basename(__file__),
        "method": method,
        "env_id": args.env_id,
        "dataset_id": None,
        "seed": args.seed,
        "updates": args.total_updates,
        "updates_per_second": np.mean([row["charts/updates_per_second"] for row in rows]),
        "eval_episodes": S,  # an expectation from every start state, in place of samples
        "eval_return_mean": v.mean(),
        "eval_return_std": v.std(),
        "eval_returns": v.tolist(),
        "random_return": v_random.mean(),
        "reference_return": v_optimal.mean(),
        "normalized_return": row["eval/normalized_return"],
        "normalized_return_state1": row["eval/normalized_return_state1"],
        "behaviour_normalized_return": 100 * (v_behaviour - v_random).mean() / scale.mean(),
        "policy_entropy": h,
    }
    json.dump(result, open(f"{folder}/result.json", "w"), indent=2)
    if args.track:
        wandb.run.summary.update(result)
    print(f"{method} on {data}: return {v.mean():.1f}, exact, mean over the start states")
    low, high = v_random.mean(), v_optimal.mean()
    print(f"normalized return {row['eval/normalized_return']:.1f} ", end="")
    print(f"(0: {low:.1f}, random play; 100: {high:.1f}, optimal play)")
    print(f"run folder: {folder}")
