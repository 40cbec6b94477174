"""A scheduling policy that pagedcore knows nothing of: tenants take turns, with ``scheduling_policy="round-robin"``."""

from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.scheduler.policies import Policy


@hookimpl
def pagedcore_register(registry):
    """Add this policy by name; ``round_robin`` is imported when an engine asks for it."""
    registry.schedulers.add("round-robin", "pagedcore_round_robin:round_robin", summary="tenants take turns")


def round_robin(*, vip=""):
    """The tenant with the fewest running requests first; ``vip`` (``policy_options={"vip": "name"}``) before all.

    Why it makes progress: a sequence that was preempted runs first when it is back, until it has one token more than
    before; pagedcore sees to that for every dynamic policy.
    """
    def order(sequence, view):
        tenant = sequence.options.tenant
        return tenant != vip, view.usage_of(tenant).num_rows, view.ahead.get(sequence.sequence_id, 0), sequence.arrival

    return Policy("round-robin", order, is_dynamic=True, has_tenants=True, cache_bonus=0)
