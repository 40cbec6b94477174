"""The laws of ``EngineConfig``: every field checks itself, and memory can be said in three ways."""

import dataclasses
import inspect
import json

import numpy as np
import pytest

from pagedcore.config.engine_config import EngineConfig
from pagedcore.config.limits import MAX_COUNT
from pagedcore.config.memory_budget import MemoryBudget
from pagedcore.errors import InvalidConfig

BUDGET = MemoryBudget(1)
NAN, INF = float("nan"), float("inf")
NOT_A_COUNT = [0, -1, MAX_COUNT + 1, 10**400, True, 1.0, "1", NAN, np.int64(8), [1]]

ACCEPTED = {
    "dtype": ["auto", "float32", "bfloat16", "float16"],
    "device": ["auto", "cpu", "cuda", "cuda:1"],
    "block_size": [None, 1, MAX_COUNT],
    "num_kv_blocks": [None, 1, MAX_COUNT],
    "kv_cache_memory": [None, 1, 2**31, "2GiB", 0.5, BUDGET, BUDGET.share(1)],
    "kv_cache_dtype": ["auto", "int8"],
    "max_model_len": [None, 1, MAX_COUNT],
    "max_num_seqs": [1, 512],
    "max_num_batched_tokens": [32, MAX_COUNT],
    "min_batch_size": [1, 32],
    "max_wait_ms": [None, 0, 0.5, 50, 3_600_000],
    "phases": ["mixed", "separate"],
    "prefill_share": [1.0, 1, 0.25, 1e-9],
    "max_num_waiting": [None, 1, MAX_COUNT],
    "queue_timeout_s": [None, 1, 0.001, 5e-324, 1e9],
    "num_threads": [None, 1, MAX_COUNT],
    "attention_backend": ["auto", "mine"],
    "linear_backend": ["auto", "mine"],
    "quantization": ["none", "w8a8", "w8a16", "w4a16", "w4a8", "auto-int8"],
    "model_backend": ["auto", "mine"],
    "scheduling_policy": ["fcfs", "mine"],
    "policy_options": [{}, {"ageing_s": 10.0}],
    "admission": ["optimistic", "guaranteed"],
    "enable_prefix_caching": [True, False],
    "eviction_policy": ["lru", "lfu", "fifo"],
    "host_kv_memory": [None, 2**20, "64MiB", 0.5],
    "disk_kv_dir": [None, "kv"],
    "cuda_kernels": [None, "kernels"],
    "session_key": [None, "k" * 16, b"k" * 1024],
    "preemption": ["auto", "swap", "shrink", "recompute", "wait"],
    "tokenizer": [None, "somewhere"],
    "chat_template": [None, "{{ messages }}", "x" * 2**17],
    "tool_parser": ["auto", "none", "mine"],
    "reasoning_parser": ["auto", "none", "mine"],
    "generation_config": ["auto", "none"],
    "trust_remote_code": [False, True],
    "control_tokens_in_chats": [False, True],
    "check_invariants": [False, True],
    "flight_recorder": ["off", "on", "tokens"],
    "adapters": [{}, {"fr": "a/b", "de.v-1_": "/x"}],
    "max_adapters": [None, 0, 1, 256],
    "adapter_memory": [None, 2**20, "64MiB", 0.5],
    "speculative_model": [None],
    "speculation": ["off", "auto", {}, {"sources": ["text", "grammar"]}, {"sources": ("completions",), "most": 64}],
    "seed": [0, 2**63 - 1],
}

