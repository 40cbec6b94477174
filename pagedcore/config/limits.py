"""Every hard bound on what a caller may ask, with its reason. Pure numbers, none from the environment."""

from __future__ import annotations

from typing import Final

MAX_COUNT: Final = 2**31 - 1
"""Token ids, token counts and block counts fit 32 bits in every array of the engine."""
MAX_SEQUENCES_PER_REQUEST: Final = 16
"""Parallel completions of one request: each costs a whole sequence of KV memory."""
MAX_TEMPERATURE: Final = 10.0
"""Above this a softmax over any real vocabulary is flat to float32."""
MAX_PENALTY: Final = 2.0
"""Range of presence and frequency penalties, the field's convention."""
MAX_REPETITION_PENALTY: Final = 10.0
"""Repetition penalty divides logits; beyond this the sign alone decides."""
MAX_LENGTH_PENALTY: Final = 10.0
"""Length penalty: a power of the length; beyond this the length alone decides."""
MAX_LOGPROBS: Final = 20
"""Log-probabilities per token: bounds what one completion can copy out of a row."""
MAX_RETURNED_LOGITS_BYTES: Final = 2**28
"""Bytes of the logits of its completions that one request may ask for: 441 tokens of a vocabulary of 152,064."""
MAX_SCORED_BYTES: Final = 2**26
"""Bytes of logits that a step may hold for prompts whose log-probabilities are reported; a row of them is as wide as
the vocabulary, so a whole chunk of a prompt would be hundreds of megabytes."""
MAX_STOP_STRINGS: Final = 8
"""Stop strings per request; matching is linear in their total length."""
MAX_STOP_LENGTH: Final = 64
"""Characters of one stop string: bounds the text a stream may have to hold back."""
MAX_STOP_TOKEN_IDS: Final = 64
"""Stop token ids per request."""
MAX_BAD_WORDS: Final = 128
"""Words per request that may not come, and the characters of one: each is tokenised twice."""
MAX_BAD_WORD_LENGTH: Final = 32
MAX_BAD_SEQUENCES: Final = 2 * MAX_BAD_WORDS
"""The same as sequences of tokens, and the tokens of one: four bytes a character, each a token."""
MAX_BAD_SEQUENCE_LENGTH: Final = 4 * MAX_BAD_WORD_LENGTH + 4
MAX_ALLOWED_TOKEN_IDS: Final = 4096
"""Token ids of a request that alone may come: a session's file has them twice."""
MAX_SUPPRESSED_TOKENS: Final = 4096
"""Token ids of a request that may not come: forty times what published models suppress."""
MAX_NGRAM: Final = 64
"""Tokens of a run that may not come twice: a run is kept for each token of the context."""
MAX_LOGIT_BIAS_ENTRIES: Final = 300
"""Biased tokens per request: they are applied one by one."""
MAX_LOGIT_BIAS: Final = 100.0
"""Bias that makes a token certain or impossible in float32."""
MAX_SEED: Final = 2**63 - 1
"""Seeds are stored as signed 64-bit integers."""
MAX_VOCABULARY: Final = 2**22
"""Ids of tokens: sixteen times the largest vocabulary. A file may give a token any id, and libraries count up to it."""
MAX_TEXT_BYTES_PER_TOKEN: Final = 16
"""UTF-8 bytes of text accepted per token of context, checked before tokenising."""
MAX_CHAT_MESSAGES: Final = 1024
"""Chat messages of one prompt; the template is rendered before tokens can be counted."""
MAX_TOOLS: Final = 256
"""Tools of one request: a grammar has rules for each, whose text without the schemas has ``MAX_GRAMMAR_BYTES``."""
MAX_TOOLS_LENGTH: Final = 2**18
"""Characters of all tools of a request as JSON; they are written into the prompt, and become a grammar. Four servers of
tools with 70,000 each; it takes a third of a second of one core to check, write, tokenise and compile them."""
MAX_TOOL_DEPTH: Final = 32
"""Levels of objects and lists in a tool's parameters, and in the arguments that a model writes."""
MAX_TEMPLATE_ARGUMENTS: Final = 16
"""Arguments of a chat template: published ones read fewer than ten."""
MAX_TEMPLATE_ARGUMENT_LENGTH: Final = 128
"""Characters of a text among them; they are words such as "high", or a date."""
MAX_TOOL_CALLS: Final = 128
"""Calls in one message of a chat."""
MAX_CHAT_BYTES: Final = 2**22
"""UTF-8 bytes of all roles and contents of one chat, for the same reason: a million tokens of prose."""
MAX_INDEX_BYTES: Final = 2**26
"""Bytes of the index of a checkpoint's weights: several times what a trillion parameters take."""
MAX_TEMPLATE_LENGTH: Final = 2**17
"""Characters of a chat template, eight times the longest of seventy that are published: a longer one is not compiled.
"""
MIN_TEMPLATE_STEPS: Final = 2**20
"""Steps of one rendering of a chat template, which are nodes of its tree, for a chat of a few messages: many times what
published ones take. It may be rendered on an event loop."""
MAX_TEMPLATE_STEPS: Final = 2**26
"""The same for a long chat: a template that looks at all of a thousand messages for each of them takes fifty million.
"""
MAX_TEMPLATE_BYTES: Final = 2**27
"""Bytes that one rendering of a chat template may make before the process is looked at, and then add to it."""
MAX_RENDERED_LENGTH: Final = 4 * MAX_CHAT_BYTES
"""Characters of a rendered chat: four times the text of the longest one."""
MAX_TEMPLATE_DEPTH: Final = 100
"""Levels of the lists and objects that a chat template compares, writes or looks up: the interpreter recurses."""
MAX_TEMPLATE_BITS: Final = 4096
"""Bits of a number that a chat template computes."""
MAX_TEMPLATE_S: Final = 10.0
"""Seconds of processor time of one rendering of a chat template."""
MAX_PRIORITY: Final = 1_000_000
"""Priorities are compared, never added: any small integer will do."""
MAX_WEIGHT: Final = 1000.0
"""Weights of requests, and one over it is the smallest: the share of one tenant beside another."""
MAX_SALT_BYTES: Final = 64
"""A salt names a group of requests; it is hashed, never stored."""
MAX_REQUEST_ID_LENGTH: Final = 128
"""Characters of a caller's own label of a request: it is kept as long as the request and repeated to hooks."""
MAX_HELD_SEQUENCES: Final = 16_384
"""Sequences that wait outside a full waiting queue, for callers with ``wait_for_room``: each keeps its prompt."""
MAX_SESSIONS: Final = 4096
"""Sessions that are open at once: each keeps its tokens until it is closed."""
MAX_SESSION_FILE_BYTES: Final = 2**25
"""Bytes of a session file without KV, checked before it is read: more than a million tokens take."""
MAX_PARKING_S: Final = 2_592_000.0
"""Seconds that parked KV may be kept: thirty days. After that it is cheaper to compute it again."""
MAX_TIMEOUT_S: Final = 2_592_000.0
"""Seconds that a caller may wait for a completion: thirty days. Timers of Python's threads overflow above 292 years."""
MAX_TRANSFER_S: Final = 10.0
"""Seconds after which a transfer between the memories times out: a thousand times what one takes."""
MAX_PARKED_HOST_SHARE: Final = 0.5
"""Share of the host's blocks that parked sessions may pin; the rest is for running requests that have to make room."""
MAX_GRAMMAR_BYTES: Final = 2**16
"""UTF-8 bytes of a grammar, schema or regular expression; some take a second to compile at this size."""
MAX_LARK_BYTES: Final = 2**19
"""UTF-8 bytes of a grammar in Lark with the JSON schemas inside, which are those of tools as a rule: these take time in
proportion to their text, three seconds at this size if they are made for it. The rest has ``MAX_GRAMMAR_BYTES``."""
MAX_GRAMMAR_DEPTH: Final = 64
"""Levels of a schema, and of the brackets in a grammar: compilers of grammars recurse."""
MAX_CHOICES: Final = 1024
"""Texts of a choice."""
MAX_EBNF_RULES: Final = 256
"""Rules of a grammar in EBNF, whose conversion takes the square of their number."""
MAX_SCHEMA_PROPERTIES: Final = 1000
"""Properties of a schema, all its objects together; compiling takes the square of it."""
MAX_PATTERN_PROPERTIES: Final = 32
"""Patterns for names of properties, all objects of a schema together; each is compared with each."""
MAX_MULTIPLE_OF: Final = 100_000
"""The least common multiple of a schema's ``multipleOf``: an automaton has so many states."""
MAX_GRAMMAR_SIZE: Final = 2**20
"""What a grammar's regular expressions and terminals expand to, as ``structured.grammar_size`` counts: one of this size
takes tens of milliseconds and some MiB, while it is compiled, or in the one mask that comes to its largest part."""
MAX_UNTRIED_GRAMMAR_SIZE: Final = 2**16
"""The same for one that is compiled without trying it in a child process first."""
MAX_TRIAL_BYTES: Final = 2**25
"""Bytes that a child process which tries a grammar may take for it."""
MAX_GRAMMAR_ERROR: Final = 200
"""Characters of what a library says is wrong with a grammar."""
MAX_COMPILING_GRAMMARS: Final = 3
"""Grammars of one engine that are compiled at the same time, each on a thread; those of one owner leave one free."""
MAX_COMPILING_S: Final = 5.0
"""Seconds that compiling a grammar may take, half of them in a child process, and that a grammar waits for its turn."""
MAX_LIVE_GRAMMAR_BYTES: Final = 2**22
"""Bytes of the grammars of all requests of an engine together; compiled they take some hundred times as much."""
MAX_ADAPTER_RANK: Final = 256
"""Rank of an adapter, of each of its matrices."""
MAX_ADAPTERS: Final = 256
"""Names of adapters that one engine knows at a time, and slots: a step has a table of them."""
MAX_LOADING_ADAPTERS: Final = 2
"""Adapters of one engine that are read at the same time, each on a thread."""
MAX_ADAPTER_LOAD_S: Final = 60.0
"""Seconds that a request waits for the file of its adapter once that is being read."""
MAX_OVERTAKING: Final = 64
"""Later arrivals with adapters that may start before a request for whose adapter no slot is free."""
MAX_WAIT_MS: Final = 3_600_000.0
"""Milliseconds that a new request may wait for company: an hour."""
MAX_CONFIG_BYTES: Final = 2**16
"""Bytes of a file of settings: a hundred times what all of them take."""
