"""How far the logits of a GGUF file are from those of its decoded numbers: ours and llama.cpp's, on the same file.

    pip install gguf accelerate
    python logit_error.py --gguf MODEL/FILE.gguf --llamacpp LLAMA_BIN [--prompts 24]

The reference is transformers, which decodes the file to float32 with the package ``gguf``. Printed for each engine is
the root mean square of the difference of the logits behind prompts of 48 random tokens, relative to that of the logits
around their mean, and how often the largest is the same. llama.cpp's are the log-probabilities of all tokens, as its
server returns them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from pagedcore import Engine, SamplingParams

PORT = 18231
FIRST_TOKEN, LAST_TOKEN, PROMPT_TOKENS = 300, 4000, 48
Prompts = list[list[int]]
Logits = NDArray[np.float64]


def reference(file: Path, prompts: Prompts) -> Logits:
    """Return what transformers computes, ``[prompts, vocabulary]``."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.inference_mode():
        return np.array([model(torch.tensor([one])).logits[0, -1].double().numpy() for one in prompts])


def ours(file: Path, quantization: str, prompts: Prompts) -> Logits:
    """Return the logits of an engine."""
    asked = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, return_logits=True, ignore_eos=True)
    with Engine.from_pretrained(file, quantization=quantization, max_model_len=512) as engine:
        return np.array([one.outputs[0].logits[0] for one in engine.generate(prompts, asked)], dtype=np.float64)


def _ask(path: str, body: dict[str, object] | None = None) -> dict[str, list[dict[str, list[dict[str, float]]]]]:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=300)
    connection.request("POST" if body else "GET", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        raise OSError(f"status {answer.status}")
    found: dict[str, list[dict[str, list[dict[str, float]]]]] = json.loads(answer.read())
    return found


def llamacpp(file: Path, programs: str, prompts: Prompts, vocab_size: int) -> Logits:
    """Return the log-probabilities that llama.cpp's server reports: logits less a number for each prompt."""
    server = subprocess.Popen(
        [str(Path(programs) / "llama-server"), "-m", str(file), "-c", "1024", "-np", "1", "--port", str(PORT)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while server.poll() is None:
            try:
                _ask("/health")
                break
            except OSError:
                time.sleep(0.5)
        found = np.full((len(prompts), vocab_size), np.nan)
        for row, prompt in zip(found, prompts, strict=True):
            body = {"prompt": prompt, "n_predict": 1, "n_probs": vocab_size, "temperature": 0.0, "cache_prompt": False}
            for one in _ask("/completion", body)["completion_probabilities"][0]["top_logprobs"]:
                row[int(one["id"])] = one["logprob"]
        return found
    finally:
        server.kill()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", required=True, type=Path)
    parser.add_argument("--llamacpp", required=True, help="folder with llama-server")
    parser.add_argument("--prompts", type=int, default=24)
    given = parser.parse_args()
    rng = random.Random(7)
    prompts = [[rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(PROMPT_TOKENS)] for _ in range(given.prompts)]
    exact = reference(given.gguf, prompts)
    around = exact - exact.mean(1, keepdims=True)
    print("| engine | error of logits | same largest logit |\n| --- | --- | --- |")
    for name, logits in (
        ("pagedcore", ours(given.gguf, "none", prompts)),
        ("pagedcore, w4a8", ours(given.gguf, "w4a8", prompts)),
        ("llama.cpp", llamacpp(given.gguf, given.llamacpp, prompts, exact.shape[1])),
    ):
        difference = logits - logits.mean(1, keepdims=True) - around
        error = np.sqrt((difference**2).mean() / (around**2).mean())
        same = int((logits.argmax(1) == exact.argmax(1)).sum())
        print(f"| {name} | {error:.2%} | {same} of {len(prompts)} |", flush=True)


if __name__ == "__main__":
    main()
