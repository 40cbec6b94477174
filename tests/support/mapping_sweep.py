"""Every entry of transformers' mapping of causal language models, small and random, through the engine's own door.

What becomes of an entry is one of five words: "equal" to what ``generate`` says, "refused" with a reason of pagedcore,
"raw", an exception of another kind, "wrong", other tokens, and "not built", where no small model could be made here.
With quantised weights it "runs" in the place of the first.

Run it to print all entries, with every scheme of quantisation, and to write the table of the documentation; it fails if
one is raw or wrong.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagedcore import Engine, SamplingParams
from pagedcore.config.schemes import SCHEMES
from pagedcore.errors import PagedcoreError
from support.families import FAMILIES, VOCAB, config_of
from support.wrappers import WRAPPERS

LENGTHS = (1, 3, 17, 40, 70)
NUM_TOKENS = 12
PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
_MOST_PARAMETERS = 30_000_000
#: Fields that make a model small, of all architectures; an architecture gets those that it has.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_local_experts": 4, "moe_topk": 2,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "head_dim": 16, "sliding_window": 8, "ffn_dim": 96, "decoder_layers": 3, "decoder_ffn_dim": 96, "d_model": 64,
    "decoder_attention_heads": 4, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "shared_expert_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
    "embedding_size": 64, "layer_types": None,
}
#: Encoders, which decode if they are told so.
_TOLD_TO_DECODE = frozenset({
    "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm",
    "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod",
})
_AS_ANOTHER = {"gemma4_unified_text": "gemma4_text"}
_MORE: dict[str, dict[str, Any]] = {
    "longcat_flash": {"num_layers": 2, "num_hidden_layers": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 32,
                      "ffn_hidden_size": 96},
    "codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8},
    "gpt_neo": {"num_hidden_layers": 4, "window_size": 8, "attention_types": [[["global", "local"], 2]]},
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one entry, and the reason that was given or the exception."""

    entry: str
    word: str
    said: str = ""


def entries() -> list[str]:
    """The names of the mapping, in order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(entry: str) -> Any:
    """A configuration with sizes for a test; as far as its fields have names that are known."""
    if entry in FAMILIES:
        return config_of(entry)
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[entry]
    if entry in WRAPPERS:
        return kind(**copy.deepcopy(WRAPPERS[entry]))
    default = kind()
    if getattr(default, "text_config", None) is not None:
        return default  # it is refused for that
    fields = {name: value for name, value in _SMALL.items() if _has(default, name)}
    if _has(default, "qk_rope_head_dim"):
        fields |= {"num_key_value_heads": 4, "head_dim": 8}
    if entry in _TOLD_TO_DECODE:
        fields["is_decoder"] = True
    if entry in _AS_ANOTHER:
        fields = {**fields, "head_dim": 16, **FAMILIES[_AS_ANOTHER[entry]]}
    fields |= _MORE.get(entry, {})
    try:
        return kind(**fields)
    except Exception:  # of whatever type: the fields of some depend on each other in their own way
        return default


def _has(config: Any, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except Exception:  # what transformers raises for a field that layers may have of their own
        return True


def save_small(entry: str, directory: Path) -> Any:
    """Save an entry's small random model; ``None``: only its configuration, as no model is small enough."""
    from transformers import AutoModelForCausalLM

    config = small_config(entry)
    config.save_pretrained(directory)
    with torch.device("meta"):
        tree = AutoModelForCausalLM.from_config(config)
    if sum(parameter.numel() for parameter in tree.parameters()) > _MOST_PARAMETERS:
        return None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Why also what is usually 0 or 1: norms, biases and sinks hide errors then.
            parameter.normal_(0, 0.15) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model


def prompts() -> list[list[int]]:
    """Prompts of several lengths, of tokens that no tokenizer has names for."""
    return [[(start * 37 + place * 11) % (VOCAB - 10) + 5 for place in range(length)]
            for start, length in enumerate(LENGTHS)]


