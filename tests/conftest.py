"""Settings of the whole test suite."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.stores"]

_SLOW_CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]  # tests that write files are slow on busy machines

settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=_SLOW_CHECKS)
# The same examples in every run, so that a red run means a change; the nightly profile looks for new ones.
settings.register_profile(
    "ci", deadline=None, max_examples=60, stateful_step_count=40, derandomize=True, suppress_health_check=_SLOW_CHECKS
)
settings.register_profile("nightly", deadline=None, max_examples=400, stateful_step_count=120, suppress_health_check=_SLOW_CHECKS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

# A shell that starts this in the background has Ctrl-C ignored, here and in all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
