"""The Ray Serve application on a local Ray: two replicas with the demo model on half a processor each, real clients."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ray = pytest.importorskip("ray")

import openai  # noqa: E402
from openai import OpenAI  # noqa: E402

from architecture.sources import PACKAGE_PARENTS  # noqa: E402
from docs.pages import ROOT, blocks  # noqa: E402
from pagedcore import Engine, SamplingParams  # noqa: E402
from pagedcore.errors import InvalidConfig  # noqa: E402
from pagedcore_openai import ApiKeys  # noqa: E402
from support.lora_directories import random_matrices, write_adapter  # noqa: E402

PORT = 8761
PROMPT = "What is 2 + 3?"
KEY, ADMIN = "key-of-tenant-one", "key-of-the-operator"
URL = f"http://127.0.0.1:{PORT}/v1"
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 256, "block_size": 16}


def start(**options: Any) -> Any:
    """Deploy the application and return the handle of its replicas."""
    from ray import serve

    from pagedcore_ray import llm_app

    serve.run(llm_app("demo", num_cpus=0.5, **SETTINGS, **options), name="app")
    return serve.get_deployment_handle("EngineReplica", "app")


@pytest.fixture(scope="module")
def replicas() -> Iterator[Any]:
    """Two replicas and an ingress."""
    from ray import serve

    search_path = ":".join(map(str, PACKAGE_PARENTS))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False,
             runtime_env={"env_vars": {"PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}})
    serve.start(http_options={"port": PORT})
    yield start(num_replicas=2)
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def client(replicas: Any) -> Iterator[OpenAI]:
    """The official client, which does not try again by itself."""
    with OpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        yield client


def question(number: int) -> Any:
    return [{"role": "user", "content": f"What is {number} + {number + 3}?"}]


def test_tokens_are_those_of_a_single_engine(client: OpenAI) -> None:
    """Whichever replica computes, with or without sampling, streamed or whole: the bits are one engine's."""
    with Engine.from_pretrained("demo", **SETTINGS) as engine:
        for number in range(12):
            temperature, params = float(number % 2), SamplingParams(max_tokens=24, temperature=number % 2, seed=number)
            expected = engine.generate([question(number)], params, show_progress=False)[0].outputs[0]
            fields: dict[str, Any] = {"model": "demo", "messages": question(number), "max_tokens": 24,
                                      "temperature": temperature, "seed": number}
            whole = client.chat.completions.create(**fields)
            stream = client.chat.completions.create(**fields, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            assert (whole.choices[0].message.content, streamed) == (expected.text, expected.text)


def test_requests_with_one_prefix_land_on_one_replica(client: OpenAI) -> None:
    """After the first request of a prefix at least 95 of 100 find its blocks in the cache, and both replicas work."""
    prefixes = [f"Rule {letter}: " + f"be {letter} and kind. " * 30 for letter in "abcdefgh"]
    num_found = num_later = 0
    for turn in range(14):
        for prefix in prefixes:
            asked = [{"role": "system", "content": prefix}, *question(turn)]
            usage = client.chat.completions.create(model="demo", messages=asked, max_tokens=2).usage  # type: ignore[arg-type]
            assert usage is not None
            assert usage.prompt_tokens > 100
            if turn:
                num_later += 1
                num_found += (usage.prompt_tokens_details.cached_tokens or 0) > usage.prompt_tokens / 2  # type: ignore[union-attr,operator]
    assert num_later == 104
    assert num_found / num_later >= 0.95, (num_found, num_later)


def test_refusals_are_typed_as_at_the_openai_door(client: OpenAI) -> None:
    """What the ingress refuses and what the replica refuses both arrive with status, field and limit."""
    with pytest.raises(openai.BadRequestError, match="temperature: got 99"):
        client.chat.completions.create(model="demo", messages=question(1), temperature=99)
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model="demo", prompt=[1] * 5000, max_tokens=2)


async def test_a_client_that_leaves_frees_its_request(replicas: Any) -> None:
    """Streams that are closed early end in the replicas too."""
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        for _ in range(4):
            stream = await client.completions.create(model="demo", prompt="Count:", max_tokens=1500, stream=True,
                                                     extra_body={"ignore_eos": True})
            async for _chunk in stream:
                break
            await stream.close()
    for _ in range(100):
        busy = [(await replicas.stats.remote()).num_running for _ in range(6)]
        if not any(busy):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("requests of clients that left go on")


def test_settings_are_checked_before_anything_is_deployed() -> None:
    """A number out of range is refused in the caller's process, with its name."""
    from pagedcore_ray import llm_app

    for wrong in ({"num_replicas": 0}, {"num_replicas": 3, "max_replicas": 2}, {"max_imbalance": -1}):
        with pytest.raises(InvalidConfig, match=list(wrong)[-1]):
            llm_app("demo", **wrong)  # type: ignore[arg-type]


