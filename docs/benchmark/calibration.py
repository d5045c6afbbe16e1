"""Does the set hold the truth? What only the true MDP tells about runs of ersac_tabular.py, and their grids.

    python docs/benchmark/calibration.py --targets own --seed 100

A policy that was learned on the data was also chosen on them, so its values are the ones that the data overrate. Here
the policy is fixed beforehand, the one that collected the data, and the critics of ersac_tabular.py only evaluate it on
RiverSwim: the share of states whose ellipsoid holds the true Q-vector, and the share whose robust value is a lower
bound of the true value, by upsilon. Unseen pairs have columns of their own: no data speak there, only the initial
tables do. The grids are run by sweep.py --study; rates() scores the learned policies there.
"""

import itertools
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from scipy.optimize import nnls

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from ersac_tabular import Args as Tabular  # noqa: E402
from ersac_tabular import (  # noqa: E402
    collect,
    entropy,
    expectile_value_iteration,
    machine_replacement,
    policy_value,
    riverswim,
    robust_target,
    worst_case_box,
    worst_case_ellipsoid,
    worst_case_hull,
)

UPSILONS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
NEAR = 0.01  # tolerance for rounding and incomplete convergence


@dataclass
class Args:
    dataset_size: int = 100
    """transitions per state"""
    expectile_tau: float = 0.5
    """risk level of the policy"""
    targets: Literal["own", "shared"] = "own"
    """own: every table bootstraps from itself; shared: one robust target for all"""
    seed: int = 100
    """seed of the data, the initial tables and the resamples"""
    output_dir: str = "runs"
    """folder that receives the run folder"""


def table_cells(study):
    """The cells of a study of the tables: the arguments that differ from the script's defaults (or,
    fixed-policy, from those of this script)."""
    coarse = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
    curves = [(100, 0.5), (100, 0.1), (100, 0.9), (10, 0.5), (1000, 0.5)]  # size, tau
    if study == "fixed-policy":  # how often the set holds the truth, against upsilon, by evaluation alone
        cells = []
        for (size, tau), targets in itertools.product(curves, ("own", "shared")):
            cells.append({"dataset_size": size, "expectile_tau": tau, "targets": targets})
        return cells
    if study == "calibration":  # the same for learned policies
        cells = []
        for (size, tau), targets in itertools.product(curves, ("shared", "own")):
            for upsilon in UPSILONS if (size, tau) == (100, 0.5) else coarse:
                cell = dict(env_id="RiverSwim", dataset_size=size, expectile_tau=tau, targets=targets)
                cells.append(cell | dict(uncertainty_set="ellipsoid", upsilon=upsilon))
        return cells
    paper = []
    envs, sizes, taus = ("MachineReplacement", "RiverSwim"), (10, 100, 1000), (0.1, 0.5, 0.9)
    sets = (("box", 0.9), ("hull", 0.9), ("ellipsoid", 1.0), ("ellipsoid", 0.9))  # box and hull ignore upsilon
    for env, size, tau, (kind, upsilon) in itertools.product(envs, sizes, taus, sets):
        cell = dict(env_id=env, dataset_size=size, expectile_tau=tau)
        paper.append(cell | dict(uncertainty_set=kind, upsilon=upsilon))
    little = [cell for cell in paper if cell["dataset_size"] == 10]
    # larger steps reach the same fixed point sooner; initial tables below anything attainable
    fast = dict(bootstrap=False, q_lr=0.1, polyak=0.05, total_updates=3000)
    below = {"MachineReplacement": (-1010.0, -1000.0), "RiverSwim": (-10.0, 0.0)}
    if study == "paper":  # the paper's table
        return paper
    if study == "no-bootstrap":  # the same data for every critic, trained to convergence
        pessimistic = [cell | fast | dict(prior=below[cell["env_id"]]) for cell in little]
        return pessimistic + [cell | fast for cell in little if cell["env_id"] == "RiverSwim"]
    if study == "targets":  # one target for all critics or each its own, by bootstrap and initial tables
        cells = []
        for cell, targets in itertools.product(paper, ("shared", "own")):
            for data, prior in itertools.product(({}, fast), ({}, dict(prior=below[cell["env_id"]]))):
                if cell["dataset_size"] < 1000:
                    cells.append(cell | dict(targets=targets) | data | prior)
        return cells
    if study == "upsilon":  # smaller shares of critics in the ellipsoid; 0.9 and 1.0 are in the paper's
        ellipsoids = [cell for cell in little if cell["upsilon"] == 1.0]
        return [cell | dict(upsilon=u) for cell in ellipsoids for u in (0.1, 0.3, 0.5, 0.7)]
    if study == "critics":  # fewer of them; 100 are in the paper's
        return [cell | dict(num_critics=n) for cell in little for n in (3, 10, 30)]
    # tuning: what was tried before the settings were fixed
    changes = [dict(total_updates=n) for n in (1000, 2000, 6000)] + [dict(reset_prob=p) for p in (0.0, 0.5)]
    changes = [change | dict(polyak=0.005) for change in (*changes, dict(prior=(0.0, 10.0)))]
    return [cell | change for change in changes for cell in little]


