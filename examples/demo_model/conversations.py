"""Random conversations about the tasks, as rows of tokens to train on or to measure with.

Owns the plain and the chat form of a turn, the turns of a conversation with tools, and which tokens are learned; it
never runs a model. A turn in plain form is the question itself, a line break, the answer and the end-of-message token.
"""

import re
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pagedcore.demo_model.questions import Split

from .objects import OBJECT_TASKS
from .tasks import TASKS, Draft, Task, draw
from .tokenizer import END_OF_MESSAGE, START_OF_MESSAGE
from .tools import Tool, ToolDraft, call_instead, draw_call, draw_tools, tools_message

IGNORED = -100
"""Target of a position whose next token is not learned."""

_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a small demo model.",
    "Answer shortly.",
    "You are pagedcore, a friendly assistant. Answer in one sentence.",
)
_ALL_TASKS = TASKS | OBJECT_TASKS
# How often each kind of tool is listed and asked for.
_TOOL_SHARES = {"calculator": 6, "capital": 1, "weather": 1, "any": 0.6}
# The value of a JSON property that is one word.
_SPELLED = re.compile(r'(?<=: ")([a-z]+)(?=")')
# What may stand between a plain answer and the next plain question.
_PLAIN_GAPS = ("\n", "\n", " ", "", "\n\n")


@dataclass
class Row:
    """Tokens of one conversation and, at each position, the token to be predicted there or `IGNORED`.

    Invariant: `ids` and `targets` have the same length.
    """

    ids: list[int]
    targets: list[int]

    def append(self, question: list[int], reply: list[int], keep_end: bool) -> None:
        """Add a turn; only `reply`, which ends with the end-of-message token, is learned.

        The end token is learned but left out of the text if not `keep_end`, as engines may drop it.
        """
        self.ids += question
        self.targets += [IGNORED] * len(question)
        first = len(self.ids) - 1
        self.ids += reply if keep_end else reply[:-1]
        self.targets += [IGNORED] * (len(self.ids) - len(self.targets))
        self.targets[first : first + len(reply)] = reply


