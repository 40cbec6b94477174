"""Train the demo model that ships inside pagedcore, from nothing, in less than an hour on two CPU cores.

The text is written by the tasks of `examples/demo_model/`, nothing is downloaded, and every run with the
same arguments sees the same text. Owns the network's size and the training loop; the tokenizer, the
conversations and the measuring stand in `examples/demo_model/`.

    python examples/train_demo_model.py                    # about 50 minutes on two cores
    python examples/train_demo_model.py --start DIRECTORY  # continue with an earlier model
    python examples/train_demo_model.py --measure          # only measure the model again
"""

import argparse
import copy
import hashlib
import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from demo_model.conversations import IGNORED, ConversationSource
from demo_model.evaluation import (
    FORMS,
    LONGEST_ANSWER,
    LONGEST_CALL,
    FormedQuestion,
    accuracy,
    answers,
    formed_accuracy,
    object_questions,
    share_right,
    tool_questions,
)
from demo_model.objects import OBJECT_TASKS
from demo_model.tasks import TASKS
from demo_model.tokenizer import CHAT_TEMPLATE, train_tokenizer
from demo_model.tools import KINDS
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from pagedcore import Engine, SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR

CONTEXT, VOCABULARY = 2048, 2048
CONTINUED_RATE = 0.4
# Held-out questions of each task and form that the report measures.
QUESTIONS = 500
# Held-out questions for the calculator, and as many that want an object.
FORMED = 1000
# Share of each task among the questions, before the errors made in training shift it.
WEIGHTS = {
    "add": 13.0, "subtract": 16.0, "add_three_digits": 2.0, "subtract_three_digits": 2.0,
    "capital": 12.0, "country": 8.0, "count": 8.0, "reverse": 8.0, "sort": 18.0, "spell": 5.0,
    "spell_backwards": 6.0, "day": 1.5, "month": 2.0, "month_length": 1.5, "explain": 6.0, "talk": 1.0,
    "json_add": 20.0, "json_capital": 6.0, "json_word": 5.0, "json_person": 3.5,
    "json_count": 1.0,
}  # fmt: skip
# Rows and length of the batches, taken in turn, and the share of rows with tools: as many tokens each.
BATCHES = ((32, 96, 0.0), (16, 192, 0.6), (32, 96, 0.0), (8, 384, 0.7), (32, 96, 0.0), (12, 256, 0.6))


@dataclass(frozen=True)
class Plan:
    """How to train: until `steps` batches are learned or `minutes` have passed.

    `rate` is for the matrices of the layers, `plain_rate` for all other weights.
    """

    steps: int
    minutes: float
    seed: int
    rate: float = 0.02
    plain_rate: float = 0.004
    warm_up: int = 100
    check_every: int = 400


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return an untrained Qwen2 of about two million parameters, three query heads to a key-value head."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


