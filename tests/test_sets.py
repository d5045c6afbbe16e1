"""The uncertainty sets against oracles that share no code with them, over random and degenerate ensembles."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize

from ersac_tabular import (
    center,
    ellipsoid_radius,
    inside,
    mahalanobis,
    worst_case_box,
    worst_case_ellipsoid,
    worst_case_hull,
)

DTYPES = (torch.float32, torch.float64)
KINDS = ("gaussian", "correlated", "scaled", "offset", "tiny", "duplicates")
PIS = ("random", "deterministic", "uniform")


def ensemble(kind, N, B, A, rng):
    """Q-samples [N, B, A] of different shapes, in float64 numpy."""
    q = rng.normal(size=(N, B, A))
    if kind == "correlated":
        q = 0.95 * q[..., :1] + 0.3 * q
    if kind == "scaled":
        q = q * 10.0 ** rng.uniform(-1, 1, size=(1, B, A))
    if kind == "offset":
        q = q + rng.normal(size=(1, B, A)) * 100
    if kind == "tiny":
        q = q * 1e-6
    if kind == "duplicates":
        q[N // 2 :] = q[: N - N // 2]
    return q


def policy(kind, B, A, rng):
    pi = rng.dirichlet(np.ones(A), size=B)
    if kind == "deterministic":
        pi = np.eye(A)[rng.integers(A, size=B)]
    if kind == "uniform":
        pi = np.full((B, A), 1 / A)
    return pi


def brute_force_radius_squared(q, upsilon):
    """The smallest radius^2 with a share upsilon of the samples q [N, A] inside, by trying the distance of each."""
    d = q - q.mean(0)
    distances = np.array([x @ np.linalg.solve(np.cov(q.T, ddof=0).reshape(q.shape[1], -1), x) for x in d])
    return min(r for r in distances if (distances <= r * (1 + 1e-12)).mean() >= upsilon - 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_box_and_hull_solve_their_linear_programs(kind, dtype):
    rng = np.random.default_rng(0)
    for (N, A), pi_kind in zip([(1, 2), (3, 4), (10, 2), (30, 18), (100, 4)], 2 * PIS):
        q = torch.tensor(ensemble(kind, N, 4, A, rng), dtype=dtype)
        pi = torch.tensor(policy(pi_kind, 4, A, rng), dtype=dtype)
        box, hull = worst_case_box(q, pi), worst_case_hull(q, pi)
        assert box.dtype == hull.dtype == dtype and box.shape == hull.shape == (4, A)
        for b in range(4):
            scale = q[:, b].abs().max().item()  # the solver's tolerances are absolute
            x, p, ours_box, ours_hull = (
                t.double().numpy() for t in (q[:, b] / scale, pi[b], box[b] / scale, hull[b] / scale)
            )
            tolerance = 1e-6 if dtype == torch.float32 else 1e-9
            low = linprog(p, bounds=list(zip(x.min(0), x.max(0))))
            assert abs(low.fun - p @ ours_box) <= tolerance
            mix = linprog(x @ p, A_eq=np.ones((1, N)), b_eq=[1.0], bounds=(0, None))
            assert abs(mix.fun - p @ ours_hull) <= tolerance
            assert (x == ours_hull).all(-1).any()  # a member of the ensemble itself


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_ellipsoid_solves_its_convex_program(kind, dtype):
    rng = np.random.default_rng(1)
    for (N, A), pi_kind, upsilon in zip([(8, 2), (30, 3), (100, 4), (12, 2)], (*PIS, "random"), (1.0, 0.9, 0.5, 0.25)):
        q = torch.tensor(ensemble(kind, N, 4, A, rng), dtype=dtype)
        pi = torch.tensor(policy(pi_kind, 4, A, rng), dtype=dtype)
        q_star = worst_case_ellipsoid(q, pi, upsilon)
        assert q_star.dtype == dtype and q_star.shape == (4, A)
        for b in range(4):
            x, p, ours = (t.double().numpy() for t in (q[:, b], pi[b], q_star[b]))
            mu, sigma = x.mean(0), np.cov(x.T, ddof=0).reshape(A, A)
            radius2 = brute_force_radius_squared(x, upsilon)
            # the minimiser works on u = (q - mu) / sd with its own constraint, from several starts
            sd = np.sqrt(np.diag(sigma))
            precision = np.linalg.inv(sigma / np.outer(sd, sd))
            c = p * sd / np.abs(p * sd).max()
            solutions = [
                minimize(
                    lambda u, c=c: c @ u,
                    start,
                    jac=lambda u, c=c: c,
                    constraints={
                        "type": "ineq",
                        "fun": lambda u, m=precision, r=radius2: 1 - u @ m @ u / r,
                        "jac": lambda u, m=precision, r=radius2: -2 * m @ u / r,
                    },
                    options={"ftol": 1e-12, "maxiter": 500},
                ).x
                for start in rng.normal(size=(3, A)) * 0.1
            ]
            best = min(c @ u for u in solutions if u @ precision @ u <= radius2 * (1 + 1e-6)) * np.abs(p * sd).max()
            scale = math.sqrt(p @ sigma @ p)
            noise = 1e-6 * np.abs(x).max() if dtype == torch.float32 else 0.0
            assert abs(p @ (ours - mu) - best) <= 1e-5 * scale + 10 * noise
            if dtype == torch.float64:  # on the boundary of the set, exactly
                assert (ours - mu) @ np.linalg.solve(sigma, ours - mu) == pytest.approx(radius2, rel=1e-6)
                assert p @ (ours - mu) == pytest.approx(-math.sqrt(radius2) * scale, rel=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_radius_covers_the_share_upsilon_of_the_samples(dtype):
    rng = np.random.default_rng(2)
    for N in (1, 2, 7, 10, 30, 100):
        _, d = center(torch.tensor(rng.normal(size=(N, 5, 2)), dtype=dtype))
        for k in range(1, N + 1):
            radius2 = ellipsoid_radius(d, k / N).square()
            held = (mahalanobis(d, d) <= radius2[:, None] * (1 + 1e-5)).sum(-1)
            assert (held >= k).all() and (N <= 3 or (held == k).all())  # for N <= 3 distances tie
    # 0.1 * 30 = 3.0000000000000004 must still mean the third smallest
    _, d = center(torch.tensor(rng.normal(size=(30, 1, 2)), dtype=dtype))
    assert ellipsoid_radius(d, 0.1) == mahalanobis(d, d).sort().values[0, 2].sqrt()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("set_", ["box", "hull", "ellipsoid"])
def test_one_critic_and_identical_critics_give_their_value(set_, dtype):
    rng = np.random.default_rng(3)
    worst = dict(box=worst_case_box, hull=worst_case_hull, ellipsoid=lambda q, pi: worst_case_ellipsoid(q, pi, 0.9))
    for N, A, scale in [(1, 2, 1.0), (1, 18, 1e3), (5, 2, 1e-30), (100, 4, 0.1), (100, 18, 1e6), (3, 4, 0.0)]:
        q = torch.tensor(rng.normal(size=(1, 6, A)) * scale, dtype=dtype).repeat(N, 1, 1)
        for kind in PIS:
            pi = torch.tensor(policy(kind, 6, A, rng), dtype=dtype)
            assert torch.equal(worst[set_](q, pi), q[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_more_critics_than_actions(dtype):
    """N points in general position span N - 1 dimensions; there all of them lie at the squared distance N - 1."""
    rng = np.random.default_rng(4)
    for N, A in [(2, 2), (2, 4), (3, 4), (4, 4), (5, 18), (10, 18), (18, 18)]:
        q, pi = torch.tensor(rng.normal(size=(N, 20, A)), dtype=dtype), torch.tensor(policy("random", 20, A, rng))
        mu, d = center(q)
        assert mahalanobis(d, d).numpy() == pytest.approx(N - 1, rel=0.01)
        q, pi = q - mu.to(dtype), pi.to(dtype)
        for upsilon in (0.1, 0.9, 1.0):
            value = (pi * worst_case_ellipsoid(q, pi, upsilon)).sum(-1)
            sd = torch.einsum("nba,ba->nb", q, pi).std(0, correction=0)
            assert value.numpy() == pytest.approx(-math.sqrt(N - 1) * sd.numpy(), rel=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_collapsed_direction_neither_explodes_nor_sets_the_radius(dtype):
    """Action 1's samples agree up to rounding: the radius is that of action 0 alone, and q* stays at hand."""
    rng = np.random.default_rng(5)
    for offset in (0.0, 1.0, 50.0):
        q = rng.normal(size=(100, 8, 2))
        q[..., 1] = offset + rng.normal(size=(100, 8)) * np.finfo(np.float32 if dtype == torch.float32 else float).eps
        q = torch.tensor(q, dtype=dtype)
        alone = q[..., 0].double()
        z = ((alone - alone.mean(0)) / alone.std(0, correction=0)).square().sort(0).values[89].sqrt()
        assert ellipsoid_radius(center(q)[1], 0.9).numpy() == pytest.approx(z.numpy(), rel=0.02)
        for kind in PIS:
            pi = torch.tensor(policy(kind, 8, 2, rng), dtype=dtype)
            q_star = worst_case_ellipsoid(q, pi, 0.9)
            assert q_star.isfinite().all()
            assert ((q_star[:, 1] - offset).abs() < 1e-4).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1e10, 1e18])
