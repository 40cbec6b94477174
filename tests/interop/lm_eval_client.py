"""Runs lm-eval over ``/v1/completions``, in an environment of its own: a task of choices and one of generations.

    python lm_eval_client.py BASE_URL TOKENIZER_DIRECTORY FOLDER

``FOLDER/questions.json`` has the questions; ``FOLDER/results.json`` gets what lm-eval made of the answers. Prompts are
sent as token ids.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

CHOICES = """task: pagedcore_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
target_delimiter: ""
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
GENERATIONS = """task: pagedcore_generations
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.json}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 24}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def main(base_url: str, tokenizer: str, folder: str) -> None:
    """Evaluate and write the results."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": f"{folder}/home"}
    import lm_eval
    from lm_eval.tasks import TaskManager

    for name, text in (("choices", CHOICES), ("generations", GENERATIONS)):
        Path(folder, f"{name}.yaml").write_text(text.replace("FOLDER", folder), "utf-8")
    results = lm_eval.simple_evaluate(
        model="local-completions", tasks=["pagedcore_choices", "pagedcore_generations"], log_samples=True,
        model_args={"model": "demo", "base_url": f"{base_url}/completions", "tokenizer": tokenizer,
                    "tokenizer_backend": "huggingface", "tokenized_requests": True, "num_concurrent": 2,
                    "max_length": 2048},
        batch_size=3, task_manager=TaskManager(include_path=folder, include_defaults=False), bootstrap_iters=0,
    )
    samples = {name: [{"doc": one["doc"], "resps": one["resps"]} for one in found]
               for name, found in results["samples"].items()}
    told = {"results": results["results"], "samples": samples}
    Path(folder, "results.json").write_text(json.dumps(told, default=str), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
