"""Faults of ersac_ensemble.py that its tests must notice: what to replace, by what, and the fault in words."""

FAULTS = [
    ("returns if ended[-1] else np.nan * r", "returns", "returns of cut episodes count as known"),
    ("(next_obs - obs_mean) / obs_std", "next_obs", "s_next is not normalised"),
    ("kthvalue(k, dim=-1).values.sqrt()", "kthvalue(k, dim=-1).values", "the radius lacks its square root"),
    ("* s_next) + prior_q_next", "* s_next)", "a prior in the critics and not in their targets"),
    ('if args.targets == "shared":', "if True:", "own targets are shared"),
    ("robust_target(r, ended,", "robust_target(r, 0 * ended,", "terminations are ignored"),
    ("args.num_critics * args.edac_eta", "args.edac_eta", "EDAC's term shrinks beside a sum over N critics"),
    (
        "            q = critic(args.input_scale * s) + prior_q  # [N, B, A]\n            q_star",
        "            q_star",
        "the actor's worst case from before the critics' step",
    ),
    ("p_target.lerp_(p.detach(), args.polyak)", "p.data.lerp_(p_target, args.polyak)", "critics follow targets"),
    ("10**6 * (args.seed + 1) + 10**5", "10**6 * (args.seed + 1)", "the final episodes are those in between"),
]
