"""Whether another checkout of the project gives the same bytes: tokens and log-probabilities of 520 requests.

    python benchmarks/same_outputs.py --base CHECKOUT

Forty greedy requests, and forty sampled ones with seeds, each on the demo model and on random weights of four
architectures, and on the demo model, llama and mixtral in w8a8, on pools so small that requests are preempted. Both
checkouts run on this machine, each in a process of its own; a digest is equal if all tokens and all bits of all
log-probabilities are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUM_REQUESTS = 40
COMMON = {"vocab_size": 199, "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "gpt2": {"vocab_size": 199, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "bos_token_id": 1,
             "eos_token_id": 2},
    "gemma2": {**COMMON, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16,
               "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    "mixtral": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
}

DEMO_PROMPTS = """\
Do you know the capital of Lithuania?
What comes after Sunday?
92 - 75 = ?
Please count down from 5 to 3.
How long is January?
Spell the word wheat.
Spell melon backwards.
Port Moresby is the capital of which country?
Reverse the order of these words: pepper, root, duck, hill.
Sort the words dog, oak, fox, apron, marble.
Explain what a token is.
Calculate 4 + 42.
Which month is after July?
What can you do?
What day comes before Friday?
Please spell mother.
Spell plate backwards.
Put these words in alphabetical order: prince, lake, jar.
Hello!
What is the sum of 39 and 78?
Explain what prompt is.
64 - 1
Reverse: rock, drum, lime, poem.
What country is Kingstown the capital of?
Please count from 34 to 44.
Capital of Albania?
What is the number of days in March?
What month is after September?
What is the sum of 29 and 70?
What are the letters of coin?
Reverse these words: room, fabric.
What day comes after Sunday?
Can you spell ankle backwards?
What country is Andorra la Vella the capital of?
Sort these words in alphabetical order: fig, bright, summer.
What month comes before June?
Tell me the capital of Cuba.
Explain what memory fragmentation is.
How many days are there in May?
Thank you.""".splitlines()
"""Fixed, so that checkouts whose demo model comes with other questions can be compared."""


def random_model(family: str) -> Any:
    """Return the tiny model of an architecture, with weights large enough that attention matters."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**FAMILIES[family])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.2)
    return model


def prompts_of(model: str) -> list[Any]:
    """Return the forty prompts of a model: text for the demo model, else token ids with beginnings in common."""
    if model == "demo":
        return DEMO_PROMPTS
    rng = random.Random(0)
    beginning = [rng.randrange(3, 199) for _ in range(40)]
    return [beginning[: rng.randrange(0, 40)] + [rng.randrange(3, 199) for _ in range(rng.randrange(1, 40))]
            for _ in range(NUM_REQUESTS)]


SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "presence_penalty": 0.2}
CASES: list[tuple[str, str, str]] = [
    *((model, way, "none") for way in ("greedy", "sampled") for model in ("demo", *FAMILIES)),
    *((model, "greedy", "w8a8") for model in ("demo", "llama", "mixtral")),
]
"""Model, way of choosing tokens, and quantisation."""


def digest_of(model: str, way: str, quantization: str) -> str:
    """Answer all prompts of a case and return a digest of everything that came of it."""
    from pagedcore import Engine, SamplingParams

    chosen = SAMPLED if way == "sampled" else {}
    params = [SamplingParams(max_tokens=8 + i, logprobs=5, prompt_logprobs=2 if i % 8 == 0 else None, seed=i,
                             ignore_eos=model != "demo", n=2 if way == "sampled" and i % 4 == 0 else 1, **chosen)
              for i in range(NUM_REQUESTS)]
    # Why: half of what all rows want, so that sequences have to make room for each other.
    num_blocks = 12 if model == "demo" else 40
    # One way of preempting, because "auto" follows the clock, and mixtures of experts depend on the schedule.
    settings = {"block_size": 16, "num_kv_blocks": num_blocks, "max_num_seqs": 16, "max_num_batched_tokens": 64,
                "preemption": "recompute", "quantization": quantization}
    loaded = "demo" if model == "demo" else random_model(model)
    with Engine.from_pretrained(loaded, **settings) as engine:
        outputs = engine.generate(prompts_of(model), params, show_progress=False)
        num_preemptions = engine.stats().num_preemptions
    digest = hashlib.sha256()
    for output in outputs:
        for answer in output.outputs:
            for one in [*(output.prompt_logprobs or ()), *(answer.logprobs or ())]:
                if one is not None:
                    for token_id, logprob in [(one.token_id, one.logprob), *one.top]:
                        digest.update(struct.pack("<qd", token_id, logprob))
            digest.update(repr((answer.token_ids, answer.text, answer.finish_reason)).encode())
    if not num_preemptions:
        raise SystemExit(f"{model}: no request was preempted, so this proves less than it says")
    return digest.hexdigest()


def digests_of(checkout: Path) -> dict[str, str]:
    """Return the digest of every case as a checkout makes them, in a process of its own."""
    folders = [checkout, checkout / "kernels", checkout / "adapters"]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, folders))}
    command = [sys.executable, __file__, "--digests"]
    done = subprocess.run(command, env=environment, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Compare and print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="the other checkout")
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.digests:
        print(json.dumps({" ".join(case): digest_of(*case) for case in CASES}))
        return
    if given.base is None:
        parser.error("--base is needed: the checkout to compare with")
    here, base = digests_of(ROOT), digests_of(given.base.resolve())
    for case, digest in here.items():
        print(f"{case}: {'equal' if base[case] == digest else 'DIFFERENT'} {digest[:16]}")
    raise SystemExit(here != base)


if __name__ == "__main__":
    main()
