"""Faults of ersac_epinet.py that its tests must notice: what to replace, by what, and the fault in words."""

FAULTS = [
    ("else psi.detach()", "else psi", "the stochastic heads move the features"),
    ("math.sqrt(chi2.ppf(args.upsilon, A))", "chi2.ppf(args.upsilon, A)", "closed form: no square root in the radius"),
    ("h = F.relu(F.linear(x, w_x", "h = (F.linear(x, w_x", "general heads are quadratic in z, and no more"),
    ("case(target_critic, s_next", "case(critic, s_next", "shared targets from the critic itself"),
    ('            if args.targets == "shared":\n', "            if False:\n", "shared targets are own"),
    ("gamma * (1 - terminated)[:, None] * torch", "gamma * torch", "spread beyond a termination"),
    ("a, y, c[batch], args.noise_scale", "a, y, c[: len(batch)], args.noise_scale", "directions of other transitions"),
    ("case(critic, s, pi", "case(target_critic, s, pi", "the actor's worst case from the target critic"),
    ("p_target.lerp_(p.detach(), args.polyak)", "p.data.lerp_(p_target, args.polyak)", "the critic follows its target"),
    ("10**6 * (args.seed + 1) + 10**5", "10**6 * (args.seed + 1)", "the final episodes are those in between"),
]
