"""What structured output costs: compiling, masks by vocabulary, and the share of a step of a model.

    python benchmarks/structured.py [--step] [--rows 64]

Compiles the test's fifty schemas, and follows each for some tokens at random, with the vocabulary of the demo model and
with one of 151,936 tokens made from the Python sources of this machine. Where xgrammar can be imported, it does the
same. With --step, random weights in the shape of Qwen2.5-0.5B generate under the schemas, and the time in masks is
compared with the rest of the step.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagedcore import Engine, SamplingParams, StructuredOutput
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.structured.grammars import Grammars
from pagedcore.tokenizer.quick_tokenizer import QuickTokenizer
from pagedcore.tokenizer.tokenizer import HFTokenizer

SCHEMAS: list[Any] = [
    one["schema"] for one in json.loads((Path(__file__).parents[1] / "tests/structured/schemas.json").read_text())
]
LARGE, TOKENS_PER_SCHEMA = 151_936, 24
END = "<|im_end|>"


def large_tokenizer() -> QuickTokenizer:
    """Make a byte-level tokenizer of 151,936 tokens: the commonest beginnings of words in Python sources."""
    counts: collections.Counter[str] = collections.Counter()
    for path in islice(sorted(Path(sysconfig.get_paths()["purelib"]).glob("*/**/*.py")), 4000):
        words = re.findall(r" ?[A-Za-z]+| ?[0-9]+|[^\sA-Za-z0-9]+|\s+", path.read_text(errors="ignore"))
        counts.update(word for word in words if word.isascii() and len(word) <= 24)
    shown = dict(zip(map(chr, range(256)), _alphabet(), strict=True))
    beginnings: collections.Counter[str] = collections.Counter()
    for word, count in counts.items():
        spelled = "".join(shown[one] for one in word)
        beginnings.update({spelled[:end]: count for end in range(2, len(spelled) + 1)})
    # Why longer ones later: a token is merged from its beginning and one byte.
    chosen = sorted((one for one, _ in beginnings.most_common(LARGE - 257)), key=len)
    vocabulary = {token: place for place, token in enumerate([*shown.values(), *chosen])}
    merges = [(token[:-1], token[-1]) for token in chosen]
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    return QuickTokenizer(backend, {"eos_token": END}, None)


def _alphabet() -> Iterator[str]:
    """Yield GPT-2's character for each byte."""
    hidden = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            yield chr(byte)
        else:
            yield chr(0x100 + hidden)
            hidden += 1


def follow(compile_one: Callable[[Any], tuple[Callable[[], Any], Callable[[int], Any]]], size: int) -> str:
    """Compile all schemas and follow each; say what compiling and a mask took, in milliseconds."""
    rng, compiling, masking = np.random.default_rng(0), list[float](), list[float]()
    for schema in SCHEMAS:
        started = time.perf_counter()
        mask, advance = compile_one(schema)
        compiling.append(time.perf_counter() - started)
        for _ in range(TOKENS_PER_SCHEMA):
            started = time.perf_counter()
            bits = mask()
            masking.append(time.perf_counter() - started)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little", count=size))
            if not len(allowed) or advance(int(rng.choice(allowed))) is False:
                break
    return "; ".join(
        f"{name} {np.median(values) * 1e3:.3f} in the median, {np.mean(values) * 1e3:.3f} on average, "
        f"{max(values) * 1e3:.1f} at most"
        for name, values in (("compiling", compiling), ("a mask", masking))
    )


