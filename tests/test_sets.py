"""Protects the uncertainty sets, worst_case_*: against linear programs, a numerical minimiser, brute force and samples
that share no code with them, over ensembles of many shapes and in every degenerate case of the design."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from scipy.stats import chi2

from ersac_ensemble import worst_case_box, worst_case_ellipsoid, worst_case_hull
from ersac_epinet import worst_case_gaussian, worst_case_gaussian_box

DTYPES = (torch.float32, torch.float64)
KINDS = ("gaussian", "correlated", "scaled", "offset", "tiny", "duplicates")
PIS = ("random", "deterministic", "uniform")


def ensemble(kind, N, B, A, rng):
    """Q-samples [N, B, A] of different shapes, in float64 numpy."""
    q = rng.normal(size=(N, B, A))
    if kind == "duplicates":
        q[N // 2 :] = q[: N - N // 2]
    changed = {"correlated": 0.95 * q[..., :1] + 0.3 * q, "tiny": 1e-6 * q}
    changed["scaled"] = q * 10.0 ** rng.uniform(-1, 1, size=(1, B, A))
    changed["offset"] = q + 100 * rng.normal(size=(1, B, A))
    return changed.get(kind, q)


def policy(kind, B, A, rng):
    if kind == "deterministic":
        return np.eye(A)[rng.integers(A, size=B)]
    return rng.dirichlet(np.ones(A), size=B) if kind == "random" else np.full((B, A), 1 / A)


def distances(q):
    """Squared Mahalanobis distances of the samples q [N, A] from their mean, sorted."""
    d = q - q.mean(0)
    sigma = np.cov(q.T, ddof=0).reshape(q.shape[1], -1)
    return np.sort([x @ np.linalg.solve(sigma, x) for x in d])


def radius(q, pi, upsilon):
    """The radius that the ellipsoid has used: how many standard deviations of <pi, q> it went below the mean. [B]"""
    values = torch.einsum("nba,ba->nb", q.double(), pi.double())
    value = (pi.double() * worst_case_ellipsoid(q, pi, upsilon).double()).sum(-1)
    return ((values.mean(0) - value) / values.std(0, correction=0)).numpy()


# ----- against oracles
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
            x, p, lowest, worst = (t.double().numpy() for t in (q[:, b], pi[b], box[b], hull[b]))
            assert (lowest == x.min(0)).all() and (x == worst).all(-1).any()  # the hull's is a member of the ensemble
            scale = np.abs(x).max()  # the solver's tolerances are absolute
            corner = linprog(p, bounds=list(zip(x.min(0) / scale, x.max(0) / scale)))
            mix = linprog(x @ p / scale, A_eq=np.ones((1, N)), b_eq=[1.0], bounds=(0, None))
            found = np.array([p @ lowest, p @ worst]) / scale
            assert np.allclose(found, [corner.fun, mix.fun], rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-9)


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
            mu, sigma, radius2 = x.mean(0), np.cov(x.T, ddof=0), distances(x)[math.ceil(upsilon * N) - 1]
            # the minimiser works on u = (q - mu) / sd with its own constraint, from several starts
            sd = np.sqrt(np.diag(sigma))
            precision = np.linalg.inv(sigma / np.outer(sd, sd)) / radius2
            c = p * sd / np.abs(p * sd).max()
            constraint = {"type": "ineq", "fun": lambda u, m=precision: 1 - u @ m @ u}
            constraint["jac"] = lambda u, m=precision: -2 * m @ u
            options = {"constraints": constraint, "options": {"ftol": 1e-12, "maxiter": 500}}
            starts = rng.normal(size=(3, A)) * 0.1
            found = [minimize(lambda u, c=c: c @ u, u, jac=lambda u, c=c: c, **options).x for u in starts]
            best = min(c @ u for u in found if u @ precision @ u <= 1 + 1e-6) * np.abs(p * sd).max()
            noise = 1e-5 * np.abs(x).max() if dtype == torch.float32 else 0.0
            assert abs(p @ (ours - mu) - best) <= 1e-5 * math.sqrt(p @ sigma @ p) + noise
            if dtype == torch.float64:  # on the boundary of the set, exactly
                assert (ours - mu) @ np.linalg.solve(sigma, ours - mu) == pytest.approx(radius2, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_radius_is_the_order_statistic_of_the_distances(dtype):
    rng = np.random.default_rng(2)
    pi = torch.tensor(policy("random", 5, 2, rng), dtype=dtype)
    for N in (4, 7, 10, 25, 30, 100):
        q = torch.tensor(rng.normal(size=(N, 5, 2)), dtype=dtype)
        expected = np.sqrt([distances(q[:, b].double().numpy()) for b in range(5)])  # [B, N]
        for k in range(1, N + 1):  # 0.1 * 30 and 0.28 * 25 are a little above 3 and 7
            assert radius(q, pi, k / N) == pytest.approx(expected[:, k - 1], rel=1e-4)
            assert radius(q, pi, (k - 0.5) / N) == pytest.approx(expected[:, k - 1], rel=1e-4)
        assert radius(q, pi, 0.0) == pytest.approx(expected[:, 0], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_the_sets(kind):
    rng = np.random.default_rng(8)
    for case in range(150):
        N, A = rng.integers(1, 41), rng.integers(1, 7)
        q, pi = torch.tensor(ensemble(kind, N, 3, A, rng)), torch.tensor(policy(PIS[case % 3], 3, A, rng))
        small, large = np.sort(rng.uniform(0.01, 1, size=2))
        worst = [worst_case_ellipsoid(q, pi, upsilon) for upsilon in (1.0, large, small)]
        worst += [worst_case_box(q, pi), worst_case_hull(q, pi), q.mean(0)]
        everything, large, small, box, hull, mean = ((pi * q_star).sum(-1) for q_star in worst)
        slack = 1e-9 * (1 + q.abs().max())
        assert (box <= hull + slack).all() and (hull <= mean + slack).all() and (small <= mean + slack).all()
        assert (large <= small + slack).all()
        assert (everything <= hull + 1e-6 * q.std(0, correction=0).max() + slack).all()


# ----- degenerate ensembles
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_critic_and_critics_that_agree_up_to_rounding_give_their_value(dtype):
    rng = np.random.default_rng(3)
    for N, A, scale in [(1, 2, 1.0), (1, 18, 1e3), (5, 2, 1e-30), (100, 4, 0.1), (100, 18, 1e6), (3, 4, 0.0)]:
        q = torch.tensor(rng.normal(size=(1, 6, A)) * scale, dtype=dtype).repeat(N, 1, 1)
        rounded = q * (1 + torch.finfo(dtype).eps * torch.tensor(rng.integers(-1, 2, size=q.shape)))
        for kind in PIS:
            pi = torch.tensor(policy(kind, 6, A, rng), dtype=dtype)
            assert torch.equal(worst_case_box(q, pi), q[0]) and torch.equal(worst_case_hull(q, pi), q[0])
            for members in (q, rounded.to(dtype)):
                ours = worst_case_ellipsoid(members, pi, 0.9)
                assert ((ours - q[0]).abs() <= 1e-6 * q[0].abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_more_critics_than_actions(dtype):
    """N points in general position span N - 1 dimensions; there all of them lie at the squared distance N - 1."""
    rng = np.random.default_rng(4)
    for N, A in [(2, 2), (2, 4), (3, 4), (4, 4), (5, 18), (10, 18), (18, 18)]:
        q = torch.tensor(rng.normal(size=(N, 20, A)), dtype=dtype)
        pi = torch.tensor(policy("random", 20, A, rng), dtype=dtype)
        for upsilon in (0.1, 0.9, 1.0):
            assert radius(q, pi, upsilon) ** 2 == pytest.approx(N - 1, rel=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_collapsed_direction_neither_explodes_nor_sets_the_radius(dtype):
    """Action 1's samples agree up to rounding: the radius is that of action 0 alone, and q* stays at hand."""
    rng = np.random.default_rng(5)
    for offset in (0.0, 1.0, 50.0):
        q = rng.normal(size=(100, 8, 2))
        q[..., 1] = offset + rng.uniform(-0.5, 0.5, size=(100, 8)) * torch.finfo(dtype).eps
        q = torch.tensor(q, dtype=dtype)
        alone = [np.sqrt(distances(q[:, b, :1].double().numpy())[89]) for b in range(8)]
        assert radius(q, torch.tensor([[1.0, 0.0]] * 8, dtype=dtype), 0.9) == pytest.approx(alone, rel=0.02)
        for kind in PIS:
            q_star = worst_case_ellipsoid(q, torch.tensor(policy(kind, 8, 2, rng), dtype=dtype), 0.9)
            assert q_star.isfinite().all() and ((q_star[:, 1] - offset).abs() < 1e-4).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("A", [3, 18])