async def test_replicas_have_the_adapters_of_their_settings(replicas: Any, tmp_path: Path) -> None:
    """Listed as models, and whoever names one gets the text of a single engine with it; none is loaded later."""
    from ray import serve

    from pagedcore_ray import llm_app

    sizes = {f"model.layers.{layer}.self_attn.o_proj": (192, 192) for layer in range(4)}
    place = str(write_adapter(tmp_path, random_matrices(sizes, 4, 1), rank=4))
    settings = {**SETTINGS, "adapters": {"fr": place}}
    options = {"api_keys": ApiKeys([KEY], ADMIN), "adapter_roots": [str(tmp_path.parent)]}
    app = llm_app("demo", num_cpus=0.5, app_options=options, **settings)
    await asyncio.to_thread(serve.run, app, name="adapted", route_prefix="/adapted")
    try:
        with Engine.from_pretrained("demo", **settings) as engine:
            params = SamplingParams(max_tokens=24, ignore_eos=True)
            expected = [engine.generate([PROMPT], params, lora=name)[0].outputs[0].text for name in (None, "fr")]
        url = f"http://127.0.0.1:{PORT}/adapted/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=ADMIN, max_retries=0) as client:
            assert [one.id async for one in client.models.list()] == ["demo", "fr"]
            found = await asyncio.gather(*(
                client.completions.create(model=name, prompt=PROMPT, max_tokens=24, temperature=0,
                                          extra_body={"ignore_eos": True}) for name in ("demo", "fr", "demo:fr")))
            assert [one.choices[0].text for one in found] == [expected[0], expected[1], expected[1]]
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="demo:de", prompt="x")
            with pytest.raises(openai.BadRequestError, match="those of the deployment's settings"):
                await client.post("/load_lora_adapter", cast_to=object,
                                  body={"lora_name": "de", "lora_path": tmp_path.name})
    finally:
        await asyncio.to_thread(serve.delete, "adapted")


async def test_a_killed_replica_loses_only_its_streams(replicas: Any) -> None:
    """Its streams end with an error that says to try again, and repeat nothing; others go on; Ray makes a new one."""
    params: dict[str, Any] = {"model": "demo", "max_tokens": 700, "temperature": 0, "stream": True,
                              "extra_body": {"ignore_eos": True}}
    prompts = [f"Tell me about number {number}." for number in range(8)]
    with Engine.from_pretrained("demo", **SETTINGS) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=700, ignore_eos=True), show_progress=False)
        expected = [one.outputs[0].text for one in outputs]
    started = asyncio.Semaphore(0)
    texts, errors = [""] * len(prompts), [None] * len(prompts)

    async def read(client: openai.AsyncOpenAI, place: int) -> None:
        is_first = True
        try:
            stream = await client.completions.create(prompt=prompts[place], **params)  # type: ignore[call-overload]
            async for chunk in stream:
                texts[place] += chunk.choices[0].text if chunk.choices else ""
                if is_first:
                    started.release()
                    is_first = False
        except openai.APIError as error:
            errors[place] = error  # type: ignore[call-overload]

    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        reading = [asyncio.create_task(read(client, place)) for place in range(len(prompts))]
        for _ in prompts:
            await started.acquire()
        os.kill(await replicas.pid.remote(), signal.SIGKILL)
        await asyncio.gather(*reading)
        lost = [place for place, error in enumerate(errors) if error is not None]
        assert 0 < len(lost) < len(prompts), errors
        for place, (text, error) in enumerate(zip(texts, errors, strict=True)):
            assert expected[place].startswith(text) if error else text == expected[place]
            assert error is None or "send it again" in str(error)
        again = await client.completions.create(prompt=prompts[lost[0]], **{**params, "stream": False})  # type: ignore[call-overload]
        assert again.choices[0].text == expected[lost[0]]


async def test_a_queue_adds_a_replica(replicas: Any) -> None:
    """While more calls are open than one engine runs at a time Ray starts a second replica, which answers too; no call
    fails meanwhile."""
    from ray import serve

    from pagedcore_ray import llm_app

    scaled = llm_app("demo", num_cpus=0.5, max_replicas=2, max_num_seqs=2, **SETTINGS)
    await asyncio.to_thread(serve.run, scaled, name="scaled", route_prefix="/scaled")
    handle = serve.get_deployment_handle("EngineReplica", "scaled")
    is_over, pids = asyncio.Event(), {await handle.pid.remote()}

    async def keep_asking(client: openai.AsyncOpenAI, number: int) -> None:
        while not is_over.is_set():
            await client.completions.create(model="demo", prompt=f"Count to {number}:", max_tokens=200,
                                            extra_body={"ignore_eos": True})

    url = f"http://127.0.0.1:{PORT}/scaled/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=240.0) as client:
        asking = [asyncio.create_task(keep_asking(client, number)) for number in range(8)]
        try:
            # Why so long: Ray adds a replica when the load has lasted for 30 seconds.
            async with asyncio.timeout(240):
                while len(pids) < 2:
                    pids.add(await handle.pid.remote())
                    await asyncio.sleep(0.2)
        finally:
            is_over.set()
            await asyncio.gather(*asking)
    await asyncio.to_thread(serve.delete, "scaled")


def test_the_page_on_scaling(replicas: Any) -> None:
    """Its snippets run as they stand."""
    snippets = blocks(ROOT / "docs" / "scaling.md", "py")
    assert snippets
    for snippet in snippets:
        exec(compile(snippet.replace(":8000", f":{PORT}"), "docs/scaling.md", "exec"), {})
