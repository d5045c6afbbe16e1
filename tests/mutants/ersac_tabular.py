"""Faults of ersac_tabular.py that its tests must notice: what to replace, by what, and the fault in words."""

FAULTS = [
    ("np.where(values < e, tau, 1 - tau)", "np.where(values < e, 1 - tau, tau)", "the risk level is reversed"),
    ("visits[s, a, s_next] += 1", "visits[s, a, s] += 1", "s in place of s_next in the data"),
    ("s = int(s_random[i]) if u_reset[i] < reset_prob else s_next", "s = s_next", "the collection never resets"),
    (
        "rng.multinomial(size, visits.ravel() / size, N)",
        "np.tile(rng.multinomial(size, visits.ravel() / size), (N, 1))",
        "all critics share one bootstrap resample",
    ),
    ("    if args.bootstrap:  # |D|", "    if True:  # |D|", "--no-bootstrap has no effect"),
    (
        "critic_step = 1 - (1 - args.q_lr) ** n",
        "critic_step = args.q_lr * (n > 0)",
        "the critics' step does not grow with the number of transitions",
    ),
    ("q_next = worst_case(q_target, pi)", "q_next = worst_case(q, pi)", "shared targets from the online tables"),
    ("q_next = q_target[:, None, None]", "q_next = q[:, None, None]", "own targets from the online tables"),
    ('            if args.targets == "shared":', "            if True:", "own targets are shared"),
    ('            if args.targets == "shared":', "            if False:", "shared targets are own"),
    (
        "q_next = worst_case(q_target, pi)",
        "q_next = worst_case(q_target, torch.full_like(pi, 1 / A))",
        "the targets' worst case is that of the uniform policy",
    ),
    ("q_next, args.alpha, args.gamma)", "q_next, args.alpha, 0.9)", "--gamma has no effect on the targets"),
    (
        "v = (pi * q_star).sum(-1) + alpha * entropy(pi, log_pi)",
        "v = (pi * q_star).sum(-1) - alpha * entropy(pi, log_pi)",
        "entropy has the wrong sign in the target",
    ),
    ("kthvalue(k, dim=-1).values.sqrt()", "kthvalue(k, dim=-1).values", "the radius lacks its square root"),
    ("(q, pi, args.upsilon)", "(q, pi, 0.9)", "--upsilon has no effect on the set"),
    (
        "return worst_case_ellipsoid(q, pi, args.upsilon)",
        "return worst_case_hull(q, pi)",
        "hull in place of ellipsoid",
    ),
    ("return worst_case_hull(q, pi)", "return worst_case_box(q, pi)", "box in place of hull"),
    (
        "            q += critic_step * td_error\n\n"
        "            # worst-case value vectors of the updated critics\n"
        "            q_star = worst_case(q, pi)  # [S, A]\n",
        "            q_star = worst_case(q, pi)  # [S, A]\n            q += critic_step * td_error\n",
        "the actor's worst case from before the critics' step",
    ),
    (
        "q_star = worst_case(q, pi)  # [S, A]",
        "q_star = worst_case(q_target, pi)  # [S, A]",
        "the actor's worst case from the target tables",
    ),
    (
        "pi_loss = (actor_loss(pi, log_pi, q_star, args.alpha) * state_weight).sum()",
        "pi_loss = -(actor_loss(pi, log_pi, q_star, args.alpha) * state_weight).sum()",
        "the actor climbs the wrong way",
    ),
    ("        optimizer.step()\n", "", "the actor is never stepped"),
    ("q_target.lerp_(q, args.polyak)", "q.lerp_(q_target, args.polyak)", "the tables follow their targets"),
    ("q_target.lerp_(q, args.polyak)", "pass", "the target tables are never updated"),
    ('(("", greedy(pi)), ("_stochastic", pi))', '(("", pi), ("_stochastic", pi))', "the headline return is not greedy"),
    ("td_error[n > 0].square()", "td_error.square()", "the critic loss counts pairs without data"),
    (
        "policy_value(P, R, policy, args.gamma, args.alpha * h.numpy())",
        "policy_value(P, R, policy, args.gamma)",
        "the true value lacks the entropy that the robust value has",
    ),
]