def mahalanobis(x, q):
    """Squared distances of points x [M, B, A] from the mean of the samples q [N, B, A], in their covariance. [B, M]"""
    mu = q.mean(0)
    d = (q - mu).permute(1, 2, 0)  # [B, A, N]
    sigma = d @ d.mT / len(q)  # [B, A, A]
    scale = sigma.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]  # [B, 1, 1]
    ridge = (1e-12 * scale + torch.finfo(q.dtype).tiny) * torch.eye(q.shape[-1], dtype=q.dtype)
    gap = (x - mu).permute(1, 2, 0)  # [B, A, M]
    return (gap * torch.linalg.solve(sigma + ridge, gap)).sum(1)


def radius_squared(q, upsilon):
    """Of the smallest ellipsoid around the mean that holds a share upsilon of the samples. [B]"""
    k = min(max(math.ceil(upsilon * len(q) - 1e-9), 1), len(q))  # 0.28 * 25 is a little above 7
    return mahalanobis(q, q).kthvalue(k, dim=-1).values


def inside(x, q, uncertainty_set, upsilon, tolerance=0.0):
    """Whether the points x [B, A] lie in the sets built from q [N, B, A], up to a tolerance. Bool [B]"""
    if uncertainty_set == "box":
        return ((q.amin(0) - tolerance <= x) & (x <= q.amax(0) + tolerance)).all(-1)
    if uncertainty_set == "ellipsoid":
        nearest = q.mean(0).clamp(x - tolerance, x + tolerance)  # x moved towards the mean, by the tolerance
        return mahalanobis(nearest[None], q)[:, 0] <= radius_squared(q, upsilon)
    # x is in the hull iff w >= 0, sum(w) = 1 and sum_n w_n (q_n - x) = 0 has a solution
    scale = (q - x).abs().amax((0, 2)).clamp(min=1e-300)  # [B]
    d = (q - x) / scale[:, None]  # [N, B, A]
    system = torch.cat([d, torch.ones_like(d[..., :1])], -1)  # [N, B, A + 1]
    system = system.permute(1, 2, 0).numpy()  # [B, A + 1, N]
    goal = np.eye(system.shape[1])[-1]
    error = torch.tensor([nnls(system[b], goal)[1] for b in range(len(system))])  # [B]
    return error < 1e-9 + tolerance / scale


def support_optimum(P, R, visits, gamma, v_low):
    """Normalised return of the best policy of the empirical MDP that takes only actions seen in the data."""
    counts = visits.sum(-1)  # [S, A]
    P_hat = visits / np.maximum(counts, 1)[..., None]
    v = np.zeros(len(P))
    for _ in range(2000):
        q = np.where(counts > 0, (P_hat * (R + gamma * v)).sum(-1), -np.inf)  # [S, A]
        v = np.where((counts > 0).any(-1), q.max(-1), v_low)
    seen = np.where(np.isfinite(q), q == q.max(-1, keepdims=True), False)
    pi = np.where(seen.any(-1, keepdims=True), seen / np.maximum(seen.sum(-1, keepdims=True), 1), 1 / P.shape[1])
    best = np.zeros(len(P))
    for _ in range(2000):
        q_best = (P * (R + gamma * best)).sum(-1)
        best = q_best.max(-1)
    uniform = np.full_like(pi, 1 / P.shape[1])
    optimal = np.eye(P.shape[1])[q_best.argmax(-1)]
    value, low, high = (policy_value(P, R, policy, gamma).mean() for policy in (pi, uniform, optimal))
    return 100 * (value - low) / (high - low)


