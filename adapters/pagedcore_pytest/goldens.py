"""Golden answers: the file beside a test, and what is said where an answer is not the stored one.

A file has, for each name, what was asked, the answer's text and tokens with their log-probabilities, and the
environment that it was recorded in. Several processes may update one file at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, Protocol

from pagedcore_pytest.errors import GoldenChanged, GoldenFileInvalid, GoldenMissing, NothingToCompare

_FORMAT: Final = 1
_UPDATE: Final = "pytest --update-goldens"
_NUMBERS: Final = re.compile(r"\[\n[\s\d.,eE+-]*\]")
"""A list of numbers on several lines; text in JSON has no line break."""
_MAX_NAME: Final = 200
_END: Final = "the end of the answer"


class Scores(Protocol):
    """The model, for what is said of tokens."""

    def logprobs_of(self, prompt: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after a prompt."""

    def name_of(self, token_id: int) -> str:
        """Return what a token stands for."""


@dataclass(frozen=True)
class Answer:
    """An answer that a test has got."""

    prompt: str
    prompt_token_ids: Sequence[int]
    text: str
    token_ids: Sequence[int]
    model: Scores = field(repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return what is stored of it, with the log-probabilities of its tokens."""
        logprobs = self.model.logprobs_of(self.prompt_token_ids, self.token_ids)
        return {"prompt": self.prompt, "text": self.text, "prompt_token_ids": list(self.prompt_token_ids),
                "token_ids": list(self.token_ids), "logprobs": [round(one, 4) for one in logprobs]}

    def is_stored_as(self, stored: Mapping[str, Any]) -> bool:
        """Whether a file has this prompt and this answer."""
        return (list(self.prompt_token_ids), list(self.token_ids), self.text) == (
            stored["prompt_token_ids"], stored["token_ids"], stored["text"])


class Goldens:
    """The golden files of a test run."""

    def __init__(self, root: Path, *, is_updating: bool) -> None:
        self._root = root
        self._is_updating = is_updating
        self._written: dict[tuple[Path, str], list[Sequence[int]]] = {}

    def check(self, path: Path, name: str, answers: Sequence[Answer], sampling: Mapping[str, Any],
              environment: Mapping[str, Any]) -> None:
        """Compare answers with the stored ones, or store them.

        Raises:
            GoldenChanged: they differ. GoldenMissing: there are none. GoldenFileInvalid: the file is damaged.
            NothingToCompare: the name is no text of 1 to 200 characters, or two prompts have it.
        """
        __tracebackhide__ = True
        if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME:
            raise NothingToCompare(f"llm.golden: a name is text of 1 to {_MAX_NAME} characters.")
        # Why: requests that run side by side end in any order.
        answers = sorted(answers, key=lambda one: (list(one.prompt_token_ids), list(one.token_ids)))
        if self._is_updating:
            self._store(path, name, answers, sampling, environment)
            return
        shown = self._shown(path)
        content = _read(path, shown)
        if name not in content["goldens"]:
            raise GoldenMissing(f"{shown} has no golden answer {name!r}. Record it with: {_UPDATE}")
        stored = content["goldens"][name]
        if (difference := _difference(stored["calls"], answers)) is not None:
            asked = _of_sampling(stored.get("sampling", {}), _plain(sampling))
            where = _of_environment(content["environments"].get(stored["environment"], {}), environment)
            raise GoldenChanged(f"golden answer {name!r} of {shown}: {difference}\n  {asked}{where}\n"
                                f"  If the new answer is right, record it with: {_UPDATE}")

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self._root)) if path.is_relative_to(self._root) else path.name

    def _store(self, path: Path, name: str, answers: Sequence[Answer], sampling: Mapping[str, Any],
               environment: Mapping[str, Any]) -> None:
        prompts = [one.prompt_token_ids for one in answers]
        if self._written.setdefault((path, name), prompts) != prompts:
            raise NothingToCompare(f"llm.golden: two tests of one file give different prompts the name {name!r}. Give "
                                   "each its own, for example with the parameter of a parametrised test in it.")
        plain = _plain(sampling)
        with _locked(path.parent):
            content = _read(path, self._shown(path))
            stored = content["goldens"].get(name)
            if stored is not None and stored.get("sampling", {}) == plain and _difference(
                    stored["calls"], answers) is None:
                return
            key = sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:12]
            content["environments"][key] = dict(environment)
            content["goldens"][name] = {"environment": key, **({"sampling": plain} if plain else {}),
                                        "calls": [one.to_json() for one in answers]}
            used = {one["environment"] for one in content["goldens"].values()}
            content["environments"] = {key: one for key, one in content["environments"].items() if key in used}
            _write(path, content)


def _plain(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as JSON gives them back."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(sampling), default=str))
    return plain


def _difference(stored: Sequence[Mapping[str, Any]], answers: Sequence[Answer]) -> str | None:
    """Say where answers differ from the stored ones; ``None`` if they do not."""
    if len(stored) == len(answers) and all(map(Answer.is_stored_as, answers, stored)):
        return None
    by_prompt = {tuple(one["prompt_token_ids"]): one for one in stored}
    # Why first: a changed answer changes the prompts of all calls after it.
    for answer in answers:
        one = by_prompt.get(tuple(answer.prompt_token_ids))
        if one is not None and one["token_ids"] != list(answer.token_ids) and not any(
                answer.is_stored_as(other) for other in stored):
            return _of_tokens(one, answer)
        if one is not None and one["token_ids"] == list(answer.token_ids) and one["text"] != answer.text:
            return f"the same tokens have another text.\n  expected: {one['text']!r}\n  got:      {answer.text!r}"
    for answer, one in zip(answers, stored, strict=False):
        if one["prompt_token_ids"] != list(answer.prompt_token_ids):
            return _of_prompts(one, answer)
    return f"expected {len(stored)} completions, got {len(answers)}."


def _of_tokens(stored: Mapping[str, Any], answer: Answer) -> str:
    """Name the first token that differs, with the log-probabilities of both."""
    expected, got = stored["token_ids"], list(answer.token_ids)
    place = _first_difference(expected, got)
    before = got[:place]
    return (
        f"the answer changed at token {place} (the first is token 0).\n"
        f"  expected: {_token(answer, before, expected, place, stored['logprobs'])}\n"
        f"  got:      {_token(answer, before, got, place, ())}\n"
        f"  expected answer: {stored['text']!r}\n"
        f"  answer now:      {answer.text!r}\n"
        f"  prompt:          {answer.prompt!r}"
    )


def _token(answer: Answer, before: Sequence[int], token_ids: Sequence[int], place: int, recorded: Sequence[float],
           ) -> str:
    if place >= len(token_ids):
        return _END
    token_id, model = token_ids[place], answer.model
    with suppress(Exception):  # Why: a token of another model may be none of this one.
        now = model.logprobs_of([*answer.prompt_token_ids, *before], [token_id])
        told = [f"{recorded[place]:.4f} when recorded"] if place < len(recorded) else []
        told += [f"{one:.4f} now" for one in now]
        return f"{model.name_of(token_id)!r} (token id {token_id}, log-probability {', '.join(told) or 'unknown'})"
    return f"token id {token_id}, which this model does not have"


def _of_prompts(stored: Mapping[str, Any], answer: Answer) -> str:
    place = _first_difference(stored["prompt_token_ids"], list(answer.prompt_token_ids))
    return (f"the prompt changed at token {place} (the first is token 0).\n"
            f"  expected prompt: {stored['prompt']!r}\n  prompt now:      {answer.prompt!r}")


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return next(place for place, (a, b) in enumerate(zip_longest(one, other)) if a != b)


def _of_sampling(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if stored == now:
        return ""
    return f"The parameters changed: recorded with {stored or 'none'}, now {now or 'none'}.\n  "


def _of_environment(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    others = [f"{name}: {stored.get(name)} when recorded, {value} now" for name, value in now.items()
              if stored.get(name) != value]
    if not others:
        return f"It was recorded with the same {', '.join(now)}."
    return "It was recorded elsewhere, which may be the cause:\n    " + "\n    ".join(others)


def _read(path: Path, shown: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"format": _FORMAT, "environments": {}, "goldens": {}}
    except ValueError:
        content = None
    if not _is_valid(content):
        raise GoldenFileInvalid(f"{shown} is no file of golden answers of format {_FORMAT}. Restore it, or delete it "
                                f"and record its answers with: {_UPDATE}")
    return dict(content)


def _is_valid(content: Any) -> bool:
    with suppress(KeyError, TypeError, AttributeError):
        return content["format"] == _FORMAT and isinstance(content["environments"], dict) and all(
            isinstance(call["text"], str) and isinstance(call["prompt"], str) and all(
                isinstance(call[name], list) for name in ("prompt_token_ids", "token_ids", "logprobs"))
            for one in content["goldens"].values() for call in (one["environment"] and one["calls"]))
    return False


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True)
    text = _NUMBERS.sub(lambda found: "[" + " ".join(found[0][1:-1].split()) + "]", text)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".part")
    try:
        # Why: a temporary file is for its owner alone, and this one belongs to the repository of the tests.
        os.fchmod(handle, 0o666 & ~_umask())
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes of the test run from the files of a folder."""
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Why: some file systems have no locks; then a single process can update.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
