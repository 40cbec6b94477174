"""Models with convolutions or recurrent layers beside transformers' batched ``generate``, in one run.

    python benchmarks/recurrent.py [--shape lfm2|qwen3_5] [--requests 1 8 32] [--pairs 5] [--layers N]

Random bfloat16 weights of the shape of LFM2-350M, or of Qwen3.5-0.8B with 12 layers. All prompts have 64 tokens and all
completions 32, so that transformers' batch has no padding. Rounds take turns; printed are medians of output tokens per
second and, of the ratio of a pair, the median and its interval of 95 %. Run it with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from interleaved import interval, markdown, ratios

from pagedcore import Engine, SamplingParams

PROMPT, COMPLETION = 64, 32


def shape_of(name: str, layers: int | None) -> Any:
    """Return transformers' configuration of a shape."""
    from transformers import AutoConfig

    if name == "lfm2":
        kinds = ["conv" if place not in (2, 5, 8, 10, 12, 14) else "full_attention" for place in range(16)]
        return AutoConfig.for_model(
            "lfm2", hidden_size=1024, intermediate_size=6656, num_hidden_layers=16, num_attention_heads=16,
            num_key_value_heads=8, vocab_size=65536, layer_types=kinds, max_position_embeddings=4096,
        )  # fmt: skip
    return AutoConfig.for_model(
        "qwen3_5_text", hidden_size=1024, intermediate_size=3584, num_hidden_layers=layers or 12, vocab_size=151936,
        num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip


def model_of(config: Any) -> Any:
    """Return a random model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def seconds(work: Callable[[], object]) -> float:
    """Return what something takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="lfm2", choices=("lfm2", "qwen3_5"))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--layers", type=int)
    given = parser.parse_args()
    own, table = model_of(shape_of(given.shape, given.layers)), list[list[str]]()
    tokens = torch.randint(5, 60000, (max(given.requests), PROMPT), generator=torch.Generator().manual_seed(1))
    params = SamplingParams(max_tokens=COMPLETION, temperature=0.0, ignore_eos=True)
    with Engine.from_pretrained(
        model_of(shape_of(given.shape, given.layers)), max_num_seqs=max(given.requests), max_model_len=512,
        enable_prefix_caching=False, speculation="off",
    ) as engine:  # fmt: skip
        for count in given.requests:
            prompts, some = tokens[:count].tolist(), tokens[:count]

            def ours(prompts: list[list[int]] = prompts) -> None:
                engine.generate(prompts, params, show_progress=False)

            @torch.inference_mode()
            def theirs(some: torch.Tensor = some) -> None:
                own.generate(some, attention_mask=torch.ones_like(some), max_new_tokens=COMPLETION, do_sample=False,
                             pad_token_id=0, eos_token_id=None)  # fmt: skip

            ours()
            theirs()
            times: dict[Any, list[float]] = {ours: [], theirs: []}
            for pair in range(given.pairs):
                for work in (ours, theirs) if pair % 2 else (theirs, ours):
                    times[work].append(seconds(work))
            speed = ratios(times[theirs], times[ours])
            low, high = interval(speed)
            each = [f"{count * COMPLETION / statistics.median(times[work]):.1f}" for work in (ours, theirs)]
            table.append([str(count), *each, f"{statistics.median(speed):.2f} ({low:.2f} to {high:.2f})"])
    print(markdown(["requests", "tokens/s", "transformers", "ratio"], table))


if __name__ == "__main__":
    main()