def rates(args, checkpoint):
    """What only the true MDP tells about a run of ersac_tabular.py, from its arguments and its checkpoint: whether the
    robust value bounds the last policy's soft value from below, whether the set holds its Q-vector, and what the best
    policy is worth that takes only actions of the data."""
    tables = torch.load(checkpoint, weights_only=True)
    P, R = {"MachineReplacement": machine_replacement, "RiverSwim": riverswim}[args["env_id"]]()
    gamma, upsilon, kind = args["gamma"], args["upsilon"], args["uncertainty_set"]
    q, log_pi = tables["q"], tables["logits"].log_softmax(-1)
    pi = log_pi.exp()
    if kind == "ellipsoid":
        q_star = worst_case_ellipsoid(q, pi, upsilon)  # [S, A]
    else:
        q_star = {"box": worst_case_box, "hull": worst_case_hull}[kind](q, pi)
    bonus = args["alpha"] * entropy(pi, log_pi)  # [S]
    robust_v = ((pi * q_star).sum(-1) + bonus).numpy()  # [S]
    soft_v = policy_value(P, R + bonus.numpy()[:, None, None], pi.numpy(), gamma)  # [S]
    soft_q = torch.tensor((P * (R + gamma * soft_v)).sum(-1))  # [S, A]
    return {
        "lower_bound_rate": (robust_v <= soft_v + NEAR).mean().item(),
        "coverage_rate": inside(soft_q, q, kind, upsilon, NEAR).double().mean().item(),
        "support_optimum": support_optimum(P, R, tables["visits"].numpy(), gamma, args["prior"][0]),
    }


def evaluate_fixed(size, tau, targets, seed):
    """Rows of one data set: the defaults of ersac_tabular.py, with a policy that stays as it is."""
    default = Tabular()
    N = default.num_critics
    P, R = riverswim()
    S, A, _ = P.shape
    behaviour = expectile_value_iteration(P, R, tau, default.gamma).argmax(-1)  # [S]
    pi = (1 - default.epsilon) * np.eye(A)[behaviour] + default.epsilon / A  # the policy of the data, [S, A]
    rng = np.random.default_rng([seed, 0])
    visits = collect(P, behaviour, size * S, default.epsilon, default.reset_prob, rng)  # [S, A, S]
    resamples = np.random.default_rng([seed, 1]).multinomial(size * S, visits.ravel() / visits.sum(), N)
    resamples = torch.tensor(resamples.reshape(N, S, A, S)).double()
    n = resamples.sum(-1)  # [N, S, A]
    p_hat = resamples / n.clamp(min=1)[..., None]  # [N, S, A, S]
    step = 1 - (1 - default.q_lr) ** n
    prior = (R.min() / (1 - default.gamma), R.max() / (1 - default.gamma))
    v = policy_value(P, R, pi, default.gamma)  # [S]
    truth = torch.tensor((P * (R + default.gamma * v)).sum(-1))  # Q^pi, [S, A]
    seen = visits.sum(-1).min(-1) > 0  # every action of the state was taken, [S]
    pi = torch.tensor(pi)
    reward = torch.tensor(R)

    def train(upsilon):
        q = torch.tensor(np.random.default_rng([seed, 2]).uniform(*prior, (N, S, A)))
        q_target = q.clone()
        for _ in range(default.total_updates):
            if targets == "shared":
                q_next = worst_case_ellipsoid(q_target, pi, upsilon)  # [S, A]
            else:
                q_next = q_target[:, None, None]  # [N, 1, 1, S, A]
            y = robust_target(reward, 0.0, pi, pi.log(), q_next, 0.0, default.gamma)  # [(N,) S, A, S]
            q += step * ((p_hat * y).sum(-1) - q)
            q_target.lerp_(q, default.polyak)
        return q

    rows = []
    q = train(None) if targets == "own" else None  # own targets know no upsilon while they learn
    for upsilon in UPSILONS:
        if targets == "shared":
            q = train(upsilon)
        covered = inside(truth, q, "ellipsoid", upsilon, NEAR).numpy()  # [S]
        bound = ((pi * worst_case_ellipsoid(q, pi, upsilon)).sum(-1).numpy() <= v + NEAR).astype(float)  # [S]
        row = {"upsilon": upsilon, "coverage_rate": covered.mean(), "lower_bound_rate": bound.mean()}
        row |= {"coverage_rate_seen": covered[seen].mean(), "lower_bound_rate_seen": bound[seen].mean()}
        rows.append(row | {"share_seen": seen.mean()})
    return rows


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    rows = evaluate_fixed(args.dataset_size, args.expectile_tau, args.targets, args.seed)
    folder = os.path.join(args.output_dir, f"calibration__{args.targets}__{args.seed}")
    os.makedirs(folder, exist_ok=True)
    json.dump(asdict(args), open(f"{folder}/args.json", "w"), indent=2)
    json.dump({"rows": rows}, open(f"{folder}/result.json", "w"), indent=2)
    for row in rows:
        print(", ".join(f"{name} {value:.2f}" for name, value in row.items()))