REFUSED = {
    "dtype": ["int8", "", None, 1, np.array(["auto", "float32"])],
    "device": ["cuda:", "cuda:x", "cuda:-1", "CUDA", "gpu", "", None, 1],
    "block_size": NOT_A_COUNT,
    "num_kv_blocks": NOT_A_COUNT,
    "kv_cache_memory": [0, -1, 2**63, True, 0.0, 1.0, 1.5, NAN, INF, "", "0", "-1GiB", "2 parsecs", "nanGiB", [1]],
    "kv_cache_dtype": ["", None, 8, "fp8", "INT8"],
    "max_model_len": NOT_A_COUNT,
    "max_num_seqs": [None, *NOT_A_COUNT],
    "max_num_batched_tokens": [None, 31, *NOT_A_COUNT],
    "min_batch_size": [None, 33, *NOT_A_COUNT],
    "max_wait_ms": [-1, 3_600_001, NAN, INF, True, "50", np.float64(50)],
    "phases": ["", None, "Mixed", 1],
    "prefill_share": [None, 0, 0.0, 1.01, -0.5, NAN, INF, True, "1"],
    "max_num_waiting": NOT_A_COUNT,
    "queue_timeout_s": [0, -1, 0.0, NAN, INF, True, "1", np.float64(1)],
    "num_threads": NOT_A_COUNT,
    "attention_backend": ["", None, 1],
    "linear_backend": ["", None, 1],
    "quantization": ["", None, 8, "int8", "W8A8"],
    "model_backend": ["", None, 1],
    "scheduling_policy": ["", None, 1],
    "policy_options": [None, "ageing_s", [("ageing_s", 1)], {1: 2}],
    "admission": ["greedy", "", None],
    "enable_prefix_caching": [None, 0, 1, "no"],
    "eviction_policy": ["mru", "", None],
    "host_kv_memory": [0, -1, 2**63, True, 1.5, NAN, "", "2 parsecs"],
    "disk_kv_dir": ["", 1],
    "cuda_kernels": ["", 1],
    "session_key": ["", "k" * 15, b"k" * 1025, 16, bytearray(16)],
    "preemption": ["never", "", None],
    "tokenizer": ["", 1],
    "chat_template": ["", 1, "x" * (2**17 + 1), "\ud800", b"{{ messages }}"],
    "tool_parser": ["", None],
    "reasoning_parser": ["", 1],
    "generation_config": [None, "", "vllm", "mine"],
    "trust_remote_code": [None, 0, 1, "false", "True"],
    "control_tokens_in_chats": [None, 0, 1, "false"],
    "check_invariants": [None, 0, 1, "True"],
    "flight_recorder": [None, True, "", "all"],
    "adapters": [None, [], "a", {"../a": "b"}, {"a:b": "c"}, {"": "b"}, {1: "b"}, {"a": 1}, {"a" * 65: "b"}],
    "max_adapters": [-1, 257, True, "8", 1.5],
    "adapter_memory": [0, -1, "x", 1.5, True],
    "speculative_model": ["", 1, True, ["demo"]],
    "speculation": [None, True, "", "on", {"source": ["text"]}, {"sources": []}, {"sources": "text"}, {"most": 0},
                    {"most": 65}, {"most": True}, {"sources": ["model"]}, [], {1: 2}],
    "seed": [-1, 2**63, None, True, 1.0, "1"],
}


def test_every_field_is_tested():
    """The tables above name exactly the fields."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert names == ACCEPTED.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", ACCEPTED)
def test_values_within_range_are_kept(name):
    """A value within its range is stored as given."""
    for value in ACCEPTED[name]:
        assert getattr(EngineConfig(**{name: value}), name) == value


@pytest.mark.parametrize("name", REFUSED)
def test_values_out_of_range_are_refused_by_name(name):
    """Any other value is an InvalidConfig whose message begins with the field's name."""
    for value in REFUSED[name]:
        assert message_about(name, value).startswith(f"{name}: got "), value


def message_about(name, value):
    """Return how a value of a field is refused, or nothing if it is not."""
    try:
        EngineConfig(**{name: value})
    except InvalidConfig as refusal:
        return str(refusal)
    return ""


def test_messages_do_not_repeat_text():
    """Long text, a path or a secret that was given is described by its length."""
    for settings in ({"dtype": "/canary/directory"}, {"dtype": "canary" * 20}, {"session_key": "canary"}):
        with pytest.raises(InvalidConfig, match=r"got a string of \d+ characters") as refusal:
            EngineConfig(**settings)
        assert "canary" not in str(refusal.value)


@pytest.mark.parametrize(("settings", "message"), [
    ({"dtype": "fp16"}, "dtype: got 'fp16', .* Did you mean float16?"),
    ({"dtype": "BF16 "}, "dtype: got 'BF16 ', .* Did you mean bfloat16?"),
    ({"dtype": "floot32"}, "Did you mean float32?"),
    ({"device": "gpu"}, "device: got 'gpu', .* Did you mean cuda?"),
    ({"device": "cuda0"}, "Did you mean cuda:0?"),
    ({"kv_cache_dtype": "int_8"}, "Did you mean int8?"),
    ({"quantization": "int8"}, "quantization: got 'int8', .* Did you mean w8a8?"),
    ({"quantization": "w8a18"}, "Did you mean w8a8?"),
    ({"eviction_policy": "LRU"}, "Did you mean lru?"),
    ({"preemption": "recomput"}, "Did you mean recompute?"),
    ({"phases": "seperate"}, "Did you mean separate?"),
    ({"flight_recorder": "token"}, "Did you mean tokens?"),
    ({"kv_cache_memory": "2 Gigs"}, "kv_cache_memory: got '2 Gigs', .* Did you mean 2GiB?"),
    ({"host_kv_memory": "1.5 t"}, "Did you mean 1.5TiB?"),
    ({"max_num_seqs": "4"}, "max_num_seqs: got '4', allowed is an integer from 1 to 2147483647."),
    ({"enable_prefix_caching": "yes"}, "enable_prefix_caching: got 'yes', allowed is True or False."),
])
def test_a_refused_setting_is_shown_with_what_was_meant(tmp_path, settings, message):
    """Keywords and files answer alike; what other projects call it is understood."""
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings))
    for make in (lambda: EngineConfig(**settings), lambda: EngineConfig.from_file(path)):
        with pytest.raises(InvalidConfig, match=message.replace("?", r"\?") + "$"):
            make()


def test_the_budget_covers_every_running_sequence():
    """A step's token budget is at least one token for each sequence."""
    assert EngineConfig(max_num_seqs=64, max_num_batched_tokens=64).max_num_seqs == 64
    with pytest.raises(InvalidConfig, match="max_num_batched_tokens: got 63, allowed is at least 64"):
        EngineConfig(max_num_seqs=64, max_num_batched_tokens=63)


