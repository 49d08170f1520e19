"""Hypothesis profiles. Tests repeat exactly by default; `--hypothesis-profile=explore` looks further, and at random."""

from hypothesis import settings

# No deadlines: how long an example takes on a shared machine says nothing about whether the rule holds.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2_000, deadline=None)
settings.load_profile("ci")
