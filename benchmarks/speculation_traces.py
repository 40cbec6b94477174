"""Token streams for ``speculation.py``: prompts and what an assistant would answer, of five kinds.

They are made from this repository: from its history (a file and the same file after a commit), its pages, its tables
and docstrings, and from ``prose.txt``, the beginnings of six public-domain texts. No model wrote any of it.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("edits", "json", "quotes", "prose", "chat")
_LEAST = 96
"""Tokens of a completion, at least."""


@dataclass(frozen=True)
class Trace:
    """One prompt, and the tokens that are forced to follow it."""

    kind: str
    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    def cut(self, num_tokens: int) -> Trace:
        """Return the same with so many tokens of the completion."""
        return Trace(self.kind, self.prompt, self.completion[:num_tokens])


def traces(tokenizer: Tokenizer, number: int, most_tokens: int = 320) -> list[Trace]:
    """Return ``number`` traces of each kind, or as many as there are, always the same ones for one state of the
    repository; completions have at most so many tokens."""
    found = []
    for kind in KINDS:
        made = []
        for prompt, completion in _TEXTS[kind](random.Random(kind)):
            ids = tokenizer.encode(completion, add_special_tokens=False).ids
            if len(ids) >= _LEAST:
                before = tokenizer.encode(prompt, add_special_tokens=False).ids
                made.append(Trace(kind, tuple(before), tuple(ids[:most_tokens])))
            if len(made) == number:
                break
        found += made
    return found


def _turn(user: str) -> str:
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def edits(rng: random.Random) -> Iterator[tuple[str, str]]:
    """A file and a commit's subject; the answer is the part of the file that the commit changes, rewritten."""
    commits = _git("log", "--no-merges", "--format=%h", "--diff-filter=M", "-n", "400", "--", "pagedcore").split()
    rng.shuffle(commits)
    for commit in commits:
        subject = _git("log", "-1", "--format=%s", commit).strip()
        names = _git("show", "--format=", "--name-only", "--diff-filter=M", commit, "--", "pagedcore/*.py").split()
        for name in names[:1]:
            hunk = re.search(r"@@ -(\d+)", _git("show", "--format=", "-U0", commit, "--", name))
            start = max(0, int(hunk[1]) - 25) if hunk else 0
            before, after = (_git("show", f"{one}:{name}").splitlines()[start : start + 90]
                             for one in (f"{commit}~1", commit))
            if before != after and len(after) > 60:
                asked = f"{subject}. Change this file accordingly, and write all of it.\n\n```python\n"
                yield _turn(asked + "\n".join(before) + "\n```"), "```python\n" + "\n".join(after) + "\n```"


def as_json(rng: random.Random) -> Iterator[tuple[str, str]]:
    """In turns: records from a text, a call of a tool with the contents of a file, and a row of small calls."""
    commits = [line.split("\t") for line in _git("log", "-n", "300", "--format=%h\t%as\t%s").splitlines()]
    pages = sorted((ROOT / "docs").glob("*.md"))
    schema = {"type": "array", "items": {"type": "object", "properties": {
        "commit": {"type": "string"}, "date": {"type": "string"}, "subject": {"type": "string"}}}}
    tools = [{"name": name, "parameters": {"type": "object", "properties": {one: {"type": "string"} for one in given}}}
             for name, given in (("write_file", ("path", "content")), ("search", ("query", "folder")))]
    while True:
        some = rng.sample(commits, 8)
        text = "\n".join(f"On {date} commit {short} was made: {subject}." for short, date, subject in some)
        records = [{"commit": short, "date": date, "subject": subject} for short, date, subject in some]
        yield (_turn(f"Write this as JSON by the schema {json.dumps(schema)}.\n\n{text}"),
               json.dumps(records, indent=2, ensure_ascii=False))
        page = rng.choice(pages)
        content = page.read_text(encoding="utf-8")[:900]
        call = {"name": "write_file", "arguments": {"path": f"notes/{page.name}", "content": content}}
        yield (_turn(f"Tools: {json.dumps(tools)}\n\nSave this under notes/{page.name}:\n\n{content}"),
               f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
        calls = [{"name": "search", "arguments": {"query": subject.lower()[:40], "folder": f"docs/{short}"}}
                 for short, _, subject in rng.sample(commits, 6)]
        yield (_turn(f"Tools: {json.dumps(tools)}\n\nFind out what our pages say of the latest changes."),
               "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls))


def quotes(rng: random.Random) -> Iterator[tuple[str, str]]:
    """A page; the answer strings some of its sentences together, quoted, with words around them."""
    before = ("The page begins by saying that", "It goes on to explain:", "On this point the text is explicit:",
              "The author also notes that", "What follows from it, as the page puts it, is that", "Finally it says:")
    after = ("This matters to anyone who runs more than one model at a time.", "In other words, nothing is left open.",
             "That is the part most readers will look for.", "The rest of the section gives the details.")
    for page in _shuffled(rng, sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")[:6000]
        sentences = [" ".join(one.split()) for one in re.findall(r"(?<=[.:] )[A-Z][^.|`*]{60,220}\.", text)]
        if len(sentences) >= 6:
            chosen = sorted(rng.sample(range(len(sentences)), 6))
            parts = [f'{start} "{sentences[place]}" {rng.choice(after)}'
                     for start, place in zip(before, chosen, strict=True)]
            yield _turn(f"Summarise this page, with quotations.\n\n{text}"), " ".join(parts)


def prose(rng: random.Random) -> Iterator[tuple[str, str]]:
    """A paragraph; the answer is the next one, and no paragraph is in two of them."""
    lines = (ROOT / "benchmarks" / "prose.txt").read_text(encoding="utf-8").splitlines()
    paragraphs = [line for line in lines if line]
    for place in _shuffled(rng, range(0, len(paragraphs) - 1, 2)):
        yield _turn(f"Go on with this story:\n\n{paragraphs[place]}"), paragraphs[place + 1]


def chat(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Two sections of a page as questions and answers: what the second answer shares with the first turn is little."""
    for page in _shuffled(rng, sorted((ROOT / "docs").glob("*.md"))):
        parts = re.split(r"^## (.*)\n", page.read_text(encoding="utf-8"), flags=re.M)[1:]
        sections = [(name, text.strip()) for name, text in zip(parts[::2], parts[1::2], strict=True)
                    if len(text) > 500 and not text.lstrip().startswith(("|", "```"))]
        if len(sections) >= 2:
            (one, first), (two, second) = rng.sample(sections, 2)
            yield (_turn(f"Tell me about: {one.lower()}") + f"{first[:1500]}<|im_end|>\n"
                   + _turn(f"And what about this: {two.lower()}?")), second


def _shuffled(rng: random.Random, values: Sequence[Any]) -> list[Any]:
    return rng.sample(list(values), len(values))


_TEXTS = {"edits": edits, "json": as_json, "quotes": quotes, "prose": prose, "chat": chat}
