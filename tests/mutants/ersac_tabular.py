"""Faults in ersac_tabular.py: what to replace, by what, and the fault in words."""

FAULTS = [
    (
        "np.where(values < e, tau, 1 - tau)",
        "np.where(values < e, 1 - tau, tau)",
        "the risk level is reversed",
    ),
    (
        "s = int(s_random) if u_reset < reset_prob else s_next",
        "s = s_next",
        "the data collection never resets",
    ),
    (
        "rng.multinomial(size, v.ravel() / size, N)",
        "np.tile(rng.multinomial(size, v.ravel() / size), (N, 1))",
        "all critics share one bootstrap resample",
    ),
    (
        "critic_step = 1 - (1 - args.q_lr) ** n",
        "critic_step = args.q_lr * (n > 0)",
        "the critics' step does not grow with the number of transitions",
    ),
    (
        "q_star = worst_case(q_target.view(",
        "q_star = worst_case(q.view(",
        "targets come from the online tables",
    ),
    (
        "return reward + gamma * (1 - terminated) * ((pi * q_star).sum(-1) + alpha",
        "return reward + gamma * (1 - terminated) * ((pi * q_star).sum(-1) - alpha",
        "entropy has the wrong sign in the target",
    ),
    (
        "return -((pi * q_star.detach()).sum(-1) + alpha * entropy(pi, log_pi))",
        "return (pi * q_star.detach()).sum(-1) + alpha * entropy(pi, log_pi)",
        "the actor climbs the wrong way",
    ),
    (
        "partial(worst_case_ellipsoid, upsilon=args.upsilon)",
        "partial(worst_case_ellipsoid, upsilon=0.9)",
        "the set ignores upsilon",
    ),
    (
        "q_target.lerp_(q, args.polyak)",
        "q_target.lerp_(q, 1 - args.polyak)",
        "the target rate is the wrong way round",
    ),
    (
        "eps=1e-30",
        "eps=1e-8",
        "Adam's eps is larger than small gradients",
    ),
    (
        '(("", greedy(pi)), ("_stochastic", pi))',
        '(("", pi), ("_stochastic", pi))',
        "the headline return is the stochastic policy's",
    ),
    (
        "(td_error.square() * (n > 0))",
        "td_error.square()",
        "the critic loss counts pairs without data",
    ),
    (
        "best / best.sum(-1, keepdims=True)",
        "np.eye(pi.shape[-1])[pi.argmax(-1)]",
        "ties go to the first action",
    ),
    (
        "np.random.default_rng([seed, 3])",
        "np.random.default_rng()",
        "the sampled returns differ from run to run",
    ),
    (
        "policy_value(P, R, policy, args.gamma, args.alpha * h.numpy())",
        "policy_value(P, R, policy, args.gamma)",
        "the true value lacks the entropy that the robust value has",
    ),
]
