"""Faults that tests/test_gen.py must notice, see tests/test_mutants.py: (what to replace, by what, in words)."""

FAULTS = [
    ("np.where(values < e, tau, 1 - tau)", "np.where(values < e, 1 - tau, tau)", "expectiles upside down"),
    ("cut = np.roll(weight, -1, 0)", "cut = weight", "traces are cut by this step's weight, not by the next one's"),
    ("scored = a if resampling else b", "scored = a", "action-noise: the critic scores the chosen action"),
    ("train_actor = tau is None or rollout >= 8", "train_actor = True", "a tau trains its actor before its critic"),
    ("simulator.state = states[t][e].copy()", "simulator.state = states[0][e].copy()", "resampled from another state"),
    ("if turns and (not steps or", "if turns and (steps or", "the early policy never begins an episode"),
]
