"""Protects own and shared targets: closed forms against sampling, and a chain on which both can be solved by hand."""

import math

import pytest
import torch
from scipy.stats import chi2

from ersac_ensemble import worst_case_ellipsoid
from ersac_epinet import epinet_loss, propagated_spread, robust_target, worst_case_gaussian


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ----- what the next state's spread adds to an index's own target
def test_propagated_spread_is_the_covariance_of_the_target_with_its_index():
    pi, r, mu_next, sigma_next = draw(5, 3, seed=1).softmax(-1), draw(5, seed=6), draw(5, 3, seed=2), draw(5, 3, 4)
    ended, z = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0]).double(), draw(400_000, 4, seed=9)
    q_next = mu_next + torch.einsum("bad,nd->nba", sigma_next, z)
    own = robust_target(r, ended, pi, pi.log(), q_next, 0.3, 0.9)  # [n, B]
    assert own.shape == (400_000, 5)
    covariance = (own - own.mean(0)).T @ z / len(z)  # Cov(y(z), z), [B, d]
    spread = propagated_spread(ended, pi, sigma_next, 0.9)
    assert (covariance - spread).abs().max() < 0.02
    assert (spread[ended == 1] == 0).all() and spread[ended == 0].abs().max() > 0.3


# ----- what the set asks of the policy
def test_the_ellipsoids_best_policy_weighs_actions_by_their_inverse_variance():
    """Equal means, uncorrelated actions, no entropy bonus: <pi, q*> is highest at pi_a ~ 1 / variance_a."""
    scales = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    sigma = torch.diag(scales)[None]
    logits = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], 0.05)
    for _ in range(800):
        pi = logits.softmax(-1)
        q_star = worst_case_gaussian(torch.zeros(1, 3, dtype=torch.float64), sigma, pi.detach(), 2.0)
        optimizer.zero_grad()
        (-(pi * q_star).sum()).backward()
        optimizer.step()
    expected = 1 / scales**2 / (1 / scales**2).sum()
    torch.testing.assert_close(logits.softmax(-1)[0].detach(), expected, rtol=1e-3, atol=1e-3)


# ----- a chain s_0 -> s_1 -> ... -> s_K-1 -> end with one action, solved by hand
K, GAMMA, NOISE, RADIUS = 6, 0.8, 0.3, 1.7
REWARDS = draw(K, seed=11)
PI = torch.ones(K, 1, dtype=torch.float64)
ENDED = torch.eye(K, dtype=torch.float64)[-1]
ACTION = torch.zeros(K, dtype=torch.long)
DISCOUNT = GAMMA ** torch.arange(K, dtype=torch.float64)


def solve_chain(targets, c):
    """Gradient descent on the Epinet's loss with one-hot states: a step of 1/2 solves a state for its target."""
    mu = torch.zeros(K, 1, dtype=torch.float64, requires_grad=True)
    sigma = torch.zeros(K, 1, c.shape[1], dtype=torch.float64, requires_grad=True)
    following = [*range(1, K), K - 1]  # of the last state nothing is used: it ends
    for _ in range(K):
        with torch.no_grad():
            mu_next, sigma_next = mu[following], sigma[following]
            spread = propagated_spread(ENDED, PI, sigma_next, GAMMA)
            if targets == "shared":
                mu_next, spread = worst_case_gaussian(mu_next, sigma_next, PI, RADIUS), 0.0
            y = robust_target(REWARDS, ENDED, PI, PI.log(), mu_next, 0.1, GAMMA)
        loss = epinet_loss(mu, sigma, ACTION, y, c, NOISE, spread).sum()
        for parameter, gradient in zip((mu, sigma), torch.autograd.grad(loss, (mu, sigma))):
            parameter.data -= 0.5 * gradient
    return mu.detach()[:, 0], sigma.detach()[:, 0]


def test_the_chain_with_own_targets_adds_spreads_as_vectors():
    c = torch.linalg.qr(draw(8, K, seed=12)).Q.T * torch.linspace(0.5, 2, K).double()[:, None]  # orthogonal, [K, d]
    mu, sigma = solve_chain("own", c)
    torch.testing.assert_close(mu[0], (DISCOUNT * REWARDS).sum(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sigma[0], NOISE * (DISCOUNT[:, None] * c).sum(0), rtol=0, atol=1e-6)


def test_the_chain_with_shared_targets_adds_their_lengths_to_the_charge():
    c = torch.linalg.qr(draw(8, K, seed=12)).Q.T * torch.linspace(0.5, 2, K).double()[:, None]
    mu, sigma = solve_chain("shared", c)
    charge = RADIUS * NOISE * (DISCOUNT * c.norm(dim=-1))[1:].sum()
    torch.testing.assert_close(sigma[0], NOISE * c[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(mu[0], (DISCOUNT * REWARDS).sum() - charge, rtol=0, atol=1e-6)


def table_chain(targets, N, upsilon=0.9):
    """The same chain with N tables; every table sees its own noise in the rewards. Values of s_0, [N]"""
    noise = NOISE * draw(N, K, seed=13)
    q = torch.zeros(N, 1, 1, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    for k in reversed(range(K)):
        q_next = worst_case_ellipsoid(q, one, upsilon) if targets == "shared" else q
        ended = torch.tensor([float(k == K - 1)], dtype=torch.float64)
        y = robust_target(REWARDS[k : k + 1], ended, one, one.log(), q_next, 0.1, GAMMA)
        q = (y.expand(N, 1) + noise[:, k : k + 1])[:, :, None]
    return q[:, 0, 0]


def test_the_chain_of_tables():
    own, shared = table_chain("own", 20_000), table_chain("shared", 20_000)
    value = (DISCOUNT * REWARDS).sum().item()
    assert own.std().item() == pytest.approx(NOISE * DISCOUNT.norm().item(), rel=0.05)
    assert own.mean().item() == pytest.approx(value, abs=0.05 * NOISE)
    assert shared.std().item() == pytest.approx(NOISE, rel=0.05)
    charge = math.sqrt(chi2.ppf(0.9, 1)) * NOISE * DISCOUNT[1:].sum().item()
    assert value - shared.mean().item() == pytest.approx(charge, rel=0.05)


def test_one_table_has_no_spread_so_both_forms_agree():
    assert table_chain("own", 1).item() == table_chain("shared", 1).item()
