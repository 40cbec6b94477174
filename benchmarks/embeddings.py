"""Embeddings beside sentence-transformers on this CPU, and a chat beside a bulk of texts.

    python benchmarks/embeddings.py [--texts 96] [--rounds 2] [--dtype bfloat16] [--peer DIRECTORY]

Random weights in the shape of Qwen3-Embedding-0.6B with fewer layers embed texts of random lengths, in turns
with sentence-transformers, which gets the batch size that is its fastest and sorts by length itself; ``--peer`` is a
directory to import it from. Then one chat decodes alone and beside a bulk of texts, in turns: its mean time from token
to token. All figures are of one run; other programs on the machine disturb them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pagedcore import AsyncEngine, SamplingParams

SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 2048, "tie_word_embeddings": True}
CHAT_TOKENS = 48


def write_model(directory: Path, layers: int) -> None:
    """Write an embedder of random weights with a tokenizer of a token for each byte pair that it saw."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["<eos>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    torch.manual_seed(1)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_hidden_layers=layers, pad_token_id=0, eos_token_id=0)).to(
        torch.bfloat16).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = "sentence_transformers.models."
    files: dict[str, Any] = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>",
                                  "pad_token": "<eos>", "model_max_length": 2048, "padding_side": "left"},
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": f"{names}Transformer"},
                         {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{names}Pooling"},
                         {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{names}Normalize"}],
        "1_Pooling/config.json": {"word_embedding_dimension": SHAPE["hidden_size"], "pooling_mode_lasttoken": True},
    }
    (directory / "1_Pooling").mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


def make_texts(count: int, seed: int) -> list[str]:
    """Return texts of 8 to some 400 tokens."""
    numbers = random.Random(seed)
    words = Path(__file__).read_text(encoding="utf-8").split()
    return [" ".join(numbers.choices(words, k=int(2 ** numbers.uniform(2, 7)))) for _ in range(count)]


async def embed_in_turns(engine: AsyncEngine, directory: Path, texts: list[str], rounds: int, dtype: str) -> None:
    """Print how many texts a second each computes."""
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]  # Why: no extra of ours.

    peer = SentenceTransformer(str(directory), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    sizes = {size: _seconds_of(peer, texts[: len(texts) // 3], size) for size in (4, 16, 32)}
    best = min(sizes, key=lambda size: sizes[size])
    await engine.embed(texts[:4])
    ours, theirs = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        found = await engine.embed(texts, cache_salt=str(begin))
        ours.append(time.perf_counter() - begin)
        theirs.append(_seconds_of(peer, texts, best))
    vectors = torch.tensor(peer.encode(texts[:8]))
    worst = min(float(vectors[place] @ torch.from_numpy(found[place].vector.copy())) for place in range(8))
    tokens = sum(one.num_prompt_tokens for one in found)
    pairs = [b / a for a, b in zip(ours, theirs, strict=True)]
    print(f"{len(texts)} texts of {tokens} tokens, {dtype}: {tokens / median(ours):.0f} tokens/s beside "
          f"{tokens / median(theirs):.0f} of sentence-transformers (batches of {best}): x {median(pairs):.2f} "
          f"({min(pairs):.2f} to {max(pairs):.2f}); least cosine of 8 {worst:.5f}")


def _seconds_of(peer: Any, texts: list[str], size: int) -> float:
    begin = time.perf_counter()
    peer.encode(texts, batch_size=size, show_progress_bar=False)
    return time.perf_counter() - begin


async def chat_beside(engine: AsyncEngine, texts: list[str], rounds: int) -> None:
    """Print the time from token to token of one chat alone and beside a bulk of texts."""
    params = SamplingParams(max_tokens=CHAT_TOKENS, ignore_eos=True)

    async def chat() -> tuple[float, float]:
        output = await engine.submit([5] * 40, params)
        times = output.outputs[0].itl_s
        return sum(times) / len(times), max(times)

    alone, beside, longest = [], [], []
    for number in range(rounds):
        alone.append((await chat())[0])
        bulk = asyncio.create_task(engine.embed(texts * 4, cache_salt=str(number)))
        await asyncio.sleep(0.2)
        mean, most = await chat()
        beside.append(mean)
        longest.append(most)
        bulk.cancel()
        await asyncio.gather(bulk, return_exceptions=True)
    print(f"chat: {1e3 * median(alone):.1f} ms from token to token alone, {1e3 * median(beside):.1f} ms beside a bulk: "
          f"x {median(beside) / median(alone):.2f}; longest {1e3 * max(longest):.0f} ms")


async def measure(options: argparse.Namespace, directory: Path) -> None:
    """Run both parts on one engine each."""
    texts = make_texts(options.texts, 3)
    settings: dict[str, Any] = {"dtype": options.dtype, "kv_cache_memory": "1GiB"}
    if "embed" in options.parts:
        async with AsyncEngine.from_pretrained(str(directory), **settings) as engine:
            await embed_in_turns(engine, directory, texts, options.rounds, options.dtype)
    for share in options.shares if "chat" in options.parts else ():
        more = {} if share == "default" else dict([share.split("=")])
        more = {name: json.loads(value) for name, value in more.items()}
        async with AsyncEngine.from_pretrained(str(directory), **settings, **more) as engine:
            print(share, end=": ")
            await chat_beside(engine, texts, options.rounds)


def main() -> None:
    """Write the model, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--peer", default="")
    parser.add_argument("--parts", nargs="+", default=["embed", "chat"])
    parser.add_argument("--shares", nargs="+", default=["default"], help="settings of the engine beside the chat")
    options = parser.parse_args()
    sys.path[:0] = [options.peer] if options.peer else []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "model"
        write_model(directory, options.layers)
        asyncio.run(measure(options, directory))


if __name__ == "__main__":
    main()