def test_scales_far_from_one_and_single_precision(dtype, A):
    rng = np.random.default_rng(6)
    for kind, scale in zip(2 * KINDS, (1e-20, 1e-10, 1.0, 1.0, 1e10, 1e18)):
        q, pi = torch.tensor(ensemble(kind, 64, 5, A, rng)), torch.tensor(policy("random", 5, A, rng))
        spread, size = q.std(0).max().item(), q.abs().max().item()
        ours = worst_case_ellipsoid((q * scale).to(dtype), pi.to(dtype), 0.9).double() / scale
        assert (ours - worst_case_ellipsoid(q, pi, 0.9)).abs().max() <= 1e-3 * spread + 1e-6 * size


# ----- the Epinet's closed form
def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("A", [2, 4, 18])
def test_gaussian_set_and_its_box_against_a_hundred_thousand_samples(A):
    mu, sigma_bar, z = draw(2, A), draw(2, A, A + 2, seed=1), draw(100_000, A + 2, seed=2)
    pi = draw(2, A, seed=3).softmax(-1)
    q = mu + torch.einsum("bad,nd->nba", sigma_bar, z)  # [n, B, A]
    for upsilon in (0.5, 0.9):
        root = math.sqrt(chi2.ppf(upsilon, A))
        ours = (pi * worst_case_gaussian(mu, sigma_bar, pi, root)).sum(-1)
        sampled = (pi * worst_case_ellipsoid(q, pi, upsilon)).sum(-1)
        assert ((ours - sampled).abs() < 0.02 * ((pi * mu).sum(-1) - ours)).all()
        box = worst_case_gaussian_box(mu, sigma_bar, pi, root)
        for a in range(A):  # its side is where the ellipsoid ends along this axis
            lowest = worst_case_gaussian(mu, sigma_bar, torch.eye(A).double()[[a, a]], root)[:, a]
            torch.testing.assert_close(box[:, a], lowest)
        assert ((pi * box).sum(-1) < ours).all()


