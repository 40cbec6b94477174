"""llama.cpp's server over loopback HTTP: ``python run_llamacpp.py --model FILE.gguf --programs LLAMA_BIN``."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measuring import arguments, measure
from workloads import Workload

options = arguments(programs="", max_seqs=32, max_tokens=640)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen(
    [str(Path(options.programs) / "llama-server"), "-m", options.model, "-t", str(options.threads),
     "-tb", str(options.threads), "-c", str(options.max_seqs * options.max_tokens), "-np", str(options.max_seqs),
     "--kv-unified", "--host", "127.0.0.1", "--port", str(port), "--no-slots"],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)


def post(prompt: list[int], number: int) -> tuple[int, list[float]]:
    """Answer a prompt; return the number of tokens, and when each piece of text came: some tokens end none."""
    body = {"prompt": prompt, "n_predict": number, "stream": True, "temperature": 0.0, "ignore_eos": True,
            "samplers": ["top_k"], "top_k": 1, "cache_prompt": True}
    connection, stamps = http.client.HTTPConnection("127.0.0.1", port, timeout=600), []
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    num_tokens = 0
    for line in connection.getresponse():
        if line.startswith(b"data: "):
            stamps.append(time.perf_counter())
            num_tokens = json.loads(line[6:]).get("tokens_predicted", num_tokens)
    connection.close()
    return num_tokens, stamps


def run(work: Workload) -> int:
    """Answer all prompts."""
    with ThreadPoolExecutor(len(work.prompts)) as pool:
        return sum(number for number, _ in pool.map(post, work.prompts, work.outputs))


def stream(work: Workload) -> tuple[float, list[float]]:
    """Answer one prompt."""
    return time.perf_counter(), post(work.prompts[0], work.outputs[0])[1]


def wait() -> None:
    """Return when the model is loaded."""
    while server.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"llama-server ended with {server.returncode}")


try:
    wait()
    measure("llama.cpp", options, run, stream, server.pid)
finally:
    server.terminate()
    server.wait()
