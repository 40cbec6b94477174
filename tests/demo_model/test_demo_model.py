"""Laws of the shipped demo model, loaded with plain transformers: its shape, its tokenizer, its answers."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.demo_model.questions import CHECKED_TASKS, DemoQuestion, demo_questions, is_correct

_TARGETS = {"add": 0.97, "subtract": 0.97, "capital": 0.99}
_OTHER_TARGET = 0.95


@cache
def _model(dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=dtype, local_files_only=True)
    assert isinstance(model, Qwen2ForCausalLM)
    return model.eval()


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR, local_files_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@cache
def _accuracy() -> dict[str, Any]:
    report: dict[str, Any] = json.loads((DEMO_MODEL_DIR / "accuracy.json").read_text())
    return report


def _answers(prompts: list[str]) -> list[str]:
    """Continue all prompts greedily, in one batch."""
    batch = _tokenizer()(prompts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        output = _model().generate(**batch, max_new_tokens=60)
    texts: list[str] = _tokenizer().batch_decode(output[:, batch["input_ids"].shape[1] :])
    return texts


def _chat(*contents: str) -> str:
    """Render messages, user first, then assistant and user in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(contents)]
    text = _tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def _mistakes(questions: list[DemoQuestion], prompts: list[str]) -> list[tuple[str, str]]:
    pairs = zip(questions, _answers(prompts), strict=True)
    return [(question.prompt, text) for question, text in pairs if not is_correct(question, text)]


def test_directory_is_small_and_whole() -> None:
    """The shipped files are the five that a loader needs, the report and the questions, and stay under 8 MB."""
    files = [path for path in DEMO_MODEL_DIR.iterdir() if path.is_file()]
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
              "tokenizer_config.json", "accuracy.json", "questions.json"}  # fmt: skip
    assert needed <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) <= 8_000_000


def test_architecture_exercises_grouped_queries_biases_and_tied_embeddings() -> None:
    """The model has 1 to 4 million parameters, fewer key-value heads than heads, biases and tied ends."""
    model, config = _model(), _model().config
    assert 1_000_000 <= model.num_parameters() <= 4_000_000
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.hidden_size // config.num_attention_heads % 16 == 0
    assert config.max_position_embeddings == 2048
    assert config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].self_attn.q_proj.bias is not None


@pytest.mark.parametrize(
    "text", ["plain", "héllo wörld", "中文 漢字", "🎉👩‍🚀", "a\tb\r\n\n  c", "\x00\x7f", "x" * 300]
)
def test_tokenizer_returns_any_text_unchanged(text: str) -> None:
    """Encoding and decoding is the identity on every text."""
    assert _tokenizer().decode(_tokenizer().encode(text)) == text


def test_every_digit_is_a_token_of_its_own() -> None:
    """A number has as many tokens as digits, wherever it stands."""
    digits = {_tokenizer().convert_tokens_to_ids(digit) for digit in "0123456789"}
    assert len(digits) == 10
    for text in ("1234567890", "x1234567890", "(1234567890)", ", 1234567890", "12345\n67890"):
        assert sum(token in digits for token in _tokenizer().encode(text)) == 10


def test_chat_template_renders_system_and_many_turns() -> None:
    """The template writes each message between its markers and opens the assistant's turn."""
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"},
                {"role": "assistant", "content": "A"}, {"role": "user", "content": "V"}]  # fmt: skip
    text = _tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    assert text == "".join(expected) + "<|im_start|>assistant\n"
    assert (_tokenizer().eos_token, _tokenizer().pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("form", ["plain", "chat"])
def test_one_held_out_question_of_each_task_is_answered(form: str) -> None:
    """Held-out questions of every task, four each, get the right answer and an end; one may miss."""
    questions = demo_questions(4 * len(CHECKED_TASKS), seed=11, split="held_out")
    prompts = [question.prompt if form == "plain" else _chat(question.prompt) for question in questions]
    assert len(_mistakes(questions, prompts)) <= 1


def test_plain_answer_begins_with_a_line_break_and_ends_with_the_end_token() -> None:
    """A plain prompt is continued by a line break, the answer, and the end-of-message token."""
    (text,) = _answers(["What is 2 + 3?"])
    assert text.startswith("\n2 + 3 = 5.<|im_end|>")


@pytest.mark.parametrize("gap", ["\n", " ", "", "<|im_end|>", "<|im_end|>\n", "<|im_end|> "])
def test_finished_answer_can_be_continued_by_a_short_question(gap: str) -> None:
    """A short question after an answer means the same kind of thing, whatever stands between them."""
    turns = [("What is 2 + 3?", "2 + 3 = 5.", "And 4 + 4?", "4 + 4 = 8."),
             ("What is the capital of Sweden?", "The capital of Sweden is Stockholm.", "And of Norway?",
              "The capital of Norway is Oslo.")]  # fmt: skip
    plain = [f"{question}\n{answer}{gap}{again}" for question, answer, again, _ in turns]
    chats = [_chat(question, answer, again) for question, answer, again, _ in turns]
    questions = [DemoQuestion(again, reply, "follow_up") for _, _, again, reply in turns]
    assert _mistakes(questions * 2, plain + chats) == []


def test_report_was_made_for_these_weights() -> None:
    """The accuracy report names the digest of exactly the weights that ship."""
    digest = hashlib.sha256((Path(DEMO_MODEL_DIR) / "model.safetensors").read_bytes()).hexdigest()
    assert _accuracy()["model_sha256"] == digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("task", CHECKED_TASKS)
def test_reported_accuracy_meets_the_target(dtype: str, task: str) -> None:
    """Measured over all forms of asking, each task is right as often as promised, in both number types."""
    figures = _accuracy()["held_out_accuracy"][dtype][task].values()
    right, questions = (sum(figure[name] for figure in figures) for name in ("right", "questions"))
    assert right / questions >= _TARGETS.get(task, _OTHER_TARGET)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_capitals_are_all_right_unless_other_turns_come_before(dtype: str) -> None:
    """Every capital asked for alone or after a question of its kind is right; misses come after other turns only."""
    forms = _accuracy()["held_out_accuracy"][dtype]["capital"]
    assert {"plain", "chat", "plain_follow_up", "chat_follow_up"} < set(forms)
    assert all(figure["right"] == figure["questions"] for form, figure in forms.items() if not form.endswith("_later"))


def test_every_reported_figure_says_how_many_questions_it_comes_from() -> None:
    """A figure is a number of right answers and of questions, 3,000 of them for a sum of two digits."""
    for tasks in _accuracy()["held_out_accuracy"].values():
        figures = [figure for forms in tasks.values() for figure in forms.values()]
        assert all(0 < figure["right"] <= figure["questions"] <= 500 for figure in figures)
        for task in ("add", "subtract"):
            assert sum(figure["questions"] for figure in tasks[task].values()) == 3000