def test_scales_far_from_one(scale, dtype):
    rng = np.random.default_rng(6)
    q = torch.tensor(rng.normal(size=(50, 5, 3)))
    pi = torch.tensor(policy("random", 5, 3, rng), dtype=dtype)
    ours = worst_case_ellipsoid((q * scale).to(dtype), pi, 0.9).double() / scale
    assert ours.numpy() == pytest.approx(worst_case_ellipsoid(q, pi.double(), 0.9).numpy(), rel=1e-4, abs=1e-4)


def test_float32_agrees_with_float64():
    rng = np.random.default_rng(7)
    for kind in KINDS:
        q, pi = torch.tensor(ensemble(kind, 64, 50, 4, rng)), torch.tensor(policy("random", 50, 4, rng))
        q, pi = q.float().double(), pi.float().double()
        spread = q.std(0).amax().item()
        for worst in (worst_case_box, worst_case_hull, lambda q, pi: worst_case_ellipsoid(q, pi, 0.9)):
            gap = (worst(q.float(), pi.float()).double() - worst(q, pi)).abs().max().item()
            assert gap <= 1e-3 * spread + 1e-6 * q.abs().max().item()


def test_membership():
    """`inside` against a linear program for the hull and the definitions for box and ellipsoid."""
    rng = np.random.default_rng(8)
    q = rng.normal(size=(12, 200, 2))
    x = rng.normal(size=(200, 2))
    got = {kind: inside(torch.tensor(x), torch.tensor(q), kind, 0.9).numpy() for kind in ("box", "hull", "ellipsoid")}
    for b in range(200):
        feasible = linprog(
            np.zeros(12), A_eq=np.vstack([q[:, b].T, np.ones(12)]), b_eq=[*x[b], 1.0], bounds=(0, None)
        ).success
        assert got["hull"][b] == feasible
        assert got["box"][b] == all(q[:, b, a].min() <= x[b, a] <= q[:, b, a].max() for a in range(2))
        d = x[b] - q[:, b].mean(0)
        distance = d @ np.linalg.solve(np.cov(q[:, b].T, ddof=0), d)
        assert got["ellipsoid"][b] == (distance <= brute_force_radius_squared(q[:, b], 0.9))
    assert 0 < got["hull"].mean() < got["box"].mean() < 1 and 0 < got["ellipsoid"].mean() < 1
    assert inside(torch.tensor(q[3]), torch.tensor(q), "hull", 0.9).all()  # members are inside their hull