class Trainer:
    """The training loop; each batch is shared out among as many threads as there are cores.

    Invariant: `steps` batches with `tokens` tokens have been learned.
    """

    def __init__(self, model: Qwen2ForCausalLM, source: ConversationSource, plan: Plan) -> None:
        self.model, self.plan, self.steps, self.tokens = model, plan, 0, 0
        self._start = time.monotonic()
        # Why: on a CPU, plain matrix products go backwards through short rows faster than fused attention.
        model.set_attn_implementation("eager")
        self._source = source
        self._weights = list(model.parameters())
        # Why: threads that each work through a whole share of the batch meet once a step; threads that
        # share every product meet thousands of times and stall when the machine has other work too.
        self._shares = torch.get_num_threads() if model.device.type == "cpu" else 1
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self._shares)
        self._optimizers = self._make_optimizers()

    def _make_optimizers(self) -> list[tuple[torch.optim.Optimizer, float]]:
        """Return one optimizer for each share of the matrices, one for the rest, and their rates."""
        matrices = [weight for weight in self.model.model.layers.parameters() if weight.ndim == 2]
        chosen = {id(weight) for weight in matrices}
        others = [weight for weight in self._weights if id(weight) not in chosen]
        # Muon (https://kellerjordan.github.io/posts/muon) is made for matrices; its author leaves the rest to Adam.
        shares = [matrices[share :: self._shares] for share in range(self._shares)]
        muons = [(torch.optim.Muon(share, weight_decay=0.01), self.plan.rate) for share in shares]
        adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
        return [*muons, (adam, self.plan.plain_rate)]

    def step(self) -> float:
        """Learn from one batch and return the loss, the mean over the learned tokens in nats."""
        batch = BATCHES[self.steps % len(BATCHES)]
        ids, targets = (part.to(self.model.device) for part in self._source.batch(*batch))
        self.tokens += ids.numel()
        learned = int((targets != IGNORED).sum())
        parts = zip(ids.chunk(self._shares), targets.chunk(self._shares), strict=True)
        results = list(self._pool.map(lambda part: self._gradients(part[0], part[1], learned), parts))
        for weight, *gradients in zip(self._weights, *(gradients for _, gradients in results), strict=True):
            weight.grad = torch.stack(gradients).sum(0)
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        factor = self._rate_factor()
        list(self._pool.map(lambda pair: _update(pair[0], pair[1] * factor), self._optimizers))
        self.steps += 1
        return sum(loss for loss, _ in results)

    def _gradients(self, ids: Tensor, targets: Tensor, learned: int) -> tuple[float, tuple[Tensor, ...]]:
        """Return this share of the loss, which is a mean over `learned` tokens, and its gradients."""
        with torch.autocast(ids.device.type, torch.bfloat16):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            # Why: most positions are not learned, so that most of the output layer's work can be skipped.
            kept = targets != IGNORED
            scores = self.model.lm_head(hidden[kept])
        loss = nn.functional.cross_entropy(scores.float(), targets[kept], reduction="sum") / learned
        return loss.item(), torch.autograd.grad(loss, self._weights)

    def record(self) -> dict[str, float]:
        """Return what has been learned so far, and how fast."""
        seconds = time.monotonic() - self._start
        minutes, speed = round(seconds / 60, 1), round(self.tokens / seconds)
        return {"steps": self.steps, "tokens": self.tokens, "minutes": minutes, "tokens_per_second": speed}

    def done(self) -> float:
        """Return the part of the training that lies behind, by steps or by time, whichever is more."""
        minutes = (time.monotonic() - self._start) / 60
        return max(self.steps / self.plan.steps, minutes / self.plan.minutes)

    def _rate_factor(self) -> float:
        """Linear warm-up, then half a cosine down to zero."""
        warm = min(1.0, (self.steps + 1) / self.plan.warm_up)
        return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, self.done())))


def _update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def train(trainer: Trainer, tokenizer: PreTrainedTokenizerFast, source: ConversationSource, out: Path) -> None:
    """Train to the end with a progress bar; ask more of what the model gets wrong."""
    bar = tqdm(total=trainer.plan.steps, unit="step", mininterval=5)
    while trainer.done() < 1:
        loss = trainer.step()
        bar.update()
        bar.set_postfix(loss=f"{loss:.3f}", done=f"{trainer.done():.0%}", refresh=False)
        if trainer.steps % trainer.plan.check_every == 0:
            measured = check(trainer.model, tokenizer, trainer.steps)
            bar.write(f"step {trainer.steps} loss {loss:.3f} " + " ".join(f"{t} {a:.0%}" for t, a in measured.items()))
            source.weights = shifted_weights(measured)
            save(trainer.model, tokenizer, out)


def shifted_weights(measured: dict[str, float]) -> dict[str, float]:
    """Return the shares of the tasks, moved towards those that are often wrong."""
    return {task: WEIGHTS[task] * (0.3 + 2 * (1 - measured[task])) for task in WEIGHTS}


def check(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, float]:
    """Return a quick estimate of the held-out accuracy of each task, all forms of asking together."""
    model.eval()
    ask = partial(answers, model, tokenizer)
    measured = accuracy(ask, tokenizer, FORMS, questions=2, seed=seed, tasks=TASKS | OBJECT_TASKS)
    formed = [question for kind in KINDS for question in tool_questions(4, seed, tokenizer, kind)]
    called = formed_accuracy(lambda asked: ask([one.prompt for one in asked], longest=LONGEST_CALL), formed)
    model.train()
    grouped = {task: list(by.values()) for task, by in measured.items()} | {kind: [one] for kind, one in called.items()}
    return {name: share_right(figures) for name, figures in grouped.items()}


def fresh(seed: int) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast, list[object]]:
    """Return an untrained model, a tokenizer trained for it, and an empty list of earlier runs."""
    tokenizer = train_tokenizer(VOCABULARY, seed, CONTEXT)
    return new_model(tokenizer), tokenizer, []