def with_llguidance(tokenizer: HFTokenizer, size: int, end: int) -> Callable[[Any], Any]:
    """Return what compiles a schema as the engine does; a mask is that of one row."""
    grammars = Grammars(tokenizer, size, frozenset({end}))
    started = time.perf_counter()
    grammars.compile(StructuredOutput(regex="a"))
    print(f"  llguidance: the vocabulary {time.perf_counter() - started:.2f} s")

    def compile_one(schema: Any) -> Any:
        cursor, tokens = grammars.compile(StructuredOutput(json_schema=schema)), list[int]()
        bits = np.zeros((1, (size + 31) // 32), np.int32)

        def mask() -> Any:
            from llguidance.numpy import fill_next_token_bitmask

            fill_next_token_bitmask(cursor.matcher_after(tokens), bits)
            return bits[0]

        def advance(token: int) -> bool:
            tokens.append(token)
            return token != end

        return mask, advance

    return compile_one


def with_xgrammar(tokenizer: QuickTokenizer, size: int, end: int) -> Callable[[Any], Any]:
    """The same with xgrammar's compiler, its cache off."""
    import xgrammar

    started = time.perf_counter()
    names = [name for name, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    info = xgrammar.TokenizerInfo(names, xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=[end])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    print(f"  xgrammar: the vocabulary {time.perf_counter() - started:.2f} s")

    def compile_one(schema: Any) -> Any:
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
        bits = xgrammar.allocate_token_bitmask(1, size)

        def mask() -> Any:
            matcher.fill_next_token_bitmask(bits)
            return bits.numpy()[0]

        return mask, lambda token: matcher.accept_token(token) and token != end

    return compile_one


def many_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a list that no completion comes to the end of, so that all rows stay in the batch."""
    items = {name: value for name, value in schema.items() if name != "$defs"}
    return {"type": "array", "items": items, "minItems": 100, "$defs": schema.get("$defs", {})}


def share_of_a_step(tokenizer: HFTokenizer, rows: int) -> str:
    """Generate under the schemas with the shape of a model of half a billion weights; compare masks with steps."""
    from pagedcore.bench.workloads import random_model

    masks, steps = list[float](), list[float]()
    mask_rows = Grammars.mask_rows

    def timed(self: Grammars, logits: Any, constrained: Any) -> Any:
        started = time.perf_counter()
        failures = mask_rows(self, logits, constrained)
        if len(constrained) == rows:
            masks.append(time.perf_counter() - started)
        return failures

    Grammars.mask_rows = timed  # type: ignore[method-assign]
    model = random_model("qwen05b", "bfloat16")
    with Engine.from_pretrained(model, tokenizer=tokenizer, max_num_seqs=rows, max_model_len=512,
                                num_kv_blocks=rows * 4, block_size=16) as engine:
        for row in range(rows):
            engine.add_request([row + 1] * 8, SamplingParams(
                max_tokens=30, temperature=1.0, seed=row,
                structured=StructuredOutput(json_schema=many_of(SCHEMAS[row % len(SCHEMAS)])),
            ))
        while engine.has_pending_requests():
            before, started = len(masks), time.perf_counter()
            engine.step()
            if len(masks) > before:
                steps.append(time.perf_counter() - started)
    mask, step = np.sum(masks), np.sum(steps)
    return (
        f"{len(steps)} steps of {rows} rows: {step / len(steps) * 1e3:.0f} ms a step, "
        f"{mask / len(steps) * 1e3:.1f} ms of it masks (largest {max(masks) * 1e3:.1f}): "
        f"{mask / (step - mask):.1%} of the rest"
    )


def main() -> None:
    """Print what is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    demo, large = HFTokenizer.from_directory(DEMO_MODEL_DIR), large_tokenizer()
    quick: Any = demo._tokenizer
    for name, one, text in (("demo model", quick, demo), ("large", large, HFTokenizer(large, is_shared=False))):
        size, end = one.backend.get_vocab_size(), one.eos_token_id
        print(f"{name}: {size} tokens")
        print("  llguidance:", follow(with_llguidance(text, size, end), size))
        if find_spec("xgrammar") is not None:
            print("  xgrammar:", follow(with_xgrammar(one, size, end), size))
    if options.step:
        print(share_of_a_step(HFTokenizer(large, is_shared=False), options.rows))


if __name__ == "__main__":
    main()
