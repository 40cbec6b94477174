"""The operator's ``session_key`` among the settings of a LangChain model: used, and shown nowhere."""

from __future__ import annotations

import pytest

pytest.importorskip("langchain_core")

from langchain_core.load import dumps

from pagedcore_langchain import ChatPagedCore, PagedCoreLLM

KEY = "canary key of the operator"


@pytest.mark.parametrize("kind", [ChatPagedCore, PagedCoreLLM])
@pytest.mark.parametrize("key", [KEY, KEY.encode()])
def test_the_key_reaches_the_engine_and_no_representation(
    kind: type[ChatPagedCore] | type[PagedCoreLLM], key: str | bytes
) -> None:
    """Representations, dumps and what caches and tracers identify a model by have a mask; the engine has the key."""
    model = kind(model="demo", engine_settings={"session_key": key, "num_kv_blocks": 64})
    with model.engine:
        shown = [repr(model), str(model), str(model.model_dump()), dumps(model), str(model.to_json()),
                 str(model._identifying_params)]
        if isinstance(model, ChatPagedCore):
            shown.append(model._get_llm_string())
        assert not [text for text in shown if "canary" in text]
        assert model.engine._read_session.__self__.session_key == KEY.encode()  # type: ignore[attr-defined]