def test_a_batch_is_awaited_that_can_run():
    """min_batch_size is at most max_num_seqs, since more could not start together."""
    assert EngineConfig(max_num_seqs=4, min_batch_size=4).max_wait_s == 0.05
    with pytest.raises(InvalidConfig, match=r"min_batch_size: got 5, allowed is at most 4 \(max_num_seqs\)"):
        EngineConfig(max_num_seqs=4, min_batch_size=5)


def test_a_share_is_for_steps_that_have_both():
    """prefill_share has no meaning where a step has prefill chunks or decode rows only."""
    with pytest.raises(InvalidConfig, match=r"prefill_share: got 0.5, allowed is 1.0 with phases="):
        EngineConfig(phases="separate", prefill_share=0.5)


def test_four_times_as_many_may_wait_as_run_unless_said():
    """The waiting limit follows max_num_seqs until it is set."""
    assert EngineConfig(max_num_seqs=5).waiting_limit == 20
    assert EngineConfig(max_num_seqs=5, max_num_waiting=1).waiting_limit == 1


@pytest.mark.parametrize(("name", "advice"), [
    ("max_cpu_loras", 'adapter_memory="1GiB"'),
    ("tensor_parallel_size", "computes on one device"),
    ("speculative_config", 'speculation="auto"'), ("quantization_config", 'quantization="w8a8"'),
    ("gpu_memory_utilization", 'kv_cache_memory="4GiB"'), ("swap_space", 'host_kv_memory="4GiB"'),
])
def test_settings_of_other_engines_say_what_there_is_instead(name, advice):
    """A sentence says it; a setting that it names is one, with a value that is taken."""
    with pytest.raises(InvalidConfig, match=rf"^unknown setting '{name}'\. [A-Z].*{advice}.*\.$"):
        EngineConfig(**{name: 1})
    if "=" in advice:
        setting, _, value = advice.partition("=")
        EngineConfig(**{setting: value.strip('"')})


@pytest.mark.parametrize("make", [EngineConfig, EngineConfig.from_keywords])
def test_unknown_settings_are_refused_with_the_nearest_and_the_known_ones(make):
    """The constructor and from_keywords name the nearest setting, if one is near, and list what exists."""
    assert make(seed=3).seed == 3
    nearest = r"unknown setting 'blocksize', known are .*block_size.*seed.*\. Did you mean block_size\?$"
    with pytest.raises(InvalidConfig, match=nearest):
        make(blocksize=3)
    with pytest.raises(InvalidConfig, match=r"unknown setting 'max_batchsize', .* Did you mean max_batch_size\?$"):
        make(max_batchsize=3)
    with pytest.raises(InvalidConfig, match=r"unknown setting 'xyzzy', known are adapter_memory.*, admission.*\.$"):
        make(xyzzy=3)
    with pytest.raises(InvalidConfig, match=r"unknown setting a string of 70000 characters,"):
        make(**{"m" * 70_000: 1})


@pytest.mark.parametrize(("alias", "name"), [
    ("max_batch_size", "max_num_seqs"), ("max_batch_tokens", "max_num_batched_tokens"),
])
def test_other_engines_names_are_accepted(alias, name):
    """An alias sets the field; beside the field it must have the same value, and its range is the field's."""
    assert EngineConfig(**{alias: 32}) == EngineConfig(**{name: 32})
    assert EngineConfig(**{alias: 32, name: 32}) == EngineConfig(**{name: 32})
    with pytest.raises(InvalidConfig, match=f"{name}: got two values"):
        EngineConfig(**{alias: 31, name: 32})
    with pytest.raises(InvalidConfig, match=f"{name}: got two values"):
        EngineConfig(**{name: 32, alias: 33})
    with pytest.raises(InvalidConfig, match=f"{name}: got 0, allowed is"):
        EngineConfig(**{alias: 0})


def test_the_signature_is_that_of_the_fields():
    """Aliases change neither what help shows nor copies with other values."""
    assert list(inspect.signature(EngineConfig).parameters) == [one.name for one in dataclasses.fields(EngineConfig)]
    assert dataclasses.replace(EngineConfig(seed=1), block_size=8) == EngineConfig(seed=1, block_size=8)


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, (256, 8192)), ({"max_batch_size": 7}, (7, 8192)), ({"max_num_seqs": 10_000}, (10_000, 10_000)),
    ({"max_num_batched_tokens": 100}, (100, 100)), ({"max_num_seqs": 5, "max_num_batched_tokens": 9}, (5, 9)),
])
def test_steps_of_a_gpu_are_wider(settings, expected):
    """What is not said is wider than on a CPU there, never contradicts what is said, and stays in copies."""
    config = EngineConfig(device="cuda:1", **settings)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == expected
    assert dataclasses.replace(config, seed=1) == EngineConfig(device="cuda:1", seed=1, **settings)
    assert (EngineConfig().max_num_seqs, EngineConfig(device="cpu").max_num_batched_tokens) == (32, 512)
