"""A chat template that would not end ends its own calls, and a stream beside them is what it is alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import openai
from openai import OpenAI

from adapters.openai.loopback import serving
from pagedcore_openai import openai_app
from support.scripted_model import TEMPLATES, scripted_engine

#: What a message makes the template do.
BOMBS = {
    "steps": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{{ 'a' * 2000000000 }}", "format": "{{ '%2000000000d' % 1 }}",
    "json": "{{ [1]|tojson(indent=999999999) }}",
}


def test_a_call_over_a_bound_is_refused_beside_a_stream() -> None:
    """Each bomb is a 400 that names the bound; the stream that was read meanwhile has the text of one alone."""
    template = "".join(
        f"{{% if messages[0].content == '{name}' %}}{bomb}{{% endif %}}" for name, bomb in BOMBS.items())
    answer = "one two three four five six seven eight nine ten."
    with scripted_engine(answer, template + TEMPLATES["none"]) as engine, serving(openai_app({"m": engine})) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def ask(text: str, **options: Any) -> Any:
            messages: Any = [{"role": "user", "content": text}]
            return client.chat.completions.create(model="m", messages=messages, temperature=0, **options)

        written, left = "", list(BOMBS)
        for chunk in ask("Hello", stream=True):
            written += chunk.choices[0].delta.content or "" if chunk.choices else ""
            if written and left:
                with pytest.raises(openai.BadRequestError, match=r"within its bounds.*takes more than [0-9]+"):
                    ask(left.pop())
        assert (written, left) == (answer, [])
