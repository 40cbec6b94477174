"""Many prompts at once: hand over a list, get the answers back in the same order."""

from pagedcore import Engine, SamplingParams
from pagedcore.demo_model.questions import demo_questions, is_correct


def main() -> None:
    """Ask the demo model 24 questions with known answers and check every one."""
    questions = demo_questions(24)
    with Engine.from_pretrained("demo", max_num_seqs=8) as engine:
        outputs = engine.generate([question.prompt for question in questions], SamplingParams(max_tokens=96))

    num_right = 0
    for question, output in zip(questions, outputs, strict=True):
        answer = output.outputs[0]
        right = is_correct(question, answer.text)
        num_right += right
        print(f"{'right' if right else 'wrong'}  {question.prompt!r} -> {answer.text.strip()!r}")
    print(f"{num_right} of {len(questions)} answers right")


if __name__ == "__main__":
    main()