@st.composite
def samples(draw):
    N, B, A = draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q = ensemble(draw(st.sampled_from(KINDS)), N, B, A, rng)
    return torch.tensor(q), torch.tensor(policy(draw(st.sampled_from(PIS)), B, A, rng)), rng


def values(q, pi, upsilon):
    worst = worst_case_box(q, pi), worst_case_hull(q, pi), worst_case_ellipsoid(q, pi, upsilon)
    return [(pi * q_star).sum(-1) for q_star in worst]


@settings(max_examples=150, deadline=None)
@given(samples(), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_order_of_the_sets(case, upsilon, other):
    q, pi, _ = case
    box, hull, ellipsoid = values(q, pi, upsilon)
    mean = (pi * q.mean(0)).sum(-1)
    slack = 1e-9 * (1 + q.abs().max())
    assert (box <= hull + slack).all() and (hull <= mean + slack).all() and (ellipsoid <= mean + slack).all()
    small, large = sorted((upsilon, other))
    assert (
        values(q, pi, large)[2] <= values(q, pi, small)[2] + slack
    ).all()  # a larger ellipsoid has a worse worst case
    # the ellipsoid of all samples contains their hull
    assert (values(q, pi, 1.0)[2] <= hull + 1e-6 * q.std(0, correction=0).max() + slack).all()


@settings(max_examples=150, deadline=None)
@given(samples(), st.floats(0.01, 1.0), st.floats(0.01, 100.0), st.floats(-100, 100))
def test_symmetries_of_the_sets(case, upsilon, scale, shift):
    q, pi, rng = case
    permuted = q[rng.permutation(len(q))]
    b = torch.tensor(rng.normal(size=q.shape[1:])) * shift  # a shift of every action's value, the same for all critics
    tolerance = dict(rtol=1e-6, atol=1e-6 * float(q.std(0, correction=0).max()) + 1e-9 * (1 + float(q.abs().max())))
    for ours, again in zip(values(q, pi, upsilon), values(permuted, pi, upsilon)):
        torch.testing.assert_close(ours, again, **tolerance)
    for worst in (worst_case_box, worst_case_hull, lambda q, pi: worst_case_ellipsoid(q, pi, upsilon)):
        moved = (pi * (worst(scale * q + b, pi) - b)).sum(-1)
        wide = dict(rtol=1e-6, atol=scale * tolerance["atol"] + 1e-9 * float(b.abs().max()))
        torch.testing.assert_close(moved, scale * (pi * worst(q, pi)).sum(-1), **wide)
