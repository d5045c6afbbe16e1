"""Faults of ersac_tabular.py that its tests must notice: what to replace, by what, and the fault in words."""

FAULTS = [
    ("np.where(values < e, tau, 1 - tau)", "np.where(values < e, 1 - tau, tau)", "the risk level is reversed"),
    ("visits[s, a, s_next] += 1", "visits[s, a, s] += 1", "s in place of s_next in the data"),
    (
        "rng.multinomial(size, visits.ravel() / size, N)",
        "np.tile(rng.multinomial(size, visits.ravel() / size), (N, 1))",
        "all tables share one resample",
    ),
    ("1 - (1 - args.q_lr) ** n", "args.q_lr * (n > 0)", "the tables' step does not grow with the number of visits"),
    ("q_next = worst_case(q_target, pi)", "q_next = worst_case(q, pi)", "shared targets from the online tables"),
    ("q_next = q_target.reshape(N,", "q_next = q.reshape(N,", "own targets from the online tables"),
    ("kthvalue(k, dim=-1).values.sqrt()", "kthvalue(k, dim=-1).values", "the radius lacks its square root"),
    ("+ alpha * entropy(pi, log_pi)\n    return", "- alpha * entropy(pi, log_pi)\n    return", "entropy's sign in y"),
    ("q_target.lerp_(q, args.polyak)", "q.lerp_(q_target, args.polyak)", "the tables follow their targets"),
    ("v = policy_value(P, R, greedy(policy), args.gamma)", "v = policy_value(P, R, policy, args.gamma)", "not greedy"),
]
