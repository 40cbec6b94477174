"""Draw the questions that pagedcore ships, and write them to the package's `questions.json`.

Run in `examples/`:

    python -m demo_model.shipped_questions
"""

import json
from random import Random

from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.demo_model.questions import CHECKED_TASKS, DemoQuestion, Split

from .tasks import TASKS, draw

NUM_ROUNDS: dict[Split, int] = {"any": 100, "train": 20, "held_out": 20}
"""How many rounds are shipped of each split; a round has one question of every task."""
_TRIES_FOR_A_NEW_PROMPT = 50


def draw_questions(num_rounds: int, split: Split) -> list[DemoQuestion]:
    """Draw rounds of questions; prompts differ from each other as long as the tasks have new ones to offer."""
    rng = Random(0)
    questions: list[DemoQuestion] = []
    seen: set[str] = set()
    for _ in range(num_rounds):
        for name in rng.sample(CHECKED_TASKS, len(CHECKED_TASKS)):
            question = _new_question(name, rng, split, seen)
            seen.add(question.prompt)
            questions.append(question)
    return questions


def _new_question(name: str, rng: Random, split: Split, seen: set[str]) -> DemoQuestion:
    for _ in range(_TRIES_FOR_A_NEW_PROMPT):
        draft = draw(TASKS[name].make, rng, split)
        if draft.prompt not in seen:
            break
    return DemoQuestion(draft.prompt, draft.answer, name)


def as_json() -> str:
    """Return the file's text: for each split its rounds, one in a line, of task, prompt and answer."""
    splits = []
    for split, num_rounds in NUM_ROUNDS.items():
        drawn = [[one.task, one.prompt, one.answer] for one in draw_questions(num_rounds, split)]
        size = len(CHECKED_TASKS)
        rounds = (json.dumps(drawn[start : start + size]) for start in range(0, len(drawn), size))
        splits.append(f'"{split}": [\n' + ",\n".join(rounds) + "\n]")
    return "{" + ",\n".join(splits) + "}\n"


if __name__ == "__main__":
    (DEMO_MODEL_DIR / "questions.json").write_text(as_json(), encoding="utf-8")
