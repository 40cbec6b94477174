"""The implementations that come with pagedcore, registered as any plugin registers its own.

They are no entry points, because an uninstalled checkout has none. Nothing here is imported before it is used.
"""

from __future__ import annotations

from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.plugins.registry import Registry


@hookimpl
def pagedcore_register(registry: Registry) -> None:
    """Add the built-in implementations of every table."""
    registry.adapters.add("async-generator", "pagedcore_asyncgen:create",
                          summary="a callable that returns an async generator of deltas")
    registry.attention.add("numba-cpu", "pagedcore_kernels.cpu.attention.backend:NumbaCpuAttention",
                           summary="compiled for this machine's CPU; the default")
    registry.attention.add("numba-cuda", "pagedcore_kernels.cuda.attention.backend:NumbaCudaAttention", extra="cuda",
                           summary="tensor-core kernels for NVIDIA GPUs")
    registry.attention.add("reference", "pagedcore_kernels.reference:ReferenceAttention",
                           summary="plain and slow; what the others are tested against")
    registry.linears.add("onednn", "pagedcore.models.linears.packed_linear:OneDnnMatmul",
                         summary="torch's own library, with packed weights")
    registry.linears.add("packed", "pagedcore_kernels.cpu.matmul.packed:PackedMatmul",
                         summary="compiled for x86 processors with AVX2 or better; the default there")
    registry.models.add("transformers", "pagedcore.models.loading:transformers_backend",
                        summary="causal language models of transformers; the default")
    registry.reasoning_parsers.add("harmony", "pagedcore.tool_calls.harmony:HarmonyFormat",
                                   summary="the analysis channel, as gpt-oss writes it")
    registry.reasoning_parsers.add("mistral", "pagedcore.tool_calls.reasoning:mistral_reasoning",
                                   summary="[THINK] and [/THINK]")
    registry.reasoning_parsers.add("seed", "pagedcore.tool_calls.reasoning:seed_reasoning",
                                   summary="<seed:think> and </seed:think>, as Seed-OSS writes them")
    registry.reasoning_parsers.add("think", "pagedcore.tool_calls.formats:ReasoningFormat",
                                   summary="<think> and </think>, as DeepSeek and Qwen write them")
    registry.schedulers.add("cache-aware", "pagedcore.scheduler.policies:cache_aware",
                            summary="first come, first served; cached beginnings some places earlier")
    registry.schedulers.add("deadline", "pagedcore.scheduler.policies:deadline",
                            summary="least slack to deadline_s first")
    registry.schedulers.add("fair", "pagedcore.scheduler.policies:fair",
                            summary="the tenant that has had least, by its weight, first")
    registry.schedulers.add("fcfs", "pagedcore.scheduler.policies:fcfs",
                            summary="first come, first served; the default")
    registry.schedulers.add("priority", "pagedcore.scheduler.policies:priority",
                            summary="higher priority first, then first come; can age and preempt")
    registry.schedulers.add("shortest-first", "pagedcore.scheduler.policies:shortest_first",
                            summary="fewest tokens first, with ageing")
    registry.schedulers.add("static", "pagedcore.scheduler.policies:static",
                            summary="a batch runs until its last request is done; for comparisons")
    registry.tool_parsers.add("deepseek_v31", "pagedcore.tool_calls.deepseek_v31:DeepSeekV31Format",
                              summary="a name, <｜tool▁sep｜> and JSON, as DeepSeek V3.1 writes them")
    registry.tool_parsers.add("glm", "pagedcore.tool_calls.glm:GlmFormat",
                              summary="<arg_key> and <arg_value>, as GLM, Ling and Laguna write them")
    registry.tool_parsers.add("granite", "pagedcore.tool_calls.granite:GraniteFormat",
                              summary="<|tool_call|> and a JSON list, as Granite 3 writes them")
    registry.tool_parsers.add("harmony", "pagedcore.tool_calls.harmony:HarmonyFormat",
                              summary="the commentary channel and JSON, as gpt-oss writes them")
    registry.tool_parsers.add("hermes", "pagedcore.tool_calls.hermes:HermesFormat",
                              summary="<tool_call> and JSON, as Hermes and Qwen write them")
    registry.tool_parsers.add("llama3", "pagedcore.tool_calls.llama3:Llama3Format",
                              summary="JSON with parameters, as Llama 3 writes it")
    registry.tool_parsers.add("minimax_m2", "pagedcore.tool_calls.minimax_m2:MiniMaxM2Format",
                              summary="<invoke> and <parameter>, as MiniMax-M2 writes them")
    registry.tool_parsers.add("mistral", "pagedcore.tool_calls.mistral:MistralFormat",
                              summary="[TOOL_CALLS] and JSON, as Mistral writes it")
    registry.tool_parsers.add("qwen3_coder", "pagedcore.tool_calls.qwen3_coder:Qwen3CoderFormat",
                              summary="<function=> and <parameter=>, as Qwen3-Coder and Nemotron 3 write them")
    registry.tool_parsers.add("seed_oss", "pagedcore.tool_calls.seed_oss:SeedOssFormat",
                              summary="the same in <seed:tool_call>, as Seed-OSS writes them")
