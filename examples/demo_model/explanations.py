"""Short explanations and small talk the demo model answers with, word for word.

Owns the texts; it never phrases the questions about them. Read `tasks.py` next.
"""

EXPLANATIONS: dict[tuple[str, ...], str] = {
    (
        "AI",
        "artificial intelligence",
    ): "AI is short for artificial intelligence: software that does what we would call clever in a person.",
    (
        "ML",
        "machine learning",
    ): "ML is short for machine learning: a program finds its rules in examples instead of being told them.",
    ("deep learning",): "Deep learning is machine learning with neural networks of many layers.",
    (
        "a neural network",
        "neural network",
    ): "A neural network is a chain of simple sums and bends whose numbers are learned from examples.",
    (
        "a language model",
        "language model",
    ): "A language model reads a text and says how likely each next token is.",
    (
        "an LLM",
        "LLM",
        "a large language model",
    ): "An LLM is a large language model: it writes text one token at a time.",
    (
        "a token",
        "token",
    ): "A token is a piece of text, often a word or a part of a word, that a model reads as one number.",
    ("a tokenizer", "tokenizer"): "A tokenizer cuts text into tokens and puts tokens together to text again.",
    (
        "the KV cache",
        "KV cache",
        "a KV cache",
    ): "The KV cache keeps the keys and values of all earlier tokens, so that a new token is cheap.",
    (
        "continuous batching",
    ): "Continuous batching lets requests join and leave the running batch at every step, so no one waits "
    "for the slowest.",
    ("static batching",): "Static batching runs a fixed group of requests until the longest of them has finished.",
    (
        "paged attention",
        "PagedAttention",
    ): "Paged attention keeps the KV cache in small blocks that need not lie side by side in memory.",
    (
        "a block table",
        "block table",
    ): "A block table lists, for one request, which memory blocks hold its keys and values, in order.",
    (
        "prefix caching",
        "prefix sharing",
    ): "Prefix caching keeps the blocks of a prompt, so the next request that starts alike can reuse them.",
    ("preemption",): "Preemption takes memory away from one request so that others can go on; it is finished later.",
    ("attention",): "Attention lets each token look at the earlier tokens and take from them what it needs.",
    (
        "grouped-query attention",
        "GQA",
    ): "In grouped-query attention several query heads share one pair of key and value heads, which saves memory.",
    (
        "a transformer",
        "transformer",
    ): "A transformer is a neural network made of layers of attention and small feed-forward networks.",
    ("an embedding", "embedding"): "An embedding is a list of numbers that stands for a token.",
    ("prefill",): "Prefill is the first part of answering: the model reads the whole prompt at once.",
    (
        "decoding",
        "decode",
    ): "Decoding is the second part of answering: the model writes one token after another.",
    (
        "chunked prefill",
    ): "Chunked prefill reads a long prompt in pieces, so that other requests keep writing in between.",
    ("sampling",): "Sampling picks the next token at random, where likely tokens are picked more often.",
    ("greedy decoding",): "Greedy decoding always picks the most likely next token.",
    (
        "temperature",
    ): "Temperature says how bold sampling is: near zero it is careful, higher values give more surprises.",
    ("top-k", "top-k sampling"): "Top-k sampling picks only among the k most likely tokens.",
    ("top-p", "top-p sampling"): "Top-p sampling picks among the fewest tokens whose chances add up to p.",
    ("latency",): "Latency is the time that one request has to wait.",
    ("throughput",): "Throughput is how much work is done in a second, for example tokens per second.",
    ("a scheduler", "scheduler"): "A scheduler decides at every step which requests may run.",
    ("a batch", "batch"): "A batch is a group of requests that a model works on at the same time.",
    ("a GPU", "GPU"): "A GPU is a chip that does very many small sums at the same time.",
    ("a CPU", "CPU"): "A CPU is the main chip of a computer; it can do anything, one step after another.",
    (
        "memory fragmentation",
        "fragmentation",
    ): "Fragmentation means that free memory is scattered in pieces too small to be of use.",
    ("swapping",): "Swapping moves data that is not needed now to slower memory and brings it back later.",
    ("quantization",): "Quantization stores numbers with fewer bits, which saves memory and costs a little accuracy.",
    (
        "speculative decoding",
    ): "In speculative decoding a small model guesses some tokens and the large model checks them at once.",
    ("a prompt", "prompt"): "A prompt is the text that a model is asked to continue.",
    ("Python",): "Python is a programming language that is easy to read and much used for machine learning.",
    ("pagedcore",): "pagedcore is a small engine that answers many requests at once and keeps their memory in blocks.",
}
"""Explanation of each subject, keyed by the names people may ask for; the first name is the usual one."""

_HELLO = "Hello! Ask me a sum, a capital, or what the KV cache is."
_SELF = "I am the small demo model of pagedcore. I know sums, capitals, words, days and a few ideas."
_SKILLS = "I can add and subtract, name capitals, count, spell, sort and reverse words, and explain a few ideas."
_WELCOME = "You are welcome."
_GOODBYE = "Goodbye!"

SMALL_TALK: dict[str, str] = {
    "Hello!": _HELLO,
    "Hello.": _HELLO,
    "Hi!": _HELLO,
    "Hi there!": _HELLO,
    "Good morning!": _HELLO,
    "Who are you?": _SELF,
    "What are you?": _SELF,
    "What is your name?": _SELF,
    "Tell me about yourself.": _SELF,
    "What can you do?": _SKILLS,
    "What do you know?": _SKILLS,
    "How can you help me?": _SKILLS,
    "What can I ask you?": _SKILLS,
    "Help.": _SKILLS,
    "Thank you.": _WELCOME,
    "Thanks!": _WELCOME,
    "Goodbye.": _GOODBYE,
    "Bye!": _GOODBYE,
}
"""Reply to each greeting."""