def outcome_of(entry: str, directory: Path, **settings: Any) -> Outcome:
    """Send one entry through the door, with ``settings`` of the engine, and compare what it says with ``generate``."""
    try:
        model = save_small(entry, directory)
    except Exception as error:  # of a model that is not ours
        model, built = None, f"{type(error).__name__}: {error}"
    else:
        built = "too large"
    try:
        actual = _from_engine(directory, **settings)
    except PagedcoreError as refusal:
        is_missing = model is None and any(words in str(refusal) for words in ("no config.json", "safetensors files"))
        return Outcome(entry, "not built" if is_missing else "refused", built if is_missing else str(refusal))
    except Exception as error:  # what the law forbids
        return Outcome(entry, "raw", f"{type(error).__name__}: {error}")
    if settings.get("quantization", "none") != "none":
        return Outcome(entry, "runs")
    return Outcome(entry, "equal" if actual == _from_transformers(directory, model) else "wrong", f"{actual}")


def _from_engine(directory: Path, **settings: Any) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with Engine.from_pretrained(
        directory, dtype="float32", max_num_batched_tokens=48, kv_cache_memory="16MiB", **settings
    ) as engine:
        return [list(one.outputs[0].token_ids) for one in engine.generate(prompts(), sampling)]


def _from_transformers(directory: Path, saved: Any) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    # Why by class: a language model that is saved without its wrapper may be in no mapping.
    kind = AutoModelForCausalLM if saved is None else type(saved)
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    # Why: Moshi's cache has a window that its masks do not have.
    uses_cache, found = model.config.model_type != "moshi", list[list[int]]()
    with torch.no_grad():
        for prompt in prompts():
            ids = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                max_new_tokens=NUM_TOKENS, eos_token_id=None, use_cache=uses_cache,
            )
            found.append(ids[0, len(prompt):].tolist())
    return found


def reason_of(outcome: Outcome) -> str:
    """What the documentation says of an outcome: a refusal without what it found in this entry only."""
    if outcome.word != "refused":
        return outcome.word
    said = outcome.said.removeprefix("model: ")
    for start in ("cannot run here: ", "cannot be paged: "):
        said = said.partition(start)[2] or said
    # Why: what an architecture's own code raised is all that is known of it.
    said = re.sub(r"^its architecture cannot run here \((.*)\)", r"its own code fails: \1", said)
    said = re.split(r" Logits of|[;(]|, so that| that is shipped", said)[0].strip(" .")
    return "refused: " + re.sub(r"\blayer \d+ ", "a layer ", re.sub(r"^\w+ForCausalLM ", "it ", said))


def table(outcomes: Sequence[Outcome]) -> str:
    """The table of the documentation."""
    groups = defaultdict[str, list[str]](list)
    for one in outcomes:
        groups[reason_of(one)].append(one.entry)
    rows = sorted(groups.items(), key=lambda group: (group[0] != "equal", -len(group[1]), group[0]))
    lines = [f"| {reason} | {len(names)} | {' '.join(f'`{name}`' for name in names)} |" for reason, names in rows]
    return "\n".join(["| what happens | entries | which |", "| --- | --- | --- |", *lines])


def main() -> int:
    """Print what becomes of every entry, and write the table; return how many outcomes there must not be."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found, num_bad = [], 0
    for entry in entries():
        for scheme in ("none", *SCHEMES):
            with tempfile.TemporaryDirectory() as directory:
                outcome = outcome_of(entry, Path(directory), quantization=scheme)
            print(f"{entry:28} {scheme:10} {outcome.word:9} {outcome.said[:200]}", flush=True)
            num_bad += outcome.word in ("raw", "wrong")
            if scheme == "none":
                found.append(outcome)
                if outcome.word != "equal":
                    break
    before, _, after = re.split(r"(?s)(\| what happens .*?\|\n)(?=\n|\Z)", PAGE.read_text(encoding="utf-8"), maxsplit=1)
    PAGE.write_text(f"{before}{table(found)}\n{after}", encoding="utf-8")
    return num_bad


if __name__ == "__main__":
    sys.exit(min(main(), 1))
