"""What an engine of either kind says of text and tokens by itself, from any thread, without a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedcore.outputs import TokenText
from pagedcore.protocols import ChatMessage, Tokenizer
from pagedcore.request_options import RequestOptions
from pagedcore.requests.input_processor import InputProcessor, Prompt
from pagedcore.sampling_params import SamplingParams
from pagedcore.tokenizer.chat import Chat


class TextVerbs:
    """The part of an engine that turns text into tokens and back."""

    input_processor: InputProcessor

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What turns text into tokens and back: its ``encode``, ``decode`` and more; ``None``: prompts are token ids.
        """
        return self.input_processor.tokenizer

    @property
    def embedding_prompts(self) -> Mapping[str, str]:
        """What the model's directory has texts begin with, by the names that ``embed`` takes as ``prompt_name``."""
        return self.input_processor.embeddings.prompts

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True, continue_final_message: bool = False, **template_arguments: Any,
    ) -> str:
        """Return the text of a chat as the model's template writes it; ``encode`` returns its tokens.

        For looking at it. As a prompt of its own this text would have the control tokens that messages spell; a chat
        has not.

        Args:
            messages: of the chat, like ``tools`` as for ``Chat``.
            tools: that the model may call.
            add_generation_prompt: as for ``Chat``, and as it is by default for requests.
            continue_final_message: as for ``Chat``.
            **template_arguments: further variables of the template, such as ``enable_thinking=False``.

        Raises:
            InvalidRequest: the chat is refused, or this engine has no template.
        """
        return self.input_processor.render(Chat(
            messages, tools, template_arguments=template_arguments, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        ))

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, a chat with its template, as a request would send them to the model.

        Raises ``InvalidRequest``: ``PromptTooLong`` if the context has no room for the prompt and a completion.
        """
        inputs = self.input_processor
        if not inputs.embeddings.generates and isinstance(prompt, str):
            return inputs.tokens_of_text(prompt)
        return inputs.process(prompt, SamplingParams(max_tokens=1), RequestOptions()).token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of at most a context of tokens, special ones left out, without waiting.

        Raises ``InvalidRequest`` if there are more, or none, or one is not in the vocabulary.
        """
        return self.input_processor.text_of(token_ids)

    def token_text(self, token_id: int) -> TokenText:
        """Say what a token stands for, without waiting. Raises ``InvalidRequest`` outside of the vocabulary."""
        return self.input_processor.token_text(token_id)
