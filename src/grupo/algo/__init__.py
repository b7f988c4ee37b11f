"""GRPO's arithmetic as pure tensor functions: rewards to advantages, log-probs to a loss.

    scores ──compute_advantages──▶ advantages ─┐
    log-probs, mask ───────────────────────────┴─GRPOLoss──▶ loss

    advantages.py   rewards of a group to advantages
    registry.py     the losses by name, and the settings that each one reads
    losses.py       the loss of one optimizer step; aggregations
    terms.py        per-token policy terms (clipped surrogate, CISPO, SAPO, VESPO) and the settings of a loss
    ratios.py       importance ratios, the off-policy mask, the KL estimator
    entropy.py      the high-entropy threshold and the adaptive entropy coefficient
    selection.py    the completions of a group to train on

Settings arrive as plain values. Nothing here knows about models, ranks or micro-batches: a loss is a numerator over a
denominator that the caller counted once for the whole optimizer step.
"""
