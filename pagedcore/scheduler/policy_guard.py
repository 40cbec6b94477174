"""Makes a policy of its registered function and the operator's options, and takes the time of policies of others."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from pagedcore.errors import InvalidConfig, describe_name, did_you_mean
from pagedcore.scheduler.policies import Policy

BURST_S: Final = 1.0
"""Seconds that the functions of a policy may take at once; it grows again by ``SHARE`` of the time that passes."""
SHARE: Final = 0.1
_LONGEST_S: Final = 0.4
"""What one call counts at most: the process may have been stopped meanwhile."""


class PolicyTooSlow(Exception):
    """The functions of a policy have taken more than their share of the time."""


def make_policy(
    make: Callable[..., Policy], options: Mapping[str, Any], now: Callable[[], float] = time.perf_counter
) -> Policy:
    """Call the function of the plugin table ``schedulers``; the time of a policy that is not ours is bounded.

    Raises:
        InvalidConfig: the function does not take these options, refuses one, or returns no ``Policy``.
    """
    names = list(inspect.signature(make).parameters)
    if unknown := [one for one in options if one not in names]:
        given, allowed = ", ".join(map(describe_name, unknown)), ", ".join(names) or "none"
        advice = did_you_mean(unknown[0], names)
        raise InvalidConfig(f"policy_options: got {given}, allowed is {allowed}. {advice}".rstrip())
    policy = make(**options)
    if not isinstance(policy, Policy):
        raise InvalidConfig(f"scheduling_policy: its function returned a {type(policy).__name__}, needed is a Policy.")
    policy = replace(policy, options=dict(options))
    if make.__module__.partition(".")[0] == "pagedcore":
        return policy
    timed = _TimeBudget(now).timed
    return replace(policy, order=timed(policy.order), victim_order=policy.victim_order and timed(policy.victim_order),
                   preempts=policy.preempts and timed(policy.preempts))


class _TimeBudget:
    """A leaky bucket of seconds, which one policy's functions share."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._last_s, self._spent_s = now, now(), 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function; it raises ``PolicyTooSlow`` when the bucket overflows."""
        def call(*arguments: Any) -> Any:
            start_s = self._now()
            result = function(*arguments)
            end_s = self._now()
            leaked_s, self._last_s = SHARE * (start_s - self._last_s), end_s
            self._spent_s = max(0.0, self._spent_s - leaked_s) + min(end_s - start_s, _LONGEST_S)
            if self._spent_s > BURST_S:
                raise PolicyTooSlow
            return result

        return call