def test_gaussian_set_of_fewer_indices_than_actions():
    """Its Q-vectors lie in a plane, where the set holds all z of a length up to the radius."""
    sigma_bar, z = draw(1, 4, 2, seed=1), draw(100_000, 2, seed=2)
    pi = torch.full((1, 4), 0.25).double()
    q_star = worst_case_gaussian(torch.zeros(1, 4).double(), sigma_bar, pi, 2.5)
    edge = torch.einsum("bad,nd->nba", sigma_bar, 2.5 * z / z.norm(dim=-1, keepdim=True))
    assert (pi * q_star).sum().item() == pytest.approx((edge * pi).sum(-1).min().item(), rel=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gaussian_set_in_degenerate_cases(dtype):
    mu, pi = draw(3, 4).to(dtype), torch.eye(4, dtype=dtype)[:3]
    for worst in (worst_case_gaussian, worst_case_gaussian_box):
        assert torch.equal(worst(mu, torch.zeros(3, 4, 5, dtype=dtype), pi, 2.0), mu)
        for scale in (1e-30, 1e-10, 1e10):
            sigma_bar = (draw(3, 4, 5) * scale).to(dtype)
            value = (pi * worst(torch.zeros_like(mu), sigma_bar, pi, 2.0)).sum(-1)
            expected = -2 * sigma_bar[range(3), range(3)].double().norm(dim=-1)  # a deterministic policy
            assert value.dtype == dtype and value.double().numpy() == pytest.approx(expected.numpy(), rel=1e-5)
