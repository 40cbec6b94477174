"""Random conversations about the tasks, as rows of tokens to train on.

Owns the plain and the chat form of a turn and which tokens are learned; it never runs a model. A turn in
plain form is the question itself, a line break, the answer and the end-of-message token.
"""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .tasks import TASKS, Draft, Task, draw
from .tokenizer import END_OF_MESSAGE, START_OF_MESSAGE

IGNORED = -100
"""Target of a position whose next token is not learned."""

_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a small demo model.",
    "Answer shortly.",
    "You are pagedcore, a friendly assistant. Answer in one sentence.",
)
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
    """Endless supply of training rows, seeded.

    Invariant: only questions of the "train" split are ever drawn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, weights: dict[str, float], seed: int) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._end = tokenizer.convert_tokens_to_ids(END_OF_MESSAGE)
        self._pad = tokenizer.pad_token_id
        self._rng = Random(seed)
        self.weights = dict(weights)

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return token ids and targets, both int64 of shape (rows, length)."""
        drawn = [self._row(length) for _ in range(rows)]
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
            reply = [*self._encode(draft.answer if as_chat else "\n" + draft.answer), self._end]
            question = self._encode(before)
            if len(row.ids) + len(question) + len(reply) <= length:
                row.append(question, reply, keep_end=as_chat or self._rng.random() < 0.6)
            elif row.ids:
                return row

    def _next_question(self, last: Task | None) -> tuple[Task, Draft]:
        if last is not None and last.follow_up is not None and self._rng.random() < 0.45:
            task = self._pick([task for task in TASKS.values() if task.family == last.family])
            if task.follow_up is not None:
                return task, draw(task.follow_up, self._rng, "train")
        task = self._pick(list(TASKS.values()))
        return task, draw(task.make, self._rng, "train")

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

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _message(role: str, content: str) -> str:
    return f"{START_OF_MESSAGE}{role}\n{content}{END_OF_MESSAGE}\n"
