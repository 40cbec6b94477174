"""Measures the door with GuideLLM, in an environment of its own: chats, texts, responses, and chats that are refused.

    python guidellm_client.py BASE_URL API_KEY TOKENIZER_DIRECTORY FOLDER

``FOLDER/NAME.json`` gets each report.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FORMATS = {"chats": "/v1/chat/completions", "texts": "/v1/completions", "responses": "/v1/responses",
           "refused": "/v1/chat/completions"}


def main(base_url: str, api_key: str, tokenizer: str, folder: str) -> None:
    """Run the benchmarks, of three requests each."""
    for name, request_format in FORMATS.items():
        model = "other" if name == "refused" else "demo"
        options = {
            "backend": f"kind=openai_http,target={base_url.removesuffix('/v1')},model={model},api_key={api_key},"
                       f"request_format={request_format}",
            "profile": "kind=concurrent,streams=2", "constraint": "kind=max_requests,count=3",
            "data": "kind=synthetic_text,prompt_tokens=20,output_tokens=16",
            "tokenizer": f"kind=huggingface_auto,model={tokenizer}",
            "output": f"kind=json,path={Path(folder, f'{name}.json')}",
        }
        words = [word for option, value in options.items() for word in (f"--{option}", value)]
        command = [Path(sys.executable).parent / "guidellm", "run", *words, "--disable-console"]
        subprocess.run(command, check=True, timeout=300)


if __name__ == "__main__":
    main(*sys.argv[1:])