def load(start: Path) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast, list[object]]:
    """Return model and tokenizer of the directory `start`, and the runs its report lists."""
    model = Qwen2ForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    tokenizer.chat_template = CHAT_TEMPLATE
    return model, tokenizer, json.loads((start / "accuracy.json").read_text())["training_runs"]


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights, as bfloat16, and tokenizer to `out`."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)


def report(out: Path, tokenizer: PreTrainedTokenizerFast, runs: list[object]) -> dict[str, object]:
    """Measure the stored model, as the engine runs it in float32 and in bfloat16, on held-out questions."""
    measured: dict[str, object] = {}
    constrained: dict[str, object] = {}
    formed = tool_questions(FORMED, -1, tokenizer) + object_questions(FORMED, -1, tokenizer)
    for dtype in ("float32", "bfloat16"):
        with Engine.from_pretrained(out, dtype=dtype, max_num_seqs=128, max_num_waiting=QUESTIONS) as engine:
            measured[dtype] = accuracy(partial(engine_answers, engine), tokenizer, FORMS, QUESTIONS, seed=-1)
            constrained[dtype] = formed_accuracy(partial(constrained_answers, engine), formed)
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    return {"model_sha256": digest, "training_runs": runs, "held_out_accuracy": measured,
            "constrained_accuracy": constrained}  # fmt: skip


def engine_answers(engine: Engine, prompts: list[str]) -> list[str]:
    """Continue each prompt greedily and return the new text."""
    texts: list[str] = []
    for start in range(0, len(prompts), QUESTIONS):
        outputs = engine.generate(prompts[start : start + QUESTIONS], SamplingParams(max_tokens=LONGEST_ANSWER))
        texts += [output.outputs[0].text for output in outputs]
    return texts


def constrained_answers(engine: Engine, questions: list[FormedQuestion]) -> list[str]:
    """Continue each prompt greedily within its form and return the new text."""
    texts: list[str] = []
    for start in range(0, len(questions), QUESTIONS):
        asked = questions[start : start + QUESTIONS]
        params = [SamplingParams(max_tokens=LONGEST_CALL, structured=one.structured) for one in asked]
        outputs = engine.generate([one.prompt for one in asked], params)
        texts += [output.outputs[0].text for output in outputs]
    return texts


def write_report(out: Path, tokenizer: PreTrainedTokenizerFast, runs: list[object]) -> None:
    """Write the report beside the model, a line for each figure."""
    text = json.dumps(report(out, tokenizer, runs), indent=1)
    text = re.sub(r'\{\s+("right": \d+,)\s+("questions": \d+)\s+\}', r"{\1 \2}", text)
    (out / "accuracy.json").write_text(text + "\n")


def main() -> None:
    """Train, save, measure and write the report."""
    arguments = parse_arguments()
    if arguments.measure:
        write_report(arguments.out, *load(arguments.out)[1:])
        return
    start: Path | None = arguments.start
    plan = Plan(arguments.steps, arguments.minutes, arguments.seed)
    if start is not None:
        plan = replace(plan, rate=plan.rate * CONTINUED_RATE, plain_rate=plan.plain_rate * CONTINUED_RATE)
    torch.manual_seed(plan.seed)
    model, tokenizer, runs = load(start) if start is not None else fresh(plan.seed)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    source = ConversationSource(tokenizer, WEIGHTS, plan.seed)
    if start is not None:
        source.weights = shifted_weights(check(model, tokenizer, plan.seed))
    trainer = Trainer(model, source, plan)
    train(trainer, tokenizer, source, arguments.out)
    save(model, tokenizer, arguments.out)
    runs.append({"plan": asdict(plan), "parameters": model.num_parameters(), **trainer.record()})
    write_report(arguments.out, tokenizer, runs)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12000, help="batches of about 3,000 tokens (default 12000)")
    parser.add_argument("--minutes", type=float, default=50, help="stop by then even before the last step")
    parser.add_argument("--seed", type=int, default=0, help="use another one to continue with other text")
    parser.add_argument("--start", type=Path, help="continue from this model, at a lower rate, not from nothing")
    parser.add_argument("--measure", action="store_true", help="do not train, measure the model in --out")
    parser.add_argument("--out", type=Path, default=DEMO_MODEL_DIR, help="directory to write the model to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
