"""The laws of the rules for single fields: what each accepts, stores, and says."""

import numpy as np
import pytest

from pagedcore.config.field_rules import integer, matching, number, one_of, seconds
from pagedcore.errors import InvalidRequest, InvalidSampling
from pagedcore.requests import validation

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("rule", "words"), [
    (integer(1, 5), "an integer from 1 to 5"),
    (number(0, 1), "a finite number from 0 to 1"),
    (number(0, above_low=True).or_none(), "a finite number above 0, or None"),
    (seconds(0, 2_592_000.0, above_low=True), "a finite number of seconds above 0 to 2592000"),
    (one_of("a", "b"), "one of a, b"),
    (matching("a+", "some a"), "some a"),
])  # fmt: skip
def test_a_refusal_says_what_is_allowed(rule, words):
    """A rule's own words are the limit of the error that its user chose."""
    with pytest.raises(InvalidSampling) as refusal:
        rule.check("field", b"b", InvalidSampling)
    assert (refusal.value.what, refusal.value.limit) == ("field", words)


@pytest.mark.parametrize("value", [1, 0.001, 5e-324, np.float64(2.5)])
def test_time_limits_are_stored_as_floats(value):
    """A positive number of seconds, of NumPy too, becomes a float; None stays None."""
    assert type(validation.validate_timeout(value)) is type(validation.validate_ttl(value)) is float
    assert validation.validate_timeout(None) is validation.validate_ttl(None) is None


@pytest.mark.parametrize("value", [0, -1, 0.0, NAN, INF, 10**400, True, "1", [1], np.float32(1)])
def test_other_time_limits_are_refused(value):
    """What is no finite number of seconds above 0 is an InvalidRequest that names the field."""
    for validate, name in ((validation.validate_timeout, "timeout_s"), (validation.validate_ttl, "ttl_s")):
        with pytest.raises(InvalidRequest) as refusal:
            validate(value)
        assert refusal.value.what == name