class ConversationSource:
    """Endless supply of rows, seeded.

    Invariant: only questions of one split are ever drawn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, weights: dict[str, float], seed: int, split: Split = "train"
    ) -> None:
        self._split: Split = split
        self._tokenizer = tokenizer.backend_tokenizer
        self._end = tokenizer.convert_tokens_to_ids(END_OF_MESSAGE)
        self._pad = tokenizer.pad_token_id
        self._rng = Random(seed)
        self.weights = dict(weights)

    def batch(self, rows: int, length: int, tools: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return token ids and targets, both int64 of shape (rows, length); `tools` is the share of rows with tools."""
        drawn = [self._tools_row(length) if self._rng.random() < tools else self._row(length) for _ in range(rows)]
        ids = [row.ids + [self._pad] * (length - len(row.ids)) for row in drawn]
        targets = [row.targets + [IGNORED] * (length - len(row.targets)) for row in drawn]
        return torch.tensor(ids), torch.tensor(targets)

    def _row(self, length: int) -> Row:
        row, task = Row([], []), None
        chat = self._rng.random() < 0.45
        while True:
            task, draft = self._next_question(task)
            # Why: a finished chat may be continued by plain text, hence a few turns change the form.
            as_chat = chat if self._rng.random() < 0.9 else not chat
            before = self._chat_question(row, draft) if as_chat else self._plain_question(row, draft)
            reply = [*self._encode("" if as_chat else "\n"), *self._encode_answer(draft), self._end]
            question = self._encode(before)
            if len(row.ids) + len(question) + len(reply) <= length:
                row.append(question, reply, keep_end=as_chat or self._rng.random() < 0.6)
            elif row.ids:
                return row

    def _tools_row(self, length: int) -> Row:
        """Return a conversation whose system message lists tools: calls, results, and answers without a call."""
        row, last = Row([], []), None
        needed = self._rng.choices(list(_TOOL_SHARES), list(_TOOL_SHARES.values()))[0]
        tools = draw_tools(self._rng, *([needed] if self._rng.random() < 0.9 else []))
        system = self._rng.choice(_SYSTEM_MESSAGES) if self._rng.random() < 0.3 else ""
        lead = _message("system", tools_message(tools, system))
        while True:
            last, turns = self._tool_turns(tools, last)
            parts = []
            for role, content, reply in turns:
                question = f"{lead}{_message(role, content)}{START_OF_MESSAGE}assistant\n"
                parts.append((self._encode(question), [*reply, self._end]))
                lead = "\n"
            if len(row.ids) + sum(len(question) + len(reply) for question, reply in parts) <= length:
                for question, reply in parts:
                    row.append(question, reply, keep_end=True)
            elif row.ids:
                return row
            else:
                return self._row(length)

    def _tool_turns(self, tools: list[Tool], last: Tool | None) -> tuple[Tool | None, list[tuple[str, str, list[int]]]]:
        """Return the tool of the next question, if it needs one, and its turns: role, content and reply."""
        if self._rng.random() < 0.7:
            again = last is not None and self._rng.random() < 0.3
            tool = last if again else self._rng.choices(tools, [_TOOL_SHARES[tool.kind] for tool in tools])[0]
            return tool, self._turns_of(draw_call(tool, self._rng, self._split, again=again))
        task, draft = self._next_question(None)
        call = call_instead(task.name, draft.prompt, draft.answer, tools) if task.name in TASKS else None
        return None, self._turns_of(call) if call else [("user", self._vary(draft.prompt), self._encode_answer(draft))]

    def _turns_of(self, draft: ToolDraft) -> list[tuple[str, str, list[int]]]:
        asked = ("user", draft.prompt, self._encode(draft.call))
        return [asked, ("tool", draft.result, self._encode(draft.answer))]

    def _next_question(self, last: Task | None) -> tuple[Task, Draft]:
        if last is not None and last.follow_up is not None and self._rng.random() < 0.45:
            task = self._pick([task for task in _ALL_TASKS.values() if task.family == last.family])
            if task.follow_up is not None:
                return task, draw(task.follow_up, self._rng, self._split)
        task = self._pick(list(_ALL_TASKS.values()))
        return task, draw(task.make, self._rng, self._split)

    def _pick(self, tasks: list[Task]) -> Task:
        return self._rng.choices(tasks, [self.weights[task.name] for task in tasks])[0]

    def _chat_question(self, row: Row, draft: Draft) -> str:
        lead = ""
        if row.ids:
            lead = "\n" if row.ids[-1] == self._end else END_OF_MESSAGE + "\n"
        elif self._rng.random() < 0.3:
            lead = _message("system", self._rng.choice(_SYSTEM_MESSAGES))
        return lead + _message("user", self._vary(draft.prompt)) + f"{START_OF_MESSAGE}assistant\n"

    def _plain_question(self, row: Row, draft: Draft) -> str:
        return (self._rng.choice(_PLAIN_GAPS) if row.ids else "") + self._vary(draft.prompt)

    def _vary(self, prompt: str) -> str:
        """Now and then write a prompt as people do who are in a hurry."""
        chance = self._rng.random()
        if chance < 0.05:
            prompt = prompt[0].lower() + prompt[1:]
        if 0.03 < chance < 0.1:
            prompt = prompt.rstrip("?.! ")
        return prompt.lower() if 0.1 < chance < 0.12 else prompt

    def _encode_answer(self, draft: Draft) -> list[int]:
        """Encode an answer; words of a spelled one by letters, as the model knows which letters a word has."""
        parts = _SPELLED.split(draft.answer) if draft.spelled else [draft.answer]
        # Why: `split` with a group returns the text between the words and the words in turn.
        return [one for place, part in enumerate(parts) for text in (part if place % 2 else [part])
                for one in self._encode(text)]  # fmt: skip

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _message(role: str, content: str) -> str:
    return f"{START_OF_MESSAGE}{role}\n{content}{END_OF_MESSAGE}\n"
