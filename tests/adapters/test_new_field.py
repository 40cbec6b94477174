"""An option of a request, or a sampling parameter, is one field: added to its dataclass, it is at every door."""

from __future__ import annotations

import pytest

pytest.importorskip("bentoml")
pytest.importorskip("langchain_core")

from mutants.killing import Mutant, run_tests
from pagedcore.request_options import CALLERS_OPTIONS, OPTIONS, CallersKeywords, OptionKeywords, RequestOptions

_OPTION = Mutant("Two options more.", "pagedcore/request_options.py", "    salt: bytes = field(init=False", """\
    colour: int = _option(0, PRIORITY.check, schema={"type": "integer"})
    shade: str = _option("", LABEL.check, reader=Reader.PRIORITIES)
    salt: bytes = field(init=False""")
_PARAMETER = Mutant("A parameter more.", "pagedcore/sampling_params.py", "    ignore_eos: bool = _parameter", """\
    mood: int = _parameter(0, integer(0, 9), with_beams=False)
    ignore_eos: bool = _parameter""")


_CASES = {
    "option": (_OPTION, ("arrives", "is_in_the_schema", "is_checked", "is_recorded", "is_simulated"), 7),
    "parameter": (_PARAMETER, ("arrives", "is_checked_and_kept"), 2),
}


@pytest.mark.parametrize("what", _CASES)
def test_a_new_field_is_at_every_door(what: str) -> None:
    """Nothing but its dataclass names it, and each of the cases finds it."""
    source, told, num_cases = _CASES[what]
    outcome = run_tests(source, [f"adapters/new_field_cases.py::test_a_new_{what}_{one}" for one in told])
    assert (outcome.verdict, outcome.num_passed) == ("survived", num_cases), outcome


def test_type_checkers_know_the_keywords() -> None:
    """The typed keywords are the fields, with their types."""
    types = RequestOptions.__annotations__
    for keywords, names in ((OptionKeywords, OPTIONS), (CallersKeywords, CALLERS_OPTIONS)):
        told = {name: one.__forward_arg__ for name, one in keywords.__annotations__.items()}
        assert told == {name: types[name] for name in names}
